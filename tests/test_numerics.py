"""ffi/numerics.h against ``jnvfp4.reference`` and against ml_dtypes and NumPy, over all inputs of small formats.

cpp/tables.cc (and cpp/tables.cu on a GPU) write tables of the C++ functions; cpp/exhaustive.cc checks the
encoders over float32 patterns against rules of its own.
"""

import functools
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

from jnvfp4 import Format, QuantSpec, reference, softfloat

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


@pytest.mark.parametrize("half", list(HALF_DTYPES))
def test_e2m1_of_every_16_bit_number(tables, half):
    got, x = tables[f"e2m1_of_{half}"].astype(np.uint8), halves(half)
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
def test_stochastic_code_of_every_golden_value(tables):
    golden = golden_stochastic()
    value, r = golden["value"][:, None], golden["rbits"][None].astype(np.uint32)
    assert_bitwise(r, np.arange(256, dtype=np.uint32)[None])
    want = np.where(is_nan(value), 0, golden["code"])
    want = np.where(bits(value) == 0x80000000, 8, want).astype(np.uint8)  # -0.0 has code 0 in the file
    assert_bitwise(tables["stochastic_of_golden"].reshape(want.shape).astype(np.uint8), want, "golden")
    got = by_reference(lambda b, r: reference.e2m1_encode_stochastic(b, r), bits(value), r)
    assert_bitwise(got, want, "reference")


def test_stochastic_code_of_every_bf16_number(tables):
    """With every random byte: the reference, and by float64 the grid point below, or above where the byte reaches."""
    packed = tables["stochastic_of_bf16"].reshape(65536, 32, 1)
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
@pytest.mark.parametrize("name", ["rht16", "rht16_inverse"])
def test_rotation(tables, name):
    x, got = tables["block_elements"].reshape(-1, 16), tables[name].reshape(-1, 16)
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


@pytest.mark.parametrize("select", ["mae", "mse"])
@pytest.mark.parametrize("math", ["fp32", "fp16"])
def test_row_error(tables, select, math):
    """The sum runs from element 0 to 15, each step rounded."""
    which = 2 * (select == "mse") + (math == "fp16")
    got = tables["row_error"].reshape(4, -1)[which]
    x, codes, scale, amax = error_rows()
    spec = QuantSpec(Format(e4m3_max=256), select=select, error_math=math)

    def error(x, codes, scale, amax):
        return reference.row_error(x, codes, scale, amax, reference.encode_scale(amax, 256), spec)

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
        "tie": ("kMagic + 2.0f", "kMagic + 3.0f"),
        "saturation": ("? t05 : kMagicBits + 7", "? t05 : t05"),
        "NaN": ("a > kInf ? 0u : e2m1_magnitude(a)", "e2m1_magnitude(a)"),
    },
    "e2m1_round": {
        "step": ("22 << 23, least", "21 << 23, least"),
        "least": ("bits_of(6291456.0f * one)", "bits_of(4194304.0f * one)"),
    },
    "e4m3_encode": {
        "tie": ("(a + 0x7ffffu", "(a + 0x80000u"),
        "subnormal": ("a < 0x3c800000u", "a < 0x3c000000u"),
    },
    "e2m1_magnitude_stochastic": {
        "step": ("a >= 2.0f ?", "a >= 3.0f ?"),
        "saturation": ("code > 7u ? 7u : code", "code"),
    },
    "e2m1_round_stochastic": {
        "half": ("t >= 0x3f000000u ? 0x3f000000u", "t >= 0x3f000000u ? 0x3f800000u"),
        "saturation": ("t > 0x40c00000u ? 0x40c00000u : t & 0xffc00000u", "t & 0xffc00000u"),
        "sign": ("float_of(magnitude | (b & kSign))", "float_of(magnitude)"),
    },
    "div_by_steps": {"correction": ("fma(fma(-d, q, a), reciprocal, q)", "q")},
    "row_error_strict": {
        "underflow": ("product >= 7.7e-34f", "product >= 7.7e-36f"),
        "overflow": ("product <= 1.3e36f", "product <= 1.3e38f"),
        "power": ("float_of(b & 0xff800000u)", "float_of(b & 0x7f800000u)"),
    },
}


@pytest.mark.parametrize(("check", "mistake"), [(check, m) for check, found in MISTAKES.items() for m in found])
def test_encoders_over_float32_finds_mistakes(tmp_path, monkeypatch, check, mistake):
    """The same program is red for a numerics.h with one constant changed."""
    right, wrong = MISTAKES[check][mistake]
    text = (INCLUDE / "numerics.h").read_text()
    assert right in text
    (tmp_path / "numerics.h").write_text(text.replace(right, wrong))
    monkeypatch.setitem(globals(), "INCLUDE", tmp_path)
    program = build("g++", HOST_FLAGS, "exhaustive.cc", tmp_path)
    done = subprocess.run([str(program), "quick", check], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "patterns wrong" in done.stdout
