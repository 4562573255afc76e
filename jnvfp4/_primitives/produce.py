"""nvfp4_produce: the bfloat16 result of a norm or a gate, and what quantize makes of it, in one pass over the operands.

Operands: x and weight, or gate and up; then as in _operands.py. The last result is the values; what was not asked for
is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference
from ..spec import BLOCK, NVFP4, QuantSpec
from ._base import Axes, Backend, Body, Shape, axes_of, axes_of_dims, check_explicit, make_primitive, typed
from ._known_answers import describe, quantizer_calls
from ._known_answers import values as known_values
from ._operands import (
    Side,
    Sides,
    batch_size,
    batched,
    batched_operands,
    blocks_in_rows,
    call_ffi,
    check_float,
    check_operand,
    ffi_operands,
    ffi_results,
    keep_blocks,
    max_over_devices,
    names_of_dims,
    shardings,
    split_operands,
    typed_results,
    with_local_streams,
)
from ._self_check import Check


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
        return reference.gated(gate, up)

    def gradient(self, gate: jax.Array, up: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = jax.nn.sigmoid(gate)
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share


Specs = tuple[QuantSpec | None, QuantSpec | None]


def _sides(specs: Specs, given: tuple[bool, bool]) -> Sides:
    """Returns the side of the rows, then that of the columns; ``given`` says whose amax is an operand."""
    # The FFI call takes operands by position, so that columns alone would pass for rows.
    assert specs[0] is not None or specs[1] is None
    sides = zip(specs, (False, True), given, strict=True)
    return [Side(spec, transpose, has_amax) for spec, transpose, has_amax in sides if spec is not None]


def check_sources(op: RmsNorm | SiluMul, a: Any, b: Any) -> None:
    """Refuses what no spec could change; a and b have a shape and a dtype."""
    name, (first, second) = f"{op.name}_quantize", op.operands
    check_operand(name, a, None, NVFP4, False, first)
    check_float(name, second, b.dtype)
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
    sides = _sides(specs, given)
    (a, b), amaxes, _ = split_operands(flat, sides, 2)
    check_sources(op, a, b)
    for side, amax in zip(sides, amaxes, strict=True):
        check_operand(f"{op.name}_quantize", a, amax, side.spec, side.transpose, op.operands[0])
    return typed_results(a, sides) + [typed(a, a.shape, jnp.bfloat16, axes_of_dims(a))] * values


def _local(
    backend: Backend,
    *flat: jax.Array,
    op: RmsNorm | SiluMul,
    specs: Specs,
    given: tuple[bool, bool],
    values: bool,
    row_blocks: tuple[int, int] | None = None,
) -> Sequence[jax.Array]:
    sides, a = _sides(specs, given), flat[0]
    ops, row_blocks = split_operands(flat, sides, 2), row_blocks or blocks_in_rows(a.shape)
    if backend.name == "reference":
        y = lax.optimization_barrier(op.values(*ops.sources))  # else XLA computes it in every use
        operands = zip(sides, ops.amax, ops.stream, strict=True)
        return [v for side, m, s in operands for v in side.quantize_by_reference(y, m, s, row_blocks)] + [y] * values
    results = [*ffi_results(a.shape, sides, 2), (a.shape if values else (0,), jnp.bfloat16)]
    out = call_ffi(
        "nvfp4_produce",
        ffi_operands(ops, 2),
        [*results, _scratch(backend.name, a.shape, op, specs, values)],
        producer=op.name,
        eps=np.float32(op.eps),
        row_spec=(specs[0] or NVFP4).ffi_attrs(),
        col_spec=(specs[1] or NVFP4).ffi_attrs(),
        row_blocks=np.int32(row_blocks[0]),
        col_blocks=np.int32(row_blocks[1]),
    )
    return out[: sum(shape != (0,) for shape, _ in results)]  # without the scratch


def _scratch(
    platform: str, shape: tuple[int, ...], op: RmsNorm | SiluMul, specs: Specs, values: bool
) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of what a kernel must keep between its passes.

    For columns, a CPU keeps the values unless they are a result. For tiles, a GPU keeps the factors of a norm.
    """
    row, col = specs
    if platform == "cpu" and col is not None and not values:
        return shape, jnp.bfloat16
    tiles = col is not None or (row is not None and row.block_rows == BLOCK)
    if platform == "cuda" and tiles and isinstance(op, RmsNorm):
        return shape[:-1], jnp.float32
    return (0,), jnp.uint8


def _batch(args, dims, *, implementation: str | None, **params):
    ops = batched_operands(args, dims, _sides(params["specs"], params["given"]), 2)
    x, second = ops.sources
    if isinstance(params["op"], RmsNorm):
        second = _batched_weight(x, args[1], dims[1], batch_size(args, dims))
    out = produce_p.bind(*ops._replace(sources=(x, second)).flat(), implementation=implementation, **params)
    return out, [0] * len(out)


def _batched_weight(x: jax.Array, weight: jax.Array, dim: int | None, size: int) -> jax.Array:
    """Leaves a weight [K] that all matrices share; otherwise gives each matrix its own, [..., K]."""
    if dim is None and weight.ndim == 1:
        return weight
    # Under two vmaps the weight may have the batch axis of one of them only: it lacks an axis in between.
    weight = batched(size, weight, dim)
    missing = (1,) * (x.ndim - 1 - weight.ndim)
    return jnp.broadcast_to(weight.reshape(size, *missing, *weight.shape[1:]), (*x.shape[:-2], x.shape[-1]))


# ---------------------------------------------------------------- sharding
def _partition(
    mesh: Any,
    operands: list[Axes],
    shapes: list[Shape],
    _results: list[Axes],
    *,
    op: RmsNorm | SiluMul,
    specs: Specs,
    given: tuple[bool, bool],
    values: bool,
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    sides, shape = _sides(specs, given), shapes[0]
    # A norm needs whole rows. Without a spec too, kernels take columns in blocks.
    columns = shape[-1] if isinstance(op, RmsNorm) else BLOCK
    axes = keep_blocks(mesh, operands[0], shape, (1, columns), *(side.units for side in sides))

    def wrap(local: Body) -> Body:
        if sides and not given[0] and sides[0].spec.format.amax_scope == "row" and axes_of(axes[-1]):
            return _with_row_amax(local, axes_of(axes[-1]))
        return with_local_streams(local, mesh, axes, shape, sides, 2)

    operand_axes, result_axes = shardings(axes, shapes, sides, _second_sharding(op, axes, shapes[1]))
    return operand_axes, result_axes + [axes] * values, wrap


def _second_sharding(op: RmsNorm | SiluMul, dims: list, shape: Shape) -> list:
    """Returns the sharding of the second source, of this shape, for that of the first."""
    return dims if isinstance(op, SiluMul) else [*dims[:-2], dims[-1]][-len(shape) :]


def _with_row_amax(local: Body, axes: tuple[str, ...]) -> Body:
    """Computes the values twice for rows that are split over ``axes``: for their amax, then for the bytes."""

    def body(a, b):
        (y,) = local(a, b, specs=(None, None), given=(False, False), values=True)
        amax = max_over_devices(reference.find_amax(y, "row"), axes)
        data, scale, *rest = local(a, b, amax, given=(True, False))
        return (data, scale, amax, *rest)

    return body


def _rule(
    *shapes: Shape, op: RmsNorm | SiluMul, specs: Specs, given: tuple[bool, bool], values: bool
) -> tuple[list[list], list[list]]:
    dims = names_of_dims(shapes[0])
    operands, results = shardings(dims, shapes, _sides(specs, given), _second_sharding(op, dims, shapes[1]))
    return operands, results + [dims] * values


# ---------------------------------------------------------------- the self-check
def _known(_backend: Backend, avals: Sequence[ShapedArray], **params: Any) -> list[Check]:
    return [check_of(avals[0].dtype, avals[1].dtype, **params)]


def check_of(
    dtype: Any, second: Any, *, op: RmsNorm | SiluMul, specs: Specs, given: tuple[bool, bool], values: bool
) -> Check:
    """Returns the check of a producer, for operands of these dtypes."""
    sides = _sides(specs, given)
    params = {"op": op, "specs": specs, "given": given, "values": values}
    calls = partial(quantizer_calls, sides, dtype, params, partial(_second_source, op, second))
    made = " and ".join(filter(None, (describe(sides), "values" * values)))
    types = f"{jnp.dtype(dtype).name} and {jnp.dtype(second).name}"
    return Check(f"{op.name}_quantize {made} of {types}, eps={op.eps}", produce_p, "native", calls)


def _second_source(op: RmsNorm | SiluMul, dtype: Any, x: np.ndarray) -> np.ndarray:
    rows, cols = x.shape
    other = known_values(rows, cols, dtype, seed=1)
    return other[0] if isinstance(op, RmsNorm) else other


produce_p = make_primitive(
    "nvfp4_produce", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule, known=_known
)
