"""nvfp4_rht_amax: x -> the amax of the rotated x, one for each index of the first ``keep`` axes.

The tensor amax of a spec with ``rht``. Unlike the amax of x itself it cannot be left to XLA, whose float arithmetic
flushes and reorders.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import BLOCK, NVFP4_RHT
from ._base import Body, Spec, axes_of, block_factors, divisible, make_primitive, sharding_rule, spec_of, typed
from .quantize import batched, check_operand, turn


def _abstract(x: ShapedArray, *, transpose: bool, keep: int) -> list[ShapedArray]:
    check_operand("quantize", x, None, NVFP4_RHT, transpose)
    return [typed(x, x.shape[:keep], jnp.float32, spec_of(x)[:keep])]


def _local(backend: str, x: jax.Array, *, transpose: bool, keep: int) -> Sequence[jax.Array]:
    shape = x.shape[:keep]
    if backend == "empty":
        return [jnp.zeros(shape, jnp.float32)]
    if backend == "reference":
        return [reference.find_rht_amax(jnp.swapaxes(x, -1, -2) if transpose else x, keep)]
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return [jax.ffi.ffi_call("nvfp4_rht_amax", result)(x, transpose=transpose, keep=np.int32(keep))]


def _batch(args, dims, *, transpose: bool, keep: int, implementation: str | None):
    x = batched(args[0].shape[dims[0]], args[0], dims[0])
    return rht_amax_p.bind(x, transpose=transpose, keep=keep + 1, implementation=implementation), [0]


def _layout(
    mesh: Any, specs: list[Spec], shapes: list[tuple[int, ...]], *, transpose: bool, keep: int
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    *lead_sizes, rows, cols = turn(shapes[0], transpose)
    *lead, row, col = turn(specs[0], transpose)
    lead = [divisible(mesh, e, n) for e, n in zip(lead, lead_sizes, strict=True)]
    split = [*lead, divisible(mesh, row, rows), divisible(mesh, col, cols, BLOCK)]
    over = tuple(axis for entry in split[keep:] for axis in axes_of(entry))

    def maximum(local: Body) -> Body:
        if not over:
            return local
        return lambda x: (softfloat.from_bits(lax.pmax(softfloat.to_bits(local(x)[0]), over)),)

    return [turn(split, transpose)], [lead[:keep]], maximum


def _rule(mesh: Any, operands: Any, _results: Any, *, transpose: bool, keep: int) -> Any:
    lead = [f"b{i}" for i in range(operands[0].rank - 2)]
    *_, cols = turn(operands[0].shape, transpose)
    (full, *_), whole = block_factors(mesh, "c", cols // BLOCK)
    term = [*lead, "r", full]
    return sharding_rule([turn(term, transpose)], [lead[:keep]], whole, reduced=tuple(term[keep:]))


rht_amax_p = make_primitive(
    "nvfp4_rht_amax", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule
)
