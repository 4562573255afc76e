"""A transformer as functions of a tree of weights.

The product of the linear layers is an argument, ``linear(x, w, key, name)``, so the same model runs in bfloat16
(``bf16_linear``; ``trained_bf16_linear`` has float32 gradients of weights), trains in NVFP4 (``quantized_linear``),
runs from NVFP4 weights (``converted_linear``) and is split over devices by the names of its weights
(``lm/sharded.py``). The attention scores, norms, embeddings and the output head are in bfloat16 or float32, the
residual stream is bfloat16.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jnvfp4
from jnvfp4 import NVFP4Tensor, QuantizedWeight, Recipe
from lm.config import Config

Tree = Any  # a nested dict of arrays; of NVFP4Tensors, too, where weights are quantized
Linear = Callable[[Array, Any, Array, str], Array]  # x [..., K], w [N, K], key, name of w -> [..., N]
PROJECTIONS = ("qkv", "attention_out", "mlp_up", "mlp_down")  # names of the weights of linear layers


class Probed(NamedTuple):
    """Holds weights as a linear layer takes them, and the probe whose gradient is the statistics of the layer."""

    w: Any
    probe: Array


# Linear layers


def bf16_linear(x: Array, w: Array, key: Array, name: str) -> Array:
    """Multiplies x by w^T in the dtype of x; key and name are unused."""
    return x @ w.astype(x.dtype).T


@jax.custom_vjp
def _product(x: Array, w: Array) -> Array:
    return x @ w.astype(x.dtype).T


def _product_fwd(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, w), (x, w)


def _product_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    tokens = tuple(range(x.ndim - 1))
    dw = jax.lax.dot_general(dy, x, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)
    return dy @ w.astype(dy.dtype), dw.astype(w.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def trained_bf16_linear(x: Array, w: Array, key: Array, name: str) -> Array:
    """Multiplies as ``bf16_linear``, and sums gradients of w in float32 without rounding them to bfloat16.

    So does ``jnvfp4.linear``, and a comparison with it should differ in the quantization alone.
    """
    return _product(x, w)


def bf16_forward(recipe: Recipe) -> Linear:
    """Returns a linear layer whose y is that of ``trained_bf16_linear``, while gradients follow the recipe.

    ``jnvfp4.linear`` with ``fprop=None`` computes y from w as it is: from float32 weights in float32, which is slow.
    """
    return with_gradients(recipe, _product)


def with_gradients(recipe: Recipe, multiply: Callable[[Array, Array], Array]) -> Linear:
    """Returns a linear layer whose y is that of ``multiply``, while gradients follow the recipe."""
    assert recipe.fprop is None or not recipe.requantize  # there are no others than of the x and w given
    gradients = replace(recipe, fprop=None)

    def pull(x: Array, w: Array, key: Array, dy: Array) -> tuple[Array, Array]:
        _, pull = jax.vjp(lambda x, w: jnvfp4.linear(x, w, gradients, key=key), x, w)  # XLA drops the unused y
        return pull(dy)

    return with_pull(multiply, pull)


def with_pull(
    multiply: Callable[[Array, Array], Array], pull: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
) -> Linear:
    """Returns a linear layer whose y is ``multiply(x, w)``, and whose gradients are ``pull(x, w, key, dy)``."""

    @jax.custom_vjp
    def product(x: Array, w: Array, key: Array) -> Array:
        return multiply(x, w)

    def forward(x: Array, w: Array, key: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        return multiply(x, w), (x, w, key)

    def backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
        return *pull(*saved, dy), None

    product.defvjp(forward, backward)
    return lambda x, w, key, name: product(x, w, key)


def quantized_linear(recipe: Recipe, gather: Callable[[str], Any] = lambda name: None) -> Linear:
    """Returns a linear layer that quantizes x and w, and their gradients, as the recipe says.

    It takes w alone, a pair of w and its amax, or a ``QuantizedWeight``, or ``Probed`` of these; ``gather`` returns the
    ``w_gather`` of a name.
    """

    def linear(x: Array, w: Any, key: Array, name: str) -> Array:
        w, probe = w if isinstance(w, Probed) else (w, None)
        w, amax = w if isinstance(w, tuple) else (w, None)
        return jnvfp4.linear(x, w, recipe, key=key, w_amax=amax, w_gather=gather(name), stats=probe)

    return linear


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

    embeddings = {"embedding": normal(config.vocabulary, d, std=0.02)}
    if not is_llama:
        embeddings["position"] = normal(config.seq, d, std=0.02)
    residual_std = (2 * n) ** -0.5  # 2n branches add to the residual stream
    return {
        **embeddings,
        "head": normal(config.vocabulary, d, std=0.02),
        "norm": jnp.ones(d),
        "layers": {
            "attention_norm": jnp.ones((n, d)),
            "qkv": normal(n, (config.heads + 2 * config.kv_heads) * config.head_dim, d, std=d**-0.5),
            "attention_out": normal(n, d, config.heads * config.head_dim, std=residual_std * d**-0.5),
            "mlp_norm": jnp.ones((n, d)),
            "mlp_up": normal(n, 2 * hidden if is_llama else hidden, d, std=d**-0.5),
            "mlp_down": normal(n, d, hidden, std=residual_std * hidden**-0.5),
        },
    }


def stacks(params: Tree) -> Tree:
    """Returns the weights [layers, N, K] of the linear layers by name."""
    return {name: w for name, w in params["layers"].items() if w.ndim == 3}


def amaxes(params: Tree) -> Tree:
    """Finds the amax of each matrix of the linear layers, float32 [layers] by name: their ``w_amax``."""
    return {name: jnp.max(jnp.abs(w), (1, 2)) for name, w in stacks(params).items()}


def quantize_weights(params: Tree, amax: Tree, recipe: Recipe) -> Tree:
    """Quantizes the weights of the linear layers for all microbatches of a step; ``amax`` may lack some."""

    def make(w: Array, amax: Array | None) -> QuantizedWeight:
        return QuantizedWeight.of(w, recipe, w_amax=amax)

    return {name: jax.vmap(make)(w, amax.get(name)) for name, w in stacks(params).items()}


def with_known(params: Tree, known: Tree) -> Tree:
    """Puts beside the weights of linear layers what is known of them: their amaxes, or their quantized forms."""

    def join(w: Array, of: Array | QuantizedWeight) -> Any:
        return replace(of, array=w) if isinstance(of, QuantizedWeight) else (w, of)

    layers = params["layers"]
    return params | {"layers": layers | {name: join(layers[name], of) for name, of in known.items()}}


def make_probes(config: Config) -> Tree:
    """Returns the probes of all linear layers by name, stacked as the weights are."""
    return {name: jnvfp4.stats.probe(True, (config.layers,)) for name in PROJECTIONS}


def with_probes(params: Tree, probes: Tree) -> Tree:
    """Puts probes [layers, 3, 7] beside the weights of linear layers, by name."""
    layers = params["layers"]
    return params | {"layers": layers | {name: Probed(layers[name], probe) for name, probe in probes.items()}}


# Layers


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (x32 * scale * gain).astype(x.dtype)


def angles(config: Config) -> Array:
    """Returns by what angle each pair of a head's elements turns from position to position, float32 [head_dim / 2]."""
    half, scaling = config.head_dim // 2, config.rotary_scaling
    plain = config.rotary_base ** (-jnp.arange(half) / half)
    if scaling is None:
        return plain
    turns = scaling.positions / (2 * math.pi) * plain
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(x: Array, config: Config, start: Array | int = 0) -> Array:
    """Embeds the positions of x [batch, seq, heads, head_dim]: rotates each element with the one half a head away.

    Args:
      x: queries or keys.
      config: sizes of the model.
      start: position of the first of them, of all sequences or of each [batch].
    """
    position = jnp.asarray(start)[..., None] + jnp.arange(x.shape[1])
    angle = position[..., None] * angles(config)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array) -> Array:
    qkv = linear(x, layer["qkv"], keys[0], "qkv").reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.heads, config.heads + config.kv_heads], axis=2)
    if config.architecture == "llama":
        q, k = rotate(q, config), rotate(k, config)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.reshape(*x.shape[:2], -1), layer["attention_out"], keys[1], "attention_out")


def activate(up: Array, config: Config) -> Array:
    if config.architecture == "llama":
        gate, values = jnp.split(up, 2, axis=-1)
        return jax.nn.silu(gate) * values
    return jax.nn.gelu(up)


def mlp(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array) -> Array:
    hidden = activate(linear(x, layer["mlp_up"], keys[0], "mlp_up"), config)
    return linear(hidden, layer["mlp_down"], keys[1], "mlp_down")


FeedForward = Callable[[Array, Tree, Config, Linear, Array], Array]


def block(x: Array, layer: Tree, config: Config, linear: Linear, keys: Array, feed_forward: FeedForward = mlp) -> Array:
    normed = rms_norm(x, layer["attention_norm"], config.norm_epsilon)
    x = x + attention(normed, layer, config, linear, keys[:2])
    normed = rms_norm(x, layer["mlp_norm"], config.norm_epsilon)
    return x + feed_forward(normed, layer, config, linear, keys[2:])


# Model


@jax.custom_vjp
def embed(tokens: Array, embedding: Array) -> Array:
    """Looks tokens up. The gradient is a GEMM: a scatter sums in an order that changes from run to run on GPUs."""
    return embedding[tokens]


def _embed_fwd(tokens: Array, embedding: Array) -> tuple[Array, tuple[Array, Array]]:
    return embed(tokens, embedding), (tokens, embedding)


def _embed_bwd(saved: tuple[Array, Array], dx: Array) -> tuple[None, Array]:
    tokens, embedding = saved
    picked = jax.nn.one_hot(tokens.reshape(-1), embedding.shape[0], dtype=jnp.bfloat16)
    flat = dx.reshape(-1, dx.shape[-1]).astype(jnp.bfloat16)  # exact: the residual stream is bfloat16
    grad = jax.lax.dot_general(picked, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    _, pull = jax.vjp(lambda e: e + grad, embedding)  # in a shard_map it sums over devices that tokens are split over
    return None, *pull(grad)


embed.defvjp(_embed_fwd, _embed_bwd)


def logits(
    params: Tree,
    tokens: Array,
    config: Config,
    linear: Linear | Sequence[Linear],
    key: Array,
    feed_forward: FeedForward = mlp,
) -> Array:
    """Computes the logits of every next token, float32 [batch, seq, vocabulary].

    Args:
      params: weights as ``init_params`` makes them, in any dtype; those of the linear layers as ``linear`` takes them.
      tokens: integers [batch, seq].
      config: sizes of the model.
      linear: product of the linear layers, for all blocks, which then run in a loop; or one for each, without a loop.
      key: for a linear layer that rounds stochastically; every layer receives a key of its own.
      feed_forward: what follows the attention in each block.
    """

    def run(x: Array, layer: Tree, keys: Array, linear: Linear) -> Array:
        return block(x, layer, config, linear, keys, feed_forward)

    x = embed(tokens, params["embedding"])
    if config.architecture == "gpt":
        x = x + params["position"][: tokens.shape[1]]
    x = x.astype(jnp.bfloat16)
    keys = jax.random.split(key, (config.layers, 4))  # one for each linear layer
    if callable(linear):
        x, _ = jax.lax.scan(lambda x, of: (run(x, *of, linear), None), x, (params["layers"], keys))
    else:
        for i, of_block in enumerate(linear):
            x = run(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]), keys[i], of_block)
    return unembed(x, params, config)


def unembed(x: Array, params: Tree, config: Config) -> Array:
    """Computes logits, float32 [..., vocabulary], from the residual stream [..., width]."""
    norm, head = (params["norm"], config.norm_epsilon), params["head"]
    if isinstance(head, NVFP4Tensor):
        return jnvfp4.matmul_nt(x, head, norm=norm, out_dtype=jnp.float32)
    return (rms_norm(x, *norm) @ head.astype(x.dtype).T).astype(jnp.float32)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns the mean cross entropy in nats of logits [..., vocabulary] and integers [...]."""
    is_target = jnp.arange(logits.shape[-1]) == targets.astype(jnp.int32)[..., None]  # its gradient is no scatter
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0), axis=-1))


def loss_fn(
    params: Tree,
    batch: Array,
    config: Config,
    linear: Linear | Sequence[Linear],
    key: Array,
    feed_forward: FeedForward = mlp,
) -> Array:
    """Returns the loss of predicting the tokens 1 to seq of a batch [batch, seq + 1] from those before them."""
    return cross_entropy(logits(params, batch[:, :-1], config, linear, key, feed_forward), batch[:, 1:])
