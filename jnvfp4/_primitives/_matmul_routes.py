"""How one device computes a product: by the kernel of a plan, in one FFI call or as XLA operations.

ffi/plan/matmul.h decides. It is asked with what the lowering knows of the device; the handler asks it again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.typing import DTypeLike

from .. import reference
from .._core import softfloat
from .._native import plans
from ..spec import Format
from ._base import Backend
from ._products import ProductParams


@dataclass(frozen=True)
class MatmulParams(ProductParams):
    """Holds the static parameters of ``nvfp4_matmul``."""

    k_axes: int = 1  # how many axes, the last ones of a and b, are contracted as one
    epsilon: float | None = None  # of the norm of a, whose gain is the last operand; None without a norm

    def bias_and_gain(self, rest: tuple) -> tuple[tuple, tuple]:
        """Divides the operands besides a and b into those of the bias and of the gain: one each, or none."""
        count = len(rest) - (self.epsilon is not None)
        return rest[:count], rest[count:]

    def product(self, flat: Sequence[Any]) -> "Product":
        """Returns the operands by role, with one axis K."""
        a, b, rest = self.split(flat)
        bias, gain = ((*one, None)[0] for one in self.bias_and_gain(rest))
        return Product(self._merged(a, self.a), self._merged(b, self.b), bias, gain, self)

    def _merged(self, parts: tuple, fmt: Format | None) -> tuple:
        """Merges the axes that are contracted: those of data and scale, and of an amax for each window."""
        if self.k_axes == 1:
            return parts
        amax = parts[2:] if fmt is None or fmt.amax_scope != "window64" else ()
        return *(_with_last_axes_merged(part, self.k_axes) for part in parts[: len(parts) - len(amax)]), *amax


def _with_last_axes_merged(part: Any, count: int) -> Any:
    first = part.ndim - count
    shape = (*part.shape[:first], math.prod(part.shape[first:]))
    return jax.ShapeDtypeStruct(shape, part.dtype) if isinstance(part, ShapedArray) else part.reshape(shape)


class Product(NamedTuple):
    """Holds the operands of a product: arrays, or their shapes and dtypes."""

    a: tuple  # data, scale and amax, or one 16-bit array
    b: tuple  # data, scale and amax
    bias: Any  # [N], or of the shape of the result; None without
    gain: Any  # of the norm of a; None without
    params: MatmulParams

    @property
    def windows(self) -> bool:
        formats = self.params.a, self.params.b
        return any(fmt is not None and fmt.amax_scope == "window64" for fmt in formats)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.a[0].shape[:-1], self.b[0].shape[-2]), self.params.out_dtype)


def plan(product: Product, capability: int | None, kernel: str | None) -> plans.MatmulPlan:
    """Asks for the best kernel, or for ``kernel``, on a device: the CPU (capability 0) or a GPU (None: any).

    Raises:
      NotImplementedError: a size is symbolic. The choice of a kernel and its scratch depend on all sizes.
    """
    shapes = product.a[0].shape, product.b[0].shape
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise NotImplementedError(
            "matmul_nt: the sizes of a product must be known when a program is lowered, got "
            f"{product.result.shape} for its result; export one program for each size, or pass "
            'implementation="reference", which is slower'
        )
    *lead, cols, half = product.b[0].shape
    batch = math.prod(lead)
    elements = math.prod(product.a[0].shape[:-1])
    return plans.plan_matmul(
        shape=(batch, elements // max(batch, 1), cols, 2 * half),
        a="nvfp4" if product.params.a else jnp.dtype(product.a[0].dtype).name,
        windows=product.windows,
        out=product.params.out_dtype.name,
        pinned=product.params.pinned,
        capability=capability,
        kernel=kernel,
    )


REFERENCE = plans.MatmulPlan("reference", 0, "", whole_bias=True)


def multiply(product: Product, backend: Backend) -> jax.Array:
    """Computes a b^T on one device, with a norm of a and a bias by XLA where the kernel takes none.

    Raises:
      NotImplementedError: the kernel that ``implementation`` names cannot; the message says why.
    """
    params, chosen = product.params, choose(product, backend)
    if chosen.reason:
        raise NotImplementedError(f"matmul_nt: implementation={backend.kernel!r} cannot run here: {chosen.reason}")
    if product.gain is not None and not chosen.norm:
        a = rms_norm(product.a[0], product.gain, params.epsilon)
        return multiply(product._replace(a=(a,), gain=None, params=replace(params, epsilon=None)), backend)
    if product.bias is not None and product.bias.ndim > 1 and not chosen.whole_bias:
        sums = product._replace(bias=None, params=replace(params, out_dtype=np.dtype(np.float32)))
        return finish(multiply(sums, backend), product.bias, out_dtype=params.out_dtype)
    if chosen.kernel == "reference":
        a = product.a if params.a else product.a[0]
        return reference.matmul(a, product.b, product.bias, params.a, params.b, params.out_dtype)
    if chosen.kernel == "decode_then_dot":
        return _decode_then_dot(product)
    return _call_kernel(product, chosen)


def choose(product: Product, backend: Backend) -> plans.MatmulPlan:
    """Returns the plan; where the self-check has refused its kernel, the exact decode path, or else the reference."""
    if backend.name == "reference":
        return REFERENCE
    chosen = plan(product, backend.capability, backend.kernel)
    refusal = backend.refusal(chosen.kernel)
    if chosen.reason or not refusal:
        return chosen
    if backend.kernel:
        return chosen._replace(reason=refusal)
    decode = plan(product, backend.capability, "decode_then_dot")
    if decode.reason or backend.refusal(decode.kernel):
        return REFERENCE
    return decode


@partial(jax.jit, static_argnames=("epsilon", "split_over"), inline=True)  # an eager call transfers no constants
def rms_norm(a: jax.Array, gain: jax.Array, epsilon: float, split_over: tuple[str, ...] = ()) -> jax.Array:
    """Computes cast(a * rsqrt(mean(a^2) + epsilon) * gain) of rows, which mesh axes may split, in float32."""
    x = a.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    mean = lax.pmean(mean, split_over) if split_over else mean
    return (x * lax.rsqrt(mean + np.float32(epsilon)) * gain.astype(jnp.float32)).astype(a.dtype)


@partial(jax.jit, static_argnames="out_dtype", inline=True)
def finish(y: jax.Array, *bias: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Takes the kernel's last two steps, + bias and the cast.

    On bit patterns: XLA would delete a cast and its inverse, and its float addition flushes subnormal numbers and
    takes 0 + -0 for -0.
    """
    bits = softfloat.to_bits(y)
    for b in bias:
        bits = softfloat.add(bits, jnp.broadcast_to(softfloat.to_bits(b), bits.shape))
    return softfloat.from_bits(bits, out_dtype)


def _call_kernel(product: Product, chosen: plans.MatmulPlan) -> jax.Array:
    params, rest = product.params, (*product.b, _or_absent(product.bias), _or_absent(product.gain))
    attrs = {
        "epsilon": np.float32(params.epsilon or 1),
        "pinned": params.pinned,
        "a_windows": params.a is not None and params.a.amax_scope == "window64",
        "b_windows": params.b.amax_scope == "window64",
    }
    return call_kernel("nvfp4_matmul", params, product.a, rest, product.result, chosen, **attrs)


def call_kernel(
    target: str, params: ProductParams, a: tuple, rest: tuple, like: Any, chosen: plans.MatmulPlan, **attrs
) -> jax.Array:
    """Calls the FFI target of a product with the kernel and the scratch memory of a plan; the result is ``like``."""
    absent = (jnp.zeros((0,), jnp.uint8), jnp.zeros((0,), jnp.float32))
    call = jax.ffi.ffi_call(target, [like, jax.ShapeDtypeStruct((chosen.scratch_bytes,), jnp.uint8)])
    return call(
        *(a if params.a else (*a, *absent)),
        *rest,
        kernel=chosen.kernel,
        a_e4m3_max=np.int32((params.a or Format()).e4m3_max),
        b_e4m3_max=np.int32(params.b.e4m3_max),
        **attrs,
    )[0]


def _or_absent(operand: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if operand is None else operand


def _decode_then_dot(product: Product) -> jax.Array:
    """Decodes both operands exactly, and leaves the GEMM to XLA, which shares decoded weights between GEMMs."""
    params, quantized = product.params, product.params.a is not None
    dense = decode(product.a, jnp.bfloat16) if quantized else product.a[0]
    weight = decode(product.b, dense.dtype)
    batch = tuple(range(weight.ndim - 2))
    if not batch:
        dense = dense.reshape(math.prod(dense.shape[:-1]), dense.shape[-1])
    dims = (((dense.ndim - 1,), (weight.ndim - 1,)), (batch, batch))
    # The precision is named, so that no jax.default_matmul_precision can change the products or their sum.
    y = lax.dot_general(dense, weight, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
    return jax.ffi.ffi_call("nvfp4_epilogue", product.result)(
        y.reshape(product.result.shape),
        product.a[2] if quantized else jnp.zeros((0,), jnp.float32),
        product.b[2],
        _or_absent(product.bias),
        a_e4m3_max=np.int32((params.a or Format()).e4m3_max),
        b_e4m3_max=np.int32(params.b.e4m3_max),
        b_batched=bool(batch),
    )


def decode(parts: tuple, dtype: DTypeLike) -> jax.Array:
    """Computes q * s as 16-bit floats, exact in both types."""
    data, scale, _ = parts
    result = jax.ShapeDtypeStruct((*data.shape[:-1], 2 * data.shape[-1]), dtype)
    return jax.ffi.ffi_call("nvfp4_decode", result)(data, scale)
