"""Runs the scripts in examples/ as a user would."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG"


def run(script: str, *arguments: str, cwd: pathlib.Path, timeout: float = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
