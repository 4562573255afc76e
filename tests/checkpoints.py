"""Small checkpoints that several test modules share, and what becomes of a bad one."""

import json
import os
import re
import struct
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jnvfp4.checkpoints._files.safetensors import TAGS, Planned, writing
from jnvfp4.cli import main

GOLDEN = Path(__file__).parent / "data" / "checkpoints"
TE_MODELOPT = GOLDEN / "llama" / "te_modelopt"
INDEX = "model.safetensors.index.json"
GATE, UP, DOWN = (f"model.layers.0.mlp.{role}_proj.weight" for role in ("gate", "up", "down"))
COMMAND = (sys.executable, "-c", "import sys; from jnvfp4.cli import main; sys.exit(main())")


def environment() -> dict[str, str]:
    """For a process that converts: the platform it uses, and not the eight devices of the tests."""
    return {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def draw_nothing(monkeypatch) -> None:
    """Reports have no picture from now on, which takes long."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def write(path, tensors, metadata=None):
    """One file; tensors are (safetensors dtype, array) by name."""
    plan = [Planned(n, t, np.shape(a)) for n, (t, a) in tensors.items()]
    with writing(path, plan, metadata or {"format": "pt"}) as out:
        for name, (_, a) in tensors.items():
            out.put(name, np.asarray(a))


def write_model(directory, shards, config=None) -> Path:
    """A directory of files, of which each is tensors by name; an index where they are several."""
    directory.mkdir(parents=True)
    for name, tensors in shards.items():
        write(directory / name, tensors)
    config = {"model_type": "llama", "num_hidden_layers": 1} if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) > 1:
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def model_of(directory, tensors, config=None) -> Path:
    """A model in one file; tensors are arrays, or (safetensors dtype, array), by name."""
    pairs = {name: t if isinstance(t, tuple) else (TAGS[t.dtype], t) for name, t in tensors.items()}
    return write_model(directory, {"model.safetensors": pairs}, config)


def weight(rows, k, seed=0):
    rng = np.random.default_rng(seed)
    return "BF16", rng.normal(size=(rows, k)).astype(np.float32).astype(ml_dtypes.bfloat16)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)


def same(a, b) -> None:
    """Trees of the same structure with the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def files_of(directory) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def header_of(data: bytes) -> tuple[dict, bytes]:
    """The header of a file, and its data."""
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(text: str | bytes, data: bytes) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(body)) + body + data


def damaged_header(path, change):
    """`change` alters the header in place, or returns the text to put there."""
    header, data = header_of(path.read_bytes())
    text = change(header)
    path.write_bytes(with_header(json.dumps(header) if text is None else text, data))


def refused(directory, tmp_path, text, code, *arguments, capsys, out=None) -> str:
    """The command ends with this code and a line that matches `text`, and leaves no output."""
    out = tmp_path / "out" if out is None else out
    capsys.readouterr()
    assert main(["convert", str(directory), str(out), *arguments]) == code
    error = capsys.readouterr().err
    line, *hint = error.rstrip("\n").split("\n")
    assert line.startswith("error: ")
    assert not hint or (len(hint) == 1 and hint[0].startswith("hint: ")), error
    assert re.search(text, error), error
    assert not out.is_dir() or not list(out.iterdir())
    return error


# ---------------------------------------------------------------- model families
H, KV, WIDE, EXPERTS = 512, 256, 768, 2  # hidden size, of keys and values, of an MLP


def _roles(parent: str, roles: str, **shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Weights of projections by name; a role without a shape is a norm."""
    return {f"{parent}.{role}.weight": shapes.get(role, (H,)) for role in roles.split()}


def _attention(parent: str, end: str = "_proj") -> dict[str, tuple[int, ...]]:
    return {f"{parent}.{r}{end}.weight": (KV if r in "kv" else H, H) for r in "qkvo"}


def _mlp(parent: str, roles: str = "gate up down", end: str = "_proj") -> dict[str, tuple[int, ...]]:
    down = roles.split()[-1]
    return {f"{parent}.{r}{end}.weight": (H, WIDE) if r == down else (WIDE, H) for r in roles.split()}


def _experts(parent: str, roles: str = "gate up down", shared: str = "") -> dict[str, tuple[int, ...]]:
    out = {f"{parent}.gate.weight": (EXPERTS, H), **(_mlp(f"{parent}.{shared}", roles) if shared else {})}
    for e in range(EXPERTS):
        out |= _mlp(f"{parent}.experts.{e}", roles)
    return out


def _ends(model: str = "model", head: str = "lm_head", table: str = "embed_tokens") -> dict[str, tuple[int, ...]]:
    dot = f"{model}." if model else ""
    return {f"{dot}{table}.weight": (64, H), f"{dot}norm.weight": (H,), **({f"{head}.weight": (64, H)} if head else {})}


_L = "model.layers."
_NORMS = "input_layernorm post_attention_layernorm"
_MLA = {
    **dict(q_a_proj=(KV, H), q_b_proj=(H, KV), kv_a_proj_with_mqa=(KV + 16, H), kv_b_proj=(H + 384, KV), o_proj=(H, H)),
    **dict(q_a_layernorm=(KV,), kv_a_layernorm=(KV,)),
}
_LINEAR = dict(in_proj_qkv=(H + KV, H), in_proj_z=(H, H), in_proj_b=(16, H), in_proj_a=(16, H), out_proj=(H, H))
_CONV = (H, 1, 4)
# By family: the config, and the shapes of the tensors as transformers stores them (those of Mistral as Mistral does).
FAMILIES: dict[str, tuple[dict, dict[str, tuple[int, ...]]]] = {
    "Llama": (
        {"model_type": "llama"},
        {**_ends(), **_roles(f"{_L}0", _NORMS), **_attention(f"{_L}0.self_attn"), **_mlp(f"{_L}0.mlp")},
    ),
    "Qwen3": (
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {
            **_ends(head=""),
            **_roles(f"{_L}0.self_attn", "q_norm k_norm", q_norm=(64,), k_norm=(64,)),
            **_attention(f"{_L}0.self_attn"),
            **_mlp(f"{_L}0.mlp"),
        },
    ),
    "Qwen3-MoE": ({"model_type": "qwen3_moe"}, {**_ends(), **_attention(f"{_L}0.self_attn"), **_experts(f"{_L}0.mlp")}),
    "Qwen3.5": (
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 2}},
        {
            **_ends("model.language_model"),
            **_roles("model.language_model.layers.0.linear_attn", " ".join([*_LINEAR, "norm"]), **_LINEAR),
            "model.language_model.layers.0.linear_attn.conv1d.weight": _CONV,
            "model.language_model.layers.0.linear_attn.A_log": (16,),
            **_mlp("model.language_model.layers.0.mlp"),
            **_attention("model.language_model.layers.1.self_attn"),
            **_mlp("model.language_model.layers.1.mlp"),
            "mtp.fc.weight": (H, 2 * H),
            **_attention("mtp.layers.0.self_attn"),
            "model.visual.blocks.0.attn.qkv.weight": (3 * H, H),
        },
    ),
    "GLM-4.5": (
        {"model_type": "glm4_moe", "num_hidden_layers": 2},
        {
            **_ends(),
            **_attention(f"{_L}0.self_attn"),
            **_mlp(f"{_L}0.mlp"),
            **_attention(f"{_L}1.self_attn"),
            **_experts(f"{_L}1.mlp", shared="shared_experts"),
            f"{_L}1.mlp.gate.e_score_correction_bias": (EXPERTS,),
            f"{_L}2.eh_proj.weight": (H, 2 * H),
            **_attention(f"{_L}2.self_attn"),
            f"{_L}2.shared_head.head.weight": (64, H),
        },
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 2},
        {
            **_ends(),
            **_roles(f"{_L}0.self_attn", " ".join(_MLA), **_MLA),
            **_mlp(f"{_L}0.mlp"),
            **_roles(f"{_L}1.self_attn", " ".join(_MLA), **_MLA),
            **_experts(f"{_L}1.mlp", shared="shared_experts"),
        },
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "hidden_size": H, "intermediate_size": WIDE, "num_local_experts": EXPERTS},
        {
            **_ends(),
            **_attention(f"{_L}0.self_attn"),
            f"{_L}0.self_attn.sinks": (8,),
            f"{_L}0.mlp.router.weight": (EXPERTS, H),
            f"{_L}0.mlp.experts.gate_up_proj": (EXPERTS, H, 2 * WIDE),
            f"{_L}0.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDE),
            f"{_L}0.mlp.experts.down_proj": (EXPERTS, WIDE, H),
            f"{_L}0.mlp.experts.down_proj_bias": (EXPERTS, H),
        },
    ),
    "Nemotron-H": (
        {"model_type": "nemotron_h", "num_hidden_layers": 4},
        {
            **_ends("backbone", table="embeddings"),
            "backbone.layers.0.mixer.in_proj.weight": (2 * H, H),
            "backbone.layers.0.mixer.out_proj.weight": (H, H),
            "backbone.layers.0.mixer.conv1d.weight": _CONV,
            **_mlp("backbone.layers.1.mixer", "up down"),
            **_attention("backbone.layers.2.mixer"),
            **_experts("backbone.layers.3.mixer", "up down", shared="shared_experts"),
        },
    ),
    "Mistral": (
        {"model_type": "mistral"},
        {
            **_ends("", head="output", table="tok_embeddings"),
            **{n.replace("attention.", "attention.w"): s for n, s in _attention("layers.0.attention", "").items()},
            **_mlp("layers.0.feed_forward", "w1 w3 w2", ""),
            **_roles("layers.0", "attention_norm ffn_norm"),
        },
    ),
    "Gemma-3": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 1}},
        {
            **_ends("language_model.model", head=""),
            **_attention("language_model.model.layers.0.self_attn"),
            **_roles("language_model.model.layers.0", "pre_feedforward_layernorm post_feedforward_layernorm"),
            **_mlp("language_model.model.layers.0.mlp"),
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": (WIDE, H),
            "vision_tower.vision_model.encoder.layers.0.mlp.fc2.weight": (H, WIDE),
            "multi_modal_projector.mm_input_projection_weight": (H, H),
        },
    ),
}


def family(directory, name: str) -> Path:
    """A model of a family with random weights."""
    config, shapes = FAMILIES[name]
    rng = np.random.default_rng(sorted(FAMILIES).index(name))
    tensors = {n: rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16) for n, shape in shapes.items()}
    return model_of(directory, tensors, {"num_hidden_layers": 1, **config})
