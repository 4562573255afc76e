"""Methods of the literature that change how a recipe's layers are trained, in jnp around public functions.

Each takes a recipe and returns the product of the linear layers. Their gradients are those of what is written here: the
recipe's where ``jnvfp4.linear`` multiplies, in bfloat16 or float32 elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

import jnvfp4
from jnvfp4 import QuantSpec, Recipe
from lm.config import Config
from lm.model import Linear, Tree, stacks, trained_bf16_linear, with_gradients

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


def two_tensors(recipe: Recipe) -> Linear:
    """Multiplies x as the sum of two quantized tensors, the second of what the first leaves; gradients see x once."""
    assert recipe.fprop is not None
    spec = recipe.fprop.x
    assert spec is not None
    forward = replace(recipe, dgrad=None, wgrad=None)

    def multiply(x: Array, w: Array) -> Array:
        left = x - jnvfp4.fake_quant(x, spec).astype(x.dtype)
        first, second = (jnvfp4.linear(part, w, forward, out_dtype=jnp.float32) for part in (x, left))
        return (first + second).astype(x.dtype)

    return with_gradients(recipe, multiply)


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
