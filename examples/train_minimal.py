"""Trains a small Flax NNX model in NVFP4 with optax: the lines that name jnvfp4 are all that NVFP4 adds.

    pip install ".[flax]"
    python examples/train_minimal.py

The model predicts a byte of this Python's standard library from the 64 before it. Takes half a minute on two CPU cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jnvfp4
from lm.data import stdlib_text, windows

CONTEXT, WIDTH, LAYERS, BATCH, STEPS = 64, 512, 3, 256, 300


class Model(nnx.Module):
    """A residual MLP over the embedded context."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 16, rngs=rngs)
        self.inputs = nnx.Linear(CONTEXT * 16, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, context: jax.Array) -> jax.Array:
        h = self.inputs(self.embed(context).reshape(len(context), -1))
        for block in self.blocks:
            h = h + block(nnx.gelu(h))
        return self.head(h)


model = Model(nnx.Rngs(0))
policy = jnvfp4.Policy([jnvfp4.Rule("inputs|blocks/.*", jnvfp4.recipes.pretrain())])  # the head stays in float32
model = jnvfp4.flax.nnx.apply(model, policy, rngs=nnx.Rngs(sr=0))  # stochastic rounding draws from the stream "sr"
optimizer = nnx.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(1e-3, STEPS)), wrt=nnx.Param)


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    """Makes a training step on [batch, context + 1] bytes; returns the loss in nats per byte."""

    def loss(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, -1]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


text, _ = stdlib_text()
for i in range(STEPS):
    batch = windows(text, np.random.default_rng(i).integers(len(text) - CONTEXT, size=BATCH), CONTEXT)
    value = step(model, optimizer, jnp.asarray(batch, jnp.int32))
    if i % 50 == 0 or i == STEPS - 1:
        print(f"step {i:3}  loss {value:.3f}")
