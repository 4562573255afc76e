"""What runs natively where, and the self-check behind ``python -m jnvfp4 doctor``."""

import platform
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from . import _native
from .ops import dequantize, matmul_nt, quantize
from .spec import (
    FUSED_PAIRS,
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT_SR,
    ROW_SCALED,
    SUPPORTED_SPECS,
    WINDOW64,
    QuantSpec,
    four_over_six,
    name_of,
)

OPS = (
    *("quantize", "quantize_pair", "rms_norm_quantize", "silu_mul_quantize", "dequantize", "matmul_nt"),
    *("linear", "dot_general", "fake_quant"),
)
MIN_COMPUTE_CAPABILITY = (8, 0)
# Enough for a self-check: every field that changes the arithmetic. The tests go through all specs.
CHECKED_SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, four_over_six())


def supports(spec_or_op: QuantSpec | str, device: jax.Device | None = None) -> str | bool:
    """Whether a native kernel runs a spec or an operation on a device.

    Args:
      spec_or_op: a ``QuantSpec``, or the name of an operation such as "matmul_nt".
      device: the default device if None.

    Returns: True, or the reason as a string. Where the reason is the platform, the operation still works,
      through the reference implementation.
    """
    if not isinstance(spec_or_op, QuantSpec) and spec_or_op not in OPS:
        raise ValueError(f"supports: spec_or_op must be a QuantSpec or one of {OPS}, got {spec_or_op!r}")
    return _platform_reason(device or _default_device()) or True


def _default_device() -> jax.Device:
    return next(iter(jnp.zeros(()).devices()))


def _platform_reason(device: jax.Device) -> str | None:
    name = "cuda" if device.platform == "gpu" else device.platform
    if not _native.available(name):
        built = ", ".join(sorted(_native.extensions()))
        return f'no native kernels for platform "{name}" in this build (built: {built}); the reference is used'
    if name == "cuda" and (capability := _compute_capability(device)) < MIN_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is below the supported {MIN_COMPUTE_CAPABILITY}"
    return None


def _compute_capability(device: jax.Device) -> tuple[int, ...]:
    return tuple(int(part) for part in str(device.compute_capability).split("."))


# ---------------------------------------------------------------- the table of docs/support.md
def support_table() -> str:
    """Every spec and what it means, in Markdown, from ``SUPPORTED_SPECS``."""
    head = ("spec", "amax of", "blocks", "block scale", "E", "values", "rotated", "transposed too, in one pass")
    rows = [head, ("---",) * len(head), *map(_support_row, SUPPORTED_SPECS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _support_row(spec: QuantSpec) -> tuple[str, ...]:
    scale = "amax to 6" if spec.select == "max6" else f"4 or 6, {spec.select}, {spec.error_math}"
    partners = [name_of(col) for row, col in FUSED_PAIRS if row == spec]
    return (
        f"`{name_of(spec)}`",
        {"tensor": "tensor", "row": "row", "window64": "64 elements"}[spec.format.amax_scope],
        f"{spec.block_rows}x16",
        scale,
        str(spec.format.e4m3_max),
        spec.rounding,
        "yes" if spec.format.rht else "no",
        "as " + " or ".join(f"`{name}`" for name in sorted(partners)) if partners else "two passes",
    )


# ---------------------------------------------------------------- doctor
def doctor() -> bool:
    """Prints versions, built targets, devices and a self-check; True if no check failed."""
    extensions = _native.extensions()
    print(f"jnvfp4   {_version()}  (sources {extensions['cpu'].source_hash})")
    print(f"python   {platform.python_version()}  jax {jax.__version__}  jaxlib {jaxlib.__version__}")
    print(f"ffi      built with {_dotted(extensions['cpu'].ffi_api)}, running {_dotted(_native._runtime_ffi_api())}")
    print(f"cpu      kernels for {extensions['cpu'].isa()}")
    cuda = extensions.get("cuda")
    print(f"cuda     {'built for ' + cuda.built_for if cuda else 'not built'}")
    devices = _devices()
    for device in devices:
        detail = f", compute capability {device.compute_capability}" if device.platform == "gpu" else ""
        print(f"device   {device}: {device.device_kind}{detail}")
    print()
    rows = [row for device in _one_per_platform(devices) for row in _check_device(device)]
    width = max(len(name) for name, _, _ in rows)
    for name, where, outcome in rows:
        print(f"{name:<{width}}  {where:<6} {outcome}")
    return not any(outcome.startswith("FAILED") for _, _, outcome in rows)


def _version() -> str:
    from . import __version__

    return __version__


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _devices() -> list[jax.Device]:
    return list(dict.fromkeys([*jax.devices(), *jax.devices("cpu")]))


def _one_per_platform(devices: list[jax.Device]) -> list[jax.Device]:
    return list({device.platform: device for device in reversed(devices)}.values())[::-1]


def _check_device(device: jax.Device) -> Iterator[tuple[str, str, str]]:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(jnp.bfloat16)
    reason = _platform_reason(device)

    def check(name: str, run: Callable) -> tuple[str, str, str]:
        if reason:
            return name, device.platform, f"reference only: {reason}"
        try:
            with jax.default_device(device):
                return name, device.platform, _compare(run("native"), run("reference"))
        except Exception as error:
            return name, device.platform, f"FAILED: {error}".splitlines()[0]

    for spec in CHECKED_SPECS:
        for transpose in (False, True):

            def run(implementation, spec=spec, transpose=transpose):
                key = jax.random.key(0) if spec.rounding == "stochastic" else None
                return quantize(x, spec, key=key, transpose=transpose, implementation=implementation)

            yield check(f"quantize {name_of(spec)}{' transposed' * transpose}", run)
    yield check("dequantize", lambda i: dequantize(quantize(x), implementation=i))
    exact = quantize(np.round(np.clip(x.astype(np.float32), -2, 2)), NVFP4)  # sums exact in any order
    yield check("matmul_nt", lambda i: matmul_nt(exact, exact, implementation=i))
    yield check("matmul_nt weight-only", lambda i: matmul_nt(jnp.round(jnp.asarray(x)), exact, implementation=i))


def _compare(native: object, reference: object) -> str:
    pairs = zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True)
    different = sum(int(np.sum(_bytes(a) != _bytes(b))) for a, b in pairs)
    return f"FAILED: {different} bytes differ from the reference" if different else "ok: native == reference"


def _bytes(a: object) -> np.ndarray:
    return np.frombuffer(np.asarray(a).tobytes(), np.uint8)
