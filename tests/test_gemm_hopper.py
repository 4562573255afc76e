"""The GEMM kernels of Hopper beside test_gemm_kernels.py: every tile and division of work, and windows of 64."""

from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, random_tensor
from products import (
    DTYPES,
    NARROW,
    ROW,
    TENSOR,
    dense,
    every_left,
    every_out_dtype,
    hang_guard,
    multiply_on,
    order_free_operands,
    over,
    with_nan_scale,
)
from test_gemm_kernels import EXCHANGED, FUSED

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor
from jnvfp4._native import load


class Plan(NamedTuple):
    """Of a fused kernel: rows of a in a tile, or of b, if operands are exchanged; parts of K, but of `whole` tiles."""

    tokens: int
    splits: int
    exchanged: bool
    whole: int


def plan_fused(*shape: int, nvfp4: bool = False) -> Plan:
    return Plan(*load.extensions()["cpu"].plan_fused(*shape, nvfp4))


@pytest.fixture
def hopper():
    """A GPU. A kernel that never ends stops the process, since nothing else can."""
    found = [device for device in gpus() if device.compute_capability == "9.0"]
    if not found:
        skip_or_fail("hopper", "no GPU of compute capability 9.0")
    with hang_guard():
        yield found[0]


def multiply(device, kernel, a, b, bias=None, out=np.float32) -> np.ndarray:
    left = "nvfp4" if isinstance(a, NVFP4Tensor) else "dense"
    return multiply_on(device, f"sm90_{left}_{kernel}", a, b, bias, out)


def check(device, kernel, a, b, bias=None, out=np.float32) -> None:
    assert_bitwise(multiply(device, kernel, a, b, bias, out), jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


def test_shapes_have_every_tile_and_parts_of_k():
    found = [plan_fused(1, *shape) for shape in FUSED]
    assert {(p.tokens, p.splits > 1) for p in found} == set(product((32, 64, 128, 256), (False, True)))
    assert {p.tokens for p in found if p.whole} == {64, 128, 256}
    assert {plan_fused(1, *shape) for shape in FUSED} == {plan_fused(1, *shape, nvfp4=True) for shape in FUSED}
    found = [plan_fused(1, *shape, nvfp4=True) for shape in EXCHANGED]
    assert {(p.tokens, p.splits > 1) for p in found} == {(128, False), (128, True), (256, False)}
    assert all(p.exchanged for p in found)


@every_left
@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize("k", [256, 304])
def test_every_count_of_few_rows(hopper, left, m, k):
    check(hopper, "small_m", *order_free_operands(left, (m, 67, k), b_format=ROW))


@every_left
@every_out_dtype
@over("shape", FUSED[:8] + EXCHANGED[:2])
def test_result_of_every_tile(hopper, left, shape, out):
    check(hopper, "fused", *order_free_operands(left, shape), dense(shape[1:2], DTYPES["bf16"]), out)


@pytest.mark.parametrize("a_format", [TENSOR, ROW, Format(e4m3_max=256)], ids=["tensor", "row", "256"])
@pytest.mark.parametrize("b_format", [TENSOR, ROW, Format("row", 256)], ids=["tensor", "row", "row256"])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "two"])
@over("shape", EXCHANGED[:2])
def test_formats_of_exchanged_operands(hopper, a_format, b_format, lead, shape):
    a, b = order_free_operands(None, shape, a_format=a_format, b_format=b_format, lead=lead, b_lead=lead)
    check(hopper, "fused", a, b, dense(shape[1:2], DTYPES["bf16"]), DTYPES["bf16"])


PARTS_OF_MANY = {(5, 6, 5120): (32, 3), (64, 6, 7936): (64, 3), (100, 6, 5120): (128, 3)}


@every_left
@over("shape", PARTS_OF_MANY)
def test_parts_of_k_of_many_matrices(hopper, left, shape):
    """More parts than CTAs: each goes on after it has kept its sums for another."""
    assert plan_fused(40, *shape, nvfp4=True) == (*PARTS_OF_MANY[shape], False, 0)
    a, b = order_free_operands(left, shape, a_format=ROW, b_format=ROW, lead=(40,), b_lead=(40,))
    check(hopper, "fused", a, b)


@pytest.mark.parametrize("m", [8, 40, 300])
def test_a_chain_of_products(hopper, m):
    """A kernel may start before the one ahead ends, but reads nothing of it: also where it makes the left operand."""
    weights = [random_tensor(i, (512, 512), ROW) for i in range(24)]
    x = dense((m, 512), DTYPES["bf16"])

    def step(x, w, i):
        left = jnvfp4.quantize(x) if i % 3 == 2 else x
        y = jnvfp4.matmul_nt(left, w, out_dtype=jnp.float32)
        return (y / jnp.abs(y).max()).astype(jnp.bfloat16)

    def chain(x, weights):
        found = []
        for i, w in enumerate(weights):
            x = step(x, w, i)
            found.append(x)
        return found

    x, weights = jax.device_put((x, weights), hopper)
    with jax.default_device(hopper):
        want = []
        for i, w in enumerate(weights):
            want.append(jax.block_until_ready(jax.jit(step, static_argnums=2)(want[-1] if want else x, w, i)))
        program = jax.jit(chain)
        for _ in range(5):
            for i, (got, expected) in enumerate(zip(program(x, weights), want, strict=True)):
                assert_bitwise(got, expected, f"product {i}")


WINDOW = Format("window64")


def windowed(seed, shape, fmt, lead=()) -> NVFP4Tensor:
    """Operands whose products add up to the same bits in any order: the factors of windows are powers of two."""
    of_scope = {"window64": (*lead, shape[0], shape[1] // 64), "row": (*lead, shape[0]), "tensor": lead}
    powers = np.random.default_rng(seed + 10).integers(-1, 2, of_scope[fmt.amax_scope])
    return random_tensor(seed, (*lead, *shape), fmt, scales=NARROW, amax=6 * 448 * 2.0**powers)


SIDES = {"a": (WINDOW, TENSOR), "b": (TENSOR, WINDOW), "rows and b": (ROW, WINDOW), "both": (WINDOW, WINDOW)}
every_side = pytest.mark.parametrize(("a_format", "b_format"), SIDES.values(), ids=SIDES)


@every_side
@over("shape", [(1, 1, 64), (5, 7, 128), (130, 140, 320), (70, 131, 1088), (300, 600, 2112), (257, 256, 192)])
@every_out_dtype
def test_windows(hopper, a_format, b_format, shape, out):
    m, n, k = shape
    a, b = windowed(0, (m, k), a_format), windowed(1, (n, k), b_format)
    check(hopper, "windows", a, b, dense((n,), np.float32), out)


@every_side
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@pytest.mark.parametrize(("matrices", "parts", "k"), [(67, 1, 1024), (40, 3, 5120)], ids=["tiles", "parts"])
def test_windows_of_many_matrices(hopper, a_format, b_format, shared, matrices, parts, k):
    """More tiles, or more parts of tiles, than CTAs."""
    sides = a_format is WINDOW, b_format is WINDOW
    assert load.extensions()["cpu"].plan_windows(matrices, 5, 6, k, *sides) == parts
    lead = (matrices,)
    a, b = windowed(0, (5, k), a_format, lead), windowed(1, (6, k), b_format, () if shared else lead)
    check(hopper, "windows", a, b)


@every_side
@pytest.mark.parametrize(
    "amaxes",
    [(x, x) for x in (0.0, np.inf, np.nan, 1e34, 1e30, 1e19, 1e-30)] + [(-2688.0, np.inf), (np.inf, -2688.0)],
    ids=str,
)
def test_amax_of_a_window_that_is_no_ordinary_number(hopper, a_format, b_format, amaxes):
    """Of one window of each side that has them, so that both also meet each other."""
    a, b = windowed(0, (40, 192), a_format), windowed(1, (50, 192), b_format)

    def with_amax(t, row, amax):
        if t.format is not WINDOW:
            return t
        return NVFP4Tensor(t.data, t.scale, t.amax.at[row, 1].set(amax), WINDOW)

    a, b = with_amax(a, 3, amaxes[0]), with_amax(b, 5, amaxes[1])
    got, want = multiply(hopper, "windows", a, b), np.asarray(jnvfp4.matmul_nt(a, b, out_dtype=np.float32))
    others = np.ones((40, 50), bool)
    others[3] = a_format is not WINDOW
    others[:, 5] &= b_format is not WINDOW
    assert_bitwise(got[others], want[others])
    assert np.array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=2**-20, atol=0)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True)


@every_side
def test_windows_of_ordinary_data(hopper, a_format, b_format):
    """Against float64, within the bound of the sums of windows and the rounding of their factors."""
    a, b = random_tensor(0, (140, 1088), a_format), random_tensor(1, (150, 1088), b_format)
    got = multiply(hopper, "windows", a, b).astype(np.float64)
    x, y = (np.asarray(jnvfp4.dequantize(t, jnp.float32), np.float64) for t in (a, b))
    magnitude = np.abs(x) @ np.abs(y).T
    assert (np.abs(got - x @ y.T) <= (1088 / 16 + 8) * 2.0**-23 * magnitude).all()
    for _ in range(5):
        assert_bitwise(multiply(hopper, "windows", a, b), got.astype(np.float32))


@pytest.mark.parametrize("power", [110, -110])
def test_a_small_and_a_large_factor_of_a_window_have_their_whole_product(hopper, power):
    """Factors near 2^-121 meet others near 2^99: products of the same accuracy as those of ordinary ones."""
    a, b = random_tensor(0, (40, 192), WINDOW), random_tensor(1, (50, 192), WINDOW)
    x, y = (np.asarray(jnvfp4.dequantize(t, jnp.float32), np.float64) for t in (a, b))
    ordinary = multiply(hopper, "windows", a, b).astype(np.float64)
    a = NVFP4Tensor(a.data, a.scale, a.amax * 2.0**-power, WINDOW)
    b = NVFP4Tensor(b.data, b.scale, b.amax * 2.0**power, WINDOW)
    assert (np.abs(multiply(hopper, "windows", a, b) - ordinary) <= 2.0**-20 * (np.abs(x) @ np.abs(y).T)).all()


@every_side
def test_nan_scales_and_amaxes_of_windows(hopper, a_format, b_format):
    a, b = windowed(0, (140, 320), a_format), windowed(1, (150, 320), b_format)
    got = multiply(hopper, "windows", with_nan_scale(a, 3), with_nan_scale(b, 5))
    want = np.zeros((140, 150), bool)
    want[3], want[:, 5] = True, True
    assert np.array_equal(np.isnan(got), want)
    if b_format is WINDOW:
        amax = np.asarray(b.amax).copy()
        amax[7, 2] = np.nan
        got = multiply(hopper, "windows", a, NVFP4Tensor(b.data, b.scale, jnp.asarray(amax), WINDOW))
        assert np.isnan(got[:, 7]).all()
        assert not np.isnan(np.delete(got, 7, axis=1)).any()
