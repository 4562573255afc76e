"""Conversion of checkpoints: the bytes of independent software, and properties of every layout."""

import hashlib
import json
from importlib.util import find_spec

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import GOLDEN, TE_MODELOPT, array, draw_nothing, files_of, model_of, refused, weight
from conftest import gpus, skip_or_fail

import jnvfp4
from jnvfp4 import checkpoints
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, Exit, convert_checkpoint
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.checkpoints.compare import diff
from jnvfp4.checkpoints.load import open_checkpoint
from jnvfp4.checkpoints.report_files import write_report
from jnvfp4.checkpoints.rewrite import dequantize_checkpoint, repack_checkpoint
from jnvfp4.checkpoints.rules import lint
from jnvfp4.checkpoints.save import save_checkpoint
from jnvfp4.checkpoints.verify import VerificationError, verify_checkpoint
from jnvfp4.cli import main

MODELS = ("llama", "moe")
LAYOUTS = ("modelopt", "compressed-tensors", "te")
MINUS_ZERO = "model.layers.1.mlp.down_proj"  # row 2 begins with -0.0, whose code is 8 here and 0 there


@pytest.mark.parametrize("name", checkpoints.__all__)
def test_no_public_name_hides_a_module(name):
    assert callable(getattr(checkpoints, name))
    assert find_spec(f"jnvfp4.checkpoints.{name}") is None


# ---------------------------------------------------------------- models as they are published
def matrices(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: array(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


# By name: the config, the shapes of what is quantized, and of what is kept.
PUBLISHED = {
    "no gate": (
        {"model_type": "nemotron_h", "hidden_size": 64},
        {
            "backbone.layers.0.mixer.up_proj.weight": (96, 64),
            "backbone.layers.0.mixer.down_proj.weight": (64, 96),
            **{f"backbone.layers.1.mixer.experts.{e}.up_proj.weight": (48, 64) for e in range(3)},
            **{f"backbone.layers.1.mixer.experts.{e}.down_proj.weight": (64, 48) for e in range(3)},
            "backbone.layers.1.mixer.shared_experts.up_proj.weight": (96, 64),
            "backbone.layers.2.mixer.in_proj.weight": (96, 64),
            "backbone.layers.3.mixer.q_proj.weight": (32, 64),
        },
        {"backbone.layers.1.mixer.gate.weight": (3, 64), "backbone.layers.2.mixer.conv1d.weight": (64, 1, 4)},
    ),
    "no gate, stacks": (
        {"model_type": "nemotron_h", "hidden_size": 64},
        {
            "backbone.layers.0.mixer.up_proj.weight": (96, 64),
            "backbone.layers.0.mixer.down_proj.weight": (64, 96),
            "backbone.layers.1.mixer.experts.up_proj": (3, 48, 64),
            "backbone.layers.1.mixer.experts.down_proj": (3, 64, 48),
        },
        {"backbone.layers.1.mixer.gate.weight": (3, 64)},
    ),
    "no gate, w1 and w2": ({}, {"layers.0.mlp.w1.weight": (96, 64), "layers.0.mlp.w2.weight": (64, 96)}, {}),
    "attention with a gate": (
        {"model_type": "afmoe"},
        {
            **{f"model.layers.0.self_attn.{r}_proj.weight": (32, 64) for r in ("q", "k", "v", "gate")},
            **{f"model.layers.0.mlp.{r}_proj.weight": (96, 64) for r in ("gate", "up")},
        },
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_is_converted(tmp_path, model, layout):
    config, quantized, kept = PUBLISHED[model]
    if layout == "compressed-tensors" and any(len(shape) == 3 for shape in quantized.values()):
        pytest.skip("stores no stacks")
    model_of(tmp_path / "in", matrices(**quantized, **kept), config)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(layout=layout))
    records = verify_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {r.name for r in records if r.error} == quantized.keys()
    assert all(r.error.relative_error < 0.12 for r in records if r.error)
    assert [f for f in lint(tmp_path / "out") if not f.note] == []


# ---------------------------------------------------------------- golden
@pytest.mark.parametrize("chunk_bytes", [1 << 13, 64 << 20], ids=["slices", "whole"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_the_reference(tmp_path, model, chunk_bytes, native):
    options = ConvertOptions(chunk_bytes=chunk_bytes)
    convert_checkpoint(GOLDEN / model / "input", tmp_path / "out", options, device=native.device)
    got, want = open_source(tmp_path / "out"), open_source(GOLDEN / model / "te_modelopt")
    assert got.places.keys() == want.places.keys()
    for e in want.entries():
        assert (got.entry(e.name).tag, got.entry(e.name).shape) == (e.tag, e.shape)
        if e.name == f"{MINUS_ZERO}.weight":
            a, b = got.array(e.name).copy(), want.array(e.name)
            np.testing.assert_array_equal(a[2, :8], 0x88)
            a[2, :8] = 0
            np.testing.assert_array_equal(a, b)
        else:
            assert got.array(e.name).tobytes() == want.array(e.name).tobytes(), e.name
    for directory in (got.directory, want.directory):
        assert json.loads((directory / "config.json").read_text()).get("quantization_config")
    assert got.config == want.config


ON_GPUS = {
    "row-scaled": ConvertOptions(layout="te", spec=jnvfp4.ROW_SCALED),
    "4over6": ConvertOptions(spec=jnvfp4.spec.four_over_six()),
    "4over6 448 16x16": ConvertOptions(spec=jnvfp4.spec.four_over_six("mse", e4m3_max=448, block_rows=16)),
    "16x16": ConvertOptions(spec=jnvfp4.NVFP4_2D),
    "search": ConvertOptions(spec=jnvfp4.QuantSpec(select="search")),
}


@pytest.mark.parametrize("options", ON_GPUS.values(), ids=ON_GPUS)
def test_a_gpu_writes_the_same_files(tmp_path, options):
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "cpu", options)
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "gpu", options, device=gpus()[0], workers=3)
    assert files_of(tmp_path / "gpu") == files_of(tmp_path / "cpu")


def check_same_weights(first, second):
    found = diff(first, second)
    assert (found.codes, found.scales, found.others) == ({}, {}, [])


@pytest.mark.parametrize("model", MODELS)
def test_layouts_have_the_same_codes_and_scales(tmp_path, model):
    for f in LAYOUTS:
        convert_checkpoint(GOLDEN / model / "input", tmp_path / f, ConvertOptions(layout=f))
    for f in LAYOUTS[1:]:
        check_same_weights(tmp_path / LAYOUTS[0], tmp_path / f)


COUNTS = {"llama/ct_f32stats": (41, 267), "llama/ct_nativestats": (1375, 6966), "moe/ct_f32stats": (26, 134)}


@pytest.mark.parametrize("other", COUNTS)
def test_diff_counts(other):
    found = diff((GOLDEN / other).parent / "te_modelopt", GOLDEN / other)
    assert (sum(found.scales.values()), sum(found.codes.values())) == COUNTS[other]
    if "native" in other:
        assert len(open_stored(GOLDEN / other).modules) - len(found.globals) == 1


STORED = [(m, s) for m in MODELS for s in ("te_modelopt", "ct_f32stats", "ct_nativestats") if (GOLDEN / m / s).is_dir()]


@pytest.mark.parametrize(("model", "stored"), STORED)
def test_readers_decode_what_is_stored(model, stored):
    c = open_checkpoint(GOLDEN / model / stored)
    for module in c.stored.modules:
        t = c[f"{module}.weight"]
        got = np.asarray(jnvfp4.dequantize(t, jnp.bfloat16))
        np.testing.assert_array_equal(got, c.stored.weight(module).values().astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("model", MODELS)
def test_repack_keeps_codes_and_scales(tmp_path, model):
    repack_checkpoint(GOLDEN / model / "ct_f32stats", tmp_path / "a", "modelopt")
    repack_checkpoint(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    for out in ("a", "b"):
        check_same_weights(GOLDEN / model / "ct_f32stats", tmp_path / out)


def test_dequantized_checkpoint_is_what_readers_decode(tmp_path):
    dequantize_checkpoint(TE_MODELOPT, tmp_path / "out")
    out, stored = open_source(tmp_path / "out"), open_stored(TE_MODELOPT)
    assert "quantization_config" not in out.config
    for m in stored.modules:
        np.testing.assert_array_equal(out.array(f"{m}.weight"), stored.weight(m).values().astype(ml_dtypes.bfloat16))


# ---------------------------------------------------------------- properties
def test_a_group_is_quantized_as_its_concatenation(tmp_path):
    parts = {r: weight(32, 64, i) for i, r in enumerate(("gate_proj", "up_proj"))}
    parts["up_proj"] = ("BF16", parts["up_proj"][1] * 3)
    model_of(tmp_path / "a", {f"model.layers.0.mlp.{r}.weight": w for r, w in parts.items()})
    both = np.concatenate([w for _, w in parts.values()])
    model_of(tmp_path / "b", {"model.layers.0.mlp.gate_up_proj.weight": both})
    for d in ("a", "b"):
        convert_checkpoint(tmp_path / d, tmp_path / f"{d}_out")
    a, b = open_stored(tmp_path / "a_out"), open_stored(tmp_path / "b_out")
    one = b.weight("model.layers.0.mlp.gate_up_proj")
    two = [a.weight(f"model.layers.0.mlp.{r}") for r in parts]
    np.testing.assert_array_equal(np.concatenate([w.codes for w in two]), one.codes)
    np.testing.assert_array_equal(np.concatenate([w.scales for w in two]), one.scales)
    assert {float(w.global_scale) for w in two} == {float(one.global_scale)}


# ---------------------------------------------------------------- policy
@pytest.mark.parametrize("config", [{"num_hidden_layers": 12}, {"text_config": {"num_hidden_layers": 12}}])
def test_layers_are_numbers(tmp_path, config):
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": weight(16, 32, i) for i in (0, 1, 10, 11, 12)}
    model_of(tmp_path / "in", tensors, config)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(start_layers=2, end_layers=1))
    modules = ["model.layers.10.mlp.down_proj", "model.layers.12.mlp.down_proj"]  # the 13th of 12 is no decoder layer
    assert open_stored(tmp_path / "out").modules == modules


def test_something_must_be_left(tmp_path, capsys):
    bad, int8 = np.full((16, 32), np.nan, np.float32), ("I8", np.ones((16, 32), np.int8))
    model_of(tmp_path / "in", {"a.down_proj.weight": ("F32", bad)})
    text = "no tensor is quantized: all are not finite$"
    refused(tmp_path / "in", tmp_path, text, 3, "--on-nonfinite", "skip", capsys=capsys)
    model_of(tmp_path / "int8", {"lm_head.weight": weight(16, 32), **dict.fromkeys(("a.weight", "b.weight"), int8)})
    text = "no tensor is quantized\nhint: 2 kept: dtype I8, 1 kept: a head$"
    refused(tmp_path / "int8", tmp_path, text, 2, capsys=capsys)


def test_shards_name_the_tensors_they_were_made_of(tmp_path):
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "out")
    entries = [f"{e.name} {e.tag} {e.shape}\n" for e in open_source(GOLDEN / "llama" / "input").entries()]
    digest = hashlib.sha256("".join(entries).encode()).hexdigest()
    metadata = [file.metadata for file in open_source(tmp_path / "out").files.values()]
    assert metadata == 2 * [{"format": "pt", "jnvfp4_version": jnvfp4.__version__, "source": digest, "recipe": "nvfp4"}]


# ---------------------------------------------------------------- report
def test_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    model, report = GOLDEN / "llama" / "input", tmp_path / "report"
    assert main(["convert", str(model), str(tmp_path / "out"), "--report", str(report), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["quantized"], printed["kept"]) == (14, 7)
    assert 0.094 < printed["mean_rel_err"] < 0.095
    values = json.loads((report / "report.json").read_text(), parse_constant=pytest.fail)
    assert [t["name"] for t in values["tensors"]] == sorted(open_source(model).places)
    gate = next(t for t in values["tensors"] if t["name"] == "model.layers.0.mlp.gate_proj.weight")
    assert gate["group"] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert gate["global"] == pytest.approx(gate["amax"] / 2688)
    assert gate["seconds"] > 0
    assert (report / "report.csv").read_text().count("\n") == 22
    assert (report / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_zero_weight_has_no_error(tmp_path):
    zero = ("F32", np.zeros((3, 32), np.float32))
    model_of(tmp_path / "in", {"model.layers.0.mlp.down_proj.weight": zero})
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    (record,) = verify_checkpoint(tmp_path / "in", tmp_path / "out")
    assert record.global_scale == 1.0
    assert (record.error.relative_error, record.error.snr_db, record.error.cosine) == (0, None, None)


# ---------------------------------------------------------------- experts in one tensor
@pytest.mark.parametrize("layout", ["modelopt", "te"])
@pytest.mark.parametrize("kn", [False, True], ids=["nk", "kn"])
def test_a_stack_is_its_experts(tmp_path, kn, layout):
    rng = np.random.default_rng(5)
    stack = rng.normal(size=(3, 32, 64)).astype(np.float32) * np.array([1, 2, 0.5], np.float32)[:, None, None]
    prefix = "model.layers.0.mlp.experts"
    stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if kn else stack
    model_of(tmp_path / "stack", {f"{prefix}.gate_up_proj": stored})
    model_of(tmp_path / "each", {f"{prefix}.{e}.gate_up_proj.weight": w for e, w in enumerate(stack)})
    o = ConvertOptions(layout=layout, expert_layout="kn" if kn else "nk", chunk_bytes=1 << 12)
    for d in ("stack", "each"):
        convert_checkpoint(tmp_path / d, tmp_path / f"{d}_out", o)
    one, each = open_stored(tmp_path / "stack_out"), open_stored(tmp_path / "each_out")
    (module,) = one.modules
    w = one.weight(module)
    assert w.kn == kn
    assert one.source.entry(one.parts(module).scales).shape == ((3, 4, 32) if kn else (3, 32, 4))
    for e in range(3):
        v = each.weight(f"{prefix}.{e}.gate_up_proj")
        np.testing.assert_array_equal(w.codes[e], v.codes)
        np.testing.assert_array_equal(w.scales[e], v.scales)
        assert w.global_scale[e] == v.global_scale.reshape(())
    (record,) = verify_checkpoint(tmp_path / "stack", tmp_path / "stack_out")
    assert record.error.relative_error < 0.1
    t = open_checkpoint(tmp_path / "stack_out")[module]
    np.testing.assert_array_equal(np.asarray(jnvfp4.dequantize(t, jnp.bfloat16)), w.values().astype(ml_dtypes.bfloat16))
    dequantize_checkpoint(tmp_path / "stack_out", tmp_path / "back", "F32")
    back = open_source(tmp_path / "back").array(module)
    np.testing.assert_array_equal(back.transpose(0, 2, 1) if kn else back, w.values())


# ---------------------------------------------------------------- from memory
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_tensors_come_back(tmp_path, layout):
    w = jnp.asarray(weight(32, 64)[1])
    tensors = {
        "model.layers.0.mlp.down_proj.weight": jnvfp4.quantize(w, jnvfp4.NVFP4),
        "model.norm.weight": jnp.ones(64, jnp.bfloat16),
        "lm_head.weight": w,
    }
    save_checkpoint(tensors, tmp_path / "out", layout, config={"model_type": "llama"})
    c = open_checkpoint(tmp_path / "out")
    assert sorted(c) == sorted(tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]  # without the norm
    t, got = tensors["model.layers.0.mlp.down_proj.weight"], c["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(got.data, t.data)
    np.testing.assert_array_equal(np.asarray(got.scale).view(np.uint8), np.asarray(t.scale).view(np.uint8))
    np.testing.assert_array_equal(jnvfp4.dequantize(got, jnp.bfloat16), jnvfp4.dequantize(t, jnp.bfloat16))
    np.testing.assert_array_equal(c["lm_head.weight"], w)
    with pytest.raises(CheckpointError, match="window64"):
        save_checkpoint({"a.weight": jnvfp4.quantize(w, jnvfp4.WINDOW64)}, tmp_path / "no", layout)
    with pytest.raises(CheckpointError, match="layout is 'x'; expected modelopt or compressed-tensors"):
        save_checkpoint(tensors, tmp_path / "no", layout="x")


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_te_stores_what_amaxes_were_found_for(tmp_path, e4m3_max):
    w = jnp.asarray(weight(32, 64)[1])
    t = jnvfp4.quantize(w, jnvfp4.spec.four_over_six(e4m3_max=e4m3_max))
    save_checkpoint({"a.down_proj.weight": t, "b.down_proj.weight": w}, tmp_path / "out", "te")
    got = open_checkpoint(tmp_path / "out")
    assert got["a.down_proj.weight"].format.e4m3_max == e4m3_max
    np.testing.assert_array_equal(jnvfp4.dequantize(got["a.down_proj.weight"]), jnvfp4.dequantize(t))
    assert got.config["quantization_config"]["ignore"] == ["b.down_proj", "lm_head"]
    save_checkpoint({"a.down_proj.weight": t}, tmp_path / "modelopt")  # which stores scales
    config = tmp_path / "modelopt" / "config.json"
    config.write_text(config.read_text().replace('"quant_method"', f'"e4m3_max": {e4m3_max}, "quant_method"'))
    assert open_checkpoint(config.parent)["a.down_proj.weight"].format.e4m3_max == 448
    other = jnvfp4.quantize(w, jnvfp4.spec.four_over_six(e4m3_max=704 - e4m3_max))
    both = {"a.down_proj.weight": t, "b.down_proj.weight": other}
    with pytest.raises(CheckpointError, match=r"tensors have e4m3_max \[256, 448\]; expected one, in layout te"):
        save_checkpoint(both, tmp_path / "no", "te")


def test_tensors_that_loaders_would_read_differently_are_not_saved(tmp_path):
    w = jnp.asarray(weight(32, 64)[1])
    tensors = {"m.mlp.gate.weight": w, "m.mlp.gate_proj.weight": jnvfp4.quantize(w)}
    with pytest.raises(CheckpointError, match=r"vLLM would keep it because of 'm\.mlp\.gate'") as found:
        save_checkpoint(tensors, tmp_path / "out")
    assert found.value.code == Exit.CONFLICT
    assert not (tmp_path / "out").exists()


def test_saved_groups_have_one_amax(tmp_path):
    w = jnp.asarray(weight(32, 64)[1])
    gate, up = jnvfp4.quantize(w), jnvfp4.quantize(2 * w)
    tensors = {"a.gate_proj.weight": gate, "a.up_proj.weight": up}
    with pytest.raises(CheckpointError, match=r"another amax than 'a\.gate_proj'") as found:
        save_checkpoint(tensors, tmp_path / "no")
    assert found.value.code == Exit.CONFLICT
    rows = {name: jnvfp4.quantize(i * w, jnvfp4.ROW_SCALED) for i, name in enumerate(tensors, 1)}
    save_checkpoint(rows, tmp_path / "rows", "te")  # which only jnvfp4 reads
    tensors["a.gate_proj.weight"] = jnvfp4.quantize(w, amax=up.amax)
    save_checkpoint(tensors, tmp_path / "out")
    save_checkpoint({"a.down_proj.weight": w}, tmp_path / "plain")
    convert_checkpoint(tmp_path / "plain", tmp_path / "converted")


# ---------------------------------------------------------------- verification
def changed(directory, name, value):
    """Writes a number over the first bytes of a tensor."""
    entry = open_source(directory).entry(name)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[entry.begin : entry.begin + len(value)] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("weight_scale", b"\x7f", "block scales that are negative or NaN"),
        ("weight_scale", b"\x80", "block scales that are negative or NaN"),
        ("weight_scale_2", np.float32(np.nan).tobytes(), "has a global scale of nan"),
        ("weight_scale_2", np.float32(1e3).tobytes(), "relative error is"),
        ("weight_scale_2", np.float32(3e38).tobytes(), "relative error is nan"),
    ],
)
def test_verify_finds_what_is_no_number(tmp_path, monkeypatch, part, value, text):
    draw_nothing(monkeypatch)
    model_of(tmp_path / "in", {"a.down_proj.weight": weight(16, 32), "b.o_proj.weight": weight(16, 32)})
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    changed(tmp_path / "out", f"a.down_proj.{part}", value)
    with pytest.raises(VerificationError, match=f"a.down_proj.*{text}") as found:
        verify_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "b.o_proj.weight" in [r.name for r in found.value.records]
    write_report(tmp_path / "report", found.value.records)
    json.loads((tmp_path / "report" / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_finds_groups_with_different_global_scales(tmp_path, layout):
    """Each weight alone is as near to its source as before."""
    model_of(tmp_path / "in", {f"a.{r}_proj.weight": weight(16, 32, i) for i, r in enumerate(("gate", "up"))})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", ConvertOptions(layout=layout))
    assert all(0.08 < r.error.relative_error < 0.11 for r in verify_checkpoint(tmp_path / "in", tmp_path / "out"))
    out = open_stored(tmp_path / "out")
    next_scale = np.nextafter(out.weight("a.up_proj").global_scale, np.float32(np.inf))
    changed(tmp_path / "out", out.parts("a.up_proj").global_scale, next_scale.tobytes())
    text = r"'a\.up_proj\.weight': has another global scale than 'a\.gate_proj\.weight'"
    with pytest.raises(VerificationError, match=text) as found:
        verify_checkpoint(tmp_path / "in", tmp_path / "out")
    assert len(found.value.failures) == 1
    assert found.value.code == Exit.VERIFICATION
