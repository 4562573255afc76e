"""Producers fused with the quantizer: the norm or gate before a linear layer and the bytes of its result.

An FFI call ends XLA's fusion, so a norm followed by ``quantize`` writes and reads its result once more.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._arguments import (
    AmaxPair,
    Implementation,
    as_amax,
    as_amax_pair,
    as_array,
    check_implementation,
    check_spec,
    check_switch,
    magnitude,
    operation,
    random_stream,
    stochastic_key,
)
from ._primitives._base import bind, match_varying
from ._primitives._operands import check_operand
from ._primitives.produce import RmsNorm, SiluMul, check_sources, produce_p
from .ops import quantize, quantize_pair
from .spec import FUSED_PAIRS, NVFP4, WINDOW64, QuantSpec
from .tensor import NVFP4Tensor, take_tensor

Amax = ArrayLike | tuple[ArrayLike | None, ArrayLike | None] | None


class Produced(NamedTuple):
    """Holds the results of a producer. Pass it as ``linear(produced.values, ..., quantized=produced)``.

    Attributes:
      row: the quantized y [..., M, K].
      col: the quantized transpose of y, [..., K, M]; None without ``col_spec``.
      values: y itself, bfloat16 [..., M, K]; None without ``return_values``.
    """

    row: NVFP4Tensor
    col: NVFP4Tensor | None = None
    values: jax.Array | None = None


@operation
def rms_norm_quantize(
    x: ArrayLike,
    weight: ArrayLike,
    row_spec: QuantSpec = NVFP4,
    col_spec: QuantSpec | None = None,
    *,
    eps: float = 1e-6,
    amax: Amax = None,
    key: jax.Array | None = None,
    return_values: bool = False,
    implementation: Implementation = None,
) -> Produced:
    """Computes y = x / sqrt(mean(x^2) + eps) * weight, the RMS norm over the last axis, and quantizes it.

    Args:
      x: [..., M, K], float32, bfloat16 or float16. K and M must be multiples as in ``quantize_pair``.
      weight: [K], float32, bfloat16 or float16.
      row_spec: how to quantize y.
      col_spec: how to quantize y with its last two axes swapped; None to leave that out.
      eps: a number that is positive and normal in float32.
      amax: that of y, as ``quantize`` takes it, or with ``col_spec`` the pair that ``quantize_pair`` takes. None
        computes it.
      key: as in ``quantize``, needed if a spec rounds stochastically.
      return_values: return y, too.
      implementation: as in ``quantize``.

    Returns:
      ``Produced(row, col, values)``. ``row`` and ``col`` have the bytes of ``quantize(y, row_spec)`` or
      ``quantize_pair(y, row_spec, col_spec)``, and no gradients. ``values`` is y in bfloat16. It is computed in float32
      in the order of docs/producers.md and rounded once, so it has the same bits on every platform and is within one
      bfloat16 ulp of float64. Gradients go through it, by the derivative of the norm.

      The kernel reads x once if each amax is given, or belongs to a row (without ``col_spec``) or to 64 elements. Where
      an amax must be found over y first, and for pairs that ``quantize_pair`` makes in two calls, y is stored and read
      again.

    Raises:
      ValueError, TypeError: a shape, dtype or argument does not fit; the message names it.
    """
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating):
        raise TypeError(f"rms_norm_quantize: eps must be a number, got {eps!r}")
    if not 2.0**-126 <= eps < 2.0**127:
        raise ValueError(f"rms_norm_quantize: eps must be a positive normal float32 number, got {eps!r}")
    scale = as_array("rms_norm_quantize", "weight", weight)
    if scale.ndim != 1:
        raise ValueError(f"rms_norm_quantize: weight must have rank 1, [K], got weight.shape={scale.shape}")
    call = _Call(RmsNorm(float(eps)), (row_spec, col_spec), implementation)
    return _produce(call, x, scale, amax, key, return_values)


@operation
def silu_mul_quantize(
    gate: ArrayLike,
    up: ArrayLike,
    row_spec: QuantSpec = NVFP4,
    col_spec: QuantSpec | None = None,
    *,
    amax: Amax = None,
    key: jax.Array | None = None,
    return_values: bool = False,
    implementation: Implementation = None,
) -> Produced:
    """Computes y = gate / (1 + exp(-gate)) * up, the gate of SwiGLU, and quantizes it.

    Args:
      gate: [..., M, K], float32, bfloat16 or float16. K and M must be multiples as in ``quantize_pair``.
      up: an array with the shape and dtype of ``gate``.
      row_spec: how to quantize y.
      col_spec: how to quantize y with its last two axes swapped; None to leave that out.
      amax: as in ``rms_norm_quantize``.
      key: as in ``quantize``, needed if a spec rounds stochastically.
      return_values: return y, too.
      implementation: as in ``quantize``.

    Returns and raises: as ``rms_norm_quantize``.
    """
    return _produce(_Call(SiluMul(), (row_spec, col_spec), implementation), gate, up, amax, key, return_values)


class _Call(NamedTuple):
    """Holds the static arguments of one call."""

    op: RmsNorm | SiluMul
    specs: tuple[QuantSpec, QuantSpec | None]
    implementation: Implementation

    @property
    def name(self) -> str:
        return f"{self.op.name}_quantize"


def _produce(call: _Call, a: Any, b: Any, amax: Any, key: Any, return_values: bool) -> Produced:
    name, (row_spec, col_spec) = call.name, call.specs
    check_spec(name, "row_spec", row_spec)
    if col_spec is not None:
        check_spec(name, "col_spec", col_spec)
    key = stochastic_key(name, key, *_specs(call))
    check_implementation(name, call.implementation)
    check_switch(name, "return_values", return_values)
    amaxes: AmaxPair
    if col_spec is not None:
        amaxes = as_amax_pair(name, amax)
    else:
        amaxes = (None if amax is None else as_amax(name, amax)), None
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    arrays = [as_array(name, n, v) for n, v in zip(call.op.operands, (a, b), strict=True)]
    a, b = match_varying(*arrays, like=(amaxes, key))
    check_sources(call.op, jax.typeof(a), jax.typeof(b))
    for spec, known, transpose in zip(_specs(call), amaxes, (False, True), strict=False):
        aval = None if known is None else jax.typeof(known)
        check_operand(name, jax.typeof(a), aval, spec, transpose, call.op.operands[0])
    if not return_values:
        return _produced(call, a, b, amaxes, key, False)._replace(values=None)
    return _differentiable(call, a, b, amaxes, key)


def _specs(call: _Call) -> list[QuantSpec]:
    return [spec for spec in call.specs if spec is not None]


def _in_one_pass(call: _Call, amaxes: AmaxPair) -> bool:
    """Says whether one kernel makes the values and everything quantized from them."""
    spec, col_spec = call.specs
    if col_spec is None:
        return amaxes[0] is not None or spec.finds_amax
    if call.specs not in FUSED_PAIRS:
        return False
    if spec == WINDOW64:
        return amaxes == (None, None)
    return all(amax is not None for amax in amaxes)


def _produced(call: _Call, a: jax.Array, b: jax.Array, amaxes: AmaxPair, key: Any, with_values: bool) -> Produced:
    """Makes the tensors, and the values if asked for or made on the way."""
    op, specs, implementation = call
    run = partial(bind, produce_p, op=op, implementation=implementation)
    if not _in_one_pass(call, amaxes):
        (y,) = run(a, b, specs=(None, None), given=(False, False), values=True)
        if specs[1] is None:
            return Produced(quantize(y, specs[0], amax=amaxes[0], key=key, implementation=implementation), None, y)
        pair = quantize_pair(y, specs[0], specs[1], amax=amaxes, key=key, implementation=implementation)
        return Produced(*pair, y)
    streams = [random_stream(key, a.shape) for spec in _specs(call) if spec.rounding == "stochastic"]
    known = tuple(amax is not None for amax in amaxes)
    operands = [amax for amax in amaxes if amax is not None] + streams
    results = iter(run(a, b, *operands, specs=specs, given=known, values=with_values))
    tensors = [
        take_tensor(results, spec.format, None if amax is None else magnitude(amax))
        for spec, amax in zip(_specs(call), amaxes, strict=False)
    ]
    return Produced(tensors[0], tensors[1] if len(tensors) == 2 else None, next(results, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, a: jax.Array, b: jax.Array, amaxes: AmaxPair, key: Any) -> Produced:
    return _produced(call, a, b, amaxes, key, True)


def _forward(call: _Call, a: jax.Array, b: jax.Array, amaxes: AmaxPair, key: Any) -> tuple[Produced, Any]:
    return _differentiable(call, a, b, amaxes, key), (a, b)


def _backward(call: _Call, residuals: tuple[jax.Array, jax.Array], cotangents: Produced) -> tuple[Any, ...]:
    a, b = residuals
    dy = cotangents.values
    assert dy is not None
    return *_gradient(call.op, a, b, dy), None, None


@partial(jax.jit, static_argnums=0, inline=True)  # an eager call transfers no constants
def _gradient(op: RmsNorm | SiluMul, a: jax.Array, b: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    da, db = op.gradient(*(v.astype(jnp.float32) for v in (a, b, dy)))
    return da.astype(a.dtype), db.astype(b.dtype)


_differentiable.defvjp(_forward, _backward)
