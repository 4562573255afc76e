"""Format, QuantSpec and Recipe: what is accepted, what is refused, and what the kernels implement."""

import dataclasses
import pathlib
import pickle
import re
import subprocess
from itertools import product

import jax
import numpy as np
import pytest
from cases import Case
from helpers import key_for

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, Format, QuantSpec, Recipe, four_over_six
from jnvfp4._primitives.quantize_pair import quantize_pair_p, sides_of
from jnvfp4.spec import FUSED_PAIRS, SUPPORTED_SPECS, name_of

FFI = pathlib.Path(__file__).parents[1] / "ffi"
SPEC_ATTR_H = FFI / "calls" / "spec_attr.h"
SR, RHT, MSE = QuantSpec(rounding="stochastic"), QuantSpec(Format(rht=True)), QuantSpec(select="mse")

INVALID = {
    "amax_scope": (lambda: Format("column"), "Format: amax_scope must be 'tensor', 'row' or 'window64', got 'column'"),
    "e4m3_max": (lambda: Format(e4m3_max=240), r"Format: e4m3_max must be 448 or 256, got 240"),
    "rht": (lambda: Format(rht=1), r"Format: rht must be False or True, got 1"),
    "window_rht": (lambda: Format("window64", rht=True), "window64 goes with neither rht nor e4m3_max=256"),
    "format": (lambda: QuantSpec("tensor"), "QuantSpec: format must be a Format, got 'tensor'"),
    "block_rows": (lambda: QuantSpec(block_rows=2), r"block_rows must be 1 or 16, got 2"),
    "select": (lambda: QuantSpec(select="max4"), "select must be 'max6', 'mae' or 'mse', got 'max4'"),
    "error_math": (lambda: QuantSpec(select="mse", error_math="bf16"), "error_math must be 'fp32' or 'fp16'"),
    "rounding": (lambda: QuantSpec(rounding="up"), "rounding must be 'nearest' or 'stochastic', got 'up'"),
    "256_max6": (lambda: QuantSpec(Format(e4m3_max=256)), 'e4m3_max=256 needs select="mae" or "mse"'),
    "fp16_max6": (lambda: QuantSpec(error_math="fp16"), 'error_math="fp16" needs select="mae" or "mse"'),
    "mse_stochastic": (lambda: QuantSpec(select="mse", rounding="stochastic"), 'rounding="stochastic" needs select'),
    "mae_rht": (lambda: QuantSpec(Format(rht=True), select="mae"), 'rht=True needs select="max6", not "mae"'),
    "rht_row": (lambda: Format("row", rht=True), 'rht needs amax_scope="tensor" and e4m3_max=448'),
    "row_2d": (lambda: QuantSpec(Format("row"), block_rows=16), 'amax_scope="row" needs block_rows=1 and rounding='),
    "row_stochastic": (
        lambda: QuantSpec(Format("row"), rounding="stochastic"),
        'amax_scope="row" needs block_rows=1 and rounding="nearest"',
    ),
    "window_2d": (lambda: QuantSpec(Format("window64"), block_rows=16), 'amax_scope="window64" needs block_rows=1'),
    "window_stochastic": (
        lambda: QuantSpec(Format("window64"), rounding="stochastic"),
        'amax_scope="window64" needs .* rounding="nearest"',
    ),
    "2d_stochastic": (
        lambda: QuantSpec(block_rows=16, rounding="stochastic"),
        'block_rows=16 needs rounding="nearest" and rht=False.*, got format=.*block_rows=16',
    ),
    "2d_rht": (lambda: QuantSpec(Format(rht=True), 16), 'block_rows=16 needs rounding="nearest" and rht=False'),
    "headroom": (lambda: QuantSpec(rounding="stochastic", scale_headroom=1), r"scale_headroom must be .*, got 1"),
    "headroom_nearest": (
        lambda: QuantSpec(scale_headroom=True),
        'QuantSpec: scale_headroom=True needs rounding="stochastic" and block_rows=1.*, got .*scale_headroom=True',
    ),
    "four_over_six_error": (lambda: four_over_six("max"), "four_over_six: error must be 'mae' or 'mse', got 'max'"),
    "four_over_six_window": (lambda: four_over_six(amax_scope="window64"), "window64"),
    "recipe_fprop": (lambda: Recipe(fprop=NVFP4), r"Recipe: fprop must be a pair \(x spec or None, w spec\)"),
    "recipe_fprop_w": (lambda: Recipe(fprop=(NVFP4, None)), "Recipe: fprop must be a pair"),
    "recipe_dgrad": (lambda: Recipe(dgrad=(None, NVFP4)), r"Recipe: dgrad must be a pair \(dy spec, w spec\)"),
    "recipe_wgrad": (lambda: Recipe(wgrad=(NVFP4,)), r"Recipe: wgrad must be a pair \(dy spec, x spec\)"),
    "recipe_text": (lambda: Recipe(wgrad="bf16"), 'wgrad must be a pair .*, "dequantized" or None, got'),
    "recipe_rht": (
        lambda: Recipe(wgrad=(RHT, NVFP4)),
        r"wgrad operands must both be rotated \(format.rht\) or neither",
    ),
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


def test_every_4over6_spec_is_a_four_over_six():
    assert four_over_six("mse", e4m3_max=448, fast=True, block_rows=16) == QuantSpec(Format(), 16, "mse", "fp16")
    assert four_over_six(amax_scope="row") == QuantSpec(Format("row", 256), select="mae")
    settings = product(("mae", "mse"), (448, 256), (False, True), ((1, "tensor"), (16, "tensor"), (1, "row")))
    made = {four_over_six(e, e4m3_max=m, fast=f, block_rows=r, amax_scope=s) for e, m, f, (r, s) in settings}
    assert made == {spec for spec in SUPPORTED_SPECS if spec.select != "max6"}


def test_the_repr_of_a_spec_is_its_name():
    assert [repr(spec) for spec in SUPPORTED_SPECS] == [name_of(spec) for spec in SUPPORTED_SPECS]
    for name in ("NVFP4", "NVFP4_2D", "NVFP4_RHT_SR_UNBIASED", "ROW_SCALED", "WINDOW64"):
        assert f"{[getattr(jnvfp4, name)]}" == f"[{name}]"
    assert len({repr(spec) for spec in SUPPORTED_SPECS}) == len(SUPPORTED_SPECS) == 24 + 9  # of 4over6, and others


def test_a_refused_spec_is_written_in_full():
    """It has no name."""
    with pytest.raises(ValueError, match=r"got format=Format\(.*e4m3_max=256.*\), block_rows=1, select='max6'"):
        QuantSpec(Format(e4m3_max=256))


def test_the_names_of_formats():
    tensors = {"nvfp4_tensor_448", "nvfp4_tensor_256", "nvfp4_tensor_448_rht"}
    others = {"nvfp4_row_448", "nvfp4_row_256", "nvfp4_window64_448"}
    assert {spec.format.name for spec in SUPPORTED_SPECS} == tensors | others


def test_recipe_needs_a_key_only_for_stochastic_rounding():
    assert not Recipe().stochastic
    assert not Recipe(dgrad=None, wgrad="dequantized").stochastic
    assert Recipe(dgrad=(SR, NVFP4)).stochastic


# ---------------------------------------------------------------- Python and C++ agree
def test_ffi_attributes_are_those_of_c_plus_plus():
    """Names, order and types of the nested attribute, from the struct that decodes it; all are registered."""
    text, attrs = SPEC_ATTR_H.read_text(), NVFP4.ffi_attrs()
    members = re.findall(r"([\w:]+) (\w+);", re.search(r"struct SpecAttr \{(.*?)\};", text, re.S)[1])
    types = {"std::string_view": str, "int32_t": np.int32, "bool": bool}
    assert [(name, types[kind]) for kind, name in members] == [(name, type(value)) for name, value in attrs.items()]
    assert re.findall(r'StructMember<[\w:]+>\("(\w+)"\)', text) == list(attrs)


# ---------------------------------------------------------------- what is implemented
FIELDS = {
    "amax_scope": ("tensor", "row", "window64"),
    "select": ("max6", "mae", "mse"),
    "error_math": ("fp32", "fp16"),
    "rounding": ("nearest", "stochastic"),
}


def test_every_fused_pair_is_one_call():
    x = jax.ShapeDtypeStruct((64, 128), np.float32)
    for pair in FUSED_PAIRS:
        run = lambda x, pair=pair: jnvfp4.quantize_pair(x, *pair, key=key_for(*pair))  # noqa: E731
        calls = [str(e.primitive) for e in jax.make_jaxpr(run)(x).eqns if "nvfp4_quantize" in str(e.primitive)]
        assert calls == ["nvfp4_quantize_pair"], pair


def test_a_pair_without_a_kernel(native):
    x, specs = Case("x", (32, 64)).make(), (NVFP4, ROW_SCALED)
    assert specs not in FUSED_PAIRS
    operands = (x, np.float32(3), np.full(64, 3, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: quantize_pair: row_spec and col_spec must"):
        jax.block_until_ready(quantize_pair_p.bind(*operands, params=sides_of(specs), implementation="native"))


# ---------------------------------------------------------------- ffi/core/spec.h
def _kernel(spec: QuantSpec) -> tuple:
    """What spec.h's KernelSpec holds: every setting but e4m3_max and scale_headroom, as its enumerators' numbers."""
    return (
        FIELDS["amax_scope"].index(spec.format.amax_scope),
        int(spec.format.rht),
        spec.block_rows,
        FIELDS["select"].index(spec.select),
        FIELDS["error_math"].index(spec.error_math),
        FIELDS["rounding"].index(spec.rounding),
    )


@pytest.fixture(scope="module")
def kernel_lists(tmp_path_factory) -> dict[str, list[tuple]]:
    """The lists of ffi/core/spec.h, as cpp/specs.cc prints them."""
    program = tmp_path_factory.mktemp("specs") / "specs"
    source = pathlib.Path(__file__).parent / "cpp" / "specs.cc"
    subprocess.run(["g++", "-std=c++17", f"-I{FFI}", str(source), "-o", str(program)], check=True)
    lines = [line.split() for line in subprocess.run([program], capture_output=True, text=True).stdout.splitlines()]
    return {kind: [tuple(map(int, numbers)) for k, *numbers in lines if k == kind] for kind in ("spec", "pair")}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("spec", {_kernel(spec) for spec in SUPPORTED_SPECS}),
        ("pair", {_kernel(row) + _kernel(col) for row, col in FUSED_PAIRS}),
    ],
    ids=["specs", "pairs"],
)
def test_kernels_are_those_of_the_lists(kernel_lists, kind, expected):
    assert len(kernel_lists[kind]) == len(expected)
    assert set(kernel_lists[kind]) == expected
