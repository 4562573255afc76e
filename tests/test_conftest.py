"""What the default run leaves out of tests with several lists of parameters."""

import itertools
import pathlib
import re
import subprocess
import sys

TESTS = """
import pytest

@pytest.fixture(params=["cpu", "cuda"])
def platform(request):
    return request.param

@pytest.mark.parametrize("letter", "abcdef")
@pytest.mark.parametrize(("x", "y"), [(1, 1), pytest.param(1, 2, id="1-2"), (2, 1), (2, 2)])
@pytest.mark.parametrize("flag", [False, True])
def test_product(platform, letter, x, y, flag): pass

@pytest.mark.parametrize("letter", "abcdef")
def test_list(letter): pass

def test_alone(): pass
"""


def collected(folder: pathlib.Path, marks: str) -> dict[str, list[str]]:
    """The parameters of the cases of each test."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        marks,
        "-p",
        "no:cacheprovider",
        "test_it.py",
    ]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    found: dict[str, list[str]] = {}
    for name, case in re.findall(r"::(\w+)(?:\[(.*)\])?$", out.stdout, flags=re.M):
        found.setdefault(name, []).append(case)
    return found


def test_a_diagonal_of_each_product_runs(tmp_path):
    (tmp_path / "conftest.py").write_text((pathlib.Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = product\n")
    flags, pairs = ["False", "True"] * 3, ["1-1", "1-2", "2-1", "2-2", "1-1", "1-2"]
    diagonal = [f"{p}-{f}-{xy}-{a}" for p in ("cpu", "cuda") for f, xy, a in zip(flags, pairs, "abcdef", strict=True)]
    default = collected(tmp_path, "not product")
    assert sorted(default.pop("test_product")) == sorted(diagonal)
    assert default == {"test_list": list("abcdef"), "test_alone": [""]}
    everything = itertools.product(("cpu", "cuda"), flags[:2], pairs[:4], "abcdef")
    assert sorted(collected(tmp_path, "")["test_product"]) == sorted("-".join(case) for case in everything)
