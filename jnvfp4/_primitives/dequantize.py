"""nvfp4_dequantize: (data, scale, amax) -> values."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from ..spec import Format
from ._base import Axes, Backend, Body, Shape, axes_of_dims, check_explicit, make_primitive, typed
from ._batching import batch_size, batched_parts
from ._checks import check_parts
from ._known_answers import EVERY_SCALE, tensor
from ._self_check import Call, Check
from ._shardings import keep_blocks, names_of_dims, part_shardings


def _values_shape(data: Any) -> Shape:
    return (*data.shape[:-1], 2 * data.shape[-1])


def _abstract(
    data: ShapedArray, scale: ShapedArray, amax: ShapedArray, *, format: Format, dtype: Any, rotate_back: bool
) -> list[ShapedArray]:
    check_parts("dequantize", "t", (data, scale, amax), format)
    check_explicit("dequantize", data, data.ndim - 1, format.unit // 2)
    return [typed(data, _values_shape(data), dtype, axes_of_dims(data))]


def _local(
    backend: Backend,
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array,
    *,
    format: Format,
    dtype: Any,
    rotate_back: bool,
) -> Sequence[jax.Array]:
    if backend.name == "reference":
        return [reference.dequantize(data, scale, amax, format, dtype, rotate_back)]
    call = jax.ffi.ffi_call("nvfp4_dequantize", [jax.ShapeDtypeStruct(_values_shape(data), dtype)])
    windows, rotated = format.amax_scope == "window64", format.rht and rotate_back
    return call(data, scale, amax, e4m3_max=np.int32(format.e4m3_max), windows=windows, rotate_back=rotated)


def _batch(args, dims, **params):
    return dequantize_p.bind(*batched_parts(batch_size(args, dims), args, dims), **params), [0]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], *, format: Format, **_: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    axes = keep_blocks(mesh, operands[0], shapes[0], (1, format.unit // 2))
    return part_shardings(axes, shapes[2]), [axes], lambda local: local


def _rule(data: Shape, _scale: Shape, amax: Shape, **_: Any) -> tuple[list[list], list[list]]:
    dims = names_of_dims(data)
    return part_shardings(dims, amax), [dims]


def _known(_backend: Backend, _avals: Sequence[ShapedArray], **params: Any) -> list[Check]:
    return [check_of(**params)]


def check_of(format: Format, dtype: Any, rotate_back: bool) -> Check:
    """Returns the check of a format and a dtype."""

    def calls() -> Iterator[Call]:
        parts = tensor(np.random.default_rng(0), (77, 320), format, EVERY_SCALE)
        yield Call(parts, {"format": format, "dtype": dtype, "rotate_back": rotate_back})

    path = f"dequantize {format.name}{' rotated' * (format.rht and not rotate_back)} to {jnp.dtype(dtype).name}"
    return Check(path, dequantize_p, "native", calls)


dequantize_p = make_primitive(
    "nvfp4_dequantize", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule, known=_known
)
