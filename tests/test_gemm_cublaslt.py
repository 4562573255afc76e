"""The kernel decode_then_cublaslt on any GPU: the CPU's bits where every order of summation gives the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_gemm_close, bits, random_tensor
from products import (
    DTYPES,
    HALVES,
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
from jnvfp4 import Format, _native

KERNEL = "decode_then_cublaslt"
SHAPES = [
    *[(1, 1, 16), (1, 24, 256), (5, 7, 48), (8, 40, 4096), (16, 2200, 512), (3, 43000, 256)],
    *[(31, 101, 2064), (128, 128, 128), (200, 3001, 272), (700, 261, 2064), (257, 256, 8192), (20, 101, 14336)],
    *[(70, 131, k) for k in (16, 32, 48, 64, 80, 112, 240, 1280, 4096)],
]
PATHS = [(1, 36, 48), (16, 36, 512), (130, 140, 48), (20, 101, 1040)]
every_path = over("shape", PATHS)
# Where the sums are: a float32 result holds them itself.
every_place = pytest.mark.parametrize("out", [np.float32, DTYPES["bf16"]], ids=["in place", "in scratch"])


@pytest.fixture
def gpu():
    found = gpus()
    if not found:
        skip_or_fail("cuda", "no CUDA device")
    if reason := _native.cublaslt().reason:
        skip_or_fail("cuda", reason)
    with hang_guard():
        yield found[0]


def product(a, b, bias=None, out=np.float32):
    return jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out, implementation=KERNEL)


def multiply(device, a, b, bias=None, out=np.float32) -> np.ndarray:
    return multiply_on(device, KERNEL, a, b, bias, out)


def check(device, a, b, bias=None, out=np.float32) -> None:
    assert_bitwise(multiply(device, a, b, bias, out), jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


def test_supports_names_it(gpu):
    a, b = order_free_operands(None, (32, 48, 64))
    assert jnvfp4.supports("matmul_nt", a, b, device=gpu, implementation=KERNEL) == (True, KERNEL, "")


@every_left
@over("shape", SHAPES)
def test_shapes(gpu, left, shape):
    a, b = order_free_operands(left, shape)
    assert order_free(a, b)
    check(gpu, a, b, dense(shape[1:2], np.float32))


@every_left
@every_out_dtype
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES.values()], ids=["none", *DTYPES])
@every_path
def test_bias(gpu, left, out, bias_dtype, shape):
    bias = None if bias_dtype is None else dense(shape[1:2], bias_dtype)
    check(gpu, *order_free_operands(left, shape), bias, out)


@every_left
@pytest.mark.parametrize("a_format", [TENSOR, ROW, Format(e4m3_max=256)], ids=["tensor", "row", "256"])
@pytest.mark.parametrize("b_format", [TENSOR, ROW, Format("row", 256)], ids=["tensor", "row", "row256"])
@every_path
def test_formats(gpu, left, a_format, b_format, shape):
    check(gpu, *order_free_operands(left, shape, a_format=a_format, b_format=b_format))


@every_left
@every_place
@pytest.mark.parametrize("scope", ["tensor", "per matrix", "row"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@every_path
def test_leading_axes(gpu, left, out, scope, shared, shape):
    m, n, _ = shape
    lead, b_lead = (2, 3), () if shared else (2, 3)
    rng = np.random.default_rng(5)
    fmt = ROW if scope == "row" else TENSOR
    of = {"tensor": lambda *_: (), "per matrix": lambda axes, _: axes, "row": lambda axes, rows: (*axes, rows)}[scope]
    amax = {"a_amax": rng.uniform(0.5, 2, of(lead, m)), "b_amax": rng.uniform(0.5, 2, of(b_lead, n))}
    a, b = order_free_operands(left, shape, a_format=fmt, b_format=fmt, lead=lead, b_lead=b_lead, **amax)
    check(gpu, a, b, dense((n,), np.float32), out)


@every_left
@every_place
@pytest.mark.parametrize("count", [300, 65535, 65537])
def test_many_matrices(gpu, left, out, count):
    """Also more than a dimension of a grid has: those go to the library in two parts."""
    a, b = order_free_operands(left, (2, 3, 32), a_format=ROW, b_format=ROW, lead=(count,), b_lead=(count,))
    check(gpu, a, b, out=out)


@every_place
@over("shape", [(1, 70000, 32), (70000, 1, 32), (70000, 5, 32), (5, 70000, 32)])
def test_many_rows_or_columns(gpu, out, shape):
    check(gpu, *order_free_operands(None, shape), out=out)


@every_left
def test_every_code_and_scale(gpu, left):
    """Each result is one decoded value of b."""
    b = random_tensor(1, (300, 512), scales=range(0x7F), amax=6 * 448.0)
    check(gpu, identity(left, 512), b)


def test_every_code_and_scale_of_the_left_operand(gpu):
    a = random_tensor(1, (300, 512), scales=range(0x7F), amax=6 * 448.0)
    check(gpu, a, identity(None, 512))


@every_left
@every_out_dtype
@over("shape", [*PATHS, (200, 3001, 4352), (128, 4096, 8192), (1, 4096, 4096)])
def test_ordinary_data_is_close_and_the_same_in_every_run(gpu, left, out, shape):
    m, n, k = shape
    b = random_tensor(1, (n, k), ROW)
    a = random_tensor(0, (m, k), ROW) if left is None else dense((m, k), left)
    first = multiply(gpu, a, b, out=out)
    assert_gemm_close(first, a, b)
    for _ in range(5):
        assert_bitwise(multiply(gpu, a, b, out=out), first)


def poison(device) -> None:
    """Leaves NaN in memory that the results and scratch of the next programs get."""
    with jax.default_device(device):
        for count in (1 << 28, 1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 8):
            jax.block_until_ready(jnp.full(count // 4, np.nan, np.float32))


@every_left
@every_place
@every_path
def test_results_and_scratch_that_held_nan(gpu, left, out, shape):
    """The library reads nothing of the result, which it multiplies by 0."""
    a, b = order_free_operands(left, shape)
    for _ in range(3):
        poison(gpu)
        check(gpu, a, b, out=out)


@every_left
@every_out_dtype
@every_path
def test_nan_scales_reach_their_row_and_column(gpu, left, out, shape):
    """A NaN scale, or element, reaches its row or column and no other, also the last ones; the NaN is the rule's."""
    m, n, _ = shape
    a, b = order_free_operands(left, shape)
    want = np.zeros((m, n), bool)
    want[-1], want[:, [4, -1]] = True, True
    a = with_nan_scale(a, -1) if left is None else a.at[-1, 17].set(np.nan)
    got = multiply(gpu, a, with_nan_scale(with_nan_scale(b, 4), -1), out=out)
    assert np.array_equal(np.isnan(got.astype(np.float32)), want)
    assert (bits(got)[want] == {"f4": 0x7FC00000, "f2": 0x7E00}.get(got.dtype.str[1:], 0x7FC0)).all()


@every_left
@every_place
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
@every_path
def test_amax_that_is_no_ordinary_number(gpu, left, out, amax, shape):
    """alpha of 0, Inf and NaN, and an overflow of the product of both amaxes, which follows the sum."""
    check(gpu, *order_free_operands(left, shape, a_amax=amax, b_amax=amax), out=out)


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@every_path
def test_elements_that_are_not_finite(gpu, half, value, shape):
    a, b = order_free_operands(half, shape)
    check(gpu, a.at[-1, 7].set(value), b)


@every_left
@pytest.mark.parametrize("m", [8, 300])
def test_a_chain_of_products_in_one_program(gpu, left, m):
    """Products share scratch, and XLA may record the program as a CUDA graph: run after run the bits are the same."""
    weights = [random_tensor(i, (512, 512), ROW) for i in range(8)]
    x = dense((m, 512), left or DTYPES["bf16"])

    def chain(x, weights):
        found = []
        for w in weights:
            y = product(jnvfp4.quantize(x) if left is None else x, w)
            x = (y / jnp.abs(y).max()).astype(x.dtype)
            found.append(y)
        return found

    x, weights = jax.device_put((x, weights), gpu)
    with jax.default_device(gpu):
        program = jax.jit(chain)
        first = program(x, weights)
        for _ in range(5):
            for i, (got, want) in enumerate(zip(program(x, weights), first, strict=True)):
                assert_bitwise(got, want, f"product {i}")


def test_threads_and_devices(gpu):
    """Several threads and devices multiply at once: one handle for each device."""
    from concurrent.futures import ThreadPoolExecutor

    a, b = order_free_operands(None, (130, 140, 1040))
    want = jnvfp4.matmul_nt(a, b, out_dtype=np.float32)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda device: multiply(device, a, b), 8 * gpus()):
            assert_bitwise(got, want)
