"""Which kernel multiplies: ffi/matmul_plan.h, asked as the lowering asks it. Needs no GPU, and no CUDA build."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from conftest import skip_or_fail
from helpers import random_tensor

from jnvfp4 import Format, NVFP4Tensor, _native, matmul_nt

CPU, AMPERE, HOPPER, BLACKWELL = 0, 80, 90, 100
GPUS = (AMPERE, 86, 89, HOPPER, BLACKWELL, 103, 120, 121)
LEFT = ("nvfp4", "bfloat16", "float16")


SMALL = {"nvfp4": "sm90_nvfp4_small_m", "bfloat16": "sm90_dense_small_m", "float16": "sm90_dense_small_m"}


def plan(a="nvfp4", windows=False, pinned=False, capability=HOPPER, shape=(1, 128, 128, 256), kernel=None):
    return _native.plan_matmul(
        shape=shape, a=a, windows=windows, out="bfloat16", pinned=pinned, capability=capability, kernel=kernel
    )


@pytest.mark.parametrize("capability", GPUS)
def test_a_gpu(capability):
    assert plan(capability=capability) == ("decode_then_dot", 0, "")
    assert plan("float16", capability=capability) == ("decode_then_dot", 0, "")
    assert plan(windows=True, capability=capability) == ("sm80_nvfp4_blocks", 0, "")
    assert plan(pinned=True, capability=capability) == ("sm80_nvfp4_blocks", 0, "")
    assert plan("bfloat16", pinned=True, capability=capability) == ("sm80_dense_elements", 0, "")


@pytest.mark.parametrize("pinned", [False, True])
def test_the_cpu_has_one_order(pinned):
    assert plan(pinned=pinned, capability=CPU).kernel == "cpu_nvfp4_blocks"
    assert plan(windows=True, pinned=pinned, capability=CPU).kernel == "cpu_nvfp4_blocks"
    assert plan("bfloat16", pinned=pinned, capability=CPU).kernel == "cpu_dense_elements"


def test_a_plan_without_a_device_runs_on_every_supported_gpu():
    assert _native.any_gpu() == AMPERE
    for a, windows, pinned in itertools.product(LEFT, (False, True), (False, True)):
        portable = plan(a, windows, pinned, _native.any_gpu())
        for capability in GPUS:
            if not portable.reason:
                assert plan(a, windows, pinned, capability, kernel=portable.kernel).reason == ""


def test_a_gpu_that_is_too_old():
    assert plan(capability=75).reason
    assert (
        "from compute capability 8.0, not on compute capability 7.5"
        in plan(capability=75, kernel="decode_then_dot").reason
    )


WHY_NOT = {
    "another platform": ("cpu_nvfp4_blocks", {}, "cpu_nvfp4_blocks runs on the CPU, not on compute capability 9.0"),
    "a GPU's kernel on the CPU": ("decode_then_dot", {"capability": CPU}, "not on the CPU"),
    "windows": ("decode_then_dot", {"windows": True}, "window64"),
    "an order": ("decode_then_dot", {"pinned": True}, "its order of summation is not pinned"),
    "a dense left operand": ("sm80_nvfp4_blocks", {"a": "bfloat16"}, "must be an NVFP4 tensor"),
    "an NVFP4 left operand": ("sm80_dense_elements", {}, "must be a bfloat16 or float16 array"),
    "an order that is pinned": ("sm90_nvfp4_fused", {"pinned": True}, "its order of summation is not pinned"),
    "windows of a kernel of Hopper": ("sm90_nvfp4_fused", {"windows": True}, "window64"),
    "a fused dense left operand": ("sm90_nvfp4_fused", {"a": "float16"}, "must be an NVFP4 tensor"),
    "a fused NVFP4 left operand": ("sm90_dense_fused", {}, "must be a bfloat16 or float16 array"),
    "a pinned dense product": ("sm90_dense_fused", {"a": "bfloat16", "pinned": True}, "is not pinned"),
    "a kernel of Hopper elsewhere": (
        "sm90_nvfp4_fused",
        {"capability": BLACKWELL},
        "sm90_nvfp4_fused runs on GPUs of compute capability 9.0, not on compute capability 10.0",
    ),
    "too many rows": ("sm90_nvfp4_fused", {"shape": (2**20, 1025, 1, 64)}, "at most 2^30 rows of either operand"),
    "few rows on another GPU": (
        "sm90_nvfp4_small_m",
        {"shape": (1, 1, 16, 16), "capability": BLACKWELL},
        "sm90_nvfp4_small_m runs on GPUs of compute capability 9.0, not on compute capability 10.0",
    ),
    "few rows on an older GPU": (
        "sm90_dense_small_m",
        {"a": "float16", "capability": 89},
        "not on compute capability 8.9",
    ),
    "few rows on the CPU": ("sm90_nvfp4_small_m", {"capability": CPU}, "not on the CPU"),
    "65 rows": ("sm90_nvfp4_small_m", {"shape": (1, 65, 16, 16)}, "sm90_nvfp4_small_m cannot: M must be at most 64"),
    "65 rows of an array": ("sm90_dense_small_m", {"a": "float16", "shape": (1, 65, 16, 16)}, "M must be at most 64"),
    "few rows of an array": ("sm90_nvfp4_small_m", {"a": "bfloat16"}, "must be an NVFP4 tensor"),
    "few rows of a tensor": ("sm90_dense_small_m", {}, "must be a bfloat16 or float16 array"),
    "few rows of windows": ("sm90_nvfp4_small_m", {"windows": True}, "window64"),
    "few rows by windows": ("sm90_dense_small_m", {"a": "bfloat16", "windows": True}, "window64"),
    "few rows in an order": ("sm90_nvfp4_small_m", {"pinned": True}, "its order of summation is not pinned"),
    "a long K": ("sm90_nvfp4_small_m", {"shape": (1, 1, 16, 2**30 + 16)}, "K must be at most 2^30"),
    "many columns": ("sm90_nvfp4_small_m", {"shape": (1, 1, 2**30 + 1, 16)}, "N times the batch is too large"),
    "many products": ("sm90_nvfp4_small_m", {"shape": (2**26 + 1, 1, 1, 16)}, "the batch is too large"),
    "no such kernel": ("sm90_unheard_of", {}, "no kernel has the name sm90_unheard_of"),
}


@pytest.mark.parametrize(("kernel", "problem", "reason"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_a_kernel_cannot(kernel, problem, reason):
    assert reason in plan(**problem, kernel=kernel).reason


def test_every_kernel_has_a_problem():
    """Also those that run only where they are named."""
    problems = list(itertools.product(LEFT, (False, True), (False, True), (CPU, HOPPER), [(1, 8, 16, 32)]))
    for kernel in _native.matmul_kernels():
        assert any(not plan(*problem, kernel).reason for problem in problems), kernel


@pytest.mark.parametrize("a", LEFT)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 16), (1, 64, 128256, 4096), (7, 64, 40, 48), (2**26, 1, 1, 16), (1, 8, 2**30, 16), (1, 8, 16, 2**30)],
)
def test_few_rows_on_hopper(a, shape):
    """By name alone, without scratch: the kernels for few rows are not planned yet."""
    assert plan(a, shape=shape, kernel=SMALL[a]) == (SMALL[a], 0, "")
    assert plan(a, shape=shape).kernel == "decode_then_dot"


def test_fused_kernels_run_only_by_name():
    planned = {plan(*p).kernel for p in itertools.product(LEFT, (False, True), (False, True), GPUS)}
    assert not any("fused" in kernel for kernel in planned)


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@pytest.mark.parametrize("shape", [(1, 128, 384, 512), (1, 5, 7, 256), (3, 5, 7, 64), (2, 300, 129, 48), (1, 1, 1, 16)])
def test_scratch_of_fused_kernels(shape):
    """Decoded rows, and copies of what no tensor map takes: codes unless K % 32 == 0, scales unless K % 256 == 0."""
    batch, m, n, k = shape
    rows = up(batch * m * up(k, 64) * 2, 256)
    data = 0 if k % 32 == 0 else up(batch * n * up(k // 2, 16), 256)
    scale = 0 if k % 256 == 0 else up(batch * n * up(k // 16, 16), 256)
    assert plan(shape=shape, kernel="sm90_nvfp4_fused") == ("sm90_nvfp4_fused", rows + data + scale, "")
    for a in ("bfloat16", "float16"):
        assert plan(a, shape=shape, kernel="sm90_dense_fused") == ("sm90_dense_fused", data + scale, "")


def test_shape_and_types_reach_the_plan(monkeypatch):
    """The lowering passes on what it knows of the operands."""
    asked = []
    original = _native.plan_matmul
    monkeypatch.setattr(_native, "plan_matmul", lambda **problem: asked.append(problem) or original(**problem))
    a, b = random_tensor(0, (2, 3, 48), Format("row")), random_tensor(1, (2, 5, 48))
    w = random_tensor(2, (7, 64), Format("window64"))
    with jax.default_device(jax.devices("cpu")[0]):
        matmul_nt(a, b, out_dtype=jnp.float16, accumulation="pinned")
        matmul_nt(random_tensor(3, (2, 3, 64)), w, implementation="native")
        matmul_nt(jnp.ones((6, 48), jnp.bfloat16), b := random_tensor(4, (5, 48)), implementation="cpu_dense_elements")
    common = {"capability": CPU, "kernel": None}
    first, second, third = (dict(asked[i]) for i in _first_of_each(asked))
    assert first == {**common, "shape": (2, 3, 5, 48), "a": "nvfp4", "windows": False, "out": "float16", "pinned": True}
    assert second == {
        **common,
        "shape": (1, 6, 7, 64),
        "a": "nvfp4",
        "windows": True,
        "out": "bfloat16",
        "pinned": False,
    }
    assert (third["a"], third["kernel"], third["shape"]) == ("bfloat16", "cpu_dense_elements", (1, 6, 5, 48))
    assert isinstance(b, NVFP4Tensor)


def _first_of_each(asked: list[dict]) -> list[int]:
    """A lowering may ask more than once."""
    return [i for i, problem in enumerate(asked) if problem not in asked[:i]]


@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_an_exported_program_has_the_portable_plan(accumulation):
    """No device is known where a program is exported: its kernel runs on every supported GPU."""
    if not _native.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    a = random_tensor(0, (16, 64))
    product = jax.jit(lambda a, b: matmul_nt(a, b, accumulation=accumulation))
    text = product.trace(a, a).lower(lowering_platforms=("cuda",)).as_text()
    assert ("sm80_nvfp4_blocks" in text) == (accumulation == "pinned")
    assert ("dot_general" in text) == (accumulation == "fast")
