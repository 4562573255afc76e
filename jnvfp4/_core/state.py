"""Trees of quantized tensors as trees of plain arrays and back, for whatever stores arrays."""

import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..spec import SUPPORTED_SPECS, Format
from .tensor import PARTS, NVFP4Tensor, PyTree, part_names

_FORMATS = {spec.format.name: spec.format for spec in SUPPORTED_SPECS}
_SCOPES = ("tensor", "row", "window64")  # a record has the place of one: add new ones at the end
_RECORD = "format"
_STARTS = tuple(f"{part}_nvfp4_" for part in PARTS)


def to_state(tree: PyTree) -> PyTree:
    """Replaces every NVFP4Tensor of a tree by a dictionary of plain arrays that says its format.

    For stores that keep leaves by their order or know only NumPy's dtypes (``numpy.savez``, msgpack). A store that
    keeps the names of leaves, such as orbax, keeps the format of ``tree`` itself too.

    Args:
      tree: a pytree with NVFP4Tensors; their parts may be ``jax.ShapeDtypeStruct``.

    Returns:
      The tree with ``{"data_<format>": uint8 [..., M, K/2], "scale_<format>": uint8 [..., M, K/16], "amax_<format>":
      float32, "format": int32 [3]}`` for each tensor, whose last entry holds amax scope, ``e4m3_max`` and ``rht``.
      Other leaves are the same objects.
    """
    return jax.tree.map(_state_of, tree, is_leaf=lambda node: isinstance(node, NVFP4Tensor))


def from_state(state: PyTree) -> PyTree:
    """Makes the NVFP4Tensors again that ``to_state`` has replaced.

    Args:
      state: a pytree with dictionaries as ``to_state`` makes them; or without the entry "format", as orbax restores a
        tree of NVFP4Tensors into no target.

    Returns:
      The tree with an NVFP4Tensor for each of these dictionaries. Other leaves are the same objects.

    Raises:
      ValueError: a dictionary with an entry of a tensor lacks others, or one of them is no array; its names say a
        format that does not exist or is not that of its entry "format" (as after a restore into a tree of another
        format); or its scale is no E4M3.
      TypeError: the entry "format" is traced by ``jax.jit``.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, node: _tensor_of(path, node) if _is_state(node) else node, state, is_leaf=_is_state
    )


def _state_of(leaf: object) -> object:
    if not isinstance(leaf, NVFP4Tensor):
        return leaf
    parts = (leaf.data, _with_dtype(leaf.scale, jnp.uint8), leaf.amax)
    return {**dict(zip(part_names(leaf.format), parts, strict=True)), _RECORD: np.array(_record(leaf.format), np.int32)}


def _record(fmt: Format) -> list[int]:
    return [_SCOPES.index(fmt.amax_scope), fmt.e4m3_max, int(fmt.rht)]


def _with_dtype(scale: jax.Array | np.ndarray | jax.ShapeDtypeStruct, dtype: DTypeLike) -> Any:
    """Views the bytes of a scale by another dtype: of a JAX or NumPy array, or the description of one."""
    if scale.dtype == dtype:
        return scale
    if isinstance(scale, jax.ShapeDtypeStruct):
        return scale.update(dtype=jnp.dtype(dtype))
    return scale.view(dtype) if isinstance(scale, np.ndarray) else lax.bitcast_convert_type(scale, dtype)


def _is_state(node: object) -> bool:
    """Says whether a dictionary has a part of a tensor."""
    return isinstance(node, Mapping) and any(map(_is_name, node))


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.startswith(_STARTS)


def _tensor_of(path: tuple, state: Mapping[str, PyTree]) -> NVFP4Tensor:
    place = jax.tree_util.keystr(path) or "the state"
    name = next(filter(_is_name, state)).split("_", 1)[1]
    if name not in _FORMATS:
        raise ValueError(f"from_state: the names in {place} must be those of one of {sorted(_FORMATS)}, got {name}")
    fmt = _FORMATS[name]
    names = part_names(fmt)
    if set(state) - {_RECORD} != set(names):
        raise ValueError(f"from_state: {place} must have the entries {list(names)}, got {sorted(state)}")
    if _RECORD in state:
        _check_record(place, fmt, state[_RECORD])
    for name in names:
        if not (hasattr(state[name], "shape") and hasattr(state[name], "dtype")):
            got = reprlib.repr(state[name])
            raise ValueError(f"from_state: the entry {name} in {place} must be an array, got {got}")
    data, scale, amax = (state[name] for name in names)
    if scale.dtype not in (jnp.uint8, jnp.float8_e4m3fn):
        raise ValueError(f"from_state: the scale in {place} must be uint8 or float8_e4m3fn, got {scale.dtype}")
    return NVFP4Tensor(data, _with_dtype(scale, jnp.float8_e4m3fn), amax, fmt)


def _check_record(place: str, fmt: Format, record: object) -> None:
    if isinstance(record, jax.ShapeDtypeStruct):
        return
    if isinstance(record, jax.core.Tracer):
        raise TypeError(
            f"from_state: the format of {place} must be known, got a traced array; call it outside of jax.jit"
        )
    found = np.asarray(record).tolist()
    if found != _record(fmt):
        stored = next((name for name, other in _FORMATS.items() if _record(other) == found), found)
        raise ValueError(
            f"from_state: the format of {place} must be {fmt.name}, which its names say, got {stored}; restore into "
            "the state of a tree with this format"
        )
