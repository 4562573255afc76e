"""Fine-tunes a trained model for the forward pass that will run: on the text, or on the logits of the trained model."""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from lm.config import Config
from lm.model import Linear, Tree, bf16_linear, logits, loss_fn
from lm.train import adamw, init_optimizer, learning_rate

SHARE, RATE = 0.05, 0.1  # of the steps and of the peak learning rate of the training
Objective = Literal["text", "teacher"]


def divergence(teacher: Array, student: Array) -> Array:
    """Returns the mean KL divergence, in nats, of the distributions of two logits [..., vocabulary]."""
    expected, found = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.mean(jnp.sum(jnp.exp(expected) * (expected - found), axis=-1))


def fine_tune(trained: Tree, config: Config, tokens: Array, linear: Linear, objective: Objective, seed: int) -> Tree:
    """Returns float32 weights after a twentieth of the training's steps, with a tenth of its learning rate.

    Args:
      trained: float32 weights.
      config: sizes of the model and of its training.
      tokens: to train on.
      linear: product of the linear layers in the forward pass, which says the gradients, too.
      objective: the loss on the text, or the divergence from the logits of ``trained`` in bfloat16.
      seed: of the batches.
    """
    short = replace(config, steps=max(1, round(SHARE * config.steps)), peak_lr=RATE * config.peak_lr, last_lr=0.0)

    def loss_of(params: Tree, batch: Array) -> Array:
        if objective == "text":
            return loss_fn(params, batch, config, linear, jax.random.key(0))
        of = partial(logits, tokens=batch[:, :-1], config=config, key=jax.random.key(0))
        return divergence(of(trained, linear=bf16_linear), of(params, linear=linear))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Tree, tokens: Array, key: Array) -> tuple[Tree, Tree]:
        key = jax.random.fold_in(key, state["step"])
        starts = jax.random.randint(key, (config.batch,), 0, len(tokens) - config.seq)
        batch = tokens[starts[:, None] + jnp.arange(config.seq + 1)]
        grads = jax.grad(loss_of)(params, batch)
        return adamw(params, grads, state, learning_rate(state["step"], short))

    params = jax.tree.map(jnp.copy, trained)
    state = init_optimizer(params)
    for _ in range(short.steps):
        params, state = step(params, state, tokens, jax.random.key(2000 + seed))
    return params
