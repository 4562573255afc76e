"""Small models of Flax, in bfloat16 and unaware of jnvfp4, and what the tests look at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jnvfp4 import layer_index
from jnvfp4._layers import dot_general

WIDTH, HIDDEN, VOCABULARY = 32, 64, 48
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, 16)))


class Mlp(nn.Module):
    """A block of one hidden layer."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, dtype=jnp.bfloat16, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, use_bias=False, name="down")(nn.gelu(h)).astype(x.dtype)


class Transformer(nn.Module):
    """Attention by DenseGeneral, a gate by Einsum, ``Mlp``, and a head."""

    layers: int = 2
    block: Any = Mlp

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for i in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16, name=f"block_{i}_attention")
            x = x + attention(nn.LayerNorm(name=f"block_{i}_norm")(x)).astype(x.dtype)
            gate = nn.Einsum((WIDTH, WIDTH), "bsd,de->bse", dtype=jnp.bfloat16, name=f"block_{i}_gate")
            x = x * gate(x).astype(x.dtype)
            x = self.block(name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, name="lm_head")(x)


class Stack(nn.Module):
    """Blocks one after the other: ``scan`` says how."""

    layers: int = 3
    scan: bool = False
    indexed: bool = False
    remat: bool = False
    split_rngs: Any = (("params", True),)

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Mlp) if self.remat else Mlp
        if not self.scan:
            for i in range(self.layers):
                x = block(name=f"block_{i}")(x)
            return x

        def body(block, x, i):
            if self.indexed:
                with layer_index(i):
                    return block(x), None
            return block(x), None

        axes, split = {"params": 0, "keys": 0}, dict(self.split_rngs)
        loop = nn.scan(body, variable_axes=axes, split_rngs=split, length=self.layers)
        return loop(block(name="block"), x, jnp.arange(self.layers))[0]


def stacked(params: Any) -> Any:
    """The parameters of the scanned stack from those of the unrolled one."""
    blocks = [params["params"][f"block_{i}"] for i in range(len(params["params"]))]
    return {"params": {"block": jax.tree.map(lambda *v: jnp.stack(v), *blocks)}}


class NnxMlp(nnx.Module):
    """``Mlp`` in NNX."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x)))).astype(x.dtype)


class NnxBlock(nnx.Module):
    """A block of ``NnxTransformer``."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=rngs)
        self.gate = nnx.Einsum("bsd,de->bse", (WIDTH, WIDTH), dtype=jnp.bfloat16, rngs=rngs)
        self.mlp = NnxMlp(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x)).astype(x.dtype)
        return self.mlp(x * self.gate(x).astype(x.dtype))


class NnxTransformer(nnx.Module):
    """``Transformer`` in NNX."""

    def __init__(self, rngs, layers=2):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def cross_entropy(logits, tokens=TOKENS):
    """Of the next token."""
    likely = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(likely, tokens[:, 1:, None], -1).mean()


def products(f, *args) -> int:
    """How many products of quantized operands a function has; the arguments may be shapes."""
    return str(jax.make_jaxpr(f)(*args)).count("nvfp4_matmul[")


def record_keys(monkeypatch) -> list[tuple[int, ...]]:
    """Lists the keys of all products that run from now on, also within loops."""
    drawn: list[tuple[int, ...]] = []
    original = dot_general.call_linear

    def recorded(call, x, w, bias, key, *rest):
        if call.recipe.stochastic:
            jax.debug.callback(lambda data: drawn.append(tuple(np.asarray(data).tolist())), jax.random.key_data(key))
        return original(call, x, w, bias, key, *rest)

    monkeypatch.setattr(dot_general, "call_linear", recorded)
    return drawn
