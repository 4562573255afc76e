"""NVFP4 checkpoints in JAX: tensors by name, read when they are asked for, placed as they are wanted."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jnvfp4.convert.errors import CheckpointError
from jnvfp4.convert.layouts import TE
from jnvfp4.convert.names import module_of
from jnvfp4.convert.stored import Stored, open_stored
from jnvfp4.spec import BLOCK, Format
from jnvfp4.tensor import NVFP4Tensor

Tensor = NVFP4Tensor | jax.Array
Place: TypeAlias = Sharding | jax.Device | None


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by the names they had before they were quantized.

    `checkpoint[name]` is an NVFP4Tensor where the weight is quantized, else an array. Nothing is read before.
    """

    def __init__(self, stored: Stored):
        self.stored = stored
        self._names = dict.fromkeys(sorted([*(stored.name(m) for m in stored.modules), *stored.others]))
        self._quantized = set(stored.modules)

    @property
    def config(self) -> dict[str, Any] | None:
        return self.stored.source.config

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        return self.place(name, None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the header; [N, K] or [E, N, K] of a quantized weight."""
        if name not in self:
            raise KeyError(name)
        module = module_of(name)
        return self.stored.weight(module).shape if module in self._quantized else self.stored.source.entry(name).shape

    def to_device(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Many tensors on devices; only what this process has of them is read.

        Args:
          places: where each tensor goes, as in `place`; names that are not there are not read.

        Returns:
          the tensors by name.

        Raises:
          KeyError, CheckpointError, ValueError: as `place`.
        """
        return {name: self.place(name, place) for name, place in places.items()}

    def place(self, name: str, place: Place) -> Tensor:
        """A tensor on devices; only what this process has of it is read.

        Args:
          name: as in `keys()`.
          place: a sharding of the weight [N, K], whose blocks of 16 along K must stay whole. Or a device; None is the
            default one.

        Raises:
          KeyError: there is no such tensor.
          CheckpointError: the sharding splits blocks.
          ValueError: the sharding does not divide the shape.
        """
        if name not in self:
            raise KeyError(name)
        module = module_of(name)
        if module not in self._quantized:
            return _put(self.stored.source.array(name), place)
        weight = self.stored.weight(module)
        scales = weight.scales.view(ml_dtypes.float8_e4m3fn)
        if isinstance(place, Sharding):
            _check_blocks(name, weight.shape, place)
        # S_dec * 2688: an amax whose decode scale is the stored one, whatever E4M3 maximum it was made for.
        amax = weight.stored.reshape(-1) if weight.layout is TE else weight.decode * np.float32(2688)
        amax = np.asarray(amax, np.float32)
        each = weight.stacked or (amax.size == weight.shape[0] and weight.stored.size > 1)
        by_row = each and not weight.stacked
        format_ = Format("row" if by_row else "tensor", weight.e4m3_max)
        return NVFP4Tensor(
            _put(weight.codes, place),
            _put(scales, place),
            _put(amax if each else amax.reshape(()), _of_amax(place, each)),
            format_,
        )


def _of_amax(place: Place, each: bool) -> Place:
    """Of one amax, which all devices have, or of one for each row or expert, which go where these go."""
    if not isinstance(place, NamedSharding):
        return place
    spec = PartitionSpec(*place.spec[:1]) if each else PartitionSpec()
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)


def _put(x: np.ndarray, place: Place) -> jax.Array:
    if isinstance(place, Sharding):
        return jax.make_array_from_callback(x.shape, place, lambda index: np.asarray(x[index], order="C"))
    return jax.device_put(np.asarray(x, order="C"), place)


def _check_blocks(name: str, shape: tuple[int, ...], sharding: Sharding) -> None:
    k = sharding.shard_shape(shape)[-1]
    if k % BLOCK:
        raise CheckpointError(
            f"K = {shape[-1]} is cut into pieces of {k} by {sharding}", f"whole blocks of {BLOCK}", tensor=name
        )


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens an NVFP4 checkpoint of any layout: modelopt, compressed-tensors or te.

    Raises:
      CheckpointError: it is damaged or has no NVFP4 weight.
    """
    return Checkpoint(open_stored(Path(path)))
