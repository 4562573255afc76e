"""Quantizes models that pretrain_lm trained in bfloat16, and measures what each inference recipe costs.

    pip install ".[pretrain]"
    python -m benchmarks.quality.pretrain_lm --arms bf16 --seeds 0 1 2 --tokens out/t.npz --out out/5m
    python -m benchmarks.quality.pretrain_lm --arms bf16 --seeds 0 1 2 --tokens out/t.npz --out out/12m --preset gpu-12m
    python -m benchmarks.quality.quantize_trained out/*m/bf16/seed* --tokens out/t.npz

The weights of the linear layers of all blocks are quantized, or activations, or both, and the loss on windows spread
evenly over the validation text is computed. GPTQ sees 512 windows, spread evenly over the training text. Some methods
fine-tune the models first (``fine_tune``). The gap of a method is how far the loss lies above that of bfloat16, a mean
over the models of a size with its standard error. "closed" is the part of the gap of plain NVFP4, of one kind, that
a method closes in a model, averaged likewise, and over all models.

The distilled weights of the first model of a size also go through the checkpoint converter, whose tensors must have the
bytes of those that are quantized here.

Prints a table, and writes ``quantized.json`` to ``--out``.
"""

import argparse
import json
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
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, NVFP4Tensor, QuantSpec, Recipe
from jnvfp4.calibration import gptq, hessian
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from lm.config import Config
from lm.data import val_batches
from lm.hugging_face import from_hugging_face, llama_config, to_hugging_face
from lm.model import Linear, Tree, bf16_linear, logits, loss_fn

from ..tables import quantized_cells
from . import corpus
from .fine_tune import Objective, fine_tune
from .pretrain import (
    BASELINE,
    FOUR_OVER_SIX,
    MSE_448,
    ROW_MSE_448,
    SEARCH,
    Checkpoint,
    block_weights,
    read_finished,
)

ROW_SEARCH = replace(ROW_SCALED, select="search")


class Method(NamedTuple):
    """Says how weights and what they multiply are quantized.

    Attributes:
      w: the spec of the weights; None leaves them in bfloat16.
      x: that of the activations, likewise.
      by_gptq: whether the weights are rounded by GPTQ.
      fitted: whether GPTQ minds that x is quantized: H is that of quantized x, and the weights are first replaced by
        those whose products with quantized x are nearest to w x (as GPTAQ, arXiv 2504.02692, does column by column).
      twice: whether x is the sum of two NVFP4 tensors, the second of what the first leaves.
      tuned: on what the model is fine-tuned with this forward pass before; None if it is not.
    """

    w: QuantSpec | None
    x: QuantSpec | None = None
    by_gptq: bool = False
    fitted: bool = False
    twice: bool = False
    tuned: Objective | None = None


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
    "row-scaled 4over6": Method(None, ROW_MSE_448),
    "row-scaled search": Method(None, ROW_SEARCH),
}
BOTH: dict[str, Method] = {
    "1x16": Method(NVFP4, NVFP4),
    "row-scaled x": Method(NVFP4, ROW_SCALED),
    "row-scaled 4over6 x, 4over6 w": Method(MSE_448, ROW_MSE_448),
    "row-scaled 4over6 x, GPTQ with search of w": Method(SEARCH, ROW_MSE_448, by_gptq=True),
    "the same, w fitted to quantized x": Method(SEARCH, ROW_MSE_448, by_gptq=True, fitted=True),
    "x as two tensors, 4over6 w": Method(MSE_448, NVFP4, twice=True),
    "1x16, fine-tuned": Method(NVFP4, NVFP4, tuned="text"),
    "1x16, distilled": Method(NVFP4, NVFP4, tuned="teacher"),
    "row-scaled 4over6 x, 4over6 w, distilled": Method(MSE_448, ROW_MSE_448, tuned="teacher"),
    "nothing, fine-tuned": Method(None, tuned="text"),
}
CALIBRATION, AT_ONCE = 512, 16  # windows of the training text
LAYOUTS: tuple[Literal["modelopt", "te"], ...] = ("modelopt", "te")
KINDS = {"weights": WEIGHTS, "activations": ACTIVATIONS, "weights and activations": BOTH}


# Weights


class Seen(NamedTuple):
    """Holds sums over what a kind of layers multiplies, float32 [layers, K, K]: X, and Q = ROW_MSE_448 of X."""

    xx: Array  # X^T X
    qq: Array  # Q^T Q
    xq: Array  # X^T Q


@partial(jax.jit, static_argnames="config")
def calibrate(params: Tree, tokens: Array, config: Config) -> dict[str, Seen]:
    """Sums over tokens, integers [batches, sequences, seq], what the linear layers of each block multiply, by name."""

    def of_batch(batch: Array) -> dict[str, Seen]:
        seen: dict[str, list[Seen]] = {}

        def linear(x: Array, w: Array, key: Array, name: str) -> Array:
            q = jnvfp4.fake_quant(x, ROW_MSE_448).astype(x.dtype)
            xq = jnp.einsum("...j,...k->jk", x, q, precision="highest", preferred_element_type=jnp.float32)
            seen.setdefault(name, []).append(Seen(hessian(x), hessian(q), xq))
            return bf16_linear(x, w, key, name)

        logits(params, batch, config, [linear] * config.layers, jax.random.key(0))
        return {name: jax.tree.map(lambda *of: jnp.stack(of), *blocks) for name, blocks in seen.items()}

    return jax.tree.map(lambda h: jnp.sum(h, axis=0), jax.lax.map(of_batch, tokens))


def fit(w: Array, seen: Seen) -> Array:
    """Returns the weights whose products with quantized x are nearest to w x; w is [N, K]. Damped as in GPTQ."""
    w, damping = w.astype(jnp.float32), 0.01 * jnp.mean(jnp.diagonal(seen.qq))
    wanted = jnp.matmul(w, seen.xq, precision="highest") + damping * w
    return jnp.linalg.solve(seen.qq + damping * jnp.eye(w.shape[-1]), wanted.T).T


def quantized(params: Tree, found: dict[str, Seen], method: Method) -> Tree:
    """Quantizes the weights of the linear layers, stacked over blocks."""
    spec = method.w
    if spec is None:
        return params

    def weights(w: Array, seen: Seen) -> NVFP4Tensor:
        if method.fitted:
            return gptq(jax.vmap(fit)(w, seen), seen.qq, spec)
        return gptq(w, seen.xx, spec) if method.by_gptq else jax.vmap(partial(jnvfp4.quantize, spec=spec))(w)

    layers = {name: weights(w, found[name]) if name in found else w for name, w in params["layers"].items()}
    return {**params, "layers": layers}


# Losses


def recipe_of(method: Method) -> Recipe | None:
    return Recipe(fprop=(method.x, method.w), dgrad=None, wgrad=None) if method.w else None


def linear_of(method: Method) -> Linear:
    """Returns the product of the linear layers with quantized weights."""
    recipe = recipe_of(method)

    def linear(x: Array, w: Any, key: Array, name: str) -> Array:
        if recipe is None and method.x is None:
            return bf16_linear(x, w, key, name)
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


Losses = Mapping[tuple[str, str], float]  # by what is quantized and the method


def tune(trained: Checkpoint, tokens: Array, method: Method) -> Tree:
    """Returns the weights in bfloat16 of a model, fine-tuned with a method's forward pass if it says so."""
    params = trained.params
    if method.tuned is not None:
        params = fine_tune(params, trained.config, tokens, recipe_of(method), method.tuned, trained.run.seed)
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)


def losses(trained: Checkpoint, text: corpus.Corpus, batches: int) -> Losses:
    """Computes the validation loss in bfloat16, under ("", "bf16"), and by every kind and method."""
    config = replace(trained.config, val_batches=batches)
    held_out, tokens = jnp.asarray(val_batches(text.val, config)), jnp.asarray(text.train)
    windows = val_batches(text.train, replace(config, val_batches=CALIBRATION // AT_ONCE, batch=AT_ONCE))
    plain = tune(trained, tokens, Method(None))
    seen = calibrate(plain, jnp.asarray(windows[..., :-1], jnp.int32), config)
    found = {("", BASELINE): float(validation_loss(plain, held_out, config, None))}
    for kind, methods in KINDS.items():
        for name, method in methods.items():
            params = tune(trained, tokens, method) if method.tuned else plain
            run = method._replace(tuned=None, by_gptq=False, fitted=False)  # what the forward pass is
            found[kind, name] = float(validation_loss(quantized(params, seen, method), held_out, config, run))
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


def figures(values: np.ndarray) -> tuple[float, float | None]:
    """Returns the mean and its standard error; None instead of that of one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def summarize(found: Mapping[str, Sequence[Losses]]) -> list[dict[str, Any]]:
    """Makes the rows of the table of what each model showed, by size.

    A row has what is quantized, the method, the losses of models by size, and means with standard errors: of the gap in
    percent of the loss by size, and of the part of the gap that is closed, in percent, by size and over ``all``.
    """

    def of(kind: str, name: str) -> dict[str, np.ndarray]:
        return {size: np.array([losses[kind, name] for losses in models]) for size, models in found.items()}

    base = of("", BASELINE)
    rows = [{"quantized": "", "method": BASELINE, "losses": {size: v.tolist() for size, v in base.items()}}]
    for kind, methods in KINDS.items():
        plain = {size: v - base[size] for size, v in of(kind, next(iter(methods))).items()}
        for i, name in enumerate(methods):
            losses = of(kind, name)
            gaps = {size: v - base[size] for size, v in losses.items()}
            closed = {size: 100 * (1 - v / plain[size]) for size, v in gaps.items()}
            closed["all"] = np.concatenate(list(closed.values()))
            row = {"quantized": kind, "method": name, "losses": {size: v.tolist() for size, v in losses.items()}}
            row["gap_percent"] = {size: figures(100 * v / base[size]) for size, v in gaps.items()}
            rows.append(row | ({"closed_percent": {size: figures(v) for size, v in closed.items()}} if i else {}))
    return rows


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
    """Reads finished runs in bfloat16, which must have the same text."""
    runs = [read_finished(folder) for folder in folders]
    for folder, trained in zip(folders, runs, strict=True):
        if trained.run.arm != BASELINE:
            raise ValueError(f"{folder} must have a run of the arm {BASELINE}, got {trained.run.arm}")
        if trained.sha256 != runs[0].sha256:
            raise ValueError(f"{folder} must have the text of {folders[0]}, {runs[0].sha256}, got {trained.sha256}")
    return runs


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantizes the models that the arguments name, and returns the rows of the table."""
    runs = restore_alike(args.runs)
    text = corpus.read(args.tokens or args.runs[0].parent.parent / "tokens.npz")
    if text.source.sha256 != runs[0].sha256:
        raise ValueError(f"--tokens must have the text of the runs, {runs[0].sha256}, got {text.source.sha256}")
    found: dict[str, list[Losses]] = {}
    for trained in runs:
        of_size = found.setdefault(f"{block_weights(trained.params) / 1e6:.1f} M", [])
        if not of_size:
            params = tune(trained, jnp.asarray(text.train), BOTH["1x16, distilled"])
            for layout in LAYOUTS:
                with tempfile.TemporaryDirectory() as scratch:
                    count = check_converter(params, trained.config, layout, Path(scratch))
                print(f"{count} tensors of the checkpoint converter, layout {layout}, have the bytes of quantize")
        of_size.append(losses(trained, text, args.batches))
    return summarize(found)


def main() -> None:
    args = parse_args()
    try:
        rows = measure(args)
    except (OSError, ValueError) as error:
        raise SystemExit(f"quantize_trained: {error}") from None
    columns = [f"{size}: {what}, %" for size in rows[0]["losses"] for what in ("loss above bf16", "closed")]
    heads = ["quantized", "method", *columns, "closed, %"]
    print("\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *quantized_cells(rows)]))
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
