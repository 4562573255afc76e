"""Differentiable products of unquantized arrays: ``linear``, ``dot_general`` and ``fake_quant``."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._primitives._base import axes_of_dims as spec_of
from ._primitives._base import bind, match_varying
from ._primitives._operands import FLOAT_DTYPES as INPUT_DTYPES
from ._primitives._operands import check_operand
from ._primitives.fake_quant import fake_quant_p
from .ops import (
    Implementation,
    _array,
    _check_implementation,
    _check_spec,
    _stream,
    _tensor_amax,
    as_amax,
    check_key,
    check_one_key,
    dequantize,
    matmul_nt,
    quantize,
    quantize_pair,
)
from .recipe import DEFAULT, Recipe
from .spec import BLOCK, NVFP4, QuantSpec
from .tensor import NVFP4Tensor

RESIDUAL_NAME = "nvfp4_residual"  # for jax.checkpoint_policies.save_only_these_names


Quantized = NVFP4Tensor | tuple[NVFP4Tensor, NVFP4Tensor] | None


def linear(
    x: Any,
    w: Any,
    recipe: Recipe = DEFAULT,
    *,
    bias: Any | None = None,
    key: jax.Array | None = None,
    quantized: Quantized = None,
) -> jax.Array:
    """x w^T + bias with quantized operands, in the forward GEMM and in both gradient GEMMs.

    Args:
      x: [..., K], float32, bfloat16 or float16; the leading axes are flattened to one of M tokens. Any M: for
        blocks along M (wgrad) zero tokens are added up to a multiple of 16 (or 64), which changes no result.
      w: [N, K], float32, bfloat16 or float16. K and N multiples of 16, or of 64 where an operand has amax scope
        "window64" along it (N only if a GEMM runs over it).
      recipe: how each GEMM quantizes its operands, see ``jnvfp4.recipes``.
      bias: [N], any float dtype, added in float32 before the cast.
      key: a JAX PRNG key, needed if the recipe rounds stochastically (``recipe.stochastic``) and otherwise unused:
        x, w and dy draw from ``jax.random.fold_in(key, i)`` for i = 0, 1, 2. Give each layer, step and example of
        vmap its own.
      quantized: what ``rms_norm_quantize`` or ``silu_mul_quantize`` made beside x [M, K], instead of quantizing x here:
        the tensor of x, or the pair with that of x transposed, in the formats of the recipe.

    Returns:
      [..., N] in x.dtype. The gradients have the dtypes of x, w and bias. Residuals are the packed tensors
      (for a GEMM in high precision, the original array), named "nvfp4_residual" for jax.checkpoint policies.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit; the message names them.
    """
    return _linear("linear", x, w, recipe, bias, key, None, quantized)


def _linear(
    op: str,
    x: Any,
    w: Any,
    recipe: Recipe,
    bias: Any,
    key: jax.Array | None,
    out_dtype: Any,
    quantized: Quantized = None,
) -> jax.Array:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{op}: recipe must be a Recipe, got {recipe!r}")
    if recipe.stochastic and key is None:
        raise ValueError(f"{op}: key must be a JAX PRNG key, since the recipe rounds stochastically, got None")
    key = key if recipe.stochastic else None
    if key is not None:
        check_one_key(op, key)
    x, w = _array(op, "x", x), _array(op, "w", w)
    bias = None if bias is None else _array(op, "bias", bias)
    _check_dtypes(op, x, w, bias, recipe)
    if w.ndim != 2:
        raise ValueError(f"{op}: w must have rank 2, [N, K], got w.shape={w.shape}")
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{op}: x and w must have the same last axis K, got x.shape={x.shape}, w.shape={w.shape}")
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"{op}: bias must have shape (N,)={w.shape[:1]}, got {bias.shape}")
    _check_contractions(op, w.shape, recipe)
    _check_flattening(op, x)
    given = _given(op, x, recipe, quantized)
    operands = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w] + ([] if bias is None else [bias])
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    x2, w, *rest = match_varying(*operands)
    y = _linear2d(x2, w, rest[0] if rest else None, key, given, recipe, jnp.dtype(out_dtype or x.dtype))
    return y.reshape(*x.shape[:-1], w.shape[0])


def _check_dtypes(op: str, x: jax.Array, w: jax.Array, bias: jax.Array | None, recipe: Recipe) -> None:
    for name, value in (("x", x), ("w", w), ("bias", bias)):
        if value is not None and value.dtype not in INPUT_DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {value.dtype}")
    if recipe.fprop[0] is None and x.dtype == jnp.float32:
        raise TypeError(f"{op}: x must be bfloat16 or float16 for a weight-only recipe, got {x.dtype}")


Given = tuple[NVFP4Tensor | None, NVFP4Tensor | None]  # of x and of x transposed


def _given(op: str, x: jax.Array, recipe: Recipe, quantized: Quantized) -> Given:
    """What was quantized before, if it can be what the recipe would make of x."""
    row, col = quantized if isinstance(quantized, tuple) and len(quantized) == 2 else (quantized, None)
    col_spec = recipe.wgrad[1] if isinstance(recipe.wgrad, tuple) else None
    for what, tensor, spec, shape in (
        ("", row, recipe.fprop[0], x.shape),
        (" transposed", col, col_spec, x.shape[::-1]),
    ):
        made = spec and isinstance(tensor, NVFP4Tensor) and (tensor.format, tensor.shape) == (spec.format, shape)
        if tensor is not None and not (made and x.ndim == 2 and x.shape[0] % (_unit(recipe.wgrad) if col else 1) == 0):
            raise ValueError(
                f"{op}: quantized must be x [M, K]{what} as the recipe quantizes it, by {spec}, for x.shape={x.shape}, "
                f"got {getattr(tensor, 'shape', tensor)} in {getattr(tensor, 'format', None)}"
            )
    return row, col


def _check_flattening(op: str, x: jax.Array) -> None:
    """On an Explicit mesh only the first axis of those that become tokens may be sharded."""
    inner = spec_of(jax.typeof(x))[1:-1]
    if any(entry is not None for entry in inner):
        raise ValueError(
            f"{op}: of the leading axes of x only the first may be sharded on an Explicit mesh, since they are "
            f"flattened, got {jax.typeof(x)}; reshard x or flatten it yourself"
        )


def _check_contractions(op: str, w_shape: tuple[int, ...], recipe: Recipe) -> None:
    n, k = w_shape
    unit = _unit(recipe.fprop)
    if k % unit:
        raise ValueError(f"{op}: K must be a multiple of {unit}, got w.shape={w_shape}; pad x and w to {_up(k, unit)}")
    needs = [("recipe.dgrad contracts over it", _unit(recipe.dgrad))]
    if recipe.fprop[1].block_rows == BLOCK:
        needs.append(("recipe.fprop quantizes w in 16x16 tiles", BLOCK))
    if isinstance(recipe.wgrad, tuple) and recipe.wgrad[0].block_rows == BLOCK:
        needs.append(("recipe.wgrad quantizes dy in 16x16 tiles", BLOCK))
    for reason, unit in needs:
        if n % unit:
            raise ValueError(
                f"{op}: N must be a multiple of {unit}, since {reason}, got w.shape={w_shape}; "
                f"pad w to {_up(n, unit)} rows or choose another recipe"
            )


def _unit(pair: Any) -> int:
    """What the contracted axis of a GEMM must be a multiple of; 1 for a GEMM in high precision."""
    return max([spec.unit for spec in pair if spec is not None]) if isinstance(pair, tuple) else 1


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _pad_rows(x: jax.Array, unit: int) -> jax.Array:
    """Zero rows up to a multiple of ``unit``: zeros add nothing to a sum."""
    return jnp.pad(x, ((0, _up(x.shape[0], unit) - x.shape[0]), (0, 0))) if x.shape[0] % unit else x


def _crop_rows(t: NVFP4Tensor, rows: int) -> NVFP4Tensor:
    return jax.tree.map(lambda part: part[:rows] if part.ndim else part, t)


def _save(t: Any) -> Any:
    """Names what the backward pass needs: an array, or the parts of a quantized tensor, its scales as bytes."""
    return _unpack(jax.tree.map(lambda v: checkpoint_name(v, RESIDUAL_NAME), _pack(t)))


def _pack(t: Any) -> Any:
    """Scales as bytes: jax.checkpoint rounds the floats it saves by IEEE rules, where E4M3 256 is infinite."""
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.uint8)) if isinstance(t, NVFP4Tensor) else t


def _unpack(t: Any) -> Any:
    if not isinstance(t, NVFP4Tensor):
        return t
    return replace(t, scale=lax.bitcast_convert_type(t.scale, jnp.float8_e4m3fn))


def _key_for(spec: QuantSpec, key: jax.Array | None, operand: int) -> jax.Array | None:
    return None if key is None or spec.rounding == "nearest" else jax.random.fold_in(key, operand)


def _quantize_rows(x: jax.Array, spec: QuantSpec, key: Any, operand: int) -> NVFP4Tensor:
    """x [M, K] along K, for any M."""
    q = quantize(_pad_rows(x, spec.block_rows), spec, key=_key_for(spec, key, operand))
    return _crop_rows(q, x.shape[0])


def _quantize_both(
    x: jax.Array, row_spec: QuantSpec | None, col_spec: QuantSpec | None, unit: int, key: Any, operand: int
) -> tuple[NVFP4Tensor | None, NVFP4Tensor | None]:
    """x [M, K] along K and, with rows of zeros up to a multiple of ``unit``, along M; None where no spec is given."""
    row = col = None
    if row_spec is None or col_spec is None:
        if row_spec is not None:
            row = _quantize_rows(x, row_spec, key, operand)
        if col_spec is not None:
            col = quantize(_pad_rows(x, unit), col_spec, key=_key_for(col_spec, key, operand), transpose=True)
        return row, col
    used = next((k for s in (row_spec, col_spec) if (k := _key_for(s, key, operand)) is not None), None)
    row, col = quantize_pair(_pad_rows(x, max(unit, row_spec.block_rows)), row_spec, col_spec, key=used)
    return _crop_rows(row, x.shape[0]), col


X, W, DY = range(3)  # operands, for their keys


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _linear2d(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, key: Any, given: Given, recipe: Recipe, out_dtype: Any
) -> jax.Array:
    x_spec, w_spec = recipe.fprop
    qx = given[0] or (x if x_spec is None else _quantize_rows(x, x_spec, key, X))
    qw = quantize(w, w_spec, key=_key_for(w_spec, key, W))
    # Named before the GEMM reads them, so that a checkpoint policy that saves them saves the quantizers' work.
    return matmul_nt(_save(qx), _save(qw), out_dtype=out_dtype, bias=bias)


def _forward(
    x: jax.Array, w: jax.Array, bias: Any, key: Any, given: Given, recipe: Recipe, out_dtype: Any
) -> tuple[jax.Array, Any]:
    x_col = recipe.wgrad[1] if isinstance(recipe.wgrad, tuple) else None
    w_col = recipe.dgrad[1] if isinstance(recipe.dgrad, tuple) else None
    row_spec, col_spec = (None if q else spec for q, spec in zip(given, (recipe.fprop[0], x_col), strict=True))
    own = _quantize_both(x, row_spec, col_spec, _unit(recipe.wgrad), key, X)
    x_row, x_t = given[0] or own[0], given[1] or own[1]
    w_row, w_t = _quantize_both(w, recipe.fprop[1], w_col, 1, key, W)
    qx, qw = _save(x if x_row is None else x_row), _save(w_row)
    y = matmul_nt(qx, qw, out_dtype=out_dtype, bias=bias)
    w_saved = _save(w_t) if w_t is not None else _save(w) if recipe.dgrad is None else qw
    x_saved = _save(x_t) if x_t is not None else _save(x) if recipe.wgrad is None else qx
    # Empty arrays carry the dtypes to the backward pass.
    like = (x[:0, :0], w[:0, :0], None if bias is None else bias[:0])
    return y, (_pack(x_saved), _pack(w_saved), like, key)


def _high_precision(a: jax.Array, b: Any, dims: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> jax.Array:
    """A GEMM with an original or dequantized operand, accumulated in float32."""
    b = b if isinstance(b, jax.Array) else dequantize(b, a.dtype)
    common = jnp.promote_types(a.dtype, b.dtype)
    product = lax.dot_general(
        a.astype(common),
        b.astype(common),
        (dims, ((), ())),
        precision=lax.Precision.HIGHEST,  # float32 operands stay float32, never TF32
        preferred_element_type=jnp.float32,
    )
    return product.astype(dtype)


def _backward(recipe: Recipe, _out_dtype: Any, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    *saved, (x_like, w_like, bias_like), key = residuals
    x_saved, w_saved = map(_unpack, saved)
    row_spec = recipe.dgrad[0] if isinstance(recipe.dgrad, tuple) else None
    col_spec = recipe.wgrad[0] if isinstance(recipe.wgrad, tuple) else None
    dy_row, dy_t = _quantize_both(dy, row_spec, col_spec, _unit(recipe.wgrad), key, DY)
    if dy_row is not None:
        dx = matmul_nt(dy_row, w_saved, out_dtype=x_like.dtype)
    else:
        dx = _high_precision(dy, w_saved, ((1,), (0,)), x_like.dtype)
    if dy_t is not None:
        dw = matmul_nt(dy_t, x_saved, out_dtype=w_like.dtype)
    else:
        dw = _high_precision(dy, x_saved, ((0,), (0,)), w_like.dtype)
    db = None if bias_like is None else jnp.sum(dy.astype(jnp.float32), 0).astype(bias_like.dtype)
    return dx, dw, db, None, None


_linear2d.defvjp(_forward, _backward)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe = DEFAULT,
    key: jax.Array | None = None,
    **unsupported: Any,
) -> jax.Array:
    """``jax.lax.dot_general`` through ``linear``: for model code that takes a ``dot_general`` argument.

    Args:
      lhs: the activations (the recipe's x), any rank; several contracting axes act as one of their product K.
        Batch axes are mapped over, each example with its own amax.
      rhs: the weights (the recipe's w), likewise.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: only None or the default, since the operands are quantized.
      preferred_element_type: of the result; the promoted type of lhs and rhs if None.
      recipe: as in ``linear``.
      key: as in ``linear``; split over batch axes.
      **unsupported: newer arguments of ``lax.dot_general``; each must be None.

    Returns: axes batch, lhs free, rhs free, as ``lax.dot_general``; differentiable.
    """
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in (None, "default", lax.Precision.DEFAULT) for p in precisions):
        raise ValueError(f"dot_general: precision must be None or 'default', got {precision!r}")
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"dot_general: {name} must be None, got {value!r}")
    lhs, rhs = _array("dot_general", "lhs", lhs), _array("dot_general", "rhs", rhs)
    out_dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    (lc, rc), (lb, rb) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
    left, batch_shape, left_free = _to_matrix("lhs", lhs, lc, lb)
    right, _, right_free = _to_matrix("rhs", rhs, rc, rb)
    for kind, left_axes, right_axes in (("contracting", lc, rc), ("batch", lb, rb)):
        if [lhs.shape[i] for i in left_axes] != [rhs.shape[i] for i in right_axes]:
            raise ValueError(
                f"dot_general: {kind} axes must have the same sizes, got axes {left_axes} of "
                f"lhs.shape={lhs.shape} and axes {right_axes} of rhs.shape={rhs.shape}"
            )

    def product(a: jax.Array, b: jax.Array, key: Any) -> jax.Array:
        return _linear("dot_general", a, b, recipe, None, key, out_dtype)

    if not lb:
        out = product(left[0], right[0], key)
    else:
        keys = jax.random.split(key, left.shape[0]) if recipe.stochastic and key is not None else None
        out = jax.vmap(product)(left, right, keys)
    return out.reshape(*batch_shape, *left_free, *right_free)


def _to_matrix(
    name: str, x: jax.Array, contract: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, tuple[int, ...], tuple[int, ...]]:
    """[B, free, contracting] with each group of axes flattened, and the shapes of the first two groups."""
    free = tuple(i for i in range(x.ndim) if i not in contract and i not in batch)
    if len(free) + len(contract) + len(batch) != x.ndim:
        raise ValueError(
            f"dot_general: contracting {contract} and batch {batch} axes must be distinct axes of {name}, "
            f"got {name}.shape={x.shape}"
        )
    groups = [tuple(x.shape[i] for i in axes) for axes in (batch, free, contract)]
    matrix = x.transpose(*batch, *free, *contract).reshape([math.prod(g) for g in groups])
    return matrix, groups[0], groups[1]


@partial(jax.custom_jvp, nondiff_argnums=(1, 4))
def _fake_quant(x: jax.Array, spec: QuantSpec, amax: Any, key: Any, implementation: Implementation) -> jax.Array:
    if amax is None and not spec.finds_amax:
        amax = _tensor_amax(x, spec, False, implementation)
    operands = [x] if amax is None else [x, amax]
    if key is not None:
        operands.append(_stream(key, x.shape))
    return bind(fake_quant_p, *operands, spec=spec, has_amax=amax is not None, implementation=implementation)[0]


@_fake_quant.defjvp
def _fake_quant_jvp(spec: QuantSpec, implementation: Implementation, primals: Any, tangents: Any) -> Any:
    x, amax, key = primals
    return _fake_quant(x, spec, amax, key, implementation), tangents[0]


def fake_quant(
    x: Any,
    spec: QuantSpec = NVFP4,
    *,
    amax: Any | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """``dequantize(quantize(x))`` in x's dtype, bit for bit in one pass, with the gradient of the identity.

    Args and errors as in ``quantize``; a rotated block is rotated back. ``amax`` gets no gradient (straight-through).
    For quantization-aware training.
    """
    _check_spec("fake_quant", spec)
    check_key("fake_quant", key, spec)
    _check_implementation("fake_quant", implementation)
    x = _array("fake_quant", "x", x)
    amax = None if amax is None else as_amax("fake_quant", amax)
    check_operand("fake_quant", jax.typeof(x), None if amax is None else jax.typeof(amax), spec, False)
    return _fake_quant(x, spec, amax, key, implementation)
