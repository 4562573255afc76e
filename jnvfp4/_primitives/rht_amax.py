"""nvfp4_rht_amax: x -> the amax of the rotated x and that of x, one of each for every index of the first ``keep`` axes.

The first is the tensor amax of a spec with ``rht``, which cannot be left to XLA: its float arithmetic flushes and
reorders. The second is for the other orientation of x, which is not rotated, so that x is read once for both.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of, axes_of_dims, keep_blocks, max_over_devices, names_of_dims, typed
from ..spec import NVFP4_RHT
from ._base import Backend, Partition, Proposal, make_primitive
from ._batching import batched
from ._checks import check_operand
from ._sides import Side


class RhtAmaxParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_rht_amax``."""

    transpose: bool
    keep: int = 0


def _abstract(p: RhtAmaxParams, x: ShapedArray) -> list[ShapedArray]:
    check_operand("quantize", x, None, NVFP4_RHT, p.transpose)
    return 2 * [typed(x, x.shape[: p.keep], jnp.float32, axes_of_dims(x)[: p.keep])]


def _local(p: RhtAmaxParams, backend: Backend, x: jax.Array) -> Sequence[jax.Array]:
    transpose, keep = p
    x = x.reshape(*x.shape[:keep], math.prod(x.shape[keep:-1]), x.shape[-1])  # no block is in two matrices
    if backend.name == "reference":
        rotated = reference.find_rht_amax(jnp.swapaxes(x, -1, -2) if transpose else x, keep)
        return [rotated, reference.find_amax(x.reshape(*x.shape[:keep], -1), "row" if keep else "tensor")]
    result = jax.ShapeDtypeStruct(x.shape[:keep], jnp.float32)
    return jax.ffi.ffi_call("nvfp4_rht_amax", [result, result])(x, transpose=transpose, keep=np.int32(keep))


def _batch(p: RhtAmaxParams, bind: Callable, args, dims):
    x = batched(args[0].shape[dims[0]], args[0], dims[0])
    return bind(p._replace(keep=p.keep + 1), x), [0, 0]


def _partition(p: RhtAmaxParams, proposed: Proposal) -> Partition:
    units = Side(NVFP4_RHT, p.transpose, has_amax=False).units
    axes = keep_blocks(proposed.mesh, proposed.operands[0], proposed.shapes[0], units)
    over = tuple(axis for entry in axes[p.keep :] for axis in axes_of(entry))
    amaxes = 2 * [axes[: p.keep]]
    return [axes], amaxes, lambda local: lambda x: tuple(max_over_devices(amax, over) for amax in local(x))


def _rule(p: RhtAmaxParams, x: Shape) -> tuple[list[list], list[list]]:
    dims = names_of_dims(x)
    return [dims], 2 * [dims[: p.keep]]


rht_amax_p = make_primitive(
    "nvfp4_rht_amax", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
