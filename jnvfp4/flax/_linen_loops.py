"""Finds loops of Linen that give all their iterations the same stream of keys.

Within ``nn.remat`` a stream is an argument of the function that JAX traces, which hides in which loops its key is
computed, and before ``nn.jit`` Flax computes another key of it in the loop. Only the frames of the functions that Flax
gives to JAX have the key that was passed. A shared stream of ``jax.lax.scan`` is not found if the whole model is an
``nn.jit`` within.
"""

import sys
from collections.abc import Iterator
from itertools import product
from types import CodeType, FrameType
from typing import Any

import jax
from flax.core import lift, scope

from .._core.tensor import PyTree
from .._layers.keys import is_in_more_loops, varies


def shares_stream(name: str, key: jax.Array) -> bool:
    """Says whether a loop being traced gives a module the same key of a stream in all iterations."""
    return not varies(key) or any(is_in_more_loops(own, passed) for own, passed in _keys_of_lifts(name))


def _keys_of_lifts(name: str) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields each key of a stream that the model passes to an ``nn.remat`` or an ``nn.scan``, after values within.

    These are the same key within the ``nn.remat``, and what each iteration of the ``nn.scan`` has of its own.
    """
    frame: FrameType | None = sys._getframe()
    within: list[jax.Array] = []
    while frame is not None and frame.f_code is not _APPLY:
        if frame.f_code is _TRACED:
            within = _keys_in(name, frame.f_locals["rng_groups"])
        elif frame.f_code is _CALL:
            yield from zip(within, _keys_in(name, frame.f_locals["rng_groups"]), strict=True)
        elif frame.f_code is _SCANNED:
            own = jax.tree.leaves([frame.f_locals[of] for of in ("carry", "scan_variable_groups", "args")])
            yield from product(own, _keys_in(name, frame.f_locals["rng_groups"]))
        frame = frame.f_back


def _keys_in(name: str, groups: PyTree) -> list[jax.Array]:
    streams = jax.tree_util.tree_leaves_with_path(groups, is_leaf=lambda v: isinstance(v, scope.LazyRng))
    return [getattr(rng, "rng", rng) for path, rng in streams if getattr(path[-1], "key", None) == name]


def _code_in(function: Any, *names: str) -> CodeType:
    """Returns the code of a function that another one defines, by the names of those around it."""
    code = function.__code__
    for name in names:
        inner = [const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name]
        if not inner:
            raise ImportError(f"jnvfp4.flax: this version of Flax has no {function.__name__}.{'.'.join(names)}")
        (code,) = inner
    return code


_APPLY = _code_in(scope.apply, "wrapper")  # where a model begins, with streams of its own
_CALL = _code_in(lift.checkpoint, "inner")
_SCANNED = _code_in(lift.scan, "inner", "scanned")
_TRACED = _code_in(lift.checkpoint, "inner", "rematted")
