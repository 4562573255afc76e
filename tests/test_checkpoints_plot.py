"""The picture of a report: what it is of, axes that can be read, and what normal weights would have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import model_of, weight

import jnvfp4
from jnvfp4.checkpoints import ConvertOptions, convert_checkpoint, verify_checkpoint, write_report
from jnvfp4.checkpoints.report_files import limits

figures = pytest.importorskip("matplotlib.figure")
LAYERS = 3


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Converts a model of some layers with options, and gives the figure of its report."""
    found = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    layers = {f"model.layers.{i}.mlp.{r}_proj.weight": weight(64, 64, 9 * i + j) for i in range(LAYERS)
              for j, r in enumerate(("gate", "up", "down"))}  # fmt: skip
    experts = {f"model.layers.1.mlp.experts.{e}.down_proj.weight": weight(64, 64, 50 + e) for e in range(4)}
    config = {"model_type": "llama", "num_hidden_layers": LAYERS}
    shard = {**layers, **experts, "odd.weight": weight(64, 64)}
    model = model_of(tmp_path / "Tiny-1B", shard, config)

    def draw(with_result=True, **options):
        result = convert_checkpoint(model, tmp_path / "out", ConvertOptions(**options), overwrite=True)
        write_report(tmp_path / "report", verify_checkpoint(model, tmp_path / "out"), result if with_result else None)
        return found.pop()

    return draw


RECIPES = [
    ({}, "nvfp4, 1x16 blocks, layout modelopt"),
    ({"layout": "te", "spec": jnvfp4.NVFP4_2D}, "nvfp4, 16x16 blocks, layout te"),
    ({"layout": "compressed-tensors", "spec": jnvfp4.spec.four_over_six()}, "4over6, 1x16 blocks"),
    ({"layout": "te", "spec": jnvfp4.ROW_SCALED}, "row-scaled, 1x16 blocks, layout te"),
    ({"spec": jnvfp4.QuantSpec(select="search")}, "nvfp4-search, 1x16 blocks, layout modelopt"),
]


@pytest.mark.parametrize(("options", "title"), RECIPES, ids=[r[1] for r in RECIPES])
def test_a_picture_says_what_it_is_of(drawn, options, title):
    spec = options.get("spec", jnvfp4.NVFP4)
    x = jax.random.normal(jax.random.key(1), (512, 512))
    difference = jnvfp4.dequantize(jnvfp4.quantize(x, spec), jnp.float32) - x
    expected = float(jnp.linalg.norm(difference) / jnp.linalg.norm(x))
    figure = drawn(**options)
    text = figure.get_suptitle()
    assert "Tiny-1B (llama)" in text
    assert title in text
    for axes, value in zip(figure.axes, (expected, None), strict=True):
        (line,) = (line for line in axes.lines if "normal" in str(line.get_label()))
        (level,) = set(line.get_ydata())
        assert value is None or level == pytest.approx(value, rel=0.02)
        data = np.concatenate([np.ravel(line.get_ydata()) for line in axes.lines])
        assert axes.get_yscale() == "linear"
        low, high = axes.get_ylim()
        assert low < data.min() <= data.max() < high


def test_a_line_has_one_point_for_each_layer(drawn):
    """Layers are whole numbers. The four experts of a layer are its mean, and their span is shaded."""
    figure = drawn()
    axes = figure.axes[-1]
    low, high = axes.get_xlim()
    ticks = dict(zip(axes.get_xticks(), (t.get_text() for t in axes.get_xticklabels()), strict=True))
    assert {x: t for x, t in ticks.items() if low <= x <= high} == {-1: "none", 0: "0", 1: "1", 2: "2"}
    assert axes.get_xlabel().startswith("layer")
    error = figure.axes[0]
    lines = {line.get_label(): line for line in error.lines}
    assert set(lines) >= {"gate_proj", "up_proj", "down_proj", "odd"}
    assert list(lines["down_proj"].get_xdata()) == list(range(LAYERS))
    assert list(lines["odd"].get_xdata()) == [-1]
    assert error.collections


def test_a_report_without_a_conversion_has_a_picture_too(drawn):
    figure = drawn(with_result=False)
    assert "13 weights" not in figure.get_suptitle()
    assert "14 weights" in figure.get_suptitle()
    assert not any("normal" in str(line.get_label()) for axes in figure.axes for line in axes.lines)


def test_an_axis_is_around_its_values_or_from_0():
    assert limits([0.094, 0.1]) == pytest.approx((0.089, 0.105))
    assert limits([0.05, 0.1]) == pytest.approx((0.04, 0.11))
    assert limits([0.095, 0.3]) == (0, pytest.approx(0.33))
    assert limits([0.0, 0.0]) == limits([]) == (0, 1)
