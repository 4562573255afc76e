"""Options of a conversion and of its command: wrong ones are refused in one line, right ones are documented."""

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DOWN, GATE, UP, weight, write_model

import jnvfp4
from jnvfp4.convert import CheckpointError, ConvertOptions, open_checkpoint, save_checkpoint

FILE = "model.safetensors"


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "in", {FILE: {GATE: weight(16, 32), UP: weight(16, 32, 1), DOWN: weight(32, 16)}})


# ---------------------------------------------------------------- ConvertOptions
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "x"}, "format is 'x'; expected one of modelopt, compressed-tensors, te"),
        ({"recipe": "nvfp5"}, "recipe is 'nvfp5'; expected one of nvfp4, 4over6, row-scaled"),
        ({"experts": None}, "experts is None; expected one of keep"),
        ({"block_rows": True}, "block_rows is True; expected one of 1, 16"),
        ({"recipe": "4over6", "e4m3_max": 448.0}, "e4m3_max is 448.0; expected one of 448, 256"),
        ({"strict": "no"}, "strict is 'no'; expected one of False, True"),
        ({"targets": "model.a"}, "targets is 'model.a'; expected a tuple of texts"),
        ({"ignore": (1,)}, "ignore is (1,); expected a tuple of texts"),
        ({"start_layers": -1}, "start_layers is -1; expected an integer, 0 or more"),
        ({"end_layers": 0.5}, "end_layers is 0.5; expected an integer, 0 or more"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0; expected an integer, 1 or more"),
        ({"chunk_bytes": None}, "chunk_bytes is None; expected an integer, 1 or more"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0; expected an integer, 1 or more"),
        ({"input_scale": "1.0"}, "input_scale is '1.0'; expected a number or the Path of a JSON file"),
        *(
            ({"input_scale": x}, "expected a number above 0 that float32 has")
            for x in (0, -1.0, float("nan"), float("inf"), 1e-50, 1e39, 1e-39)
        ),
        ({"recipe": "row-scaled"}, "recipe is row-scaled and format modelopt"),
        ({"share": ("(a)?.*_proj",)}, "does not begin with a group and a dot"),
        ({"share": (r"(a)\.x|b\.y",)}, "does not begin with a group and a dot"),
        ({"share": ("(model).*_proj",)}, "does not begin with a group and a dot"),
        ({"share": (r"a(b)\.x_proj",)}, "does not begin with a group and a dot"),
    ],
)
def test_values_that_are_none(values, text):
    with pytest.raises(CheckpointError, match=re.escape(text)) as e:
        ConvertOptions(**values)
    assert e.value.code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"input_scale": np.float32(0.5), "max_shard_bytes": 1, "chunk_bytes": 1},
        {"share": (r"re:^(.*)\.(a|b)_proj", r"(?P<parent>m)[.]x")},
        {"recipe": "4over6", "error": "mse", "e4m3_max": 448, "block_rows": 16},
        {"format": "te", "recipe": "row-scaled", "weight_only": True},
        {"kv_cache": "fp8"},
    ],
)
def test_values_that_are_some(values):
    ConvertOptions(**values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"e4m3_max": 448}, "e4m3_max is 448 and recipe nvfp4"),
        ({"error": "mse"}, "error is mse and recipe nvfp4"),
        ({"error": "mse", "recipe": "row-scaled", "format": "te"}, "error is mse and recipe row-scaled"),
        ({"input_scale": 0.5, "weight_only": True}, "input_scale is 0.5 and weight_only True"),
        ({"input_scale": Path("s.json"), "format": "te"}, "input_scale is s.json and format te"),
        ({"kv_cache": "fp8", "format": "te"}, "kv_cache is fp8 and format te"),
        ({"kv_cache": "fp8", "format": "compressed-tensors"}, "kv_cache is fp8 and format compressed-tensors"),
        ({"block_rows": 16, "recipe": "row-scaled", "format": "te"}, "block_rows is 16 and recipe row-scaled"),
    ],
)
def test_settings_that_would_say_nothing(values, text):
    with pytest.raises(CheckpointError, match=text) as e:
        ConvertOptions(**values)
    assert e.value.code == 2


def test_the_layout_is_the_keyword_format(tmp_path):
    t = jnvfp4.quantize(np.ones((2, 16), np.float32))
    save_checkpoint({DOWN: t}, tmp_path / "a", format="te")
    assert open_checkpoint(tmp_path / "a").config["quantization_config"]["quant_method"] == "jnvfp4"
    with pytest.raises(CheckpointError, match="format is 'x'; expected one of modelopt"):
        save_checkpoint({DOWN: t}, tmp_path / "b", format="x")
