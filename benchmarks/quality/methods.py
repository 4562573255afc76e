"""Methods of the literature that change how a recipe's layers are trained, in jnp around public functions.

Each takes a recipe and returns the product of the linear layers. Their gradients are those of what is written here: the
recipe's where ``jnvfp4.linear`` multiplies, in bfloat16 or float32 elsewhere; ``eden`` has its own.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import scipy.linalg  # type: ignore[import-untyped]
from jax import Array, lax

import jnvfp4
from jnvfp4 import QuantSpec, Recipe
from jnvfp4.recipes import Fprop
from jnvfp4.reference import search_candidate, search_offset
from lm.config import Config
from lm.model import Linear, Tree, stacks, trained_bf16_linear, with_gradients, with_pull

Method = Callable[[Recipe], Linear]

# ---------------------------------------------------------------- products


def bf16_product(x: Array, w: Array) -> Array:
    """Multiplies x by w^T, rounded to bfloat16, into float32."""
    return jnp.einsum("...k,nk->...n", x.astype(jnp.float32), w.astype(jnp.bfloat16).astype(jnp.float32))


def hot_channels(count: int) -> Method:
    """Leaves the channels of most energy in the batch in bfloat16: a skinny second product in all three GEMMs.

    All tokens of the batch choose them, in validation, too: a decoder would need channels that are chosen before.
    """

    def of_recipe(recipe: Recipe) -> Linear:
        def linear(x: Array, w: Array, key: Array, name: str) -> Array:
            energy = jnp.mean(jnp.square(lax.stop_gradient(x).astype(jnp.float32)), tuple(range(x.ndim - 1)))
            # A GEMM by ones and zeros chooses exactly, and its gradient is one too: no scatter.
            chosen = jax.nn.one_hot(lax.top_k(energy, count)[1], x.shape[-1], dtype=x.dtype)
            hot, hot_w = x @ chosen.T, jnp.matmul(w, chosen.T.astype(w.dtype), precision="highest")
            cold = jnp.where(jnp.any(chosen, axis=0), jnp.zeros((), x.dtype), x)
            return jnvfp4.linear(cold, w, recipe, key=key) + trained_bf16_linear(hot, hot_w, key, name)

        return linear

    return of_recipe


def without_mean(axes: tuple[int, ...]) -> Method:
    """Quantizes x without its mean m over tokens (Averis, arXiv 2603.10444): y = Q(x - m) Q(w)^T + m w^T.

    So the gradient of w is Q(dy)^T Q(x - m), and the sum of dy over tokens times m. ``axes`` are those of the mean of
    x [sequences, tokens, K], which has later tokens, too: a decoder would need a stored mean.
    """

    def of_recipe(recipe: Recipe) -> Linear:
        def linear(x: Array, w: Array, key: Array, name: str) -> Array:
            mean = lax.stop_gradient(jnp.mean(x.astype(jnp.float32), axes, keepdims=True)).astype(x.dtype)
            y = jnvfp4.linear(x - mean, w, recipe, key=key, out_dtype=jnp.float32)
            return (y + bf16_product(mean, w)).astype(x.dtype)

        return linear

    return of_recipe


def forward_of(recipe: Recipe) -> tuple[Recipe, Callable[[Array], Array], Callable[[Array], Array]]:
    """Returns the recipe of the forward pass alone, and what it makes of x and of w."""
    assert recipe.fprop is not None
    assert recipe.fprop.x is not None
    quantized_x, quantized_w = (partial(jnvfp4.fake_quant, spec=spec) for spec in (recipe.fprop.x, recipe.fprop.w))
    return replace(recipe, dgrad=None, wgrad=None), quantized_x, quantized_w


def two_tensors(recipe: Recipe) -> Linear:
    """Multiplies x as the sum of two quantized tensors, the second of what the first leaves; gradients see x once."""
    forward, quantized_x, _ = forward_of(recipe)

    def multiply(x: Array, w: Array) -> Array:
        left = x - quantized_x(x)
        first, second = (jnvfp4.linear(part, w, forward, out_dtype=jnp.float32) for part in (x, left))
        return (first + second).astype(x.dtype)

    return with_gradients(recipe, multiply)


# ---------------------------------------------------------------- searched block scales of x


class Scaled(NamedTuple):
    """Holds a quantized array, ``values * scale``. The values have few bits: they are exact in TF32."""

    values: Array
    scale: Array


def nearest_e2m1(x: Array) -> Array:
    """Rounds to E2M1 numbers, ties to even codes, and clips."""
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.minimum(jnp.round(size / step) * step, 6.0)


def searched(x: Array) -> Scaled:
    """Quantizes [..., K], which must be finite, as ``QuantSpec(select="search")``, in plain float32: ties may differ.

    GPUs have no kernel for that spec.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 16)
    amax = jnp.max(jnp.abs(blocks))
    scale = jnp.where(amax > 0, amax, 1.0) / (6 * 448)
    blocks = blocks / scale
    largest = (jnp.max(jnp.abs(blocks), axis=-1) / 6).astype(jnp.float8_e4m3fn)
    rule = lax.bitcast_convert_type(largest, jnp.uint8)

    def values(code: Array) -> Array:
        of_block = lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)[..., None]
        return nearest_e2m1(blocks / jnp.where(of_block > 0, of_block, 1.0)) * of_block

    codes = search_candidate(rule, search_offset(jnp.arange(11).reshape(-1, *[1] * rule.ndim)))
    errors = jnp.sum(jnp.square(values(codes) - blocks), axis=-1)
    best = jnp.argmin(errors, axis=0)  # the first of equal ones
    chosen = jnp.take_along_axis(codes, best[None], axis=0)[0]
    return Scaled(values(chosen).reshape(x.shape), scale)


def searched_x(recipe: Recipe) -> Linear:
    """Multiplies as the recipe, with searched block scales of x in the forward pass."""
    assert recipe.fprop is not None
    weights = Recipe(Fprop(None, recipe.fprop.w), None, None)

    def multiply(x: Array, w: Array) -> Array:
        found = searched(x)  # its values are exact in bfloat16
        y = jnvfp4.linear(found.values.astype(jnp.bfloat16), w, weights, out_dtype=jnp.float32)
        return (y * found.scale).astype(x.dtype)

    return with_gradients(recipe, multiply)


# ---------------------------------------------------------------- gradients by MS-EDEN

EDEN_SCALE, EDEN_MAX = 0.93 * 17 / 16, 256.0  # of Quartet II (arXiv 2601.22813), which rotates 128 by random signs


def stochastic_e4m3(x: Array, key: Array) -> Array:
    """Rounds positive numbers to E4M3 numbers stochastically."""
    _, exponent = jnp.frexp(x)  # exact: x is less than 2^exponent
    step = jnp.ldexp(jnp.ones_like(x), jnp.maximum(exponent - 1, -6) - 3)
    return jnp.minimum(jnp.floor(x / step + jax.random.uniform(key, x.shape)) * step, 448.0)


def ms_eden(x: Array, signs: Array, key: Array) -> Scaled:
    """Quantizes [..., K], rotated in groups as long as ``signs``. Its mean over random signs and keys is nearly x.

    Codes are those of nearest rounding with scales so small that the largest elements are clipped. The projection of
    the codes on each group then gives its error back to the block scales, which are rounded stochastically.
    """
    size = signs.shape[0]
    groups = x.astype(jnp.bfloat16).astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    hadamard = jnp.asarray(scipy.linalg.hadamard(size), jnp.float32) * signs
    groups = jnp.einsum("...k,jk->...j", groups, hadamard) * size**-0.5
    blocks = groups.reshape(*groups.shape[:-1], -1, 16)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    largest = jnp.max(amax)
    scale = jnp.where(largest > 0, largest, 1.0) / EDEN_MAX * (EDEN_SCALE / 6)
    of_block = (amax * (EDEN_SCALE / 6) / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    of_block = jnp.where(of_block == 0, 1.0, of_block)
    scaled = blocks / (of_block * scale)
    codes = nearest_e2m1(scaled)
    whole, along = (jnp.sum(scaled * part, axis=(-2, -1), keepdims=True) for part in (scaled, codes))
    of_block = stochastic_e4m3(of_block * whole / jnp.where(along > 0, along, 1.0), key)
    return Scaled((codes * of_block).reshape(x.shape), scale)


def eden_product(a: Array, b: Array, key: Array, group: int = 128) -> Array:
    """Multiplies [M, K] by [N, K]^T, both by MS-EDEN with the same signs. -> float32"""
    of_signs, of_a, of_b = jax.random.split(key, 3)
    signs = jax.random.rademacher(of_signs, (math.gcd(group, a.shape[-1]),), jnp.float32)
    left, right = ms_eden(a, signs, of_a), ms_eden(b, signs, of_b)
    return left.values @ right.values.T * (left.scale * right.scale)


def eden(group: int = 128) -> Method:
    """Multiplies as the recipe in the forward pass; gradients are those of its quantized x and w, by MS-EDEN.

    ``group`` says how many elements are rotated together: a divisor of K, if that is not one.
    """

    def of_recipe(recipe: Recipe) -> Linear:
        forward, quantized_x, quantized_w = forward_of(recipe)

        def pull(x: Array, w: Array, key: Array, dy: Array) -> tuple[Array, Array]:
            of_dx, of_dw = jax.random.split(key)
            rows, tokens = dy.reshape(-1, dy.shape[-1]), quantized_x(x.reshape(-1, x.shape[-1]))
            dx = eden_product(rows, quantized_w(w).T, of_dx, group)
            dw = eden_product(rows.T, tokens.T, of_dw, group)
            return dx.reshape(x.shape).astype(x.dtype), dw.astype(w.dtype)

        return with_pull(lambda x, w: jnvfp4.linear(x, w, forward), pull)

    return of_recipe


# ---------------------------------------------------------------- oscillating weights

BEGIN, PERIOD, WATCHED, RATIO = 0.64, 200, 50, 8.0


def watched(params: Tree) -> Tree:
    """Returns the state of ``reset_oscillating`` before the first step: paths of quantized and of float32 weights."""
    return {name: (jnp.zeros_like(w), jnp.zeros_like(w)) for name, w in stacks(params).items()}


def reset_oscillating(before: Tree, params: Tree, watch: Tree, step: Array, config: Config, spec: QuantSpec) -> Tree:
    """Sets weights that oscillate to their quantized values (OsciReset of TetraJet-v2, arXiv 2510.27527).

    From 64 % of the steps on, in the first 50 of every 200 steps, it adds up how far each quantized weight moves, and
    how far the weight itself does. Where that ratio is 8 or more, the weight becomes its quantized value. ``step`` is
    the number of the step between ``before`` and ``params``, from 1.

    Returns:
      the weights, and the state.
    """
    since = step - int(BEGIN * config.steps)
    phase = since % PERIOD
    quantize = jax.vmap(partial(jnvfp4.fake_quant, spec=spec))

    def of(old: Array, new: Array, paths: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        was, now = quantize(old), quantize(new)
        kept = [jnp.where(phase == 0, 0, path) for path in paths]
        moved, went = (path + jnp.abs(a - b) for path, a, b in zip(kept, (now, new), (was, old), strict=True))
        resets = (phase == WATCHED - 1) & (moved >= RATIO * went) & (went > 0)
        return jnp.where((since >= 0) & resets, now, new), (moved, went)

    found = {name: of(before["layers"][name], w, watch[name]) for name, w in stacks(params).items()}
    layers = params["layers"] | {name: w for name, (w, _) in found.items()}
    return params | {"layers": layers}, {name: paths for name, (_, paths) in found.items()}
