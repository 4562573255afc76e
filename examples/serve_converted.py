"""Converts a Llama from Hugging Face files to NVFP4 and runs it in JAX, beside the model in bfloat16.

    pip install ".[examples]"
    python examples/serve_converted.py
    python examples/serve_converted.py --format compressed-tensors --recipe 4over6 --out out/4over6
    python examples/serve_converted.py --format te --recipe row-scaled --steps 1000 --out out/row_scaled

So that its perplexity means something, a small Llama is trained for a moment, on the bytes of the running Python's
standard library. It is saved as Hugging Face would save it, in the folder ``bf16`` of ``--out``, and converted to the
folder ``nvfp4``, from which it is loaded. Both run by the same code: a linear layer is ``x @ w.T`` where the weight is
an array, and ``jnvfp4.matmul_nt`` where it is an NVFP4Tensor. Activations are in bfloat16.

Expect half a minute on two CPU cores, a perplexity of about 6 per byte, and one that is about one percent higher in
NVFP4.
"""

import argparse
import json
import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm  # type: ignore[import-untyped]

import jnvfp4
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, open_checkpoint, save_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BATCH, SEQ, PEAK_LR = 16, 64, 3e-3
HELD_OUT_BATCHES = 16

Config = Mapping[str, Any]
Params = dict[str, Any]  # arrays and NVFP4Tensors, by their Hugging Face names


# Data


def stdlib_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules: of the first 95% of the files, and of the rest."""
    texts = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    split = len(texts) * 95 // 100
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in (texts[:split], texts[split:]))
    return train, held_out


def batch_at(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[batch, SEQ + 1] bytes: inputs and, one to the right, targets."""
    return text[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)


# Model


def init_params(rng: np.random.Generator, c: Config) -> Params:
    """A Llama's weights, float32."""
    d, h, f = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * h, c["num_key_value_heads"] * h
    layer = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (c["vocab_size"], d),
        "model.norm": (d,),
        "lm_head": (c["vocab_size"], d),
    }
    shapes |= {f"model.layers.{i}.{name}": s for i in range(c["num_hidden_layers"]) for name, s in layer.items()}
    std = d**-0.5
    return {
        f"{name}.weight": jnp.asarray(rng.normal(0, std, s) if len(s) == 2 else np.ones(s), jnp.float32)
        for name, s in shapes.items()
    }


def linear(x: Array, w: Array | jnvfp4.NVFP4Tensor) -> Array:
    """x w^T for x [..., K] and w [N, K], in the dtype of x."""
    if isinstance(w, jnvfp4.NVFP4Tensor):
        return jnvfp4.matmul_nt(x, w, out_dtype=x.dtype)
    return x @ w.astype(x.dtype).T


def rms_norm(x: Array, gain: Array, c: Config) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + c["rms_norm_eps"])
    return (x32 * gain).astype(x.dtype)


def rotate(x: Array, c: Config) -> Array:
    """Rotary position embedding of x [batch, seq, heads, head_dim]; an element's partner is half a head away."""
    half = c["head_dim"] // 2
    angle = jnp.arange(x.shape[1])[:, None] * c["rope_theta"] ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def logits(params: Params, tokens: Array, c: Config) -> Array:
    """[batch, seq, vocabulary], float32."""
    heads = (*tokens.shape, -1, c["head_dim"])
    x = params["model.embed_tokens.weight"][tokens].astype(jnp.bfloat16)
    for i in range(c["num_hidden_layers"]):
        layer = {n.removeprefix(p): w for n, w in params.items() if n.startswith(p := f"model.layers.{i}.")}
        y = rms_norm(x, layer["input_layernorm.weight"], c)
        q, k, v = (linear(y, layer[f"self_attn.{p}_proj.weight"]).reshape(heads) for p in "qkv")
        y = jax.nn.dot_product_attention(rotate(q, c), rotate(k, c), v, is_causal=True)
        x = x + linear(y.reshape(*tokens.shape, -1), layer["self_attn.o_proj.weight"])
        y = rms_norm(x, layer["post_attention_layernorm.weight"], c)
        y = jax.nn.silu(linear(y, layer["mlp.gate_proj.weight"])) * linear(y, layer["mlp.up_proj.weight"])
        x = x + linear(y, layer["mlp.down_proj.weight"])
    return linear(rms_norm(x, params["model.norm.weight"], c), params["lm_head.weight"]).astype(jnp.float32)


def loss_of(found: Array, targets: Array) -> Array:
    """Mean cross entropy, in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(found), targets[..., None], axis=-1))


# Training


def train(params: Params, text: np.ndarray, steps: int, rng: np.random.Generator) -> Params:
    """Adam, with a cosine from the peak learning rate to zero."""

    @jax.jit
    def step_of(params: Params, moments: tuple[Params, Params], batch: Array, step: Array) -> tuple[Any, Any, Array]:
        loss, grads = jax.value_and_grad(lambda p: loss_of(logits(p, batch[:, :-1], CONFIG), batch[:, 1:]))(params)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, moments[1], grads)
        lr = PEAK_LR * (0.5 + 0.5 * jnp.cos(math.pi * step / steps))
        # Both moments begin at zero, and are divided by what of their weights has been there.
        scale = lr / (1 - 0.9 ** (step + 1)), 1 / (1 - 0.95 ** (step + 1))
        params = jax.tree.map(lambda p, m, s: p - scale[0] * m / (jnp.sqrt(scale[1] * s) + 1e-8), params, mean, square)
        return params, (mean, square), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = (zeros, zeros)
    progress = tqdm(range(steps), unit="step", mininterval=0.5)
    for step in progress:
        batch = batch_at(text, rng.integers(len(text) - SEQ, size=BATCH))
        params, moments, loss = step_of(params, moments, batch, jnp.float32(step))
        if step % 20 == 0 or step == steps - 1:
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return params


# Comparison


def compare(models: Mapping[str, Params], text: np.ndarray) -> dict[str, dict[str, float]]:
    """Bytes, perplexity and how far the logits are from those of the first model, for every model."""
    starts = np.linspace(0, len(text) - SEQ - 1, HELD_OUT_BATCHES * BATCH).astype(int).reshape(-1, BATCH)
    batches = jnp.asarray(np.stack([batch_at(text, s) for s in starts]))
    run = jax.jit(lambda params, tokens: jax.lax.map(lambda t: logits(params, t, CONFIG), tokens))
    out: dict[str, dict[str, float]] = {}
    first: Array | None = None
    for name, params in models.items():
        found = run(params, batches[..., :-1])
        first = found if first is None else first
        out[name] = {
            "bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
            "perplexity": math.exp(loss_of(found, batches[..., 1:])),
            "logits_relative_error": float(jnp.linalg.norm(found - first) / jnp.linalg.norm(first)),
            "logits_largest_error": float(jnp.max(jnp.abs(found - first))),
        }
    return out


SPECS = {"nvfp4": jnvfp4.NVFP4, "4over6": jnvfp4.four_over_six(), "row-scaled": jnvfp4.ROW_SCALED}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Converts a small Llama to NVFP4 and compares it with bfloat16.")
    parser.add_argument("--format", choices=("modelopt", "compressed-tensors", "te"), default="modelopt")
    parser.add_argument("--recipe", choices=SPECS, default="nvfp4")
    parser.add_argument("--steps", type=int, default=400, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--out", type=Path, default=Path("out/serve_converted"), help="folder for both checkpoints")
    args = parser.parse_args()
    if args.recipe == "row-scaled" and args.format != "te":
        parser.error("--recipe row-scaled needs --format te, which has an amax for each row")
    return args


def main() -> None:
    args = parse_args()
    paths = {name: args.out / name for name in ("bf16", "nvfp4")}
    for path in paths.values():
        if path.exists():
            raise SystemExit(f"{path} exists already: remove it, or name another --out")

    text, held_out = stdlib_text()
    rng = np.random.default_rng(args.seed)
    trained = train(init_params(rng, CONFIG), text, args.steps, rng)
    params = {name: w.astype(jnp.bfloat16) for name, w in trained.items()}
    save_checkpoint(params, paths["bf16"], config=CONFIG)
    options = ConvertOptions(layout=args.format, spec=SPECS[args.recipe], weight_only=True)
    result = convert_checkpoint(paths["bf16"], paths["nvfp4"], options)
    print(f"{len(result.amaxes)} of {len(params)} tensors converted, from {paths['bf16']} to {paths['nvfp4']}")

    checkpoint = open_checkpoint(paths["nvfp4"])
    quantized = checkpoint.to_device(dict.fromkeys(checkpoint))
    found = compare({"bf16": params, "nvfp4": quantized}, held_out)
    print(f"\n{'':8}{'bytes':>12}{'perplexity':>12}{'logits: relative error':>26}{'largest error':>16}")
    for name, row in found.items():
        size, perplexity, relative, largest = row.values()
        print(f"{name:8}{size:12,}{perplexity:12.4f}{100 * relative:25.2f}%{largest:16.4f}")
    (args.out / "metrics.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
