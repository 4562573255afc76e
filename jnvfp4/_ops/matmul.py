"""Products of quantized tensors: argument checks, and one primitive for each."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core.tensor import NVFP4Tensor, parts_of
from .._native import plans
from .._primitives._base import bind
from .._primitives._matmul_routes import MatmulParams
from .._primitives._products import ProductParams
from .._primitives.grouped_matmul import grouped_matmul_p
from .._primitives.matmul import matmul_p
from .arguments import Accumulation, Checks, operation


@operation
def matmul_nt(
    a: NVFP4Tensor | ArrayLike,
    b: NVFP4Tensor,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    bias: ArrayLike | None = None,
    norm: tuple[ArrayLike, float] | None = None,
    accumulation: Accumulation = "fast",
    implementation: str | None = None,
) -> jax.Array:
    """Computes a b^T: [..., M, N] from a [..., M, K] and b [N, K] or [..., N, K], accumulated in float32.

    Args:
      a: an NVFP4Tensor, or a bfloat16 or float16 array. An array cannot be multiplied by a b of amax scope "window64".
      b: an NVFP4Tensor. Without leading axes it is the right operand of every matrix of ``a``.
      out_dtype: float32, bfloat16 or float16.
      bias: [N] or, as a residual, of the shape of the result; any float dtype. It is added in float32 before the cast.
      norm: (gain, epsilon) multiplies the RMS norm of the rows of an ``a`` that is not quantized, instead of ``a``:
        a * rsqrt(mean(a^2) + epsilon) * gain in float32, then rounded to the dtype of ``a``. (LlamaRMSNorm of
        transformers rounds before it multiplies by the gain.) The gain is [K], any float dtype, and epsilon a Python
        number. In shard_map the mean is over the K of the device. On Hopper, if K is a multiple of 256, it costs no
        kernel up to 4 rows, and a residual none up to 16; elsewhere both are as fast as outside.
      accumulation: the order of the sums along K. "fast" is the order that is fastest on the device. "pinned" is the
        order of docs/numerics.md, with the bits of the CPU and the reference. If K is split over devices, it holds
        within the part of each device. It says nothing of the sum of squares of a norm, whose order is never defined.
      implementation: as in ``quantize``, or the name of a kernel (``jnvfp4.supports("matmul_nt", a, b).kernel``). If
        that kernel cannot run these operands, compilation raises.

    Returns:
      [..., M, N] of ``out_dtype``: cast(fl(fl(alpha * y) + bias)), where y is the sum along K and alpha a factor made
      of the amaxes of the quantized operands. The CPU and the reference always sum in the pinned order, and so does a
      GPU other than Hopper if an operand has amax scope "window64". Otherwise "fast" on a GPU uses the order of its
      tensor cores, which is not defined; the result then differs from the pinned one within a rounding bound.

    Raises:
      ValueError, TypeError: shapes, dtypes or formats do not fit; the message names them.
    """
    check = Checks("matmul_nt")
    check.lowering(implementation, plans.matmul_kernels())
    check.choice("accumulation", accumulation, get_args(Accumulation))
    b = check.tensor("b", b)
    operands = [*(parts_of(a) if isinstance(a, NVFP4Tensor) else [check.array("a", a)]), *parts_of(b)]
    if bias is not None:
        operands.append(check.array("bias", bias))
    a_format, epsilon = a.format if isinstance(a, NVFP4Tensor) else None, None
    if norm is not None:
        if a_format is not None:
            raise ValueError("matmul_nt: norm must be None where a is quantized; normalize a before jnvfp4.quantize")
        gain, epsilon = check.norm(norm)
        operands.append(gain)
    out = check.float_dtype("out_dtype", out_dtype)
    params = MatmulParams(a_format, b.format, out, accumulation, epsilon=epsilon)
    return bind(matmul_p, *operands, params=params, implementation=implementation)[0]


@operation
def grouped_matmul_nt(
    a: NVFP4Tensor | ArrayLike,
    b: NVFP4Tensor,
    group_sizes: ArrayLike,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation = "fast",
    implementation: str | None = None,
) -> jax.Array:
    """Computes the product of each group of rows of ``a`` with a matrix of its own, as a mixture of experts needs it.

    Args:
      a: [M, K], an NVFP4Tensor of amax scope "tensor" or "row", or a bfloat16 or float16 array. The rows of a group
        follow each other, and group g + 1 follows group g; group 0 begins at row 0.
      b: an NVFP4Tensor [G, N, K] of the same scopes: a matrix for each group, whose amax has the shape [G] or [G, N].
        One amax () is that of all groups.
      group_sizes: int32 [G], how many rows each group has. It stays on the device: no size is read by the host. A
        negative size counts as 0. If the sum is less than M, the rows beyond it belong to no group. If it is more, the
        groups are cut at row M; of a NumPy array or a list, whose numbers are known, that is an error.
      out_dtype: float32, bfloat16 or float16.
      accumulation: as in ``matmul_nt``. On GPUs "pinned" needs one of Hopper and a quantized ``a``.
      implementation: as in ``quantize``, or the name of a kernel (``jnvfp4.supports("grouped_matmul_nt", a, b,
        group_sizes).kernel``). If that kernel cannot run these operands, compilation raises.

    Returns:
      [M, N] of ``out_dtype``. Row m is that of ``matmul_nt(a[m:m + 1], b[g])`` for the group g that holds it: the same
      bits on the CPU, in the reference and in the pinned order; else the sums along K on a GPU are exact products in
      an order that is not defined. Rows that no group holds are zero, whatever ``a`` has there. A group without rows
      costs nothing in the kernels of CPUs and of Hopper.

    Raises:
      ValueError, TypeError: shapes, dtypes or formats do not fit; the message names them.
      NotImplementedError: where the program is compiled, if the device has no kernel of the pinned order.
    """
    check = Checks("grouped_matmul_nt")
    check.lowering(implementation, plans.grouped_kernels())
    check.choice("accumulation", accumulation, get_args(Accumulation))
    b = check.tensor("b", b)
    left = parts_of(a) if isinstance(a, NVFP4Tensor) else [check.array("a", a)]
    data, scale, amax = parts_of(b)
    if amax.ndim == 0 and data.ndim == 3:
        amax = jnp.broadcast_to(amax, data.shape[:1])
    operands = [*left, data, scale, amax, check.group_sizes(group_sizes, math.prod(left[0].shape[:1]))]
    a_format = a.format if isinstance(a, NVFP4Tensor) else None
    params = ProductParams(a_format, b.format, check.float_dtype("out_dtype", out_dtype), accumulation)
    return bind(grouped_matmul_p, *operands, params=params, implementation=implementation)[0]


def contract_rows(
    a: NVFP4Tensor, b: NVFP4Tensor, row_axes: int, *, out_dtype: np.dtype, accumulation: str, implementation: str | None
) -> jax.Array:
    """Computes ``matmul_nt`` of tensors [M, *rows] and [N, *rows] that ``quantize_sides`` has transposed."""
    params = MatmulParams(a.format, b.format, jnp.dtype(out_dtype), accumulation, row_axes)
    return bind(matmul_p, *parts_of(a), *parts_of(b), params=params, implementation=implementation)[0]
