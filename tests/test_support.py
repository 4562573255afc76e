"""supports: the answer for a platform, an operation and its operands; doctor and the table of specs."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operands import normal

from jnvfp4 import NVFP4Tensor, Recipe, Support, quantize, recipes, supports
from jnvfp4._native import load, plans, self_check
from jnvfp4._ops.arguments import OPERATIONS
from jnvfp4.attention import KVCache
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_SR, ROW_SCALED, SUPPORTED_SPECS, WINDOW64, name_of

KEY = jax.random.key(0)
NT = (((1,), (1,)), ((), ()))


def a(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def t(*shape, spec=NVFP4) -> NVFP4Tensor:
    return jax.eval_shape(lambda x: quantize(x, spec), a(*shape))


SIZES = a(3, dtype=jnp.int32)
X, W, A, B = a(32, 64), a(48, 64), t(32, 64), t(48, 64)
KV, LENGTHS = KVCache(*[t(2, 3, 64, 128, spec=ROW_SCALED)] * 2), a(2, dtype=jnp.int32)
# operation, operands, options
CALLS = {
    "quantize": ("quantize", (X,), {}),
    "quantize by position": ("quantize", (X, NVFP4_2D), {"transpose": True}),
    "quantize with amax": ("quantize", (X,), {"spec": ROW_SCALED, "amax": a(32, dtype=jnp.float32)}),
    "quantize with a key": ("quantize", (X,), {"spec": NVFP4_SR, "key": KEY}),
    "a spec": (NVFP4_SR, (X,), {"key": KEY}),
    "an array": (NVFP4, (normal((32, 64)),), {"amax": 2.0}),
    "quantize_pair": ("quantize_pair", (X, NVFP4, NVFP4), {"amax": (None, 1.0)}),
    "dequantize": ("dequantize", (A, jnp.bfloat16), {}),
    "dequantize to a NumPy type": ("dequantize", (A, np.float32), {}),
    "dequantize to a named dtype": ("dequantize", (A,), {"dtype": "float16"}),
    "decode_attention": ("decode_attention", (a(2, 6, 128), KV, LENGTHS), {"sm_scale": 0.1}),
    "append_kv": ("append_kv", (KV, a(2, 3, 128), a(2, 3, 128), LENGTHS), {}),
    "transpose": ("transpose", (t(32, 64, spec=NVFP4_2D), NVFP4_2D), {}),
    "fake_quant": ("fake_quant", (X, WINDOW64), {}),
    "gptq": ("gptq", (W, a(64, 64, dtype=jnp.float32)), {}),
    "linear": ("linear", (X, W, recipes.pretrain()), {"key": KEY, "bias": a(48)}),
    "linear frozen": ("linear", (X, B), {}),
    "linear kn": ("linear", (X, a(64, 48)), {"w_axes": "kn", "accumulation": "pinned"}),
    "dot_general": ("dot_general", (X, W, NT), {"preferred_element_type": jnp.float32, "recipe": Recipe()}),
    "grouped_linear": ("grouped_linear", (X, a(3, 48, 64), SIZES, recipes.pretrain()), {"key": KEY}),
    "einsum": ("einsum", ("mk,nk->nm", X, W), {"recipe": recipes.pretrain(), "key": KEY}),
}


@pytest.mark.parametrize(("op", "operands", "options"), CALLS.values(), ids=CALLS)
def test_calls_that_a_native_kernel_runs(native, op, operands, options):
    assert supports(op, *operands, device=native.device, **options) == (True, native.platform, "")


def test_the_calls_are_of_every_operation():
    called = {op for op, *_ in CALLS.values() if isinstance(op, str)}
    assert called | {"matmul_nt", "grouped_matmul_nt"} == set(OPERATIONS)


@pytest.mark.parametrize("op", [*OPERATIONS, NVFP4, WINDOW64], ids=str)
def test_supports_without_operands(native, op):
    assert supports(op, device=native.device) == (True, native.platform, "")


@pytest.mark.parametrize("spec", SUPPORTED_SPECS, ids=name_of)
def test_the_specs_that_gpus_have_kernels_for(any_gpu, spec):
    answer = supports(spec, device=any_gpu("9.0"))
    assert answer.native == (spec.select != "search")
    if not answer:
        assert answer == (False, "reference", 'no kernel for select="search" on GPUs')
        assert answer == supports("quantize", X, spec, device=any_gpu("9.0"))
        assert answer == supports("quantize", X, spec=spec, device=any_gpu("9.0"))


def test_supports_asks_the_default_device(cpu):
    assert supports("quantize") == supports("quantize", device=jax.devices("cpu")[0])


# ---------------------------------------------------------------- the kernel of matmul_nt


EXPERTS = t(3, 48, 64)
PRODUCTS = {
    "nvfp4": ((A, B), {}, "cpu_nvfp4_blocks"),
    "named": ((), {"a": A, "b": B}, "cpu_nvfp4_blocks"),
    "half named": ((A,), {"b": B, "bias": a(48)}, "cpu_nvfp4_blocks"),
    "windows": ((t(32, 64, spec=WINDOW64), B), {"out_dtype": jnp.float32}, "cpu_nvfp4_blocks"),
    "weight-only": ((X, B), {"accumulation": "pinned"}, "cpu_dense_elements"),
    "arrays": ((quantize(normal((32, 64))), quantize(normal((48, 64)))), {}, "cpu_nvfp4_blocks"),
    "grouped": ((A, EXPERTS, SIZES), {}, "cpu_nvfp4_blocks"),
    "grouped, named": ((), {"a": A, "b": EXPERTS, "group_sizes": SIZES}, "cpu_nvfp4_blocks"),
    "grouped, weight-only": ((X, EXPERTS, SIZES), {"out_dtype": jnp.float32}, "cpu_dense_elements"),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_kernel_of_a_product(product):
    (operands, options, kernel), op = PRODUCTS[product], "grouped_matmul_nt" if "grouped" in product else "matmul_nt"
    assert supports(op, *operands, device=jax.devices("cpu")[0], **options) == (True, kernel, "")


# ---------------------------------------------------------------- no native kernel
def gpu(capability):
    return SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)


TPU = SimpleNamespace(platform="tpu")


@pytest.fixture
def any_device(monkeypatch):
    """Devices that this machine need not have."""
    monkeypatch.setattr(jax, "Device", SimpleNamespace)


@pytest.mark.parametrize("op", [NVFP4, "matmul_nt", "linear"], ids=str)
@pytest.mark.parametrize("operands", [False, True], ids=["alone", "operands"])
def test_a_platform_without_kernels(any_device, op, operands):
    calls = {NVFP4: (X,), "matmul_nt": (A, B), "linear": (X, W)}
    answer = supports(op, *(calls[op] if operands else ()), device=TPU)
    assert (answer.native, answer.kernel) == (False, "reference")
    assert answer.reason.startswith('no native kernels for platform "tpu" in this build (built: cpu')


def test_a_gpu_that_is_too_old_runs_the_reference(any_device, monkeypatch):
    monkeypatch.setattr(load, "available", lambda name: name == "cuda")
    answer = supports("quantize", device=gpu("7.5"))
    assert answer == (False, "reference", "compute capability 7.5 is below the supported 8.0")
    assert supports("quantize", device=gpu("8.0")) == (True, "cuda", "")


# ---------------------------------------------------------------- the kernel of matmul_nt on a GPU
WINDOWS_A, WINDOWS_B = t(32, 64, spec=WINDOW64), t(48, 64, spec=WINDOW64)
PREPARED = "sm90_nvfp4_pinned_prepared"
# The kernel of any GPU, and that of Hopper where it has another one.
GPU_MATMULS = {
    "nvfp4": ((t(65, 64), B), {}, "decode_then_dot sm90_nvfp4_fused"),
    "64 rows": ((t(64, 64), B), {}, "sm80_nvfp4_blocks_small_m sm90_nvfp4_fused"),
    "few rows": ((t(16, 64), B), {}, "sm80_nvfp4_blocks_small_m sm90_nvfp4_small_m"),
    "pinned": ((A, B), {"accumulation": "pinned"}, "sm80_nvfp4_blocks_small_m"),
    "pinned of many rows": ((t(65, 64), B), {"accumulation": "pinned"}, "sm80_nvfp4_blocks sm90_nvfp4_pinned"),
    "windows of a": ((WINDOWS_A, B), {}, "sm80_nvfp4_blocks_small_m"),
    "windows of b": ((A, WINDOWS_B), {}, "sm80_nvfp4_blocks_small_m"),
    "windows of many rows": ((t(65, 64), WINDOWS_B), {}, "sm80_nvfp4_blocks sm90_nvfp4_windows"),
    "windows pinned": ((t(65, 64), WINDOWS_B), {"accumulation": "pinned"}, f"sm80_nvfp4_blocks {PREPARED}"),
    "weight-only": ((X, B), {}, "decode_then_dot sm90_dense_fused"),
    "weight-only of few rows": ((a(1, 64), B), {}, "decode_then_dot sm90_dense_small_m"),
    "weight-only pinned": ((X, B), {"accumulation": "pinned"}, "sm80_dense_elements"),
    "named": ((A, B), {"implementation": "sm80_nvfp4_blocks"}, "sm80_nvfp4_blocks"),
}
CPU_KERNEL, DOT, SM80 = "cpu_nvfp4_blocks", "decode_then_dot", "sm80_nvfp4_blocks"
GPU_REFUSALS = {
    "the CPU's": ((A, B), {"implementation": CPU_KERNEL}, f"{CPU_KERNEL} runs on the CPU, not on .* 9.0"),
    "a pinned dot": ((A, B), {"implementation": DOT, "accumulation": "pinned"}, f"{DOT} cannot: its order of summ"),
    "a dot of windows": ((WINDOWS_A, B), {"implementation": DOT}, f"{DOT} cannot: it takes no operand with amax_scope"),
    "blocks of an array": ((X, B), {"implementation": SM80}, f"{SM80} cannot: .* must be an NVFP4 tensor"),
    "elements of a tensor": ((A, B), {"implementation": "sm80_dense_elements"}, "left operand must be a bfloat16 or"),
}


@pytest.fixture
def any_gpu(any_device, monkeypatch):
    """GPUs whose kernels are planned, not run, with cuBLASLt 13.2."""
    monkeypatch.setattr(load, "available", lambda name: name == "cuda")
    use_cublaslt(monkeypatch, "13.2.0")
    return gpu


def use_cublaslt(monkeypatch, version: str, reason: str = "") -> None:
    found = plans.CublasLt("" if reason else "/lib/libcublasLt.so.13", version, reason)
    monkeypatch.setattr(plans, "cublaslt", lambda: found)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize(("operands", "options", "kernel"), GPU_MATMULS.values(), ids=GPU_MATMULS)
def test_the_kernel_of_a_product_on_a_gpu(any_gpu, operands, options, kernel, capability):
    of_any, *of_hopper = kernel.split()
    expected = of_hopper[0] if of_hopper and capability == "9.0" else of_any
    if kernel == GPU_MATMULS["nvfp4"][2] and capability in ("10.0", "12.0"):
        expected = FP4
    assert supports("matmul_nt", *operands, device=any_gpu(capability), **options) == (True, expected, "")


@pytest.mark.parametrize(("capability", "pinned"), [("9.0", "sm90_nvfp4_pinned_grouped"), ("8.0", "")])
def test_the_kernel_of_groups_in_the_pinned_order_on_a_gpu(any_gpu, capability, pinned):
    answer = supports("grouped_matmul_nt", A, EXPERTS, SIZES, device=any_gpu(capability), accumulation="pinned")
    assert answer[:2] == (bool(pinned), pinned)


FP4 = "sm100_cublaslt_nvfp4"
OLD = f"{FP4} needs cuBLASLt 13.2 or newer on compute capability 10.3, got 13.1.2"


NO_LIBRARY = {"old": ("13.1.2", "", OLD), "none": ("", "there is none", f"{FP4} needs cuBLASLt: there is none")}


@pytest.mark.parametrize(("version", "why", "reason"), NO_LIBRARY.values(), ids=NO_LIBRARY)
def test_why_fp4_tensor_cores_are_not_used(any_gpu, monkeypatch, version, why, reason):
    """Only products that would use them say so."""
    use_cublaslt(monkeypatch, version, why)
    for name, (operands, options, kernel) in GPU_MATMULS.items():
        answer = supports("matmul_nt", *operands, device=gpu("10.3"), **options)
        assert answer == (True, kernel.split()[0], reason if name == "nvfp4" else "")
    assert supports("matmul_nt", t(65, 64), B, device=gpu("9.0")) == (True, "sm90_nvfp4_fused", "")
    named = supports("matmul_nt", t(65, 64), B, device=gpu("10.3"), implementation=FP4)
    assert named == (False, FP4, reason)
    asked = supports("matmul_nt", t(65, 64), B, device=gpu("10.3"), implementation=DOT)
    assert asked == (True, DOT, "")


def test_what_the_self_check_refused_is_of_one_compute_capability(any_gpu, monkeypatch):
    """A kernel, then the exact decode path, then the reference; a GPU of the same name may compute otherwise."""

    def ask(capability, **options):
        return supports("matmul_nt", t(65, 64), B, device=any_gpu(capability), **options)

    monkeypatch.setattr(self_check, "_FOUND", {})
    reason = f"the self-check of matmul_nt {FP4} on {gpu('10.0')} (GPU) failed: wrong"
    for kernel, why in ((FP4, ""), (DOT, reason)):
        assert ask("10.0") == (True, kernel, why)
        self_check._FOUND[self_check._key(f"matmul_nt {kernel}", gpu("10.0"))] = "wrong"
        assert ask("10.0", implementation=FP4) == (False, FP4, reason)
    assert ask("10.0") == (False, "reference", reason)
    assert ask("10.3") == (True, FP4, "")


@pytest.mark.parametrize(("operands", "options", "reason"), GPU_REFUSALS.values(), ids=GPU_REFUSALS)
def test_why_a_kernel_cannot_run_on_a_gpu(any_gpu, operands, options, reason):
    answer = supports("matmul_nt", *operands, device=any_gpu("9.0"), **options)
    assert (answer.native, answer.kernel) == (False, options["implementation"])
    assert re.search(reason, answer.reason)


def test_a_kernel_of_gpus_does_not_run_on_the_cpu():
    answer = supports("matmul_nt", A, B, device=jax.devices("cpu")[0], implementation=SM80)
    assert answer == (False, SM80, f"{SM80} runs on GPUs from compute capability 8.0, not on the CPU")


def test_the_reference_asked_for(native):
    want = (False, "reference", 'implementation="reference" asks for it')
    assert supports("matmul_nt", A, B, device=native.device, implementation="reference") == want
    assert supports(NVFP4, device=native.device, implementation="reference") == want
    assert [bool(Support(answer, "kernel", "")) for answer in (False, True)] == [False, True]


# ---------------------------------------------------------------- errors
ERRORS = {
    "operation": (("conv",), {}, ValueError, "supports: op_or_spec must be a QuantSpec or one of .*quantize, .*'conv'"),
    "recipe": ((Recipe(),), {}, ValueError, "supports: op_or_spec must be a QuantSpec or one of .*, got Recipe"),
    "list": ((["quantize"],), {}, ValueError, r"supports: op_or_spec must be .*, got \['quantize'\]"),
    "device": (("quantize",), {"device": "cpu"}, TypeError, "supports: device must be a jax.Device, got 'cpu'"),
    "option": (("quantize", X), {"speed": 1}, TypeError, "quantize: got an unexpected keyword argument 'speed'"),
    "option alone": (("matmul_nt",), {"speed": 1}, TypeError, "matmul_nt: got an unexpected keyword argument 'speed'"),
    "K": (("quantize", a(4, 100)), {}, ValueError, "quantize: K must be a multiple of 16, got x.shape="),
    "no operand": (("matmul_nt", A), {}, TypeError, "matmul_nt: missing a required argument: 'b'"),
    "kernel": (("matmul_nt", A, B), {"implementation": "x"}, ValueError, "matmul_nt: implementation must be"),
}


@pytest.mark.parametrize(("arguments", "options", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_wrong_arguments_raise_the_error_of_the_operation(arguments, options, error, text):
    with pytest.raises(error, match=text):
        supports(*arguments, **options)
