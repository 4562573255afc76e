"""nvfp4_dequantize: (data, scale, amax) -> values."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of_dims, check_explicit, keep_blocks, names_of_dims, part_shardings, typed
from ..spec import Format
from ._base import Backend, Partition, Proposal, make_primitive
from ._batching import batch_size, batched_parts
from ._checks import check_parts


class DequantizeParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_dequantize``."""

    format: Format
    dtype: np.dtype
    rotate_back: bool


def _values_shape(data: Any) -> Shape:
    return (*data.shape[:-1], 2 * data.shape[-1])


def _abstract(p: DequantizeParams, *parts: ShapedArray) -> list[ShapedArray]:
    check_parts("dequantize", "t", parts, p.format)
    data = parts[0]
    check_explicit("dequantize", data, data.ndim - 1, p.format.unit // 2)
    return [typed(data, _values_shape(data), p.dtype, axes_of_dims(data))]


def _local(
    p: DequantizeParams, backend: Backend, data: jax.Array, scale: jax.Array, amax: jax.Array
) -> Sequence[jax.Array]:
    if backend.name == "reference":
        return [reference.dequantize(data, scale, amax, *p)]
    call = jax.ffi.ffi_call("nvfp4_dequantize", [jax.ShapeDtypeStruct(_values_shape(data), p.dtype)])
    windows, rotated = p.format.amax_scope == "window64", p.format.rht and p.rotate_back
    return call(data, scale, amax, e4m3_max=np.int32(p.format.e4m3_max), windows=windows, rotate_back=rotated)


def _batch(p: DequantizeParams, bind: Callable, args, dims):
    return bind(p, *batched_parts(batch_size(args, dims), args, dims)), [0]


def _partition(p: DequantizeParams, proposed: Proposal) -> Partition:
    (data, _, amax), units = proposed.shapes, (1, p.format.unit // 2)
    axes = keep_blocks(proposed.mesh, proposed.operands[0], data, units)
    return part_shardings(axes, amax), [axes], lambda local: local


def _rule(_: DequantizeParams, data: Shape, _scale: Shape, amax: Shape) -> tuple[list[list], list[list]]:
    dims = names_of_dims(data)
    return part_shardings(dims, amax), [dims]


dequantize_p = make_primitive(
    "nvfp4_dequantize", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
