"""nvfp4_transpose: (data, scale) of 16x16 tiles -> (data, scale) of the transposed values; scales are bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of_dims, check_explicit, keep_blocks, names_of_dims, typed
from ..spec import BLOCK, Format
from ._base import Backend, Partition, Proposal, make_primitive
from ._batching import batch_size, batched
from ._checks import check_parts, turn

_UNITS = (BLOCK, BLOCK // 2)  # rows and bytes of a row of data that must stay on one device


def check_tiles(parts: tuple, fmt: Format) -> None:
    """Raises unless the parts are those of an NVFP4 tensor that can consist of 16x16 tiles."""
    check_parts("transpose", "q", parts, fmt)
    data, _, amax = parts
    *lead, rows, half = data.shape
    if rows % BLOCK:
        raise ValueError(f"transpose: M and K of q must be multiples of {BLOCK}, got q.shape={(*lead, rows, 2 * half)}")
    if amax.shape not in ((), tuple(lead)):
        raise ValueError(
            f"transpose: q.amax must have shape {' or '.join(map(str, dict.fromkeys([(), tuple(lead)])))} for data "
            f"{data.shape}, got {amax.shape}; the rows of a tile share one amax"
        )


def _results(data: Any) -> list[Shape]:
    *lead, rows, half = data.shape
    return [(*lead, 2 * half, rows // 2), (*lead, 2 * half, rows // BLOCK)]


def _abstract(_: None, data: ShapedArray, scale: ShapedArray) -> list[ShapedArray]:
    for axis, unit in zip((-2, -1), _UNITS, strict=True):
        check_explicit("transpose", data, data.ndim + axis, unit)
    axes = turn(axes_of_dims(data), True)
    return [typed(data, shape, jnp.uint8, axes) for shape in _results(data)]


def _local(_: None, backend: Backend, data: jax.Array, scale: jax.Array) -> Sequence[jax.Array]:
    if backend.name == "reference":
        return reference.transpose(data, scale)
    results = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in _results(data)]
    return jax.ffi.ffi_call("nvfp4_transpose", results)(data, scale)


def _batch(_: None, bind: Callable, args, dims):
    size = batch_size(args, dims)
    return bind(None, *(batched(size, v, d) for v, d in zip(args, dims, strict=True))), [0, 0]


def _partition(_: None, proposed: Proposal) -> Partition:
    axes = keep_blocks(proposed.mesh, proposed.operands[0], proposed.shapes[0], _UNITS)
    return [axes, axes], 2 * [turn(axes, True)], lambda local: local


def _rule(_: None, data: Shape, _scale: Shape) -> tuple[list[list], list[list]]:
    dims = names_of_dims(data)
    return [dims, dims], 2 * [turn(dims, True)]


transpose_p = make_primitive(
    "nvfp4_transpose", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
