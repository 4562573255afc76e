"""The CPU kernels compiled for 64-bit Arm, and run by an emulator, with the bytes that this processor makes.

Needs aarch64-linux-gnu-g++ and, to run anything, qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user). An emulator
says nothing about times.
"""

import os
import pathlib
import re
import shutil
import subprocess

import jaxlib
import pytest
from conftest import skip_or_fail

ROOT = pathlib.Path(__file__).parents[1]
FFI = ROOT / "ffi"
# module.cc needs Python's headers for Arm. cpu_kernels.cc includes cpu/matmul.cc.
NOT_LINKED = [FFI / "cpu" / "module.cc", FFI / "cpu" / "matmul.cc"]
LINKED = sorted({*FFI.glob("cpu/*.cc"), *FFI.glob("plan/*.cc")} - {*NOT_LINKED})
(BUILD_FLAGS,) = re.findall(r"set\(JNVFP4_CXX_FLAGS ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
FLAGS = [
    *("-std=c++20", "-DNDEBUG", *BUILD_FLAGS.split(), "-Werror", "-Wno-maybe-uninitialized", "-pthread"),
    *(f"-I{FFI}", "-isystem", os.path.join(os.path.dirname(jaxlib.__file__), "include")),
]
# Processors with the dot products of bytes and without.
BEST = {"max": "neon_dot", "cortex-a53": "portable"}


def _program(*names: str) -> str:
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        skip_or_fail("aarch64", f"no {names[0]}")
    return found


@pytest.fixture
def cross() -> str:
    return _program("aarch64-linux-gnu-g++")


@pytest.fixture
def emulator(cross) -> str:
    return _program("qemu-aarch64", "qemu-aarch64-static")


def _output(*command) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _kernels(compiler: str, folder: pathlib.Path, optimize: str, *link: str) -> pathlib.Path:
    """Compiles every kernel and the program that runs them, by two compilers at a time."""
    program = folder / "cpu_kernels"
    sources = [ROOT / "tests" / "cpp" / "cpu_kernels.cc", *LINKED]
    objects = [folder / f"{source.parent.name}_{source.stem}.o" for source in sources]
    left = list(zip(sources, objects, strict=True))
    while left:
        pair, left = left[:2], left[2:]
        running = [subprocess.Popen([compiler, *FLAGS, optimize, "-c", source, "-o", to]) for source, to in pair]
        assert [process.wait() for process in running] == [0] * len(running)
    _output(compiler, *link, "-pthread", *objects, "-o", program)
    return program


def _lines(*command) -> tuple[str, list[str]]:
    """Returns the best instruction set, and a line for the bytes of each kernel."""
    best, *lines = _output(*command).splitlines()
    assert len(lines) > 900
    return best.removeprefix("isa "), lines


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    """The lines of this processor; -O1 takes a third of the time to compile and makes the same bytes."""
    return _lines(_kernels(_program("g++"), tmp_path_factory.mktemp("here"), "-O1"))[1]


@pytest.mark.long
def test_products_follow_the_rule_on_this_processor(expected):
    assert sum(line.startswith("product ") for line in expected) > 700


@pytest.mark.long
def test_kernels_make_the_same_bytes(cross, emulator, expected, tmp_path):
    program = _kernels(cross, tmp_path, "-O3", "-static")
    for processor, best in BEST.items():
        assert _lines(emulator, "-cpu", processor, program) == (best, expected)


@pytest.mark.long
def test_encoders_over_float32(cross, emulator, tmp_path):
    """As test_numerics.py runs it. With every pattern it takes an hour."""
    program = tmp_path / "exhaustive"
    source = ROOT / "tests" / "cpp" / "exhaustive.cc"
    _output(cross, "-std=c++20", "-O2", "-ffp-contract=off", "-pthread", "-static", f"-I{FFI}", source, "-o", program)
    _output(emulator, program, "quick")


@pytest.mark.long
def test_dot_products_of_bytes_are_in_kernels_that_ask_for_them(cross, tmp_path):
    """A processor without them must not meet one; and nothing spills."""
    compiled = tmp_path / "matmul.o"
    _output(cross, *FLAGS, "-O3", "-c", FFI / "cpu" / "matmul.cc", "-o", compiled)
    code = _output(_program("aarch64-linux-gnu-objdump"), "-dC", "--no-show-raw-insn", compiled)
    functions = dict(re.findall(r"^\w+ <(.*)>:\n((?:.+\n)*)", code, flags=re.M))
    with_dots = {name: body for name, body in functions.items() if "\tsdot\t" in body}
    assert len(with_dots) == 4
    assert all("sum_blocks_neon_dot<" in name for name in with_dots), list(with_dots)
    assert not any(re.search(r"\t(str|stp|stur)\tq\d+, .*\[sp", body) for body in with_dots.values())
