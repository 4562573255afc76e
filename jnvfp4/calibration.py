"""Weights quantized with a look at what they multiply: GPTQ (arXiv 2210.17323) on NVFP4 blocks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from . import reference
from ._core.mesh import axes_of_dims
from ._core.softfloat import from_bits, to_bits
from ._core.tensor import NVFP4Tensor
from ._ops.arguments import Checks, operation
from ._ops.quantize import quantize
from .spec import BLOCK, NVFP4, QuantSpec

__all__ = ["gptq", "hessian"]

_DAMPING = 0.01  # as in GPTQ's own code


def hessian(x: ArrayLike) -> jax.Array:
    """Computes X^T X of what a layer multiplies by its weights. Add those of all batches.

    Args:
      x: [..., K], float32, bfloat16 or float16. Any leading axis may be sharded, on an Auto mesh.

    Returns:
      float32 [K, K]. XLA sums in float32, in its own order.

    Raises:
      ValueError, TypeError: x has no axis, is no float array, or is sharded on an Explicit mesh.
    """
    check = Checks("hessian")
    x = check.float_array("x", x)
    _refuse_explicit(check, "x", x, 0)
    if x.ndim < 1:
        raise ValueError("hessian: x must have shape [..., K], got a scalar")
    rows = x.reshape(-1, x.shape[-1])
    highest = lax.Precision.HIGHEST  # float32 stays float32, never TF32
    return lax.dot_general(rows, rows, (((0,), (0,)), ((), ())), precision=highest, preferred_element_type=jnp.float32)


@operation
def gptq(
    w: ArrayLike,
    hessian: ArrayLike,
    spec: QuantSpec = NVFP4,
    *,
    amax: ArrayLike | None = None,
    damping: float = _DAMPING,
) -> NVFP4Tensor:
    """Quantizes the weights of a layer one column after another; those behind it make up for its error.

    The scales of 16 columns are chosen by ``spec`` when their turn comes, of what the columns before made of them.
    Where inputs are not correlated, or were never seen (H = 0), the result is that of ``jnvfp4.quantize``.

    Args:
      w: [..., N, K], float32, bfloat16 or float16, K a multiple of 16; leading axes are experts. N may be sharded, on
        an Auto mesh.
      hessian: H = X^T X (``hessian``), or any multiple of it, float32 [..., K, K] with the leading axes of w.
      spec: of 1x16 blocks that are rounded to nearest and not rotated, with amax scope "tensor" or "row".
      amax: as in ``jnvfp4.quantize``; None is that of w, or of each matrix or row of it.
      damping: what is added to the diagonal of H, in parts of its mean: a Python number.

    Returns:
      The weights in the format of ``spec``. Sums over columns are XLA's, in float32: unlike those of
      ``jnvfp4.quantize``, the bits may differ between platforms. They are NaN where H has a NaN, or is not positive
      definite in float32 when it is damped.

    Raises:
      ValueError, TypeError: shapes, dtypes or the spec do not fit; the message names them.
    """
    check = Checks("gptq")
    check.spec("spec", spec)
    w, h = check.float_array("w", w), check.array("hessian", hessian)
    if w.ndim < 2 or w.shape[-1] % BLOCK or not w.shape[-1]:
        raise ValueError(
            f"{check.op}: w must have shape [..., N, K] with K a positive multiple of {BLOCK}, got {w.shape}"
        )
    if h.dtype != jnp.float32 or h.shape != (*w.shape[:-2], w.shape[-1], w.shape[-1]):
        wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
        raise ValueError(f"{check.op}: hessian must be float32 {wanted}, [..., K, K], got {h.dtype} {h.shape}")
    _refuse_explicit(check, "w", w, w.ndim - 2)
    _refuse_explicit(check, "hessian", h, h.ndim - 2)
    fmt = spec.format
    if spec.block_rows != 1 or spec.rounding != "nearest" or fmt.rht or fmt.amax_scope == "window64":
        raise ValueError(
            f'{check.op}: spec must have block_rows=1, rounding="nearest", rht=False and amax_scope "tensor" or "row", '
            f"got {spec}"
        )
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 < damping < 1:
        raise ValueError(f"{check.op}: damping must be a Python number above 0 and below 1, got {damping!r}")
    shape = w.shape[:-2] if fmt.amax_scope == "tensor" else w.shape[:-1]
    amax = _amaxes(w, fmt.amax_scope) if amax is None else check.amax(amax)
    if amax.shape != shape or amax.dtype != jnp.float32:
        raise ValueError(f"{check.op}: amax must be float32 {shape}, got {amax.dtype} {amax.shape}")
    of_matrix = partial(_gptq, spec=spec, damping=float(damping))
    for _ in range(w.ndim - 2):
        of_matrix = jax.vmap(of_matrix)
    return of_matrix(w, h, amax)


def _refuse_explicit(check: Checks, name: str, x: jax.Array, first: int) -> None:
    """Refuses an array whose axes from ``first`` on are sharded on an Explicit mesh, where XLA may not gather."""
    axes = axes_of_dims(jax.typeof(x))[first:]
    if any(entry is not None for entry in axes):
        raise ValueError(f"{check.op}: {name} must not be sharded on an Explicit mesh, got {jax.typeof(x)}; reshard it")


def _amaxes(w: jax.Array, scope: str) -> jax.Array:
    """Finds the amax of each matrix, or of each row."""
    find = partial(reference.find_amax, scope=scope)
    for _ in range(w.ndim - 2):
        find = jax.vmap(find)
    return find(w)


@partial(jax.jit, static_argnames=("spec", "damping"))
def _gptq(w: jax.Array, h: jax.Array, amax: jax.Array, spec: QuantSpec, damping: float) -> NVFP4Tensor:
    n, k = w.shape
    upper = _inverse_factor(h, damping)

    def of_group(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns, codes, scales = state  # columns: what is left of w^T [K, N]
        begin = i * BLOCK
        rows = lax.dynamic_slice_in_dim(upper, begin, BLOCK)
        scale, found, errors = _round_group(
            lax.dynamic_slice_in_dim(columns, begin, BLOCK),
            lax.dynamic_slice_in_dim(rows, begin, BLOCK, axis=1),
            amax,
            spec,
        )
        columns = columns - jnp.einsum("jk,jn->kn", rows, errors, precision=lax.Precision.HIGHEST)
        return columns, codes.at[i].set(found), scales.at[i].set(scale)

    start = w.astype(jnp.float32).T, jnp.zeros((k // BLOCK, n, BLOCK), jnp.uint8), jnp.zeros((k // BLOCK, n), jnp.uint8)
    _, codes, scales = lax.fori_loop(0, k // BLOCK, of_group, start)
    data = reference.pack_codes(codes.swapaxes(0, 1).reshape(n, k))
    return NVFP4Tensor(data, lax.bitcast_convert_type(scales.T, jnp.float8_e4m3fn), amax, spec.format)


def _inverse_factor(h: jax.Array, damping: float) -> jax.Array:
    """Returns U, upper triangular, with U^T U a multiple of (H + damping mean(diag H) I)^-1, which one does not matter.

    It is R^-1, and H is not inverted.
    """
    eye = jnp.eye(h.shape[-1], dtype=h.dtype)
    return jax.scipy.linalg.solve_triangular(damped_factor(h, damping), eye, lower=False)


@partial(jax.jit, static_argnames="damping")
def damped_factor(h: jax.Array, damping: float = _DAMPING) -> jax.Array:
    """Returns R, upper triangular; R R^T is a multiple of H + damping mean(diag H) I, or NaN if not positive definite.

    It is the Cholesky factor of H with its rows and columns in descending order, turned back.
    """
    largest = jnp.max(jnp.abs(h))  # on the diagonal, if it is a hessian
    exponent = (to_bits(largest) >> 23).astype(jnp.int32)
    h = h * from_bits(jnp.clip(254 - exponent, 1).astype(jnp.uint32) << 23)  # exact, below 4: no sum overflows
    added = jnp.where(largest == 0, 1, damping * jnp.mean(jnp.diagonal(h)))
    damped = h + added * jnp.eye(h.shape[-1], dtype=h.dtype)
    return jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]


def _round_group(
    columns: jax.Array, upper: jax.Array, amax: jax.Array, spec: QuantSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds 16 columns [16, N]. -> block scales uint8 [N], codes [N, 16], errors [16, N] in parts of U's diagonal"""
    scale = lax.bitcast_convert_type(quantize(columns.T, spec, amax=amax).scale[:, 0], jnp.uint8)
    amaxes, e4m3_max = to_bits(amax), spec.format.e4m3_max
    decode, _ = reference.global_scale(amaxes, e4m3_max)
    encode = from_bits(reference.block_encode_scale(scale, decode))
    factor = from_bits(reference.dequantize_factor(scale, amaxes, e4m3_max))

    def of_column(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns, codes, errors = state
        code = reference.e2m1_encode(to_bits(columns[j] * encode))
        error = (columns[j] - from_bits(reference.e2m1_decode(code)) * factor) / upper[j, j]
        return columns - upper[j][:, None] * error[None], codes.at[j].set(code), errors.at[j].set(error)

    start = columns, jnp.zeros(columns.shape, jnp.uint8), jnp.zeros_like(columns)
    _, codes, errors = lax.fori_loop(0, BLOCK, of_column, start)  # unrolled, it would take long to compile
    return scale, codes.T, errors
