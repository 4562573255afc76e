"""nvfp4_quantize_pair: x -> the parts of x and of its transpose, in one pass over x. See _sides.py.

An amax is an operand but for scope window64, where the kernel finds it.
"""

from functools import partial

import jax
import numpy as np

from ..spec import QuantSpec
from . import _sides
from ._base import make_primitive
from ._sides import Operands, Side, Sides, call_ffi

Specs = tuple[QuantSpec, QuantSpec]


def sides_of(specs: Specs) -> Sides:
    """Returns the static parameters for a pair of specs."""
    return tuple(
        Side(spec, t, spec.format.amax_scope != "window64") for spec, t in zip(specs, (False, True), strict=True)
    )


def _call_kernel(ops: Operands, sides: Sides) -> list[jax.Array]:
    row, col = sides
    return call_ffi(
        "nvfp4_quantize_pair",
        ops,
        sides,
        row_spec=row.spec.ffi_attrs(),
        col_spec=col.spec.ffi_attrs(),
        row_blocks=np.int32(row.blocks_in_row(ops.x.shape)),
        col_blocks=np.int32(col.blocks_in_row(ops.x.shape)),
    )


quantize_pair_p = make_primitive(
    "nvfp4_quantize_pair",
    abstract=partial(_sides.abstract, "quantize_pair"),
    local=partial(_sides.quantize, _call_kernel),
    batch=_sides.batch,
    partition=_sides.partition,
    rule=_sides.rule,
)
