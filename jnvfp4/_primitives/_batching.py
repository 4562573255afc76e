"""Moves the batch axes of vmap, of arrays and of the parts of a tensor."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._core.mesh import Shape


def batched(size: int, operand: jax.Array, dim: int | None) -> jax.Array:
    """Moves the batch axis to the front, or repeats an operand that has none."""
    return jnp.broadcast_to(operand, (size, *operand.shape)) if dim is None else jnp.moveaxis(operand, dim, 0)


def batched_amax(size: int, amax: jax.Array, dim: int | None, lead: Shape) -> jax.Array:
    """Moves the batch axis of an amax to the front; one number for all examples stays that.

    One number for each example becomes one for each matrix, of shape ``lead``, the leading axes of the batched array.
    """
    if dim is None and amax.ndim == 0:
        return amax
    amax = batched(size, amax, dim)
    return jnp.broadcast_to(amax.reshape(size, *(1,) * (len(lead) - 1)), lead) if amax.ndim == 1 else amax


def batched_parts(size: int, parts: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """Moves the batch axis of data, scale and amax to the front."""
    data, scale = (batched(size, p, d) for p, d in zip(parts[:2], dims[:2], strict=True))
    return [data, scale, batched_amax(size, parts[2], dims[2], data.shape[:-2])]


def batch_size(args: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    """Returns the number of examples of a vmap."""
    return next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
