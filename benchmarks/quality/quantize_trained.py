"""Quantizes models that pretrain_lm trained in bfloat16, and measures what each inference recipe costs.

    pip install ".[pretrain]"
    python -m benchmarks.quality.pretrain_lm --arms bf16 --seeds 0 1 2
    python -m benchmarks.quality.quantize_trained out/pretrain_lm/bf16/seed*

Nothing is trained. The weights of the linear layers of all blocks are quantized, or activations, or both, and the
perplexity of windows spread evenly over the validation text is computed. GPTQ sees 128 windows, spread evenly over the
training text.
The gap of a method is how far the loss, the logarithm of the perplexity, lies above that of bfloat16, averaged over the
models with its standard error. "closed" is the part of the gap of plain NVFP4, of the same kind, that a method closes,
with the standard error over models.

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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, WINDOW64, NVFP4Tensor, QuantSpec, Recipe
from jnvfp4.calibration import gptq, hessian
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from jnvfp4.spec import four_over_six
from lm.config import Config
from lm.data import val_batches
from lm.hugging_face import from_hugging_face, llama_config, to_hugging_face
from lm.model import Linear, Tree, bf16_linear, logits, loss_fn

from . import corpus
from .pretrain import BASELINE, Checkpoint, read_finished

FOUR_OVER_SIX = four_over_six()
MSE_448 = four_over_six("mse", e4m3_max=448)
ROW_FOUR_OVER_SIX = four_over_six(amax_scope="row")
ROW_MSE_448 = four_over_six("mse", e4m3_max=448, amax_scope="row")
SEARCH = QuantSpec(select="search")
ROW_SEARCH = replace(ROW_SCALED, select="search")


class Method(NamedTuple):
    """Says how weights and what they multiply are quantized.

    Attributes:
      w: the spec of the weights; None leaves them in bfloat16.
      x: that of the activations, likewise.
      by_gptq: whether the weights are rounded by GPTQ.
      twice: whether x is the sum of two NVFP4 tensors, the second of what the first leaves.
    """

    w: QuantSpec | None
    x: QuantSpec | None = None
    by_gptq: bool = False
    twice: bool = False


# By what is quantized, and by the name of a method, of which plain NVFP4 is the first.
WEIGHTS: dict[str, Method] = {
    "1x16": Method(NVFP4),
    "16x16 tiles": Method(NVFP4_2D),
    "4over6": Method(FOUR_OVER_SIX),
    "4over6, squared errors, 448": Method(MSE_448),
    "search": Method(SEARCH),
    "GPTQ": Method(NVFP4, by_gptq=True),
    "GPTQ, search": Method(SEARCH, by_gptq=True),
}
ACTIVATIONS: dict[str, Method] = {
    "1x16": Method(None, NVFP4),
    "row-scaled": Method(None, ROW_SCALED),
    "row-scaled 4over6": Method(None, ROW_FOUR_OVER_SIX),
    "row-scaled 4over6, squared errors, 448": Method(None, ROW_MSE_448),
    "row-scaled search": Method(None, ROW_SEARCH),
}
BOTH: dict[str, Method] = {
    "1x16": Method(NVFP4, NVFP4),
    "16x16 tiles of w": Method(NVFP4_2D, NVFP4),
    "row-scaled x": Method(NVFP4, ROW_SCALED),
    "window64 x": Method(NVFP4, WINDOW64),
    "row-scaled 4over6 x, 4over6 w": Method(FOUR_OVER_SIX, ROW_FOUR_OVER_SIX),
    "row-scaled 4over6 x, GPTQ with search of w": Method(SEARCH, ROW_FOUR_OVER_SIX, by_gptq=True),
    "the same, x by squared errors, 448": Method(SEARCH, ROW_MSE_448, by_gptq=True),
    "x as two tensors, 4over6 w": Method(FOUR_OVER_SIX, NVFP4, twice=True),
}
CALIBRATION, AT_ONCE = 128, 16  # windows of the training text
LAYOUTS: tuple[Literal["modelopt", "te"], ...] = ("modelopt", "te")
KINDS = {"weights": WEIGHTS, "activations": ACTIVATIONS, "weights and activations": BOTH}


# Weights

Hessians = dict[str, Array]  # of the inputs of a kind of layers, float32 [layers, K, K]


@partial(jax.jit, static_argnames="config")
def hessians(params: Tree, tokens: Array, config: Config) -> Hessians:
    """Sums X^T X of what the linear layers of each block multiply; tokens are integers [batches, sequences, seq]."""

    def of_batch(batch: Array) -> Hessians:
        seen: dict[str, list[Array]] = {}

        def linear(x: Array, w: Array, key: Array, name: str) -> Array:
            seen.setdefault(name, []).append(hessian(x))
            return bf16_linear(x, w, key, name)

        logits(params, batch, config, [linear] * config.layers, jax.random.key(0))
        return {name: jnp.stack(of_block) for name, of_block in seen.items()}

    return jax.tree.map(lambda h: jnp.sum(h, axis=0), jax.lax.map(of_batch, tokens))


def quantized(params: Tree, found: Hessians, method: Method) -> Tree:
    """Quantizes the weights of the linear layers, stacked over blocks."""

    spec = method.w
    if spec is None:
        return params

    def weights(name: str, w: Array) -> NVFP4Tensor:
        if method.by_gptq:
            return gptq(w, found[name], spec)
        return jax.vmap(partial(jnvfp4.quantize, spec=spec))(w)

    layers = {name: weights(name, w) if name in found else w for name, w in params["layers"].items()}
    return {**params, "layers": layers}


# Losses


def linear_of(method: Method) -> Linear:
    """Returns the product of the linear layers with quantized weights."""
    recipe = Recipe(fprop=(method.x, method.w), dgrad=None, wgrad=None) if method.w else None

    def linear(x: Array, w: Any, key: Array, name: str) -> Array:
        if recipe is None:
            assert method.x is not None
            return bf16_linear(jnvfp4.fake_quant(x, method.x).astype(x.dtype), w, key, name)
        if not method.twice:
            return jnvfp4.linear(x, w, recipe)
        assert method.x is not None
        left = (x - jnvfp4.fake_quant(x, method.x).astype(x.dtype)).astype(x.dtype)
        sums = (jnvfp4.linear(part, w, recipe, out_dtype=jnp.float32) for part in (x, left))
        return sum(sums, jnp.zeros((), jnp.float32)).astype(x.dtype)

    return linear


@partial(jax.jit, static_argnames=("config", "method"))
def validation_loss(params: Tree, batches: Array, config: Config, method: Method | None) -> Array:
    """Computes the loss of a quantized model, or of one in bfloat16 if there is no method."""
    linear = bf16_linear if method is None else linear_of(method)
    return jnp.mean(jax.lax.map(lambda batch: loss_fn(params, batch, config, linear, jax.random.key(0)), batches))


def losses(params: Tree, config: Config, batches: Array, calibration: Array) -> dict[tuple[str, str], float]:
    """Computes the validation loss in bfloat16, under ("", "bf16"), and by every kind and method."""
    found = {("", BASELINE): float(validation_loss(params, batches, config, None))}
    seen = hessians(params, calibration, config)
    for kind, methods in KINDS.items():
        for name, method in methods.items():
            of_method = quantized(params, seen, method)
            found[kind, name] = float(validation_loss(of_method, batches, config, method))
    return found


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


def spread(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean; None for one value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def summarize(found: Sequence[Mapping[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """Makes the rows of the table of what each model showed."""
    base = np.array([of[("", BASELINE)] for of in found])
    rows: list[dict[str, Any]] = [{"quantized": "", "method": BASELINE, "perplexity": math.exp(np.mean(base))}]
    for kind, methods in KINDS.items():
        above = {name: np.array([of[kind, name] for of in found]) - base for name in methods}
        plain = next(iter(above.values()))
        for name, gaps in above.items():
            row = {"quantized": kind, "method": name, "perplexity": math.exp(np.mean(base + gaps))}
            percent, closed = 100 * gaps / base, 100 * (1 - gaps / plain)
            row |= {"gap_nats": float(np.mean(gaps)), "gap_percent": float(np.mean(percent))}
            row["standard_error"] = spread(percent)
            if gaps is not plain:
                row |= {"closed_percent": float(np.mean(closed)), "closed_standard_error": spread(closed)}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["quantized", "method", "perplexity", "loss above bf16, %", "closed, %"]
    cells = [heads, ["---"] * len(heads)]
    for row in rows:
        above, closed = (
            "" if of not in row else f"{row[of]:{form}}" + ("" if row[error] is None else f" ± {row[error]:{form[1:]}}")
            for of, error, form in (
                ("gap_percent", "standard_error", "+.3f"),
                ("closed_percent", "closed_standard_error", "-.1f"),
            )
        )
        cells.append([row["quantized"], row["method"], f"{row['perplexity']:.4f}", above, closed])
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
    seen = replace(config, val_batches=CALIBRATION // AT_ONCE, batch=AT_ONCE)
    calibration = jnp.asarray(val_batches(text.train, seen)[..., :-1], jnp.int32)
    models = [jax.tree.map(lambda w: w.astype(jnp.bfloat16), trained.params) for trained in runs]
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as scratch:
            count = check_converter(models[0], config, layout, Path(scratch))
        print(f"{count} tensors of the checkpoint converter, layout {layout}, have the bytes of quantize")
    return summarize([losses(params, config, batches, calibration) for params in models])


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
