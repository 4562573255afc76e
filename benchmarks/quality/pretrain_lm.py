"""Pretrains a small Llama in bfloat16 and by several recipes, in pairs, and compares the losses.

    pip install ".[pretrain]"
    python -m benchmarks.quality.pretrain_lm --arms bf16 pretrain --seeds 0 1
    python -m benchmarks.quality.pretrain_lm --arms bf16 pretrain --seeds 0 1 --minutes 30  # stops, or continues
    python -m benchmarks.quality.pretrain_lm --report out/pretrain_lm

The text is the source code and documentation of the installed packages, so nothing is downloaded; a byte-pair tokenizer
with 8192 tokens is trained on it. The hash that is printed names the text: another set of packages is another corpus.
The model has rotary positions, RMSNorm, SwiGLU and an output head that is not tied to the embedding. The recipe applies
to all linear layers of the blocks; attention, norms, embedding and head stay in bfloat16 or float32, the weights and
the optimizer in float32. The gradients of weights are float32 in every run, in bfloat16 too.

A pair is two runs with one seed: the same initial weights, the same batches, and XLA without nondeterministic
operations. What is printed is the difference within pairs, averaged over seeds, with its standard error.

Each run is kept in a folder of ``--out``, with checkpoints of where it ended, where ``--minutes`` stopped it, and where
another run branches off; a process that is killed loses the run in progress. ``--out`` also receives the losses as
``metrics.json`` and ``loss.png``. On a GPU a run takes about a minute on an H200 (docs/results.md), with ``--preset
gpu-12m`` four, with ``--steps 8832``, 60 tokens per parameter, two. On a CPU the preset is a toy, which shows that
everything works and measures nothing.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# Before jax starts. It keeps autotuning, which --xla_gpu_deterministic_ops would turn off: an arm is compiled once for
# all its seeds, but two processes may choose GEMMs with other orders of summation.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_exclude_nondeterministic_ops=true"

import jax
import matplotlib
import numpy as np

from lm.config import Config, step_count
from lm.model import init_params

from . import corpus
from .pretrain import ARMS, BASELINE, Run, Trainer, block_weights, gap

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PRESETS = {
    "cpu": Config(
        layers=3,
        width=64,
        heads=2,
        kv_heads=2,
        mlp_width=192,
        seq=64,
        batch=8,
        steps=60,
        peak_lr=3e-3,
        val_batches=4,
        architecture="llama",
        vocabulary=512,
        last_lr=0.0,
    ),
    "gpu": Config(
        layers=6,
        width=256,
        heads=4,
        kv_heads=4,
        mlp_width=704,
        seq=256,
        batch=128,
        steps=3680,
        peak_lr=3e-3,
        val_batches=32,
        architecture="llama",
        vocabulary=8192,
        last_lr=0.0,
    ),
}
PRESETS["gpu-12m"] = replace(PRESETS["gpu"], layers=7, width=384, heads=6, kv_heads=6, mlp_width=1024, steps=9450)
BYTES = {"cpu": 2_000_000, "gpu": None, "gpu-12m": None}  # of text


# What is written


def collect(path: Path) -> dict[str, Any]:
    """Reads a metrics.json, or the runs below a folder, which become its contents."""
    if path.is_file():
        return json.loads(path.read_text())
    runs = [json.loads(found.read_text()) for found in sorted(path.rglob("run.json"))]
    if not runs:
        raise ValueError(f"{path} has no runs")
    shared = [name for name in runs[0] if name != "run"]
    if any(run[name] != runs[0][name] for run in runs for name in ("config", "corpus")):
        raise ValueError(f"{path} has runs of different sizes or texts, which cannot be compared")
    return {**{name: runs[0][name] for name in shared}, "runs": [run["run"] for run in runs]}


def finals(runs: Sequence[Run], config: Config) -> dict[str, dict[int, float]]:
    """Returns the final validation losses of the finished runs by arm and seed, in the order of the arms."""
    done = [run for run in runs if run.is_done(config)]
    return {
        name: {run.seed: run.val[-1] for run in done if run.arm == name}
        for name in ARMS
        if any(run.arm == name for run in done)
    }


def table(runs: Sequence[Run], config: Config) -> str:
    """Makes the table of docs/results.md: losses, gaps to bfloat16 and to ``pretrain``, time of a step."""
    losses = finals(runs, config)
    heads = ["arm", "seeds", "validation loss", f"above {BASELINE}, %", "in nats", "above pretrain, %", "ms a step"]
    rows = [heads, ["---"] * len(heads)]
    base = losses.get(BASELINE, {})
    for name, of_seed in losses.items():
        others = [{} if other == name else losses.get(other, {}) for other in (BASELINE, "pretrain")]
        of_bf16, of_pretrain = (str(gap(of_seed, other) or "") for other in others)
        nats = [loss - base[seed] for seed, loss in of_seed.items() if seed in base]
        done = [run for run in runs if run.arm == name and run.is_done(config) and run.timed_steps]
        timed = [1e3 * run.seconds / run.timed_steps for run in done]
        mean = f"{np.mean(list(of_seed.values())):.4f}"
        above = f"{np.mean(nats):+.4f}" if of_bf16 else ""
        rows.append(
            [name, str(len(of_seed)), mean, of_bf16, above, of_pretrain, f"{np.median(timed):.1f}" if timed else ""]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(path: Path, runs: Sequence[Run], config: Config) -> None:
    """Plots how far the validation losses lie above bfloat16 during training, and at the end with each pair."""
    losses = finals(runs, config)
    figure, (curves, ends) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    base = {run.seed: run for run in runs if run.arm == BASELINE and run.is_done(config)}
    shown = [name for name in losses if name != BASELINE and gap(losses[name], losses.get(BASELINE, {}))]
    for i, name in enumerate(shown):
        pairs = [run for run in runs if run.arm == name and run.seed in base and run.is_done(config)]
        above = np.array([100 * (np.divide(run.val, base[run.seed].val) - 1) for run in pairs])
        color = f"C{i % 10}"
        steps = pairs[0].val_steps
        curves.plot(steps, above.mean(0), color=color, linestyle="--" if i > 9 else "-", linewidth=1.5)
        curves.fill_between(steps, above.min(0), above.max(0), color=color, alpha=0.12, linewidth=0)
        ends.plot(above[:, -1], np.full(len(above), -i), "o", color=color, markersize=4, alpha=0.5)
        found = gap(losses[name], losses[BASELINE])
        assert found is not None
        ends.errorbar(found.mean, -i, xerr=found.error, fmt="|", color=color, markersize=14, capsize=4)
    curves.set(xlabel="step", ylabel="validation loss above bfloat16, %", title="mean and range of the pairs")
    last = [100 * (loss / losses[BASELINE][i] - 1) for name in shown for i, loss in losses[name].items() if i in base]
    curves.set_ylim(1.2 * min([0, *last]), 1.3 * max([0.01, *last]))
    ends.set(xlabel="final validation loss above bfloat16, %", title="each pair, mean and standard error")
    ends.set_yticks([-i for i in range(len(shown))], shown)
    for i, label in enumerate(ends.get_yticklabels()):
        label.set_color(f"C{i % 10}")  # the legend of both panels
    ends.axvline(0, color="black", linewidth=0.8)
    for axes in (curves, ends):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(path: Path, out: Path) -> None:
    """Prints the table of a metrics.json, or of the runs below a folder, and writes metrics.json and loss.png."""
    found = collect(path)
    config, runs = Config(**found["config"]), [Run(**run) for run in found["runs"]]
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{table(runs, config)}")
    if BASELINE in finals(runs, config):
        plot(out / "loss.png", runs, config)


def describe(config: Config) -> dict[str, int | float]:
    """Returns N, the tokens that a run trains on, D, and D/N."""
    weights = block_weights(jax.eval_shape(lambda: init_params(jax.random.key(0), config)))
    tokens = config.steps * config.batch * config.seq
    return {"block_weights": weights, "trained_on": tokens, "tokens_per_weight": tokens / weights}


# Command line


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrains a small Llama by several recipes and compares the losses.")
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument("--preset", choices=PRESETS, default=backend, help="sizes (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=["all", *ARMS], default=["bf16", "pretrain"], metavar="ARM",
                        help=f"what to train: all, or of {', '.join(ARMS)} (default: bf16 pretrain)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as many as each arm should have, from 0")
    parser.add_argument("--steps", type=step_count, help="training steps, if not the preset's")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command then continues")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FOLDER", help="default: the installed packages")
    parser.add_argument("--tokens", type=Path, help="file of the tokens, made if absent (default: in --out)")
    parser.add_argument("--out", type=Path, default=Path("out/pretrain_lm"), help="folder for the runs")
    parser.add_argument("--commit", default="", help="of this library, to be written beside the runs")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PATH",
        help="compare the runs of a metrics.json or below a folder, train nothing",
    )
    args = parser.parse_args()
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    args.tokens = args.tokens or args.out / "tokens.npz"
    return args


def planned(arms: Sequence[str], seeds: Sequence[int] | None) -> list[tuple[str, int]]:
    """Lists the arms and seeds to run: an arm after the one it branches from, all seeds of an arm in a row."""
    names = [name for name in ARMS if name in arms or "all" in arms]
    return [(name, seed) for name in names for seed in (range(ARMS[name].seeds) if seeds is None else seeds)]


def about(config: Config, text: corpus.Corpus, commit: str) -> dict[str, Any]:
    """Returns what is written beside every run."""
    device, sizes = jax.devices()[0], describe(config)
    return {
        "config": asdict(config),
        "tokens": {**sizes, "passes": sizes["trained_on"] / len(text.train)},
        "corpus": asdict(text.source),
        "commit": commit,
        "device": {"platform": device.platform, "kind": device.device_kind},
        "python": platform.python_version(),
        "packages": sorted({f"{found.name}=={found.version}" for found in distributions()}),
    }


def refuse_others(folder: Path, shared: dict[str, Any]) -> None:
    """Stops before anything is trained if a folder has runs that cannot be compared with new ones."""
    for path in folder.rglob("run.json"):
        found = json.loads(path.read_text())
        for name in ("config", "corpus"):
            if found[name] != shared[name]:
                raise ValueError(f"{path} is a run of another {name}, {found[name]}; name another --out")


def train(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    deadline = None if args.minutes is None else begin + 60 * args.minutes
    config = PRESETS[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    folders = args.text or ([corpus.standard_library()] if args.preset == "cpu" else corpus.installed())
    text = corpus.load(args.tokens, folders, config.vocabulary, BYTES[args.preset])
    shared = about(config, text, args.commit)
    refuse_others(args.out, shared)
    sizes = shared["tokens"]
    print(f"corpus {text.source}")
    print(f"{config}\nN = {sizes['block_weights']:,} block weights, D = {sizes['trained_on']:,} tokens, "
          f"D/N = {sizes['tokens_per_weight']:.1f}, {sizes['passes']:.2f} passes")  # fmt: skip
    trainer = Trainer(config, text, args.out, deadline)
    for name, seed in planned(args.arms, args.seeds):
        path = trainer.path(name, seed) / "run.json"
        late = deadline is not None and time.monotonic() > deadline
        if not late and not (path.exists() and Run(**json.loads(path.read_text())["run"]).is_done(config)):
            run = trainer.run(name, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**shared, "run": asdict(run)}) + "\n")
            late = not run.is_done(config)
        if late:
            print(f"stopped after --minutes at {name}, seed {seed}; the same command continues")
            break
    if any(args.out.rglob("run.json")):
        report(args.out, args.out)
        print(f"\n{time.monotonic() - begin:.0f} s in all; wrote {args.out}/metrics.json and {args.out}/loss.png")


def main() -> None:
    args = parse_args()
    try:
        report(args.report, args.out) if args.report else train(args)
    except (OSError, ValueError) as error:
        raise SystemExit(f"pretrain_lm: {error}") from None


if __name__ == "__main__":
    main()
