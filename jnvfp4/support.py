"""What runs natively where, and the self-check behind ``python -m jnvfp4 doctor``."""

import platform
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from . import _native
from .ops import dequantize, matmul_nt, quantize
from .spec import NVFP4, SUPPORTED_SPECS, QuantSpec, unsupported_reason

OPS = ("quantize", "quantize_pair", "dequantize", "matmul_nt", "linear", "dot_general", "fake_quant")
MIN_COMPUTE_CAPABILITY = (8, 0)


def supports(spec_or_op: QuantSpec | str, device: jax.Device | None = None) -> str | bool:
    """Whether a native kernel runs a spec or an operation on a device.

    Args:
      spec_or_op: a ``QuantSpec``, or the name of an operation such as "matmul_nt".
      device: the default device if None.

    Returns: True, or the reason as a string. Where the reason is the platform, the operation still works,
      through the reference implementation.
    """
    if isinstance(spec_or_op, QuantSpec):
        if reason := unsupported_reason(spec_or_op):
            return reason
    elif spec_or_op not in OPS:
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
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(jnp.bfloat16)
    reason = _platform_reason(device)

    def check(name: str, run: Callable) -> tuple[str, str, str]:
        if reason:
            return name, device.platform, f"reference only: {reason}"
        try:
            with jax.default_device(device):
                return name, device.platform, _compare(run("native"), run("reference"))
        except Exception as error:
            return name, device.platform, f"FAILED: {error}".splitlines()[0]

    for spec in SUPPORTED_SPECS:
        for transpose in (False, True):

            def run(implementation, spec=spec, transpose=transpose):
                return quantize(x, spec, transpose=transpose, implementation=implementation)

            scope, rows = spec.format.amax_scope, spec.block_rows
            yield check(f"quantize {scope} {rows}x16{' transposed' * transpose}", run)
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


def main(argv: list[str]) -> int:
    if argv != ["doctor"]:
        print("usage: python -m jnvfp4 doctor", file=sys.stderr)
        return 2
    return 0 if doctor() else 1
