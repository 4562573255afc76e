"""nvfp4_quantize_pair: x -> the parts of x and of its transpose, in one pass over x.

Operands: x, then the amax of either orientation where the kernel does not find it (scope window64), then the stream of
either where it rounds stochastically. Results: data, scale and a found amax, of the rows, then of the columns.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from ..spec import BLOCK, QuantSpec
from ._base import Body, Spec, axes_of, block_factors, divisible, make_primitive, sharding_rule, spec_of, typed
from .quantize import (
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


class Operands(NamedTuple):
    """The flat operand list by role: x, and a pair (rows, columns) each. Absent ones are None."""

    x: Any
    amax: tuple
    stream: tuple


Specs = tuple[QuantSpec, QuantSpec]
_ORIENTATIONS = (False, True)


def _given(spec: QuantSpec) -> bool:
    return spec.format.amax_scope != "window64"


def _split(flat: Sequence[Any], specs: Specs) -> Operands:
    x, *rest = flat
    amax = tuple(rest.pop(0) if _given(spec) else None for spec in specs)
    return Operands(x, amax, tuple(rest.pop(0) if spec.rounding == "stochastic" else None for spec in specs))


def _flat(ops: Operands) -> list:
    return [v for v in (ops.x, *ops.amax, *ops.stream) if v is not None]


def _abstract(*flat: ShapedArray, specs: Specs) -> list[ShapedArray]:
    ops, results = _split(flat, specs), []
    for spec, amax, transpose in zip(specs, ops.amax, _ORIENTATIONS, strict=True):
        check_operand("quantize_pair", ops.x, amax, spec, transpose)
        where = turn(spec_of(ops.x), transpose)
        shapes = result_shapes(ops.x.shape, spec, transpose, _given(spec))
        results += [typed(ops.x, shape, dtype, where[: len(shape)]) for shape, dtype in shapes]
    return results


def _local(
    backend: str, *flat: jax.Array, specs: Specs, row_blocks: tuple[int, int] | None = None
) -> Sequence[jax.Array]:
    ops = _split(flat, specs)
    shapes = [result_shapes(ops.x.shape, s, t, _given(s)) for s, t in zip(specs, _ORIENTATIONS, strict=True)]
    if backend == "empty":
        return [jnp.zeros(shape, dtype) for results in shapes for shape, dtype in results]
    row_blocks = row_blocks or (shapes[0][1][0][-1], shapes[1][1][0][-1])
    if backend == "reference":
        each = zip(ops.amax, ops.stream, specs, _ORIENTATIONS, row_blocks, strict=True)
        return [part for own in each for part in quantize_by_reference(ops.x, *own)]
    absent = ((0,), jnp.float32)
    padded = [[*own, *[absent] * (3 - len(own))] for own in shapes]
    results = [jax.ShapeDtypeStruct(shape, dtype) for found in padded for shape, dtype in found]
    out = jax.ffi.ffi_call("nvfp4_quantize_pair", results)(
        ops.x,
        *(jnp.zeros((0,), jnp.float32) if a is None else a for a in ops.amax),
        *(no_stream() if s is None else s for s in ops.stream),
        row_spec=specs[0].ffi_attrs(),
        col_spec=specs[1].ffi_attrs(),
        row_blocks=np.int32(row_blocks[0]),
        col_blocks=np.int32(row_blocks[1]),
    )
    return [*out[: len(shapes[0])], *out[3 : 3 + len(shapes[1])]]


def _batch(args, dims, *, specs: Specs, implementation: str | None):
    ops, od = _split(args, specs), _split(dims, specs)
    size = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    x = batched(size, ops.x, od.x)
    amaxes, streams = [], []
    for i, (spec, t) in enumerate(zip(specs, _ORIENTATIONS, strict=True)):
        *lead, rows, cols = turn(x.shape, t)
        amax, stream = ops.amax[i], ops.stream[i]
        full = amax_shapes(lead, rows, cols, spec)[-1]
        amaxes.append(None if amax is None else batched_amax(size, amax, od.amax[i], full))
        streams.append(None if stream is None else batched(size, stream, od.stream[i]))
    moved = _flat(Operands(x, tuple(amaxes), tuple(streams)))
    out = quantize_pair_p.bind(*moved, specs=specs, implementation=implementation)
    return out, [0] * len(out)


def _layout(
    mesh: Any, flat: list[Spec], shapes: list[tuple[int, ...]], *, specs: Specs
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    n = _split(shapes, specs)
    *lead_sizes, rows, cols = n.x
    *lead, row, col = flat[0]
    lead = [divisible(mesh, e, size) for e, size in zip(lead, lead_sizes, strict=True)]
    row = divisible(mesh, row, rows, max(specs[1].unit, specs[0].block_rows))
    col = divisible(mesh, col, cols, max(specs[0].unit, specs[1].block_rows))
    split = [*lead, row, col]
    amaxes, streams, results = [], [], []
    for i, (spec, t) in enumerate(zip(specs, _ORIENTATIONS, strict=True)):
        out = turn(split, t)
        amaxes.append(None if n.amax[i] is None else out[: len(n.amax[i])])
        streams.append(None if n.stream[i] is None else [*lead, None])
        results += [out, out] if _given(spec) else [out, out, out]

    def wrap(local: Body) -> Body:
        if all(s is None for s in n.stream) or not (axes_of(row) or axes_of(col)):
            return local
        blocks = (cols // BLOCK, rows // BLOCK)

        def body(*operands):
            ops = _split(operands, specs)
            own = (
                None if ops.stream[0] is None else local_stream(mesh, ops.stream[0], row, col, rows, blocks[0]),
                None if ops.stream[1] is None else local_stream(mesh, ops.stream[1], col, row, cols, blocks[1]),
            )
            return local(*_flat(ops._replace(stream=own)), row_blocks=blocks)

        return body

    return _flat(Operands(split, tuple(amaxes), tuple(streams))), results, wrap


def _rule(mesh: Any, operands: Any, _results: Any, *, specs: Specs) -> Any:
    ops = _split(operands, specs)
    lead = [f"b{i}" for i in range(ops.x.rank - 2)]
    *_, rows, cols = ops.x.shape
    row_names, whole_rows = block_factors(mesh, "r", rows // max(specs[1].unit, specs[0].block_rows))
    col_names, whole_cols = block_factors(mesh, "c", cols // max(specs[0].unit, specs[1].block_rows))
    ins, outs = [[*lead, row_names[0], col_names[0]]], []
    amaxes = []
    for spec, own, other in ((specs[0], row_names, col_names), (specs[1], col_names, row_names)):
        _, half, blocks, windows = other
        amaxes.append([*lead, own[0], windows] if spec.format.amax_scope == "window64" else [*lead, own[0]])
        outs += [[*lead, own[0], half], [*lead, own[0], blocks]]
        if not _given(spec):
            outs.append(amaxes[-1])
    ins += [term[: amax.rank] for term, amax in zip(amaxes, ops.amax, strict=True) if amax is not None]
    ins += [[*lead, name] for name, s in zip("st", ops.stream, strict=True) if s is not None]
    return sharding_rule(ins, outs, whole_rows | whole_cols | {"s", "t"})


quantize_pair_p = make_primitive(
    "nvfp4_quantize_pair", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule
)
