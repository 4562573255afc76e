"""Quantizes the operands of a layer, and names those that its gradients read, for ``jax.checkpoint``."""

from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from .._core.tensor import NVFP4Tensor, with_float_scale, with_scale_bytes
from .._ops.arguments import AmaxPair, Implementation
from .._ops.quantize import Orientation, dequantize, quantize_sides
from ..spec import QuantSpec

RESIDUAL_NAME = "nvfp4_residual"
"""The name of the residuals of ``linear``, for ``jax.checkpoint_policies.save_only_these_names``."""
BACKWARD_NAME = "nvfp4_backward"
"""The name of the residuals that the gradient GEMMs read; the others are operands of the forward GEMM."""

Operand = jax.Array | NVFP4Tensor
Pair = tuple[NVFP4Tensor | None, NVFP4Tensor | None]  # of x, and of x transposed
SpecPair = tuple[QuantSpec | None, QuantSpec | None]  # by which they are quantized
T = TypeVar("T")
X, W, DY = range(3)  # operands, for their keys


@partial(jax.jit, static_argnums=1, inline=True)  # an eager call transfers no constants
def _pad_rows(x: jax.Array, unit: int) -> jax.Array:
    """Adds zero rows up to a multiple of ``unit``: zeros add nothing to a sum."""
    return jnp.pad(x, ((0, -x.shape[0] % unit), (0, 0))) if x.shape[-2] % unit else x


def _crop_rows(t: NVFP4Tensor, rows: int) -> NVFP4Tensor:
    if t.data.shape[0] == rows:
        return t
    return jax.tree.map(lambda part: lax.slice_in_dim(part, 0, rows) if part.ndim else part, t)


@partial(jax.jit, static_argnums=1, inline=True)
def _fold_in(key: jax.Array, operand: int) -> jax.Array:
    return jax.random.fold_in(key, operand)


class Quantizer(NamedTuple):
    """Quantizes the operands of one call.

    They are x [M, K] of any M, or x [*rows, K] whose last axis of rows is a multiple of what a block has of them.
    """

    key: jax.Array | None
    implementation: Implementation

    def key_of(self, operand: int, *specs: QuantSpec | None) -> jax.Array | None:
        if self.key is None or all(spec is None or spec.rounding == "nearest" for spec in specs):
            return None
        return _fold_in(self.key, operand)

    def pair(
        self,
        x: jax.Array,
        specs: SpecPair,
        key: jax.Array | None,
        amax: AmaxPair = (None, None),
        unit: int = 1,
    ) -> Pair:
        """Quantizes x along K and, with zero rows up to a multiple of ``unit``, along its rows, by the specs given."""
        row_spec, col_spec = specs
        if col_spec is None:
            if row_spec is None:
                return None, None
            unit = row_spec.block_rows
        whole = _pad_rows(x, unit)
        sides = zip(specs, (False, True), amax, strict=True)
        wanted = [Orientation(spec, transpose, given) for spec, transpose, given in sides if spec is not None]
        made = iter(quantize_sides(whole, wanted, x.ndim - 1, key, self.implementation, in_layer=True))
        row, col = (None if spec is None else next(made) for spec in specs)
        return row if row is None else _crop_rows(row, x.shape[0]), col

    def again(
        self, row: NVFP4Tensor, dtype: DTypeLike, spec: QuantSpec, key: jax.Array | None, unit: int = 1
    ) -> NVFP4Tensor:
        """Makes the second tensor of a pair of the values of the first."""
        values = dequantize(row, dtype, implementation=self.implementation)
        _, col = self.pair(values, (None, spec), key, unit=unit)
        assert col is not None
        return col


def named(t: T, for_backward: bool) -> T:
    """Names an operand of the forward GEMM, or what is saved for the gradient GEMMs: an array or a tensor's parts.

    What is saved has both names, so that a policy can save it alone or together with the operands of the forward GEMM.
    """
    names = (RESIDUAL_NAME, BACKWARD_NAME) if for_backward else (RESIDUAL_NAME,)
    packed = pack(t)
    for name in names:
        packed = jax.tree.map(partial(checkpoint_name, name=name), packed)
    return unpack(packed)


def pack(t: T) -> T:
    """Views scales as bytes: jax.checkpoint rounds the floats it saves by IEEE rules, where E4M3 256 is infinite."""
    return with_scale_bytes(t) if isinstance(t, NVFP4Tensor) else t


def unpack(t: T) -> T:
    return with_float_scale(t) if isinstance(t, NVFP4Tensor) else t
