"""Experts taken apart and put together, FP8 decoded, and options that change what is kept."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import DOWN, array, draw_nothing, files_of, model_of, refused

import jnvfp4
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint
from jnvfp4.checkpoints._convert.views import decoded
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.checkpoints.rules import lint
from jnvfp4.checkpoints.verify import verify_checkpoint
from jnvfp4.cli import main

EXPERTS = "model.layers.0.mlp.experts"


def weights_of(directory):
    stored = open_stored(directory)
    return {m: stored.weight(m) for m in stored.modules}


def same(stack, weight, expert=...):
    """Whether a weight has the bytes of another, or of an expert of a stack."""
    return all(
        getattr(stack, part)[expert].tobytes() == getattr(weight, part).tobytes() for part in ("codes", "scales")
    )


def check_same_tensors(directory, other):
    got, want = open_source(directory), open_source(other)
    assert got.places.keys() == want.places.keys()
    assert all(got.array(n).tobytes() == want.array(n).tobytes() for n in want.places)
    assert got.config == want.config


# ---------------------------------------------------------------- experts
SIZES = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 48}
OF_SIZES = {"model_type": "of_tomorrow", "vision_config": {"hidden_size": 48}}


@pytest.mark.parametrize(
    ("config", "turned"),
    [
        ({"model_type": "qwen3_moe"}, False),
        ({"model_type": "llama4"}, True),
        ({"model_type": "gpt_oss"}, True),
        ({"model_type": "qwen3_vl_moe", "text_config": SIZES}, True),
        (OF_SIZES | SIZES, True),
        (OF_SIZES | SIZES, False),
        (OF_SIZES | {"thinker_config": {"text_config": SIZES}}, True),
    ],
    ids=str,
)
def test_experts_taken_apart(tmp_path, config, turned):
    interleaved = config["model_type"] == "gpt_oss"
    gate, up, down = array(3, 48, 64), 2 * array(3, 48, 64, seed=1), array(3, 64, 48, seed=2)
    both = np.stack([gate, up], axis=2).reshape(3, 96, 64) if interleaved else np.concatenate([gate, up], axis=1)
    stacks = {f"{EXPERTS}.gate_up_proj": both, f"{EXPERTS}.down_proj": down}
    stored = {n: np.ascontiguousarray(x.transpose(0, 2, 1)) if turned else x for n, x in stacks.items()}
    model_of(tmp_path / "in", stored, config)
    each = {f"{EXPERTS}.{e}.{r}.weight": x[e] for r, x in zip(("gate_proj", "up_proj", "down_proj"),
            (gate, up, down), strict=True) for e in range(3)}  # fmt: skip
    model_of(tmp_path / "each", each)
    for f in ("modelopt", "compressed-tensors"):
        o = ConvertOptions(layout=f, experts="per-expert", chunk_bytes=1 << 12)
        convert_checkpoint(tmp_path / "in", tmp_path / f, o)
        convert_checkpoint(tmp_path / "each", tmp_path / f"{f}_each", ConvertOptions(layout=f))
        got, want = weights_of(tmp_path / f), weights_of(tmp_path / f"{f}_each")
        assert got.keys() == want.keys()
        assert all(same(got[m], want[m]) and got[m].global_scale == want[m].global_scale for m in want)
        assert len(verify_checkpoint(tmp_path / "in", tmp_path / f)) == 9


def test_blocks_of_a_stack_along_the_wrong_axis_are_found(tmp_path):
    """Which --expert-layout writes, against the sizes of the config."""
    model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": array(2, 48, 64)}, OF_SIZES | SIZES)
    for layout in ("nk", "kn"):
        convert_checkpoint(tmp_path / "in", tmp_path / layout, ConvertOptions(expert_layout=layout))
    assert [f for f in lint(tmp_path / "kn") if not f.note] == []
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "kn")) == 1
    (found,) = (f for f in lint(tmp_path / "nk") if not f.note)
    assert (found.rule, found.where, found.fixable) == ("parts", f"{EXPERTS}.down_proj", False)
    assert found.found == "has blocks along N, by the sizes in config.json"
    with pytest.raises(CheckpointError, match=r"down_proj': has blocks along N; expected K"):
        verify_checkpoint(tmp_path / "in", tmp_path / "nk")
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "nk", expert_layout="nk")) == 1


def test_blocks_of_an_expert_along_the_wrong_axis_are_found(tmp_path):
    module = f"{EXPERTS}.0.down_proj"
    for name, shape in (("wrong", (48, 64)), ("right", (64, 48))):
        model_of(tmp_path / "in" / name, {f"{module}.weight": array(*shape)}, OF_SIZES | SIZES)
        convert_checkpoint(tmp_path / "in" / name, tmp_path / name, ConvertOptions())
        found = [(f.where, f.found) for f in lint(tmp_path / name) if not f.note]
        assert found == (
            [(f"{module}.weight", "has blocks along N, by the sizes in config.json")] if name == "wrong" else []
        )


@pytest.mark.parametrize("model_type", ["of_tomorrow", "qwen3_moe"])
def test_a_square_stack_has_the_axes_of_those_beside_it(tmp_path, model_type):
    sizes = {"model_type": model_type, "hidden_size": 96, "moe_intermediate_size": 48}
    square = array(2, 96, 96) * np.arange(1, 97)[:, None].astype(ml_dtypes.bfloat16)  # [E, K, N]
    stacks = {f"{EXPERTS}.gate_up_proj": square, f"{EXPERTS}.down_proj": array(2, 48, 96)}
    model_of(tmp_path / "in", stacks, sizes)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(experts="per-expert"))
    scales = weights_of(tmp_path / "out")[f"{EXPERTS}.0.gate_proj"].scales.astype(np.float32)
    assert scales.shape == (48, 6)
    assert scales[:, 5].min() > scales[:, 0].max()  # they grow along K


NAMES = {"llama": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


@pytest.mark.parametrize(
    ("names", "model"), [*((of, None) for of in NAMES.values()), (NAMES["llama"], "llama4")], ids=[*NAMES, "llama4"]
)
def test_experts_put_together(tmp_path, names, model):
    """A model whose own stacks are [E, K, N] has matrices [N, K] like all others."""
    shapes = zip(names, ((32, 64), (32, 64), (64, 32)), strict=True)
    parts = [(f"{EXPERTS}.{e}.{r}.weight", s, 10 * e + i) for i, (r, s) in enumerate(shapes) for e in range(3)]
    each = {name: array(*shape, seed=seed) for name, shape, seed in parts}
    model_of(tmp_path / "in", each, {"model_type": model} if model else None)
    convert_checkpoint(tmp_path / "in", tmp_path / "each")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(experts="stacked", chunk_bytes=1 << 12))
    got, want = weights_of(tmp_path / "out"), weights_of(tmp_path / "each")
    assert sorted(got) == [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]
    both = got[f"{EXPERTS}.gate_up_proj"]
    assert both.shape == (3, 64, 64)
    for e in range(3):
        halves = [want[f"{EXPERTS}.{e}.{r}"] for r in names[:2]]
        np.testing.assert_array_equal(both.codes[e], np.concatenate([w.codes for w in halves]))
        np.testing.assert_array_equal(both.scales[e], np.concatenate([w.scales for w in halves]))
        assert both.global_scale[e] == halves[0].global_scale == halves[1].global_scale
        assert same(got[f"{EXPERTS}.down_proj"], want[f"{EXPERTS}.{e}.{names[2]}"], e)
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "out")) == 2
    del each[f"{EXPERTS}.1.{names[1]}.weight"]
    model_of(tmp_path / "less", each)
    with pytest.raises(CheckpointError, match=r"experts are \[0, 2\]; expected 0 to 2"):
        convert_checkpoint(tmp_path / "less", tmp_path / "no", ConvertOptions(experts="stacked"))


def test_a_bias_of_a_stack_is_kept_with_a_warning(tmp_path):
    model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": array(2, 32, 64), f"{EXPERTS}.down_proj_bias": array(2, 32)},
         {"model_type": "qwen3_moe"})  # fmt: skip
    options = ConvertOptions(experts="per-expert", weight_only=True)
    result = convert_checkpoint(tmp_path / "in", tmp_path / "out", options)
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
        ((2, 32, 64), {}, None),
        ((2, 32, 64), {"model_type": "of_tomorrow"}, None),
        ((2, 64, 64), {"model_type": "of_tomorrow", "hidden_size": 64, "intermediate_size": 64}, None),
        ((2, 64, 64), {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64}, True),
        ((2, 64, 32), {"model_type": "llama4", "hidden_size": 64, "intermediate_size": 32}, False),
        ((2, 32, 64), {"hidden_size": 64}, True),
        ((2, 32, 64), {"moe_latent_size": 32, "hidden_size": 48}, False),
        ((2, 32, 64), {"hidden_size": 32, "moe_intermediate_size": 32, "text_config": {"hidden_size": 64}}, True),
    ],
)
def test_axes_of_a_stack(tmp_path, capsys, shape, config, kn):
    directory = model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": array(*shape)}, config)
    refused(directory, tmp_path, "stack of experts", 2, "--format", "compressed-tensors", capsys=capsys)
    if kn is None:
        refused(directory, tmp_path, r"\[E, N, K\] or \[E, K, N\]", 3, capsys=capsys)
        return
    convert_checkpoint(directory, tmp_path / "out")
    (w,) = weights_of(tmp_path / "out").values()
    assert w.kn == kn
    assert w.shape == ((shape[0], shape[2], shape[1]) if kn else shape)


def test_the_axes_of_a_stack_are_an_argument_of_reports_and_verify(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": array(2, 32, 64)}, {})
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--expert-layout=kn"]
    assert main(["convert", *arguments, "--experts=per-expert", "--report", str(tmp_path / "report")]) == 0
    assert main(["verify", *arguments]) == 0


GATE, UP, UP_OF_1 = (f"{EXPERTS}.{r}_proj.weight" for r in ("0.gate", "0.up", "1.up"))


STACK, CODES = {f"{EXPERTS}.down_proj": array(2, 32, 64)}, array(200, 144).astype(ml_dtypes.float8_e4m3fn)
UNFIT = {
    "a name twice": ({f"{EXPERTS}.up_proj": array(1, 32, 64), UP: array(32, 64)}, {"experts": "per-expert"},
                     rf"'{UP}': is in the source, and would be made of '{EXPERTS}.up_proj'"),
    "a dtype": ({UP: array(32, 64), UP_OF_1: array(32, 64).astype(np.float16)},
                {"experts": "stacked"}, r"is F16 \[32, 64\]; expected BF16 \[32, 64\], as expert 0"),
    "a shape": ({UP: array(32, 64), UP_OF_1: array(16, 64)},
                {"experts": "stacked"}, r"is BF16 \[16, 64\]; expected BF16 \[32, 64\], as expert 0"),
    "K": ({GATE: array(32, 64), UP: array(32, 32)}, {"experts": "stacked"},
          r"has \[\[32, 64\], \[32, 32\]\] for gate and up"),
    "rows of a stack": (STACK, {"layout": "te", "spec": jnvfp4.ROW_SCALED},
                        "is a stack of experts, recipe row-scaled, layout te"),
    "scales of FP8": ({DOWN: CODES, f"{DOWN}_scale_inv": np.ones((1, 2), np.float32)},
                      {"dequantize_input": "fp8"}, r"has shape \[1, 2\]; expected .* \[2, 2\], one for 128x128"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_tensors_that_do_not_fit(tmp_path, case):
    tensors, options, text = UNFIT[case]
    model_of(tmp_path / "in", tensors, {"model_type": "deepseek_v3" if "FP8" in case else "qwen3_moe"})
    with pytest.raises(CheckpointError, match=text) as error:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(**options))
    assert error.value.code == (2 if "rows" in case else 3)


# ---------------------------------------------------------------- FP8
def test_fp8_blocks_are_decoded(tmp_path, capsys):
    codes = array(200, 144).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.5, 3], [0.001, 7]], np.float32)
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    model_of(tmp_path / "in", {DOWN: codes, f"{DOWN}_scale_inv": scales, "model.norm.weight": array(16)}, config)
    factors = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :144]
    values = (codes.astype(np.float32) * factors).astype(ml_dtypes.bfloat16)
    model_of(tmp_path / "bf16", {DOWN: values, "model.norm.weight": array(16)}, {"model_type": "deepseek_v3"})
    o = ConvertOptions(dequantize_input="fp8", chunk_bytes=1 << 14)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", o)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "want")
    check_same_tensors(tmp_path / "out", tmp_path / "want")
    assert len(verify_checkpoint(tmp_path / "in", tmp_path / "out")) == 2
    source = open_source(tmp_path / "in")
    assert "quantization_config" not in decoded(source, "fp8").config
    assert source.config == config  # the view has a config of its own
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "no")]) == 3
    assert "quantized already (fp8)" in (error := capsys.readouterr().err)
    assert "--dequantize-input fp8" in error


@pytest.mark.parametrize("experts", ["keep", "stacked"])
def test_fp8_experts(tmp_path, experts):
    """Decoded first, then put into one tensor; what is beside them stays decoded."""
    decoded, coded = {}, {}
    for i, role in enumerate(("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj", "{}.o_proj")):
        for e in (0, 1):
            name = f"{EXPERTS.removesuffix('experts')}{role.format(e)}.weight"
            w = array(32, 32, seed=2 * i + e).astype(ml_dtypes.float8_e4m3fn)
            coded |= {name: w, f"{name}_scale_inv": np.full((1, 1), 2 + e, np.float32)}
            decoded[name] = (w.astype(np.float32) * (2 + e)).astype(ml_dtypes.bfloat16)
    model_of(tmp_path / "in", coded)
    model_of(tmp_path / "bf16", decoded)
    fp8 = ConvertOptions(dequantize_input="fp8", experts=experts)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", fp8)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "want", ConvertOptions(experts=experts))
    check_same_tensors(tmp_path / "out", tmp_path / "want")


# ---------------------------------------------------------------- amaxes and workers
def test_zero_and_tiny_amax(tmp_path):
    tiny = np.full((1, 16), 1e-37, np.float32)
    model_of(tmp_path / "in", {"a.down_proj.weight": np.zeros((1, 16), np.float32), "b.down_proj.weight": tiny})
    result = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert any("b.down_proj" in w and "1e-37" in w for w in result.warnings)
    assert float(weights_of(tmp_path / "out")["a.down_proj"].global_scale) == 1.0


def test_bytes_do_not_depend_on_workers(tmp_path):
    tensors = {f"model.layers.{i}.mlp.{r}.weight": array(48, 64, seed=i) for i in range(6)
               for r in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    model_of(tmp_path / "in", tensors)
    o = ConvertOptions(chunk_bytes=1 << 11, max_shard_bytes=10_000)
    for workers in (1, 2, 5):
        convert_checkpoint(tmp_path / "in", tmp_path / str(workers), o, workers=workers)
    one, *others = (files_of(tmp_path / str(workers)) for workers in (1, 2, 5))
    assert len(one) > 4
    assert others == [one, one]


# ---------------------------------------------------------------- layouts
@pytest.mark.parametrize("spec", [jnvfp4.NVFP4, jnvfp4.spec.four_over_six()], ids=["nvfp4", "4over6"])
def test_te_becomes_the_others(tmp_path, spec):
    model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": array(2, 32, 64), "a.down_proj.weight": array(32, 64, seed=1)},
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


# ---------------------------------------------------------------- options
@pytest.mark.long
def test_the_reference_writes_the_same_files(tmp_path):
    model_of(tmp_path / "in", {"a.down_proj.weight": array(32, 64), "b.norm.weight": array(64)})
    for backend in ("cpu", "jnp"):
        arguments = [str(tmp_path / "in"), str(tmp_path / backend), "--backend", backend]
        assert main(["convert", "--quiet", *arguments]) == 0
    assert files_of(tmp_path / "cpu") == files_of(tmp_path / "jnp")


def test_groups_that_an_option_names(tmp_path):
    model_of(tmp_path / "in", {"m.a_proj.weight": array(16, 32), "m.b_proj.weight": 4 * array(16, 32, seed=1)})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(share=(r"re:(.*)\.(a|b)_proj",)))
    a, b = weights_of(tmp_path / "out").values()
    assert a.global_scale == b.global_scale
