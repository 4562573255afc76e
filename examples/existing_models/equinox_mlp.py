"""Trains a small Equinox model as it is written, in NVFP4 beside bfloat16.

    pip install ".[equinox]" optax
    python examples/existing_models/equinox_mlp.py

Prints what is quantized and the losses.
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jnvfp4
from jnvfp4 import Policy, Rule, recipes, step_key

VOCABULARY, WIDTH = 64, 64


class Model(eqx.Module):
    """Says which token follows: a residual MLP between an embedding and a head, of one token."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, token: jax.Array) -> jax.Array:
        x = self.embed(token)
        return self.head(x + self.mlp(x))


def batch(rng: np.random.Generator, following: np.ndarray) -> np.ndarray:
    """Returns 16 sequences of 33 tokens, of which each determines the next one four times out of five."""
    tokens = rng.integers(0, VOCABULARY, (33, 16))
    for column, previous in zip(tokens[1:], tokens, strict=False):
        column[:] = np.where(rng.random(16) < 0.8, following[previous], column)
    return tokens.T


def losses(policy: Policy, steps: int) -> list[float]:
    """Trains the model and returns the loss of each step."""
    model = jnvfp4.equinox.apply(Model(jax.random.key(0)), policy)  # before the optimizer sees it
    optimizer = optax.adam(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss(model: Model, tokens: jax.Array) -> jax.Array:
        in_bf16 = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, model)
        logits = jax.vmap(jax.vmap(in_bf16))(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @eqx.filter_jit
    def step(model: Model, state: Any, tokens: jax.Array, key: jax.Array) -> tuple[Model, Any, jax.Array]:
        with step_key(key):  # for recipes that round stochastically
            value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    rng = np.random.default_rng(0)
    following, curve = rng.permutation(VOCABULARY), []
    for key in jax.random.split(jax.random.key(1), steps):
        model, state, value = step(model, state, jnp.asarray(batch(rng, following)), key)
        curve.append(float(value))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    policy = Policy([Rule("mlp/.*", recipes.pretrain())])
    print(policy.explain(Model(jax.random.key(0))))
    for name, of_run in (("bfloat16", Policy()), ("pretrain()", policy)):
        curve = losses(of_run, steps)
        print(f"{name:10} loss {curve[0]:.3f}, mean of the last 10 of {len(curve)} steps {np.mean(curve[-10:]):.3f}")


if __name__ == "__main__":
    main()
