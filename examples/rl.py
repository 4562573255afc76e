"""Trains a small policy by reinforcement learning, and measures how far training is from the rollouts it learns from.

    pip install ".[examples]"
    python examples/rl.py
    python examples/rl.py --steps 20 --runs pinned fast --out out/rl

The policy adds two dice: it gets "5+6=" and answers "11." a token at a time. The reward is the share of the right
answer that its own begins with; of 16 answers to a prompt, those above their mean become more probable (GRPO).
Rollouts run token by token with a KV cache, in batches that shrink as answers end; training runs whole sequences. So
every token gets its log probability twice, from operations of other sizes. Each step prints the reward, the largest
|log probability in training - in rollout|, and how many answers each step of the rollout ran, for four policies:

  pinned    linear layers by recipes.rl(), each sum in an order that no size changes: the difference is 0
  fast      the order of the fastest kernel for each size; a CPU has one order, so there this is "pinned". Products of
            NVFP4 have few bits, so another order shows only where a sum rounds: with values that differ by orders
  bf16      x @ w.T of XLA in bfloat16
  xla_sums  as "pinned", but XLA orders the sums outside of the linear layers

Those are sums over axes of fixed size: width, head, vocabulary, capacity of the cache. XLA orders a reduction by the
whole shape; ``in_halves`` is a tree of additions instead. Products of bfloat16 are exact in float32, so fusing them
with an addition changes nothing, and ``bf16`` rounds where XLA may drop a cast to bfloat16 and back. Takes two
minutes on two CPU cores; ``--out`` receives ``rl.json`` and ``rl.png``.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4 import recipes
from lm.config import Config, step_count
from lm.model import Linear, Tree, embed, init_params, quantized_linear, trained_bf16_linear
from lm.train import adamw, init_optimizer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TOKENS = "0123456789+=."
END = TOKENS.index(".")
PROMPT, CAPACITY = 4, 8  # tokens of a prompt, and of a whole sequence
GROUP = 16  # answers to each prompt
SIZES = (8, 16, 32, 64, 128, 256)  # of batches of rollouts, padded to the next of them: each is a program
ENTROPY = 0.015  # weight of the entropy, without which the policy settles on one answer for all prompts
CONFIG = Config(
    layers=2, width=64, heads=4, kv_heads=4, mlp_width=256, seq=CAPACITY, batch=SIZES[-1], steps=150, peak_lr=2e-3,
    val_batches=0, vocabulary=16,
)  # fmt: skip

# Orders of sums


def in_halves(combine: Any, x: Array, axis: int) -> Array:
    """Combines the halves of an axis, whose size is a power of two, by jnp.add or jnp.maximum until one is left."""
    while (size := x.shape[axis]) > 1:
        x = combine(*(jax.lax.slice_in_dim(x, i, i + size // 2, axis=axis) for i in (0, size // 2)))
    return jnp.squeeze(x, axis)


def by_xla(combine: Any, x: Array, axis: int) -> Array:
    return (jnp.sum if combine is jnp.add else jnp.max)(x, axis)


class Policy(NamedTuple):
    """Says how a policy computes."""

    linear: Linear
    reduce: Callable[[Any, Array, int], Array] = in_halves  # all other sums
    quantized: bool = True  # rollouts have NVFP4 weights, as an inference engine has them


def pinned(x: Array, w: Any, key: Array, name: str) -> Array:
    return jnvfp4.linear(x, w, recipes.rl(), accumulation="pinned")


POLICIES = {
    "pinned": Policy(pinned),
    "fast": Policy(quantized_linear(recipes.rl())),
    "bf16": Policy(trained_bf16_linear, quantized=False),
    "xla_sums": Policy(pinned, by_xla),
}

# Model

Cache = tuple[Array, Array]  # keys and values, bfloat16 [layers, batch, CAPACITY, heads, head_dim]


def empty_cache(config: Config, batch: int) -> Cache:
    shape = (config.layers, batch, CAPACITY, config.heads, config.head_dim)
    return jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)


def bf16(x: Array) -> Array:
    return jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


def forward(
    params: Tree, tokens: Array, cache: Cache, start: Array | int, config: Config, policy: Policy
) -> tuple[Array, Cache]:
    """Runs tokens [batch, tokens], the first of them at position ``start``, after those in a cache.

    Returns log probabilities of what follows each, float32 [batch, tokens, vocabulary], and the cache with the tokens.
    """
    visible = jnp.arange(CAPACITY) <= start + jnp.arange(tokens.shape[1])[:, None]

    def multiply(x: Array, layer: Tree, name: str) -> Array:
        unused = jax.random.key(0)  # nothing rounds stochastically
        return policy.linear(x.reshape(-1, x.shape[-1]), layer[name], unused, name).reshape(*x.shape[:-1], -1)

    def add(x: Array, y: Array) -> Array:
        return bf16(x.astype(jnp.float32) + y.astype(jnp.float32))

    def dot(a: Array, b: Array, axis: int) -> Array:
        return policy.reduce(jnp.add, a.astype(jnp.float32) * b.astype(jnp.float32), axis)

    def norm(x: Array, gain: Array) -> Array:
        scale = jax.lax.rsqrt(dot(x, x, -1) / config.width + config.norm_epsilon)
        return bf16(x.astype(jnp.float32) * scale[..., None] * gain)

    def log_softmax(x: Array) -> Array:
        x = x - jax.lax.stop_gradient(policy.reduce(jnp.maximum, x, -1))[..., None]
        return x - jnp.log(policy.reduce(jnp.add, jnp.exp(x), -1))[..., None]

    def block(x: Array, of_block: tuple[Tree, Cache]) -> tuple[Array, Cache]:
        layer, cache = of_block
        qkv = multiply(norm(x, layer["attention_norm"]), layer, "qkv").reshape(*x.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(qkv, 3, axis=2)
        keys, values = (jax.lax.dynamic_update_slice_in_dim(c, n, start, 1) for c, n in zip(cache, (k, v), strict=True))
        scores = dot(q[:, :, :, None], keys.swapaxes(1, 2)[:, None], -1) * config.head_dim**-0.5
        shares = bf16(jnp.exp(log_softmax(jnp.where(visible[:, None], scores, -jnp.inf))))
        mixed = bf16(dot(shares[..., None], values.swapaxes(1, 2)[:, None], -2)).reshape(x.shape)
        x = add(x, multiply(mixed, layer, "attention_out"))
        up = multiply(norm(x, layer["mlp_norm"]), layer, "mlp_up")
        hidden = bf16(jax.nn.gelu(up.astype(jnp.float32)))
        return add(x, multiply(hidden, layer, "mlp_down")), (keys, values)

    positions = jax.lax.dynamic_slice_in_dim(params["position"], start, tokens.shape[1])
    x, cache = jax.lax.scan(block, bf16(embed(tokens, params["embedding"]) + positions), (params["layers"], cache))
    logits = dot(norm(x, params["norm"])[:, :, None], bf16(params["head"]), -1)
    return log_softmax(logits), cache


# Rollouts


def encode(text: str) -> np.ndarray:
    return np.array([TOKENS.index(character) for character in text], np.int32)


def draw_prompts(seed: int, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draws prompts [count, PROMPT], in groups of equal ones, and their right answers."""
    dice = np.repeat(np.random.default_rng(seed).integers(1, 7, size=(count // GROUP, 2)), GROUP, axis=0)
    return np.stack([encode(f"{a}+{b}=") for a, b in dice]), [encode(f"{a + b}.") for a, b in dice]


quantize = jax.jit(jax.vmap(jnvfp4.quantize))  # one amax for each layer


@partial(jax.jit, static_argnames=("config", "policy"), donate_argnames="cache")
def sample(
    params: Tree, tokens: Array, cache: Cache, rows: Array, start: Array, key: Array, config: Config, policy: Policy
) -> tuple[Array, Array, Cache]:
    """Runs tokens of the sequences ``rows``; returns the next of each, their log probabilities, and the cache."""
    log_probs, new = forward(params, tokens, jax.tree.map(lambda c: c[:, rows], cache), start, config, policy)
    chosen = jax.random.categorical(key, log_probs[:, -1]).astype(jnp.int32)
    cache = jax.tree.map(lambda c, n: c.at[:, rows].set(n), cache, new)
    return chosen, jnp.take_along_axis(log_probs[:, -1], chosen[:, None], -1)[:, 0], cache


def rollout(
    params: Tree, prompts: np.ndarray, key: Array, config: Config, policy: Policy
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples answers; returns sequences [batch, CAPACITY], log probabilities, and which tokens are of answers."""
    if policy.quantized:
        layers = {name: quantize(w) if w.ndim == 3 else w for name, w in params["layers"].items()}
        params = {**params, "layers": layers}
    tokens = np.pad(prompts, ((0, 0), (0, CAPACITY - PROMPT)), constant_values=END)
    log_probs, sampled = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
    cache, running, start = empty_cache(config, len(prompts)), np.arange(len(prompts)), 0
    for end in range(PROMPT, CAPACITY):
        size = min(size for size in SIZES if size >= len(running))
        rows = np.pad(running, (0, size - len(running)), mode="edge")
        of_step = jax.random.fold_in(key, end)
        *found, cache = sample(params, tokens[rows, start:end], cache, rows, start, of_step, config, policy)
        tokens[running, end], log_probs[running, end] = (np.asarray(v)[: len(running)] for v in found)
        sampled[running, end] = True
        running, start = running[tokens[running, end] != END], end
        if not len(running):
            break
    return tokens, log_probs, sampled


# Training


@partial(jax.jit, static_argnames=("config", "policy"), donate_argnames=("params", "state"))
def train_step(
    params: Tree, state: Tree, rollouts: tuple[Array, Array, Array], advantage: Array, config: Config, policy: Policy
) -> tuple[Tree, Tree, Array]:
    """Takes a step; returns the largest difference of log probabilities, that of the weights before it, as well."""
    tokens, of_rollout, sampled = rollouts[0], *(v[:, 1:] for v in rollouts[1:])

    def loss_fn(params: Tree) -> tuple[Array, Array]:
        log_probs = forward(params, tokens, empty_cache(config, len(tokens)), 0, config, policy)[0][:, :-1]
        is_next = jnp.arange(config.vocabulary) == tokens[:, 1:, None]
        difference = jnp.where(sampled, jnp.sum(jnp.where(is_next, log_probs, 0), -1) - of_rollout, 0)
        ratio, weight = jnp.exp(difference), advantage[:, None]
        gain = jnp.minimum(ratio * weight, jnp.clip(ratio, 0.8, 1.2) * weight)
        gain -= ENTROPY * jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        return -jnp.sum(jnp.where(sampled, gain, 0)) / jnp.sum(sampled), jnp.max(jnp.abs(difference))

    grads, difference = jax.grad(loss_fn, has_aux=True)(params)
    return *adamw(params, grads, state, config.peak_lr), difference


def train(name: str, config: Config) -> dict[str, list[float]]:
    """Trains a policy; returns the reward and the difference of every step."""
    policy, key = POLICIES[name], jax.random.key(0)
    params = init_params(key, config)
    state = init_optimizer(params)
    curves: dict[str, list[float]] = {"reward": [], "difference": []}
    for step in range(config.steps):
        prompts, answers = draw_prompts(step, config.batch)
        rollouts = rollout(params, prompts, jax.random.fold_in(key, step), config, policy)
        answered = rollouts[0][:, PROMPT:]
        right = [np.cumprod(row[: len(a)] == a).mean() for row, a in zip(answered, answers, strict=True)]
        groups = np.array(right, np.float32).reshape(-1, GROUP)
        advantage = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
        params, state, difference = train_step(params, state, rollouts, advantage, config, policy)
        curves["reward"].append(float(groups.mean()))
        curves["difference"].append(float(difference))
        ran = ", ".join(str(n) for n in rollouts[2].sum(axis=0)[PROMPT:])
        print(f"{name:8} step {step + 1:4}  reward {groups.mean():.3f}  difference {difference:.2e}  answers {ran}")
    return curves


def plot(path: Path, runs: dict[str, dict[str, list[float]]]) -> None:
    """Plots reward and difference over steps; the axis of differences is linear up to 1e-7, so that it shows 0."""
    figure, panels = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for size, (name, curves) in zip((9, 7, 5, 3), runs.items(), strict=False):  # so that equal ones show
        for axes, values in zip(panels, curves.values(), strict=True):
            axes.plot(range(1, len(values) + 1), values, ".-", markersize=size, linewidth=0.8, label=name)
            axes.grid(alpha=0.3)
    panels[0].set(ylabel="reward", title=f"Sums of two dice, on {jax.devices()[0].device_kind}")
    panels[0].legend(frameon=False)
    panels[1].set(xlabel="step", ylabel="largest |log probability\nin training - in rollout|")
    panels[1].set_yscale("symlog", linthresh=1e-7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how far training is from the rollouts it learns from.")
    parser.add_argument("--runs", nargs="+", choices=POLICIES, default=list(POLICIES), help="(default: all)")
    parser.add_argument("--steps", type=step_count, default=CONFIG.steps, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for rl.json and rl.png")
    args = parser.parse_args()
    begin = time.perf_counter()
    runs = {name: train(name, replace(CONFIG, steps=args.steps)) for name in args.runs}
    print(f"\n{'':8}{'last reward':>14}{'largest difference':>22}{'steps with one':>17}")
    for name, curves in runs.items():
        last, differences = np.mean(curves["reward"][-10:]), np.array(curves["difference"])
        print(f"{name:8}{last:14.3f}{differences.max():22.2e}{np.sum(differences > 0):17}")
    print(f"\n{time.perf_counter() - begin:.0f} s in all; writes {args.out}/rl.json and {args.out}/rl.png")
    args.out.mkdir(parents=True, exist_ok=True)
    of_run = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "runs": runs}
    (args.out / "rl.json").write_text(json.dumps(of_run) + "\n")
    plot(args.out / "rl.png", runs)


if __name__ == "__main__":
    main()
