"""nvfp4_dequantize: (data, scale, amax) -> values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from ..spec import BLOCK, WINDOW, Format
from ._base import Body, Spec, block_factors, check_explicit, divisible, make_primitive, sharding_rule, spec_of, typed


def check_parts(op: str, name: str, parts: tuple, fmt: Format) -> None:
    """Refuses parts that are no NVFP4 tensor: shapes and dtypes that do not belong together."""
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
            f'{data.shape} and amax_scope="{fmt.amax_scope}", got {amax.shape}'
        )


def _abstract(
    data: ShapedArray, scale: ShapedArray, amax: ShapedArray, *, format: Format, dtype: Any, rotate_back: bool
) -> list[ShapedArray]:
    check_parts("dequantize", "t", (data, scale, amax), format)
    check_explicit("dequantize", data, data.ndim - 1, format.unit // 2)
    return [typed(data, (*data.shape[:-1], 2 * data.shape[-1]), dtype, spec_of(data))]


def _local(
    backend: str,
    data: jax.Array,
    scale: jax.Array,
    amax: jax.Array,
    *,
    format: Format,
    dtype: Any,
    rotate_back: bool,
) -> Sequence[jax.Array]:
    result = jax.ShapeDtypeStruct((*data.shape[:-1], 2 * data.shape[-1]), dtype)
    if backend == "empty":
        return [jnp.zeros(result.shape, result.dtype)]
    if backend == "reference":
        return [reference.dequantize(data, scale, amax, format, dtype, rotate_back)]
    call = jax.ffi.ffi_call("nvfp4_dequantize", [result])
    windows, rotated = format.amax_scope == "window64", format.rht and rotate_back
    return call(data, scale, amax, e4m3_max=np.int32(format.e4m3_max), windows=windows, rotate_back=rotated)


def batch_parts(size: int, parts: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """Moves the batch axis of data, scale and amax to the front; a batched amax gets all leading axes."""
    data, scale = (
        jnp.broadcast_to(p, (size, *p.shape)) if d is None else jnp.moveaxis(p, d, 0)
        for p, d in zip(parts[:2], dims[:2], strict=True)
    )
    amax, d = parts[2], dims[2]
    if d is None and amax.ndim == 0:
        return [data, scale, amax]
    amax = jnp.moveaxis(amax, d, 0) if d is not None else amax[None]
    if amax.ndim == data.ndim:  # one a window
        return [data, scale, jnp.broadcast_to(amax, (size, *amax.shape[1:]))]
    rank = data.ndim - 1 if amax.ndim == data.ndim - 1 else data.ndim - 2
    return [
        data,
        scale,
        jnp.broadcast_to(amax.reshape(*amax.shape, *(1,) * (rank - amax.ndim)), data.shape[:rank]),
    ]


def _batch(args, dims, **params):
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return dequantize_p.bind(*batch_parts(size, args, dims), **params), [0]


def _layout(
    mesh: Any,
    specs: list[Spec],
    shapes: list[tuple[int, ...]],
    *,
    format: Format,
    dtype: Any,
    rotate_back: bool,
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    *head, col = specs[0]
    head = [divisible(mesh, e, n) for e, n in zip(head, shapes[0][:-1], strict=True)]
    spec = [*head, divisible(mesh, col, shapes[0][-1], format.unit // 2)]
    return [spec, spec, spec[: len(shapes[2])]], [spec], lambda local: local


def _rule(mesh: Any, operands: Any, _results: Any, *, format: Format, dtype: Any, rotate_back: bool) -> Any:
    head = [f"b{i}" for i in range(operands[0].rank - 1)]
    (full, half, blocks, windows), whole = block_factors(mesh, "c", 2 * operands[0].shape[-1] // format.unit)
    amax = [*head, windows][: operands[2].rank]
    return sharding_rule([[*head, half], [*head, blocks], amax], [[*head, full]], whole)


dequantize_p = make_primitive(
    "nvfp4_dequantize", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule
)
