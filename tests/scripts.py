"""Runs scripts of examples/ and modules of benchmarks/ as a user would, and programs in two processes."""

import os
import pathlib
import socket
import subprocess
import sys

import jax

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG"
# Before 0.11 JAX's default emitters compile for longer; newer versions have no such flag.
EMITTERS = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
LIGHTLY = f"--xla_backend_optimization_level=1{EMITTERS}"  # compiles and runs these in less time than levels 0 and 2


def run(script: str, *arguments: str, cwd: pathlib.Path, timeout: float = 300) -> str:
    """What a script of examples/ prints, or a module of the repository."""
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": LIGHTLY, "PYTHONPATH": os.pathsep.join(paths)}
    program = [str(EXAMPLES / script)] if script.endswith(".py") else ["-m", script]
    options = {"cwd": cwd, "env": os.environ | environment, "capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run([sys.executable, *program, *arguments], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_two_processes(*program: str, environments=(None, None), arguments=((), ())) -> list[str]:
    """What two processes print. Each gets the address for ``jax.distributed``, its number and its own arguments."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, *program, address, str(i), *own],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, (environment, own) in enumerate(zip(environments, arguments, strict=True))
    ]
    try:
        printed = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), [err[-2000:] for _, err in printed]
    return [out for out, _ in printed]
