"""nvfp4_fake_quant: (x, amax?, stream?) -> the values that x quantizes to, in x's dtype.

The operands are those of nvfp4_quantize. An amax of rows or windows that is not given is found and not returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import BLOCK, QuantSpec
from ._base import Body, Spec, make_primitive, sharding_rule, spec_of, typed
from .quantize import (
    Operands,
    batched_operands,
    check_operand,
    no_stream,
    quantize_layout,
    rule_terms,
    split_operands,
)


def _abstract(*flat: ShapedArray, spec: QuantSpec, has_amax: bool) -> list[ShapedArray]:
    ops = split_operands(flat, spec, has_amax)
    check_operand("fake_quant", ops.x, ops.amax, spec, transpose=False)
    return [typed(ops.x, ops.x.shape, ops.x.dtype, spec_of(ops.x))]


def _local(
    backend: str, *flat: jax.Array, spec: QuantSpec, has_amax: bool, row_blocks: int | None = None
) -> Sequence[jax.Array]:
    ops = split_operands(flat, spec, has_amax)
    if backend == "empty":
        return [jnp.zeros(ops.x.shape, ops.x.dtype)]
    if backend == "reference":
        return [_by_reference(ops, spec, row_blocks)]
    amax = jnp.zeros((0,), jnp.float32) if ops.amax is None else ops.amax
    stream = no_stream() if ops.stream is None else ops.stream
    row_blocks = row_blocks or ops.x.shape[-1] // BLOCK
    call = jax.ffi.ffi_call("nvfp4_fake_quant", [jax.ShapeDtypeStruct(ops.x.shape, ops.x.dtype)])
    return call(ops.x, amax, stream, spec=spec.ffi_attrs(), row_blocks=np.int32(row_blocks))


def _by_reference(ops: Operands, spec: QuantSpec, row_blocks: int | None) -> jax.Array:
    data, scale, amax = reference.quantize(ops.x, spec, ops.amax, False, ops.stream, row_blocks)
    magnitude = softfloat.from_bits(softfloat.to_bits(amax) & softfloat.ABS)
    return reference.dequantize(data, scale, magnitude, spec.format, ops.x.dtype)


def _batch(args, dims, *, spec: QuantSpec, has_amax: bool, implementation: str | None):
    operands = batched_operands(args, dims, spec, False, has_amax)
    return fake_quant_p.bind(*operands, spec=spec, has_amax=has_amax, implementation=implementation), [0]


def _layout(
    mesh: Any, specs: list[Spec], shapes: list[tuple[int, ...]], *, spec: QuantSpec, has_amax: bool
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    """quantize's, but for the results: x alone, and no amax even where a collective found it."""
    operands, (out, *_), wrap = quantize_layout(mesh, specs, shapes, spec=spec, transpose=False, has_amax=has_amax)
    return operands, [out], lambda local: lambda *flat: wrap(local)(*flat)[:1]


def _rule(mesh: Any, operands: Any, _results: Any, *, spec: QuantSpec, has_amax: bool) -> Any:
    ins, _, whole = rule_terms(mesh, operands, spec, False, has_amax)
    return sharding_rule(ins, ins[:1], whole)


fake_quant_p = make_primitive(
    "nvfp4_fake_quant", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule
)
