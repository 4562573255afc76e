"""The operands of self-checks: small, and chosen so that a wrong path is not right by accident.

No size is a multiple of a tile, so that all have padding. Elements lie on the grid of E2M1 and between its numbers,
scales are all that there are, and no factor of a product is a power of two. Sums of products are exact in any order.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from .._native import plans
from .._native.self_check import Call
from .._primitives._checks import amax_shapes
from .._primitives._matmul_routes import MatmulParams, plan
from .._primitives._products import ProductParams
from .._primitives._sides import Sides
from .._primitives.append_kv import AppendParams
from .._primitives.decode_attention import AttentionParams
from ..spec import BLOCK, WINDOW, Format, QuantSpec, name_of

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


# ---------------------------------------------------------------- quantizers
# Numbers of E2M1, the middle of each two, and some beside them.
_ELEMENTS = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 0.3, 0.8, 2.4, 2.6, 5.1])
_STREAM = np.array([0x9E3779B9, 0x7F4A7C15, 0xFFFFFFF0, 1], np.uint32)  # the low word of the index will carry


def values(rows: int, cols: int, dtype: DTypeLike, seed: int = 0) -> np.ndarray:
    """Returns blocks whose scales and elements are exact if the amax is 6 * 448, and rows that are not."""
    rng = np.random.default_rng(seed)
    scales = np.ldexp(8 + rng.integers(0, 8, (rows, cols // BLOCK, 1)), rng.integers(-9, 3, (rows, cols // BLOCK, 1)))
    x = rng.choice(_ELEMENTS, (rows, cols // BLOCK, BLOCK)) * rng.choice([-1, 1], (rows, cols // BLOCK, BLOCK))
    x[:, :, 5] = 6  # the largest of a block
    x = (x * scales).reshape(rows, cols)
    x[::3] = rng.standard_normal((len(x[::3]), cols)) * np.ldexp(1.0, rng.integers(-9, 5, (len(x[::3]), 1)))
    x[1, :BLOCK], x[1, BLOCK : 2 * BLOCK], x[2, 3] = 0, -0.0, 6 * 448
    return x.astype(dtype)


def quantizer_calls(sides: Sides, dtype: DTypeLike) -> Iterator[Call]:
    """Makes the call of a primitive that quantizes x."""
    rows, cols = (192, 320) if len(sides) != 1 else _sizes(sides[0].spec)
    x = values(rows, cols, dtype)
    x = np.ascontiguousarray(x.T) if len(sides) == 1 and sides[0].transpose else x
    given = [_amax(x, side.spec, side.transpose) for side in sides if side.has_amax]
    streams = [_STREAM + np.uint32(i) for i, side in enumerate(sides) if side.spec.rounding == "stochastic"]
    yield Call((x, *given, *streams), sides)


def _sizes(spec: QuantSpec) -> tuple[int, int]:
    return 80 if spec.block_rows > 1 else 77, 5 * WINDOW if spec.unit == WINDOW else 21 * BLOCK


def _amax(x: np.ndarray, spec: QuantSpec, transpose: bool) -> np.ndarray:
    """Returns an amax for each row or window that is not its largest magnitude; that of the tensor is exact."""
    shape = amax_shapes(x.shape, spec, transpose)[0]
    return np.array(np.random.default_rng(1).uniform(40, 3000, shape) if shape else 6 * 448, np.float32)


def describe(sides: Sides) -> str:
    """Names what a quantizer makes."""
    return " and ".join(f"{name_of(s.spec)}{' transposed' * s.transpose}{' with its amax' * s.has_amax}" for s in sides)


# ---------------------------------------------------------------- tensors
def tensor(
    rng: np.random.Generator, shape: Sequence[int], fmt: Format, scales: Sequence[int], amax: Any = None
) -> tuple:
    """Returns data, scale and amax of random codes, and of scales out of some bytes."""
    *lead, rows, cols = shape
    data = rng.integers(0, 256, (*lead, rows, cols // 2), np.uint8)
    scale = rng.choice(np.array(scales, np.uint8), (*lead, rows, cols // BLOCK)).view(ml_dtypes.float8_e4m3fn)
    if amax is None and fmt.amax_scope == "window64":  # factors of windows that are powers of two are never rounded
        amax = np.ldexp(6.0 * fmt.e4m3_max, rng.integers(-3, 3, (*lead, rows, cols // WINDOW)))
    elif amax is None:
        amax = rng.uniform(0.7, 1.9, (*lead, rows) if fmt.amax_scope == "row" else tuple(lead))
    return data, scale, np.asarray(amax, np.float32)


EVERY_SCALE = range(1, 0x7F)
_FEW_SCALES = (0x30, 0x34, 0x38, 0x3C, 0x40, 0x42)  # 0.5, 0.75, 1, 1.5, 2, 2.5: sums below 2^21 of their unit


# ---------------------------------------------------------------- products
class Sample(NamedTuple):
    """A product whose sums are exact in any order."""

    shape: tuple[int, int, int]
    a: Any = Format()  # or the dtype of an array
    b: Format = Format()
    out: Any = F32
    bias: Any = None
    residual: bool = False  # the bias has the shape of the result
    lead: tuple[int, ...] = ()
    unit: str = ""  # "a" or "b": this operand has ones on its diagonal, so that each result is one element


_ROW, _NARROW, _WINDOWS = Format("row"), Format(e4m3_max=256), Format("window64")
SAMPLES = (
    *[Sample((5, 131, 48), a) for a in (Format(), BF16, F16)],
    *[Sample((70, 131, 208), a) for a in (Format(), BF16, F16)],
    Sample((129, 144, 80), _NARROW, Format(), BF16, BF16),
    Sample((16, 47, 96), _ROW, _NARROW, F32, F32),
    Sample((66, 45, 112), _NARROW, _ROW, F16, F32),
    Sample((5, 132, 48), BF16, bias=BF16, residual=True),
    Sample((3, 32, 64), lead=(3,)),
    Sample((272, 140, 272), unit="a"),
    Sample((133, 208, 208), unit="b"),
    Sample((64, 208, 208), unit="b"),
    Sample((16, 208, 208), unit="b"),
    *[Sample((rows, 131, 320), *of) for rows in (5, 130) for of in ((_WINDOWS, Format()), (_WINDOWS, _WINDOWS))],
)


def _ones(size: int, like: tuple) -> tuple:
    codes = 2 * np.eye(size, dtype=np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, np.full_like(like[1], 1), like[2]


def call_of(sample: Sample) -> Call:
    """Returns the call of ``nvfp4_matmul``."""
    rng = np.random.default_rng(sum(sample.shape))
    (m, n, k), quantized = sample.shape, isinstance(sample.a, Format)
    scales = EVERY_SCALE if sample.unit else _FEW_SCALES
    # With windows no factor may be rounded, which on Hopper each product of two is.
    amax = 6 * 448 if sample.a == _WINDOWS != sample.b else None
    b = tensor(rng, (*sample.lead, n, k), sample.b, scales, amax)
    if quantized:
        a: tuple = tensor(rng, (*sample.lead, m, k), sample.a, scales)
    else:
        a = (rng.integers(-8, 9, (*sample.lead, m, k)).astype(jnp.dtype(sample.a)),)
    if sample.unit:
        a, b = (_ones(k, a), b) if sample.unit == "a" else (a, _ones(k, b))
    of_bias = (*sample.lead, m, n) if sample.residual else (n,)
    bias = () if sample.bias is None else (rng.standard_normal(of_bias).astype(sample.bias),)
    params = MatmulParams(sample.a if quantized else None, sample.b, jnp.dtype(sample.out))
    return Call((*a, *b, *bias), params)


def _plan(call: Call, capability: int | None, kernel: str) -> plans.MatmulPlan:
    return plan(call.params.product(call.operands), capability, kernel)


def product_calls(kernel: str, capability: int | None) -> Iterator[Call]:
    """Makes the calls that a kernel can run on a device."""
    for sample in SAMPLES:
        call = call_of(sample)
        if not _plan(call, capability, kernel).reason:
            yield call


def why_no_product(kernel: str, capability: int | None) -> str:
    """Says why a kernel can run none of the calls on a device; empty if it can run one."""
    reasons = [_plan(call_of(sample), capability, kernel).reason for sample in SAMPLES]
    # What the device lacks, rather than what is wrong with an operand.
    return "" if "" in reasons else next((reason for reason in reasons if " cannot: " not in reason), reasons[0])


# ---------------------------------------------------------------- grouped products
_GROUPED = (77, 4, 45, 208)  # rows, groups, N, K
_LEFTS = ((_ROW, "nvfp4"), (Format(), "nvfp4"), (None, "bfloat16"), (None, "float16"))


def _why_not_grouped(left: str, kernel: str, capability: int | None) -> str:
    return plans.plan_grouped(
        shape=_GROUPED, a=left, out="bfloat16", pinned=False, capability=capability, kernel=kernel
    ).reason


def grouped_calls(kernel: str, capability: int | None) -> Iterator[Call]:
    """Makes the calls of ``nvfp4_grouped_matmul``: some groups have no rows, and some rows no group."""
    rng = np.random.default_rng(3)
    rows, groups, cols, depth = _GROUPED
    sizes = np.array([17, 0, 40, 13], np.int32)
    b = tensor(rng, (groups, cols, depth), Format(), _FEW_SCALES)
    for a_format, left in _LEFTS:
        if _why_not_grouped(left, kernel, capability):
            continue
        numbers = rng.integers(-8, 9, (rows, depth))
        a = tensor(rng, (rows, depth), a_format, _FEW_SCALES) if a_format else (numbers.astype(jnp.dtype(left)),)
        yield Call((*a, *b, sizes), ProductParams(a_format, Format(), jnp.dtype(BF16)))


def why_no_grouped(kernel: str, capability: int | None) -> str:
    """Says why a kernel can run none of the calls on a device; empty if it can run one."""
    reasons = [_why_not_grouped(left, kernel, capability) for _, left in _LEFTS]
    return "" if "" in reasons else reasons[0]


# ---------------------------------------------------------------- a KV cache
_PLACES, _PER_PAGE = 320, 64  # tokens that a sequence has room for, and that a page has
_SEEN = np.array([320, 1, 257, 0, 70], np.int32)  # lengths


def _cut_into_pages(parts: tuple, table: np.ndarray) -> tuple:
    """Returns the pool whose pages are those of a cache, as the table [B, max_pages] orders them."""

    def pool(part: np.ndarray) -> np.ndarray:
        batch, heads, places, *rest = part.shape
        pages = part.reshape(batch, heads, places // _PER_PAGE, _PER_PAGE, *rest).swapaxes(1, 2)
        placed = np.zeros((table.size, heads, _PER_PAGE, *rest), part.dtype)
        placed[table.reshape(-1)] = pages.reshape(placed.shape)
        return placed

    return tuple(map(pool, parts))


def attention_calls(paged: bool, dtype: DTypeLike, depth: int) -> Iterator[Call]:
    """Makes the call of ``nvfp4_decode_attention``, in which each query head sees one token and no other.

    A query head has a one in a block of its own. All keys are alike, but for one token of each sequence and head, in
    whose key this block has twice the scale: the others weigh less than 2^-60. So the result is one value, which every
    order of sums gives, and it is found by the right scale and place alone.
    """
    rng = np.random.default_rng(depth)
    batch, heads, blocks = len(_SEEN), 2, depth // BLOCK
    group = blocks + 1  # kernels take eight at a time; the last head has the block of the first
    shape = (batch, heads, _PLACES, depth)
    keys = (np.full((*shape[:-1], depth // 2), 0x77, np.uint8), np.full((*shape[:-1], blocks), 0x38, np.uint8))
    chosen = rng.integers(0, np.maximum(_SEEN, 1), (heads, blocks, batch))  # a token of each
    for (head, block, sequence), token in np.ndenumerate(chosen):
        keys[1][sequence, head, token, block] = 0x40
    codes = rng.choice(np.delete(np.arange(16, dtype=np.uint8), [0, 8]), shape)  # a zero may have either sign
    scale = rng.choice(np.array(EVERY_SCALE, np.uint8), (*shape[:-1], blocks))
    amax = [np.full(shape[:-1], 2688, np.float32), np.ldexp(np.float32(2688), rng.integers(-3, 3, shape[:-1]))]
    q = np.zeros((batch, heads, group, depth))
    for g in range(group):
        q[:, :, g, BLOCK * (g % blocks) + g] = 1
    mixed = codes[..., ::2] | codes[..., 1::2] << 4, scale, amax[1].astype(np.float32)
    parts: tuple[np.ndarray, ...] = (*keys, amax[0], *mixed)
    behind = np.arange(_PLACES) >= _SEEN[:, None]
    for part in parts:  # all bits are one: NaN
        part.view(np.uint8).reshape(*part.shape[:3], -1)[np.broadcast_to(behind[:, None], part.shape[:3])] = 0xFF
    table = rng.permutation(batch * _PLACES // _PER_PAGE).reshape(batch, -1).astype(np.int32)
    parts = _cut_into_pages(parts, table) if paged else parts
    parts = tuple(p.view(ml_dtypes.float8_e4m3fn) if i % 3 == 1 else p for i, p in enumerate(parts))
    operands = (*parts, q.reshape(batch, heads * group, depth).astype(jnp.dtype(dtype)), _SEEN)
    yield Call((*operands, table) if paged else operands, AttentionParams(8.0, paged))


def append_calls(paged: bool, dtype: DTypeLike, depth: int) -> Iterator[Call]:
    """Makes the call of ``nvfp4_append_kv``: some tokens have no place, and nothing else may be written."""
    rng = np.random.default_rng(depth)
    positions = np.array([0, 63, 319, -1, 320], np.int32)
    batch, heads = len(positions), 3
    cache = [tensor(rng, (batch, heads, _PLACES, depth), _ROW, EVERY_SCALE) for _ in range(2)]
    table = rng.permutation(batch * _PLACES // _PER_PAGE).reshape(batch, -1).astype(np.int32)
    parts = tuple(part for parts in cache for part in parts)
    parts = _cut_into_pages(parts, table) if paged else parts
    k, v = (values(batch * heads, depth, dtype, seed).reshape(batch, heads, depth) for seed in (0, 1))
    operands = (*parts, k, v, positions)
    yield Call((*operands, table) if paged else operands, AppendParams(paged))
