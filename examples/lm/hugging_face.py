"""The Llama of these examples under its Hugging Face names, to save checkpoints and to load them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jnvfp4 import NVFP4Tensor
from jnvfp4.checkpoints import Checkpoint, NameRule, from_hf, to_hf
from lm.config import Config
from lm.model import Tree

LAYER = r"model.layers.{layer:\d+}"
RULES = [
    NameRule("model.embed_tokens.weight", "embedding"),
    NameRule("model.norm.weight", "norm"),
    NameRule("lm_head.weight", "head"),
    NameRule(f"{LAYER}.input_layernorm.weight", "layers/attention_norm", stack=("layer",)),
    NameRule(f"{LAYER}.self_attn.{{part:[qkv]}}_proj.weight", "layers/{part}", stack=("layer",)),
    NameRule(f"{LAYER}.self_attn.o_proj.weight", "layers/attention_out", stack=("layer",)),
    NameRule(f"{LAYER}.post_attention_layernorm.weight", "layers/mlp_norm", stack=("layer",)),
    NameRule(f"{LAYER}.mlp.{{part:gate|up}}_proj.weight", "layers/{part}", stack=("layer",)),
    NameRule(f"{LAYER}.mlp.down_proj.weight", "layers/mlp_down", stack=("layer",)),
]
# The projections that are joined here, by the weight in a layer that they become.
JOINED = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
    "attention_out": ("self_attn.o",),
    "mlp_up": ("mlp.gate", "mlp.up"),
    "mlp_down": ("mlp.down",),
}


def llama_config(config: Config) -> dict[str, Any]:
    """Returns the config.json of a model with the architecture "llama"."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def read_config(folder: Path) -> Config:
    """Reads the sizes of a Llama from the config.json of its checkpoint; those of a training are 1.

    Raises:
      ValueError: the model is none that these examples compute: other layers, scaled positions or tied embeddings.
      OSError: there is no config.json.
    """
    declared = json.loads((folder / "config.json").read_text())
    heads, width = declared["num_attention_heads"], declared["hidden_size"]
    positions = declared.get("rope_parameters") or {"rope_theta": declared.get("rope_theta", 10_000.0)}
    for name, found, wanted in (
        ("model_type", declared["model_type"], "llama"),
        ("hidden_act", declared.get("hidden_act", "silu"), "silu"),
        ("head_dim", declared.get("head_dim") or width // heads, width // heads),
        ("tie_word_embeddings", bool(declared.get("tie_word_embeddings")), False),
        ("attention_bias", bool(declared.get("attention_bias")), False),
        ("rope_scaling", declared.get("rope_scaling"), None),
        ("rope_type", positions.get("rope_type", "default"), "default"),
    ):
        if found != wanted:
            raise ValueError(f"{folder}/config.json: {name} must be {wanted!r}, got {found!r}")
    return Config(
        layers=declared["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=declared.get("num_key_value_heads", heads),
        mlp_width=declared["intermediate_size"],
        seq=declared["max_position_embeddings"],
        batch=1,
        steps=1,
        peak_lr=1.0,
        val_batches=1,
        architecture="llama",
        vocabulary=declared["vocab_size"],
        rotary_base=positions["rope_theta"],
        norm_epsilon=declared["rms_norm_eps"],
    )


def to_hugging_face(params: Tree, config: Config) -> dict[str, NVFP4Tensor | Array | np.ndarray]:
    """Splits the weights of a Llama, which must be arrays, into the tensors of a checkpoint."""
    layers = dict(params["layers"])
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers["q"], layers["k"], layers["v"] = jnp.split(layers.pop("qkv"), [queries, queries + keys], axis=1)
    layers["gate"], layers["up"] = jnp.split(layers.pop("mlp_up"), 2, axis=1)
    return to_hf({**params, "layers": layers}, RULES)


def from_hugging_face(tensors: Mapping[str, NVFP4Tensor | Array | np.ndarray]) -> Tree:
    """Makes the weights of a Llama from the tensors of a checkpoint, quantized ones included."""
    tree = from_hf(tensors, RULES)
    return {**tree, "layers": _joined(tree["layers"])}


def layer_from_hugging_face(tensors: Mapping[str, NVFP4Tensor | Array | np.ndarray], layer: int) -> Tree:
    """Makes the weights of one layer, without the axis of layers, and reads no others."""
    own = f"model.layers.{layer}."
    as_first = {name.replace(own, "model.layers.0.", 1): tensors[name] for name in tensors if name.startswith(own)}
    layers = _joined(from_hf(as_first, [rule for rule in RULES if rule.stack])["layers"])
    return jax.tree.map(lambda w: w[0], layers)


def _joined(layers: Tree) -> Tree:
    layers["qkv"] = join_rows(*(layers.pop(part) for part in "qkv"))
    layers["mlp_up"] = join_rows(layers.pop("gate"), layers.pop("up"))
    return layers


def input_amaxes(checkpoint: Checkpoint, layers: int) -> list[dict[str, Array]]:
    """Reads the amaxes that a checkpoint stores for activations, one for all weights that are joined here.

    Returns:
      for each layer float32 [], by the name of the weight in the layer.

    Raises:
      ValueError: one is missing, or those of one GEMM differ.
    """
    found = []
    for layer in range(layers):
        amaxes = {}
        for joined, modules in JOINED.items():
            names = [f"model.layers.{layer}.{module}_proj.weight" for module in modules]
            parts = [amax for name in names if (amax := checkpoint.input_amax(name)) is not None]
            if len(parts) < len(names):
                raise ValueError(f"{names[0]} has no stored scale of activations")
            if len({float(part) for part in parts}) > 1:  # of which engines take the largest or the smallest, by layout
                raise ValueError(f"{', '.join(names)} must have one scale of activations, got {parts}")
            amaxes[joined] = jnp.asarray(parts[0])
        found.append(amaxes)
    return found


def join_rows(*parts: Any) -> NVFP4Tensor | Array:
    """Joins weights [layers, N, K] along N, so that one GEMM multiplies by all of them.

    Args:
      parts: arrays, or NVFP4Tensors with one amax in common or with an amax for each row.

    Raises:
      ValueError: the NVFP4Tensors have different formats, or different amaxes that do not belong to rows.
    """
    first, *others = parts
    if not isinstance(first, NVFP4Tensor):
        return jnp.concatenate(parts, axis=1)
    data, scale = (jnp.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("data", "scale"))
    by_row = first.format.amax_scope == "row"
    for other in others:
        if other.format != first.format:
            raise ValueError(f"join_rows: parts must have the same format, got {first.format} and {other.format}")
        if not by_row and (other.amax != first.amax).any():
            raise ValueError(f"join_rows: parts must have the same amax, got {first.amax} and {other.amax}")
    amax = jnp.concatenate([part.amax for part in parts], axis=1) if by_row else first.amax
    return NVFP4Tensor(data, scale, amax, first.format)
