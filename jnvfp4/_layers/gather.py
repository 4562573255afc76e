"""Shardings of a weight at rest and as GEMMs read it, and the gather of its bytes between both."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._core.mesh import AnyMesh, Entry, Placement, axes_of, place, ways
from .._core.tensor import NVFP4Tensor, moved_as_bytes


class Gather(NamedTuple):
    """Holds two shardings of weights [..., N, K] by their axes: as each device keeps them, and as GEMMs read them."""

    mesh: AnyMesh
    sharded: tuple[Entry, ...]
    gathered: tuple[Entry, ...]

    @property
    def reversed(self) -> "Gather":
        """Returns the same for the transposed matrices."""
        sharded, gathered = ((*entries[:-2], entries[-1], entries[-2]) for entries in self[1:])
        return Gather(self.mesh, sharded, gathered)

    def constrain(self, w: jax.Array) -> jax.Array:
        """Places an array as each device keeps it; so is its gradient."""
        return place(w, self.mesh, self.sharded)

    def read(self, w: jax.Array) -> jax.Array:
        """Places an array as products read it."""
        return place(w, self.mesh, self.gathered)

    def keep(self, t: NVFP4Tensor) -> NVFP4Tensor:
        """Places a quantized tensor as each device keeps it, as bytes: before what is computed of it there."""
        return moved_as_bytes(t, lambda part: place(part, self.mesh, self.sharded[: part.ndim]), t.amax.ndim > 0)

    def gather(self, t: NVFP4Tensor) -> NVFP4Tensor:
        """Moves a quantized tensor from where each device keeps it to where products read it, the scale as bytes.

        Collectives of float8 need newer GPUs, and on a CPU they carry 16 bits. Both constraints are on the same array,
        since XLA may move data at any operation between two of them: at a conversion to float8, or before a quantizer.
        """

        def move(part: jax.Array) -> jax.Array:
            kept = place(part, self.mesh, self.sharded[: part.ndim])
            return place(kept, self.mesh, self.gathered[: part.ndim])

        return moved_as_bytes(t, move, t.amax.ndim > 0)


def as_pair(op: str, w_gather: tuple[Placement, Placement] | None) -> tuple[Placement, Placement] | None:
    """Refuses what is neither None nor a pair of shardings."""
    if w_gather is None:
        return None
    pair = isinstance(w_gather, tuple) and len(w_gather) == 2
    if not pair or not all(isinstance(entry, Placement) for entry in w_gather):
        raise TypeError(
            f"{op}: w_gather must be None or a pair (sharded, gathered) of PartitionSpec or NamedSharding, got "
            f"{w_gather!r}"
        )
    return w_gather


def as_gather(
    op: str, name: str, pair: tuple[Placement, Placement], w: jax.Array, shape: tuple[int, ...], units: Sequence[int]
) -> Gather:
    """Makes a ``Gather`` for weights of ``shape``, of which a device may have multiples of units[i] along axis i.

    ``w`` is an array of them, which may know a mesh.

    Raises:
      ValueError: there is no mesh, a sharding does not fit it or the array, or the second splits more than the first.
    """
    mesh = jax.typeof(w).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    if mesh.empty:
        mesh = next((entry.mesh for entry in pair if isinstance(entry, NamedSharding)), mesh)
    if mesh.empty:
        raise ValueError(
            f"{op}: {name or 'sharded'} must be of NamedSharding where no mesh is known, got {pair}; or call it in "
            "`with jax.set_mesh(mesh):`"
        )
    names = [f"{name}.{which}" if name else which for which in Gather._fields[1:]]
    for what, entry in zip(names, pair, strict=True):
        if isinstance(entry, NamedSharding) and entry.mesh.shape != mesh.shape:
            raise ValueError(
                f"{op}: {what} must be of the mesh {dict(mesh.shape)}, got one of {dict(entry.mesh.shape)}"
            )
    entries = (_entries(op, what, entry, mesh, shape, units) for what, entry in zip(names, pair, strict=True))
    gather = Gather(mesh, *entries)
    _check_order(op, names, gather)
    return gather


def _check_order(op: str, names: Sequence[str], gather: Gather) -> None:
    """Refuses a pair the wrong way round, by which each device keeps more than products read."""
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in gather.sharded):  # XLA decides how much a device keeps
        return
    kept, read = (math.prod(ways(gather.mesh, entry) for entry in entries) for entries in gather[1:])
    if read > kept:
        raise ValueError(
            f"{op}: {names[1]} must not split w into more parts than {names[0]}, got {read} by "
            f"{PartitionSpec(*gather.gathered)} and {kept} by {PartitionSpec(*gather.sharded)}; swap them: devices "
            f"keep w by {names[0]}, and products read it by {names[1]}"
        )


def _entries(
    op: str, what: str, sharding: Placement, mesh: AnyMesh, shape: tuple[int, ...], units: Sequence[int]
) -> tuple[Entry, ...]:
    """Returns the entries of a sharding, one for each dimension, or says why it does not fit."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if len(spec) > len(shape):
        raise ValueError(f"{op}: {what} must have at most {len(shape)} entries for shape {shape}, got {spec}")
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in (axis for entry in spec for axis in axes_of(entry)):
        if types.get(axis, AxisType.Manual) == AxisType.Manual:
            free = [name for name, kind in types.items() if kind != AxisType.Manual]
            which, remedy = "the mesh", ""
            if len(free) < len(types):
                which = "the mesh that shard_map leaves alone"
                remedy = "; inside shard_map there is jnvfp4.sharding.all_gather"
            raise ValueError(f"{op}: {what} must have axes of {which}, {free}, got {axis!r} in {spec}{remedy}")
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    for dimension, (entry, size, unit) in enumerate(zip(entries, shape, units, strict=True)):
        count = ways(mesh, entry)
        if size % (unit * count):
            raise ValueError(
                f"{op}: {what} must split axis {dimension} of shape {shape} into multiples of {unit}, got {spec}, "
                f"{count} ways"
            )
    return entries
