"""nvfp4_quantize: (x, amax?, stream?) -> (data, scale, amax where it was not given). See _operands.py."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from ._base import Axes, Backend, Body, Shape, axes_of, make_primitive
from ._operands import (
    Operands,
    Side,
    batched_operands,
    blocks_in_rows,
    call_ffi,
    check_operand,
    ffi_operands,
    ffi_results,
    keep_blocks,
    max_over_devices,
    names_of_dims,
    shardings,
    split_operands,
    turn,
    typed_results,
    with_local_streams,
)


def _abstract(*flat: ShapedArray, **params: Any) -> list[ShapedArray]:
    side = Side(**params)
    (x,), (amax,), _ = split_operands(flat, [side])
    check_operand("quantize", x, amax, side.spec, side.transpose)
    return typed_results(x, [side])


def _local(
    backend: Backend, *flat: jax.Array, row_blocks: tuple[int, int] | None = None, **params: Any
) -> Sequence[jax.Array]:
    side = Side(**params)
    ops = split_operands(flat, [side])
    row_blocks = row_blocks or blocks_in_rows(flat[0].shape)
    if backend.name == "reference":
        return side.quantize_by_reference(flat[0], ops.amax[0], ops.stream[0], row_blocks)
    return _call_kernel(ops, side, row_blocks[side.transpose])


def _call_kernel(ops: Operands, side: Side, row_blocks: int) -> list[jax.Array]:
    return call_ffi(
        "nvfp4_quantize",
        ffi_operands(ops),
        ffi_results(ops.sources[0].shape, [side]),
        transpose=side.transpose,
        spec=side.spec.ffi_attrs(),
        row_blocks=np.int32(row_blocks),
    )


def _batch(args, dims, *, implementation: str | None, **params):
    ops = batched_operands(args, dims, [Side(**params)])
    out = quantize_p.bind(*ops.flat(), **params, implementation=implementation)
    return out, [0] * len(out)


def quantize_partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], **params: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    """Follows the sharding of x, and adds a collective only for rows that are split and whose amax is found."""
    side = Side(**params)
    axes = keep_blocks(mesh, operands[0], shapes[0], side.units)
    split = axes_of(turn(axes, side.transpose)[-1])

    def wrap(local: Body) -> Body:
        if not side.has_amax and side.spec.format.amax_scope == "row" and split:
            return _with_row_amax(local, split, side.transpose)
        return with_local_streams(local, mesh, axes, shapes[0], [side])

    return *shardings(axes, shapes, [side]), wrap


def _with_row_amax(local: Body, axes: tuple[str, ...], transpose: bool) -> Body:
    """Finds the amax of rows that are split over ``axes`` first: the kernel sees one device's part of a row."""

    def body(x):
        amax = max_over_devices(reference.find_amax(jnp.swapaxes(x, -1, -2) if transpose else x, "row"), axes)
        return (*local(x, amax, has_amax=True), amax)

    return body


def _rule(*shapes: Shape, **params: Any) -> tuple[list[list], list[list]]:
    return shardings(names_of_dims(shapes[0]), shapes, [Side(**params)])


quantize_p = make_primitive(
    "nvfp4_quantize", abstract=_abstract, local=_local, batch=_batch, partition=quantize_partition, rule=_rule
)
