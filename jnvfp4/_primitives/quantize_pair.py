"""nvfp4_quantize_pair: x -> the parts of x and of its transpose, in one pass over x. See _operands.py.

An amax is an operand but for scope window64, where the kernel finds it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from ..spec import QuantSpec
from ._base import Axes, Backend, Body, Shape, make_primitive
from ._checks import check_operand
from ._known_answers import describe, quantizer_calls
from ._self_check import Check
from ._shardings import keep_blocks, names_of_dims
from ._sides import (
    Operands,
    Side,
    Sides,
    batched_operands,
    call_ffi,
    ffi_operands,
    ffi_results,
    shardings,
    split_operands,
    typed_results,
    with_local_streams,
    with_merged_rows,
)

Specs = tuple[QuantSpec, QuantSpec]


def _sides(specs: Specs, row_axes: int) -> Sides:
    return [Side(s, t, s.format.amax_scope != "window64", row_axes) for s, t in zip(specs, (False, True), strict=True)]


def _abstract(*flat: ShapedArray, specs: Specs, row_axes: int) -> list[ShapedArray]:
    sides = _sides(specs, row_axes)
    x, amaxes, _ = split_operands(flat, sides)
    for side, amax in zip(sides, amaxes, strict=True):
        check_operand("quantize_pair", x, amax, side.spec, side.transpose, row_axes=row_axes)
    return typed_results(x, sides)


def _local(
    backend: Backend, *flat: jax.Array, specs: Specs, row_axes: int, row_blocks: tuple[int, int] | None = None
) -> Sequence[jax.Array]:
    return with_merged_rows(partial(_quantize, backend), flat, _sides(specs, row_axes), row_blocks)


def _quantize(backend: Backend, ops: Operands, sides: Sides, row_blocks: tuple[int, int]) -> list[jax.Array]:
    x = ops.x
    if backend.name == "reference":
        operands = zip(sides, ops.amax, ops.stream, strict=True)
        return [part for side, a, s in operands for part in side.quantize_by_reference(x, a, s, row_blocks)]
    return call_ffi(
        "nvfp4_quantize_pair",
        ffi_operands(ops, 2),
        ffi_results(x.shape, sides, 2),
        row_spec=sides[0].spec.ffi_attrs(),
        col_spec=sides[1].spec.ffi_attrs(),
        row_blocks=np.int32(row_blocks[0]),
        col_blocks=np.int32(row_blocks[1]),
    )


def _batch(args, dims, *, specs: Specs, row_axes: int, implementation: str | None):
    ops = batched_operands(args, dims, _sides(specs, row_axes))
    out = quantize_pair_p.bind(*ops.flat(), specs=specs, row_axes=row_axes, implementation=implementation)
    return out, [0] * len(out)


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], *, specs: Specs, row_axes: int
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    sides = _sides(specs, row_axes)
    axes = keep_blocks(mesh, operands[0], shapes[0], *(side.units for side in sides))
    return *shardings(axes, shapes, sides), lambda local: with_local_streams(local, mesh, axes, shapes[0], sides)


def _rule(*shapes: Shape, specs: Specs, row_axes: int) -> tuple[list[list], list[list]]:
    return shardings(names_of_dims(shapes[0]), shapes, _sides(specs, row_axes))


def _known(_backend: Backend, avals: Sequence[ShapedArray], *, specs: Specs, row_axes: int) -> list[Check]:
    return [check_of(specs, avals[0].dtype)]


def check_of(specs: Specs, dtype: Any) -> Check:
    """Returns the check of a pair of specs, for arrays of a dtype."""
    sides = _sides(specs, 1)
    calls = partial(quantizer_calls, sides, dtype, {"specs": specs, "row_axes": 1})
    return Check(f"quantize_pair {describe(sides)} of {jnp.dtype(dtype).name}", quantize_pair_p, "native", calls)


quantize_pair_p = make_primitive(
    "nvfp4_quantize_pair",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    known=_known,
)
