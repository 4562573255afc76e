"""Each kernel of products by its name, over one table of problems: the CPU's bits where no order changes a sum.

Most need a GPU. Blackwell's product, on which no test runs, has the stand-in for cuBLASLt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_gemm_close, random_tensor
from products import (
    DTYPES,
    HALVES,
    LEFT,
    ROW,
    TENSOR,
    dense,
    every_out_dtype,
    hang_guard,
    identity,
    library_on_cpu,
    multiply_by_stand_in,
    multiply_on,
    order_free,
    order_free_operands,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import Format

Shape = tuple[int, int, int]  # M, N, K


@dataclass(frozen=True)
class Kernel:
    name: str  # {}: "nvfp4" or "dense", as the left operand is
    paths: list[Shape]  # a small shape of every way through it
    shapes: list[Shape]  # sizes that divide its work in every way
    ordinary: list[Shape]  # for data whose sums depend on the order; none if the order is pinned
    lefts: tuple[str, ...] = tuple(LEFT)
    most_rows: int = 1 << 30  # that it takes, leading axes of a included


# Rows of a that kernels of Hopper put into a tile, and parts of K: test_gemm_hopper.py. 132 SMs.
SMALL_M = [
    *[(1, 1, 16), (8, 40, 48)],  # masked where 256 does not divide K
    *[(3, 100, 272), (13, 1000, 2320)],  # clusters of two CTAs divide K
    *[(16, 2200, 4112), (1, 24, 256)],  # three units of columns a warp
    *[(7, 100, 4096), (8, 2128, 8192)],  # clusters of eight
    *[(3, 43000, 256), (9, 77, 512), (16, 2200, 4096)],  # more CTAs than SMs
    *[(16, 2200, 8448), (12, 40, 8192)],  # the last warps have fewer units
]
FUSED = [
    *[(20, 101, 272), (20, 101, 1040), (31, 101, 2064)],  # tiles of 32 rows of a, then the same with parts of K
    *[(200, 3001, 272), (700, 261, 2064)],  # of 64
    *[(400, 3001, 272), (200, 3001, 4352)],  # of 128
    *[(700, 4001, 272), (400, 3001, 14336)],  # of 256
    # Tiles of 64, of 128 and of 256 rows: parts of K for those that fill no wave.
    *[(60, 17001, 2064), (100, 17001, 2064), (1024, 14337, 4096)],
    *[(m, n, 336) for m, n in ((1, 1), (1, 257), (129, 3), (64, 64), (65, 130), (300, 600), (257, 256))],
    # What is past the end of K is zero, also where rows of codes or scales are copied for the tensor maps.
    *[(70, 131, k) for k in (16, 32, 48, 64, 80, 112, 128, 240, 256, 272, 512, 528, 1280, 4096)],
]
# Two NVFP4 operands, the right one of fewer rows: it is decoded to scratch instead of the left one.
EXCHANGED = [(5668, 130, 48), (3594, 521, 272), (2862, 130, 4352), (1581, 261, 4352), (6000, 2601, 80)]


TALL_AND_WIDE = [(70000, 5, 32), (5, 70000, 32)]


def deep(shapes: list[Shape]) -> list[Shape]:
    return [shape for shape in shapes if 1000 < shape[2] < 10000]


KERNELS = [
    Kernel(
        "decode_then_dot",
        paths=[(1, 36, 48), (130, 141, 48)],  # the epilogue takes four columns at a time, or one
        shapes=[(1, 1, 16), (5, 7, 48), (8, 40, 4096), (31, 101, 2064), (257, 256, 8192), *TALL_AND_WIDE],
        ordinary=[(5, 7, 48), (200, 301, 4352)],
    ),
    Kernel(
        "sm80_nvfp4_blocks_small_m",  # more of it: test_gemm_few_rows.py
        # With 8, 16, 16, 32 and 64 rows per CTA on an H200; columns that do not fill the last one, and that do.
        paths=[(5, 70, 336), (16, 9001, 320), (33, 9024, 320), (31, 9001, 320), (63, 9024, 336)],
        shapes=[],
        ordinary=[],
        lefts=("nvfp4",),
        most_rows=64,
    ),
    Kernel(
        "sm90_{}_small_m",
        paths=[(5, 35, 48), (16, 36, 512)],  # with a mask, and without
        shapes=SMALL_M,
        ordinary=deep(SMALL_M),
        most_rows=16,
    ),
    Kernel(
        "sm90_{}_fused",
        paths=[(40, 36, 512), (130, 140, 48), (20, 101, 1040)],  # without copies, with copies, with parts of K
        shapes=FUSED + EXCHANGED,
        ordinary=deep(FUSED + EXCHANGED),
    ),
    Kernel(
        "sm100_cublaslt_nvfp4",
        # N of 16 and its multiples are written by the library, other N by the epilogue; K is padded to 32.
        paths=[(5, 7, 48), (129, 144, 64), (130, 16, 80), (66, 35, 64)],
        shapes=[(5, 7, 16), (5, 16, 32), (70, 131, 48), (3, 272, 320), (65, 33, 1040)],
        ordinary=[(5, 7, 16), (3, 272, 320), (65, 33, 1040)],
        lefts=("nvfp4",),
    ),
]


class Problem(NamedTuple):
    kernel: Kernel
    left: str
    shape: Shape

    @property
    def name(self) -> str:
        return self.kernel.name.format("nvfp4" if self.left == "nvfp4" else "dense")

    def operands(self, **options):
        return order_free_operands(LEFT[self.left], self.shape, **options)


def every(shapes: Callable[[Kernel], list[Shape]], lefts: tuple[str, ...] = tuple(LEFT)):
    problems = [Problem(k, left, shape) for k in KERNELS for left in k.lefts if left in lefts for shape in shapes(k)]
    problems = [p for p in problems if p.left == "nvfp4" or p.shape not in EXCHANGED]
    ids = ["-".join((p.name, p.left, "x".join(map(str, p.shape)))) for p in problems]
    return pytest.mark.parametrize("of", problems, ids=ids)


every_path, every_shape, every_kernel = map(every, (lambda k: k.paths, lambda k: k.shapes, lambda k: k.paths[:1]))


@pytest.fixture
def run(of):
    """Multiplies by the kernel of a name: on a GPU that has it, or by the stand-in."""
    if "cublaslt" in of.name:
        with library_on_cpu() as library:
            yield partial(multiply_by_stand_in, library)
            assert library("alive") == 0
        return
    hopper = of.name.startswith("sm90")
    found = [device for device in gpus() if not hopper or device.compute_capability == "9.0"]
    if not found:
        skip_or_fail("hopper" if hopper else "cuda", f"no GPU that runs {of.name}")
    with hang_guard():
        yield partial(multiply_on, found[0])


def check(run, of: Problem, a, b, bias=None, out=np.float32) -> None:
    assert_bitwise(run(of.name, a, b, bias, out), jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


@every_shape
def test_shapes(run, of):
    """Against the CPU; the largest against the pinned order on the same GPU."""
    a, b = of.operands()
    bias = dense(of.shape[1:2], np.float32)
    if np.prod(of.shape) < 1e9:
        assert order_free(a, b)
        check(run, of, a, b, bias)
    else:
        pinned = "sm80_nvfp4_blocks" if of.left == "nvfp4" else "sm80_dense_elements"
        assert_bitwise(run(of.name, a, b, bias), run(pinned, a, b, bias))


@every(lambda k: k.ordinary)
def test_ordinary_data_is_close_and_the_same_in_every_run(run, of):
    m, n, k = of.shape
    b = random_tensor(1, (n, k), ROW)
    a = random_tensor(0, (m, k), ROW) if of.left == "nvfp4" else dense((m, k), LEFT[of.left])
    first = run(of.name, a, b)
    assert_gemm_close(first, a, b)
    for _ in range(4):
        assert_bitwise(run(of.name, a, b), first)


F32, BF16, F16 = DTYPES.values()
EPILOGUES = [(F32, None), (F32, F32), (F32, F16), (BF16, None), (BF16, BF16), (BF16, F32), (F16, BF16), (F16, F16)]


@every_path
def test_results_and_biases(run, of):
    for out, bias in EPILOGUES:
        check(run, of, *of.operands(), None if bias is None else dense(of.shape[1:2], bias), out)


NARROW, ROW_NARROW = Format(e4m3_max=256), Format("row", 256)
FORMATS = [(TENSOR, ROW), (ROW, TENSOR), (NARROW, TENSOR), (TENSOR, ROW_NARROW), (ROW, ROW), (NARROW, ROW_NARROW)]


@every_path
def test_formats(run, of):
    for a_format, b_format in FORMATS:
        check(run, of, *of.operands(a_format=a_format, b_format=b_format))


@every_path
@pytest.mark.parametrize("scope", ["tensor", "per matrix", "row"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
def test_leading_axes(run, of, scope, shared):
    m, n, k = of.shape
    if shared and 6 * m > of.kernel.most_rows:
        m = max(1, m // 6)  # leading axes of a are rows
    lead, b_lead = (2, 3), () if shared else (2, 3)
    rng = np.random.default_rng(5)
    fmt = ROW if scope == "row" else TENSOR
    of_scope = {"tensor": lambda *_: (), "per matrix": lambda axes, _: axes, "row": lambda axes, rows: (*axes, rows)}
    sides = ("a", (lead, m)), ("b", (b_lead, n))
    amax = {f"{name}_amax": rng.uniform(0.5, 2, of_scope[scope](*axes)) for name, axes in sides}
    a, b = order_free_operands(LEFT[of.left], (m, n, k), a_format=fmt, b_format=fmt, lead=lead, b_lead=b_lead, **amax)
    for out in (F32, BF16):  # of which Blackwell's library finishes the second alone
        check(run, of, a, b, dense((n,), out), out)


@every_kernel
def test_every_code_and_scale(run, of):
    """Each result is one decoded value of either operand."""
    rows = min(512, of.kernel.most_rows)
    values = {"scales": range(0x7F), "amax": 6 * 448.0}
    b = random_tensor(1, (300, 512), **values)
    for first in range(0, 512, rows):
        check(run, of, identity(LEFT[of.left], 512, first, rows), b)
    if of.left == "nvfp4":
        check(run, of, random_tensor(1, (16, 512), **values), identity(None, 512))


@every_path
@every_out_dtype
def test_nan_scales_reach_their_row_and_column(run, of, out):
    """A NaN scale, or element, reaches its row or column and no other, also the last ones; the NaN is the rule's."""
    a, b = of.operands()
    a = with_nan_scale(a, -1) if of.left == "nvfp4" else a.at[-1, 17].set(np.nan)
    check(run, of, a, with_nan_scale(with_nan_scale(b, 4), -1), out=out)


@every_path
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
def test_amax_that_is_no_ordinary_number(run, of, amax):
    """alpha of 0, Inf and NaN, and an overflow of the product of both amaxes, which follows the sum."""
    check(run, of, *of.operands(a_amax=amax, b_amax=amax), out=DTYPES["bf16"])


@every(lambda k: k.paths, lefts=tuple(HALVES))
@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=str)
def test_elements_that_are_not_finite(run, of, value):
    a, b = of.operands()
    check(run, of, a.at[-1, 7].set(value), b)


MANY = {"decode_then_dot": (2, 3, 32), "sm90_{}_fused": (5, 6, 528), "sm90_{}_small_m": (16, 6, 256)}


@every(lambda k: [MANY[k.name], (5, 6, 80)] if k.name in MANY else [])
def test_more_matrices_than_a_dimension_of_the_grid(run, of):
    """Or than CTAs, which go on to the next with their barriers as they are."""
    count = 65537 if of.name == "decode_then_dot" else 300
    check(run, of, *of.operands(a_format=ROW, b_format=ROW, lead=(count,), b_lead=(count,)))
