"""The rules of ffi/core/numerics.h, and the fast forms of ffi/core/numerics_fast.h, against
``jnvfp4.reference`` and against ml_dtypes and NumPy, over all inputs of small formats.

cpp/tables.cc (and cpp/tables.cu on a GPU) write tables of the C++ functions; cpp/exhaustive.cc checks the
encoders over float32 patterns against rules of its own. The last section compares the lists of functions.
"""

import functools
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import FLOAT_MAX, assert_bitwise, bits, canonical_nans, philox, rotate, rotate_back

from jnvfp4 import reference
from jnvfp4._core import softfloat

CPP = Path(__file__).parent / "cpp"
INCLUDE = CPP.parent.parent / "ffi"
HOST_FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-pthread"]
DEVICE_FLAGS = ["-std=c++20", "-O2", "-fmad=false", "-arch=native"]
PATTERNS = np.arange(65536, dtype=np.uint16)
HALF_DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def build(compiler: str, flags: list[str], source: str, folder: Path) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    program = folder / source.replace(".", "_")
    include = [f"-I{INCLUDE}", f"-I{folder}"]
    subprocess.run([compiler, *flags, *include, str(CPP / source), "-o", str(program)], check=True)
    return program


@functools.cache
def golden_stochastic() -> dict[str, np.ndarray]:
    with np.load(CPP.parent / "data" / "sr_software.npz") as file:
        return {name: file[name] for name in ("value", "rbits", "code")}


def write_tables(compiler: str, flags: list[str], source: str, folder: Path) -> dict[str, np.ndarray]:
    values = bits(golden_stochastic()["value"])
    (folder / "stochastic_values.h").write_text(
        f"#define JNVFP4_STOCHASTIC_COUNT {len(values)}\n"
        f"#define JNVFP4_STOCHASTIC_VALUES {', '.join(map(hex, values.tolist()))}\n"
    )
    subprocess.run([str(build(compiler, flags, source, folder)), str(folder)], check=True)
    return {path.stem: np.fromfile(path, np.uint32) for path in folder.glob("*.bin")}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def tables(request, tmp_path_factory) -> dict[str, np.ndarray]:
    """Every table of cpp/tables.h, as the host or the GPU computes it."""
    folder = tmp_path_factory.mktemp("tables")
    if request.param == "cpu":
        return write_tables("g++", HOST_FLAGS, "tables.cc", folder)
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    if not shutil.which("nvcc"):
        skip_or_fail("cuda", "no nvcc")
    return write_tables("nvcc", DEVICE_FLAGS, "tables.cu", folder)


@pytest.fixture(autouse=True)
def on_cpu():
    """Where NumPy overflows, underflows and meets NaN in silence."""
    with jax.default_device(jax.devices("cpu")[0]), np.errstate(all="ignore"):
        yield


def by_reference(function, *operands) -> np.ndarray:
    return np.asarray(jax.jit(function)(*(jnp.asarray(x) for x in operands)))


def dense() -> np.ndarray:
    """``dense`` of cpp/tables.h: upper 20 bits of a float32, lower bits 0, 1 and 0xfff."""
    i = np.arange(3 << 20, dtype=np.uint32)
    return i // 3 << 12 | np.array([0, 1, 0xFFF], np.uint32)[i % 3]


MAGNITUDES = np.arange(65536, dtype=np.uint32) << 15  # non-negative, Inf and NaN
SCALE_INDEX = np.arange(127 * 512, dtype=np.uint32)
SCALES = (SCALE_INDEX % 127).astype(np.uint8)
AMAXES = MAGNITUDES[SCALE_INDEX // 127 * 127]


def e4m3_values(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Clamped codes by ml_dtypes."""
    codes = np.minimum(values, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def agree(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Codes; or float32 bits, equal up to those of a NaN, which no table entry stores as such."""
    if want.dtype != np.uint32:
        assert_bitwise(got.astype(want.dtype), want, what)
        return
    assert_bitwise(*(canonical_nans(np.asarray(a, np.uint32).view(np.float32)) for a in (got, want)), what)


def check(tables, name: str, by_rule, by_numpy, part=lambda table: table, fast: bool = False) -> None:
    """A table, and that of the ``fast`` form, is what the reference and what NumPy or ml_dtypes compute."""
    for which in (name, f"{name}_fast") if fast else (name,):
        for who, want in (("reference", by_rule), ("NumPy", by_numpy)):
            agree(part(tables[which]), np.asarray(want), f"{which}, {who}")


# ---------------------------------------------------------------- 16-bit inputs


# ---------------------------------------------------------------- codes and scales
@pytest.mark.parametrize(("half", "dtype"), HALF_DTYPES.items(), ids=HALF_DTYPES)
def test_every_16_bit_number(tables, half, dtype):
    """Decoded, and encoded from float32, as E2M1, where NaN has code 0, and those that are not negative as E4M3."""
    x, bits_of = PATTERNS.view(dtype), softfloat.to_bits
    check(tables, f"{half}_decode", by_reference(bits_of, x), bits(x.astype(np.float32)))
    by_rule = bits(by_reference(lambda b: softfloat.from_bits(b, dtype), dense()))
    check(tables, f"{half}_encode", by_rule, bits(canonical_nans(dense().view(np.float32).astype(dtype))))
    codes = np.where(np.isnan(x), 0, x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)
    by_rule = by_reference(lambda x: reference.e2m1_encode(bits_of(x)), x)
    check(tables, f"e2m1_of_{half}", by_rule, codes.astype(np.uint8), fast=True)
    valid = ~np.signbit(x) | np.isnan(x)
    by_rule = by_reference(lambda x: reference.e4m3_encode(bits_of(x)), x)[valid]
    check(tables, f"e4m3_of_{half}", by_rule, to_e4m3(x.astype(np.float32))[valid], lambda table: table[valid])


def test_decode_e4m3(tables):
    scales = np.arange(256, dtype=np.uint8)
    check(tables, "e4m3_decode", by_reference(reference.e4m3_decode, scales), bits(e4m3_values(scales)))


def test_decode_e2m1(tables):
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    check(tables, "e2m1_decode", by_reference(reference.e2m1_decode, codes), bits(values), fast=True)
    check(tables, "e2m1_twice", by_reference(reference.e2m1_twice, codes), (2 * values).astype(np.int32))


def test_scale_times_code_is_exact(tables):
    """All 127 x 16 products, also as 16-bit floats: what a GEMM on decoded operands relies on."""
    scales, codes = np.arange(127, dtype=np.uint8)[:, None], np.arange(16, dtype=np.uint8)[None]

    def product(s, c):
        return softfloat.mul(reference.e4m3_decode(s), reference.e2m1_decode(c))

    exact = e4m3_values(scales).astype(float) * codes.view(ml_dtypes.float4_e2m1fn).astype(float)
    by_numpy = bits(exact.astype(np.float32))
    check(tables, "products", by_reference(product, scales, codes), by_numpy, lambda table: table.reshape(127, 16))
    for dtype in HALF_DTYPES.values():
        assert_bitwise(exact.astype(dtype).astype(float), exact, np.dtype(dtype).name)


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_encode_scale(tables, e4m3_max):
    amax = MAGNITUDES.view(np.float32)
    want = np.minimum(np.float32(6 * e4m3_max) / amax, FLOAT_MAX)
    want = np.where((amax == 0) | (want == 0), np.float32(1), want).view(np.uint32)
    by_rule = by_reference(lambda b: reference.encode_scale(b, e4m3_max), MAGNITUDES)
    check(tables, f"encode_scale_{e4m3_max}", by_rule, want)


def test_global_scale(tables):
    decode, mult = jax.jit(lambda b: reference.global_scale(b, 448))(MAGNITUDES)
    s_enc = tables["encode_scale_448"].view(np.float32)
    check(tables, "decode_of_global_scale", decode, bits(np.float32(1) / s_enc))
    check(tables, "mult_of_global_scale", mult, bits(s_enc * np.float32(1 / 6)))


@pytest.mark.parametrize("headroom", [False, True], ids=["plain", "headroom"])
def test_block_scale(tables, headroom):
    """Products above the largest scale, and infinite ones, saturate."""
    block_amax = MAGNITUDES[hashed(MAGNITUDES >> 15) & 0xFFFF]

    def scale(block_amax, amax):
        return reference.block_scale(block_amax, reference.global_scale(amax, 448)[1], headroom)

    product = block_amax.view(np.float32) * tables["mult_of_global_scale"].view(np.float32)
    product = product * np.float32(1.0625) if headroom else product
    assert np.isinf(product).sum() > 1000
    by_rule = by_reference(scale, block_amax, MAGNITUDES)
    check(tables, f"block_scale{'_headroom' * headroom}", by_rule, to_e4m3(product), fast=True)


def test_block_encode_scale(tables):
    def enc(scale, amax):
        return reference.block_encode_scale(scale, reference.global_scale(amax, 448)[0])

    s_dec = tables["decode_of_global_scale"].view(np.float32)[SCALE_INDEX // 127 * 127]
    want = np.minimum(np.float32(1) / (e4m3_values(SCALES) * s_dec), FLOAT_MAX)
    check(tables, "block_encode_scale", by_reference(enc, SCALES, AMAXES), bits(want))


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_dequantize_factor(tables, e4m3_max):
    by_rule = by_reference(lambda s, b: reference.dequantize_factor(s, b, e4m3_max), SCALES, AMAXES)
    constant = np.uint32({448: 0x39C30C31, 256: 0x3A2AAAAB}[e4m3_max]).view(np.float32)
    want = e4m3_values(SCALES) * AMAXES.view(np.float32) * constant
    check(tables, f"dequantize_factor_{e4m3_max}", by_rule, bits(want))


# ---------------------------------------------------------------- stochastic rounding
def test_stochastic_code_of_every_golden_value(tables):
    golden = golden_stochastic()
    value, r = golden["value"][:, None], golden["rbits"][None].astype(np.uint32)
    assert_bitwise(r, np.arange(256, dtype=np.uint32)[None])
    want = np.where(np.isnan(value), 0, golden["code"])
    want = np.where(bits(value) == 0x80000000, 8, want).astype(np.uint8)  # -0.0 has code 0 in the file
    by_rule = by_reference(reference.e2m1_encode_stochastic, bits(value), r)
    check(tables, "stochastic_of_golden", by_rule, want, lambda table: table.reshape(want.shape), fast=True)


def test_stochastic_code_of_every_bf16_number(tables):
    """With every random byte: the reference, and by float64 the grid point below, or above where the byte reaches."""
    r = np.arange(256, dtype=np.uint32)[None]
    x = (PATTERNS.astype(np.uint32) << 16)[:, None]
    magnitude = np.minimum(np.abs(x.view(np.float32)).astype(np.float64), 6)
    step = np.where(magnitude >= 4, 2, np.where(magnitude >= 2, 1, 0.5))
    value = (np.floor(magnitude / step) + (magnitude / step % 1 + r / 256 >= 1)) * step
    code = np.searchsorted([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.nan_to_num(value)) | (x >> 28 & 8)
    want = np.where(np.isnan(x.view(np.float32)), 0, code).astype(np.uint8)

    def unpacked(table):
        return (table.reshape(65536, 32, 1) >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(65536, 256)

    by_rule = by_reference(reference.e2m1_encode_stochastic, x, r)
    check(tables, "stochastic_of_bf16", by_rule, want, unpacked, fast=True)


# The known answers that the authors publish (Random123, kat_vectors): counter, key, result.
PHILOX = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX, ids=["zeros", "ones", "pi"])
def test_known_answers_of_philox(counter, key, words):
    assert_bitwise(np.concatenate(philox(counter, key)), np.array(words, np.uint32))


def test_random_bits(tables):
    """Case 0 of the table is the known answer for zeros; the others have keys, 64-bit block indices, orientations."""
    case = np.arange(4096, dtype=np.uint32)
    key = (case * np.uint32(0x9E3779B9), case * np.uint32(0x85EBCA6B))
    high, transposed = np.where(case % 2, case * np.uint32(0xC2B2AE35), 0).astype(np.uint32), case // 2 % 2 == 1
    got = tables["random_words"].reshape(-1, 4)
    assert_bitwise(got[0], np.array(PHILOX[0][2], np.uint32), "known answer")
    assert_bitwise(got, np.stack(philox((case, high, transposed, 0), key), axis=-1), "NumPy")
    for way in (False, True):
        own = tuple(k[transposed == way] for k in key)
        block = case[transposed == way], high[transposed == way]
        words = by_reference(lambda *v, way=way: reference.random_bits(v[:2], *v[2:], way), *own, *block)
        want = got[transposed == way].astype("<u4").view(np.uint8).reshape(-1, 16)
        assert_bitwise(words.astype(np.uint8), want, "reference")


# ---------------------------------------------------------------- rotation, 4over6
@pytest.mark.parametrize(("name", "formula"), [("rht16", rotate), ("rht16_inverse", rotate_back)])
def test_rotation(tables, name, formula):
    x = tables["block_elements"].reshape(-1, 16)
    by_rule, want = by_reference(getattr(reference, name), x), bits(formula(x.view(np.float32)))
    check(tables, name, by_rule, want, lambda table: table.reshape(-1, 16), fast=name == "rht16")


def hashed(v: np.ndarray) -> np.ndarray:
    """``hash`` of cpp/tables.h."""
    v = (v ^ v >> 16) * np.uint32(0x7FEB352D)
    v = (v ^ v >> 15) * np.uint32(0x846CA68B)
    return v ^ v >> 16


@pytest.mark.parametrize("constant", [6, 1536, 2688])
def test_division_by_a_constant(tables, constant):
    agree(tables[f"divided_by_{constant}"], bits(dense().view(np.float32) / np.float32(constant)), "NumPy")


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_candidate_scales(tables, e4m3_max):
    got, amax = tables[f"candidates_{e4m3_max}"], MAGNITUDES
    below = hashed(np.arange(65536, dtype=np.uint32)) % np.uint32(20 << 23)
    block_amax = np.where(amax > 0x7F800000, amax, amax - np.minimum(below, amax))

    def scales(block_amax, amax):
        return jnp.stack(reference.candidate_scales(block_amax, reference.encode_scale(amax, e4m3_max)))

    base = block_amax.view(np.float32) / np.float32(6) * tables[f"encode_scale_{e4m3_max}"].view(np.float32)
    both, want = np.stack([got & 255, got >> 8]), np.stack([to_e4m3(v) for v in (base, base * np.float32(1.5))])
    agree(both, by_reference(scales, block_amax, amax), "reference")
    agree(both, want, "NumPy")
    agree(tables[f"candidate_base_{e4m3_max}"], bits(base), "NumPy, not yet rounded")


def error_rows() -> tuple[np.ndarray, ...]:
    """x, codes, scale bytes and amax of ``row_errors`` in cpp/tables.h."""
    row = np.arange(8192, dtype=np.uint32)
    amax = np.uint32(0x3F800000) + (hashed(row) & 0x3FFFFFF)
    scale = (8 + hashed(row + np.uint32(8192)) % 119).astype(np.uint8)
    h = hashed(np.arange(16 * 8192, dtype=np.uint32)).reshape(-1, 16)
    codes = (h % 16).astype(np.uint8)
    near = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * (0x3F000000 | h >> 9).view(np.float32)
    decode = e4m3_values(scale) * amax.view(np.float32) / np.float32(1536)
    return near * decode[:, None], codes, scale, amax


@pytest.mark.parametrize("select", ["mae", "mse"])
@pytest.mark.parametrize("math", ["fp32", "fp16"])
def test_row_error(tables, select, math):
    """The sum runs from element 0 to 15, each step rounded."""
    which = 2 * (select == "mse") + (math == "fp16")
    x, codes, scale, amax = error_rows()

    def error(x, codes, scale, amax):
        q, s = reference.e2m1_decode(codes), reference.e4m3_decode(scale)
        if math == "fp16":
            return reference.row_error_scaled(x, q, s, reference.encode_scale(amax, 256), select == "mse")
        return reference.row_error_strict(x, q, s, amax, 256, select == "mse")

    by_rule = by_reference(error, bits(x), codes, scale, amax)
    product = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * e4m3_values(scale)[:, None]
    amax = amax.view(np.float32)[:, None]
    difference = product * amax / np.float32(1536) - x if math == "fp32" else product - x * (np.float32(1536) / amax)
    total = np.zeros(len(x), np.float32)
    for term in (difference * difference if select == "mse" else np.abs(difference)).T:
        total = total + term
    check(tables, "row_error", by_rule, bits(total), lambda table: table.reshape(4, -1)[which], fast=True)


def test_tile_error(tables):
    """Halves first."""
    rows = np.uint32(0x3F800000) + (hashed(np.arange(16 * 4096, dtype=np.uint32)).reshape(-1, 16) & 0x1FFFFFF)
    by_rule = by_reference(lambda e: reference.tile_error(e[..., None])[..., 0], rows)
    want = rows.view(np.float32)
    while want.shape[1] > 1:
        want = want[:, : want.shape[1] // 2] + want[:, want.shape[1] // 2 :]
    check(tables, "tile_error", by_rule, bits(want[:, 0]))


# ---------------------------------------------------------------- search
def test_search(tables):
    """The scales around each one, and a comparison that NaN and ties fail."""
    i = np.arange(127 * 11, dtype=np.int32)
    offsets = np.array([0, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7], np.int32)
    want = np.clip(i // 11 + offsets[i % 11], 0, 126).astype(np.uint8)
    by_rule = by_reference(
        lambda i: reference.search_candidate((i // 11).astype(jnp.uint8), reference.search_offset(i % 11)), i
    )
    check(tables, "search_candidate", by_rule, want)
    other = MAGNITUDES[hashed(np.arange(65536, dtype=np.uint32)) & 0xFFFF]
    want = (MAGNITUDES.view(np.float32) < other.view(np.float32)).astype(np.uint8)
    check(tables, "improves", by_reference(reference.improves, MAGNITUDES, other).astype(np.uint8), want)


# ---------------------------------------------------------------- operations and products
def test_fused_multiply_add(tables):
    """Where the product is exact, fusing changes nothing."""
    i = np.arange(65536, dtype=np.uint32)
    a, b = (((h & 0x807FF000) | 112 + h % 32 << 23).view(np.float32) for h in (hashed(i), hashed(i + np.uint32(65536))))
    c = ((hashed(i + np.uint32(131072)) & 0x807FFFFF) | 97 + hashed(i) % 64 << 23).view(np.float32)
    assert_bitwise((a * b).astype(np.float64), a.astype(np.float64) * b, "the products are exact")
    assert_bitwise(tables["fused_multiply_add"], bits(a * b + c), "NumPy")


def test_add_max(tables):
    i = np.arange(65536, dtype=np.uint32)
    a, b, c = ((hashed(i + np.uint32(k << 16)).view(np.int32) / 4).astype(np.int32) for k in range(3))
    assert_bitwise(tables["add_max"].view(np.int32), np.maximum(a + b, c), "NumPy")


def test_alpha_w4a4(tables):
    b = MAGNITUDES[hashed(np.arange(4 * 65536, dtype=np.uint32)) & 0xFFFF].reshape(4, -1)
    for case, (a_max, b_max) in enumerate([(448, 448), (256, 448), (448, 256), (256, 256)]):
        alpha = functools.partial(reference.alpha_w4a4, e4m3_max_a=a_max, e4m3_max_b=b_max)
        by_rule = by_reference(alpha, MAGNITUDES, b[case])
        want = MAGNITUDES.view(np.float32) * b[case].view(np.float32) / np.float32(36 * a_max * b_max)
        of_case = lambda table, case=case: table.reshape(4, -1)[case]  # noqa: E731
        check(tables, "alpha_w4a4", by_rule, bits(want), of_case, fast=True)


def test_add_block(tables):
    i = np.arange(65536, dtype=np.uint32)
    y = ((hashed(i).view(np.int32) / 4).astype(np.int32)).astype(np.float32) * np.float32(2**-20)
    a, b = (e4m3_values((hashed(i + np.uint32(k)) % 127).astype(np.uint8)) for k in (1, 2))
    dot = ((hashed(i + np.uint32(3)) % 4609).astype(np.int32) - 2304).astype(np.float32) / 4
    check(tables, "add_block", bits(by_reference(reference.add_block, y, a, b, dot)), bits(y + a * b * dot))


@pytest.mark.parametrize("name", ["add_element", "add_window"])
def test_add_to_an_accumulator(tables, name):
    i = np.arange(65536, dtype=np.uint32)
    a, b = hashed(i), hashed(~i)
    want = MAGNITUDES.view(np.float32) + a.view(np.float32) * b.view(np.float32)
    check(tables, name, by_reference(getattr(reference, name), MAGNITUDES, a, b), bits(want))


# ---------------------------------------------------------------- float32 inputs
@pytest.fixture(scope="module")
def exhaustive(tmp_path_factory) -> Path:
    flags = [*HOST_FLAGS, "-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno"]  # vectorized
    return build("g++", flags, "exhaustive.cc", tmp_path_factory.mktemp("exhaustive"))


@pytest.mark.parametrize("patterns", ["quick", pytest.param("full", marks=pytest.mark.long)])
def test_encoders_over_float32(exhaustive, patterns):
    """ "full": e2m1_encode over all 2^32 patterns, e4m3_encode over the 2^31 that are not negative."""
    done = subprocess.run([str(exhaustive), patterns], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the lists of functions
ROOT, RULES = INCLUDE.parent, "ffi/core/numerics.h"
TITLE = re.compile(r"^(?://|#) -{64} (.*)\n", flags=re.M)
FUNCTION = {
    ".h": re.compile(r"^(?:JNVFP4_HD|inline|constexpr|static)\b[^(=\n]*?(\w+)\(", flags=re.M),
    ".py": re.compile(r"^def ([a-z]\w*)\(", flags=re.M),
}
# How C++ and the reference hold a number; the only section whose functions differ.
REPRESENTATION = {
    "C++": ["bits_of", "float_of"],
    "reference": [
        *("constant", "is_nan", "to_bits", "from_bits", "unpack", "round_off"),  # a number is its bits
        *("mul_wide", "add_wide"),  # there are no 64-bit integers
    ],
}


def sections(*files: str) -> dict[str, list[str]]:
    """Title of a section -> its functions, in order; operations of C++ without their suffix."""
    found = {}
    for file in files:
        head, *parts = TITLE.split((ROOT / file).read_text())
        function = FUNCTION[Path(file).suffix]
        assert not function.findall(head), f"{file} has functions before its first section"
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            assert title not in found, f"two sections are called {title}"
            found[title] = function.findall(text)
    return {title: [name.removesuffix("_rn") for name in names] for title, names in found.items()}


def test_the_reference_mirrors_the_header():
    """The same sections with the same functions in the same order; the reference's whole operations follow."""
    kernels, oracle = sections(RULES), sections("jnvfp4/_core/softfloat.py", "jnvfp4/reference.py")
    assert kernels.pop("representation") == REPRESENTATION["C++"]
    assert oracle.pop("representation") == REPRESENTATION["reference"]
    assert "quantize" in oracle.pop("whole operations")
    assert list(kernels.items()) == list(oracle.items())


PROOF = re.compile(r"^// = (.+), proven by (tests/[\w/.]+)::(\w+)$")


def fast_forms() -> dict[str, str]:
    """Name of a function or struct of numerics_fast.h -> the first line of the comment before it."""
    lines = (INCLUDE / "core/numerics_fast.h").read_text().splitlines()
    forms = {}
    for i, line in enumerate(lines):
        name = FUNCTION[".h"].match(line) or re.match(r"struct (\w+) ", line)
        if name:
            first = i - lines[i - 1].startswith("template")
            while lines[first - 1].startswith("//") and not TITLE.match(lines[first - 1] + "\n"):
                first -= 1
            forms[name[1]] = lines[first]
    return forms


@pytest.mark.parametrize("form", list(fast_forms()))
def test_a_fast_form_names_its_rule_and_its_proof(form):
    proof = PROOF.match(fast_forms()[form])
    assert proof, f"the comment of {form} begins with {fast_forms()[form]!r}"
    rule, file, test = proof.groups()
    names = {name.removesuffix("_rn") for name in re.findall(r"(\w+)\(", rule)}
    assert names
    assert names <= {"max"}.union(*sections(RULES).values()), f"{form} names no rule"
    text = (ROOT / file).read_text()
    assert (f"def {test}(" if file.endswith(".py") else f'"{test}"') in text, f"{file} has no {test}"
    programs = [(CPP / program).read_text() for program in ("tables.h", "exhaustive.cc")]
    assert any(re.search(rf"\b{form}\b", program) for program in programs), f"no program calls {form}"


def test_the_rules_in_words_name_their_functions():
    """The table of docs/numerics.md has every function of the headers, and of the reference's whole operations some."""
    page = (ROOT / "docs" / "numerics.md").read_text()
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", page, flags=re.M))))
    every = {name for title, names in sections(RULES).items() if title != "representation" for name in names}
    whole = set(sections("jnvfp4/reference.py")["whole operations"])
    assert every <= named, f"not in docs/numerics.md: {every - named}"
    assert named <= every | whole, f"no functions: {named - every - whole}"
