"""Patterns that select modules."""

import pytest

from jnvfp4._core.patterns import layer_of, matches, names_exactly


@pytest.mark.parametrize(
    ("pattern", "module", "matched", "exact"),
    [
        ("a.mlp", "a.mlp", True, True),
        ("a.mlp", "a.mlp.down_proj", True, False),
        ("a.mlp.", "a.mlp.down_proj", True, False),
        ("a.mlp", "a.mlp_2", False, False),
        ("mlp", "a.mlp", False, False),
        ("a.mlp", "b.mlp", False, False),
        ("*.mlp", "a.mlp", True, True),
        ("*.mlp", "b.x.mlp", True, True),
        ("*.mlp", "a.mlp.down_proj", False, False),
        ("a.*", "a.mlp.down_proj", True, False),
        ("re:a\\.m", "a.mlp", True, False),
        ("re:a\\.m.*", "a.mlp", True, True),
        ("re:m", "a.mlp", False, False),
    ],
)
def test_which_modules_a_pattern_matches(pattern, module, matched, exact):
    assert (matches(pattern, module), names_exactly(pattern, module)) == (matched, exact)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.0.w", 0),
        ("model.layers.12.w", 12),
        ("model.language_model.layers.1.w", 1),
        ("mtp.layers.0.w", None),
        ("model.mtp.layers.0.w", None),
        ("model.my_layers.0.w", None),
        ("model.layers.w", None),
        ("model.layers.3", None),
    ],
)
def test_the_number_of_a_layer_is_in_its_name(name, layer):
    assert layer_of(name) == layer
