"""Serves a Llama from NVFP4 weights by greedy decoding with a KV cache, beside the same model in bfloat16.

    pip install ".[examples]"
    python examples/serve.py
    python examples/serve.py --preset llama-8b --batch 1 4 16 64
    python examples/serve.py --preset llama-8b --batch 8 --prompt 512 2048 8192 32704 --head nvfp4
    python examples/serve.py --checkpoint out/serve_converted/nvfp4

Prints tokens per second of a jitted program that generates ``--new`` tokens for each sequence, and what weights and
cache take. The weights are bfloat16, or NVFP4; then the tokens that they multiply stay bfloat16 ("W4A16"), or are
quantized too, with per-token scaling ("W4A4"). With ``--activations stored`` W4A4 scales them by the checkpoint's
``input_scale`` instead, as vLLM and SGLang do. With ``--kv nvfp4`` the keys and values are in NVFP4, with an amax per
token and head ("KV4"), which makes room for 3.4 times the tokens where a head has 128 elements. ``--head nvfp4``
quantizes the head of these models too. The programs differ in nothing else. Speed is measured with ``--prompt`` random
tokens of each sequence in the cache; of several numbers of tokens, a picture shows it.

``--preset small``, the default on a CPU, trains the model of ``serve_converted.py`` for a moment, converts it and
serves the converted checkpoint. It also prints the lines that each model writes after prompts of different lengths,
which end at different times, and perplexities per byte, measured with one token at a time through the cache.
``--preset llama-8b``, the default on a GPU, has the sizes of Llama 3 8B and random weights, made on the device.
``--checkpoint`` serves what the converter wrote; "bf16" is then that checkpoint, decoded.

Expect a minute and a half for the small preset on two CPU cores. Writes ``serve.json`` and the picture to ``--out``.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4.attention import KVCache
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, open_checkpoint
from lm.config import Config, step_count
from lm.data import stdlib_text, val_batches
from lm.decode import (
    CHUNK,
    Calibrated,
    calibrated_linear,
    check_room,
    empty_cache,
    forced_loss,
    generate,
    is_quantized,
    prefill,
    put_prompts,
    row_scaled_linear,
    unstack,
)
from lm.hugging_face import from_hugging_face, input_amaxes, read_config
from lm.model import Linear, Tree, converted_linear
from serve_converted import CONFIG, make_checkpoints

RUNS = 5
BYTES = 256  # the vocabulary of models whose tokens are bytes
LLAMA_8B = Config(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    mlp_width=14336,
    seq=8192,
    batch=1,
    steps=1,
    peak_lr=1.0,
    val_batches=1,
    architecture="llama",
    vocabulary=128256,
    rotary_base=500_000.0,
    norm_epsilon=1e-5,
)
BATCHES = {"small": [1, 16], "llama-8b": [1, 4, 16, 64]}
CACHES = ["bf16", "nvfp4"]
HEAD_SIZES = (64, 128)  # that attention to an NVFP4 cache takes


@dataclass(frozen=True)
class Variant:
    """Says how a model is served.

    Attributes:
      weights: which weights it has: "bf16", "NVFP4", or "NVFP4, calibrated": with the stored amaxes of activations.
      linear: product of the linear layers.
      quantized_cache: whether its KV cache is in NVFP4.
    """

    weights: str
    linear: Linear
    quantized_cache: bool = False


def variants(caches: Iterable[str], activations: str) -> dict[str, Variant]:
    """Returns what is compared: bfloat16, and NVFP4 weights with each of the caches."""
    stored = activations == "stored"
    weights, linear = ("NVFP4, calibrated", calibrated_linear) if stored else ("NVFP4", row_scaled_linear)
    found = {"bf16": Variant("bf16", converted_linear)}
    for cache in caches:
        quantized, suffix = cache == "nvfp4", " KV4" if cache == "nvfp4" else ""
        found["W4A16" + suffix] = Variant("NVFP4", converted_linear, quantized)
        found["W4A4" + suffix] = Variant(weights, linear, quantized)
    return found


# Models

Models = dict[str, Tree]  # weights as lm.decode takes them, by Variant.weights


def with_linears(params: Tree, change: Callable[[Any], Any]) -> Tree:
    """Changes the weights of the linear layers; the others are shared with ``params``."""
    layers = [{name: change(w) if w.ndim == 2 else w for name, w in layer.items()} for layer in params["layers"]]
    return {**params, "layers": layers}


def random_models(config: Config, seed: int) -> Models:
    """Draws bfloat16 weights that keep the size of what they multiply, and quantizes them where they are."""
    keys = iter(jax.random.split(jax.random.key(seed), 4 * config.layers + 2))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5, static_argnums=1)
    ones = jnp.ones(config.width, jnp.bfloat16)

    def linear(rows: int, cols: int) -> Array:
        return draw(next(keys), (rows, cols))

    def layer() -> Tree:
        return {
            "attention_norm": ones,
            "qkv": linear((config.heads + 2 * config.kv_heads) * config.head_dim, config.width),
            "attention_out": linear(config.width, config.heads * config.head_dim),
            "mlp_norm": ones,
            "mlp_up": linear(2 * config.mlp_width, config.width),
            "mlp_down": linear(config.width, config.mlp_width),
        }

    embedding, head = linear(config.vocabulary, config.width), linear(config.vocabulary, config.width)
    params = {"embedding": embedding, "head": head, "norm": ones, "layers": [layer() for _ in range(config.layers)]}
    return {"bf16": params, "NVFP4": with_linears(params, jax.jit(jnvfp4.quantize))}


def with_head(params: Tree) -> Tree:
    """Quantizes the head, too."""
    return {**params, "head": jax.jit(jnvfp4.quantize)(params["head"])}


def decoded_models(quantized: Tree) -> Models:
    """Decodes the weights of a checkpoint, to serve the same values in bfloat16."""
    decode = jax.jit(lambda t: jnvfp4.dequantize(t, jnp.bfloat16))
    return {"bf16": with_linears(quantized, lambda w: decode(w) if is_quantized(w) else w), "NVFP4": quantized}


def calibrated(quantized: Tree, folder: Path, layers: int) -> Tree:
    """Puts the amaxes of activations that a checkpoint stores beside its weights."""
    amaxes = input_amaxes(open_checkpoint(folder), layers)
    with_amaxes = [
        {name: Calibrated(w, amax[name]) if name in amax else w for name, w in layer.items()}
        for layer, amax in zip(quantized["layers"], amaxes, strict=True)
    ]
    return {**quantized, "layers": with_amaxes}


def load(folder: Path) -> Tree:
    """Loads a converted checkpoint; what it has in more than 16 bits becomes bfloat16."""

    def narrow(w: Any) -> Any:
        return w if is_quantized(w) else jnp.asarray(w, jnp.bfloat16)

    params = from_hugging_face(open_checkpoint(folder), read_config(folder).tied)
    if not any(map(is_quantized, params["layers"].values())):
        raise ValueError(f"{folder} has no weights in NVFP4: convert it first, jnvfp4 convert {folder} NEW_FOLDER")
    return unstack(jax.tree.map(narrow, params, is_leaf=is_quantized))


def make_models(args: argparse.Namespace) -> tuple[Config, Models]:
    """Returns the models that the arguments ask for, and their sizes."""
    if args.checkpoint:
        return args.config, decoded_models(load(args.checkpoint))
    if args.preset == "llama-8b":
        return args.config, random_models(args.config, args.seed)
    paths = folders(args)
    params, _ = make_checkpoints(args.config, args.seed, **paths, options=ConvertOptions(weight_only=True))
    return args.config, {"bf16": unstack(params), "NVFP4": load(paths["nvfp4"])}


# Memory


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # of shapes, too


def weight_bytes(params: Tree) -> dict[str, int]:
    """Counts the bytes of the linear layers in the blocks, which are quantized, and of all weights."""
    linear = sum(nbytes(w) for layer in params["layers"] for w in layer.values() if w.ndim == 2)
    return {"linear": linear, "all": nbytes(params)}


def bytes_per_token(config: Config, quantized: bool) -> int:
    return config.layers * nbytes(jax.eval_shape(lambda: empty_cache(config, 1, CHUNK, quantized))) // CHUNK


def memory(config: Config, models: Models, gib: float) -> dict[str, Any]:
    """Says what weights and a token in the cache take, and how many tokens fit beside the weights into some GiB."""
    weights = {name: weight_bytes(params) for name, params in models.items()}
    cache = {name: bytes_per_token(config, name == "nvfp4") for name in ("bf16", "nvfp4")}
    tokens = {
        f"{name} weights, {kv} cache": max(0, int((gib * 2**30 - weights[name]["all"]) // cache[kv]))
        for name, kv in (("bf16", "bf16"), ("NVFP4", "bf16"), ("NVFP4", "nvfp4"))
    }
    return {
        "weight_bytes": weights,
        "weight_ratio": {part: weights["NVFP4"][part] / weights["bf16"][part] for part in ("linear", "all")},
        "cache_bytes_per_token": cache,
        "cache_ratio": cache["nvfp4"] / cache["bf16"],
        "gib": gib,
        "tokens_that_fit": tokens,
    }


def print_memory(found: dict[str, Any]) -> None:
    weights, ratio, cache = found["weight_bytes"], found["weight_ratio"], found["cache_bytes_per_token"]
    for part, title in (("linear", "linear layers of the blocks"), ("all", "all weights, embedding in bf16")):
        sizes = ", ".join(f"{weights[name][part] / 1e6:.1f} MB {name}" for name in weights)
        print(f"{title}: {sizes} ({ratio[part]:.3f})")
    print(f"a token in the cache: {cache['bf16']} bytes bf16, {cache['nvfp4']} NVFP4 ({found['cache_ratio']:.3f})")
    fits = ", ".join(f"{count:,} ({name})" for name, count in found["tokens_that_fit"].items())
    print(f"tokens that fit into {found['gib']:g} GiB with the weights: {fits}")


# Speed


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def random_cache(config: Config, batch: int, length: int, capacity: int, quantized: bool, key: Array) -> KVCache:
    """Makes the cache of a layer after ``length`` random tokens of each sequence."""
    empty = empty_cache(config, batch, capacity, quantized)
    shape = (batch, length, config.kv_heads, config.head_dim)
    rows = (jax.random.normal(part, shape, jnp.bfloat16) for part in jax.random.split(key))
    return KVCache(*(put_prompts(kept, new) for kept, new in zip(empty[:2], rows, strict=True)))


def measure(
    params: Tree, variant: Variant, config: Config, batch: int, length: int, new: int, capacity: int
) -> dict[str, float]:
    """Times a compiled program that generates ``new`` tokens after ``length`` others, the median of several runs."""
    linear, positions = variant.linear, jnp.full(batch, length, jnp.int32)
    keys = jax.random.split(jax.random.key(0), config.layers)
    caches = [random_cache(config, batch, length, capacity, variant.quantized_cache, key) for key in keys]
    check_room(caches, [length], new)
    token = jnp.zeros(batch, jnp.int32)
    begin = time.perf_counter()
    program = generate.lower(params, token, caches, positions, new, config, linear).compile()
    compile_seconds = time.perf_counter() - begin
    cache_bytes, needed = nbytes(caches), program.memory_analysis()
    times = []
    for _ in range(1 + RUNS):  # each overwrites the tokens that the one before appended
        begin = time.perf_counter()
        tokens, caches, _ = program(params, token, caches, positions)
        jax.block_until_ready((tokens, caches))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    return {
        "tokens_per_second": batch * new / seconds,
        "milliseconds_per_step": 1e3 * seconds / new,
        "compile_seconds": compile_seconds,
        "weight_bytes": nbytes(params),
        "cache_bytes": cache_bytes,
        "temporary_bytes": needed.temp_size_in_bytes if needed else 0,
    }


def compare_speed(
    models: Models, compared: dict[str, Variant], config: Config, args: argparse.Namespace, prompt: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Measures and prints tokens per second of each variant after so many tokens, by the number of sequences."""
    width = max(map(len, compared)) + 12
    capacity = args.capacity or prompt + args.new
    print(f"\ntokens per second (times bf16), {args.new} new tokens after {prompt}")
    print(f"{'batch':>8}" + "".join(f"{name:>{width}}" for name in compared), flush=True)
    rows = {}
    for batch in args.batch:
        row = rows[str(batch)] = {
            name: measure(models[variant.weights], variant, config, batch, prompt, args.new, capacity)
            for name, variant in compared.items()
        }
        rate = row["bf16"]["tokens_per_second"]
        for found in row.values():
            found["times_bf16"] = found["tokens_per_second"] / rate
        cells = [f"{found['tokens_per_second']:.0f} ({found['times_bf16']:.2f})" for found in row.values()]
        print(f"{batch:>8}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)
    for name in compared:
        sizes = (
            f"{sum(found[part] for part in ('weight_bytes', 'cache_bytes', 'temporary_bytes')) / 1e6:.1f} MB"
            for found in (row[name] for row in rows.values())
        )
        print(f"memory of {name}, by batch: {', '.join(sizes)}")
    return rows


def draw(speeds: dict[str, dict[str, dict[str, dict[str, float]]]], path: Path) -> None:
    """Draws tokens per second over the tokens in the cache, a panel for each number of sequences."""
    matplotlib.use("Agg")
    prompts, batches = [int(prompt) for prompt in speeds], next(iter(speeds.values()))
    figure, panels = plt.subplots(
        1, len(batches), figsize=(5 * len(batches) + 1, 4), layout="constrained", squeeze=False
    )
    for panel, batch in zip(panels[0], batches, strict=True):
        for name in batches[batch]:
            rates = [by_batch[batch][name]["tokens_per_second"] for by_batch in speeds.values()]
            panel.plot(prompts, rates, marker="o", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(prompts, [f"{prompt:,}" for prompt in prompts])
        panel.set_ylim(bottom=0)
        panel.set(title=f"{batch} sequences", xlabel="tokens of each in the cache", ylabel="tokens per second")
        panel.legend()
    figure.savefig(path, dpi=110)


# Text


def write(
    params: Tree, variant: Variant, config: Config, prompts: Sequence[np.ndarray], new: int, capacity: int
) -> list[str]:
    """Continues prompts of bytes up to the end of a line, by at most ``new`` bytes, and returns these as texts."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    linear, stop = variant.linear, ord("\n")
    token, caches = prefill(
        params, jnp.asarray(tokens), jnp.asarray(lengths), capacity, config, linear, variant.quantized_cache
    )
    check_room(caches, lengths, new - 1)
    others, _, _ = generate(params, token, caches, jnp.asarray(lengths), new - 1, config, linear, stop)
    written = np.concatenate([token[:, None], others], axis=1).astype(np.uint8)
    return [row.tobytes().split(b"\n")[0].decode(errors="replace") for row in written]


def perplexity(params: Tree, variant: Variant, config: Config, batch: np.ndarray) -> float:
    tokens = jnp.asarray(batch, jnp.int32)
    return math.exp(forced_loss(params, tokens, config, variant.linear, variant.quantized_cache))


def compare_text(models: Models, compared: dict[str, Variant], config: Config, args: argparse.Namespace) -> Tree:
    """Prints the perplexity of each variant on the validation text, and how it continues beginnings of that text."""
    _, text = stdlib_text()
    batches = val_batches(text, CONFIG)
    batch = batches.reshape(-1, batches.shape[-1])
    longest = max(args.prompt)
    prompts = [text[: max(1, longest // part)] for part in (1, 2, 4)]
    texts = ", ".join(repr(bytes(prompt).decode(errors="replace")) for prompt in prompts)
    print(f"\nperplexity, and the rest of the line after {texts}")
    found = {}
    for name, variant in compared.items():
        params = models[variant.weights]
        row = found[name] = {
            "perplexity": perplexity(params, variant, config, batch),
            "text": write(params, variant, config, prompts, args.new, args.capacity or longest + args.new),
        }
        print(f"{name:>12}{row['perplexity']:10.4f}  {row['text']}", flush=True)
    return found


# Command line


def folders(args: argparse.Namespace) -> dict[str, Path]:
    """Returns the folders of the two checkpoints of the small model."""
    return {name: args.out / name for name in ("bf16", "nvfp4")}


def parse_args() -> argparse.Namespace:
    default = "llama-8b" if jax.default_backend() == "gpu" else "small"
    parser = argparse.ArgumentParser(description="Serves a Llama from NVFP4 weights and compares it with bfloat16.")
    parser.add_argument("--preset", choices=BATCHES, default=default, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="folder of a converted Llama, to serve instead of the preset")
    parser.add_argument("--batch", type=step_count, nargs="+", help="numbers of sequences (default: by the preset)")
    parser.add_argument("--prompt", type=step_count, nargs="+", default=[32], help="tokens of a prompt (default: 32)")
    parser.add_argument("--new", type=step_count, default=64, help="tokens to generate (default: %(default)s)")
    text = "tokens of a sequence that the cache has room for (default: --prompt and --new)"
    parser.add_argument("--capacity", type=step_count, help=text)
    parser.add_argument("--kv", choices=("bf16", "nvfp4"), nargs="+", help="KV caches (default: both)")
    text = "the head of models with NVFP4 weights (default: %(default)s)"
    parser.add_argument("--head", choices=("bf16", "nvfp4"), default="bf16", help=text)
    text = "how W4A4 scales activations: per token, or by the checkpoint's input_scale (default: %(default)s)"
    parser.add_argument("--activations", choices=("tokens", "stored"), default="tokens", help=text)
    parser.add_argument("--memory", type=float, default=80.0, help="GiB for weights and cache (default: %(default)g)")
    parser.add_argument("--layers", type=step_count, help="number of layers, where no checkpoint has it")
    parser.add_argument("--steps", type=step_count, help=f"of training the small model (default: {CONFIG.steps})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and prompts")
    parser.add_argument("--out", type=Path, default=Path("out/serve"), help="folder for serve.json and checkpoints")
    args = parser.parse_args()
    args.batch = args.batch or BATCHES[args.preset]
    args.kv = args.kv or CACHES
    trains = args.preset == "small" and not args.checkpoint
    if args.steps and not trains:
        parser.error("--steps is for --preset small without --checkpoint, which alone trains")
    if args.activations == "stored" and not args.checkpoint:
        parser.error("--activations stored is for --checkpoint, which has the scales")
    if args.layers and args.checkpoint:
        parser.error("--layers is for presets: a checkpoint has its own")
    if not args.memory > 0:
        parser.error(f"--memory must be positive, got {args.memory:g}")
    for path in folders(args).values() if trains else ():
        if path.exists():
            parser.error(f"{path} exists already: remove it, name another --out, or pass --checkpoint {args.out}/nvfp4")
    try:
        args.config = read_config(args.checkpoint) if args.checkpoint else CONFIG if trains else LLAMA_8B
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--checkpoint {args.checkpoint} cannot be served: {error}")
    args.config = replace(args.config, layers=args.layers or args.config.layers)
    if "nvfp4" in args.kv and args.config.head_dim not in HEAD_SIZES:
        parser.error(f"--kv nvfp4 needs heads of 64 or 128 elements, got {args.config.head_dim}; pass --kv bf16")
    longest = max(args.prompt)
    if args.capacity and args.capacity < longest + args.new:
        parser.error(
            f"--capacity {args.capacity} has no room for {longest} tokens of a prompt and {args.new} new ones: "
            "make it larger, or --prompt or --new smaller"
        )
    if trains:
        args.config = replace(args.config, steps=args.steps or CONFIG.steps)
    return args


def main() -> None:
    args = parse_args()
    begin = time.perf_counter()
    try:
        config, models = make_models(args)
        if args.head == "nvfp4":
            models["NVFP4"] = with_head(models["NVFP4"])
        served = dict(models)
        if args.activations == "stored":
            served["NVFP4, calibrated"] = calibrated(models["NVFP4"], args.checkpoint, config.layers)
    except (CheckpointError, ValueError) as error:
        raise SystemExit(f"serve.py: --checkpoint {args.checkpoint} cannot be served: {error}") from None
    jax.block_until_ready(served)
    device = jax.devices()[0].device_kind
    print(f"{config.layers} layers, width {config.width}, vocabulary {config.vocabulary}, on {device}")
    print(f"weights were made in {time.perf_counter() - begin:.1f} s")
    compared = variants(args.kv, args.activations)
    results: dict[str, Any] = {
        "model": str(args.checkpoint or args.preset),
        "layers": config.layers,
        "width": config.width,
        "vocabulary": config.vocabulary,
        "activations": args.activations,
        "head": args.head,
        "new": args.new,
        "device": device,
        "versions": {"jax": jax.__version__, "jnvfp4": jnvfp4.__version__},
        "memory": memory(config, models, args.memory),
    }
    print_memory(results["memory"])
    if config.vocabulary == BYTES:
        results["text"] = compare_text(served, compared, config, args)
    speeds = {str(prompt): compare_speed(served, compared, config, args, prompt) for prompt in sorted(args.prompt)}
    results["prompts"] = speeds
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "serve.json").write_text(json.dumps(results, indent=2) + "\n")
    if len(speeds) > 1:
        draw(speeds, args.out / "serve.png")
    print(f"\nwrote {args.out}/serve.json in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
