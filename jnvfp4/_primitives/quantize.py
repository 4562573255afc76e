"""nvfp4_quantize: (x, amax?, stream?) -> (data, scale, amax where it was not given). See _sides.py."""

from functools import partial

import jax
import numpy as np

from .._core.mesh import axes_of, max_over_devices
from . import _sides
from ._base import Body, Partition, Proposal, make_primitive
from ._sides import Operands, Side, Sides, call_ffi, find_row_amax


def _call_kernel(ops: Operands, sides: Sides) -> list[jax.Array]:
    (side,) = sides
    return call_ffi(
        "nvfp4_quantize",
        ops,
        sides,
        transpose=side.transpose,
        spec=side.spec.ffi_attrs(),
        row_blocks=np.int32(side.blocks_in_row(ops.x.shape)),
    )


def _partition(sides: Sides, proposed: Proposal) -> Partition:
    """Adds a collective only for rows that are split and whose amax is found."""
    operands, results, wrap = _sides.partition(sides, proposed)
    (side,) = sides
    split = tuple(axis for entry in side.contracted(operands[0]) for axis in axes_of(entry))
    if not side.has_amax and side.spec.format.amax_scope == "row" and split:
        return operands, results, lambda local: _with_row_amax(local, split, side)
    return operands, results, wrap


def _with_row_amax(local: Body, axes: tuple[str, ...], side: Side) -> Body:
    """Finds the amax of rows that are split over ``axes`` first: the kernel sees one device's part of a row."""

    def body(x):
        amax = max_over_devices(find_row_amax(x, side.transpose, side.row_axes), axes)
        return (*local(x, amax, params=(side._replace(has_amax=True),)), amax)

    return body


quantize_p = make_primitive(
    "nvfp4_quantize",
    abstract=partial(_sides.abstract, "quantize"),
    local=partial(_sides.quantize, _call_kernel),
    batch=_sides.batch,
    partition=_partition,
    rule=_sides.rule,
    missing=_sides.missing,
)
