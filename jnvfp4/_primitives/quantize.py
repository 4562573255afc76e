"""nvfp4_quantize: (x, amax?, stream?) -> (data, scale, amax where it was not given).

``stream`` (uint32 [..., 4], one for each matrix) says where the random bits of stochastic rounding come from: two
words of key, and the index of the matrix's first block in the whole array, low word first.

The scale is uint8 here, the bits of float8_e4m3fn: a jax.checkpoint policy may save a primitive's results, and JAX
rounds the floats that it saves by IEEE rules, where E4M3's 256 and above are infinite.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import BLOCK, WINDOW, QuantSpec
from ._base import (
    Body,
    Spec,
    axes_of,
    block_factors,
    check_explicit,
    divisible,
    make_primitive,
    sharding_rule,
    some_axis_divides,
    spec_of,
    typed,
    ways,
)

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def turn(items: Sequence[Any], transpose: bool) -> list:
    """Swaps the last two items: shape or spec of x -> that of what is quantized, and back."""
    items = list(items)
    return [*items[:-2], items[-1], items[-2]] if transpose else items


class Operands(NamedTuple):
    """The flat operand list by role; also used for their specs and shapes. Absent ones are None."""

    x: Any
    amax: Any
    stream: Any


def split_operands(flat: Sequence[Any], spec: QuantSpec, has_amax: bool) -> Operands:
    x, *rest = flat
    amax = rest.pop(0) if has_amax else None
    return Operands(x, amax, rest[0] if spec.rounding == "stochastic" else None)


def amax_shapes(lead: Sequence[int], rows: int, cols: int, spec: QuantSpec) -> list[tuple[int, ...]]:
    """The shapes that a given amax may have."""
    if spec.format.amax_scope == "tensor":
        return list(dict.fromkeys([(), tuple(lead)]))
    windows = (cols // WINDOW,) if spec.format.amax_scope == "window64" else ()
    return [(*lead, rows, *windows)]


def check_array(op: str, x: Any, name: str = "x") -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{op}: {name} must have rank 2 or more, [..., M, K], got {name}.shape={x.shape}")


def check_operand(
    op: str, x: ShapedArray, amax: ShapedArray | None, spec: QuantSpec, transpose: bool, name: str = "x"
) -> None:
    check_array(op, x, name)
    *lead, rows, cols = turn(x.shape, transpose)
    if cols % spec.unit:
        which = "M (the quantized axis, since it is transposed)" if transpose else "K"
        why = ' for amax_scope="window64"' if spec.unit == WINDOW else ""
        raise ValueError(
            f"{op}: {which} must be a multiple of {spec.unit}{why}, got {name}.shape={x.shape}; "
            f"pad it to {-(-cols // spec.unit) * spec.unit} with zeros"
        )
    if spec.block_rows == BLOCK and rows % BLOCK:
        raise ValueError(
            f"{op}: block_rows={BLOCK} needs both M and K to be multiples of {BLOCK}, got {name}.shape={x.shape}"
        )
    if amax is not None:
        accepted = amax_shapes(lead, rows, cols, spec)
        if amax.shape not in accepted:
            raise ValueError(
                f"{op}: amax must have shape {' or '.join(map(str, accepted))} for "
                f'amax_scope="{spec.format.amax_scope}" and {name}.shape={x.shape}, got {amax.shape}'
            )
        if amax.dtype != jnp.float32:
            raise TypeError(f"{op}: amax must be float32, got {amax.dtype}")
    quantized = x.ndim - 2 if transpose else x.ndim - 1
    check_explicit(op, x, quantized, spec.unit)
    check_explicit(op, x, 2 * x.ndim - 3 - quantized, spec.block_rows)


def result_shapes(shape: Sequence[int], spec: QuantSpec, transpose: bool, has_amax: bool) -> list[tuple]:
    """(shape, dtype) of data, scale and, if not given, amax."""
    *lead, rows, cols = turn(shape, transpose)
    found = [
        ((*lead, rows, cols // 2), jnp.uint8),
        ((*lead, rows, cols // BLOCK), jnp.uint8),
    ]
    return found if has_amax else [*found, (amax_shapes(lead, rows, cols, spec)[0], jnp.float32)]


def _abstract(*flat: ShapedArray, spec: QuantSpec, transpose: bool, has_amax: bool) -> list[ShapedArray]:
    ops = split_operands(flat, spec, has_amax)
    check_operand("quantize", ops.x, ops.amax, spec, transpose)
    where = turn(spec_of(ops.x), transpose)
    shapes = result_shapes(ops.x.shape, spec, transpose, has_amax)
    return [typed(ops.x, shape, dtype, where[: len(shape)]) for shape, dtype in shapes]


def _local(
    backend: str,
    *flat: jax.Array,
    spec: QuantSpec,
    transpose: bool,
    has_amax: bool,
    row_blocks: int | None = None,
) -> Sequence[jax.Array]:
    ops = split_operands(flat, spec, has_amax)
    shapes = result_shapes(ops.x.shape, spec, transpose, has_amax)
    if backend == "empty":
        return [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    if backend == "reference":
        return quantize_by_reference(ops.x, ops.amax, ops.stream, spec, transpose, row_blocks)
    if has_amax:
        shapes = [*shapes, ((0,), jnp.float32)]
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    amax = jnp.zeros((0,), jnp.float32) if ops.amax is None else ops.amax
    stream = no_stream() if ops.stream is None else ops.stream
    row_blocks = row_blocks or shapes[1][0][-1]
    call = jax.ffi.ffi_call("nvfp4_quantize", results)
    out = call(ops.x, amax, stream, transpose=transpose, spec=spec.ffi_attrs(), row_blocks=np.int32(row_blocks))
    return out[:2] if has_amax else out


def quantize_by_reference(
    x: jax.Array, amax: Any, stream: Any, spec: QuantSpec, transpose: bool, row_blocks: int | None
) -> list[jax.Array]:
    data, scale, found = reference.quantize(x, spec, amax, transpose, stream, row_blocks)
    parts = [data, lax.bitcast_convert_type(scale, jnp.uint8)]
    return [*parts, found] if amax is None else parts


def no_stream() -> jax.Array:
    return jnp.zeros((0, 4), jnp.uint32)


# ---------------------------------------------------------------- vmap
def batched(size: int, operand: jax.Array, dim: int | None) -> jax.Array:
    return jnp.broadcast_to(operand, (size, *operand.shape)) if dim is None else jnp.moveaxis(operand, dim, 0)


def batched_amax(size: int, amax: jax.Array, dim: int | None, full: tuple[int, ...]) -> jax.Array:
    """The amax of all examples: () if it is one for all, else of shape ``full``, batch axis in front."""
    if dim is None and amax.ndim == 0:
        return amax
    a = amax[None] if dim is None else jnp.moveaxis(amax, dim, 0)
    return jnp.broadcast_to(a.reshape(*a.shape, *(1,) * (len(full) - a.ndim)), full)


def batched_operands(args, dims, spec: QuantSpec, transpose: bool, has_amax: bool) -> list[jax.Array]:
    """The flat operands of all examples, batch axis in front."""
    ops, od = split_operands(args, spec, has_amax), split_operands(dims, spec, has_amax)
    size = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    x = batched(size, ops.x, od.x)
    operands = [x]
    if has_amax:
        *lead, rows, cols = turn(x.shape, transpose)
        operands.append(batched_amax(size, ops.amax, od.amax, amax_shapes(lead, rows, cols, spec)[-1]))
    if ops.stream is not None:  # every example counts from the start of an array of its own
        operands.append(batched(size, ops.stream, od.stream))
    return operands


def _batch(args, dims, *, spec: QuantSpec, transpose: bool, has_amax: bool, implementation: str | None):
    operands = batched_operands(args, dims, spec, transpose, has_amax)
    params = {"spec": spec, "transpose": transpose, "has_amax": has_amax, "implementation": implementation}
    out = quantize_p.bind(*operands, **params)
    return out, [0] * len(out)


# ---------------------------------------------------------------- sharding
def shard_index(mesh: Any, entry: Any) -> jax.Array:
    """Which part of a dimension sharded over ``entry`` this device has."""
    index = jnp.uint32(0)
    for axis in axes_of(entry):
        index = index * jnp.uint32(mesh.shape[axis]) + lax.axis_index(axis).astype(jnp.uint32)
    return index


def local_stream(mesh: Any, stream: jax.Array, row: Any, col: Any, rows: int, blocks: int) -> jax.Array:
    """``stream`` with the index of the first block that this device has; rows and blocks of the whole matrix."""
    low, high = stream[..., 2], stream[..., 3]
    first_row = shard_index(mesh, row) * jnp.uint32(rows // ways(mesh, row))
    first_col = shard_index(mesh, col) * jnp.uint32(blocks // ways(mesh, col))
    row_high, row_low = softfloat.mul_wide(blocks, first_row)
    low, high = softfloat.add_wide(low, high + row_high, row_low)
    low, high = softfloat.add_wide(low, high, first_col)
    return jnp.stack([stream[..., 0], stream[..., 1], low, high], axis=-1)


def quantize_layout(
    mesh: Any,
    specs: list[Spec],
    shapes: list[tuple[int, ...]],
    *,
    spec: QuantSpec,
    transpose: bool,
    has_amax: bool,
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    n = split_operands(shapes, spec, has_amax)
    *lead_sizes, rows, cols = turn(n.x, transpose)
    *lead, row, col = turn(specs[0], transpose)
    lead = [divisible(mesh, e, size) for e, size in zip(lead, lead_sizes, strict=True)]
    row, col = divisible(mesh, row, rows, spec.block_rows), divisible(mesh, col, cols, spec.unit)
    out = [*lead, row, col]
    operand_specs = [turn(out, transpose)]
    if has_amax:
        operand_specs.append(out[: len(n.amax)])
    if n.stream is not None:
        operand_specs.append([*lead, None])
    result_specs = [out, out] if has_amax else [out, out, out[: -1 if spec.format.amax_scope == "row" else None]]

    def wrap(local: Body) -> Body:
        if not has_amax and spec.format.amax_scope == "row" and axes_of(col):
            return _with_row_amax(local, axes_of(col), transpose)
        if n.stream is not None and (axes_of(row) or axes_of(col)):
            blocks = cols // BLOCK

            def body(x, amax, stream):
                return local(x, amax, local_stream(mesh, stream, row, col, rows, blocks), row_blocks=blocks)

            return body
        return local

    return operand_specs, result_specs, wrap


def _with_row_amax(local: Body, axes: tuple[str, ...], transpose: bool) -> Body:
    """Rows that are split over ``axes``: their amax is a maximum over devices, then given."""

    def body(x):
        own = reference.find_amax(jnp.swapaxes(x, -1, -2) if transpose else x, "row")
        amax = softfloat.from_bits(lax.pmax(softfloat.to_bits(own), axes))
        return (*local(x, amax, has_amax=True), amax)

    return body


def rule_terms(
    mesh: Any, operands: Any, spec: QuantSpec, transpose: bool, has_amax: bool
) -> tuple[list[list[str]], list[list[str]], set[str]]:
    """The Shardy factors of the operands, of data, scale and amax, and those of them that must stay whole."""
    ops = split_operands(operands, spec, has_amax)
    lead = [f"b{i}" for i in range(ops.x.rank - 2)]
    *_, rows, cols = turn(ops.x.shape, transpose)
    (full, half, blocks, windows), whole = block_factors(mesh, "c", cols // spec.unit)
    if not some_axis_divides(mesh, rows // spec.block_rows):
        whole.add("r")
    amax = [*lead, "r", windows] if spec.format.amax_scope == "window64" else [*lead, "r"]
    ins = [turn([*lead, "r", full], transpose)]
    if has_amax:
        ins.append(amax[: ops.amax.rank])
    if ops.stream is not None:
        ins.append([*lead, "s"])
        whole.add("s")
    return ins, [[*lead, "r", half], [*lead, "r", blocks], amax], whole


def _rule(mesh: Any, operands: Any, _results: Any, *, spec: QuantSpec, transpose: bool, has_amax: bool) -> Any:
    ins, outs, whole = rule_terms(mesh, operands, spec, transpose, has_amax)
    return sharding_rule(ins, outs[:2] if has_amax else outs, whole)


quantize_p = make_primitive(
    "nvfp4_quantize", abstract=_abstract, local=_local, batch=_batch, layout=quantize_layout, rule=_rule
)
