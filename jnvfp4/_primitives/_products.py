"""Shared by the primitives of products: parameters, operands by role, checks, and shardings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding

from .._core.mesh import Axes, Entry, axes_if_divisible, axes_of, check_explicit, part_shardings, without_axes
from ..spec import Format
from ._base import Proposal
from ._checks import check_parts

DENSE_DTYPES = (jnp.bfloat16, jnp.float16)


class Operands(NamedTuple):
    """Holds a flat operand list by role: arrays, or their shapes, shardings or batch dimensions."""

    a: tuple  # data, scale and amax, or one 16-bit array
    b: tuple  # data, scale and amax
    rest: tuple


@dataclass(frozen=True)
class ProductParams:
    """Holds the static parameters of a product."""

    a: Format | None  # None: one 16-bit array
    b: Format
    out_dtype: np.dtype
    accumulation: str = "fast"

    @property
    def pinned(self) -> bool:
        """Says whether sums along K must have the order of docs/numerics.md."""
        return self.accumulation == "pinned"

    def split(self, flat: Sequence[Any]) -> Operands:
        """Returns the operands by role."""
        flat, na = tuple(flat), 1 if self.a is None else 3
        return Operands(flat[:na], flat[na : na + 3], flat[na + 3 :])

    @property
    def unit(self) -> int:
        """Returns the number that the part of K on a device must be a multiple of."""
        return max(fmt.unit for fmt in (self.a, self.b) if fmt is not None)


# ---------------------------------------------------------------- what products refuse
def check_operands(op: str, params: ProductParams, a: tuple, b: tuple) -> None:
    """Raises unless kernels read both operands, and both are rotated or neither."""
    if params.a is not None:
        check_parts(op, "a", a, params.a)
    elif a[0].dtype not in DENSE_DTYPES:
        remedy = "cast it to bfloat16, or quantize it"
        raise TypeError(f"{op}: an unquantized a must be bfloat16 or float16, got {a[0].dtype}; {remedy}")
    check_parts(op, "b", b, params.b)
    a_rht = params.a is not None and params.a.rht
    if a_rht != params.b.rht:
        raise ValueError(
            f"{op}: a and b must both be rotated (format.rht) or neither, got a.rht={a_rht}, b.rht={params.b.rht}"
        )


def check_depth(op: str, params: ProductParams, a: ShapedArray, b: ShapedArray) -> None:
    """Refuses an a and a b of different K, and on an Explicit mesh a K that is split within a block."""
    per_byte = 1 if params.a is None else 2  # elements of a for each that it stores
    depths = per_byte * a.shape[-1], 2 * b.shape[-1]
    if depths[0] != depths[1]:
        raise ValueError(f"{op}: a and b must have the same K, got K={depths[0]} and K={depths[1]}")
    check_explicit(op, a, a.ndim - 1, params.unit // per_byte)
    check_explicit(op, b, b.ndim - 1, params.unit // 2)


def check_axes_once(op: str, axes: Axes) -> None:
    """Refuses a result whose dimensions would be sharded over a common mesh axis."""
    used = [axis for entry in axes for axis in axes_of(entry)]
    if len(used) != len(set(used)):
        raise ValueError(
            f"{op}: M of a and N of b are sharded over a common mesh axis (result would be {axes}); reshard one of them"
        )


# ---------------------------------------------------------------- products in high precision
def product(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[Sequence[int], Sequence[int]],
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Multiplies two arrays over these axes. -> float32"""
    common = a.dtype if a.dtype == b.dtype else jnp.float32  # also where jax.numpy_dtype_promotion is strict
    return lax.dot_general(
        a.astype(common),
        b.astype(common),
        (contracted, ((), ())),
        precision=lax.Precision.HIGHEST,  # float32 operands stay float32, never TF32
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


# ---------------------------------------------------------------- sharding
def operand_shardings(a: Axes, b: Axes, shapes: Operands) -> list[list]:
    """Returns the shardings of the operands a and b for those of their values: mesh axes, or names of a rule."""
    parts_of_a = part_shardings(a, shapes.a[2]) if len(shapes.a) == 3 else [list(a)]
    return [*parts_of_a, *part_shardings(b, shapes.b[2])]


class Result(NamedTuple):
    """Says how a product is split over devices, and how it is summed of what they compute."""

    axes: Axes
    over: tuple[str, ...]  # the mesh axes of the sum
    apart: tuple[str, ...]  # those over which each row is zero on all devices but one
    scattered: list[tuple[str, ...]]  # those that split each dimension of the sum

    def sum(self, y: jax.Array) -> jax.Array:
        """Sums over devices: by a reduce-scatter over the axes that the result should have, half of an all-reduce."""
        left = tuple(axis for axis in self.over if not any(axis in axes for axes in self.scattered))
        for dim, axes in (*enumerate(self.scattered), (None, left)):
            for exact, same in itertools.groupby(axes, self.apart.__contains__):
                y = (_sum_bits if exact else _sum)(y, tuple(same), dim)
        return y


def _sum(y: jax.Array, axes: tuple[str, ...], dim: int | None) -> jax.Array:
    return lax.psum(y, axes) if dim is None else lax.psum_scatter(y, axes, scatter_dimension=dim, tiled=True)


def _sum_bits(y: jax.Array, axes: tuple[str, ...], dim: int | None) -> jax.Array:
    """Sums numbers of which all but one are zero: the sum of their bits is exact, and keeps -0."""
    # XLA may widen sums of uint16, which doubles the bytes between devices: two values are one word.
    pairs = y.dtype.itemsize == 2 and y.shape[-1] % 2 == 0 and dim != y.ndim - 1
    v = y.reshape(*y.shape[:-1], -1, 2) if pairs else y
    words = lax.bitcast_convert_type(v, jnp.uint32 if pairs or y.dtype.itemsize == 4 else jnp.uint16)
    total = lax.bitcast_convert_type(_sum(words, axes, dim), y.dtype)
    return total.reshape(*total.shape[:-2], -1) if pairs else total


class ProductAxes:
    """Decides over which mesh axes the dimensions of a product are split: an axis is of the first that claims it."""

    def __init__(self, proposed: Proposal) -> None:
        self._mesh, self._wanted = proposed.mesh, proposed.results[0]
        self._taken: set[str] = set()

    def claim(self, entry: Entry, size: int) -> Entry:
        """Takes the axes that no other dimension has taken, if they divide ``size``."""
        entry = axes_if_divisible(self._mesh, without_axes(entry, self._taken), size)
        self._taken.update(axes_of(entry))
        return entry

    def contracted(self, of_a: Entry, of_b: Entry, size: int) -> Entry:
        """Claims for K; where a and b do not split it alike, XLA gathers the packed parts of the one that does."""
        return self.claim(of_a if axes_of(of_a) == axes_of(of_b) else None, size)

    def rows_then_column(self, rows: Axes, row_sizes: Sequence[int], col: Entry, cols: int) -> Axes:
        """Claims for the dimensions of the result, the last of which is N.

        An axis that splits M and N stays with N if the result has it there: the packed rows are gathered, and not b.
        """
        of_col = set(axes_of(col)) & set(axes_of(self._wanted[-1]))
        claimed = [self.claim(without_axes(e, of_col), size) for e, size in zip(rows, row_sizes, strict=True)]
        return [*claimed, self.claim(col, cols)]

    def result(self, split: Axes, sizes: Sequence[int], summed: tuple[str, ...], apart: tuple[str, ...] = ()) -> Result:
        """Returns the result whose dimensions devices split so before they sum over ``apart`` and ``summed``."""
        over = (*apart, *summed)
        scattered = [self._scattered(*of, over) for of in zip(self._wanted, split, sizes, strict=True)]
        axes = [(*axes_of(entry), *more) or None for entry, more in zip(split, scattered, strict=True)]
        return Result(axes, over, apart, scattered)

    def _scattered(self, wanted: Entry, entry: Entry, size: int, over: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes of a sum that the result should have for a dimension, if they can split what is left."""
        more = tuple(axis for axis in axes_of(wanted) if axis in over)
        return more if axes_if_divisible(self._mesh, (*axes_of(entry), *more), size) else ()
