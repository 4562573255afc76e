"""Quantizes models that pretrain_lm trained in bfloat16, and measures what each inference recipe costs.

    pip install ".[pretrain]"
    python -m benchmarks.quality.pretrain_lm --arms bf16 --seeds 0 1 2
    python -m benchmarks.quality.quantize_trained out/pretrain_lm/bf16/seed*

Nothing is trained or calibrated. The weights of the linear layers of all blocks are quantized, or weights and
activations, and the perplexity of windows spread evenly over the validation text is computed. The gap of a recipe is
how far the loss, the logarithm of the perplexity, lies above that of bfloat16, averaged over the models with its
standard error. "closed" is the part of the gap of plain NVFP4, of the same kind, that a recipe closes.

The weights of the first model also go through the checkpoint converter, whose tensors must have the bytes of those that
are quantized here.

Prints a table, and writes ``quantized.json`` to ``--out``.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, WINDOW64, NVFP4Tensor, QuantSpec, Recipe
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from jnvfp4.spec import four_over_six
from lm.config import Config
from lm.data import val_batches
from lm.hugging_face import from_hugging_face, llama_config, to_hugging_face
from lm.model import Tree, bf16_linear, loss_fn, quantized_linear

from . import corpus
from .pretrain import BASELINE, Checkpoint, gap, read_finished

Specs = tuple[QuantSpec | None, QuantSpec]  # of x (None: left in bfloat16) and of w

FOUR_OVER_SIX = four_over_six()
ROW_FOUR_OVER_SIX = four_over_six(amax_scope="row")
# By what is quantized, and by the name of a recipe, of which plain NVFP4 is the first.
WEIGHTS: dict[str, Specs] = {
    "1x16": (None, NVFP4),
    "16x16 tiles": (None, NVFP4_2D),
    "4over6": (None, FOUR_OVER_SIX),
    "row-scaled": (None, ROW_SCALED),
}
BOTH: dict[str, Specs] = {
    "1x16": (NVFP4, NVFP4),
    "16x16 tiles of w": (NVFP4, NVFP4_2D),
    "4over6 of w": (NVFP4, FOUR_OVER_SIX),
    "4over6": (FOUR_OVER_SIX, FOUR_OVER_SIX),
    "row-scaled x": (ROW_SCALED, NVFP4),
    "row-scaled 4over6 x, 4over6 w": (ROW_FOUR_OVER_SIX, FOUR_OVER_SIX),
    "window64 x": (WINDOW64, NVFP4),
}
LAYOUTS: tuple[Literal["modelopt", "te"], ...] = ("modelopt", "te")
KINDS = {"weights": WEIGHTS, "weights and activations": BOTH}


@partial(jax.jit, static_argnames=("config", "specs"))
def validation_loss(params: Tree, batches: Array, config: Config, specs: Specs | None) -> Array:
    """Computes the loss with x and w quantized as the specs say, or in bfloat16."""
    recipe = None if specs is None else Recipe(fprop=specs, dgrad=None, wgrad=None)
    linear = bf16_linear if recipe is None else quantized_linear(recipe)
    return jnp.mean(jax.lax.map(lambda batch: loss_fn(params, batch, config, linear, jax.random.key(0)), batches))


def losses(params: Tree, config: Config, batches: Array) -> dict[tuple[str, str], float]:
    """Computes the validation loss in bfloat16, under ("", "bf16"), and by every kind and recipe."""
    choices = {
        ("", BASELINE): None,
        **{(kind, name): specs for kind, of in KINDS.items() for name, specs in of.items()},
    }
    return {choice: float(validation_loss(params, batches, config, specs)) for choice, specs in choices.items()}


def check_converter(params: Tree, config: Config, layout: Literal["modelopt", "te"], folder: Path) -> int:
    """Converts the weights as a checkpoint and compares the quantized tensors byte by byte; returns their number.

    Codes and block scales are compared, and in layout "te" the amaxes. The other keeps amax / 2688 rounded, from which
    amax comes back with an error of one unit in the last place.

    Raises:
      ValueError: a tensor of the converter has other bytes than ``quantize`` makes of the same weights.
    """
    save_checkpoint(to_hugging_face(params, config), folder / "bf16", config=llama_config(config))
    convert_checkpoint(folder / "bf16", folder / "nvfp4", ConvertOptions(layout=layout, weight_only=True))
    layers = from_hugging_face(open_checkpoint(folder / "nvfp4"))["layers"]
    parts = ("data", "scale", "amax") if layout == "te" else ("data", "scale")
    quantized = {name: tensor for name, tensor in layers.items() if isinstance(tensor, NVFP4Tensor)}
    for name, tensor in quantized.items():
        own = jax.vmap(jnvfp4.quantize)(params["layers"][name])
        for part in parts:
            if np.asarray(getattr(own, part)).tobytes() != np.asarray(getattr(tensor, part)).tobytes():
                raise ValueError(f"{part} of the converter's {name} has other bytes than quantize, layout {layout}")
    return len(quantized) * config.layers


def summarize(found: Sequence[Mapping[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """Makes the rows of the table of what each model showed."""
    base = dict(enumerate(of[("", BASELINE)] for of in found))
    rows = [{"quantized": "", "recipe": BASELINE, "perplexity": math.exp(np.mean(list(base.values())))}]
    for kind, recipes in KINDS.items():
        plain = gap(dict(enumerate(of[kind, next(iter(recipes))] for of in found)), base)
        assert plain is not None
        for name in recipes:
            of_model = dict(enumerate(of[kind, name] for of in found))
            own = gap(of_model, base)
            assert own is not None
            closed = None if own == plain else 100 * (1 - own.mean / plain.mean)
            perplexity = math.exp(np.mean(list(of_model.values())))
            rows.append({"quantized": kind, "recipe": name, "perplexity": perplexity, "gap_percent": own.mean,
                         "standard_error": own.error, "closed_percent": closed})  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["quantized", "recipe", "perplexity", "loss above bf16, %", "closed, %"]
    cells = [heads, ["---"] * len(heads)]
    for row in rows:
        error = "" if row.get("standard_error") is None else f" ± {row['standard_error']:.3f}"
        above = f"{row['gap_percent']:+.3f}{error}" if "gap_percent" in row else ""
        closed = "" if row.get("closed_percent") is None else f"{row['closed_percent']:.1f}"
        cells.append([row["quantized"], row["recipe"], f"{row['perplexity']:.4f}", above, closed])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantizes trained models and compares perplexities.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run of pretrain_lm")
    parser.add_argument("--tokens", type=Path, help="file of the tokens (default: tokens.npz, two folders above a run)")
    parser.add_argument("--batches", type=int, default=64, help="of the validation text (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/quantize_trained"), help="folder for quantized.json")
    args = parser.parse_args()
    if args.batches < 1:
        parser.error(f"--batches must be positive, got {args.batches}")
    return args


def restore_alike(folders: Sequence[Path]) -> list[Checkpoint]:
    """Reads finished runs in bfloat16, which must have the same sizes and the same text."""
    runs = [read_finished(folder) for folder in folders]
    for folder, trained in zip(folders, runs, strict=True):
        if trained.run.arm != BASELINE:
            raise ValueError(f"{folder} must have a run of the arm {BASELINE}, got {trained.run.arm}")
        if (trained.config, trained.sha256) != (runs[0].config, runs[0].sha256):
            raise ValueError(f"{folder} must have the sizes and the text of {folders[0]}, got others")
    return runs


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantizes the models that the arguments name, and returns the rows of the table."""
    runs = restore_alike(args.runs)
    text = corpus.read(args.tokens or args.runs[0].parent.parent / "tokens.npz")
    if text.source.sha256 != runs[0].sha256:
        raise ValueError(f"--tokens must have the text of the runs, {runs[0].sha256}, got {text.source.sha256}")
    config = replace(runs[0].config, val_batches=args.batches)
    batches = jnp.asarray(val_batches(text.val, config))
    models = [jax.tree.map(lambda w: w.astype(jnp.bfloat16), trained.params) for trained in runs]
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as scratch:
            count = check_converter(models[0], config, layout, Path(scratch))
        print(f"{count} tensors of the checkpoint converter, layout {layout}, have the bytes of quantize")
    return summarize([losses(params, config, batches) for params in models])


def main() -> None:
    args = parse_args()
    try:
        rows = measure(args)
    except (OSError, ValueError) as error:
        raise SystemExit(f"quantize_trained: {error}") from None
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    results = {
        "models": [f"{folder.parent.name}/{folder.name}" for folder in args.runs],
        "batches": args.batches,
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jnvfp4": jnvfp4.__version__},
        "rows": rows,
    }
    (args.out / "quantized.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
