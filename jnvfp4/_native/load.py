"""Finds the compiled extensions and registers their FFI targets."""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import re
from types import ModuleType
from typing import NamedTuple

import jax

from .source_hash import source_hash

_PACKAGE = pathlib.Path(__file__).parents[1]
_INSTALL_HINT = "run `pip install .` in the checkout"


def _installed_file(distribution: str, names: tuple[str, ...]) -> pathlib.Path | None:
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
    if spec is None and (path := _installed_file("jnvfp4", names)) is not None:
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
            f"provides {running[0]}.{running[1]}; upgrade jax and jaxlib, or rebuild jnvfp4 with `pip install "
            "--force-reinstall --no-cache-dir .`, which uses the oldest supported headers"
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


@functools.cache
def extensions() -> dict[str, ModuleType]:
    """Loads, checks and registers what was built: platform ("cpu", "cuda") -> extension module."""
    modules = {}
    for platform, name in (("cpu", "_cpu"), ("cuda", "_cuda")):
        module = _load(name)
        if module is None:
            if platform == "cpu":
                raise ImportError(f"jnvfp4: the compiled extension {name} is missing; {_INSTALL_HINT}")
            continue
        check_ffi_api(module.ffi_api, runtime_ffi_api())
        check_source_hash(name, module.source_hash, _PACKAGE.parent)
        for target, handler in module.targets.items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA" if platform == "cuda" else platform)
        modules[platform] = module
    return modules


def available(platform: str) -> bool:
    """Says whether native kernels were built for "cpu" or "cuda"."""
    return platform in extensions()


def matmul_kernels() -> tuple[str, ...]:
    """Lists the kernels of ``matmul_nt`` that ``implementation=`` may name."""
    return extensions()["cpu"].matmul_kernels


def grouped_kernels() -> tuple[str, ...]:
    """Lists the kernels of ``grouped_matmul_nt`` that ``implementation=`` may name."""
    return extensions()["cpu"].grouped_kernels


def any_gpu() -> int:
    """Returns the compute capability, 10 * major + minor, that every supported GPU has at least."""
    return extensions()["cpu"].any_gpu


def has_run_on(capability: int) -> bool:
    """Says whether the kernels have run on a GPU of a compute capability, or for the CPU (0); else on none like it."""
    return extensions()["cpu"].has_run_on(capability)


# The wheels of cuBLAS for CUDA 13 and 12, and the file of cuBLASLt in each.
_CUBLAS_WHEELS = {"nvidia-cublas": "libcublasLt.so.13", "nvidia-cublas-cu12": "libcublasLt.so.12"}


class CublasLt(NamedTuple):
    """Says which copy of cuBLASLt the kernel "sm100_cublaslt_nvfp4" calls.

    Attributes:
      path: its file; empty if none was found.
      version: such as "13.1.0"; empty if none was found.
      reason: why none was found; empty if one was.
    """

    path: str
    version: str
    reason: str


@functools.cache
def _cublaslt_wheel() -> pathlib.Path | None:
    found = (_installed_file(wheel, (name,)) for wheel, name in _CUBLAS_WHEELS.items())
    return next((path for path in found if path is not None), None)


def cublaslt() -> CublasLt:
    """Finds cuBLASLt: the copy that JAX's CUDA plugin has loaded, or else that of an installed wheel.

    It needs no GPU. Whether there is a copy may change until one is found, since JAX loads its plugin late.
    """
    cuda = extensions().get("cuda")
    if cuda is None:
        return CublasLt("", "", "jnvfp4 was built without CUDA")
    wheel = _cublaslt_wheel()
    path, version, reason = cuda.find_cublaslt(str(wheel or ""))
    if reason:
        return CublasLt("", "", reason if wheel else f"{reason}, and {' or '.join(_CUBLAS_WHEELS)} is not installed")
    return CublasLt(path, f"{version // 10000}.{version // 100 % 100}.{version % 100}", "")


def _library() -> tuple[str, int]:
    """Returns why a plan cannot use cuBLASLt, or an empty text, and its version as a number.

    In a build without CUDA the answer is hypothetical: the newest version.
    """
    if not available("cuda"):
        return "", extensions()["cpu"].newest_cublaslt
    found = cublaslt()
    if found.reason:
        return found.reason, 0
    major, minor, patch = map(int, found.version.split("."))
    return "", 10000 * major + 100 * minor + patch


def has_block_scaled(capability: int | None) -> bool:
    """Says whether a GPU has FP4 tensor cores that a kernel is for; ``capability`` as in ``plan_matmul``."""
    return extensions()["cpu"].has_block_scaled(capability or 0)


def no_block_scaled(capability: int) -> str:
    """Says what a GPU's FP4 tensor cores lack to be used; empty if nothing, or if it has none."""
    if not has_block_scaled(capability):
        return ""
    return extensions()["cpu"].no_block_scaled(capability, *_library())


class MatmulPlan(NamedTuple):
    """Says which kernel multiplies.

    Attributes:
      kernel: one of ``matmul_kernels()``, or of ``grouped_kernels()``.
      scratch_bytes: the memory that it needs beside its result.
      reason: why it cannot; empty if it can.
    """

    kernel: str
    scratch_bytes: int
    reason: str


def plan_matmul(
    *,
    shape: tuple[int, int, int, int],
    a: str,
    windows: bool,
    out: str,
    pinned: bool,
    capability: int | None,
    kernel: str | None = None,
) -> MatmulPlan:
    """Asks ffi/matmul_plan.h for a kernel; the answer needs no device.

    Args:
      shape: how many products, and M, N and K of each.
      a: "nvfp4", or the dtype of a left operand that is not quantized.
      windows: whether an operand has amax scope "window64".
      out: the dtype of the result.
      pinned: whether the sum along K must have the pinned order.
      capability: 10 * major + minor of a GPU; 0 for the CPU; None for a GPU that is not known.
      kernel: the kernel to ask for; the best one if None.
    """
    batch, rows, cols, depth = shape
    asked = has_block_scaled(capability) and kernel in (None, "sm100_cublaslt_nvfp4")
    library = _library() if asked else ("", 0)
    answer = extensions()["cpu"].plan_matmul(
        batch, rows, cols, depth, a, windows, out, pinned, *_device(capability), *library, kernel or ""
    )
    return MatmulPlan(*answer)


def plan_grouped(
    *, shape: tuple[int, int, int, int], a: str, out: str, capability: int | None, kernel: str | None = None
) -> MatmulPlan:
    """Asks ffi/grouped_plan.h for a kernel of a grouped product.

    Args:
      shape: M of all groups together, the number of groups, N and K.
      a: as in ``plan_matmul``; so are the others.
      out: the dtype of the result.
      capability: of the device.
      kernel: the kernel to ask for.
    """
    return MatmulPlan(*extensions()["cpu"].plan_grouped(*shape, a, out, *_device(capability), kernel or ""))


def _device(capability: int | None) -> tuple[int, bool]:
    """Returns the capability that a plan must fit, and whether the build has the kernels for 90a."""
    sm90a = getattr(extensions().get("cuda"), "sm90a", True)  # without a CUDA build any answer is hypothetical
    return any_gpu() if capability is None else capability, sm90a
