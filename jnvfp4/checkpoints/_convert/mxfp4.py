"""Converts MXFP4 weights, which gpt-oss and DeepSeek-V4 have, to NVFP4 with the same values where that is possible.

A stack of experts ``NAME`` is stored as ``NAME_blocks``, U8 [E, N, K/32, 16], two E2M1 codes per byte with the even
element in the low half, and ``NAME_scales``, U8 [E, N, K/32], E8M0: an exponent of 2, plus 127. Decoded it is
[E, K, N], as in ``convert_moe_packed_tensors`` of transformers' integrations/mxfp4.py. A weight of one module ``M``,
U8 or I8 [N, K/2] with U8 or F8_E8M0 [N, K/32], is ``M.weight_packed`` and ``M.weight_scale`` in mxfp4-pack-quantized,
``M.weight`` and ``M.weight_scale`` in Model Optimizer, ``M.weight`` and ``M.scale`` in DeepSeek-V4.

An NVFP4 scale is an E4M3 number times S_dec. With a power of 2 as S_dec, E4M3's 18 powers of 2 (2^-9 to 2^8) cover 18
exponents: blocks of 16 whose scale is among them have the values of MXFP4, bit for bit. S_dec puts the largest scale
of a weight at 2^8, so only blocks that are smaller than the largest by 2^18 or more may be rounded.
"""

from collections.abc import Iterator
from functools import cache

import ml_dtypes
import numpy as np

from ...spec import BLOCK
from .._files.errors import CheckpointError
from .._files.files import Rows, slices
from .._files.safetensors import Planned
from .._files.source import Source, View
from .._layouts.fp8 import POWERS, powers
from .._layouts.names import WEIGHT, is_stack
from .._layouts.stored import VALUES
from .encode import Amax

_BLOCKS, _SCALES = "_blocks", "_scales"
_MODULES = ((".weight_packed", ".weight_scale"), (WEIGHT, ".weight_scale"), (WEIGHT, ".scale"))
_LARGEST, _SMALLEST = 8, -9  # exponents of E4M3's powers of 2
_LARGEST_SCALE = 124  # as an exponent of 2
_INFINITE = 0x7F80  # the bits of bfloat16, and above them NaN
_EXPONENTS = 512  # more than float32 has
_UNIT_AMAX = 2688.0  # with S_dec = 1


@cache
def _lowest_bits() -> np.ndarray:
    """Gives the exponent of the lower of the two bits that MXFP4 has, by the bits of a bfloat16 magnitude."""
    mantissa, exponent = np.frexp(np.arange(_INFINITE, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))
    lowest = np.full(1 << 15, _EXPONENTS // 2 - 1)  # zero has none, and infinity and NaN are refused
    lowest[1:_INFINITE] = np.where(mantissa == 0.5, exponent - 1, exponent - 2)[1:]  # 0.75 has two bits
    return (lowest + _EXPONENTS // 2).astype(np.int16)


# ---------------------------------------------------------------- decoding
def mxfp4_views(source: Source) -> Iterator[View]:
    """Finds the weights in MXFP4 and shows them in bfloat16, stacks as [E, K, N], which holds all of their values.

    Raises:
      CheckpointError: shapes or dtypes of codes and scales do not fit.
    """
    for codes in source.entries():
        stack = codes.name.removesuffix(_BLOCKS)
        if stack != codes.name and is_stack(stack) and stack + _SCALES in source.places:
            scales = source.entry(stack + _SCALES)
            if codes.tag != "U8" or len(codes.shape) != 4 or codes.shape[3] != BLOCK:
                raise CheckpointError(f"is {codes.tag} {list(codes.shape)}", "U8 [E, N, K/32, 16]", tensor=codes.name)
            if (scales.tag, scales.shape) != ("U8", codes.shape[:3]):
                expected = f"U8 {list(codes.shape[:3])}"
                raise CheckpointError(f"is {scales.tag} {list(scales.shape)}", expected, tensor=scales.name)
            yield _view(source, stack, codes, scales, ())
        elif found := _of_module(source, codes):
            module, scales = found
            names = (f"{module}.input_scale", f"{module}.input_global_scale")  # of activations
            yield _view(source, module + WEIGHT, codes, scales, tuple(n for n in names if n in source.places))


def _of_module(source: Source, codes: Planned) -> tuple[str, Planned] | None:
    """Finds the scales of one weight [N, K], and names its module; None if it is not in MXFP4."""
    if codes.tag not in ("U8", "I8") or len(codes.shape) != 2 or codes.shape[1] % BLOCK:
        return None
    pairs = ((codes.name.removesuffix(s), scale) for s, scale in _MODULES if codes.name.endswith(s))
    found = ((module, source.entry(module + scale)) for module, scale in pairs if module + scale in source.places)
    shape = codes.shape[0], codes.shape[1] // BLOCK
    return next(((module, s) for module, s in found if s.tag in POWERS and s.shape == shape), None)


def _view(source: Source, name: str, codes: Planned, scales: Planned, unused: tuple[str, ...]) -> View:
    *rows, groups = scales.shape
    shape = (*rows, 2 * BLOCK * groups)
    stacked = len(shape) == 3
    decoded = Planned(name, "BF16", (shape[0], shape[2], shape[1]) if stacked else shape, kn=stacked, mxfp4=True)

    def compute(rows: slice) -> np.ndarray:
        factors = powers(source.read(scales.name, rows))[..., None]
        with np.errstate(over="ignore"):  # what becomes infinite is an error when the amax is found
            pairs = source.read(codes.name, rows).view(np.uint8)
            q = np.stack([VALUES[pairs & 15], VALUES[pairs >> 4]], axis=-1)
            values = (q.reshape(*factors.shape[:-1], 2 * BLOCK) * factors).astype(decoded.dtype)
        values = values.reshape(-1, *shape[1:])
        return values.transpose(0, 2, 1) if stacked else values

    computed = Rows(decoded.shape, decoded.dtype, compute)
    return View(decoded, source, (codes.name, scales.name, *unused), lambda: computed)


# ---------------------------------------------------------------- encoding
def _scale_exponents(largest: np.ndarray) -> np.ndarray:
    """Gives the smallest j for which E2M1 covers the ``largest`` magnitude of a block with the scale 2^j: 6 * 2^j."""
    mantissa, exponent = np.frexp(largest)
    return np.where(mantissa > 0.75, exponent - 2, exponent - 3)  # 6 is 0.75 * 2^3


def find_power_amax(x: np.ndarray | Rows, name: str) -> Amax:
    """Finds the amax of a bfloat16 weight [N, K] by which S_dec is a power of 2, and the exponents of lowest bits.

    Raises:
      CheckpointError: the amax, 10.5 times the largest scale, is above the largest float32.
    """
    largest, not_finite, first = 0, 0, None
    lowest = np.zeros(_EXPONENTS, np.int64)
    for rows in slices(x.shape, 2, 1 << 22):
        part = np.ascontiguousarray(x[rows])
        magnitudes: np.ndarray = part.view(np.uint16) & 0x7FFF  # their bits have the same order
        largest = max(largest, int(magnitudes.max()))
        if largest >= _INFINITE:
            wrong = np.argwhere(magnitudes >= _INFINITE)
            not_finite += len(wrong)
            first = first or (rows.start + int(wrong[0][0]), int(wrong[0][1]))
        blocks = _lowest_bits()[magnitudes].reshape(part.shape[0], -1, BLOCK).min(axis=-1)
        lowest += np.bincount(blocks.reshape(-1), minlength=_EXPONENTS)
    if not largest or not_finite:
        return Amax(np.zeros((), np.float32), not_finite, first, lowest)
    j = int(_scale_exponents(np.uint16(largest).view(ml_dtypes.bfloat16).astype(np.float32)))
    if j > _LARGEST_SCALE:
        raise CheckpointError(f"has a scale of 2^{j}", f"at most 2^{_LARGEST_SCALE}", tensor=name)
    amax = np.ldexp(_UNIT_AMAX, max(j - _LARGEST, -126))  # the reciprocal of S_dec is finite, too
    return Amax(np.asarray(amax, np.float32), lowest=lowest)


def count_inexact(lowest: np.ndarray, amax: np.ndarray) -> int:
    """Counts the blocks of 16 with bits below the smallest that E2M1 has with the smallest scale."""
    smallest = _exponent(amax) + _SMALLEST - 1
    return int(lowest[: smallest + _EXPONENTS // 2].sum())


def _exponent(amax: np.ndarray) -> int:
    """Gives the exponent of S_dec, which is a power of 2."""
    mantissa, exponent = np.frexp(float(amax) / _UNIT_AMAX if amax else 1.0)
    assert mantissa == 0.5, amax
    return int(exponent) - 1


def encode_powers(
    x: np.ndarray | Rows, amax: np.ndarray, max_bytes: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Quantizes a finite weight [N, K] with powers of 2 as scales, by an amax of ``find_power_amax``, in slices.

    Yields:
      as ``encode``.
    """
    decode = _exponent(amax)
    for rows in slices(x.shape, 4, max_bytes):
        part = np.ascontiguousarray(x[rows], np.float32)
        blocks = part.reshape(part.shape[0], -1, BLOCK)
        exponents = np.clip(_scale_exponents(np.abs(blocks).max(axis=-1)) - decode, _SMALLEST, _LARGEST)
        scales = np.where(blocks.any(axis=-1), np.ldexp(np.float32(1), exponents), np.float32(0))
        codes = np.ldexp(blocks, -(exponents + decode)[..., None]).astype(ml_dtypes.float4_e2m1fn)
        nibbles = codes.view(np.uint8).reshape(part.shape) & 15
        packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        yield rows.start, packed, scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
