"""Checkpoints as they are published: NVFP4 beside FP8, AWQ's factors, scales of a KV cache.

The fixtures have the names, dtypes and shapes that vLLM reads and Model Optimizer and llm-compressor write: see
``jnvfp4/checkpoints/_layouts/fp8.py``, ``Stored`` and ``kv_scale_in``. The values are those of a plain NumPy model.
"""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import array, files_of, model_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jnvfp4 import NVFP4Tensor
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    VerificationError,
    convert_checkpoint,
    dequantize_checkpoint,
    diff,
    inspect,
    open_checkpoint,
    repack_checkpoint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._files.source import CONFIG, HF_QUANT, open_source
from jnvfp4.cli import main

LAYER = "model.layers.0"
ATTENTION, EXPERT = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts.0.down_proj"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
N, K = 200, 144  # of FP8 weights: no multiple of a block


# ---------------------------------------------------------------- a plain model of both formats
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


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
ALGORITHMS = {"per tensor": "FP8", "per channel": "FP8_PER_CHANNEL_PER_TOKEN"}
STRATEGIES = {"per tensor": "tensor", "per channel": "channel"}


def configs(layout: str, granularity: str, dtype: str) -> tuple[dict, dict | None]:
    """config.json, and hf_quant_config.json of Model Optimizer (``convert_hf_quant_config_format``)."""
    config = {"model_type": "llama", "torch_dtype": dtype}
    if layout == "modelopt":
        layers = {f"{ATTENTION}.q_proj": {"quant_algo": ALGORITHMS.get(granularity, "FP8_PB_WO")},
                  EXPERT: {"quant_algo": "NVFP4", "group_size": 16}}  # fmt: skip
        mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        numbers = {"num_bits": 8, "type": "float", "dynamic": False}
        groups = {"group_0": {"weights": numbers, "input_activations": numbers, "targets": [f"{ATTENTION}.q_proj"]}}
        config["quantization_config"] = {"quant_method": "modelopt", "config_groups": groups, "ignore": [], **mixed,
                                         "kv_cache_scheme": numbers}  # fmt: skip
        return config, {"producer": {"name": "modelopt"}, "quantization": {**mixed, "kv_cache_quant_algo": "FP8"}}
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    eight = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "group_size": None}
    eight["strategy"] = STRATEGIES.get(granularity, "block")
    eight["block_structure"] = [128, 128] if granularity == "128x128" else None
    groups = {
        "group_0": {"targets": ["re:.*experts.*"], "format": "nvfp4-pack-quantized", "weights": four,
                    "input_activations": {**four, "dynamic": "local"}},
        "group_1": {"targets": ["re:.*self_attn.*"], "format": "float-quantized", "weights": eight,
                    "input_activations": {**eight, "strategy": "token", "dynamic": True, "block_structure": None}},
    }  # fmt: skip
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
    dequantize_checkpoint(path, tmp_path / "out", "F32")
    out = open_source(tmp_path / "out")
    for name, want in values.items():
        np.testing.assert_array_equal(out.array(name), want)
    assert set(out.places) == set(checkpoint)
    assert "quantization_config" not in out.config
    described = inspect(path)
    assert not described["warnings"]
    assert described["quantized"] == [EXPERT]
    assert described["fp8"] == {f"{ATTENTION}.q_proj": granularity.partition(",")[0]}
    assert described["kv_scales"] == KV_NAMES[layout]
    assert described["kept"] == ["model.norm.weight"]
    assert diff(path, path).same


@pytest.mark.parametrize(("dtype", "want"), [("float16", np.float16), ("float32", np.float32), ("int8", BF16)])
def test_fp8_weights_have_their_dtype_of_origin(tmp_path, dtype, want):
    path, values = mixed(tmp_path, dtype=dtype)
    q = f"{ATTENTION}.q_proj.weight"
    got = open_checkpoint(path)[q]
    assert got.dtype == want
    np.testing.assert_array_equal(got, values[q].astype(want))


@pytest.mark.parametrize("granularity", ["per tensor", "per channel", "128x128"])
def test_fp8_weights_are_sharded(tmp_path, granularity):
    path, values = mixed(tmp_path, granularity=granularity)
    q = f"{ATTENTION}.q_proj.weight"
    mesh = jax.make_mesh((2, 4), ("n", "k"))
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


def test_the_command_shows_what_modules_are(tmp_path, capsys):
    path, _ = mixed(tmp_path, granularity="per channel")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for line in (f"FP8        {ATTENTION}.q_proj, per channel", f"KV scale   {ATTENTION}.k_proj.k_scale"):
        assert line in shown.splitlines()
    assert main(["dequantize", str(path), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "decoded 1 NVFP4 weights and 1 FP8 weights to bf16, and copied 3 other tensors\n"


BAD_SCALES = {
    "shape": (
        np.ones((3, 2), np.float32),
        r"is F32, has shape \[3, 2\]; expected .* 200 for rows, or \[2, 2\], one for",
    ),
    "dtype": (np.ones((), np.int32), r"is I32, has shape \[\]; expected a float"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_scales_of_fp8_that_do_not_fit(tmp_path, case):
    scale, text = BAD_SCALES[case]
    path, _ = mixed(tmp_path, more={f"{ATTENTION}.q_proj.weight_scale": scale})
    for read in (open_checkpoint, inspect):
        with pytest.raises(CheckpointError, match=f"q_proj.weight_scale': {text}") as found:
            read(path)
        assert found.value.code == 3


def test_fp8_that_overflows_is_refused(tmp_path):
    path, _ = mixed(tmp_path, more={f"{ATTENTION}.q_proj.weight_scale": np.float32(1e5)})
    with pytest.raises(CheckpointError, match=r"q_proj.weight': has \d+ values that are not finite in F16"):
        dequantize_checkpoint(path, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()
    dequantize_checkpoint(path, tmp_path / "out", "F32")


# ---------------------------------------------------------------- factors of AWQ
def awq(directory):
    """A checkpoint of NVFP4_AWQ, its weight's values, and the factors of its activations."""
    factors = np.random.default_rng(3).uniform(0.5, 2, 64).astype(BF16)
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
