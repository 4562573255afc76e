"""The Llama of these examples under its Hugging Face names, to save checkpoints and to load them."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jnvfp4 import NVFP4Tensor
from jnvfp4.checkpoints import Checkpoint, NameRule, from_hf, to_hf
from lm.config import Config, RotaryScaling
from lm.model import Tree, init_params

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
# Llama 2's files may have the angles of rotary positions, which follow from the config.
ANGLES = NameRule(f"{LAYER}.self_attn.rotary_emb.inv_freq", "layers/angles", stack=("layer",))
# How a config calls the fields of a RotaryScaling.
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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
        "tie_word_embeddings": config.tied,
        "torch_dtype": "bfloat16",
        **({"rope_scaling": _declared_scaling(config.rotary_scaling)} if config.rotary_scaling else {}),
    }


def _declared_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    return {"rope_type": "llama3", **dict(zip(SCALING, scaling, strict=True))}


def read_config(folder: Path) -> Config:
    """Reads the sizes of a Llama from the config.json of its checkpoint; those of a training are 1.

    Raises:
      ValueError: the model is none that these examples compute; the message names the entry and what is accepted.
      OSError: there is no config.json.
    """
    file = folder / "config.json"
    declared = _object(file)
    positions = _merged_positions(declared, file)
    kind = positions.get("rope_type", positions.get("type", "default"))
    for name, found, wanted in (
        ("model_type", declared.get("model_type"), ("llama",)),
        ("hidden_act", declared.get("hidden_act", "silu"), ("silu",)),
        ("attention_bias", declared.get("attention_bias") or False, (False,)),
        ("mlp_bias", declared.get("mlp_bias") or False, (False,)),
        ("rope_type", kind, ("default", "llama3")),
        ("partial_rotary_factor", positions.get("partial_rotary_factor") or 1, (1,)),
    ):
        if found not in wanted:
            raise ValueError(f"{file}: {name} must be {' or '.join(map(repr, wanted))}, got {found!r}")

    def count(name: str, default: int | None = None) -> int:
        value = default if declared.get(name) is None else declared[name]
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {name} must be a whole number, 1 or more, got {value!r}")
        return value

    def number(of: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = default if of.get(name) is None else of[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{file}: {name} must be a number above 0, got {value!r}")
        return float(value)

    config = Config(
        layers=count("num_hidden_layers"),
        width=count("hidden_size"),
        heads=count("num_attention_heads"),
        kv_heads=count("num_key_value_heads", declared.get("num_attention_heads")),
        mlp_width=count("intermediate_size"),
        seq=count("max_position_embeddings"),
        batch=1,
        steps=1,
        peak_lr=1.0,
        val_batches=1,
        architecture="llama",
        vocabulary=count("vocab_size"),
        rotary_base=number(positions, "rope_theta", 10_000.0),
        norm_epsilon=number(declared, "rms_norm_eps", 1e-6),
        rotary_scaling=RotaryScaling(*(number(positions, name) for name in SCALING)) if kind == "llama3" else None,
        head_size=count("head_dim") if declared.get("head_dim") is not None else None,
        tied=bool(declared.get("tie_word_embeddings")),
    )
    _check_sizes(config, file)
    return replace(config, head_size=None) if config.head_dim * config.heads == config.width else config


def _object(file: Path) -> dict[str, Any]:
    try:
        declared = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON in UTF-8: {error}") from None
    if not isinstance(declared, dict):
        raise ValueError(f"{file} must be a JSON object, got {declared!r:.100}")
    return declared


def _merged_positions(declared: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns what a config has about rotary positions: in entries of its own, or in one of two objects."""
    found = {name: declared[name] for name in ("rope_theta", "partial_rotary_factor") if name in declared}
    for name in ("rope_parameters", "rope_scaling"):
        part = declared.get(name) or {}
        if not isinstance(part, dict):
            raise ValueError(f"{file}: {name} must be an object or null, got {part!r:.100}")
        found |= part
    return found


def _check_sizes(config: Config, file: Path) -> None:
    """Raises if sizes do not fit each other."""
    if config.head_size is None and config.width % config.heads:
        raise ValueError(
            f"{file}: hidden_size must be a multiple of num_attention_heads, or head_dim be given, got {config.width} "
            f"and {config.heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim must be even, got {config.head_dim}")
    if config.heads % config.kv_heads:
        raise ValueError(
            f"{file}: num_key_value_heads must divide num_attention_heads, {config.heads}, got {config.kv_heads}"
        )
    if (scaling := config.rotary_scaling) and not scaling.low < scaling.high:
        raise ValueError(
            f"{file}: high_freq_factor must be above low_freq_factor, {scaling.low:g}, got {scaling.high:g}"
        )


def check_shapes(checkpoint: Checkpoint, config: Config, folder: Path) -> None:
    """Checks, without reading them, that a checkpoint has the tensors of its config.

    Raises:
      ValueError: one is missing, has another shape, or is none that these examples compute with.
    """

    def tensors(key: Array) -> Any:
        return to_hugging_face(init_params(key, config), config)

    wanted = {name: w.shape for name, w in jax.eval_shape(tensors, jax.random.key(0)).items()}
    found = {name: checkpoint.shape(name) for name in checkpoint if ANGLES.fields_of_name(name) is None}
    if config.tied:
        wanted["lm_head.weight"] = found.setdefault("lm_head.weight", ())  # not read, if there is one
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            accepted = (
                f"must have the shape {wanted[name]}" if name in wanted else "is not computed with, must be absent"
            )
            raise ValueError(f"{folder}: {name} {accepted} by config.json, got {found.get(name)}")


def to_hugging_face(params: Tree, config: Config) -> dict[str, NVFP4Tensor | Array | np.ndarray]:
    """Splits the weights of a Llama, which must be arrays, into the tensors of a checkpoint."""
    layers = dict(params["layers"])
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers["q"], layers["k"], layers["v"] = jnp.split(layers.pop("qkv"), [queries, queries + keys], axis=1)
    layers["gate"], layers["up"] = jnp.split(layers.pop("mlp_up"), 2, axis=1)
    return to_hf({**params, "layers": layers}, RULES)


def from_hugging_face(tensors: Mapping[str, NVFP4Tensor | Array | np.ndarray], tied: bool = False) -> Tree:
    """Makes the weights of a Llama from the tensors of a checkpoint, quantized ones included.

    Args:
      tensors: by name.
      tied: whether the embedding is the head; that of the checkpoint is not used, if there is one.
    """
    rules = [rule for rule in RULES if rule.path != "head" or not tied or rule.name in tensors]
    rules += [ANGLES] * any(ANGLES.fields_of_name(name) is not None for name in tensors)
    tree = from_hf(tensors, rules)
    tree["layers"].pop("angles", None)
    return {**tree, "layers": _joined(tree["layers"])} | ({"head": tree["embedding"]} if tied else {})


def layer_from_hugging_face(tensors: Mapping[str, NVFP4Tensor | Array | np.ndarray], layer: int) -> Tree:
    """Makes the weights of one layer, without the axis of layers, and reads no others."""
    own = f"model.layers.{layer}."
    names = [name for name in tensors if name.startswith(own) and ANGLES.fields_of_name(name) is None]
    as_first = {name.replace(own, "model.layers.0.", 1): tensors[name] for name in names}
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
