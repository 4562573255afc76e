"""Each kernel of products by its name: one table of kernels, and claims about all of them.

A kernel of the CPU has the bits of the formula. One of a GPU, most tests of which need it, has the bits of the CPU: for
any data if its order is pinned, else for data whose sums no order changes. Blackwell's product, on which no test runs,
has the stand-in for cuBLASLt.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_gemm_close, matmul_by_formula, random_tensor, round_to
from operands import (
    DTYPES,
    HALVES,
    LEFT,
    ROW,
    TENSOR,
    WINDOW,
    dense,
    hang_guard,
    identity,
    library_on_cpu,
    multiply_by_stand_in,
    multiply_on,
    order_free,
    random_operands,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor

Shape = tuple[int, int, int]  # M, N, K
F32, BF16, F16 = DTYPES.values()
NARROW, ROW_NARROW = Format(e4m3_max=256), Format("row", 256)
WITHOUT_WINDOWS = (TENSOR, ROW, NARROW, ROW_NARROW)
# Of a and b, by whether windows are among them.
FORMATS = {
    False: [*product(WITHOUT_WINDOWS, repeat=2), (Format(rht=True),) * 2],
    True: [(WINDOW, WINDOW), *((WINDOW, f) for f in WITHOUT_WINDOWS), *((f, WINDOW) for f in WITHOUT_WINDOWS)],
}


@dataclass(frozen=True)
class Kernel:
    name: str  # {}: "nvfp4" or "dense", as the left operand is
    paths: list[Shape]  # a small shape of every way through it
    shapes: list[Shape]  # sizes that divide its work in every way
    exact: Literal["any data", "order-free"]  # the data that have the CPU's bits
    windows: bool = False  # whether operands have an amax per window of 64
    tiles: list[Shape] = field(default_factory=list)  # with a code of their own for what follows the sums
    repeated: list[Shape] = field(default_factory=list)  # for data whose sums depend on the order, again and again
    many: list[tuple[int, ...]] = field(default_factory=list)  # matrices (more than the grid has, or CTAs), M, N, K
    lefts: tuple[str, ...] = tuple(LEFT)
    least_rows: int = 1
    most_rows: int = 1 << 30  # leading axes of a included

    @property
    def formats(self) -> list[tuple[Format, Format]]:
        """Those of every shape."""
        if self.windows:
            return [(WINDOW, TENSOR), (TENSOR, WINDOW), (ROW, WINDOW), (WINDOW, WINDOW)]
        return [(ROW, ROW) if self.exact == "any data" else (TENSOR, TENSOR)]


def deep(shapes: list[Shape]) -> list[Shape]:
    return [shape for shape in shapes if 1000 < shape[2] < 10000]


# One row, odd N, one block, more than one tile and panel in every direction, long K, any last part of a step along K.
SMALL = {
    False: [(1, 1, 16), (1, 40, 64), (5, 7, 16), (17, 33, 48), (130, 65, 256), (3, 100, 4096)]
    + [(70, 67, k) for k in (16, 32, 48, 64, 80, 112, 144)],
    True: [(1, 1, 64), (5, 7, 128), (17, 33, 192), (130, 65, 256), (3, 100, 4096)],
}

# Rows of a that kernels of Hopper put into a tile, and parts of K: test_gemm_hopper.py. 132 SMs.
SMALL_M = [
    *[(1, 1, 16), (8, 40, 48)],  # masked where 256 does not divide K
    *[(3, 100, 272), (13, 1000, 2320)],  # clusters of two CTAs divide K
    *[(16, 2200, 4112), (1, 24, 256)],  # three units of columns a warp
    *[(7, 100, 4096), (8, 2128, 8192)],  # clusters of eight
    *[(3, 43000, 256), (9, 77, 512), (16, 2200, 4096)],  # more CTAs than SMs
    *[(16, 2200, 8448), (12, 40, 8192)],  # the last warps have fewer units
    *[(m, 67, k) for m in (1, 8, 9, 16) for k in (256, 304)],
]
FUSED_TILES = [
    *[(20, 101, 272), (20, 101, 1040), (31, 101, 2064)],  # tiles of 32 rows of a, then the same with parts of K
    *[(200, 3001, 272), (700, 261, 2064)],  # of 64
    *[(400, 3001, 272), (200, 3001, 4352)],  # of 128
    (700, 4001, 272),  # of 256
]
FUSED = [
    *FUSED_TILES,
    (400, 3001, 14336),
    # Tiles of 64, of 128 and of 256 rows: parts of K for those that fill no wave.
    *[(60, 17001, 2064), (100, 17001, 2064), (1024, 14337, 4096)],
    *[(m, n, 336) for m, n in ((1, 1), (1, 257), (129, 3), (64, 64), (65, 130), (300, 600), (257, 256))],
    # What is past the end of K is zero, also where rows of codes or scales are copied for the tensor maps.
    *[(70, 131, k) for k in (16, 32, 48, 64, 80, 112, 128, 240, 256, 272, 512, 528, 1280, 4096)],
]
# Two NVFP4 operands, the right one of fewer rows: it is decoded to scratch instead of the left one.
SWAPPED = [(5668, 130, 48), (3594, 521, 272), (2862, 130, 4352), (1581, 261, 4352), (6000, 2601, 80)]
# Of many matrices, more parts of K than CTAs: rows of a in a tile, and parts; for windows, parts.
PARTS_OF_MANY = {(40, 5, 6, 5120): (32, 3), (40, 64, 6, 7936): (64, 3), (40, 100, 6, 5120): (128, 3)}
PARTS_OF_WINDOWS = {(67, 5, 6, 1024): 1, (40, 5, 6, 5120): 3}

WINDOWS = [(1, 1, 64), (5, 7, 128), (130, 140, 320), (70, 131, 1088), (300, 600, 2112), (257, 256, 192)]

# The pinned order on GPUs, by whether there are windows. N, K for few rows: CTAs have 16 to 112 columns and 8 to 64
# rows, what lets all SMs end soonest. They go along K by 128 or 256, through seven stages: a K of 1600 uses some again.
WIDTHS = {
    False: [(1, 16), (8, 48), (40, 272), (64, 4096), (130, 1600), (1000, 4112), (9001, 272), (9024, 1280)],
    True: [(1, 64), (40, 192), (64, 4096), (130, 1600), (1000, 4160), (9024, 256)],
}
# With 8, 16, 16, 32, 64 and 64 rows per CTA on an H200; columns that do not fill the last one, and that do.
FEW_ROWS = [(5, 70, 336), (16, 9001, 320), (33, 9024, 320), (31, 9001, 320), (63, 9024, 336), (64, 14336, 192)]
FEW_ROWS += [(16, 16, 64)]  # no length tells rows from columns
MANY_ROWS = [(300, 520, 272), (4097, 70, 336), (1000, 4200, 80), (129, 8192, 64)]  # by each tile


def pinned(name: str, *, windows: bool = False, few: bool = False) -> Kernel:
    """A kernel of GPUs for two NVFP4 operands; if ``few``, of at most 64 rows."""
    paths = FEW_ROWS if few else FEW_ROWS + MANY_ROWS
    return Kernel(
        name,
        [(m, n, 320) for m, n, _ in paths] if windows else paths,
        [(m, n, k) for m in (1, 7, 8, 9, 16, 17, 33, 64) for n, k in WIDTHS[windows]] + ([] if few else SMALL[windows]),
        "any data",
        windows,
        repeated=[(33, 9001, 1088 if windows else 1040)] if few else [(256, 192, 2048)],
        many=[(300, m, 7, 320) for m in (5, 13, 40)],
        lefts=("nvfp4",),
        most_rows=64 if few else 1 << 30,
    )


ANY_DATA: dict[str, Any] = {"exact": "any data", "repeated": [(256, 192, 2048)]}
KERNELS = [
    Kernel("cpu_nvfp4_blocks", [(17, 33, 80), (16, 16, 64)], SMALL[False], lefts=("nvfp4",), **ANY_DATA),
    Kernel("cpu_nvfp4_blocks", [(17, 33, 128)], SMALL[True], windows=True, lefts=("nvfp4",), **ANY_DATA),
    Kernel("cpu_dense_elements", [(17, 33, 80)], SMALL[False], lefts=tuple(HALVES), **ANY_DATA),
    Kernel("sm80_dense_elements", [(17, 33, 80)], SMALL[False], lefts=tuple(HALVES), **ANY_DATA),
    pinned("sm80_nvfp4_blocks_small_m", few=True),
    pinned("sm80_nvfp4_blocks_small_m", few=True, windows=True),
    pinned("sm80_nvfp4_blocks"),
    pinned("sm80_nvfp4_blocks", windows=True),
    pinned("sm90_nvfp4_pinned"),
    pinned("sm90_nvfp4_pinned_prepared", windows=True),
    Kernel("sm90_nvfp4_pinned_prepared", [(4097, 70, 336)], [], "any data", lefts=("nvfp4",), least_rows=4096),
    Kernel(
        "decode_then_dot",
        paths=[(1, 36, 48), (130, 141, 48)],  # the epilogue takes four columns at a time, or one
        shapes=[
            *[(1, 1, 16), (5, 7, 48), (8, 40, 4096), (31, 101, 2064), (257, 256, 8192)],
            *[(70000, 5, 32), (5, 70000, 32)],
        ],
        exact="order-free",
        repeated=[(5, 7, 48), (200, 301, 4352)],
        many=[(65537, 2, 3, 32), (65537, 5, 6, 80)],
    ),
    Kernel(
        "sm90_nvfp4_windows",
        paths=WINDOWS[1:4],
        shapes=WINDOWS,
        exact="order-free",
        windows=True,
        many=list(PARTS_OF_WINDOWS),
        lefts=("nvfp4",),
    ),
    Kernel(
        "sm90_{}_small_m",
        paths=[(5, 35, 48), (16, 16, 512)],  # with a mask, and without
        shapes=SMALL_M,
        exact="order-free",
        repeated=deep(SMALL_M),
        many=[(300, 16, 6, 256), (300, 5, 6, 80)],
        most_rows=16,
    ),
    Kernel(
        "sm90_{}_fused",
        # Without copies, with copies, with parts of K; the left operand decoded to scratch, and the right one.
        paths=[(40, 36, 512), (130, 140, 48), (20, 101, 1040), *SWAPPED[:2]],
        shapes=FUSED + SWAPPED,
        exact="order-free",
        tiles=FUSED_TILES,
        repeated=deep(FUSED + SWAPPED),
        many=[(300, 5, 6, 528), (300, 5, 6, 80), *PARTS_OF_MANY],
    ),
    Kernel(
        "sm100_cublaslt_nvfp4",
        # N of 16 and its multiples are written by the library, other N by the epilogue; K is padded to 32.
        paths=[(5, 7, 48), (129, 144, 64), (130, 16, 80), (66, 35, 64)],
        shapes=[(5, 7, 16), (5, 16, 32), (70, 131, 48), (3, 272, 320), (65, 33, 1040)],
        exact="order-free",
        repeated=[(5, 7, 16), (3, 272, 320), (65, 33, 1040)],
        many=[(64, 66, 32, 32)],
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

    @property
    def id(self) -> str:
        return "-".join((self.name, "windows" if self.kernel.windows else self.left, "x".join(map(str, self.shape))))

    def operands(self, a_format=TENSOR, b_format=TENSOR, shape=None, **options):
        exact = self.kernel.exact == "order-free"
        options |= {"order_free": exact, "a_format": a_format, "b_format": b_format}
        return random_operands(LEFT[self.left], shape or self.shape, **options)

    def of_every_format(self):
        return [self.operands(*formats) for formats in self.kernel.formats]


def every(shapes: Callable[[Kernel], list], lefts: tuple[str, ...] = tuple(LEFT)):
    problems = [Problem(k, left, shape) for k in KERNELS for left in k.lefts if left in lefts for shape in shapes(k)]
    problems = [p for p in problems if p.left == "nvfp4" or p.shape not in SWAPPED]
    return pytest.mark.parametrize("of", problems, ids=[p.id for p in problems])


def every_pinned(windows: bool):
    """Paths of the kernels of NVFP4 operands in the pinned order."""
    return every(lambda k: k.paths if k.exact == "any data" and k.windows == windows else [], ("nvfp4",))


every_path = every(lambda k: k.paths)


@pytest.fixture
def run(of):
    """Multiplies by the kernel of a name: on a CPU, on a GPU that has it, or by the stand-in."""
    if "cublaslt" in of.name:
        with library_on_cpu() as library:
            yield partial(multiply_by_stand_in, library)
            assert library("alive") == 0
        return
    found, need = (jax.devices("cpu") if of.name.startswith("cpu") else gpus()), "cuda"
    if of.name.startswith("sm90"):
        found, need = [device for device in found if device.compute_capability == "9.0"], "hopper"
    if not found:
        skip_or_fail(need, f"no GPU that runs {of.name}")
    with hang_guard():
        yield partial(multiply_on, found[0])


def wanted(run, of: Problem, a, b) -> np.ndarray:
    """The float32 result; of a free order, the largest are those of the pinned order on the same GPU."""
    if of.name.startswith("cpu"):
        return matmul_by_formula(a, b)
    if of.kernel.exact == "any data" or np.prod(a.shape) * b.shape[-2] < 1e9:
        return np.asarray(jnvfp4.matmul_nt(a, b, out_dtype=F32))
    return run("sm80_nvfp4_blocks" if of.left == "nvfp4" else "sm80_dense_elements", a, b)


def check(run, of: Problem, a, b, *epilogues) -> None:
    """``epilogues`` are types of the result and of the bias."""
    want = wanted(run, of, a, b)
    for out, bias_type in epilogues or [(F32, None)]:
        bias = None if bias_type is None else dense(b.shape[-2:-1], bias_type)
        with np.errstate(all="ignore"):
            expected = round_to(want if bias is None else want + np.asarray(bias, F32), out)
        assert_bitwise(run(of.name, a, b, bias, out), expected)


# ---------------------------------------------------------------- every kernel
@every(lambda k: k.shapes)
def test_sizes_that_divide_the_work_in_every_way(run, of):
    for (a, b), out in zip(of.of_every_format(), cycle((F32, BF16, F16))):
        if of.kernel.exact == "order-free" and not of.kernel.windows and np.prod(of.shape) < 1e9:
            assert order_free(a, b)
        check(run, of, a, b, (out, F32))


@every(lambda k: k.repeated)
def test_ordinary_data_gives_the_same_in_every_run(run, of):
    """In a free order within the bound that is derived for tensor cores."""
    m, n, k = of.shape
    fmt = WINDOW if of.kernel.windows else ROW
    a = random_tensor(0, (m, k), fmt) if of.left == "nvfp4" else dense((m, k), LEFT[of.left])
    b = random_tensor(1, (n, k), fmt)
    first = run(of.name, a, b)
    if of.kernel.exact == "any data":
        assert_bitwise(first, wanted(run, of, a, b))
    else:
        assert_gemm_close(first, a, b)
    for _ in range(4):
        assert_bitwise(run(of.name, a, b), first)


@every(lambda k: [*k.paths, *k.tiles])
def test_every_type_of_result_and_bias(run, of):
    check(run, of, *of.operands(*of.kernel.formats[-1]), *product((F32, BF16, F16), (None, F32, BF16, F16)))


@every(lambda k: [] if "cublaslt" in k.name else [*k.paths, *k.tiles])  # which never gets one
def test_every_type_of_result_and_residual(run, of):
    a, b = of.operands(*of.kernel.formats[-1])
    want = wanted(run, of, a, b)
    for out, kind in product((F32, BF16, F16), repeat=2):
        residual = dense(want.shape, kind)
        with np.errstate(all="ignore"):
            expected = round_to(want + np.asarray(residual, F32), out)
        assert_bitwise(run(of.name, a, b, residual, out), expected)


@every_path
def test_every_pair_of_formats(run, of):
    pairs = FORMATS[of.kernel.windows]
    if of.left != "nvfp4":
        pairs = [(TENSOR, b_format) for b_format in WITHOUT_WINDOWS]
    for formats, out in zip(pairs, cycle((F32, BF16, F16)), strict=False):
        check(run, of, *of.operands(*formats), (out, F32))


SCOPES = {
    False: [("tensor",) * 2, ("matrix",) * 2, ("row",) * 2],
    True: [("window64",) * 2, ("window64", "matrix"), ("row", "window64"), ("matrix", "window64")],
}


@every_path
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
def test_leading_axes_with_an_amax_of_every_scope(run, of, shared):
    m, n, k = of.shape
    if shared and 6 * m > of.kernel.most_rows:
        m = max(1, m // 6)  # leading axes of a are rows
    lead, b_lead, rng = (2, 3), () if shared else (2, 3), np.random.default_rng(5)

    def amax(scope, lead, rows):
        shape = {"tensor": (), "matrix": lead, "row": (*lead, rows), "window64": (*lead, rows, k // 64)}[scope]
        windows = of.kernel.windows and of.kernel.exact == "order-free"
        return 2688 * 2.0 ** rng.integers(-1, 2, shape) if windows else rng.uniform(0.5, 2, shape)

    for scopes in SCOPES[of.kernel.windows]:
        formats = [Format("tensor" if scope == "matrix" else scope) for scope in scopes]
        amaxes = {"a_amax": amax(scopes[0], lead, m), "b_amax": amax(scopes[1], b_lead, n)}
        a, b = of.operands(*formats, (m, n, k), lead=lead, b_lead=b_lead, **amaxes)
        check(run, of, a, b, (F32, F32), (BF16, BF16))  # of which Blackwell's library finishes the second alone


@every(lambda k: k.many)
def test_more_matrices_than_ctas_or_than_a_dimension_of_the_grid(run, of):
    """CTAs go on to the next with their barriers as they are."""
    (count, m, n, k), kernel = of.shape, of.kernel
    for formats in kernel.formats if kernel.windows else [(ROW, ROW)]:
        for b_lead in ((count,), ())[: 1 + (count * m <= kernel.most_rows)]:
            check(run, of, *of.operands(*formats, (m, n, k), lead=(count,), b_lead=b_lead), (F32, F32))


@every(lambda k: k.paths[:1] if k.exact == "any data" else [])
def test_every_code_and_scale_in_any_sum(run, of):
    """Every product of codes, and each pair of scales of E4M3."""
    rows, scales = max(64, of.kernel.least_rows), range(0x7F)
    a, b = (random_tensor(i, (n, 2048), of.kernel.formats[-1][i], scales=scales) for i, n in enumerate((rows, 128)))
    check(run, of, a if of.left == "nvfp4" else dense((rows, 2048), LEFT[of.left]), b)


@every(lambda k: k.paths[:1] if k.exact == "order-free" and not k.windows else [])
def test_every_code_and_scale_alone(run, of):
    """Each result is one decoded value of either operand."""
    rows = min(512, of.kernel.most_rows)
    values = {"scales": range(0x7F), "amax": 6 * 448.0}
    b = random_tensor(1, (300, 512), **values)
    for first in range(0, 512, rows):
        check(run, of, identity(LEFT[of.left], 512, first, rows), b)
    if of.left == "nvfp4":
        check(run, of, random_tensor(1, (16, 512), **values), identity(None, 512))


@every_path
def test_nan_scales_reach_their_row_and_column(run, of):
    """A NaN scale, or element, reaches its row or column and no other, also the last ones; the NaN is the rule's."""
    for a, b in of.of_every_format():
        a = with_nan_scale(a, -1) if of.left == "nvfp4" else a.at[-1, 17].set(np.nan)
        check(run, of, a, with_nan_scale(with_nan_scale(b, 4), -1), (F32, None), (BF16, None), (F16, None))


ODD_AMAXES = (0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38)


@every(lambda k: [] if k.windows else k.paths)
def test_amax_that_is_no_ordinary_number(run, of):
    """alpha of 0, Inf, NaN and subnormal numbers, and an overflow of the product of both amaxes, after the sum."""
    for amax in ODD_AMAXES:
        check(run, of, *of.operands(a_amax=amax, b_amax=amax), (F32, None), (BF16, None))


@every(lambda k: k.paths, lefts=tuple(HALVES))
def test_elements_that_are_not_finite(run, of):
    a, b = of.operands()
    for value in (np.inf, -np.inf):
        check(run, of, a.at[-1, 7].set(value), b)


# ---------------------------------------------------------------- the pinned order
@every_pinned(windows=True)
def test_amax_of_a_window_that_is_no_ordinary_number(run, of):
    """In one window of either operand, which meet each other in a result, and in another of b."""
    a, b = of.operands(WINDOW, WINDOW)
    for amax in ODD_AMAXES:
        of_a, of_b = a.amax.at[2, -1].set(amax), b.amax.at[4, -1].set(amax).at[6, 0].set(amax)
        odd = [NVFP4Tensor(t.data, t.scale, of_t, WINDOW) for t, of_t in ((a, of_a), (b, of_b))]
        check(run, of, *odd, (F32, None), (BF16, None))


@every_pinned(windows=True)
def test_amaxes_of_16_bit_arrays(run, of):
    """Their products are exact, which sm90_nvfp4_pinned_prepared makes use of."""
    a, b = of.operands(WINDOW, WINDOW)
    check(run, of, *(NVFP4Tensor(t.data, t.scale, t.amax.astype(jnp.bfloat16).astype(F32), WINDOW) for t in (a, b)))


def with_smaller_fourth_blocks(t: NVFP4Tensor, places: int, largest: bool) -> NVFP4Tensor:
    """The scales of every fourth block are so many binary places below the others; codes are 6 or -6 if ``largest``."""
    mantissas = np.random.default_rng(places).integers(0, 8, t.scale.shape, np.uint8)
    exponents = np.where(np.arange(t.scale.shape[-1]) % 4 == 3, max(14 - places, 0), 14).astype(np.uint8)
    scale = (exponents << 3 | mantissas).view(t.scale.dtype)
    return NVFP4Tensor(t.data | 0x77 if largest else t.data, jnp.asarray(scale), t.amax, t.format)


@every(lambda k: [(64, 300, 576)] if k.exact == "any data" and k.windows else [])
@pytest.mark.parametrize("places", [(0, 0), (1, 1), (2, 0), (0, 2), (2, 1), (2, 2), (4, 0), (7, 7), (14, 1)], ids=str)
@pytest.mark.parametrize("largest", [False, True], ids=["any codes", "largest codes"])
@pytest.mark.parametrize("a_format", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_windows_whose_sums_are_exact_and_some_that_are_not(run, of, places, largest, a_format):
    """sm90_nvfp4_pinned_prepared lets tensor cores add up the former: with the largest codes the first four here."""
    a, b = of.operands(a_format, WINDOW)
    a, b = (with_smaller_fourth_blocks(t, p, largest) for t, p in zip((a, b), places, strict=True))
    for signs in (0xFF, 0x77):  # and without
        check(run, of, *(NVFP4Tensor(t.data & signs, t.scale, t.amax, t.format) for t in (a, b)))


@every_pinned(windows=False)
def test_sums_of_negative_zeros_are_positive(run, of):
    """Codes of -0 on a side."""
    a, b = of.operands()
    check(run, of, NVFP4Tensor(jnp.full_like(a.data, 0x88), a.scale, a.amax), b)
    check(run, of, a, NVFP4Tensor(jnp.full_like(b.data, 0x88), b.scale, b.amax))


def test_sums_of_windows_that_are_taken_for_exact(tmp_path):
    """By sm90_nvfp4_pinned_prepared, on a model of tensor cores."""
    root, program = Path(__file__).parents[1], tmp_path / "window_sums"
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", f"-I{root / 'ffi'}"]
    subprocess.run(["g++", *flags, root / "tests/cpp/window_sums.cc", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
