"""repack, dequantize and diff: what they write beside the weights, what they refuse, and what they leave in memory."""

import json
import shutil
from functools import partial
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from checkpoints import DOWN, GATE, GOLDEN, UP, files_of, model_of, weight, write

import jnvfp4
from jnvfp4.checkpoints import compare, rewrite
from jnvfp4.checkpoints._convert.options import ConvertOptions
from jnvfp4.checkpoints._files.errors import CheckpointError, Exit
from jnvfp4.checkpoints._files.safetensors import File
from jnvfp4.checkpoints._files.source import CONFIG, open_source
from jnvfp4.checkpoints._layouts.base import FLOAT_MAX, decode_scale, encode_scale
from jnvfp4.checkpoints._layouts.layouts import LAYOUTS, LayoutName
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.checkpoints.compare import diff
from jnvfp4.checkpoints.convert import convert_checkpoint
from jnvfp4.checkpoints.load import open_checkpoint
from jnvfp4.checkpoints.rewrite import dequantize_checkpoint, repack_checkpoint
from jnvfp4.cli import main

HF_QUANT = "hf_quant_config.json"
ROUTER = "model.layers.0.mlp.gate.weight"
NORM = "model.norm.weight"
CT: LayoutName = "compressed-tensors"
REWRITTEN = (partial(repack_checkpoint, layout="modelopt"), dequantize_checkpoint)


def quantized(directory, tensors=None, config=None, **options):
    """A checkpoint `out` of these tensors, by default an MLP with a kept head and a norm."""
    default = {DOWN: weight(32, 64), "lm_head.weight": weight(7, 64), NORM: ("F32", np.ones(5, np.float32))}
    model = model_of(directory / "in", tensors or default, config)
    convert_checkpoint(model, directory / "out", ConvertOptions(**options))
    return directory / "out"


def json_of(path):
    return json.loads(path.read_text())


def changed_json(path, change):
    value = json_of(path)
    change(value)
    path.write_text(json.dumps(value))


# ---------------------------------------------------------------- what loaders read
def test_the_ignore_list_is_that_of_the_new_layout(tmp_path):
    names = ["q", "k", "v"]
    kept = {f"model.layers.1.self_attn.{n}_proj.weight": weight(32, 64) for n in names}
    embedding = {"model.embed_tokens.weight": weight(32, 64)}
    options = {"ignore": ("model.layers.1.*",), "weight_only": True}
    out = quantized(tmp_path, {DOWN: weight(32, 64)} | kept | embedding, layout=CT, **options)
    changed_json(out / CONFIG, lambda c: c["quantization_config"].update(ignore=["lm_head", "re:.*layers.1.*"]))
    repack_checkpoint(out, tmp_path / "modelopt", "modelopt")
    convert_checkpoint(tmp_path / "in", tmp_path / "want", ConvertOptions(**options))
    got, want = ((tmp_path / d / HF_QUANT).read_text() for d in ("modelopt", "want"))
    assert got == want
    assert "qkv_proj" in got
    assert json_of(tmp_path / "modelopt" / CONFIG) == json_of(tmp_path / "want" / CONFIG)
    repack_checkpoint(tmp_path / "modelopt", tmp_path / "back", CT)
    ignore = json_of(tmp_path / "back" / CONFIG)["quantization_config"]["ignore"]
    assert ignore == ["lm_head", *(f"model.layers.1.self_attn.{n}_proj" for n in sorted(names))]


@pytest.mark.parametrize("layout", ["modelopt", CT])
def test_an_amax_becomes_the_scale_of_its_block_scales(tmp_path, layout):
    """4over6 leaves block scales at most 256, and the amax of layout te is without its divisor."""
    spec = jnvfp4.four_over_six()
    of_te = quantized(tmp_path / "te", layout="te", spec=spec)
    repack_checkpoint(of_te, tmp_path / "repacked", layout)
    converted = quantized(tmp_path / "converted", layout=layout, spec=spec)
    got, want = (open_stored(path).weight(DOWN.removesuffix(".weight")) for path in (tmp_path / "repacked", converted))
    assert got.global_scale.tobytes() == want.global_scale.tobytes()
    np.testing.assert_array_equal(got.values(), want.values())


def test_layers_that_are_kept_completely_are_in_the_ignore_list_of_modelopt():
    kept = ["model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj", "model.layers.10.mlp.up_proj"]
    quantized = ["model.layers.2.mlp.up_proj", "model.layers.3.mlp.down_proj"]
    entries = ["lm_head", *kept]
    assert LAYOUTS[CT].ignore_list(kept, quantized) == sorted(entries)
    more = ["model.layers.10.mlp.gate_up_proj", "model.layers.1.*", "model.layers.10.*"]
    assert LAYOUTS["modelopt"].ignore_list(kept, quantized) == sorted([*entries, *more])


def test_fused_modules_are_in_the_ignore_list_if_every_part_is_kept():
    """And a head that is quantized is not."""
    assert LAYOUTS[CT].ignore_list(["m.gate"], ["lm_head", "m.down_proj"]) == ["m.gate"]
    kept = ["m.experts.0.up_proj", "n.experts.0.up_proj", "m.q_proj", "n.q_proj", "n.k_proj"]
    entries = LAYOUTS["modelopt"].ignore_entries({"lm_head", *kept}, {"m.experts.1.up_proj", "m.k_proj"})
    assert sorted(entries) == [
        "lm_head",
        "m.experts.0.up_proj",
        "m.q_proj",
        "n.experts",
        "n.k_proj",
        "n.q_proj",
        "n.qkv_proj",
    ]
    with pytest.raises(CheckpointError, match="is kept, but vLLM would quantize it"):
        LAYOUTS["modelopt"].ignore_list(["m.q_proj"], ["m.k_proj"])


def test_kept_experts_in_one_tensor_are_in_the_ignore_list(tmp_path):
    stack = "model.layers.0.mlp.experts.down_proj"
    experts = ("BF16", np.ones((2, 32, 64), ml_dtypes.bfloat16))
    out = quantized(tmp_path, {DOWN: weight(32, 64), stack: experts}, ignore=(stack,), expert_layout="nk")
    repack_checkpoint(out, tmp_path / "back", CT)
    assert stack in json_of(tmp_path / "back" / CONFIG)["quantization_config"]["ignore"]


def test_a_conflict_between_loaders_is_found_before_anything_is_written(tmp_path):
    """The router's entry is a substring of a quantized module's name, which one layout's loader takes for a match."""
    out = quantized(tmp_path, {GATE: weight(32, 64), UP: weight(32, 64), ROUTER: weight(4, 64)}, layout=CT)
    with pytest.raises(CheckpointError, match=r"but vLLM would keep it because of 'model.layers.0.mlp.gate'") as found:
        repack_checkpoint(out, tmp_path / "back", "modelopt")
    assert found.value.code == Exit.CONFLICT
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("layout", ["modelopt", CT])
@pytest.mark.parametrize("claimed", [True, False])
def test_a_kv_cache_of_fp8_is_taken_over(tmp_path, layout, claimed):
    out = quantized(tmp_path, layout="modelopt", kv_cache="fp8" if claimed else "none")
    if layout == CT:
        repack_checkpoint(out, tmp_path / "ct", layout)
        scheme = json_of(tmp_path / "ct" / CONFIG)["quantization_config"]["kv_cache_scheme"]
        fields = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        assert scheme == (fields if claimed else None)
        out = tmp_path / "ct"
    repack_checkpoint(out, tmp_path / "back", "modelopt")
    assert json_of(tmp_path / "back" / HF_QUANT)["quantization"]["kv_cache_quant_algo"] == ("FP8" if claimed else None)
    assert ("kv_cache_scheme" in json_of(tmp_path / "back" / CONFIG)["quantization_config"]) == claimed


FP8_SCHEME = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("where", "name", "claim"),
    [(file, "kv_cache_quant_algo", "FP8") for file in (HF_QUANT, CONFIG)] + [(CONFIG, "kv_cache_scheme", FP8_SCHEME)],
)
def test_one_claim_of_a_kv_cache_is_enough(tmp_path, where, name, claim):
    out = quantized(tmp_path)
    section = "quantization" if where == HF_QUANT else "quantization_config"
    changed_json(out / where, lambda c: c[section].update({name: claim}))
    repack_checkpoint(out, tmp_path / "a", CT)
    assert json_of(tmp_path / "a" / CONFIG)["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.parametrize("layout", ["modelopt", CT])
def test_activation_scales_are_those_of_the_layout(tmp_path, layout):
    weights = {DOWN: weight(32, 64), "a.o_proj.weight": weight(16, 32)}
    out = quantized(tmp_path, weights, layout=layout, input_amax=1344)
    other = CT if layout == "modelopt" else "modelopt"
    repack_checkpoint(out, tmp_path / "other", other)
    stored = {"modelopt": ("input_scale", 0.5), CT: ("input_global_scale", 2.0)}
    for directory, (name, value) in ((out, stored[layout]), (tmp_path / "other", stored[other])):
        assert open_source(directory).array(f"{DOWN.removesuffix('weight')}{name}").reshape(()) == value
    source = open_source(out)  # again without one of the two scales
    some = {e.name: (e.tag, source.read(e.name)) for e in source.entries() if e.name != f"a.o_proj.{stored[layout][0]}"}
    write(out / "model.safetensors", some)
    repack_checkpoint(out, tmp_path / "some", other)
    assert json_of(tmp_path / "some" / CONFIG)["quantization_config"]["config_groups"]["group_0"]["input_activations"]


@pytest.mark.parametrize("rewritten", REWRITTEN, ids=["repack", "dequantize"])
def test_the_index_lists_every_tensor(tmp_path, rewritten):
    convert_checkpoint(GOLDEN / "llama" / "input", tmp_path / "two")
    rewritten(tmp_path / "two", tmp_path / "out")
    index, source = json_of(tmp_path / "out" / "model.safetensors.index.json"), open_source(tmp_path / "out")
    assert len(source.files) == 2
    assert index == {"metadata": {"total_size": source.nbytes}, "weight_map": dict(sorted(source.places.items()))}


# ---------------------------------------------------------------- globals
def test_globals_are_finite_both_ways(tmp_path):
    tiny = np.full((16, 32), 1e-37, ml_dtypes.bfloat16)
    out = quantized(tmp_path, {DOWN: ("BF16", tiny)})
    scale = open_stored(out).weight(DOWN.removesuffix(".weight")).global_scale
    assert 0 < scale < 3e-39
    assert repack_checkpoint(out, tmp_path / "ct", CT) == 0
    assert open_stored(tmp_path / "ct").weight(DOWN.removesuffix(".weight")).global_scale == FLOAT_MAX
    repack_checkpoint(tmp_path / "ct", tmp_path / "back", "modelopt")
    assert diff(out, tmp_path / "back").same


@pytest.mark.parametrize("stored", ["llama/ct_f32stats", "moe/ct_f32stats", "llama/te_modelopt"])
def test_repacking_counts_the_globals_that_change(tmp_path, stored):
    """Over there and back again the bytes differ in so many globals; an amax has no way back."""
    source = GOLDEN / stored
    layouts = ("modelopt", CT) if "ct" in stored else (CT, "modelopt")
    count = repack_checkpoint(source, tmp_path / "there", layouts[0])
    repack_checkpoint(tmp_path / "there", tmp_path / "back", layouts[1])
    a, b = open_stored(source), open_stored(tmp_path / "back")
    scales = [(a.weight(m).global_scale.reshape(()), b.weight(m).global_scale.reshape(())) for m in a.modules]
    assert count == sum(v != w for v, w in scales)
    assert repack_checkpoint(source, tmp_path / "same", layouts[1]) == 0
    options = ConvertOptions(layout="te")
    convert_checkpoint(GOLDEN / stored.partition("/")[0] / "input", tmp_path / "te", options)
    assert repack_checkpoint(tmp_path / "te", tmp_path / "of_te", CT) == 0


def test_reciprocals_of_globals():
    some = np.float32([1e-45, 0.5, 3, FLOAT_MAX, 0])
    np.testing.assert_array_equal(decode_scale(some), np.float32([FLOAT_MAX, 2, 1 / 3, 2.938736e-39, FLOAT_MAX]))
    assert decode_scale(decode_scale(encode_scale(1e-40))) == FLOAT_MAX
    assert np.isnan(decode_scale(np.nan))
    assert encode_scale(np.inf) == encode_scale(0) == 1


# ---------------------------------------------------------------- dequantize
@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_the_config_says_what_dtype_was_written(tmp_path, dtype, name):
    old = {"model_type": "llama", "torch_dtype": "?", "dtype": "?", "text_config": {"dtype": "?", "x": 1}}
    out = quantized(tmp_path, config=old)
    dequantize_checkpoint(out, tmp_path / "back", dtype)
    new = {"model_type": "llama", "torch_dtype": name, "dtype": name, "text_config": {"dtype": name, "x": 1}}
    assert json_of(tmp_path / "back" / CONFIG) == new
    changed_json(out / CONFIG, lambda c: [c.pop(key) for key in ("torch_dtype", "dtype")])
    dequantize_checkpoint(out, tmp_path / "again", dtype)
    assert {k: v for k, v in json_of(tmp_path / "again" / CONFIG).items() if "dtype" in k} == {"torch_dtype": name}


def test_a_multimodal_config_says_nothing_of_the_old_quantization(tmp_path):
    """Its language model may name it instead of the model."""
    out = quantized(tmp_path, config={"text_config": {"x": 1}})
    changed_json(out / CONFIG, lambda c: c["text_config"].update(quantization_config=c.pop("quantization_config")))
    for name, writer in (("back", dequantize_checkpoint), ("again", partial(repack_checkpoint, layout=CT))):
        writer(out, tmp_path / name)
        assert json_of(tmp_path / name / CONFIG)["text_config"] == {"x": 1}
        assert open_checkpoint(tmp_path / name)[NORM].shape == (5,)
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == [CONFIG, "model.safetensors"]


def test_values_that_f16_cannot_hold_are_an_error(tmp_path, capsys):
    large = np.zeros((32, 64), np.float32)
    large[3, :2], large[20, 5], large[21, 5] = 7e4, -1e5, 6e4
    out = quantized(tmp_path, {GATE: weight(32, 64), UP: weight(32, 64), DOWN: ("F32", large)})
    assert main(["dequantize", str(out), str(tmp_path / "back"), "--dtype", "f16"]) == Exit.BAD_INPUT
    w = open_stored(out).weight(DOWN.removesuffix(".weight")).values()
    count = int((np.abs(w) >= 65520).sum())
    assert count == 3
    assert f"error: tensor '{DOWN}': has {count} values that are not finite in F16" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    assert main(["dequantize", str(out), str(tmp_path / "back"), "--dtype", "f32"]) == 0
    np.testing.assert_array_equal(open_source(tmp_path / "back").array(DOWN), w)
    rows = quantized(tmp_path / "rows", {DOWN: ("F32", large)}, layout="te", spec=jnvfp4.ROW_SCALED)
    with pytest.raises(CheckpointError, match="values that are not finite in F16"):  # most rows have a small amax
        dequantize_checkpoint(rows, tmp_path / "none", "F16")


def test_a_large_global_alone_is_no_error(tmp_path):
    """6 * 448 * S_dec is above 65504, the values are not: rounding to it is fine."""
    most = np.full((16, 32), 65504, np.float32)
    out = quantized(tmp_path, {DOWN: ("F32", most)})
    with open(out / "model.safetensors", "r+b") as file:
        entry = open_source(out).entry(DOWN.removesuffix("weight") + "weight_scale_2")
        file.seek(entry.begin)
        file.write(np.float32(65515 / 2688).tobytes())
    dequantize_checkpoint(out, tmp_path / "back", "F16")
    assert (open_source(tmp_path / "back").array(DOWN) == 65504).all()


# ---------------------------------------------------------------- refused before the output is made
def test_rows_are_refused_before_the_output_is_made(tmp_path):
    out = quantized(tmp_path, layout="te", spec=jnvfp4.ROW_SCALED)
    with pytest.raises(CheckpointError, match="has an amax per row") as found:
        repack_checkpoint(out, tmp_path / "back", "modelopt")
    assert found.value.code == Exit.USAGE
    assert not (tmp_path / "back").exists()


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    out = quantized(tmp_path)

    hint = "\nhint: the output is not complete: remove it and run the command again"
    for step, text in (("writing", ""), ("copy_companions", hint)):  # before and after there is something to remove
        monkeypatch.setattr(rewrite, step, mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match=rf"cannot be written \(No space left on device\){text}$") as found:
            repack_checkpoint(out, tmp_path / "back", "modelopt")
        monkeypatch.undo()
        assert found.value.code == Exit.IO
    assert not (tmp_path / "back" / CONFIG).exists()


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("work", REWRITTEN, ids=["repack", "dequantize"])
def test_the_size_of_slices_changes_no_byte(tmp_path, monkeypatch, work):
    tensors = {DOWN: weight(48, 64), "lm_head.weight": weight(40, 64), NORM: ("F32", np.float32(2))}
    out = quantized(tmp_path, tensors)
    work(out, tmp_path / "whole")
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 100)
    work(out, tmp_path / "slices")
    assert files_of(tmp_path / "slices") == files_of(tmp_path / "whole")


def test_pages_are_released(tmp_path, monkeypatch):
    out = quantized(tmp_path)
    released, release = set(), File.release
    monkeypatch.setattr(File, "release", lambda file, name: (released.add(name), release(file, name)))
    diff(out, out)
    module = DOWN.removesuffix(".weight")
    assert released >= {DOWN, f"{module}.weight_scale", "lm_head.weight", NORM}


def test_an_empty_tensor_at_the_end_of_a_page_is_released(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"a": ("U8", np.zeros(1, np.uint8)), "z": ("U8", np.zeros(0, np.uint8))})
    n = 4096 - path.stat().st_size - 2  # digits more of the numbers in the header
    for size in range(n - 16, n + 16):
        write(path, {"a": ("U8", np.zeros(size, np.uint8)), "z": ("U8", np.zeros(0, np.uint8))})
        if path.stat().st_size == 4096:
            break
    assert path.stat().st_size == 4096
    File(path).release("z")


def test_diff_counts_by_slices(tmp_path, monkeypatch):
    tensors = {DOWN: weight(48, 64), "lm_head.weight": weight(7, 64), NORM: ("F32", np.float32(2))}
    a = quantized(tmp_path, tensors)
    b = tmp_path / "b"
    repack_checkpoint(a, b, "modelopt")
    source = open_source(b)
    with open(b / "model.safetensors", "r+b") as file:
        for name, at, n in ((DOWN, 1000, 300), (DOWN[:-6] + "weight_scale", 30, 99), ("lm_head.weight", 800, 1)):
            entry = source.entry(name)
            file.seek(entry.begin + at)
            part = file.read(n)
            file.seek(entry.begin + at)
            file.write(bytes(255 - x for x in part))
    monkeypatch.setattr(compare, "CHUNK_BYTES", 64)
    found = diff(a, b)
    assert (found.codes, found.scales, found.globals) == ({DOWN: 300}, {DOWN: 99}, {})
    assert found.others == ["lm_head.weight"]
    assert open_checkpoint(b)[DOWN].shape == (48, 64)
    assert diff(a, a).same


# ---------------------------------------------------------------- diff
ALGORITHM = ["config.json: quantization_config.config_groups", "config.json: quantization_config.quant_algo",
             "hf_quant_config.json: quantization.quant_algo"]  # fmt: skip
DIFFERENT = {
    "weight-only": ({}, {"weight_only": True}, {"activations": {DOWN: 1}, "configs": ALGORITHM}),
    "activation scales": ({"input_amax": 2.0}, {"input_amax": 3.0}, {"activations": {DOWN: 1}}),
    "KV cache": ({}, {"kv_cache": "fp8"}, {"configs": ["config.json: quantization_config.kv_cache_scheme",
                                                       "hf_quant_config.json: quantization.kv_cache_quant_algo"]}),
    "recipe": ({"layout": "te"}, {"layout": "te", "spec": jnvfp4.four_over_six()}, None),
    "layouts": ({}, {"layout": CT}, {}),
    "layouts, weight-only": ({"weight_only": True}, {"layout": CT}, {"activations": {DOWN: 1}}),
    "nothing": ({"input_amax": 2.0}, {"input_amax": 2.0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_diff_finds_what_differs(tmp_path, capsys, case):
    *options, expected = DIFFERENT[case]
    a, b = (quantized(tmp_path / name, **values) for name, values in zip("ab", options, strict=True))
    found = diff(a, b)
    got = {k: v for k, v in vars(found).items() if v}
    if expected is None:
        assert {"codes", "configs"} <= got.keys()
    else:
        assert got == expected
    assert found.same == (expected == {})
    for first, second in ((a, b), (b, a)):
        assert main(["diff", str(first), str(second), "--json"]) == (0 if found.same else 1)
        assert json.loads(capsys.readouterr().out) == vars(diff(first, second))


def test_diff_names_what_only_one_has(tmp_path):
    a = quantized(tmp_path / "a", {DOWN: weight(32, 64), NORM: weight(1, 4)})
    b = quantized(tmp_path / "b", {DOWN: weight(32, 64), GATE: weight(16, 32), UP: weight(16, 32)})
    for found, only in ((diff(a, b), ([NORM], [GATE, UP])), (diff(b, a), ([GATE, UP], [NORM]))):
        assert (found.only_first, found.only_second, found.others, found.same) == (*only, [], False)
    kept = quantized(tmp_path / "kept", {DOWN: weight(32, 64), NORM: weight(1, 4), "x.o_proj.weight": weight(16, 32)},
                     layout=CT, ignore=("*.down_proj",))  # fmt: skip
    assert diff(a, kept).others == [DOWN]
    assert main(["diff", str(a), str(tmp_path / "a" / "in")]) == 3
    turned = quantized(tmp_path / "c", {DOWN: weight(64, 32), NORM: weight(4, 1)})  # as many bytes
    assert diff(a, turned).others == [DOWN, NORM]
    half, brain = (
        quantized(tmp_path / tag, {DOWN: weight(32, 64), NORM: (tag, np.zeros(4, dtype))})
        for tag, dtype in (("F16", np.float16), ("BF16", ml_dtypes.bfloat16))
    )
    assert diff(half, brain).others == [NORM]  # the same bytes


def without(*keys):
    return lambda config: [config.pop(key) for key in keys]


@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        (HF_QUANT, lambda c: c.update(producer={"name": "other", "version": "1"}), [f"{HF_QUANT}: producer"]),
        (HF_QUANT, lambda c: c.update(more=None), [f"{HF_QUANT}: more"]),
        (HF_QUANT, without("producer"), [f"{HF_QUANT}: producer"]),
        (CONFIG, lambda c: c.update(more=None), ["config.json: more"]),
        (CONFIG, lambda c: c.update(num_hidden_layers=True), ["config.json: num_hidden_layers"]),
        (CONFIG, without("model_type"), ["config.json: model_type"]),
        (CONFIG, lambda c: c["quantization_config"]["ignore"].append("x"), ["config.json: quantization_config.ignore"]),
    ],
)
def test_diff_finds_any_entry_of_a_config(tmp_path, capsys, file, change, found):
    """An entry that is null is not absent, and true is not 1."""
    a, b = quantized(tmp_path, config={"model_type": "llama", "num_hidden_layers": 1}), tmp_path / "b"
    shutil.copytree(a, b)
    changed_json(b / file, change)
    assert diff(a, b).configs == found
    assert main(["diff", str(a), str(b)]) == 1
