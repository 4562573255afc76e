"""Devices for the tests. Eight CPU devices always; GPUs where there are any.

JNVFP4_REQUIRE=cuda,sharding turns "no GPU" and "fewer than two GPUs" from skips into failures.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from dataclasses import dataclass

import jax
import pytest

REQUIRED = frozenset(filter(None, os.environ.get("JNVFP4_REQUIRE", "").split(",")))


def gpus() -> list:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def skip_or_fail(requirement: str, reason: str) -> None:
    if requirement in REQUIRED:
        pytest.fail(f"JNVFP4_REQUIRE={requirement}: {reason}")
    pytest.skip(reason)


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation: where, and by which implementation."""

    platform: str
    implementation: str

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]


def _backend(request) -> Backend:
    implementation, platform = request.param.split("-")
    if platform == "cuda" and not gpus():
        skip_or_fail("cuda", "no CUDA device")
    return Backend(platform, implementation)


ALL_BACKENDS = ["native-cpu", "reference-cpu", "native-cuda", "reference-cuda"]
NATIVE_BACKENDS = ["native-cpu", "native-cuda"]


@pytest.fixture(params=ALL_BACKENDS)
def backend(request):
    """Every implementation on every platform, as the default device of the test."""
    chosen = _backend(request)
    with jax.default_device(chosen.device):
        yield chosen


@pytest.fixture(params=NATIVE_BACKENDS)
def native(request):
    """The native kernels of every platform, as the default device of the test."""
    chosen = _backend(request)
    with jax.default_device(chosen.device):
        yield chosen


@pytest.fixture(params=["cpu", "cuda"])
def devices(request) -> list:
    """Devices for a mesh: eight of the CPU, or two to eight real GPUs."""
    if request.param == "cpu":
        return jax.devices("cpu")[:8]
    found = gpus()
    count = max((n for n in (2, 4, 8) if n <= len(found)), default=0)
    if not count:
        skip_or_fail("sharding", "fewer than two CUDA devices")
    return found[:count]
