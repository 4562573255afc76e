"""Operands of ``matmul_nt`` that its test modules share."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from helpers import bits, decoded, random_tensor

from jnvfp4 import Format, NVFP4Tensor

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
HALVES = {name: DTYPES[name] for name in ("bf16", "fp16")}
ROW = Format(amax_scope="row")
TENSOR = Format()
WINDOW = Format(amax_scope="window64")
NARROW = (0x30, 0x38, 0x40)  # scales 1/2, 1, 2


def quantized(shape, a_format=TENSOR, b_format=TENSOR, seed=0, **kwargs) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    m, n, k = shape
    return random_tensor(seed, (m, k), a_format, **kwargs), random_tensor(seed + 1, (n, k), b_format, **kwargs)


def dense(shape: tuple[int, ...], dtype, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def order_free(a, b) -> bool:
    """All products are multiples of one unit and the sum of their magnitudes is below 2^24 units."""
    values = [decoded(t).astype(np.float64) for t in (a, b)]
    units = [np.min(np.abs(v[v != 0])) for v in values]
    unit = 2.0 ** np.floor(np.log2(units[0])) * 2.0 ** np.floor(np.log2(units[1])) / 4
    multiples = all(np.all(v / (u / 2) == np.round(v / (u / 2))) for v, u in zip(values, units, strict=True))
    return multiples and np.max(np.abs(values[0]) @ np.abs(values[1]).T) < 2.0**24 * unit


def with_nan_scale(t: NVFP4Tensor, row: int) -> NVFP4Tensor:
    scale = bits(t.scale).copy()
    scale[row, 1] = 0x7F
    return NVFP4Tensor(t.data, jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), t.amax, t.format)
