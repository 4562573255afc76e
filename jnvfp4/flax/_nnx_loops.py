"""Finds loops of NNX that give all their iterations the same stream of keys.

``nnx.scan`` passes what ``in_axes=None`` broadcasts in the carry of ``jax.lax.scan`` and drops its updates, so tracers
of broadcast state look like those of state that the loop updates; ``nnx.remat`` hides both. Only the frames of
the functions that NNX gives to JAX tell them apart.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from flax import nnx
from flax.nnx.extract import NodeStates
from flax.nnx.transforms import iteration

from .._core.tensor import PyTree
from .._layers.keys import is_within


def loop_that_shares(layer: Any) -> str | None:
    """Returns "scan" or "vmap" if one around a layer broadcasts the layer's stream, key and count; else None."""
    key = layer.stream.key[...]
    for loop, args, states in _loops():
        shared = _keys_in(states)
        if _is_in(key, shared):
            return loop
        # In a function of the loop's body, such as that of nnx.remat, tracers are others than those of the loop.
        same = [node.stream.key[...] for _, node in nnx.iter_graph(args) if _is_layer(node, layer)]
        if same and all(_is_in(of_loop, shared) and is_within(key, of_loop) for of_loop in same):
            return loop
    return None


def _loops() -> Iterator[tuple[str, PyTree, list[nnx.State]]]:
    """Yields the loops being traced: the kind, the arguments of the body, and the states that are broadcast."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame := frame.f_back) is not None:
        body = BODIES.get(frame.f_code)
        if body is None:
            continue
        local, args = frame.f_locals, frame.f_locals["args"]
        if body == "ScanFn":
            yield "scan", args, [state for of_argument in local["broadcast_deque_out"] for state in of_argument]
        elif body == "VmapFn":
            yield "vmap", args, _unmapped(local["pure_args"])
        else:
            yield "vmap", args, [_broadcast(local["self"].in_axes, args)]


BODIES = {iteration.ScanFn.__call__.__code__: "ScanFn", iteration.VmapFn.__call__.__code__: "VmapFn"}
_simple: Any = getattr(iteration, "SimpleVmapFn", None)  # nnx.vmap(graph_updates=False)
if "in_axes" in getattr(_simple, "__dataclass_fields__", ()):  # which it has in Flax from 0.12.8 on
    BODIES[_simple.__call__.__code__] = "SimpleVmapFn"


def _unmapped(arguments: PyTree) -> list[nnx.State]:
    """Returns the states with axis None of the arguments of ``nnx.vmap``."""
    nodes = jax.tree.leaves(arguments, is_leaf=lambda v: isinstance(v, NodeStates))
    found = []
    for node in (node for node in nodes if isinstance(node, NodeStates)):
        axes = node.metadata.axes if isinstance(node.metadata, nnx.StateAxes) else (node.metadata,)
        found += [state for state, axis in zip(node.states, axes, strict=True) if axis is None]
    return found


def _broadcast(axes: PyTree, arguments: PyTree) -> nnx.State:
    """Returns the random state of arguments whose axis is None; ``axes`` is a prefix of their tree."""
    parts: list[jax.Array] = []
    jax.tree.map(
        lambda axis, part: parts.extend(jax.tree.leaves(part) if axis is None else ()),
        axes,
        arguments,
        is_leaf=lambda axis: axis is None,
    )
    return nnx.state(arguments, lambda _, v: isinstance(v, nnx.RngState) and _is_in(v[...], parts))


def _keys_in(states: list[nnx.State]) -> list[jax.Array]:
    """Returns the keys of the streams that are in states with their counts: with a count of its own a key may recur."""
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    paths = {path for variables in flat for path in variables}
    return [
        variable[...]
        for variables in flat
        for path, variable in variables.items()
        if isinstance(variable, nnx.RngKey) and (*path[:-1], "count") in paths
    ]


def _is_in(key: jax.Array, keys: list[jax.Array]) -> bool:
    return any(key is other for other in keys)


def _is_layer(node: object, layer: Any) -> bool:
    return isinstance(node, type(layer)) and node.product.path == layer.product.path
