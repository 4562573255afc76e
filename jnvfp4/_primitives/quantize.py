"""nvfp4_quantize: (x, amax?, stream?) -> (data, scale, amax where it was not given). See _operands.py."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from ._base import Axes, Backend, Body, Shape, axes_of, make_primitive
from ._checks import check_operand
from ._known_answers import describe, quantizer_calls
from ._self_check import Check
from ._shardings import keep_blocks, max_over_devices, names_of_dims
from ._sides import (
    Operands,
    Side,
    Sides,
    batched_operands,
    call_ffi,
    ffi_operands,
    ffi_results,
    find_row_amax,
    shardings,
    split_operands,
    typed_results,
    with_local_streams,
    with_merged_rows,
)


def _abstract(*flat: ShapedArray, **params: Any) -> list[ShapedArray]:
    side = Side(**params)
    x, (amax,), _ = split_operands(flat, [side])
    check_operand("quantize", x, amax, side.spec, side.transpose, row_axes=side.row_axes)
    return typed_results(x, [side])


def _local(
    backend: Backend, *flat: jax.Array, row_blocks: tuple[int, int] | None = None, **params: Any
) -> Sequence[jax.Array]:
    return with_merged_rows(partial(_quantize, backend), flat, [Side(**params)], row_blocks)


def _quantize(backend: Backend, ops: Operands, sides: Sides, row_blocks: tuple[int, int]) -> list[jax.Array]:
    (side,) = sides
    if backend.name == "reference":
        return side.quantize_by_reference(ops.x, ops.amax[0], ops.stream[0], row_blocks)
    return call_ffi(
        "nvfp4_quantize",
        ffi_operands(ops),
        ffi_results(ops.x.shape, [side]),
        transpose=side.transpose,
        spec=side.spec.ffi_attrs(),
        row_blocks=np.int32(row_blocks[side.transpose]),
    )


def _batch(args, dims, *, implementation: str | None, **params):
    ops = batched_operands(args, dims, [Side(**params)])
    out = quantize_p.bind(*ops.flat(), **params, implementation=implementation)
    return out, [0] * len(out)


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], **params: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    """Follows the sharding of x, and adds a collective only for rows that are split and whose amax is found."""
    side = Side(**params)
    axes = keep_blocks(mesh, operands[0], shapes[0], side.units)
    split = tuple(axis for entry in side.contracted(axes) for axis in axes_of(entry))

    def wrap(local: Body) -> Body:
        if not side.has_amax and side.spec.format.amax_scope == "row" and split:
            return _with_row_amax(local, split, side)
        return with_local_streams(local, mesh, axes, shapes[0], [side])

    return *shardings(axes, shapes, [side]), wrap


def _with_row_amax(local: Body, axes: tuple[str, ...], side: Side) -> Body:
    """Finds the amax of rows that are split over ``axes`` first: the kernel sees one device's part of a row."""

    def body(x):
        amax = max_over_devices(find_row_amax(x, side.transpose, side.row_axes), axes)
        return (*local(x, amax, has_amax=True), amax)

    return body


def _rule(*shapes: Shape, **params: Any) -> tuple[list[list], list[list]]:
    return shardings(names_of_dims(shapes[0]), shapes, [Side(**params)])


def _known(_backend: Backend, avals: Sequence[ShapedArray], **params: Any) -> list[Check]:
    return [check_of(Side(**params), avals[0].dtype)]


def check_of(side: Side, dtype: Any) -> Check:
    """Returns the check of one side, for arrays of a dtype."""
    side = side._replace(row_axes=1)
    calls = partial(quantizer_calls, [side], dtype, side._asdict(), turned=side.transpose)
    return Check(f"quantize {describe([side])} of {jnp.dtype(dtype).name}", quantize_p, "native", calls)


quantize_p = make_primitive(
    "nvfp4_quantize",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    known=_known,
)
