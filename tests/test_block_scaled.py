"""Products on Blackwell, which no test has: the scale layout, and cuBLASLt's block-scaled product with a stand-in.

The stand-in (cpp/cublaslt_stand_in.cc) computes from the pointers and attributes that it is given, so a product has the
bits of the reference where every order of summation gives the same.
"""

import itertools
import json
import pathlib
import re
import shutil
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import stand_in
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_gemm_close, bits, random_tensor
from products import (
    DTYPES,
    ROW,
    TENSOR,
    dense,
    every_out_dtype,
    order_free,
    order_free_operands,
    over,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor, QuantSpec, recipes
from jnvfp4._native import load, plans
from jnvfp4._primitives import _base, _matmul_routes

KERNEL = "sm100_cublaslt_nvfp4"
B200, B300, THOR, RTX, SPARK = 100, 103, 110, 120, 121
NARROW = Format(e4m3_max=256)
PATHS = [
    (5, 7, 16),
    (1, 16, 32),
    (70, 131, 48),
    (129, 144, 64),
    (130, 16, 80),
    (3, 272, 320),
    (65, 33, 1040),
    (66, 35, 64),
]
every_path = over("shape", PATHS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if not stand_in.compiler():
        pytest.skip("no g++")
    return stand_in.build(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture(scope="module")
def process(built):
    made = stand_in.Process(*built)
    yield made
    made.close()


_devices = itertools.count()


@pytest.fixture
def library(process):
    """The stand-in, on a device that no test has used; at the end it has refused nothing, and nothing is left of it."""
    process("reset", next(_devices))
    with jax.default_device(jax.devices("cpu")[0]):
        yield process
    assert process("alive") == 0


# ---------------------------------------------------------------- the layout of scales
@pytest.mark.long
def test_every_scale_has_a_byte_of_its_own(process):
    assert process("without_bijection", 300, 40) == 0


with np.load(pathlib.Path(__file__).parent / "data" / "swizzle.npz") as file:
    GOLDEN = {name: file[name] for name in file if name != "meta"}
    assert json.loads(str(file["meta"]))["config"]["pad_fill"] == 0


@pytest.mark.parametrize("case", sorted({name.split("__")[0] for name in GOLDEN}))
def test_golden_tiles(process, case):
    assert_bitwise(process("tiles", GOLDEN[f"{case}__linear"][None])[0], GOLDEN[f"{case}__swizzled"].reshape(-1))


def tiles(scale: np.ndarray) -> np.ndarray:
    """Tiles by reshaping: 4 groups of 32 rows become columns."""
    matrices, rows, cols = scale.shape
    padded = np.pad(scale, ((0, 0), (0, -rows % 128), (0, -cols % 4)))
    parts = padded.reshape(matrices, -1, 4, 32, padded.shape[2] // 4, 4)
    return parts.transpose(0, 1, 4, 3, 2, 5).reshape(matrices, -1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (2, 128, 4), (2, 129, 3), (1, 300, 40), (1, 31, 33)], ids=str)
def test_tiles_and_their_padding(process, shape):
    scale = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    assert_bitwise(process("tiles", scale), tiles(scale))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (2, 7, 3), (1, 16, 4)], ids=str)
@pytest.mark.parametrize("more", [(0, 0), (0, 1), (9, 0), (9, 1)], ids=str)
def test_padded_codes(process, shape, more):
    data = np.random.default_rng(0).integers(1, 2**63, shape, np.uint64)
    rows, pieces = shape[1] + more[0], shape[2] + more[1]
    assert np.array_equal(process("padded", data, rows, pieces), np.pad(data, ((0, 0), (0, more[0]), (0, more[1]))))


# ---------------------------------------------------------------- products
def operand(t) -> dict:
    amax = np.asarray(t.amax)
    rows = t.data.size // t.data.shape[-1]
    parts = {"data": np.asarray(t.data), "scale": bits(t.scale), "amax": amax.reshape(-1)}
    return {**parts, "rows_per_amax": rows // amax.size, "e4m3_max": t.format.e4m3_max}


def run(library, a, b, bias=None, out=np.float32, capability=B200, kernel="") -> tuple:
    """The result of a product as ``matmul_nt`` would lower it, the kernel that ran and the error."""
    *lead, cols, half = b.data.shape
    out = np.dtype(out)
    rows = a.data.shape[:-1]
    batch = int(np.prod(lead))
    shape = (batch, int(np.prod(rows)) // batch, cols, 2 * half)
    bias = None if bias is None else (bias.dtype.name, bits(bias))
    result, ran, error = library("multiply", operand(a), operand(b), bias, out.name, shape, capability, kernel)
    return result.view(out).reshape(*rows, cols), ran, error


def check(library, a, b, bias=None, out=np.float32, **options) -> None:
    want = jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out)
    got, ran, error = run(library, a, b, bias, out, **{"kernel": KERNEL, **options})
    assert (ran, error, library("complaint")) == (KERNEL, "", "")
    assert_bitwise(got, want)


@every_out_dtype
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES.values()], ids=["none", *DTYPES])
@every_path
def test_results_and_biases(library, out, bias_dtype, shape):
    """N of 16 and its multiples are written by the library, other N by the epilogue; K is padded to 32."""
    a, b = order_free_operands(None, shape)
    assert order_free(a, b)
    check(library, a, b, None if bias_dtype is None else dense(shape[1:2], bias_dtype), out)


def of_recipes() -> dict[str, tuple[Format, Format]]:
    """The formats of both operands of every product of the recipes."""
    made = {
        "default": recipes.DEFAULT,
        "pretrain": recipes.pretrain(),
        "row_scaled": recipes.row_scaled(),
        "four_over_six": recipes.four_over_six(),
        "pretrain_4over6": recipes.pretrain_4over6(),
        "rl": recipes.rl(),
        "rl_4over6": recipes.rl(four_over_six=True),
        "inference": recipes.inference(),
    }
    pairs = {}
    for name, recipe in made.items():
        for field in ("fprop", "dgrad", "wgrad"):
            specs = getattr(recipe, field)
            if isinstance(specs, tuple) and all(isinstance(spec, QuantSpec) for spec in specs):
                pairs[f"{name} {field}"] = tuple(spec.format for spec in specs)
    return pairs


RECIPES = of_recipes()


@every_out_dtype
@pytest.mark.parametrize("formats", RECIPES.values(), ids=RECIPES)
@over("shape", [(33, 48, 96), (33, 47, 80)])
def test_recipes(library, out, formats, shape):
    a, b = order_free_operands(None, shape, a_format=formats[0], b_format=formats[1])
    check(library, a, b, None, out)


def test_recipes_have_every_kind_of_operand():
    found = {fmt for pair in RECIPES.values() for fmt in pair}
    assert {(f.amax_scope, f.e4m3_max) for f in found} == set(itertools.product(("tensor", "row"), (448, 256)))
    assert any(fmt.rht for fmt in found)


@every_out_dtype
@pytest.mark.parametrize("a_format", [TENSOR, ROW, NARROW], ids=["tensor", "row", "256"])
@pytest.mark.parametrize("b_format", [TENSOR, ROW, NARROW, Format("row", 256)], ids=["tensor", "row", "256", "row256"])
@over("shape", [(5, 7, 48), (66, 32, 64)])
def test_formats(library, out, a_format, b_format, shape):
    a, b = order_free_operands(None, shape, a_format=a_format, b_format=b_format)
    check(library, a, b, dense(shape[1:2], out), out)


@every_out_dtype
@pytest.mark.parametrize("scope", ["tensor", "per matrix", "row"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@over("shape", [(5, 7, 48), (130, 16, 64), (129, 130, 80)])
def test_leading_axes(library, out, scope, shared, shape):
    m, n, _ = shape
    lead, b_lead = (2, 3), () if shared else (2, 3)
    rng = np.random.default_rng(5)
    fmt = ROW if scope == "row" else TENSOR
    of = {"tensor": lambda *_: (), "per matrix": lambda axes, _: axes, "row": lambda axes, rows: (*axes, rows)}[scope]
    amax = {"a_amax": rng.uniform(0.5, 2, of(lead, m)), "b_amax": rng.uniform(0.5, 2, of(b_lead, n))}
    a, b = order_free_operands(None, shape, a_format=fmt, b_format=fmt, lead=lead, b_lead=b_lead, **amax)
    check(library, a, b, dense((n,), out), out)


@pytest.mark.parametrize("count", [64, 65])
def test_many_matrices(library, count):
    """The library is called for each, so more than 64 are decoded."""
    a, b = order_free_operands(None, (66, 32, 32), a_format=ROW, lead=(count,), b_lead=(count,))
    if count == 64:
        check(library, a, b)
    reason = run(library, a, b, kernel=KERNEL)[2]
    assert reason == ("" if count == 64 else f"{KERNEL} cannot: it takes at most 64 matrices")


@every_out_dtype
def test_every_code_and_scale(library, out):
    a = random_tensor(0, (140, 128), scales=range(0x7F), amax=6 * 448.0)
    ones = np.eye(128, dtype=np.uint8) * 2
    scale = jnp.asarray(np.ones((128, 8), ml_dtypes.float8_e4m3fn))
    b = NVFP4Tensor(jnp.asarray(ones[:, ::2] | ones[:, 1::2] << 4), scale, jnp.float32(6 * 448), TENSOR)
    check(library, a, b, None, out)
    check(library, b, a, None, out)


@every_out_dtype
@every_path
def test_ordinary_data_is_close(library, out, shape):
    m, n, k = shape
    a, b = random_tensor(0, (m, k)), random_tensor(1, (n, k), ROW)
    got, _, error = run(library, a, b, out=out, kernel=KERNEL)
    assert not error
    assert_gemm_close(got, a, b)


@every_out_dtype
@over("shape", [(5, 7, 48), (66, 32, 64)])
def test_nan_scales_reach_their_row_and_column(library, out, shape):
    a, b = order_free_operands(None, shape)
    check(library, with_nan_scale(a, -1), with_nan_scale(b, 4), None, out)


@every_out_dtype
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
@over("shape", [(5, 7, 48), (66, 32, 64)])
def test_amax_that_is_no_ordinary_number(library, out, amax, shape):
    check(library, *order_free_operands(None, shape, a_amax=amax, b_amax=amax), None, out)


# ---------------------------------------------------------------- the whole way
@pytest.fixture
def calls(library, monkeypatch):
    """The kernels of products that are lowered for a B200; the stand-in computes them."""
    found = []

    def call_kernel(product, chosen):
        found.append(chosen.kernel)
        if chosen.kernel != KERNEL:
            return _matmul_routes.by_reference(product)

        def multiply(a, b, *bias):
            a = NVFP4Tensor(*a, product.params.a)
            b = NVFP4Tensor(*b, product.params.b)
            a, b = jax.tree.map(np.asarray, (a, b))
            got, ran, error = run(library, a, b, *bias, out=product.params.out_dtype, kernel=KERNEL)
            assert (ran, error) == (KERNEL, "")
            return got

        bias = () if product.bias is None else (product.bias,)
        return jax.pure_callback(multiply, product.result, product.a, product.b, *bias)

    right = _base._backend
    monkeypatch.setattr(_base, "_backend", lambda *args: right(*args)._replace(capability=B200))
    monkeypatch.setattr(_matmul_routes, "_call_kernel", call_kernel)
    monkeypatch.setattr(
        _matmul_routes, "_decode_then_dot", lambda p: call_kernel(p, plans.MatmulPlan("decode_then_dot", 0, ""))
    )
    monkeypatch.setattr(plans, "has_run_on", lambda capability: True)
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("/lib/libcublasLt.so.13", "13.2.0", ""))
    return found


def lowered_for_b200(f):
    """A function that no other test has compiled, nor lowered."""
    jax.clear_caches()
    return jax.jit(lambda *args: f(*args))


@pytest.mark.parametrize(
    ("rows", "options", "kernel"),
    [
        (70, {}, KERNEL),
        (5, {}, "sm80_nvfp4_blocks_small_m"),
        (70, {"accumulation": "pinned"}, "sm80_nvfp4_blocks"),
        (70, {"implementation": "decode_then_dot"}, "decode_then_dot"),
    ],
    ids=["many rows", "few rows", "pinned", "decode"],
)
def test_the_kernel_of_a_lowered_product(calls, rows, options, kernel):
    a, b = order_free_operands(None, (rows, 131, 48))
    y = lowered_for_b200(lambda a, b: jnvfp4.matmul_nt(a, b, **options))(a, b)
    assert calls == [kernel]
    assert_bitwise(y, jnvfp4.matmul_nt(a, b, implementation="reference"))


def test_without_the_library_a_product_is_decoded(calls, monkeypatch):
    if not load.available("cuda"):
        monkeypatch.setattr(load, "available", lambda platform: True)
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("", "", "there is none"))
    a, b = order_free_operands(None, (70, 131, 48))
    y = lowered_for_b200(jnvfp4.matmul_nt)(a, b)
    assert calls == ["decode_then_dot"]
    assert_bitwise(y, jnvfp4.matmul_nt(a, b, implementation="reference"))


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0), (None, 0)], ids=["a", "both", "b"])
def test_vmap_of_a_lowered_product(calls, in_axes):
    lead, b_lead = ((3,) if axis == 0 else () for axis in in_axes)
    a, b = order_free_operands(None, (70, 131, 48), lead=lead, b_lead=b_lead, a_format=ROW, b_format=ROW)
    y = lowered_for_b200(jax.vmap(jnvfp4.matmul_nt, in_axes))(a, b)
    assert calls == [KERNEL]
    reference = partial(jnvfp4.matmul_nt, implementation="reference")
    assert_bitwise(y, jax.vmap(reference, in_axes)(a, b))


# ---------------------------------------------------------------- versions
def versions(capability: int) -> dict[int, bool]:
    fits = {120700: False, 120800: True, 120904: True, 130101: True, 130200: True, 131000: True}
    return fits if capability >= RTX else {version: version >= 130200 for version in fits}


@pytest.mark.parametrize("capability", [B200, B300, THOR, RTX, SPARK])
def test_versions(library, capability):
    a, b = order_free_operands(None, (70, 32, 64))
    for version, fits in versions(capability).items():
        library("use_version", version)
        got, ran, error = run(library, a, b, capability=capability)
        if fits:
            assert (ran, error) == (KERNEL, "")
            assert_bitwise(got, jnvfp4.matmul_nt(a, b, out_dtype=np.float32))
        else:
            assert ran == "decode_then_dot"
            least = "12.8" if capability >= RTX else "13.2"
            text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
            gpu = f"compute capability {capability // 10}.{capability % 10}"
            want = f"needs cuBLASLt {least} or newer on {gpu}, got {text}"
            assert run(library, a, b, capability=capability, kernel=KERNEL)[2] == f"{KERNEL} {want}"


@pytest.mark.parametrize("capability", [80, 90, 99, 122, 130])
def test_other_gpus(library, capability):
    a, b = order_free_operands(None, (70, 32, 64))
    reason = run(library, a, b, capability=capability, kernel=KERNEL)[2]
    text = f"{capability // 10}.{capability % 10}"
    assert reason == (f"{KERNEL} runs on GPUs of compute capability 10.0 to 12.1, not on compute capability {text}")


# ---------------------------------------------------------------- failures of the library
STATUS = {3: 2, 13: 719, 15: 801, 1: 999}  # of cuBLASLt -> of CUDA
FUNCTIONS = (
    *("Create", "MatmulDescCreate", "MatmulDescSetAttribute", "MatrixLayoutCreate", "MatmulPreferenceCreate"),
    *("MatmulPreferenceSetAttribute", "MatmulAlgoGetHeuristic", "Matmul"),
)


@pytest.mark.parametrize("format", [TENSOR, ROW], ids=["finished", "sums"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("status", STATUS)
def test_a_status_is_passed_on(library, format, function, status):
    a, b = order_free_operands(None, (5, 16, 64), a_format=format)
    library("fail", function, status)
    assert run(library, a, b, kernel=KERNEL)[2] == f"status {STATUS[status]}"


def test_a_handle_that_could_not_be_made_is_made_later(library):
    a, b = order_free_operands(None, (70, 16, 64))
    library("reset", device := next(_devices))
    library("fail", "Create", 3)
    assert run(library, a, b)[2] == "status 2"
    library("reset", device)
    check(library, a, b)


@pytest.mark.parametrize(("what", "status"), [("found", 801), ("state", 801)])
def test_no_algorithm(library, what, status):
    library("fail", what, 15)
    assert run(library, *order_free_operands(None, (5, 16, 64)), kernel=KERNEL)[2] == f"status {status}"


def test_a_launch_that_fails(library):
    library("fail", "launch", 0)
    assert run(library, *order_free_operands(None, (5, 16, 64)), kernel=KERNEL)[2] == "status 719"


@pytest.mark.parametrize("refusal", [7, 15])
@pytest.mark.parametrize("out", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_a_type_that_the_library_refuses_is_made_of_float32_sums(library, out, refusal):
    number = {"float16": 2, "bfloat16": 14}[np.dtype(out).name]
    library("fail", f"MatmulAlgoGetHeuristic of {number}", refusal)
    check(library, *order_free_operands(None, (70, 32, 64)), dense((32,), out), out)


# ---------------------------------------------------------------- compilers and GPUs
PREPARE = stand_in.FFI / "cuda/matmul/cublaslt/prepare.cu"


@pytest.mark.parametrize("target", ["90a", "100f", "120f"])
def test_kernels_compile_without_spilling(tmp_path, target):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", f"-gencode=arch=compute_{target},code=sm_{target}"]
    command = ["nvcc", *flags, "-c", str(PREPARE), "-o", str(tmp_path / "prepare.o")]
    done = subprocess.run(command, text=True, capture_output=True)
    if "Unsupported gpu architecture" in done.stderr:
        pytest.skip(f"this nvcc does not know {target}")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert found == [("0", "0", "0")] * 2


def program_for_the_gpu(folder: pathlib.Path, name: str, *sources: str) -> pathlib.Path:
    """Compiles a program of cpp/ with sources of ffi/."""
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    if not shutil.which("nvcc"):
        skip_or_fail("cuda", "no nvcc")
    flags = ["-std=c++17", "-O2", "-fmad=false", "-arch=native", f"-I{stand_in.FFI}", f"-I{stand_in.CPP}"]
    paths = [str(stand_in.CPP / f"{name}.cu"), *(str(stand_in.FFI / source) for source in sources)]
    subprocess.run(["nvcc", *flags, *paths, "-ldl", "-o", str(folder / name)], check=True)
    return folder / name


LIBRARY = ("cuda/matmul/cublaslt/prepare.cu", "cuda/matmul/cublaslt/library.cc", "cuda/matmul/cublaslt/gemm.cc")
PLAN = ("plan/table.cc", "plan/matmul.cc", "plan/sm90_fused.cc")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return program_for_the_gpu(tmp_path_factory.mktemp("parts"), "blackwell_parts", *LIBRARY)


@pytest.mark.parametrize("part", ["prepare", "finish", "refuse"])
def test_parts_that_any_gpu_can_run(parts, part):
    """The kernels, by the bytes of the CPU; what the library does at the end of a product; and that it refuses FP4."""
    if part == "refuse" and int(gpus()[0].compute_capability.split(".")[0]) >= 10:
        pytest.skip("this GPU has FP4 tensor cores")
    if part != "prepare" and (reason := plans.cublaslt().reason):
        skip_or_fail("cuda", reason)
    done = subprocess.run([str(parts), part, plans.cublaslt().path], text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_products_in_device_memory(built, tmp_path):
    """The whole call with its kernels, compared on the GPU; the stand-in copies what it is given from device memory."""
    sources = ("cuda/matmul/cublaslt/nvfp4.cc", "cuda/matmul/epilogue.cu", *PLAN)
    program = program_for_the_gpu(tmp_path, "block_scaled_on_device", *LIBRARY, *sources)
    done = subprocess.run([str(program), "all", str(built[1])], text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the real library
def header() -> list[str]:
    """Folders of the headers of CUDA and cuBLAS on this machine."""
    wheels = [path for name in ("nvidia-cublas", "nvidia-cublas-cu12") for path in wheel_headers(name)]
    toolkits = [
        *pathlib.Path("/usr/local").glob("cuda*/include"),
        *pathlib.Path("/usr/local").glob("cuda*/targets/*/include"),
    ]
    folders = [*wheels, *toolkits, *wheel_folders()]
    if not any((folder / "cublasLt.h").is_file() for folder in folders):
        pytest.skip("no cublasLt.h: neither a wheel of nvidia-cublas nor a toolkit that has it is installed")
    if not any((folder / "library_types.h").is_file() for folder in folders):
        pytest.skip("no library_types.h of a CUDA toolkit")
    return [f"-I{folder}" for folder in folders]


def wheel_headers(name: str) -> list[pathlib.Path]:
    found = load.installed_file(name, ("cublasLt.h",))
    return [] if found is None else [found.parent]


def wheel_folders() -> list[pathlib.Path]:
    found = load.installed_file("nvidia-cuda-runtime", ("library_types.h",))
    return [] if found is None else [found.parent]


def test_numbers_are_those_of_the_header(process):
    flags = header()
    lines = [f"static_assert(({name}) == {number});" for name, number in process("numbers").items()]
    source = "\n".join(["#include <cstddef>", "#include <cublasLt.h>", *lines, "int main() {}"])
    command = ["g++", "-std=c++17", *flags, "-x", "c++", "-", "-fsyntax-only"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_real_library_takes_every_attribute(built):
    path = plans._cublaslt_wheel()
    if path is None:
        pytest.skip("no wheel of nvidia-cublas is installed")
    real = stand_in.Process(built[0], path)
    try:
        if real("version") < 120800:
            pytest.skip("it is older than block-scaled products")
        for finished, with_bias, kind in itertools.product((True, False), (True, False), (0, 2, 14)):
            assert real("describe", finished, with_bias, kind) == 0
    finally:
        real.close()
