"""``quantize``: the native kernels against the reference, and the rules for amax, NaN, Inf and zeros."""

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FLOAT_MAX,
    assert_bitwise,
    assert_same_tensor,
    bits,
    find_amax,
    properties,
    quantize_by_reference,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED

SPECS = {"1d": NVFP4, "2d": NVFP4_2D, "row": ROW_SCALED}
every_spec = pytest.mark.parametrize("spec", list(SPECS.values()), ids=list(SPECS))
one_by_sixteen = pytest.mark.parametrize("spec", [NVFP4, ROW_SCALED], ids=["1d", "row"])
both_ways = pytest.mark.parametrize("transpose", [False, True], ids=["rows", "columns"])
DISTRIBUTED = [case for case in cases.tagged("quick") if case.name == f"{case.distribution}_bf16"]


def every_case(found: list[cases.Case]):
    return pytest.mark.parametrize("case", found, ids=[case.name for case in found])


def turned(x: np.ndarray, transpose: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if transpose else x


def native_quantize(x, spec, amax=None, transpose=False):
    return jnvfp4.quantize(x, spec, amax=amax, transpose=transpose, implementation="native")


def check(t, x: np.ndarray, spec, amax=None) -> None:
    """t has the bits that the reference gives for x, which is oriented like t."""
    amax = find_amax(x, spec.format.amax_scope) if amax is None else np.asarray(amax, np.float32)
    data, scale = quantize_by_reference(x, spec, amax)
    assert_bitwise(t.amax, amax, "amax")
    assert_bitwise(t.scale, scale, "scale")
    assert_bitwise(unpack_codes(t.data), unpack_codes(data), "codes")
    assert t.format == spec.format
    assert t.shape == x.shape


def amax_of(x, spec, transpose=False):
    return find_amax(turned(x, transpose), spec.format.amax_scope)


# ---------------------------------------------------------------- native == reference
@every_case(cases.tagged("quick"))
@every_spec
@both_ways
def test_native(native, case, spec, transpose):
    x = case.make()
    check(native_quantize(x, spec, transpose=transpose), turned(x, transpose), spec)


@every_spec
@both_ways
def test_every_backend_in_its_own_shape(backend, spec, transpose):
    x = next(case for case in cases.CASES if case.name == "batched").make()
    t = jnvfp4.quantize(x, spec, transpose=transpose, implementation=backend.implementation)
    check(t, turned(x, transpose), spec)


@every_case(cases.RAGGED_ROWS)
@one_by_sixteen
@both_ways
def test_any_number_of_rows(native, case, spec, transpose):
    x = turned(case.make(), transpose)
    check(native_quantize(x, spec, transpose=transpose), turned(x, transpose), spec)


@one_by_sixteen
def test_any_number_of_rows_by_the_reference(backend, spec):
    x = cases.Case("three", (3, 32)).make()
    check(jnvfp4.quantize(x, spec, implementation=backend.implementation), x, spec)


@every_case(DISTRIBUTED)
@every_spec
@both_ways
@pytest.mark.parametrize("factor", [0.1, 1, 3], ids=["smaller", "equal", "larger"])
def test_given_amax(native, case, spec, transpose, factor):
    x = case.make()
    amax = amax_of(x, spec, transpose) * np.float32(factor)
    check(native_quantize(x, spec, amax, transpose), turned(x, transpose), spec, amax)


@pytest.mark.parametrize("amax", [0.0, -0.0, 1e-45, 1e-38, 7.8e-36, 3.3e-35, float(FLOAT_MAX), np.inf, np.nan])
@every_spec
def test_extreme_given_amax(native, spec, amax):
    x = cases.Case("x", (32, 64), "fp32", "heavy").make()
    amax = np.broadcast_to(np.float32(amax), x.shape[:-1] if spec is ROW_SCALED else ())
    check(native_quantize(x, spec, amax), x, spec, np.abs(amax))


@every_spec
def test_amax_larger_than_given_saturates(native, spec):
    """Elements above the given amax get the largest code and the largest scale."""
    x = np.full((16, 32), 1.0, np.float32)
    x[3, 5], x[4, 6] = 100, -100
    amax = np.ones(16 if spec is ROW_SCALED else (), np.float32)
    t = native_quantize(x, spec, amax)
    check(t, x, spec, amax)
    codes = unpack_codes(t.data)
    assert (codes[3, 5], codes[4, 6]) == (7, 15)
    assert bits(t.scale)[3, 0] == bits(t.scale)[4, 0] == 0x7E


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D], ids=["1d", "2d"])
@both_ways
def test_amax_per_leading_index(native, spec, transpose):
    x = cases.Case("batch", (2, 3, 16, 48)).make()
    amax = np.array([[0.5, 1, 2], [3, 4, 5]], np.float32)
    t = native_quantize(x, spec, amax, transpose)
    check(t, turned(x, transpose), spec, amax)
    for i in np.ndindex(2, 3):
        assert_same_tensor(jax.tree.map(lambda leaf, i=i: leaf[i], t), native_quantize(x[i], spec, amax[i], transpose))


# ---------------------------------------------------------------- NaN, Inf and zeros
SPECIAL_PLACES = [(0, 0), (17, 40), (31, 63)]


def with_special(value: float, dtype: str = "fp32") -> np.ndarray:
    x = cases.Case("x", (32, 64), dtype).make().copy()
    for place in SPECIAL_PLACES:
        x[place] = value
    return x


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", list(cases.DTYPES))
@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
@every_spec
@both_ways
def test_special_elements(native, value, dtype, given, spec, transpose):
    x = with_special(value, dtype)
    amax = amax_of(np.clip(np.nan_to_num(x), -2, 2), spec, transpose) if given else None
    check(native_quantize(x, spec, amax, transpose), turned(x, transpose), spec, amax)


@pytest.mark.parametrize("payload", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
@every_spec
def test_every_nan_is_a_nan(native, spec, payload):
    x = with_special(0.0)
    x.view(np.uint32)[17, 40] = payload
    check(native_quantize(x, spec), x, spec)


def places(spec) -> np.ndarray:
    """Which of the [32, 4] blocks hold one of SPECIAL_PLACES."""
    hit = np.zeros((32, 4), bool)
    for row, col in SPECIAL_PLACES:
        rows = slice(row // 16 * 16, row // 16 * 16 + 16) if spec is NVFP4_2D else row
        hit[rows, col // 16] = True
    return hit


@every_spec
def test_given_amax_confines_nan_to_its_block(native, spec):
    amax = np.full(32 if spec is ROW_SCALED else (), 3, np.float32)
    t = native_quantize(with_special(np.nan), spec, amax)
    assert np.array_equal(bits(t.scale) == 0x7F, places(spec))
    assert not unpack_codes(t.data)[places(spec).repeat(16, axis=1)].any()


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D], ids=["1d", "2d"])
def test_computed_amax_spreads_nan_over_the_tensor(native, spec):
    t = native_quantize(with_special(np.nan), spec)
    assert bits(t.amax) == 0x7FC00000
    assert (bits(t.scale) == 0x7F).all()
    assert not np.asarray(t.data).any()


def test_computed_amax_spreads_nan_over_its_row(native):
    t = native_quantize(with_special(np.nan), ROW_SCALED)
    rows = np.isin(np.arange(32), [row for row, _ in SPECIAL_PLACES])
    assert np.array_equal(bits(t.amax) == 0x7FC00000, rows)
    assert np.array_equal((bits(t.scale) == 0x7F).all(axis=1), rows)
    assert np.array_equal((bits(t.scale) == 0x7F).any(axis=1), rows)
    assert not np.asarray(t.data)[rows].any()


@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
@every_spec
def test_inf_saturates(native, spec, given):
    amax = np.full(32 if spec is ROW_SCALED else (), 3, np.float32) if given else None
    t = native_quantize(with_special(-np.inf), spec, amax)
    assert all(unpack_codes(t.data)[place] == 15 for place in SPECIAL_PLACES)
    assert (bits(t.scale)[places(spec)] == 0x7E).all()
    assert not (bits(t.scale) == 0x7F).any()


@every_spec
def test_signed_zeros(native, spec):
    x = cases.Case("x", (16, 32), "bf16", "signed_zeros").make()
    t = native_quantize(x, spec)
    assert_bitwise(unpack_codes(t.data), np.where(np.signbit(x), 8, 0).astype(np.uint8))
    assert not bits(t.scale).any()
    assert not bits(t.amax).any()


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0), (0, 16, 32), (2, 0, 32)])
@every_spec
@both_ways
def test_no_elements(backend, shape, spec, transpose):
    x = jnp.zeros(shape, jnp.bfloat16)
    t = jnvfp4.quantize(x, spec, transpose=transpose, implementation=backend.implementation)
    *lead, rows, cols = turned(x, transpose).shape
    assert t.data.shape == (*lead, rows, cols // 2)
    assert t.scale.shape == (*lead, rows, cols // 16)
    assert_bitwise(t.amax, np.zeros((*lead, rows) if spec is ROW_SCALED else (), np.float32))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@every_spec
def test_subnormals_survive_jit(native, dtype, spec):
    """XLA:CPU flushes subnormals in its own code; the amax and the kernels must not."""
    x = cases.Case("x", (32, 64), dtype, "subnormal").make()
    t = jax.jit(lambda x: native_quantize(x, spec))(x)
    assert 0 < np.max(np.asarray(t.amax)) < 2.0**-126
    assert np.asarray(t.data).any()
    check(t, x, spec)


# ---------------------------------------------------------------- pairs and transposes
@pytest.mark.parametrize("row_spec", list(SPECS.values()), ids=list(SPECS))
@pytest.mark.parametrize("col_spec", list(SPECS.values()), ids=list(SPECS))
def test_pair_is_two_calls(native, row_spec, col_spec):
    x = cases.Case("x", (32, 64), "bf16", "heavy").make()
    row, col = jnvfp4.quantize_pair(x, row_spec, col_spec, implementation="native")
    assert_same_tensor(row, native_quantize(x, row_spec), "row")
    assert_same_tensor(col, native_quantize(x, col_spec, transpose=True), "col")


@pytest.mark.parametrize("which", ["row", "col", "both"])
def test_pair_with_given_amax(native, which):
    x = cases.Case("x", (32, 64)).make()
    amax = (np.float32(2) if which != "col" else None, np.full(64, 3, np.float32) if which != "row" else None)
    row, col = jnvfp4.quantize_pair(x, NVFP4, ROW_SCALED, amax=amax, implementation="native")
    assert_same_tensor(row, native_quantize(x, NVFP4, amax[0]), "row")
    assert_same_tensor(col, native_quantize(x, ROW_SCALED, amax[1], transpose=True), "col")


@every_spec
def test_transpose_is_the_transposed_input(native, spec):
    x = cases.Case("x", (2, 32, 48), "fp16", "heavy").make()
    assert_same_tensor(
        native_quantize(x, spec, transpose=True), native_quantize(np.ascontiguousarray(turned(x, True)), spec)
    )


@every_case(DISTRIBUTED)
def test_transposed_tiles_are_the_transpose(native, case):
    """16x16 tiles: the codes and scales of the transpose are those of the tensor, transposed."""
    x = case.make()
    t, tt = native_quantize(x, NVFP4_2D), native_quantize(x, NVFP4_2D, transpose=True)
    assert_bitwise(unpack_codes(tt.data), unpack_codes(t.data).T, "codes")
    scale, scale_t = (bits(s).repeat(16, axis=1) for s in (t.scale, tt.scale))
    assert_bitwise(scale_t, scale.T, "scale of every element")


# ---------------------------------------------------------------- properties
shapes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 6).map(lambda n: 16 * n))
distributions = st.sampled_from(sorted(cases.DISTRIBUTIONS))
seeds = st.integers(0, 2**31)


@properties
@hypothesis.given(
    shapes, distributions, seeds, st.sampled_from(sorted(cases.DTYPES)), st.sampled_from([NVFP4, ROW_SCALED])
)
def test_native_over_shapes(native, shape, distribution, seed, dtype, spec):
    x = cases.Case("x", shape, dtype, distribution).make(seed)
    check(native_quantize(x, spec), x, spec)


@properties
@hypothesis.given(seeds, st.integers(-80, 80), st.sampled_from(list(SPECS.values())))
def test_scaling_by_powers_of_two_changes_only_amax(native, seed, exponent, spec):
    x = cases.Case("x", (32, 64), "bf16", "heavy").make(seed)
    t, scaled = native_quantize(x, spec), native_quantize((x.astype(np.float32) * 2.0**exponent).astype(x.dtype), spec)
    assert_bitwise(scaled.data, t.data, "data")
    assert_bitwise(scaled.scale, t.scale, "scale")
    assert_bitwise(scaled.amax, np.asarray(t.amax) * np.float32(2.0**exponent), "amax")


@properties
@hypothesis.given(seeds, distributions, st.sampled_from([NVFP4, ROW_SCALED]))
def test_permuting_rows_commutes(native, seed, distribution, spec):
    x = cases.Case("x", (32, 64), "bf16", distribution).make(seed)
    order = np.random.default_rng(seed).permutation(32)
    t, permuted = native_quantize(x, spec), native_quantize(x[order], spec)
    assert_bitwise(permuted.data, np.asarray(t.data)[order], "data")
    assert_bitwise(permuted.scale, np.asarray(t.scale)[order], "scale")


def test_the_sign_of_amax_means_nothing(native):
    x = jnp.ones((16, 16))
    assert_same_tensor(jnvfp4.quantize(x, amax=-1.0), jnvfp4.quantize(x, amax=1.0))
    assert not jnvfp4.quantize(x, amax=jnp.asarray(1.0)).amax.weak_type
