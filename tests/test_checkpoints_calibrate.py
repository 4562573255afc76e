"""Scales of activations: a warning where nothing was measured, one unit, and the file of what was measured."""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import DOWN, GATE, UP, draw_nothing, files_of, model_of, weight

from jnvfp4.checkpoints import CheckpointError, ConvertOptions, convert_checkpoint, open_checkpoint, write_input_amaxes
from jnvfp4.checkpoints._files.source import open_source
from jnvfp4.cli import main

MODULES = {name: name.removesuffix(".weight") for name in (GATE, UP, DOWN)}
UNCALIBRATED = "the activation scales are uncalibrated: all 3 are 1.0"
CT = "compressed-tensors"


@pytest.fixture
def model(tmp_path):
    tensors = {GATE: weight(16, 32), UP: weight(16, 32, 1), DOWN: weight(32, 16)}
    return model_of(tmp_path / "in", tensors)


# ---------------------------------------------------------------- nothing is measured
@pytest.mark.parametrize("layout", ["modelopt", CT])
def test_scales_that_nobody_measured_are_called_uncalibrated(model, tmp_path, capsys, monkeypatch, layout):
    """In the output, in the plan and in the report; --quiet does not take it out of the result."""
    draw_nothing(monkeypatch)
    convert = ["convert", "--format", layout, str(model)]
    assert main([*convert, str(tmp_path / "a"), "--report", str(tmp_path / "report"), "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("warning: "))
    assert UNCALIBRATED in line
    losing = "activations with a standard deviation below 0.1 lose accuracy"
    for text in (losing, "--weight-only", "--input-amax FILE", "write_input_amaxes"):
        assert text in line
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert line == f"warning: {report['warnings'][0]}"
    assert json.loads(out)["warnings"] == report["warnings"]
    assert main([*convert, str(tmp_path / "b"), "--quiet", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["warnings"], err) == (report["warnings"], "")
    assert main([*convert, str(tmp_path / "c"), "--dry-run"]) == 0
    assert UNCALIBRATED in capsys.readouterr().out
    assert [e.tag for e in open_source(tmp_path / "a").entries() if "input" in e.name] == ["F32"] * 3


def test_what_has_no_activation_scales_or_measured_ones_has_no_such_warning(model, tmp_path):
    for i, options in enumerate(({"weight_only": True}, {"layout": "te"}, {"input_amax": np.float32(3)})):
        result = convert_checkpoint(model, tmp_path / str(i), ConvertOptions(**options))
        assert result.warnings == ()


# ---------------------------------------------------------------- one unit
def scales_of(directory) -> list[float]:
    source = open_source(directory)
    return [float(source.array(e.name).reshape(())) for e in source.entries() if "input" in e.name]


@pytest.mark.parametrize(("layout", "scale"), [("modelopt", np.float32(3.5 / 2688)), (CT, 1 / np.float32(3.5 / 2688))])
def test_a_number_and_a_file_have_one_unit(model, tmp_path, layout, scale):
    file = tmp_path / "amaxes.json"
    file.write_text(json.dumps(dict.fromkeys(MODULES.values(), 3.5)))
    for out, value in (("number", "3.5"), ("file", str(file))):
        arguments = ["convert", str(model), str(tmp_path / out), "--format", layout]
        assert main([*arguments, "--quiet", "--input-amax", value]) == 0
    assert files_of(tmp_path / "number") == files_of(tmp_path / "file")
    assert scales_of(tmp_path / "number") == [scale] * 3


@pytest.mark.parametrize(
    ("amaxes", "text"),
    [
        ({GATE: 1.0}, f"has no amax for {MODULES[DOWN]!r}"),
        ({GATE: 0, DOWN: 1}, f"has the amax 0 for {MODULES[GATE]!r}"),
        ({GATE: 1, UP: -2.0, DOWN: 1}, f"has the amax -2.0 for {MODULES[UP]!r}"),
        ({DOWN: "3", GATE: 1}, f"has the amax '3' for {MODULES[DOWN]!r}"),
        ({DOWN: True, GATE: 1}, f"has the amax True for {MODULES[DOWN]!r}"),
        ({DOWN: None, GATE: 1}, f"has the amax None for {MODULES[DOWN]!r}"),
        ({DOWN: 1e31, GATE: 1}, f"has the amax 1e+31 for {MODULES[DOWN]!r}"),
        ({DOWN: 1e-31, GATE: 1}, f"has the amax 1e-31 for {MODULES[DOWN]!r}"),
        ({"x": 1, **MODULES}, "names 'x'; expected modules of the model"),
    ],
)
def test_files_that_are_wrong(model, tmp_path, amaxes, text):
    file = tmp_path / "amaxes.json"
    file.write_text(json.dumps({MODULES.get(k, k): v for k, v in amaxes.items()}))
    with pytest.raises(CheckpointError, match=f"amaxes.json: {re.escape(text)}"):
        convert_checkpoint(model, tmp_path / "out", ConvertOptions(input_amax=file))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- experts that calibration never reached
EXPERTS = "model.layers.0.mlp.experts"
ROLES = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}


@pytest.fixture
def experts(tmp_path):
    """A layer of four experts, and a layer of one."""
    layers = {EXPERTS: 4, EXPERTS.replace("0", "1"): 1}
    return model_of(tmp_path / "in", {f"{layer}.{e}.{role}.weight": weight(*shape) for layer, count in layers.items()
                                      for e in range(count) for role, shape in ROLES.items()})  # fmt: skip


def amaxes_of(tmp_path, more=(), without=()) -> ConvertOptions:
    """Amaxes of all experts but 1 and 3, whose siblings have 2 to 5 for gate, 6 and 7 for down."""
    amaxes = {f"{EXPERTS}.0.gate_proj": 2, f"{EXPERTS}.2.gate_proj": 5, f"{EXPERTS}.0.down_proj": 7,
              f"{EXPERTS}.2.down_proj": 6, f"{EXPERTS.replace('0', '1')}.0.up_proj": 90,
              f"{EXPERTS.replace('0', '1')}.0.down_proj": 91, **dict(more)}  # fmt: skip
    file = tmp_path / "amaxes.json"
    file.write_text(json.dumps({m: a for m, a in amaxes.items() if m not in without}))
    return ConvertOptions(input_amax=file, on_missing_amax="siblings")


@pytest.mark.parametrize("layout", ["modelopt", CT])
def test_an_expert_without_an_amax_has_that_of_its_siblings(experts, tmp_path, layout):
    """The largest of the same projections in the same layer; gate and up are one group. All of them are named."""
    result = convert_checkpoint(experts, tmp_path / "out", replace(amaxes_of(tmp_path), layout=layout))
    (warning,) = result.warnings
    assert "amaxes.json: 6 modules have no amax, and take the largest of their sibling experts: " in warning
    named = [f"{EXPERTS}.{e}.{role}" for e in (1, 3) for role in ROLES]
    assert sorted(warning.rpartition(": ")[2].split(", ")) == sorted(named)
    checkpoint = open_checkpoint(tmp_path / "out")
    got = {name: float(checkpoint.input_amax(name)) for name in checkpoint}
    want = {f"{EXPERTS}.{e}.{role}_proj.weight": amax for e, down, up in ((0, 7, 2), (1, 7, 5), (2, 6, 5), (3, 7, 5))
            for role, amax in (("gate", up), ("up", up), ("down", down))}  # fmt: skip
    assert {n: got[n] for n in want} == pytest.approx(want)


def test_experts_without_siblings_or_the_option_are_refused(experts, tmp_path):
    options = amaxes_of(tmp_path)
    text = re.escape(f"has no amax for '{EXPERTS}.1.down_proj'; expected one for each module")
    with pytest.raises(CheckpointError, match=f"{text}.*\nhint: --on-missing-amax siblings takes that of its sib"):
        convert_checkpoint(experts, tmp_path / "out", replace(options, on_missing_amax="error"))
    alone = f"{EXPERTS.replace('0', '1')}.0.down_proj"
    options = amaxes_of(tmp_path, without=(alone,))
    with pytest.raises(CheckpointError, match=f"has no amax for '{alone}'.*\nhint: --ignore keeps it"):
        convert_checkpoint(experts, tmp_path / "out", options)
    options = amaxes_of(tmp_path, more={f"{EXPERTS}.0.up_proj": 0})
    with pytest.raises(CheckpointError, match=f"has the amax 0 for '{EXPERTS}.0.up_proj'"):
        convert_checkpoint(experts, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- measuring
def batches(seed=0, dtype=np.float32, count=3):
    rng = np.random.default_rng(seed)
    return [
        (m, (rng.normal(size=(5, 7, 16)) * (1 + i)).astype(dtype)) for _ in range(count) for i, m in enumerate("ab")
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_amax_of_each_module_is_measured_and_written(tmp_path, dtype, on_device):
    given = batches(dtype=dtype)
    want = {m: float(max(np.abs(x.astype(np.float64)).max() for name, x in given if name == m)) for m in "ab"}
    put = jnp.asarray if on_device and dtype != np.float64 else (lambda x: x)
    got = write_input_amaxes(((m, put(x)) for m, x in given), tmp_path / "f.json")
    assert got == want == json.loads((tmp_path / "f.json").read_text())


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("percentile", [99.0, 50, 100, 1e-3])
@pytest.mark.filterwarnings("ignore:percentile is")
def test_a_percentile_is_the_largest_of_the_batches(tmp_path, percentile, on_device):
    """So at least so many magnitudes of all batches are not above it."""
    given = batches()
    got = write_input_amaxes(
        [(m, jnp.asarray(x) if on_device else x) for m, x in given], tmp_path / "f.json", percentile=percentile
    )
    for m in "ab":
        magnitudes = [np.sort(np.abs(x).ravel()) for name, x in given if name == m]
        want = max(x[int(np.ceil(percentile / 100 * (x.size - 1)))] for x in magnitudes)
        assert got[m] == float(want)
        assert (np.concatenate(magnitudes) <= want).mean() >= percentile / 100
    if percentile == 100:
        assert got == write_input_amaxes(given, tmp_path / "g.json")


@pytest.mark.parametrize(
    ("percentile", "warns"), [(None, False), (99.999, False), (100, False), (99.99, True), (1, True)]
)
def test_a_percentile_that_clips_is_warned_of(tmp_path, recwarn, percentile, warns):
    write_input_amaxes(batches(), tmp_path / "f.json", percentile=percentile)
    texts = [f"percentile is {percentile}: below 99.999 clipped activations lose up to 25 dB; the default is the amax"]
    assert [str(w.message) for w in recwarn] == texts * warns


def test_headroom_enlarges_the_amax(tmp_path):
    amaxes = write_input_amaxes(batches(), tmp_path / "f.json")
    got = write_input_amaxes(batches(), tmp_path / "f.json", headroom=1.25)
    assert got == {m: 1.25 * amax for m, amax in amaxes.items()} == json.loads((tmp_path / "f.json").read_text())


def test_what_was_measured_is_what_a_conversion_takes(model, tmp_path):
    """Names of modules or of their weights; gate and up share the larger one."""
    x = np.linspace(-4, 3, 32, dtype=np.float32)
    amaxes = write_input_amaxes([(GATE, x / 2), (MODULES[UP], x), (DOWN, x[16:]), (DOWN, x[:0])], tmp_path / "f.json")
    assert amaxes == {MODULES[GATE]: 2.0, MODULES[UP]: 4.0, MODULES[DOWN]: 3.0}
    result = convert_checkpoint(model, tmp_path / "out", ConvertOptions(input_amax=tmp_path / "f.json"))
    assert not result.warnings
    assert scales_of(tmp_path / "out") == [np.float32(a / 2688) for a in (3.0, 4.0, 4.0)]
    options = ConvertOptions(input_amax=tmp_path / "f.json", ignore=("*.down_proj",))  # of which the file has an amax
    convert_checkpoint(model, tmp_path / "less", options)
    assert scales_of(tmp_path / "less") == scales_of(tmp_path / "out")[1:]


def test_a_module_without_activations_is_left_out_with_a_warning(tmp_path):
    given = [("a", np.zeros((2, 3), np.float32)), ("b", np.ones(3, np.float32)), ("c", np.ones((0, 4), np.float32))]
    with pytest.warns(UserWarning, match="no activation other than 0") as found:
        assert write_input_amaxes(given, tmp_path / "f.json") == {"b": 1.0}
    assert [str(w.message).partition(":")[0] for w in found] == ["a", "c"]


BAD_BATCHES = [
    ([], {}, "no module has activations; expected batches of"),
    ([("a", np.zeros(3, np.float32))], {}, "no module has activations"),
    ([("a", np.float32([1, np.nan, np.inf]))], {}, "activations of 'a' in batch 0 have 2 values that are not finite"),
    ([("a", np.ones(3, int))], {}, "activations of 'a' in batch 0 are int64; expected an array of floats"),
    ([("a", [1.0])], {}, "activations of 'a' in batch 0 are list; expected an array of floats"),
    ([(1, np.ones(3))], {}, "batch 0 is a tuple of int and ndarray; expected a name and an array"),
    ([np.ones(3)], {}, "batch 0 is a ndarray; expected a name and an array"),
    *(([("a", np.ones(3)), (n, np.ones(3))], {}, f"batch 1 has the name {n!r}; expected the name of a module")
      for n in ("", ".weight")),
    ([("a", np.float64([1e30]))], {}, "activations of 'a' in batch 0 have the amax 1e+30; expected a number above 1e"),
    ([("a", np.float32([1e-31])), ("b", np.ones(3))], {}, "activations of 'a' have the amax 1e-31; expected a number"),
    *(([("a", np.ones(3))], {"percentile": p}, f"percentile is {p!r}; expected a number above 0, at most 100")
      for p in (0, 101.0, float("nan"), "99")),
    *(([("a", np.ones(3))], {"headroom": h}, f"headroom is {h!r}; expected a finite number, 1 or more")
      for h in (0.5, math.inf, float("nan"), "2", True)),
    ([("a", np.ones(3))], {"headroom": 1e30}, "activations of 'a' have the amax 1e+30; expected a number above 1e-30"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "text"), BAD_BATCHES)
def test_batches_that_are_refused(tmp_path, given, options, text):
    with np.errstate(all="ignore"), pytest.raises(CheckpointError, match=re.escape(text)):
        write_input_amaxes(given, tmp_path / "f.json", **options)
    with pytest.raises(CheckpointError, match="activations of 'a' in batch 0 are traced; expected"):
        jax.eval_shape(lambda x: write_input_amaxes([("a", x)], tmp_path / "f.json"), jnp.ones(3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "text"),
    [("missing/f.json", "is missing; expected a directory"), (".", "is a directory; expected a file"),
     ("file/f.json", "is a file; expected a directory")],
)  # fmt: skip
def test_the_output_is_checked_before_the_first_batch(tmp_path, path, text):
    (tmp_path / "file").write_text("")

    measured = (pytest.fail("a batch was asked for") for _ in range(1))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        write_input_amaxes(measured, tmp_path / path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_tiny_batch_is_no_error_beside_a_larger_one(tmp_path):
    given = [("a", np.float32([1e-31])), ("a", np.float32([1]))]
    assert write_input_amaxes(given, tmp_path / "f.json") == {"a": 1.0}
