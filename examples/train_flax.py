"""Trains a small transformer of plain Flax, in bfloat16 and in NVFP4, from the same weights and batches.

    pip install ".[flax]"
    python examples/train_flax.py --api linen,nnx --out out

The models know nothing of jnvfp4. What a user adds to a training script is in ``train_linen`` and ``train_nnx``, in the
lines that name it; train_minimal.py is shorter. Prints first and last losses, and writes all to ``--out``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jnvfp4
from lm.data import stdlib_text, windows

LAYERS, WIDTH, HEADS, SEQ, BATCH, VOCABULARY = 2, 128, 4, 128, 8, 256


# ---------------------------------------------------------------- a model of Linen
class Block(nn.Module):
    """Attention and an MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, name="attention")
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.Dense(4 * WIDTH, dtype=jnp.bfloat16, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, name="down")(nn.gelu(h))


class Transformer(nn.Module):
    """A byte-level language model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (SEQ, WIDTH))
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, name="lm_head")(nn.LayerNorm()(x))


# ---------------------------------------------------------------- the same of NNX
class NnxBlock(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxTransformer(nnx.Module):
    """A byte-level language model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQ, WIDTH)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


# ---------------------------------------------------------------- training
def loss_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, max(steps, 11)))


def train_linen(recipe: jnvfp4.Recipe | None, batches: list[np.ndarray], seed: int) -> list[float]:
    """Trains the model of Linen; returns the loss of each step."""
    model, tx = Transformer(), optimizer(len(batches))
    policy = jnvfp4.Policy([jnvfp4.Rule("block_.*", recipe)])
    params = model.init(jax.random.key(seed), batches[0][:, :-1])
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            with jnvfp4.flax.linen.intercept(policy):
                logits: Any = model.apply(params, batch[:, :-1], rngs={"sr": key})
            return loss_of(logits, batch[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for i, batch in enumerate(batches):
        params, state, value = step(params, state, batch, jax.random.key(i))
        losses.append(float(value))
    return losses


def train_nnx(recipe: jnvfp4.Recipe | None, batches: list[np.ndarray], seed: int) -> list[float]:
    """Trains the model of NNX; returns the loss of each step."""
    model = NnxTransformer(nnx.Rngs(seed))
    policy = jnvfp4.Policy([jnvfp4.Rule("blocks/.*", recipe)])
    model = jnvfp4.flax.nnx.apply(model, policy, rngs=nnx.Rngs(sr=seed))
    state = nnx.Optimizer(model, optimizer(len(batches)), wrt=nnx.Param)

    @nnx.jit
    def step(model: NnxTransformer, state: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: loss_of(m(batch[:, :-1]), batch[:, 1:]))(model)
        state.update(model, grads)
        return value

    return [float(step(model, state, jnp.asarray(batch))) for batch in batches]


APIS: dict[str, Callable[[jnvfp4.Recipe | None, list[np.ndarray], int], list[float]]] = {
    "linen": train_linen,
    "nnx": train_nnx,
}
RECIPES = {"bf16": None, "pretrain": jnvfp4.recipes.pretrain(), "pretrain_4over6": jnvfp4.recipes.pretrain_4over6()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="linen,nnx", help="of linen, nnx (default: both)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for train_flax.json")
    args = parser.parse_args()
    text, _ = stdlib_text()
    draw = np.random.default_rng(args.seed)
    starts = [draw.integers(len(text) - SEQ, size=BATCH) for _ in range(args.steps)]
    batches = [windows(text, s, SEQ).astype(np.int32) for s in starts]

    losses: dict[str, dict[str, list[float]]] = {}
    for api in args.api.split(","):
        losses[api] = {name: APIS[api](recipe, batches, args.seed) for name, recipe in RECIPES.items()}
        for name, curve in losses[api].items():
            last = np.mean(curve[-10:])
            above = 100 * (last / np.mean(losses[api]["bf16"][-10:]) - 1)
            print(f"{api:6} {name:16} first {curve[0]:.3f}  last ten {last:.3f}  ({above:+.1f} % to bf16)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_flax.json").write_text(json.dumps({"jax": jax.__version__, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
