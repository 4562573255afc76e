"""grouped_matmul_nt at sizes that every way of dividing a product reaches: tiles, tails of groups, parts of K."""

import pathlib
import subprocess
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_gemm_close, bits, random_tensor
from operands import ROW, TENSOR, normal, with_nan_scale
from test_grouped import by_group, ends_of, exact, int32, taken

from jnvfp4 import NVFP4Tensor, grouped_matmul_nt, supports


class Groups(NamedTuple):
    """A product: the rows of each group, rows that no group holds, N and K."""

    sizes: tuple[int, ...]
    beyond: int
    cols: int
    depth: int

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.beyond


# How kernels of Hopper divide them, by all rows M and their number for each of G groups (ffi/plan/sm90_grouped.cc).
PRODUCTS = {
    "few rows": Groups((3, 0, 12), 1, 100, 272),  # M <= 16
    "few rows of many groups": Groups((1, 0, 9, 2) * 8, 4, 72, 528),  # M <= 128 and 4 G
    "few rows and a long K": Groups((5, 11), 0, 40, 4112),
    "tiles of 64": Groups((1, 64, 0, 65, 30), 7, 300, 272),  # M < 48 G
    "tiles of 64, parts of K": Groups((70, 2, 63), 0, 130, 4352),
    "tiles of 256": Groups((256, 512, 0, 256), 0, 261, 272),
    "tiles of 256 and tails": Groups((300, 1, 0, 513, 129), 50, 300, 528),
    "tiles of 256 and tails, parts of K": Groups((257, 40, 129), 3, 257, 4352),
    "more tiles than CTAs": Groups((400, 0, 33, 511), 0, 5000, 48),
    "a K that tensor maps cannot read": Groups((100, 200, 7), 3, 70, 48),
}
every_product = pytest.mark.parametrize("of", PRODUCTS.values(), ids=PRODUCTS)
every_left = pytest.mark.parametrize("left", ["nvfp4", "row", "bfloat16", "float16"])


def test_products_reach_every_division():
    found = set()
    for of in PRODUCTS.values():
        groups = len(of.sizes)
        few = of.rows <= 16 or of.rows <= min(128, 4 * groups)
        found.add("few" if few else "256" if of.rows >= 48 * groups else "64")
    assert found == {"few", "64", "256"}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> pathlib.Path:
    """cpp/grouped_on_host.cc, which needs no GPU."""
    program, here = tmp_path_factory.mktemp("grouped") / "grouped_on_host", pathlib.Path(__file__).parent
    ffi, cpp = here.parent / "ffi", here / "cpp"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ffi}", f"-I{cpp / 'host_cuda'}"]
    sources = [cpp / "grouped_on_host.cc", *sorted(ffi.glob("plan/*.cc"))]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("what", ["tiles", "scratch", "plans"])
def test_decisions_on_the_host(on_host, what):
    """Any number of clusters computes each part of K once; lists fit their scratch; plans are adapted."""
    done = subprocess.run([on_host, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def ordinary(left: str, of: Groups):
    """Random operands, with an amax for each row of each matrix unless ``left`` has one."""
    fmt = TENSOR if left == "nvfp4" else ROW
    b = random_tensor(1, (len(of.sizes), of.cols, of.depth), fmt, amax=None if fmt is ROW else experts_amax(of))
    shape = (of.rows, of.depth)
    return (random_tensor(0, shape, fmt) if left in ("nvfp4", "row") else normal(shape).astype(left)), b


def experts_amax(of: Groups) -> np.ndarray:
    return np.random.default_rng(3).uniform(0.5, 2, len(of.sizes)).astype(np.float32)


def multiply(a, b, of: Groups, sizes=None) -> np.ndarray:
    return np.asarray(grouped_matmul_nt(a, b, int32(of.sizes if sizes is None else sizes), out_dtype=jnp.float32))


@every_left
@every_product
def test_sums_that_are_exact_have_the_bits_of_matmul_nt_on_the_cpu(native, left, of):
    a, b = exact(left, of.rows, len(of.sizes), of.cols, of.depth)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        want = by_group(*jax.device_put((a, b), cpu), of.sizes, out_dtype=jnp.float32)
    assert_bitwise(multiply(a, b, of), want)


@every_left
@every_product
def test_ordinary_data_is_close_and_the_same_in_every_run(native, left, of):
    """Sums in any order are within the bound that is derived for those of tensor cores."""
    a, b = ordinary(left, of)
    first = multiply(a, b, of)
    for g, (begin, end) in enumerate(ends_of(of.sizes, of.rows)):
        if end > begin:
            assert_gemm_close(first[begin:end], taken(a, begin, end), b[g])
    assert not bits(first[sum(of.sizes) :]).any()
    for _ in range(3):
        assert_bitwise(multiply(a, b, of), first)


@every_product
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@every_left
def test_what_is_not_finite_stays_in_its_group(native, left, value, of):
    """In the rows of one group, and in rows that no group holds."""
    if left in ("nvfp4", "row") and np.isinf(value):
        pytest.skip("NVFP4 has no infinity but in an amax")
    a, b = ordinary(left, of)
    skip_where_xla_multiplies(a, b, of)
    want, group = multiply(a, b, of), int(np.argmax(of.sizes))
    begin, end = ends_of(of.sizes, of.rows)[group]
    for row in (begin, end - 1, *range(sum(of.sizes), of.rows)):
        a = with_nan_scale(a, row) if isinstance(a, NVFP4Tensor) else a.at[row, 17].set(value)
    got, others = multiply(a, b, of), np.ones(of.rows, bool)
    others[[begin, end - 1]] = False
    assert_bitwise(got[others], want[others])
    assert not np.isfinite(got[~others]).any()


@every_product
@every_left
def test_an_expert_that_is_not_finite_reaches_its_rows_alone(native, left, of):
    a, b = ordinary(left, of)
    skip_where_xla_multiplies(a, b, of)
    want, group = multiply(a, b, of), int(np.argmax(of.sizes))
    empty = [g for g, size in enumerate(of.sizes) if not size]
    for g in (group, *empty):
        b = with_nan_scale(b, g, of.cols - 1)
    got, (begin, end) = multiply(a, b, of), ends_of(of.sizes, of.rows)[group]
    others = np.ones((of.rows, of.cols), bool)
    others[begin:end, -1] = False
    assert_bitwise(got[others], want[others])
    assert np.isnan(got[~others]).all()


def skip_where_xla_multiplies(a, b, of: Groups) -> None:
    """It may multiply each row by the matrices of all experts."""
    kernel = supports("grouped_matmul_nt", a, b, int32(of.sizes)).kernel
    if kernel == "decode_then_ragged_dot":
        pytest.skip("XLA computes this product")
