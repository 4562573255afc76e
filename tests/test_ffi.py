"""The handlers refuse calls that Python never makes, before they touch memory.

`.ci/run` repeats these tests with the CPU module under AddressSanitizer and UndefinedBehaviorSanitizer, and
`.ci/run_gpu` with the CUDA module under compute-sanitizer.
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from calls import Array, Call, valid_calls, wrong_arrays, wrong_attrs
from conftest import skip_or_fail
from jax._src.dispatch import runtime_tokens
from rules import OF_HANDLERS, norm_of_cpu

from jnvfp4 import NVFP4, ROW_SCALED, WINDOW64, matmul_nt, quantize
from jnvfp4._native import load

SHORT = (  # of each target
    *("quantize stochastic", "pair stochastic", "dequantize windows", "rht_amax"),
    *("matmul windows", "decode", "epilogue", "grouped dense", "attention in pages", "append in pages"),
)
EVERY_CALL = valid_calls("cpu") | valid_calls("cuda")
NAMES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in EVERY_CALL]


def the_call(native, name: str) -> Call:
    calls = valid_calls(native.platform, getattr(native.device, "compute_capability", None) == "9.0")
    if name not in calls:
        pytest.skip(f"{native.platform} has no such target")
    return calls[name]


def refusal(call: Call) -> str | None:
    """The text of the INVALID_ARGUMENT that a call gives, or None if it runs; any other outcome is raised."""
    try:
        call.run()
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("INVALID_ARGUMENT: "):
            raise
        runtime_tokens.clear()  # jax.effects_barrier() would raise the error again, in another test
        return str(error)
    return None


def names_of(call: Call) -> list[str]:
    """What an error may name: the array itself, or one that does not fit it any more."""
    return ["a", "D", *(a.name for a in (*call.operands, *call.results)), *call.attrs]


def with_array(call: Call, index: int, array: Array) -> Call:
    arrays = list(call.operands + call.results)
    arrays[index] = array
    return replace(call, operands=tuple(arrays[: len(call.operands)]), results=tuple(arrays[len(call.operands) :]))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_target_has_a_call(platform):
    if not load.available(platform):
        skip_or_fail(platform, f"no kernels for {platform} in this build")
    called = {f"nvfp4_{call.target}" for call in valid_calls(platform).values()}
    assert called == set(load.extensions()[platform].targets)


@pytest.mark.parametrize("name", NAMES)
def test_the_call_itself_runs(native, name):
    assert refusal(the_call(native, name)) is None


def check_wrong_arrays(call: Call, *, all_of: bool) -> None:
    """All wrong arrays, or one shape and one type in turns, in place of each array, are refused by its name."""
    for index, array in enumerate(call.operands + call.results):
        wrong = list(wrong_arrays(array))
        some = [w for w in wrong if 0 not in w.shape]  # an array without elements is often one that is left out
        kinds = [[w for w in some if (w.shape == array.shape) == alike] for alike in (False, True)]
        for other in wrong if all_of else [kind[7 * index % len(kind)] for kind in kinds if kind]:
            text = refusal(with_array(call, index, other))
            assert text is not None, f"ran with {other}"
            if array.name == "scratch" and "bytes of scratch" in text:  # a plan that does not fit says how many it has
                continue
            named = [name for name in names_of(call) if f"{name} must" in text or f"{name} and" in text]
            assert named, f"{other}: {text}"


@pytest.mark.parametrize("name", EVERY_CALL)
def test_one_wrong_of_each_operand_and_result_is_refused(native, name):
    check_wrong_arrays(the_call(native, name), all_of=False)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_operand_or_result_is_refused(native, name):
    check_wrong_arrays(the_call(native, name), all_of=True)


@pytest.mark.parametrize(("call", "words"), OF_HANDLERS, ids=lambda v: v if isinstance(v, str) else v.target)
def test_shapes_that_break_a_rule_together_are_refused(native, call, words):
    """All of them fit each other, so that one check alone can see what is wrong."""
    if call.target not in {other.target for other in valid_calls(native.platform).values()}:
        pytest.skip(f"{native.platform} has no such target")
    text = refusal(call)
    assert text is not None
    assert words in text


def test_a_kernel_that_takes_no_norm_refuses_it(native):
    if native.platform != "cpu":
        pytest.skip("the kernel is the CPU's")
    call, words = norm_of_cpu
    assert words in refusal(call)


def counts_random_bits(call: Call, attr: str) -> bool:
    streams = {o.name for o in call.operands if o.name.endswith("stream") and o.shape != (0,)}
    return not streams.isdisjoint({"stream", attr.replace("_blocks", " stream")})


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_attribute_is_refused(native, name):
    call = the_call(native, name)
    for attr, wrong in wrong_attrs(call.attrs):
        if attr.endswith("_blocks") and not counts_random_bits(call, attr):
            continue
        text = refusal(replace(call, attrs={**call.attrs, attr: wrong}))
        assert text is not None, f"{name}: ran with {attr}={wrong}"
        assert attr in text, text


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_operand_result_or_attribute_is_refused(native, name):
    call = the_call(native, name)
    assert refusal(replace(call, operands=call.operands[:-1]))
    if len(call.results) > 1:  # XLA drops a GPU call without any result
        assert refusal(replace(call, results=call.results[:-1]))
    for attr in call.attrs:
        assert refusal(replace(call, attrs={k: v for k, v in call.attrs.items() if k != attr}))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("pair", {"row_spec": ROW_SCALED, "col_spec": NVFP4}),  # no kernel quantizes both in one pass
        ("pair", {"row_spec": WINDOW64, "col_spec": WINDOW64}),  # finds its amaxes, and these are given
        ("pair windows", {"row_spec": ROW_SCALED, "col_spec": ROW_SCALED}),  # does not find its amaxes
        ("quantize rows found", {"spec": NVFP4}),  # the amax of a tensor is never found
    ],
    ids=str,
)
def test_a_spec_that_does_not_go_with_the_operands_is_refused(native, name, specs):
    call = the_call(native, name)
    assert refusal(replace(call, attrs={**call.attrs, **{k: s.ffi_attrs() for k, s in specs.items()}}))


@pytest.mark.parametrize("name", ["quantize", "quantize rows found", "dequantize", "matmul"])
def test_no_rows_are_no_work(native, name):
    """A program with a symbolic number of rows may run with none."""
    call = the_call(native, name)
    rows = {"dequantize": 16, "matmul": 24}.get(name, 64)

    def without_rows(array: Array) -> Array:
        if rows not in array.shape or array.name.startswith("b "):
            return array
        axis = array.shape.index(rows)
        return replace(array, shape=(*array.shape[:axis], 0, *array.shape[axis + 1 :]))

    operands, results = tuple(map(without_rows, call.operands)), tuple(map(without_rows, call.results))
    assert refusal(replace(call, operands=operands, results=results)) is None


def test_an_array_that_kernels_cannot_read_in_words_of_16_bytes_is_refused(tmp_path):
    """In C++, since JAX copies such arrays on a CPU; on a GPU it imports them from other libraries."""
    root, program = Path(__file__).parents[1], tmp_path / "alignment"
    flags = ["-std=c++20", f"-I{root / 'ffi'}", "-isystem", jax.ffi.include_dir()]
    subprocess.run(["g++", *flags, root / "tests/cpp/alignment.cc", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- the plan of a product
def test_a_plan_of_another_device_is_adapted(native):
    """A program lowered for a kernel that this device lacks runs one that fits, with the same bits."""
    call = the_call(native, "matmul")
    other = "sm80_nvfp4_blocks" if native.platform == "cpu" else "cpu_nvfp4_blocks"
    assert refusal(replace(call, attrs={**call.attrs, "kernel": other, "pinned": True})) is None


def test_a_plan_that_cannot_be_adapted_names_both(native):
    """decode_then_dot is XLA operations, which a handler cannot run: a GPU has nothing else without scratch."""
    call = the_call(native, "matmul dense")
    text = refusal(replace(call, attrs={**call.attrs, "kernel": "decode_then_dot"}))
    if native.platform == "cpu":
        assert text is None
    else:
        assert "lowered for the kernel decode_then_dot" in text
        assert "compute capability" in text


@pytest.mark.parametrize("precision", ["highest", "F16_F16_F16", "BF16_BF16_F32"])
def test_default_matmul_precision_leaves_the_gpu_product_alone(precision):
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    a = quantize(jnp.ones((16, 32)))
    texts = []
    for name in (None, precision):
        product = jax.jit(lambda a, b: matmul_nt(a, b, implementation="decode_then_dot"))
        with jax.default_matmul_precision(name):
            texts.append(product.trace(a, a).lower(lowering_platforms=("cuda",)).as_text())
    dots = [[line.split("dot_general")[1] for line in t.splitlines() if "dot_general" in line] for t in texts]
    assert dots[0]
    assert dots[0] == dots[1]
