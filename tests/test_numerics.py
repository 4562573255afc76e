"""ffi/numerics.h against ``jnvfp4.reference`` and against ml_dtypes and NumPy, over all inputs of small formats.

cpp/tables.cc (and cpp/tables.cu on a GPU) write tables of the C++ functions; cpp/exhaustive.cc checks the
encoders over float32 patterns against rules of its own.
"""

import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import FLOAT_MAX, assert_bitwise, bits, canonical_nans

from jnvfp4 import reference, softfloat

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
    subprocess.run([compiler, *flags, f"-I{INCLUDE}", str(CPP / source), "-o", str(program)], check=True)
    return program


def write_tables(program: Path, folder: Path) -> dict[str, np.ndarray]:
    subprocess.run([str(program), str(folder)], check=True)
    return {path.stem: np.fromfile(path, np.uint32) for path in folder.glob("*.bin")}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def tables(request, tmp_path_factory) -> dict[str, np.ndarray]:
    """Every table of cpp/tables.h, as the host or the GPU computes it."""
    folder = tmp_path_factory.mktemp("tables")
    if request.param == "cpu":
        return write_tables(build("g++", HOST_FLAGS, "tables.cc", folder), folder)
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    if not shutil.which("nvcc"):
        skip_or_fail("cuda", "no nvcc")
    return write_tables(build("nvcc", DEVICE_FLAGS, "tables.cu", folder), folder)


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


# ---------------------------------------------------------------- float32 inputs
@pytest.fixture(scope="module")
def exhaustive(tmp_path_factory) -> Path:
    return build("g++", HOST_FLAGS, "exhaustive.cc", tmp_path_factory.mktemp("exhaustive"))


@pytest.mark.parametrize("patterns", ["quick", pytest.param("full", marks=pytest.mark.long)])
def test_encoders_over_float32(exhaustive, patterns):
    """ "full": e2m1_encode over all 2^32 patterns, e4m3_encode over the 2^31 that are not negative."""
    done = subprocess.run([str(exhaustive), patterns], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "e2m1 tie": ("kMagic + 2.0f", "kMagic + 3.0f"),
    "e2m1 saturation": ("? t05 : kMagicBits + 7", "? t05 : t05"),
    "e2m1 NaN": ("a > kInf ? 0u : e2m1_magnitude(a)", "e2m1_magnitude(a)"),
    "e4m3 tie": ("(a + 0x7ffffu", "(a + 0x80000u"),
    "e4m3 subnormal": ("a < 0x3c800000u", "a < 0x3c000000u"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_encoders_over_float32_finds_mistakes(tmp_path, monkeypatch, mistake):
    """The same program is red for a numerics.h with one constant changed."""
    right, wrong = MISTAKES[mistake]
    text = (INCLUDE / "numerics.h").read_text()
    assert right in text
    (tmp_path / "numerics.h").write_text(text.replace(right, wrong))
    monkeypatch.setitem(globals(), "INCLUDE", tmp_path)
    program = build("g++", HOST_FLAGS, "exhaustive.cc", tmp_path)
    done = subprocess.run([str(program), "quick"], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "patterns wrong" in done.stdout
