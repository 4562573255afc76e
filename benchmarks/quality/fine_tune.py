"""Fine-tunes a trained model for the forward pass that will run: on the text, or on the logits of the trained model."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jnvfp4 import Recipe
from lm.config import Config
from lm.model import Tree, bf16_linear, logits, loss_fn, quantized_linear, trained_bf16_linear
from lm.train import adamw, init_optimizer, learning_rate

SHARE, RATE = 0.05, 0.1  # of the steps and of the peak learning rate of the training
Objective = Literal["text", "teacher"]


def divergence(teacher: Array, student: Array) -> Array:
    """Returns the mean KL divergence, in nats, of the distributions of two logits [..., vocabulary]."""
    expected, found = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.mean(jnp.sum(jnp.exp(expected) * (expected - found), axis=-1))


def fine_tune(
    trained: Tree, config: Config, tokens: Array, recipe: Recipe | None, objective: Objective, seed: int
) -> Tree:
    """Returns float32 weights after a twentieth of the training's steps, with a tenth of its learning rate.

    Args:
      trained: float32 weights.
      config: sizes of the model and of its training.
      tokens: to train on.
      recipe: of the linear layers; None for bfloat16.
      objective: the loss on the text, or the divergence from the logits of ``trained`` in bfloat16.
      seed: of the batches.
    """
    short = replace(config, steps=max(1, round(SHARE * config.steps)), peak_lr=RATE * config.peak_lr, last_lr=0.0)
    params, key = jax.tree.map(jnp.copy, trained), jax.random.key(2000 + seed)
    state = init_optimizer(params)
    for _ in range(short.steps):
        params, state = _step(params, state, trained, tokens, key, short, recipe, objective)
    return params


@partial(jax.jit, static_argnames=("config", "recipe", "objective"), donate_argnames=("params", "state"))
def _step(
    params: Tree, state: Tree, teacher: Tree, tokens: Array, key: Array, config: Config, recipe: Any, objective: str
) -> tuple[Tree, Tree]:
    linear = trained_bf16_linear if recipe is None else quantized_linear(recipe)
    starts = jax.random.randint(jax.random.fold_in(key, state["step"]), (config.batch,), 0, len(tokens) - config.seq)
    batch = tokens[starts[:, None] + jnp.arange(config.seq + 1)]

    def loss_of(params: Tree) -> Array:
        if objective == "text":
            return loss_fn(params, batch, config, linear, key)
        of = partial(logits, tokens=batch[:, :-1], config=config, key=key)
        return divergence(of(teacher, linear=bf16_linear), of(params, linear=linear))

    return adamw(params, jax.grad(loss_of)(params), state, learning_rate(state["step"], config))
