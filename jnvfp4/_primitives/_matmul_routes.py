"""How one device computes a product: by the kernel of a plan, in one FFI call or as XLA operations.

ffi/plan/matmul.h decides. It is asked with what the lowering knows of the device; the handler asks it again.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import reference
from .._native import plans
from ..spec import Format
from ._base import Backend


class Product(NamedTuple):
    """Holds the operands of a product: arrays, or their shapes and dtypes."""

    a: tuple  # data, scale and amax, or one 16-bit array
    b: tuple  # data, scale and amax
    bias: Any  # None without
    a_format: Format | None
    b_format: Format
    out_dtype: Any
    accumulation: str

    @property
    def windows(self) -> bool:
        return any(fmt is not None and fmt.amax_scope == "window64" for fmt in (self.a_format, self.b_format))

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.a[0].shape[:-1], self.b[0].shape[-2]), self.out_dtype)


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
        a="nvfp4" if product.a_format else jnp.dtype(product.a[0].dtype).name,
        windows=product.windows,
        out=jnp.dtype(product.out_dtype).name,
        pinned=product.accumulation == "pinned",
        capability=capability,
        kernel=kernel,
    )


def multiply(product: Product, backend: Backend) -> jax.Array:
    """Computes a b^T on one device.

    Raises:
      NotImplementedError: the kernel that ``implementation`` names cannot; the message says why.
    """
    chosen = choose(product, backend)
    if chosen.reason:
        raise NotImplementedError(f"matmul_nt: implementation={backend.kernel!r} cannot run here: {chosen.reason}")
    if chosen.kernel == "reference":
        return by_reference(product)
    if chosen.kernel == "decode_then_dot":
        return _decode_then_dot(product)
    return _call_kernel(product, chosen)


def by_reference(p: Product) -> jax.Array:
    """Computes a b^T by the reference."""
    return reference.matmul(p.a if p.a_format else p.a[0], p.b, p.bias, p.a_format, p.b_format, p.out_dtype)


def choose(product: Product, backend: Backend) -> plans.MatmulPlan:
    """Returns the plan; where the self-check has refused its kernel, the exact decode path, or else the reference."""
    chosen = plan(product, backend.capability, backend.kernel)
    refusal = backend.refusal(chosen.kernel)
    if chosen.reason or not refusal:
        return chosen
    if backend.kernel:
        return chosen._replace(reason=refusal)
    decode = plan(product, backend.capability, "decode_then_dot")
    if decode.reason or backend.refusal(decode.kernel):
        return plans.MatmulPlan("reference", 0, "")
    return decode


def _call_kernel(product: Product, chosen: plans.MatmulPlan) -> jax.Array:
    a_format, b_format = product.a_format or Format(), product.b_format
    absent = (jnp.zeros((0,), jnp.uint8), jnp.zeros((0,), jnp.float32))
    call = jax.ffi.ffi_call("nvfp4_matmul", [product.result, jax.ShapeDtypeStruct((chosen.scratch_bytes,), jnp.uint8)])
    return call(
        *(product.a if product.a_format else (*product.a, *absent)),
        *product.b,
        _bias(product),
        kernel=chosen.kernel,
        pinned=product.accumulation == "pinned",
        a_e4m3_max=np.int32(a_format.e4m3_max),
        b_e4m3_max=np.int32(b_format.e4m3_max),
        a_windows=a_format.amax_scope == "window64",
        b_windows=b_format.amax_scope == "window64",
    )[0]


def _bias(product: Product) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if product.bias is None else product.bias


def _decode_then_dot(product: Product) -> jax.Array:
    """Decodes both operands exactly, and leaves the GEMM to XLA, which shares decoded weights between GEMMs."""
    quantized = product.a_format is not None
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
        _bias(product),
        a_e4m3_max=np.int32((product.a_format or Format()).e4m3_max),
        b_e4m3_max=np.int32(product.b_format.e4m3_max),
        b_batched=bool(batch),
    )


def decode(parts: tuple, dtype: Any) -> jax.Array:
    """Computes q * s as 16-bit floats, exact in both types."""
    data, scale, _ = parts
    result = jax.ShapeDtypeStruct((*data.shape[:-1], 2 * data.shape[-1]), dtype)
    return jax.ffi.ffi_call("nvfp4_decode", result)(data, scale)
