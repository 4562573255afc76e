"""The kernel decode_then_dot on any GPU: the CPU's bits where every order of summation gives the same."""

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
    identity,
    multiply_on,
    order_free,
    order_free_operands,
    over,
    with_nan_scale,
)

import jnvfp4

KERNEL = "decode_then_dot"
SHAPES = [(1, 1, 16), (5, 7, 48), (8, 40, 4096), (31, 101, 2064), (257, 256, 8192)]
every_path = over("shape", [(1, 36, 48), (130, 141, 48)])  # the epilogue takes four columns at a time, or one


@pytest.fixture
def gpu():
    found = gpus()
    if not found:
        skip_or_fail("cuda", "no CUDA device")
    return found[0]


def check(device, a, b, bias=None, out=np.float32) -> None:
    got = multiply_on(device, KERNEL, a, b, bias, out)
    assert_bitwise(got, jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


@every_left
@over("shape", SHAPES)
def test_shapes(gpu, left, shape):
    a, b = order_free_operands(left, shape)
    assert order_free(a, b)
    check(gpu, a, b)


@every_left
@over("shape", [(5, 7, 48), (200, 301, 4352)])
def test_ordinary_data_is_close_and_the_same_in_every_run(gpu, left, shape):
    m, n, k = shape
    b = random_tensor(1, (n, k), ROW)
    a = random_tensor(0, (m, k), ROW) if left is None else dense((m, k), left)
    first = multiply_on(gpu, KERNEL, a, b)
    assert_gemm_close(first, a, b)
    for _ in range(3):
        assert_bitwise(multiply_on(gpu, KERNEL, a, b), first)


@every_left
@every_out_dtype
@pytest.mark.parametrize("bias_dtype", DTYPES.values(), ids=DTYPES)
@every_path
def test_bias(gpu, left, out, bias_dtype, shape):
    check(gpu, *order_free_operands(left, shape), dense(shape[1:2], bias_dtype), out)


@every_left
@pytest.mark.parametrize("scope", ["tensor", "per matrix", "row"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@every_path
def test_leading_axes(gpu, left, scope, shared, shape):
    m, n, _ = shape
    lead, b_lead = (2, 3), () if shared else (2, 3)
    rng = np.random.default_rng(5)
    fmt = ROW if scope == "row" else TENSOR
    of = {"tensor": lambda *_: (), "per matrix": lambda axes, _: axes, "row": lambda axes, rows: (*axes, rows)}[scope]
    amax = {"a_amax": rng.uniform(0.5, 2, of(lead, m)), "b_amax": rng.uniform(0.5, 2, of(b_lead, n))}
    a, b = order_free_operands(left, shape, a_format=fmt, b_format=fmt, lead=lead, b_lead=b_lead, **amax)
    check(gpu, a, b, dense((n,), np.float32), DTYPES["bf16"])


def test_more_matrices_than_a_dimension_of_the_grid(gpu):
    check(gpu, *order_free_operands(None, (2, 3, 32), a_format=ROW, b_format=ROW, lead=(65537,), b_lead=(65537,)))


@over("shape", [(70000, 5, 32), (5, 70000, 32)])
def test_more_rows_or_columns_than_a_dimension_of_the_grid(gpu, shape):
    check(gpu, *order_free_operands(None, shape))


@every_left
def test_every_code_and_scale(gpu, left):
    """Each result is one decoded value of b."""
    b = random_tensor(1, (300, 512), scales=range(0x7F), amax=6 * 448.0)
    check(gpu, identity(left, 512), b)


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
    got = multiply_on(gpu, KERNEL, a, with_nan_scale(with_nan_scale(b, 4), -1), out=out)
    assert np.array_equal(np.isnan(got.astype(np.float32)), want)
    assert (bits(got)[want] == {"f4": 0x7FC00000, "f2": 0x7E00}.get(got.dtype.str[1:], 0x7FC0)).all()


@every_left
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
def test_amax_that_is_no_ordinary_number(gpu, left, amax):
    """alpha of 0, Inf and NaN, and an overflow of the product of both amaxes, which follows the sum."""
    check(gpu, *order_free_operands(left, (16, 36, 512), a_amax=amax, b_amax=amax))


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=str)
def test_elements_that_are_not_finite(gpu, half, value):
    a, b = order_free_operands(half, (16, 36, 512))
    check(gpu, a.at[-1, 7].set(value), b)
