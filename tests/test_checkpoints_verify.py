"""What verification measures and reports: numbers that another computation finds too, under fixed names."""

import json
import shutil

import numpy as np
import pytest
from checkpoints import DOWN, FAMILIES, GATE, UP, array, draw_nothing, family, model_of, weight, write
from test_checkpoints_lint import Broken, blocks_of_32, padded, put, scaled, tiled

import jnvfp4
from jnvfp4.checkpoints import (
    CheckpointError,
    ConvertOptions,
    VerificationError,
    convert_checkpoint,
    lint,
    verify_checkpoint,
)
from jnvfp4.checkpoints._convert import choices
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.checkpoints._layouts.loaders import VERSIONS
from jnvfp4.checkpoints._layouts.names import Group
from jnvfp4.checkpoints._layouts.stored import open_stored
from jnvfp4.checkpoints.verify import as_json, error_stats
from jnvfp4.cli import main

MODULE = DOWN.removesuffix(".weight")


@pytest.fixture
def converted(tmp_path):
    """A weight with blocks that are zero, small beside the amax, and at it."""
    x = np.array(weight(48, 64)[1], np.float32)
    x[0], x[1], x[2, :16] = 0, 1e-9 * x[1], 30
    model = model_of(tmp_path / "in", {DOWN: ("F32", x), "a.norm": weight(1, 4)})
    convert_checkpoint(model, tmp_path / "out")
    return model, tmp_path / "out", x.astype(np.float64)


def test_errors_are_those_of_the_decoded_weight(converted):
    _, output, x = converted
    w = open_stored(output).weight(MODULE)
    decoded = w.values().astype(np.float64)
    codes = np.stack([w.codes & 15, w.codes >> 4])
    wanted = {
        "relative_error": np.linalg.norm(x - decoded) / np.linalg.norm(x),
        "snr_db": 10 * np.log10(np.sum(x**2) / np.sum((x - decoded) ** 2)),
        "max_abs_error": np.abs(x - decoded).max(),
        "cosine": np.sum(x * decoded) / np.linalg.norm(x) / np.linalg.norm(decoded),
        "largest_code_share": np.mean(np.isin(codes, (7, 15))),
        "zero_code_share": np.mean(np.isin(codes, (0, 8))),
        "zero_scale_share": np.mean(w.scales == 0),
        "saturated_scale_share": np.mean(w.scales == 0x7E),
    }
    assert 0 < wanted["zero_scale_share"] != wanted["saturated_scale_share"] > 0
    for max_bytes in (1, 1 << 20):
        assert vars(error_stats(x, w, max_bytes)) == pytest.approx(wanted, rel=1e-12)


def rewritten(output, change):
    """Writes the output again with other tensors."""
    source = open_source(output)
    tensors = {e.name: (e.tag, source.array(e.name).copy()) for e in source.entries()}
    change(tensors)
    write(output / "model.safetensors", tensors)


CHANGES = {
    "missing": (lambda t: t.pop("a.norm"), "'a.norm': is missing"),
    "further": (lambda t: t.update(b=weight(1, 1)), "'b': is not in the source"),
    "dtype": (lambda t: t.update({"a.norm": ("F16", np.ones((1, 4), np.float16))}), r"is F16 \[1, 4\]; expected BF16"),
    "shape": (lambda t: t.update({"a.norm": weight(4, 1)}), r"is BF16 \[4, 1\]; expected BF16"),
    "bytes": (lambda t: t.update({"a.norm": weight(1, 4, 1)}), "has other bytes than in the source"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_kept_tensors_are_unchanged(converted, case):
    source, output, _ = converted
    change, text = CHANGES[case]
    rewritten(output, change)
    with pytest.raises(VerificationError, match=text) as found:
        verify_checkpoint(source, output)
    assert len(found.value.failures) == 1


def test_records_in_json(converted):
    source, output, _ = converted
    records = verify_checkpoint(source, output)
    assert [r.name for r in records] == ["a.norm", DOWN]
    kept, quantized = as_json(records)
    assert list(kept) == ["name", "shape", "dtype", "global", "sha256"]
    assert list(quantized) == [
        *("name", "shape", "dtype", "global", "rel_err", "snr_db", "max_abs_err", "cosine", "saturated", "zero_codes"),
        *("zero_scales", "largest_scales", "sha256"),
    ]
    error = records[1].error
    assert (quantized["rel_err"], quantized["max_abs_err"]) == (error.relative_error, error.max_abs_error)
    assert (quantized["saturated"], quantized["zero_codes"]) == (error.largest_code_share, error.zero_code_share)
    shares = (error.zero_scale_share, error.saturated_scale_share)
    assert (quantized["zero_scales"], quantized["largest_scales"]) == shares
    assert quantized["global"] == open_stored(output).weight(MODULE).global_scale
    json.dumps([kept, quantized], allow_nan=False)


def test_a_plan_in_json(converted, tmp_path, capsys):
    source, _, _ = converted
    arguments = ["convert", str(source), str(tmp_path / "no"), "--format", "te"]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan) == ["format", "ignore", "tensors", "bytes", "with_hessian", "warnings"]
    assert (plan["format"], plan["ignore"], plan["warnings"]) == ("te", ["lm_head"], [])
    kept, quantized = plan["tensors"]
    assert kept == {"name": "a.norm", "action": "keep", "reason": "no weight", "group": None, "bytes": 8}
    nbytes = 48 * 32 + 48 * 4 + 4
    assert quantized == {"name": DOWN, "action": "quantize", "reason": None, "group": [MODULE], "bytes": nbytes}
    assert plan["bytes"] == 8 + nbytes


RECIPES = {
    "nvfp4": (jnvfp4.NVFP4, jnvfp4.NVFP4_2D),
    "4over6": (jnvfp4.spec.four_over_six(), jnvfp4.spec.four_over_six("mse", e4m3_max=448)),
    "row-scaled": (jnvfp4.ROW_SCALED,),
    "nvfp4-search": (jnvfp4.QuantSpec(select="search"),),
    "row-scaled-search": (jnvfp4.QuantSpec(jnvfp4.Format("row"), select="search"),),
}


@pytest.mark.parametrize(("recipe", "spec"), [(name, spec) for name, specs in RECIPES.items() for spec in specs])
def test_an_output_names_its_recipe(tmp_path, recipe, spec):
    """Its group is verified: the amaxes of rows, which differ between gate and up, are no fault."""
    model = model_of(tmp_path / "in", {GATE: weight(16, 32), UP: weight(16, 32, 1)})
    convert_checkpoint(model, tmp_path / "out", ConvertOptions(layout="te", spec=spec))
    assert [r.name for r in verify_checkpoint(model, tmp_path / "out")] == [GATE, UP]
    source = open_source(tmp_path / "out")
    assert source.files["model.safetensors"].metadata["recipe"] == recipe
    config = source.config["quantization_config"]
    assert {k: config[k] for k in ("recipe", "amax_scope", "e4m3_max")} == {
        "recipe": recipe,
        "amax_scope": spec.format.amax_scope,
        "e4m3_max": spec.format.e4m3_max,
    }


# ---------------------------------------------------------------- nothing is quantized
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "te"])
def test_an_output_without_nvfp4_weights_is_verified(tmp_path, capsys, monkeypatch, layout):
    draw_nothing(monkeypatch)
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    out = str(tmp_path / "out")
    convert_checkpoint(model, out, ConvertOptions(layout=layout))
    shutil.copy(model / "model.safetensors", out)
    assert main(["verify", str(model), out]) == 0
    assert capsys.readouterr().out.endswith("verified: 1 other tensors are unchanged\n")
    assert main(["inspect", out, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["layout"], described["quantized"]) == (layout, [])


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_weights_without_their_global_scales_are_refused(tmp_path, layout):
    """The config alone does not make them ordinary tensors."""
    model = model_of(tmp_path / "in", {DOWN: weight(16, 32)})
    convert_checkpoint(model, tmp_path / "out", ConvertOptions(layout=layout, weight_only=True))
    read = open_source(tmp_path / "out")
    tensors = {e.name: (e.tag, read.array(e.name).copy()) for e in read.entries() if "global" not in e.name}
    tensors = {name: t for name, t in tensors.items() if not name.endswith("weight_scale_2")}
    assert len(tensors) == 2
    write(tmp_path / "out" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="has no NVFP4 weight"):
        verify_checkpoint(model, tmp_path / "out")


# ---------------------------------------------------------------- weights as loaders multiply them
READ_BY = {"modelopt": ("vllm", "sglang", "trtllm"), "compressed-tensors": ("vllm", "sglang"), "te": ()}


@pytest.mark.parametrize("layout", READ_BY)
@pytest.mark.parametrize("name", FAMILIES)
def test_model_families_are_loaded_as_they_are_stored(tmp_path, name, layout):
    """With the error of normal random weights, and without an alarm."""
    model, out = family(tmp_path / "in", name), tmp_path / "out"
    experts = "per-expert" if (name, layout) == ("gpt-oss", "compressed-tensors") else "keep"
    result = convert_checkpoint(
        model, out, ConvertOptions(layout=layout, weight_only=layout != "modelopt", experts=experts)
    )
    assert not [w for w in result.warnings if "otherwise" in w]
    assert [f for f in lint(out) if not f.note] == []
    kept = {t: i.choice.reason for t, i in result.plan.items.items() if not i.choice.quantizes}
    assert len(result.plan.weights) >= 6
    for loader in READ_BY[layout] or (None,):
        records = verify_checkpoint(model, out, loader=loader)
        quantized = [r for r in records if r.error]
        assert len(quantized) == len(records) - len(kept) == len(result.plan.weights)
        assert not [r.name for r in records if r.reason]
        errors = [r.error_as_loaded if loader else r.error.relative_error for r in quantized]
        assert np.mean(errors) <= 0.0955
        assert 0.09 < min(errors) <= max(errors) <= 0.096


ATTENTION, MLP, MOE = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp"
Q, K, V = (f"{ATTENTION}.{r}_proj" for r in "qkv")
EXPERT = [f"{MOE}.experts.{e}.{r}_proj" for e in range(2) for r in ("gate", "up", "down")]
HEAD, CT = "lm_head", "compressed-tensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A model, and what is made of it by layout and by whether activations are quantized."""
    directory = tmp_path_factory.mktemp("loaded")
    modules = [Q, K, V, f"{ATTENTION}.o_proj", *(f"{MLP}.{r}_proj" for r in ("gate", "up", "down")), *EXPERT, HEAD]
    tensors = {f"{m}.weight": array(128, 128, seed=i) for i, m in enumerate(modules)}
    model = model_of(directory / "in", tensors | {"model.embed_tokens.weight": array(64, 128)})
    for layout in ("modelopt", CT):
        for a16 in (False, True):
            convert_checkpoint(model, directory / f"{layout}-{a16}", ConvertOptions(layout=layout, weight_only=a16))
    return model, directory


def listing(*entries, only=False):
    def change(b):
        for section in filter(None, (b.quantization, (b.hf_quant or {}).get("quantization"))):
            key = "ignore" if "ignore" in section else "exclude_modules"
            section[key] = list(entries) if only else [*section[key], *entries]

    return change


def mixing(*modules):
    def change(b):
        b.hf_quant = None
        layers = {m: {"quant_algo": "NVFP4"} for m in modules}
        b.config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    return change


def unquantized(module):
    def change(b):
        for part in filter(None, b.layout.parts(module)):
            b.tensors.pop(part, None)
        b.tensors[f"{module}.weight"] = "BF16", array(128, 128)
        listing(module)(b)

    return change


def tiles(module):
    """As ComfyUI stores a weight: scales in tiles, the even element in the high half, and a mark."""

    def change(b):
        codes, scales = (b.tensors[n][1] for n in b.layout.parts(module)[:2])
        b.tensors[f"{module}.weight"] = "U8", codes << 4 | codes >> 4
        b.tensors[f"{module}.weight_scale"] = "F8_E4M3", tiled(scales, True).view(scales.dtype)
        b.tensors[f"{module}.comfy_quant"] = "U8", np.frombuffer(b'{"format": "nvfp4"}', np.uint8).copy()

    return change


def nothing(b):
    """Leaves a checkpoint as it is."""


def no_config(b):
    b.hf_quant, b.config = None, {"model_type": "llama"}


LARGEST, SMALLEST, FIRST = (f"gets the {which} of" for which in ("largest", "smallest", "first"))
REFUSED, KEPT = "have different global scales, which is refused", "left in high precision because of"
O_PROJ, ALL = f"{ATTENTION}.o_proj", "vllm sglang trtllm"
# By case: the layout, whether it is W4A16, the change, and by loaders what is said of which modules: why, and the ratio
# of S_dec where it is another one.
LOADED = {
    "nothing": ("modelopt", False, nothing, {ALL: {}}),
    "k larger": ("modelopt", False, scaled(4, K), {
        "vllm sglang": {Q: (LARGEST, 4), V: (LARGEST, 4)}, "trtllm": dict.fromkeys((Q, K, V), (REFUSED, None))}),
    "k smaller": (CT, False, scaled(0.25, K), {"vllm sglang": {Q: (SMALLEST, 0.25), V: (SMALLEST, 0.25)}}),
    "k larger in W4A16": (CT, True, scaled(4, K), {
        "vllm": {K: (SMALLEST, 0.25)}, "sglang": dict.fromkeys((Q, K, V), (REFUSED, None))}),
    "up of an expert": ("modelopt", False, scaled(4, EXPERT[1]), {
        "vllm sglang": {EXPERT[1]: (FIRST, 0.25)}, "trtllm": dict.fromkeys(EXPERT[:2], (REFUSED, None))}),
    "a listed weight": ("modelopt", False, listing(O_PROJ), {ALL: {O_PROJ: (KEPT, None)}}),
    "one expert is listed": ("modelopt", False, listing(EXPERT[2]), {
        "vllm": dict.fromkeys(EXPERT, (KEPT, None)), "sglang trtllm": {}}),
    "a part of a name is listed": ("modelopt", False, listing("self_attn.o"), {
        "vllm": {O_PROJ: (KEPT, None)}, "sglang trtllm": {}}),
    "a part of a path is listed": ("modelopt", False, listing("o_proj"), {
        "vllm sglang": {O_PROJ: (KEPT, None)}, "trtllm": {}}),
    "a layer is listed": ("modelopt", False, listing("model.layers.1"), {ALL: dict.fromkeys(EXPERT, (KEPT, None))}),
    "the head is not listed": ("modelopt", False, listing("none", only=True), {
        ALL: {HEAD: ("would be quantized", None)}}),
    "a part is not quantized": ("modelopt", False, unquantized(V), {
        ALL: {V: ("is not quantized, but other parts", None)}}),
    "a mixed config": ("modelopt", False, mixing(MLP, MOE), {
        "vllm": dict.fromkeys((Q, K, V, O_PROJ), ("quantized_layers do not name it", None))}),
    "no config": ("modelopt", False, no_config, {"vllm": dict.fromkeys(
        (Q, K, V, O_PROJ, *(f"{MLP}.{r}_proj" for r in ("gate", "up", "down")), *EXPERT),
        ("no config.json or other config", None))}),
    "padded block scales": ("modelopt", False, padded(O_PROJ, flat=True), {ALL: {
        O_PROJ: ("does not fit: weight_scale is F8_E4M3 [1024]; expected F8_E4M3 [128, 8]", None)}}),
    "several global scales": (CT, False, put("global_scale", lambda x: x * [1, 4], O_PROJ), {
        "vllm sglang": {O_PROJ: ("has 2 different global scales: which is refused", None)}}),
    "blocks of 32": ("modelopt", False, lambda b: blocks_of_32(b, O_PROJ), {
        "vllm": {O_PROJ: ("blocks of 32, whose scales are loaded, while", None)},
        "sglang": {O_PROJ: ("blocks of 32, which Marlin refuses", None)},
        "trtllm": {O_PROJ: ("blocks of 32, which are refused but in W4A16", None)}}),
    "blocks of 32 in W4A16": ("modelopt", True, lambda b: blocks_of_32(b, O_PROJ), {
        "vllm": {O_PROJ: ("whose scales are loaded, while", None)}, "trtllm": {}}),
    "ComfyUI's tiles": ("modelopt", False, tiles(O_PROJ), {"vllm": {O_PROJ: ("taken for rows", 0)}, "sglang": {}}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "names", "loader"), [(c, n, x) for c, r in LOADED.items() for n in r[3] for x in n.split()]
)
def test_weights_as_a_loader_multiplies_them(tmp_path, sound, case, names, loader):
    layout, a16, change, by_loader = LOADED[case]
    (model, directory), expected = sound, by_loader[names]
    b = Broken(directory / f"{layout}-{a16}")
    change(b)
    out = b.write(tmp_path / "out")
    for scales_only in (False, True):
        try:
            records = verify_checkpoint(model, out, 9, loader=loader, scales_only=scales_only)
            assert None not in [ratio for _, ratio in expected.values()]
        except VerificationError as e:
            records = e.records
        found = {r.name.removesuffix(".weight"): r for r in records if r.reason}
        assert found.keys() == expected.keys()
        for module, (reason, ratio) in expected.items():
            r = found[module]
            assert reason in r.reason
            if ratio is None:
                assert r.error_as_loaded is None
            elif ratio:
                w = open_source(model).read(r.name).astype(np.float64)
                decoded = open_stored(out).weight(module).values().astype(np.float64)
                from_source = np.linalg.norm(w - ratio * decoded) / np.linalg.norm(w)
                wanted = abs(ratio - 1) if scales_only else from_source
                assert r.error_as_loaded == pytest.approx(wanted, rel=1e-4)
                assert f"{ratio:.4g} times its own" in r.reason
            elif not scales_only:
                assert r.error_as_loaded > 0.9


def test_a_conversion_warns_of_what_loaders_read_otherwise(tmp_path, sound, monkeypatch):
    """Which a conversion that knew no groups would write."""
    monkeypatch.setattr(choices, "groups_of", lambda modules, *_: [Group((m,)) for m in modules])
    result = convert_checkpoint(sound[0], tmp_path / "out")
    (vllm, _, trtllm) = [w for w in result.warnings if "otherwise" in w]
    assert vllm.startswith(f"vLLM {VERSIONS['vllm']} reads ")
    assert "gets the largest of q_proj, k_proj, v_proj" in vllm or "of gate_proj, up_proj" in vllm
    assert "refused" in trtllm


def test_the_command_shows_weights_as_stored_and_as_loaded(tmp_path, sound, capsys):
    b = Broken(sound[1] / "modelopt-False")
    scaled(4, K)(b)
    out = str(b.write(tmp_path / "out"))
    assert main(["verify", str(sound[0]), out, "--as", "vllm", "--max-rel-error", "9"]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["weight", "as", "stored", "as", "loaded", "reason"]
    (line,) = [line for line in lines if line.startswith(f"{Q}.weight ")]
    assert "0.09" in line
    assert line.endswith("gets the largest of q_proj, k_proj, v_proj, 4 times its own S_dec")
    sizes = str(sound[1] / "modelopt-False")
    assert main(["verify", str(sound[0]), sizes, "--as", "trtllm", "--scales-only"]) == 0
    assert capsys.readouterr().out.endswith("13 weights are loaded as they are stored, by names and scales alone\n")
    assert main(["verify", str(sound[0]), sizes, "--as", "vllm", "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert all(t["rel_err_as_loaded"] == t["rel_err"] for t in tensors if "rel_err" in t)
    assert main(["verify", str(sound[0]), sizes, "--scales-only"]) == 2
    assert main(["verify", str(sound[0]), str(sound[1] / f"{CT}-True"), "--as", "trtllm"]) == 2
    with pytest.raises(CheckpointError, match="loader is 'x'; expected vllm or sglang or trtllm"):
        verify_checkpoint(sound[0], sizes, loader="x")
