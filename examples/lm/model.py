"""A byte-level transformer as functions of a tree of weights.

The product of the linear layers is an argument, ``linear(x, w, key, name)``, so the same model runs in bfloat16
(``bf16_linear``), trains in NVFP4 (``quantized_linear``), runs from NVFP4 weights (``converted_linear``) and is split
over devices by the names of its weights (``lm/sharded.py``). The attention scores, norms, embeddings and the output
head are in bfloat16 or float32, the residual stream is bfloat16.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jnvfp4
from jnvfp4 import NVFP4Tensor, Recipe
from lm.config import Config

Tree = Any  # a nested dict of arrays; of NVFP4Tensors, too, where weights are quantized
Linear = Callable[[Array, Any, Array, str], Array]  # x [..., K], w [N, K], key, name of w -> [..., N]

VOCABULARY = 256
NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0


# Linear layers


def bf16_linear(x: Array, w: Array, key: Array, name: str) -> Array:
    """Multiplies x by w^T in the dtype of x; key and name are unused."""
    return x @ w.astype(x.dtype).T


def quantized_linear(recipe: Recipe) -> Linear:
    """Returns a linear layer that quantizes x and w, and their gradients, as the recipe says."""
    return lambda x, w, key, name: jnvfp4.linear(x, w, recipe, key=key)


def converted_linear(x: Array, w: Array | NVFP4Tensor, key: Array, name: str) -> Array:
    """Multiplies x by w^T where w may be quantized already; key and name are unused."""
    if isinstance(w, NVFP4Tensor):
        return jnvfp4.matmul_nt(x, w, out_dtype=x.dtype)
    return bf16_linear(x, w, key, name)


# Weights


def init_params(key: Array, config: Config) -> Tree:
    """Draws float32 weights. Those of the layers are stacked along a leading axis.

    The rows of "qkv" are those of the queries, keys and values; in a Llama the rows of "mlp_up" are those of the gate
    and of the values that it multiplies.
    """
    d, n, hidden = config.width, config.layers, config.mlp_width
    is_llama = config.architecture == "llama"
    keys = iter(jax.random.split(key, 7))

    def normal(*shape: int, std: float) -> Array:
        return std * jax.random.normal(next(keys), shape)

    embeddings = {"embedding": normal(VOCABULARY, d, std=0.02)}
    if not is_llama:
        embeddings["position"] = normal(config.seq, d, std=0.02)
    residual_std = (2 * n) ** -0.5  # 2n branches add to the residual stream
    return {
        **embeddings,
        "head": normal(VOCABULARY, d, std=0.02),
        "norm": jnp.ones(d),
        "layers": {
            "attention_norm": jnp.ones((n, d)),
            "qkv": normal(n, (config.heads + 2 * config.kv_heads) * config.head_dim, d, std=d**-0.5),
            "attention_out": normal(n, d, d, std=residual_std * d**-0.5),
            "mlp_norm": jnp.ones((n, d)),
            "mlp_up": normal(n, 2 * hidden if is_llama else hidden, d, std=d**-0.5),
            "mlp_down": normal(n, d, hidden, std=residual_std * hidden**-0.5),
        },
    }


# Layers


def rms_norm(x: Array, gain: Array) -> Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + NORM_EPSILON)
    return (x32 * scale * gain).astype(x.dtype)


def rotate(x: Array) -> Array:
    """Embeds the positions of x [batch, seq, heads, head_dim]: rotates each element with the one half a head away."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * ROTARY_BASE ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array) -> Array:
    qkv = linear(x, layer["qkv"], keys[0], "qkv").reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.heads, config.heads + config.kv_heads], axis=2)
    if config.architecture == "llama":
        q, k = rotate(q), rotate(k)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.reshape(x.shape), layer["attention_out"], keys[1], "attention_out")


def mlp(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array) -> Array:
    up = linear(x, layer["mlp_up"], keys[0], "mlp_up")
    if config.architecture == "llama":
        gate, values = jnp.split(up, 2, axis=-1)
        hidden = jax.nn.silu(gate) * values
    else:
        hidden = jax.nn.gelu(up)
    return linear(hidden, layer["mlp_down"], keys[1], "mlp_down")


FeedForward = Callable[[Array, Tree, Config, Linear, Array], Array]


# Model


def logits(
    params: Tree, tokens: Array, config: Config, linear: Linear, key: Array, feed_forward: FeedForward = mlp
) -> Array:
    """Computes the logits of every next byte, float32 [batch, seq, 256].

    Args:
      params: weights as ``init_params`` makes them, in any dtype; those of the linear layers as ``linear`` takes them.
      tokens: integers [batch, seq].
      config: sizes of the model.
      linear: product of the linear layers.
      key: for a linear layer that rounds stochastically; every layer receives a key of its own.
      feed_forward: what follows the attention in each block.
    """

    def block(x: Array, layer_and_keys: tuple[Tree, Array]) -> tuple[Array, None]:
        layer, keys = layer_and_keys
        x = x + attention(rms_norm(x, layer["attention_norm"]), layer, config, linear, keys[:2])
        x = x + feed_forward(rms_norm(x, layer["mlp_norm"]), layer, config, linear, keys[2:])
        return x, None

    x = params["embedding"][tokens]
    if config.architecture == "gpt":
        x = x + params["position"][: tokens.shape[1]]
    keys = jax.random.split(key, (config.layers, 4))  # one for each linear layer
    x, _ = jax.lax.scan(block, x.astype(jnp.bfloat16), (params["layers"], keys))
    return (rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype).T).astype(jnp.float32)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns the mean cross entropy in nats of logits [..., 256] and integers [...]."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets.astype(jnp.int32)[..., None], axis=-1))


def loss_fn(
    params: Tree, batch: Array, config: Config, linear: Linear, key: Array, feed_forward: FeedForward = mlp
) -> Array:
    """Returns the loss of predicting the bytes 1 to seq of a batch [batch, seq + 1] from those before them."""
    return cross_entropy(logits(params, batch[:, :-1], config, linear, key, feed_forward), batch[:, 1:])
