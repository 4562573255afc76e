"""Statistics of FP4 tensors: of the layers of a training step, inside it, and of one array.

The statistics of a layer are the gradient of a small array that it takes, its probe. So they need no state, and JAX
sums them over microbatches, scans, rematerialization and devices as it sums gradients:

    probe = jnvfp4.stats.probe()
    loss = lambda w, probe: f(jnvfp4.linear(x, w, recipe, key=key, stats=probe))
    dw, found = jax.grad(loss, (0, 1))(w, probe)
    jnvfp4.stats.read(found).dy.underflow_share
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._layers.stats import SHAPE
from ._layers.stats import collect as collect
from ._layers.stats import probe as probe
from ._ops.arguments import Checks
from ._reports.quantization import QuantizationReport as QuantizationReport
from ._reports.quantization import quantization_report as quantization_report

__all__ = ["OperandStats", "QuantizationReport", "StepStats", "collect", "probe", "quantization_report", "read"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OperandStats:
    """Holds the statistics of one operand of a layer: a pytree of float32 arrays, all means over calls.

    In a call they concern the tensor that fprop reads (of dy, that dgrad reads), in its orientation; where that GEMM
    quantizes none, the transposed one of wgrad (of w, of dgrad). For a spec with ``rht`` they concern rotated values.
    Of a tensor with 512 rows or more, every 16th row along the axis before the last counts; the amax is of all.

    Attributes:
      calls: how often the layer ran: microbatches, devices of a ``shard_map``, examples of ``vmap``, layers of a scan
        that have one probe. It is 0, and so is all else, where nothing was collected or quantized.
      nonzero_share: of the elements, those that were not zero before.
      underflow_share: of the elements, those that were not zero before and whose code is 0.
      saturated_share: of the elements, those larger in magnitude than 6 times their block's dequantized scale (by more
        than rounding, a millionth), where its stored scale is not 0.
      subnormal_scale_share: of the block scales, those that are subnormal E4M3 numbers, not zero.
      relative_error: ||dequantized - x|| / ||x||, Frobenius norms; 0 where the amax is 0 or subnormal, NaN where it is
        not finite, or 2^63 times all that counts.
      amax: the amax of the tensor; the largest of its rows, windows or experts.
    """

    calls: jax.Array
    nonzero_share: jax.Array
    underflow_share: jax.Array
    saturated_share: jax.Array
    subnormal_scale_share: jax.Array
    relative_error: jax.Array
    amax: jax.Array


class StepStats(NamedTuple):
    """Holds the statistics of the operands of a layer, or of several along leading axes."""

    x: OperandStats
    w: OperandStats
    dy: OperandStats


def read(gradient: ArrayLike) -> StepStats:
    """Reads the gradient of a probe.

    Args:
      gradient: float32 [..., 3, 7], a sum over calls: their number, and sums of what ``OperandStats``
        has. Each share is a count in integers, exact for fewer than 2^31 elements, divided once in its call. So the
        means over calls of equal sizes are those of all elements.

    Returns:
      Arrays [...] of each number.

    Raises:
      ValueError: gradient has another shape.
    """
    array = Checks("read").float_array("gradient", gradient)
    if array.shape[-2:] != SHAPE:
        raise ValueError(f"read: gradient must have shape [..., 3, 7], got {array.shape}")
    calls, *sums = jnp.moveaxis(array, -1, 0)
    means = [calls, *(total / jnp.maximum(calls, 1) for total in sums)]
    x, w, dy = (OperandStats(*(of[..., row] for of in means)) for row in range(SHAPE[0]))
    return StepStats(x, w, dy)
