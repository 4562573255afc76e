"""Experts taken apart and put together, FP8 decoded, and options that change what is kept."""

import json

import ml_dtypes
import numpy as np
import pytest

import jnvfp4
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint
from jnvfp4.checkpoints._convert.views import fp8_decoded
from jnvfp4.checkpoints._files.safetensors import TAGS, Planned, Writer
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.checkpoints.verify import verify_checkpoint
from jnvfp4.cli import main

EXPERTS = "model.layers.0.mlp.experts"


def save(directory, tensors, config=None):
    directory.mkdir()
    plan = [Planned(n, TAGS[a.dtype], a.shape) for n, a in tensors.items()]
    with Writer(directory / "model.safetensors", plan, {"format": "pt"}) as out:
        for name, a in tensors.items():
            out.put(name, a)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(ml_dtypes.bfloat16)


def weights_of(directory):
    stored = open_stored(directory)
    return {m: stored.weight(m) for m in stored.modules}


def same(a, b):
    return a.codes.tobytes() == b.codes.tobytes() and a.scales.tobytes() == b.scales.tobytes()


# ---------------------------------------------------------------- experts
@pytest.mark.parametrize("model", ["qwen3_moe", "llama4", "gpt_oss"])
def test_experts_taken_apart(tmp_path, model):
    turned, interleaved = model != "qwen3_moe", model == "gpt_oss"
    gate, up, down = normal(3, 32, 64), 2 * normal(3, 32, 64, seed=1), normal(3, 64, 32, seed=2)
    both = np.stack([gate, up], axis=2).reshape(3, 64, 64) if interleaved else np.concatenate([gate, up], axis=1)
    stacks = {f"{EXPERTS}.gate_up_proj": both, f"{EXPERTS}.down_proj": down}
    save(tmp_path / "in", {n: np.ascontiguousarray(x.transpose(0, 2, 1)) if turned else x for n, x in stacks.items()},
         {"model_type": model})  # fmt: skip
    each = {f"{EXPERTS}.{e}.{r}.weight": x[e] for r, x in zip(("gate_proj", "up_proj", "down_proj"),
            (gate, up, down), strict=True) for e in range(3)}  # fmt: skip
    save(tmp_path / "each", each)
    for f in ("modelopt", "compressed-tensors"):
        o = ConvertOptions(layout=f, experts="per-expert", chunk_bytes=1 << 12)
        convert_checkpoint(tmp_path / "in", tmp_path / f, o)
        convert_checkpoint(tmp_path / "each", tmp_path / f"{f}_each", ConvertOptions(layout=f))
        got, want = weights_of(tmp_path / f), weights_of(tmp_path / f"{f}_each")
        assert got.keys() == want.keys()
        assert all(same(got[m], want[m]) and got[m].global_scale == want[m].global_scale for m in want)
        assert len(verify_checkpoint(tmp_path / "in", tmp_path / f)) == 9


def test_experts_put_together(tmp_path):
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    each = {
        f"{EXPERTS}.{e}.{r}.weight": normal(*s, seed=10 * e + i)
        for e in range(3)
        for i, (r, s) in enumerate(shapes.items())
    }
    save(tmp_path / "in", each)
    convert_checkpoint(tmp_path / "in", tmp_path / "each")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(experts="stacked", chunk_bytes=1 << 12))
    got, want = weights_of(tmp_path / "out"), weights_of(tmp_path / "each")
    assert sorted(got) == [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]
    assert got[f"{EXPERTS}.gate_up_proj"].shape == (3, 64, 64)
    for e in range(3):
        halves = [want[f"{EXPERTS}.{e}.{r}"] for r in ("gate_proj", "up_proj")]
        one = got[f"{EXPERTS}.gate_up_proj"]
        np.testing.assert_array_equal(one.codes[e], np.concatenate([w.codes for w in halves]))
        np.testing.assert_array_equal(one.scales[e], np.concatenate([w.scales for w in halves]))
        assert one.global_scale[e] == halves[0].global_scale == halves[1].global_scale
        assert same_slice(got[f"{EXPERTS}.down_proj"], e, want[f"{EXPERTS}.{e}.down_proj"])
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "out")) == 2
    del each[f"{EXPERTS}.1.up_proj.weight"]
    save(tmp_path / "less", each)
    with pytest.raises(CheckpointError, match=r"experts are \[0, 2\]; expected 0 to 2"):
        convert_checkpoint(tmp_path / "less", tmp_path / "no", ConvertOptions(experts="stacked"))


def test_a_bias_of_a_stack_is_kept_with_a_warning(tmp_path):
    save(tmp_path / "in", {f"{EXPERTS}.down_proj": normal(2, 32, 64), f"{EXPERTS}.down_proj_bias": normal(2, 32)},
         {"model_type": "qwen3_moe"})  # fmt: skip
    result = convert_checkpoint(
        tmp_path / "in", tmp_path / "out", ConvertOptions(experts="per-expert", weight_only=True)
    )
    assert result.warnings == (f"{EXPERTS}.down_proj_bias stays one tensor for all experts",)
    assert f"{EXPERTS}.down_proj_bias" in open_source(tmp_path / "out").places


@pytest.mark.parametrize(
    ("shape", "config", "kn"),
    [
        ((2, 32, 64), {"model_type": "qwen3_moe"}, False),
        ((2, 32, 64), {"model_type": "llama4"}, True),
        ((2, 32, 64), {"text_config": {"model_type": "llama4_text"}}, True),
        ((2, 24, 64), {}, False),
        ((2, 64, 24), {}, True),
    ],
)
def test_axes_of_a_stack(tmp_path, shape, config, kn):
    save(tmp_path / "in", {f"{EXPERTS}.down_proj": normal(*shape)}, config)
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    (w,) = weights_of(tmp_path / "out").values()
    assert w.kn == kn
    assert w.shape == ((shape[0], shape[2], shape[1]) if kn else shape)


def test_experts_of_other_names_put_together(tmp_path):
    each = {f"{EXPERTS}.{e}.{r}.weight": normal(32, 32, seed=e) for e in range(2) for r in ("w1", "w2", "w3")}
    save(tmp_path / "in", each)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(experts="stacked"))
    assert sorted(weights_of(tmp_path / "out")) == [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]


GATE, UP, UP_OF_1 = (f"{EXPERTS}.{r}_proj.weight" for r in ("0.gate", "0.up", "1.up"))
UNFIT = {
    "a name twice": ({f"{EXPERTS}.up_proj": normal(1, 32, 64), UP: normal(32, 64)}, "per-expert",
                     rf"'{UP}': is in the source, and would be made of '{EXPERTS}.up_proj'"),
    "a dtype": ({UP: normal(32, 64), UP_OF_1: normal(32, 64).astype(np.float16)},
                "stacked", r"is F16 \[32, 64\]; expected BF16 \[32, 64\], as expert 0"),
    "a shape": ({UP: normal(32, 64), UP_OF_1: normal(16, 64)},
                "stacked", r"is BF16 \[16, 64\]; expected BF16 \[32, 64\], as expert 0"),
    "K": ({GATE: normal(32, 64), UP: normal(32, 32)}, "stacked", r"has \[\[32, 64\], \[32, 32\]\] for gate and up"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_experts_that_do_not_fit(tmp_path, case):
    tensors, experts, text = UNFIT[case]
    save(tmp_path / "in", tensors, {"model_type": "qwen3_moe"})
    with pytest.raises(CheckpointError, match=text):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(experts=experts))


def test_a_stack_has_no_amax_for_each_row(tmp_path):
    save(tmp_path / "in", {f"{EXPERTS}.down_proj": normal(2, 32, 64)}, {"model_type": "qwen3_moe"})
    with pytest.raises(CheckpointError, match="is a stack of experts, recipe row-scaled, layout te") as e:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(layout="te", spec=jnvfp4.ROW_SCALED))
    assert e.value.code == 2


def test_fp8_scales_of_another_shape(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    codes, scales = normal(200, 144).astype(ml_dtypes.float8_e4m3fn), np.ones((1, 2), np.float32)
    save(tmp_path / "in", {name: codes, f"{name}_scale_inv": scales}, {"model_type": "deepseek_v3"})
    with pytest.raises(CheckpointError, match=r"has shape \[1, 2\]; expected \[2, 2\], one for 128x128"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(dequantize_input="fp8-block"))


def same_slice(stack, e, weight):
    return stack.codes[e].tobytes() == weight.codes.tobytes() and stack.scales[e].tobytes() == weight.scales.tobytes()


# ---------------------------------------------------------------- FP8
def test_fp8_blocks_are_decoded(tmp_path, capsys):
    name = "model.layers.0.mlp.down_proj.weight"
    codes = normal(200, 144).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.5, 3], [0.001, 7]], np.float32)
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    save(tmp_path / "in", {name: codes, f"{name}_scale_inv": scales, "model.norm.weight": normal(16)}, config)
    factors = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :144]
    decoded = (codes.astype(np.float32) * factors).astype(ml_dtypes.bfloat16)
    save(tmp_path / "bf16", {name: decoded, "model.norm.weight": normal(16)}, {"model_type": "deepseek_v3"})
    o = ConvertOptions(dequantize_input="fp8-block", chunk_bytes=1 << 14)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", o)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "want")
    got, want = open_source(tmp_path / "out"), open_source(tmp_path / "want")
    assert got.places.keys() == want.places.keys()
    assert all(got.array(n).tobytes() == want.array(n).tobytes() for n in want.places)
    assert got.config == want.config
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "out")) == 2
    source = open_source(tmp_path / "in")
    assert "quantization_config" not in fp8_decoded(source).config
    assert source.config == config  # the view has a config of its own
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "no")]) == 3
    assert "quantized already (fp8)" in (error := capsys.readouterr().err)
    assert "--dequantize-input fp8-block" in error


@pytest.mark.parametrize("experts", ["keep", "stacked"])
def test_fp8_experts(tmp_path, experts):
    """Decoded first, then put into one tensor."""
    decoded, coded = {}, {}
    for i, role in enumerate(("gate_proj", "up_proj", "down_proj")):
        for e in (0, 1):
            name = f"{EXPERTS}.{e}.{role}.weight"
            w = normal(32, 32, seed=2 * i + e).astype(ml_dtypes.float8_e4m3fn)
            coded |= {name: w, f"{name}_scale_inv": np.full((1, 1), 2 + e, np.float32)}
            decoded[name] = (w.astype(np.float32) * (2 + e)).astype(ml_dtypes.bfloat16)
    save(tmp_path / "in", coded)
    save(tmp_path / "bf16", decoded)
    fp8 = ConvertOptions(dequantize_input="fp8-block", experts=experts)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", fp8)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "want", ConvertOptions(experts=experts))
    got, want = open_source(tmp_path / "out"), open_source(tmp_path / "want")
    assert got.places.keys() == want.places.keys()
    assert all(got.array(n).tobytes() == want.array(n).tobytes() for n in want.places)


# ---------------------------------------------------------------- what is kept
def test_kept_tensors_in_bfloat16(tmp_path):
    tensors = {"model.layers.0.mlp.down_proj.weight": normal(16, 32), "lm_head.weight": normal(16, 32),
               "model.norm.weight": normal(32).astype(np.float32) / 3, "ids": np.arange(3)}  # fmt: skip
    save(tmp_path / "in", tensors)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(high_precision_dtype="bf16"))
    out = open_source(tmp_path / "out")
    np.testing.assert_array_equal(
        out.array("model.norm.weight"), tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    )
    assert out.entry("ids").tag == "I64"
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "out")) == 4


def test_zero_and_tiny_amax(tmp_path):
    tiny = np.full((1, 16), 1e-37, np.float32)
    save(tmp_path / "in", {"a.down_proj.weight": np.zeros((1, 16), np.float32), "b.down_proj.weight": tiny})
    result = convert_checkpoint(tmp_path / "in", tmp_path / "one")
    assert any("b.down_proj" in w and "1e-37" in w for w in result.warnings)
    convert_checkpoint(tmp_path / "in", tmp_path / "te", ConvertOptions(zero_amax="te-reference"))
    stored = [float(weights_of(tmp_path / d)["a.down_proj"].global_scale) for d in ("one", "te")]
    assert stored == [1.0, float(np.float32(1) / np.finfo(np.float32).max)]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_do_not_depend_on_workers(tmp_path, workers):
    tensors = {f"model.layers.{i}.mlp.{r}.weight": normal(48, 64, seed=i) for i in range(6)
               for r in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    save(tmp_path / "in", tensors)
    o = ConvertOptions(chunk_bytes=1 << 11, max_shard_bytes=10_000)
    convert_checkpoint(tmp_path / "in", tmp_path / "want", o, workers=1)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", o, workers=workers)
    files = [{p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("want", "out")]
    assert len(files[0]) > 4
    assert files[0] == files[1]


# ---------------------------------------------------------------- layouts
@pytest.mark.parametrize("spec", [jnvfp4.NVFP4, jnvfp4.four_over_six()], ids=["nvfp4", "4over6"])
def test_te_becomes_the_others(tmp_path, spec):
    save(tmp_path / "in", {f"{EXPERTS}.down_proj": normal(2, 32, 64), "a.down_proj.weight": normal(32, 64, seed=1)},
         {"model_type": "qwen3_moe"})  # fmt: skip
    convert_checkpoint(tmp_path / "in", tmp_path / "te", ConvertOptions(layout="te", spec=spec))
    convert_checkpoint(tmp_path / "in", tmp_path / "want", ConvertOptions(spec=spec, weight_only=True))
    arguments = ["repack", str(tmp_path / "te"), str(tmp_path / "out"), "--format"]
    assert main([*arguments, "modelopt"]) == 0
    got, want = weights_of(tmp_path / "out"), weights_of(tmp_path / "want")
    assert all(same(got[m], want[m]) and got[m].global_scale.tobytes() == want[m].global_scale.tobytes() for m in want)
    assert all(r.error.relative_error < 0.12 for r in verify_checkpoint(tmp_path / "in", tmp_path / "te"))
    te = weights_of(tmp_path / "te")
    assert all(te[m].values().tobytes() == want[m].values().tobytes() for m in want)
    assert main([*arguments, "te"]) == 2


def test_row_scaled_weights_stay_in_te(tmp_path, capsys):
    save(tmp_path / "in", {"a.down_proj.weight": normal(32, 64)})
    convert_checkpoint(tmp_path / "in", tmp_path / "te", ConvertOptions(layout="te", spec=jnvfp4.ROW_SCALED))
    assert all(r.error.relative_error < 0.12 for r in verify_checkpoint(tmp_path / "in", tmp_path / "te"))
    assert main(["repack", str(tmp_path / "te"), str(tmp_path / "out"), "--format", "modelopt"]) == 2
    assert "an amax for each row" in capsys.readouterr().err


# ---------------------------------------------------------------- options
def test_the_reference_writes_the_same_files(tmp_path):
    save(tmp_path / "in", {"a.down_proj.weight": normal(32, 64), "b.norm.weight": normal(64)})
    for backend in ("cpu", "jnp"):
        arguments = [str(tmp_path / "in"), str(tmp_path / backend), "--backend", backend]
        assert main(["convert", "--quiet", *arguments]) == 0
    files = [{p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("cpu", "jnp")]
    assert files[0] == files[1]


def test_devices_that_are_not_there(tmp_path, capsys):
    save(tmp_path / "in", {"a.down_proj.weight": normal(32, 64)})
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out")]
    for more in (["--device", "cpu:99"], ["--device", "tpu0"], ["--device", "cpu", "--backend", "cuda"]):
        assert main([*arguments, *more]) == 2
        assert "device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_of_megatron(tmp_path, capsys):
    names = [f"decoder.layers.{i}.mlp.linear_fc{j}.weight" for i in (0, 1) for j in (1, 2)]
    save(tmp_path / "in", {n: normal(16, 32) for n in names})
    convert_checkpoint(
        tmp_path / "in", tmp_path / "out", ConvertOptions(keep_containing_megatron=("layers.1.mlp.linear_fc1",))
    )
    assert sorted(weights_of(tmp_path / "out")) == [n.removesuffix(".weight") for n in names if n != names[2]]
    save(tmp_path / "hf", {"model.layers.0.mlp.down_proj.weight": normal(16, 32)})
    with pytest.raises(CheckpointError, match="no name is Megatron's"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "no", ConvertOptions(keep_containing_megatron=("x",)))


def test_scales_of_activations_from_a_file(tmp_path):
    module = "model.layers.0.mlp.{}_proj".format
    save(tmp_path / "in", {f"{module(r)}.weight": normal(32, 32) for r in ("gate", "up", "down")})
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({module("gate"): 4.0, module("up"): 5.0, module("down"): 3.0}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(input_amax=scales))
    convert_checkpoint(tmp_path / "in", tmp_path / "ct", ConvertOptions(layout="compressed-tensors", input_amax=scales))
    a, b = open_source(tmp_path / "out"), open_source(tmp_path / "ct")
    for role, amax in (("gate", 5), ("up", 5), ("down", 3)):
        assert a.array(f"{module(role)}.input_scale") == np.float32(amax / 2688)
        assert b.array(f"{module(role)}.input_global_scale") == np.float32(1) / np.float32(amax / 2688)
    amaxes = {module("gate"): 4.0, module("down"): 3.0}
    for wrong in (
        {module("gate"): 4.0},
        *({**amaxes, module("down"): v} for v in (0, -1.0, True, "3", None, 1e-31, 1e31)),
    ):
        scales.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"has (no amax|the amax .*) for "):
            convert_checkpoint(tmp_path / "in", tmp_path / "no", ConvertOptions(input_amax=scales))
    scales.write_text(json.dumps({**amaxes, "other": 1.0}))
    with pytest.raises(CheckpointError, match="names 'other'; expected modules that are quantized"):
        convert_checkpoint(tmp_path / "in", tmp_path / "no", ConvertOptions(input_amax=scales))
    convert_checkpoint(tmp_path / "in", tmp_path / "yes", ConvertOptions(input_amax=scales, allow_unmatched=True))
    assert open_source(tmp_path / "yes").array(f"{module('up')}.input_scale") == np.float32(4 / 2688)


def test_groups_that_an_option_names(tmp_path):
    save(tmp_path / "in", {"m.a_proj.weight": normal(16, 32), "m.b_proj.weight": 4 * normal(16, 32, seed=1)})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(share=(r"re:(.*)\.(a|b)_proj",)))
    a, b = weights_of(tmp_path / "out").values()
    assert a.global_scale == b.global_scale
    for wrong, text in (("re:(", "no regular expression"), (".*_proj", "without a group")):
        with pytest.raises(CheckpointError, match=text):
            ConvertOptions(share=(wrong,))
    with pytest.raises(CheckpointError, match="no regular expression"):
        ConvertOptions(ignore=("re:[",))
