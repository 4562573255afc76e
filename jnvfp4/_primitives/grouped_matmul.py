"""nvfp4_grouped_matmul: (a parts, b parts, group sizes) -> row m of a times the transposed matrix of b of its group.

``a`` is three operands (data, scale, amax), or one 16-bit array when ``a_format`` is None. Groups follow each other
from row 0; the amax of b has a number for each group at least.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference
from .._core import softfloat
from .._native import plans
from ..spec import Format
from ._base import (
    Axes,
    Backend,
    Body,
    Shape,
    axes_of,
    axes_of_dims,
    check_explicit,
    make_primitive,
    typed,
    without_axes,
)
from ._checks import check_parts
from ._groups import check_sizes, claims, map_examples, rows_of, rows_of_device, sum_over_devices
from ._known_answers import grouped_check
from ._matmul_routes import decode
from ._self_check import Check
from ._shardings import part_shardings
from .matmul import DENSE_DTYPES, scattered_over, unit_of_k

OP = "grouped_matmul_nt"


class Operands(NamedTuple):
    """Holds a flat operand list by role: arrays, or their shapes, shardings or batch dimensions."""

    a: tuple
    b: tuple
    sizes: Any


def _split(flat: Sequence[Any], a_format: Format | None) -> Operands:
    flat, na = tuple(flat), 1 if a_format is None else 3
    return Operands(flat[:na], flat[na : na + 3], flat[na + 3])


# ---------------------------------------------------------------- types
def _abstract(*flat: ShapedArray, a_format: Format | None, b_format: Format, out_dtype: Any) -> list[ShapedArray]:
    ops = _split(flat, a_format)
    a, b, sizes = ops.a[0], ops.b[0], ops.sizes
    if a_format is None:
        if a.dtype not in DENSE_DTYPES:
            raise TypeError(f"{OP}: an unquantized a must be bfloat16 or float16, got {a.dtype}")
    else:
        check_parts(OP, "a", ops.a, a_format)
    check_parts(OP, "b", ops.b, b_format)
    _check_formats(a_format, b_format)
    if a.ndim != 2:
        raise ValueError(f"{OP}: a must have rank 2, [M, K], got shape {_shape(a, a_format)}; vmap adds leading axes")
    if b.ndim != 3:
        raise ValueError(
            f"{OP}: b must have rank 3, [G, N, K], got shape {_shape(b, b_format)}; vmap adds leading axes"
        )
    depths = _shape(a, a_format)[1], _shape(b, b_format)[2]
    if depths[0] != depths[1]:
        raise ValueError(f"{OP}: a and b must have the same K, got K={depths[0]} and K={depths[1]}")
    check_sizes(OP, sizes, b.shape[0])
    unit = unit_of_k(a_format, b_format)
    check_explicit(OP, a, 1, unit if a_format is None else unit // 2)
    check_explicit(OP, b, 2, unit // 2)
    axes = [axes_of_dims(a)[0], axes_of_dims(b)[1]]
    if set(axes_of(axes[0])) & set(axes_of(axes[1])):
        raise ValueError(
            f"{OP}: M of a and N of b are sharded over a common mesh axis (result would be {axes}); reshard one of them"
        )
    return [typed(a, (a.shape[0], b.shape[1]), out_dtype, axes)]


def _shape(data: Any, fmt: Format | None) -> Shape:
    return data.shape if fmt is None else (*data.shape[:-1], 2 * data.shape[-1])


def _check_formats(a_format: Format | None, b_format: Format) -> None:
    for name, fmt in (("a", a_format), ("b", b_format)):
        if fmt is not None and fmt.amax_scope == "window64":
            raise ValueError(
                f'{OP}: {name} must have amax_scope "tensor" or "row", got "window64", whose amaxes change along K, so '
                "that no sum can be scaled once at its end; quantize by another spec, or call matmul_nt for each group"
            )
    a_rht = a_format is not None and a_format.rht
    if a_rht != b_format.rht:
        raise ValueError(
            f"{OP}: a and b must both be rotated (format.rht) or neither, got a.rht={a_rht}, b.rht={b_format.rht}"
        )


# ---------------------------------------------------------------- on one device
def _local(
    backend: Backend, *flat: jax.Array, a_format: Format | None, b_format: Format, out_dtype: Any
) -> Sequence[jax.Array]:
    ops = _split(flat, a_format)
    if backend.name == "reference":
        return [_by_reference(ops, a_format, b_format, out_dtype)]
    chosen = plan(ops, a_format, out_dtype, backend.capability, backend.kernel)
    refusal = backend.refusal(chosen.kernel)
    if reason := chosen.reason or (refusal if backend.kernel else ""):
        raise NotImplementedError(f"{OP}: implementation={backend.kernel!r} cannot run here: {reason}")
    if refusal:
        return [_by_reference(ops, a_format, b_format, out_dtype)]
    if chosen.kernel == "decode_then_ragged_dot":
        return [_decode_then_ragged_dot(ops, a_format, b_format, out_dtype)]
    return [_call_kernel(ops, a_format, b_format, out_dtype, chosen)]


def plan(
    ops: Operands, a_format: Format | None, out_dtype: Any, capability: int | None, kernel: str | None
) -> plans.MatmulPlan:
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
        a="nvfp4" if a_format else jnp.dtype(ops.a[0].dtype).name,
        out=jnp.dtype(out_dtype).name,
        capability=capability,
        kernel=kernel,
    )


def _call_kernel(
    ops: Operands, a_format: Format | None, b_format: Format, out_dtype: Any, chosen: plans.MatmulPlan
) -> jax.Array:
    absent = (jnp.zeros((0,), jnp.uint8), jnp.zeros((0,), jnp.float32))
    result = jax.ShapeDtypeStruct((ops.a[0].shape[0], ops.b[0].shape[1]), out_dtype)
    call = jax.ffi.ffi_call("nvfp4_grouped_matmul", [result, jax.ShapeDtypeStruct((chosen.scratch_bytes,), jnp.uint8)])
    return call(
        *(ops.a if a_format else (*ops.a, *absent)),
        *ops.b,
        ops.sizes,
        kernel=chosen.kernel,
        a_e4m3_max=np.int32((a_format or Format()).e4m3_max),
        b_e4m3_max=np.int32(b_format.e4m3_max),
    )[0]


def _by_reference(ops: Operands, a_format: Format | None, b_format: Format, out_dtype: Any) -> jax.Array:
    """Multiplies all rows by the matrix of each group that has some, and keeps those of the group."""
    a, rows = ops.a[0] if a_format is None else ops.a, ops.a[0].shape[0]
    of = rows_of(ops.sizes, rows)
    index = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def of_group(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        b, start, end = group
        product = lambda: reference.matmul(a, b, None, a_format, b_format, out_dtype)  # noqa: E731
        mine = (index >= start) & (index < end)
        return lax.cond(end > start, lambda: jnp.where(mine, product(), y), lambda: y), None

    zeros = jnp.zeros((rows, ops.b[0].shape[1]), out_dtype)
    return lax.scan(of_group, zeros, (ops.b, *of))[0]


def _decode_then_ragged_dot(ops: Operands, a_format: Format | None, b_format: Format, out_dtype: Any) -> jax.Array:
    """Decodes both operands exactly, and leaves the sums to XLA."""
    dense = ops.a[0] if a_format is None else decode(ops.a, jnp.bfloat16)
    weight = decode(ops.b, dense.dtype)
    rows = dense.shape[0]
    of = rows_of(ops.sizes, rows)
    dims = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    y = lax.ragged_dot_general(
        dense, weight, of.sizes, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
    group = of.group_of(rows)
    of_b = softfloat.to_bits(ops.b[2])[group]
    of_b = of_b[:, None] if of_b.ndim == 1 else of_b
    if a_format is None:
        alpha = reference.alpha_w4a16(of_b, b_format.e4m3_max)
    else:
        of_a = softfloat.to_bits(ops.a[2])
        of_a = of_a[:, None] if of_a.ndim else of_a
        alpha = reference.alpha_w4a4(of_a, of_b, a_format.e4m3_max, b_format.e4m3_max)
    scaled = softfloat.from_bits(reference.gemm_epilogue(softfloat.to_bits(y), alpha, None), out_dtype)
    return jnp.where(of.held(rows), scaled, jnp.zeros((), out_dtype))


# ---------------------------------------------------------------- vmap
def _batch(args, dims, **params) -> tuple:
    return map_examples(grouped_matmul_p, args, dims, params)


# ---------------------------------------------------------------- sharding
def _shardings(row: Any, group: Any, col: Any, depth: Any, n: Operands) -> list[list]:
    """Returns the shardings of all operands of these shapes: mesh axes, or names of a sharding rule."""
    a, b = [row, depth], [group, col, depth]
    return [*(part_shardings(a, n.a[2]) if len(n.a) == 3 else [a]), *part_shardings(b, n.b[2]), [None]]


def _partition(
    mesh: Any,
    operands: list[Axes],
    shapes: list[Shape],
    results: list[Axes],
    *,
    a_format: Format | None,
    b_format: Format,
    out_dtype: Any,
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    axes, n = _split(operands, a_format), _split(shapes, a_format)
    (row, of_a), (group, col, of_b) = axes.a[0], axes.b[0]
    (rows, _), (groups, cols, half) = n.a[0], n.b[0]
    claim = claims(mesh)
    g = claim(group, groups)
    # Where a and b do not split K alike, XLA gathers the packed parts of the one that does.
    k = claim(of_a if axes_of(of_a) == axes_of(of_b) else None, 2 * half // unit_of_k(a_format, b_format))
    # As in matmul: an axis that splits M and N stays with N if the result has it there.
    of_col = set(axes_of(col)) & set(axes_of(results[0][1]))
    m = claim(without_axes(row, of_col), rows)
    c = claim(col, cols)
    y, sizes = [m, c], (rows, cols)
    over = (*axes_of(g), *axes_of(k))
    scattered = [scattered_over(mesh, *of, over) for of in zip(results[0], y, sizes, strict=True)]
    y_axes = [(*axes_of(entry), *more) or None for entry, more in zip(y, scattered, strict=True)]

    def on_a_device(local: Body) -> Body:
        return partial(_local_groups, local, mesh, (m, g, k), rows, scattered, a_format, out_dtype)

    return _shardings(m, g, c, k, n), [y_axes], on_a_device


def _local_groups(
    local: Body,
    mesh: Any,
    axes: tuple[Any, Any, Any],
    whole: int,
    scattered: Sequence[tuple[str, ...]],
    a_format: Format | None,
    out_dtype: Any,
    *flat: jax.Array,
) -> tuple[jax.Array, ...]:
    """Multiplies the rows that this device has by the matrices that it has, and sums over devices.

    Args:
      local: the computation of one device.
      mesh: the mesh.
      axes: over which M, G and K are split.
      whole: M.
      scattered: the axes of sums over which each dimension of the result is split.
      a_format: the format of a.
      out_dtype: the dtype of the result.
      *flat: the operands of this device; of the group sizes, all.
    """
    m, g, k = axes
    if not (axes_of(m) or axes_of(g) or axes_of(k)):
        return tuple(local(*flat))
    ops = _split(flat, a_format)
    rows, groups = ops.a[0].shape[0], ops.b[0].shape[0]
    of = rows_of_device(mesh, rows_of(ops.sizes, whole), (m, rows), (g, groups))
    start = of.starts[0]
    dtype = jnp.dtype(jnp.float32) if axes_of(k) else out_dtype
    a = [v if v.ndim == 0 else jnp.roll(v, -start, axis=0) for v in ops.a] if axes_of(g) else ops.a
    y = local(*a, *ops.b, of.sizes, out_dtype=dtype)[0]
    y = jnp.roll(y, start, axis=0) if axes_of(g) else y
    y = sum_over_devices(y, axes_of(g), axes_of(k), scattered)
    return (y if dtype == out_dtype else softfloat.from_bits(softfloat.to_bits(y), out_dtype),)


def _rule(*shapes: Shape, a_format: Format | None, **_: Any) -> tuple[list[list], list[list]]:
    return _shardings("m", "g", "n", "k", _split(shapes, a_format)), [["m", "n"]]


def _known(
    backend: Backend, flat: Sequence[ShapedArray], *, a_format: Format | None, b_format: Format, out_dtype: Any
) -> list[Check]:
    chosen = plan(_split(flat, a_format), a_format, out_dtype, backend.capability, backend.kernel)
    if chosen.reason or backend.refusal(chosen.kernel):
        return []
    return [grouped_check(grouped_matmul_p, chosen.kernel, backend.capability)]


grouped_matmul_p = make_primitive(
    "nvfp4_grouped_matmul",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    sums=True,
    known=_known,
)
