"""Which kernel multiplies, and the copy of cuBLASLt that it may call: what ffi/ answers without a device."""

import functools
import pathlib
from typing import NamedTuple

from . import load


def matmul_kernels() -> tuple[str, ...]:
    """Lists the kernels of ``matmul_nt`` that ``implementation=`` may name."""
    return load.extensions()["cpu"].matmul_kernels


def grouped_kernels() -> tuple[str, ...]:
    """Lists the kernels of ``grouped_matmul_nt`` that ``implementation=`` may name."""
    return load.extensions()["cpu"].grouped_kernels


def any_gpu() -> int:
    """Returns the compute capability, 10 * major + minor, that every supported GPU has at least."""
    return load.extensions()["cpu"].any_gpu


def has_run_on(capability: int) -> bool:
    """Says whether the kernels have run on a GPU of a compute capability, or for the CPU (0); else on none like it."""
    return load.extensions()["cpu"].has_run_on(capability)


# The wheels of cuBLAS for CUDA 13 and 12, and the file of cuBLASLt in each.
_CUBLAS_WHEELS = {"nvidia-cublas": "libcublasLt.so.13", "nvidia-cublas-cu12": "libcublasLt.so.12"}


class CublasLt(NamedTuple):
    """Says which copy of cuBLASLt the kernel "sm100_cublaslt_nvfp4" calls."""

    path: str  # its file; empty if none was found
    version: str  # such as "13.1.0"; empty if none was found
    reason: str  # why none was found; empty if one was


@functools.cache
def _cublaslt_wheel() -> pathlib.Path | None:
    found = (load.installed_file(wheel, (name,)) for wheel, name in _CUBLAS_WHEELS.items())
    return next((path for path in found if path is not None), None)


def cublaslt() -> CublasLt:
    """Finds cuBLASLt: the copy that JAX's CUDA plugin has loaded, or else that of an installed wheel.

    It needs no GPU. Whether there is a copy may change until one is found, since JAX loads its plugin late.
    """
    cuda = load.extensions().get("cuda")
    if cuda is None:
        return CublasLt("", "", load.refused.get("cuda", "jnvfp4 was built without CUDA"))
    wheel = _cublaslt_wheel()
    path, version, reason = cuda.find_cublaslt(str(wheel or ""))
    if reason:
        return CublasLt("", "", reason if wheel else f"{reason}, and {' or '.join(_CUBLAS_WHEELS)} is not installed")
    return CublasLt(path, f"{version // 10000}.{version // 100 % 100}.{version % 100}", "")


def _library() -> tuple[str, int]:
    """Returns why a plan cannot use cuBLASLt, or an empty text, and its version as a number.

    In a build without CUDA the answer is hypothetical: the newest version.
    """
    if not load.available("cuda"):
        return "", load.extensions()["cpu"].newest_cublaslt
    found = cublaslt()
    if found.reason:
        return found.reason, 0
    major, minor, patch = map(int, found.version.split("."))
    return "", 10000 * major + 100 * minor + patch


def has_block_scaled(capability: int | None) -> bool:
    """Says whether a GPU has FP4 tensor cores that a kernel is for; ``capability`` as in ``plan_matmul``."""
    return load.extensions()["cpu"].has_block_scaled(capability or 0)


def no_block_scaled(capability: int) -> str:
    """Says what a GPU's FP4 tensor cores lack to be used; empty if nothing, or if it has none."""
    if not has_block_scaled(capability):
        return ""
    return load.extensions()["cpu"].no_block_scaled(capability, *_library())


class MatmulPlan(NamedTuple):
    """Says which kernel multiplies."""

    kernel: str  # one of ``matmul_kernels()``, or of ``grouped_kernels()``
    scratch_bytes: int  # the memory that it needs beside its result
    reason: str  # why it cannot; empty if it can
    whole_bias: bool = False  # whether it adds a bias of the shape of the result
    norm: bool = False  # whether it normalizes the rows of a


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
    """Asks ffi/plan/matmul.h for a kernel; the answer needs no device.

    Args:
      shape: how many products, and M, N and K of each.
      a: "nvfp4", or the dtype of a left operand that is not quantized.
      windows: whether an operand has amax scope "window64".
      out: the dtype of the result.
      pinned: whether the sum along K must have the pinned order.
      capability: 10 * major + minor of a GPU; 0 for the CPU; None for a GPU that is not known.
      kernel: the kernel to ask for; the best one if None.
    """
    asked = has_block_scaled(capability) and kernel in (None, "sm100_cublaslt_nvfp4")
    library = _library() if asked else ("", 0)
    plan = load.extensions()["cpu"].plan_matmul
    return MatmulPlan(*plan(*shape, a, windows, out, pinned, *_device(capability), *library, kernel or ""))


def plan_grouped(
    *,
    shape: tuple[int, int, int, int],
    a: str,
    out: str,
    pinned: bool,
    capability: int | None,
    kernel: str | None = None,
) -> MatmulPlan:
    """Asks ffi/plan/grouped.h for a kernel of a grouped product.

    Args:
      shape: M of all groups together, the number of groups, N and K.
      a: as in ``plan_matmul``; so are the others.
      out: the dtype of the result.
      pinned: whether sums must have the pinned order.
      capability: of the device.
      kernel: the kernel to ask for.
    """
    plan = load.extensions()["cpu"].plan_grouped
    return MatmulPlan(*plan(*shape, a, out, pinned, *_device(capability), kernel or ""))


class AttentionPlan(NamedTuple):
    """Says what ``decode_attention`` needs on a device."""

    scratch_bytes: int
    reason: str  # why no kernel runs there; empty if one does


def plan_decode_attention(*, shape: tuple[int, int, int, int, int], capability: int | None) -> AttentionPlan:
    """Asks ffi/plan/decode_attention.h.

    Args:
      shape: sequences, KV heads, query heads of each, elements of a head, and tokens that a sequence has room for.
      capability: of the device, as in ``plan_matmul``.
    """
    plan = load.extensions()["cpu"].plan_decode_attention
    return AttentionPlan(*plan(*shape, _device(capability)[0]))


def _device(capability: int | None) -> tuple[int, str]:
    """Returns the capability that a plan must fit, and the targets of the build, or "" for any without one."""
    built_for = getattr(load.extensions().get("cuda"), "built_for", "")
    return any_gpu() if capability is None else capability, built_for
