"""Comparing arrays bit for bit."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import skip_or_fail

from jnvfp4 import ROW_SCALED, Format, NVFP4Tensor, QuantSpec, quantize, quantize_pair, reference
from jnvfp4._layers import dot_general
from jnvfp4._ops import quantize as quantizers
from jnvfp4._ops.arguments import random_stream
from jnvfp4.spec import BLOCK, WINDOW

TENSOR = Format()
KEY_SEED = 7
_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(a) -> np.ndarray:
    """The array's bit patterns, as unsigned integers."""
    a = np.ascontiguousarray(a)  # a number becomes an array of one
    return a.view(_WIDTH[a.dtype.itemsize])


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


def refused(text: str):
    """Expects a ValueError that matches ``text``, or the TypeError of "TypeError: text"."""
    error = TypeError if text.startswith("TypeError: ") else ValueError
    return pytest.raises(error, match=text.removeprefix("TypeError: "))


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


def key_for(*specs: QuantSpec, seed: int = KEY_SEED):
    """A key if any of the specs rounds stochastically, else None."""
    return jax.random.key(seed) if any(spec.rounding == "stochastic" for spec in specs) else None


def find_amax(x: np.ndarray, scope: str = "tensor") -> np.ndarray:
    """The float32 amax of x: () for scope "tensor", [..., M] for "row", [..., M, K/64] for "window64"; NaN wins."""
    with np.errstate(invalid="ignore"):
        magnitude = bits(np.asarray(x, np.float32)).reshape(x.shape) & 0x7FFFFFFF
    if scope == "window64":
        magnitude = magnitude.reshape(*x.shape[:-1], x.shape[-1] // WINDOW, WINDOW)
    found = magnitude.max(axis=None if scope == "tensor" else -1, initial=0)
    return canonical_nans(np.asarray(found, np.uint32).view(np.float32))


def amax_shape(scope: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the amax of an array of ``shape``, oriented like the result."""
    return {"tensor": (), "row": shape[:-1], "window64": (*shape[:-1], shape[-1] // WINDOW)}[scope]


def amax_for(x: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """The amax that ``quantize`` finds for x, which is oriented like the result."""
    return find_amax(rotate(x) if spec.format.rht else x, spec.format.amax_scope)


HADAMARD_SIGNS = np.where(0xD7E8 >> np.arange(16) & 1, -1, 1).astype(np.float32)


def hadamard(v: np.ndarray) -> np.ndarray:
    """[..., 16]: a quarter of the Sylvester transform, in stages with strides 1, 2, 4, 8."""
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack([a + b, a - b], axis=-2).reshape(v.shape)
    return v * np.float32(0.25)


def rotate(x: np.ndarray) -> np.ndarray:
    """x [..., K] by the random Hadamard transform: bfloat16 in, bfloat16 out, in float32."""
    with np.errstate(all="ignore"):
        v = round_to(x, ml_dtypes.bfloat16).astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
        rotated = hadamard(v * HADAMARD_SIGNS) + np.float32(0)
        return round_to(rotated, ml_dtypes.bfloat16).astype(np.float32).reshape(x.shape)


def rotate_back(values: np.ndarray) -> np.ndarray:
    """The inverse, of dequantized float32 values."""
    with np.errstate(all="ignore"):
        v = values.reshape(*values.shape[:-1], -1, BLOCK)
        return (hadamard(v) * HADAMARD_SIGNS).reshape(values.shape)


def philox(counter, key) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of counter, two of key -> four words, all broadcast."""
    c0, c1, c2, c3 = (np.atleast_1d(np.asarray(word, np.uint64)) for word in counter)
    k0, k1 = (np.atleast_1d(np.asarray(word, np.uint64)) for word in key)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> high) ^ c1 ^ k0, p1 & low, (p0 >> high) ^ c3 ^ k1, p0 & low
        k0, k1 = k0 + np.uint64(0x9E3779B9) & low, k1 + np.uint64(0xBB67AE85) & low
    return [word.astype(np.uint32) for word in (c0, c1, c2, c3)]


def block_bytes(words, blocks: np.ndarray, transposed: bool) -> np.ndarray:
    """The 16 random bytes of blocks by their 64-bit index, for two words of a key -> uint8 [..., 16]."""
    counter = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), int(transposed), 0
    return np.stack(np.broadcast_arrays(*philox(counter, words)), axis=-1).astype("<u4").view(np.uint8)


def random_bytes(key, shape: tuple[int, ...], transposed: bool = False) -> np.ndarray:
    """The random byte of every element of a quantized array [..., M, K]: element i of a block is byte i of 16."""
    blocks = np.arange(np.prod(shape, dtype=np.int64) // BLOCK, dtype=np.uint64)
    return block_bytes(np.asarray(jax.random.bits(key, (2,), jnp.uint32)), blocks, transposed).reshape(shape)


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


def per_block(amax, ndim: int) -> np.ndarray:
    """amax of any scope, made to broadcast with the blocks [..., M, K/16]."""
    amax = np.asarray(amax, np.float32)
    return np.repeat(amax, WINDOW // BLOCK, axis=-1) if amax.ndim == ndim else per_row(amax, ndim)


def encode_scales(scale, amax, ndim: int, e4m3_max: int = 448) -> np.ndarray:
    """What the elements of each block were multiplied by, from the block scales [..., M, K/16]."""
    with np.errstate(all="ignore"):
        s_enc = np.minimum(np.float32(6 * e4m3_max) / per_block(amax, ndim), FLOAT_MAX)
        s_dec = np.float32(1) / np.where(s_enc == 0, np.float32(1), s_enc)
        return np.minimum(np.float32(1) / (scale_values(scale) * s_dec), FLOAT_MAX)


def search_by_formula(x: np.ndarray, amax) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale bytes) of finite x [..., M, K] with searched block scales; E is 448, and no amax 0."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    with np.errstate(over="ignore"):
        s_enc = np.minimum(np.float32(2688) / per_block(amax, x.ndim), FLOAT_MAX)
    base = np.abs(blocks).max(axis=-1) * (s_enc * np.float32(1 / 6))
    rule = np.minimum(base, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def codes_of(scale):
        with np.errstate(all="ignore"):
            encode = np.minimum(np.float32(1) / (scale_values(scale) * (np.float32(1) / s_enc)), FLOAT_MAX)
            scaled = np.clip(blocks * encode[..., None], -6, 6)
        return scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)

    least, best = np.full(rule.shape, np.inf, np.float32), rule
    for offset in (0, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7):
        scale = np.clip(rule.astype(int) + offset, 0, 126).astype(np.uint8)
        difference = e2m1_values(codes_of(scale)) * scale_values(scale)[..., None] - blocks * s_enc[..., None]
        error = np.zeros(rule.shape, np.float32)
        for term in np.moveaxis(difference * difference, -1, 0):
            error = error + term
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return codes_of(best).reshape(x.shape), best


def dequantize_by_formula(data, scale, amax, e4m3_max: int = 448, dtype=np.float32) -> np.ndarray:
    """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max)))))"""
    codes = unpack_codes(data)
    with np.errstate(all="ignore"):
        factor = scale_values(scale) * per_block(amax, codes.ndim) * (np.float32(1) / np.float32(6 * e4m3_max))
        return round_to(e2m1_values(codes) * np.repeat(factor, 16, axis=-1), dtype)


def matmul_by_formula(a, b, bias=None, dtype=np.float32) -> np.ndarray:
    """matmul_nt in its pinned order: blocks of 16 for two NVFP4Tensors, or their windows of 64, or single k for a
    16-bit ``a``."""
    if len(a.shape) > 2:
        shared_b, shared_bias = len(b.shape) == 2, bias is None or bias.ndim == 1
        of_b, of_bias = [b] * a.shape[0] if shared_b else b, [bias] * a.shape[0] if shared_bias else bias
        return np.stack([matmul_by_formula(*one, dtype) for one in zip(a, of_b, of_bias, strict=True)])
    with np.errstate(all="ignore"):
        y = np.zeros((a.shape[0], b.shape[0]), np.float32)
        windows = _windowed(a) or _windowed(b)
        for term in _window_terms(a, b) if windows else _terms(a, b):
            y = y + term
        y = y if windows else alpha_by_formula(a, b) * y
        return round_to(y if bias is None else y + np.asarray(bias).astype(np.float32), dtype)


def _windowed(t) -> bool:
    return isinstance(t, NVFP4Tensor) and t.format.amax_scope == "window64"


def _window_terms(a, b):
    """The sum of each window's four blocks, times its alpha."""

    def column(t, w):
        return np.asarray(t.amax)[:, w, None] if _windowed(t) else per_row(t.amax, 2)

    blocks, constant = list(_block_terms(a, b)), np.float32(36 * a.format.e4m3_max * b.format.e4m3_max)
    for w in range(len(blocks) // 4):
        total = np.zeros_like(blocks[0])
        for block in blocks[4 * w : 4 * w + 4]:
            total = total + block
        yield column(a, w) * column(b, w).T / constant * total


def _terms(a, b):
    return _block_terms(a, b) if isinstance(a, NVFP4Tensor) else _element_terms(a, b)


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

    One step of a tensor core adds 16 products, which are exact, to the accumulator: it aligns the 17 terms to the
    largest exponent, cuts each below 2^-25 of that power of two, and cuts the sum to 24 bits. A subnormal float16 has
    the exponent of 2^-14 there. A decoded q s is a float16 times 2^-14, so it counts as 1 or more. Let S be the sum
    of |a_k b_k| with these magnitudes. There are K/16 steps of less than (17/4 + 1) 2^-23 S. The epilogue rounds
    alpha * y and the sum with the bias once each, by 2^-24 of at most alpha * S + |bias|, two teams of warps or parts
    of K add once more, and the cast to the output rounds by half a unit in the last place.
    """
    got = np.asarray(got)
    exact_a, exact_b = (decoded(t).astype(np.float64) for t in (a, b))
    alpha, depth = alpha_by_formula(a, b).astype(np.float64), exact_a.shape[-1]
    offset = np.zeros(1) if bias is None else np.asarray(bias).astype(np.float64)
    exact = alpha * (exact_a @ exact_b.T) + offset
    magnitude = alpha * (_aligned(exact_a, a, a) @ _aligned(exact_b, b, a).T)
    bound = (depth / 16 * 21 / 4 + 2) * 2.0**-23 * (magnitude + np.abs(offset)) + half_ulp(np.abs(exact), got.dtype)
    error = np.abs(got.astype(np.float64) - exact)
    wrong = np.argwhere(~(error <= bound))
    assert not wrong.size, f"{len(wrong)} of {got.size} outside the bound, first at {tuple(wrong[0])}"


def _aligned(exact: np.ndarray, operand, a) -> np.ndarray:
    """The magnitudes by whose exponents a tensor core aligns products with a; bfloat16 has no subnormals here."""
    if not isinstance(a, NVFP4Tensor) and np.asarray(a).dtype == ml_dtypes.bfloat16:
        return np.abs(exact)
    least = 1.0 if isinstance(operand, NVFP4Tensor) else 2.0**-14
    return np.where(exact == 0, 0, np.maximum(np.abs(exact), least))


def half_ulp(magnitude: np.ndarray, dtype) -> np.ndarray:
    """Half the distance of neighbouring numbers of ``dtype`` at ``magnitude``, in float64."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, info.minexp)
    return np.ldexp(1.0, exponent - info.nmant - 1)


# ---------------------------------------------------------------- the reference, with few compilations
_TILES = 128  # tiles of 16 x 16 per call


@functools.cache
def _tile_quantizer(spec: QuantSpec):
    def run(x, amax, random=None):
        with mock.patch.object(reference, "block_bits", return_value=random):  # given, not from a stream
            return reference.quantize(x, spec, amax, stream=random)[:2]

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})  # integers only: the same bits


def quantize_by_reference(
    x: np.ndarray, spec: QuantSpec, amax, key=None, transposed: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(data, scale) of ``reference.quantize(x, spec, amax)``, computed on the CPU.

    Given amax and random bytes, 16 x 16 tiles do not depend on each other, so x is cut into them: one compilation
    per spec. The random bytes are NumPy's, and a window64 tile is a row-scaled one, so the reference's own
    bookkeeping of both is not in here.
    """
    *lead, rows, cols = x.shape
    blocks = cols // 16
    with np.errstate(invalid="ignore"):
        x = np.asarray(x, np.float32)
    amaxes = np.broadcast_to(per_block(amax, x.ndim), (*lead, rows, blocks))[..., None]
    random = None
    if spec.rounding == "stochastic":
        random = _cut(random_bytes(key, x.shape, transposed).reshape(*lead, rows, blocks, 16))[:, :, None]
    spec = ROW_SCALED if spec.format.amax_scope == "window64" else spec
    data, scale = _quantize_tiles(_cut(x.reshape(*lead, rows, blocks, 16)), spec, _cut(amaxes)[..., 0], random)

    def whole(parts):
        parts = parts.reshape(-1, blocks, 16, parts.shape[-1]).swapaxes(1, 2)
        return parts.reshape(*lead, rows + -rows % 16, -1)[..., :rows, :]

    return whole(data), whole(scale)


def _cut(values: np.ndarray) -> np.ndarray:
    """[..., M, blocks, n] -> [tiles, 16, n], M padded with zeros."""
    *lead, rows, blocks, n = values.shape
    values = np.pad(values, [*[(0, 0)] * len(lead), (0, -rows % 16), (0, 0), (0, 0)])
    return values.reshape(-1, 16, blocks, n).swapaxes(1, 2).reshape(-1, 16, n)


def _quantize_tiles(
    tiles: np.ndarray, spec: QuantSpec, amaxes: np.ndarray, random: np.ndarray | None
) -> list[np.ndarray]:
    count = len(tiles)
    if spec.format.amax_scope == "tensor":
        amaxes = amaxes[:, 0]

    def batches(v):
        padded = np.pad(v, [(0, -count % _TILES), *[(0, 0)] * (v.ndim - 1)])
        return padded.reshape(-1, _TILES, *v.shape[1:])

    operands = [batches(v) for v in (tiles, amaxes, *([] if random is None else [random.astype(np.uint32)]))]
    with jax.default_device(jax.devices("cpu")[0]):
        parts = [_tile_quantizer(spec)(*batch) for batch in zip(*operands, strict=True)]
    return [np.concatenate([np.asarray(p) for p in column])[:count] for column in zip(*parts, strict=True)]


def random_tensor(
    seed: int, shape: tuple[int, ...], fmt: Format = TENSOR, *, amax=None, scales=range(1, 0x7F)
) -> NVFP4Tensor:
    """A tensor of random codes, block scales out of the bytes ``scales``, and amax near 1 unless given."""
    rng = np.random.default_rng(seed)
    *lead, rows, cols = shape
    data = rng.integers(0, 256, (*lead, rows, cols // 2), np.uint8)
    scale = rng.choice(np.array(scales, np.uint8), (*lead, rows, cols // 16)).view(ml_dtypes.float8_e4m3fn)
    if amax is None:
        amax = rng.uniform(0.5, 2, amax_shape(fmt.amax_scope, shape)).astype(np.float32)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(amax, jnp.float32), fmt)


def quantize_as(spec: QuantSpec, x, amaxes: dict, key, transpose: bool = False) -> NVFP4Tensor:
    """By a spec with what it takes: the amax of its scope, if there is one, and the key."""
    key = key if spec.rounding == "stochastic" else None
    return quantize(x, spec, amax=amaxes.get(spec.format.amax_scope), key=key, transpose=transpose)


def quantize_pair_as(pair, x, amaxes: tuple[dict, dict], key) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    amax = tuple(a.get(spec.format.amax_scope) for a, spec in zip(amaxes, pair, strict=True))
    return quantize_pair(x, *pair, amax=amax, key=key if "stochastic" in [s.rounding for s in pair] else None)


# ---------------------------------------------------------------- vmap
def assert_vmap_is_a_loop(f, args, axes, out_axes=0) -> None:
    """``axes`` has an axis, or None, for each leaf of ``args``."""
    args, axes, is_none = tuple(args), tuple(axes), lambda v: v is None
    leaves = (jax.tree.leaves(tree, is_leaf=is_none) for tree in (args, axes))
    size = next(x.shape[axis] for x, axis in zip(*leaves, strict=True) if axis is not None)
    got = jax.jit(jax.vmap(f, axes, out_axes))(*args)
    calls = [f(*jax.tree.map(functools.partial(_example, i), axes, args, is_leaf=is_none)) for i in range(size)]
    assert_same_tensor(got, jax.tree.map(functools.partial(stack, axis=out_axes), *calls))


def _example(i, axis, x):
    """By NumPy, since XLA compiles a program for each shape; it has no keys."""
    if axis is None or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x if axis is None else x[i]
    return jnp.asarray(np.take(np.asarray(x), i, axis))


def stack(*parts, axis=0) -> np.ndarray:
    return np.stack([np.asarray(part) for part in parts], axis)


# Property tests: few and the same examples in every run; fixtures only choose the device.
properties = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def equations(jaxpr):
    """All equations, of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def primitives(jaxpr) -> list[str]:
    """The names of all primitives, of inner jaxprs too."""
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def products(f, *args) -> int:
    """How many products of quantized operands a function has; the arguments may be shapes."""
    return str(jax.make_jaxpr(f)(*args)).count("nvfp4_matmul[")


def words(key) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


@contextmanager
def recorded_keys() -> Iterator[list[tuple[int, ...]]]:
    """Lists the words of the keys of all products that run within, also in loops."""
    drawn: list[tuple[int, ...]] = []
    original = dot_general.multiply

    def recorded(call, x, w, key, *rest, **more):
        if call.recipe.stochastic:
            jax.debug.callback(lambda key: drawn.append(words(key)), key)
        return original(call, x, w, key, *rest, **more)

    with mock.patch.object(dot_general, "multiply", recorded):
        yield drawn
        jax.effects_barrier()


@contextmanager
def recorded_draws() -> Iterator[list[tuple[int, ...]]]:
    """Lists the words of the keys that all quantizers within draw from, also in loops."""
    drawn: list[tuple[int, ...]] = []

    def recorded(key, shape):
        jax.debug.callback(lambda key: drawn.append(words(key)), key)
        return random_stream(key, shape)

    with mock.patch.object(quantizers, "random_stream", recorded):
        yield drawn
        jax.effects_barrier()


def key_of_operand(key: jax.Array, index: int, operand: jax.Array) -> jax.Array:
    """The key of x (0), w (1) or dy (2) of a layer, as docs/numerics.md says."""
    amax = jnp.max(jnp.abs(operand.astype(jnp.float32)))
    return jax.random.fold_in(jax.random.fold_in(key, index), jax.lax.bitcast_convert_type(amax, jnp.uint32))


def skip_unless_haliax_runs() -> None:
    """Skips where haliax itself, without jnvfp4, does not run with this JAX."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about JAX
            import haliax as hax
            import haliax.nn as hnn

            axes = hax.Axis("i", 2), hax.Axis("o", 2)
            hnn.Linear.init(*axes, key=jax.random.key(0))(hax.ones(axes[:1]))
    except (ImportError, AttributeError) as error:
        skip_or_fail("haliax", f"no haliax that runs with this JAX: {error}")
