"""The private corner of JAX that jnvfp4 touches, in one place. tests/test_compat.py watches it."""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import config, core, dispatch, sharding_impls
from jax._src.interpreters import batching, mlir
from jax.extend.core import Primitive
from jax.sharding import Mesh


def needs_devices_in_lowering(primitive: Primitive) -> None:
    """Makes jit hand the device list to ``primitive``'s lowering, which custom_partitioning asks for.

    Without it a sharded jit stops with an AssertionError inside JAX (0.10.2 to 0.12).
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def without_constant_folding() -> AbstractContextManager:
    """Leaves ``jax.ensure_compile_time_eval`` for what is traced inside.

    custom_partitioning stops with an AssertionError at a constant that was evaluated in its function (0.10.2, 0.11.2),
    and the place of a device in a mesh has no value yet.
    """
    return config.eager_constant_folding(False)


def with_mesh(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Tells custom_partitioning of the mesh of ``jax.set_mesh``, where no sharding of the jit arguments names it.

    Without it custom_partitioning meets a sharding without a spec and raises (0.10.2 to 0.12).
    """
    axes: Any = ctx.module_context.axis_context
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(axes, "abstract_mesh", mesh) is not None or mesh.empty or mesh.size != axes.num_devices:
        return ctx
    axes = dataclasses.replace(axes, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))


def with_explicit_shardings(ctx: mlir.LoweringRuleContext, results: Iterable[mlir.ir.Value]) -> list[mlir.ir.Value]:
    """Tells XLA that the results have the shardings of their types on an Explicit mesh, as JAX's own primitives do.

    The types are not enough: Shardy would choose the shardings of what a custom call returns.
    """
    return [mlir.lower_with_sharding_in_types(ctx, v, aval) for v, aval in zip(results, ctx.avals_out, strict=True)]


def partly_manual(ctx: mlir.LoweringRuleContext) -> tuple[Mesh | None, mlir.LoweringRuleContext | None]:
    """Returns the mesh of a shard_map with ``axis_names``, and ``ctx`` for what is partitioned over its other axes.

    Both are None if shard_map has made every axis manual, if no device is known, or if Shardy is switched off, without
    which XLA ends the process (0.10.2 and 0.11.2). XLA asks custom_partitioning about
    the devices that share their place on the manual axes, so their mesh is that of the other axes; JAX gives it none,
    and it meets a sharding without a spec (0.10.2 to 0.12).
    """
    axes = ctx.module_context.axis_context
    mesh, manual = getattr(axes, "mesh", None), set(getattr(axes, "manual_axes", ()))
    avals: Any = ctx.avals_in
    for aval in avals:
        manual.update(aval.sharding.mesh.manual_axes)
    if not (isinstance(mesh, Mesh) and config.use_shardy_partitioner.value and set(mesh.axis_names) - manual):
        return None, None
    left = [i for i, name in enumerate(mesh.axis_names) if name not in manual]
    one_group = mesh.devices[tuple(slice(None) if i in left else 0 for i in range(mesh.devices.ndim))]
    abstract = Mesh(one_group, [mesh.axis_names[i] for i in left]).abstract_mesh
    axes = sharding_impls.ShardingContext(one_group.size, tuple(one_group.flat), abstract)
    return mesh, ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))


def devices(ctx: mlir.LoweringRuleContext) -> list[jax.Device]:
    """Returns the devices that a program is lowered for; none if it is exported or they are not known."""
    module = ctx.module_context
    axes = module.axis_context
    mesh = getattr(axes, "mesh", None)
    found = getattr(axes, "device_assignment", None) or (None if mesh is None else getattr(mesh, "devices", None))
    return [] if module.lowering_parameters.for_export or found is None else list(np.asarray(found).flat)


def local_devices(ctx: mlir.LoweringRuleContext) -> list[jax.Device]:
    """Returns those of ``devices`` that this process can run programs on: they are present, and its own."""
    local: dict[str, list[jax.Device]] = {}
    for platform in {device.platform for device in devices(ctx)}:
        try:
            local[platform] = jax.local_devices(backend=platform)
        except RuntimeError:  # a description of devices that are elsewhere
            local[platform] = []
    return [device for device in devices(ctx) if device in local[device.platform]]


def cpu_device() -> jax.Device | None:
    """Returns a CPU of this process; None if JAX is told to use none, as by JAX_PLATFORMS=cuda."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def capability(device: jax.Device) -> int | None:
    """Returns 10 * major + minor of a GPU; None for another device."""
    text = getattr(device, "compute_capability", None)
    if text is None:
        return None
    major, minor = str(text).split(".")
    return 10 * int(major) + int(minor)


def dotted(capability: int) -> str:
    """Returns a compute capability as NVIDIA writes it: 9.0 for 90."""
    return f"{capability // 10}.{capability % 10}"


def gpu_capability(ctx: mlir.LoweringRuleContext) -> int | None:
    """Returns 10 * major + minor of the least of the GPUs that a program is lowered for.

    None if the program is exported or no device is known: it may then run on any GPU.
    """
    found = [capability(device) for device in devices(ctx)]
    known = [number for number in found if number is not None]
    return min(known) if known and len(known) == len(found) else None


def cuda_versions() -> tuple[int | None, int | None]:
    """Returns the versions of the CUDA runtime and of CUDA that the driver has, 1000 * major + 10 * minor, if any."""
    try:
        from jax._src import lib

        versions: Any = lib.cuda_versions
        return versions.cuda_runtime_get_version(), versions.cuda_driver_get_version()
    except Exception:  # there is no plugin (None), or no driver
        return None, None


def is_mapped(*values: Any) -> bool:
    """Says whether vmap is the innermost transformation that is running, and maps one of the values."""
    trace = core.trace_ctx.trace
    return isinstance(trace, batching.BatchTrace) and any(getattr(v, "_trace", None) is trace for v in values)
