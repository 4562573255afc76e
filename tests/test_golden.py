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
from helpers import (
    assert_bitwise,
    assert_gemm_close,
    bits,
    canonical_nans,
    encode_scales,
    from_storage,
    pad_rows_and_columns,
    quantize_by_reference,
    random_bytes,
    round_to,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, ROW_SCALED, WINDOW64, Format, NVFP4Tensor, QuantSpec, reference
from jnvfp4 import four_over_six as four_over_six_spec
from jnvfp4._core.softfloat import to_bits

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

only_reference = pytest.mark.parametrize("backend", ["reference-cpu", "reference-cuda"], indirect=True)
every_plain_kind = pytest.mark.parametrize("kind", list(PLAIN))
every_max6_kind = pytest.mark.parametrize("kind", list(MAX6))
every_4over6_kind = pytest.mark.parametrize("kind", list(FOUR_OVER_SIX))


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


def test_minus_zero_rule_is_used():
    """The rule that golden code 0 stands for 8 applies to -0.0 inputs and to underflow, and to few others."""
    replaced = {g.name: np.sum(g.codes != unpack_codes(g.data)) for g in goldens("1d")}
    assert replaced["negzero_bf16"] > 0
    assert replaced["normal_bf16"] == 0


@every_max6_kind
@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
def test_native_quantize(native, kind, given):
    for golden in goldens(kind):
        x = golden.padded.T if golden.transposed else golden.padded
        amax = None
        if given and golden.spec.format.amax_scope == "tensor":
            amax = golden.amax.reshape(())
        elif given:
            extra = len(golden.padded) - len(golden.amax)
            amax = np.pad(golden.amax, [(0, extra)] + [(0, 0)] * (golden.amax.ndim - 1))
        t = jnvfp4.quantize(x, SPECS[kind], amax=amax, transpose=golden.transposed, implementation="native")
        if given:
            assert_bitwise(t.amax, amax, golden.name)
        golden.check(t.data, t.scale, t.amax)


def stacked(found: list[Golden]) -> tuple[np.ndarray, np.ndarray | None]:
    """All inputs zero-padded to one shape, and their amax if there is one each; padding changes no block."""
    x = np.stack([pad_rows_and_columns(g.x, COMMON, COMMON) for g in found])
    return x, np.concatenate([g.amax for g in found]) if found[0].spec.format.amax_scope == "tensor" else None


def check_each(found: list[Golden], *results) -> None:
    for golden, *parts in zip(found, *map(np.asarray, results), strict=True):
        golden.check(*parts)


@every_4over6_kind
@pytest.mark.parametrize("dtype", list(OUT_DTYPES))
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_native_quantize_4over6(native, kind, dtype, transposed):
    """Every golden of either file orientation, through both orientations of the kernel."""
    found = [g for g in goldens(kind) if g.x.dtype == OUT_DTYPES[dtype]]
    x, amax = stacked(found)
    x = np.swapaxes(x, -1, -2) if transposed else x
    t = jnvfp4.quantize(x, SPECS[kind], amax=amax, transpose=transposed, implementation="native")
    check_each(found, t.data, t.scale, t.amax)


def check_by_reference(kind: str, found: list[Golden]) -> None:
    """All inputs at once (one compilation)."""
    x, amax = stacked(found)
    t = jnvfp4.quantize(x, SPECS[kind], amax=amax, implementation="reference")
    check_each(found, t.data, t.scale, t.amax)


@only_reference
@pytest.mark.parametrize("kind", [*PLAIN, "1x64"])
@pytest.mark.parametrize("dtype", list(OUT_DTYPES))
def test_reference_quantize(backend, kind, dtype):
    check_by_reference(kind, [g for g in goldens(kind) if g.x.dtype == OUT_DTYPES[dtype]])


@only_reference
def test_reference_quantize_rotated(backend):
    found = goldens("1d_rht")
    assert {g.x.dtype.name for g in found} == {"bfloat16"}
    check_by_reference("1d_rht", found)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if "_448_" in kind else []) for kind in FOUR_OVER_SIX]
)
def test_reference_quantize_4over6(kind):
    """All inputs in float32, where the dtypes are the same values."""
    found = goldens(kind)
    with np.errstate(invalid="ignore"):
        x, amax = stacked([dataclasses.replace(g, x=g.x.astype(np.float32)) for g in found])
    amax = np.stack([np.pad(g.amax, (0, COMMON - len(g.amax))) for g in found]) if amax is None else amax
    check_each(found, *quantize_by_reference(x, SPECS[kind], amax), amax)


@only_reference
@pytest.mark.parametrize("kind", [*PLAIN, "1x64"])
@pytest.mark.parametrize("dtype", list(OUT_DTYPES))
def test_reference_amax(backend, kind, dtype):
    found = [g for g in goldens(kind) if g.x.dtype == OUT_DTYPES[dtype]]
    x, scope = jnp.asarray(stacked(found)[0]), SPECS[kind].format.amax_scope
    for golden, amax in zip(found, np.asarray(jax.vmap(lambda x: reference.find_amax(x, scope))(x)), strict=True):
        golden.check_amax(amax)


@only_reference
def test_reference_rotation(backend):
    """The rotated matrices themselves, and their amax."""
    found = goldens("1d_rht")
    x = jnp.asarray(stacked(found)[0])
    got = jax.jit(lambda x: reference.rht16(to_bits(x).reshape(*x.shape[:-1], -1, 16)).reshape(x.shape))(x)
    for golden, own in zip(found, np.asarray(got), strict=True):
        rows, cols = golden.x.shape
        assert_bitwise(own[:rows, :cols] >> 16, bits(golden.rotated).astype(np.uint32), golden.name)
    amax = jax.jit(lambda x: reference.find_rht_amax(x, 1))(x)
    assert_bitwise(amax, np.concatenate([g.amax for g in found]), "amax")


def test_stochastic_rounding_of_every_value(native):
    """Codes of the software rule, through ``quantize``: blocks of amax 6 and encode scale 1, random bytes by NumPy.

    Values above 6, which would change the block's scale, are in test_numerics.py.
    """
    file = load("sr_software")
    values = file["value"][np.abs(file["value"]) <= 6]
    which = np.arange(len(values) + -len(values) % 15).reshape(-1, 15) % len(values)
    which = np.pad(which, ((0, 0), (1, 0)), constant_values=np.flatnonzero(values == 6)[0]).reshape(-1)
    which = np.broadcast_to(which, (2048, len(which)))
    key = jax.random.key(0)
    t = jnvfp4.quantize(values[which], NVFP4_SR, amax=2688.0, key=key, implementation="native")
    assert (np.asarray(t.scale).astype(np.float32) == 1).all()
    r = random_bytes(key, which.shape)
    assert len(np.unique(which * 256 + r)) > 0.99 * len(values) * 256
    code = file["code"][np.abs(file["value"]) <= 6]
    want = np.where(bits(values)[which] == 0x80000000, 8, code[which, r]).astype(np.uint8)
    assert_bitwise(unpack_codes(t.data), want, "codes")


@only_reference
@pytest.mark.parametrize(
    "kind", [next(iter(PLAIN)), *(pytest.param(k, marks=pytest.mark.long) for k in list(PLAIN)[1:])]
)
def test_reference_quantize_eagerly(backend, kind):
    """Outside jit every operation is its own XLA program; the bits are the same."""
    names = ("max_fp32", "subnormal_fp32", "tiny_amax_fp32", "ties_e4m3_fp32", "inf_fp32")
    found = [golden for golden in goldens(kind) if golden.name in names]
    assert len(found) == len(names)
    for golden in found:
        golden.check(*reference.quantize(jnp.asarray(golden.x), SPECS[kind]))


@pytest.mark.parametrize("kind", [*PLAIN, *FOUR_OVER_SIX])
def test_leading_axes_are_rows(native, kind):
    x = inputs("inputs")["normal_bf16_3d"]
    golden = next(g for g in goldens(kind) if g.name == "normal_bf16_3d")
    t = jnvfp4.quantize(x, SPECS[kind], implementation="native")
    golden.check(t.data.reshape(golden.data.shape), t.scale.reshape(golden.scale.shape), t.amax.reshape(-1))


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
GEMM_CASES = config("gemm")["cases"]


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
    assert len(GEMM_CASES) == 20
    assert scopes == {("tensor", "tensor"), ("row", "tensor"), ("tensor", "row")}


def golden_product(case: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The result, and what was added to the float32 product before the cast."""
    arrays, dtype = load("gemm"), GEMM_CASES[case]["out_dtype"]
    added = from_storage(arrays[f"{case}__acc"], dtype) if GEMM_CASES[case]["accumulate"] else None
    return from_storage(arrays[f"{case}__out"], dtype), added


@pytest.mark.parametrize("case", list(GEMM_CASES))
def test_matmul(backend, case):
    a, b, dtype = operand(case, "a"), operand(case, "b"), OUT_DTYPES[GEMM_CASES[case]["out_dtype"]]
    want, added = golden_product(case)
    out_dtype = dtype if added is None else np.float32
    got = np.asarray(jnvfp4.matmul_nt(a, b, out_dtype=out_dtype, implementation=backend.implementation))
    if (backend.platform, backend.implementation) == ("cuda", "native"):
        assert_gemm_close(got, a, b)
    else:
        assert_bitwise(got if added is None else (got + added.astype(np.float32)).astype(dtype), want, case)


@pytest.mark.parametrize("case", [case for case, settings in GEMM_CASES.items() if not settings["accumulate"]])
def test_golden_products_are_within_the_bound(case):
    """The bound that tensor cores are held to admits the golden results, so it is not about another product."""
    with jax.default_device(jax.devices("cpu")[0]):
        assert_gemm_close(golden_product(case)[0], operand(case, "a"), operand(case, "b"))
