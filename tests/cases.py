"""The inputs that tests and benchmarks share: shapes, dtypes and distributions, by name."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclass(frozen=True)
class Case:
    """A named input. Tags: "quick" (small and odd, for every test run), "bench" (for the benchmarks)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    distribution: str = "normal"
    tags: frozenset[str] = frozenset({"quick"})

    def widened(self, axis: int, factor: int) -> "Case":
        """Longer along one axis: for what must be a multiple of 64."""
        shape = list(self.shape)
        shape[axis] *= factor
        return replace(self, shape=tuple(shape))

    def make(self, seed: int = 0) -> np.ndarray:
        values = {**DISTRIBUTIONS, **ADVERSARIAL}[self.distribution](np.random.default_rng(seed), self.shape)
        with np.errstate(over="ignore"):
            return values.astype(np.float32).astype(DTYPES[self.dtype])


def _one_hot(rng, shape):
    """One large element: every other block has a tiny or zero scale."""
    x = rng.standard_normal(shape) * 1e-3
    x.reshape(-1)[rng.integers(x.size)] = 3e4
    return x


def _ties(rng, shape):
    """With block amax 6 and tensor amax 2688 the encode scale is 1, so these are E2M1 ties and grid points."""
    values = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    x = rng.choice(values, shape) * rng.choice([-1.0, 1.0], shape)
    x[..., 0] = 6.0
    x.reshape(-1)[0] = 2688.0
    return x


def _outlier_rows(rng, shape):
    x = rng.standard_normal(shape)
    x[..., ::7, :] *= 300.0
    return x


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_normal(shape) ** 3,
    "zeros": lambda rng, shape: np.zeros(shape),
    "signed_zeros": lambda rng, shape: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
    "one_hot": _one_hot,
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-39,
    "powers": lambda rng, shape: np.ldexp(rng.choice([-1.0, 1.0], shape), rng.integers(-12, 12, shape)),
    "ties": _ties,
    "outlier_rows": _outlier_rows,
}


def _shuffled_blocks(rng, shape, block):
    """Blocks of 16 with these magnitudes in any order, and one element that makes 4over6's encode scale 1."""
    x = rng.permuted(np.broadcast_to(block, (*shape[:-1], shape[-1] // 16, 16)), axis=-1).reshape(shape)
    x = x * rng.choice([-1.0, 1.0], shape)
    x.reshape(-1)[0] = 6.0 * 256
    return x


def _same46(rng, shape):
    """Map-to-4 and map-to-6 reconstruct every block exactly: all ties, with the same values."""
    return _shuffled_blocks(rng, shape, [6.0] * 4 + [3.0] * 4 + [1.5] * 4 + [0.0] * 4)


def _even46(rng, shape):
    """Both err by the same sum, of magnitudes and of squares, on different elements: all ties, none for free."""
    return _shuffled_blocks(rng, shape, [6.0, 0.0] + [0.5] * 7 + [0.75] * 7)


# What is slow for 4over6 kernels that decide most blocks by an estimate.
ADVERSARIAL = {
    "same46": _same46,
    "even46": _even46,
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
}

# For specs by the dozen: no axis a power of two, a leading axis, each dtype once.
ODD = [Case("odd_blocks", (48, 80), "fp32"), Case("half", (32, 112), "fp16"), Case("batched", (2, 3, 16, 48))]

# Both axes are multiples of 16, so every spec and orientation takes every quick case (window64: widened).
CASES = [
    Case("one_block_tile", (16, 16)),
    *ODD,
    Case("wide", (16, 1040)),
    Case("tall", (272, 32), "fp32"),
    *(Case(f"{name}_{dtype}", (32, 64), dtype, name) for name in DISTRIBUTIONS for dtype in DTYPES),
    Case("large", (16384, 6144), tags=frozenset({"bench"})),
    Case("large_fp32", (16384, 6144), "fp32", tags=frozenset({"bench"})),
    Case("large_fp16", (16384, 6144), "fp16", tags=frozenset({"bench"})),
    *(Case(name, (16384, 6144), distribution=name, tags=frozenset({"bench"})) for name in ADVERSARIAL),
    Case("decode", (16, 4096), tags=frozenset({"bench"})),
    Case("cpu", (2048, 4096), tags=frozenset({"bench"})),
]

# Row counts that are no multiple of anything, for the specs that take any M.
RAGGED_ROWS = [Case(f"rows_{m}", (m, 48)) for m in (1, 3, 17, 31, 36)]


def tagged(tag: str) -> list[Case]:
    return [case for case in CASES if tag in case.tags]
