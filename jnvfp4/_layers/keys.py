"""Keys for stochastic rounding: ``step_key`` for a whole model, into which each layer folds its path.

A context variable holds the key while a step is traced. It is the only state of this package that is not passed as an
argument, and it never outlives the ``with`` block.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import jax
import numpy as np

from .._ops.arguments import OPERATIONS, Checks
from ..recipes import Recipe

THREE_WAYS = (
    "(a) with jnvfp4.step_key(key): around the model, inside the jitted step that has key as an argument; "
    "(b) in Flax Linen model.apply(..., rngs={'sr': key}); "
    "(c) in Flax NNX jnvfp4.flax.nnx.apply(model, policy, rngs=nnx.Rngs(sr=seed))"
)
PASS_KEY = "(d) the argument key of the function, where it has one"

_step: ContextVar[jax.Array | None] = ContextVar("jnvfp4_step", default=None)
# Part of the key of JAX's caches of traced functions. Without it a function that was traced before, such as a jitted
# layer, would bring the tracers of the step in which it was traced.
_trace_of_step = jax.make_user_context(None)


@contextmanager
def step_key(key: jax.Array) -> Iterator[None]:
    """Gives a key to every layer of a model that is called within: ``with jnvfp4.step_key(key): loss = ...``.

    A layer that rounds stochastically folds its path into the key, and then what docs/numerics.md says. Enter it inside
    the jitted step, with a key that is an argument of the step or made of one: a key from outside is a constant there,
    the same in every step.

    Args:
      key: a JAX PRNG key, one for each step.

    Raises:
      TypeError: key is not one PRNG key.
    """
    key = Checks("step_key").key(key)
    # A constant is no tracer that could outlive its trace, so eager calls may keep what JAX has compiled.
    with _trace_of_step(object()) if isinstance(key, jax.core.Tracer) else nullcontext():
        token = _step.set(key)
        try:
            yield
        finally:
            _step.reset(token)


def key_of_product(op: str, kind: str, path: str | None, recipe: Recipe) -> jax.Array | None:
    """Returns the key of the layer that a ``kind`` of product is part of, if it needs one."""
    if path is None and _needs_key(recipe):
        raise needs_key(op, f"{kind}(recipe, path=...) has a path that no other layer has")
    return key_of_layer(path or "", recipe)


def key_of_layer(path: str, recipe: Recipe) -> jax.Array | None:
    """Returns the key of ``step_key`` with the path of a layer folded in, if the layer needs one."""
    if not _needs_key(recipe):
        return None
    key = _step.get()
    if key is None:
        raise needs_key(f"layer {path!r}")
    return fold_path(key, path)


def _needs_key(recipe: Recipe) -> bool:
    """Says whether a layer needs a key: without ``step_key`` a model is evaluated, or its gradient raises."""
    return recipe.stochastic and (recipe.stochastic_forward or _step.get() is not None)


def check_path(kind: str, path: object) -> None:
    if path is not None and not isinstance(path, str):
        raise TypeError(f"{kind}: path must be a string or None, got {path!r}")


def fold_path(key: jax.Array, path: str) -> jax.Array:
    """Folds the hash of a path into a key: the first four bytes of SHA-256, little-endian."""
    return jax.random.fold_in(key, np.uint32(int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")))


def needs_key(what: str, fourth: str = "") -> ValueError:
    """Makes the error of a layer that rounds stochastically and has no key."""
    ways = f"{THREE_WAYS}; {fourth}" if fourth else THREE_WAYS
    ways = f"pass the argument key, or in a model {THREE_WAYS}" if what in OPERATIONS else ways
    return ValueError(f"{what}: key must be given, since the recipe rounds stochastically, got none; {ways}")
