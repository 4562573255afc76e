"""Trains a byte-level language model in bfloat16 and in NVFP4, and compares the losses.

    pip install ".[examples]"
    python examples/train_lm.py
    python examples/train_lm.py --recipe weight_only --steps 100 --out out/weight_only
    python examples/train_lm.py --recipe pretrain,window64 --backward dequantized
    python examples/train_lm.py --recipe all --out out/all

The text is the source code of the running Python's standard library, so nothing is downloaded. All runs start
from the same weights and see the same batches. They differ in one function, the linear layers' product:
``x @ w.T`` in bfloat16, or ``jnvfp4.linear``, which quantizes the operands of the GEMMs as the recipe says
(docs/recipes.md). In every run the attention scores, norms, embeddings and the output head stay in bfloat16 or
float32, the residual stream is bfloat16, and the weights and the optimizer are float32.

Expect one to two minutes for the default, bfloat16 and the pretraining recipe, on two CPU cores. The loss (nats per
byte) falls from 5.5 to about 1.9, and the final validation loss in NVFP4 is one to four percent above that in
bfloat16. On a GPU the preset is a 12-layer model. Progress bars and a table show the losses; ``--out`` receives them
as ``loss.png`` and ``metrics.json``.
"""

import argparse
import json
import math
import os
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array
from tqdm import tqdm  # type: ignore[import-untyped]

import jnvfp4
from jnvfp4 import Recipe, recipes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Tree = Any  # a nested dict of arrays
Linear = Callable[[Array, Array, Array], Array]  # x [..., K], w [N, K], key -> [..., N]

BASELINE = "bf16"
RECIPES: dict[str, Callable[..., Recipe]] = {
    "pretrain": recipes.pretrain,
    "pretrain_no_rht": partial(recipes.pretrain, rht=False),
    "pretrain_no_sr": partial(recipes.pretrain, stochastic_rounding=False),
    "pretrain_no_rht_no_sr": partial(recipes.pretrain, rht=False, stochastic_rounding=False),
    "pretrain_no_tiles": partial(recipes.pretrain, weight_tiles=False),
    "row_scaled": recipes.row_scaled,
    "four_over_six_weights": partial(recipes.four_over_six, "weights"),
    "four_over_six_activations": partial(recipes.four_over_six, "activations"),
    "four_over_six_all": partial(recipes.four_over_six, "all"),
    "window64": recipes.window64,
    "inference": recipes.inference,
    "weight_only": partial(recipes.inference, weight_only=True),
}
WITHOUT_BACKWARD = ("inference", "weight_only")  # their gradients are in high precision


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    steps: int
    peak_lr: float
    val_batches: int

    @property
    def log_every(self) -> int:
        return max(1, self.steps // 50)

    @property
    def val_every(self) -> int:
        return 5 * self.log_every


PRESETS = {
    "cpu": Config(layers=2, width=128, heads=4, seq=64, batch=16, steps=750, peak_lr=3e-3, val_batches=32),
    "gpu": Config(layers=12, width=768, heads=12, seq=512, batch=32, steps=1000, peak_lr=1e-3, val_batches=16),
}


# Data


def stdlib_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's sources: of the first 95% of the files, and of the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    names = [name for name in names if not excluded.intersection(name.parts)]
    texts = [(root / name).read_bytes() for name in names]
    split = len(texts) * 95 // 100
    train, val = (np.frombuffer(b"".join(part), np.uint8) for part in (texts[:split], texts[split:]))
    return train, val


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """[batch, seq + 1] bytes: inputs and, one to the right, targets."""
    return text[starts[:, None] + np.arange(seq + 1)]


def train_batch(text: np.ndarray, config: Config, seed: int, step: int) -> np.ndarray:
    """A function of the seed and the step alone, so that all runs see the same bytes."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - config.seq, size=config.batch)
    return windows(text, starts, config.seq)


def val_batches(text: np.ndarray, config: Config) -> np.ndarray:
    """[val_batches, batch, seq + 1] bytes, from all over the validation text."""
    starts = np.linspace(0, len(text) - config.seq - 1, config.val_batches * config.batch).astype(int)
    return windows(text, starts, config.seq).reshape(config.val_batches, config.batch, -1)


# Model


def init_params(key: Array, config: Config) -> Tree:
    """float32 weights; those of the layers are stacked along a leading axis."""
    d, n = config.width, config.layers
    keys = iter(jax.random.split(key, 7))

    def normal(*shape: int, std: float) -> Array:
        return std * jax.random.normal(next(keys), shape)

    residual_std = (2 * n) ** -0.5  # 2n branches add to the residual stream
    return {
        "embedding": normal(256, d, std=0.02),
        "position": normal(config.seq, d, std=0.02),
        "head": normal(256, d, std=0.02),
        "norm": jnp.ones(d),
        "layers": {
            "attention_norm": jnp.ones((n, d)),
            "qkv": normal(n, 3 * d, d, std=d**-0.5),
            "attention_out": normal(n, d, d, std=residual_std * d**-0.5),
            "mlp_norm": jnp.ones((n, d)),
            "mlp_up": normal(n, 4 * d, d, std=d**-0.5),
            "mlp_down": normal(n, d, 4 * d, std=residual_std * (4 * d) ** -0.5),
        },
    }


def bf16_linear(x: Array, w: Array, key: Array) -> Array:
    return x @ w.astype(x.dtype).T


def quantized_linear(recipe: Recipe) -> Linear:
    return lambda x, w, key: jnvfp4.linear(x, w, recipe, key=key)


def rms_norm(x: Array, gain: Array) -> Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale * gain).astype(x.dtype)


def attention(x: Array, layer: Tree, keys: Array, linear: Linear, heads: int) -> Array:
    batch, seq, width = x.shape
    qkv = linear(x, layer["qkv"], keys[0]).reshape(batch, seq, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.reshape(x.shape), layer["attention_out"], keys[1])


def mlp(x: Array, layer: Tree, keys: Array, linear: Linear) -> Array:
    return linear(jax.nn.gelu(linear(x, layer["mlp_up"], keys[0])), layer["mlp_down"], keys[1])


def logits(params: Tree, tokens: Array, key: Array, linear: Linear, heads: int) -> Array:
    """[batch, seq, 256], float32."""

    def block(x: Array, layer_and_keys: tuple[Tree, Array]) -> tuple[Array, None]:
        layer, keys = layer_and_keys
        x = x + attention(rms_norm(x, layer["attention_norm"]), layer, keys[:2], linear, heads)
        x = x + mlp(rms_norm(x, layer["mlp_norm"]), layer, keys[2:], linear)
        return x, None

    x = (params["embedding"][tokens] + params["position"]).astype(jnp.bfloat16)
    layers = params["layers"]
    keys = jax.random.split(key, (len(layers["qkv"]), 4))  # one for each linear layer
    x, _ = jax.lax.scan(block, x, (layers, keys))
    return (rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype).T).astype(jnp.float32)


def loss_fn(params: Tree, batch: Array, key: Array, linear: Linear, heads: int) -> Array:
    """Mean cross entropy of the next byte, in nats. The key is for recipes that round stochastically."""
    tokens, targets = batch[:, :-1], batch[:, 1:].astype(jnp.int32)
    log_probs = jax.nn.log_softmax(logits(params, tokens, key, linear, heads))
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


# Optimizer


def learning_rate(step: Array, config: Config) -> Array:
    """Linear warmup over a tenth of the steps, then a cosine to a tenth of the peak."""
    warmup = max(1, config.steps // 10)
    progress = jnp.clip((step - warmup) / max(1, config.steps - warmup), 0, 1)
    cosine = 0.55 + 0.45 * jnp.cos(math.pi * progress)
    return config.peak_lr * jnp.minimum((step + 1) / warmup, cosine)


def init_optimizer(params: Tree) -> Tree:
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return {"step": jnp.int32(0), "mean": zeros(params), "square": zeros(params)}


def adamw(params: Tree, grads: Tree, state: Tree, lr: Array) -> tuple[Tree, Tree]:
    """One step of AdamW, with the gradient clipped to norm 1."""
    beta1, beta2, decay = 0.9, 0.95, 0.1
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
    return params, {"step": step, "mean": mean, "square": square}


# Training


@dataclass
class Curves:
    """What one run measured."""

    steps: list[int] = field(default_factory=list)
    train: list[float] = field(default_factory=list)  # mean since the previous logged step
    val_steps: list[int] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0  # with compilation
    seconds_per_step: float = 0.0
    wall_seconds: float = 0.0


def make_train_step(
    linear: Linear, config: Config, seed: int
) -> Callable[[Tree, Tree, Array], tuple[Tree, Tree, Array]]:
    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Tree, state: Tree, batch: Array) -> tuple[Tree, Tree, Array]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])  # every step rounds with other random bits
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key, linear, config.heads)
        params, state = adamw(params, grads, state, learning_rate(state["step"], config))
        return params, state, loss

    return train_step


def train(name: str, linear: Linear, config: Config, seed: int, text: np.ndarray, held_out: np.ndarray) -> Curves:
    """Trains one model from the seed's weights on the seed's batches."""
    params = init_params(jax.random.key(seed), config)
    state = init_optimizer(params)
    train_step = make_train_step(linear, config, seed)
    val_loss = jax.jit(partial(loss_fn, key=jax.random.key(seed), linear=linear, heads=config.heads))

    curves, recent, val_seconds = Curves(), [], 0.0
    begin = time.perf_counter()
    progress = tqdm(range(1, config.steps + 1), desc=name, unit="step", mininterval=0.5)
    for step in progress:
        batch = jnp.asarray(train_batch(text, config, seed, step))
        params, state, loss = train_step(params, state, batch)
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
    curves.wall_seconds = time.perf_counter() - begin
    step_seconds = curves.wall_seconds - curves.first_step_seconds - val_seconds
    curves.seconds_per_step = step_seconds / max(1, config.steps - 1)
    return curves


# Report


def gap_percent(runs: dict[str, Curves], name: str) -> float:
    """How far the final validation loss lies above the baseline's."""
    return 100 * (runs[name].val[-1] / runs[BASELINE].val[-1] - 1)


def print_table(runs: dict[str, Curves]) -> None:
    print(f"\n{'final loss':28}{'training':>10}{'validation':>12}{'gap':>9}{'s/step':>9}")
    for name, curves in runs.items():
        gap = "" if name == BASELINE else f"{gap_percent(runs, name):+.2f}%"
        print(f"{name:28}{curves.train[-1]:10.4f}{curves.val[-1]:12.4f}{gap:>9}{curves.seconds_per_step:9.4f}")


def plot(path: Path, runs: dict[str, Curves]) -> None:
    """The losses, and below them their distance to the baseline's, which is too small to see in the upper panel."""
    figure, (losses, gaps) = plt.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
    base = runs[BASELINE]
    for i, (name, curves) in enumerate(runs.items()):
        is_base = name == BASELINE
        # The baseline is black; then ten colors, solid and again dashed.
        style: dict[str, Any] = {"color": "black"} if is_base else {"color": f"C{(i - 1) % 10}"}
        style["linestyle"] = "--" if i > 10 else "-"
        label = f"{name}  {curves.val[-1]:.3f}" + ("" if is_base else f"  {gap_percent(runs, name):+.1f}%")
        losses.plot(curves.steps, curves.train, linewidth=1.2, **style)
        gap = np.subtract(curves.val, base.val)
        gaps.plot(curves.val_steps, gap, marker="" if is_base else "o", markersize=4, label=label, **style)
    losses.set(ylabel="training loss, nats per byte", title="Byte-level language model: linear layers by recipe")
    gaps.set(xlabel="step", ylabel=f"validation loss\nabove {BASELINE}, nats per byte")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="final validation loss", loc="outside right upper", frameon=False, alignment="left")
    figure.savefig(path, dpi=120)


def summary(config: Config, runs: dict[str, Curves]) -> dict[str, Any]:
    """What metrics.json says, but for the command line's choices."""
    device = jax.devices()[0]
    return {
        "config": asdict(config),
        "versions": {
            "jnvfp4": jnvfp4.__version__,
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
        "device": {"platform": device.platform, "kind": device.device_kind, "cpu_count": os.cpu_count()},
        "final_val": {name: curves.val[-1] for name, curves in runs.items()},
        "gap_percent": {name: gap_percent(runs, name) for name in runs if name != BASELINE},
        "runs": {name: asdict(curves) for name, curves in runs.items()},
    }


def named_recipes(value: str) -> list[str]:
    """The argument of --recipe: names in the order given, without repetitions."""
    names = list(RECIPES) if value == "all" else list(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of all, {', '.join(RECIPES)}")
    return names


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level language model in bfloat16 and in NVFP4.")
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument("--preset", choices=PRESETS, default=backend, help="sizes (default: %(default)s)")
    parser.add_argument(
        "--recipe",
        type=named_recipes,
        default="pretrain",
        metavar="NAME[,NAME...]",
        help=f"how jnvfp4.linear quantizes: all, or of {', '.join(RECIPES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--backward", choices=("nvfp4", "high_precision", "dequantized"), help="the gradient GEMMs of a training recipe"
    )
    parser.add_argument("--steps", type=int, help="training steps, if not the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the random rounding")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png and metrics.json")
    args = parser.parse_args()
    fixed = [name for name in args.recipe if name in WITHOUT_BACKWARD]
    if args.backward and fixed:
        parser.error(f"--backward is for training recipes, not for {', '.join(fixed)}")
    return args


def main() -> None:
    args = parse_args()
    config = PRESETS[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    begin = time.perf_counter()
    text, val_text = stdlib_text()
    held_out = val_batches(val_text, config)
    print(f"{len(text):,} bytes to train on, {len(val_text):,} to validate; {args.preset} preset: {config}")

    linears: dict[str, Linear] = {BASELINE: bf16_linear}
    options = {"backward": args.backward} if args.backward else {}
    linears |= {name: quantized_linear(RECIPES[name](**options)) for name in args.recipe}
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Curves] = {}
    for name, linear in linears.items():
        runs[name] = train(name, linear, config, args.seed, text, held_out)
        metrics = {"preset": args.preset, "backward": args.backward, "seed": args.seed, **summary(config, runs)}
        metrics["wall_seconds"] = time.perf_counter() - begin
        # After every run, so that an interrupted comparison leaves something.
        (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")

    print_table(runs)
    plot(args.out / "loss.png", runs)
    print(f"\n{time.perf_counter() - begin:.0f} s in all; wrote {args.out}/loss.png and {args.out}/metrics.json")


if __name__ == "__main__":
    main()
