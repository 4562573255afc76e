"""What the primitives share: an array to be quantized, and the parts of a tensor (data, scale, amax).

Primitives that quantize have flat lists of operands: x, then the amax of every side that is given one, then
the stream of every side that rounds stochastically. Their results: data, scale and, unless given, amax of every side.

A stream (uint32 [..., 4], one for each matrix) says where the random bits of stochastic rounding come from: two
words of key, and the index of the matrix's first block in the whole array, low word first.

The scale is uint8 there, the bits of float8_e4m3fn: a jax.checkpoint policy may save a primitive's results, and JAX
rounds the floats that it saves by IEEE rules, where E4M3's 256 and above are infinite.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from .. import reference
from .._core import softfloat
from ..spec import BLOCK, WINDOW, Format, QuantSpec
from ._base import Axes, Body, Shape, axes_if_divisible, axes_of, axes_of_dims, check_explicit, typed, ways

FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


# ---------------------------------------------------------------- checks
def check_float(op: str, name: str, dtype: Any) -> None:
    """Refuses any dtype but the three that kernels read and write."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")


def check_array(op: str, x: Any) -> None:
    """Refuses what is no matrix of floats, or more of them."""
    check_float(op, "x", x.dtype)
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have rank 2 or more, [..., M, K], got x.shape={x.shape}")


def check_operand(
    op: str,
    x: ShapedArray,
    amax: ShapedArray | None,
    spec: QuantSpec,
    transpose: bool,
    row_axes: int = 1,
) -> None:
    """Refuses an array, or an amax for it, that ``spec`` cannot quantize in this orientation."""
    check_array(op, x)
    *_, rows, cols = turn(x.shape, transpose)
    if cols % spec.unit:
        which = "M (the quantized axis, since it is transposed)" if transpose else "K"
        why = ' for amax_scope="window64"' if spec.unit == WINDOW else ""
        raise ValueError(
            f"{op}: {which} must be a multiple of {spec.unit}{why}, got x.shape={x.shape}; "
            f"pad it to {-(-cols // spec.unit) * spec.unit} with zeros"
        )
    if spec.block_rows == BLOCK and rows % BLOCK:
        raise ValueError(
            f"{op}: block_rows={BLOCK} needs both M and K to be multiples of {BLOCK}, got x.shape={x.shape}"
        )
    if amax is not None:
        accepted = amax_shapes(x.shape, spec, transpose, row_axes)
        if amax.shape not in accepted:
            raise ValueError(
                f"{op}: amax must have shape {' or '.join(map(str, accepted))} for "
                f'amax_scope="{spec.format.amax_scope}" and x.shape={x.shape}, got {amax.shape}'
            )
        if amax.dtype != jnp.float32:
            raise TypeError(f"{op}: amax must be float32, got {amax.dtype}")
    rows_axis, blocks_axis = turn([x.ndim - 2, x.ndim - 1], transpose)
    check_explicit(op, x, blocks_axis, spec.unit)
    check_explicit(op, x, rows_axis, spec.block_rows)


def amax_shapes(shape: Sequence[int], spec: QuantSpec, transpose: bool, row_axes: int = 1) -> list[Shape]:
    """Returns the shapes that an amax of x may have; there is one for scopes whose amax a quantizer can find."""
    if spec.format.amax_scope == "tensor":
        return list(dict.fromkeys([(), tuple(shape[: -1 - row_axes])]))
    *rows, cols = turn(shape, transpose, row_axes)
    if spec.format.amax_scope == "window64":
        return [(*rows, cols // WINDOW)]
    return [tuple(rows[: len(shape) - row_axes] if transpose else rows)]


def check_parts(op: str, name: str, parts: tuple, fmt: Format) -> None:
    """Refuses parts that are no NVFP4 tensor: shapes and dtypes that do not belong together."""
    data, scale, amax = parts
    for field, value, dtype in (
        ("data", data, jnp.uint8),
        ("scale", scale, jnp.float8_e4m3fn),
        ("amax", amax, jnp.float32),
    ):
        if value.dtype != dtype:
            raise TypeError(f"{op}: {name}.{field} must be {jnp.dtype(dtype).name}, got {value.dtype}")
    if len(data.shape) < 2:
        raise ValueError(f"{op}: {name} must have rank 2 or more, [..., M, K], got data {data.shape}")
    *lead, rows, half = data.shape
    if half % 8:
        raise ValueError(f"{op}: K of {name} must be a multiple of {BLOCK}, got K={2 * half}")
    if scale.shape != (*lead, rows, half // 8):
        raise ValueError(
            f"{op}: {name}.scale must have shape {(*lead, rows, half // 8)} for data {data.shape}, got {scale.shape}"
        )
    accepted = [(), tuple(lead), (*lead, rows)]
    if fmt.amax_scope == "row":
        accepted = accepted[-1:]
    if fmt.amax_scope == "window64":
        if half % (WINDOW // 2):
            raise ValueError(f'{op}: K of {name} must be a multiple of {WINDOW} for "window64", got K={2 * half}')
        accepted = [(*lead, rows, 2 * half // WINDOW)]
    if amax.shape not in accepted:
        raise ValueError(
            f"{op}: {name}.amax must have shape {' or '.join(map(str, dict.fromkeys(accepted)))} for data "
            f'{data.shape} and amax_scope="{fmt.amax_scope}", got {amax.shape}{_hint_of_vmap(op, amax.shape, lead)}'
        )


def _hint_of_vmap(op: str, amax: Shape, lead: Sequence[int]) -> str:
    """Says what to do with the amax that ``jax.vmap`` has found: one for each example, and not for each matrix."""
    axes = len(amax)
    if not 0 < axes < len(lead) or tuple(amax) != tuple(lead[:axes]):
        return ""
    which = "first axis" if axes == 1 else f"first {axes} axes"
    over = "this axis" if axes == 1 else f"these {axes}"
    return f"; it has one for each index of the {which}, so call {op} in jax.vmap over {over}"


# ---------------------------------------------------------------- what is quantized
def turn(items: Sequence[Any], transpose: bool, row_axes: int = 1) -> list:
    """Moves the last item before ``row_axes`` others if ``transpose``: of a shape or sharding of x."""
    items = list(items)
    first = len(items) - 1 - row_axes
    return [*items[:first], items[-1], *items[first:-1]] if transpose else items


class Side(NamedTuple):
    """One orientation in which an array x is quantized. All shapes and shardings it takes are those of x.

    The ``row_axes`` axes of x [..., *rows, K] before the last one count as one axis of rows, which has the bytes of
    x [..., M, K]. They stay apart, because XLA cannot merge axes that are sharded: x transposed is [..., K, *rows].
    """

    spec: QuantSpec
    transpose: bool
    has_amax: bool  # the amax is an operand; otherwise it is found, and a result
    row_axes: int = 1

    @property
    def units(self) -> list[int]:
        """How many rows and how many columns of x must stay on one device."""
        return turn([self.spec.block_rows, self.spec.unit], self.transpose)

    def results(self, shape: Sequence[int]) -> list[tuple[Shape, Any]]:
        """Returns shape and dtype of data, scale and, unless it is an operand, amax."""
        *lead, cols = turn(shape, self.transpose, self.row_axes)
        data, scale = ((*lead, cols // 2), jnp.uint8), ((*lead, cols // BLOCK), jnp.uint8)
        amax = amax_shapes(shape, self.spec, self.transpose, self.row_axes)[0], jnp.float32
        return [data, scale] if self.has_amax else [data, scale, amax]

    def sharding(self, dims: Sequence[Any]) -> list[list]:
        """Returns the shardings of data, scale and amax for that of x: mesh axes, or the names of a sharding rule."""
        turned = turn(dims, self.transpose, self.row_axes)
        windows = self.spec.format.amax_scope == "window64"
        return [turned, turned, turned if windows else turned[: len(dims) - self._contracted_axes]]

    @property
    def _contracted_axes(self) -> int:
        """Returns how many axes count as the one along which blocks run."""
        return self.row_axes if self.transpose else 1

    def contracted(self, dims: Sequence[Any]) -> list:
        """Returns the items of the axes along which blocks run."""
        return turn(dims, self.transpose, self.row_axes)[-self._contracted_axes :]

    def local_stream(self, mesh: Any, stream: jax.Array, axes: Axes, shape: Sequence[int]) -> jax.Array:
        """Moves the index in ``stream`` from the first block of the whole x to the first of this device's part.

        So random bits depend on an element's place in the whole array, and not on how it is sharded.
        """
        rows = _first_rows(mesh, axes[-1 - self.row_axes : -1], shape[-1 - self.row_axes : -1])
        cols = shard_index(mesh, axes[-1]) * jnp.uint32(shape[-1] // ways(mesh, axes[-1]))
        blocks = blocks_in_rows(shape, self.row_axes)[self.transpose]
        first_row, first_col = (cols, rows) if self.transpose else (rows, cols)
        # 64 bits in two words: jax has no wider integers unless told to, and an array may have more than 2^32 blocks.
        key, key2, low, high = (stream[(..., *(None,) * rows.ndim, i)] for i in range(4))
        row_high, row_low = softfloat.mul_wide(blocks, first_row)
        low, high = softfloat.add_wide(low, high + row_high, row_low)
        low, high = softfloat.add_wide(low, high, first_col // jnp.uint32(BLOCK))
        return jnp.stack(jnp.broadcast_arrays(key, key2, low, high), axis=-1)

    def quantize_by_reference(self, x: jax.Array, amax: Any, stream: Any, row_blocks: Any) -> list[jax.Array]:
        """Returns the results of this side; ``row_blocks`` is ``blocks_in_rows`` of the whole array."""
        data, scale, amax = reference.quantize(x, self.spec, amax, self.transpose, stream, row_blocks[self.transpose])
        parts = [data, lax.bitcast_convert_type(scale, jnp.uint8)]
        return parts if self.has_amax else [*parts, amax]


Sides = Sequence[Side]


def _row_axes(sides: Sides) -> int:
    """Returns ``row_axes``, of which all sides have the same."""
    return sides[0].row_axes


class Operands(NamedTuple):
    """Holds a flat operand list by role: arrays, or their shapes, shardings or batch dimensions."""

    x: Any
    amax: tuple  # one for each side, None where it is not given
    stream: tuple  # one for each side, None where it rounds to nearest

    def flat(self) -> list:
        """Returns the operands in the order in which the primitive takes them."""
        return [v for v in (self.x, *self.amax, *self.stream) if v is not None]


def split_operands(flat: Sequence[Any], sides: Sides) -> Operands:
    """Reverses ``Operands.flat``."""
    rest = list(flat[1:])
    amax = tuple(rest.pop(0) if side.has_amax else None for side in sides)
    stream = tuple(rest.pop(0) if side.spec.rounding == "stochastic" else None for side in sides)
    return Operands(flat[0], amax, stream)


def typed_results(x: ShapedArray, sides: Sides) -> list[ShapedArray]:
    """Returns the avals of the results, sharded like x on an Explicit mesh."""
    return [
        typed(x, shape, dtype, axes[: len(shape)])
        for side in sides
        for (shape, dtype), axes in zip(side.results(x.shape), side.sharding(axes_of_dims(x)), strict=False)
    ]


def blocks_in_rows(shape: Sequence[int], row_axes: int = 1) -> tuple[int, int]:
    """Returns how many blocks a row of x has, and a row of x transposed."""
    return shape[-1] // BLOCK, math.prod(shape[-1 - row_axes : -1]) // BLOCK


def with_merged_rows(compute: Callable, flat: Sequence[jax.Array], sides: Sides, row_blocks: Any) -> list[jax.Array]:
    """Calls ``compute(operands, sides, row_blocks)`` with x [..., M, K], and splits M in what it returns."""
    ops, row_axes = split_operands(flat, sides), _row_axes(sides)
    x = ops.x
    row_blocks = row_blocks or blocks_in_rows(x.shape, row_axes)
    if row_axes == 1:
        return list(compute(ops, sides, row_blocks))
    # The local streams have an axis more for each axis of rows whose indices are not neighbours in the whole x.
    apart = max((s.ndim for s in ops.stream if s is not None), default=1) - 1
    lead = x.shape[: max(apart, x.ndim - 1 - row_axes)]
    merged = x.reshape(*lead, math.prod(x.shape[len(lead) : -1]), x.shape[-1])
    flat_sides = [side._replace(row_axes=1) for side in sides]
    amax = tuple(_merged_amax(a, side, merged.shape) for a, side in zip(ops.amax, flat_sides, strict=True))
    parts = iter(compute(Operands(merged, amax, ops.stream), flat_sides, row_blocks))
    first = x.ndim - 1 - row_axes
    return [
        # [..., rows apart, K, other rows] -> [..., K, *rows]
        (jnp.moveaxis(part, len(lead), first) if side.transpose and len(lead) > first else part).reshape(shape)
        for side in sides
        for (shape, _), part in zip(side.results(x.shape), parts, strict=False)
    ]


def _merged_amax(amax: Any, side: Side, shape: Shape) -> Any:
    if amax is None or not amax.ndim:
        return amax
    wanted = amax_shapes(shape, side.spec, side.transpose)[-1]
    if side.spec.format.amax_scope == "tensor":
        amax = amax.reshape(*amax.shape, *(1,) * (len(wanted) - amax.ndim))
        return jnp.broadcast_to(amax, wanted)
    return amax.reshape(wanted)


# ---------------------------------------------------------------- FFI calls
_ABSENT: list[tuple[Shape, Any]] = [((0,), jnp.uint8), ((0,), jnp.uint8), ((0,), jnp.float32)]


def ffi_operands(ops: Operands, sides: int = 1) -> list[jax.Array]:
    """Returns the operands of an FFI call for ``sides`` sides, whose number is fixed: an absent one is empty."""
    absent = (None,) * (sides - len(ops.amax))
    amax = (jnp.zeros((0,), jnp.float32) if v is None else v for v in ops.amax + absent)
    stream = (jnp.zeros((0, 4), jnp.uint32) if v is None else v for v in ops.stream + absent)
    return [ops.x, *amax, *stream]


def ffi_results(shape: Sequence[int], sides: Sides, count: int = 1) -> list[tuple[Shape, Any]]:
    """Returns shape and dtype of the results of an FFI call for ``count`` sides: an absent one is empty."""
    results = []
    for side in sides:
        parts = side.results(shape)
        results += [*parts, *_ABSENT[len(parts) :]]
    return results + _ABSENT * (count - len(sides))


def call_ffi(target: str, operands: Sequence[jax.Array], results: Sequence[tuple], **attrs: Any) -> list[jax.Array]:
    """Calls an FFI target and leaves out the results that are empty."""
    out = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*r) for r in results])(*operands, **attrs)
    return [value for value in out if value.shape != (0,)]


# ---------------------------------------------------------------- vmap
def batched(size: int, operand: jax.Array, dim: int | None) -> jax.Array:
    """Moves the batch axis to the front, or repeats an operand that has none."""
    return jnp.broadcast_to(operand, (size, *operand.shape)) if dim is None else jnp.moveaxis(operand, dim, 0)


def batched_amax(size: int, amax: jax.Array, dim: int | None, lead: Shape) -> jax.Array:
    """Moves the batch axis of an amax to the front; one number for all examples stays that.

    One number for each example becomes one for each matrix, of shape ``lead``, the leading axes of the batched array.
    """
    if dim is None and amax.ndim == 0:
        return amax
    amax = batched(size, amax, dim)
    return jnp.broadcast_to(amax.reshape(size, *(1,) * (len(lead) - 1)), lead) if amax.ndim == 1 else amax


def batched_parts(size: int, parts: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """Moves the batch axis of data, scale and amax to the front."""
    data, scale = (batched(size, p, d) for p, d in zip(parts[:2], dims[:2], strict=True))
    return [data, scale, batched_amax(size, parts[2], dims[2], data.shape[:-2])]


def batch_size(args: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    """Returns the number of examples of a vmap."""
    return next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)


def batched_operands(args: Sequence[Any], dims: Sequence[Any], sides: Sides) -> Operands:
    """Moves the batch axis of all operands to the front."""
    ops, at = split_operands(args, sides), split_operands(dims, sides)
    size = batch_size(args, dims)
    x = batched(size, ops.x, at.x)
    pairs = zip(ops.amax, at.amax, strict=True)
    lead = x.shape[: -1 - _row_axes(sides)]
    amax = tuple(None if v is None else batched_amax(size, v, d, lead) for v, d in pairs)
    # With a stream for each example, every one counts from the start of an array of its own.
    streams = zip(ops.stream, at.stream, strict=True)
    return Operands(x, amax, tuple(None if v is None else batched(size, v, d) for v, d in streams))


# ---------------------------------------------------------------- sharding
def names_of_dims(shape: Sequence[int]) -> list[str]:
    """Names the leading dimensions of x, its rows and its columns for a sharding rule."""
    return [*(f"b{i}" for i in range(len(shape) - 2)), "r", "c"]


def keep_blocks(mesh: Any, axes: Axes, shape: Sequence[int], *units: Sequence[int]) -> Axes:
    """Drops the axes that would split a block; ``units`` are pairs of what ``Side.units`` says."""
    least = [1] * (len(shape) - 2) + [max(n) for n in zip((1, 1), *units, strict=True)]
    return [axes_if_divisible(mesh, *entry) for entry in zip(axes, shape, least, strict=True)]


def shardings(dims: Sequence[Any], shapes: Sequence[Shape], sides: Sides) -> tuple[list[list], list[list]]:
    """Returns the shardings of all operands and results for that of x."""
    ops, parts = split_operands(shapes, sides), [side.sharding(dims) for side in sides]
    amax = tuple(None if s is None else p[2][: len(s)] for s, p in zip(ops.amax, parts, strict=True))
    stream = tuple(None if s is None else [*dims[: -1 - _row_axes(sides)], None] for s in ops.stream)
    results = [v for side, p in zip(sides, parts, strict=True) for v in (p[:2] if side.has_amax else p)]
    return Operands(list(dims), amax, stream).flat(), results


def part_shardings(dims: Sequence[Any], amax: Shape) -> list[list]:
    """Returns the shardings of data, scale and an amax of this shape for that of the values."""
    return [list(dims), list(dims), list(dims[: len(amax)])]


def shard_index(mesh: Any, entry: Any) -> jax.Array:
    """Returns which part of a dimension sharded over ``entry`` this device has."""
    index = jnp.uint32(0)
    for axis in axes_of(entry):
        index = index * jnp.uint32(mesh.shape[axis]) + lax.axis_index(axis).astype(jnp.uint32)
    return index


def _first_rows(mesh: Any, axes: Axes, sizes: Sequence[int]) -> jax.Array:
    """Returns where this device's part of the merged rows begins: uint32, a number or one for each index of some axes.

    The indices of a part follow each other from the last axis that is split on. If this device has several indices of
    the axes before it, each of them begins anew.
    """
    local = [size // ways(mesh, entry) for entry, size in zip(axes, sizes, strict=True)]
    last = max((i for i, entry in enumerate(axes) if ways(mesh, entry) > 1), default=0)
    apart = last if math.prod(local[:last]) > 1 else 0
    first = jnp.zeros(local[:apart], jnp.uint32)
    for i, entry in enumerate(axes):
        index = shard_index(mesh, entry) * jnp.uint32(local[i])
        if i < apart:
            index = index + jnp.arange(local[i], dtype=jnp.uint32).reshape(-1, *(1,) * (apart - 1 - i))
        first = first + index * jnp.uint32(math.prod(sizes[i + 1 :]))
    return first


def with_local_streams(local: Body, mesh: Any, axes: Axes, shape: Shape, sides: Sides) -> Body:
    """Gives ``local`` the random bits of the device's place in the whole x, of this sharding and shape."""
    stochastic, row_axes = any(side.spec.rounding == "stochastic" for side in sides), _row_axes(sides)
    if not stochastic or not any(axes_of(entry) for entry in axes[-1 - row_axes :]):
        return local

    def body(*flat):
        ops = split_operands(flat, sides)
        streams = zip(sides, ops.stream, strict=True)
        moved = tuple(None if s is None else side.local_stream(mesh, s, axes, shape) for side, s in streams)
        return local(*ops._replace(stream=moved).flat(), row_blocks=blocks_in_rows(shape, row_axes))

    return body


def find_row_amax(x: jax.Array, transpose: bool, row_axes: int = 1) -> jax.Array:
    """Finds the amax of each row of x, or of x transposed: the largest magnitude over the axes that count as rows."""
    if not transpose:
        return reference.find_amax(x, "row")
    amax = jnp.moveaxis(x, -1, x.ndim - 1 - row_axes)
    for _ in range(row_axes):
        amax = reference.find_amax(amax, "row")
    return amax


def max_over_devices(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Takes the largest amax over mesh axes.

    It compares bits: they order like magnitudes, NaN is the largest, and no subnormal number is flushed.
    """
    return softfloat.from_bits(lax.pmax(softfloat.to_bits(amax), axes)) if axes else amax
