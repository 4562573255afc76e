"""``jnvfp4 doctor``: what it prints for people, and the JSON that is pasted into reports of bugs."""

import json
from types import SimpleNamespace

import jax
import pytest
from conftest import gpus, skip_or_fail

import jnvfp4
from jnvfp4._native import load, plans, self_check
from jnvfp4._primitives import transpose
from jnvfp4._reports import doctor, support
from jnvfp4._self_check import cases
from jnvfp4.checkpoints._files.errors import Exit
from jnvfp4.cli import main

FP4 = "sm100_cublaslt_nvfp4"
OLD = f"{FP4} needs cuBLASLt 13.2 or newer on compute capability 10.3, got 13.1.2"


@pytest.fixture
def few_checks(monkeypatch):
    """One check that is quick, and one that applies nowhere."""
    few = [(cases.transpose_check(), ""), (cases.transpose_check()._replace(path="other"), "it runs on GPUs alone")]
    monkeypatch.setattr(doctor, "checks", lambda capability, full: iter(few))


@pytest.fixture(autouse=True)
def no_trace_with_a_fault():
    """JAX keeps what it traced, and with it the fault of a test."""
    yield
    jax.clear_caches()


def wrong_transpose(monkeypatch) -> None:
    jax.clear_caches()
    right = jax.ffi.ffi_call
    wrong = lambda *call: lambda *ops, **attrs: [v ^ 1 for v in right(*call)(*ops, **attrs)]  # noqa: E731
    monkeypatch.setattr(transpose.jax.ffi, "ffi_call", wrong)


# ---------------------------------------------------------------- for people
@pytest.mark.long
def test_every_kernel_is_checked(capsys, monkeypatch):
    """On every kind of device that is here: one line for each check, and none fails. `.ci/run` checks all specs."""
    monkeypatch.setattr(doctor, "CHECKED_SPECS", doctor.QUICK_SPECS)
    monkeypatch.setattr(doctor, "CHECKED_PAIRS", doctor.CHECKED_PAIRS[1:])
    assert doctor.doctor()
    out = capsys.readouterr().out
    assert out.startswith(f"jnvfp4   {jnvfp4.__version__}  (sources ")
    lines = [line for line in out.splitlines() if line.partition(": ")[0] in {str(d) for d in doctor.devices()}]
    for kernel in (*plans.matmul_kernels(), *plans.grouped_kernels()):
        assert any(f"matmul_nt {kernel}: " in line for line in lines)
    for operation in ("quantize", "quantize_pair", "dequantize"):
        assert any(line.split(": ")[1].split()[0] == operation and line.endswith(": ok") for line in lines), operation
    assert "failed" not in out
    assert "cpu:0: matmul_nt cpu_nvfp4_blocks: ok" in out
    assert f"cpu:0: matmul_nt {FP4}: not applicable: {FP4} runs on GPUs of compute capability 10.0 to 12.1, not" in out
    assert "cpu:0: matmul_nt of bfloat16 8192x4096x4096: cpu_dense_elements" in out


def test_every_kernel_of_the_plan_that_a_gpu_has_is_checked_there(monkeypatch):
    """Without a GPU the list at least: all kernels for Blackwell apply where the library is new enough."""
    monkeypatch.setattr(load, "available", lambda name: name == "cuda")
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("/lib/libcublasLt.so.13", "13.2.0", ""))
    applies = {check.path for check, reason in doctor.checks(100, True) if not reason}
    products = {"sm80_nvfp4_blocks_small_m", FP4, "decode_then_dot", "sm80_nvfp4_blocks", "sm80_dense_elements"}
    assert {path.split()[1] for path in applies if path.startswith("matmul_nt")} == products
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("/lib/libcublasLt.so.13", "13.1.2", ""))
    reasons = {check.path: reason for check, reason in doctor.checks(103, True)}
    assert reasons[f"matmul_nt {FP4}"] == OLD


def test_quick_checks_are_some_of_all():
    quick, every = (dict((check.path, check) for check, _ in doctor.checks(0, full)) for full in (False, True))
    assert quick.keys() < every.keys()
    assert {path for path in every if "matmul_nt" in path} <= quick.keys()
    on_cpu = quick["matmul_nt cpu_nvfp4_blocks"]
    assert (len(list(on_cpu.calls())), len(list(every[on_cpu.path].calls())) > 1) == (1, True)


@pytest.mark.parametrize(
    ("full", "capability", "runs_all"),
    [(False, None, False), (True, None, True), (False, "9.0", False), (False, "10.0", True)],  # none has run on 10.0
)
def test_the_last_line_says_which_checks_ran(few_checks, monkeypatch, capsys, full, capability, runs_all):
    if capability is not None:
        device = SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
        outcomes = [{"device": "gpu", "check": "a", "outcome": "ok", "reason": ""}]
        monkeypatch.setattr(load, "available", lambda name: name == "cuda")
        monkeypatch.setattr(doctor, "devices", lambda: [device])
        monkeypatch.setattr(doctor, "examine", lambda device, full: iter(outcomes))
    else:
        monkeypatch.setattr(doctor, "devices", lambda: [jax.devices("cpu")[0]])
    assert doctor.doctor(full)
    last = "all 1 checks ran" if runs_all else "1 quick checks ran; jnvfp4 doctor --full runs all"
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"ok: {last}"
    assert ("cpu:0: 1 GPU kernel: not applicable here" in out) == (capability is None and not full)


def test_a_platform_without_kernels(few_checks, capsys, monkeypatch):
    monkeypatch.setattr(support, "no_kernels", lambda device: "the reason")
    assert doctor.doctor()
    assert "cpu:0: transpose: not applicable: reference only: the reason" in capsys.readouterr().out.splitlines()


def test_a_wrong_byte(few_checks, capsys, monkeypatch):
    """It is printed, and no record is left: programs find out for themselves."""
    monkeypatch.setattr(self_check, "_FOUND", {})
    wrong_transpose(monkeypatch)
    assert not doctor.doctor()
    assert self_check._FOUND == {}
    out = capsys.readouterr().out
    assert "NOT OK: 1 failed; " in out.splitlines()[-1]
    assert "cpu:0: transpose: failed: call 1, result 0: 13440 of 13440 elements differ, first at [0, 0]: got" in out
    assert "cpu:0: other: not applicable: it runs on GPUs alone" in out
    assert not doctor.doctor(full=False)


@pytest.mark.parametrize(
    ("found", "shown"),
    [(("/lib/libcublasLt.so.13", "13.1.2", ""), "13.1.2  /lib/libcublasLt.so.13"), (("", "", "why"), "none: why")],
    ids=["found", "none"],
)
def test_the_copy_of_cublaslt_or_the_reason(few_checks, capsys, monkeypatch, found, shown):
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt(*found))
    assert doctor.doctor()
    assert f"cublaslt {shown}" in capsys.readouterr().out.splitlines()
    report = doctor.report()
    assert report["full"]
    assert main(["doctor", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["full"]
    assert (report["cublaslt"]["path"], report["versions"]["cublaslt"] or "", report["cublaslt"]["reason"]) == found


@pytest.mark.parametrize(
    ("capability", "version", "line", "run"),
    [
        ("10.3", "13.1.2", f"not used, products decode to 16 bits: {OLD}", False),
        ("10.3", "13.2.0", f"used by {FP4}, which is compiled, but was never run on such a GPU", False),
        ("12.0", "12.8.4", f"used by {FP4}, which is compiled, but was never run on such a GPU", False),
        ("9.0", "13.2.0", None, True),
        ("13.0", "13.2.0", None, False),
    ],
)
def test_whether_fp4_tensor_cores_are_used(monkeypatch, capsys, capability, version, line, run):
    monkeypatch.setattr(load, "available", lambda name: name == "cuda")
    monkeypatch.setattr(plans, "cublaslt", lambda: plans.CublasLt("/lib/libcublasLt.so.13", version, ""))
    device = SimpleNamespace(platform="gpu", device_kind="GPU", compute_capability=capability)
    monkeypatch.setattr(doctor, "devices", lambda: [device])
    monkeypatch.setattr(doctor, "examine", lambda device, full: iter([]))
    assert doctor.doctor()
    out = capsys.readouterr().out.splitlines()
    assert [text for text in out if text.startswith("fp4 ")] == ([] if line is None else [f"fp4      {device}: {line}"])
    untried = "; kernels are compiled for it, but have not run on one before this"
    assert f"device   {device}: GPU, compute capability {capability}{'' if run else untried}" in out
    described = doctor.describe_device(device)
    assert (described["fp4"], described["kernels_have_run"]) == (line or "", run)


# ---------------------------------------------------------------- JSON
TEXT, MAYBE = str, (str, type(None))
SCHEMA = {
    "ok": bool,
    "full": bool,
    "versions": {
        **dict.fromkeys(("jnvfp4", "sources", "python", "machine", "jax", "jaxlib", "ffi_built", "ffi_running"), TEXT),
        **dict.fromkeys(("cuda_runtime", "cuda_of_driver", "driver", "cublaslt"), MAYBE),
    },
    "targets": {"cpu": TEXT, "cuda": MAYBE},
    "cublaslt": {"path": TEXT, "reason": TEXT},
    "devices": [
        dict.fromkeys(("device", "platform", "kind", "fp4"), TEXT)
        | {"compute_capability": MAYBE, "kernels_have_run": bool}
    ],
    "checks": [dict.fromkeys(("check", "device", "outcome", "reason"), TEXT)],
    "plan": [{"device": TEXT, "a": TEXT, "shape": [int], "kernel": TEXT}],
}


def assert_schema(value, schema, at="report") -> None:
    if isinstance(schema, dict):
        assert list(value) == list(schema), at
        for key, inner in schema.items():
            assert_schema(value[key], inner, f"{at}.{key}")
    elif isinstance(schema, list):
        assert value, at
        for item in value:
            assert_schema(item, schema[0], f"{at}[]")
    else:
        assert isinstance(value, schema), at


def test_json_has_the_schema(few_checks, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)  # one object and nothing else
    ordered = {**report, "devices": [dict(sorted(d.items())) for d in report["devices"]]}
    schema = {**SCHEMA, "devices": [dict(sorted(SCHEMA["devices"][0].items()))]}
    assert_schema(ordered, schema)
    assert report["versions"]["jnvfp4"] == jnvfp4.__version__
    assert report["ok"] is True
    cpu = [check for check in report["checks"] if check["device"] == "cpu:0"]
    assert cpu == [
        {"check": "transpose", "device": "cpu:0", "outcome": "ok", "reason": ""},
        {"check": "other", "device": "cpu:0", "outcome": "not applicable", "reason": "it runs on GPUs alone"},
    ]
    assert {"device": "cpu:0", "a": "nvfp4", "shape": [1, 4096, 4096], "kernel": "cpu_nvfp4_blocks"} in report["plan"]


def test_json_of_a_wrong_kernel(few_checks, capsys, monkeypatch):
    wrong_transpose(monkeypatch)
    assert main(["doctor", "--json"]) == Exit.VERIFICATION
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"] is False
    # A GPU is compared with the CPU's kernel, which is wrong in the same way here.
    on_cpu = [check for check in report["checks"] if check["device"] == "cpu:0"]
    assert {check["outcome"] for check in on_cpu} == {"failed", "not applicable"}
    assert err == "error: a kernel gives other bits than the reference\n"


def test_versions_of_a_gpu():
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    versions = doctor.versions()
    assert all(versions[name] for name in ("cuda_runtime", "cuda_of_driver"))


@pytest.mark.parametrize(("number", "text"), [(13020, "13.2"), (12090, "12.9"), (0, None), (None, None)])
def test_cuda_versions_are_made_of_numbers(monkeypatch, number, text):
    monkeypatch.setattr(doctor.compat, "cuda_versions", lambda: (number, number))
    versions = doctor.versions()
    assert (versions["cuda_runtime"], versions["cuda_of_driver"]) == (text, text)
