"""Greedy decoding with a KV cache: the Llama of these examples, a new token of each sequence at a time.

``prefill`` runs prompts of any lengths, and ``generate`` then a token at a time, all of them in one compiled program.
The cache of a layer holds the keys and values of the tokens so far, in bfloat16 or in NVFP4 with an amax for each token
and head: a ``jnvfp4.attention.KVCache``. Its capacity is fixed (``check_room``).

The weights of layers are a list here (``unstack``), each layer with arrays of its own. A loop over stacked ones would
copy the weights of a layer before a kernel could read them, and reading weights is what takes the time here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jnvfp4
from jnvfp4 import ROW_SCALED, NVFP4Tensor
from jnvfp4.attention import KVCache, append_kv, decode_attention
from lm.config import Config
from lm.model import Linear, Tree, activate, converted_linear, cross_entropy, embed, rms_norm, rotate, unembed

# Linear layers

FEW = 16  # rows of a GEMM that adds a residual itself on Hopper


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


def on_rows(linear: Linear) -> Callable[..., Array]:
    """Returns the layer for x [batch, tokens, K], which multiplies all tokens of the batch by one GEMM.

    It multiplies the norm of x where it is given (gain, epsilon), and adds a residual. ``matmul_nt`` of few rows of an
    x that is not quantized is given both: on Hopper the norm of up to 4 rows and the residual cost no kernels.
    """

    def joined(
        x: Array, w: Any, key: Array, name: str, norm: tuple[Array, float] | None = None, residual: Array | None = None
    ) -> Array:
        rows, added = x.reshape(-1, x.shape[-1]), None if residual is None else residual.reshape(-1, residual.shape[-1])
        if linear is converted_linear and is_quantized(w) and rows.shape[0] <= FEW:
            y = jnvfp4.matmul_nt(rows, w, norm=norm, bias=added, out_dtype=x.dtype)
        else:
            y = linear(rows if norm is None else rms_norm(rows, *norm), w, key, name)
            y = y if added is None else added + y
        return y.reshape(*x.shape[:-1], -1)

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

CHUNK = 64  # tokens that a capacity is a multiple of


def empty_cache(config: Config, batch: int, capacity: int, quantized: bool) -> KVCache:
    """Makes the cache of a layer.

    Args:
      config: sizes of the model.
      batch: number of sequences.
      capacity: tokens of a sequence that it has room for, at least.
      quantized: keep keys and values in NVFP4 instead of bfloat16.
    """
    shape = (batch, config.kv_heads, -(-capacity // CHUNK) * CHUNK, config.head_dim)
    return KVCache.zeros(shape, jnp.float4_e2m1fn if quantized else jnp.bfloat16)


def check_room(caches: Sequence[KVCache], lengths: Any, new: int) -> None:
    """Raises if the caches have no room for ``new`` more tokens of sequences of these lengths, integers [batch]."""
    capacity, needed = caches[0].keys.shape[2], int(max(lengths)) + new
    if needed > capacity:
        raise ValueError(
            f"the cache is full: it has room for {capacity} tokens of a sequence, and {needed} are needed; make it "
            "larger, generate fewer tokens, or end or shorten the longest sequences"
        )


def put_prompts(kept: Any, new: Array) -> Any:
    """Puts the keys or values [batch, tokens, kv_heads, head_dim] of prompts at the beginning of an empty cache.

    Each token has an amax of its own in each head. What is behind the end of a shorter prompt is not read, and is
    overwritten.
    """
    rows = new.swapaxes(1, 2)
    parts = jnvfp4.quantize(rows, ROW_SCALED) if is_quantized(kept) else rows
    return jax.tree.map(lambda old, part: jax.lax.dynamic_update_slice_in_dim(old, part, 0, 2), kept, parts)


# Layers


def attend(q: Array, k: Array, v: Array, cache: KVCache, positions: Array) -> tuple[Array, KVCache]:
    """Attends to all tokens so far, and puts the new ones into the cache.

    Args:
      q: [batch, tokens, heads, head_dim]: prompts, or one token of each sequence.
      k: [batch, tokens, kv_heads, head_dim].
      v: of the same shape.
      cache: of the layer; empty before prompts.
      positions: int32 [batch], of the first of the tokens. That of a sequence that has ended is -1.

    Returns:
      [batch, tokens, heads * head_dim], and the cache.
    """
    if q.shape[1] == 1:
        cache = append_kv(cache, k[:, 0], v[:, 0], positions)
        mixed = decode_attention(q[:, 0], cache, positions + 1)
    else:
        cache = KVCache(put_prompts(cache.keys, k), put_prompts(cache.values, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*q.shape[:2], -1), cache


# Compiled, or traced into a larger program, once for all layers.
@partial(jax.jit, static_argnames=("config", "linear"))
def block(
    x: Array, layer: Tree, cache: KVCache, positions: Array, config: Config, linear: Linear
) -> tuple[Array, KVCache]:
    """Runs a layer on x [batch, tokens, width] and appends their keys and values to its cache."""
    multiply, unused = on_rows(linear), jax.random.key(0)  # nothing rounds stochastically

    def product(name: str, x: Array, norm: str | None = None, residual: Array | None = None) -> Array:
        of_x = None if norm is None else (layer[norm], config.norm_epsilon)
        return multiply(x, layer[name], unused, name, of_x, residual)

    qkv = product("qkv", x, norm="attention_norm").reshape(*x.shape[:2], -1, config.head_dim)
    rotated, v = jnp.split(qkv, [config.heads + config.kv_heads], axis=2)
    q, k = jnp.split(rotate(rotated, config, positions), [config.heads], axis=2)  # one small kernel, not two
    mixed, cache = attend(q, k, v, cache, positions)
    x = product("attention_out", mixed, residual=x)
    hidden = activate(product("mlp_up", x, norm="mlp_norm"), config)
    return product("mlp_down", hidden, residual=x), cache


# Model

next_logits = jax.jit(unembed, static_argnames="config")  # without it prefill would transpose the head in memory


def forward(
    params: Tree,
    tokens: Array,
    caches: Sequence[KVCache],
    positions: Array,
    last: Array,
    config: Config,
    linear: Linear,
) -> tuple[Array, list[KVCache]]:
    """Runs prompts, or one token of each sequence after those in the caches.

    Args:
      params: weights as ``unstack`` makes them.
      tokens: integers [batch, tokens].
      caches: one for each layer.
      positions: of the first of the tokens, int32 [batch].
      last: which of the tokens is the last one of its sequence, int32 [batch].
      config: sizes of the model.
      linear: product of the linear layers: ``converted_linear``, ``row_scaled_linear`` or ``calibrated_linear``.

    Returns:
      the logits of what follows the last token, float32 [batch, vocabulary], and the caches with the tokens.
    """
    x = embed(tokens, params["embedding"]).astype(jnp.bfloat16)
    new = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = block(x, layer, cache, positions, config, linear)
        new.append(cache)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return next_logits(x, {name: params[name] for name in ("norm", "head")}, config), new


def greedy(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def prefill(
    params: Tree,
    tokens: Array,
    lengths: Array,
    capacity: int,
    config: Config,
    linear: Linear,
    quantized_cache: bool = False,
) -> tuple[Array, list[KVCache]]:
    """Runs prompts, layer by layer; a compiled layer serves all.

    Args:
      params: weights as ``unstack`` makes them.
      tokens: integers [batch, longest prompt]; what follows the end of a shorter prompt may be anything.
      lengths: of the prompts, int32 [batch].
      capacity: tokens of a sequence that the caches get room for, at least.
      config: sizes of the model.
      linear: as in ``forward``.
      quantized_cache: keep keys and values in NVFP4.

    Returns:
      the first new token of each sequence, int32 [batch], and the caches.
    """
    caches = [empty_cache(config, tokens.shape[0], capacity, quantized_cache) for _ in params["layers"]]
    check_room(caches, [tokens.shape[1]], 0)
    logits, caches = forward(params, tokens, caches, jnp.zeros_like(lengths), lengths - 1, config, linear)
    return greedy(logits), caches


@partial(jax.jit, static_argnames=("steps", "config", "linear", "stop"), donate_argnames="caches")
def generate(
    params: Tree,
    token: Array,
    caches: list[KVCache],
    positions: Array,
    steps: int,
    config: Config,
    linear: Linear,
    stop: int = -1,
) -> tuple[Array, list[KVCache], Array]:
    """Generates tokens, in each step the most probable one after those before.

    Args:
      params: weights as ``unstack`` makes them.
      token: the last token of each sequence, int32 [batch], which is not in the caches yet.
      caches: of the tokens before it, with room for the new ones (``check_room``). They are donated: the new tokens are
        written in place.
      positions: of ``token``, int32 [batch]; -1 for a sequence that has ended, which costs no attention.
      steps: number of tokens to generate.
      config: sizes of the model.
      linear: as in ``forward``.
      stop: the token that ends a sequence; -1 if none does.

    Returns:
      the new tokens, int32 [batch, steps], ``stop`` where a sequence has ended; the caches; and the positions of the
      last tokens, with which it can go on.
    """

    def step(carry: tuple[Array, list[KVCache], Array], _: None) -> tuple[tuple[Array, list[KVCache], Array], Array]:
        token, caches, positions = carry
        positions = jnp.where(token == stop, -1, positions)
        first = jnp.zeros_like(positions)
        logits, caches = forward(params, token[:, None], caches, positions, first, config, linear)
        token = jnp.where(positions < 0, stop, greedy(logits))
        return (token, caches, jnp.where(positions < 0, -1, positions + 1)), token

    (_, caches, positions), tokens = jax.lax.scan(step, (token, caches, positions), length=steps)
    return tokens.T, caches, positions


@partial(jax.jit, static_argnames=("config", "linear", "quantized_cache"))
def forced_loss(
    params: Tree, batch: Array, config: Config, linear: Linear = converted_linear, quantized_cache: bool = False
) -> Array:
    """Returns the mean loss of a batch [sequences, seq + 1], whose tokens run one at a time through the cache."""
    caches = [empty_cache(config, batch.shape[0], batch.shape[1] - 1, quantized_cache) for _ in params["layers"]]
    first = jnp.zeros(batch.shape[0], jnp.int32)

    def step(carry: tuple[list[KVCache], Array], tokens: Array) -> tuple[tuple[list[KVCache], Array], Array]:
        caches, positions = carry
        logits, caches = forward(params, tokens[:1].T, caches, positions, first, config, linear)
        return (caches, positions + 1), cross_entropy(logits, tokens[1])

    pairs = jnp.stack([batch[:, :-1].T, batch[:, 1:].T], axis=1)  # [seq, token and target, sequences]
    _, losses = jax.lax.scan(step, (caches, first), pairs)
    return jnp.mean(losses)
