"""Training of the language model: AdamW, one jitted step, and a loop that measures."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm  # type: ignore[import-untyped]

from jnvfp4 import Recipe
from lm.config import Config
from lm.data import train_batch
from lm.model import (
    Linear,
    Tree,
    amaxes,
    bf16_linear,
    init_params,
    loss_fn,
    make_probes,
    quantize_weights,
    quantized_linear,
    with_known,
    with_probes,
)

# Optimizer

DECAY = 0.1  # of weights, times the learning rate


def learning_rate(step: Array, config: Config) -> Array:
    """Rises linearly over a tenth of the steps, then falls as a cosine to ``config.last_lr`` times the peak."""
    warmup = max(1, config.steps // 10)
    progress = jnp.clip((step - warmup) / max(1, config.steps - warmup), 0, 1)
    cosine = (1 + config.last_lr + (1 - config.last_lr) * jnp.cos(math.pi * progress)) / 2
    return config.peak_lr * jnp.minimum((step + 1) / warmup, cosine)


def init_optimizer(params: Tree, recipe: Recipe | None = None) -> Tree:
    """Returns the state of ``adamw``; if a recipe reads the amaxes of weights, with these, which each update finds."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    state = {"step": jnp.int32(0), "mean": zeros(params), "square": zeros(params)}
    return state | {"amax": amaxes(params)} if recipe is not None and recipe.takes_weight_amax else state


def adamw(params: Tree, grads: Tree, state: Tree, lr: Array | float, decay: float = DECAY) -> tuple[Tree, Tree]:
    """Takes one step of AdamW, with the gradient clipped to norm 1; returns the new weights and optimizer state."""
    beta1, beta2 = 0.9, 0.95
    step = state["step"] + 1
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: beta2 * s + (1 - beta2) * g * g, state["square"], grads)

    def update(path: Any, p: Array, m: Array, s: Array) -> Array:
        direction = m / (1 - beta1**step) / (jnp.sqrt(s / (1 - beta2**step)) + 1e-8)
        is_gain = "norm" in path[-1].key
        return p - lr * (direction if is_gain else direction + decay * p)

    params = jax.tree.map_with_path(update, params, mean, square)
    found = {"amax": amaxes(params)} if "amax" in state else {}  # XLA finds them where it writes the weights
    return params, {"step": step, "mean": mean, "square": square, **found}


# Training

TrainStep = Any  # a jitted function: weights, state, batch, probes -> weights, state, loss, gradient of the probes


@dataclass
class Curves:
    """Holds the losses and times of one run."""

    steps: list[int] = field(default_factory=list)
    train: list[float] = field(default_factory=list)  # mean since the previous logged step
    val_steps: list[int] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    stats: dict[int, Tree] = field(default_factory=dict)  # gradients of probes by step
    first_step_seconds: float = 0.0  # with compilation
    seconds_per_step: float = 0.0
    wall_seconds: float = 0.0


def make_train_step(
    linear: Linear, config: Config, seed: int, recipe: Recipe | None = None, microbatches: int = 1, **options: Any
) -> TrainStep:
    """Returns the jitted training step. It donates the weights and the optimizer state.

    Without probes it is compiled without statistics. With them (``make_probes``) it returns their gradients.

    Args:
      linear: product of the linear layers.
      config: sizes of the model and of its training.
      seed: of the random rounding.
      recipe: by which weights are quantized once for all microbatches; None lets ``linear`` do it in each.
      microbatches: parts of a batch, one after another, whose gradients are added up.
      options: of ``jax.jit``.
    """

    @partial(jax.jit, donate_argnums=(0, 1), **options)
    def train_step(params: Tree, state: Tree, batch: Array, probes: Tree = None) -> tuple[Tree, Tree, Array, Tree]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])  # every step rounds with other random bits
        known = state.get("amax", {})
        if recipe is not None and microbatches > 1:
            known = quantize_weights(params, known, recipe)

        def loss_of(weights: tuple[Tree, Tree], batch: Array, key: Array) -> Array:
            params, probes = weights
            return loss_fn(with_probes(with_known(params, known), probes), batch, config, linear, key)

        of_loss = jax.value_and_grad(loss_of)
        loss, (grads, found) = accumulated(of_loss, (params, probes or {}), batch, key, microbatches)
        params, state = adamw(params, grads, state, learning_rate(state["step"], config))
        return params, state, loss, found

    return train_step


def accumulated(f: Callable[..., Tree], params: Tree, batch: Array, key: Array, parts: int) -> Tree:
    """Returns the mean of f(params, part, key) over the parts of a batch, one after another, each with its own key."""
    if parts == 1:
        return f(params, batch, key)

    def add(total: Tree, of: tuple[Array, Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, f(params, *of)), None

    split = batch.reshape(parts, -1, batch.shape[1]), jax.random.split(key, parts)
    zeros = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), jax.eval_shape(f, params, split[0][0], key))
    total, _ = jax.lax.scan(add, zeros, split)
    return jax.tree.map(lambda v: v / parts, total)


def train(
    name: str,
    recipe: Recipe | None,
    config: Config,
    seed: int,
    text: np.ndarray,
    held_out: np.ndarray,
    microbatches: int = 1,
    stats_every: int | None = None,
) -> tuple[Tree, Curves]:
    """Trains one model and shows a progress bar.

    Args:
      name: title of the progress bar.
      recipe: of the linear layers; None for bfloat16.
      config: sizes of the model and of its training.
      seed: of the weights, the batches and the random rounding.
      text: bytes to train on.
      held_out: batches of the validation loss, as ``val_batches`` makes them.
      microbatches: parts of each batch, whose gradients are added up.
      stats_every: steps between two that collect statistics of quantized tensors; the others have a program without.

    Returns:
      the trained weights, float32, and the losses and times.
    """
    params = init_params(jax.random.key(seed), config)
    state = init_optimizer(params, recipe)
    linear = bf16_linear if recipe is None else quantized_linear(recipe)
    train_step = make_train_step(linear, config, seed, recipe, microbatches)
    val_loss = jax.jit(partial(loss_fn, config=config, linear=linear, key=jax.random.key(seed)))

    curves, recent, val_seconds = Curves(), [], 0.0
    begin = time.perf_counter()
    progress = tqdm(range(1, config.steps + 1), desc=name, unit="step", mininterval=0.5)
    for step in progress:
        batch = jnp.asarray(train_batch(text, config, seed, step))
        collects = recipe is not None and stats_every is not None and step % stats_every == 0
        params, state, loss, found = train_step(params, state, batch, make_probes(config) if collects else None)
        if collects:
            curves.stats[step] = found
        recent.append(loss)
        last = step == config.steps
        if step == 1:
            loss.block_until_ready()
            curves.first_step_seconds = time.perf_counter() - begin
        if step % config.log_every == 0 or last:
            curves.steps.append(step)
            curves.train.append(float(np.mean(jax.device_get(recent))))  # waits for the steps
            recent.clear()
            progress.set_postfix(loss=f"{curves.train[-1]:.3f}", refresh=False)
        if step % config.val_every == 0 or last:
            val_begin = time.perf_counter()
            curves.val_steps.append(step)
            curves.val.append(float(np.mean([val_loss(params, jnp.asarray(batch)) for batch in held_out])))
            val_seconds += time.perf_counter() - val_begin
    curves.stats = jax.device_get(curves.stats)
    curves.wall_seconds = time.perf_counter() - begin
    step_seconds = curves.wall_seconds - curves.first_step_seconds - val_seconds
    curves.seconds_per_step = step_seconds / max(1, config.steps - 1)
    return params, curves
