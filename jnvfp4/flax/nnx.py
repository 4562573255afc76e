"""Flax NNX: ``apply`` quantizes the layers of a model as it is."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .._layers.dot_general import DotGeneral
from .._layers.einsum import einsum_of_layer, sizes_of
from .._layers.gather import Placement
from .._layers.keys import fold_path, in_step, key_of_layer, layer_key, must_vary, varies
from ..policy import (
    WEIGHT_NAMES,
    Decision,
    Layer,
    Policy,
    ProductOptions,
    check_policy,
    depths_of,
    is_of_experts,
    layers_of,
    path_of_parameter,
)
from ..recipes import Recipe
from ._nnx_loops import loop_that_shares
from .linen import unknown

__all__ = ["apply"]

_OWN_KEY = "or enter jnvfp4.step_key(jax.random.fold_in(key, i)) in its body"
_REMEDIES = {
    "scan": f"carry the nnx.RngState of the model (nnx.StateAxes({{nnx.RngState: nnx.Carry, ...: None}})), {_OWN_KEY}",
    "vmap": "map the nnx.RngState of the model (nnx.split_rngs, and nnx.StateAxes({nnx.RngState: 0, ...: None})), "
    + _OWN_KEY,
}
Model = TypeVar("Model", bound=nnx.Module)
LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
Multiplying: TypeAlias = nnx.Linear | nnx.LinearGeneral | nnx.Einsum


def apply(model: Model, policy: Policy, *, rngs: nnx.Rngs | None = None) -> Model:
    """Makes the layers of an NNX model multiply by a policy: ``nnx.Linear``, ``LinearGeneral`` and ``Einsum``.

    Layers of attention and subclasses are among them; the adapters of LoRA stay in high precision. Parameters, their
    names and shapes, and the optimizer stay as they are. A layer that has a dot_general of its own keeps it. A warning
    names convolutions, experts and other modules with a kernel that the policy would quantize and this function cannot.

    Args:
      model: the model, which is changed in place. If a policy was applied before, this one replaces it.
      policy: which layers are quantized, and how. Paths are as in the model: "blocks/3/mlp/up".
      rngs: where layers that round stochastically get their keys, ``rngs.sr()``. Each of them gets a stream of its own,
        which is state of the model like that of ``nnx.Dropout``: it advances at each call, so a step must keep the
        state (``nnx.jit`` does). In a loop that gives this state to all iterations layers take the key of
        ``jnvfp4.step_key``; without one they raise, except after ``model.eval()``. If rngs is None, all take the key
        of ``jnvfp4.step_key``, and the model gets no state.

    Returns:
      The model.

    Raises:
      ValueError: as in ``Policy.plan``; or ``rngs`` has neither the stream "sr" nor the default one.
      TypeError: an argument is of another type.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"apply: model must be an nnx.Module, got {type(model).__name__}")
    check_policy("apply", policy)
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"apply: rngs must be nnx.Rngs or None, got {rngs!r}")
    layers = {layer.path: (module, layer) for module, layer in layers_in(model)}
    listed = [layer for _, layer in layers.values()]
    plan, depths = policy.plan(listed), depths_of(listed)
    for path, (module, layer) in layers.items():
        if layer.reason is None:
            set_product(module, _product(module, plan[path], policy.options_of(path), rngs))
        elif not isinstance(module, LAYERS):
            policy.warn("apply", layer, depths)
    return model


@dataclass(frozen=True)
class EinsumOp:
    """Stands in for ``jnp.einsum`` of activations and weights, and multiplies by a recipe.

    Attributes:
      recipe: how the layer is quantized.
      path: the path of the layer in its model.
      w_gather: as in ``jnvfp4.einsum``.
      pad: as in ``jnvfp4.DotGeneral``.
    """

    recipe: Recipe
    path: str
    w_gather: tuple[Placement, Placement] | None = None
    pad: bool = False

    def __call__(self, subscripts: str, x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
        """Computes ``jnvfp4.einsum``, with the key of the layer if none is passed."""
        key = options.pop("key", None)
        if key is None:
            key = key_of_layer(self.path, self.recipe)
        return einsum_of_layer(self.path, subscripts, x, w, self.recipe, key, self.w_gather, pad=self.pad, **options)


class Keyed(nnx.Module):
    """Calls a product with keys of a stream of its own.

    Attributes:
      product: a ``DotGeneral`` or an ``EinsumOp``.
      stream: the keys.
      deterministic: whether the model evaluates, which leaves the stream as it is: ``model.eval()`` sets it.
    """

    def __init__(self, product: DotGeneral | EinsumOp, stream: nnx.RngStream) -> None:
        self.product = product
        self.stream = stream
        self.deterministic = False

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the attribute for ``nnx.view``."""
        self.deterministic = self.deterministic if deterministic is None else deterministic

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Computes the product."""
        return self.product(*args, key=self._key(), **options)

    def _key(self) -> jax.Array:
        """Draws a key; a loop that shares the stream takes that of ``step_key``. An evaluation leaves the stream."""
        path = str(self.product.path)
        stored = self.stream.key[...]
        if stored.ndim:
            raise ValueError(
                f"layer {path!r}: key must be one of those of the scanned layers, got {stored.shape}; scan the "
                "nnx.RngState of the model along axis 0, as its parameters"
            )
        if self.deterministic:
            return fold_path(stored, path)
        if (loop := self._loop_that_shares()) is not None:
            if not in_step():
                raise must_vary(f"layer {path!r}", _REMEDIES[loop])
            return layer_key(path)
        return fold_path(self.stream(), path)

    def _loop_that_shares(self) -> str | None:
        """Returns the kind of a loop, if any, whose iterations would all draw the same keys of the stream."""
        return loop_that_shares(self) if varies(self.stream.key[...], self.stream.count[...]) else "scan"


def _product(
    module: Multiplying, decision: Decision, options: ProductOptions, rngs: nnx.Rngs | None
) -> Callable | None:
    """Returns what a layer multiplies by, or None for what Flax multiplies by."""
    if decision.recipe is None:
        return None
    kind = EinsumOp if isinstance(module, nnx.Einsum) else DotGeneral
    product = kind(decision.recipe, decision.path, **options)
    if rngs is None or not decision.recipe.stochastic:
        return product
    return Keyed(product, _stream(rngs, module.kernel.shape[: _stacked(module)]))


def _stream(rngs: nnx.Rngs, stacked: tuple[int, ...]) -> nnx.RngStream:
    """Makes a stream of keys for a layer, or one key for each of the layers whose weights are stacked."""
    if "sr" not in rngs and "default" not in rngs:
        raise ValueError(f"apply: rngs must have the stream 'sr', got {list(rngs)}; nnx.Rngs(..., sr=seed) has it")
    key = rngs["sr"]()
    return nnx.RngStream(jax.random.split(key, stacked) if stacked else key, tag="sr")


def plain_product(module: Multiplying) -> Callable:
    """Returns what Flax multiplies by."""
    return jnp.einsum if isinstance(module, nnx.Einsum) else jax.lax.dot_general


def product_of(module: Multiplying) -> Callable | None:
    """Returns what a layer multiplies by."""
    return module.einsum_op if isinstance(module, nnx.Einsum) else module.dot_general


def set_product(module: Multiplying, product: Callable | None) -> None:
    """Makes a layer multiply by ``product``; None is that of Flax."""
    if product is None and not isinstance(module, nnx.LinearGeneral):
        product = plain_product(module)
    # NNX asks which of both it is, because a layer may have had the other one before.
    kind = nnx.data if isinstance(product, nnx.Module) else nnx.static
    setattr(module, "einsum_op" if isinstance(module, nnx.Einsum) else "dot_general", kind(product))


# ---------------------------------------------------------------- what a model consists of
def layers_in(model: nnx.Module) -> list[tuple[Any, Layer]]:
    """Lists the layers of a model, and other modules that have a kernel, with their descriptions."""
    found: list[tuple[Any, Layer]] = []
    for keys, module in nnx.iter_modules(model):
        path = "/".join(map(str, keys))
        if isinstance(module, LAYERS):
            sizes, reason = _sizes(module)
            found.append((module, Layer(path, module.kernel.shape, sizes, _stacked(module) > 0, reason)))
        else:
            found += [(module, layer) for layer in _unknown(module, path)]
    return found


def _unknown(module: nnx.Module, path: str) -> Iterator[Layer]:
    """Describes the parameters of a module that has no hook for its products: weights, and what may be experts."""
    of_flax = type(module).__module__.startswith("flax.")
    for name, value in vars(module).items():
        shape = getattr(value, "shape", ()) if isinstance(value, nnx.Param) else ()
        if len(shape) > 1 and (name in WEIGHT_NAMES or (not of_flax and is_of_experts(name, shape))):
            yield Layer(path_of_parameter(path, name), shape, reason=unknown(module, "apply"))


def parameters_of(module: nnx.Module) -> dict[str, jax.Array]:
    """Returns the parameters that a module has itself, by name."""
    return {name: value.get_raw_value() for name, value in vars(module).items() if isinstance(value, nnx.Param)}


def _stacked(module: Multiplying) -> int:
    """Returns how many axes of the weights count layers, for a loop over layers."""
    return module.kernel.ndim - len(_kernel_shape(module))


def _kernel_shape(module: Multiplying) -> tuple[int, ...]:
    if isinstance(module, nnx.Einsum):
        return tuple(module.kernel_shape)
    if isinstance(module, nnx.LinearGeneral):
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)
    return module.in_features, module.out_features


def _sizes(module: Multiplying) -> tuple[tuple[int, int] | None, str | None]:
    """Returns N and K, or why the layer cannot be quantized."""
    if isinstance(module, nnx.Einsum):
        return _einsum_sizes(module)
    own = getattr(module, "dot_general_cls", None) is not None
    if own or not (module.dot_general in (None, jax.lax.dot_general) or isinstance(module.dot_general, _OURS)):
        return None, "has a dot_general of its own"
    if isinstance(module, nnx.Linear):
        return (module.out_features, module.in_features), None
    return (math.prod(module.out_features), math.prod(module.in_features)), None


def _einsum_sizes(module: nnx.Einsum) -> tuple[tuple[int, int] | None, str | None]:
    if module.einsum_op is not jnp.einsum and not isinstance(module.einsum_op, _OURS):
        return None, "has an einsum_op of its own"
    x, w = module.einsum_str.partition("->")[0].split(",")
    shape = tuple(module.kernel_shape)
    hidden = len(shape) - len(w.replace("...", ""))  # axes for which an ellipsis stands
    return sizes_of(module.einsum_str, len(x.replace("...", "")) + hidden, shape)


_OURS = (DotGeneral, EinsumOp, Keyed)


@layers_of.register(nnx.Module)
def _layers_of_module(model: nnx.Module, *_: object, **__: object) -> list[Layer]:
    """Lists the layers of a model, whose inputs tell nothing more."""
    return [layer for _, layer in layers_in(model)]
