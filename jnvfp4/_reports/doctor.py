"""Reports on an installation for ``jnvfp4 doctor``: versions, devices, known-answer tests of kernels, and plans."""

import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import jaxlib

from .._native import compat, load, plans
from .._native.self_check import Call, Check, outcome
from .._primitives._sides import Side
from .._primitives.append_kv import append_kv_p
from .._primitives.decode_attention import decode_attention_p
from .._primitives.dequantize import DequantizeParams
from .._primitives.quantize import quantize_p
from .._primitives.quantize_pair import quantize_pair_p, sides_of
from .._self_check import cases
from .._self_check.known_answers import why_no_grouped, why_no_product
from .._version import __version__
from ..spec import NVFP4, NVFP4_2D, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64, Format, QuantSpec, four_over_six
from . import support

# The quick checks, for an installation; then every field that changes the arithmetic. The tests go through all specs.
QUICK_SPECS = (NVFP4, ROW_SCALED)
CHECKED_SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, four_over_six())
CHECKED_FORMATS = (Format(), Format("row"), Format("window64"), Format(rht=True))
CHECKED_PAIRS = ((NVFP4_SR, NVFP4_RHT_SR), (WINDOW64, WINDOW64))
CHECKED_CACHES = ((False, jnp.bfloat16, 128), (True, jnp.float16, 64))  # in pages or not, new tokens, sizes of a head
OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


# ---------------------------------------------------------------- versions and devices
def versions() -> dict[str, str | None]:
    """Returns the versions of the libraries and of the driver; None for one that is missing."""
    runtime, driver = compat.cuda_versions()
    return {
        "jnvfp4": __version__,
        "sources": load.extensions()["cpu"].source_hash,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "ffi_built": "{}.{}".format(*load.extensions()["cpu"].ffi_api),
        "ffi_running": "{}.{}".format(*load.runtime_ffi_api()),
        "cuda_runtime": "{}.{}".format(*divmod(runtime // 10, 100)) if runtime else None,
        "cuda_of_driver": "{}.{}".format(*divmod(driver // 10, 100)) if driver else None,
        "driver": _driver(),
        "cublaslt": plans.cublaslt().version or None,
    }


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver as the kernel of Linux has it."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return next(iter(re.findall(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)), None)


def targets() -> dict[str, str | None]:
    """Returns what the kernels of each platform were compiled for."""
    return {"cpu": load.extensions()["cpu"].isa(), "cuda": getattr(load.extensions().get("cuda"), "built_for", None)}


def describe_device(device: jax.Device) -> dict[str, object]:
    """Returns what a device is, and what its kernels and FP4 tensor cores are used for."""
    capability = compat.capability(device) if device.platform == "gpu" else None
    return {
        "device": str(device),
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": None if capability is None else compat.dotted(capability),
        "kernels_have_run": plans.has_run_on(capability or 0),
        "fp4": _fp4(capability) if capability else "",
    }


def _fp4(capability: int) -> str:
    """Says whether products use the FP4 tensor cores of a GPU; empty if no kernel is for those that it has."""
    if missing := plans.no_block_scaled(capability):
        return f"not used, products decode to 16 bits: {missing}"
    if not plans.has_block_scaled(capability):
        return ""
    return f"used by {support.FP4_KERNEL}, which is compiled, but was never run on such a GPU"


# ---------------------------------------------------------------- checks
def checks(capability: int, full: bool) -> Iterator[tuple[Check, str]]:
    """Lists the checks of kernels, with the reason why one does not apply to a device.

    The quick ones make one call of each GEMM kernel, and leave out most recipes.
    """
    for spec in CHECKED_SPECS if full else QUICK_SPECS:
        for transpose in (False, True) if full else (False,):
            yield _quantizer_check(spec, transpose), ""
    if full:
        for pair in CHECKED_PAIRS:
            yield cases.quantizer_check(quantize_pair_p, sides_of(pair), BF16), ""
        yield cases.rht_amax_check(False, BF16), ""
    for fmt in CHECKED_FORMATS if full else [spec.format for spec in QUICK_SPECS]:
        yield cases.dequantize_check(DequantizeParams(fmt, F32, fmt.rht)), ""
    yield cases.transpose_check(), ""
    for paged, dtype, depth in CHECKED_CACHES if full else CHECKED_CACHES[:1]:
        yield cases.cache_check(append_kv_p, paged, dtype, depth), ""
        yield cases.cache_check(decode_attention_p, paged, dtype, depth), ""
    for check, reason in _gemm_checks(capability):
        yield check if full else check._replace(calls=partial(_first, check.calls)), reason


def _first(calls: Callable[[], Iterable[Call]]) -> Iterator[Call]:
    return islice(calls(), 1)


def _quantizer_check(spec: QuantSpec, transpose: bool) -> Check:
    side = Side(spec, transpose, spec.format.amax_scope == "tensor")
    return cases.quantizer_check(quantize_p, (side,), BF16)


def _gemm_checks(capability: int) -> Iterator[tuple[Check, str]]:
    for kernel in plans.matmul_kernels():
        yield cases.product_check(kernel, capability), why_no_product(kernel, capability)
    for kernel in plans.grouped_kernels():
        yield cases.grouped_check(kernel, capability), why_no_grouped(kernel, capability)


def examine(device: jax.Device, full: bool) -> Iterator[dict[str, str]]:
    """Runs the checks on a device, one after another."""
    reason = support.no_kernels(device)
    capability = 0 if reason or device.platform != "gpu" else compat.capability(device)
    for check, inapplicable in checks(capability or 0, full):
        found = {"check": check.path, "device": str(device)}
        if not_run := f"reference only: {reason}" if reason else inapplicable:
            yield {**found, "outcome": NOT_APPLICABLE, "reason": not_run}
            continue
        yield {**found, "outcome": FAILED if (wrong := outcome(check, device)) else OK, "reason": wrong}


# ---------------------------------------------------------------- the plan
PLANNED = [(rows, 4096, 4096) for rows in (1, 16, 64, 256, 8192)]


def planned(device: jax.Device) -> Iterator[dict[str, str | list[int]]]:
    """Says which kernel multiplies on a device, for some numbers of rows, unless the self-check refuses it."""
    if support.no_kernels(device):
        return
    capability = compat.capability(device) if device.platform == "gpu" else 0
    for left in ("nvfp4", "bfloat16"):
        for m, n, k in PLANNED:
            chosen = plans.plan_matmul(
                shape=(1, m, n, k), a=left, windows=False, out="bfloat16", pinned=False, capability=capability
            )
            yield {"device": str(device), "a": left, "shape": [m, n, k], "kernel": chosen.kernel}


# ---------------------------------------------------------------- the report
def devices() -> list[jax.Device]:
    """Returns one device of each kind that this process has; the CPU is one."""
    cpu = compat.cpu_device()
    every = [*jax.local_devices(), *([] if cpu is None else [cpu])]
    return list({(d.platform, d.device_kind): d for d in reversed(every)}.values())[::-1]


def runs_all(devices: list[jax.Device], full: bool) -> bool:
    """Says whether all checks run: where it is asked, and on a GPU of a kind that no kernel has run on."""
    return full or not all(plans.has_run_on(compat.capability(d) or 0) for d in devices if d.platform == "gpu")


def report(full: bool = True) -> dict[str, object]:
    """Returns all that ``jnvfp4 doctor --json`` prints.

    Its keys: ``ok`` (no check has failed), ``full`` (all checks have run, not the quick ones alone), ``versions``,
    ``targets`` (what kernels were compiled for), ``cublaslt`` (path, or the reason why there is none), ``devices``,
    ``checks`` (outcome "ok", "failed" or "not applicable", and the reason) and ``plan`` (the kernels of some products).
    """
    found = devices()  # JAX's CUDA plugin, if there is one, has loaded cuBLASLt then
    library, full = plans.cublaslt(), runs_all(found, full)
    outcomes = [one for device in found for one in examine(device, full)]
    return {
        "ok": all(one["outcome"] != FAILED for one in outcomes),
        "full": full,
        "versions": versions(),
        "targets": targets(),
        "cublaslt": {"path": library.path, "reason": library.reason},
        "devices": [describe_device(device) for device in found],
        "checks": outcomes,
        "plan": [plan for device in found for plan in planned(device)],
    }


def doctor(full: bool = True) -> bool:
    """Prints the same for people, each check when it is done, and a verdict; returns whether none has failed."""
    found = devices()
    full = runs_all(found, full)
    v, built, library = versions(), targets(), plans.cublaslt()
    print(f"jnvfp4   {v['jnvfp4']}  (sources {v['sources']})")
    print(f"python   {v['python']}  jax {v['jax']}  jaxlib {v['jaxlib']}  on {v['machine']}")
    print(f"ffi      built with {v['ffi_built']}, running {v['ffi_running']}")
    print(f"cpu      kernels for {built['cpu']}")
    cuda = f"built for {built['cuda']}" if built["cuda"] else load.refused.get("cuda", "not built")
    print(f"cuda     {cuda}{_cuda_text(v)}")
    print("cublaslt " + (f"none: {library.reason}" if library.reason else f"{library.version}  {library.path}"))
    for device in found:
        _print_device(describe_device(device))
    print()
    count, failed = 0, 0
    for device in found:
        unlisted = 0
        for o in examine(device, full):
            count += o["outcome"] != NOT_APPLICABLE
            failed += o["outcome"] == FAILED
            if not full and o["outcome"] == NOT_APPLICABLE and " runs on GPUs " in o["reason"]:
                unlisted += 1
                continue
            print(f"{o['device']}: {o['check']}: {o['outcome']}{': ' * bool(o['reason'])}{o['reason']}", flush=True)
        if unlisted:
            print(f"{device}: {unlisted} GPU kernel{'s' * (unlisted > 1)}: not applicable here")
    print()
    for device in found:
        for p in planned(device):
            print(f"{p['device']}: matmul_nt of {p['a']} {'x'.join(map(str, p['shape']))}: {p['kernel']}")
    which = f"all {count} checks ran" if full else f"{count} quick checks ran; jnvfp4 doctor --full runs all"
    print(f"\nNOT OK: {failed} failed; {which}" if failed else f"\nok: {which}")
    return not failed


def _cuda_text(v: dict[str, str | None]) -> str:
    driver = f"driver {v['driver']} for {v['cuda_of_driver']}" if v["cuda_of_driver"] else "no driver"
    return f"; runtime {v['cuda_runtime']}, {driver}" if v["cuda_runtime"] else ""


def _print_device(d: dict[str, object]) -> None:
    capability = f", compute capability {d['compute_capability']}" if d["compute_capability"] else ""
    run = "" if d["kernels_have_run"] else "; kernels are compiled for it, but have not run on one before this"
    print(f"device   {d['device']}: {d['kind']}{capability}{run}")
    if d["fp4"]:
        print(f"fp4      {d['device']}: {d['fp4']}")
