"""Opens NVFP4 checkpoints in JAX: tensors by name, read when they are used and placed on any devices."""

import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._core.tensor import NVFP4Tensor
from ..spec import BLOCK, Format
from ._files.errors import CheckpointError
from ._files.files import Rows
from ._files.safetensors import JSON
from ._layouts.names import module_of
from ._layouts.stored import Stored, Weight, open_stored
from ._layouts.unsupported import other_kv_cache

Tensor = NVFP4Tensor | jax.Array
Place: TypeAlias = Sharding | jax.Device | None


class Checkpoint(Mapping[str, Tensor]):
    """Maps the names that tensors had before quantization to the tensors.

    ``checkpoint[name]`` is an NVFP4Tensor if the weight is quantized, else an array. It is read at that moment. FP8
    weights are decoded to the dtype of origin. A module with ``M.pre_quant_scale`` [K] computes
    (x * pre_quant_scale) @ W^T. Scales of a KV cache have the names that the file has.
    """

    def __init__(self, stored: Stored):
        self.stored = stored
        self._names = dict.fromkeys(stored.names)
        self._quantized = set(stored.modules)

    @property
    def config(self) -> JSON | None:
        """The content of config.json, or None if there is no such file."""
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
        """Gives the shape of a tensor from the header: [N, K] or [E, N, K] for a quantized weight."""
        module = module_of(self._known(name))
        if module in self._quantized:
            return self.stored.weight(module).shape
        return self.stored.source.entry(name).array_shape

    def __repr__(self) -> str:
        layout = self.stored.layout.name if self._quantized else None
        directory = str(self.stored.source.directory)
        return f"Checkpoint({directory!r}, layout={layout!r}, {len(self)} tensors, {len(self._quantized)} in NVFP4)"

    def _known(self, name: str) -> str:
        if name in self:
            return name
        close = ", ".join(get_close_matches(str(name), self._names)) or "none that is alike"
        raise KeyError(f"{name!r:.200} is no tensor of {self!r}; it has {close}")

    def input_amax(self, name: str) -> np.ndarray | None:
        """Gives the amax that a weight's activations are quantized by in engines: 2688 * input_scale.

        Args:
          name: a weight's name, as in ``keys()``.

        Returns:
          float32 [], of a stack of experts [E]; None if none is stored, as for weights alone and for layout te.

        Raises:
          KeyError: there is no such tensor.
        """
        module = module_of(self._known(name))
        scale = self.stored.activation(module) if module in self._quantized else None
        if scale is None:
            return None
        amax = self.stored.layout.to_amax(scale)
        return amax if module in self.stored.stacks else amax.reshape(())

    def to_device(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Places many tensors on devices; only the parts that this process holds are read.

        Args:
          places: the sharding or device of each tensor, as in ``place``; other tensors are not read.

        Returns:
          the tensors by name.

        Raises:
          KeyError, CheckpointError, ValueError: as ``place``.
        """
        return {name: self.place(name, place) for name, place in places.items()}

    def place(self, name: str, place: Place) -> Tensor:
        """Places a tensor on devices; only the parts that this process holds are read.

        Args:
          name: the tensor's name, as in ``keys()``.
          place: a sharding of the weight [N, K], which may cut K only between blocks of 16; or a device; None is the
            default device.

        Raises:
          KeyError: there is no such tensor.
          CheckpointError: the sharding cuts through blocks.
          ValueError: the sharding does not divide the shape evenly.
        """
        module = module_of(self._known(name))
        if module not in self._quantized:
            return _put(self.stored.source.array(name), place)
        return _placed(self.stored.weight(module), place)


def _placed(weight: Weight, place: Place) -> NVFP4Tensor:
    if isinstance(place, Sharding) and (k := place.shard_shape(weight.shape)[-1]) % BLOCK:
        observed = f"K = {weight.shape[-1]} is cut into pieces of {k} by {place}"
        raise CheckpointError(observed, f"whole blocks of {BLOCK}", tensor=weight.name)
    amax = weight.layout.to_amax(weight.global_scale).reshape(-1)
    by_row = not weight.stacked and amax.size == weight.shape[0] and weight.global_scale.size > 1
    vector, amax_place = weight.stacked or by_row, place
    if isinstance(place, NamedSharding):  # amaxes are sharded like the rows or experts, a single one is replicated
        spec = PartitionSpec(*place.spec[:1]) if vector else PartitionSpec()
        amax_place = NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)
    return NVFP4Tensor(
        _put(weight.codes, place),
        _put(weight.scales.view(ml_dtypes.float8_e4m3fn), place),
        _put(amax if vector else amax.reshape(()), amax_place),
        Format("row" if by_row else "tensor", weight.e4m3_max),
    )


def _put(x: np.ndarray | Rows, place: Place) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(x.shape) if index is None else index
        return np.asarray(x[index[0]][:, *index[1:]] if isinstance(x, Rows) else x[index], order="C")

    if isinstance(place, Sharding):
        return jax.make_array_from_callback(x.shape, place, part)
    return jax.device_put(part(None), place)


def open_checkpoint(source: Path | str) -> Checkpoint:
    """Opens an NVFP4 checkpoint of any layout (modelopt, compressed-tensors or te), or one without quantized tensors.

    Args:
      source: a directory of safetensors files, or one such file.

    Raises:
      CheckpointError: the checkpoint is damaged, or has weights in formats other than NVFP4, FP8 and MXFP8.

    Warns of factors of AWQ, which the caller multiplies the activations by, of a KV cache other than FP8, and of files
    that may be no part of the checkpoint.
    """
    stored = open_stored(Path(source), ordinary=True)
    stored.source.warn_of_files(warnings.warn)
    if text := other_kv_cache(stored.source):
        warnings.warn(f"{stored.source.directory}: {text}", stacklevel=2)
    if awq := [name for m in stored.modules if (name := stored.pre_quant_scale(m))]:
        text = f"multiply the activations of {len(awq)} modules by their factors, such as checkpoint[{awq[0]!r}]"
        warnings.warn(f"{stored.source.directory}: {text}", stacklevel=2)
    return Checkpoint(stored)
