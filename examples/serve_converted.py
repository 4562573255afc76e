"""Converts a Llama from Hugging Face files to NVFP4 and runs it in JAX, beside the same model in bfloat16.

    pip install ".[examples]"
    python examples/serve_converted.py
    python examples/serve_converted.py --format compressed-tensors --recipe 4over6 --out out/4over6
    python examples/serve_converted.py --format te --recipe row-scaled --steps 1000 --out out/row_scaled

First a small Llama is trained for a moment on the source code of the running Python's standard library, so that its
perplexity means something. It is saved as Hugging Face would save it, in the folder ``bf16`` of ``--out``. That folder
is converted to the folder ``nvfp4``, and the NVFP4 model is loaded from there. Both models run by the same code: a
linear layer is ``x @ w.T`` where the weight is an array, and ``jnvfp4.matmul_nt`` where it is an NVFP4Tensor.
Activations are in bfloat16. ``--out`` also receives the printed table as ``metrics.json``.

Expect 80 s of CPU time, a perplexity of about 6.6 per byte in bfloat16, and one that is about one percent
higher in NVFP4.
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint
from lm.config import Config, step_count
from lm.data import stdlib_text, val_batches
from lm.hugging_face import from_hugging_face, llama_config, to_hugging_face
from lm.model import Tree, converted_linear, cross_entropy, logits
from lm.train import train

CONFIG = Config(
    layers=2,
    width=128,
    heads=2,
    kv_heads=1,
    mlp_width=384,
    seq=64,
    batch=16,
    steps=400,
    peak_lr=3e-3,
    val_batches=16,
    architecture="llama",
)


def compare(models: Mapping[str, Tree], config: Config, batches: np.ndarray) -> dict[str, dict[str, float]]:
    """Measures every model: its bytes, its perplexity, and how far its logits are from those of the first model."""
    tokens, targets = jnp.asarray(batches[..., :-1]), jnp.asarray(batches[..., 1:])

    @jax.jit
    def run(params: Tree) -> Array:
        key = jax.random.key(0)  # nothing rounds stochastically
        return jax.lax.map(lambda batch: logits(params, batch, config, converted_linear, key), tokens)

    outputs = {name: run(params) for name, params in models.items()}
    first = next(iter(outputs.values()))
    return {
        name: {
            "bytes": sum(x.nbytes for x in jax.tree.leaves(models[name])),
            "perplexity": math.exp(cross_entropy(output, targets)),
            "logits_relative_error": float(jnp.linalg.norm(output - first) / jnp.linalg.norm(first)),
            "logits_largest_error": float(jnp.max(jnp.abs(output - first))),
        }
        for name, output in outputs.items()
    }


FOUR_OVER_SIX = jnvfp4.spec.four_over_six("mse", e4m3_max=448)
SPECS = {"nvfp4": jnvfp4.NVFP4, "4over6": FOUR_OVER_SIX, "row-scaled": jnvfp4.ROW_SCALED}


def make_checkpoints(
    config: Config, seed: int, bf16: Path, nvfp4: Path, options: ConvertOptions
) -> tuple[Tree, np.ndarray]:
    """Trains a model, saves it in the folder ``bf16`` as Hugging Face would, and converts that to ``nvfp4``.

    Returns:
      the trained weights, bfloat16, and batches of text that it was not trained on.
    """
    text, val_text = stdlib_text()
    held_out = val_batches(val_text, config)
    trained, _ = train("training", None, config, seed, text, held_out)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), trained)
    tensors = to_hugging_face(params, config)
    save_checkpoint(tensors, bf16, config=llama_config(config))
    result = convert_checkpoint(bf16, nvfp4, options)
    print(f"{len(result.amaxes)} of {len(tensors)} tensors converted, from {bf16} to {nvfp4}")
    return params, held_out


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Converts a small Llama to NVFP4 and compares it with bfloat16.")
    parser.add_argument("--format", choices=("modelopt", "compressed-tensors", "te"), default="modelopt")
    parser.add_argument("--recipe", choices=SPECS, default="nvfp4")
    parser.add_argument("--steps", type=step_count, default=CONFIG.steps, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--out", type=Path, default=Path("out/serve_converted"), help="folder for both checkpoints")
    args = parser.parse_args()
    if args.recipe == "row-scaled" and args.format != "te":
        parser.error("--recipe row-scaled needs --format te, which has an amax for each row")
    for path in folders(args).values():
        if path.exists():
            parser.error(f"{path} exists already: remove it, or name another --out")
    return args


def folders(args: argparse.Namespace) -> dict[str, Path]:
    """Returns the folders of the two checkpoints."""
    return {name: args.out / name for name in ("bf16", "nvfp4")}


def main() -> None:
    args = parse_args()
    paths = folders(args)
    config = replace(CONFIG, steps=args.steps)
    options = ConvertOptions(layout=args.format, spec=SPECS[args.recipe], weight_only=True)
    params, held_out = make_checkpoints(config, args.seed, **paths, options=options)
    quantized = from_hugging_face(open_checkpoint(paths["nvfp4"]))
    table = compare({"bf16": params, "nvfp4": quantized}, config, held_out)
    print(f"\n{'':8}{'bytes':>12}{'perplexity':>12}{'logits: relative error':>26}{'largest error':>16}")
    for name, row in table.items():
        size, perplexity, relative, largest = row.values()
        print(f"{name:8}{size:12,}{perplexity:12.4f}{100 * relative:25.2f}%{largest:16.4f}")
    (args.out / "metrics.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
