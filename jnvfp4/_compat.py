"""The private corner of JAX that jnvfp4 touches, in one place. tests/test_compat.py watches it."""

from jax._src import dispatch
from jax.extend.core import Primitive


def needs_devices_in_lowering(primitive: Primitive) -> None:
    """Makes jit hand the device list to ``primitive``'s lowering, which custom_partitioning asks for.

    Without it a sharded jit stops with an AssertionError inside JAX (0.10.2 to 0.12).
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)
