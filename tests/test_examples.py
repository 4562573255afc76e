"""Every script in examples/ runs as a user would run it, and prints or writes what it promises."""

import argparse
import importlib
import importlib.util
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import EXAMPLES, PNG, ROOT, run

from jnvfp4 import Recipe, recipes
from jnvfp4.spec import name_of


@pytest.mark.long
def test_quantize_prints_the_tour(tmp_path):
    out = run("quantize.py", cwd=tmp_path)
    assert "0.5625 bytes per element, against 4 in float32" in out
    assert "dx float32 (512, 1024): relative error" in out


@pytest.mark.long
def test_sharded_linear_checks_every_case(tmp_path):
    out = run("sharded_linear.py", cwd=tmp_path)
    assert "8 devices (cpu), mesh {'data': 4, 'model': 2}" in out
    assert out.count("checked      the same bytes as on one device") == 4
    assert out.count("checked      relative difference to one device") == 4
    assert "all-gather" not in out
    assert "shard_map: weight gradient" in out


@pytest.mark.long
def test_sharded_train_moves_packed_weights(tmp_path):
    needs_plots()
    out = run("sharded_train.py", "--mesh", "1,1,1", "1,8,1", "2,2,2", "--steps", "2", cwd=tmp_path)
    assert out.count("quantized weights: the bytes of the first mesh") == 3
    assert "OTHER BYTES" not in out
    # XLA for CPUs gathers bfloat16 as float32.
    assert re.findall(r"bytes gathered for the layers: ([\d.]+) of", out) == 2 * ["0.141"]
    one, fsdp, tensor = np.array(re.findall(r"NVFP4: losses ([\d.]+), ([\d.]+)", out), float)
    printed = 2 * 5e-5 / one.min()
    # The bounds of docs/sharding.md for 1024 tokens and four products of K = 128 or 512 whose K is split.
    assert abs(fsdp[0] / one[0] - 1) < 2 * 1024 * 2**-24 + printed
    assert abs(tensor[0] / one[0] - 1) < 2 * (1024 + 2 * (128 + 512)) * 2**-24 + printed
    np.testing.assert_allclose([fsdp[1], tensor[1]], one[[1, 1]], rtol=2e-3)
    assert out.count("reduce-scatter f32") == 2


@pytest.mark.long
def test_processes_have_the_same_bytes(tmp_path):
    needs_plots()
    whole = run("sharded_train.py", "--mesh", "1,8,1", "--steps", "2", cwd=tmp_path)
    parts = run("multihost.py", "--steps", "2", cwd=tmp_path)
    for process in (0, 1):
        assert f"process {process} of 2, 4 of 8 devices" in parts
    digests = re.findall(r"weights ([0-9a-f]{16})", whole + parts)
    assert digests == 3 * digests[:1]
    assert len(set(re.findall(r"NVFP4: losses (.*)", parts))) == 1


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
        assert abs(gap) < 1  # 0.25 % after 12 steps of pretrain
    return metrics


def check_stats(folder: pathlib.Path, names: list[str], steps: list[int]) -> None:
    """What train_lm.py --stats wrote of a recipe that quantizes no gradient."""
    stats = json.loads((folder / "stats.json").read_text())
    assert list(stats) == names
    for name, of in stats.items():
        assert (folder / f"stats_{name}.png").read_bytes().startswith(PNG)
        assert of["steps"] == steps
        assert of["layers"][:5] == ["0/qkv", "0/attention_out", "0/mlp_up", "0/mlp_down", "1/qkv"]
        errors = {operand: np.array(of[operand]["relative_error"]) for operand in ("x", "w", "dy")}
        assert {v.shape for v in errors.values()} == {(len(steps), 8)}
        assert not errors["dy"].any()
        for operand in ("x", "w"):
            assert np.all((errors[operand] > 0.05) & (errors[operand] < 0.15))


@pytest.mark.long
def test_train_lm_compares_recipes_with_another_backward_pass(tmp_path):
    needs_plots()
    arguments = ("--steps", "12", "--recipe", "pretrain,window64", "--backward", "dequantized", "--out", "curves")
    out = run("train_lm.py", *arguments, "--stats", "4", "--microbatches", "2", cwd=tmp_path)
    check_stats(tmp_path / "curves", ["pretrain", "window64"], [4, 8, 12])
    metrics = check_training(tmp_path / "curves", ["pretrain", "window64"], 12, falls_by=1)
    assert metrics["backward"] == "dequantized"
    table = re.findall(r"^(\w+) +[\d.]+ +[\d.]+ +([-+][\d.]+%)? ", out, flags=re.M)
    assert [name for name, _ in table] == ["bf16", "pretrain", "window64"]


@pytest.mark.long
def test_train_lm_trains_with_every_recipe(tmp_path):
    needs_plots()
    run("train_lm.py", "--steps", "4", "--recipe", "all", "--out", "curves", cwd=tmp_path, timeout=1200)
    check_training(tmp_path / "curves", [row[0] for row in documented_recipes()], 4, falls_by=0.3)


@pytest.mark.long
@pytest.mark.parametrize("options", [("--shared",), ("--expert-parallel", "4")], ids=" ".join)
def test_moe_trains(options, tmp_path):
    out = run("moe.py", "--steps", "12", *options, "--out", "moe", cwd=tmp_path)
    assert re.findall(r"^(\w+) +[\d.]+ +[\d.]+ +[-+][\d.]+% ", out, flags=re.M) == ["bf16", "pretrain"]
    runs = json.loads((tmp_path / "moe" / "metrics.json").read_text())["runs"]
    for name, curves in runs.items():
        assert len(curves["train"]) == 12
        assert curves["train"][-1] < curves["train"][0] - 1, name
    assert abs(runs["pretrain"]["val"] / runs["bf16"]["val"] - 1) < 0.05


@pytest.fixture
def moe(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pytest.importorskip("tqdm")
    return importlib.import_module("moe")


def test_rows_of_experts_follow_each_other(moe):
    group = np.random.default_rng(0).integers(0, 5, 60).astype(np.int32)  # 4: left out
    place, sizes = (np.asarray(v) for v in moe.places(jnp.asarray(group), 4))
    assert (sizes == np.bincount(group, minlength=5)[:4]).all()
    assert len(set(place.tolist())) == len(group)
    ends = np.cumsum(sizes)
    for g in range(4):
        mine = place[group == g]
        assert mine.min() == ends[g] - sizes[g]
        assert mine.max() < ends[g]
        assert (np.diff(mine) == 1).all()
    assert (place[group == 4] >= ends[-1]).all()


@pytest.mark.long
def test_experts_on_several_devices_compute_what_one_does(moe):
    """With room for all rows; the loss of an uneven choice is that of each device's tokens."""
    config, experts = moe.PRESETS["cpu"]
    config = moe.replace(config, layers=1, seq=16, batch=4)
    experts = moe.replace(experts, capacity=4.0, balance=0.0)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), (moe.EXPERTS_AXIS,), axis_types=(moe.AxisType.Auto,), devices=devices)
    with jax.default_device(devices[0]):
        params = moe.init_moe(jax.random.key(0), config, experts)
        batch = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.uint8)
        one, four = (
            jax.jit(jax.value_and_grad(moe.make_loss(config, experts, moe.HIGH_PRECISION, m)))(
                params, batch, jax.random.key(1)
            )
            for m in (None, mesh)
        )
    for got, want in zip(jax.tree.leaves(four), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * np.abs(want).max())


@pytest.mark.long
def test_rl_trains_on_the_bits_of_its_rollouts(tmp_path):
    needs_plots()
    out = run("rl.py", "--runs", "pinned", "xla_sums", "--steps", "3", "--out", "learned", cwd=tmp_path)
    assert (tmp_path / "learned" / "rl.png").read_bytes().startswith(PNG)
    runs = json.loads((tmp_path / "learned" / "rl.json").read_text())["runs"]
    assert list(runs) == ["pinned", "xla_sums"]
    assert runs["pinned"]["difference"] == [0, 0, 0]
    assert 0 < max(runs["xla_sums"]["difference"]) < 1e-2  # a difference would show
    assert all(0 < reward < 0.2 for run in runs.values() for reward in run["reward"])
    batches = [list(map(int, row.split(", "))) for row in re.findall(r"answers (.*)", out)]
    assert len(batches) == 6
    assert all(ran[0] == 256 and ran == sorted(ran, reverse=True) and ran[-1] < 256 for ran in batches)


@pytest.mark.long
def test_serve_converted_compares_the_models(tmp_path):
    pytest.importorskip("tqdm", reason="needs the extra [examples]")
    arguments = ("--steps", "20", "--format", "te", "--recipe", "row-scaled", "--out", "served")
    out = run("serve_converted.py", *arguments, cwd=tmp_path)
    assert "14 of 21 tensors converted, from served/bf16 to served/nvfp4" in out
    metrics = json.loads((tmp_path / "served" / "metrics.json").read_text())
    assert metrics["nvfp4"]["bytes"] < 0.4 * metrics["bf16"]["bytes"]
    assert 5 < metrics["bf16"]["perplexity"] < 50
    assert metrics["nvfp4"]["perplexity"] == pytest.approx(metrics["bf16"]["perplexity"], rel=0.01)
    assert 0.001 < metrics["nvfp4"]["logits_relative_error"] < 0.03  # 0.005, more or less by machine
    config = json.loads((tmp_path / "served" / "nvfp4" / "config.json").read_text())
    assert config["quantization_config"]["amax_scope"] == "row"


@pytest.mark.long
def test_train_minimal_learns_in_sixty_lines(tmp_path):
    for library in ("flax", "optax"):
        pytest.importorskip(library)
    assert len((EXAMPLES / "train_minimal.py").read_text().splitlines()) <= 60
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("train_minimal.py", cwd=tmp_path, timeout=600))]
    assert losses[0] > 5
    assert losses[-1] < 3


@pytest.mark.long
def test_train_flax_trains_both_apis(tmp_path):
    for library in ("flax", "optax"):
        pytest.importorskip(library)
    out = run("train_flax.py", "--steps", "3", "--out", str(tmp_path), cwd=tmp_path, timeout=600)
    of_api = dict.fromkeys(("bf16", "pretrain", "pretrain_4over6"), 3)
    runs = re.findall(r"^(\w+) +(\w+) +first", out, flags=re.M)
    assert runs == [(api, recipe) for api in ("linen", "nnx") for recipe in of_api]
    losses = json.loads((tmp_path / "train_flax.json").read_text())["losses"]
    lengths = {api: {recipe: len(curve) for recipe, curve in curves.items()} for api, curves in losses.items()}
    assert lengths == {"linen": of_api, "nnx": of_api}


@pytest.mark.long
def test_models_of_hugging_face_are_quantized(tmp_path):
    for library in ("flax", "qwix"):
        pytest.importorskip(library)
    version = pytest.importorskip("transformers").__version__
    if int(version.split(".")[0]) >= 5:
        pytest.skip(f"transformers {version} has no Flax models, the last are those of 4")
    out = run("existing_models/hugging_face.py", cwd=tmp_path, timeout=600)
    assert "BERT: 12 layers in NVFP4" in out
    assert "GPT-2: 8 layers in NVFP4" in out


def needs(library: str) -> None:
    """Skips without a framework, which need not be importable with warnings as errors."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} in an environment of its own (docs/models.md)")


@pytest.mark.long
def test_tunix_fine_tunes(tmp_path):
    needs("tunix")
    out = run("existing_models/tunix_llama.py", cwd=tmp_path, timeout=600)
    assert out.count("pretrain()  rule 'layers/.*'") == 2 * 7  # attention of Tunix' own modules, and the MLP
    assert "lm_head                 64x64    -           keep 'lm_head'" in out
    last = [float(loss) for loss in re.findall(r"mean of the last 10 of 100 steps ([\d.]+)", out)]
    assert max(last) < 1.6
    np.testing.assert_allclose(last[1::2], last[::2], atol=0.05)
    assert [int(n) for n in re.findall(r"up_proj takes (\d+) bytes", out)] == 3 * [2 * 64 * 128] + [
        64 * 128 * 9 // 16 + 4
    ]


@pytest.mark.long
def test_tunix_makes_a_step_of_grpo(tmp_path):
    needs("tunix")
    out = run("existing_models/tunix_grpo.py", cwd=tmp_path, timeout=600)
    moved, apart = np.array(re.findall(r"moved by ([\d.]+), log-probabilities are ([\d.]+) nats apart", out), float).T
    assert (moved > 0).all()
    assert apart[0] > 0 == apart[1]


@pytest.mark.long
def test_the_trainer_of_maxtext_runs(tmp_path):
    needs("maxtext")
    out = run("existing_models/maxtext_trainer.py", cwd=tmp_path, timeout=900)
    assert out.count("pretrain()  rule 'decoder/.*layers.*'") == 2 * 7 + 2 * 7  # with the three of all experts at once
    assert out.count("no product: einsum: x and w must share a letter") == 2 * 2 * 2  # scales of norms
    assert out.count("-           rule '.*/gate'") == 3
    last = np.array(re.findall(r"loss 5\.\d+ -> ([\d.]+) in 20 steps", out), float).reshape(2, 2)
    assert last.max() < 1.6
    assert np.ptp(last, axis=1).max() < 0.4


@pytest.mark.long
def test_the_trainer_of_levanter_runs(tmp_path):
    needs("levanter")
    out = run("existing_models/levanter_llama.py", cwd=tmp_path, timeout=600)
    assert out.count("pretrain()  rule 'transformer/layers/.*'") == 7
    bf16, nvfp4 = (float(loss) for loss in re.findall(r"mean of the last 10 of 100 steps ([\d.]+)", out))
    assert max(bf16, nvfp4) < 1.6
    assert abs(nvfp4 - bf16) < 0.05


@pytest.mark.long
def test_a_model_of_equinox_is_trained(tmp_path):
    needs("equinox")
    out = run("existing_models/equinox_mlp.py", cwd=tmp_path)
    assert out.count("pretrain()  rule 'mlp/.*'") == 3
    bf16, nvfp4 = (float(loss) for loss in re.findall(r"mean of the last 10 of 100 steps ([\d.]+)", out))
    assert max(bf16, nvfp4) < 1.5
    assert abs(nvfp4 - bf16) < 0.05


# ---------------------------------------------------------------- docs/training.md
def documented_recipes() -> list[list[str]]:
    """The rows of the table of recipes: name, call, fprop, dgrad, wgrad."""
    text = (ROOT / "docs" / "training.md").read_text()
    table = text.split("## The named recipes")[1].split("\n- ")[0]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", table, flags=re.M)]


def in_words(pair) -> str:
    if pair is None:
        return "high precision"
    return pair if isinstance(pair, str) else ", ".join("16-bit" if spec is None else name_of(spec) for spec in pair)


def documented_recipe(call: str) -> Recipe:
    return eval(call, {name: getattr(recipes, name) for name in dir(recipes)})


@pytest.mark.parametrize("row", documented_recipes(), ids=lambda row: row[0])
def test_documented_specs_are_those_of_the_recipe(row):
    _, call, *specs = row
    recipe = documented_recipe(call)
    assert specs == [in_words(pair) for pair in (recipe.fprop, recipe.dgrad, recipe.wgrad)]


@pytest.fixture
def train_lm(monkeypatch):
    """The script as a module."""
    needs_plots()
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_lm")


def test_train_lm_has_the_documented_recipes(train_lm):
    made = {name: make() for name, make in train_lm.RECIPES.items()}
    assert made == {name: documented_recipe(call) for name, call, *_ in documented_recipes()}


def test_train_lm_reads_recipe_names(train_lm):
    assert train_lm.named_recipes("all") == list(train_lm.RECIPES)
    assert train_lm.named_recipes("window64,pretrain,window64") == ["window64", "pretrain"]
    with pytest.raises(argparse.ArgumentTypeError, match="'nothing' is none of all, pretrain,"):
        train_lm.named_recipes("pretrain,nothing")


WHOLE = "must be a whole number, 1 or more, got"
WRONG_ARGUMENTS = {
    "serve --batch 0": f"argument --batch: {WHOLE} 0",
    "serve --new -1": f"argument --new: {WHOLE} -1",
    "serve --preset llama-8b --prompt 9 --new 9 --capacity 17": "--capacity 17 has no room for 9 tokens of a pro",
    "serve --memory 0": "--memory must be positive, got 0",
    "serve --kv fp8": "argument --kv: invalid choice: 'fp8'",
    "serve --preset llama-8b --steps 3": "--steps is for --preset small without --checkpoint",
    "serve --preset small --checkpoint FOLDER --layers 2": "--layers is for presets: a checkpoint has its own",
    "serve --checkpoint FOLDER": "cannot be served: [Errno 2] No such file or directory",
    "serve --preset small --out FOLDER": "nvfp4 exists already: remove it, name another --out, or pass --checkpoint",
    "train_lm --preset cpu --microbatches 3": "--microbatches must divide the batch, 16 sequences, got 3",
    "train_lm --stats 0": f"argument --stats: {WHOLE} 0",
    "train_lm --steps 0": f"argument --steps: {WHOLE} 0",
    "serve_converted --steps 1.5": f"argument --steps: {WHOLE} 1.5",
    "serve_converted --steps many": f"argument --steps: {WHOLE} many",
    "serve_converted --out FOLDER": "nvfp4 exists already: remove it, or name another --out",
    "quantize_checkpoint FOLDER FOLDER FOLDER/nvfp4": "nvfp4 exists already: remove it, or name another OUTPUT",
    "quantize_checkpoint FOLDER FOLDER FOLDER/new --seq 0": f"argument --seq: {WHOLE} 0",
    "train_lm --recipe pretrain,inference --backward nvfp4": "--backward is for training recipes, not for inf",
}


@pytest.mark.parametrize("command", WRONG_ARGUMENTS)
def test_scripts_refuse_wrong_arguments(train_lm, command, monkeypatch, capsys, tmp_path):
    (tmp_path / "nvfp4").mkdir()
    script, *arguments = command.replace("FOLDER", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main()
    assert stopped.value.code == 2
    assert WRONG_ARGUMENTS[command] in capsys.readouterr().err
