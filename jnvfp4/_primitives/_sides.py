"""Arrays that a primitive quantizes: their orientations (sides), operands and results by role, and the hooks.

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
from .._core.mesh import (
    AnyMesh,
    Axes,
    Shape,
    axes_of,
    axes_of_dims,
    first_rows,
    keep_blocks,
    names_of_dims,
    shard_index,
    typed,
    ways,
)
from ..spec import BLOCK, QuantSpec
from ._base import Backend, Body, Partition, Proposal
from ._batching import batch_size, batched, batched_amax
from ._checks import amax_shapes, check_operand, turn


class Side(NamedTuple):
    """One orientation in which an array x is quantized. All shapes and shardings it takes are those of x.

    The ``row_axes`` axes of x [..., *rows, K] before the last one count as one axis of rows, which has the bytes of
    x [..., M, K]. They stay apart, because XLA cannot merge axes that are sharded: x transposed is [..., K, *rows].
    """

    spec: QuantSpec
    transpose: bool
    has_amax: bool  # the amax is an operand; otherwise it is found, and a result
    row_axes: int = 1
    row_blocks: int | None = None  # how many blocks a row of the whole x has, where a device has a part of x

    @property
    def units(self) -> list[int]:
        """Returns how many rows and how many columns of x must stay on one device."""
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

    def local_stream(self, mesh: AnyMesh, stream: jax.Array, axes: Axes, shape: Sequence[int]) -> jax.Array:
        """Moves the index in ``stream`` from the first block of the whole x to the first of this device's part.

        So random bits depend on an element's place in the whole array, and not on how it is sharded.
        """
        rows = first_rows(mesh, axes[-1 - self.row_axes : -1], shape[-1 - self.row_axes : -1])
        cols = shard_index(mesh, axes[-1]) * jnp.uint32(shape[-1] // ways(mesh, axes[-1]))
        blocks = self.blocks_in_row(shape)
        first_row, first_col = (cols, rows) if self.transpose else (rows, cols)
        # 64 bits in two words: jax has no wider integers unless told to, and an array may have more than 2^32 blocks.
        key, key2, low, high = (stream[(..., *(None,) * rows.ndim, i)] for i in range(4))
        row_high, row_low = softfloat.mul_wide(blocks, first_row)
        low, high = softfloat.add_wide(low, high + row_high, row_low)
        low, high = softfloat.add_wide(low, high, first_col // jnp.uint32(BLOCK))
        return jnp.stack(jnp.broadcast_arrays(key, key2, low, high), axis=-1)

    def blocks_in_row(self, shape: Sequence[int]) -> int:
        """Returns how many blocks a row has that is quantized."""
        if self.row_blocks is not None:
            return self.row_blocks
        return (math.prod(shape[-1 - self.row_axes : -1]) if self.transpose else shape[-1]) // BLOCK


Sides = tuple[Side, ...]  # the static parameters of a primitive that quantizes; all have the same row_axes


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


# ---------------------------------------------------------------- types
def abstract(op: str, sides: Sides, *flat: ShapedArray) -> list[ShapedArray]:
    """Returns the avals of the results, sharded like x on an Explicit mesh."""
    x, amaxes, _ = split_operands(flat, sides)
    for side, amax in zip(sides, amaxes, strict=True):
        check_operand(op, x, amax, side.spec, side.transpose, side.row_axes)
    return [
        typed(x, shape, dtype, axes[: len(shape)])
        for side in sides
        for (shape, dtype), axes in zip(side.results(x.shape), side.sharding(axes_of_dims(x)), strict=False)
    ]


# ---------------------------------------------------------------- on one device
def no_kernel(spec: QuantSpec, platform: str) -> str:
    """Says why a platform that has kernels has none for a spec, as CudaSpecs of ffi/core/spec.h; empty if it has."""
    searches = platform == "cuda" and spec.select == "search"
    return 'no kernel for select="search" on GPUs' if searches else ""


def missing(sides: Sides, platform: str) -> str:
    """Says why a platform that has kernels has none for these sides; empty if it has."""
    return next((reason for side in sides if (reason := no_kernel(side.spec, platform))), "")


def quantize(
    call_kernel: Callable[[Operands, Sides], list[jax.Array]], sides: Sides, backend: Backend, *flat: jax.Array
) -> list[jax.Array]:
    """Quantizes x [..., M, K] of which M is one axis for the kernel, and several in ``flat`` and the results."""
    compute = _by_reference if backend.name == "reference" else call_kernel
    ops, row_axes = split_operands(flat, sides), sides[0].row_axes
    x = ops.x
    if row_axes == 1:
        return compute(ops, sides)
    # The local streams have an axis more for each axis of rows whose indices are not neighbours in the whole x.
    apart = max((s.ndim for s in ops.stream if s is not None), default=1) - 1
    lead = x.shape[: max(apart, x.ndim - 1 - row_axes)]
    merged = x.reshape(*lead, math.prod(x.shape[len(lead) : -1]), x.shape[-1])
    flat_sides = tuple(side._replace(row_axes=1, row_blocks=side.blocks_in_row(x.shape)) for side in sides)
    amax = tuple(_merged_amax(a, side, merged.shape) for a, side in zip(ops.amax, flat_sides, strict=True))
    parts = iter(compute(Operands(merged, amax, ops.stream), flat_sides))
    first = x.ndim - 1 - row_axes
    return [
        # [..., rows apart, K, other rows] -> [..., K, *rows]
        (jnp.moveaxis(part, len(lead), first) if side.transpose and len(lead) > first else part).reshape(shape)
        for side in sides
        for (shape, _), part in zip(side.results(x.shape), parts, strict=False)
    ]


def _by_reference(ops: Operands, sides: Sides) -> list[jax.Array]:
    results = []
    for side, amax, stream in zip(sides, ops.amax, ops.stream, strict=True):
        row_blocks = side.blocks_in_row(ops.x.shape)
        data, scale, found = reference.quantize(ops.x, side.spec, amax, side.transpose, stream, row_blocks)
        results += [data, lax.bitcast_convert_type(scale, jnp.uint8), *([] if side.has_amax else [found])]
    return results


def _merged_amax(amax: Any, side: Side, shape: Shape) -> Any:
    if amax is None or not amax.ndim:
        return amax
    wanted = amax_shapes(shape, side.spec, side.transpose)[-1]
    if side.spec.format.amax_scope == "tensor":
        amax = amax.reshape(*amax.shape, *(1,) * (len(wanted) - amax.ndim))
        return jnp.broadcast_to(amax, wanted)
    return amax.reshape(wanted)


_ABSENT: tuple[tuple[Shape, Any], ...] = (((0,), jnp.uint8), ((0,), jnp.uint8), ((0,), jnp.float32))


def call_ffi(target: str, ops: Operands, sides: Sides, **attrs: Any) -> list[jax.Array]:
    """Calls an FFI target. The number of its operands and results is fixed: one that is absent is empty."""
    amax = (jnp.zeros((0,), jnp.float32) if v is None else v for v in ops.amax)
    stream = (jnp.zeros((0, 4), jnp.uint32) if v is None else v for v in ops.stream)
    parts = [side.results(ops.x.shape) for side in sides]
    results = [jax.ShapeDtypeStruct(*part) for of_side in parts for part in (*of_side, *_ABSENT[len(of_side) :])]
    out = jax.ffi.ffi_call(target, results)(ops.x, *amax, *stream, **attrs)
    return [value for value in out if value.shape != (0,)]


# ---------------------------------------------------------------- vmap
def batch(sides: Sides, bind: Callable, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list, list]:
    """Moves the batch axis of all operands to the front."""
    ops, at = split_operands(args, sides), split_operands(dims, sides)
    size = batch_size(args, dims)
    x = batched(size, ops.x, at.x)
    pairs = zip(ops.amax, at.amax, strict=True)
    lead = x.shape[: -1 - sides[0].row_axes]
    amax = tuple(None if v is None else batched_amax(size, v, d, lead) for v, d in pairs)
    # With a stream for each example, every one counts from the start of an array of its own.
    streams = zip(ops.stream, at.stream, strict=True)
    stream = tuple(None if v is None else batched(size, v, d) for v, d in streams)
    out = bind(sides, *Operands(x, amax, stream).flat())
    return out, [0] * len(out)


# ---------------------------------------------------------------- sharding
def partition(sides: Sides, proposed: Proposal) -> Partition:
    """Follows the sharding of x, but for axes that would split a block; it needs no collective."""
    mesh, (axes, *_), (shape, *_), _ = proposed
    axes = keep_blocks(mesh, axes, shape, *(side.units for side in sides))
    return *_shardings(axes, proposed.shapes, sides), lambda local: _with_local_streams(local, mesh, axes, shape, sides)


def rule(sides: Sides, *shapes: Shape) -> tuple[list[list], list[list]]:
    """Names the dimensions of all operands and results."""
    return _shardings(names_of_dims(shapes[0]), shapes, sides)


def _shardings(dims: Sequence[Any], shapes: Sequence[Shape], sides: Sides) -> tuple[list[list], list[list]]:
    """Returns the shardings of all operands and results for that of x."""
    ops, parts = split_operands(shapes, sides), [side.sharding(dims) for side in sides]
    amax = tuple(None if s is None else p[2][: len(s)] for s, p in zip(ops.amax, parts, strict=True))
    stream = tuple(None if s is None else [*dims[: -1 - sides[0].row_axes], None] for s in ops.stream)
    results = [v for side, p in zip(sides, parts, strict=True) for v in (p[:2] if side.has_amax else p)]
    return Operands(list(dims), amax, stream).flat(), results


def _with_local_streams(local: Body, mesh: AnyMesh, axes: Axes, shape: Shape, sides: Sides) -> Body:
    """Gives ``local`` the random bits of the device's place in the whole x, of this sharding and shape."""
    stochastic, row_axes = any(side.spec.rounding == "stochastic" for side in sides), sides[0].row_axes
    if not stochastic or not any(axes_of(entry) for entry in axes[-1 - row_axes :]):
        return local

    def body(*flat):
        ops = split_operands(flat, sides)
        streams = zip(sides, ops.stream, strict=True)
        moved = tuple(None if s is None else side.local_stream(mesh, s, axes, shape) for side, s in streams)
        placed = tuple(side._replace(row_blocks=side.blocks_in_row(shape)) for side in sides)
        return local(*ops._replace(stream=moved).flat(), params=placed)

    return body


def find_row_amax(x: jax.Array, transpose: bool, row_axes: int = 1) -> jax.Array:
    """Finds the amax of each row of x, or of x transposed: the largest magnitude over the axes that count as rows."""
    if not transpose:
        return reference.find_amax(x, "row")
    amax = jnp.moveaxis(x, -1, x.ndim - 1 - row_axes)
    for _ in range(row_axes):
        amax = reference.find_amax(amax, "row")
    return amax
