"""Every golden array (data/README.md) of the supported formats, bit for bit, by every implementation."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import (
    assert_bitwise,
    assert_gemm_close,
    bits,
    canonical_nans,
    encode_scales,
    from_storage,
    pad_rows_and_columns,
    round_to,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, Format, NVFP4Tensor, reference

DATA = Path(__file__).parent / "data"
SPECS = {"1d": NVFP4, "2d": NVFP4_2D, "rowscaled": ROW_SCALED}
OUT_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
COMMON = 128  # every golden matrix fits a square of this size

only_reference = pytest.mark.parametrize("backend", ["reference-cpu", "reference-cuda"], indirect=True)
every_kind = pytest.mark.parametrize("kind", list(SPECS))


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
    x: np.ndarray
    transposed: bool
    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray

    @property
    def padded(self) -> np.ndarray:
        rows, cols = (-(-n // 16) * 16 for n in self.x.shape)
        return pad_rows_and_columns(self.x, rows, cols)

    @property
    def codes(self) -> np.ndarray:
        """The golden codes, with 8 for the elements that are exactly -0.0 after scaling: the files have 0 there."""
        codes = unpack_codes(self.data)
        scale = self.scale[: self.x.shape[0]]
        amax = self.amax.reshape(()) if self.amax.size == 1 else self.amax
        enc = np.repeat(encode_scales(scale, amax, 2), 16, axis=-1)[:, : self.x.shape[1]]
        with np.errstate(all="ignore"):
            minus_zero = bits(self.x.astype(np.float32) * enc) == 0x80000000
        assert not codes[minus_zero].any()
        return np.where(minus_zero, 8, codes).astype(np.uint8)

    def check(self, data, scale, amax) -> None:
        (rows, cols), (scale_rows, scale_cols) = self.x.shape, self.scale.shape
        want_scale = np.where(self.scale & 0x7F == 0x7F, 0x7F, self.scale)
        assert_bitwise(unpack_codes(data)[:rows, :cols], self.codes, f"{self.name} codes")
        assert_bitwise(bits(scale)[:scale_rows, :scale_cols], want_scale, f"{self.name} scale")
        got_amax = np.asarray(amax).reshape(-1)[: self.amax.size]
        assert_bitwise(got_amax, canonical_nans(self.amax), f"{self.name} amax")


def inputs(name: str) -> dict[str, np.ndarray]:
    arrays, dtypes = load(name), config(name)["dtypes"]
    return {key: from_storage(arrays[key], dtypes[key]) for key in dtypes}


def quantized(arrays: dict, name: str, x: np.ndarray, xt: np.ndarray) -> list[Golden]:
    def fields(*names):
        return (arrays[f"{name}__{field}"] for field in names)

    return [
        Golden(name, x, False, *fields("data", "scale", "amax_row")),
        Golden(f"{name}^T", xt, True, *fields("data_t", "scale_t", "amax_col")),
    ]


def rotated() -> list[Golden]:
    """Matrices after the random Hadamard transform: quantized like any other."""
    arrays = load("q_1d_rht")
    names = [key.removesuffix("__x") for key in arrays if key.endswith("__x")]
    pairs = [(n, *(arrays[f"{n}__{f}"].view(ml_dtypes.bfloat16) for f in ("x", "xt_rht"))) for n in names]
    return [golden for n, x, xt in pairs for golden in quantized(arrays, f"{n}", x, xt)]


@functools.cache
def goldens(kind: str) -> list[Golden]:
    found = rotated() if kind == "1d" else []
    for prefix, source in (("q", "inputs"), ("nonfinite", "inputs_nonfinite")):
        for name, x in inputs(source).items():
            x = x.reshape(-1, x.shape[-1])
            found += quantized(load(f"{prefix}_{kind}"), name, x, x.T)
    return found


def test_no_golden_array_is_left_out():
    assert {kind: len(goldens(kind)) for kind in SPECS} == {"1d": 98, "2d": 74, "rowscaled": 74}


def test_minus_zero_rule_is_used():
    """The rule that golden code 0 stands for 8 applies to -0.0 inputs and to underflow, and to few others."""
    replaced = {g.name: np.sum(g.codes != unpack_codes(g.data)) for g in goldens("1d")}
    assert replaced["negzero_bf16"] > 0
    assert replaced["normal_bf16"] == 0


@every_kind
@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
def test_native_quantize(native, kind, given):
    for golden in goldens(kind):
        x = golden.padded.T if golden.transposed else golden.padded
        amax = None
        if given:
            amax = (
                golden.amax.reshape(())
                if kind != "rowscaled"
                else np.pad(golden.amax, (0, len(golden.padded) - len(golden.amax)))
            )
        t = jnvfp4.quantize(x, SPECS[kind], amax=amax, transpose=golden.transposed, implementation="native")
        if given:
            assert_bitwise(t.amax, amax, golden.name)
        golden.check(t.data, t.scale, t.amax)


@only_reference
@every_kind
@pytest.mark.parametrize("dtype", list(OUT_DTYPES))
def test_reference_quantize(backend, kind, dtype):
    """All inputs of a dtype at once, zero-padded to one shape (one compilation); padding changes no block."""
    found = [g for g in goldens(kind) if g.x.dtype == OUT_DTYPES[dtype]]
    x = np.stack([pad_rows_and_columns(g.x, COMMON, COMMON) for g in found])
    amax = None if kind == "rowscaled" else np.concatenate([g.amax for g in found])
    t = jnvfp4.quantize(x, SPECS[kind], amax=amax, implementation="reference")
    for golden, data, scale, own in zip(found, *map(np.asarray, (t.data, t.scale, t.amax)), strict=True):
        golden.check(data, scale, own)


@only_reference
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_reference_amax(backend, scope):
    for golden in goldens("1d" if scope == "tensor" else "rowscaled"):
        got = np.asarray(reference.find_amax(jnp.asarray(golden.x), scope)).reshape(-1)
        assert_bitwise(got, canonical_nans(golden.amax), golden.name)


@only_reference
@every_kind
def test_reference_quantize_eagerly(backend, kind):
    """Outside jit every operation is its own XLA program; the bits are the same."""
    names = ("max_fp32", "subnormal_fp32", "tiny_amax_fp32", "ties_e4m3_fp32", "inf_fp32")
    for golden in goldens(kind):
        if golden.name in names:
            golden.check(*reference.quantize(jnp.asarray(golden.x), SPECS[kind]))


@every_kind
def test_leading_axes_are_rows(native, kind):
    x = inputs("inputs")["normal_bf16_3d"]
    golden = next(g for g in goldens(kind) if g.name == "normal_bf16_3d")
    t = jnvfp4.quantize(x, SPECS[kind], implementation="native")
    golden.check(t.data.reshape(golden.data.shape), t.scale.reshape(golden.scale.shape), t.amax)


# ---------------------------------------------------------------- dequantize
@dataclass(frozen=True)
class Dequantized:
    name: str
    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray
    want: np.ndarray

    @property
    def kind(self) -> str:
        return self.name.split("__")[1]


DEQUANTIZE_FORMATS = {"1d": Format(), "rowscaled": Format(amax_scope="row"), "4o6_256": Format(e4m3_max=256)}
every_format = pytest.mark.parametrize("kind", list(DEQUANTIZE_FORMATS))
every_out_dtype = pytest.mark.parametrize("dtype", list(OUT_DTYPES))


def dequantized(kind: str) -> list[Dequantized]:
    arrays = load("dequant")
    names = [name for name in config("dequant")["e4m3_max"] if name.endswith(f"__{kind}")]
    return [Dequantized(n, *(arrays[f"{n}__{f}"] for f in ("data", "scale", "amax", "dq_f32"))) for n in names]


def test_formats_are_those_of_the_file():
    """``e4m3_max`` of each kind of case, and no case left out."""
    found = {d.name: DEQUANTIZE_FORMATS[kind].e4m3_max for kind in DEQUANTIZE_FORMATS for d in dequantized(kind)}
    assert found == config("dequant")["e4m3_max"]


def tensor(data, scale, amax, fmt: Format) -> NVFP4Tensor:
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(amax), fmt)


@every_format
@every_out_dtype
def test_native_dequantize(native, kind, dtype):
    for d in dequantized(kind):
        amax = d.amax if kind == "rowscaled" else d.amax.reshape(())
        t = tensor(d.data, d.scale, amax, DEQUANTIZE_FORMATS[kind])
        got = jnvfp4.dequantize(t, OUT_DTYPES[dtype], implementation="native")
        assert_bitwise(got, round_to(d.want, OUT_DTYPES[dtype]), d.name)


@only_reference
@every_format
@every_out_dtype
def test_reference_dequantize(backend, kind, dtype):
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
GEMM_CASES = {n: c for n, c in config("gemm")["cases"].items() if not c["accumulate"]}


def operand(case: str, side: str) -> NVFP4Tensor:
    arrays, settings = load("gemm"), GEMM_CASES[case]
    made = settings[f"{side}_config"]
    scope = "row" if made.get("row_scaled_nvfp4") else "tensor"
    fmt = Format(amax_scope=scope, e4m3_max=settings[f"max_{side}"], rht=made.get("with_rht", False))
    amax = arrays[f"{case}__amax_{side}"]
    return tensor(
        arrays[f"{case}__{side}"],
        arrays[f"{case}__s{side}"],
        amax if scope == "row" else amax.reshape(()),
        fmt,
    )


def test_gemm_cases_cover_a_vector_amax_on_either_side():
    scopes = {(operand(c, "a").format.amax_scope, operand(c, "b").format.amax_scope) for c in GEMM_CASES}
    assert len(GEMM_CASES) == 17
    assert scopes == {("tensor", "tensor"), ("row", "tensor"), ("tensor", "row")}


@pytest.mark.parametrize("case", list(GEMM_CASES))
def test_matmul(backend, case):
    a, b, dtype = operand(case, "a"), operand(case, "b"), GEMM_CASES[case]["out_dtype"]
    want = from_storage(load("gemm")[f"{case}__out"], dtype)
    got = jnvfp4.matmul_nt(a, b, out_dtype=OUT_DTYPES[dtype], implementation=backend.implementation)
    if (backend.platform, backend.implementation) == ("cuda", "native"):
        assert_gemm_close(got, a, b)
    else:
        assert_bitwise(got, want, case)


@pytest.mark.parametrize("case", list(GEMM_CASES))
def test_golden_products_are_within_the_bound(case):
    """The bound that tensor cores are held to admits the golden results, so it is not about another product."""
    with jax.default_device(jax.devices("cpu")[0]):
        want = from_storage(load("gemm")[f"{case}__out"], GEMM_CASES[case]["out_dtype"])
        assert_gemm_close(want, operand(case, "a"), operand(case, "b"))
