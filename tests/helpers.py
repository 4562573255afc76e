"""Comparing arrays bit for bit."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jnvfp4 import Format, NVFP4Tensor, QuantSpec, reference

TENSOR = Format()
_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(a) -> np.ndarray:
    """The array's bit patterns, as unsigned integers."""
    a = np.asarray(a)
    return (
        np.ascontiguousarray(a).view(_WIDTH[a.dtype.itemsize])
        if a.ndim
        else a.reshape(1).view(_WIDTH[a.dtype.itemsize])
    )


def assert_bitwise(got, want, what: str = "array") -> None:
    """Equal shapes, dtypes and bits; the message locates the first difference."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    g, w = bits(got).reshape(-1), bits(want).reshape(-1)
    wrong = np.flatnonzero(g != w)
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0], got.shape)) if got.ndim else ()
        raise AssertionError(
            f"{what}: {wrong.size} of {g.size} elements differ, first at {at}: "
            f"got {g[wrong[0]]:#x}, expected {w[wrong[0]]:#x}"
        )


def assert_same_tensor(got, want, what: str = "tensor") -> None:
    """Two NVFP4Tensors (or any pytrees of arrays) with the same structure and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    paths = jax.tree_util.tree_leaves_with_path(want)
    for leaf, (path, other) in zip(jax.tree.leaves(got), paths, strict=True):
        assert_bitwise(leaf, other, what + jax.tree_util.keystr(path))


def unpack_codes(data) -> np.ndarray:
    """uint8 [..., K/2] -> E2M1 codes [..., K]."""
    data = np.asarray(data)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def from_storage(a: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 is stored as uint16 bits in .npz files."""
    return a.view(ml_dtypes.bfloat16) if dtype == "bfloat16" and a.dtype == np.uint16 else a


def canonical_nans(a) -> np.ndarray:
    """Every NaN replaced by the one that jnvfp4 stores (sign clear, quiet bit only)."""
    a = np.asarray(a)
    pattern = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[a.dtype.name]
    return np.where(np.isnan(a), np.array(pattern, _WIDTH[a.dtype.itemsize]).view(a.dtype), a)


def round_to(a, dtype) -> np.ndarray:
    """NumPy's cast: nearest even, canonical NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return canonical_nans(np.asarray(a).astype(dtype))


def pad_rows_and_columns(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """x [..., M, K] zero-padded at the end of its last two axes."""
    width = [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, cols - x.shape[-1])]
    return np.pad(x, width)


# ---------------------------------------------------------------- NumPy formulas of docs/numerics.md
# NumPy outside jit is IEEE float32 with subnormals kept, so each line below is one rounding.
FLOAT_MAX = np.float32(3.40282347e38)


def find_amax(x: np.ndarray, scope: str = "tensor") -> np.ndarray:
    """The float32 amax of x: () for scope "tensor", [..., M] for "row"; NaN wins."""
    magnitude = bits(np.asarray(x, np.float32)) & 0x7FFFFFFF
    found = magnitude.max(axis=-1 if scope == "row" else None, initial=0)
    return canonical_nans(np.asarray(found, np.uint32).view(np.float32))


def e2m1_values(codes) -> np.ndarray:
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)


def scale_values(scale) -> np.ndarray:
    """E4M3 scales, as such or as bytes, in float32."""
    return np.asarray(scale).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def per_row(amax, ndim: int) -> np.ndarray:
    """amax (), one per matrix or one per row, made to broadcast with [..., M, 1]."""
    amax = np.asarray(amax, np.float32)
    if amax.ndim == 0:
        return amax.reshape(1, 1)
    return amax[..., None] if amax.ndim == ndim - 1 else amax[..., None, None]


def encode_scales(scale, amax, ndim: int) -> np.ndarray:
    """What the elements of each block were multiplied by, from the block scales [..., M, K/16]; e4m3_max 448."""
    with np.errstate(all="ignore"):
        s_enc = np.minimum(np.float32(2688) / per_row(amax, ndim), FLOAT_MAX)
        s_dec = np.float32(1) / np.where(s_enc == 0, np.float32(1), s_enc)
        return np.minimum(np.float32(1) / (scale_values(scale) * s_dec), FLOAT_MAX)


def dequantize_by_formula(data, scale, amax, e4m3_max: int = 448, dtype=np.float32) -> np.ndarray:
    """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max)))))"""
    codes = unpack_codes(data)
    with np.errstate(all="ignore"):
        factor = scale_values(scale) * per_row(amax, codes.ndim) * (np.float32(1) / np.float32(6 * e4m3_max))
        return round_to(e2m1_values(codes) * np.repeat(factor, 16, axis=-1), dtype)


def matmul_by_formula(a, b, bias=None, dtype=np.float32) -> np.ndarray:
    """matmul_nt in its pinned order: blocks of 16 for two NVFP4Tensors, single k for a 16-bit ``a``. 2-D only."""
    with np.errstate(all="ignore"):
        y = np.zeros((a.shape[0], b.shape[0]), np.float32)
        for term in _block_terms(a, b) if isinstance(a, NVFP4Tensor) else _element_terms(a, b):
            y = y + term
        y = alpha_by_formula(a, b) * y
        return round_to(y if bias is None else y + np.asarray(bias).astype(np.float32), dtype)


def alpha_by_formula(a, b) -> np.ndarray:
    amax_b = np.swapaxes(per_row(b.amax, 2), -1, -2)
    if not isinstance(a, NVFP4Tensor):
        return amax_b / np.float32(6 * b.format.e4m3_max)
    return per_row(a.amax, 2) * amax_b / np.float32(36 * a.format.e4m3_max * b.format.e4m3_max)


def _block_terms(a, b):
    qa, qb = (e2m1_values(unpack_codes(t.data)) for t in (a, b))
    sa, sb = (scale_values(t.scale) for t in (a, b))
    for j in range(sa.shape[1]):
        block = slice(16 * j, 16 * j + 16)
        yield sa[:, None, j] * sb[None, :, j] * (qa[:, block] @ qb[:, block].T)  # the dot product is exact


def _element_terms(a, b):
    a, weight = np.asarray(a).astype(np.float32), decoded(b)
    for k in range(a.shape[1]):
        yield a[:, None, k] * weight[None, :, k]


def decoded(t) -> np.ndarray:
    """q * s in float32, exact; a 16-bit array as it is."""
    if not isinstance(t, NVFP4Tensor):
        return np.asarray(t).astype(np.float32)
    return e2m1_values(unpack_codes(t.data)) * np.repeat(scale_values(t.scale), 16, axis=-1)


def assert_gemm_close(got, a, b, bias=None) -> None:
    """matmul_nt of 2-D operands on tensor cores, whose order along K is not defined, within a derived bound.

    Let S = sum |a_k b_k| over the decoded values (the products are exact). One tensor-core step adds 16 products
    to the accumulator and truncates once, by less than 2^-23 of a magnitude that is at most S; there are K/16
    steps. The epilogue rounds alpha * y and the sum with the bias once each, by 2^-24 of at most
    alpha * S + |bias|, and the cast to the output rounds by half a unit in the last place.
    """
    got = np.asarray(got)
    exact_a, exact_b = (decoded(t).astype(np.float64) for t in (a, b))
    alpha, depth = alpha_by_formula(a, b).astype(np.float64), exact_a.shape[-1]
    offset = np.zeros(1) if bias is None else np.asarray(bias).astype(np.float64)
    exact = alpha * (exact_a @ exact_b.T) + offset
    magnitude = alpha * (np.abs(exact_a) @ np.abs(exact_b).T)
    bound = (depth / 16 + 2) * 2.0**-23 * (magnitude + np.abs(offset)) + half_ulp(np.abs(exact), got.dtype)
    error = np.abs(got.astype(np.float64) - exact)
    wrong = np.argwhere(~(error <= bound))
    assert not wrong.size, f"{len(wrong)} of {got.size} outside the bound, first at {tuple(wrong[0])}"


def half_ulp(magnitude: np.ndarray, dtype) -> np.ndarray:
    """Half the distance of neighbouring numbers of ``dtype`` at ``magnitude``, in float64."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, info.minexp)
    return np.ldexp(1.0, exponent - info.nmant - 1)


# ---------------------------------------------------------------- the reference, with few compilations
_TILES = 128  # tiles of 16 x 16 per call


@functools.cache
def _tile_quantizer(spec: QuantSpec):
    return jax.jit(lambda x, amax: reference.quantize(x, spec, amax)[:2])


def quantize_by_reference(x: np.ndarray, spec: QuantSpec, amax) -> tuple[np.ndarray, np.ndarray]:
    """(data, scale) of ``reference.quantize(x, spec, amax)``, computed on the CPU.

    Given amax, 16 x 16 tiles do not depend on each other, so x is cut into them: one compilation per spec.
    """
    *lead, rows, cols = x.shape
    amax = np.broadcast_to(per_row(amax, x.ndim)[..., 0], (*lead, rows))
    padding = [(0, 0)] * len(lead) + [(0, -rows % 16)]
    tiles = np.pad(np.asarray(x, np.float32), [*padding, (0, 0)]).reshape(-1, 16, cols // 16, 16).swapaxes(1, 2)
    amaxes = np.pad(amax, padding, "edge").reshape(-1, 1, 16).repeat(cols // 16, 1)
    data, scale = _quantize_tiles(tiles.reshape(-1, 16, 16), spec, amaxes.reshape(-1, 16))

    def whole(parts):
        parts = parts.reshape(-1, cols // 16, 16, parts.shape[-1]).swapaxes(1, 2)
        return parts.reshape(*lead, rows + -rows % 16, -1)[..., :rows, :]

    return whole(data), whole(scale)


def _quantize_tiles(tiles: np.ndarray, spec: QuantSpec, amaxes: np.ndarray) -> list[np.ndarray]:
    extra = -len(tiles) % _TILES
    tiles, amaxes = np.pad(tiles, ((0, extra), (0, 0), (0, 0))), np.pad(amaxes, ((0, extra), (0, 0)))
    if spec.format.amax_scope == "tensor":
        amaxes = amaxes[:, 0]
    run = _tile_quantizer(spec)
    with jax.default_device(jax.devices("cpu")[0]):
        parts = [run(tiles[i : i + _TILES], amaxes[i : i + _TILES]) for i in range(0, len(tiles), _TILES)]
    return [
        np.concatenate([np.asarray(p) for p in column])[: len(tiles) - extra] for column in zip(*parts, strict=True)
    ]


def random_tensor(
    seed: int, shape: tuple[int, ...], fmt: Format = TENSOR, *, amax=None, scales=range(1, 0x7F)
) -> NVFP4Tensor:
    """A tensor of random codes, block scales out of the bytes ``scales``, and amax near 1 unless given."""
    rng = np.random.default_rng(seed)
    *lead, rows, cols = shape
    data = rng.integers(0, 256, (*lead, rows, cols // 2), np.uint8)
    scale = rng.choice(np.array(scales, np.uint8), (*lead, rows, cols // 16)).view(ml_dtypes.float8_e4m3fn)
    if amax is None:
        amax = rng.uniform(0.5, 2, (*lead, rows) if fmt.amax_scope == "row" else ()).astype(np.float32)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(amax, jnp.float32), fmt)


# Property tests: few and the same examples in every run; fixtures only choose the device.
properties = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
