"""Finds the compiled extensions and registers their FFI targets."""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import re
import warnings
from types import ModuleType

import jax

from . import compat
from .source_hash import source_hash

_PACKAGE = pathlib.Path(__file__).parents[1]
_INSTALL_HINT = "run `pip install .` in the checkout"
refused: dict[str, str] = {}  # platform -> why its kernels were built and are not used


def installed_file(distribution: str, names: tuple[str, ...]) -> pathlib.Path | None:
    """Finds the first file with one of some names that an installed distribution has; the path is absolute."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((pathlib.Path(str(file.locate())).resolve() for file in files if file.name in names), None)


def _load(name: str) -> ModuleType | None:
    """Imports the extension ``jnvfp4.<name>``; None if it was not built."""
    full_name = f"jnvfp4.{name}"
    spec = importlib.util.find_spec(full_name)
    names = tuple(name + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    # The installed distribution has it where the package is imported from a checkout.
    if spec is None and (path := installed_file("jnvfp4", names)) is not None:
        spec = importlib.util.spec_from_file_location(full_name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runtime_ffi_api() -> tuple[int, int]:
    """Reads the XLA FFI version of the running jaxlib from its headers, which alone say it."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)[0]) for part in ("MAJOR", "MINOR"))
    return major, minor


def check_ffi_api(built: tuple[int, int], running: tuple[int, int]) -> None:
    """Raises before anything is registered: a handler newer than the runtime stops every JAX backend."""
    if built[0] != running[0] or built[1] > running[1]:
        raise ImportError(
            f"jnvfp4: its extension was built with XLA FFI {built[0]}.{built[1]}, but the installed jaxlib "
            f"provides {running[0]}.{running[1]}; upgrade {'jnvfp4' if running[0] > built[0] else 'jax and jaxlib'}, "
            "or rebuild jnvfp4 with `pip install --force-reinstall --no-cache-dir .`, which takes the oldest headers"
        )


def check_source_hash(name: str, built: str, checkout: pathlib.Path) -> None:
    """Raises if a checkout's C++ sources are not those of the extension."""
    if (checkout / "ffi").is_dir() and (checkout / "CMakeLists.txt").is_file():
        current = source_hash(checkout / "ffi")
        if built != current:
            raise ImportError(
                f"jnvfp4: the extension {name} was built from other sources ({built}) than {checkout / 'ffi'} "
                f"({current}); {_INSTALL_HINT} again"
            )


def old_driver(built: int, driver: int | None) -> str:
    """Says why a driver runs no kernel of a build, from the versions of CUDA that both are for; empty if it does."""
    if not driver or (found := driver // 1000) >= built // 1000:
        return ""
    reason = f"the CUDA kernels must have a driver for CUDA {built // 1000}, got one for CUDA {found}"
    return f"{reason}; install a newer driver, or build jnvfp4 with nvcc {found}"


@functools.cache
def extensions() -> dict[str, ModuleType]:
    """Loads, checks and registers what was built: platform ("cpu", "cuda") -> extension module."""
    if jax.__version_info__ < (0, 10, 2):
        raise ImportError(f"jnvfp4: jax must be 0.10.2 or newer, got {jax.__version__}; upgrade jax and jaxlib")
    modules = {}
    for platform, name in (("cpu", "_cpu"), ("cuda", "_cuda")):
        module = _load(name)
        if module is None:
            if platform == "cpu":
                raise ImportError(f"jnvfp4: the compiled extension {name} is missing; {_INSTALL_HINT}")
            continue
        check_ffi_api(module.ffi_api, runtime_ffi_api())
        check_source_hash(name, module.source_hash, _PACKAGE.parent)
        if platform == "cuda" and (reason := old_driver(module.cuda_version, compat.cuda_versions()[1])):
            refused[platform] = reason
            warnings.warn(f"jnvfp4: {reason}; the reference is used on GPUs", RuntimeWarning, stacklevel=2)
            continue
        for target, handler in module.targets.items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA" if platform == "cuda" else platform)
        modules[platform] = module
    return modules


def available(platform: str) -> bool:
    """Says whether native kernels were built for "cpu" or "cuda"."""
    return platform in extensions()
