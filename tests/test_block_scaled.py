"""Products on Blackwell, which no test has: the scale layout, and how cuBLASLt's block-scaled product is called.

The stand-in (cpp/cublaslt_stand_in.cc) computes from the pointers and attributes that it is given. Its results are
compared in test_gemm_kernels.py.
"""

import contextlib
import itertools
import json
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import stand_in
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, matmul_by_formula
from operands import ROW, TENSOR, ask_stand_in, dense, library_on_cpu, multiply_by_stand_in, order_free_operands

import jnvfp4
from jnvfp4 import NVFP4Tensor
from jnvfp4._native import load, plans, self_check
from jnvfp4._primitives import _base, _matmul_routes
from jnvfp4._self_check import known_answers

KERNEL = "sm100_cublaslt_nvfp4"
B200, B300, THOR, RTX, SPARK = 100, 103, 110, 120, 121


@pytest.fixture
def library():
    """At its end the stand-in has nothing left."""
    with library_on_cpu() as process:
        yield process
        assert process("alive") == 0


# ---------------------------------------------------------------- the layout of scales
@pytest.mark.long
def test_every_scale_has_a_byte_of_its_own(library):
    assert library("without_bijection", 300, 40) == 0


with np.load(pathlib.Path(__file__).parent / "data" / "swizzle.npz") as file:
    GOLDEN = {name: file[name] for name in file if name != "meta"}
    assert json.loads(str(file["meta"]))["config"]["pad_fill"] == 0


@pytest.mark.parametrize("case", sorted({name.split("__")[0] for name in GOLDEN}))
def test_tiles_of_scales_are_the_golden_ones(library, case):
    assert_bitwise(library("tiles", GOLDEN[f"{case}__linear"][None])[0], GOLDEN[f"{case}__swizzled"].reshape(-1))


def tiles(scale: np.ndarray) -> np.ndarray:
    """Tiles by reshaping: 4 groups of 32 rows become columns."""
    matrices, rows, cols = scale.shape
    padded = np.pad(scale, ((0, 0), (0, -rows % 128), (0, -cols % 4)))
    parts = padded.reshape(matrices, -1, 4, 32, padded.shape[2] // 4, 4)
    return parts.transpose(0, 1, 4, 3, 2, 5).reshape(matrices, -1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (2, 128, 4), (2, 129, 3), (1, 300, 40), (1, 31, 33)], ids=str)
def test_tiles_and_their_padding(library, shape):
    scale = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    assert_bitwise(library("tiles", scale), tiles(scale))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (2, 7, 3), (1, 16, 4)], ids=str)
@pytest.mark.parametrize("more", [(0, 0), (0, 1), (9, 0), (9, 1)], ids=str)
def test_codes_are_padded_with_zeros(library, shape, more):
    data = np.random.default_rng(0).integers(1, 2**63, shape, np.uint64)
    rows, pieces = shape[1] + more[0], shape[2] + more[1]
    assert np.array_equal(library("padded", data, rows, pieces), np.pad(data, ((0, 0), (0, more[0]), (0, more[1]))))


# ---------------------------------------------------------------- products
def check(library, a, b, bias=None, out=np.float32) -> None:
    got = multiply_by_stand_in(library, KERNEL, a, b, bias, out)
    assert_bitwise(got, jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


def test_more_than_64_matrices_are_refused(library):
    """The library is called for each."""
    a, b = order_free_operands(None, (66, 32, 32), lead=(65,), b_lead=(65,))
    assert ask_stand_in(library, a, b, kernel=KERNEL)[2] == f"{KERNEL} cannot: it takes at most 64 matrices"


# ---------------------------------------------------------------- the whole way
@pytest.fixture
def calls(library, monkeypatch):
    """The kernels of products that are lowered for a B200; the stand-in computes them."""
    found = []

    def call_kernel(product, chosen):
        found.append(chosen.kernel)

        def multiply(a, b, *bias):
            a, b = NVFP4Tensor(*a, product.params.a), NVFP4Tensor(*b, product.params.b)
            a, b = jax.tree.map(np.asarray, (a, b))
            if chosen.kernel != KERNEL:
                return matmul_by_formula(a, b, *bias, dtype=product.params.out_dtype)
            return multiply_by_stand_in(library, KERNEL, a, b, *bias, out=product.params.out_dtype)

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


LOWERED = {  # rows of a, options, and the kernel
    "many rows": (70, {}, KERNEL),
    "few rows": (5, {}, "sm80_nvfp4_blocks_small_m"),
    "pinned": (70, {"accumulation": "pinned"}, "sm80_nvfp4_blocks"),
    "decode": (70, {"implementation": "decode_then_dot"}, "decode_then_dot"),
}


@pytest.mark.parametrize(("rows", "options", "kernel"), LOWERED.values(), ids=LOWERED)
def test_the_kernel_of_a_lowered_product(calls, rows, options, kernel):
    a, b = order_free_operands(None, (rows, 131, 48))
    y = lowered_for_b200(lambda a, b: jnvfp4.matmul_nt(a, b, **options))(a, b)
    assert calls == [kernel]
    assert_bitwise(y, matmul_by_formula(a, b, dtype=jnp.bfloat16))


def test_without_the_library_a_product_is_decoded(calls, monkeypatch):
    if not load.available("cuda"):
        monkeypatch.setattr(load, "available", lambda platform: True)
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("", "", "there is none"))
    a, b = order_free_operands(None, (70, 131, 48))
    y = lowered_for_b200(jnvfp4.matmul_nt)(a, b)
    assert calls == ["decode_then_dot"]
    assert_bitwise(y, matmul_by_formula(a, b, dtype=jnp.bfloat16))


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0), (None, 0)], ids=["a", "both", "b"])
def test_vmap_of_a_lowered_product(calls, in_axes):
    lead, b_lead = ((3,) if axis == 0 else () for axis in in_axes)
    a, b = order_free_operands(None, (70, 131, 48), lead=lead, b_lead=b_lead, a_format=ROW, b_format=ROW)
    y = lowered_for_b200(jax.vmap(jnvfp4.matmul_nt, in_axes))(a, b)
    assert calls == [KERNEL]
    for i in range(3):
        one = [t if axis is None else t[i] for t, axis in zip((a, b), in_axes, strict=True)]
        assert_bitwise(y[i], matmul_by_formula(*one, dtype=jnp.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", "layout", "alpha", "padding", "nan"])
def test_a_library_that_gives_wrong_bits_is_not_used(calls, library, monkeypatch, fault):
    """Lowering plans its product, the self-check refuses it, the decode path computes."""
    samples = [s._replace(shape=shape) for s in known_answers.SAMPLES[:1] for shape in ((129, 144, 80), (70, 45, 48))]
    monkeypatch.setattr(known_answers, "SAMPLES", samples)
    monkeypatch.setattr(plans, "has_run_on", lambda capability: False)
    monkeypatch.setattr(self_check, "_FOUND", {})
    library("go_wrong", fault)
    a, b = order_free_operands(None, (66, 47, 80))
    warned = pytest.warns(RuntimeWarning, match=f"self-check of matmul_nt {KERNEL} on")
    with warned if fault else contextlib.nullcontext():
        for _ in range(2):
            y = lowered_for_b200(lambda a, b: jnvfp4.matmul_nt(a, b, out_dtype=np.float32))(a, b)
            assert_bitwise(y, matmul_by_formula(a, b))
    assert ("decode_then_dot" in calls) == bool(fault)


# ---------------------------------------------------------------- versions
def versions(capability: int) -> dict[int, bool]:
    fits = {120700: False, 120800: True, 120904: True, 130101: True, 130200: True, 131000: True}
    return fits if capability >= RTX else {version: version >= 130200 for version in fits}


@pytest.mark.parametrize("capability", [B200, B300, THOR, RTX, SPARK])
def test_versions_of_cublaslt_that_multiply_fp4(library, capability):
    a, b = order_free_operands(None, (70, 32, 64))
    for version, fits in versions(capability).items():
        library("use_version", version)
        got, ran, error = ask_stand_in(library, a, b, capability=capability)
        if fits:
            assert (ran, error) == (KERNEL, "")
            assert_bitwise(got, jnvfp4.matmul_nt(a, b, out_dtype=np.float32))
        else:
            assert ran == "decode_then_dot"
            least = "12.8" if capability >= RTX else "13.2"
            text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
            gpu = f"compute capability {capability // 10}.{capability % 10}"
            want = f"needs cuBLASLt {least} or newer on {gpu}, got {text}"
            assert ask_stand_in(library, a, b, capability=capability, kernel=KERNEL)[2] == f"{KERNEL} {want}"


@pytest.mark.parametrize("capability", [80, 90, 99, 122, 130])
def test_other_architectures_are_refused(library, capability):
    a, b = order_free_operands(None, (70, 32, 64))
    reason = ask_stand_in(library, a, b, capability=capability, kernel=KERNEL)[2]
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
    assert ask_stand_in(library, a, b, kernel=KERNEL)[2] == f"status {STATUS[status]}"


@pytest.mark.parametrize(("what", "status", "found"), [("found", 15, 801), ("state", 15, 801), ("launch", 0, 719)])
def test_no_algorithm_or_no_launch(library, what, status, found):
    library("fail", what, status)
    assert ask_stand_in(library, *order_free_operands(None, (5, 16, 64)), kernel=KERNEL)[2] == f"status {found}"


def test_a_handle_that_could_not_be_made_is_made_later(library):
    a, b = order_free_operands(None, (70, 16, 64))
    library("reset", 1_000_000)  # a device that no test has used
    library("fail", "Create", 3)
    assert ask_stand_in(library, a, b)[2] == "status 2"
    library("reset", 1_000_000)
    check(library, a, b)


@pytest.mark.parametrize("refusal", [7, 15])
@pytest.mark.parametrize("out", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_a_type_that_the_library_refuses_is_made_of_float32_sums(library, out, refusal):
    number = {"float16": 2, "bfloat16": 14}[np.dtype(out).name]
    library("fail", f"MatmulAlgoGetHeuristic of {number}", refusal)
    check(library, *order_free_operands(None, (70, 32, 64)), dense((32,), out), out)


# ---------------------------------------------------------------- compilers and GPUs
PREPARE = stand_in.FFI / "cuda/matmul/cublaslt/prepare.cu"


@pytest.mark.long
@pytest.mark.parametrize("target", ["90a", "100f", "120f"])
def test_kernels_compile_without_spilling(tmp_path, target):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    flags = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas=-v", f"-gencode=arch=compute_{target},code=sm_{target}"]
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
    flags = ["-std=c++20", "-O2", "-fmad=false", "-arch=native", f"-I{stand_in.FFI}", f"-I{stand_in.CPP}"]
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


def test_products_in_device_memory(tmp_path):
    """The whole call with its kernels, compared on the GPU; the stand-in copies what it is given from device memory."""
    sources = ("cuda/matmul/cublaslt/nvfp4.cc", "cuda/matmul/epilogue.cu", *PLAN)
    program = program_for_the_gpu(tmp_path, "block_scaled_on_device", *LIBRARY, *sources)
    done = subprocess.run([str(program), "all", str(stand_in.built()[1])], text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the real library
def header() -> list[str]:
    """Folders of the headers of CUDA and cuBLAS on this machine."""
    wheels = [load.installed_file(name, ("cublasLt.h",)) for name in ("nvidia-cublas", "nvidia-cublas-cu12")]
    toolkits = [p for way in ("include", "targets/*/include") for p in pathlib.Path("/usr/local").glob(f"cuda*/{way}")]
    runtime = load.installed_file("nvidia-cuda-runtime", ("library_types.h",))
    folders = [*(p.parent for p in wheels if p), *toolkits, *([runtime.parent] if runtime else [])]
    if not any((folder / "cublasLt.h").is_file() for folder in folders):
        pytest.skip("no cublasLt.h: neither a wheel of nvidia-cublas nor a toolkit that has it is installed")
    if not any((folder / "library_types.h").is_file() for folder in folders):
        pytest.skip("no library_types.h of a CUDA toolkit")
    return [f"-I{folder}" for folder in folders]


def test_numbers_are_those_of_the_header(library):
    flags = header()
    lines = [f"static_assert(({name}) == {number});" for name, number in library("numbers").items()]
    source = "\n".join(["#include <cstddef>", "#include <cublasLt.h>", *lines, "int main() {}"])
    command = ["g++", "-std=c++20", *flags, "-x", "c++", "-", "-fsyntax-only"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_real_library_takes_every_attribute(library):
    path = plans._cublaslt_wheel()
    if path is None:
        pytest.skip("no wheel of nvidia-cublas is installed")
    real = stand_in.Process(stand_in.built()[0], path)
    try:
        if real("version") < 120800:
            pytest.skip("it is older than block-scaled products")
        for finished, with_bias, kind in itertools.product((True, False), (True, False), (0, 2, 14)):
            assert real("describe", finished, with_bias, kind) == 0
    finally:
        real.close()
