"""The vocabulary of meshes: how an array and its dimensions are sharded, and where on a mesh a device is."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from . import softfloat

Shape = tuple[int, ...]
Entry = str | tuple[str, ...] | None  # of a PartitionSpec, for one dimension; UNCONSTRAINED has no public type
Axes = list  # how an array is sharded: an Entry for each dimension
Placement = NamedSharding | PartitionSpec
AnyMesh = Mesh | AbstractMesh
T = TypeVar("T")


# ---------------------------------------------------------------- one dimension
def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes of one dimension of a sharding."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def ways(mesh: AnyMesh, entry: Entry) -> int:
    """Returns into how many parts a dimension sharded over ``entry`` is split."""
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def without_axes(entry: Any, removed: AbstractSet[str]) -> Any:
    """Returns the sharding of one dimension without some mesh axes."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    left = tuple(axis for axis in axes_of(entry) if axis not in removed)
    return left[0] if len(left) == 1 else left or None


def axes_if_divisible(mesh: AnyMesh, entry: Entry, size: int, unit: int = 1) -> Entry:
    """Returns ``entry`` if it splits ``size`` elements into whole multiples of ``unit``, else None."""
    return entry if (size // unit) % ways(mesh, entry) == 0 else None


def shard_index(mesh: AnyMesh, entry: Entry) -> jax.Array:
    """Returns which part of a dimension sharded over ``entry`` this device has."""
    index = jnp.uint32(0)
    for axis in axes_of(entry):
        index = index * jnp.uint32(mesh.shape[axis]) + lax.axis_index(axis).astype(jnp.uint32)
    return index


# ---------------------------------------------------------------- an array
def axes_of_dims(aval: ShapedArray) -> Axes:
    """Returns the sharding of a traced value, or of an operand or result of a partitioning callback."""
    axes = [] if aval.sharding is None else list(aval.sharding.spec)  # None: GSPMD does not know it yet
    return axes + [None] * (len(aval.shape) - len(axes))


def resharded(tree: T, axes: Sequence[Entry]) -> T:
    """Gives arrays of an Explicit mesh the sharding ``axes`` by dimension; one of fewer dimensions gets the first."""

    def reshard(v: jax.Array) -> jax.Array:
        wanted = tuple(axes[: v.ndim])
        if tuple(axes_of_dims(jax.typeof(v))) == wanted:
            return v
        return jax.sharding.reshard(v, NamedSharding(jax.typeof(v).sharding.mesh, PartitionSpec(*wanted)))

    return jax.tree.map(reshard, tree)


def place(x: jax.Array, mesh: AnyMesh, entries: Sequence[Entry]) -> jax.Array:
    """Gives ``x`` a sharding: on an Explicit mesh its type changes, on an Auto mesh XLA is told of it."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in types.items() if kind == AxisType.Explicit}
    if explicit:
        wanted = PartitionSpec(*(without_axes(entry, types.keys() - explicit) for entry in entries))
        x = jax.sharding.reshard(x, NamedSharding(mesh, wanted))
    if AxisType.Auto in types.values():
        others = PartitionSpec(*(without_axes(entry, explicit) for entry in entries))
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, others))
    return x


def check_explicit(op: str, aval: ShapedArray, axis: int, unit: int) -> None:
    """Refuses a sharding of an Explicit mesh that would split a block; under other meshes XLA reshards."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return
    entry = axes_of_dims(aval)[axis]
    if axes_if_divisible(mesh, entry, aval.shape[axis], unit) != entry:
        raise ValueError(
            f"{op}: axis {axis} of shape {aval.shape} is sharded over {entry!r} ({ways(mesh, entry)} ways), which "
            f"must split it into multiples of {unit}; reshard it first"
        )


def match_varying(*operands: jax.Array, like: object = ()) -> tuple[jax.Array, ...]:
    """Gives all operands the manual axes of shard_map that any of them, or any array of the tree ``like``, varies over.

    ``like`` is for what a custom derivative takes beside its operands: a gradient varies over the same axes as the
    result, so an operand must vary over them before the derivative begins.
    """

    def varying(x: jax.Array) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    union: frozenset = frozenset().union(*map(varying, (*operands, *jax.tree.leaves(like))))
    missing = [tuple(sorted(union - varying(x))) for x in operands]
    return tuple(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(operands, missing, strict=True))


def typed(like: ShapedArray, shape: Shape, dtype: DTypeLike, axes: Axes) -> ShapedArray:
    """Returns an aval of ``shape`` with the mesh and manual axes of ``like``; ``axes`` is its explicit sharding.

    Its dtype is not weak: a quantized tensor does not follow the dtype of what it meets, even if x would have.
    """
    changes = {}
    if not like.sharding.mesh.empty:
        changes["sharding"] = like.sharding.update(spec=PartitionSpec(*axes))
    return like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, **changes)


def names_of_dims(shape: Sequence[int]) -> list[str]:
    """Names the leading dimensions of x, its rows and its columns for a sharding rule."""
    return [*(f"b{i}" for i in range(len(shape) - 2)), "r", "c"]


def keep_blocks(mesh: AnyMesh, axes: Axes, shape: Sequence[int], *units: Sequence[int]) -> Axes:
    """Drops the axes that would split a block; ``units`` are pairs of what ``Side.units`` says."""
    least = [1] * (len(shape) - 2) + [max(n) for n in zip((1, 1), *units, strict=True)]
    return [axes_if_divisible(mesh, *entry) for entry in zip(axes, shape, least, strict=True)]


def part_shardings(dims: Sequence[Entry], amax: Shape) -> list[list]:
    """Returns the shardings of data, scale and an amax of this shape for that of the values."""
    return [list(dims), list(dims), list(dims[: len(amax)])]


def first_rows(mesh: AnyMesh, axes: Axes, sizes: Sequence[int]) -> jax.Array:
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


def max_over_devices(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Takes the largest amax over mesh axes.

    It compares bits: they order like magnitudes, NaN is the largest, and no subnormal number is flushed.
    """
    return softfloat.from_bits(lax.pmax(softfloat.to_bits(amax), axes)) if axes else amax
