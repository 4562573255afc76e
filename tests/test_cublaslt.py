"""Which copy of cuBLASLt is found. Each search has a process of its own: a copy that is found stays. Needs no GPU."""

import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import skip_or_fail

from jnvfp4._native import load, plans

NONE = "the process has loaded neither libcublasLt.so.13 nor libcublasLt.so.12"
FUNCTIONS = (
    *("Create", "Matmul", "MatmulAlgoGetHeuristic", "MatmulDescCreate", "MatmulDescSetAttribute", "MatmulDescDestroy"),
    *("MatrixLayoutCreate", "MatrixLayoutDestroy"),
    *("MatmulPreferenceCreate", "MatmulPreferenceSetAttribute", "MatmulPreferenceDestroy"),
)


@pytest.fixture(autouse=True)
def cuda():
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")


def search(expression: str, *, before: str = "", **options) -> str:
    """What a new process prints of an expression of ``find``. It does not import JAX, whose plugin may load a copy."""
    file = load.extensions()["cuda"].__file__
    code = f"""
import ctypes, importlib.util
spec = importlib.util.spec_from_file_location("jnvfp4._cuda", {file!r})
spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
find = module.find_cublaslt
{before}
print({expression})"""
    env = {**os.environ, **options.pop("env", {})}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def library(folder: pathlib.Path, version: int = 130102, without: str = "") -> pathlib.Path:
    """A library with the functions that products call, none of which does anything."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in FUNCTIONS if name != without]
    source = f"unsigned long cublasLtGetVersion(void) {{ return {version}; }}\n"
    source += "".join(f"int cublasLt{name}(void) {{ return 0; }}\n" for name in names)
    path = folder / "libcublasLt.so.13"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", str(path)]
    subprocess.run([compiler, *flags], input=source, text=True, check=True)
    return path


def test_nothing_is_found(tmp_path):
    assert search("find('')") == str(("", 0, NONE))
    assert search("find('/nowhere/libcublasLt.so.13')[2]").startswith(f"{NONE}, and /nowhere/libcublasLt.so.13: ")
    library(tmp_path)  # neither by its name nor by a path that is not absolute
    assert search("find('')[2]", cwd=tmp_path, env={"LD_LIBRARY_PATH": f"{tmp_path}:."}) == NONE
    for path in ("libcublasLt.so.13", "./libcublasLt.so.13"):
        found = search(f"find('{path}')[2]", cwd=tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path)})
        assert found == f"{NONE}, and the path of another copy must be absolute, got {path}"


def test_a_file_by_its_path_which_stays(tmp_path):
    path = library(tmp_path)
    assert search(f"(find('{path}'), find(''))") == str(((str(path), 130102, ""),) * 2)


def test_the_copy_that_is_loaded_comes_first(tmp_path):
    loaded, other = library(tmp_path / "loaded"), library(tmp_path / "other", version=120400)
    assert search(f"find('{other}')[0]", before=f"ctypes.CDLL('{loaded}')") == str(loaded)


def test_what_was_not_found_is_looked_for_again(tmp_path):
    path = library(tmp_path)
    assert search("find('')[0]", before=f"assert find('')[2]; ctypes.CDLL('{path}')") == str(path)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_library_that_lacks_a_function(tmp_path, name):
    path = library(tmp_path, without=name)
    assert search(f"find('{path}')[2]") == f"{path} has no cublasLt{name}"


def test_a_library_that_is_too_old(tmp_path):
    path = library(tmp_path, version=111103)
    assert search(f"find('{path}')[2]") == f"{path} is older than 12.0"


# ---------------------------------------------------------------- wheels
@pytest.fixture
def searched(monkeypatch):
    """The paths that are searched for; none is found."""
    paths = []
    module = SimpleNamespace(find_cublaslt=lambda path: paths.append(path) or ("", 0, "not loaded"))
    monkeypatch.setitem(load.extensions(), "cuda", module)
    plans._cublaslt_wheel.cache_clear()
    yield paths
    plans._cublaslt_wheel.cache_clear()


def wheel(folder: pathlib.Path, name: str, file: str) -> str:
    info = folder / f"{name}-13.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 13.1.2\n")
    names = "libcublas.so.13", file
    (info / "RECORD").write_text("".join(f"nvidia/lib/{name},,\n" for name in names))
    (folder / "nvidia" / "lib").mkdir(parents=True)
    for name in names:  # from Python 3.12 on, files that are missing are not listed
        (folder / "nvidia" / "lib" / name).touch()
    return str(folder / "nvidia" / "lib" / file)


@pytest.mark.parametrize("name", ["nvidia_cublas", "nvidia_cublas_cu12"])
def test_an_installed_wheel(searched, monkeypatch, tmp_path, name):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    path = wheel(tmp_path, name, "libcublasLt.so.12" if name.endswith("12") else "libcublasLt.so.13")
    assert plans.cublaslt() == ("", "", "not loaded")
    assert searched == [path]


def test_without_a_wheel_the_text_names_both(searched, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    want = "not loaded, and nvidia-cublas or nvidia-cublas-cu12 is not installed"
    assert plans.cublaslt() == ("", "", want)
    assert searched == [""]


def test_a_version_as_text(monkeypatch):
    found = ("/lib/libcublasLt.so.13", 131002, "")
    monkeypatch.setitem(load.extensions(), "cuda", SimpleNamespace(find_cublaslt=lambda path: found))
    assert plans.cublaslt() == ("/lib/libcublasLt.so.13", "13.10.2", "")


def test_a_build_without_cuda(monkeypatch):
    monkeypatch.delitem(load.extensions(), "cuda")
    assert plans.cublaslt() == ("", "", "jnvfp4 was built without CUDA")
