"""The Llama of these examples under its Hugging Face names, to save checkpoints and to load them."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jnvfp4 import NVFP4Tensor
from jnvfp4.checkpoints import NameRule, from_hf, to_hf
from lm.config import Config
from lm.model import NORM_EPSILON, ROTARY_BASE, Tree

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
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


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
    layers = tree["layers"]
    layers["qkv"] = join_rows(*(layers.pop(part) for part in "qkv"))
    layers["mlp_up"] = join_rows(layers.pop("gate"), layers.pop("up"))
    return tree


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
