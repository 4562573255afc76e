"""The public operations on arrays: argument checks, amax, and one primitive each."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import reference, softfloat
from ._primitives._base import bind
from ._primitives._operands import FLOAT_DTYPES as OUT_DTYPES
from ._primitives._operands import check_array, check_operand
from ._primitives.dequantize import dequantize_p
from ._primitives.matmul import matmul_p
from ._primitives.quantize import quantize_p
from ._primitives.quantize_pair import quantize_pair_p
from ._primitives.rht_amax import rht_amax_p
from .spec import BLOCK, FUSED_PAIRS, NVFP4, WINDOW64, QuantSpec
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


def _check_switch(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{op}: {name} must be True or False, got {value!r}")


def _check_spec(op: str, spec: QuantSpec) -> None:
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"{op}: spec must be a QuantSpec, got {spec!r}")


def check_key(op: str, key: jax.Array | None, *specs: QuantSpec) -> None:
    """A key where something rounds stochastically, and only there."""
    stochastic = any(spec.rounding == "stochastic" for spec in specs)
    if stochastic and key is None:
        raise ValueError(f'{op}: key must be a JAX PRNG key for rounding="stochastic", got None')
    if key is None:
        return
    if not stochastic:
        raise ValueError(f'{op}: key must be None for rounding="nearest", got {key!r}')
    check_one_key(op, key)


def check_one_key(op: str, key: Any) -> None:
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and shape == ()) and not (dtype == jnp.uint32 and len(shape or ()) == 1):
        raise TypeError(f"{op}: key must be one JAX PRNG key, as jax.random.key gives, got {key!r}")


def _stream(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """For each matrix of [..., M, K]: two words of key, and the index of its first block, low word first."""
    lead, words = shape[:-2], jax.random.bits(key, (2,), jnp.uint32)
    if not lead:
        return jnp.concatenate([words, jnp.zeros((2,), jnp.uint32)])
    blocks, index = math.prod(shape[-2:]) // BLOCK, jnp.arange(math.prod(lead), dtype=jnp.uint32)
    high, low = softfloat.mul_wide(blocks & 0xFFFFFFFF, index)
    first = jnp.stack([low, high + np.uint32(blocks >> 32) * index], axis=-1)
    return jnp.concatenate([jnp.broadcast_to(words, (*lead, 2)), first.reshape(*lead, 2)], axis=-1)


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
      x: [..., M, K], float32, bfloat16 or float16. K (M if ``transpose``) a multiple of ``spec.unit``: 16, or 64
        for scope "window64"; any number of rows, but for ``block_rows=16``.
      spec: how to quantize.
      amax: float32, the largest magnitude to encode; computed from ``x`` if None (after the rotation, for a spec
        with ``rht``). Scope "tensor": () for all of ``x``, or ``x.shape[:-2]``, one per matrix. Scope "row": one
        per row of what is quantized; "window64": one per 64 of a row. Larger magnitudes saturate. Its sign is
        ignored.
      key: a JAX PRNG key, required exactly for ``spec.rounding == "stochastic"``. The random bits are a function
        of ``jax.random.bits(key, (2,), uint32)``, orientation and the element's place in ``x``: not of devices,
        shards or platform. Under vmap each example has the places of an array of its own, and inside shard_map each
        device: give each its own key (``jax.random.fold_in(key, jax.lax.axis_index(...))``).
      transpose: quantize ``x`` with its last two axes swapped; every result shape is that of the swapped array.
      implementation: None for the best one, or "native" (C++ or CUDA) or "reference" (integer jnp). A named
        one that does not exist for the platform raises when compiled.

    Returns:
      The NVFP4Tensor. Where the block scale is a normal number and amax between 8e-36 and FLT_MAX / 448, an element
      within amax dequantizes to within half an E2M1 step times its block scale, within one step with stochastic
      rounding; with ``rht`` that holds for the rotated values, which ``dequantize(..., rotate_back=False)`` gives.

    Raises:
      ValueError, TypeError: a shape, dtype or argument that does not fit; the message names it.

    The bytes are those of docs/numerics.md on every platform, sharded or not. Recipe: arXiv:2509.25149; block scale,
    2D tiles, 4over6 and rotation as in NVIDIA TransformerEngine at d0067d0da.
    """
    _check_spec("quantize", spec)
    check_key("quantize", key, spec)
    _check_implementation("quantize", implementation)
    x = _array("quantize", "x", x)
    check_array("quantize", x)
    _check_switch("quantize", "transpose", transpose)
    params: dict[str, Any] = {"spec": spec, "transpose": transpose, "implementation": implementation}
    if amax is None and spec.finds_amax:
        return _tensor(spec, bind(quantize_p, x, has_amax=False, **params))
    found = amax is None  # and then not negative
    amax = _tensor_amax(x, spec, transpose, implementation) if found else as_amax("quantize", amax)
    operands = [x, amax] if key is None else [x, amax, _stream(key, x.shape)]
    parts = bind(quantize_p, *operands, has_amax=True, **params)
    return _tensor(spec, [*parts, amax if found else _magnitude(amax)])


def _tensor(spec: QuantSpec, parts: Sequence[jax.Array]) -> NVFP4Tensor:
    data, scale, amax = parts
    return NVFP4Tensor(data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), amax, spec.format)


def _tensor_amax(x: jax.Array, spec: QuantSpec, transpose: bool, implementation: Implementation) -> jax.Array:
    if spec.format.rht:
        return bind(rht_amax_p, x, transpose=transpose, keep=0, implementation=implementation)[0]
    return reference.find_amax(x, "tensor")


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
      x: [..., M, K], float32, bfloat16 or float16; K a multiple of ``row_spec.unit``, M of ``col_spec.unit``.
      row_spec: for the tensor of ``x``.
      col_spec: for the tensor of ``x`` with its last two axes swapped.
      amax: None, or the pair of what ``quantize`` takes for either; computed where None.
      key: as in ``quantize``, if either spec rounds stochastically; the orientations have different bits.
      implementation: as in ``quantize``.

    Returns:
      The two tensors of ``quantize(x, row_spec)`` and ``quantize(x, col_spec, transpose=True)``, bit for bit. Pairs
      that recipes use (``jnvfp4.spec.FUSED_PAIRS``) read x once, given both amax; other pairs are two calls.
    """
    specs = (row_spec, col_spec)
    for spec in specs:
        _check_spec("quantize_pair", spec)
    check_key("quantize_pair", key, *specs)
    _check_implementation("quantize_pair", implementation)
    if amax is not None and not (isinstance(amax, tuple) and len(amax) == 2):
        raise ValueError(f"quantize_pair: amax must be None or a pair (row_amax, col_amax), got {amax!r}")
    x = _array("quantize_pair", "x", x)
    for spec, given, transpose in zip(specs, amax or (None, None), (False, True), strict=True):
        given = None if given is None else jax.typeof(as_amax("quantize_pair", given))
        check_operand("quantize_pair", jax.typeof(x), given, spec, transpose)
    found = [a is None for a in amax or (None, None)]
    amaxes = _pair_amax(x, specs, list(amax or (None, None)), implementation)
    if specs in FUSED_PAIRS and (WINDOW64 not in specs or all(a is None for a in amaxes)):
        return _fused_pair(x, specs, amaxes, found, key, implementation)
    row, col = (
        quantize(
            x,
            spec,
            amax=a,
            key=key if spec.rounding == "stochastic" else None,
            transpose=t,
            implementation=implementation,
        )
        for spec, a, t in zip(specs, amaxes, (False, True), strict=True)
    )
    return row, col


def _pair_amax(x: jax.Array, specs: tuple[QuantSpec, QuantSpec], amaxes: list, implementation: Implementation) -> list:
    """The given amaxes, and for a fused kernel those it does not find; one pass over x where both are its own."""
    found: list = list(amaxes)
    own = None
    for i, (spec, transpose) in enumerate(zip(specs, (False, True), strict=True)):
        if found[i] is not None or spec.format.amax_scope == "window64":
            continue
        if spec.format.amax_scope == "row":
            if specs in FUSED_PAIRS:
                found[i] = reference.find_amax(jnp.swapaxes(x, -1, -2) if transpose else x, "row")
        elif spec.format.rht:
            found[i] = _tensor_amax(x, spec, transpose, implementation)
        else:
            found[i] = own = _tensor_amax(x, spec, transpose, implementation) if own is None else own
    return found


def _fused_pair(
    x: jax.Array,
    specs: tuple[QuantSpec, QuantSpec],
    amaxes: list,
    found: list[bool],
    key: Any,
    implementation: Implementation,
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """``found`` says which amaxes are not the caller's, and then not negative."""
    given = [as_amax("quantize_pair", a) for a in amaxes if a is not None]
    stream = [] if key is None else [_stream(key, x.shape)]
    streams = [s for spec in specs if spec.rounding == "stochastic" for s in stream]
    out = bind(quantize_pair_p, x, *given, *streams, specs=specs, implementation=implementation)
    half = len(out) // 2
    amaxes = [a if f else _magnitude(a) for a, f in zip(given, found, strict=False)] or [out[2], out[5]]
    row, col = (_tensor(s, [*out[i : i + 2], a]) for s, i, a in zip(specs, (0, half), amaxes, strict=True))
    return row, col


def _float_dtype(op: str, name: str, dtype: Any) -> Any:
    dtype = jnp.dtype(dtype)
    if dtype not in OUT_DTYPES:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")
    return dtype


def dequantize(
    t: NVFP4Tensor, dtype: Any = jnp.float32, *, rotate_back: bool = True, implementation: Implementation = None
) -> jax.Array:
    """The values of ``t``: cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))).

    Args:
      t: [..., M, K].
      dtype: float32, bfloat16 or float16.
      rotate_back: undo the rotation of a tensor with ``format.rht``, in float32 before the cast.
      implementation: as in ``quantize``.

    Returns: [..., M, K] of ``dtype``. ``s * amax`` overflows to inf for amax above FLT_MAX / 448.
    """
    _check_implementation("dequantize", implementation)
    if not isinstance(t, NVFP4Tensor):
        raise TypeError(f"dequantize: t must be an NVFP4Tensor, got {type(t).__name__}")
    _check_switch("dequantize", "rotate_back", rotate_back)
    dtype = _float_dtype("dequantize", "dtype", dtype)
    params = {
        "format": t.format,
        "dtype": dtype,
        "rotate_back": rotate_back,
        "implementation": implementation,
    }
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
      a: an NVFP4Tensor, or a bfloat16 or float16 array (weight-only; b then has no "window64" amax).
      b: an NVFP4Tensor; without leading axes it is shared by all of ``a``'s.
      out_dtype: float32, bfloat16 or float16.
      bias: [N], any float dtype, added in float32 before the cast.
      implementation: as in ``quantize``.

    Returns:
      out = cast(fl(fl(alpha * y) + bias)). On the CPU and in the reference the sum y has one pinned order along
      K (docs/numerics.md); on a GPU the tensor cores' order, so equal to it within a rounding bound, except with
      amax scope "window64" on either side, where the order is pinned everywhere.

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
