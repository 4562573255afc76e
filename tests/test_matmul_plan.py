"""Which kernel multiplies: ffi/plan/matmul.h, asked as the lowering asks it. Needs no GPU, and no CUDA build."""

import itertools
import pathlib
import re
import subprocess
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from conftest import skip_or_fail
from helpers import random_tensor

from jnvfp4 import Format, NVFP4Tensor, export_checks, matmul_nt
from jnvfp4._native import compat, load, plans

CPU, AMPERE, HOPPER, BLACKWELL = 0, 80, 90, 100
GPUS = (AMPERE, 86, 89, HOPPER, BLACKWELL, 103, 120, 121)
LEFT = ("nvfp4", "bfloat16", "float16")
FFI = pathlib.Path(__file__).parent.parent / "ffi"

SMALL = {"nvfp4": "sm90_nvfp4_small_m", "bfloat16": "sm90_dense_small_m", "float16": "sm90_dense_small_m"}
FUSED = {left: name.replace("small_m", "fused") for left, name in SMALL.items()}


FP4 = "sm100_cublaslt_nvfp4"


@pytest.fixture(autouse=True)
def cublaslt(monkeypatch):
    """A copy of cuBLASLt, whether or not this machine has one."""
    use_version(monkeypatch, "13.2.0")


def use_version(monkeypatch, version: str) -> None:
    found = plans.CublasLt("/lib/libcublasLt.so.13", version, "")
    monkeypatch.setattr(plans, "cublaslt", lambda: found)


PROBLEM = {"a": "nvfp4", "windows": False, "pinned": False, "capability": HOPPER, "shape": (1, 128, 128, 256)}
PROBLEM |= {"kernel": None, "out": "bfloat16"}


def plan(*first, **changes):
    """Of PROBLEM, but for its first values and for changes by name."""
    return plans.plan_matmul(**PROBLEM | dict(zip(PROBLEM, first, strict=False)) | changes)


@pytest.mark.parametrize("capability", GPUS)
def test_the_kernels_of_a_gpu(capability):
    for left in LEFT:
        fast = FUSED[left] if capability == HOPPER else "decode_then_dot"
        fast = FP4 if capability >= BLACKWELL and left == "nvfp4" else fast
        assert plan(left, capability=capability)[:3:2] == (fast, "")
    for m, few in ((1, True), (64, True), (65, False)):
        hopper = capability == HOPPER and not few
        kernel = "sm80_nvfp4_blocks_small_m" if few else "sm80_nvfp4_blocks"
        for windows, name in ((False, "sm90_nvfp4_pinned"), (True, "sm90_nvfp4_pinned_prepared")):
            got = plan(windows=windows, pinned=True, capability=capability, shape=(3, m, 128, 256))
            assert got[:3:2] == (name if hopper else kernel, "")
            assert bool(got.scratch_bytes) != few
        windows = "sm90_nvfp4_windows" if capability == HOPPER and not few else kernel
        assert plan(windows=True, capability=capability, shape=(3, m, 128, 256))[:3:2] == (windows, "")
    assert plan("bfloat16", pinned=True, capability=capability)[:3] == ("sm80_dense_elements", 0, "")


def test_which_kernels_take_a_norm_and_a_residual():
    """On Hopper those for few rows, where K has whole units: the norm of at most four rows."""
    for left, m, k, pinned in itertools.product(LEFT, (1, 4, 5, 16), (256, 14336, 272), (False, True)):
        found = plan(left, shape=(3, m, 128, k), pinned=pinned)
        assert (found.kernel == SMALL[left]) == (not pinned)
        assert found.whole_bias == (k != 272 and not pinned)
        assert found.norm == (found.whole_bias and m <= 4 and left != "nvfp4")
    for left, m, capability in itertools.product(LEFT, (1, 17, 300), (CPU, *GPUS)):
        found = plan(left, capability=capability, shape=(1, m, 128, 256))
        assert found.whole_bias == (found.kernel in ("decode_then_dot", SMALL[left]) or capability == CPU)
        assert found.norm == (found.kernel == "sm90_dense_small_m")
        assert not plan(left, pinned=True, shape=(1, m, 128, 256)).norm


@pytest.mark.parametrize("pinned", [False, True])
def test_the_cpu_has_one_order(pinned):
    assert plan(pinned=pinned, capability=CPU).kernel == "cpu_nvfp4_blocks"
    assert plan(windows=True, pinned=pinned, capability=CPU).kernel == "cpu_nvfp4_blocks"
    assert plan("bfloat16", pinned=pinned, capability=CPU).kernel == "cpu_dense_elements"


def test_a_plan_without_a_device_runs_on_every_supported_gpu():
    assert plans.any_gpu() == AMPERE
    for a, windows, pinned in itertools.product(LEFT, (False, True), (False, True)):
        portable = plan(a, windows, pinned, plans.any_gpu())
        for capability in GPUS:
            if not portable.reason:
                assert plan(a, windows, pinned, capability, kernel=portable.kernel).reason == ""


def test_a_gpu_that_is_too_old():
    assert plan(capability=75).reason
    why = plan(capability=75, kernel="decode_then_dot").reason
    assert "from compute capability 8.0, not on compute capability 7.5" in why


SMALL_M, BLOCKS, FEW_BLOCKS = "sm90_nvfp4_small_m", "sm80_nvfp4_blocks", "sm80_nvfp4_blocks_small_m"
DENSE = {"a": "float16"}
FEW = [(SMALL_M, {}), ("sm90_dense_small_m", DENSE)]
NARROW = [("sm90_nvfp4_fused", {}), ("sm90_dense_fused", DENSE), ("sm90_nvfp4_pinned", {})]
NARROW += [(name, {"windows": True}) for name in ("sm90_nvfp4_windows", "sm90_nvfp4_pinned_prepared")]
# What a plan says, and the kernels and problems of which it says so.
WHY_NOT = {
    "cpu_nvfp4_blocks runs on the CPU, not on compute capability 9.0": [("cpu_nvfp4_blocks", {})],
    "not on the CPU": [(name, {"capability": CPU}) for name in ("decode_then_dot", SMALL_M, FP4, FEW_BLOCKS)],
    "runs on GPUs of compute capability 9.0, not on compute capability 10.0": [
        ("sm90_nvfp4_fused", {"capability": BLACKWELL}),
        (SMALL_M, {"shape": (1, 1, 16, 16), "capability": BLACKWELL}),
    ],
    "not on compute capability 8.9": [("sm90_dense_small_m", {**DENSE, "capability": 89})],
    f"{FP4} runs on GPUs of compute capability 10.0 to 12.1, not on compute capability 9.0": [(FP4, {})],
    "not on compute capability 8.0": [(FP4, {"capability": None})],
    "window64": [
        *[(name, {"windows": True}) for name in ("decode_then_dot", "sm90_nvfp4_fused", SMALL_M)],
        *[(f"sm90_dense_{name}", {"a": "bfloat16", "windows": True}) for name in ("small_m", "fused")],
        ("sm80_dense_elements", {"a": "bfloat16", "windows": True}),
        ("sm90_nvfp4_pinned", {"windows": True}),
        (FP4, {"windows": True, "capability": BLACKWELL}),
    ],
    "its order of summation is not pinned": [
        *[(name, {"pinned": True}) for name in ("decode_then_dot", "sm90_nvfp4_fused", SMALL_M)],
        *[(f"sm90_dense_{name}", {"a": "bfloat16", "pinned": True}) for name in ("small_m", "fused")],
        ("sm90_nvfp4_windows", {"windows": True, "pinned": True}),
        (FP4, {"pinned": True, "capability": BLACKWELL}),
    ],
    "must be an NVFP4 tensor": [
        *[(name, DENSE) for name in (BLOCKS, "sm90_nvfp4_fused", SMALL_M, FEW_BLOCKS)],
        *[(f"sm90_nvfp4_{name}", DENSE) for name in ("windows", "pinned", "pinned_prepared")],
        (FP4, {"a": "bfloat16", "capability": BLACKWELL}),
    ],
    "must be a bfloat16 or float16 array": [
        (name, {}) for name in ("sm80_dense_elements", "sm90_dense_fused", "sm90_dense_small_m")
    ],
    'an operand must have amax_scope="window64"': [("sm90_nvfp4_windows", {})],
    "or M must be at least 4096": [("sm90_nvfp4_pinned_prepared", {"shape": (1, 4095, 16, 16)})],
    "at most 2^30 rows of either operand": [
        (name, {**of, "shape": shape})
        for name, of in NARROW
        for shape in ((2**20, 1025, 1, 64), (2**20, 1, 1025, 64), (1, 1, 1, 2**30 + 64))
    ],
    "cannot: M must be at most 16": [
        (SMALL_M, {"shape": (1, 17, 16, 16)}),
        ("sm90_dense_small_m", {**DENSE, "shape": (1, 17, 16, 16)}),
    ],
    "cannot: M must be at most 64": [(FEW_BLOCKS, {"shape": (1, 65, 16, 16)})],
    "K must be at most 2^30": [
        (SMALL_M, {"shape": (1, 1, 16, 2**30 + 16)}),
        (FEW_BLOCKS, {"shape": (1, 64, 16, 2**30 + 16)}),
    ],
    "K must be at least 16": [
        *[(name, {**of, "shape": (1, 1, 16, 0)}) for name, of in [*FEW, *NARROW, (FEW_BLOCKS, {})]],
        (FP4, {"shape": (1, 1, 1, 0), "capability": 120}),
    ],
    "N times the batch is too large": [
        (SMALL_M, {"shape": shape}) for shape in ((1, 1, 2**30 + 1, 16), (2**13, 1, 2**17 + 1, 16))
    ],
    "the batch is too large": [(SMALL_M, {"shape": (2**26 + 1, 1, 1, 16)})],
    "it takes at most 64 matrices": [(FP4, {"shape": (65, 1, 1, 16), "capability": 120})],
    "at most 2^29 rows of either": [
        (FP4, {"shape": shape, "capability": 120})
        for shape in ((2, 2**28 + 1, 1, 64), (2, 1, 2**28 + 1, 64), (1, 1, 1, 2**29 + 64))
    ],
    "no kernel has the name sm90_unheard_of": [("sm90_unheard_of", {})],
}


@pytest.mark.parametrize("reason", WHY_NOT)
def test_why_a_kernel_cannot(reason):
    for kernel, problem in WHY_NOT[reason]:
        assert reason in plan(**problem, kernel=kernel).reason


def test_every_kernel_of_a_gpu_is_launched():
    """Names alone connect the table of the plan with that of the launchers, which needs CUDA."""
    sources = [FFI / "cuda/matmul/launch.cc", *FFI.glob("cuda/matmul/*/launchers.cu")]
    launchers = "".join(source.read_text() for source in sources)
    kernels = [name for name in (*plans.matmul_kernels(), *plans.grouped_kernels()) if name.startswith("sm")]
    assert sorted(re.findall(r'\{"(\w+)", \w+\}', launchers)) == sorted(kernels)


def test_every_kernel_has_a_problem():
    """Also those that run only where they are named."""
    problems = list(itertools.product(LEFT, (False, True), (False, True), (CPU, HOPPER, BLACKWELL), [(1, 8, 16, 32)]))
    for kernel in plans.matmul_kernels():
        assert any(not plan(*problem, kernel).reason for problem in problems), kernel


@pytest.mark.parametrize("a", LEFT)
def test_few_rows_on_hopper(a):
    shapes = [(1, 1, 1, 16), (1, 16, 128256, 4096), (7, 16, 40, 48)]
    for shape in (*shapes, (2**26, 1, 1, 16), (1, 8, 2**30, 16), (1, 8, 16, 2**30)):
        assert plan(a, shape=shape)[:3] == (SMALL[a], 0, "")


@pytest.mark.parametrize("a", LEFT)
def test_what_the_kernels_of_hopper_leave_to_decoding(a):
    assert plan(a, shape=(1, 17, 16, 16)).kernel == FUSED[a]
    few = "sm80_nvfp4_blocks_small_m" if a == "nvfp4" else "decode_then_dot"
    assert plan(a, shape=(1, 16, 2**30 + 1, 16)).kernel == few
    assert plan(a, shape=(1, 16, 16, 0)).kernel == "decode_then_dot"


def test_a_build_without_the_kernels_of_hopper(monkeypatch):
    monkeypatch.setitem(load.extensions(), "cuda", SimpleNamespace(built_for="sm_90 sm_100f compute_80"))
    for left in LEFT:
        assert plan(left)[:3] == ("decode_then_dot", 0, "")
        why = plan(left, kernel=FUSED[left]).reason
        assert why == f"{FUSED[left]} is not in this build; build jnvfp4 with 90a among JNVFP4_CUDA_TARGETS"
        assert plan(left, pinned=True).kernel.startswith("sm80")


def test_an_architecture_is_a_row_and_a_target(tmp_path):
    program, source = tmp_path / "table", pathlib.Path(__file__).parent / "cpp/kernel_table.cc"
    subprocess.run(["g++", "-std=c++20", f"-I{FFI}", source, FFI / "plan/table.cc", "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines() == [
        "sm120_stand_in: ",
        "sm80_any: sm120_stand_in is not in this build; build jnvfp4 with 120f among JNVFP4_CUDA_TARGETS",
        "sm80_any: sm120_stand_in runs on GPUs of compute capability 12.0 to 12.9, not on compute capability 9.0",
    ]


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@pytest.mark.parametrize(("a", "copied"), [("nvfp4", 4096), ("bfloat16", 16384)])
def test_the_smaller_of_two_nvfp4_operands_is_copied(a, copied):
    counter = 256  # with nothing behind it
    assert plan(a, shape=(1, 16384, 4096, 14336))[:3] == (FUSED[a], copied * 14336 * 2 + counter, "")
    # A tile of few rows is not swapped, however few columns there are.
    assert load.extensions()["cpu"].plan_fused(1, 2096, 224, 6832, a == "nvfp4") == (64, 2, False, 0)


FUSED_SHAPES = [(1, 128, 384, 512), (1, 5, 7, 256), (3, 5, 7, 64), (2, 300, 129, 48), (1, 1, 1, 16)]
FUSED_SHAPES += [(1, 20, 101, 2064), (2, 700, 261, 4352), (1, 700, 6001, 2064)]


@pytest.mark.parametrize("shape", FUSED_SHAPES)
def test_scratch_of_fused_kernels(shape):
    """Prepared rows to the end of a tile; copies of codes unless K % 32 == 0, and of scales unless K % 256 == 0; parts
    of K with flags, and a counter of tiles."""
    batch, m, n, k = shape
    tokens, splits, _, whole = load.extensions()["cpu"].plan_fused(*shape, False)
    rows = up(((batch - 1) * m + up(m, tokens)) * up(k, 64) * 2, 256)
    data = 0 if k % 32 == 0 else up(batch * n * up(k // 2, 16), 256)
    scale = 0 if k % 256 == 0 else up(batch * n * up(k // 16, 16), 256)
    tiles = batch * up(m, tokens) // tokens * (up(n, 256) // 256) - whole
    teams = 2 if tokens <= 64 else 1
    sums = tiles * (splits - 1) * teams * tokens * 256 * 4
    flags = up((tiles * (splits - 1) * teams * 4 + 1) * 4, 256)
    for a in LEFT:
        assert plan(a, shape=shape, kernel=FUSED[a])[:3] == (FUSED[a], rows + data + scale + sums + flags, "")


@pytest.mark.parametrize(
    "shape",
    [(1, 128, 384, 512), (1, 5, 7, 256), (3, 5, 7, 64), (2, 300, 129, 192), (1, 70, 131, 1088), (1, 300, 700, 64)],
)
def test_scratch_of_windows(shape):
    """Both operands and their factors to the end of a tile, whichever of them has windows; as above, flags of parts."""
    batch, m, n, k = shape

    def scratch(tokens, columns, a_windows, b_windows):
        both = a_windows and b_windows
        tile, factor, token_factors = (128, 16, k // 64) if both else (192, 4, 1)
        padded = up(tokens, tile), up(columns, 256)
        numbers = sum(up(((batch - 1) * r + p) * k * 2, 256) for r, p in zip((tokens, columns), padded, strict=True))
        counts = token_factors, k // 64  # of a row
        factors = sum(up(batch * p * count * factor, 256) for p, count in zip(padded, counts, strict=True))
        parts = load.extensions()["cpu"].plan_windows(*shape, a_windows, b_windows)
        parts_of_tiles = batch * (padded[0] // tile) * (padded[1] // 256) * (parts - 1)
        return numbers + factors + parts_of_tiles * tile * 256 * 4 + up((parts_of_tiles * 4 + 1) * 4, 256)

    expected = max(scratch(m, n, False, True), scratch(n, m, True, False), scratch(m, n, True, True))
    kernel = "sm90_nvfp4_windows"
    assert plan(windows=True, shape=shape, kernel=kernel)[:3] == (kernel, expected, "")


@pytest.mark.parametrize("shape", FUSED_SHAPES)
def test_scratch_of_the_pinned_order(shape):
    """As above, K in one part; b too is prepared, from 4096 rows on or for windows, whose amaxes are in fours."""
    batch, least, n, k = shape
    kernel = "sm90_nvfp4_pinned_prepared"
    for windows, tokens, m in ((False, 256, least + 4096), (True, 128, least)):
        numbers = [up(((batch - 1) * m + up(m, tokens)) * up(k, 64) * 2, 256), up(batch * n * up(k, 64) * 2, 256)]
        data = 0 if k % 32 == 0 else up(batch * n * up(k // 2, 16), 256)
        scale = 0 if k % 256 == 0 else up(batch * n * up(k // 16, 16), 256)
        tiles = (up(m, tokens) // 128, up(n, 256) // 128) if windows else ()
        amaxes = [up(batch * count * up(k, 256) // 64 * 132 * 4, 256) for count in tiles]
        want = sum(numbers + amaxes) + data + scale + 256  # a counter of tiles
        assert plan(shape=(batch, m, n, k), windows=windows, pinned=True, kernel=kernel)[:3] == (kernel, want, "")


@pytest.mark.parametrize(("columns", "padded"), [(22, 192), (23, 256), (45, 256)])
def test_tiles_of_the_pinned_order_fill_waves_of_66(columns, padded):
    """192 rows are three tiles of 64 in one wave, or two of 128, or one of 256, which waste 64 rows."""
    got = plan(shape=(1, 192, 256 * columns, 256), pinned=True, kernel="sm90_nvfp4_pinned")
    assert got.scratch_bytes == padded * 256 * 2 + 256


def test_a_plan_of_the_largest_products():
    """Their sizes in bytes do not overflow 64 bits, although no memory holds them."""
    for shape in ((1, 2**30, 2**30, 2**30), (2**20, 2**10, 2**10, 2**30)):
        assert load.extensions()["cpu"].plan_fused(*shape, False) == (256, 1, False, 0)
        assert plan(shape=shape).scratch_bytes > 2**60
        assert plan(shape=shape, windows=True).scratch_bytes > 2**60


@pytest.mark.parametrize("nk", [(16, 16), (1000, 2048), (4096, 14336), (14336, 4096), (8192, 65536), (128256, 4096)])
def test_parts_of_k_of_fused_kernels(nk):
    """Each has 512 along K at least, and their sums have 16 MiB at most. Tiles without parts fill a GPU."""
    for m in (1, 17, 64, 100, 128, 256, 500, 1000, 4096):
        tokens, splits, _, whole = load.extensions()["cpu"].plan_fused(1, m, *nk, False)
        assert 1 <= splits <= max(1, -(-nk[1] // 256) // 2)
        tiles = up(m, tokens) // tokens * (up(nk[0], 256) // 256)
        assert whole % (66 // splits * splits) == 0
        assert whole < tiles if splits > 1 else whole == 0
        sums = (tiles - whole) * tokens * 256 * (splits - 1) * (2 if tokens <= 64 else 1) * 4
        assert sums <= 16 << 20


# ---------------------------------------------------------------- cuBLASLt
def test_only_blackwell_looks_for_cublaslt(monkeypatch):
    monkeypatch.setattr(load, "available", lambda platform: True)
    monkeypatch.setattr(plans, "cublaslt", lambda: pytest.fail("looked for"))
    for capability, kernel in itertools.product((AMPERE, HOPPER, None, CPU), (None, FP4)):
        plan(capability=capability, kernel=kernel)
    assert plan(capability=BLACKWELL, kernel="decode_then_dot").reason == ""


@pytest.mark.parametrize("version", ["12.8.0", "13.1.9", "13.2.0"])
def test_the_version_that_fp4_products_need(monkeypatch, version):
    """12.8 to 13.1 corrupt results on 10.x and 11.x."""
    monkeypatch.setattr(load, "available", lambda platform: True)
    use_version(monkeypatch, version)
    for capability in GPUS:
        fits = capability >= 120 or (capability >= BLACKWELL and version == "13.2.0")
        assert (plan(capability=capability).kernel == FP4) == fits
        assert plans.has_block_scaled(capability) == (capability >= BLACKWELL)
        dotted = f"{capability // 10}.{capability % 10}"
        why = f"{FP4} needs cuBLASLt 13.2 or newer on compute capability {dotted}, got {version}"
        assert plans.no_block_scaled(capability) == (why if capability in (BLACKWELL, 103) and not fits else "")


@pytest.mark.parametrize("shape", [(1, 128, 384, 512), (1, 128, 390, 512), (3, 70, 48, 48), (64, 70, 7, 16)])
def test_scratch_of_fp4_products(shape):
    """Tiles of scales, padded codes where K or N need it, a factor a matrix, sums unless the result holds them."""
    batch, m, n, k = shape
    deep, wide = up(k, 32), up(n, 16)
    tiles = sum(up(batch * up(rows, 128) * up(k // 16, 4), 256) for rows in (m, n))
    codes = up(batch * m * deep // 2, 256) if deep != k else 0
    codes += up(batch * wide * deep // 2, 256) if (deep, wide) != (k, n) else 0
    for out, capability in itertools.product(("float32", "bfloat16"), (BLACKWELL, 103, 110, 120, 121)):
        sums = 0 if out == "float32" and wide == n else up(batch * m * wide * 4, 256)
        want = tiles + codes + sums + up((batch + 1) * 4, 256) + (32 << 20)
        assert plan(shape=shape, out=out, capability=capability)[:3] == (FP4, want, "")


def lowered(monkeypatch, a, b, **options) -> str:
    """What is lowered for a GPU of Blackwell, which need not be there."""
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    monkeypatch.setattr(compat, "gpu_capability", lambda ctx: BLACKWELL)
    jax.clear_caches()  # of what was lowered for another version of the library
    product = jax.jit(lambda a, b: matmul_nt(a, b, **options))
    return product.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()


def test_an_fp4_product_is_one_call(monkeypatch):
    a, b = random_tensor(0, (70, 64)), random_tensor(1, (24, 64))
    text = lowered(monkeypatch, a, b)
    assert text.count("stablehlo.custom_call @nvfp4_") == 1
    assert f'kernel = "{FP4}"' in text
    assert f"tensor<{plan(shape=(1, 70, 24, 64), capability=BLACKWELL)[1]}xui8>" in text
    use_version(monkeypatch, "13.1.2")
    assert "dot_general" in lowered(monkeypatch, a, b)


def test_a_plan_without_cublaslt_gives_the_reason(monkeypatch):
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("", "", "there is none"))
    assert plan(kernel=FP4, capability=BLACKWELL).reason == f"{FP4} needs cuBLASLt: there is none"
    assert plan(capability=BLACKWELL)[:3] == ("decode_then_dot", 0, "")
    a = random_tensor(0, (16, 64))
    with pytest.raises(NotImplementedError, match=f"implementation='{FP4}' cannot run here: .*: there is none"):
        lowered(monkeypatch, a, a, implementation=FP4)


def test_shape_and_types_reach_the_plan(monkeypatch):
    """The lowering passes on what it knows of the operands."""
    asked = []
    original = plans.plan_matmul
    monkeypatch.setattr(plans, "plan_matmul", lambda **problem: asked.append(problem) or original(**problem))
    a, b = random_tensor(0, (2, 3, 48), Format("row")), random_tensor(1, (2, 5, 48))
    w = random_tensor(2, (7, 64), Format("window64"))
    with jax.default_device(jax.devices("cpu")[0]):
        matmul_nt(a, b, out_dtype=jnp.float16, accumulation="pinned")
        matmul_nt(random_tensor(3, (2, 3, 64)), w, implementation="native")
        matmul_nt(jnp.ones((6, 48), jnp.bfloat16), b := random_tensor(4, (5, 48)), implementation="cpu_dense_elements")
    common = {"capability": CPU, "kernel": None}
    first, second, third = (problem for i, problem in enumerate(asked) if problem not in asked[:i])  # it may ask twice
    assert first == {**common, "shape": (2, 3, 5, 48), "a": "nvfp4", "windows": False, "out": "float16", "pinned": True}
    assert second == {**first, "shape": (1, 6, 7, 64), "windows": True, "out": "bfloat16", "pinned": False}
    assert (third["a"], third["kernel"], third["shape"]) == ("bfloat16", "cpu_dense_elements", (1, 6, 5, 48))
    assert isinstance(b, NVFP4Tensor)


@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_an_exported_program_has_the_portable_plan(accumulation):
    """No device is known where a program is exported: its kernel runs on every supported GPU."""
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    a = random_tensor(0, (65, 64))
    product = jax.jit(lambda a, b: matmul_nt(a, b, accumulation=accumulation))
    text = jax.export.export(product, platforms=["cuda"], disabled_checks=export_checks())(a, a).mlir_module()
    assert ("sm80_nvfp4_blocks" in text) == (accumulation == "pinned")
    assert ("dot_general" in text) == (accumulation == "fast")
