"""Every quantizer of a step writes the same bytes on any number of devices and of processes, for every recipe."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest
from conftest import gpus, skip_or_fail
from step_bytes import EVERY_RECIPE, digests, quantizers

import jnvfp4

SCRIPT = pathlib.Path(__file__).parent / "step_bytes.py"
PACKAGE = str(pathlib.Path(jnvfp4.__file__).parent.parent)


@functools.cache
def on_one_cpu() -> dict[str, str]:
    return digests(jax.devices("cpu")[:1])


def test_every_quantizer_of_every_recipe_is_here():
    expected = {f"{name} {which}" for name, recipe in EVERY_RECIPE.items() for which in quantizers(recipe)}
    assert set(on_one_cpu()) == expected
    assert len(quantizers(EVERY_RECIPE["default"])) == 6
    # Operands, orientations and specs that differ have digests that differ.
    uses = {use for recipe in EVERY_RECIPE.values() for use in quantizers(recipe).values()}
    assert len(set(on_one_cpu().values())) == len(uses)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.long
def test_on_cpus(count):
    assert digests(jax.devices("cpu")[:count]) == on_one_cpu()


@pytest.mark.parametrize("count", [1, 2])
def test_on_gpus(count):
    if len(gpus()) < count:
        skip_or_fail("cuda" if count == 1 else "sharding", f"fewer than {count} CUDA devices")
    assert digests(gpus()[:count]) == on_one_cpu()


def in_processes(platform: str, each: list[dict[str, str]]) -> list[dict[str, str]]:
    """What each of these processes prints, which have these additional environment variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(i), str(len(each)), coordinator],
            env=os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": PACKAGE} | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, own in enumerate(each)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), [err[-2000:] for _, err in printed]
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.mark.long
def test_in_two_processes_of_four_cpus():
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    assert in_processes("cpu", 2 * [flags]) == 2 * [on_one_cpu()]


def test_in_two_processes_of_a_gpu():
    if len(gpus()) < 2:
        skip_or_fail("sharding", "fewer than two CUDA devices")
    assert in_processes("cuda", [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]) == 2 * [on_one_cpu()]
