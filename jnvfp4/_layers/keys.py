"""Keys for stochastic rounding: ``step_key`` for a whole model, ``layer_index`` in a loop over layers, ``layer_key``.

A context variable holds the key while a step is traced. It is the only state of this package that is not passed as an
argument, and it never outlives the ``with`` block.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._core.patterns import layer_path
from .._native.compat import traced_functions
from .._ops.arguments import OPERATIONS, Checks
from ..recipes import Recipe

LOOPS = frozenset({"scan", "fori_loop", "while_body", "while_cond"})
"""What JAX calls a function that it traces once and runs many times."""

THREE_WAYS = (
    "(a) with jnvfp4.step_key(key): around the model, inside the jitted step that has key as an argument; "
    "(b) in Flax Linen model.apply(..., rngs={'sr': key}); "
    "(c) in Flax NNX jnvfp4.flax.nnx.apply(model, policy, rngs=nnx.Rngs(sr=seed))"
)
PASS_KEY = "(d) the argument key of the function, where it has one"
_ENTER_INSIDE = "pass the key to the jitted step as an argument and enter step_key inside"


class _Step(NamedTuple):
    """Holds the key of a step and the indices of the loops that are being traced."""

    key: jax.Array
    indices: tuple[ArrayLike, ...] = ()


_step: ContextVar[_Step | None] = ContextVar("jnvfp4_step", default=None)
# Part of the key of JAX's caches of traced functions. Without it a function that was traced before, such as a jitted
# layer, would bring the tracers of the step in which it was traced.
_trace_of_step = jax.make_user_context(None)


@contextmanager
def step_key(key: jax.Array) -> Iterator[None]:
    """Gives a key to every layer of a model that is called within: ``with jnvfp4.step_key(key): loss = ...``.

    Each layer folds its path and, where it has one, its number into the key (``layer_key``), so no two layers draw the
    same random bits. Enter it inside the jitted step, with a key that is an argument of the step or made of one: then a
    new key needs no new trace. Inside a loop over layers, enter ``layer_index`` as well. Examples of vmap draw the same
    bits unless the key, or an index, differs between them.

    Args:
      key: a JAX PRNG key, one for each step and each microbatch.

    Raises:
      TypeError: key is not one PRNG key.
      ValueError: key is a constant of the function that is being traced, which would round alike in every step.
    """
    key = Checks("step_key").key(key)
    check_step("step_key", key)
    with _entered(_Step(key)):
        yield


@contextmanager
def layer_index(index: ArrayLike) -> Iterator[None]:
    """Tells the layers called within their number in a loop: ``with jnvfp4.layer_index(i): ...``.

    JAX traces the body of ``jax.lax.scan`` once for all layers, so a layer cannot know its number. Without
    ``layer_index`` for every loop between ``step_key`` and a layer, the layer raises. Without ``step_key``
    it has no effect, so a model may contain it always.

    Args:
      index: an integer of at least 0, or a traced integer scalar: in a loop what the loop passes, such as an element of
        ``jnp.arange(layers)`` that is scanned with the parameters.

    Raises:
      TypeError: index is not one integer.
      ValueError: index is negative.
    """
    dtype, shape = getattr(index, "dtype", None), np.shape(index)
    is_integer = isinstance(index, int) if dtype is None else jnp.issubdtype(dtype, jnp.integer)
    if shape != () or not is_integer or isinstance(index, bool):
        raise TypeError(f"layer_index: index must be one integer, got {index!r}")
    if not isinstance(index, jax.core.Tracer) and int(index) < 0:  # type: ignore[arg-type]
        raise ValueError(f"layer_index: index must be at least 0, got {index}")
    step = _step.get()
    with nullcontext() if step is None else _entered(step._replace(indices=(*step.indices, index))):
        yield


def layer_key(path: str) -> jax.Array:
    """Makes the key of a layer of the current step, for ``linear`` and other operations that round stochastically.

    Args:
      path: the name of the layer, with slashes, different for each layer: "block_3/mlp/up" or "layers/3/mlp/up".

    Returns:
      ``fold_in(fold_in(key, h), n)`` for the key of ``step_key``, where h is a hash of the path and n the number of the
      layer: the indices of ``layer_index``, if any, from the outside in; else the number in the path, which h then
      leaves out. So "block_3/up" has the key of "block/up" in ``layer_index(3)``. Without a number nothing is folded
      after h. The hash is the first four bytes of SHA-256, little-endian.

    Raises:
      ValueError: there is no ``step_key``; or it was entered outside the function that is being traced; or a loop
        without ``layer_index`` is being traced.
      TypeError: path is not a string.
    """
    if not isinstance(path, str):
        raise TypeError(f"layer_key: path must be a string, got {path!r}")
    step = _step.get()
    if step is None:
        raise needs_key(f"layer {path!r}")
    check_step(f"layer {path!r}", step.key)
    _check_varies(f"layer {path!r}", step)
    indices = step.indices
    if not indices:
        of_layer = layer_path(path)
        path, indices = of_layer.without_number, () if of_layer.number is None else (of_layer.number,)
    return fold_path(step.key, path, *indices)


def key_of_product(op: str, kind: str, path: str | None, recipe: Recipe) -> jax.Array | None:
    """Returns the key of the layer that a ``kind`` of product is part of, if it needs one."""
    if path is not None or _needs_none(recipe):
        return key_of_layer(path or "", recipe)
    raise needs_key(op, f"{kind}(recipe, path=...) has a path that no other layer has")


def key_of_layer(path: str, recipe: Recipe) -> jax.Array | None:
    """Returns the key of a layer of a model, if it needs one."""
    return None if _needs_none(recipe) else layer_key(path)


def _needs_none(recipe: Recipe) -> bool:
    """Says whether a layer needs no key: without ``step_key`` a model is evaluated, or its gradient raises."""
    return not recipe.stochastic or not (recipe.stochastic_forward or in_step())


def check_path(kind: str, path: object) -> None:
    if path is not None and not isinstance(path, str):
        raise TypeError(f"{kind}: path must be a string or None, got {path!r}")


def in_step() -> bool:
    """Says whether ``step_key`` is entered."""
    return _step.get() is not None


def fold_path(key: jax.Array, path: str, *indices: ArrayLike) -> jax.Array:
    """Folds the hash of a path, then indices, into a key."""
    words = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")
    key = jax.random.fold_in(key, np.uint32(words))
    for index in indices:
        key = jax.random.fold_in(key, index)
    return key


def needs_key(what: str, fourth: str = "") -> ValueError:
    """Makes the error of a layer that rounds stochastically and has no key."""
    ways = f"{THREE_WAYS}; {fourth}" if fourth else THREE_WAYS
    ways = f"pass the argument key, or in a model {THREE_WAYS}" if what in OPERATIONS else ways
    return ValueError(f"{what}: key must be given, since the recipe rounds stochastically, got none; {ways}")


def check_step(what: str, key: object, of: str = "the key of step_key", hint: str = _ENTER_INSIDE) -> None:
    """Refuses a key that would become a constant of a traced function."""
    functions = traced_functions()
    if functions and not isinstance(key, jax.core.Tracer):
        raise ValueError(
            f"{what}: {of} must be traced with the function that uses it, which JAX traces for "
            f"{functions[-1]!r}, got a constant, which would be the same in every step; {hint}"
        )


def varies(*values: object) -> bool:
    """Says whether every loop being traced computes one of the values, so that its iterations may differ in it."""
    return max(map(_depth, values)) >= _count_loops(traced_functions())


def is_within(value: object, other: object) -> bool:
    """Says whether a value belongs to a function that is traced within that of another value."""
    return len(_functions_of(value)) > len(_functions_of(other))


def is_in_more_loops(value: object, other: object) -> bool:
    """Says whether a value belongs to more loops than another one."""
    return _depth(value) > _depth(other)


def must_vary(what: str, hint: str) -> ValueError:
    """Makes the error of a layer in a loop that gives all its iterations one key."""
    return ValueError(
        f"{what}: key must differ between the iterations of a loop that JAX traces once, got one for all; {hint}"
    )


@contextmanager
def _entered(step: _Step) -> Iterator[None]:
    """Makes a step the current one."""
    # A constant key never reaches a traced function, so eager calls may keep what JAX has compiled.
    with _trace_of_step(object()) if isinstance(step.key, jax.core.Tracer) else nullcontext():
        token = _step.set(step)
        try:
            yield
        finally:
            _step.reset(token)


def _check_varies(what: str, step: _Step) -> None:
    """Refuses a loop over which neither the key nor an index varies."""
    loops = _count_loops(traced_functions())
    varied = {*range(1, _depth(step.key) + 1), *map(_depth, step.indices)}
    if missing := [loop for loop in range(1, loops + 1) if loop not in varied]:
        which = f", here number {missing[0]} of {loops} from the outside" if loops > 1 else ""
        raise ValueError(
            f"{what}: in a loop that JAX traces once{which}, layers must have an index that the loop passes, got none; "
            "enter jnvfp4.layer_index(i) in the body of the loop over layers, or "
            "jnvfp4.step_key(jax.random.fold_in(key, i)) in that of a loop over microbatches"
        )


def _depth(value: object) -> int:
    """Returns within how many loops a value is computed; 0 for a constant."""
    return _count_loops(_functions_of(value))


def _functions_of(value: object) -> tuple[str, ...]:
    return traced_functions(value) if isinstance(value, jax.core.Tracer) else ()


def _count_loops(functions: tuple[str, ...]) -> int:
    return sum(name in LOOPS for name in functions)
