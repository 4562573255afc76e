"""The self-check: a path that gives wrong bits is refused on its device, results are right, and one warning says so.

Faults are put between a kernel and what it returns, on a device that is taken for one like which none has run the
kernels: the CPU, and any GPU. A stand-in for cuBLASLt makes its own faults (cpp/cublaslt_stand_in.cc).
"""

import contextlib
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import skip_or_fail
from helpers import assert_bitwise, assert_same_tensor, matmul_by_formula
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import ask_stand_in, library_on_cpu, normal, order_free_operands
from scripts import in_two_processes

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4Tensor
from jnvfp4._native import load, plans, self_check
from jnvfp4._primitives import _base, _matmul_routes, quantize
from jnvfp4._primitives._sides import Side
from jnvfp4._primitives.dequantize import DequantizeParams
from jnvfp4._primitives.matmul import matmul_p
from jnvfp4._primitives.quantize import quantize_p
from jnvfp4._self_check import cases, known_answers

FP4 = "sm100_cublaslt_nvfp4"


# ---------------------------------------------------------------- a device like which none has run the kernels
@pytest.fixture
def never_run(native, monkeypatch):
    """The device of the test, of which nothing is known; two samples make a check of products."""
    monkeypatch.setattr(plans, "has_run_on", lambda capability: False)
    monkeypatch.setattr(self_check, "_FOUND", {})
    monkeypatch.setattr(self_check, "known_for", by_reference_on_the_cpu)
    monkeypatch.setattr(known_answers, "SAMPLES", [SAMPLE, SAMPLE._replace(shape=(70, 45, 48))])
    return native.device


@pytest.fixture(autouse=True)
def no_trace_with_a_fault():
    """JAX keeps what it traced, and with it the fault of a test; no kernel changes outside of tests."""
    jax.clear_caches()
    yield
    jax.clear_caches()


SAMPLE = next(s for s in known_answers.SAMPLES if s.shape == (129, 144, 80))


def by_reference_on_the_cpu(_device):
    """The CPU's kernels are what is faulty here. Compiling the reference takes long, so each result is kept."""

    def run(primitive, call):
        key = primitive.name, repr(call.params), *(v.tobytes() for v in call.operands)
        if key not in KNOWN:
            KNOWN[key] = self_check._run(jax.devices("cpu")[0], primitive, call, "reference")
        return KNOWN[key]

    return run


KNOWN: dict = {}


A, B = order_free_operands(None, (130, 140, 48))
X = np.asarray(normal((32, 64)).astype(jnp.bfloat16))


def want(a=A, b=B, out_dtype=jnp.bfloat16):
    return matmul_by_formula(a, b, dtype=out_dtype)


def kernel_of(device) -> str:
    return jnvfp4.supports("matmul_nt", A, B, device=device).kernel


def turned(scale):
    return jnp.flip(scale, axis=(-2, -1))


def with_garbage(y, product):
    """What stale scales behind the last column would leave in every row."""
    return jnp.where((product.b[1].shape[-1] % 4 != 0) & (jnp.arange(y.shape[-1]) == 3), y + 1, y)


# A fault of a product: of its operands, and of its result.
FAULTS = {
    "scale layout": (lambda p: p._replace(a=(p.a[0], turned(p.a[1]), p.a[2])), lambda y, p: y),
    "alpha": (lambda p: p._replace(b=(*p.b[:2], p.b[2] * 2)), lambda y, p: y),
    "stale padding": (lambda p: p, with_garbage),
    "nan": (lambda p: p, lambda y, p: y.at[..., -1, -1].set(np.nan)),
}
every_fault = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture
def faulty(monkeypatch):
    """Makes every kernel of products wrong; decode_then_dot is none."""

    def put(fault: str) -> None:
        before, after = FAULTS[fault]
        right = _matmul_routes._call_kernel
        wrong = lambda p, chosen: after(right(before(p), chosen), p)  # noqa: E731
        monkeypatch.setattr(_matmul_routes, "_call_kernel", wrong)
        jax.clear_caches()

    return put


@contextlib.contextmanager
def one_warning(text: str):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in found if "self-check" in str(w.message)]
    assert len(messages) == 1, messages
    assert re.search(text, messages[0]), messages


def multiply(**options):
    """A function that no other call can find compiled."""
    return jax.jit(lambda a, b: jnvfp4.matmul_nt(a, b, **options))


def on(device, *values):
    return jax.device_put(values, device)


# ---------------------------------------------------------------- products
@pytest.mark.long
@every_fault
def test_a_wrong_product_is_refused_and_the_result_is_right(never_run, faulty, fault):
    kernel = kernel_of(never_run)
    faulty(fault)
    text = rf"self-check of matmul_nt {kernel} on .* failed: call \d, result 0: .* differ.*doctor --full --json"
    with one_warning(text):
        for _ in range(2):  # the second program asks again
            assert_bitwise(multiply()(*on(never_run, A, B)), want())
        assert_bitwise(jnvfp4.matmul_nt(*on(never_run, A, B), out_dtype=np.float32), want(out_dtype=np.float32))


def test_a_right_product_is_used_without_a_word(never_run):
    kernel = kernel_of(never_run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = multiply().lower(*on(never_run, A, B)).as_text()
    assert f'kernel = "{kernel}"' in text
    assert not [thread for thread in threading.enumerate() if thread.name == "jnvfp4 self-check"]
    assert {key[0]: reason for key, reason in self_check._FOUND.items()}[f"matmul_nt {kernel}"] == ""


def test_a_kernel_that_stops_is_refused(never_run, monkeypatch):
    def stop(*_):
        raise RuntimeError("out of\norder")

    monkeypatch.setattr(_matmul_routes, "_call_kernel", stop)
    with one_warning("failed: RuntimeError: out of order"):
        assert_bitwise(multiply()(*on(never_run, A, B)), want())


def test_a_kernel_by_name_raises(never_run, faulty):
    kernel = kernel_of(never_run)
    faulty("alpha")
    with one_warning(kernel):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=f"'{kernel}' cannot run here: the self-check"):
                multiply(implementation=kernel)(*on(never_run, A, B))


def test_the_exact_decode_path_is_checked_before_it_is_used(never_run, faulty, monkeypatch):
    """If it too is wrong, the reference computes."""
    faulty("alpha")
    if never_run.platform == "cpu":
        pytest.skip("the CPU has no decode path")
    right = _matmul_routes._decode_then_dot
    monkeypatch.setattr(_matmul_routes, "_decode_then_dot", lambda product: right(product) * 2)
    with pytest.warns(RuntimeWarning) as found:
        assert_bitwise(multiply()(*on(never_run, A, B)), want())
    assert any("decode_then_dot" in str(w.message) for w in found)


def test_each_path_is_checked_once(never_run, monkeypatch):
    asked = []
    right = self_check.outcome
    monkeypatch.setattr(self_check, "outcome", lambda check, device: asked.append(check.path) or right(check, device))
    for _ in range(3):
        multiply()(*on(never_run, A, B))
    assert asked
    assert len(asked) == len(set(asked))


def test_memory_that_a_gpu_may_give_to_a_call_holds_nan(monkeypatch):
    """So that what a kernel reads and nobody wrote shows: before each call anew, since a call leaves its results."""
    found = []
    left = SimpleNamespace(block_until_ready=lambda: SimpleNamespace(delete=lambda: found.append("freed")))
    monkeypatch.setattr(jax, "device_put", lambda v, device: found.append((v == 0xFF).all()) or left)
    monkeypatch.setattr(self_check, "_run", lambda *_: found.append("call"))
    run = self_check.on(SimpleNamespace(platform="gpu"), "native")
    for _ in range(2):
        run(matmul_p, None)
    assert found == 2 * (3 * [True, "freed"] + ["call"])


def test_threads_find_it_once(never_run, faulty):
    faulty("nan")
    a, b = on(never_run, A, B)
    with one_warning("self-check"), ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: multiply()(a, b), range(4)):
            assert_bitwise(y, want())


# ---------------------------------------------------------------- where a program may be traced
def test_every_primitive_with_a_kernel_has_known_answers():
    targets = {name for module in load.extensions().values() for name in module.targets}
    assert {primitive.name for primitive in _base.PRIMITIVES} & targets == set(self_check.CASES)


def traced_calls(device) -> dict:
    """Ways to trace the product of a and b."""
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    y = lambda a, b: jnvfp4.matmul_nt(a, b)  # noqa: E731

    def of_shard_map(a, b):
        specs = jax.tree.map(lambda leaf: P("x") if leaf.ndim else P(), a)
        return jax.shard_map(y, mesh=mesh, in_specs=(specs, P()), out_specs=P("x"))(a, b)

    def of_vmap(a, b):
        return jax.vmap(y, in_axes=(0, None))(jax.tree.map(lambda leaf: leaf[None], a), b)[0]

    def of_scan(a, b):
        return jax.lax.scan(lambda _, __: (None, y(a, b)), None, length=1)[1][0]

    def within(make, call):
        def run(a, b):
            with contextlib.ExitStack() as stack:
                for context in make():
                    stack.enter_context(context)
                return call(a, b)

        return run

    constant = within(lambda: [jax.ensure_compile_time_eval()], y)
    strict = (
        (jax.numpy_dtype_promotion, "strict"),
        (jax.numpy_rank_promotion, "raise"),
        (jax.transfer_guard, "disallow"),
    )
    return {
        "shard_map": lambda a, b: jax.jit(of_shard_map)(a, b),
        "vmap": lambda a, b: jax.jit(of_vmap)(a, b),
        "scan": lambda a, b: jax.jit(of_scan)(a, b),
        "set_mesh": within(lambda: [jax.set_mesh(mesh)], lambda a, b: jax.jit(y)(a, b)),
        "remat": lambda a, b: jax.jit(jax.checkpoint(y))(a, b),
        "compile-time evaluation": lambda a, b: jax.jit(lambda: constant(a, b))(),
        "disable_jit": within(lambda: [jax.disable_jit()], y),
        "strict promotion": within(lambda: [f(mode) for f, mode in strict], lambda a, b: jax.jit(y)(a, b)),
    }


@pytest.mark.parametrize("where", traced_calls(None))
@pytest.mark.parametrize("fault", [None, "scale layout"])
def test_a_wrong_product_in_every_transformation(never_run, faulty, where, fault):
    if fault:
        faulty(fault)
    m = 131 + 2 * list(traced_calls(None)).index(where) + bool(fault)  # a shape that nothing else compiles
    a, b = order_free_operands(None, (m, 140, 48))
    expected = want(a, b)
    a, b = on(never_run, a, b)
    with one_warning("self-check") if fault else contextlib.nullcontext():
        assert_bitwise(traced_calls(never_run)[where](a, b), expected)


@pytest.mark.long
def test_gradients_are_right_with_a_wrong_product(never_run, faulty):
    """All three products of a layer, and its quantizers."""
    x, w = (jnp.asarray(normal(shape, seed=s)) for s, shape in enumerate([(96, 64), (80, 64)]))
    with jax.default_device(jax.devices("cpu")[0]):
        loss = lambda x, w: jnvfp4.linear(x, w).astype(jnp.float32).sum()  # noqa: E731
        expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    self_check._FOUND.clear()
    faulty("alpha")
    x, w = on(never_run, x, w)
    with one_warning("matmul_nt"):
        got = jax.jit(jax.value_and_grad(lambda x, w: jnvfp4.linear(x, w).astype(jnp.float32).sum(), (0, 1)))(x, w)
    if never_run.platform == "cpu":  # elsewhere the order of a sum may be another
        assert_same_tensor(got, expected)


def test_a_wrong_product_split_over_devices(never_run, devices, faulty):
    """A product that is split over rows: XLA asks for the kernels of its parts when it compiles."""
    if devices[0].platform != never_run.platform:
        pytest.skip("of another platform")
    faulty("nan")
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    a, b = order_free_operands(None, (len(devices) * 72, 140, 48))
    expected = want(a, b)
    sharding = lambda leaf: NamedSharding(mesh, P("x") if leaf.ndim else P())  # noqa: E731
    a = jax.device_put(a, jax.tree.map(sharding, a))
    b = jax.device_put(b, NamedSharding(mesh, P()))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert_bitwise(multiply()(a, b), expected)
    messages = [str(w.message) for w in found if "self-check" in str(w.message)]
    assert len(messages) == len({message.split(" on ")[0] for message in messages}) >= 1


# ---------------------------------------------------------------- where nothing is checked


@pytest.fixture
def no_check(monkeypatch):
    monkeypatch.setattr(self_check, "outcome", lambda *_: pytest.fail("a check ran"))


def test_an_export_checks_nothing(never_run, no_check):
    checks = jnvfp4.export_checks()
    platform = "cpu" if never_run.platform == "cpu" else "cuda"
    with jax.default_device(never_run):
        exported = jax.export.export(multiply(), platforms=[platform], disabled_checks=checks)(A, B)
    assert "nvfp4_matmul" in exported.mlir_module() or "nvfp4_decode" in exported.mlir_module()


def test_lowering_for_an_absent_device_checks_nothing(never_run, no_check):
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    checks = jnvfp4.export_checks()
    jax.export.export(multiply(), platforms=["cuda"], disabled_checks=checks)(A, B)


def test_devices_of_other_processes_are_not_asked(native):
    """A device that this process does not have, such as one of a description of machines elsewhere."""
    from jnvfp4._native import compat

    mine, absent = native.device, SimpleNamespace(platform="tpu", compute_capability="10.0")
    axes = SimpleNamespace(device_assignment=[mine, absent], mesh=None)
    module = SimpleNamespace(axis_context=axes, lowering_parameters=SimpleNamespace(for_export=False))
    assert compat.local_devices(SimpleNamespace(module_context=module)) == [mine]
    module.lowering_parameters.for_export = True
    assert compat.local_devices(SimpleNamespace(module_context=module)) == []


def test_devices_on_which_kernels_have_run_are_not_checked(native, no_check):
    capability = "0.0" if native.platform == "cpu" else native.device.compute_capability
    if not plans.has_run_on(int(capability.replace(".", ""))):
        pytest.skip("no kernel has run on a GPU like this")
    multiply(out_dtype=np.float16)(*on(native.device, A, B))


def test_where_kernels_have_run():
    assert [plans.has_run_on(number) for number in (0, 80, 89, 90, 100, 103, 121)] == 4 * [True] + 3 * [False]


def test_a_call_of_the_reference_is_not_checked(never_run, no_check):
    a, b = on(never_run, A, B)
    assert_bitwise(multiply(implementation="reference")(a, b), want())


# ---------------------------------------------------------------- quantizers
def test_a_wrong_quantizer_is_replaced_by_the_reference(never_run, monkeypatch):
    """Each spec has a kernel of its own, and so a check: the one that is right is used."""
    expected = jnvfp4.quantize(X, NVFP4_2D, implementation="reference")
    right = quantize.call_ffi

    def wrong(target, operands, results, **attrs):
        data, *rest = right(target, operands, results, **attrs)
        return [data if attrs["spec"] == NVFP4.ffi_attrs() else data.at[..., -1].add(1), *rest]

    monkeypatch.setattr(quantize, "call_ffi", wrong)
    x = jax.device_put(X, never_run)
    with one_warning(r"self-check of quantize NVFP4_2D with its amax of bfloat16 on .* differ"):
        jax.jit(lambda x: jnvfp4.quantize(x, NVFP4))(x)
        assert_same_tensor(jax.jit(lambda x: jnvfp4.quantize(x, NVFP4_2D))(x), expected)
    with pytest.raises(NotImplementedError, match="nvfp4_quantize: implementation='native' cannot run here: the self-"):
        jax.jit(lambda x: jnvfp4.quantize(x, NVFP4_2D, implementation="native"))(x)


CHECKS = {
    "quantize": lambda: cases.quantizer_check(quantize_p, (Side(NVFP4, False, True),), jnp.bfloat16),
    "dequantize": lambda: cases.dequantize_check(DequantizeParams(jnvfp4.Format(), jnp.dtype(jnp.float32), False)),
    "transpose": cases.transpose_check,
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("result", [0, -1])
def test_one_wrong_byte_is_found_anywhere(name, result):
    """Of each result of each call, in the last byte."""
    check = CHECKS[name]()
    cpu = jax.devices("cpu")[0]
    known = self_check.on(cpu, "native")

    def wrong(primitive, call):
        results = [v.copy() for v in known(primitive, call)]
        results[result].reshape(-1).view(np.uint8)[-1] ^= 1
        return results

    assert self_check.mismatch(check, known, known) == ""
    assert "1 of" in self_check.mismatch(check, wrong, known)


# ---------------------------------------------------------------- several processes
@pytest.mark.parametrize("call", ["a product", "a quantizer"])
def test_with_several_processes_it_raises_and_names_the_device(never_run, faulty, monkeypatch, call):
    faulty("alpha")
    right = quantize.call_ffi
    monkeypatch.setattr(quantize, "call_ffi", lambda *a, **k: [right(*a, **k)[0] ^ 1, *right(*a, **k)[1:]])
    a, b, x = on(never_run, A, B, X)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    device = re.escape(f"{never_run} ({never_run.device_kind})")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"self-check of .* on {device} failed: .* process 3 of 4, .*must comp"):
            multiply()(a, b) if call == "a product" else jax.jit(jnvfp4.quantize)(x)


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jnvfp4
from jnvfp4._native import plans
from jnvfp4._primitives import transpose
from jnvfp4.spec import NVFP4_2D
import jax.numpy as jnp
t = jnvfp4.quantize(jnp.ones((32, 32)), NVFP4_2D)
plans.has_run_on = lambda capability: False
if sys.argv[2] == "1":
    right = jax.ffi.ffi_call
    jax.ffi.ffi_call = lambda *a, **k: lambda *b, **c: [v ^ 1 for v in right(*a, **k)(*b, **c)]
try:
    jnvfp4.transpose(t, NVFP4_2D)
    print("done")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_a_wrong_kernel_in_one_of_two_processes_raises():
    right, wrong = in_two_processes("-c", TWO_PROCESSES)
    assert right.strip() == "done"
    assert re.match(r"jnvfp4: the self-check of transpose on cpu:\d+ \(cpu\) failed: .*process 1 of 2", wrong)


# ---------------------------------------------------------------- cuBLASLt's product, with a stand-in for the library


@pytest.fixture
def library(monkeypatch):
    """The stand-in, new enough for any Blackwell, also where there is an older cuBLASLt."""
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("libcublasLt.so.13", "13.2.0", ""))
    with library_on_cpu() as process:
        yield process


def through(library, call) -> list[np.ndarray]:
    """A call of nvfp4_matmul as the kernel with the stand-in computes it."""
    product, params = call.params.product(call.operands), call.params
    sides = (product.a, params.a), (product.b, params.b)
    a, b = (NVFP4Tensor(*map(jnp.asarray, parts), fmt) for parts, fmt in sides)
    result, ran, error = ask_stand_in(library, a, b, product.bias, params.out_dtype, kernel=FP4)
    assert ran == FP4
    if error:
        raise RuntimeError(error)
    return [result]


CHECK_OF_FP4 = cases.product_check(FP4, 100)
by_cpu = self_check.on(jax.devices("cpu")[0], "native")


@pytest.mark.parametrize("fault", ["", "layout", "alpha", "padding", "nan"])
def test_known_answers_of_the_library_see_each_fault_in_several_calls(library, fault):
    """No fault is found by luck; the padding needs a number of scales that is no multiple of 4."""
    library("go_wrong", fault)
    each = [CHECK_OF_FP4._replace(calls=partial(list, [call])) for call in CHECK_OF_FP4.calls()]
    assert len(each) > 5
    found = [self_check.mismatch(one, lambda _, call: through(library, call), by_cpu) for one in each]
    seen = [text for text in found if text]
    assert (len(seen) >= len(found) // 2) if fault else not seen
    assert all("elements differ, first at [" in text for text in seen)
