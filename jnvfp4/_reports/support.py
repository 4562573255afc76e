"""``supports``, which says what runs natively where; ``export_checks``; and the command ``support``."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from .._core.tensor import NVFP4Tensor, PyTree
from .._native import compat, load, plans
from .._native.self_check import Refusal, refusals
from .._ops.arguments import OPERATIONS
from .._ops.quantize import quantize
from .._primitives._base import Backend
from .._primitives._matmul_routes import MatmulParams, Product, choose, plan
from .._primitives._products import Operands, ProductParams
from .._primitives._sides import no_kernel
from .._primitives.grouped_matmul import plan as plan_grouped
from .._self_check.cases import product_check
from ..spec import FUSED_PAIRS, SUPPORTED_SPECS, QuantSpec, name_of

FP4_KERNEL = "sm100_cublaslt_nvfp4"
Options = dict[str, Any]  # keyword arguments of an operation


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


def supports(
    op_or_spec: str | QuantSpec, *operands: object, device: jax.Device | None = None, **options: object
) -> Support:
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
    device = device or next(iter(jax.device_put(np.float32(0)).devices()))  # the default device
    arguments = _arguments(name, function, operands, options)
    if arguments is not None:
        _check_call(function, operands, options)
    support = _platform_support(device)
    if not support:
        return support
    if options.get("implementation") == "reference":
        return Support(False, "reference", 'implementation="reference" asks for it')
    for spec in filter(lambda value: isinstance(value, QuantSpec), (op_or_spec, *(arguments or {}).values())):
        if reason := no_kernel(spec, support.kernel):  # of quantize, quantize_pair, fake_quant and gptq
            return Support(False, "reference", reason)
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


def _check_call(function: Callable, operands: tuple, options: Options) -> None:
    """Traces a call, so that the operation raises for what it refuses; nothing is computed."""
    leaves, structure = jax.tree.flatten((operands, options))
    arrays = [leaf for leaf in leaves if _is_array(leaf)]

    def call(*traced: jax.Array) -> PyTree:
        rest = iter(traced)
        args, keywords = jax.tree.unflatten(structure, [next(rest) if _is_array(leaf) else leaf for leaf in leaves])
        return function(*args, **keywords)

    jax.eval_shape(call, *arrays)


def _arguments(name: str, function: Callable, operands: tuple, options: Options) -> Options | None:
    signature = inspect.signature(function)
    try:
        partly = signature.bind_partial(*operands, **options).arguments
        required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        return None if set(partly).isdisjoint(required) else signature.bind(*operands, **options).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _is_array(leaf: object) -> bool:
    return not isinstance(leaf, type) and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _matmul_kernel(operands: tuple, options: Options, device: jax.Device) -> Support:
    """Asks for the kernel of ``matmul_nt`` for the operands (a, b) on a device that has native kernels."""
    (left, a_format), (right, b_format) = map(_parts_of, operands)
    accumulation = options.get("accumulation", "fast")
    params = MatmulParams(a_format, b_format, _out_dtype(options), accumulation)
    product = Product(left, right, options.get("bias"), None, params)
    capability, kernel = _where(options, device)
    backend = Backend("native", capability, kernel, _refused(device, capability))
    answer = _answer(choose(product, backend))
    if kernel:
        return answer
    refusal = backend.refusal(plan(product, capability, None).kernel)
    reason = refusal or answer.reason or _without_fp4(product, capability, answer)
    return answer._replace(native=answer.kernel != "reference" and answer.native, reason=reason)


def _grouped_kernel(operands: tuple, options: Options, device: jax.Device) -> Support:
    (left, a_format), (right, b_format) = map(_parts_of, operands)
    params = ProductParams(a_format, b_format, _out_dtype(options), options.get("accumulation", "fast"))
    return _answer(plan_grouped(params, Operands(left, right, ()), *_where(options, device)))


_KERNELS = {"matmul_nt": _matmul_kernel, "grouped_matmul_nt": _grouped_kernel}


def _parts_of(operand: object) -> tuple[tuple, Any]:
    if isinstance(operand, NVFP4Tensor):
        return (operand.data, operand.scale, operand.amax), operand.format
    return (operand,), None


def _out_dtype(options: Options) -> np.dtype:
    return jnp.dtype(options.get("out_dtype", jnp.bfloat16))


def _where(options: Options, device: jax.Device) -> tuple[int, str | None]:
    """Returns the capability of a device and the kernel that is asked for by name."""
    implementation = options.get("implementation")
    capability = compat.capability(device) or 0
    return capability, None if implementation in (None, "native") else implementation


def _answer(chosen: plans.MatmulPlan) -> Support:
    return Support(not chosen.reason, chosen.kernel, chosen.reason)


def no_kernels(device: jax.Device) -> str:
    """Says why no kernel of this build runs on a device; empty if some do."""
    return _platform_support(device).reason


def _refused(device: jax.Device, capability: int) -> tuple[Refusal, ...]:
    """Returns the kernels that this process has found wrong on a device; most devices are never asked."""
    if plans.has_run_on(capability):
        return ()
    return refusals([product_check(name, capability) for name in plans.matmul_kernels()], device)


def _without_fp4(product: Product, capability: int, answer: Support) -> str:
    """Says why a GPU's FP4 tensor cores do not compute a product that they would with another library."""
    missing = plans.no_block_scaled(capability)
    decoded = answer.kernel == "decode_then_dot"
    return missing if missing and decoded and plan(product, capability, FP4_KERNEL).reason == missing else ""


def _platform_support(device: jax.Device) -> Support:
    name = "cuda" if device.platform == "gpu" else device.platform
    if not load.available(name):
        none = f'no native kernels for platform "{name}" in this build (built: {", ".join(sorted(load.extensions()))})'
        return Support(False, "reference", f"{load.refused.get(name, none)}; the reference is used")
    if name == "cuda" and (capability := compat.capability(device) or 0) < plans.any_gpu():
        found, least = compat.dotted(capability), compat.dotted(plans.any_gpu())
        return Support(False, "reference", f"compute capability {found} is below the supported {least}")
    return Support(True, name, "")


# ---------------------------------------------------------------- export
def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Lists what ``jax.export.export`` takes as ``disabled_checks`` for a program with our kernels: one for each call.

    JAX exports a custom call only for a caller who vouches that its name keeps its meaning. An exported program that
    another version of jnvfp4 cannot run is refused with INVALID_ARGUMENT or as an unknown target, and is to be
    exported again.
    """
    names = {name for module in load.extensions().values() for name in module.targets}
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(names)]


# ---------------------------------------------------------------- the table of docs/support.md
def support_table() -> str:
    """Lists every spec and its fields, in Markdown."""
    head = ("spec", "amax of", "blocks", "block scale", "E", "values", "rotated", "transposed too, in one pass")
    rows = [head, ("---",) * len(head), *map(_support_row, SUPPORTED_SPECS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _support_row(spec: QuantSpec) -> tuple[str, ...]:
    largest = "amax below 6" if spec.scale_headroom else "amax to 6"
    scale = {"max6": largest, "search": "best of 11"}.get(spec.select, f"4 or 6, {spec.select}, {spec.error_math}")
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
