"""Quantizes a Llama (2, 3, 3.1, 3.2 without vision, 3.3) from Hugging Face files by GPTQ, weight-only.

    pip install ".[examples]" tokenizers
    python examples/quantize_checkpoint.py MODEL TEXT OUTPUT
    python examples/quantize_checkpoint.py out/serve_converted/bf16 README.md out/gptq --format compressed-tensors

One layer is in memory at a time: the files may be larger. The conversion is checked first, since all else takes long.
128 sequences, spread evenly over the text, run through the model in bfloat16. Of each layer's inputs the hessians X^T X
are written to ``OUTPUT-hessians``: four K x K matrices of float32 a layer, 33 GB for Llama 3 8B. Then the layer is
quantized, and the next one sees what the quantized one computes, as in GPTQ's own code and in llm-compressor. At the
end the converter quantizes the files by these hessians, as ``jnvfp4 convert --scales search --hessians`` does.

Tokens are those of the model's ``tokenizer.json``; without one they are bytes, as in the models of these examples.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jnvfp4 import QuantSpec
from jnvfp4.calibration import gptq, hessian
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    Result,
    convert_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from lm.config import Config, step_count
from lm.data import spread
from lm.hugging_face import JOINED, check_shapes, layer_from_hugging_face, read_config
from lm.model import Tree, bf16_linear, block, converted_linear

SEARCH = QuantSpec(select="search")


def read_tokens(model: Path, text: Path, vocabulary: int) -> np.ndarray:
    """Reads a text as tokens of the model.

    Raises:
      ValueError: the model has no tokenizer, and its tokens are no bytes; or tokenizer or text cannot be read.
    """
    path = model / "tokenizer.json"
    if not path.exists():
        if vocabulary != 256:
            raise ValueError(f"{path} is missing, and {vocabulary} tokens are no bytes")
        return np.frombuffer(text.read_bytes(), np.uint8)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            f"{path} is read by the package tokenizers, which is missing: pip install tokenizers"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no other
        raise ValueError(f"{path} must be a tokenizer of the package tokenizers: {error}") from None
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} must be UTF-8: {error}") from None
    if max(ids, default=0) >= vocabulary:
        raise ValueError(f"{path}: tokens must be below the vocab_size of config.json, {vocabulary}, got {max(ids)}")
    return np.array(ids)


def read_sequences(args: argparse.Namespace, config: Config) -> np.ndarray:
    """Reads [sequences, seq] tokens of the text; a warning says if it is too short for as many of them."""
    tokens, length = read_tokens(args.model, args.text, config.vocabulary), min(args.seq, config.seq)
    sequences = spread(tokens, args.sequences, length)
    if len(tokens) < sequences.size:
        text = f"{args.text} has {len(tokens)} tokens, and {args.sequences} sequences of {length} overlap"
        print(f"warning: {text}", file=sys.stderr)
    return sequences


KEYS = jax.random.split(jax.random.key(0), 4)  # nothing rounds stochastically


@partial(jax.jit, static_argnames="config")
def hessians(x: Array, layer: Tree, config: Config) -> dict[str, Array]:
    """Sums X^T X of what each weight of a layer multiplies, float32 [K, K], for x [sequences, seq, width]."""

    def add(sums: dict[str, Array], x: Array) -> tuple[dict[str, Array], None]:
        seen = {}

        def linear(x: Array, w: Array, key: Array, name: str) -> Array:
            seen[name] = hessian(x)
            return bf16_linear(x, w, key, name)

        block(x[None], layer, config, linear, KEYS)
        return jax.tree.map(jnp.add, sums, seen), None

    nothing = {name: jnp.zeros(2 * layer[name].shape[-1:], jnp.float32) for name in JOINED}
    return jax.lax.scan(add, nothing, x)[0]


@partial(jax.jit, static_argnames="config")
def run(x: Array, layer: Tree, config: Config) -> Array:
    """Computes the residual stream [sequences, seq, width] behind a layer from that before it."""
    return jax.lax.map(lambda x: block(x[None], layer, config, converted_linear, KEYS)[0], x)


def save(tensors: dict[str, Array], path: Path) -> None:
    """Writes one safetensors file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        save_checkpoint(tensors, Path(scratch) / "one")
        (Path(scratch) / "one" / "model.safetensors").replace(path)


def write_hessians(model: Path, tokens: np.ndarray, folder: Path) -> None:
    """Writes a file of hessians for each layer; the first of the weights with the same inputs names them."""
    config, checkpoint = read_config(model), open_checkpoint(model)
    embedding = checkpoint["model.embed_tokens.weight"]
    x = jnp.asarray(embedding)[tokens].astype(jnp.bfloat16)
    for i in range(config.layers):
        layer = layer_from_hugging_face(checkpoint, i)
        found = hessians(x, layer, config)
        names = {name: f"model.layers.{i}.{modules[0]}_proj.weight" for name, modules in JOINED.items()}
        save({names[name]: h for name, h in found.items()}, folder / f"layer-{i:04d}.safetensors")
        x = run(x, layer | {name: gptq(layer[name], h, SEARCH) for name, h in found.items()}, config)
        if not jnp.isfinite(x).all():
            raise ValueError(f"layer {i + 1} of {config.layers} computes NaN or infinity")
        print(f"layer {i + 1} of {config.layers}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quantizes a Llama by GPTQ, one layer at a time.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model in bfloat16")
    parser.add_argument("text", type=Path, metavar="TEXT", help="what the model usually reads, in UTF-8")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder of the quantized model")
    parser.add_argument("--format", choices=("modelopt", "compressed-tensors", "te"), default="modelopt")
    parser.add_argument("--sequences", type=step_count, default=128, help="of the text (default: %(default)s)")
    parser.add_argument("--seq", type=step_count, default=2048, help="tokens of each at most (default: %(default)s)")
    args = parser.parse_args()
    for path in (args.output, hessians_of(args)):
        if path.exists():
            parser.error(f"{path} exists already: remove it, or name another OUTPUT")
    return args


def hessians_of(args: argparse.Namespace) -> Path:
    return args.output.with_name(f"{args.output.name}-hessians")


def check(args: argparse.Namespace, options: ConvertOptions, config: Config) -> None:
    """Refuses whatever the conversion would refuse behind all layers, and a disk without room for the hessians."""
    planned = convert_checkpoint(args.model, args.output, options, dry_run=True)
    check_shapes(open_checkpoint(args.model), config, args.model)
    inputs = 2 * config.width**2 + (config.heads * config.head_dim) ** 2 + config.mlp_width**2
    needed = 2 * planned.bytes_after + 4 * config.layers * inputs  # the converter asks for room for a second copy
    disk = next(path for path in args.output.resolve().parents if path.exists())
    if (free := shutil.disk_usage(disk).free) < needed:
        raise OSError(f"{disk} must have room for {needed:,} bytes, hessians included, got {free:,}")


def convert(args: argparse.Namespace, options: ConvertOptions) -> Result:
    """Converts by the hessians; if that ends early, the error names the command that repeats it without calibration."""
    device = jax.devices()[0]
    command = ["jnvfp4", "convert", args.model, args.output, "--format", args.format, "--scales", "search"]
    command += ["--weight-only", "--hessians", options.hessians, *["--device", "cuda:0"] * (device.platform == "gpu")]
    try:
        return convert_checkpoint(args.model, args.output, options, device=device)
    except (CheckpointError, OSError, RuntimeError, KeyboardInterrupt) as error:  # RuntimeError: of a device
        begun = ["--resume"] if args.output.exists() else []
        line = shlex.join(map(str, [*command, *begun]))
        raise ValueError(
            f"{str(error) or 'interrupted'}\nall hessians are written; this converts by them: {line}"
        ) from None


def main() -> None:
    args = parse_args()
    folder = hessians_of(args)
    options = ConvertOptions(layout=args.format, spec=SEARCH, weight_only=True)
    try:
        config = read_config(args.model)
        tokens = read_sequences(args, config)
        check(args, options, config)
        folder.mkdir(parents=True)
        write_hessians(args.model, tokens, folder)
        result = convert(args, replace(options, hessians=folder))
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"quantize_checkpoint: {error}") from None
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    rounded = f"{len(result.by_gptq)} of {len(result.amaxes)} weights in {args.output} rounded"
    print(f"{rounded} by the hessians in {folder}, no longer needed")


if __name__ == "__main__":
    main()
