"""Devices for the tests. Eight CPU devices always; GPUs where there are any.

JNVFP4_REQUIRE=cuda,sharding,haliax,docs turns "no GPU", "fewer than two GPUs", "no haliax that runs" and "no MkDocs"
from skips into failures.
"""

import os
import shutil

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# 4 % less time: no test reads where an operation was traced.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import jax
import pytest
from _pytest.mark.structures import ParameterSet
from scripts import EMITTERS

from jnvfp4._native import load

REQUIRED = frozenset(filter(None, os.environ.get("JNVFP4_REQUIRE", "").split(",")))


def gpus() -> list:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def skip_or_fail(requirement: str, reason: str) -> None:
    if requirement in REQUIRED:
        pytest.fail(f"JNVFP4_REQUIRE={requirement}: {reason}")
    pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation: where, and by which implementation."""

    platform: str
    implementation: str

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]


ALL_BACKENDS = ["native-cpu", "reference-cpu", "native-cuda", "reference-cuda"]
NATIVE_BACKENDS = ["native-cpu", "native-cuda"]


LESSER_ISAS = ["portable", "avx2"]  # of the CPU kernels, on a processor that has AVX-512


@contextmanager
def lesser_isa(name: str) -> Iterator[str]:
    """Makes the CPU kernels use an instruction set that is not the best of this processor, which it gives."""
    cpu = load.extensions()["cpu"]
    best = cpu.isa()
    if best == name or not cpu.use_isa(name):
        pytest.skip(f"this processor's best is {best}")
    try:
        yield best
    finally:
        cpu.use_isa(best)


def one_of(params: list[str]):
    @pytest.fixture(params=params)
    def chosen(request):
        """A backend as the default device of the test; the CPU may be restricted, as in "native-cpu-avx2"."""
        implementation, platform, *isa = request.param.split("-")
        if platform == "cuda" and not gpus():
            skip_or_fail("cuda", "no CUDA device")
        with jax.default_device(jax.devices(platform)[0]), lesser_isa(*isa) if isa else nullcontext():
            yield Backend(platform, implementation)

    return chosen


backend = one_of(ALL_BACKENDS)  # every implementation on every platform
native = one_of(NATIVE_BACKENDS)  # the native kernels of every platform


@pytest.fixture
def cpu():
    """Where the pinned order along K makes every product bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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


QUICKLY = "--xla_backend_optimization_level=0"  # compiles a step of training in a third of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimized", action="store_true", help="compile with LLVM's optimizations, as users do")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles without LLVM's optimizations, a quarter faster, unless there is a GPU or --optimized is given."""
    if not config.getoption("optimized") and shutil.which("nvidia-smi") is None:
        os.environ["XLA_FLAGS"] += f" {QUICKLY}{EMITTERS}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Gives each worker neighbouring tests, which share what they compile, until it has none and takes another's."""
    if config.getvalue("dist") != "load":  # another one was asked for
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# Modules that run beside another one, whose programs they compile too: specs of the reference, and a stand-in.
BESIDE = {"golden": "quantize", "block_scaled": "gemm_kernels", "self_check": "gemm_kernels"}
BESIDE = {f"test_{name}.py": f"test_{other}.py" for name, other in BESIDE.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as ``product`` what the default run leaves out of tests with several lists of parameters.

    Of lists of 24, 5 and 2 values there are 240 cases. 24 of them remain: case i takes value i of each list, and starts
    a list again where it ends. So each value is in at least one case. Fixtures, such as backends, are not counted.
    """
    items.sort(key=lambda item: BESIDE.get(item.path.name, item.path.name))
    lists: dict[int, tuple[list[str], dict[tuple[int, ...], int]]] = {}  # by mark, which the cases of a test share
    for item in items:
        chosen = []
        for mark in item.iter_markers("parametrize"):
            if id(mark) not in lists:
                lists[id(mark)] = _list_of(mark)
            names, places = lists[id(mark)]
            chosen.append((places[tuple(id(item.callspec.params[name]) for name in names)], len(mark.args[1])))
        if not _on_diagonal(chosen):
            item.add_marker(pytest.mark.product)


def _on_diagonal(chosen: list[tuple[int, int]]) -> bool:
    longest = max((size for _, size in chosen), default=1)
    return len(chosen) < 2 or any(all(i == case % size for i, size in chosen) for case in range(longest))


def _list_of(mark) -> tuple[list[str], dict[tuple[int, ...], int]]:
    """Returns the names of a list of parameters, and the place of each of its values by their identities."""
    names, values = mark.args
    names = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    places: dict[tuple[int, ...], int] = {}
    for i, value in enumerate(values):
        value = value.values if isinstance(value, ParameterSet) else value if len(names) > 1 else (value,)
        places.setdefault(tuple(map(id, value)), i)
    return names, places
