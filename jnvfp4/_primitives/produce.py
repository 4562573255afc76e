"""nvfp4_produce: the bfloat16 result of a norm or a gate, and what quantize makes of it, in one pass over the operands.

Operands: x and weight, or gate and up; then the amax of either orientation where one is given; then the stream of
either where it rounds stochastically. Results: data, scale and, where none was given, amax, of the rows, then of the
columns, then the bfloat16 values; what was not asked for is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import BLOCK, NVFP4, QuantSpec
from ._base import (
    Body,
    Spec,
    axes_of,
    block_factors,
    check_explicit,
    divisible,
    make_primitive,
    sharding_rule,
    spec_of,
    typed,
)
from .quantize import (
    INPUT_DTYPES,
    amax_shapes,
    batched,
    batched_amax,
    check_operand,
    local_stream,
    no_stream,
    quantize_by_reference,
    result_shapes,
    turn,
)


@dataclass(frozen=True)
class RmsNorm:
    """x [..., M, K] and weight, [K] or [..., K]."""

    eps: float
    name = "rms_norm"
    operands = ("x", "weight")

    def values(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return reference.rms_norm(x, weight, self.eps)

    def gradient(self, x: jax.Array, weight: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of x and weight [K], in float32."""
        factor = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        normed, scaled = x * factor, dy * weight.reshape((1,) * (dy.ndim - 1) + weight.shape)
        dx = factor * (scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
        return dx, jnp.sum(dy * normed, axis=tuple(range(dy.ndim - 1)))


@dataclass(frozen=True)
class SiluMul:
    """gate and up, both [..., M, K]."""

    eps = 0.0
    name = "silu_mul"
    operands = ("gate", "up")

    def values(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return reference.silu_mul(gate, up)

    def gradient(self, gate: jax.Array, up: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = jax.nn.sigmoid(gate)
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share


Specs = tuple[QuantSpec | None, QuantSpec | None]
_ORIENTATIONS = (False, True)


class Operands(NamedTuple):
    """The flat operand list by role: two sources, and a pair (rows, columns) each. Absent ones are None."""

    a: Any
    b: Any
    amax: tuple
    stream: tuple


def _split(flat: Sequence[Any], specs: Specs, given: tuple[bool, bool]) -> Operands:
    a, b, *rest = flat
    amax = tuple(rest.pop(0) if g else None for g in given)
    return Operands(a, b, amax, tuple(rest.pop(0) if s and s.rounding == "stochastic" else None for s in specs))


def _flat(ops: Operands) -> list:
    return [v for v in (ops.a, ops.b, *ops.amax, *ops.stream) if v is not None]


def check_sources(op: RmsNorm | SiluMul, a: Any, b: Any) -> None:
    """Refuses what no spec could change; a and b have a shape and a dtype."""
    name, (first, second) = f"{op.name}_quantize", op.operands
    check_operand(name, a, None, NVFP4, False, first)
    if b.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: {second} must be float32, bfloat16 or float16, got {b.dtype}")
    if isinstance(op, RmsNorm):
        if b.shape not in (a.shape[-1:], (*a.shape[:-2], a.shape[-1])):
            raise ValueError(f"{name}: weight must have shape (K,)={a.shape[-1:]}, got {b.shape}")
        check_explicit(name, a, a.ndim - 1, a.shape[-1])
    elif (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
            f"{name}: gate and up must have the same shape and dtype, got {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        )


def _abstract(
    *flat: ShapedArray, op: RmsNorm | SiluMul, specs: Specs, given: tuple[bool, bool], values: bool
) -> list[ShapedArray]:
    ops, results = _split(flat, specs, given), []
    check_sources(op, ops.a, ops.b)
    for spec, amax, has_amax, transpose in zip(specs, ops.amax, given, _ORIENTATIONS, strict=True):
        if spec is not None:
            check_operand(f"{op.name}_quantize", ops.a, amax, spec, transpose, op.operands[0])
            where = turn(spec_of(ops.a), transpose)
            shapes = result_shapes(ops.a.shape, spec, transpose, has_amax)
            results += [typed(ops.a, shape, dtype, where[: len(shape)]) for shape, dtype in shapes]
    return results + [typed(ops.a, ops.a.shape, jnp.bfloat16, spec_of(ops.a))] * values


def _local(
    backend: str,
    *flat: jax.Array,
    op: RmsNorm | SiluMul,
    specs: Specs,
    given: tuple[bool, bool],
    values: bool,
    row_blocks: tuple[int, int] | None = None,
) -> Sequence[jax.Array]:
    ops = _split(flat, specs, given)
    rows, cols = ops.a.shape[-2:]
    row_blocks = row_blocks or (cols // BLOCK, rows // BLOCK)
    if backend == "reference":
        y = lax.optimization_barrier(op.values(ops.a, ops.b))  # else XLA computes it in every use
        parts = []
        for amax, stream, spec, t, blocks in zip(ops.amax, ops.stream, specs, _ORIENTATIONS, row_blocks, strict=True):
            parts += [] if spec is None else quantize_by_reference(y, amax, stream, spec, t, blocks)
        return parts + [y] * values
    # An FFI call has a fixed list of results: what was not asked for is empty.
    shapes: list[tuple] = []
    for spec, has_amax, t in zip(specs, given, _ORIENTATIONS, strict=True):
        own = [] if spec is None else result_shapes(ops.a.shape, spec, t, has_amax)
        shapes += own + [((0,), jnp.uint8), ((0,), jnp.uint8), ((0,), jnp.float32)][len(own) :]
    shapes.append((ops.a.shape if values else (0,), jnp.bfloat16))
    wanted = [i for i, (shape, _) in enumerate(shapes) if shape != (0,)]
    if backend == "empty":
        return [jnp.zeros(*shapes[i]) for i in wanted]
    shapes.append(_scratch(backend, ops.a.shape, op, specs, values))
    out = jax.ffi.ffi_call("nvfp4_produce", [jax.ShapeDtypeStruct(*s) for s in shapes])(
        ops.a,
        ops.b,
        *(jnp.zeros((0,), jnp.float32) if v is None else v for v in ops.amax),
        *(no_stream() if v is None else v for v in ops.stream),
        producer=op.name,
        eps=np.float32(op.eps),
        row_spec=(specs[0] or NVFP4).ffi_attrs(),
        col_spec=(specs[1] or NVFP4).ffi_attrs(),
        row_blocks=np.int32(row_blocks[0]),
        col_blocks=np.int32(row_blocks[1]),
    )
    return [out[i] for i in wanted]


def _scratch(
    backend: str, shape: tuple[int, ...], op: RmsNorm | SiluMul, specs: Specs, values: bool
) -> tuple[tuple[int, ...], Any]:
    """For columns, a CPU keeps the values unless they are a result. For tiles, a GPU keeps the factors of a norm."""
    row, col = specs
    if backend == "cpu" and col is not None and not values:
        return shape, jnp.bfloat16
    tiles = col is not None or (row is not None and row.block_rows == BLOCK)
    if backend == "cuda" and tiles and isinstance(op, RmsNorm):
        return shape[:-1], jnp.float32
    return (0,), jnp.uint8


def _batch(args, dims, *, implementation: str | None, **params):
    op, specs, given = params["op"], params["specs"], params["given"]
    ops, od = _split(args, specs, given), _split(dims, specs, given)
    size = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    a, b = batched(size, ops.a, od.a), ops.b
    if isinstance(op, SiluMul):
        b = batched(size, b, od.b)
    elif od.b is not None or b.ndim > 1:  # one weight for each matrix
        b = batched(size, b, od.b)
        b = jnp.broadcast_to(b.reshape(size, *(1,) * (a.ndim - 1 - b.ndim), *b.shape[1:]), (*a.shape[:-2], a.shape[-1]))
    amaxes, streams = [], []
    for i, (spec, t) in enumerate(zip(specs, _ORIENTATIONS, strict=True)):
        *lead, rows, cols = turn(a.shape, t)
        amax, stream = ops.amax[i], ops.stream[i]
        amaxes.append(
            None if amax is None else batched_amax(size, amax, od.amax[i], amax_shapes(lead, rows, cols, spec)[-1])
        )
        streams.append(None if stream is None else batched(size, stream, od.stream[i]))
    out = produce_p.bind(*_flat(Operands(a, b, tuple(amaxes), tuple(streams))), implementation=implementation, **params)
    return out, [0] * len(out)


# ---------------------------------------------------------------- sharding
def _units(specs: Specs) -> tuple[int, int]:
    """What the rows and the columns of a part must be multiples of."""
    row, col = specs
    rows = max(row.block_rows if row else 1, col.unit if col else 1)
    return rows, max(row.unit if row else BLOCK, col.block_rows if col else 1)


def _layout(
    mesh: Any,
    flat: list[Spec],
    shapes: list[tuple[int, ...]],
    *,
    op: RmsNorm | SiluMul,
    specs: Specs,
    given: tuple[bool, bool],
    values: bool,
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    n = _split(shapes, specs, given)
    *lead_sizes, rows, cols = n.a
    *lead, row, col = flat[0]
    row_unit, col_unit = _units(specs)
    lead = [divisible(mesh, e, size) for e, size in zip(lead, lead_sizes, strict=True)]
    row = divisible(mesh, row, rows, row_unit)
    col = None if isinstance(op, RmsNorm) else divisible(mesh, col, cols, col_unit)
    split = [*lead, row, col]
    second = split if isinstance(op, SiluMul) else [*lead, None][-len(n.b) :]
    amaxes, streams, results = [], [], []
    for i, (spec, t) in enumerate(zip(specs, _ORIENTATIONS, strict=True)):
        out = turn(split, t)
        amaxes.append(None if n.amax[i] is None else out[: len(n.amax[i])])
        streams.append(None if n.stream[i] is None else [*lead, None])
        if spec is not None:
            found = [] if given[i] else [out if spec.format.amax_scope == "window64" else out[:-1]]
            results += [out, out, *found]
    results += [split] * values

    def wrap(local: Body) -> Body:
        if specs[0] and not given[0] and specs[0].format.amax_scope == "row" and axes_of(col):
            return _with_row_amax(local, axes_of(col))
        if all(s is None for s in n.stream) or not (axes_of(row) or axes_of(col)):
            return local
        blocks = (cols // BLOCK, rows // BLOCK)

        def body(*operands):
            ops = _split(operands, specs, given)
            places = ((row, col, rows, blocks[0]), (col, row, cols, blocks[1]))
            own = tuple(
                None if s is None else local_stream(mesh, s, *p) for s, p in zip(ops.stream, places, strict=True)
            )
            return local(*_flat(ops._replace(stream=own)), row_blocks=blocks)

        return body

    return _flat(Operands(split, second, tuple(amaxes), tuple(streams))), results, wrap


def _with_row_amax(local: Body, axes: tuple[str, ...]) -> Body:
    """Rows that are split over ``axes``: the values alone, their amax over devices, then the bytes with it given."""

    def body(a, b):
        (y,) = local(a, b, specs=(None, None), given=(False, False), values=True)
        amax = softfloat.from_bits(lax.pmax(softfloat.to_bits(reference.find_amax(y, "row")), axes))
        data, scale, *rest = local(a, b, amax, given=(True, False))
        return (data, scale, amax, *rest)

    return body


def _rule(
    mesh: Any,
    operands: Any,
    _results: Any,
    *,
    op: RmsNorm | SiluMul,
    specs: Specs,
    given: tuple[bool, bool],
    values: bool,
) -> Any:
    ops = _split(operands, specs, given)
    lead = [f"b{i}" for i in range(ops.a.rank - 2)]
    *_, rows, cols = ops.a.shape
    row_unit, col_unit = _units(specs)
    row_names, whole_rows = block_factors(mesh, "r", rows // row_unit)
    col_names, whole_cols = block_factors(mesh, "c", cols // col_unit)
    whole = whole_rows | whole_cols | {"s", "t"}
    full = [*lead, row_names[0], col_names[0]]
    if isinstance(op, RmsNorm):
        whole |= set(col_names)
        second = [*lead, col_names[0]][-ops.b.rank :]
    else:
        second = full
    ins, outs = [full, second], []
    for spec, has_amax, amax, own, other in zip(
        specs, given, ops.amax, (row_names, col_names), (col_names, row_names), strict=True
    ):
        if spec is None:
            continue
        term = [*lead, own[0], other[3]] if spec.format.amax_scope == "window64" else [*lead, own[0]]
        outs += [[*lead, own[0], other[1]], [*lead, own[0], other[2]]] + [term] * (not has_amax)
        ins += [] if amax is None else [term[: amax.rank]]
    ins += [[*lead, name] for name, s in zip("st", ops.stream, strict=True) if s is not None]
    return sharding_rule(ins, outs + [full] * values, whole)


produce_p = make_primitive("nvfp4_produce", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule)
