"""Small operands that several test modules share."""

import jax.numpy as jnp
import numpy as np
from cases import Case
from helpers import amax_shape

from jnvfp4 import Format, NVFP4Tensor


def normal(shape, seed=0, dtype="bf16"):
    return jnp.asarray(Case("normal", shape, dtype).make(seed))


def near_tie() -> jnp.ndarray:
    """A tile whose errors for 4 and 6 are so close that the order of their sums decides, by four_over_six("mse"): the
    quantizer chooses another scale for its transpose."""
    return jnp.asarray(np.round(4 * np.random.default_rng(13594).standard_normal((16, 16))) / 4, jnp.bfloat16)


def exact_tensor(shape, seed=0) -> NVFP4Tensor:
    """A tensor whose products sum exactly in any order: few bits, and an alpha of 1 with its like."""
    rng = np.random.default_rng(seed)
    *lead, rows, k = shape
    data = rng.integers(0, 256, (*lead, rows, k // 2), np.uint8)
    scale = rng.choice([0.5, 1.0, 2.0], (*lead, rows, k // 16))
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale, jnp.float8_e4m3fn), jnp.float32(6 * 448), Format())


def exact_with_scope(scope, shape, seed) -> NVFP4Tensor:
    """``exact_tensor`` with an amax of its own for every row or window, as it may be within exact sums."""
    t, rng = exact_tensor(shape, seed), np.random.default_rng(seed)
    if scope == "tensor":
        return t
    amax = 6 * 448.0 * 2.0 ** rng.integers(-1, 2, amax_shape(scope, shape))
    return NVFP4Tensor(t.data, t.scale, jnp.asarray(amax, jnp.float32), Format(scope))
