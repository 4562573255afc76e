"""Format, QuantSpec and Recipe: what is accepted, what is refused, and what the kernels implement."""

import dataclasses
import pathlib
import pickle
import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operands import normal

from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, Format, QuantSpec, Recipe, quantize, supports
from jnvfp4.spec import SUPPORTED_SPECS

CHECK_H = pathlib.Path(__file__).parents[1] / "ffi" / "check.h"
SR, RHT, MSE = QuantSpec(rounding="stochastic"), QuantSpec(Format(rht=True)), QuantSpec(select="mse")

INVALID = {
    "amax_scope": (lambda: Format("column"), "Format: amax_scope must be one of .*, got 'column'"),
    "e4m3_max": (lambda: Format(e4m3_max=240), r"Format: e4m3_max must be one of \(448, 256\), got 240"),
    "e4m3_max_float": (lambda: Format(e4m3_max=448.0), r"e4m3_max must be .*, got 448\.0"),
    "rht": (lambda: Format(rht=1), r"Format: rht must be one of \(False, True\), got 1"),
    "window_rht": (lambda: Format("window64", rht=True), "window64 goes with neither rht nor e4m3_max=256"),
    "window_256": (lambda: Format("window64", 256), "window64 goes with neither"),
    "format": (lambda: QuantSpec("tensor"), "QuantSpec: format must be a Format, got 'tensor'"),
    "block_rows": (lambda: QuantSpec(block_rows=2), r"block_rows must be one of \(1, 16\), got 2"),
    "block_rows_bool": (lambda: QuantSpec(block_rows=True), "block_rows must be .*, got True"),
    "select": (lambda: QuantSpec(select="max4"), "select must be one of .*, got 'max4'"),
    "error_math": (lambda: QuantSpec(select="mse", error_math="bf16"), "error_math must be one of"),
    "rounding": (lambda: QuantSpec(rounding="up"), "rounding must be one of .*, got 'up'"),
    "256_max6": (lambda: QuantSpec(Format(e4m3_max=256)), 'e4m3_max=256 needs select="mae" or "mse"'),
    "fp16_max6": (lambda: QuantSpec(error_math="fp16"), 'error_math="fp16" needs select="mae" or "mse"'),
    "mse_stochastic": (lambda: QuantSpec(select="mse", rounding="stochastic"), 'rounding="stochastic" needs select'),
    "mae_rht": (lambda: QuantSpec(Format(rht=True), select="mae"), 'rht=True needs select="max6", not "mae"'),
    "row_2d": (lambda: QuantSpec(Format("row"), block_rows=16), 'block_rows=16 needs amax_scope="tensor", not "row"'),
    "window_2d": (lambda: QuantSpec(Format("window64"), block_rows=16), "block_rows=16 needs amax_scope"),
    "window_mse": (lambda: QuantSpec(Format("window64"), select="mse"), 'amax_scope="window64" needs select="max6"'),
    "window_stochastic": (
        lambda: QuantSpec(Format("window64"), rounding="stochastic"),
        'amax_scope="window64" needs .* rounding="nearest"',
    ),
    "recipe_fprop": (lambda: Recipe(fprop=NVFP4), r"Recipe: fprop must be a pair \(x spec or None, w spec\)"),
    "recipe_fprop_w": (lambda: Recipe(fprop=(NVFP4, None)), "Recipe: fprop must be a pair"),
    "recipe_dgrad": (lambda: Recipe(dgrad=(None, NVFP4)), r"Recipe: dgrad must be a pair \(dy spec, w spec\)"),
    "recipe_wgrad": (lambda: Recipe(wgrad=(NVFP4,)), r"Recipe: wgrad must be a pair \(dy spec, x spec\)"),
    "recipe_text": (lambda: Recipe(wgrad="bf16"), 'wgrad must be a pair of specs, None or "dequantized", got'),
    "recipe_rht": (
        lambda: Recipe(wgrad=(RHT, NVFP4)),
        r"wgrad operands must both be rotated \(format.rht\) or neither",
    ),
    "recipe_rht_weight_only": (lambda: Recipe(fprop=(None, RHT)), "fprop operands must both be rotated"),
}


@pytest.mark.parametrize(("make", "text"), INVALID.values(), ids=INVALID)
def test_settings_that_mean_nothing(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "value", [Format(), NVFP4, NVFP4_2D, ROW_SCALED, SR, RHT, MSE, Recipe(), Recipe((None, NVFP4))]
)
def test_settings_are_frozen_hashable_values(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert hash(copy) == hash(value)
    assert len({value, copy}) == 1


def test_settings_with_different_fields_differ():
    specs = [NVFP4, NVFP4_2D, ROW_SCALED, SR, RHT, MSE]
    assert len(set(specs)) == len(specs)


def test_named_specs():
    assert QuantSpec() == NVFP4
    assert QuantSpec(block_rows=16) == NVFP4_2D
    assert QuantSpec(Format("row")) == ROW_SCALED


def test_recipe_needs_a_key_only_for_stochastic_rounding():
    assert not Recipe().stochastic
    assert not Recipe(dgrad=None, wgrad="dequantized").stochastic
    assert Recipe(dgrad=(SR, NVFP4)).stochastic


# ---------------------------------------------------------------- Python and C++ agree
def test_ffi_attributes_are_those_of_c_plus_plus():
    """Names, order and types of the nested attribute, from the struct that decodes it."""
    struct = re.search(r"struct SpecAttr \{(.*?)\};", CHECK_H.read_text(), re.S)[1]
    members = re.findall(r"([\w:]+) (\w+);", struct)
    types = {"std::string_view": str, "int32_t": np.int32, "bool": bool}
    assert [(name, types[kind]) for kind, name in members] == [
        (name, type(value)) for name, value in NVFP4.ffi_attrs().items()
    ]


def test_every_ffi_attribute_is_registered():
    registered = re.findall(r'StructMember<[\w:]+>\("(\w+)"\)', CHECK_H.read_text())
    assert registered == list(NVFP4.ffi_attrs())


# ---------------------------------------------------------------- what is implemented
FIELDS = {
    "amax_scope": ("tensor", "row", "window64"),
    "e4m3_max": (448, 256),
    "rht": (False, True),
    "block_rows": (1, 16),
    "select": ("max6", "mae", "mse"),
    "error_math": ("fp32", "fp16"),
    "rounding": ("nearest", "stochastic"),
}


def _make(values) -> QuantSpec:
    return QuantSpec(Format(*values[:3]), *values[3:])


def _constructible() -> list[QuantSpec]:
    specs = []
    for values in product(*FIELDS.values()):
        try:
            specs.append(_make(values))
        except ValueError:
            continue
    return specs


@pytest.mark.parametrize("spec", SUPPORTED_SPECS, ids=lambda s: f"{s.format.amax_scope}_{s.block_rows}")
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_supported_specs_run_natively(native, spec, transpose, dtype):
    x = normal((32, 64), dtype=dtype)
    got = quantize(x, spec, transpose=transpose, implementation="native")
    assert got.shape == (x.shape[::-1] if transpose else x.shape)
    assert supports(spec, native.device) is True


def test_every_other_combination_is_refused():
    """The whole product of field values: what can be built and is not listed names the field that is missing."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for spec in set(_constructible()) - set(SUPPORTED_SPECS):
        key = jax.random.key(0) if spec.rounding == "stochastic" else None
        with pytest.raises(NotImplementedError, match=r"^quantize: .* is not implemented in this version"):
            jax.eval_shape(lambda x, spec=spec, key=key: quantize(x, spec, key=key), x)
        assert isinstance(supports(spec), str)


def test_the_product_of_fields_is_what_it_was():
    """24 with a tensor amax, 12 with a row amax, one with windows of 64."""
    assert (len(list(product(*FIELDS.values()))), len(_constructible())) == (288, 37)


@pytest.mark.parametrize("op", ["quantize", "quantize_pair", "dequantize", "matmul_nt", "linear", "dot_general"])
def test_supports_operations(native, op):
    assert supports(op, native.device) is True


def test_supports_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="supports: spec_or_op must be a QuantSpec or one of"):
        supports("conv")
