"""Known-answer tests of kernels on GPU architectures that they never ran on: a path is used once its bits are right.

Checks run at lowering, and in ``jnvfp4 doctor``. docs/internals.md says when, and what a mismatch does.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive

from . import compat, plans


class Unchecked(NamedTuple):
    """Stands for ``implementation`` in a call that is part of a check itself."""

    name: str  # "native", or a kernel of a product


class Call(NamedTuple):
    """One call of a primitive whose results are known."""

    operands: tuple[np.ndarray, ...]
    params: Any


class Check(NamedTuple):
    """A path to a result, and the calls that show whether it is right."""

    path: str  # for people, and unique
    primitive: Primitive
    name: str  # what ``implementation`` names
    calls: Callable[[], Iterable[Call]]


# For a primitive by its name: (params, backend, operand avals) -> checks of the paths that a program takes where what
# ``backend`` refuses is not used. A check of ``"native"`` is one of the whole primitive.
CASES: dict[str, Callable[[Any, Any, Any], Sequence[Check]]] = {}


class Refusal(NamedTuple):
    """Says that a path has given wrong results."""

    name: str  # of the check
    reason: str


# ---------------------------------------------------------------- a check
Run = Callable[[Primitive, Call], Sequence[np.ndarray]]


def mismatch(check: Check, run: Run, known: Run) -> str:
    """Returns a description of the first result of ``run`` that differs from the known one; empty if none does."""
    for number, call in enumerate(check.calls(), 1):
        got, want = run(check.primitive, call), known(check.primitive, call)
        for result, (g, w) in enumerate(zip(got, want, strict=True)):
            if text := _difference(np.asarray(g), np.asarray(w)):
                shapes = ", ".join(f"{v.dtype}{list(v.shape)}" for v in call.operands)
                return f"call {number}, result {result}: {text}; the operands are {shapes}"
    return ""


def _difference(got: np.ndarray, want: np.ndarray) -> str:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{list(got.shape)} in place of {want.dtype}{list(want.shape)}"
    wrong = np.argwhere(np.any(_bytes(got) != _bytes(want), axis=-1))
    if not len(wrong):
        return ""
    at = tuple(map(int, wrong[0]))
    return f"{len(wrong)} of {got.size} elements differ, first at {list(at)}: got {got[at]!r}, expected {want[at]!r}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(*values.shape, 1).view(np.uint8)


def known_for(device: jax.Device) -> Run:
    """Returns what computes the known results for a check of a device.

    For a GPU it is the CPU's kernels, which have the bits of the reference and compile in no time; for a CPU, or where
    JAX has no CPU (JAX_PLATFORMS=cuda), the reference, which is XLA's operations alone.
    """
    cpu = compat.cpu_device()
    implementation = "reference" if cpu is None or device.platform == "cpu" else Unchecked("native")
    return lambda primitive, call: _run(cpu or device, primitive, call, implementation)


def on(device: jax.Device, name: str) -> Run:
    """Returns what computes a call by a path on a device."""

    def run(primitive: Primitive, call: Call) -> Sequence[np.ndarray]:
        _leave_nan(device)
        return _run(device, primitive, call, Unchecked(name))

    return run


def _run(device: jax.Device, primitive: Primitive, call: Call, implementation: Any) -> Sequence[np.ndarray]:
    """Compiles a program of the call alone, which no other call can find compiled."""
    bind = jax.jit(lambda *operands: primitive.bind(*operands, params=call.params, implementation=implementation))
    return [np.asarray(v) for v in bind(*jax.device_put(call.operands, device))]


def _leave_nan(device: jax.Device) -> None:
    """Leaves NaN, as a float and as a block scale, in memory of a GPU that results and scratch get next."""
    if device.platform == "gpu":
        for size in (1 << 26, 1 << 22, 1 << 16):
            jax.device_put(np.full(size, 0xFF, np.uint8), device).block_until_ready().delete()


# ---------------------------------------------------------------- what is known of devices
# Why a path is refused on a kind of device, or an empty text. It is a fact about the device, its driver and the
# libraries, none of which changes while a process runs, so each is found out once, and every program sees the same.
_FOUND: dict[tuple[str, ...], str] = {}
_LOCK = threading.Lock()  # programs may be lowered in several threads


def find(check: Check, device: jax.Device) -> str:
    """Says why a path is refused on a device; empty if its results are right. It runs once for a kind of device."""
    key = _key(check.path, device)
    with _LOCK:
        first = key not in _FOUND
        if first:
            _FOUND[key] = _in_new_thread(lambda: outcome(check, device))
    if first and _FOUND[key]:
        _report(check, device, _FOUND[key])
    return _FOUND[key]


def refusals(checks: Iterable[Check], device: jax.Device) -> tuple[Refusal, ...]:
    """Returns what ``find`` has refused on a device until now; it runs no check."""
    known = ((check, _FOUND.get(_key(check.path, device))) for check in checks)
    return tuple(Refusal(check.name, _sentence(check, device, reason)) for check, reason in known if reason)


def refused(
    checks: Callable[[tuple[Refusal, ...]], Iterable[Check]], devices: Sequence[jax.Device]
) -> tuple[Refusal, ...]:
    """Finds the paths of a program that give wrong results on one of these devices.

    Args:
      checks: from what is refused to the checks of what the program uses then.
      devices: those of this process for which the program is lowered.

    Raises:
      RuntimeError: a path gives wrong results, and there are several processes. They must compile the same program, and
        the others may have found nothing wrong.
    """
    kinds = {_kind(d): d for d in reversed(devices) if not plans.has_run_on(compat.capability(d) or 0)}
    done: set[str] = set()
    wrong: tuple[Refusal, ...] = ()
    while kinds and (new := [check for check in checks(wrong) if check.path not in done]):
        for check in new:
            done.add(check.path)
            reasons = [(device, reason) for device in kinds.values() if (reason := find(check, device))]
            if reasons and jax.process_count() > 1:
                raise RuntimeError(
                    f"jnvfp4: {_sentence(check, *reasons[0])}. This is process {jax.process_index()} of "
                    f"{jax.process_count()}, which must compile the same program, so no other path is chosen here; "
                    "choose one in all of them by implementation=, and report it with the output of "
                    "`jnvfp4 doctor --full --json`"
                )
            wrong += tuple(Refusal(check.name, _sentence(check, *of)) for of in reasons[:1])
    return wrong


def _kind(device: jax.Device) -> tuple[str, ...]:
    return device.platform, device.device_kind, str(compat.capability(device))


def _key(path: str, device: jax.Device) -> tuple[str, ...]:
    return (path, *_kind(device), plans.cublaslt().version)


def outcome(check: Check, device: jax.Device) -> str:
    """Runs a check on a device; says in what its results are wrong, or empty."""
    try:
        return mismatch(check, on(device, check.name), known_for(device))
    except Exception as error:  # a kernel that stops is no better than one that is wrong
        return " ".join(f"{type(error).__name__}: {error}".split())


def _in_new_thread(compute: Callable[[], str]) -> str:
    """Computes without what the caller's thread has entered: a trace, a mesh, a default device, settings of JAX."""
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(compute()), name="jnvfp4 self-check")
    thread.start()
    thread.join()
    return results[0]


def _sentence(check: Check, device: jax.Device, reason: str) -> str:
    return f"the self-check of {check.path} on {device} ({device.device_kind}) failed: {reason}"


def _report(check: Check, device: jax.Device, reason: str) -> None:
    if jax.process_count() == 1:
        warnings.warn(
            f"jnvfp4: {_sentence(check, device, reason)}. This process falls back to a slower exact path. Please "
            "report it with the output of `jnvfp4 doctor --full --json`",
            RuntimeWarning,
            stacklevel=2,
        )
