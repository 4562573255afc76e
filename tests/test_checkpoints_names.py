"""What names say: which modules are kept whatever model they are of, layers, and groups; and names of any kind."""

import io
import json
import os
import sys
import tempfile
from dataclasses import FrozenInstanceError
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from checkpoints import GOLDEN, model_of, weight

from jnvfp4._core.patterns import layer_of
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    convert_checkpoint,
    dequantize_checkpoint,
    inspect,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
    write_report,
)
from jnvfp4.checkpoints._convert.plan import make_plan
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.layouts import LAYOUTS
from jnvfp4.checkpoints._layouts.names import Group, groups_of
from jnvfp4.cli import main

ROUTERS = (
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate.wg",
    "model.layers.0.mlp.router.classifier",
    "transformer.blocks.0.ffn.router.layer",
    "model.layers.0.feed_forward.gate",
    "model.layers.0.block_sparse_moe.gate",
    "model.layers.0.mlp.shared_expert_gate",
)
HEADS = ("lm_head", "embed_out", "output_layer", "output", "model.layers.61.shared_head.head", "score")
EMBEDDINGS = ("model.embed_tokens", "gpt_neox.embed_in", "tok_embeddings", "model.embed_tokens_per_layer", "shared")
MTP = (
    "mtp.fc",
    "model.mtp.layers.0.mlp.down_proj",
    "model.mtp_layers.0.input_proj",
    "model.layers.61.eh_proj",
    "model.layers.61.self_attn.o_proj",
    "model.layers.62.mlp.down_proj",
    "model.nextn.0.mlp.down_proj",
)
IN_16_BITS = (
    "model.layers.0.self_attn.indexer.wk",
    "layers.0.attn.indexer.weights_proj",
    "model.layers.0.linear_attn.in_proj_a",
    "model.layers.0.linear_attn.in_proj_b",
    "model.layers.0.linear_attn.in_proj_ba",
)
OTHERS = (
    "model.layers.62.enorm",
    "vit.blocks.0.attn.qkv",
    "multi_modal_projector.linear_1",
    "model.vision_tower.layers.0.mlp.fc1",
)
PROJECTIONS = (
    "model.layers.0.self_attn.gate",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.mlp.experts.0.down_proj",
    "transformer.h.0.attn.c_attn",
    "model.layers.0.mlp.activity",
    "model.layers.0.self_attn.indexer.wq_b",
    "model.layers.0.attention.wk",
    "model.layers.6.self_attn.o_proj",
    "model.layers.0.mlp.fc",
)


def planned(tmp_path, modules, **options):
    w = np.zeros((32, 32), ml_dtypes.bfloat16)
    shard = {f"{m}.weight": ("BF16", w) for m in modules}
    directory = tmp_path / "in"
    if not directory.exists():
        model_of(directory, shard, {"model_type": "llama", "num_hidden_layers": 2})
    return make_plan(open_source(directory), ConvertOptions(**options))


def test_what_is_kept_in_models_of_all_kinds(tmp_path):
    plan = planned(tmp_path, (*ROUTERS, *HEADS, *EMBEDDINGS, *MTP, *IN_16_BITS, *OTHERS, *PROJECTIONS))
    reasons = {name.removesuffix(".weight"): item.choice.reason for name, item in plan.items.items()}
    expected = {
        **dict.fromkeys(ROUTERS, "a router"),
        **dict.fromkeys(HEADS, "a head"),
        **dict.fromkeys(EMBEDDINGS, "embedding"),
        **dict.fromkeys(MTP, "multi-token prediction"),
        **dict.fromkeys(IN_16_BITS, "in 16 bits in loaders"),
        **dict.fromkeys(OTHERS, "no projection of the language model"),
        **dict.fromkeys(PROJECTIONS, ""),
    }
    assert reasons == expected


def test_targets_are_a_filter_that_names_may_go_beyond(tmp_path):
    modules = (ROUTERS[0], *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1)), OTHERS[0], MTP[3], IN_16_BITS[0])
    for targets, quantized in (
        (("model.layers.0",), {modules[1]}),
        (("re:model\\.layers\\.0",), {modules[1]}),
        (("model.layers.0.m*",), {modules[1]}),
        ((modules[1], OTHERS[0]), {modules[1], OTHERS[0]}),
        ((MTP[3], IN_16_BITS[0]), {MTP[3], IN_16_BITS[0]}),
    ):
        plan = planned(tmp_path, modules, targets=targets)
        assert {m for g in plan.groups for m in g.members} == quantized
    with pytest.raises(CheckpointError, match="is a router; expected a projection"):
        planned(tmp_path, modules, targets=(ROUTERS[0],))


def test_layers_of_mtp_are_no_decoder_layers(tmp_path):
    assert layer_of("model.layers.12.mlp.down_proj.weight") == 12
    assert layer_of("model.language_model.layers.1.x") == 1
    assert layer_of("mtp.layers.0.mlp.down_proj.weight") is None
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": weight(16, 32) for i in (1, 2)}
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    counted = make_plan(open_source(model_of(tmp_path / "counted", tensors, config)), ConvertOptions())
    assert [m for g in counted.groups for m in g.members] == ["model.layers.1.mlp.down_proj"]
    modules = ("mtp.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    plan = planned(tmp_path, modules, start_layers=1, targets=modules)
    assert len(plan.groups) == 2


def test_a_rule_that_splits_a_group(tmp_path):
    modules = [f"model.layers.0.self_attn.{r}_proj" for r in "qkvo"]
    plan = planned(tmp_path, modules, ignore=(modules[1],))
    assert [g.members for g in plan.groups] == [(modules[3],)]
    with pytest.raises(CheckpointError, match=r"k_proj.weight': is kept \(ignore .*; expected a group as a whole") as e:
        planned(tmp_path, modules, ignore=(modules[1],), strict=True)
    assert e.value.code == 2


def test_a_preset_keeps_what_is_no_expert(tmp_path):
    modules = ("model.layers.0.mlp.experts.0.down_proj", "model.layers.0.mlp.shared_experts.down_proj", "m.o_proj")
    plan = planned(tmp_path, modules, preset="moe-experts")
    assert [i.choice.reason for i in plan.items.values()] == ["no expert", "", ""]


def test_loaders_that_disagree_about_a_conversion(tmp_path):
    """The router's name is a part of a projection's, for which one loader takes it."""
    mlp = [f"model.layers.0.mlp.{r}" for r in ("gate", "gate_proj", "up_proj")]
    with pytest.raises(CheckpointError, match=r"vLLM would keep it because of 'model\.layers\.0\.mlp\.gate'") as e:
        planned(tmp_path, mlp)
    assert e.value.code == 4
    assert len(planned(tmp_path, mlp, layout="compressed-tensors").groups) == 1


def test_groups_that_are_named_join_those_that_loaders_fuse():
    modules = [f"m.{r}_proj" for r in "qkvo"]
    (group,) = groups_of(modules, [r"re:(.*)\.(q|o)_proj"])
    assert group == Group(("m.q_proj", "m.k_proj", "m.v_proj", "m.o_proj"))
    two = groups_of(["m.a", "m.b", "m.c", "m.d"], [r"(m)\.(?:a|b)", r"(m)\.(?:c|d)"])
    assert [g.members for g in two] == [("m.a", "m.b"), ("m.c", "m.d")]
    two = groups_of(["a.x.w", "a.y.w"], [r"(a)\..*"])
    assert [g.members for g in two] == [("a.x.w", "a.y.w")]


def test_a_plan_changes_nothing(tmp_path):
    """The source stays as it is: a second plan says the same, and all of a plan is frozen."""
    modules = [f"model.layers.0.self_attn.{role}_proj" for role in "qko"]
    plan = planned(tmp_path, modules, ignore=(modules[0],), weight_only=True)
    source = open_source(tmp_path / "in")
    plans = [make_plan(source, plan.options) for _ in range(2)]
    assert source.warnings == ()
    assert plans[0].warnings == plans[1].warnings
    assert [w.partition(" is kept")[0] for w in plan.warnings] == [f"{modules[0]}.weight"]
    item = plan.items[f"{modules[1]}.weight"]
    assert item.choice.reason == f"ignore {modules[0]}, of its group"
    for value, field in ((plan, "groups"), (item, "outputs"), (item.choice, "reason"), (source, "warnings")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, ())


@pytest.mark.parametrize(
    ("roles", "warnings"),
    [(("q_proj", "k_proj"), 1), (("q_proj", "kv_a_proj_with_mqa"), 0), (("q_proj", "k_proj", "v_proj"), 0)],
)
def test_missing_members(tmp_path, roles, warnings):
    plan = planned(tmp_path, [f"model.layers.0.self_attn.{r}" for r in roles])
    assert len([w for w in plan.warnings if "no v_proj" in w]) == warnings


# ---------------------------------------------------------------- names of any kind
SUFFIXES = {s for x in LAYOUTS.values() for s in x.suffixes if s}
PARTS = (
    *("", "x", "y", " ", "*", "re:(", "[a-", "\n", "\0", "\u00e9", "e\u0301", "\U0001f600", "/", "..", "x" * 300),
    *("model", "layers", "0", "1", "mtp", "decoder", "experts", "mlp", "gate", "lm_head", "norm", "weight"),
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"),
    *(s[1:] for s in sorted(SUFFIXES)),
)
ENDS = ("", ".weight", ".weight", ".weight", ".bias", *sorted(SUFFIXES), *(s.replace(".", "_") for s in SUFFIXES))
parts = st.sampled_from(PARTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
any_name = st.builds(lambda p, end: ".".join(p) + end, st.lists(parts, min_size=1, max_size=4), st.sampled_from(ENDS))
any_shape = st.sampled_from([(16, 32)] * 4 + [(2, 16, 32), (32,), (), (16, 24)])
any_tensors = st.dictionaries(any_name.filter(lambda n: n != "__metadata__"), any_shape, min_size=1, max_size=5)
any_options = st.builds(
    ConvertOptions,
    layout=st.sampled_from(list(LAYOUTS)),
    experts=st.sampled_from(["keep", "keep", "per-expert", "stacked"]),
    expert_layout=st.just("nk"),
    on_bad_shape=st.just("keep"),
)


def check_names(shapes, options) -> str:
    """Either all that can be done with it is done, or nothing is written and an error of one line says why."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n: ("F32", np.full(shape, i + 1, np.float32)) for i, (n, shape) in enumerate(shapes.items())}
        model, out = model_of(Path(folder) / "in", tensors), Path(folder) / "out"
        try:
            result = convert_checkpoint(model, out, options)
        except CheckpointError as e:
            error = str(e)
        else:
            error = ""
        if error:
            assert len(error.split("\n")) <= 2
            assert not out.exists()
            return error
        names = set(result.plan.items)
        assert options.experts != "keep" or names == set(shapes)
        inspect(out)
        assert {r.name for r in verify_checkpoint(model, out, expert_layout="nk")} == names
        assert set(open_checkpoint(out)) == names
        dequantize_checkpoint(out, Path(folder) / "back", "F32")
        assert set(open_source(Path(folder) / "back").places) == names
        return "converted"


ODD = (
    [".x.weight"],
    ["..weight"],
    [".weight"],
    [".q_proj.weight"],
    [".q_proj.weight", ".k_proj.weight", ".v_proj.weight"],
    [".x.weight", "x.weight"],
    [".gate_proj.weight", ".up_proj.weight"],
    ["q_proj.weight", "k_proj.weight", ".q_proj.weight"],
    ["experts.0.w1.weight", "experts.0.w3.weight", ".experts.0.w2.weight"],
    ["..weight", ".x.weight", ".q_proj.weight", "x.weight", ".weight", "a..b.weight", "weight", "a. .weight"],
)


@pytest.mark.parametrize("names", ODD, ids=" ".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_names_are_converted(names, layout):
    assert check_names(dict.fromkeys(names, (16, 32)), ConvertOptions(layout=layout)) == "converted"


@hypothesis.example({"re:(.gate.weight": (16, 32), "x.weight": (16, 32)}, ConvertOptions(layout="compressed-tensors"))
@hypothesis.example({"x.weight_scale_2": (1,), "y.weight": (16, 32)}, ConvertOptions(layout="te"))
@hypothesis.example({"x.weight": (16, 32), "x.input_scale": ()}, ConvertOptions(weight_only=True))
@hypothesis.example({"experts.w1": (2, 16, 32), "experts.w1.weight": (16, 32)}, ConvertOptions(expert_layout="nk"))
@hypothesis.settings(max_examples=70, deadline=None, derandomize=True, database=None)
@hypothesis.given(any_tensors, any_options)
def test_names_of_any_kind(shapes, options):
    check_names(shapes, options)


@pytest.mark.long
@hypothesis.settings(max_examples=1000, deadline=None, database=None)
@hypothesis.given(any_tensors, any_options)
def test_names_of_any_kind_for_long(shapes, options):
    check_names(shapes, options)


@pytest.mark.parametrize("path", ["a\0b", "a\0b/c", "a\ud800"])
def test_paths_that_no_file_can_have(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    model, stored = str(GOLDEN / "llama" / "input"), str(GOLDEN / "llama" / "te_modelopt")
    works = (convert_checkpoint, model, path), (convert_checkpoint, path, "out"), (open_checkpoint, path)
    works += (save_checkpoint, {"x": np.ones(3)}, path), (dequantize_checkpoint, stored, path), (write_report, path, [])
    for work, *arguments in works:
        with pytest.raises(CheckpointError, match=r"'a\\.*' has a character that no path can have"):
            work(*arguments)
    convert = ["convert", model]
    for arguments in ([*convert, path], [*convert, "out", "--report", path], ["dequantize", stored, path]):
        assert main(arguments) == 2
        assert "has a character that no path can have" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Glyph")
def test_odd_names_are_reported(tmp_path, monkeypatch, capsys):
    """Names that a picture could take for formulas, and a directory whose name is no text."""
    monkeypatch.chdir(tmp_path)
    folder = os.fsdecode(b"m\xff$x_$\n")
    names = ["$a_$.weight", "_.weight", "\\frac.weight", "\u0967.weight", "a\nb.weight", ".$.weight", "$$.weight"]
    tensors = {n: ("F32", np.ones((16, 32), np.float32)) for n in names}
    model = model_of(Path(folder), tensors)
    (model / "config.json").unlink()
    assert main(["convert", folder, "out", "--report", "report", "--json"]) == 0
    out, err = capsys.readouterr()
    warning = json.loads(out)["warnings"][0]
    assert json.loads(Path("report/report.json").read_text())["warnings"][0] == warning
    assert warning.startswith(folder)
    assert "missing" in err
    assert Path("report/report.png").is_file() == (find_spec("matplotlib") is not None)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_names_are_printed_in_any_encoding(tmp_path, monkeypatch, encoding):
    model = model_of(tmp_path / "in", {"\u0967.weight": np.ones((16, 32), np.float32)})
    for json_ in (True, False):
        printed = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", printed)
        assert main(["convert", str(model), os.fsdecode(b"\xff"), "--dry-run", *["--json"] * json_]) == 0
        text = printed.buffer.getvalue().decode(encoding)
        assert ("\u0967.weight" if encoding == "utf-8" else "\\u0967.weight") in text
        assert not json_ or [t["name"] for t in json.loads(text)["tensors"]] == ["\u0967.weight"]
