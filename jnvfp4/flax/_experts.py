"""Experts of Flax models: calls of ``jax.lax.ragged_dot``, and which parameters they read."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from .._layers.grouped_linear import RaggedDot, axes_of_experts
from .._layers.weights import WeightAxes
from .._native.compat import made_of
from ..policy import Layer, Policy, path_of_parameter
from ..recipes import Recipe

Handler = Callable[..., jax.Array]  # of (call, w_axes, lhs, rhs, group_sizes, ...), where call computes it as JAX does
NO_PARAMETER = "a ragged_dot whose weights are not one parameter of its module, which jnvfp4 does not quantize"

_handler: ContextVar[Handler | None] = ContextVar("jnvfp4_ragged_dot", default=None)
_lock = threading.Lock()
_users = 0
_of_jax: dict[str, Callable] = {}


def intercepted(handler: Handler, of_jax: Mapping[str, Callable]) -> dict[str, Callable]:
    """Returns what stands in for the functions of ``jax.lax``, by their names, and asks a handler."""

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return handler(of_jax["ragged_dot"], "kn", lhs, rhs, group_sizes, *args, **options)

    def ragged_dot_general(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
        *args: Any,
        **options: Any,
    ) -> jax.Array:
        def call(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *args: Any, **options: Any) -> jax.Array:
            general = of_jax["ragged_dot_general"]
            return general(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *args, **options)

        w_axes = axes_of_experts(ragged_dot_dimension_numbers)
        if w_axes is None:
            return call(lhs, rhs, group_sizes, *args, **options)
        return handler(call, w_axes, lhs, rhs, group_sizes, *args, **options)

    return {"ragged_dot": ragged_dot, "ragged_dot_general": ragged_dot_general}


@contextmanager
def ragged_dots(handler: Handler) -> Iterator[None]:
    """Gives the calls of this thread to a handler; the innermost decides, and calls within it are those of JAX.

    It replaces the functions in ``jax.lax``, so a name that was imported from there before is not reached.
    """
    global _users
    token = _handler.set(handler)
    with _lock:
        if not _users:
            _of_jax.update({name: getattr(jax.lax, name) for name in ("ragged_dot", "ragged_dot_general")})
            for name, function in intercepted(_ask, _of_jax).items():
                setattr(jax.lax, name, function)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for name, function in _of_jax.items():
                    setattr(jax.lax, name, function)
        _handler.reset(token)


def _ask(call: Callable, w_axes: WeightAxes, *operands: Any, **options: Any) -> jax.Array:
    handler = _handler.get()
    if handler is None:  # of another thread, or within a handler
        return call(*operands, **options)
    token = _handler.set(None)
    try:
        return handler(call, w_axes, *operands, **options)
    finally:
        _handler.reset(token)


class Experts:
    """Tells which parameters of its module each ragged_dot of a model reads.

    A trace knows them, but not inside ``shard_map``. There they are told by their shapes, of which a device may have a
    part; those of equal shapes are taken in their order. An eager call that casts them tells them by their values.
    """

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()  # by the scope or the module

    def layers(
        self, owner: object, path: str, params: Mapping[str, jax.Array], w: jax.Array, w_axes: WeightAxes
    ) -> list[Layer]:
        """Describes the experts w of the module at ``path``, and then others that they could be."""
        k, n = w.shape[1:] if w_axes == "kn" else w.shape[:0:-1]
        names = self._names(owner, params, w)
        if not names:
            return [Layer(path, w.shape, (n, k), reason=NO_PARAMETER)]
        return [Layer(path_of_parameter(path, name), params[name].shape, (n, k)) for name in names]

    def _names(self, owner: object, params: Mapping[str, jax.Array], w: jax.Array) -> list[str]:
        if (names := made_of(w, params)) is not None:
            return names
        alike = [name for name, value in params.items() if value.shape == w.shape]
        alike = alike or [name for name, value in params.items() if _is_part(w.shape, value.shape)]
        if len(alike) > 1 and not isinstance(w, jax.core.Tracer):
            alike = [name for name in alike if jnp.array_equal(params[name].astype(w.dtype), w)] or alike
        read = self._read.setdefault(owner, set())
        if read.issuperset(alike):  # the module is called again
            read.difference_update(alike)
        names = sorted(alike, key=lambda name: name in read)
        read.update(names[:1])
        return names


def _is_part(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(part) == len(whole) and all(p and not w % p for p, w in zip(part, whole, strict=True))


def product_of(policy: Policy, depths: Mapping[str, int], layers: list[Layer]) -> RaggedDot | None:
    """Returns what multiplies by the experts that are the first of ``layers``, or None for high precision.

    Raises:
      ValueError: it is not known which of the layers they are, and the policy tells them apart.
    """
    found = [(policy.decide(layer, depths).recipe, policy.options_of(layer.path)) for layer in layers]
    (recipe, options), *others = found
    for layer, other in zip(layers[1:], others, strict=True):
        if other != found[0]:
            raise ValueError(
                "Policy: experts of one shape inside shard_map must have one recipe, w_gather and pad, got "
                f"{_name(recipe)} for {layers[0].path} and {_name(other[0])} for {layer.path}, either of which a "
                "ragged_dot may read; give them one rule"
            )
    return None if recipe is None else RaggedDot(recipe, layers[0].path, **options)


def _name(recipe: Recipe | None) -> str:
    return "high precision" if recipe is None else recipe.name
