"""Conversions by GPTQ: which weights have a hessian, the bytes of ``gptq``, files that do not fit, resuming, memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import array, environment, files_of, model_of, refused, write, write_model

import jnvfp4
from jnvfp4.calibration import gptq
from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint, open_checkpoint, verify_checkpoint
from jnvfp4.checkpoints._convert.shards import ShardWriter
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.cli import main
from jnvfp4.spec import ROW_SCALED, QuantSpec, four_over_six

ATTENTION, MLP, EXPERTS = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp.experts"
Q, K, V, OUT = (f"{ATTENTION}.{role}_proj" for role in "qkvo")
GATE, UP, DOWN = (f"{MLP}.{role}_proj" for role in ("gate", "up", "down"))
SIZES = {Q: (32, 64), K: (16, 64), V: (16, 64), OUT: (64, 32), GATE: (48, 64), UP: (48, 64), DOWN: (64, 48)}
SEARCH = QuantSpec(select="search")


def hessian(k: int, seed: int = 0) -> np.ndarray:
    """Of inputs that are correlated."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 * k, k)) @ (rng.normal(size=(k, k)) * np.geomspace(1, 0.05, k)[:, None])
    return (x.T @ x).astype(np.float32)


def hessians(path, **by_name: np.ndarray):
    write(path, {name: ("F32", h) if h.dtype == np.float32 else ("F64", h) for name, h in by_name.items()})
    return path


WEIGHTS = {name: array(*shape, seed=i) * (1 + i % 3) for i, (name, shape) in enumerate(SIZES.items())}
# As a user may name them: one for q, k and v, and one for gate and up; down has none.
GIVEN = {f"{K}.weight": hessian(64), OUT: hessian(32, 1), UP: hessian(64, 2)}
OF = {Q: GIVEN[f"{K}.weight"], K: GIVEN[f"{K}.weight"], V: GIVEN[f"{K}.weight"], OUT: GIVEN[OUT], GATE: GIVEN[UP]}
OF |= {UP: GIVEN[UP]}
GROUPS = ((Q, K, V), (OUT,), (GATE, UP), (DOWN,))


@pytest.fixture
def model(tmp_path):
    """Two files."""
    tensors = {f"{name}.weight": ("BF16", w) for name, w in WEIGHTS.items()} | {
        "model.norm.weight": ("BF16", array(64))
    }
    first = {name: tensors.pop(name) for name in [*tensors][:3]}
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": tensors}
    return write_model(tmp_path / "in", shards)


@pytest.fixture
def options(tmp_path):
    return ConvertOptions(spec=SEARCH, hessians=hessians(tmp_path / "h.safetensors", **GIVEN))


def wanted(module: str, spec: QuantSpec, hessian: np.ndarray | None) -> jnvfp4.NVFP4Tensor:
    group = next(group for group in GROUPS if module in group)
    amax = None
    if spec.format.amax_scope == "tensor":
        amax = max(float(np.abs(WEIGHTS[m].astype(np.float32)).max()) for m in group)
    w = WEIGHTS[module]
    return jnvfp4.quantize(w, spec, amax=amax) if hessian is None else gptq(w, hessian, spec, amax=amax)


def check(got: jnvfp4.NVFP4Tensor, want: jnvfp4.NVFP4Tensor) -> None:
    np.testing.assert_array_equal(got.data, want.data)
    np.testing.assert_array_equal(np.asarray(got.scale).view(np.uint8), np.asarray(want.scale).view(np.uint8))


# ---------------------------------------------------------------- bytes
CONVERSIONS = {
    "modelopt": (ConvertOptions(), "nvfp4-gptq"),
    "search": (ConvertOptions(spec=SEARCH, max_shard_bytes=4096), "nvfp4-search-gptq"),
    "compressed-tensors": (ConvertOptions(layout="compressed-tensors", spec=SEARCH), "nvfp4-search-gptq"),
    "te": (ConvertOptions(layout="te", spec=four_over_six("mse")), "4over6-gptq"),
    "rows": (ConvertOptions(layout="te", spec=ROW_SCALED), "row-scaled-gptq"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_weights_are_rounded_by_their_hessians(model, tmp_path, name):
    """By that of another weight with the same inputs, if they have none; without any, as if there were no hessians."""
    options, recipe = CONVERSIONS[name]
    values = vars(options) | {"hessians": hessians(tmp_path / "h.safetensors", **GIVEN), "weight_only": True}
    result = convert_checkpoint(model, tmp_path / "out", ConvertOptions(**values), workers=3)
    got = open_checkpoint(tmp_path / "out")
    for module in SIZES:
        check(got[f"{module}.weight"], wanted(module, options.spec, OF.get(module)))
    text = f"{tmp_path / 'h.safetensors'}: 1 modules have no hessian, and are quantized without one: {DOWN}"
    assert [w for w in result.warnings if "hessian" in w] == [text]
    assert {file.metadata["recipe"] for file in open_source(tmp_path / "out").files.values()} == {recipe}
    records = [r for r in verify_checkpoint(model, tmp_path / "out") if r.error]
    assert len(records) == len(SIZES)
    convert_checkpoint(model, tmp_path / "one", ConvertOptions(**values), workers=1)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "out")


@pytest.mark.parametrize("form", ["nk", "kn", "per-expert"])
def test_experts_have_a_hessian_each(tmp_path, form):
    """Of one that was never seen a warning tells, and it has the bytes of a conversion without hessians."""
    stack = np.stack([array(32, 48, seed=e) for e in range(3)])
    stored = np.ascontiguousarray(stack.swapaxes(1, 2)) if form == "kn" else stack
    model_of(tmp_path / "in", {f"{EXPERTS}.down_proj": stored})
    hs = np.stack([hessian(48), np.zeros((48, 48), np.float32), hessian(48, 2)])
    if form == "per-expert":
        given = {f"{EXPERTS}.{e}.down_proj.weight": h for e, h in enumerate(hs)}
        of_second = f"{EXPERTS}.1.down_proj.weight"
    else:
        given, of_second = {f"{EXPERTS}.down_proj": hs}, f"{EXPERTS}.down_proj, expert 1"
    values = {"experts": form} if form == "per-expert" else {}
    o = ConvertOptions(
        spec=SEARCH,
        hessians=hessians(tmp_path / "h.safetensors", **given),
        weight_only=True,
        expert_layout="kn" if form == "kn" else "nk",
        **values,
    )
    result = convert_checkpoint(tmp_path / "in", tmp_path / "out", o)
    (text,) = (w for w in result.warnings if "hessian" in w)
    assert text.endswith(
        f"1 hessians are 0, as of inputs that were never seen; weights are quantized without them: {of_second}"
    )
    got = open_checkpoint(tmp_path / "out")
    for e, (w, h) in enumerate(zip(stack, hs, strict=True)):
        want = gptq(w, h, SEARCH) if h.any() else jnvfp4.quantize(w, SEARCH)
        if form == "per-expert":
            check(got[f"{EXPERTS}.{e}.down_proj.weight"], want)
        else:
            np.testing.assert_array_equal(got[f"{EXPERTS}.down_proj"].data[e], want.data)
    verify_checkpoint(tmp_path / "in", tmp_path / "out", expert_layout=o.expert_layout)


def test_a_weight_with_its_own_hessian_takes_no_other(model, tmp_path):
    path = tmp_path / "hessians"  # a folder, without an index
    path.mkdir()
    own = {name: hessian(64, 5 + i) for i, name in enumerate((V, K, Q))}  # in no order
    for i, (name, h) in enumerate(own.items()):
        hessians(path / f"{i}.safetensors", **{name: h})
    convert_checkpoint(model, tmp_path / "out", ConvertOptions(hessians=path))
    got = open_checkpoint(tmp_path / "out")
    for name in own:
        check(got[f"{name}.weight"], wanted(name, jnvfp4.NVFP4, own[name]))


MIXER, MAMBA = "model.layers.0.linear_attn", "model.layers.0.mixer"
SAME_INPUTS = {
    "gate and up": ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", True),
    "w1 and w3": ("model.layers.0.mlp.experts.0.w3", "model.layers.0.mlp.experts.0.w1", True),
    "low ranks": (f"{MIXER}.f_b_proj", f"{MIXER}.g_b_proj", False),
    "gates of attention": (f"{ATTENTION}.gate_proj", Q, False),
    "of another layer": (Q, Q.replace("0", "1"), False),
    "cross attention": ("model.layers.0.cross_attn.k_proj", "model.layers.0.cross_attn.q_proj", False),
    "latents": ("model.resampler.layers.0.self_attn.k_proj", "model.resampler.layers.0.self_attn.q_proj", False),
    "perceiver": ("model.perceiver.0.attn.v_proj", "model.perceiver.0.attn.q_proj", False),
}


@pytest.mark.parametrize("case", SAME_INPUTS)
def test_only_weights_of_the_same_inputs_share_a_hessian(tmp_path, case):
    given, other, shared = SAME_INPUTS[case]
    model = model_of(tmp_path / "in", {f"{name}.weight": array(32, 64) for name in (given, other)})
    options = ConvertOptions(hessians=hessians(tmp_path / "h.safetensors", **{given: hessian(64)}), weight_only=True)
    result = convert_checkpoint(model, tmp_path / "out", options)
    assert {*result.by_gptq} == ({given, other} if shared else {given})


def test_hessians_of_what_is_kept_are_not_used(model, tmp_path, options):
    values = vars(options) | {"ignore": (ATTENTION,)}
    result = convert_checkpoint(model, tmp_path / "out", ConvertOptions(**values))
    assert {*result.by_gptq} == {GATE, UP}


def test_summaries_count_the_weights(model, tmp_path, capsys):
    """A dry run those that have a hessian, a conversion those whose hessian has seen something."""
    given = GIVEN | {OUT: np.zeros((32, 32), np.float32)}
    command = ["convert", str(model), str(tmp_path / "out"), "--weight-only", "--hessians"]
    command.append(str(hessians(tmp_path / "h.safetensors", **given)))
    assert main([*command, "--dry-run"]) == 0
    assert "\n6 weights have a hessian, by which GPTQ rounds them\n" in capsys.readouterr().out
    assert main(command) == 0
    assert "quantized  7 weights, of which 5 by GPTQ\n" in capsys.readouterr().out


def test_a_dry_run_checks_what_a_conversion_checks(model, tmp_path, options):
    result = convert_checkpoint(model, tmp_path / "out", options, dry_run=True)
    done = convert_checkpoint(model, tmp_path / "done", options)
    for name in ("by_gptq", "bytes_after", "warnings"):
        assert getattr(result, name) == getattr(done, name)
    hessians(options.hessians, **{UP: ALTERED})
    with pytest.raises(CheckpointError, match="not finite"):
        convert_checkpoint(model, tmp_path / "out", options, dry_run=True)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what is refused
ALTERED = hessian(64)
ALTERED[3, 5] = np.nan
UNEVEN = hessian(64)
UNEVEN[5, 5] = -1e-3  # too little for Cholesky, beside what is added to the diagonal
REFUSED = {
    "unknown": (
        {**GIVEN, "model.layers.9.mlp.up_proj": hessian(64)},
        r"has 'model.layers.9.mlp.up_proj'; expected names",
    ),
    "shape": (
        {OUT: hessian(64)},
        rf"tensor '{OUT}': is F32 \[64, 64\]; expected F32 \[32, 32\], for K = 32 of '{OUT}.weight'",
    ),
    "one axis": ({OUT: np.ones(32, np.float32)}, rf"tensor '{OUT}': is F32 \[32\]; expected F32 \[32, 32\]"),
    "dtype": ({OUT: hessian(32).astype(np.float64)}, r"is F64 \[32, 32\]; expected F32 \[32, 32\]"),
    "twice": (
        {OUT: hessian(32), f"{OUT}.weight": hessian(32)},
        f"tensor '{OUT}.weight': is the hessian of '{OUT}', as is '{OUT}'",
    ),
    "NaN": ({UP: ALTERED}, f"tensor '{UP}': has values that are not finite; expected X^T X of a layer's inputs X"),
    "infinity": ({OUT: np.diag([np.inf, *31 * [1]]).astype(np.float32)}, f"tensor '{OUT}': has values that are not f"),
    "negative": ({**GIVEN, OUT: -hessian(32)}, f"tensor '{OUT}': has a negative value on its diagonal; expected X"),
    "one negative": (
        {UP: np.diag(np.diag(UNEVEN))},
        f"tensor '{UP}': has a negative value on its diagonal; expected X",
    ),
    "upper triangle": ({OUT: np.triu(hessian(32))}, f"tensor '{OUT}': is not symmetric; expected X^T X of a layer's"),
    "two to choose from": (
        {Q: hessian(64), f"{K}.weight": hessian(64)},
        f"has {K}.weight and {Q}, but none of '{V}', which has the same inputs; expected one for each of them, or one",
    ),
    "names of the source": (
        {"model.layers.0.mlp.experts.0.up_proj": hessian(64)},
        r"has 'model.layers.0.mlp.experts.0.up_proj'; expected names of modules of the model\nhint: --experts changes "
        "names: hessians have those of the output",
    ),
    "indefinite": ({OUT: np.fliplr(np.eye(32, dtype=np.float32)).copy()}, f"tensor '{OUT}': is not positive definite"),
    "of no weight": ({"model.norm": hessian(64)}, "has none of a module that is quantized; expected hessians of these"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hessians_that_are_refused(model, tmp_path, capsys, case):
    """Before anything is written."""
    given, text = REFUSED[case]
    path = hessians(tmp_path / "h.safetensors", **given)
    error = refused(model, tmp_path, text.replace("^", r"\^"), 3, "--hessians", str(path), capsys=capsys)
    assert str(path) in error or case == "twice"


def test_a_file_that_is_missing_is_refused(model, tmp_path, capsys):
    refused(model, tmp_path, "none.safetensors: does not exist", 3, "--hessians", "none.safetensors", capsys=capsys)


# ---------------------------------------------------------------- resuming
def test_a_conversion_goes_on_with_the_same_hessians(model, tmp_path, options):
    out, count = tmp_path / "out", 0

    def interrupt(name, nbytes):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt

    convert_checkpoint(model, tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(model, out, options, on_progress=interrupt)
    assert [*out.glob("*.safetensors")]
    stat = options.hessians.stat()
    os.utime(options.hessians, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match="other options: hessians;"):
        convert_checkpoint(model, out, options, resume=True)
    os.utime(options.hessians, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    convert_checkpoint(model, out, options, resume=True)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("when", ["after the first tensor", "before the first tensor"])
def test_hessians_that_change_meanwhile_are_an_error(model, tmp_path, options, when, monkeypatch):
    """Also what was checked and is then no hessian."""
    write, file = ShardWriter.write, options.hessians

    def spoil(*_):
        with file.open("r+b") as f:
            f.seek(-(64**2) * 4, os.SEEK_END)
            f.write(np.full(64**2, np.nan, np.float32).tobytes())

    def spoil_and_write(*args):
        spoil()
        return write(*args)

    before = when == "before the first tensor"
    if before:
        monkeypatch.setattr(ShardWriter, "write", spoil_and_write)
    with pytest.raises(CheckpointError, match=r"h\.safetensors: has changed while it was read"):
        convert_checkpoint(model, tmp_path / "out", options, on_progress=lambda *_: None if before else spoil())
    assert not (tmp_path / "out" / "config.json").exists()


# ---------------------------------------------------------------- memory
MEMORY = """
import sys
from pathlib import Path
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint
for model in sys.argv[1:]:
    options = ConvertOptions(hessians=Path(model + "-h.safetensors"), weight_only=True)
    convert_checkpoint(model, model + "-out", options, workers=4)
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    print(int(line.split()[1]) * 1024)
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads VmHWM of /proc")
def test_one_hessian_is_in_memory(tmp_path):
    """With several workers, and whatever their number."""
    w, h = array(32, 3072), np.eye(3072, dtype=np.float32)  # smaller ones fragment the heap
    models = []
    for count in (2, 8):
        names = [f"model.layers.{i}.mlp.down_proj" for i in range(count)]
        models.append(model_of(tmp_path / str(count), {f"{name}.weight": w for name in names}))
        hessians(tmp_path / f"{count}-h.safetensors", **dict.fromkeys(names, h))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, models)], env=environment(), check=True, capture_output=True, text=True
    )
    few, many = map(int, done.stdout.split())
    assert many - few < 3 * h.nbytes  # of six more; the heap fragments
