"""Small models of Flax, in bfloat16 and unaware of jnvfp4, and what the tests look at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jnvfp4 import Policy, recipes

WIDTH, HIDDEN, VOCABULARY = 32, 64, 48
SR, NEAREST = recipes.pretrain(), recipes.DEFAULT
ALL = Policy(default=SR, keep=())
KEY = jax.random.key(5)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, WIDTH)), jnp.float32)
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
    """Blocks one after the other: ``scan`` says how, and ``lift`` what is put around their class."""

    layers: int = 3
    scan: bool = False
    lift: Any = staticmethod(lambda block: block)
    split_rngs: Any = (("params", True),)

    @nn.compact
    def __call__(self, x):
        block = self.lift(Mlp)
        if not self.scan:
            for i in range(self.layers):
                x = block(name=f"block_{i}")(x)
            return x

        axes, body = {"params": 0, "keys": 0}, lambda block, x, _: (block(x), None)
        loop = nn.scan(body, variable_axes=axes, split_rngs=dict(self.split_rngs), length=self.layers)
        return loop(block(name="block"), x, None)[0]


class LinenOwn(nn.Module):
    """Multiplies by itself, as some models do, and has a position embedding."""

    weight: str = "kernel"

    @nn.compact
    def __call__(self, x):
        x += self.param("pos", nn.initializers.zeros, (16, WIDTH))
        return jax.jit(jnp.matmul)(x, self.param(self.weight, nn.initializers.lecun_normal(), (WIDTH, WIDTH)))


GROUPS = jnp.array([9, 0, 20, 3], jnp.int32)  # of the 32 tokens, to four experts
BY_AXIS_2 = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def experts(x, gate, up, down, dtype=jnp.bfloat16):
    """Multiplies tokens by experts as models do, of which down is [G, N, K]; as one function of its arguments."""
    h = x.reshape(-1, x.shape[-1]).astype(dtype)
    gate = jax.lax.ragged_dot(lhs=h, rhs=gate.astype(dtype), group_sizes=GROUPS)
    h = nn.silu(gate) * jax.lax.ragged_dot(h, up.astype(dtype), GROUPS, preferred_element_type=dtype)
    return jax.lax.ragged_dot_general(h, down.astype(dtype), GROUPS, BY_AXIS_2).reshape(x.shape).astype(x.dtype)


class Moe(nn.Module):
    """A layer of experts, and a router that is kept; ``wrap`` is put around the products, such as shard_map."""

    wrap: Any = staticmethod(lambda f: f)

    @nn.compact
    def __call__(self, x):
        init, shape = nn.initializers.lecun_normal(), (len(GROUPS), WIDTH, HIDDEN)
        weights = [self.param(name, init, shape) for name in ("gate", "up", "down")]
        score = nn.sigmoid(nn.Dense(1, name="router")(x))
        return x + score * self.wrap(experts)(x, *weights)


class MoeBlock(nn.Module):
    """An ``Mlp`` and a ``Moe``."""

    @nn.compact
    def __call__(self, x):
        return Moe(name="moe")(Mlp(name="mlp")(x))


def shapes(model: nn.Module, x=X):
    """Of the variables, without computing them."""
    return jax.eval_shape(model.init, jax.random.key(0), x)


def init(model: nn.Module, x=X):
    """Variables without a run of the model, since any values will do."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda v: jnp.asarray(rng.normal(0, 0.2, v.shape), v.dtype), shapes(model, x))


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


class NnxStack(nnx.Module):
    """Three ``NnxMlp`` in a loop over their stacked parameters, or one after the other."""

    def __init__(self, scan):
        self.scan = scan
        if scan:
            self.block = nnx.vmap(lambda rngs: NnxMlp(rngs), in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))
        else:
            self.block = nnx.List([NnxMlp(nnx.Rngs(i)) for i in range(3)])

    def __call__(self, x):
        if not self.scan:
            for block in self.block:
                x = block(x)
            return x

        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.block)


class NnxOwn(nnx.Module):
    """Multiplies by itself, as some models do, and has a position embedding."""

    def __init__(self, weight="kernel"):
        self.pos, self.weight = nnx.Param(jnp.zeros((16, WIDTH))), weight
        setattr(self, weight, nnx.Param(jnp.ones((WIDTH, WIDTH))))

    def __call__(self, x):
        return jax.lax.dot_general(x + self.pos, getattr(self, self.weight)[...], (((x.ndim - 1,), (0,)), ((), ())))


class NnxMoe(nnx.Module):
    """``Moe`` in NNX, without the router."""

    def __init__(self, rngs):
        init, shape = nnx.initializers.lecun_normal(), (len(GROUPS), WIDTH, HIDDEN)
        self.gate, self.up, self.down = (nnx.Param(init(rngs.params(), shape)) for _ in range(3))

    def __call__(self, x):
        return x + experts(x, self.gate[...], self.up[...], self.down[...])


def cross_entropy(logits, tokens=TOKENS):
    """Of the next token."""
    likely = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(likely, tokens[:, 1:, None], -1).mean()
