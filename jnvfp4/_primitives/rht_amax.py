"""nvfp4_rht_amax: x -> the amax of the rotated x, one for each index of the first ``keep`` axes.

The tensor amax of a spec with ``rht``. Unlike the amax of x itself it cannot be left to XLA, whose float arithmetic
flushes and reorders.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from ..spec import NVFP4_RHT
from ._base import Axes, Backend, Body, Shape, axes_of, axes_of_dims, make_primitive, typed
from ._operands import Side, batched, check_operand, keep_blocks, max_over_devices, names_of_dims


def _abstract(x: ShapedArray, *, transpose: bool, keep: int) -> list[ShapedArray]:
    check_operand("quantize", x, None, NVFP4_RHT, transpose)
    return [typed(x, x.shape[:keep], jnp.float32, axes_of_dims(x)[:keep])]


def _local(backend: Backend, x: jax.Array, *, transpose: bool, keep: int) -> Sequence[jax.Array]:
    if backend.name == "reference":
        return [reference.find_rht_amax(jnp.swapaxes(x, -1, -2) if transpose else x, keep)]
    result = jax.ShapeDtypeStruct(x.shape[:keep], jnp.float32)
    return [jax.ffi.ffi_call("nvfp4_rht_amax", result)(x, transpose=transpose, keep=np.int32(keep))]


def _batch(args, dims, *, transpose: bool, keep: int, implementation: str | None):
    x = batched(args[0].shape[dims[0]], args[0], dims[0])
    return rht_amax_p.bind(x, transpose=transpose, keep=keep + 1, implementation=implementation), [0]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], *, transpose: bool, keep: int
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    axes = keep_blocks(mesh, operands[0], shapes[0], Side(NVFP4_RHT, transpose, has_amax=False).units)
    over = tuple(axis for entry in axes[keep:] for axis in axes_of(entry))
    return [axes], [axes[:keep]], lambda local: lambda x: (max_over_devices(local(x)[0], over),)


def _rule(x: Shape, *, keep: int, **_: Any) -> tuple[list[list], list[list]]:
    dims = names_of_dims(x)
    return [dims], [dims[:keep]]


rht_amax_p = make_primitive(
    "nvfp4_rht_amax", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
