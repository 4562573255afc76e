"""Quantizers of every spec write the same bytes on any number of devices and of processes."""

import functools
import json
import os
import pathlib

import jax
import pytest
from conftest import gpus, skip_or_fail
from quantizer_bytes import digests
from scripts import in_two_processes

import jnvfp4
from jnvfp4.spec import SUPPORTED_SPECS

SCRIPT = pathlib.Path(__file__).parent / "quantizer_bytes.py"
PACKAGE = str(pathlib.Path(jnvfp4.__file__).parent.parent)


@functools.cache
def on_one_cpu() -> dict[str, str]:
    return digests(jax.devices("cpu")[:1])


@pytest.mark.long
def test_four_cpus_write_the_bytes_of_one():
    """The settings of 4over6 agree on most blocks, and so on some matrices."""
    assert len(set(on_one_cpu().values())) > len(SUPPORTED_SPECS)
    assert digests(jax.devices("cpu")[:4]) == on_one_cpu()


@pytest.mark.parametrize("count", [1, 2])
def test_gpus_write_the_bytes_of_a_cpu(count):
    if len(gpus()) < count:
        skip_or_fail("cuda" if count == 1 else "sharding", f"fewer than {count} CUDA devices")
    assert digests(gpus()[:count]) == on_one_cpu()


def in_processes(platform: str, *each: dict[str, str]) -> list[dict[str, str]]:
    """What each of two processes finds, which have these additional environment variables."""
    common = os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": PACKAGE}
    printed = in_two_processes(str(SCRIPT), environments=[common | own for own in each])
    return [json.loads(out.splitlines()[-1]) for out in printed]


@pytest.mark.long
def test_in_two_processes_of_four_cpus():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    assert in_processes("cpu", flags, flags) == 2 * [on_one_cpu()]


def test_in_two_processes_of_a_gpu():
    if len(gpus()) < 2:
        skip_or_fail("sharding", "fewer than two CUDA devices")
    assert in_processes("cuda", *({"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2))) == 2 * [on_one_cpu()]
