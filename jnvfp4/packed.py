"""Frozen weights with their block scales where the FP4 tensor cores of Blackwell read them."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .spec import BLOCK, Format
from .tensor import (
    NVFP4Tensor,
    check_partition,
    part_names,
    register_parts,
    ways_of,
    with_float_scale,
    with_scale_bytes,
)

TILE_ROWS, TILE_COLS, TILE_BYTES = 128, 4, 512  # of ffi/scale_tiles.h
_GROUPS = TILE_ROWS // 32  # rows r, r + 32, r + 64 and r + 96 of a tile are neighbours


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """Holds a quantized weight [..., N, K] for products on Blackwell: a pytree of three arrays, whose format is static.

    ``jnvfp4.prepack_weight`` makes it of an NVFP4Tensor. ``matmul_nt`` takes it as ``b`` and ``linear`` as ``w``, with
    the results of that tensor, bit for bit, on every platform. No other function of jnvfp4 takes it.

    Attributes:
      data: uint8 [..., N, K/2], the codes of the NVFP4Tensor.
      tiles: uint8 [..., ceil(N/128), 512 * ceil(K/64)], its block scales in tiles of 128 rows and 4 columns, 512 bytes
        each. A row of this array is a row of tiles. Scales that the last tiles have beyond N and K are zero.
      amax: float32, that of the NVFP4Tensor.
      format: that of the NVFP4Tensor.

    The constructor checks nothing, because transforms put placeholders into the fields.
    """

    data: jax.Array
    tiles: jax.Array
    amax: jax.Array
    format: Format = field(default_factory=Format)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape [..., N, K] of the values."""
        return (*self.data.shape[:-1], 2 * self.data.shape[-1])

    @property
    def ndim(self) -> int:
        """Returns the number of axes."""
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, tiles and amax, over all devices."""
        return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in _parts(self))

    def unpack(self) -> NVFP4Tensor:
        """Returns the NVFP4Tensor that this was made of, byte for byte."""
        *_, rows, half = self.data.shape
        scale = _untile(self.tiles, rows, 2 * half // BLOCK)
        return with_float_scale(NVFP4Tensor(self.data, scale, self.amax, self.format))

    def shardings(self, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> "PackedWeight":
        """Makes the shardings of data, tiles and amax from that of the values, as ``NVFP4Tensor.shardings`` does.

        Args:
          mesh: the mesh of devices.
          spec: how the values [..., N, K] are split; along N only into whole tiles of 128 rows, and never along K.

        Returns:
          A PackedWeight of NamedShardings.

        Raises:
          TypeError, ValueError: ``spec`` is no PartitionSpec, has more entries than axes, or splits a tile or K.
        """
        op = "PackedWeight.shardings"
        check_partition(op, spec, self.shape)
        of_n, of_k = (*spec, *[None] * (self.ndim - len(spec)))[-2:]
        if ways_of(mesh, of_k) > 1:
            raise ValueError(f"{op}: spec must not split K, got {spec}; an NVFP4Tensor can be split there")
        count, rows = ways_of(mesh, of_n), self.shape[-2]
        if count > 1 and rows % (TILE_ROWS * count):
            raise ValueError(
                f"{op}: spec must split N into multiples of {TILE_ROWS}, got {spec} for N={rows}, {count} ways"
            )
        whole = NamedSharding(mesh, spec)
        of_amax = NamedSharding(mesh, PartitionSpec(*spec[: self.amax.ndim]))
        return _unflatten(self.format, (whole, whole, of_amax))

    def __repr__(self) -> str:
        try:
            values = f"shape={self.shape}, format={self.format.name}, nbytes={self.nbytes}"
        except (AttributeError, TypeError):  # placeholders in the fields
            values = f"data={self.data!r}, tiles={self.tiles!r}, amax={self.amax!r}, format={self.format!r}"
        return f"PackedWeight({values})"

    def _no_array(self) -> NoReturn:
        raise TypeError(
            f"a PackedWeight is not an array, got shape {self.shape} where one is needed: its unpack() is an "
            "NVFP4Tensor, of which jnvfp4.dequantize gives the values"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        """Refuses the conversion to a NumPy array."""
        self._no_array()

    def __jax_array__(self) -> NoReturn:
        """Refuses the conversion to a JAX array."""
        self._no_array()


def pack_tiles(t: NVFP4Tensor) -> PackedWeight:
    """Puts the block scales of ``t`` into tiles; checks nothing."""
    return PackedWeight(t.data, _tile(with_scale_bytes(t).scale), t.amax, t.format)


def tiles_shape(lead: tuple[int, ...], rows: int, depth: int) -> tuple[int, ...]:
    """Returns the shape of the tiles of a weight [*lead, rows, depth]."""
    return (*lead, -(-rows // TILE_ROWS), -(-depth // (BLOCK * TILE_COLS)) * TILE_BYTES)


# Reshapes and transposes alone, which XLA compiles for every device: tiles are made once, when a program loads weights.
@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _tile(scale: jax.Array) -> jax.Array:
    *lead, rows, cols = scale.shape
    more = (-rows % TILE_ROWS, -cols % TILE_COLS)
    tile_rows, tile_cols = (rows + more[0]) // TILE_ROWS, (cols + more[1]) // TILE_COLS
    scale, axes = _with_whole_tiles(scale, rows)
    if any(more):
        scale = lax.pad(scale, np.uint8(0), [*[(0, 0, 0)] * len(lead), *((0, n, 0) for n in more)])
    groups = _reshaped(scale, (*lead, tile_rows, _GROUPS, 32, tile_cols, TILE_COLS), axes)
    return _reshaped(_turned(groups, len(lead)), (*lead, tile_rows, tile_cols * TILE_BYTES), axes)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _untile(tiles: jax.Array, rows: int, cols: int) -> jax.Array:
    *lead, tile_rows, row_bytes = tiles.shape
    tile_cols = row_bytes // TILE_BYTES
    tiles, axes = _with_whole_tiles(tiles, rows)
    groups = _reshaped(tiles, (*lead, tile_rows, tile_cols, 32, _GROUPS, TILE_COLS), axes)
    whole = _reshaped(_turned(groups, len(lead)), (*lead, tile_rows * TILE_ROWS, tile_cols * TILE_COLS), axes)
    return whole[..., :rows, :cols]


def _turned(groups: jax.Array, lead: int) -> jax.Array:
    """Exchanges the tiles of a row with the rows of a group: the way there is the way back."""
    return groups.transpose(*range(lead), *(lead + axis for axis in (0, 3, 2, 1, 4)))


# An Explicit mesh asks how a reshaped array is sharded.
def _with_whole_tiles(x: jax.Array, rows: int) -> tuple[jax.Array, tuple]:
    """Gathers the columns of x, and its rows where a device has a part of a tile; returns the axes of the others."""
    sharding = jax.typeof(x).sharding
    *lead, of_rows, _ = list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))
    whole = rows % (TILE_ROWS * ways_of(sharding.mesh, of_rows)) == 0
    axes = (*lead, of_rows if whole else None)
    if any(entry is not None for entry in sharding.spec):
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*axes)))
    return x, axes


def _reshaped(x: jax.Array, shape: tuple[int, ...], axes: tuple) -> jax.Array:
    if all(entry is None for entry in axes):
        return x.reshape(shape)
    return lax.reshape(x, shape, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*axes)))


# ---------------------------------------------------------------- the pytree
def _parts(w: PackedWeight) -> tuple[jax.Array, jax.Array, jax.Array]:
    return w.data, w.tiles, w.amax


def _names(fmt: Format) -> tuple[str, ...]:
    """Returns the names of the parts in key paths: a store that keeps leaves by name finds no NVFP4Tensor there."""
    data, _, amax = part_names(fmt)
    return f"packed_{data}", f"packed_tiles_{fmt.name}", f"packed_{amax}"


def _unflatten(fmt: Format, parts: Any) -> PackedWeight:
    data, tiles, amax = parts
    return PackedWeight(data, tiles, amax, fmt)


register_parts(PackedWeight, _parts, _names, _unflatten)
