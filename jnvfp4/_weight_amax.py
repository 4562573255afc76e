"""The amaxes of weights, found for all weights of a step at once and checked where a layer uses one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from . import softfloat
from ._arguments import as_float_array
from ._primitives._base import bind
from ._primitives.weight_amax import weight_amax_p


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["shape", "stacked"])
@dataclass(frozen=True)
class WeightAmax:
    """Holds the amax of a parameter, and the shape by which a layer recognizes what the amax is of.

    It is a pytree, so ``jax.lax.scan`` can slice it with the weights.

    Attributes:
      value: float32, () or, if stacked, [L].
      shape: of the parameter, [L, ...] if stacked.
      stacked: whether the first axis of the parameter counts the layers of a loop, or experts, each with its own amax.
    """

    value: jax.Array
    shape: tuple[int, ...]
    stacked: bool = False

    def of(self, op: str, w: jax.Array, batch: int = 0, indices: Sequence[ArrayLike] = ()) -> jax.Array:
        """Returns the amax of the weights that a layer has, rounded to their dtype.

        (The largest of rounded numbers is the largest one, rounded.)

        Args:
          op: what errors call the layer.
          w: its weights: the whole parameter, or those of one layer of a stack.
          batch: how many first axes of w count matrices with an amax of their own.
          indices: the numbers of ``layer_index`` of the loops around the layer.

        Raises:
          ValueError: w is not what the amax was found for, or which layer of a stack it is cannot be known.
        """
        whole = w.size == math.prod(self.shape) and (batch > 0 or not self.stacked)
        in_stack = self.stacked and batch == 0 and w.size == math.prod(self.shape[1:])
        if not whole and not in_stack:
            which = "stacked" if self.stacked else "not stacked; weight_amax(..., stacked=...) says which are"
            raise ValueError(
                f"{op}: the amax of weight_amax must be that of the weights, of shape {w.shape} with {batch} axes of "
                f"experts, got that of a parameter of shape {self.shape}, which is {which}"
            )
        value = self._of_layer(op, indices) if in_stack and self.value.ndim else self.value
        if w.dtype == jnp.float32:
            return value
        # On bit patterns: XLA may leave out a pair of casts, and its reduce_precision makes subnormal numbers zero.
        return softfloat.from_bits(softfloat.to_bits(softfloat.from_bits(softfloat.to_bits(value), w.dtype)))

    def _of_layer(self, op: str, indices: Sequence[ArrayLike]) -> jax.Array:
        if len(indices) != 1:
            raise ValueError(
                f"{op}: a layer with one of {self.shape[0]} stacked weights must be in one jnvfp4.layer_index, its "
                f"place in the stack, got {len(indices)}; pass the amax of the layer as w_amax instead"
            )
        (number,) = indices
        if isinstance(number, jax.core.Tracer):  # another place has no amax: the layer's result is NaN
            return self.value.at[number].get(mode="fill", fill_value=jnp.nan)
        if int(number) >= self.shape[0]:  # type: ignore[arg-type]
            raise ValueError(f"{op}: layer_index must be less than {self.shape[0]}, got {number}")
        return self.value[int(number)]  # type: ignore[arg-type]


def find_weight_amaxes(weights: Sequence[tuple[str, Any, bool]]) -> list[WeightAmax]:
    """Finds the amax of each weight (path, array, stacked), over devices by one all-reduce."""
    arrays = [lax.stop_gradient(as_float_array("weight_amax", f"params {path}", w)) for path, w, _ in weights]
    lead = [int(stacked) for _, _, stacked in weights]
    full = [i for i, w in enumerate(arrays) if w.size]
    found = [jnp.zeros(w.shape[:kept], jnp.float32) for w, kept in zip(arrays, lead, strict=True)]
    if full:
        amaxes = bind(weight_amax_p, *(arrays[i] for i in full), lead=tuple(lead[i] for i in full), implementation=None)
        for i, amax in zip(full, amaxes, strict=True):
            found[i] = amax
    return [WeightAmax(amax, w.shape, bool(n)) for amax, w, n in zip(found, arrays, lead, strict=True)]
