"""nvfp4_fake_quant: (x, amax?, stream?) -> the values that x quantizes to, in x's dtype.

The operands are those of nvfp4_quantize. An amax of rows or windows that is not given is found and not returned.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import QuantSpec
from ._base import Axes, Backend, Body, Shape, axes_of_dims, make_primitive, typed
from ._known_answers import describe, quantizer_calls
from ._operands import (
    Operands,
    Side,
    batched_operands,
    blocks_in_rows,
    call_ffi,
    check_operand,
    ffi_operands,
    names_of_dims,
    shardings,
    split_operands,
)
from ._self_check import Check
from .quantize import quantize_partition


def _abstract(*flat: ShapedArray, spec: QuantSpec, has_amax: bool) -> list[ShapedArray]:
    x, (amax,), _ = split_operands(flat, [Side(spec, False, has_amax)])
    check_operand("fake_quant", x, amax, spec, transpose=False)
    return [typed(x, x.shape, x.dtype, axes_of_dims(x))]


def _local(
    backend: Backend, *flat: jax.Array, spec: QuantSpec, has_amax: bool, row_blocks: tuple[int, int] | None = None
) -> Sequence[jax.Array]:
    ops, x = split_operands(flat, [Side(spec, False, has_amax)]), flat[0]
    blocks, _ = row_blocks or blocks_in_rows(x.shape)
    if backend.name == "reference":
        return [_by_reference(ops, spec, blocks)]
    attrs = {"spec": spec.ffi_attrs(), "row_blocks": np.int32(blocks)}
    return call_ffi("nvfp4_fake_quant", ffi_operands(ops), [(x.shape, x.dtype)], **attrs)


def _by_reference(ops: Operands, spec: QuantSpec, row_blocks: int) -> jax.Array:
    x = ops.x
    data, scale, amax = reference.quantize(x, spec, ops.amax[0], False, ops.stream[0], row_blocks)
    magnitude = softfloat.from_bits(softfloat.to_bits(amax) & softfloat.ABS)
    return reference.dequantize(data, scale, magnitude, spec.format, x.dtype)


def _batch(args, dims, *, spec: QuantSpec, has_amax: bool, implementation: str | None):
    ops = batched_operands(args, dims, [Side(spec, False, has_amax)])
    return fake_quant_p.bind(*ops.flat(), spec=spec, has_amax=has_amax, implementation=implementation), [0]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes], **params: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    """Does as quantize's, but the result is x alone: no amax even where a collective found it."""
    axes, _, wrap = quantize_partition(mesh, operands, shapes, results, transpose=False, **params)
    return axes, axes[:1], lambda local: lambda *flat: wrap(local)(*flat)[:1]


def _rule(*shapes: Shape, **params: Any) -> tuple[list[list], list[list]]:
    operands, _ = shardings(names_of_dims(shapes[0]), shapes, [Side(transpose=False, **params)])
    return operands, operands[:1]


def _known(_backend: Backend, avals: Sequence[ShapedArray], **params: Any) -> list[Check]:
    return [check_of(**params, dtype=avals[0].dtype)]


def check_of(spec: QuantSpec, has_amax: bool, dtype: Any) -> Check:
    """Returns the check of a spec, for arrays of a dtype."""
    sides = [Side(spec, False, has_amax)]
    calls = partial(quantizer_calls, sides, dtype, {"spec": spec, "has_amax": has_amax})
    return Check(f"fake_quant {describe(sides)} of {jnp.dtype(dtype).name}", fake_quant_p, "native", calls)


fake_quant_p = make_primitive(
    "nvfp4_fake_quant",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    known=_known,
)
