"""Versions agree, and a wrong build is one readable ImportError."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest

import jnvfp4
from jnvfp4 import _native
from jnvfp4._source_hash import source_hash

ROOT = pathlib.Path(__file__).parents[1]


def test_versions_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jnvfp4.__version__ == declared == importlib.metadata.version("jnvfp4")


def test_the_build_pins_the_oldest_supported_headers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = next(d for d in project["project"]["dependencies"] if d.startswith("jaxlib>=")).removeprefix("jaxlib>=")
    assert f"jaxlib=={oldest}" in project["build-system"]["requires"]


def test_the_package_is_typed():
    assert (pathlib.Path(jnvfp4.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("built", [(0, 3), (0, 1)])
def test_older_headers_are_accepted(built):
    _native.check_ffi_api(built, (0, 3))


@pytest.mark.parametrize("built", [(0, 5), (1, 0), (1, 9)])
def test_newer_headers_are_refused_before_anything_is_registered(built):
    text = re.escape(f"built with XLA FFI {built[0]}.{built[1]}, but the installed jaxlib provides 0.4; upgrade jax")
    with pytest.raises(ImportError, match=text):
        _native.check_ffi_api(built, (0, 4))


def test_this_build_fits_this_jaxlib():
    running = _native.runtime_ffi_api()
    for module in _native.extensions().values():
        _native.check_ffi_api(module.ffi_api, running)
        assert module.ffi_api <= running


def _checkout(folder, text):
    (folder / "ffi").mkdir()
    (folder / "ffi" / "numerics.h").write_text(text)
    (folder / "CMakeLists.txt").write_text("")
    return source_hash(folder / "ffi")


def test_an_extension_of_other_sources_is_refused(tmp_path):
    current = _checkout(tmp_path, "int x;")
    _native.check_source_hash("_cpu", current, tmp_path)
    with pytest.raises(ImportError, match=r"extension _cpu was built from other sources \(0+\) than .*pip install"):
        _native.check_source_hash("_cpu", "0" * 16, tmp_path)


def test_an_installed_package_has_no_sources_to_compare(tmp_path):
    _native.check_source_hash("_cpu", "0" * 16, tmp_path)


def test_source_hash_follows_names_and_contents(tmp_path):
    first = _checkout(tmp_path, "int x;")
    (tmp_path / "ffi" / "notes.txt").write_text("not a source")
    assert source_hash(tmp_path / "ffi") == first
    (tmp_path / "ffi" / "numerics.h").write_text("int y;")
    second = source_hash(tmp_path / "ffi")
    (tmp_path / "ffi" / "numerics.h").rename(tmp_path / "ffi" / "other.h")
    assert len({first, second, source_hash(tmp_path / "ffi")}) == 3
