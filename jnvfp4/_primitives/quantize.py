"""nvfp4_quantize: (x, amax) -> (data, scale), or x -> (data, scale, amax) where the kernel finds it.

The scale is uint8 here, the bits of float8_e4m3fn: a jax.checkpoint policy may save a primitive's results, and JAX
rounds the floats that it saves by IEEE rules, where E4M3's 256 and above are infinite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .. import reference, softfloat
from ..spec import BLOCK, QuantSpec
from ._base import (
    Body,
    Spec,
    axes_of,
    check_explicit,
    divisible,
    make_primitive,
    some_axis_divides,
    spec_of,
    typed,
)

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def _turn(items: Sequence[Any], transpose: bool) -> list:
    """Swaps the last two items: shape or spec of x -> that of what is quantized, and back."""
    items = list(items)
    return [*items[:-2], items[-1], items[-2]] if transpose else items


def _check(x: ShapedArray, amax: ShapedArray | None, spec: QuantSpec, transpose: bool) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"quantize: x must have rank 2 or more, [..., M, K], got x.shape={x.shape}")
    *lead, rows, cols = _turn(x.shape, transpose)
    if cols % BLOCK:
        which = "M (the quantized axis, since transpose=True)" if transpose else "K"
        raise ValueError(
            f"quantize: {which} must be a multiple of {BLOCK}, got x.shape={x.shape}; "
            f"pad it to {-(-cols // BLOCK) * BLOCK} with zeros"
        )
    if spec.block_rows == BLOCK and rows % BLOCK:
        raise ValueError(
            f"quantize: block_rows={BLOCK} needs both M and K to be multiples of {BLOCK}, got x.shape={x.shape}"
        )
    if amax is not None:
        accepted = [(*lead, rows)] if spec.format.amax_scope == "row" else [(), tuple(lead)]
        if amax.shape not in accepted:
            raise ValueError(
                f"quantize: amax must have shape {' or '.join(map(str, dict.fromkeys(accepted)))} for "
                f'amax_scope="{spec.format.amax_scope}" and x.shape={x.shape}, got {amax.shape}'
            )
        if amax.dtype != jnp.float32:
            raise TypeError(f"quantize: amax must be float32, got {amax.dtype}")


def _abstract(x: ShapedArray, *amax: ShapedArray, spec: QuantSpec, transpose: bool) -> list[ShapedArray]:
    _check(x, amax[0] if amax else None, spec, transpose)
    quantized = x.ndim - 2 if transpose else x.ndim - 1
    check_explicit("quantize", x, quantized, BLOCK)
    check_explicit("quantize", x, 2 * x.ndim - 3 - quantized, spec.block_rows)
    *lead, rows, cols = _turn(x.shape, transpose)
    where = _turn(spec_of(x), transpose)
    results = [
        typed(x, (*lead, rows, cols // 2), jnp.uint8, where),
        typed(x, (*lead, rows, cols // BLOCK), jnp.uint8, where),
    ]
    return results if amax else [*results, typed(x, (*lead, rows), jnp.float32, where[:-1])]


def _local(backend: str, x: jax.Array, *amax: jax.Array, spec: QuantSpec, transpose: bool) -> Sequence[jax.Array]:
    *lead, rows, cols = _turn(x.shape, transpose)
    results = [
        jax.ShapeDtypeStruct((*lead, rows, cols // 2), jnp.uint8),
        jax.ShapeDtypeStruct((*lead, rows, cols // BLOCK), jnp.float8_e4m3fn),
    ]
    if not amax:
        results.append(jax.ShapeDtypeStruct((*lead, rows), jnp.float32))
    if backend == "empty":
        data, scale, *found = [jnp.zeros(r.shape, r.dtype) for r in results]
    elif backend == "reference":
        data, scale, *found = reference.quantize(x, spec, amax[0] if amax else None, transpose)[: len(results)]
    else:
        target = "nvfp4_quantize" if amax else "nvfp4_quantize_find_amax"
        call = jax.ffi.ffi_call(target, results)
        data, scale, *found = call(x, *amax, transpose=transpose, spec=spec.ffi_attrs())
    return [data, jax.lax.bitcast_convert_type(scale, jnp.uint8), *found]


def _batch(args, dims, *, spec: QuantSpec, transpose: bool, implementation: str | None):
    x, *amax = args
    dx, *da = dims
    size = x.shape[dx] if dx is not None else amax[0].shape[da[0]]
    x = jnp.moveaxis(x, dx, 0) if dx is not None else jnp.broadcast_to(x, (size, *x.shape))
    if amax:
        *lead, rows, _ = _turn(x.shape, transpose)
        full = (*lead, rows) if spec.format.amax_scope == "row" else tuple(lead)
        a = jnp.moveaxis(amax[0], da[0], 0) if da[0] is not None else amax[0][None]
        if da[0] is None and amax[0].ndim == 0:
            amax = [amax[0]]  # one amax for all examples
        else:
            amax = [jnp.broadcast_to(a.reshape(*a.shape, *(1,) * (len(full) - a.ndim)), full)]
    out = quantize_p.bind(x, *amax, spec=spec, transpose=transpose, implementation=implementation)
    return out, [0] * len(out)


def _layout(
    mesh: Any, specs: list[Spec], shapes: list[tuple[int, ...]], *, spec: QuantSpec, transpose: bool
) -> tuple[list[Spec], list[Spec], Callable[[Body], Body]]:
    *lead_sizes, rows, cols = _turn(shapes[0], transpose)
    *lead, row, col = _turn(specs[0], transpose)
    lead = [divisible(mesh, e, n) for e, n in zip(lead, lead_sizes, strict=True)]
    row, col = divisible(mesh, row, rows, spec.block_rows), divisible(mesh, col, cols, BLOCK)
    x_spec, out = _turn([*lead, row, col], transpose), [*lead, row, col]
    if len(specs) == 2:
        rank = len(shapes[1])
        return [x_spec, [*lead, row][:rank]], [out, out], lambda local: local

    def with_row_amax(local: Body) -> Body:
        if not axes_of(col):
            return local

        def body(x):
            own = reference.find_amax(jnp.swapaxes(x, -1, -2) if transpose else x, "row")
            bits = jax.lax.pmax(softfloat.to_bits(own), axes_of(col))
            amax = softfloat.from_bits(bits)
            return (*local(x, amax)[:2], amax)

        return body

    return [x_spec], [out, out, [*lead, row]], with_row_amax


def _rule(mesh: Any, operands: Any, _results: Any, *, spec: QuantSpec, transpose: bool) -> Any:
    shape = operands[0].shape
    lead = [f"b{i}" for i in range(len(shape) - 2)]
    *_, rows, cols = _turn(shape, transpose)
    fixed: list[str] = []

    def term(col: str) -> str:
        return " ".join([*lead, "r", col])

    if some_axis_divides(mesh, cols // BLOCK):  # one factor for K, K/2 and K/16
        cs = ["c", "c", "c"]
    else:
        cs = ["c", "d", "e"]
        fixed += cs
    if spec.block_rows == BLOCK and not some_axis_divides(mesh, rows // BLOCK):
        fixed.append("r")
    ins = [" ".join(_turn(term(cs[0]).split(), transpose))]
    outs = [term(cs[1]), term(cs[2])]
    if len(operands) == 2:
        ins.append(" ".join([*lead, "r"][: operands[1].rank]))
    else:
        outs.append(" ".join([*lead, "r"]))
    text = ", ".join(ins) + " -> " + ", ".join(outs)
    order = " ".join(ins + outs).split()  # Shardy wants special factors in the order in which they appear
    return (text, {"need_replication_factors": tuple(sorted(fixed, key=order.index))}) if fixed else text


quantize_p = make_primitive(
    "nvfp4_quantize", abstract=_abstract, local=_local, batch=_batch, layout=_layout, rule=_rule
)
