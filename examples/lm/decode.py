"""Greedy decoding with a KV cache: the Llama of these examples, a few new tokens at a time.

``prefill`` runs a prompt, and ``generate`` then a token at a time, all of them in one compiled program. The cache of a
layer holds the keys and values of the tokens so far, in bfloat16 or in NVFP4 with an amax for each token and head. Its
capacity is fixed; what lies behind the last token is masked.

The weights of layers are a list here (``unstack``), each layer with arrays of its own. A loop over stacked ones would
copy the weights of a layer before a kernel could read them, and reading weights is what takes the time here.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jnvfp4
from jnvfp4 import ROW_SCALED, NVFP4Tensor
from lm.config import Config
from lm.model import Linear, Tree, converted_linear, cross_entropy, embed, mlp, rms_norm, rotate, unembed

# Linear layers


def row_scaled_linear(x: Array, w: NVFP4Tensor, key: Array, name: str) -> Array:
    """Quantizes x, an amax for each token, and multiplies it by w^T; key and name are unused."""
    return jnvfp4.matmul_nt(jnvfp4.quantize(x, ROW_SCALED), w, out_dtype=x.dtype)


class Calibrated(NamedTuple):
    """Holds a quantized weight and the amax [] that its activations are scaled by, whatever they are."""

    weight: NVFP4Tensor
    amax: Array


def calibrated_linear(x: Array, w: Calibrated, key: Array, name: str) -> Array:
    """Quantizes x by the stored amax, as engines do, and multiplies it by w^T; key and name are unused."""
    return jnvfp4.matmul_nt(jnvfp4.quantize(x, amax=w.amax), w.weight, out_dtype=x.dtype)


def on_rows(linear: Linear) -> Linear:
    """Returns the layer for x [batch, tokens, K], which multiplies all tokens of the batch by one GEMM."""

    def joined(x: Array, w: Any, key: Array, name: str) -> Array:
        return linear(x.reshape(-1, x.shape[-1]), w, key, name).reshape(*x.shape[:-1], -1)

    return joined


# Weights


def is_quantized(x: Any) -> bool:
    return isinstance(x, NVFP4Tensor)


def unstack(params: Tree) -> Tree:
    """Puts weights on the device, with a list of layers instead of stacked ones."""
    stacked = params["layers"]
    layers = [
        jax.tree.map(lambda w, i=i: jax.device_put(w[i]), stacked, is_leaf=is_quantized)
        for i in range(len(stacked["attention_norm"]))
    ]
    return {**jax.device_put({name: w for name, w in params.items() if name != "layers"}), "layers": layers}


# Cache


class Cache(NamedTuple):
    """Holds what a layer remembers of the tokens, arrays or NVFP4Tensors [batch, kv_heads, capacity, head_dim].

    The heads are left of the tokens, so that the products of attention read the cache as it lies in memory.
    """

    keys: Any
    values: Any


def empty_cache(config: Config, batch: int, capacity: int, quantized: bool) -> Cache:
    """Makes the cache of a layer.

    Args:
      config: sizes of the model.
      batch: number of sequences.
      capacity: tokens of a sequence that it has room for.
      quantized: keep keys and values in NVFP4 instead of bfloat16.
    """

    def zeros() -> Array | NVFP4Tensor:
        x = jnp.zeros((batch, config.kv_heads, capacity, config.head_dim), jnp.bfloat16)
        return jnvfp4.quantize(x, ROW_SCALED) if quantized else x

    return Cache(zeros(), zeros())


def append(kept: Any, new: Array, position: Array | int) -> Any:
    """Writes new keys or values [batch, kv_heads, tokens, head_dim] into those of a cache.

    Each token has an amax of its own in each head, so what is in the cache stays as it is. Nothing else is written,
    except on CPUs, where XLA converts all scales (float8) to float16 and back.
    """
    parts = jnvfp4.quantize(new, ROW_SCALED) if is_quantized(kept) else new
    return jax.tree.map(lambda old, part: jax.lax.dynamic_update_slice_in_dim(old, part, position, 2), kept, parts)


# Layers


def attend(q: Array, cache: Cache, position: Array | int) -> Array:
    """Mixes the values in a cache for each of some queries, which see themselves and what was before them.

    Args:
      q: [batch, tokens, heads, head_dim].
      cache: of the layer, the keys and values of these tokens included.
      position: of the first query.

    Returns:
      [batch, tokens, heads * head_dim].
    """
    keys, values = (jnvfp4.dequantize(kept, jnp.bfloat16) if is_quantized(kept) else kept for kept in cache)
    batch, tokens, _, depth = q.shape
    kv_heads, capacity = keys.shape[1:3]
    # The queries that share a key are rows of one product: nothing is repeated.
    grouped = q.reshape(batch, tokens, kv_heads, -1, depth).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, depth)
    scores = jnp.einsum("bhmd,bhcd->bhmc", grouped, keys, preferred_element_type=jnp.float32) * depth**-0.5
    visible = jnp.arange(capacity) <= position + jnp.arange(grouped.shape[2])[:, None] % tokens
    shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bhmc,bhcd->bhmd", shares, values, preferred_element_type=jnp.float32).astype(q.dtype)
    return mixed.reshape(batch, kv_heads, -1, tokens, depth).transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1)


# Compiled, or traced into a larger program, once for all layers.
@partial(jax.jit, static_argnames=("config", "linear"))
def block(x: Array, layer: Tree, cache: Cache, position: Array, config: Config, linear: Linear) -> tuple[Array, Cache]:
    """Runs a layer on x [batch, tokens, width] and appends their keys and values to its cache."""
    linear = on_rows(linear)
    unused = jax.random.split(jax.random.key(0), 4)  # nothing rounds stochastically
    normed = rms_norm(x, layer["attention_norm"], config.norm_epsilon)
    qkv = linear(normed, layer["qkv"], unused[0], "qkv").reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.heads, config.heads + config.kv_heads], axis=2)
    q, k = (rotate(part, config.rotary_base, position) for part in (q, k))
    cache = Cache(*(append(kept, new.swapaxes(1, 2), position) for kept, new in zip(cache, (k, v), strict=True)))
    x = x + linear(attend(q, cache, position), layer["attention_out"], unused[1], "attention_out")
    normed = rms_norm(x, layer["mlp_norm"], config.norm_epsilon)
    return x + mlp(normed, layer, config, linear, unused[2:]), cache


# Model

next_logits = jax.jit(unembed, static_argnames="config")  # without it prefill would transpose the head in memory


def forward(
    params: Tree, tokens: Array, caches: Sequence[Cache], position: Array, config: Config, linear: Linear
) -> tuple[Array, list[Cache]]:
    """Runs some tokens of each sequence after those in the caches.

    Args:
      params: weights as ``unstack`` makes them.
      tokens: integers [batch, tokens].
      caches: one for each layer.
      position: of the first of the tokens, int32 ().
      config: sizes of the model.
      linear: product of the linear layers: ``converted_linear``, ``row_scaled_linear`` or ``calibrated_linear``.

    Returns:
      the logits of what follows the last token, float32 [batch, vocabulary], and the caches with the tokens.
    """
    x = embed(tokens, params["embedding"]).astype(jnp.bfloat16)
    new = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = block(x, layer, cache, position, config, linear)
        new.append(cache)
    return next_logits(x[:, -1], {name: params[name] for name in ("norm", "head")}, config), new


def greedy(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def prefill(
    params: Tree, tokens: Array, capacity: int, config: Config, linear: Linear, quantized_cache: bool = False
) -> tuple[Array, list[Cache]]:
    """Runs prompts, layer by layer; a compiled layer serves all.

    Returns:
      the first new token of each sequence, int32 [batch], and caches with room for ``capacity`` tokens.
    """
    caches = [empty_cache(config, tokens.shape[0], capacity, quantized_cache) for _ in params["layers"]]
    logits, caches = forward(params, tokens, caches, jnp.int32(0), config, linear)
    return greedy(logits), caches


@partial(jax.jit, static_argnames=("steps", "config", "linear"), donate_argnames="caches")
def generate(
    params: Tree, token: Array, caches: list[Cache], position: Array, steps: int, config: Config, linear: Linear
) -> tuple[Array, list[Cache]]:
    """Generates tokens, in each step the most probable one after those before.

    Args:
      params: weights as ``unstack`` makes them.
      token: the last token of each sequence, int32 [batch], which is not in the caches yet.
      caches: of the tokens before it. They are donated: the new tokens are written in place.
      position: of ``token``, int32 ().
      steps: number of tokens to generate.
      config: sizes of the model.
      linear: as in ``forward``.

    Returns:
      the new tokens, int32 [batch, steps], and the caches.
    """

    def step(carry: tuple[Array, list[Cache], Array], _: None) -> tuple[tuple[Array, list[Cache], Array], Array]:
        token, caches, position = carry
        logits, caches = forward(params, token[:, None], caches, position, config, linear)
        token = greedy(logits)
        return (token, caches, position + 1), token

    (_, caches, _), tokens = jax.lax.scan(step, (token, caches, position), length=steps)
    return tokens.T, caches


@partial(jax.jit, static_argnames=("config", "linear", "quantized_cache"))
def forced_loss(
    params: Tree, batch: Array, config: Config, linear: Linear = converted_linear, quantized_cache: bool = False
) -> Array:
    """Returns the mean loss of a batch [sequences, seq + 1], whose tokens run one at a time through the cache."""
    caches = [empty_cache(config, batch.shape[0], batch.shape[1] - 1, quantized_cache) for _ in params["layers"]]

    def step(carry: tuple[list[Cache], Array], tokens: Array) -> tuple[tuple[list[Cache], Array], Array]:
        caches, position = carry
        logits, caches = forward(params, tokens[:1].T, caches, position, config, linear)
        return (caches, position + 1), cross_entropy(logits, tokens[1])

    pairs = jnp.stack([batch[:, :-1].T, batch[:, 1:].T], axis=1)  # [seq, token and target, sequences]
    _, losses = jax.lax.scan(step, (caches, jnp.int32(0)), pairs)
    return jnp.mean(losses)
