"""Checkpoints as they are published: NVFP4 beside FP8, AWQ's factors, scales of a KV cache; FP8 and MXFP4 as sources.

The fixtures have the names, dtypes and shapes that vLLM and transformers read and Model Optimizer and llm-compressor
write: see ``jnvfp4/checkpoints/_layouts/fp8.py``, ``Stored``, ``kv_scale`` and ``_convert/mxfp4.py``. The values are
those of a plain NumPy model.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import array, draw_nothing, files_of, model_of, write
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4 import NVFP4Tensor
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    VerificationError,
    convert_checkpoint,
    dequantize_checkpoint,
    diff,
    fix_checkpoint,
    inspect,
    lint,
    open_checkpoint,
    repack_checkpoint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._files.safetensors import TAGS, Planned, writing
from jnvfp4.checkpoints._files.source import CONFIG, HF_QUANT, open_source
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.cli import main

LAYER = "model.layers.0"
ATTENTION, EXPERT = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts.0.down_proj"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
N, K = 200, 144  # of FP8 weights: no multiple of a block


# ---------------------------------------------------------------- a plain model of both formats
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4_values(codes, scales, decode) -> np.ndarray:
    """q * (s * S_dec), the even element of a byte in its low half."""
    q = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:-1], -1)
    return q * np.repeat(scales.astype(np.float32) * np.float32(decode), 16, axis=-1)


def fp8_values(codes, scale) -> np.ndarray:
    scale = np.asarray(scale, np.float32)
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    if scale.shape == (2, 2):  # blocks
        scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:N, :K]
    elif scale.shape == (N,):
        scale = scale[:, None]
    return codes.astype(np.float32) * scale


# ---------------------------------------------------------------- fixtures
def nvfp4(layout: str, seed=0, n=32, k=64) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of an NVFP4 weight by suffix, and its values."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    scales = rng.uniform(1, 448, (n, k // 16)).astype(E4M3)
    decode = np.float32(2.0**-9)
    if layout == "modelopt":
        parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": decode, "input_scale": np.float32(0.25)}
    else:
        parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / decode[None],
                 "input_global_scale": np.float32([4])}  # fmt: skip
    return {name: np.asarray(x) for name, x in parts.items()}, nvfp4_values(codes, scales, decode)


POSITIVE = np.random.default_rng(5).uniform(0.001, 0.02, (N, 4)).astype(np.float32)
# By layout and granularity: the name, dtype and shape of the scale of an FP8 weight.
SCALES = {
    ("modelopt", "per tensor"): ("weight_scale", POSITIVE[0, 0]),
    ("modelopt", "per channel"): ("weight_scale", POSITIVE[:, 0]),
    ("modelopt", "128x128"): ("weight_scale", POSITIVE[:2, None, :2, None]),
    ("compressed-tensors", "per tensor"): ("weight_scale", POSITIVE[0, :1]),
    ("compressed-tensors", "per channel"): ("weight_scale", POSITIVE[:, :1].astype(BF16)),
    ("compressed-tensors", "128x128"): ("weight_scale", POSITIVE[:2, :2].astype(BF16)),
    ("modelopt", "128x128, as DeepSeek-V3"): ("weight_scale_inv", POSITIVE[:2, :2]),
}
ALGORITHMS = {"per tensor": "FP8", "per channel": "FP8_PER_CHANNEL_PER_TOKEN", "128x128": "FP8_PB_WO"}
STRATEGIES = {"per tensor": ("tensor", "tensor"), "per channel": ("channel", "token"), "128x128": ("block", "group")}


def configs(layout: str, granularity: str, dtype: str) -> tuple[dict, dict | None]:
    """config.json, and hf_quant_config.json of Model Optimizer (``convert_hf_quant_config_format``)."""
    config = {"model_type": "llama", "torch_dtype": dtype}
    if layout == "modelopt":
        layers = {f"{ATTENTION}.q_proj": {"quant_algo": ALGORITHMS.get(granularity, "fp8_pb_wo")},
                  EXPERT: {"quant_algo": "NVFP4_AWQ", "group_size": 16}}  # fmt: skip
        mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        numbers = {"num_bits": 8, "type": "float", "dynamic": False}
        groups = {
            "group_0": {"weights": numbers, "input_activations": numbers, "targets": [f"{ATTENTION}.q_proj"]},
            "group_1": {"weights": {**numbers, "num_bits": 4}, "input_activations": numbers, "targets": [EXPERT]},
        }
        config["quantization_config"] = {"quant_method": "modelopt", "config_groups": groups, "ignore": [], **mixed,
                                         "kv_cache_scheme": numbers}  # fmt: skip
        return config, {"producer": {"name": "modelopt"}, "quantization": {**mixed, "kv_cache_quant_algo": "FP8"}}
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    eight = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "group_size": None}
    eight["strategy"], of_inputs = STRATEGIES[granularity]
    eight["block_structure"] = [128, 128] if granularity == "128x128" else None
    groups = {
        "group_0": {"targets": ["re:.*experts.*"], "format": "nvfp4-pack-quantized", "weights": four,
                    "input_activations": {**four, "dynamic": "local"}},
        "group_1": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": eight,
                    "input_activations": {**eight, "strategy": of_inputs, "dynamic": True, "block_structure": None}},
    }  # fmt: skip
    if granularity == "128x128":  # the other words for both
        weights = {**eight, "block_structure": "128x128"}
        groups["group_2"] = {**groups["group_1"], "format": "naive-quantized", "weights": weights}
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    names = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
    config["quantization_config"] = {**names, "config_groups": groups, "kv_cache_scheme": cache}
    return config, None


def mixed(directory, layout="modelopt", granularity="per tensor", dtype="bfloat16", more=()):
    """An NVFP4 expert, an FP8 projection with a static scale of activations, scales of a KV cache, a norm.

    Returns:
      the directory, and the values of the weights by name.
    """
    expert, values = nvfp4(layout)
    codes = array(N, K).astype(E4M3)
    name, scale = SCALES[layout, granularity]
    prefix = ATTENTION if layout != "modelopt" else ""
    kv = {f"{prefix or f'{ATTENTION}.{p}_proj'}.{p}_scale": np.float32(s).reshape(() if layout == "modelopt" else 1)
          for p, s in zip("kv", (0.5, 2), strict=True)}  # fmt: skip
    tensors = {
        **{f"{EXPERT}.{part}": x for part, x in expert.items()},
        f"{ATTENTION}.q_proj.weight": codes,
        f"{ATTENTION}.q_proj.{name}": np.asarray(scale),
        **({f"{ATTENTION}.q_proj.input_scale": np.float32([0.1])} if granularity == "per tensor" else {}),
        **kv,
        "model.norm.weight": array(16),
        **dict(more),
    }
    config, hf_quant = configs(layout, granularity, dtype)
    path = model_of(directory / "mixed", tensors, config)
    if hf_quant:
        (path / HF_QUANT).write_text(json.dumps(hf_quant))
    return path, {f"{EXPERT}.weight": values, f"{ATTENTION}.q_proj.weight": fp8_values(codes, scale)}


KV_NAMES = {
    "modelopt": [f"{ATTENTION}.{p}_proj.{p}_scale" for p in "kv"],
    "compressed-tensors": [f"{ATTENTION}.{p}_scale" for p in "kv"],
}
every_granularity = pytest.mark.parametrize(("layout", "granularity"), SCALES, ids=" ".join)


# ---------------------------------------------------------------- FP8 beside NVFP4
@every_granularity
def test_fp8_weights_are_decoded(tmp_path, layout, granularity):
    path, values = mixed(tmp_path, layout, granularity)
    q = f"{ATTENTION}.q_proj.weight"
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint) == sorted([*values, *KV_NAMES[layout], "model.norm.weight"])
    assert isinstance(checkpoint[f"{EXPERT}.weight"], NVFP4Tensor)
    assert checkpoint.input_amax(f"{EXPERT}.weight") == 2688 * 0.25
    assert checkpoint.input_amax(q) is None
    assert checkpoint.shape(q) == (N, K)
    assert checkpoint[q].dtype == BF16
    np.testing.assert_array_equal(checkpoint[q], values[q].astype(BF16))
    assert [float(checkpoint[n].reshape(())) for n in KV_NAMES[layout]] == [0.5, 2]
    with pytest.warns(UserWarning, match="^2 scales of a KV cache are left out, for which an ordinary model"):
        dequantize_checkpoint(path, tmp_path / "out", "F32")
    out = open_source(tmp_path / "out")
    for name, want in values.items():
        np.testing.assert_array_equal(out.array(name), want)
    assert set(out.places) == set(checkpoint) - set(KV_NAMES[layout])
    assert "quantization_config" not in out.config
    described = inspect(path)
    assert not described["warnings"]
    assert described["quantized"] == [EXPERT]
    assert described["fp8"] == {f"{ATTENTION}.q_proj": granularity.partition(",")[0]}
    assert described["kv_scales"] == KV_NAMES[layout]
    assert described["kept"] == ["model.norm.weight"]
    assert diff(path, path).same


@pytest.mark.parametrize(
    ("dtype", "want"), [("float16", np.float16), ("float32", np.float32), ("int8", BF16), ([], BF16)]
)
def test_fp8_weights_have_their_dtype_of_origin(tmp_path, dtype, want):
    path, values = mixed(tmp_path, dtype=dtype)
    q = f"{ATTENTION}.q_proj.weight"
    got = open_checkpoint(path)[q]
    assert got.dtype == want
    np.testing.assert_array_equal(got, values[q].astype(want))
    config = json.loads((path / CONFIG).read_text())
    older = "float16" if dtype == "float32" else None
    config["text_config"] = {"torch_dtype": older, "dtype": config.pop("torch_dtype")}
    (path / CONFIG).write_text(json.dumps(config))
    assert open_checkpoint(path)[q].dtype == want


@pytest.mark.parametrize("granularity", ["per tensor", "per channel", "128x128"])
def test_fp8_weights_are_sharded(tmp_path, granularity):
    path, values = mixed(tmp_path, granularity=granularity)
    q = f"{ATTENTION}.q_proj.weight"
    mesh = jax.make_mesh((2, 4), ("n", "k"), devices=jax.devices("cpu")[:8])
    got = open_checkpoint(path).place(q, NamedSharding(mesh, P("n", "k")))
    np.testing.assert_array_equal(got, values[q].astype(BF16))


@every_granularity
def test_fp8_weights_are_verified(tmp_path, layout, granularity):
    path, values = mixed(tmp_path, layout, granularity)
    source = {"model.norm.weight": array(16), **values}
    model_of(tmp_path / "source", source)
    errors = {r.name: r.error for r in verify_checkpoint(tmp_path / "source", path)}
    assert [errors[name].relative_error for name in values] == [0, 0]
    source[f"{ATTENTION}.q_proj.weight"] = values[f"{ATTENTION}.q_proj.weight"] * 1.5
    model_of(tmp_path / "other", source)
    with pytest.raises(VerificationError, match=r"q_proj.weight': relative error is 0.3333; expected at most 0.2"):
        verify_checkpoint(tmp_path / "other", path)
    source[f"{ATTENTION}.q_proj.weight"] = array(N, 1)
    model_of(tmp_path / "narrow", source)
    with pytest.raises(VerificationError, match=rf"q_proj.weight': has shape \[{N}, {K}\]; expected \[{N}, 1\]"):
        verify_checkpoint(tmp_path / "narrow", path)
    del source[f"{ATTENTION}.q_proj.weight"]
    model_of(tmp_path / "less", source)
    with pytest.raises(VerificationError, match=r"q_proj.weight': is not in the source"):
        verify_checkpoint(tmp_path / "less", path)


@pytest.mark.parametrize("to", KV_NAMES)
@pytest.mark.parametrize("layout", KV_NAMES)
def test_mixed_checkpoints_are_repacked(tmp_path, layout, to):
    """FP8 weights become 16 bits in the list of unquantized modules; scales of the cache get the layout's names."""
    path, values = mixed(tmp_path, layout)
    with pytest.warns(UserWarning, match="1 FP8 weights are decoded to BF16"):
        repack_checkpoint(path, tmp_path / "out", to)
    out, q = open_checkpoint(tmp_path / "out"), f"{ATTENTION}.q_proj"
    np.testing.assert_array_equal(out[f"{q}.weight"], values[f"{q}.weight"].astype(BF16))
    assert [float(out[n].reshape(())) for n in KV_NAMES[to]] == [0.5, 2]
    assert set(out) == {*values, *KV_NAMES[to], "model.norm.weight"}
    described = json.loads((tmp_path / "out" / CONFIG).read_text())["quantization_config"]
    assert q in described["ignore"]
    assert described["kv_cache_scheme"]["num_bits"] == 8
    assert not inspect(tmp_path / "out")["fp8"]
    assert not diff(path, tmp_path / "out").codes


@pytest.mark.parametrize("part", ["input_scale", "weight_scale"])
def test_diff_compares_fp8_weights_as_they_are_stored(tmp_path, part):
    path, _ = mixed(tmp_path)
    q = f"{ATTENTION}.q_proj"
    scale = open_source(path).read(f"{q}.{part}")
    other, _ = mixed(tmp_path / "other", more={f"{q}.{part}": np.nextafter(scale, np.float32(9)).astype(scale.dtype)})
    assert diff(path, path).same
    assert diff(path, other).others == [f"{q}.weight"]
    source = open_source(path)
    rest = {e.name: (e.tag, source.read(e.name)) for e in source.entries() if e.name != f"{q}.input_scale"}
    write(other / "model.safetensors", rest)
    assert diff(path, other).others == [f"{q}.weight"]
    rows, blocks = (mixed(tmp_path / g, granularity=g)[0] for g in ("per channel", "128x128"))
    assert diff(rows, blocks).others == [f"{q}.weight"]


def test_fp8_values_that_the_dtype_of_origin_cannot_hold_are_an_error(tmp_path):
    """A code times the scale is beyond float16."""
    more = {f"{ATTENTION}.q_proj.weight_scale": np.float32(1e6)}
    path, _ = mixed(tmp_path, dtype="float16", more=more)
    with pytest.raises(CheckpointError, match="values that are not finite in F16"):
        repack_checkpoint(path, tmp_path / "out", "compressed-tensors")


def test_scales_of_a_cache_are_no_part_of_a_source(tmp_path):
    """A conversion would write no config for them."""
    name = f"{ATTENTION}.k_proj.k_scale"
    model = model_of(tmp_path / "in", {f"{EXPERT}.weight": array(32, 64), name: np.float32([0.5])})
    with pytest.raises(CheckpointError, match=rf"{name}': is a scale of quantized weights or of a KV cache"):
        convert_checkpoint(model, tmp_path / "out")


def test_a_file_of_which_nothing_is_left_is_not_written(tmp_path):
    path, _ = mixed(tmp_path)
    write(path / "cache.safetensors", {"model.layers.1.self_attn.k_proj.k_scale": ("F32", np.ones((), np.float32))})
    dequantize_checkpoint(path, tmp_path / "out", warn=str)
    assert [p.name for p in (tmp_path / "out").glob("*safetensors*")] == ["model.safetensors"]


def test_the_command_shows_what_modules_are(tmp_path, capsys):
    path, _ = mixed(tmp_path, granularity="per channel")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for line in (f"FP8        {ATTENTION}.q_proj, per channel", f"KV scale   {ATTENTION}.k_proj.k_scale"):
        assert line in shown.splitlines()
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "decoded 1 NVFP4 weights and 1 FP8 weights to bf16, and copied 1 other tensors\n"


BAD_SCALES = {
    "shape": (
        np.ones((3, 2), np.float32),
        r"is F32, has shape \[3, 2\]; expected .* 200 for rows, or \[2, 2\], one for",
    ),
    "dtype": (np.ones((), np.int32), r"is I32, has shape \[\]; expected a float"),
    "no rows": (np.ones((), np.float32), r"is F32, has shape \[\]; expected a float"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_scales_of_fp8_that_do_not_fit(tmp_path, case):
    scale, text = BAD_SCALES[case]
    empty = {f"{ATTENTION}.q_proj.weight": np.zeros((0, K), E4M3)} if case == "no rows" else {}
    path, _ = mixed(tmp_path, more={f"{ATTENTION}.q_proj.weight_scale": scale, **empty})
    for read in (open_checkpoint, inspect):
        with pytest.raises(CheckpointError, match=f"q_proj.weight_scale': {text}") as found:
            read(path)
        assert found.value.code == 3


@pytest.mark.parametrize("scale", [1e5, -1e5, np.nan])
def test_fp8_that_overflows_is_refused(tmp_path, scale):
    path, _ = mixed(tmp_path, more={f"{ATTENTION}.q_proj.weight_scale": np.float32(scale)})
    with pytest.raises(CheckpointError, match=r"q_proj.weight': has \d+ values that are not finite in F16"):
        dequantize_checkpoint(path, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()
    if scale == scale:
        dequantize_checkpoint(path, tmp_path / "out", "F32", warn=str)  # of the scales of a KV cache


# ---------------------------------------------------------------- factors of AWQ
def awq(directory, size=1):
    """A checkpoint of NVFP4_AWQ, its weight's values, and the factors of its activations."""
    factors = np.random.default_rng(3).uniform(0.5, 2, 64)
    factors = (size * factors).astype(BF16)
    expert, values = nvfp4("modelopt")
    tensors = {f"{EXPERT}.{part}": x for part, x in expert.items()} | {f"{EXPERT}.pre_quant_scale": factors}
    numbers = {"quant_algo": "NVFP4_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "ignore": [], **numbers}}
    path = model_of(directory / "awq", tensors, config)
    (path / HF_QUANT).write_text(json.dumps({"quantization": {**numbers, "kv_cache_quant_algo": None}}))
    return path, values, factors


def test_factors_of_awq(tmp_path, capsys):
    """They multiply the activations of a quantized weight, and the columns of a decoded one: the products are equal."""
    path, values, factors = awq(tmp_path)
    with pytest.warns(
        UserWarning, match=re.escape(f"1 modules by their factors, such as checkpoint['{EXPERT}.pre_qua")
    ):
        checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint[f"{EXPERT}.pre_quant_scale"], factors)
    got = checkpoint[f"{EXPERT}.weight"]
    np.testing.assert_array_equal(nvfp4_values(np.asarray(got.data), np.asarray(got.scale), got.amax / 2688), values)
    dequantize_checkpoint(path, tmp_path / "out", "F32")
    out = open_source(tmp_path / "out")
    assert sorted(out.places) == [f"{EXPERT}.weight"]
    folded = values * factors.astype(np.float32)
    np.testing.assert_array_equal(out.array(f"{EXPERT}.weight"), folded)
    x = np.random.default_rng(4).normal(size=(3, 64))
    np.testing.assert_allclose((x * factors.astype(float)) @ values.T, x @ folded.T, rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"weight': has \d+ values that are not finite in F16"):
        dequantize_checkpoint(awq(tmp_path / "large", -1e5)[0], tmp_path / "none", "F16")
    (record,) = verify_checkpoint(tmp_path / "out", path)
    assert record.error.relative_error == 0
    assert inspect(path)["pre_quant_scales"] == [f"{EXPERT}.pre_quant_scale"]
    assert main(["inspect", str(path)]) == 0
    assert f"AWQ        {EXPERT}.pre_quant_scale, multiplies the activations" in capsys.readouterr().out.splitlines()
    assert diff(path, path).same
    with pytest.raises(
        CheckpointError, match=r"pre_quant_scale': multiplies activations; .*\nhint: `jnvfp4 dequantize"
    ):
        repack_checkpoint(path, tmp_path / "back", "compressed-tensors")


# ---------------------------------------------------------------- other forms of NVFP4
def in_tiles(x: np.ndarray) -> np.ndarray:
    """Block scales in cuBLAS's order, entry by entry: comfy-kitchen's ``to_blocked``."""
    n, k = -(-x.shape[0] // 128) * 128, -(-x.shape[1] // 4) * 4
    out = np.zeros(n * k, np.uint8)
    for r, c in np.ndindex(x.shape):
        out[(r // 128 * (k // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = x.view(np.uint8)[r, c]
    return out.reshape(n, k).view(x.dtype)


def comfy(mark, in_metadata="", n=160, k=320):
    """A layer as ComfyUI has it: the even element in the high half; a mark in a tensor, or in the file's metadata."""
    parts, values = nvfp4("modelopt", n=n, k=k)
    parts["weight"] = parts["weight"] >> 4 | parts["weight"] << 4
    parts["weight_scale"] = in_tiles(parts["weight_scale"])
    if not in_metadata:
        parts["comfy_quant"] = np.frombuffer(json.dumps(mark).encode(), np.uint8)
    return parts, values, json.dumps({"layers": {in_metadata: mark}}) if in_metadata else "{}"


def blocks_of_32(*_):
    parts, _ = nvfp4("modelopt")
    halved = np.ascontiguousarray(parts["weight_scale"][:, ::2])
    values = nvfp4_values(parts["weight"], np.repeat(halved, 2, 1), parts["weight_scale_2"])
    return {**parts, "weight_scale": halved}, values, "{}"


def test_marked_mxfp8_is_a_source_of_conversions(tmp_path):
    """Whole tiles have the shape of rows."""
    codes, exponents = array(128, 128).astype(E4M3), e8m0(128, 4)
    mark = np.frombuffer(b'{"format": "mxfp8"}', np.uint8)
    parts = {"weight": codes, "weight_scale": in_tiles(exponents), "comfy_quant": mark}
    path = other_form(tmp_path / "in", parts, "{}")
    options = ConvertOptions(dequantize_input="fp8", targets=(BLOCK,))
    convert_checkpoint(path, tmp_path / "out", options)
    assert verify_checkpoint(path, tmp_path / "out")[-1].error.relative_error < 0.12
    want = {f"{BLOCK}.weight": e8m0_values(codes, exponents, (1, 32)).astype(BF16)}
    convert_checkpoint(model_of(tmp_path / "bf16", want), tmp_path / "want", replace(options, dequantize_input="none"))
    (got, want) = (open_source(tmp_path / n) for n in ("out", "want"))
    assert all(got.array(n).tobytes() == want.array(n).tobytes() for n in want.places)


BLOCK = "model.diffusion_model.blocks.0.attn1.to_q"
OTHER_FORMS = {
    "a mark": (lambda: comfy({"format": "nvfp4"}), {}),
    "a mark with known entries": (lambda: comfy({"format": "nvfp4", "full_precision_matrix_mult": True,
                                                 "group_size": 16, "convrot": False}), {}),
    "whole tiles": (lambda: comfy({"format": "nvfp4"}, n=128, k=64), {}),
    "metadata": (lambda: comfy({"format": "nvfp4"}, BLOCK), {}),
    "metadata without the prefix": (lambda: comfy("nvfp4", BLOCK.removeprefix("model.diffusion_model.")), {}),
    "blocks of 32": (blocks_of_32, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",
                                                            "group_size": 32}}),
    "blocks of 32 in a layer": (blocks_of_32, {"quantization_config": {
        "quant_method": "modelopt", "quant_algo": "mixed_precision",
        "quantized_layers": {BLOCK: {"quant_algo": "nvfp4", "group_size": 32}}}}),
    "(3,)": (lambda: with_numbers((3,)), {}),
    "(1, 1)": (lambda: with_numbers((1, 1)), {}),
    "(2,)": (lambda: with_numbers((2,)), {}),
}  # fmt: skip


def with_numbers(shape):
    """Several equal global scales; of the activations' scales the largest counts."""
    parts, values = nvfp4("modelopt")
    several = np.full(shape, parts["weight_scale_2"], np.float32)
    inputs = np.linspace(0.125, 0.25, several.size, dtype=np.float32).reshape(shape)
    inputs.flat[-1] = 0.25
    return {**parts, "weight_scale_2": several, "input_scale": inputs}, values, "{}"


def other_form(directory, parts, metadata, config=None, module=BLOCK) -> Path:
    tensors = {f"{module}.{name}": (TAGS[x.dtype], x) for name, x in parts.items()}
    directory.mkdir(parents=True)
    write(directory / "model.safetensors", {"bias": ("F32", np.ones(3, np.float32)), **tensors},
          {"_quantization_metadata": metadata})  # fmt: skip
    (directory / CONFIG).write_text(json.dumps({"model_type": "flux", **(config or {})}))
    return directory


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_other_forms_are_read_as_rows_of_blocks_of_16(tmp_path, case):
    make, config = OTHER_FORMS[case]
    parts, values, metadata = make()
    path, name = other_form(tmp_path / "in", parts, metadata, config), f"{BLOCK}.weight"
    checkpoint = open_checkpoint(path)
    assert set(checkpoint) == {name, "bias"}
    got = checkpoint[name]
    np.testing.assert_array_equal(nvfp4_values(np.asarray(got.data), np.asarray(got.scale), got.amax / 2688), values)
    assert checkpoint.input_amax(name) == 2688 * 0.25
    assert checkpoint.shape(name) == values.shape
    dequantize_checkpoint(path, tmp_path / "plain", "F32")
    np.testing.assert_array_equal(open_source(tmp_path / "plain").array(name), values)
    assert set(open_source(tmp_path / "plain").places) == {name, "bias"}
    (record,) = (r for r in verify_checkpoint(tmp_path / "plain", path) if r.error)
    assert record.error.relative_error == 0
    for layout in KV_NAMES:
        repack_checkpoint(path, tmp_path / layout, layout)
        out = open_checkpoint(tmp_path / layout)
        assert (out[name].data == got.data).all()
        assert out[name].scale.tobytes() == got.scale.tobytes()
        assert not lint(tmp_path / layout)
        assert not open_stored(tmp_path / layout).source.views
        assert replace(diff(path, tmp_path / layout), configs=[]).same
    assert inspect(path)["quantized"] == [BLOCK]
    assert not any(f.fixable for f in lint(path))
    assert fix_checkpoint(path, tmp_path / "fixed") == {}


MARKS = {
    "format": ({"format": "svdquant_w4a4"}, r"weight': is marked \{'format': 'svdquant_w4a4'\}; expected .* nvfp4"),
    "no format": ({}, r"is marked \{\}"),
    "a list": ({"format": ["nvfp4"]}, "is marked"),
    "rotated": ({"format": "nvfp4", "convrot": True}, "is marked .*convrot"),
    "group size": ({"format": "nvfp4", "group_size": 32}, "is marked .*32"),
    "no JSON": (None, "comfy_quant is not valid JSON"),
    "no such layer": ({"format": "nvfp4"}, "x.weight': is marked"),
    "shape": ({"format": "nvfp4"}, r"weight_scale': has shape \[160, 20\]; expected \[256, 20\]"),
}


@pytest.mark.parametrize("case", MARKS)
def test_unknown_marks_are_refused(tmp_path, case):
    mark, text = MARKS[case]
    parts, _, metadata = comfy(mark, "x" if case == "no such layer" else "")
    if case == "no JSON":
        parts["comfy_quant"] = np.frombuffer(b'{"format": "nvfp4"}\0\0', np.uint8)
    if case == "shape":
        parts["weight_scale"] = nvfp4("modelopt", n=160, k=320)[0]["weight_scale"]
    path = other_form(tmp_path / "in", parts, metadata)
    for read in (open_checkpoint, lint, inspect):
        with pytest.raises(CheckpointError, match=text):
            read(path)


def test_blocks_of_32_need_a_config_that_says_so(tmp_path):
    parts, *_ = blocks_of_32()
    text = r"weight_scale': is F8_E4M3 \[32, 2\]; expected F8_E4M3 \[32, 4\](.|\n)*a config has group_size 32"
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(other_form(tmp_path / "in", parts, "{}"))


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1), (2, 2), (2, 2, 1)])
@pytest.mark.parametrize("equal", [True, False])
def test_global_scales_of_stacks_have_other_shapes(tmp_path, shape, equal):
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    parts, values = zip(*(nvfp4("modelopt", seed) for seed in range(2)), strict=True)
    stack = {part: np.stack([p[part] for p in parts]) for part in ("weight", "weight_scale", "input_scale")}
    numbers = np.broadcast_to(np.float32([1, 2]).reshape(2, *[1] * (len(shape) - 1)), shape) * np.float32(2.0**-9)
    if not equal and np.prod(shape) > 2:
        numbers = numbers * np.float32([1, 1.5]).reshape(1, 2, *[1] * (len(shape) - 2))
    tensors = {name: stack["weight"], f"{name}_weight_scale": stack["weight_scale"],
               f"{name}_weight_scale_2": numbers, f"{name}_input_scale": stack["input_scale"][:, None]}  # fmt: skip
    path = model_of(
        tmp_path / "in", tensors, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    )
    if not equal and np.prod(shape) > 2:
        with pytest.raises(CheckpointError, match=r"gate_up_proj_weight_scale_2': is F32 .*(.|\n)*fused weights again"):
            open_checkpoint(path)
        assert [(f.rule, f.where) for f in lint(path) if not f.note] == [("fused-globals", f"{name}_weight_scale_2")]
        source = model_of(tmp_path / "source", {name: array(2, *values[0].shape)})
        with pytest.raises(VerificationError, match="2 different global scales: the first is used for all its rows"):
            verify_checkpoint(source, path, loader="vllm")
        return
    want = np.stack([values[0], 2 * values[1]])
    dequantize_checkpoint(path, tmp_path / "out", "F32")
    np.testing.assert_array_equal(open_source(tmp_path / "out").array(name), want)
    assert open_checkpoint(path).input_amax(name).tolist() == [2688 * 0.25] * 2
    repack_checkpoint(path, tmp_path / "repacked", "modelopt")
    assert open_source(tmp_path / "repacked").entry(f"{name}_weight_scale_2").shape == (2,)


# ---------------------------------------------------------------- other formats beside NVFP4
def e8m0(*shape, low=110, high=130):
    return np.random.default_rng(9).integers(low, high, shape, np.uint8)


def e8m0_values(codes, exponents, unit):
    factors = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    factors = np.repeat(np.repeat(factors, unit[0], -2), unit[1], -1)[..., : codes.shape[-2], : codes.shape[-1]]
    return codes.astype(np.float32) * factors


STACK = f"{LAYER}.mlp.experts.gate_up_proj"
E8 = ml_dtypes.float8_e8m0fnu
BESIDE = {  # the name of the codes, their shape, the name of the scales, them, what shares one, the granularity
    "MXFP8": (f"{ATTENTION}.q_proj.weight", (N, 160), "_scale", e8m0(N, 5), (1, 32), "MXFP8"),
    "MXFP8, F8_E8M0": (f"{ATTENTION}.q_proj.weight", (N, 160), "_scale", e8m0(N, 5).view(E8), (1, 32), "MXFP8"),
    "DeepSeek-V4": (f"{ATTENTION}.q_proj.weight", (N, 160), ".scale", e8m0(2, 2).view(E8), (128, 128), "128x128"),
    "stack": (STACK, (2, N, 160), "_scale_inv", POSITIVE[:4, :2].reshape(2, 2, 2), (128, 128), "128x128"),
    "stack, per expert": (STACK, (2, N, 160), "_weight_scale", POSITIVE[:2, 0], (N, 160), "per tensor"),
    "stack, per row": (STACK, (2, N, 160), "_weight_scale", POSITIVE[:, :2].T, (1, 160), "per channel"),
    "stack of MXFP8": (STACK, (2, N, 160), "_weight_scale", e8m0(2, N, 5), (1, 32), "MXFP8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_formats_of_8_bits_beside_nvfp4(tmp_path, case):
    name, shape, suffix, scales, unit, granularity = BESIDE[case]
    codes, expert = array(*shape).astype(E4M3), nvfp4("modelopt")[0]
    scale_name = (name.removesuffix(".weight") if suffix == ".scale" else name) + suffix
    scales = np.ascontiguousarray(scales)
    tensors = {f"{EXPERT}.{p}": x for p, x in expert.items()} | {name: codes, scale_name: scales}
    path = model_of(tmp_path / "in", tensors)
    numbers = scales.view(np.uint8) if scales.dtype != np.float32 else scales
    if numbers.dtype == np.uint8:
        want = e8m0_values(codes, numbers, unit)
    else:
        rows = -(-shape[-2] // unit[0])
        factors = numbers.reshape(shape[0], rows, -1)
        want = codes.astype(np.float32) * np.repeat(np.repeat(factors, unit[0], 1), unit[1], 2)[:, :N, :160]
    dequantize_checkpoint(path, tmp_path / "out", "F32")
    np.testing.assert_array_equal(open_source(tmp_path / "out").array(name), want)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint) == {f"{EXPERT}.weight", name}
    np.testing.assert_array_equal(checkpoint[name], want.astype(BF16))
    assert inspect(path)["fp8"] == {name.removesuffix(".weight"): granularity}
    verify_checkpoint(tmp_path / "out", path)
    assert diff(path, path).same
    convert_checkpoint(model_of(tmp_path / "fp8", {n: tensors[n] for n in (name, scale_name)}), tmp_path / "nvfp4",
                       ConvertOptions(dequantize_input="fp8", expert_layout="nk"))  # fmt: skip
    assert inspect(tmp_path / "nvfp4")["quantized"] == [name.removesuffix(".weight")]


def test_names_of_formats_in_any_case(tmp_path):
    """And those of TensorRT-LLM."""
    for algorithm in ("FP8_BLOCK_SCALES", "fp8", "MXFP8", "fp8_pb_wo"):
        path, values = mixed(tmp_path / algorithm)
        config = json.loads((path / CONFIG).read_text())
        layers = config["quantization_config"]["quantized_layers"]
        layers[f"{ATTENTION}.q_proj"]["quant_algo"], layers[EXPERT]["quant_algo"] = algorithm, "nvfp4"
        config["quantization_config"]["quant_algo"] = "mixed_precision"
        (path / CONFIG).write_text(json.dumps(config))
        assert set(values) < set(open_checkpoint(path))
    (path / CONFIG).write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt", "quant_algo":
                                                                             "int4_awq"}}))  # fmt: skip
    with pytest.raises(CheckpointError, match="quant_algo is 'int4_awq'"):
        open_checkpoint(path)


def test_dtypes_of_less_than_a_byte_are_copied(tmp_path):
    expert, _ = nvfp4("modelopt")
    packed = {"a.f4": ("F4", (3, 32), 16), "b.f6": ("F6_E2M3", (2, 16), 12), "c.f6": ("F6_E3M2", (4,), 3),
              "d.odd": ("F4", (2, 3), None)}  # fmt: skip
    plan = [Planned(f"{EXPERT}.{n}", TAGS[x.dtype], x.shape) for n, x in expert.items()]
    plan += [Planned(name, tag, shape) for name, (tag, shape, _) in packed.items()]
    (tmp_path / "in").mkdir()
    with writing(tmp_path / "in" / "model.safetensors", plan, {}) as out:
        for n, x in expert.items():
            out.put(f"{EXPERT}.{n}", x)
        for name in packed:
            out.put(name, np.arange(Planned(name, *packed[name][:2]).nbytes, dtype=np.uint8))
    dequantize_checkpoint(tmp_path / "in", tmp_path / "out")
    source, got = open_source(tmp_path / "in"), open_source(tmp_path / "out")
    for name, (tag, shape, last) in packed.items():
        assert (got.entry(name).tag, got.entry(name).shape) == (tag, shape)
        assert got.read(name).tobytes() == source.read(name).tobytes() == bytes(range(got.entry(name).nbytes))
        assert got.read(name).shape == ((*shape[:-1], last) if last else (3,))
        assert open_checkpoint(tmp_path / "in")[name].dtype == np.uint8


def test_activations_in_fp8_have_another_scale(tmp_path):
    """W4A8_NVFP4_FP8: input_scale is amax / 448."""
    expert, values = nvfp4("modelopt")
    numbers = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"weights": numbers, "input_activations": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
    layers = {EXPERT: {"quant_algo": "W4A8_NVFP4_FP8"}}
    for i, section in enumerate(({"quant_algo": "W4A8_NVFP4_FP8", "config_groups": {"group_0": group}},
                                 {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})):  # fmt: skip
        config = {"quantization_config": {"quant_method": "modelopt", **section}}
        path = model_of(tmp_path / f"in{i}", {f"{EXPERT}.{p}": x for p, x in expert.items()}, config)
        assert open_checkpoint(path).input_amax(f"{EXPERT}.weight") == pytest.approx(448 * 0.25)
        with pytest.warns(UserWarning, match="the activations of 1 weights are FP8, and FP4 in the output"):
            repack_checkpoint(path, tmp_path / f"out{i}", "modelopt")
        assert open_checkpoint(tmp_path / f"out{i}").input_amax(f"{EXPERT}.weight") == pytest.approx(448 * 0.25)
        dequantize_checkpoint(path, tmp_path / f"plain{i}", "F32")
        np.testing.assert_array_equal(open_source(tmp_path / f"plain{i}").array(f"{EXPERT}.weight"), values)


OTHER_CACHES = {"NVFP4": "NVFP4", "nvfp4_affine": "NVFP4_AFFINE", "INT8": "INT8", "dict": "NVFP4", "unknown": None}


@pytest.mark.parametrize("claim", OTHER_CACHES)
def test_a_cache_in_another_format_changes_no_weight(tmp_path, claim):
    expert, values = nvfp4("modelopt")
    scales = {f"{ATTENTION}.{p}_proj.{p}_{part}": np.float32(0.5 if part == "scale" else -0.5) for p in "kv"
              for part in ("scale", "bias")}  # fmt: skip
    scheme = {"dict": {"num_bits": 4, "type": "float", "dynamic": False}, "unknown": {"dynamic": True}}.get(
        claim, claim
    )
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": scheme}}
    path = model_of(tmp_path / "in", {f"{EXPERT}.{p}": x for p, x in expert.items()} | scales, config)
    text = f"the KV cache is {OTHER_CACHES[claim] or scheme}"
    with pytest.warns(UserWarning, match=text):
        checkpoint = open_checkpoint(path)
    assert checkpoint.keys() == {f"{EXPERT}.weight", *scales}
    assert text in inspect(path)["warnings"][-1]
    told = []
    repack_checkpoint(path, tmp_path / "modelopt", "modelopt", warn=told.append)
    assert [t.startswith(text) for t in told] == [True] * (claim == "unknown")
    written = json.loads((tmp_path / "modelopt" / HF_QUANT).read_text())["quantization"]["kv_cache_quant_algo"]
    assert written == OTHER_CACHES[claim]
    section = json.loads((tmp_path / "modelopt/config.json").read_text())["quantization_config"]
    assert section.get("kv_cache_scheme") == (None if claim == "unknown" else scheme)
    assert not [f for f in lint(tmp_path / "modelopt") if not f.note and f.rule != "kv-scales"]
    assert set(scales) < set(open_source(tmp_path / "modelopt").places)
    told.clear()
    repack_checkpoint(path, tmp_path / "ct", "compressed-tensors", warn=told.append)
    assert [t.startswith(text) for t in told] == [True] * (OTHER_CACHES[claim] != "NVFP4")
    with pytest.warns(UserWarning, match="4 scales of a KV cache"):
        dequantize_checkpoint(path, tmp_path / "plain", "F32")
    np.testing.assert_array_equal(open_source(tmp_path / "plain").array(f"{EXPERT}.weight"), values)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4", None])
def test_mlx_is_named(tmp_path, mode, key):
    tensors = {f"{EXPERT}.weight": np.zeros((16, 8), np.uint32), f"{EXPERT}.scales": np.ones((16, 4), np.uint8),
               "norm.weight": array(16), f"{LAYER}.mlp.down_proj.weight": array(16, 64)}  # fmt: skip
    section = {"group_size": 16, "bits": 4, **({"mode": mode} if mode else {})}
    path = model_of(tmp_path / "in", tensors, {"model_type": "llama", key: section})
    for read in (open_checkpoint, lint, lambda p: convert_checkpoint(p, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=f"quantization is MLX's, mode '{mode or 'affine'}'"):
            read(path)
    assert any("MLX" in w for w in inspect(path)["warnings"])


# ---------------------------------------------------------------- FP8 alone, as the source of a conversion
@every_granularity
def test_fp8_is_a_source_of_conversions(tmp_path, layout, granularity):
    name, scale = SCALES[layout, granularity]
    codes, down = array(N, K).astype(E4M3), f"{LAYER}.mlp.down_proj"
    tensors = {f"{down}.weight": codes, f"{down}.{name}": np.asarray(scale), f"{down}.input_scale": np.float32(1)}
    config = {"model_type": "llama", "quantization_config": {"quant_method": layout}}
    model_of(tmp_path / "fp8", tensors, config)
    model_of(tmp_path / "bf16", {f"{down}.weight": fp8_values(codes, scale).astype(BF16)}, {"model_type": "llama"})
    convert_checkpoint(tmp_path / "fp8", tmp_path / "out", ConvertOptions(dequantize_input="fp8"))
    convert_checkpoint(tmp_path / "bf16", tmp_path / "want")
    (got, want) = (open_source(tmp_path / n) for n in ("out", "want"))
    assert {n: got.array(n).tobytes() for n in got.places} == {n: want.array(n).tobytes() for n in want.places}
    assert files_of(tmp_path / "out")[CONFIG] == files_of(tmp_path / "want")[CONFIG]
    verify_checkpoint(tmp_path / "fp8", tmp_path / "out")
    for read in (convert_checkpoint, dequantize_checkpoint):
        with pytest.raises(CheckpointError, match="--dequantize-input fp8"):
            read(tmp_path / "fp8", tmp_path / "no")


# ---------------------------------------------------------------- MXFP4, as the source of a conversion
STACKS = {"gate_up_proj": (3, 64, 96), "down_proj": (3, 32, 64)}  # E, N, K


def mxfp4_values(blocks, scales) -> np.ndarray:
    """q * 2^(s - 127), [E, N, K]; the even element of a byte in its low half."""
    q = E2M1[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*scales.shape, 32)
    return np.ldexp(q, scales.astype(int)[..., None] - 127).reshape(*scales.shape[:2], -1)


def mxfp4(directory, span=18, change=lambda tensors: None):
    """gpt-oss's experts; the exponents of scales of each expert are in ``span`` of its own.

    Returns:
      the directory, and the values by name [E, N, K].
    """
    rng, tensors, values = np.random.default_rng(7), {}, {}
    for i, (role, (e, n, k)) in enumerate(STACKS.items()):
        name = f"{LAYER}.mlp.experts.{role}"
        blocks = rng.integers(0, 256, (e, n, k // 32, 16), np.uint8)
        scales = rng.integers(0, span, (e, n, k // 32)) + np.array([90, 120, 7 * i + 60])[:, None, None]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales.astype(np.uint8), f"{name}_bias": array(e, n)}
        values[name] = mxfp4_values(blocks, scales)
    change(tensors)
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    return model_of(directory / "mxfp4", tensors | {"model.norm.weight": array(16)}, config), values


def decoded(path, transposed=True) -> dict[str, np.ndarray]:
    """The values of a converted checkpoint; stacks [E, N, K]."""
    dequantize_checkpoint(path, path.parent / "decoded", "F32")
    out = open_source(path.parent / "decoded")
    arrays = {n: out.array(n) for n in out.places if "experts" in n and "bias" not in n}
    return {n: a.transpose(0, 2, 1) if transposed else a for n, a in arrays.items()}


MXFP4 = ConvertOptions(dequantize_input="mxfp4", weight_only=True)


@pytest.mark.parametrize("layout", ["modelopt", "te"])
def test_mxfp4_is_converted_without_a_loss(tmp_path, layout):
    path, values = mxfp4(tmp_path)
    result = convert_checkpoint(path, tmp_path / "out", replace(MXFP4, layout=layout, chunk_bytes=1 << 12))
    assert result.inexact_blocks == {name: 0 for name in values}
    got = decoded(tmp_path / "out")
    for name, want in values.items():
        assert got[name].astype(np.float32).tobytes() == want.astype(np.float32).tobytes(), name
    errors = {r.name: r.error for r in verify_checkpoint(path, tmp_path / "out")}
    assert all(errors[name].relative_error == 0 for name in values)
    out = open_source(tmp_path / "out")
    assert "quantization_config" in out.config
    assert out.entry(f"{LAYER}.mlp.experts.gate_up_proj").shape == (3, 48, 64)  # [E, K/2, N], as of gpt-oss in bfloat16


def test_experts_in_mxfp4_are_taken_apart(tmp_path):
    """Gate and up are the even and the odd rows, and share the larger global scale."""
    path, values = mxfp4(tmp_path, span=8)
    options = replace(MXFP4, layout="compressed-tensors", experts="per-expert")
    assert set(convert_checkpoint(path, tmp_path / "out", options).inexact_blocks.values()) == {0}
    both, down = (values[f"{LAYER}.mlp.experts.{role}"] for role in STACKS)
    got = decoded(tmp_path / "out", transposed=False)
    for e in range(3):
        for role, want in (("gate", both[e, 0::2]), ("up", both[e, 1::2]), ("down", down[e])):
            np.testing.assert_array_equal(got[f"{LAYER}.mlp.experts.{e}.{role}_proj.weight"], want)


def test_codes_of_mxfp4_are_kept(tmp_path):
    """Where every block has a 6 or a 4, as quantizers to MXFP4 make them, NVFP4 has the same codes and exponents."""

    def with_six(tensors):
        for name in tensors:
            if name.endswith("_blocks"):
                tensors[name][..., 0] = tensors[name][..., 8] = 0x7E  # -4 and 6

    path, _ = mxfp4(tmp_path, change=with_six)
    convert_checkpoint(path, tmp_path / "out", MXFP4)
    source, out = open_source(path), open_source(tmp_path / "out")
    for name in (f"{LAYER}.mlp.experts.{role}" for role in STACKS):
        blocks, scales = source.array(f"{name}_blocks"), source.array(f"{name}_scales")
        np.testing.assert_array_equal(out.array(name).transpose(0, 2, 1), blocks.reshape(*blocks.shape[:2], -1))
        powers = np.ldexp(1.0, scales.astype(int) - 127)
        exact = out.array(f"{name}_weight_scale").astype(float) * out.array(f"{name}_weight_scale_2")[:, None, None]
        np.testing.assert_array_equal(exact.transpose(0, 2, 1), np.repeat(powers, 2, axis=-1))


@pytest.mark.parametrize("span", [19, 20, 24, 40])
def test_inexact_blocks_of_mxfp4_are_counted(tmp_path, capsys, monkeypatch, span):
    """Of 16 elements each; the others are exact. Blocks of zeros are, whatever their exponent."""
    draw_nothing(monkeypatch)

    def with_zeros(tensors):
        name = f"{LAYER}.mlp.experts.down_proj"
        tensors[f"{name}_blocks"][:, 0], tensors[f"{name}_scales"][:, 0] = 0x80, 0

    path, values = mxfp4(tmp_path, span, with_zeros)
    values[f"{LAYER}.mlp.experts.down_proj"][:, 0] = 0
    result = convert_checkpoint(path, tmp_path / "out", MXFP4)
    got = decoded(tmp_path / "out")
    wrong = {n: int((got[n] != want).reshape(*want.shape[:2], -1, 16).any(-1).sum()) for n, want in values.items()}
    assert result.inexact_blocks == wrong
    assert sum(wrong.values()) > 0
    arguments = ["--dequantize-input", "mxfp4", "--weight-only", "--report", str(tmp_path / "report")]
    assert main(["convert", str(path), str(tmp_path / "again"), *arguments]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f"MXFP4      {sum(wrong.values())} blocks of 16 in 2 weights have other values" in shown
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {t["name"]: t["inexact_blocks"] for t in report["tensors"] if "inexact_blocks" in t} == wrong


@pytest.mark.parametrize("exponent", [0, 1, 126, 251])
def test_all_exponents_of_mxfp4(tmp_path, exponent):
    """The smallest are subnormal in bfloat16; the largest are finite."""

    def change(tensors):
        for name in tensors:
            if name.endswith("_scales"):
                tensors[name][:] = exponent

    path, _ = mxfp4(tmp_path, change=change)
    result = convert_checkpoint(path, tmp_path / "out", MXFP4)
    got, source = decoded(tmp_path / "out"), open_source(path)
    for name in got:
        want = mxfp4_values(source.array(f"{name}_blocks"), source.array(f"{name}_scales"))
        differ = (got[name] != want).reshape(*want.shape[:2], -1, 16).any(-1).sum()
        assert result.inexact_blocks[name] == differ
        assert exponent < 2 or differ == 0


BAD_MXFP4 = {
    "large": ("scales", lambda x: np.full_like(x, 252), r"down_proj': has a scale of 2\^125; expected at most 2\^124"),
    "scales": ("scales", lambda x: x[..., :-1], r"down_proj_scales': is U8 \[3, 32, 1\]; expected U8 \[3, 32, 2\]"),
    "blocks": ("blocks", lambda x: x[..., :8], r"down_proj_blocks': is U8 \[3, 32, 2, 8\]; expected U8 \[E, N, K/"),
    "NaN": ("scales", lambda x: np.where(np.arange(x.size).reshape(x.shape) == 70, 255, x).astype(np.uint8),
            r"down_proj': has 32 values that are not finite, the first at \(1, 3, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MXFP4)
def test_mxfp4_that_is_damaged(tmp_path, case):
    part, change, text = BAD_MXFP4[case]
    name = f"{LAYER}.mlp.experts.down_proj_{part}"
    path, _ = mxfp4(
        tmp_path, change=lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})
    )
    with pytest.raises(CheckpointError, match=text) as found:
        convert_checkpoint(path, tmp_path / "out", MXFP4)
    assert found.value.code == 3


def test_formats_of_sources_are_chosen(tmp_path):
    path, _ = mxfp4(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"is quantized already \(mxfp4\).*\n.*--dequantize-input fp8 .*mxfp4 MXFP4"
    ):
        convert_checkpoint(path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="dequantize_input is fp8, and the source has none; expected a weight in"):
        convert_checkpoint(path, tmp_path / "out", ConvertOptions(dequantize_input="fp8"))
    with pytest.raises(
        CheckpointError, match="dequantize_input is mxfp4 and spec is 4over6, 1x16; expected nvfp4 with"
    ):
        ConvertOptions(dequantize_input="mxfp4", spec=jnvfp4.spec.four_over_six())


def test_a_group_in_mxfp4_in_part_is_refused(tmp_path):
    experts = f"{LAYER}.mlp.experts"
    tensors = {f"{experts}.gate_proj_{part}": np.zeros(shape, np.uint8)
               for part, shape in (("blocks", (2, 16, 1, 16)), ("scales", (2, 16, 1)))}  # fmt: skip
    tensors[f"{experts}.up_proj"] = array(2, 32, 16)
    path = model_of(tmp_path / "in", tensors, {"model_type": "gpt_oss"})
    with pytest.raises(CheckpointError, match=r"up_proj': is in MXFP4, or shares .*; expected all of a group in MXFP4"):
        convert_checkpoint(path, tmp_path / "out", MXFP4)


MODULES = {
    "mxfp4-pack-quantized": ("weight_packed", np.uint8, "weight_scale", np.uint8),
    "Model Optimizer": ("weight", np.uint8, "weight_scale", np.uint8),
    "DeepSeek-V4": ("weight", np.int8, "scale", E8),
}


@pytest.mark.parametrize("case", MODULES)
def test_mxfp4_of_modules(tmp_path, case):
    """Beside an FP8 weight, which is decoded too."""
    codes, dtype, scale, scale_dtype = MODULES[case]
    rng, expert = np.random.default_rng(1), f"{LAYER}.mlp.experts.0"
    tensors, want = {"model.norm.weight": array(16)}, {}
    for role in ("w1", "w3", "w2"):
        blocks, exponents = rng.integers(0, 256, (32, 3, 16), np.uint8), rng.integers(110, 120, (32, 3), np.uint8)
        tensors[f"{expert}.{role}.{codes}"] = blocks.reshape(32, 48).view(dtype)
        tensors[f"{expert}.{role}.{scale}"] = exponents.view(scale_dtype)
        q = E2M1[np.stack([blocks & 15, blocks >> 4], -1)].reshape(32, 3, 32)
        want[f"{expert}.{role}.weight"] = np.ldexp(q, exponents.astype(int)[..., None] - 127).reshape(32, 96)
    tensors |= {f"{expert}.w2.input_scale": np.float32(1), f"{ATTENTION}.o_proj.weight": array(32, 32).astype(E4M3),
                f"{ATTENTION}.o_proj.weight_scale": np.float32(0.5)}  # fmt: skip
    path = model_of(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    result = convert_checkpoint(path, tmp_path / "out", replace(MXFP4, ignore=("*o_proj",)))
    assert {*result.inexact_blocks.values()} == {0}
    dequantize_checkpoint(tmp_path / "out", tmp_path / "plain", "F32")
    got = open_source(tmp_path / "plain")
    assert set(got.places) == {*want, "model.norm.weight", f"{ATTENTION}.o_proj.weight"}
    for name, values in want.items():
        np.testing.assert_array_equal(got.array(name), values)
    verify_checkpoint(path, tmp_path / "out")


@pytest.mark.parametrize(("config", "warns"), [
    ({"attn_output_gate": True}, True), ({"model_type": "qwen3_next"}, True), ({"model_type": "qwen3"}, False),
    ({"text_config": {"model_type": "qwen3_5_moe_text"}}, True), ({"attn_output_gate": False}, False),
    ({"model_type": "qwen3_next", "attn_output_gate": False}, False),
])  # fmt: skip
def test_a_gate_in_q_is_warned_about(tmp_path, config, warns):
    """Half of its rows; Model-Optimizer 2091."""
    tensors = {f"{ATTENTION}.{role}_proj.weight": array(32, 64) for role in "qkvo"}
    path = model_of(tmp_path / "in", tensors, config)
    warnings = convert_checkpoint(path, tmp_path / "out").warnings
    assert any("is a gate" in w and "--ignore '*.q_proj'" in w for w in warnings) == warns
    kept = convert_checkpoint(path, tmp_path / "kept", ConvertOptions(ignore=("*.q_proj",)))
    assert not any("is a gate" in w for w in kept.warnings)
    assert inspect(tmp_path / "kept")["quantized"] == [f"{ATTENTION}.o_proj"]
