"""The quantized tensor."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from ..spec import Format
from .mesh import ways

PARTS = ("data", "scale", "amax")
PyTree = Any  # what jax.tree walks: containers of arrays and of NVFP4Tensors, or one of these
Tensor = TypeVar("Tensor", bound="NVFP4Tensor")


@dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor:
    """Holds a quantized array of shape [..., M, K]: a pytree of three arrays, whose ``format`` is static.

    x[..., m, k] ~ e2m1(data) * e4m3(scale) * amax / (6 * format.e4m3_max)

    ``t[i]`` indexes the leading axes, by anything that indexes an array there. Key paths of the leaves name the format,
    such as ``data_nvfp4_row_448``: a store that keeps leaves by name does not find those of another format. For other
    stores there is ``jnvfp4.to_state``.

    Attributes:
      data: uint8 [..., M, K/2], two E2M1 codes in a byte; the one of the even k is in the low four bits.
      scale: float8_e4m3fn [..., M, K/16], the scale of each 16 elements along K.
      amax: float32, () or [...] for scope "tensor", [..., M] for "row", [..., M, K/64] for "window64".
      format: what a reader must know to decode the numbers.

    Blocks run along the last axis, so the transpose is another tensor (``quantize(x, transpose=True)``; from the tensor
    itself by ``jnvfp4.transpose``, if it was made in 16x16 tiles). The
    constructor checks nothing, because transforms put placeholders into the fields.
    """

    data: jax.Array
    scale: jax.Array
    amax: jax.Array
    format: Format = field(default_factory=Format)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape [..., M, K] of the values."""
        return (*self.data.shape[:-1], 2 * self.data.shape[-1])

    @property
    def ndim(self) -> int:
        """Returns the number of axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Returns the number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, scales and amax, over all devices."""
        return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in parts_of(self))

    @property
    def tensor_amax(self) -> jax.Array:
        """Computes the amax of the whole tensor, float32 (): the largest of ``amax``; NaN wins."""
        return _largest(self.amax)

    @property
    def dtype(self) -> np.dtype:
        """Returns the element type, float4_e2m1fn, as a NumPy dtype."""
        return jnp.dtype(jnp.float4_e2m1fn)

    def __getitem__(self, index: object) -> "NVFP4Tensor":
        """Indexes the leading axes; the matrices [M, K] stay whole.

        Args:
          index: as for an array of the leading axes' shape: integers, slices, None, arrays of integers or booleans.

        Raises:
          IndexError: the index goes beyond the leading axes, or beyond those of an amax that has fewer (``vmap`` gives
            one to each example), or has an integer that is out of their range.
        """
        entries = index if isinstance(index, tuple) else (index,)
        self._check_index(entries)
        return _unflatten(self.format, (part[(*entries, ...)] if part.ndim else part for part in parts_of(self)))

    def _check_index(self, entries: tuple) -> None:
        lead = self.shape[:-2]
        if not _is_index(entries, lead):
            raise IndexError(
                f"NVFP4Tensor: an index must be one of the leading axes {lead} of shape {self.shape}, got {entries!r}; "
                "to index rows or columns, decode the tensor first, by jnvfp4.dequantize"
            )
        axes = lead[: self.amax.ndim or len(lead)]
        if not _is_index(entries, axes):
            raise IndexError(
                f"NVFP4Tensor: an index must be one of the axes {axes} that the amax of shape {self.shape} has, got "
                f"{entries!r}; index them first and the others then, t[i][j], or index each example in jax.vmap"
            )

    def __iter__(self) -> "Iterator[NVFP4Tensor]":
        """Iterates over the first leading axis."""
        if self.ndim < 3:
            raise TypeError(f"NVFP4Tensor: iteration needs a leading axis, got shape {self.shape}")
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        try:
            values = f"shape={self.shape}, format={self.format.name}, nbytes={self.nbytes}"
        except (AttributeError, TypeError, IndexError):  # placeholders in the fields
            values = f"data={self.data!r}, scale={self.scale!r}, amax={self.amax!r}, format={self.format!r}"
        return f"NVFP4Tensor({values})"

    def shardings(self, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> "NVFP4Tensor":
        """Makes the shardings of data, scale and amax from that of the values.

        Args:
          mesh: the mesh of devices.
          spec: how the values [..., M, K] are split; along K only between blocks of 16 (of 64 for scope "window64").

        Returns:
          An NVFP4Tensor of NamedShardings, for ``jax.device_put``, ``in_shardings``, ``out_shardings`` and
          ``jax.lax.with_sharding_constraint`` of a tensor of this shape and format. The parts may be
          ``jax.ShapeDtypeStruct``, as ``jax.eval_shape`` gives them.

        Raises:
          TypeError, ValueError: ``spec`` is no PartitionSpec, has more entries than axes, or splits a block.
        """
        op = "NVFP4Tensor.shardings"
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"{op}: spec must be a PartitionSpec, got {spec!r}")
        if len(spec) > self.ndim:
            raise ValueError(f"{op}: spec must have at most {self.ndim} entries for shape {self.shape}, got {spec}")
        whole = NamedSharding(mesh, spec)
        depth, parts = self.shape[-1], ways(mesh, spec[self.ndim - 1]) if len(spec) == self.ndim else 1
        if depth % (self.format.unit * parts):
            raise ValueError(
                f"{op}: spec must split K into multiples of {self.format.unit}, got {spec} for K={depth}, {parts} ways"
            )
        of_amax = NamedSharding(mesh, PartitionSpec(*spec[: self.amax.ndim]))
        return NVFP4Tensor(whole, whole, of_amax, self.format)  # type: ignore[arg-type]

    # ------------------------------------------------------------ what an array has and a quantized tensor has not
    def _no_transpose(self) -> NoReturn:
        raise AttributeError(
            "an NVFP4Tensor has no transpose, since its blocks run along the last axis: make one from the original "
            "array by jnvfp4.quantize(..., transpose=True), or, of a tensor that was made with block_rows=16, by "
            "jnvfp4.transpose(t, spec)"
        )

    T = transpose = mT = property(_no_transpose)  # noqa: N815

    def _no_array(self) -> NoReturn:
        raise TypeError(
            f"an NVFP4Tensor is not an array, got shape {self.shape} where one is needed: jnvfp4.dequantize(t) gives "
            "its values, and t.data, t.scale and t.amax are its parts"
        )

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
        """Refuses the conversion to a NumPy array."""
        self._no_array()

    def __jax_array__(self) -> NoReturn:
        """Refuses the conversion to a JAX array."""
        self._no_array()

    def _no_arithmetic(self, *_: object) -> NoReturn:
        self._no_array()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _no_arithmetic
    __eq__ = __ne__ = _no_arithmetic
    __hash__ = object.__hash__
    astype = reshape = property(_no_array)


def _is_index(entries: tuple, lead: tuple[int, ...]) -> bool:
    """Says whether an index is one of an array of the shape ``lead``."""
    if any(entry is ... for entry in entries):
        return False
    # NumPy counts the axes and checks integers; of JAX arrays, which may be traced, only shape and type count.
    known = (np.zeros(e.shape, e.dtype) if isinstance(e, jax.Array) else e for e in entries)
    try:
        np.broadcast_to(False, lead)[tuple(known)]
    except IndexError:
        return False
    return True


def parts_of(t: NVFP4Tensor) -> list[jax.Array]:
    """Lists the operands of the primitives that read a tensor."""
    return [t.data, t.scale, t.amax]


# ---------------------------------------------------------------- the pytree
def part_names(fmt: Format) -> tuple[str, ...]:
    """Returns the names of data, scale and amax in key paths and states."""
    return tuple(f"{part}_{fmt.name}" for part in PARTS)


def _unflatten(fmt: Format, parts: Iterable[jax.Array]) -> NVFP4Tensor:
    data, scale, amax = parts
    return NVFP4Tensor(data, scale, amax, fmt)


register_pytree_with_keys(
    NVFP4Tensor,
    lambda t: (tuple(zip(map(GetAttrKey, part_names(t.format)), parts_of(t), strict=True)), t.format),
    _unflatten,
    lambda t: (parts_of(t), t.format),
)
jax.export.register_pytree_node_serialization(
    NVFP4Tensor,
    serialized_name="jnvfp4.NVFP4Tensor",
    serialize_auxdata=lambda fmt: json.dumps(asdict(fmt)).encode(),
    deserialize_auxdata=lambda text: Format(**json.loads(text)),
)


@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _largest(amax: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(amax, jnp.uint32) & np.uint32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, initial=np.uint32(0)), jnp.float32)


def take_tensor(results: Iterator[jax.Array], fmt: Format, amax: jax.Array | None = None) -> NVFP4Tensor:
    """Takes data, scale bytes and, where ``amax`` is None, the amax from the results of a primitive."""
    data, scale = next(results), next(results)
    return with_float_scale(NVFP4Tensor(data, scale, next(results) if amax is None else amax, fmt))


def with_float_scale(t: Tensor) -> Tensor:
    """Views the scale bytes of ``t`` as float8_e4m3fn."""
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.float8_e4m3fn))


def with_scale_bytes(t: Tensor) -> Tensor:
    """Views the float8_e4m3fn scale of ``t`` as bytes."""
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.uint8))


def moved_as_bytes(t: NVFP4Tensor, move: Callable[[jax.Array], jax.Array], amax: bool) -> NVFP4Tensor:
    """Moves data, scale bytes and, if ``amax``, the amax of a tensor between devices."""
    stored = with_scale_bytes(t)
    moved = replace(stored, data=move(stored.data), scale=move(stored.scale))
    return with_float_scale(replace(moved, amax=move(t.amax)) if amax else moved)
