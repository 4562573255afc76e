"""Every script in examples/ runs as a user would run it, and prints or writes what it promises."""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jnvfp4 import Recipe, recipes
from jnvfp4.spec import name_of

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG"


def run(script: str, *arguments: str, cwd: pathlib.Path, timeout: float = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quantize_prints_the_tour(tmp_path):
    out = run("quantize.py", cwd=tmp_path)
    assert "0.5625 bytes per element, against 4 in float32" in out
    assert "dx float32 (512, 1024): relative error" in out


def test_sharded_linear_checks_every_case(tmp_path):
    out = run("sharded_linear.py", cwd=tmp_path)
    assert "8 devices (cpu), mesh {'data': 4, 'model': 2}" in out
    assert out.count("checked      the same bytes as on one device") == 4
    assert out.count("checked      relative difference to one device") == 4
    assert "all-gather" not in out
    assert "shard_map: weight gradient" in out


def needs_plots() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [examples]")
    pytest.importorskip("tqdm", reason="needs the extra [examples]")


def check_training(folder: pathlib.Path, names: list[str], steps: int, falls_by: float) -> dict:
    """What train_lm.py wrote; returns its metrics."""
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    metrics = json.loads((folder / "metrics.json").read_text())
    runs = metrics["runs"]
    assert list(runs) == ["bf16", *names]
    for name, curves in runs.items():
        assert curves["steps"] == list(range(1, steps + 1))
        assert curves["val_steps"][-1] == steps
        assert np.isfinite(curves["train"]).all()
        assert curves["train"][0] == pytest.approx(np.log(256), rel=0.05)
        assert curves["val"][-1] < curves["train"][0] - falls_by
        assert metrics["final_val"][name] == curves["val"][-1]
    for name in names:
        assert runs["bf16"]["train"] != runs[name]["train"]
        gap = 100 * (metrics["final_val"][name] / metrics["final_val"]["bf16"] - 1)
        assert metrics["gap_percent"][name] == pytest.approx(gap, abs=1e-9)
        assert abs(gap) < 5
    return metrics


@pytest.mark.long
def test_train_lm_compares_recipes(tmp_path):
    needs_plots()
    arguments = ("--steps", "12", "--recipe", "pretrain,weight_only", "--out", "curves")
    out = run("train_lm.py", *arguments, cwd=tmp_path)
    check_training(tmp_path / "curves", ["pretrain", "weight_only"], 12, falls_by=1)
    table = re.findall(r"^(\w+) +[\d.]+ +[\d.]+ +([-+][\d.]+%)? ", out, flags=re.M)
    assert [name for name, _ in table] == ["bf16", "pretrain", "weight_only"]


@pytest.mark.long
def test_train_lm_trains_with_another_backward_pass(tmp_path):
    needs_plots()
    arguments = ("--steps", "4", "--recipe", "window64", "--backward", "dequantized", "--out", "curves")
    run("train_lm.py", *arguments, cwd=tmp_path)
    metrics = check_training(tmp_path / "curves", ["window64"], 4, falls_by=0.3)
    assert metrics["backward"] == "dequantized"


@pytest.mark.long
def test_train_lm_trains_with_every_recipe(tmp_path):
    needs_plots()
    run("train_lm.py", "--steps", "4", "--recipe", "all", "--out", "curves", cwd=tmp_path, timeout=1200)
    check_training(tmp_path / "curves", [row[0] for row in documented_recipes()], 4, falls_by=0.3)


def test_compare_recipes_writes_table_and_picture(tmp_path):
    needs_plots()
    arguments = ("--size", "128", "--only", "row_scaled,2d_mse", "--out", "compared")
    out = run("compare_recipes.py", *arguments, cwd=tmp_path)
    assert out.count("FOUR_OVER_SIX_2D_MSE_256") == 3  # kinds of data
    assert (tmp_path / "compared" / "compare_recipes.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "compared" / "compare_recipes.json").read_text())
    assert list(results["specs"]) == ["normal", "heavy-tailed", "outlier rows"]
    for kind, rows in results["specs"].items():
        assert list(rows) == ["ROW_SCALED", "FOUR_OVER_SIX_2D_MSE_256"]
        assert 0.05 < rows["ROW_SCALED"]["row_error"] < 0.12
        assert 0.05 < results["recipes"][kind]["row_scaled"]["relative_error"] < 0.25


def test_serve_converted_compares_the_models(tmp_path):
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    arguments = ("--steps", "20", "--format", "te", "--recipe", "row-scaled", "--out", "served")
    out = run("serve_converted.py", *arguments, cwd=tmp_path)
    assert "14 of 21 tensors converted, from served/bf16 to served/nvfp4" in out
    found = json.loads((tmp_path / "served" / "metrics.json").read_text())
    assert found["nvfp4"]["bytes"] < 0.4 * found["bf16"]["bytes"]
    assert 5 < found["bf16"]["perplexity"] < 50
    assert found["nvfp4"]["perplexity"] == pytest.approx(found["bf16"]["perplexity"], rel=0.01)
    assert 0.01 < found["nvfp4"]["logits_relative_error"] < 0.045
    config = json.loads((tmp_path / "served" / "nvfp4" / "config.json").read_text())
    assert config["quantization_config"]["amax_scope"] == "row"


# ---------------------------------------------------------------- docs/recipes.md
def documented_recipes() -> list[list[str]]:
    """The rows of the table of recipes: name, call, fprop, dgrad, wgrad."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    table = text.split("## The named recipes")[1].split("\n- ")[0]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", table, flags=re.M)]


def in_words(pair) -> str:
    if pair is None:
        return "high precision"
    return ", ".join("16-bit" if spec is None else name_of(spec) for spec in pair)


def documented_recipe(call: str) -> Recipe:
    return eval(call, {name: getattr(recipes, name) for name in dir(recipes)})


@pytest.mark.parametrize("row", documented_recipes(), ids=lambda row: row[0])
def test_documented_specs_are_those_of_the_recipe(row):
    _, call, *specs = row
    recipe = documented_recipe(call)
    assert specs == [in_words(pair) for pair in (recipe.fprop, recipe.dgrad, recipe.wgrad)]


def load_train_lm():
    needs_plots()
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLES / "train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_train_lm_has_the_documented_recipes():
    made = {name: make() for name, make in load_train_lm().RECIPES.items()}
    assert made == {name: documented_recipe(call) for name, call, *_ in documented_recipes()}


def test_train_lm_reads_recipe_names():
    train_lm = load_train_lm()
    assert train_lm.named_recipes("all") == list(train_lm.RECIPES)
    assert train_lm.named_recipes("window64,pretrain,window64") == ["window64", "pretrain"]
    with pytest.raises(argparse.ArgumentTypeError, match="'nothing' is none of all, pretrain,"):
        train_lm.named_recipes("pretrain,nothing")


def test_train_lm_refuses_backward_for_inference(monkeypatch, capsys):
    train_lm = load_train_lm()
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--recipe", "pretrain,inference", "--backward", "nvfp4"])
    with pytest.raises(SystemExit):
        train_lm.parse_args()
    assert "--backward is for training recipes, not for inference" in capsys.readouterr().err
