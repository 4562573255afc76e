"""Moves quantized tensors between devices as bytes.

docs/sharding.md says which layouts of ``linear`` need which collectives.
"""

from typing import NoReturn

import jax
from jax import lax
from jax.typing import ArrayLike

from ._core.mesh import Placement
from ._core.tensor import NVFP4Tensor, moved_as_bytes
from ._layers.gather import as_gather
from ._ops.arguments import Checks, Implementation
from ._ops.quantize import quantize
from .spec import QuantSpec


def all_gather(q: NVFP4Tensor, axis_name: str | tuple[str, ...], *, axis: int = 0) -> NVFP4Tensor:
    """Concatenates the tensors of devices, inside ``jax.shard_map``; codes and scales travel as bytes.

    Args:
      q: the part [..., M, K] of each device, of the same shape on all.
      axis_name: the mesh axis, or a tuple of them, over which the parts are gathered: manual axes of the shard_map
        around the call.
      axis: along which axis of the values they are concatenated. Along the last one, K, parts begin with whole blocks.

    Returns:
      The whole, with the same values on all devices of ``axis_name``. (JAX still counts it as varying, as the result of
      ``lax.all_gather``: to return it from the shard_map as replicated, pass ``check_vma=False``.) Its amax is gathered
      only if it has that axis: for scope "row" and "window64", or where each matrix has an amax. Otherwise all devices
      must have the same amax: quantize with ``amax=jax.lax.pmax(jnp.max(jnp.abs(x)).astype(jnp.float32), axis_name)``,
      or for scope "row" the largest magnitude of each row.

    Raises:
      ValueError: there is no such axis of ``q`` or of the mesh; or the amax may differ between devices.
      TypeError: ``q`` is not an NVFP4Tensor.
    """
    op = "all_gather"
    q = Checks(op).tensor("q", q)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -q.ndim <= axis < q.ndim:
        raise ValueError(
            f"{op}: axis must be an integer from {-q.ndim} to {q.ndim - 1} for shape {q.shape}, got {axis!r}"
        )
    axis %= q.ndim
    names = set(_axis_names(op, axis_name))
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if missing := sorted(names - manual, key=str):
        raise ValueError(
            f"{op}: axis_name must be manual axes of a shard_map around the call, {sorted(manual)}, got {missing[0]!r}"
        )
    whole_amax = axis < q.amax.ndim
    if not whole_amax and (varying := names & jax.typeof(q.amax).manual_axis_type.varying):
        amax = "jnp.max(jnp.abs(x), -1)" if q.format.amax_scope == "row" else "jnp.max(jnp.abs(x))"
        raise ValueError(
            f"{op}: the amax of q, of shape {q.amax.shape}, must be the same on all devices, got one that varies over "
            f"{sorted(varying)}; quantize with amax=jax.lax.pmax({amax}.astype(jnp.float32), {axis_name!r})"
        )

    def gather(part: jax.Array) -> jax.Array:
        return lax.all_gather(part, axis_name, axis=axis, tiled=True)

    return moved_as_bytes(q, gather, whole_amax)


def _axis_names(op: str, axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{op}: axis_name must be a string or a tuple of strings, got {axis_name!r}")
    return names


def gather_quantized(
    w: ArrayLike,
    spec: QuantSpec,
    *,
    sharded: Placement,
    gathered: Placement,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> NVFP4Tensor:
    """Quantizes an array where it is and gathers the bytes, on an Auto or an Explicit mesh.

    It has no derivative, because bytes have none. Training uses ``jnvfp4.linear(x, w, w_gather=(sharded, gathered))``.

    Args:
      w: [..., M, K], float32, bfloat16 or float16.
      spec: as in ``quantize``.
      sharded: how the values are split where they are quantized, as a NamedSharding or, where the mesh is known (that
        of w, or of ``jax.set_mesh``), a PartitionSpec. Each device must have whole blocks.
      gathered: how the result is split.
      amax: as in ``quantize``.
      key: as in ``quantize``.
      implementation: as in ``quantize``.

    Returns:
      The tensor of ``quantize(w, spec)``, bit for bit, with the sharding ``gathered``.

    Raises:
      ValueError, TypeError: as in ``quantize``; or a sharding splits a block or does not fit the mesh.
      NotImplementedError: it is differentiated with respect to w.
    """
    check = Checks("gather_quantized")
    check.spec("spec", spec)
    array = check.array("w", w)
    for name, placement in (("sharded", sharded), ("gathered", gathered)):
        if not isinstance(placement, Placement):
            raise TypeError(f"{check.op}: {name} must be a PartitionSpec or a NamedSharding, got {placement!r}")
    if array.ndim < 2:
        raise ValueError(f"{check.op}: w must have rank 2 or more, got w.shape={array.shape}")
    units = (*(1,) * (array.ndim - 2), spec.block_rows, spec.unit)
    gather = as_gather(check.op, "", (sharded, gathered), array, array.shape, units)
    kept = gather.constrain(_without_derivative(array))
    return gather.gather(quantize(kept, spec, amax=amax, key=key, implementation=implementation))


@jax.custom_jvp
def _without_derivative(w: jax.Array) -> jax.Array:
    return w


@_without_derivative.defjvp
def _no_derivative(*_: object) -> NoReturn:
    raise NotImplementedError(
        "gather_quantized has no derivative, because packed bytes have none; training uses "
        "jnvfp4.linear(x, w, w_gather=(sharded, gathered)), and jax.lax.stop_gradient(w) says that w has no gradient"
    )
