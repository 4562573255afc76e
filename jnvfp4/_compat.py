"""The private corner of JAX that jnvfp4 touches, in one place. tests/test_compat.py watches it."""

import dataclasses
from typing import Any

import jax
from jax._src import dispatch
from jax.extend.core import Primitive


def needs_devices_in_lowering(primitive: Primitive) -> None:
    """Makes jit hand the device list to ``primitive``'s lowering, which custom_partitioning asks for.

    Without it a sharded jit stops with an AssertionError inside JAX (0.10.2 to 0.12).
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def with_mesh(ctx: Any) -> Any:
    """Tells custom_partitioning of the mesh of ``jax.set_mesh``, where no sharding of the jit arguments names it.

    Without it custom_partitioning meets a sharding without a spec and raises (0.10.2 to 0.12).
    """
    axes, mesh = ctx.module_context.axis_context, jax.sharding.get_abstract_mesh()
    if getattr(axes, "abstract_mesh", mesh) is not None or mesh.empty or mesh.size != axes.num_devices:
        return ctx
    axes = dataclasses.replace(axes, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))
