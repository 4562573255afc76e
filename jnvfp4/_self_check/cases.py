"""The checks of each primitive that has kernels: of the paths that a program takes, and of one path by its name."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from .._native.self_check import CASES, Call, Check
from .._primitives._base import Backend
from .._primitives._matmul_routes import MatmulParams, choose
from .._primitives._products import ProductParams
from .._primitives._sides import Sides
from .._primitives.append_kv import append_kv_p
from .._primitives.decode_attention import decode_attention_p
from .._primitives.dequantize import DequantizeParams, dequantize_p
from .._primitives.grouped_matmul import grouped_matmul_p
from .._primitives.grouped_matmul import plan as plan_grouped
from .._primitives.matmul import matmul_p
from .._primitives.quantize import quantize_p
from .._primitives.quantize_pair import quantize_pair_p
from .._primitives.rht_amax import RhtAmaxParams, rht_amax_p
from .._primitives.transpose import transpose_p
from ..spec import BLOCK, Format
from .known_answers import (
    EVERY_SCALE,
    append_calls,
    attention_calls,
    describe,
    grouped_calls,
    product_calls,
    quantizer_calls,
    tensor,
    values,
)


# ---------------------------------------------------------------- one path
def quantizer_check(primitive: Primitive, sides: Sides, dtype: DTypeLike) -> Check:
    """Returns the check of the sides of ``nvfp4_quantize`` or ``nvfp4_quantize_pair``, for arrays of a dtype."""
    sides = tuple(side._replace(row_axes=1) for side in sides)
    path = f"{primitive.name.removeprefix('nvfp4_')} {describe(sides)} of {jnp.dtype(dtype).name}"
    return Check(path, primitive, "native", partial(quantizer_calls, sides, dtype))


def rht_amax_check(transpose: bool, dtype: DTypeLike) -> Check:
    """Returns the check of an orientation, for arrays of a dtype."""

    def calls() -> Iterator[Call]:
        x = np.stack([values(80, 336, dtype), values(80, 336, dtype, seed=1) / 3]).astype(dtype)
        for keep in (0, 1):
            yield Call((x,), RhtAmaxParams(transpose, keep))

    path = f"rht_amax{' transposed' * transpose} of {jnp.dtype(dtype).name}"
    return Check(path, rht_amax_p, "native", calls)


def dequantize_check(params: DequantizeParams) -> Check:
    """Returns the check of a format and a dtype."""

    def calls() -> Iterator[Call]:
        yield Call(tensor(np.random.default_rng(0), (77, 320), params.format, EVERY_SCALE), params)

    rotated = " rotated" * (params.format.rht and not params.rotate_back)
    path = f"dequantize {params.format.name}{rotated} to {params.dtype.name}"
    return Check(path, dequantize_p, "native", calls)


def transpose_check() -> Check:
    """Returns the check of ``nvfp4_transpose``."""

    def calls() -> Iterator[Call]:
        data, scale, _ = tensor(np.random.default_rng(0), (80, 336), Format(), EVERY_SCALE)
        yield Call((data, np.repeat(scale[::BLOCK], BLOCK, axis=0).view(np.uint8)), None)

    return Check("transpose", transpose_p, "native", calls)


def product_check(kernel: str, capability: int | None) -> Check:
    """Returns the check of a kernel of ``nvfp4_matmul``."""
    return Check(f"matmul_nt {kernel}", matmul_p, kernel, partial(product_calls, kernel, capability))


def grouped_check(kernel: str, capability: int | None) -> Check:
    """Returns the check of a kernel of ``nvfp4_grouped_matmul``."""
    return Check(f"grouped_matmul_nt {kernel}", grouped_matmul_p, kernel, partial(grouped_calls, kernel, capability))


def cache_check(primitive: Primitive, paged: bool, dtype: DTypeLike, depth: int) -> Check:
    """Returns the check of a primitive of a KV cache, for new tokens of a dtype and heads of ``depth`` elements."""
    calls = attention_calls if primitive is decode_attention_p else append_calls
    name, where = primitive.name.removeprefix("nvfp4_"), "in pages" if paged else "contiguous"
    path = f"{name} of {jnp.dtype(dtype).name}, {depth} elements, {where}"
    return Check(path, primitive, "native", partial(calls, paged, dtype, depth))


# ---------------------------------------------------------------- the paths of a program
def _products(params: MatmulParams, backend: Backend, flat: Sequence[ShapedArray]) -> list[Check]:
    """Returns the check of the kernel for these sizes, and of the one for few rows if a device may have a part."""
    product = params.product(flat)
    kernels = [choose(product, backend)]
    if backend.split and backend.kernel is None:
        *lead, _, depth = product.a[0].shape
        few = jax.ShapeDtypeStruct((*lead, 1, depth), product.a[0].dtype)
        kernels.append(choose(product._replace(a=(few, *product.a[1:])), backend))
    names = dict.fromkeys(chosen.kernel for chosen in kernels if not chosen.reason and chosen.kernel != "reference")
    return [product_check(name, backend.capability) for name in names]


def _grouped_products(params: ProductParams, backend: Backend, flat: Sequence[ShapedArray]) -> list[Check]:
    chosen = plan_grouped(params, params.split(flat), backend.capability, backend.kernel)
    if chosen.reason or backend.refusal(chosen.kernel):
        return []
    return [grouped_check(chosen.kernel, backend.capability)]


def _cached(primitive: Primitive, params: Any, _: Backend, flat: Sequence[ShapedArray]) -> list[Check]:
    new = flat[6]  # q, or k
    return [cache_check(primitive, params.paged, new.dtype, new.shape[-1])]


def _one(check: Callable[[Any, Any], Check]) -> Callable[[Any, Backend, Sequence[ShapedArray]], list[Check]]:
    """Makes a case of a check of parameters and the dtype of the first operand."""
    return lambda params, _, flat: [check(params, flat[0].dtype)]


CASES |= {
    "nvfp4_quantize": _one(partial(quantizer_check, quantize_p)),
    "nvfp4_quantize_pair": _one(partial(quantizer_check, quantize_pair_p)),
    "nvfp4_rht_amax": _one(lambda params, dtype: rht_amax_check(params.transpose, dtype)),
    "nvfp4_dequantize": _one(lambda params, _: dequantize_check(params)),
    "nvfp4_transpose": _one(lambda *_: transpose_check()),
    "nvfp4_matmul": _products,
    "nvfp4_grouped_matmul": _grouped_products,
    "nvfp4_decode_attention": partial(_cached, decode_attention_p),
    "nvfp4_append_kv": partial(_cached, append_kv_p),
}
