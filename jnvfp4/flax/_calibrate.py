"""``calibrate`` measures the activations of a Flax model for a conversion of its checkpoint."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from flax import nnx as flax_nnx

from .._core.tensor import PyTree
from ..checkpoints import write_input_amaxes
from ..policy import Policy
from ..recipes import Recipe
from . import linen, nnx

Seen = list[tuple[str, jax.Array]]


def calibrate(
    model: nn.Module | flax_nnx.Module,
    policy: Policy,
    batches: Iterable[PyTree],
    output: Path | str,
    *,
    name: Callable[[str], str] | None = None,
    headroom: float = 1.0,
    percentile: float | None = None,
) -> dict[str, float]:
    """Runs a model in high precision and writes the amax of what each layer of a policy multiplies by its weights.

    The file is that of ``jnvfp4.checkpoints.write_input_amaxes``, which ``ConvertOptions.input_amax`` takes and
    ``jnvfp4 convert`` reads.

    Args:
      model: an NNX model, or a Linen module that is bound to its variables (``model.bind(variables)``). Its layers must
        run one by one: not inside jit, and not scanned.
      policy: whose quantized layers are measured.
      batches: the arguments of a call of the model: a tuple for several, a dict for keywords, else one.
      output: the JSON file. An older file of this name is replaced.
      name: gives the name of a layer in the checkpoint from its path in the model. Without it, "a/b/c" is "a.b.c".
      headroom: as in ``write_input_amaxes``.
      percentile: as in ``write_input_amaxes``.

    Returns:
      The amax of each layer by its name in the checkpoint.

    Raises:
      ValueError: as in ``Policy.plan``; or the policy quantizes no layer that the batches reach.
      TypeError: model is of another type, or a layer was traced.
      CheckpointError: as in ``write_input_amaxes``.
    """
    if isinstance(model, flax_nnx.Module):
        recording = _recording_nnx(model, policy)
    elif isinstance(model, nn.Module) and model.scope is not None:
        recording = _recording_linen(policy)
    else:
        raise TypeError(
            "calibrate: model must be an nnx.Module or a Linen module that is bound to its variables, got "
            f"{type(model).__name__}; model.bind(variables) binds it"
        )
    named = name or (lambda path: path.replace("/", "."))

    def activations() -> Iterator[tuple[str, jax.Array]]:
        with recording as seen:
            for batch in batches:
                _call(model, batch)
                if not seen:
                    raise ValueError("calibrate: the policy must quantize a layer that the model calls, got none")
                yield from ((named(path), x) for path, x in seen)
                seen.clear()

    return write_input_amaxes(activations(), output, headroom=headroom, percentile=percentile)


def _call(model: Callable, batch: PyTree) -> None:
    if isinstance(batch, dict):
        model(**batch)
    else:
        model(*batch if isinstance(batch, tuple) else (batch,))


def _see(seen: Seen, path: str, x: jax.Array) -> None:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"calibrate: layer {path!r} must run by itself, got traced activations; call a model without jit and scan"
        )
    seen.append((path, x))


@contextmanager
def _recording_linen(policy: Policy) -> Iterator[Seen]:
    seen: Seen = []

    class Recorder(linen.Interceptor):
        def run(
            self, module: nn.Module, path: str, recipe: Recipe, call: Callable, args: tuple, options: dict
        ) -> PyTree:
            (x, *_) = module.promote_dtype(args[0], module.variables["params"]["kernel"], dtype=module.dtype)
            _see(seen, path, x)
            return call(*args, **options)

    with nn.intercept_methods(Recorder(policy)):
        yield seen


@contextmanager
def _recording_nnx(model: flax_nnx.Module, policy: Policy) -> Iterator[Seen]:
    seen: Seen = []
    before = []
    layers = nnx.layers_in(model)
    plan = policy.plan(layer for _, layer in layers)
    try:
        for module, layer in layers:
            if plan[layer.path].recipe is not None:
                before.append((module, nnx.product_of(module)))
                nnx.set_product(module, _Recorder(seen, layer.path, nnx.plain_product(module)))
        yield seen
    finally:
        for module, product in before:
            nnx.set_product(module, product)


class _Recorder:
    """Computes a product in high precision and keeps the activations."""

    def __init__(self, seen: Seen, path: str, product: Callable) -> None:
        self.seen, self.path, self.product = seen, path, product

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        x = operands[1 if isinstance(operands[0], str) else 0]  # an einsum has its subscripts first
        _see(self.seen, self.path, x)
        return self.product(*operands, **options)
