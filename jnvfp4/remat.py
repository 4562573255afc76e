"""Policies and names for ``jax.checkpoint``: what ``linear`` keeps for its gradients, and what it quantizes again."""

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import Primitive

from ._layers.quantizer import BACKWARD_NAME as BACKWARD_NAME
from ._layers.quantizer import RESIDUAL_NAME as RESIDUAL_NAME

_QUANTIZERS = frozenset({"nvfp4_quantize", "nvfp4_quantize_pair"})
_PACKED = (jnp.uint8, jnp.float8_e4m3fn)


def save_packed(primitive: Primitive, *avals: AbstractValue, **params: object) -> bool:
    """Saves what the gradients of ``linear`` read, packed: ``jax.checkpoint(block, policy=jnvfp4.remat.save_packed)``.

    That is x and w, each in the one orientation that its gradient GEMM contracts: 9/16 of a byte per element where both
    GEMMs are quantized. All else is computed again from the arguments of ``block``, as far as the backward pass needs
    it. It is ``save_only_these_names(BACKWARD_NAME)``. With ``RESIDUAL_NAME`` the operands of the forward GEMM are
    saved, too, so that it can run again without quantizers.
    """
    return _by_name(primitive, *avals, **params)


_by_name = jax.checkpoint_policies.save_only_these_names(BACKWARD_NAME)


def recompute_quantize(primitive: Primitive, *avals: AbstractValue, **params: object) -> bool:
    """Saves what JAX saves without ``jax.checkpoint``, but nothing packed: the backward pass quantizes again.

    It is for a block that keeps x in any case, for a norm or a gate: then the packed x is one array more. Saved amaxes
    spare the quantizers the search for them.
    """
    takes_packed = any(getattr(aval, "dtype", None) in _PACKED for aval in avals)
    return primitive.name == "nvfp4_matmul" or not (takes_packed or primitive.name in _QUANTIZERS)
