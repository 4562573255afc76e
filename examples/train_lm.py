"""Trains a byte-level language model in bfloat16 and in NVFP4, and compares the losses.

    pip install ".[examples]"
    python examples/train_lm.py
    python examples/train_lm.py --recipe weight_only --steps 100 --out out/weight_only
    python examples/train_lm.py --recipe pretrain,window64 --backward dequantized
    python examples/train_lm.py --recipe all --out out/all
    python examples/train_lm.py --microbatches 4
    python examples/train_lm.py --stats 10

The text is the source code of the running Python's standard library, so nothing is downloaded. All runs start
from the same weights and see the same batches. They differ in one function, the product of
the linear layers: ``x @ w.T`` in bfloat16, or ``jnvfp4.linear``, which quantizes the operands of the GEMMs as the
recipe says (docs/training.md). In every run the attention scores, norms, embeddings and the output head are bfloat16
or float32, the residual stream is bfloat16, and the weights and the optimizer are float32. The model is in ``lm/``.
The optimizer's update finds the amaxes of the weights for the next step. With ``--microbatches`` each weight is
quantized once per step, not in each microbatch, which saves 1 to 2 % of a step of the GPU preset in four parts
(docs/training.md); no bit differs.

Expect one to two minutes for the default, bfloat16 and the pretraining recipe, on two CPU cores. The loss (nats per
byte) falls from 5.5 to about 1.9, and the final validation loss in NVFP4 is one to five percent above that in
bfloat16. On a GPU the preset is a 12-layer model. Progress bars and a table show the losses; ``--out`` receives them
as ``loss.png`` and ``metrics.json``. ``--stats`` adds what quantization does to each layer's tensors over the steps:
``stats.json``, and for each recipe a picture of underflows and errors, ``stats_pretrain.png``.
"""

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

import jnvfp4
from lm.config import Config, step_count
from lm.data import stdlib_text, val_batches
from lm.recipes import RECIPES, WITHOUT_BACKWARD
from lm.train import Curves, train

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lm import stats

BASELINE = "bf16"
PRESETS = {
    "cpu": Config(
        layers=2,
        width=128,
        heads=4,
        kv_heads=4,
        mlp_width=512,
        seq=64,
        batch=16,
        steps=750,
        peak_lr=3e-3,
        val_batches=32,
    ),
    "gpu": Config(
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        mlp_width=3072,
        seq=512,
        batch=32,
        steps=1000,
        peak_lr=1e-3,
        val_batches=16,
    ),
}


def gap_percent(runs: dict[str, Curves], name: str) -> float:
    """Returns how far the final validation loss lies above that of the baseline, in percent."""
    return 100 * (runs[name].val[-1] / runs[BASELINE].val[-1] - 1)


EXPECTED = "The gap still grows in a run as short as this; that is no divergence. Gaps of longer runs: docs/results.md"


def print_table(runs: dict[str, Curves]) -> None:
    print(f"\n{'final loss':28}{'training':>10}{'validation':>12}{'gap':>9}{'s/step':>9}")
    for name, curves in runs.items():
        gap = "" if name == BASELINE else f"{gap_percent(runs, name):+.2f}%"
        print(f"{name:28}{curves.train[-1]:10.4f}{curves.val[-1]:12.4f}{gap:>9}{curves.seconds_per_step:9.4f}")
    print(EXPECTED)


def plot(path: Path, runs: dict[str, Curves]) -> None:
    """Plots the losses and, in a lower panel, how far they lie above the baseline, which the upper one hardly shows."""
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
    gaps.set_title(EXPECTED, fontsize="small")
    gaps.set(xlabel="step", ylabel=f"validation loss\nabove {BASELINE}, nats per byte")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="final validation loss", loc="outside right upper", frameon=False, alignment="left")
    figure.savefig(path, dpi=120)


def summary(config: Config, runs: dict[str, Curves]) -> dict[str, Any]:
    """Returns the contents of metrics.json without the choices of the command line."""
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
        "runs": {name: {k: v for k, v in vars(curves).items() if k != "stats"} for name, curves in runs.items()},
    }


def write_stats(out: Path, runs: dict[str, Curves]) -> None:
    """Writes stats.json and a picture of each recipe."""
    found = {name: stats.summary(curves.stats) for name, curves in runs.items() if curves.stats}
    (out / "stats.json").write_text(json.dumps(found) + "\n")
    for name, of in found.items():
        stats.plot(out / f"stats_{name}.png", f"FP4 tensors of the linear layers, {name}", of)


def named_recipes(value: str) -> list[str]:
    """Reads the argument of --recipe: names in their order on the command line, without repetitions."""
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
    parser.add_argument("--steps", type=step_count, help="training steps, if not the preset's")
    parser.add_argument(
        "--microbatches", type=step_count, default=1, help="parts of a batch, whose gradients are added up (default: 1)"
    )
    parser.add_argument(
        "--stats",
        type=step_count,
        nargs="?",
        const=0,
        metavar="EVERY",
        help="collect statistics of quantized tensors, each so many steps (default: 100 times a run)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the random rounding")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png and metrics.json")
    args = parser.parse_args()
    fixed = [name for name in args.recipe if name in WITHOUT_BACKWARD]
    if args.backward and fixed:
        parser.error(f"--backward is for training recipes, not for {', '.join(fixed)}")
    if (batch := PRESETS[args.preset].batch) % args.microbatches:
        parser.error(f"--microbatches must divide the batch, {batch} sequences, got {args.microbatches}")
    return args


def main() -> None:
    args = parse_args()
    config = PRESETS[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    every = max(1, config.steps // 100) if args.stats == 0 else args.stats
    begin = time.perf_counter()
    text, val_text = stdlib_text()
    held_out = val_batches(val_text, config)
    print(f"{len(text):,} bytes to train on, {len(val_text):,} to validate; {args.preset} preset: {config}")

    options = {"backward": args.backward} if args.backward else {}
    recipes = {BASELINE: None, **{name: RECIPES[name](**options) for name in args.recipe}}
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Curves] = {}
    for name, recipe in recipes.items():
        _, runs[name] = train(name, recipe, config, args.seed, text, held_out, args.microbatches, every)
        chosen = {name: vars(args)[name] for name in ("preset", "backward", "seed", "microbatches")}
        metrics = {**chosen, **summary(config, runs)}
        metrics["wall_seconds"] = time.perf_counter() - begin
        # After every run, so that an interrupted comparison leaves something.
        (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")

    print_table(runs)
    plot(args.out / "loss.png", runs)
    if every is not None:
        write_stats(args.out, runs)
    print(f"\n{time.perf_counter() - begin:.0f} s in all; wrote {args.out}/loss.png and {args.out}/metrics.json")


if __name__ == "__main__":
    main()
