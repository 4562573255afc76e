"""``supports``, which says what runs natively where; ``export_checks``; and the commands ``support`` and ``doctor``."""

import inspect
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np

from . import _native
from ._arguments import OPERATIONS
from ._primitives._matmul_routes import Product, plan
from ._primitives.grouped_matmul import Operands as GroupedOperands
from ._primitives.grouped_matmul import plan as plan_grouped
from ._version import __version__
from .ops import dequantize, grouped_matmul_nt, matmul_nt, quantize, transpose
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
from .tensor import NVFP4Tensor

MIN_COMPUTE_CAPABILITY = (8, 0)
FP4_KERNEL = "sm100_cublaslt_nvfp4"
# Enough for a self-check: every field that changes the arithmetic. The tests go through all specs.
CHECKED_SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, four_over_six())


class Support(NamedTuple):
    """Holds the answer of ``supports``. It counts as true if a native kernel runs.

    Attributes:
      native: whether a kernel of this library runs, compiled for the platform.
      kernel: its name; "reference" if none runs.
      reason: why no native kernel runs; else empty, or what a product lacks to use the FP4 tensor cores of its GPU.
    """

    native: bool
    kernel: str
    reason: str

    def __bool__(self) -> bool:
        return self.native


def supports(op_or_spec: str | QuantSpec, *operands: Any, device: jax.Device | None = None, **options: Any) -> Support:
    """Says which kernel runs an operation on a device.

    Args:
      op_or_spec: the name of an operation, such as "matmul_nt"; a ``QuantSpec`` means "quantize" by that spec.
      *operands: the positional arguments of a call: arrays, ``jax.ShapeDtypeStruct`` or NVFP4Tensors of either. Without
        operands the answer says whether the operation has any native kernel on the device.
      device: a ``jax.Device``; the default device if None.
      **options: the keywords of a call, such as ``spec`` or ``bias``.

    Returns:
      ``Support(native, kernel, reason)``. An operation without a native kernel still works, through the reference
      implementation. The kernel is "cpu" or "cuda"; that of ``matmul_nt`` and ``grouped_matmul_nt`` with operands is
      more exact, a name that their ``implementation`` takes.

    Raises:
      ValueError, TypeError: there is no such operation, or ``device`` is no device. If the operation refuses the
        operands or options, its own error.
    """
    name, function = _operation(op_or_spec)
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"supports: device must be a jax.Device, got {device!r}")
    device = device or _default_device()
    arguments = _arguments(name, function, operands, options)
    if arguments is not None:
        _check_call(function, operands, options)
    support = _platform_support(device)
    if not support:
        return support
    if options.get("implementation") == "reference":
        return Support(False, "reference", 'implementation="reference" asks for it')
    if name in _KERNELS and arguments is not None:
        return _KERNELS[name]((arguments.pop("a"), arguments.pop("b")), arguments, device)
    return support


def _operation(op_or_spec: str | QuantSpec) -> tuple[str, Callable]:
    if isinstance(op_or_spec, QuantSpec):
        return "quantize", partial(quantize, spec=op_or_spec)
    if not isinstance(op_or_spec, str) or op_or_spec not in OPERATIONS:
        raise ValueError(
            f"supports: op_or_spec must be a QuantSpec or one of {', '.join(sorted(OPERATIONS))}, got {op_or_spec!r}"
        )
    return op_or_spec, OPERATIONS[op_or_spec]


def _check_call(function: Callable, operands: tuple, options: dict[str, Any]) -> None:
    """Traces a call, so that the operation raises for what it refuses; nothing is computed."""
    leaves, structure = jax.tree.flatten((operands, options))
    arrays = [leaf for leaf in leaves if _is_array(leaf)]

    def call(*traced: jax.Array) -> Any:
        rest = iter(traced)
        args, keywords = jax.tree.unflatten(structure, [next(rest) if _is_array(leaf) else leaf for leaf in leaves])
        return function(*args, **keywords)

    jax.eval_shape(call, *arrays)


def _arguments(name: str, function: Callable, operands: tuple, options: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of the call by name; None for a call without operands."""
    signature = inspect.signature(function)
    try:
        partly = signature.bind_partial(*operands, **options).arguments
        required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        return None if set(partly).isdisjoint(required) else signature.bind(*operands, **options).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _is_array(leaf: Any) -> bool:
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _matmul_kernel(operands: tuple, options: dict[str, Any], device: jax.Device) -> Support:
    """Asks for the kernel of ``matmul_nt`` for the operands (a, b) on a device that has native kernels."""
    (left, a_format), (right, b_format) = map(_parts_of, operands)
    accumulation = options.get("accumulation", "fast")
    product = Product(left, right, options.get("bias"), a_format, b_format, _out_dtype(options), accumulation)
    capability, kernel = _where(options, device)
    answer = _answer(plan(product, capability, kernel))
    return answer if kernel else answer._replace(reason=answer.reason or _without_fp4(product, capability, answer))


def _grouped_kernel(operands: tuple, options: dict[str, Any], device: jax.Device) -> Support:
    """Asks for the kernel of ``grouped_matmul_nt``."""
    (left, a_format), (right, _) = map(_parts_of, operands)
    product = GroupedOperands(left, right, options["group_sizes"])
    return _answer(plan_grouped(product, a_format, _out_dtype(options), *_where(options, device)))


_KERNELS = {"matmul_nt": _matmul_kernel, "grouped_matmul_nt": _grouped_kernel}


def _parts_of(operand: Any) -> tuple[tuple, Any]:
    """Returns data, scale and amax and their format, or an array and None."""
    if isinstance(operand, NVFP4Tensor):
        return (operand.data, operand.scale, operand.amax), operand.format
    return (operand,), None


def _out_dtype(options: dict[str, Any]) -> Any:
    return options.get("out_dtype", jnp.bfloat16)


def _where(options: dict[str, Any], device: jax.Device) -> tuple[int, str | None]:
    """Returns the capability of a device and the kernel that is asked for by name."""
    implementation = options.get("implementation")
    capability = 0 if device.platform == "cpu" else _number(_compute_capability(device))
    return capability, None if implementation in (None, "native") else implementation


def _answer(chosen: _native.MatmulPlan) -> Support:
    return Support(not chosen.reason, chosen.kernel, chosen.reason)


def _without_fp4(product: Product, capability: int, answer: Support) -> str:
    """Says why a GPU's FP4 tensor cores do not compute a product that they would with another library."""
    missing = _native.no_block_scaled(capability)
    decoded = answer.kernel == "decode_then_dot"
    return missing if missing and decoded and plan(product, capability, FP4_KERNEL).reason == missing else ""


def _default_device() -> jax.Device:
    return next(iter(jax.device_put(np.float32(0)).devices()))


def _platform_support(device: jax.Device) -> Support:
    name = "cuda" if device.platform == "gpu" else device.platform
    if not _native.available(name):
        built = ", ".join(sorted(_native.extensions()))
        reason = f'no native kernels for platform "{name}" in this build (built: {built}); the reference is used'
        return Support(False, "reference", reason)
    if name == "cuda" and (capability := _compute_capability(device)) < MIN_COMPUTE_CAPABILITY:
        reason = f"compute capability {_dotted(capability)} is below the supported {_dotted(MIN_COMPUTE_CAPABILITY)}"
        return Support(False, "reference", reason)
    return Support(True, name, "")


def _number(capability: tuple[int, ...]) -> int:
    return 10 * capability[0] + capability[1]


def _compute_capability(device: jax.Device) -> tuple[int, ...]:
    return tuple(int(part) for part in str(device.compute_capability).split("."))


# ---------------------------------------------------------------- export
def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Lists what ``jax.export.export`` takes as ``disabled_checks`` for a program with our kernels: one for each call.

    JAX exports a custom call only for a caller who vouches that its name keeps its meaning. An exported program that
    another version of jnvfp4 cannot run is refused with INVALID_ARGUMENT or as an unknown target, and is to be
    exported again.
    """
    names = {name for module in _native.extensions().values() for name in module.targets}
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(names)]


# ---------------------------------------------------------------- the table of docs/support.md
def support_table() -> str:
    """Lists every spec and its fields, in Markdown."""
    head = ("spec", "amax of", "blocks", "block scale", "E", "values", "rotated", "transposed too, in one pass")
    rows = [head, ("---",) * len(head), *map(_support_row, SUPPORTED_SPECS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _support_row(spec: QuantSpec) -> tuple[str, ...]:
    largest = "amax below 6" if spec.scale_headroom else "amax to 6"
    scale = largest if spec.select == "max6" else f"4 or 6, {spec.select}, {spec.error_math}"
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
    print(f"jnvfp4   {__version__}  (sources {extensions['cpu'].source_hash})")
    print(f"python   {platform.python_version()}  jax {jax.__version__}  jaxlib {jaxlib.__version__}")
    print(f"ffi      built with {_dotted(extensions['cpu'].ffi_api)}, running {_dotted(_native.runtime_ffi_api())}")
    print(f"cpu      kernels for {extensions['cpu'].isa()}")
    cuda = extensions.get("cuda")
    print(f"cuda     {'built for ' + cuda.built_for if cuda else 'not built'}")
    devices = _devices()  # JAX's CUDA plugin, if there is one, has loaded cuBLASLt then
    library = _native.cublaslt()
    print("cublaslt " + (f"none: {library.reason}" if library.reason else f"{library.version}  {library.path}"))
    for device in devices:
        detail = f", compute capability {device.compute_capability}" if device.platform == "gpu" else ""
        print(f"device   {device}: {device.device_kind}{detail}")
        if device.platform == "gpu" and (line := _fp4_line(_number(_compute_capability(device)))):
            print(f"fp4      {device}: {line}")
    print()
    rows = [row for device in _one_per_platform(devices) for row in _check_device(device)]
    width = max(len(name) for name, _, _ in rows)
    for name, where, outcome in rows:
        print(f"{name:<{width}}  {where:<6} {outcome}")
    return not any(outcome.startswith("FAILED") for _, _, outcome in rows)


def _fp4_line(capability: int) -> str:
    """Says whether products use the FP4 tensor cores of a GPU; empty if no kernel is for those that it has."""
    if missing := _native.no_block_scaled(capability):
        return f"not used, products decode to 16 bits: {missing}"
    if not _native.has_block_scaled(capability):
        return ""
    return f"used by {FP4_KERNEL}, which is compiled, but was never run on such a GPU"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _devices() -> list[jax.Device]:
    return list(dict.fromkeys([*jax.devices(), *jax.devices("cpu")]))


def _one_per_platform(devices: list[jax.Device]) -> list[jax.Device]:
    return list({device.platform: device for device in reversed(devices)}.values())[::-1]


def _check_device(device: jax.Device) -> Iterator[tuple[str, str, str]]:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(jnp.bfloat16)
    support = _platform_support(device)

    def check(name: str, run: Callable) -> tuple[str, str, str]:
        if not support:
            return name, device.platform, f"reference only: {support.reason}"
        try:
            with jax.default_device(device):
                return name, device.platform, _compare(run("native"), run("reference"))
        except Exception as error:
            return name, device.platform, f"FAILED: {error}".splitlines()[0]

    for spec in CHECKED_SPECS:
        for turned in (False, True):

            def run(implementation, spec=spec, turned=turned):
                key = jax.random.key(0) if spec.rounding == "stochastic" else None
                return quantize(x, spec, key=key, transpose=turned, implementation=implementation)

            yield check(f"quantize {name_of(spec)}{' transposed' * turned}", run)
    yield check("dequantize", lambda i: dequantize(quantize(x), implementation=i))
    yield check("transpose", lambda i: transpose(quantize(x, NVFP4_2D), implementation=i))
    exact = quantize(np.round(np.clip(x.astype(np.float32), -2, 2)), NVFP4)  # sums exact in any order
    yield check("matmul_nt", lambda i: matmul_nt(exact, exact, implementation=i))
    yield check("matmul_nt weight-only", lambda i: matmul_nt(jnp.round(jnp.asarray(x)), exact, implementation=i))
    experts = jax.tree.map(lambda part: jnp.stack([part] * 3), exact)
    sizes = jnp.array([17, 0, 40], jnp.int32)  # 7 rows are in no group
    yield check("grouped_matmul_nt", lambda i: grouped_matmul_nt(exact, experts, sizes, implementation=i))


def _compare(native: object, reference: object) -> str:
    pairs = zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True)
    different = sum(int(np.sum(_bytes(a) != _bytes(b))) for a, b in pairs)
    return f"FAILED: {different} bytes differ from the reference" if different else "ok: native == reference"


def _bytes(a: object) -> np.ndarray:
    return np.frombuffer(np.asarray(a).tobytes(), np.uint8)
