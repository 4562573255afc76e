"""Every golden array (data/README.md) of the supported formats, bit for bit, by every implementation."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import ALL_BACKENDS, LESSER_ISAS, NATIVE_BACKENDS, one_of
from helpers import (
    assert_bitwise,
    assert_gemm_close,
    bits,
    canonical_nans,
    encode_scales,
    from_storage,
    pad_rows_and_columns,
    quantize_by_reference,
    round_to,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, ROW_SCALED, WINDOW64, Format, NVFP4Tensor, QuantSpec, reference
from jnvfp4._core.softfloat import to_bits
from jnvfp4.spec import four_over_six as four_over_six_spec

DATA = Path(__file__).parent / "data"


def four_over_six(kind: str) -> QuantSpec:
    """The spec of a file such as q_4o6_2d_256_mse_fast."""
    _, geometry, e4m3_max, error, math = kind.split("_")
    return four_over_six_spec(
        error,  # type: ignore[arg-type]
        e4m3_max=int(e4m3_max),  # type: ignore[arg-type]
        fast=math == "fast",
        block_rows=16 if geometry == "2d" else 1,
        amax_scope="row" if geometry == "rowscaled" else "tensor",
    )


PLAIN = {"1d": NVFP4, "2d": NVFP4_2D, "rowscaled": ROW_SCALED}
MAX6 = {**PLAIN, "1d_rht": NVFP4_RHT, "1x64": WINDOW64}
FOUR_OVER_SIX = {k: four_over_six(k) for k in sorted(f.stem.removeprefix("q_") for f in DATA.glob("q_4o6_*.npz"))}
SPECS = {**MAX6, **FOUR_OVER_SIX}
OUT_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
COMMON = 128  # every golden matrix fits a square of this size

OTHER_ISAS = [f"native-cpu-{isa}" for isa in LESSER_ISAS]
native = one_of([*NATIVE_BACKENDS, *OTHER_ISAS])
only_reference = pytest.mark.parametrize("backend", ["reference-cpu", "reference-cuda"], indirect=True)


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def config(name: str) -> dict:
    return json.loads(str(load(name)["meta"]))["config"]


# ---------------------------------------------------------------- quantize
@dataclass(frozen=True)
class Golden:
    """One quantized matrix. ``x`` [M, K] is oriented like the result; ``transposed`` says that the file's is x^T."""

    name: str
    spec: QuantSpec
    x: np.ndarray
    transposed: bool
    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray
    rotated: np.ndarray | None = None  # what was encoded, if not x

    @property
    def padded(self) -> np.ndarray:
        rows, cols = (-(-n // 16) * 16 for n in self.x.shape)
        return pad_rows_and_columns(self.x, rows, cols)

    @property
    def codes(self) -> np.ndarray:
        """The golden codes, with 8 for the elements that are exactly -0.0 after scaling: the files have 0 there."""
        codes = unpack_codes(self.data)
        scale = self.scale[: self.x.shape[0]]
        amax = self.amax.reshape(()) if self.spec.format.amax_scope == "tensor" else self.amax
        enc = encode_scales(scale, amax, 2, self.spec.format.e4m3_max)
        encoded = self.x if self.rotated is None else self.rotated
        with np.errstate(all="ignore"):
            scaled = encoded.astype(np.float32) * np.repeat(enc, 16, axis=-1)[:, : self.x.shape[1]]
        minus_zero = bits(scaled) == 0x80000000
        assert not codes[minus_zero].any()
        return np.where(minus_zero, 8, codes).astype(np.uint8)

    def check(self, data, scale, amax) -> None:
        (rows, cols), (scale_rows, scale_cols) = self.x.shape, self.scale.shape
        want_scale = np.where(self.scale & 0x7F == 0x7F, 0x7F, self.scale)
        assert_bitwise(unpack_codes(data)[:rows, :cols], self.codes, f"{self.name} codes")
        assert_bitwise(bits(scale)[:scale_rows, :scale_cols], want_scale, f"{self.name} scale")
        self.check_amax(amax)

    def check_amax(self, amax) -> None:
        rows, cols = self.x.shape
        part = (slice(rows), slice(cols // 64)) if self.spec.format.amax_scope == "window64" else slice(len(self.amax))
        got = np.atleast_1d(np.asarray(amax))[part]
        assert_bitwise(got, canonical_nans(self.amax), f"{self.name} amax")


def inputs(name: str) -> dict[str, np.ndarray]:
    arrays, dtypes = load(name), config(name)["dtypes"]
    return {key: from_storage(arrays[key], dtypes[key]) for key in dtypes}


def quantized(arrays: dict, spec: QuantSpec, name: str, x: np.ndarray, xt: np.ndarray) -> list[Golden]:
    """The goldens of an input, in the orientations that the file has."""
    found = []
    for matrix, names in ((x, ("data", "scale", "amax_row")), (xt, ("data_t", "scale_t", "amax_col"))):
        if f"{name}__{names[0]}" in arrays:
            fields = (arrays[f"{name}__{field}"] for field in names)
            found.append(Golden(name + "^T" * (matrix is xt), spec, matrix, matrix is xt, *fields))
    return found


def rotations() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (x, the rotated transpose)"""
    arrays = load("q_1d_rht")
    names = [key.removesuffix("__x") for key in arrays if key.endswith("__x")]
    return {n: tuple(arrays[f"{n}__{f}"].view(ml_dtypes.bfloat16) for f in ("x", "xt_rht")) for n in names}


@functools.cache
def goldens(kind: str) -> list[Golden]:
    spec, found = SPECS[kind], []
    if kind in ("1d", "1d_rht"):
        for name, (x, xt_rht) in rotations().items():
            # Rotated matrices are goldens of the plain spec as well, quantized like any other.
            row, col = quantized(load("q_1d_rht"), spec, name, x, xt_rht)
            found += [row, col] if kind == "1d" else [dataclasses.replace(col, x=x.T, rotated=xt_rht)]
    if kind == "1d_rht":
        return found
    for prefix, source in (("q", "inputs"), ("nonfinite", "inputs_nonfinite")):
        if (DATA / f"{prefix}_{kind}.npz").exists():
            for name, x in inputs(source).items():
                x = x.reshape(-1, x.shape[-1])
                found += quantized(load(f"{prefix}_{kind}"), spec, name, x, x.T)
    return found


def test_no_golden_array_is_left_out():
    """Three arrays a golden, in every file of the data folder."""
    names = [path.stem for path in DATA.glob("*.npz") if path.stem.startswith(("q_", "nonfinite_"))]
    arrays = sum(len([key for key in load(name) if key != "meta"]) for name in names)
    rotated = 2 * len(rotations())  # __x and __xt_rht
    twice = 3 * len(goldens("1d_rht"))  # quantized by both specs
    assert len(FOUR_OVER_SIX) == 24
    assert arrays == 3 * sum(len(goldens(kind)) for kind in SPECS) + rotated - twice


@pytest.mark.parametrize("kind", MAX6)
def test_kernels_quantize_to_the_golden_bytes(native, kind):
    for golden in goldens(kind):
        x = golden.padded.T if golden.transposed else golden.padded
        t = jnvfp4.quantize(x, SPECS[kind], transpose=golden.transposed, implementation="native")
        golden.check(t.data, t.scale, t.amax)


def stacked(found: list[Golden]) -> tuple[np.ndarray, np.ndarray | None]:
    """All inputs zero-padded to one shape, and their amax if there is one each; padding changes no block."""
    x = np.stack([pad_rows_and_columns(g.x, COMMON, COMMON) for g in found])
    return x, np.concatenate([g.amax for g in found]) if found[0].spec.format.amax_scope == "tensor" else None


def check_each(found: list[Golden], *results) -> None:
    for golden, *parts in zip(found, *map(np.asarray, results), strict=True):
        golden.check(*parts)


@pytest.mark.parametrize("kind", FOUR_OVER_SIX)
def test_kernels_quantize_to_the_golden_bytes_of_4over6(native, kind):
    """Every golden of either file orientation, through both orientations of the kernel."""
    for dtype, transposed in zip(OUT_DTYPES.values(), (False, True, False), strict=True):
        found = [g for g in goldens(kind) if g.x.dtype == dtype]
        x, amax = stacked(found)
        x = np.swapaxes(x, -1, -2) if transposed else x
        t = jnvfp4.quantize(x, SPECS[kind], amax=amax, transpose=transposed, implementation="native")
        check_each(found, t.data, t.scale, t.amax)


# The types in turn: a type is only how an element becomes a float32.
OTHERS = [("1d", "bfloat16"), ("2d", "float32"), ("1x64", "float32")]
IN_TURN = [("1d_rht", "bfloat16"), ("rowscaled", "float16")]


@only_reference
@pytest.mark.parametrize(("kind", "dtype"), [*IN_TURN, *(pytest.param(*of, marks=pytest.mark.long) for of in OTHERS)])
def test_the_reference_quantizes_to_the_golden_bytes(backend, kind, dtype):
    """All inputs at once (one compilation)."""
    found = [g for g in goldens(kind) if g.x.dtype == OUT_DTYPES[dtype]]
    x, amax = stacked(found)
    t = jnvfp4.quantize(x, SPECS[kind], amax=amax, implementation="reference")
    check_each(found, t.data, t.scale, t.amax)


QUICK_4OVER6 = ("4o6_1d_256_mae_strict", "4o6_2d_448_mse_fast")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in QUICK_4OVER6)) for kind in FOUR_OVER_SIX]
)
def test_the_reference_quantizes_to_the_golden_bytes_of_4over6(kind):
    """All inputs in float32, where the dtypes are the same values."""
    found = goldens(kind)
    with np.errstate(invalid="ignore"):
        x, amax = stacked([dataclasses.replace(g, x=g.x.astype(np.float32)) for g in found])
    amax = np.stack([np.pad(g.amax, (0, COMMON - len(g.amax))) for g in found]) if amax is None else amax
    check_each(found, *quantize_by_reference(x, SPECS[kind], amax), amax)


@only_reference
def test_the_reference_rotates_to_the_golden_numbers(backend):
    """The rotated matrices themselves, and their amax."""
    found = goldens("1d_rht")
    x = jnp.asarray(stacked(found)[0])
    got = jax.jit(lambda x: reference.rht16(to_bits(x).reshape(*x.shape[:-1], -1, 16)).reshape(x.shape))(x)
    for golden, own in zip(found, np.asarray(got), strict=True):
        rows, cols = golden.x.shape
        assert_bitwise(own[:rows, :cols] >> 16, bits(golden.rotated).astype(np.uint32), golden.name)
    amax = jax.jit(lambda x: reference.find_rht_amax(x, 1))(x)
    assert_bitwise(amax, np.concatenate([g.amax for g in found]), "amax")


# ---------------------------------------------------------------- dequantize
@dataclass(frozen=True)
class Dequantized:
    name: str
    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray
    want: np.ndarray


DEQUANTIZE_FORMATS = {"1d": Format(), "rowscaled": Format(amax_scope="row"), "4o6_256": Format(e4m3_max=256)}


def dequantized(kind: str) -> list[Dequantized]:
    arrays = load("dequant")
    names = [name for name in config("dequant")["e4m3_max"] if name.endswith(f"__{kind}")]
    return [Dequantized(n, *(arrays[f"{n}__{f}"] for f in ("data", "scale", "amax", "dq_f32"))) for n in names]


def tensor(data, scale, amax, fmt: Format) -> NVFP4Tensor:
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(amax), fmt)


@pytest.mark.parametrize("kind", DEQUANTIZE_FORMATS)
def test_kernels_dequantize_to_the_golden_numbers(native, kind):
    for d in dequantized(kind):
        t = tensor(d.data, d.scale, d.amax if kind == "rowscaled" else d.amax.reshape(()), DEQUANTIZE_FORMATS[kind])
        for dtype in OUT_DTYPES.values():
            got = jnvfp4.dequantize(t, dtype, implementation="native")
            assert_bitwise(got, round_to(d.want, dtype), d.name)


@only_reference
@pytest.mark.parametrize(("kind", "dtype"), [*zip(DEQUANTIZE_FORMATS, OUT_DTYPES, strict=True)])
def test_the_reference_dequantizes_to_the_golden_numbers(backend, kind, dtype):
    found = dequantized(kind)
    data, scale = (
        np.stack([pad_rows_and_columns(a, COMMON, COMMON // n) for a in arrays])
        for arrays, n in (([d.data for d in found], 2), ([d.scale for d in found], 16))
    )
    if kind == "rowscaled":
        amax = np.stack([np.pad(d.amax, (0, COMMON - len(d.amax))) for d in found])
    else:
        amax = np.concatenate([d.amax for d in found])
    t = tensor(data, scale, amax, DEQUANTIZE_FORMATS[kind])
    got = np.asarray(jnvfp4.dequantize(t, OUT_DTYPES[dtype], implementation="reference"))
    for d, values in zip(found, got, strict=True):
        rows, cols = d.want.shape
        assert_bitwise(values[:rows, :cols], round_to(d.want, OUT_DTYPES[dtype]), d.name)


# ---------------------------------------------------------------- matmul
GEMM_CASES = config("gemm")["cases"]


def operand(case: str, side: str) -> NVFP4Tensor:
    arrays, settings = load("gemm"), GEMM_CASES[case]
    made = settings[f"{side}_config"]
    scope = "row" if made.get("row_scaled_nvfp4") else "tensor"
    fmt = Format(amax_scope=scope, e4m3_max=settings[f"max_{side}"], rht=made.get("with_rht", False))
    amax = arrays[f"{case}__amax_{side}"]
    amax = amax if scope == "row" else amax.reshape(())
    return tensor(arrays[f"{case}__{side}"], arrays[f"{case}__s{side}"], amax, fmt)


MATMULS = [  # the reference, which compiles for seconds, multiplies every fifth by default
    pytest.param(case, backend, marks=[pytest.mark.long] * bool(i % 5 and backend.startswith("reference")))
    for i, case in enumerate(GEMM_CASES)
    for backend in [*ALL_BACKENDS, *OTHER_ISAS]
]


@pytest.mark.parametrize(("case", "backend"), MATMULS, indirect=["backend"])
def test_products_are_the_golden_ones(backend, case):
    arrays, name, dtype = load("gemm"), GEMM_CASES[case]["out_dtype"], OUT_DTYPES[GEMM_CASES[case]["out_dtype"]]
    a, b, want = operand(case, "a"), operand(case, "b"), from_storage(arrays[f"{case}__out"], name)
    added = from_storage(arrays[f"{case}__acc"], name) if GEMM_CASES[case]["accumulate"] else None  # before the cast
    out_dtype = dtype if added is None else np.float32
    got = np.asarray(jnvfp4.matmul_nt(a, b, out_dtype=out_dtype, implementation=backend.implementation))
    if (backend.platform, backend.implementation) == ("cuda", "native"):
        assert_gemm_close(got, a, b)
    else:
        assert_bitwise(got if added is None else (got + added.astype(np.float32)).astype(dtype), want, case)
