"""Producers fused with the quantizer: the norm or gate before a linear layer and the bytes of its result.

An FFI call ends XLA's fusion, so a norm followed by ``quantize`` writes and reads its result once more.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._primitives._base import bind, match_varying
from ._primitives._operands import check_operand
from ._primitives.produce import RmsNorm, SiluMul, check_sources, produce_p
from .ops import (
    ArrayLike,
    Implementation,
    _array,
    _check_implementation,
    _check_spec,
    _check_switch,
    _magnitude,
    _stream,
    _tensor,
    as_amax,
    check_key,
    quantize,
    quantize_pair,
)
from .spec import FUSED_PAIRS, NVFP4, WINDOW64, QuantSpec
from .tensor import NVFP4Tensor

Amax = ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None
Tensors = NVFP4Tensor | tuple[NVFP4Tensor, NVFP4Tensor]


def rms_norm_quantize(
    x: ArrayLike,
    weight: ArrayLike,
    spec: QuantSpec = NVFP4,
    col_spec: QuantSpec | None = None,
    *,
    eps: float = 1e-6,
    amax: Amax = None,
    key: jax.Array | None = None,
    return_values: bool = False,
    implementation: Implementation = None,
) -> Tensors | tuple[Tensors, jax.Array]:
    """Quantizes y = x / sqrt(mean(x^2) + eps) * weight, the RMS norm over the last axis.

    Args:
      x: [..., M, K], float32, bfloat16 or float16; K and M as ``quantize`` needs them for y.
      weight: [K], float32, bfloat16 or float16.
      spec: how to quantize y.
      col_spec: how to quantize y with its last two axes swapped; None for no such result.
      eps: a number that is positive and normal in float32.
      amax: of y, what ``quantize`` takes, or with ``col_spec`` what ``quantize_pair`` takes; computed where None.
      key: as in ``quantize``, if a spec rounds stochastically.
      return_values: also return y.
      implementation: as in ``quantize``.

    Returns:
      The NVFP4Tensor of y, or with ``col_spec`` the pair of y and y transposed; with ``return_values`` a tuple of that
      and y, bfloat16 [..., M, K]. The bytes are those of ``quantize(y, spec)`` or ``quantize_pair(y, spec, col_spec)``.
      y is computed in float32 in the pinned order of docs/producers.md and rounded once, the same bits on every
      platform, within one bfloat16 ulp of float64. Gradients go through y, with the derivative of the norm; the
      quantized results have none.

      One pass over x where each amax is given, or belongs to a row (no ``col_spec``) or to 64 elements; where one must
      be found over y first, and for pairs that ``quantize_pair`` quantizes in two calls, y goes through memory.

    Raises:
      ValueError, TypeError: a shape, dtype or argument that does not fit; the message names it.
    """
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating):
        raise TypeError(f"rms_norm_quantize: eps must be a number, got {eps!r}")
    if not 2.0**-126 <= eps < 2.0**127:
        raise ValueError(f"rms_norm_quantize: eps must be a positive normal float32 number, got {eps!r}")
    weight = _array("rms_norm_quantize", "weight", weight)
    if weight.ndim != 1:
        raise ValueError(f"rms_norm_quantize: weight must have rank 1, [K], got weight.shape={weight.shape}")
    call = _Call(RmsNorm(float(eps)), (spec, col_spec), implementation)
    return _produce(call, x, weight, amax, key, return_values)


def silu_mul_quantize(
    gate: ArrayLike,
    up: ArrayLike,
    spec: QuantSpec = NVFP4,
    col_spec: QuantSpec | None = None,
    *,
    amax: Amax = None,
    key: jax.Array | None = None,
    return_values: bool = False,
    implementation: Implementation = None,
) -> Tensors | tuple[Tensors, jax.Array]:
    """Quantizes y = gate / (1 + exp(-gate)) * up, the gate of SwiGLU.

    Args:
      gate: [..., M, K], float32, bfloat16 or float16; K and M as ``quantize`` needs them for y.
      up: the shape and dtype of ``gate``.
      spec: how to quantize y.
      col_spec: how to quantize y with its last two axes swapped; None for no such result.
      amax: as in ``rms_norm_quantize``.
      key: as in ``quantize``, if a spec rounds stochastically.
      return_values: also return y.
      implementation: as in ``quantize``.

    Returns and raises: as ``rms_norm_quantize``.
    """
    return _produce(_Call(SiluMul(), (spec, col_spec), implementation), gate, up, amax, key, return_values)


class _Call(NamedTuple):
    """What is static."""

    op: RmsNorm | SiluMul
    specs: tuple[QuantSpec, QuantSpec | None]
    implementation: Implementation

    @property
    def name(self) -> str:
        return f"{self.op.name}_quantize"


def _produce(call: _Call, a: Any, b: Any, amax: Any, key: Any, return_values: bool) -> Any:
    name, pair = call.name, call.specs[1] is not None
    asked = [spec for spec in call.specs if spec is not None]
    for spec in (call.specs[0], *asked[1:]):
        _check_spec(name, spec)
    check_key(name, key, *asked)
    _check_implementation(name, call.implementation)
    _check_switch(name, "return_values", return_values)
    if pair and amax is not None and not (isinstance(amax, tuple) and len(amax) == 2):
        raise ValueError(f"{name}: amax must be None or a pair (row_amax, col_amax), got {amax!r}")
    amaxes = tuple(None if v is None else as_amax(name, v) for v in (amax or (None, None) if pair else (amax, None)))
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    a, b = match_varying(*(_array(name, n, v) for n, v in zip(call.op.operands, (a, b), strict=True)))
    check_sources(call.op, jax.typeof(a), jax.typeof(b))
    for spec, given, transpose in zip(asked, amaxes, (False, True), strict=False):
        given = None if given is None else jax.typeof(given)
        check_operand(name, jax.typeof(a), given, spec, transpose, call.op.operands[0])
    if not return_values:
        return _tensors_and_values(call, a, b, amaxes, key, False)[0]
    return _differentiable(call, a, b, amaxes, key)


def _one_pass(call: _Call, amaxes: tuple) -> bool:
    """Whether one kernel makes the values and everything quantized from them."""
    spec, col_spec = call.specs
    if col_spec is not None:
        found = all(a is None for a in amaxes)
        return call.specs in FUSED_PAIRS and (found if spec == WINDOW64 else all(a is not None for a in amaxes))
    return amaxes[0] is not None or spec.finds_amax


def _tensors_and_values(
    call: _Call, a: jax.Array, b: jax.Array, amaxes: tuple, key: Any, values: bool
) -> tuple[Tensors, jax.Array | None]:
    """The tensors, and the bfloat16 values if asked for or made on the way."""
    op, specs, implementation = call
    run = partial(bind, produce_p, op=op, implementation=implementation)
    if not _one_pass(call, amaxes):
        (y,) = run(a, b, specs=(None, None), given=(False, False), values=True)
        if specs[1] is None:
            return quantize(y, specs[0], amax=amaxes[0], key=key, implementation=implementation), y
        return quantize_pair(y, specs[0], specs[1], amax=amaxes, key=key, implementation=implementation), y
    streams = [_stream(key, a.shape) for s in specs if s is not None and s.rounding == "stochastic"]
    given = [v for v in amaxes if v is not None]
    has_amax = tuple(v is not None for v in amaxes)
    parts = list(run(a, b, *given, *streams, specs=specs, given=has_amax, values=values))
    tensors = []
    for spec, amax in zip(specs, amaxes, strict=True):
        if spec is not None:
            data, scale = parts.pop(0), parts.pop(0)
            tensors.append(_tensor(spec, [data, scale, parts.pop(0) if amax is None else _magnitude(amax)]))
    return tensors[0] if specs[1] is None else (tensors[0], tensors[1]), parts[0] if values else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, a: jax.Array, b: jax.Array, amaxes: tuple, key: Any) -> tuple[Tensors, jax.Array]:
    tensors, y = _tensors_and_values(call, a, b, amaxes, key, True)
    assert y is not None
    return tensors, y


def _forward(call: _Call, a: jax.Array, b: jax.Array, amaxes: tuple, key: Any) -> tuple[Any, Any]:
    return _differentiable(call, a, b, amaxes, key), (a, b)


def _backward(call: _Call, residuals: tuple[jax.Array, jax.Array], cotangents: Any) -> tuple[Any, ...]:
    a, b = residuals
    da, db = call.op.gradient(*(v.astype(jnp.float32) for v in (a, b, cotangents[1])))
    return da.astype(a.dtype), db.astype(b.dtype), None, None


_differentiable.defvjp(_forward, _backward)
