"""The GEMM kernels of Hopper beside test_gemm_kernels.py: that its shapes have every tile, and windows of 64."""

from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, random_tensor
from operands import DTYPES, ROW, TENSOR, WINDOW, dense, hang_guard, multiply_on, norm_operands, order_free_operands
from test_gemm_kernels import FUSED, LEFT, PARTS_OF_MANY, PARTS_OF_WINDOWS, SWAPPED

import jnvfp4
from jnvfp4 import NVFP4Tensor
from jnvfp4._native import load


class Plan(NamedTuple):
    """Of a fused kernel: rows of a in a tile, or of b, if A and B are swapped; splits of K, but of `whole` tiles."""

    tokens: int
    splits: int
    swapped: bool
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


def test_shapes_have_every_tile_and_split_of_k():
    found = [plan_fused(1, *shape) for shape in FUSED]
    assert {(p.tokens, p.splits > 1) for p in found} == set(product((32, 64, 128, 256), (False, True)))
    assert {p.tokens for p in found if p.whole} == {64, 128, 256}
    assert {plan_fused(1, *shape) for shape in FUSED} == {plan_fused(1, *shape, nvfp4=True) for shape in FUSED}
    found = [plan_fused(1, *shape, nvfp4=True) for shape in SWAPPED]
    assert {(p.tokens, p.splits > 1) for p in found} == {(128, False), (128, True), (256, False)}
    assert all(p.swapped for p in found)
    for shape, (tokens, parts) in PARTS_OF_MANY.items():
        assert plan_fused(*shape, nvfp4=True) == (tokens, parts, False, 0)
    for shape, parts in PARTS_OF_WINDOWS.items():
        for sides in ((True, False), (False, True), (True, True)):
            assert load.extensions()["cpu"].plan_windows(*shape, *sides) == parts


# One unit of K for each warp, or several, and clusters that split it; columns for all SMs, or few.
@pytest.mark.parametrize(("n", "k"), [(40, 256), (24, 4096), (9001, 4096), (24, 14336), (4096, 14336), (300, 8448)])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_norms_of_few_rows(hopper, half, n, k):
    """In the kernel for at most four rows, with a gain of any type; five are normalized by XLA."""
    half, run = DTYPES[half], partial(multiply_on, hopper, "sm90_dense_small_m")
    for m, gain in zip((1, 2, 3, 4, 5), cycle(DTYPES.values())):
        a, norm, normed, b = norm_operands(half, (m, n, k), gain)
        for residual, out in ((None, half), (dense((m, n), half), half), (dense((n,), np.float32), np.float32)):
            assert_bitwise(run(a, b, residual, out, norm=norm), run(normed, b, residual, out))


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize(("n", "k"), [(40, 256), (24, 4096), (9001, 4096), (24, 14336), (4096, 14336), (300, 8448)])
def test_residuals_of_few_rows(hopper, left, n, k):
    run = partial(multiply_on, hopper, f"sm90_{'nvfp4' if left is None else 'dense'}_small_m")
    for m, kind in zip((1, 3, 8, 9, 16), cycle(DTYPES.values())):
        a, b = order_free_operands(left, (m, n, k))
        residual = dense((m, n), kind)
        assert_bitwise(run(a, b, residual), run(a, b) + np.asarray(residual, np.float32))


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("k", [256, 4352])
def test_a_norm_and_residuals_of_many_matrices(hopper, half, k):
    half, run = DTYPES[half], partial(multiply_on, hopper, "sm90_dense_small_m")
    a, norm, normed, _ = norm_operands(half, (3, 40, k), lead=(2, 5))
    b = order_free_operands(half, (3, 40, k), lead=(2, 5), b_lead=(2, 5))[1]
    residual = dense((2, 5, 3, 40), half)
    assert_bitwise(run(a, b, residual, half, norm=norm), run(normed, b, residual, half))


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


# ---------------------------------------------------------------- windows of 64, whose factors tensor cores round
def multiply(device, a, b) -> np.ndarray:
    return multiply_on(device, "sm90_nvfp4_windows", a, b)


SIDES = {"a": (WINDOW, TENSOR), "b": (TENSOR, WINDOW), "rows and b": (ROW, WINDOW), "both": (WINDOW, WINDOW)}
every_side = pytest.mark.parametrize(("a_format", "b_format"), SIDES.values(), ids=SIDES)


@every_side
@pytest.mark.parametrize(
    "amaxes",
    [(x, x) for x in (0.0, np.inf, np.nan, 1e34, 1e30, 1e19, 1e-30)] + [(-2688.0, np.inf), (np.inf, -2688.0)],
    ids=str,
)
def test_amax_of_a_window_that_is_no_ordinary_number(hopper, a_format, b_format, amaxes):
    """Of one window of each side that has them, so that both also meet each other."""
    a, b = order_free_operands(None, (40, 50, 192), a_format=a_format, b_format=b_format)

    def with_amax(t, row, amax):
        if t.format is not WINDOW:
            return t
        return NVFP4Tensor(t.data, t.scale, t.amax.at[row, 1].set(amax), WINDOW)

    a, b = with_amax(a, 3, amaxes[0]), with_amax(b, 5, amaxes[1])
    got, want = multiply(hopper, a, b), np.asarray(jnvfp4.matmul_nt(a, b, out_dtype=np.float32))
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
    got = multiply(hopper, a, b).astype(np.float64)
    x, y = (np.asarray(jnvfp4.dequantize(t, jnp.float32), np.float64) for t in (a, b))
    magnitude = np.abs(x) @ np.abs(y).T
    assert (np.abs(got - x @ y.T) <= (1088 / 16 + 8) * 2.0**-23 * magnitude).all()
    for _ in range(5):
        assert_bitwise(multiply(hopper, a, b), got.astype(np.float32))


@pytest.mark.parametrize("power", [110, -110])
def test_a_small_and_a_large_factor_of_a_window_have_their_whole_product(hopper, power):
    """Factors near 2^-121 meet others near 2^99: products of the same accuracy as those of ordinary ones."""
    a, b = random_tensor(0, (40, 192), WINDOW), random_tensor(1, (50, 192), WINDOW)
    x, y = (np.asarray(jnvfp4.dequantize(t, jnp.float32), np.float64) for t in (a, b))
    ordinary = multiply(hopper, a, b).astype(np.float64)
    a = NVFP4Tensor(a.data, a.scale, a.amax * 2.0**-power, WINDOW)
    b = NVFP4Tensor(b.data, b.scale, b.amax * 2.0**power, WINDOW)
    assert (np.abs(multiply(hopper, a, b) - ordinary) <= 2.0**-20 * (np.abs(x) @ np.abs(y).T)).all()
