"""The GEMM kernels of Hopper, each by its name: the CPU's bits where every order of summation gives the same."""

from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_gemm_close, bits, random_tensor
from products import (
    DTYPES,
    HALVES,
    NARROW,
    ROW,
    TENSOR,
    dense,
    every_left,
    every_out_dtype,
    hang_guard,
    identity,
    multiply_on,
    order_free,
    order_free_operands,
    over,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor
from jnvfp4._native import load

# M, N, K. The comments are for the 132 multiprocessors of an H200.
SMALL_M = [
    (1, 1, 16),  # masked where 256 does not divide K
    (8, 40, 48),
    (3, 100, 272),  # clusters of two thread blocks divide K
    (13, 1000, 2320),
    (16, 2200, 4112),  # three units of columns a warp
    (1, 24, 256),
    (7, 100, 4096),  # clusters of eight
    (8, 2128, 8192),
    (3, 43000, 256),  # more thread blocks than multiprocessors
    (9, 77, 512),
    (16, 2200, 4096),
    (16, 2200, 8448),  # the last warps have fewer units
    (12, 40, 8192),
]
FUSED = [
    (20, 101, 272),  # tiles of 32 rows of a, then the same with parts of K
    (20, 101, 1040),
    (31, 101, 2064),
    (200, 3001, 272),  # of 64
    (700, 261, 2064),
    (400, 3001, 272),  # of 128
    (200, 3001, 4352),
    (700, 4001, 272),  # of 256
    (400, 3001, 14336),
    (60, 17001, 2064),  # tiles of 64, of 128 and of 256 rows: parts of K for those that fill no wave
    (100, 17001, 2064),
    (1024, 14337, 4096),
    *[(m, n, 336) for m, n in ((1, 1), (1, 257), (129, 3), (64, 64), (65, 130), (300, 600), (257, 256))],
    # What is past the end of K is zero, also where rows of codes or scales are copied for the tensor maps.
    *[(70, 131, k) for k in (16, 32, 48, 64, 80, 112, 128, 240, 256, 272, 512, 528, 1280, 4096)],
]
# Two NVFP4 operands, the right one of fewer rows: it is decoded to scratch instead of the left one.
EXCHANGED = [(5668, 130, 48), (3594, 521, 272), (2862, 130, 4352), (1581, 261, 4352), (6000, 2601, 80)]
SHAPES = [("small_m", *s) for s in SMALL_M] + [("fused", *s) for s in FUSED + EXCHANGED]
# A small shape of every path: with and without a mask, fused with and without copies, with parts of K.
PATHS = [
    ("small_m", 5, 35, 48),
    ("small_m", 16, 36, 512),
    ("fused", 40, 36, 512),
    ("fused", 130, 140, 48),
    ("fused", 20, 101, 1040),
]


class Plan(NamedTuple):
    """Of a fused kernel: rows of a in a tile, or of b, if operands are exchanged; parts of K, but of `whole` tiles."""

    tokens: int
    splits: int
    exchanged: bool
    whole: int


def plan_fused(*shape: int, nvfp4: bool = False) -> Plan:
    return Plan(*load.extensions()["cpu"].plan_fused(*shape, nvfp4))


every_shape, every_path = over("shape", SHAPES), over("shape", PATHS)


@pytest.fixture
def hopper():
    """A GPU. A kernel that never ends stops the process, since nothing else can."""
    found = [device for device in gpus() if device.compute_capability == "9.0"]
    if not found:
        skip_or_fail("hopper", "no GPU of compute capability 9.0")
    with hang_guard():
        yield found[0]


def operands(left, shape, **options):
    return order_free_operands(left, shape[1:], **options)


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
@every_shape
def test_shapes(hopper, left, shape):
    """Against the CPU; the largest against the pinned order on the same GPU."""
    a, b = operands(left, shape)
    bias = dense(shape[2:3], np.float32)
    if np.prod(shape[1:]) < 1e9:
        assert order_free(a, b)
        check(hopper, shape[0], a, b, bias)
        return
    got = multiply(hopper, shape[0], a, b, bias)
    with jax.default_device(hopper):
        a, b, bias = jax.device_put((a, b, bias), hopper)
        assert_bitwise(got, jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=np.float32, accumulation="pinned"))


@every_left
@pytest.mark.parametrize("m", [1, 8, 9, 16])
@pytest.mark.parametrize("k", [256, 304])
def test_every_count_of_few_rows(hopper, left, m, k):
    check(hopper, "small_m", *operands(left, ("small_m", m, 67, k), b_format=ROW))


@every_left
@every_out_dtype
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES.values()], ids=["none", *DTYPES])
@every_path
def test_bias(hopper, left, out, bias_dtype, shape):
    bias = None if bias_dtype is None else dense(shape[2:3], bias_dtype)
    check(hopper, shape[0], *operands(left, shape), bias, out)


@every_left
@every_out_dtype
@over("shape", [("fused", *s) for s in FUSED[:8] + EXCHANGED[:2]])
def test_result_of_every_tile(hopper, left, shape, out):
    check(hopper, shape[0], *operands(left, shape), dense(shape[2:3], DTYPES["bf16"]), out)


@every_left
@pytest.mark.parametrize("a_format", [TENSOR, ROW, Format(e4m3_max=256)], ids=["tensor", "row", "256"])
@pytest.mark.parametrize("b_format", [TENSOR, ROW, Format("row", 256)], ids=["tensor", "row", "row256"])
@every_path
def test_formats(hopper, left, a_format, b_format, shape):
    check(hopper, shape[0], *operands(left, shape, a_format=a_format, b_format=b_format))


@pytest.mark.parametrize("a_format", [TENSOR, ROW, Format(e4m3_max=256)], ids=["tensor", "row", "256"])
@pytest.mark.parametrize("b_format", [TENSOR, ROW, Format("row", 256)], ids=["tensor", "row", "row256"])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "two"])
@over("shape", [("fused", *s) for s in EXCHANGED[:2]])
def test_formats_of_exchanged_operands(hopper, a_format, b_format, lead, shape):
    a, b = operands(None, shape, a_format=a_format, b_format=b_format, lead=lead, b_lead=lead)
    check(hopper, "fused", a, b, dense(shape[2:3], DTYPES["bf16"]), DTYPES["bf16"])


@every_left
@pytest.mark.parametrize("scope", ["tensor", "per matrix", "row"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@every_path
def test_leading_axes(hopper, left, scope, shared, shape):
    kernel, m, n, k = shape
    lead = (2, 3)
    if shared and kernel == "small_m":
        m = max(1, m // 6)  # leading axes of a are rows
    b_lead = () if shared else lead
    rng = np.random.default_rng(5)
    fmt = ROW if scope == "row" else TENSOR
    of = {"tensor": lambda *_: (), "per matrix": lambda axes, _: axes, "row": lambda axes, rows: (*axes, rows)}[scope]
    amax = {"a_amax": rng.uniform(0.5, 2, of(lead, m)), "b_amax": rng.uniform(0.5, 2, of(b_lead, n))}
    a, b = operands(left, (kernel, m, n, k), a_format=fmt, b_format=fmt, lead=lead, b_lead=b_lead, **amax)
    check(hopper, kernel, a, b, dense((n,), np.float32))


@every_left
@over("shape", [("fused", 5, 6, 80), ("fused", 5, 6, 528), ("small_m", 5, 6, 80), ("small_m", 16, 6, 256)])
def test_many_matrices(hopper, left, shape):
    """More tiles than thread blocks: each goes on to the next with its barriers as they are."""
    a, b = operands(left, shape, a_format=ROW, b_format=ROW, lead=(300,), b_lead=(300,))
    check(hopper, shape[0], a, b)


PARTS_OF_MANY = {(5, 6, 5120): (32, 3), (64, 6, 7936): (64, 3), (100, 6, 5120): (128, 3)}


@every_left
@over("shape", PARTS_OF_MANY)
def test_parts_of_k_of_many_matrices(hopper, left, shape):
    """More parts than thread blocks: each goes on after it has kept its sums for another."""
    assert plan_fused(40, *shape, nvfp4=True) == (*PARTS_OF_MANY[shape], False, 0)
    a, b = operands(left, ("fused", *shape), a_format=ROW, b_format=ROW, lead=(40,), b_lead=(40,))
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


@every_left
@pytest.mark.parametrize("kernel", ["small_m", "fused"])
def test_every_code_and_scale(hopper, left, kernel):
    """Each result is one decoded value of b."""
    b = random_tensor(1, (300, 512), scales=range(0x7F), amax=6 * 448.0)
    rows = 16 if kernel == "small_m" else 512
    for first in range(0, 512, rows):
        check(hopper, kernel, identity(left, 512, first, rows), b)


@pytest.mark.parametrize("kernel", ["small_m", "fused"])
def test_every_code_and_scale_of_the_left_operand(hopper, kernel):
    a = random_tensor(1, (16, 512), scales=range(0x7F), amax=6 * 448.0)
    check(hopper, kernel, a, identity(None, 512))


@every_left
@over("shape", [s for s in SHAPES if 1000 < s[3] < 10000])
def test_ordinary_data_is_close_and_the_same_in_every_run(hopper, left, shape):
    kernel, m, n, k = shape
    b = random_tensor(1, (n, k), ROW)
    a = random_tensor(0, (m, k), ROW) if left is None else dense((m, k), left)
    first = multiply(hopper, kernel, a, b)
    assert_gemm_close(first, a, b)
    for _ in range(5):
        assert_bitwise(multiply(hopper, kernel, a, b), first)


@every_left
@every_path
def test_nan_scales_reach_their_row_and_column(hopper, left, shape):
    """A NaN scale, or element, reaches its row or column and no other, also the last ones."""
    kernel, m, n, _ = shape
    a, b = operands(left, shape)
    want = np.zeros((m, n), bool)
    want[-1], want[:, [4, -1]] = True, True
    a = with_nan_scale(a, -1) if left is None else a.at[-1, 17].set(np.nan)
    got = multiply(hopper, kernel, a, with_nan_scale(with_nan_scale(b, 4), -1))
    assert np.array_equal(np.isnan(got), want)
    assert (bits(got)[want] == 0x7FC00000).all()


@every_left
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
@every_path
def test_amax_that_is_no_ordinary_number(hopper, left, amax, shape):
    """alpha of 0, Inf and NaN, and an overflow of the product of both amaxes, which follows the sum."""
    check(hopper, shape[0], *operands(left, shape, a_amax=amax, b_amax=amax), out=DTYPES["bf16"])


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


def plan_windows(*shape: int, sides: tuple[bool, bool]) -> int:
    """Parts of K."""
    return load.extensions()["cpu"].plan_windows(*shape, *sides)


@every_side
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@pytest.mark.parametrize(("matrices", "parts", "k"), [(67, 1, 1024), (40, 3, 5120)], ids=["tiles", "parts"])
def test_windows_of_many_matrices(hopper, a_format, b_format, shared, matrices, parts, k):
    """More tiles, or more parts of tiles, than thread blocks."""
    sides = a_format is WINDOW, b_format is WINDOW
    assert plan_windows(matrices, 5, 6, k, sides=sides) == parts
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


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@every_path
def test_elements_that_are_not_finite(hopper, half, value, shape):
    a, b = operands(half, shape)
    check(hopper, shape[0], a.at[2, 7].set(value), b)
