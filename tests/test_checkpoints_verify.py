"""What verification measures and reports: numbers that another computation finds too, under fixed names."""

import json
import shutil

import numpy as np
import pytest
from checkpoints import DOWN, GATE, UP, draw_nothing, model_of, weight, write

import jnvfp4
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, VerificationError, convert_checkpoint, verify_checkpoint
from jnvfp4.checkpoints._files.source import open_source
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
    assert list(plan) == ["format", "ignore", "tensors", "bytes", "warnings"]
    assert (plan["format"], plan["ignore"], plan["warnings"]) == ("te", ["lm_head"], [])
    kept, quantized = plan["tensors"]
    assert kept == {"name": "a.norm", "action": "keep", "reason": "no weight", "group": None, "bytes": 8}
    nbytes = 48 * 32 + 48 * 4 + 4
    assert quantized == {"name": DOWN, "action": "quantize", "reason": None, "group": [MODULE], "bytes": nbytes}
    assert plan["bytes"] == 8 + nbytes


RECIPES = {
    "nvfp4": (jnvfp4.NVFP4, jnvfp4.NVFP4_2D),
    "4over6": (jnvfp4.four_over_six(), jnvfp4.four_over_six("mse", e4m3_max=448)),
    "row-scaled": (jnvfp4.ROW_SCALED,),
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
