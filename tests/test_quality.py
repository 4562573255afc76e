"""benchmarks/quality: what its modules print and write, and what they take from examples/lm."""

import dataclasses
import importlib
import importlib.util
import json
import math
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import PNG, ROOT, run

import jnvfp4
from jnvfp4 import recipes

sys.path.append(str(ROOT))  # last, so that the installed jnvfp4 is the one tested
MEASURED = ROOT / "benchmarks/results/pretrain_lm"


@pytest.fixture
def model():
    """The module lm.model; lm.config can be imported, too."""
    importlib.import_module("benchmarks.quality")
    return importlib.import_module("lm.model")


@pytest.fixture
def pretrain(model):
    """The module benchmarks.quality.pretrain."""
    for name in ("tqdm", "orbax.checkpoint"):
        pytest.importorskip(name, reason="needs the extra [pretrain]")
    return importlib.import_module("benchmarks.quality.pretrain")


@pytest.fixture
def corpus(model):
    """The module benchmarks.quality.corpus."""
    pytest.importorskip("tokenizers", reason="needs the extra [pretrain]")
    return importlib.import_module("benchmarks.quality.corpus")


def small_config(**changes):
    from lm.config import Config

    config = Config(
        layers=3, width=32, heads=2, kv_heads=2, mlp_width=64, seq=16, batch=4, steps=10, peak_lr=3e-3,
        val_batches=2, architecture="llama", vocabulary=64, last_lr=0.0,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def random_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, count).astype(np.uint16)


# ---------------------------------------------------------------- examples/lm/model.py
def test_gradient_of_the_embedding_sums_over_equal_tokens(model):
    tokens = jnp.asarray([[3, 1, 3], [0, 3, 1]])
    embedding = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    dx = jnp.asarray(np.random.default_rng(1).integers(-8, 9, (2, 3, 16)), jnp.bfloat16).astype(jnp.float32)
    x, pull = jax.vjp(lambda e: model.embed(tokens, e), embedding)
    np.testing.assert_array_equal(x, embedding[tokens])
    want = np.zeros((5, 16), np.float32)
    np.add.at(want, np.asarray(tokens), np.asarray(dx))
    np.testing.assert_array_equal(pull(dx)[0], want)


def test_bfloat16_baseline_has_float32_gradients_of_weights(model):
    x = jnp.asarray(np.random.default_rng(0).integers(-15, 16, (2, 200, 32)), jnp.bfloat16)
    w = jnp.asarray(np.random.default_rng(1).integers(-15, 16, (16, 32)), jnp.float32)
    dy = jnp.asarray(np.random.default_rng(2).integers(-15, 16, (2, 200, 16)), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: model.trained_bf16_linear(x, w, None, ""), x, w)
    dx, dw = pull(dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.einsum("btn,btk->nk", np.asarray(dy, np.float64), np.asarray(x, np.float64))
    np.testing.assert_array_equal(dw, exact)
    assert (np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64) != exact).any()  # what bfloat16 would lose


def test_bf16_forward_changes_the_forward_pass_alone(model):
    recipe, key = recipes.pretrain(), jax.random.key(3)
    x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (48, 32))
    dy = jax.random.normal(jax.random.key(2), (64, 48), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: model.bf16_forward(recipe)(x, w, key, ""), x, w)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(model.trained_bf16_linear(x, w, key, "")))
    gradients = dataclasses.replace(recipe, fprop=None)
    _, want = jax.vjp(lambda x, w: jnvfp4.linear(x, w, gradients, key=key), x, w)
    for got, expected in zip(pull(dy), want(dy), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


# ---------------------------------------------------------------- methods of the literature
@pytest.fixture
def methods(model):
    """The module benchmarks.quality.methods."""
    return importlib.import_module("benchmarks.quality.methods")


RECIPE = recipes.pretrain_4over6(stochastic_rounding=False)


def error_and_gradients(linear, scale):
    """How far y, dx and dw are from exact ones, relative; channels of x are ``scale`` times normal numbers plus 1."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = (1 + scale * jax.random.normal(keys[0], (2, 32, 64))).astype(jnp.bfloat16)
    w, dy = jax.random.normal(keys[1], (48, 64)), jax.random.normal(keys[2], (2, 32, 48), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: linear(x, w, jax.random.key(3), ""), x, w)
    exact, exact_pull = jax.vjp(lambda x, w: jnp.einsum("stk,nk->stn", x, w), x.astype(jnp.float32), w)
    pairs = zip((y, *pull(dy)), (exact, *exact_pull(dy.astype(jnp.float32))), strict=True)
    return [float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)) for got, want in pairs]


def test_methods_have_lower_errors_than_the_recipe(methods, model):
    scale = jnp.ones(64).at[jnp.array([3, 17])].set(40.0)
    plain, hot, all_hot, two, searched = (
        error_and_gradients(of, scale)
        for of in (
            model.quantized_linear(RECIPE),
            methods.hot_channels(2)(RECIPE),
            methods.hot_channels(64)(RECIPE),
            methods.two_tensors(RECIPE),
            methods.searched_x(RECIPE),
        )
    )
    assert hot[0] < 0.8 * plain[0]  # y
    assert hot[2] < 0.5 * plain[2]  # dw
    assert max(all_hot) < 0.01
    assert two[0] < 0.8 * plain[0]
    assert two[1:] == searched[1:] == plain[1:]  # gradients are the recipe's


def test_searched_scales_are_those_of_the_spec(methods):
    """But for 1 % of the blocks, which are rounded otherwise at ties."""
    x, w = (jax.random.normal(jax.random.key(i), (rows, 512)) for i, rows in enumerate((256, 64)))
    x = (x * jnp.geomspace(1e-4, 1e4, 256)[:, None]).at[7].set(0).astype(jnp.bfloat16)
    found, spec = methods.searched(x), jnvfp4.QuantSpec(select="search")
    assert np.array_equal(found.values.astype(jnp.bfloat16), found.values)  # which the product takes
    of_spec = jnvfp4.fake_quant(x.astype(jnp.float32), spec)
    got, want = (np.asarray(of).reshape(-1, 16) for of in (found.values * found.scale, of_spec))
    assert np.isclose(got, want, rtol=1e-5, atol=0).all(axis=-1).mean() > 0.99
    y = methods.searched_x(RECIPE)(x, w, jax.random.key(2), "").astype(jnp.float32)
    exact = jnvfp4.linear(x, w, dataclasses.replace(RECIPE, fprop=(spec, RECIPE.fprop.w))).astype(jnp.float32)
    assert jnp.linalg.norm(y - exact) < 0.02 * jnp.linalg.norm(exact)


def test_eden_has_lower_errors_than_stochastic_rounding(methods, model):
    recipe, scale = recipes.pretrain_4over6(), jnp.ones(64)
    drawn = error_and_gradients(model.quantized_linear(recipes.pretrain_4over6(requantize=True)), scale)
    for group in (128, 16):
        eden = error_and_gradients(methods.eden(group)(recipe), scale)
        assert eden[0] == drawn[0]
        assert all(of < 0.96 * than for of, than in zip(eden[1:], drawn[1:], strict=True)), group


@pytest.mark.parametrize("axes", [(0, 1), (1,)])
def test_a_mean_that_is_split_off_is_not_quantized(methods, model, axes):
    plain, split = (
        error_and_gradients(of, 0.01) for of in (model.quantized_linear(RECIPE), methods.without_mean(axes)(RECIPE))
    )
    assert split[0] < 0.1 * plain[0]
    assert split[2] < 0.7 * plain[2]  # of what is left, dy is quantized
    assert split[1] == plain[1]


def test_gradients_by_eden_have_no_bias(methods):
    """The mean over many keys comes as near as independent errors do, and one is nearer than stochastic rounding."""
    keys, (a, b) = jax.random.split(jax.random.key(1), 64), jax.random.t(jax.random.key(0), 3.0, (2, 48, 256))
    exact = np.asarray(a @ b.T)
    found = np.asarray(jax.jit(jax.vmap(lambda key: methods.eden_product(a, b, key)))(keys))

    def error(of):
        return np.linalg.norm(of - exact) / np.linalg.norm(exact)

    single = error(found[0])
    assert error(found.mean(0)) < 1.3 * single / len(keys) ** 0.5
    q = [jnvfp4.fake_quant(x, jnvfp4.NVFP4_SR_UNBIASED, key=key) for x, key in zip((a, b), keys, strict=False)]
    assert single < 0.8 * error(np.asarray(q[0] @ q[1].T))
    rounded = jax.vmap(methods.stochastic_e4m3, (None, 0))(
        jnp.array([2.0**-9, 1.3, 2.0, np.nextafter(np.float32(2), 3), 300.0, 448.0]), keys
    )
    assert (rounded == rounded.astype(jnp.float8_e4m3fn).astype(jnp.float32)).all()


def test_weights_that_oscillate_are_reset(methods):
    """One weight crosses a boundary of quantized values in every step, one moves steadily, one rests."""
    config = small_config(steps=1000)
    begin, spec = 640, jnvfp4.NVFP4
    rest = jnp.ones((1, 16, 16)).at[0, 0, 0].set(6.0)  # one block's scale for all: values 0.5, 1, 1.5, ...
    reset = jax.jit(lambda *of: methods.reset_oscillating(*of, config=config, spec=spec))

    def weights(step):
        return rest.at[0, 0, 1].set(1.25 + 0.01 * (-1) ** step).at[0, 0, 2].set(1.0 + 0.001 * (step - begin))

    def of(w):
        return {"layers": {"w": w, "norm": jnp.ones((1, 16))}}

    for first, resets in ((begin, True), (begin + 50, False), (begin - 200, False)):
        watch = methods.watched(of(rest))
        for step in range(first, first + 50):
            params, watch = reset(of(weights(step - 1)), of(weights(step)), watch, jnp.int32(step))
        got, last = params["layers"]["w"], weights(step)
        assert bool(got[0, 0, 1] in (1.0, 1.5)) == resets
        np.testing.assert_array_equal(got.at[0, 0, 1].set(0), last.at[0, 0, 1].set(0))
        assert (params["layers"]["norm"] == 1).all()


@pytest.mark.parametrize("objective", ["text", "teacher"])
def test_fine_tuning_lowers_what_it_minimizes(model, objective):
    fine_tune = pytest.importorskip("benchmarks.quality.fine_tune")
    config = small_config(steps=600, batch=8, peak_lr=1e-2)  # 30 steps
    tokens = jnp.asarray(np.tile(random_tokens(24), 200))
    recipe = recipes.inference()
    params, linear = model.init_params(jax.random.key(0), config), model.quantized_linear(recipe)
    tuned = fine_tune.fine_tune(params, config, tokens, recipe, objective, seed=0)
    batch, key = tokens[: 8 * 17].reshape(8, 17), jax.random.key(0)
    before, after = (model.logits(p, batch[:, :-1], config, linear, key) for p in (params, tuned))
    if objective == "text":
        losses = [float(model.cross_entropy(of, batch[:, 1:])) for of in (before, after)]
    else:
        teacher = model.logits(params, batch[:, :-1], config, model.bf16_linear, key)
        losses = [float(fine_tune.divergence(teacher, of)) for of in (before, after)]
    assert losses[1] < 0.9 * losses[0]


# ---------------------------------------------------------------- the corpus
def write_files(folder: pathlib.Path, count: int) -> None:
    (folder / "deep").mkdir(parents=True)
    for i in range(count):
        (folder / "deep" / f"m{i}.py").write_text(f"def f_{i}(x):\n    return x + {i}\n" * (1 + i % 3))
    (folder / "again.py").write_text((folder / "deep/m0.py").read_text())
    (folder / "data.bin").write_bytes(b"\x00\xff")
    (folder / "not_text.py").write_bytes(b"\xff\xfe\xfa")


def test_corpus_has_every_text_once(corpus, tmp_path):
    write_files(tmp_path / "text", 400)
    made = corpus.build([tmp_path / "text"], vocabulary=300)
    assert made.source.files == 400
    ends = [int(np.sum(part == 0)) for part in (made.train, made.val)]  # END is the first token
    assert sum(ends) == 400
    assert 0 < ends[1] < 20
    assert (len(made.train), len(made.val)) == (made.source.train_tokens, made.source.val_tokens)
    assert max(made.train.max(), made.val.max()) < 300
    again = corpus.build([tmp_path / "text"], vocabulary=300)
    assert again.source == made.source
    np.testing.assert_array_equal(again.train, made.train)


def test_corpus_is_kept_in_a_file(corpus, tmp_path):
    text, path = tmp_path / "text", tmp_path / "kept/tokens.npz"
    write_files(text, 400)
    made = corpus.load(path, [text], 300)
    assert [file.name for file in path.parent.iterdir()] == ["tokens.npz"]
    (text / "more.py").write_text("more = 1")
    found = corpus.load(path, [text], 300)  # is not built again
    assert found.source == made.source
    np.testing.assert_array_equal(found.train, made.train)
    for folder, vocabulary, limit in ((tmp_path, 300, None), (text, 400, None), (text, 300, 9)):
        with pytest.raises(ValueError, match=r"tokens\.npz must be made from"):
            corpus.load(path, [folder], vocabulary, limit)
    with pytest.raises(ValueError, match="must have hundreds of files, a part of them for validation, got 0 files"):
        corpus.build([], 300)


# ---------------------------------------------------------------- runs
def trainer(pretrain, folder: pathlib.Path, sha256: str = "0", deadline: float | None = None, **sizes):
    from benchmarks.quality.corpus import Corpus, Source

    text = Corpus(random_tokens(2000), random_tokens(300), Source(sha256, 1, 2300, 2000, 300, 64))
    return pretrain.Trainer(small_config(**sizes), text, folder, deadline)


@pytest.mark.long
def test_a_run_in_pieces_is_the_run_in_one(pretrain, tmp_path):
    whole = trainer(pretrain, tmp_path / "whole").run("pretrain", seed=1)
    assert whole.is_done(small_config())
    late = trainer(pretrain, tmp_path / "pieces", deadline=time.monotonic())
    pieces = [late.run("pretrain", seed=1) for _ in range(10)]  # a step each
    assert [piece.is_done(small_config()) for piece in pieces] == [False] * 9 + [True]
    assert pieces[-1].val == whole.val
    assert pieces[-1].train == whole.train
    for got, want in zip(
        *(jax.tree.leaves(restored(pretrain, tmp_path / n)) for n in ("pieces", "whole")), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert late.run("pretrain", seed=1) == pieces[-1]  # nothing is trained again


def restored(pretrain, folder: pathlib.Path):
    found = pretrain.read_finished(folder / "pretrain/seed1")
    assert (found.config, found.sha256, found.run.arm) == (small_config(), "0", "pretrain")
    return found.params


@pytest.mark.long
def test_a_branch_continues_the_run_that_it_leaves(pretrain, tmp_path):
    runs = trainer(pretrain, tmp_path)
    with pytest.raises(ValueError, match="4over6_ends_bf16_ending continues 4over6_ends_bf16: train that with seed 0"):
        runs.run("4over6_ends_bf16_ending", 0)
    trunk = runs.run("4over6_ends_bf16", 0)
    branch = runs.run("4over6_ends_bf16_ending", 0)
    assert branch.timed_steps == 1  # of 10
    assert branch.val[:-1] == trunk.val[:-1]
    assert branch.val[-1] != trunk.val[-1]


@pytest.mark.long
def test_a_run_is_validated_as_another_arm(pretrain, tmp_path):
    runs = trainer(pretrain, tmp_path)
    trained = runs.run("pretrain_4over6", 0)
    run = runs.run("pretrain_4over6_as_w4a16", 0)
    assert (run.train, run.timed_steps, run.val_steps) == (trained.train, 0, trained.val_steps)
    assert run.val[:-1] == trained.val[:-1]
    assert run.val[-1] != trained.val[-1]
    assert run.is_done(small_config())


@pytest.mark.long
def test_another_run_is_not_continued(pretrain, tmp_path):
    stopped = trainer(pretrain, tmp_path, deadline=time.monotonic()).run("bf16", 0)
    assert stopped.steps == [1]
    with pytest.raises(ValueError, match="seed0 has a run of another config: "):
        trainer(pretrain, tmp_path, width=64).run("bf16", 0)
    with pytest.raises(ValueError, match="seed0 has a run of another sha256: 0, not 1"):
        trainer(pretrain, tmp_path, sha256="1").run("bf16", 0)
    with pytest.raises(ValueError, match="seed0 must have a finished run, got 1 of 10 steps"):
        pretrain.read_finished(tmp_path / "bf16/seed0")
    with pytest.raises(ValueError, match="seed1 must have a finished run, got no checkpoint"):
        pretrain.read_finished(tmp_path / "bf16/seed1")


@pytest.mark.long
def test_pairs_have_the_same_weights_and_batches(pretrain, tmp_path):
    """The first loss, before any update, differs by the quantization alone."""
    runs = trainer(pretrain, tmp_path, steps=1, val_batches=1)
    bf16, backward_only, plain = (runs.run(name, 0).train[0] for name in ("bf16", "backward_only", "plain"))
    assert bf16 == backward_only
    assert bf16 != plain
    assert runs.run("bf16", 1).train[0] != bf16


def test_gap_is_the_mean_over_pairs(pretrain):
    found = pretrain.gap({0: 2.02, 1: 2.06, 7: 9.0}, {1: 2.0, 0: 2.0, 5: 1.0})
    assert (found.mean, found.pairs) == (pytest.approx(2.0), 2)
    assert found.error == pytest.approx(np.std([1, 3], ddof=1) / math.sqrt(2))
    assert str(found) == "+2.00 ± 1.00"
    assert str(pretrain.gap({3: 1.98}, {3: 2.0})) == "-1.00 one seed"
    assert str(pretrain.gap({3: 1.99999}, {3: 2.0})) == "+0.00 one seed"
    assert pretrain.gap({0: 1.0}, {1: 1.0}) is None


def test_a_cooldown_is_linear(pretrain):
    config = small_config(steps=100, peak_lr=2.0)
    arms = [pretrain.ARMS[name] for name in ("bf16", "bf16_cooldown")]
    rates = [[float(arm.learning_rate(step, config)) for step in range(100)] for arm in arms]
    np.testing.assert_array_equal(rates[0][:10], rates[1][:10])  # both rise over a tenth
    np.testing.assert_allclose(rates[1][9:], [2.0] * 52 + [0.05 * i for i in range(39, 0, -1)], rtol=1e-6)


def test_ends_are_bfloat16(pretrain):
    first, *middle, last = pretrain.ARMS["pretrain_ends_bf16"].linears(6)
    assert first is last
    assert first not in middle
    assert len(set(middle)) == 1


# ---------------------------------------------------------------- what is printed and written
@pytest.mark.long
def test_compare_recipes_writes_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [examples]")
    arguments = ("--size", "64", "--only", "row_scaled,2d_mse", "--out", "compared")
    out = run("benchmarks.quality.compare_recipes", *arguments, cwd=tmp_path)
    assert out.count("FOUR_OVER_SIX_2D_MSE_256") == 3  # kinds of data
    assert (tmp_path / "compared" / "compare_recipes.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "compared" / "compare_recipes.json").read_text())
    assert list(results["specs"]) == ["normal", "heavy-tailed", "outlier rows"]
    for kind, rows in results["specs"].items():
        assert list(rows) == ["ROW_SCALED", "FOUR_OVER_SIX_2D_MSE_256"]
        assert 0.05 < rows["ROW_SCALED"]["row_error"] < 0.12
        assert 0.05 < results["recipes"][kind]["row_scaled"]["relative_error"] < 0.25


@pytest.mark.long
def test_small_weights_shows_the_same_error_for_every_size_of_weights(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [examples]")
    out = run("benchmarks.quality.small_weights", "--size", "128", "--out", "compared", cwd=tmp_path)
    assert (tmp_path / "compared" / "small_weights.png").read_bytes().startswith(PNG)
    results = json.loads((tmp_path / "compared" / "small_weights.json").read_text())
    ours = results["relative_errors"][f"jnvfp4 {jnvfp4.__version__}"]
    assert len(ours) == len(results["standard_deviations"]) == 30
    assert all(0.09 < error < 0.1 for error in ours)
    if importlib.util.find_spec("qwix") is None:
        assert "qwix is not installed" in out


@pytest.mark.long
def test_pretrained_models_are_quantized(pretrain, corpus, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [pretrain]")
    text = tmp_path / "text"
    write_files(text, 3000)
    arguments = ("--arms", "bf16", "plain", "--seeds", "0", "1", "--steps", "10", "--text", str(text), "--out", "runs")
    out = run("benchmarks.quality.pretrain_lm", *arguments, cwd=tmp_path)
    assert re.search(r"\| plain \| 2 \| [\d.]+ \| [-+][\d.]+ ± [\d.]+ \|", out)
    assert "D/N = 0.0" in out
    metrics = json.loads((tmp_path / "runs/metrics.json").read_text())
    arms = [("bf16", 0), ("bf16", 1), ("plain", 0), ("plain", 1)]
    assert [(found["arm"], found["seed"]) for found in metrics["runs"]] == arms
    assert f"numpy=={np.__version__}" in metrics["packages"]
    assert (tmp_path / "runs/loss.png").read_bytes().startswith(PNG)
    unfinished = {"arm": "plain", "seed": 2, "steps": [1], "train": [9.0]}
    metrics["runs"].append(metrics["runs"][0] | unfinished | {"val_steps": [], "val": []})
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    again = run("benchmarks.quality.pretrain_lm", "--report", "metrics.json", "--out", "again", cwd=tmp_path)
    assert again.strip() in out

    arguments = ("runs/bf16/seed0", "runs/bf16/seed1", "--batches", "2", "--out", ".")
    out = run("benchmarks.quality.quantize_trained", *arguments, cwd=tmp_path)
    assert "12 tensors of the checkpoint converter, layout modelopt, have the bytes of quantize" in out
    assert "12 tensors of the checkpoint converter, layout te, have the bytes of quantize" in out
    rows = json.loads((tmp_path / "quantized.json").read_text())["rows"]
    kinds = ["", *["weights"] * 7, *["activations"] * 3, *["weights and activations"] * 10]
    assert [row["quantized"] for row in rows] == kinds
    assert all(len(row["losses"]["0.2 M"]) == 2 for row in rows)
    assert all(abs(row["gap_percent"]["0.2 M"][0]) < 5 for row in rows[1:])
    assert len({str(row["losses"]) for row in rows}) == len(rows)
    closed = [row["closed_percent"] for row in rows if "closed_percent" in row]
    assert len(closed) == len(rows) - 4
    assert all(error > 0 for of in closed for _, error in of.values())


def documented() -> list[str]:
    return (ROOT / "docs/results.md").read_text().splitlines()


def test_documented_runs_are_the_measured_ones(pretrain, tmp_path):
    """The rows of docs/results.md are what the command beside them prints."""
    pytest.importorskip("matplotlib", reason="needs the extra [pretrain]")
    arguments = ("--report", str(MEASURED / "metrics.json"), "--out", ".")
    printed = run("benchmarks.quality.pretrain_lm", *arguments, cwd=tmp_path)
    rows = re.findall(r"^\|.*", printed, flags=re.M)
    assert len(rows) > 10
    assert [row for row in rows if row not in documented()] == []
