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
from helpers import (
    FLOAT_MAX,
    assert_bitwise,
    bits,
    canonical_nans,
    philox,
    quantize_by_reference,
    rotate,
    rotate_back,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import Format, QuantSpec, four_over_six, reference
from jnvfp4._core import softfloat

CPP = Path(__file__).parent / "cpp"
INCLUDE = CPP.parent.parent / "ffi"
HOST_FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-pthread"]
DEVICE_FLAGS = ["-std=c++17", "-O2", "-fmad=false", "-arch=native"]
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
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def halves(name: str) -> np.ndarray:
    return PATTERNS.view(HALF_DTYPES[name])


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


def is_nan(values: np.ndarray) -> np.ndarray:
    """np.isnan, which warns of signaling NaNs in some versions."""
    with np.errstate(invalid="ignore"):
        return np.isnan(values)


def never_negative(values: np.ndarray) -> np.ndarray:
    return ~np.signbit(values) | is_nan(values)


every_form = pytest.mark.parametrize("form", ["", "_fast"], ids=["rule", "fast form"])


def agree(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Tables of float32 bits: equal up to the bits of a NaN, which no table entry stores as such."""
    got, want = (canonical_nans(np.asarray(a, np.uint32).view(np.float32)) for a in (got, want))
    assert_bitwise(got, want, what)


# ---------------------------------------------------------------- 16-bit inputs
@pytest.mark.parametrize("half", list(HALF_DTYPES))
def test_decode_16_bits(tables, half):
    got = tables[f"{half}_decode"]
    agree(got, by_reference(softfloat.to_bits, halves(half)), "reference")
    agree(got, bits(halves(half).astype(np.float32)), "ml_dtypes")


@pytest.mark.parametrize("half", list(HALF_DTYPES))
def test_encode_16_bits(tables, half):
    got, dtype = tables[f"{half}_encode"].astype(np.uint16), HALF_DTYPES[half]
    assert_bitwise(got, bits(by_reference(lambda b: softfloat.from_bits(b, dtype), dense())), "reference")
    with np.errstate(over="ignore", invalid="ignore"):
        assert_bitwise(got, bits(canonical_nans(dense().view(np.float32).astype(dtype))), "ml_dtypes")


@every_form
@pytest.mark.parametrize("half", list(HALF_DTYPES))
def test_e2m1_of_every_16_bit_number(tables, half, form):
    got, x = tables[f"e2m1_of_{half}{form}"].astype(np.uint8), halves(half)
    assert_bitwise(got, by_reference(lambda x: reference.e2m1_encode(softfloat.to_bits(x)), x), "reference")
    with np.errstate(all="ignore"):
        codes = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert_bitwise(got, np.where(is_nan(x), 0, codes).astype(np.uint8), "ml_dtypes, with code 0 for NaN")


def test_minus_zero_has_code_8(tables):
    assert tables["e2m1_of_bf16"][0x8000] == 8
    assert tables["e2m1_of_f16"][0x8000] == 8


@pytest.mark.parametrize("half", list(HALF_DTYPES))
def test_e4m3_of_every_16_bit_number(tables, half):
    x = halves(half)
    valid = never_negative(x)
    got = tables[f"e4m3_of_{half}"].astype(np.uint8)[valid]
    codes = by_reference(lambda x: reference.e4m3_encode(softfloat.to_bits(x)), x)[valid]
    assert_bitwise(got, codes, "reference")
    with np.errstate(all="ignore"):
        clamped = np.minimum(x.astype(np.float32)[valid], 448)  # keeps NaN
        codes = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_bitwise(got, np.where(is_nan(clamped), 0x7F, codes).astype(np.uint8), "ml_dtypes, clamped")


# ---------------------------------------------------------------- codes and scales
def test_decode_e4m3(tables):
    scales = np.arange(256, dtype=np.uint8)
    agree(tables["e4m3_decode"], by_reference(reference.e4m3_decode, scales), "reference")
    agree(tables["e4m3_decode"], bits(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)), "ml_dtypes")


def test_decode_e2m1(tables):
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_bitwise(tables["e2m1_decode"], by_reference(reference.e2m1_decode, codes), "reference")
    assert_bitwise(tables["e2m1_decode"], bits(values), "ml_dtypes")
    assert_bitwise(tables["e2m1_decode_fast"], bits(values), "ml_dtypes, fast form")
    assert_bitwise(tables["e2m1_twice"].view(np.int32), by_reference(reference.e2m1_twice, codes), "reference")
    assert_bitwise(tables["e2m1_twice"].view(np.int32), (2 * values).astype(np.int32), "ml_dtypes")


def test_scale_times_code_is_exact(tables):
    """All 127 x 16 products, also as 16-bit floats: what a GEMM on decoded operands relies on."""
    scales, codes = np.arange(127, dtype=np.uint8)[:, None], np.arange(16, dtype=np.uint8)[None]

    def product(s, c):
        return softfloat.mul(reference.e4m3_decode(s), reference.e2m1_decode(c))

    exact = scales.view(ml_dtypes.float8_e4m3fn).astype(float) * codes.view(ml_dtypes.float4_e2m1fn).astype(float)
    got = tables["products"].reshape(127, 16)
    assert_bitwise(got, by_reference(product, scales, codes), "reference")
    assert_bitwise(got, bits(exact.astype(np.float32)), "ml_dtypes")
    for dtype in HALF_DTYPES.values():
        assert_bitwise(exact.astype(dtype).astype(float), exact, np.dtype(dtype).name)


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_encode_scale(tables, e4m3_max):
    got, amax = tables[f"encode_scale_{e4m3_max}"], MAGNITUDES.view(np.float32)
    agree(got, by_reference(lambda b: reference.encode_scale(b, e4m3_max), MAGNITUDES), "reference")
    with np.errstate(all="ignore"):
        want = np.minimum(np.float32(6 * e4m3_max) / amax, FLOAT_MAX)
    agree(got, np.where((amax == 0) | (want == 0), np.float32(1), want).view(np.uint32), "NumPy")


def test_global_scale(tables):
    decode, mult = tables["decode_of_global_scale"], tables["mult_of_global_scale"]
    want_decode, want_mult = jax.jit(lambda b: reference.global_scale(b, 448))(MAGNITUDES)
    agree(decode, want_decode, "reference decode")
    agree(mult, want_mult, "reference mult")
    s_enc = tables["encode_scale_448"].view(np.float32)
    agree(decode, bits(np.float32(1) / s_enc), "NumPy decode")
    agree(mult, bits(s_enc * np.float32(1 / 6)), "NumPy mult")


@every_form
@pytest.mark.parametrize("headroom", [False, True], ids=["plain", "headroom"])
def test_block_scale(tables, headroom, form):
    """Products above the largest scale, and infinite ones, saturate."""
    got = tables[f"block_scale{'_headroom' * headroom}{form}"].astype(np.uint8)
    block_amax = MAGNITUDES[hashed(MAGNITUDES >> 15) & 0xFFFF]

    def scale(block_amax, amax):
        return reference.block_scale(block_amax, reference.global_scale(amax, 448)[1], headroom)

    assert_bitwise(got, by_reference(scale, block_amax, MAGNITUDES), "reference")
    with np.errstate(all="ignore"):
        product = block_amax.view(np.float32) * tables["mult_of_global_scale"].view(np.float32)
        product = product * np.float32(1.0625) if headroom else product
        want = np.minimum(product, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.isinf(product).sum() > 1000
    assert_bitwise(got, np.where(is_nan(product), 0x7F, want).astype(np.uint8), "NumPy")


def test_block_encode_scale(tables):
    got = tables["block_encode_scale"]

    def enc(scale, amax):
        return reference.block_encode_scale(scale, reference.global_scale(amax, 448)[0])

    agree(got, by_reference(enc, SCALES, AMAXES), "reference")
    s_dec = tables["decode_of_global_scale"].view(np.float32)[SCALE_INDEX // 127 * 127]
    with np.errstate(all="ignore"):
        want = np.minimum(np.float32(1) / (SCALES.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * s_dec), FLOAT_MAX)
    agree(got, bits(want), "NumPy")


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_dequantize_factor(tables, e4m3_max):
    got = tables[f"dequantize_factor_{e4m3_max}"]
    agree(
        got,
        by_reference(lambda s, b: reference.dequantize_factor(s, b, e4m3_max), SCALES, AMAXES),
        "reference",
    )
    constant = np.uint32({448: 0x39C30C31, 256: 0x3A2AAAAB}[e4m3_max]).view(np.float32)
    with np.errstate(all="ignore"):
        want = SCALES.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * AMAXES.view(np.float32) * constant
    agree(got, bits(want), "NumPy")


# ---------------------------------------------------------------- stochastic rounding
@every_form
def test_stochastic_code_of_every_golden_value(tables, form):
    golden = golden_stochastic()
    value, r = golden["value"][:, None], golden["rbits"][None].astype(np.uint32)
    assert_bitwise(r, np.arange(256, dtype=np.uint32)[None])
    want = np.where(is_nan(value), 0, golden["code"])
    want = np.where(bits(value) == 0x80000000, 8, want).astype(np.uint8)  # -0.0 has code 0 in the file
    assert_bitwise(tables[f"stochastic_of_golden{form}"].reshape(want.shape).astype(np.uint8), want, "golden")
    got = by_reference(lambda b, r: reference.e2m1_encode_stochastic(b, r), bits(value), r)
    assert_bitwise(got, want, "reference")


@every_form
def test_stochastic_code_of_every_bf16_number(tables, form):
    """With every random byte: the reference, and by float64 the grid point below, or above where the byte reaches."""
    packed = tables[f"stochastic_of_bf16{form}"].reshape(65536, 32, 1)
    got = (packed >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.uint8).reshape(65536, 256)
    r = np.arange(256, dtype=np.uint32)[None]
    x = (PATTERNS.astype(np.uint32) << 16)[:, None]
    assert_bitwise(got, by_reference(reference.e2m1_encode_stochastic, x, r), "reference")
    with np.errstate(all="ignore"):
        magnitude = np.minimum(np.abs(x.view(np.float32)).astype(np.float64), 6)
        step = np.where(magnitude >= 4, 2, np.where(magnitude >= 2, 1, 0.5))
        value = (np.floor(magnitude / step) + (magnitude / step % 1 + r / 256 >= 1)) * step
    code = np.searchsorted([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.nan_to_num(value)) | (x >> 28 & 8)
    assert_bitwise(got, np.where(is_nan(x.view(np.float32)), 0, code).astype(np.uint8), "NumPy")


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
        words = by_reference(
            lambda *v, way=way: reference.random_bits(v[:2], *v[2:], way),
            *own,
            case[transposed == way],
            high[transposed == way],
        )
        want = got[transposed == way].astype("<u4").view(np.uint8).reshape(-1, 16)
        assert_bitwise(words.astype(np.uint8), want, "reference")


# ---------------------------------------------------------------- rotation, 4over6
@pytest.mark.parametrize(("name", "form"), [("rht16", ""), ("rht16", "_fast"), ("rht16_inverse", "")])
def test_rotation(tables, name, form):
    x, got = tables["block_elements"].reshape(-1, 16), tables[name + form].reshape(-1, 16)
    by_formula = {"rht16": rotate, "rht16_inverse": rotate_back}[name]
    agree(got, by_reference(getattr(reference, name), x), "reference")
    agree(got, bits(by_formula(x.view(np.float32))), "NumPy")


def hashed(v: np.ndarray) -> np.ndarray:
    """``hash`` of cpp/tables.h."""
    v = (v ^ v >> 16) * np.uint32(0x7FEB352D)
    v = (v ^ v >> 15) * np.uint32(0x846CA68B)
    return v ^ v >> 16


@pytest.mark.parametrize("constant", [6, 1536, 2688])
def test_division_by_a_constant(tables, constant):
    with np.errstate(all="ignore"):
        agree(tables[f"divided_by_{constant}"], bits(dense().view(np.float32) / np.float32(constant)), "NumPy")


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_candidate_scales(tables, e4m3_max):
    got, amax = tables[f"candidates_{e4m3_max}"], MAGNITUDES
    below = hashed(np.arange(65536, dtype=np.uint32)) % np.uint32(20 << 23)
    block_amax = np.where(amax > 0x7F800000, amax, amax - np.minimum(below, amax))

    def scales(block_amax, amax):
        return jnp.stack(reference.candidate_scales(block_amax, reference.encode_scale(amax, e4m3_max)))

    assert_bitwise(
        np.stack([got & 255, got >> 8]).astype(np.uint8), by_reference(scales, block_amax, amax), "reference"
    )
    with np.errstate(all="ignore"):
        base = block_amax.view(np.float32) / np.float32(6) * tables[f"encode_scale_{e4m3_max}"].view(np.float32)
        six, four = (
            np.minimum(v, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            for v in (base, base * np.float32(1.5))
        )
    want = np.where(is_nan(base), 0x7F7F, six | four.astype(np.uint32) << 8).astype(np.uint32)
    assert_bitwise(got, want, "NumPy")
    agree(tables[f"candidate_base_{e4m3_max}"], bits(base), "NumPy, not yet rounded")


def error_rows() -> tuple[np.ndarray, ...]:
    """x, codes, scale bytes and amax of ``row_errors`` in cpp/tables.h."""
    row = np.arange(8192, dtype=np.uint32)
    amax = np.uint32(0x3F800000) + (hashed(row) & 0x3FFFFFF)
    scale = (8 + hashed(row + np.uint32(8192)) % 119).astype(np.uint8)
    h = hashed(np.arange(16 * 8192, dtype=np.uint32)).reshape(-1, 16)
    codes = (h % 16).astype(np.uint8)
    near = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * (0x3F000000 | h >> 9).view(np.float32)
    decode = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * amax.view(np.float32) / np.float32(1536)
    return near * decode[:, None], codes, scale, amax


@every_form
@pytest.mark.parametrize("select", ["mae", "mse"])
@pytest.mark.parametrize("math", ["fp32", "fp16"])
def test_row_error(tables, select, math, form):
    """The sum runs from element 0 to 15, each step rounded."""
    which = 2 * (select == "mse") + (math == "fp16")
    got = tables[f"row_error{form}"].reshape(4, -1)[which]
    x, codes, scale, amax = error_rows()

    def error(x, codes, scale, amax):
        q, s = reference.e2m1_decode(codes), reference.e4m3_decode(scale)
        if math == "fp16":
            return reference.row_error_scaled(x, q, s, reference.encode_scale(amax, 256), select == "mse")
        return reference.row_error_strict(x, q, s, amax, 256, select == "mse")

    assert_bitwise(got, by_reference(error, bits(x), codes, scale, amax), "reference")
    product = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    product = product * scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    amax = amax.view(np.float32)[:, None]
    if math == "fp16":
        difference = product - x * (np.float32(1536) / amax)
    else:
        difference = product * amax / np.float32(1536) - x
    total = np.zeros(len(x), np.float32)
    for term in (difference * difference if select == "mse" else np.abs(difference)).T:
        total = total + term
    assert_bitwise(got, bits(total), "NumPy")


def test_tile_error(tables):
    """Halves first."""
    rows = np.uint32(0x3F800000) + (hashed(np.arange(16 * 4096, dtype=np.uint32)).reshape(-1, 16) & 0x1FFFFFF)
    got = tables["tile_error"]
    assert_bitwise(got, by_reference(lambda e: reference.tile_error(e[..., None])[..., 0], rows), "reference")
    want = rows.view(np.float32)
    while want.shape[1] > 1:
        want = want[:, : want.shape[1] // 2] + want[:, want.shape[1] // 2 :]
    assert_bitwise(got, bits(want[:, 0]), "NumPy")


@pytest.mark.parametrize("select", ["mae", "mse"])
def test_strict_errors_near_overflow(native, select):
    """Decoded values overflow for some amaxes here, with which a kernel must divide for each element."""
    rng = np.random.default_rng(0)
    amax = np.exp(rng.uniform(np.log(1e34), np.log(3.4e38), 256)).astype(np.float32)
    x = (rng.uniform(-1, 1, (256, 1, 64)) * amax[:, None, None]).astype(np.float32)
    for spec in (four_over_six(select), QuantSpec(Format(e4m3_max=448), select=select)):
        t = jnvfp4.quantize(x, spec, amax=amax, implementation=native.implementation)
        data, scale = quantize_by_reference(x, spec, amax)
        assert_bitwise(t.scale, scale, "scale")
        assert_bitwise(unpack_codes(t.data), unpack_codes(data), "codes")


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


@every_form
def test_alpha_w4a4(tables, form):
    got = tables[f"alpha_w4a4{form}"].reshape(4, -1)
    b = MAGNITUDES[hashed(np.arange(4 * 65536, dtype=np.uint32)) & 0xFFFF].reshape(4, -1)
    for case, (a_max, b_max) in enumerate([(448, 448), (256, 448), (448, 256), (256, 256)]):

        def alpha(a, b, a_max=a_max, b_max=b_max):
            return reference.alpha_w4a4(a, b, a_max, b_max)

        agree(got[case], by_reference(alpha, MAGNITUDES, b[case]), "reference")
        with np.errstate(all="ignore"):
            want = MAGNITUDES.view(np.float32) * b[case].view(np.float32) / np.float32(36 * a_max * b_max)
        agree(got[case], bits(want), "NumPy")


def test_add_block(tables):
    i = np.arange(65536, dtype=np.uint32)
    y = ((hashed(i).view(np.int32) / 4).astype(np.int32)).astype(np.float32) * np.float32(2**-20)
    a, b = ((hashed(i + np.uint32(k)) % 127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for k in (1, 2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    dot = ((hashed(i + np.uint32(3)) % 4609).astype(np.int32) - 2304).astype(np.float32) / 4
    assert_bitwise(tables["add_block"], bits(by_reference(reference.add_block, y, a, b, dot)), "reference")
    assert_bitwise(tables["add_block"], bits(y + a * b * dot), "NumPy")


@pytest.mark.parametrize("name", ["add_element", "add_window"])
def test_add_to_an_accumulator(tables, name):
    i = np.arange(65536, dtype=np.uint32)
    a, b = hashed(i), hashed(~i)
    agree(tables[name], by_reference(getattr(reference, name), MAGNITUDES, a, b), "reference")
    with np.errstate(all="ignore"):
        agree(tables[name], bits(MAGNITUDES.view(np.float32) + a.view(np.float32) * b.view(np.float32)), "NumPy")


# ---------------------------------------------------------------- float32 inputs
@pytest.fixture(scope="module")
def exhaustive(tmp_path_factory) -> Path:
    return build("g++", HOST_FLAGS, "exhaustive.cc", tmp_path_factory.mktemp("exhaustive"))


@pytest.mark.parametrize("patterns", ["quick", pytest.param("full", marks=pytest.mark.long)])
def test_encoders_over_float32(exhaustive, patterns):
    """ "full": e2m1_encode over all 2^32 patterns, e4m3_encode over the 2^31 that are not negative."""
    done = subprocess.run([str(exhaustive), patterns], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# check -> what is wrong: (right, wrong)
MISTAKES = {
    "e2m1_encode": {
        "tie": ("(a >= 0.75f)", "(a > 0.75f)"),
        "saturation": ("(a > 5.0f)", "(a > 6.0f)"),
        "NaN": ("(b & kMagnitude) > kInf ? 0u :", "false ? 0u :"),
    },
    "e2m1_encode_stochastic": {
        "step": ("a >= 2.0f ?", "a >= 3.0f ?"),
        "grid": ("(t >= 3.0f)", "(t > 3.0f)"),
        "NaN": ("(b & kMagnitude) > kInf ? 0u :", "false ? 0u :"),
    },
    "e4m3_encode": {
        "tie": ("(a + 0x7ffffu", "(a + 0x80000u"),
        "subnormal": ("a < 0x3c800000u", "a < 0x3c000000u"),
        "saturation": ("b > 0x43e00000u ? 0x43e00000u : b", "b > 0x7f000000u ? 0x43e00000u : b"),
    },
    "e2m1_magnitude": {
        "tie": ("kMagic + 2.0f", "kMagic + 3.0f"),
        "saturation": ("? t05 : kMagicBits + 7", "? t05 : t05"),
    },
    "e2m1_round_below_7": {
        "step": ("22 << 23, least", "21 << 23, least"),
        "least": ("bits_of(6291456.0f * one)", "bits_of(4194304.0f * one)"),
        "scale": ("bits_of(6291456.0f * one)", "bits_of(6291456.0f)"),
    },
    "e2m1_round": {
        "saturation": ("m = a > 0x40c00000u ? 0x40c00000u : a", "m = a"),
        "sign": ("1.0f)) | (b & kSign)", "1.0f))"),
    },
    "e2m1_magnitude_stochastic": {
        "half": ("t >= 0x3f000000u ? 1u", "t >= 0x3f000000u ? 2u"),
        "saturation": ("code > 7u ? 7u : code", "code"),
    },
    "block_scale": {
        "less headroom": ("kHeadroom = 1.0625f", "kHeadroom = 1.0624f"),
        "more headroom": ("kHeadroom = 1.0625f", "kHeadroom = 1.0626f"),
    },
    "div_by_steps": {"correction": ("fma(fma(-d, q, a), reciprocal, q)", "q")},
    "row_error_by_values": {
        "underflow": ("product >= 7.7e-34f", "product >= 7.7e-36f"),
        "overflow": ("product <= 1.3e36f", "product <= 1.3e38f"),
        "no upper bound": (" && product <= 1.3e36f", ""),
        "power": ("float_of(b & 0xff800000u)", "float_of(b & 0x7f800000u)"),
    },
}


@pytest.mark.long
@pytest.mark.parametrize(("check", "mistake"), [(check, m) for check, found in MISTAKES.items() for m in found])
def test_encoders_over_float32_finds_mistakes(tmp_path, monkeypatch, check, mistake):
    """The same program is red for headers with one constant changed."""
    right, wrong = MISTAKES[check][mistake]
    changed = 0
    (tmp_path / "core").mkdir()
    for header in INCLUDE.glob("core/*.h"):
        text = header.read_text()
        changed += right in text
        (tmp_path / "core" / header.name).write_text(text.replace(right, wrong))
    assert changed == 1
    monkeypatch.setitem(globals(), "INCLUDE", tmp_path)
    program = build("g++", HOST_FLAGS, "exhaustive.cc", tmp_path)
    done = subprocess.run([str(program), "quick", check], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "patterns wrong" in done.stdout


# ---------------------------------------------------------------- the lists of functions
ROOT = INCLUDE.parent
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


def rules() -> dict[str, list[str]]:
    return sections("ffi/core/numerics.h")


def test_the_reference_mirrors_the_header():
    """The same sections with the same functions in the same order; the reference's whole operations follow."""
    kernels, oracle = rules(), sections("jnvfp4/_core/softfloat.py", "jnvfp4/reference.py")
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
    assert names <= {"max"}.union(*rules().values()), f"{form} names no rule"
    text = (ROOT / file).read_text()
    assert (f"def {test}(" if file.endswith(".py") else f'"{test}"') in text, f"{file} has no {test}"
    programs = [(CPP / program).read_text() for program in ("tables.h", "exhaustive.cc")]
    assert any(re.search(rf"\b{form}\b", program) for program in programs), f"no program calls {form}"


def test_the_rules_in_words_name_their_functions():
    """The table of docs/numerics.md has every function of the headers, and of the reference's whole operations some."""
    page = (ROOT / "docs" / "numerics.md").read_text()
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", page, flags=re.M))))
    every = {name for title, names in rules().items() if title != "representation" for name in names}
    whole = set(sections("jnvfp4/reference.py")["whole operations"])
    assert every <= named, f"not in docs/numerics.md: {every - named}"
    assert named <= every | whole, f"no functions: {named - every - whole}"
