"""The public operations on arrays: argument checks, amax, and one primitive each."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import reference, softfloat
from ._primitives._base import bind
from ._primitives.dequantize import dequantize_p
from ._primitives.matmul import OUT_DTYPES, matmul_p
from ._primitives.quantize import INPUT_DTYPES, quantize_p
from .spec import NVFP4, QuantSpec, unsupported_reason
from .tensor import NVFP4Tensor

Implementation = Literal["native", "reference"] | None
ArrayLike = Any  # what jnp.asarray takes


def _array(op: str, name: str, value: ArrayLike) -> jax.Array:
    if isinstance(value, NVFP4Tensor):
        raise TypeError(f"{op}: {name} must be an array, got an NVFP4Tensor")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be an array, got {value!r}") from error


def as_amax(op: str, amax: ArrayLike) -> jax.Array:
    """An array, not weakly typed. A Python number becomes float32; other dtypes are the primitive's to refuse."""
    amax = _array(op, "amax", np.float32(amax) if isinstance(amax, int | float) else amax)
    return lax.convert_element_type(amax, amax.dtype)


def _magnitude(amax: jax.Array) -> jax.Array:
    """|amax|, on bits: a float abs may change a NaN."""
    return softfloat.from_bits(softfloat.to_bits(amax) & softfloat.ABS)


def _check_implementation(op: str, implementation: Implementation) -> None:
    if implementation not in (None, "native", "reference"):
        raise ValueError(f"{op}: implementation must be None, 'native' or 'reference', got {implementation!r}")


def _check_spec(op: str, spec: QuantSpec, key: jax.Array | None) -> None:
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"{op}: spec must be a QuantSpec, got {spec!r}")
    if spec.rounding == "stochastic" and key is None:
        raise ValueError(f'{op}: key must be a JAX PRNG key for rounding="stochastic", got None')
    if spec.rounding == "nearest" and key is not None:
        raise ValueError(f'{op}: key must be None for rounding="nearest", got {key!r}')
    if reason := unsupported_reason(spec):
        raise NotImplementedError(f"{op}: {reason}")


def quantize(
    x: ArrayLike,
    spec: QuantSpec = NVFP4,
    *,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    transpose: bool = False,
    implementation: Implementation = None,
) -> NVFP4Tensor:
    """Quantizes ``x`` to NVFP4: E2M1 codes, one E4M3 decode scale per 16, float32 amax.

    Args:
      x: [..., M, K], float32, bfloat16 or float16. K (M if ``transpose``) a multiple of 16; any number of rows.
      spec: how to quantize.
      amax: float32, the largest magnitude to encode; computed from ``x`` if None. Scope "tensor": () for all
        of ``x``, or ``x.shape[:-2]``, one per matrix. Scope "row": one per row of what is quantized. Larger
        magnitudes saturate. Its sign is ignored.
      key: a JAX PRNG key, required exactly for ``spec.rounding == "stochastic"``.
      transpose: quantize ``x`` with its last two axes swapped; every result shape is that of the swapped array.
      implementation: None for the best one, or "native" (C++ or CUDA) or "reference" (integer jnp). A named
        one that does not exist for the platform raises when compiled.

    Returns:
      The NVFP4Tensor. Where the block scale is a normal number, an element within ``amax`` dequantizes to
      within half an E2M1 step times its block scale.

    Raises:
      ValueError, TypeError: a shape, dtype or argument that does not fit; the message names it.
      NotImplementedError: a spec this version has no implementation for.

    The bytes are those of docs/numerics.md on every platform, sharded or not. Recipe: arXiv:2509.25149;
    block scale and 2D tiles as in NVIDIA TransformerEngine at d0067d0da.
    """
    _check_spec("quantize", spec, key)
    _check_implementation("quantize", implementation)
    x = _array("quantize", "x", x)
    params = {"spec": spec, "transpose": bool(transpose), "implementation": implementation}
    if amax is None:
        if spec.format.amax_scope == "row":
            data, scale, amax = bind(quantize_p, x, **params)
            return NVFP4Tensor(data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), amax, spec.format)
        amax = _tensor_amax(x)
    amax = as_amax("quantize", amax)
    data, scale = bind(quantize_p, x, amax, **params)
    return NVFP4Tensor(data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), _magnitude(amax), spec.format)


def _tensor_amax(x: jax.Array) -> jax.Array:
    """The amax of all of x; a wrong dtype is left for the primitive to name."""
    return reference.find_amax(x, "tensor") if x.dtype in INPUT_DTYPES else jnp.zeros((), jnp.float32)


def quantize_pair(
    x: ArrayLike,
    row_spec: QuantSpec = NVFP4,
    col_spec: QuantSpec = NVFP4,
    *,
    amax: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """Quantizes ``x`` and its transpose: what a linear layer needs for its forward and weight gradient GEMM.

    Args:
      x: [..., M, K], float32, bfloat16 or float16; M and K multiples of 16.
      row_spec: for the tensor of ``x``.
      col_spec: for the tensor of ``x`` with its last two axes swapped.
      amax: None, or the pair of what ``quantize`` takes for either; computed where None.
      key: as in ``quantize``, if either spec rounds stochastically.
      implementation: as in ``quantize``.

    Returns:
      The two tensors of ``quantize(x, row_spec)`` and ``quantize(x, col_spec, transpose=True)``, bit for bit.
    """
    if amax is not None and not (isinstance(amax, tuple) and len(amax) == 2):
        raise ValueError(f"quantize_pair: amax must be None or a pair (row_amax, col_amax), got {amax!r}")
    x = _array("quantize_pair", "x", x)
    amaxes = list(amax or (None, None))
    specs = (row_spec, col_spec)
    for spec in specs:
        _check_spec("quantize_pair", spec, key)
    if all(a is None for a in amaxes) and all(s.format.amax_scope == "tensor" for s in specs):
        amaxes = [_tensor_amax(x)] * 2  # one pass over x for both
    row, col = (
        quantize(x, spec, amax=a, key=key, transpose=t, implementation=implementation)
        for spec, a, t in zip(specs, amaxes, (False, True), strict=True)
    )
    return row, col


def _float_dtype(op: str, name: str, dtype: Any) -> Any:
    dtype = jnp.dtype(dtype)
    if dtype not in OUT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")
    return dtype


def dequantize(t: NVFP4Tensor, dtype: Any = jnp.float32, *, implementation: Implementation = None) -> jax.Array:
    """The values of ``t``: cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))).

    Args:
      t: [..., M, K].
      dtype: float32, bfloat16 or float16.
      implementation: as in ``quantize``.

    Returns: [..., M, K] of ``dtype``. ``s * amax`` overflows to inf for amax above FLT_MAX / 448.
    """
    _check_implementation("dequantize", implementation)
    if not isinstance(t, NVFP4Tensor):
        raise TypeError(f"dequantize: t must be an NVFP4Tensor, got {type(t).__name__}")
    if t.format.rht or t.format.amax_scope == "window64":
        raise NotImplementedError(f"dequantize: {t.format!r} is not implemented in this version")
    dtype = _float_dtype("dequantize", "dtype", dtype)
    params = {"format": t.format, "dtype": dtype, "implementation": implementation}
    return bind(dequantize_p, t.data, t.scale, t.amax, **params)[0]


def matmul_nt(
    a: NVFP4Tensor | ArrayLike,
    b: NVFP4Tensor,
    *,
    out_dtype: Any = jnp.bfloat16,
    bias: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """a b^T: [..., M, N] from a [..., M, K] and b [N, K] or [..., N, K], accumulated in float32.

    Args:
      a: an NVFP4Tensor, or a bfloat16 or float16 array (weight-only).
      b: an NVFP4Tensor; without leading axes it is shared by all of ``a``'s.
      out_dtype: float32, bfloat16 or float16.
      bias: [N], any float dtype, added in float32 before the cast.
      implementation: as in ``quantize``.

    Returns:
      out = cast(fl(fl(alpha * y) + bias)). On the CPU and in the reference the sum y has one pinned order along
      K (docs/numerics.md); on a GPU the tensor cores' order, so equal to it within a rounding bound.

    Raises:
      ValueError, TypeError: shapes, dtypes or formats that do not fit; the message names them.
    """
    _check_implementation("matmul_nt", implementation)
    if not isinstance(b, NVFP4Tensor):
        raise TypeError(f"matmul_nt: b must be an NVFP4Tensor, got {type(b).__name__}")
    quantized = isinstance(a, NVFP4Tensor)
    operands = [a.data, a.scale, a.amax] if quantized else [_array("matmul_nt", "a", a)]
    operands += [b.data, b.scale, b.amax]
    if bias is not None:
        operands.append(_array("matmul_nt", "bias", bias))
    return bind(
        matmul_p,
        *operands,
        a_format=a.format if quantized else None,
        b_format=b.format,
        has_bias=bias is not None,
        out_dtype=_float_dtype("matmul_nt", "out_dtype", out_dtype),
        implementation=implementation,
    )[0]
