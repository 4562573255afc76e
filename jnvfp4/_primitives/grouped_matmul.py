"""nvfp4_grouped_matmul: (a parts, b parts, group sizes) -> row m of a times the transposed matrix of b of its group.

``a`` is three operands (data, scale, amax), or one 16-bit array when ``params.a`` is None. Groups follow each other
from row 0; the amax of b has a number for each group at least.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.lax import ragged_dot_general  # not what Qwix puts in its place

from .. import reference
from .._core import softfloat
from .._core.mesh import Entry, Shape, axes_of, axes_of_dims, typed
from .._native import plans
from ..spec import Format
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._groups import check_sizes, map_examples, rows_of, rows_of_device
from ._matmul_routes import call_kernel, decode
from ._products import (
    Operands,
    ProductAxes,
    ProductParams,
    check_axes_once,
    check_depth,
    check_operands,
    operand_shardings,
)

OP = "grouped_matmul_nt"


# ---------------------------------------------------------------- types
def _abstract(params: ProductParams, *flat: ShapedArray) -> list[ShapedArray]:
    ops = params.split(flat)
    a, b = ops.a[0], ops.b[0]
    check_operands(OP, params, ops.a, ops.b)
    for name, fmt in (("a", params.a), ("b", params.b)):
        if fmt is not None and fmt.amax_scope == "window64":
            raise ValueError(
                f'{OP}: {name} must have amax_scope "tensor" or "row", got "window64", whose amaxes change along K, so '
                "that no sum can be scaled once at its end; quantize by another spec, or call matmul_nt for each group"
            )
    if a.ndim != 2:
        raise ValueError(f"{OP}: a must have rank 2, [M, K], got shape {_shape(a, params.a)}; vmap adds leading axes")
    if b.ndim != 3:
        raise ValueError(
            f"{OP}: b must have rank 3, [G, N, K], got shape {_shape(b, params.b)}; vmap adds leading axes"
        )
    check_depth(OP, params, a, b)
    check_sizes(OP, ops.rest[0], b.shape[0])
    axes = [axes_of_dims(a)[0], axes_of_dims(b)[1]]
    check_axes_once(OP, axes)
    return [typed(a, (a.shape[0], b.shape[1]), params.out_dtype, axes)]


def _shape(data: Any, fmt: Format | None) -> Shape:
    return data.shape if fmt is None else (*data.shape[:-1], 2 * data.shape[-1])


# ---------------------------------------------------------------- on one device
def _local(params: ProductParams, backend: Backend, *flat: jax.Array) -> Sequence[jax.Array]:
    ops = params.split(flat)
    if backend.name == "reference":
        return [_by_reference(params, ops)]
    chosen = plan(params, ops, backend.capability, backend.kernel)
    refusal = backend.refusal(chosen.kernel)
    if reason := chosen.reason or (refusal if backend.kernel else ""):
        raise NotImplementedError(f"{OP}: {_what_cannot(params, backend)} cannot run here: {reason}")
    if refusal:
        return [_by_reference(params, ops)]
    if chosen.kernel == "decode_then_ragged_dot":
        return [_decode_then_ragged_dot(params, ops)]
    like = jax.ShapeDtypeStruct((ops.a[0].shape[0], ops.b[0].shape[1]), params.out_dtype)
    return [call_kernel("nvfp4_grouped_matmul", params, ops.a, (*ops.b, *ops.rest), like, chosen, pinned=params.pinned)]


def _what_cannot(params: ProductParams, backend: Backend) -> str:
    """Names what was asked for. Without a named kernel only the pinned order has none on some devices."""
    if backend.kernel:
        return f"implementation={backend.kernel!r}"
    left = "an NVFP4 a" if params.a else "a 16-bit a"
    return f'accumulation="pinned" with {left}, which the CPU, GPUs of Hopper (a quantized) and "reference" have,'


def plan(params: ProductParams, ops: Operands, capability: int | None, kernel: str | None) -> plans.MatmulPlan:
    """Asks for the best kernel, or for ``kernel``, as ``_matmul_routes.plan`` does."""
    (rows, _), (groups, cols, half) = ops.a[0].shape, ops.b[0].shape
    if not all(isinstance(size, int) for size in (rows, groups, cols, half)):
        raise NotImplementedError(
            f"{OP}: the sizes of a product must be known when a program is lowered, got {(rows, cols)} for its result "
            f"and {groups} groups; export one program for each size, or, where only numbers of rows and columns are "
            'symbolic, pass implementation="reference", which is slower'
        )
    return plans.plan_grouped(
        shape=(rows, groups, cols, 2 * half),
        a="nvfp4" if params.a else jnp.dtype(ops.a[0].dtype).name,
        out=params.out_dtype.name,
        pinned=params.pinned,
        capability=capability,
        kernel=kernel,
    )


def _by_reference(params: ProductParams, ops: Operands) -> jax.Array:
    """Multiplies all rows by the matrix of each group that has some, and keeps those of the group."""
    a, rows = ops.a[0] if params.a is None else ops.a, ops.a[0].shape[0]
    of = rows_of(ops.rest[0], rows)
    index = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def of_group(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        b, start, end = group
        product = lambda: reference.matmul(a, b, None, params.a, params.b, params.out_dtype)  # noqa: E731
        mine = (index >= start) & (index < end)
        return lax.cond(end > start, lambda: jnp.where(mine, product(), y), lambda: y), None

    zeros = jnp.zeros((rows, ops.b[0].shape[1]), params.out_dtype)
    return lax.scan(of_group, zeros, (ops.b, *of))[0]


def _decode_then_ragged_dot(params: ProductParams, ops: Operands) -> jax.Array:
    """Decodes both operands exactly, and leaves the sums to XLA."""
    dense = ops.a[0] if params.a is None else decode(ops.a, jnp.bfloat16)
    weight = decode(ops.b, dense.dtype)
    rows = dense.shape[0]
    of = rows_of(ops.rest[0], rows)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    y = ragged_dot_general(
        dense, weight, of.sizes, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
    group = of.group_of(rows)
    of_b = softfloat.to_bits(ops.b[2])[group]
    of_b = of_b[:, None] if of_b.ndim == 1 else of_b
    if params.a is None:
        alpha = reference.alpha_w4a16(of_b, params.b.e4m3_max)
    else:
        of_a = softfloat.to_bits(ops.a[2])
        of_a = of_a[:, None] if of_a.ndim else of_a
        alpha = reference.alpha_w4a4(of_a, of_b, params.a.e4m3_max, params.b.e4m3_max)
    scaled = softfloat.from_bits(reference.gemm_epilogue(softfloat.to_bits(y), alpha, None), params.out_dtype)
    return jnp.where(of.held(rows), scaled, jnp.zeros((), params.out_dtype))


# ---------------------------------------------------------------- sharding
def _shardings(row: Entry, group: Entry, col: Entry, depth: Entry, n: Operands) -> list[list]:
    """Returns the shardings of all operands of these shapes: mesh axes, or names of a sharding rule."""
    return [*operand_shardings([row, depth], [group, col, depth], n), [None]]


def _partition(params: ProductParams, proposed: Proposal) -> Partition:
    axes, n = params.split(proposed.operands), params.split(proposed.shapes)
    (row, of_a), (group, col, of_b) = axes.a[0], axes.b[0]
    (rows, _), (groups, cols, half) = n.a[0], n.b[0]
    split = ProductAxes(proposed)
    g = split.claim(group, groups)
    k = split.contracted(of_a, of_b, 2 * half // params.unit)
    m, c = split.rows_then_column([row], [rows], col, cols)
    result = split.result([m, c], [rows, cols], summed=axes_of(k), apart=axes_of(g))

    def on_a_device(local: Body) -> Body:
        """Multiplies the rows that a device has by the matrices that it has, and sums over devices."""
        if not (axes_of(m) or result.over):
            return local

        def body(*flat: jax.Array) -> Sequence[jax.Array]:
            ops = params.split(flat)
            here = (m, ops.a[0].shape[0]), (g, ops.b[0].shape[0])
            of = rows_of_device(proposed.mesh, rows_of(ops.rest[0], rows), *here)
            start = of.starts[0]
            a = [v if v.ndim == 0 else jnp.roll(v, -start, axis=0) for v in ops.a] if axes_of(g) else ops.a
            part = replace(params, out_dtype=jnp.dtype(jnp.float32)) if axes_of(k) else params
            y = local(*a, *ops.b, of.sizes, params=part)[0]
            y = result.sum(jnp.roll(y, start, axis=0) if axes_of(g) else y)
            return (y if part == params else softfloat.from_bits(softfloat.to_bits(y), params.out_dtype),)

        return body

    return _shardings(m, g, c, k, n), [result.axes], on_a_device


def _rule(params: ProductParams, *shapes: Shape) -> tuple[list[list], list[list]]:
    return _shardings("m", "g", "n", "k", params.split(shapes)), [["m", "n"]]


grouped_matmul_p = make_primitive(
    "nvfp4_grouped_matmul",
    abstract=_abstract,
    local=_local,
    batch=map_examples,
    partition=_partition,
    rule=_rule,
    sums=True,
)
