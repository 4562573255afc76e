"""``jnvfp4._core.softfloat`` against NumPy's float32: IEEE, subnormals kept, bit for bit on every XLA backend."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bitwise, bits, canonical_nans, round_to

from jnvfp4._core import softfloat

OPERATIONS = {"mul": np.multiply, "add": np.add, "sub": np.subtract, "div": np.divide}
HALVES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
RANDOM = 1 << 19

pytestmark = pytest.mark.parametrize("backend", ["reference-cpu", "reference-cuda"], indirect=True)
every_half = pytest.mark.parametrize("half", list(HALVES))


def edge_values() -> np.ndarray:
    """Both signs of: zero, subnormals, limits, ones, ties of the narrow formats, Inf and NaN."""
    numbers = [0, 1, 1.5, 2, 3, 6, 1 / 3, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-11, 1 + 3 * 2**-12, 1 + 2**-23]
    numbers += [2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 2.0**-14 - 2.0**-25]
    numbers += [65504, 65519.996, 65520, 65536, 2.0**24, 2688]
    patterns = [1, 2, 3, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000]  # near 2^-126
    patterns += [0x7F7FFFFF, 0x7F7FFFFE, 0x7F7F8000, 0x7F7F7FFF, 0x7F000000, 0x7E800000, 0x7F800000]  # max, Inf
    patterns += [0x7F800001, 0x7FC00000, 0x7FFFFFFF]  # NaN
    positive = np.concatenate([bits(np.array(numbers, np.float32)), np.array(patterns, np.uint32)])
    return np.concatenate([positive, positive | np.uint32(0x80000000)])


def edge_pairs() -> tuple[np.ndarray, np.ndarray]:
    a, b = np.meshgrid(edge_values(), edge_values())
    return a.reshape(-1), b.reshape(-1)


@functools.cache
def random_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Random patterns; in a quarter of them the second is close to the first, where cancellation happens."""
    rng = np.random.default_rng(7)
    a, b = rng.integers(0, 1 << 32, (2, RANDOM), np.uint32)
    near = (a ^ (rng.integers(0, 2, RANDOM, np.uint32) << 31)) + rng.integers(0, 1 << 25, RANDOM, np.uint32)
    return a, np.where(np.arange(RANDOM) % 4 == 0, near, b)


def by_numpy(operation: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return bits(canonical_nans(OPERATIONS[operation](a.view(np.float32), b.view(np.float32))))


def subnormal_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Exponents for which products and quotients of random numbers are subnormal, or nearly."""
    a, b = np.random.default_rng(8).integers(0, 1 << 32, (2, RANDOM), np.uint32)
    return a & 0x9FFFFFFF, b & 0xBFFFFFFF  # below 2^-63, below 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_are_those_of_ieee(backend, operation):
    """Random numbers, subnormal results, and all pairs of edge values; these outside of jit too."""
    parts = random_pairs(), subnormal_pairs(), edge_pairs()
    a, b = (np.concatenate(side) for side in zip(*parts, strict=True))
    f, want = getattr(softfloat, operation), by_numpy(operation, a, b)
    assert_bitwise(jax.jit(f)(a, b), want, operation)
    a, b = map(jnp.asarray, edge_pairs())
    assert_bitwise(f(a, b), want[-a.size :], f"{operation}, eagerly")


@every_half
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_narrowing_rounds_to_nearest_even(backend, half, jit):
    patterns = np.concatenate([edge_values(), random_pairs()[0], halfway(half)])
    cast = functools.partial(softfloat.from_bits, dtype=HALVES[half])
    got = (jax.jit(cast) if jit else cast)(jnp.asarray(patterns))
    assert_bitwise(got, round_to(patterns.view(np.float32), HALVES[half]), half)


def halfway(half: str) -> np.ndarray:
    """Float32 patterns between every two neighbours of a 16-bit format, and next to them."""
    values = np.arange(0x7C00 if half == "fp16" else 0x7F80, dtype=np.uint16).view(HALVES[half]).astype(np.float64)
    ties = bits(((values[:-1] + values[1:]) / 2).astype(np.float32))
    return np.concatenate([ties - 1, ties, ties + 1])


def test_float32_keeps_all_but_nan(backend):
    patterns = np.concatenate([edge_values(), random_pairs()[0]])
    assert_bitwise(jax.jit(softfloat.from_bits)(patterns), canonical_nans(patterns.view(np.float32)), "float32")


@every_half
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_widening_is_exact(backend, half, jit):
    x = np.arange(65536, dtype=np.uint16).view(HALVES[half])
    widen = lambda x: softfloat.from_bits(softfloat.to_bits(x))  # noqa: E731
    assert_bitwise((jax.jit(widen) if jit else widen)(jnp.asarray(x)), canonical_nans(x.astype(np.float32)), half)


def test_clamp_max_makes_infinity_the_largest_number(backend):
    patterns = edge_values()[: len(edge_values()) // 2]
    want = patterns.copy()
    want[want == 0x7F800000] = 0x7F7FFFFF
    assert_bitwise(jax.jit(softfloat.clamp_max)(patterns), want, "clamp_max")
