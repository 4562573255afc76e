"""Format, QuantSpec and Recipe: values, names, and what the kernels implement."""

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
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, Format, QuantSpec, Recipe
from jnvfp4._primitives._sides import no_kernel
from jnvfp4._primitives.quantize_pair import quantize_pair_p, sides_of
from jnvfp4.spec import FUSED_PAIRS, SUPPORTED_SPECS, four_over_six, name_of

FFI = pathlib.Path(__file__).parents[1] / "ffi"
SPEC_ATTR_H = FFI / "calls" / "spec_attr.h"
SR, RHT, MSE = QuantSpec(rounding="stochastic"), QuantSpec(Format(rht=True)), QuantSpec(select="mse")


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
    assert made == {spec for spec in SUPPORTED_SPECS if spec.select in ("mae", "mse")}


def test_the_repr_of_a_spec_is_its_name():
    assert [repr(spec) for spec in SUPPORTED_SPECS] == [name_of(spec) for spec in SUPPORTED_SPECS]
    for name in ("NVFP4", "NVFP4_2D", "NVFP4_RHT_SR_UNBIASED", "ROW_SCALED", "WINDOW64"):
        assert f"{[getattr(jnvfp4, name)]}" == f"[{name}]"
    assert (
        len({repr(spec) for spec in SUPPORTED_SPECS}) == len(SUPPORTED_SPECS) == 24 + 2 + 9
    )  # of 4over6, with a search, and others
    assert [repr(QuantSpec(Format(scope), select="search")) for scope in ("tensor", "row")] == [
        "NVFP4_SEARCH",
        "ROW_SCALED_SEARCH",
    ]


def test_the_names_of_formats():
    tensors = {"nvfp4_tensor_448", "nvfp4_tensor_256", "nvfp4_tensor_448_rht"}
    others = {"nvfp4_row_448", "nvfp4_row_256", "nvfp4_window64_448"}
    assert {spec.format.name for spec in SUPPORTED_SPECS} == tensors | others


# ---------------------------------------------------------------- Python and C++ agree
def test_ffi_attributes_are_those_of_c_plus_plus():
    """Names, order and types of the nested attribute, from the struct that decodes it; all are registered."""
    text, attrs = SPEC_ATTR_H.read_text(), NVFP4.ffi_attrs()
    members = re.findall(r"([\w:]+) (\w+);", re.search(r"struct SpecAttr \{(.*?)\};", text, re.S)[1])
    types = {"std::string_view": str, "int32_t": np.int32, "bool": bool}
    assert [(name, types[kind]) for kind, name in members] == [(name, type(value)) for name, value in attrs.items()]
    assert re.findall(r'StructMember<[\w:]+>\("(\w+)"\)', text) == list(attrs)


# ---------------------------------------------------------------- what is implemented


def test_every_fused_pair_is_one_call():
    x = jax.ShapeDtypeStruct((64, 128), np.float32)
    for pair in FUSED_PAIRS:
        run = lambda x, pair=pair: jnvfp4.quantize_pair(x, *pair, key=key_for(*pair))  # noqa: E731
        calls = [str(e.primitive) for e in jax.make_jaxpr(run)(x).eqns if "nvfp4_quantize" in str(e.primitive)]
        assert calls == ["nvfp4_quantize_pair"], pair


def test_a_pair_without_a_kernel_is_refused(native):
    x, specs = Case("x", (32, 64)).make(), (NVFP4, ROW_SCALED)
    assert specs not in FUSED_PAIRS
    operands = (x, np.float32(3), np.full(64, 3, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: quantize_pair: row_spec and col_spec must"):
        jax.block_until_ready(quantize_pair_p.bind(*operands, params=sides_of(specs), implementation="native"))


# ---------------------------------------------------------------- ffi/core/spec.h
NUMBERED = [
    ("tensor", "row", "window64"),
    ("max6", "mae", "mse", "search"),
    ("fp32", "fp16"),
    ("nearest", "stochastic"),
]


def _kernel(spec: QuantSpec) -> tuple:
    """What spec.h's KernelSpec holds: every setting that is a template argument, as its enumerators' numbers."""
    named = spec.format.amax_scope, spec.select, spec.error_math, spec.rounding
    scope, *others = (names.index(name) for names, name in zip(NUMBERED, named, strict=True))
    return scope, int(spec.format.rht), spec.block_rows, *others


@pytest.fixture(scope="module")
def kernel_lists(tmp_path_factory) -> dict[str, list[tuple]]:
    """The lists of ffi/core/spec.h, as cpp/specs.cc prints them."""
    program = tmp_path_factory.mktemp("specs") / "specs"
    source = pathlib.Path(__file__).parent / "cpp" / "specs.cc"
    subprocess.run(["g++", "-std=c++20", f"-I{FFI}", str(source), "-o", str(program)], check=True)
    lines = [line.split() for line in subprocess.run([program], capture_output=True, text=True).stdout.splitlines()]
    return {kind: [tuple(map(int, numbers)) for k, *numbers in lines if k == kind] for kind in ("spec", "cuda", "pair")}


def test_kernels_are_those_of_the_lists(kernel_lists):
    expected = {"spec": {_kernel(spec) for spec in SUPPORTED_SPECS}}
    expected |= {"cuda": {_kernel(spec) for spec in SUPPORTED_SPECS if not no_kernel(spec, "cuda")}}
    expected |= {"pair": {_kernel(row) + _kernel(col) for row, col in FUSED_PAIRS}}
    for kind, found in kernel_lists.items():
        assert len(found) == len(expected[kind])
        assert set(found) == expected[kind]
