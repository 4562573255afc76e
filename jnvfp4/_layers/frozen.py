"""``Frozen``: the weights of a layer, stored in NVFP4, that stand in for the array of a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import EllipsisType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._core.tensor import NVFP4Tensor
from .._ops.quantize import quantize
from ..recipes import Recipe
from .dot_general import check_options
from .linear import linear


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """Holds weights that are not trained.

    Attributes:
      tensor: [N, K], the axes that the product leaves and those that it contracts.
      shape: of the array that was quantized.
      contracted: its axes of K.
      dtype: its dtype.
    """

    tensor: NVFP4Tensor
    shape: tuple[int, ...] = field(metadata={"static": True})
    contracted: tuple[int, ...] = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Returns the number of axes of the array."""
        return len(self.shape)

    def __getitem__(self, index: EllipsisType) -> "Frozen":
        """Returns the weights: layers of NNX read ``kernel[...]``."""
        if index is not ...:
            raise TypeError(f"Frozen: weights in NVFP4 must be read as a whole, by [...], got [{index!r}]")
        return self

    def dot(
        self,
        op: str,
        x: jax.Array,
        contracted: Sequence[int],
        recipe: Recipe,
        key: jax.Array | None,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        **unsupported: object,
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general`` of x and the weights, [*x free, *weights free]; dx is not quantized."""
        check_options(op, recipe, precision, None, unsupported)
        free = [axis for axis in range(x.ndim) if axis not in contracted]
        rows = x.transpose(*free, *contracted).reshape(*(x.shape[axis] for axis in free), -1)
        columns = [size for axis, size in enumerate(self.shape) if axis not in self.contracted]
        product = linear(rows, self.tensor, recipe, key=key, out_dtype=preferred_element_type)
        return product.reshape(*rows.shape[:-1], *columns)


def freeze(w: jax.Array, contracted: Sequence[int], recipe: Recipe) -> Frozen:
    """Quantizes weights as the forward pass of the recipe does; N and K must fit its spec."""
    assert recipe.fprop is not None
    free = [axis for axis in range(w.ndim) if axis not in contracted]
    matrix = w.transpose(*free, *contracted).reshape(-1, math.prod(w.shape[axis] for axis in contracted))
    return Frozen(quantize(matrix, recipe.fprop.w), w.shape, tuple(contracted), jnp.dtype(w.dtype))
