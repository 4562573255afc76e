"""Every script in examples/ runs as a user would run it, and prints or writes what it promises."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
RECIPES = ["nvfp4", "row_scaled_fprop", "weight_only"]


def run(script: str, *arguments: str, cwd: pathlib.Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_train_lm_writes_curves(recipe, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [examples]")
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    out = run("train_lm.py", "--steps", "12", "--recipe", recipe, "--out", "curves", cwd=tmp_path)
    assert "final validation loss: bf16" in out
    assert (tmp_path / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((tmp_path / "curves" / "metrics.json").read_text())
    assert metrics["recipe"] == recipe
    runs = metrics["runs"]
    assert list(runs) == ["bf16", recipe]
    for name, curves in runs.items():
        assert curves["steps"] == list(range(1, 13))
        assert curves["val_steps"] == [5, 10, 12]
        assert np.isfinite(curves["train"]).all()
        assert curves["train"][0] == pytest.approx(np.log(256), rel=0.05)
        assert curves["val"][-1] < curves["train"][0] - 1
        assert metrics["final_val"][name] == curves["val"][-1]
    assert runs["bf16"]["train"] != runs[recipe]["train"]
    assert metrics["gap"] == runs[recipe]["val"][-1] - runs["bf16"]["val"][-1]
    assert abs(metrics["gap_percent"]) < 5
