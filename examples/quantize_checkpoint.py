"""Quantizes a Llama from Hugging Face files by GPTQ, one layer at a time: the files may be larger than memory.

    pip install ".[examples]" tokenizers
    python examples/quantize_checkpoint.py MODEL TEXT OUTPUT
    python examples/quantize_checkpoint.py out/serve_converted/bf16 README.md out/gptq --format compressed-tensors

128 sequences, spread evenly over the text, run through the model in bfloat16. Of each layer's inputs the hessians X^T X
are written to ``OUTPUT-hessians``: four K x K matrices of float32 a layer, 33 GB for Llama 3 8B. Then the layer is
quantized, and the next one sees what the quantized one computes, as in GPTQ's own code and in llm-compressor. At the
end the converter quantizes the files by these hessians, as ``jnvfp4 convert --scales search --hessians`` does.

Tokens are those of the model's ``tokenizer.json``; without one they are bytes, as in the models of these examples.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jnvfp4 import QuantSpec
from jnvfp4.calibration import gptq, hessian
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from lm.config import Config, step_count
from lm.data import spread
from lm.hugging_face import JOINED, layer_from_hugging_face, read_config
from lm.model import Tree, bf16_linear, block, converted_linear

SEARCH = QuantSpec(select="search")


def read_tokens(model: Path, text: Path, vocabulary: int) -> np.ndarray:
    """Reads a text as tokens of the model.

    Raises:
      ValueError: the model has no tokenizer, and its tokens are no bytes.
    """
    path = model / "tokenizer.json"
    if path.exists():
        from tokenizers import Tokenizer

        return np.array(Tokenizer.from_file(str(path)).encode(text.read_text()).ids)
    if vocabulary != 256:
        raise ValueError(f"{path} is missing, and {vocabulary} tokens are no bytes")
    return np.frombuffer(text.read_bytes(), np.uint8)


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


def main() -> None:
    args = parse_args()
    folder = hessians_of(args)
    options = ConvertOptions(layout=args.format, spec=SEARCH, hessians=folder, weight_only=True)
    try:
        config = read_config(args.model)
        text = read_tokens(args.model, args.text, config.vocabulary)
        tokens = spread(text, args.sequences, min(args.seq, config.seq))
        folder.mkdir(parents=True)
        write_hessians(args.model, tokens, folder)
        result = convert_checkpoint(args.model, args.output, options, device=jax.devices()[0])
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"quantize_checkpoint: {error}") from None
    print(f"{len(result.amaxes)} weights quantized to {args.output} by the hessians in {folder}, no longer needed")


if __name__ == "__main__":
    main()
