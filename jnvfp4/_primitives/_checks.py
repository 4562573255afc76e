"""Checks of the operands of primitives: arrays that kernels read, and the parts of an NVFP4 tensor."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.typing import DTypeLike

from .._core.mesh import Shape, check_explicit
from ..spec import BLOCK, WINDOW, Format, QuantSpec

FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_float(op: str, name: str, dtype: DTypeLike) -> None:
    """Raises unless ``dtype`` is one of the three that kernels read and write."""
    if dtype not in FLOAT_DTYPES:
        remedy = "; cast it" if jnp.issubdtype(dtype, jnp.floating) else ""
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}{remedy}")


def check_array(op: str, x: Any) -> None:
    """Raises unless x is a float32, bfloat16 or float16 array of rank 2 or more."""
    check_float(op, "x", x.dtype)
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have rank 2 or more, [..., M, K], got x.shape={x.shape}")


def check_operand(
    op: str,
    x: ShapedArray,
    amax: ShapedArray | None,
    spec: QuantSpec,
    transpose: bool,
    row_axes: int = 1,
) -> None:
    """Refuses an array, or an amax for it, that ``spec`` cannot quantize in this orientation."""
    check_array(op, x)
    *_, rows, cols = turn(x.shape, transpose)
    if cols % spec.unit:
        which = "M (the quantized axis, since it is transposed)" if transpose else "K"
        why = ' for amax_scope="window64"' if spec.unit == WINDOW else ""
        raise ValueError(
            f"{op}: {which} must be a multiple of {spec.unit}{why}, got x.shape={x.shape}; "
            f"pad it to {-(-cols // spec.unit) * spec.unit} with zeros"
        )
    if spec.block_rows == BLOCK and rows % BLOCK:
        raise ValueError(
            f"{op}: block_rows={BLOCK} needs both M and K to be multiples of {BLOCK}, got x.shape={x.shape}; "
            f"pad {'K' if transpose else 'M'} to {rows + -rows % BLOCK}, or take a spec of 1x16 blocks"
        )
    if amax is not None:
        accepted = amax_shapes(x.shape, spec, transpose, row_axes)
        if amax.shape not in accepted:
            raise ValueError(
                f"{op}: amax must have shape {' or '.join(map(str, accepted))} for "
                f'amax_scope="{spec.format.amax_scope}" and x.shape={x.shape}, got {amax.shape}'
            )
        if amax.dtype != jnp.float32:
            raise TypeError(f"{op}: amax must be float32, got {amax.dtype}")
    rows_axis, blocks_axis = turn([x.ndim - 2, x.ndim - 1], transpose)
    check_explicit(op, x, blocks_axis, spec.unit)
    check_explicit(op, x, rows_axis, spec.block_rows)


def amax_shapes(shape: Sequence[int], spec: QuantSpec, transpose: bool, row_axes: int = 1) -> list[Shape]:
    """Returns the shapes that an amax of x may have; there is one for scopes whose amax a quantizer can find."""
    if spec.format.amax_scope == "tensor":
        return list(dict.fromkeys([(), tuple(shape[: -1 - row_axes])]))
    *rows, cols = turn(shape, transpose, row_axes)
    if spec.format.amax_scope == "window64":
        return [(*rows, cols // WINDOW)]
    return [tuple(rows[: len(shape) - row_axes] if transpose else rows)]


def check_parts(op: str, name: str, parts: tuple, fmt: Format) -> None:
    """Raises unless data, scale and amax have the shapes and dtypes of one NVFP4 tensor."""
    data, scale, amax = parts
    for field, value, dtype in (
        ("data", data, jnp.uint8),
        ("scale", scale, jnp.float8_e4m3fn),
        ("amax", amax, jnp.float32),
    ):
        if value.dtype != dtype:
            raise TypeError(f"{op}: {name}.{field} must be {jnp.dtype(dtype).name}, got {value.dtype}")
    if len(data.shape) < 2:
        raise ValueError(f"{op}: {name} must have rank 2 or more, [..., M, K], got data {data.shape}")
    *lead, rows, half = data.shape
    if half % 8:
        raise ValueError(f"{op}: K of {name} must be a multiple of {BLOCK}, got K={2 * half}")
    if scale.shape != (*lead, rows, half // 8):
        raise ValueError(
            f"{op}: {name}.scale must have shape {(*lead, rows, half // 8)} for data {data.shape}, got {scale.shape}"
        )
    accepted = [(), tuple(lead), (*lead, rows)]
    if fmt.amax_scope == "row":
        accepted = accepted[-1:]
    if fmt.amax_scope == "window64":
        if half % (WINDOW // 2):
            raise ValueError(f'{op}: K of {name} must be a multiple of {WINDOW} for "window64", got K={2 * half}')
        accepted = [(*lead, rows, 2 * half // WINDOW)]
    if amax.shape not in accepted:
        raise ValueError(
            f"{op}: {name}.amax must have shape {' or '.join(map(str, dict.fromkeys(accepted)))} for data "
            f'{data.shape} and amax_scope="{fmt.amax_scope}", got {amax.shape}{_hint_of_vmap(op, amax.shape, lead)}'
        )


def _hint_of_vmap(op: str, amax: Shape, lead: Sequence[int]) -> str:
    """Says what to do with the amax that ``jax.vmap`` has found: one for each example, and not for each matrix."""
    axes = len(amax)
    if not 0 < axes < len(lead) or tuple(amax) != tuple(lead[:axes]):
        return ""
    which = "first axis" if axes == 1 else f"first {axes} axes"
    over = "this axis" if axes == 1 else f"these {axes}"
    return f"; it has one for each index of the {which}, so call {op} in jax.vmap over {over}"


def turn(items: Sequence[Any], transpose: bool, row_axes: int = 1) -> list:
    """Moves the last item before ``row_axes`` others if ``transpose``: of a shape or sharding of x."""
    items = list(items)
    first = len(items) - 1 - row_axes
    return [*items[:first], items[-1], *items[first:-1]] if transpose else items
