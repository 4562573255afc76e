"""The quantized tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import Format


@partial(jax.tree_util.register_dataclass, data_fields=("data", "scale", "amax"), meta_fields=("format",))
@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """Holds an NVFP4 array of shape [..., M, K]: a pytree with ``format`` static.

    x[..., m, k] ~ e2m1(data) * e4m3(scale) * amax / (6 * format.e4m3_max)

    Attributes:
      data: uint8 [..., M, K/2], two E2M1 codes a byte, even k in the low nibble.
      scale: float8_e4m3fn [..., M, K/16], the decode scale of each 16 along K.
      amax: float32, () or [...] for scope "tensor", [..., M] for "row", [..., M, K/64] for "window64".
      format: what a reader must know to decode the numbers.

    The transpose is a tensor of its own (``quantize(x, transpose=True)``): blocks run along the last axis.
    No validation happens here, since transforms put placeholders into the fields.
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
    def tensor_amax(self) -> jax.Array:
        """Computes the amax of the whole tensor, float32 (): the largest of ``amax``; NaN wins."""
        return _largest(self.amax)

    @property
    def dtype(self) -> np.dtype:
        """Returns the element type, float4_e2m1fn, as a NumPy dtype."""
        return jnp.dtype(jnp.float4_e2m1fn)


@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _largest(amax: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(amax, jnp.uint32) & np.uint32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, initial=np.uint32(0)), jnp.float32)


def take_tensor(results: Iterator[jax.Array], fmt: Format, amax: jax.Array | None = None) -> NVFP4Tensor:
    """Takes data, scale bytes and, where ``amax`` is None, the amax from the results of a primitive."""
    data, scale = next(results), next(results)
    return with_float_scale(NVFP4Tensor(data, scale, next(results) if amax is None else amax, fmt))


def with_float_scale(t: NVFP4Tensor) -> NVFP4Tensor:
    """Views the scale bytes of ``t`` as float8_e4m3fn."""
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.float8_e4m3fn))


def with_scale_bytes(t: NVFP4Tensor) -> NVFP4Tensor:
    """Views the float8_e4m3fn scale of ``t`` as bytes."""
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.uint8))
