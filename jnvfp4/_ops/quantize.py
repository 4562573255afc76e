"""Quantizers, ``dequantize`` and ``transpose``: argument checks, the amax of a tensor, and one primitive for each."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .. import reference
from .._core.mesh import match_varying
from .._core.tensor import NVFP4Tensor, parts_of, take_tensor, with_scale_bytes
from .._primitives._base import bind
from .._primitives._checks import check_array, check_operand
from .._primitives._sides import Side, find_row_amax
from .._primitives.dequantize import DequantizeParams, dequantize_p
from .._primitives.quantize import quantize_p
from .._primitives.quantize_pair import quantize_pair_p
from .._primitives.rht_amax import RhtAmaxParams, rht_amax_p
from .._primitives.transpose import check_tiles, transpose_p
from ..spec import BLOCK, FUSED_PAIRS, NVFP4, NVFP4_2D, WINDOW64, QuantSpec
from .arguments import Checks, Implementation, fold_amax, magnitude, operation, random_stream


@operation
def quantize(
    x: ArrayLike,
    spec: QuantSpec = NVFP4,
    *,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    transpose: bool = False,
    implementation: Implementation = None,
) -> NVFP4Tensor:
    """Quantizes ``x`` to NVFP4: 4-bit E2M1 codes, one 8-bit E4M3 scale for each 16 of them, and a float32 amax.

    Args:
      x: [..., M, K], float32, bfloat16 or float16. Blocks run along K (along M if ``transpose``), which must be a
        multiple of ``spec.unit``: 16, or 64 for scope "window64". With ``block_rows=16`` the other axis must be a
        multiple of 16 too; otherwise it may have any size.
      spec: how to quantize.
      amax: float32, the largest magnitude that can be encoded; larger ones saturate. Its sign is ignored. None computes
        it from ``x`` (after the rotation, if the spec rotates). Shapes by ``spec.format.amax_scope``, for the array
        that is quantized: "tensor" takes () for all of ``x`` or ``x.shape[:-2]`` for one per matrix; "row" takes one
        per row; "window64" takes one per 64 elements of a row.
      key: a JAX PRNG key, needed if ``spec.rounding == "stochastic"`` and otherwise unused. The random bits depend on
        ``jax.random.bits(key, (2,), uint32)``, on ``transpose`` and on the place of an element in ``x``, and not on
        devices, shards or platform. Places count from 0 in each example of vmap, and in the block of each device inside
        shard_map, so give each of these its own key (``jax.random.fold_in(key, jax.lax.axis_index(...))``).
      transpose: swap the last two axes of ``x`` first; all shapes of the result are those of the swapped array.
      implementation: None for the best one, "native" (C++ or CUDA) or "reference" (integer jnp). If the platform does
        not have the one that is named, compilation raises.

    Returns:
      The NVFP4Tensor. An element that is not larger than amax changes by at most half an E2M1 step times its block
      scale; with stochastic rounding by at most one step. That holds if the block scale is a normal number
      and amax lies between 8e-36 and FLT_MAX / 448. With ``select="search"`` it holds up to 6 block scales, as larger
      elements are clipped where that lowers the error of their block. For a spec with ``rht`` it holds for the rotated
      values, which ``dequantize(..., rotate_back=False)`` returns.

    Raises:
      ValueError, TypeError: a shape, dtype or argument does not fit; the message names it.

    docs/numerics.md defines the bytes. They are the same on every platform, sharded or not. The recipe is that of
    arXiv:2509.25149; block scale, 2D tiles, 4over6 and rotation are those of NVIDIA TransformerEngine at d0067d0da.
    """
    check = Checks("quantize")
    check.spec("spec", spec)
    key = check.stochastic_key(key, spec)
    check.lowering(implementation)
    array = check.array("x", x)
    check_array(check.op, array)
    check.choice("transpose", transpose, (True, False))
    given = None if amax is None else check.amax(amax)
    return quantize_sides(array, [Orientation(spec, transpose, given)], 1, key, implementation)[0]


class Orientation(NamedTuple):
    """Says how to quantize x, or x transposed."""

    spec: QuantSpec
    transpose: bool = False
    amax: jax.Array | None = None  # the caller's; None finds it


@operation
def quantize_pair(
    x: ArrayLike,
    row_spec: QuantSpec = NVFP4,
    col_spec: QuantSpec = NVFP4,
    *,
    amax: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """Quantizes ``x`` and its transpose, which a linear layer needs for its forward GEMM and for the gradient of w.

    Args:
      x: [..., M, K], float32, bfloat16 or float16. K must be a multiple of ``row_spec.unit``, M of ``col_spec.unit``.
      row_spec: how to quantize ``x``.
      col_spec: how to quantize ``x`` with its last two axes swapped.
      amax: None, or a pair: the amax of ``x`` and that of the swapped array, as ``quantize`` takes them. Where it is
        None, it is computed.
      key: as in ``quantize``, needed if either spec rounds stochastically. The two orientations draw different bits.
      implementation: as in ``quantize``.

    Returns:
      The tensors of ``quantize(x, row_spec)`` and ``quantize(x, col_spec, transpose=True)``, bit for bit. For the pairs
      of specs in ``jnvfp4.spec.FUSED_PAIRS``, which recipes use, one pass over ``x`` makes both, once both amax are
      known. (The pass of two WINDOW64 finds their amax itself, and is two calls if one of them is given.) Other pairs
      are two calls of ``quantize``.

    Raises:
      ValueError, TypeError: a shape, dtype or argument does not fit; the message names it.
    """
    check = Checks("quantize_pair")
    for name, spec in (("row_spec", row_spec), ("col_spec", col_spec)):
        check.spec(name, spec)
    key = check.stochastic_key(key, row_spec, col_spec)
    check.lowering(implementation)
    row_amax, col_amax = check.amax_pair(amax)
    array = check.array("x", x)
    sides = Orientation(row_spec, False, row_amax), Orientation(col_spec, True, col_amax)
    for side in sides:
        aval = None if side.amax is None else jax.typeof(side.amax)
        check_operand(check.op, jax.typeof(array), aval, side.spec, side.transpose)
    row, col = quantize_sides(array, sides, 1, key, implementation)
    return row, col


def quantize_sides(
    x: jax.Array,
    sides: Sequence[Orientation],
    row_axes: int,
    key: jax.Array | None = None,
    implementation: Implementation = None,
    *,
    in_layer: bool = False,
) -> list[NVFP4Tensor]:
    """Quantizes x [..., *rows, K], of which ``row_axes`` axes count as one axis of rows, in some orientations.

    The bytes are those of x [..., M, K]. The parts keep the axes apart: [..., *rows, K], or [..., K, *rows] transposed.
    The size of the last of these axes must be a multiple of what a block has of rows. ``in_layer`` folds the largest
    magnitude of x into the key, where a pass over x finds it for an amax.
    """
    fused = _is_fused(sides)
    amaxes, plain = _known_amaxes(x, sides, row_axes, fused, implementation)
    known = list(zip(sides, amaxes, strict=True))
    if in_layer and key is not None and plain is not None:
        key = fold_amax(key, plain)
    stream = None if key is None else random_stream(key, _merged_rows(x.shape, row_axes))
    tensors: list[NVFP4Tensor] = []
    for made in [known] if fused else [[one] for one in known]:
        params = tuple(Side(side.spec, side.transpose, amax is not None, row_axes) for side, amax in made)
        streams = [stream if side.spec.rounding == "stochastic" else None for side, _ in made]
        operands = [v for v in (*(amax for _, amax in made), *streams) if v is not None]
        primitive = quantize_pair_p if fused else quantize_p
        results = iter(bind(primitive, x, *operands, params=params, implementation=implementation))
        for side, amax in made:
            tensors.append(take_tensor(results, side.spec.format, amax if side.amax is None else magnitude(side.amax)))
    return tensors


def _merged_rows(shape: tuple[int, ...], row_axes: int) -> tuple[int, ...]:
    first = len(shape) - 1 - row_axes
    return (*shape[:first], math.prod(shape[first:-1]), shape[-1])


def _is_fused(sides: Sequence[Orientation]) -> bool:
    """Says whether one kernel makes both; that of window64 finds each amax itself and takes none."""
    specs = tuple(side.spec for side in sides)
    return specs in FUSED_PAIRS and (specs[0] != WINDOW64 or all(side.amax is None for side in sides))


def _known_amaxes(
    x: jax.Array, sides: Sequence[Orientation], row_axes: int, fused: bool, implementation: Implementation
) -> tuple[list[jax.Array | None], jax.Array | None]:
    """Finds the amaxes that no kernel finds itself; those of the whole tensor in one pass over x.

    The largest magnitude of x comes second, None if no amax of the whole tensor is found.
    """
    wanted = [side for side in sides if side.amax is None and not side.spec.finds_amax]
    rotated: dict[bool, jax.Array] = {}  # by whether it is that of the transposed x
    plain = None
    for side in wanted:
        if side.spec.format.rht:
            params = RhtAmaxParams(side.transpose)
            rotated[side.transpose], plain = bind(rht_amax_p, x, params=params, implementation=implementation)
    if plain is None and wanted:
        plain = reference.find_amax(x, "tensor")

    def amax_of(side: Orientation) -> jax.Array | None:
        if side.amax is not None:
            return side.amax
        if not side.spec.finds_amax:
            return rotated.get(side.transpose, plain)
        in_pair = fused and side.spec.format.amax_scope == "row"
        return find_row_amax(x, side.transpose, row_axes) if in_pair else None

    return [amax_of(side) for side in sides], plain


@partial(jax.custom_jvp, nondiff_argnums=(1, 4))
def _fake_quant(
    x: jax.Array, spec: QuantSpec, amax: jax.Array | None, key: jax.Array | None, implementation: Implementation
) -> jax.Array:
    quantized = quantize(x, spec, amax=amax, key=key, implementation=implementation)
    return dequantize(quantized, x.dtype, implementation=implementation)


@_fake_quant.defjvp
def _fake_quant_jvp(
    spec: QuantSpec, implementation: Implementation, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    x, amax, key = primals
    return _fake_quant(x, spec, amax, key, implementation), tangents[0]


@operation
def fake_quant(
    x: ArrayLike,
    spec: QuantSpec = NVFP4,
    *,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Rounds ``x`` to the values that NVFP4 can hold, for quantization-aware training.

    Args and errors are those of ``quantize``.

    Returns:
      ``dequantize(quantize(x, spec, ...), x.dtype)``, an array with the shape and dtype of ``x``. Its gradient is
      that of the identity (straight-through), and ``amax`` has none.
    """
    check = Checks("fake_quant")
    check.spec("spec", spec)
    key = check.stochastic_key(key, spec)
    check.lowering(implementation)
    array = check.array("x", x)
    given = None if amax is None else check.amax(amax)
    check_operand(check.op, jax.typeof(array), None if given is None else jax.typeof(given), spec, False)
    (array,) = match_varying(array, like=(given, key))  # outside the custom derivative, as in linear
    return _fake_quant(array, spec, given, key, implementation)


@operation
def dequantize(
    t: NVFP4Tensor, dtype: DTypeLike = jnp.float32, *, rotate_back: bool = True, implementation: Implementation = None
) -> jax.Array:
    """Decodes the values of ``t``.

    Args:
      t: an NVFP4Tensor [..., M, K].
      dtype: float32, bfloat16 or float16.
      rotate_back: undo the rotation of a tensor with ``format.rht``, in float32 before the cast.
      implementation: as in ``quantize``.

    Returns:
      [..., M, K] of ``dtype``: for a code q and its scale s, cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))),
      where fl is one rounding to float32. If amax is above FLT_MAX / 448, ``s * amax`` overflows for the largest s, and
      codes of 0 then give NaN, others infinity.

    Raises:
      ValueError, TypeError: a tensor or argument does not fit; the message names it.
    """
    check = Checks("dequantize")
    check.lowering(implementation)
    t = check.tensor("t", t)
    check.choice("rotate_back", rotate_back, (True, False))
    params = DequantizeParams(t.format, check.float_dtype("dtype", dtype), rotate_back)
    return bind(dequantize_p, *parts_of(t), params=params, implementation=implementation)[0]


@operation
def transpose(q: NVFP4Tensor, spec: QuantSpec = NVFP4_2D, *, implementation: Implementation = None) -> NVFP4Tensor:
    """Transposes a tensor of 16x16 tiles exactly, without decoding it: only codes and scales move.

    Args:
      q: an NVFP4Tensor [..., M, K] that was made by ``spec``, with M and K multiples of 16.
      spec: the spec that q was made by. It has ``block_rows=16`` and the format of q.
      implementation: as in ``quantize``.

    Returns:
      The NVFP4Tensor [..., K, M] of the same values and format, with the amax of q. For ``NVFP4_2D`` it has the bytes
      of ``quantize(x, spec, transpose=True)``. For 4over6 that call may choose another scale for a tile.

      A tensor does not say whether it was made in tiles. Where the 16 rows of a tile do not have the same scale byte,
      the tile gets the scale NaN, and its values decode to NaN. ``implementation="reference"`` raises an error instead,
      if it is called outside of ``jit`` and other transformations.

    Raises:
      ValueError, TypeError: a tensor or argument does not fit; the message names it.
    """
    check = Checks("transpose")
    check.lowering(implementation)
    q = check.tensor("q", q)
    _check_tile_spec(check, q, spec)
    check_tiles(tuple(parts_of(q)), q.format)
    if implementation == "reference":
        _check_scales_of_tiles(check.op, q)
    stored = with_scale_bytes(q)
    results = bind(transpose_p, stored.data, stored.scale, params=None, implementation=implementation)
    return take_tensor(iter(results), q.format, q.amax)


def _check_tile_spec(check: Checks, q: NVFP4Tensor, spec: QuantSpec) -> None:
    """Refuses a spec whose tensors have no transpose in packed form, or that cannot be the one of q."""
    check.spec("spec", spec)
    other_way = "make the transpose from the original array, by quantize(..., transpose=True)"
    if spec.block_rows != BLOCK:
        raise ValueError(
            f"{check.op}: spec must have block_rows={BLOCK}, got {spec} with block_rows={spec.block_rows}; {other_way}"
        )
    if spec.format != q.format:
        raise ValueError(
            f"{check.op}: spec must have the format of q, {q.format}, got {spec} with {spec.format}; pass the spec "
            f"that made q, or {other_way}"
        )


def _check_scales_of_tiles(op: str, q: NVFP4Tensor) -> None:
    """Refuses tiles whose rows have different scales, if the scales are known and all on this host."""
    if isinstance(q.scale, jax.core.Tracer) or not getattr(q.scale, "is_fully_addressable", True):
        return
    scale = np.asarray(q.scale).view(np.uint8)
    *lead, rows, blocks = scale.shape
    tiles = scale.reshape(*lead, rows // BLOCK, BLOCK, blocks)
    mixed = np.argwhere((tiles != tiles[..., :1, :]).any(axis=-2))
    if mixed.size:
        *index, row, col = mixed[0].tolist()
        found = np.unique(tiles[(*index, row, slice(None), col)]).tolist()
        raise ValueError(
            f"{op}: the {BLOCK} rows of each 16x16 tile of q must have one scale, got the scale bytes {found} in the "
            f"tile at {(*index, row * BLOCK, col * BLOCK)}; q was not made with block_rows={BLOCK}"
        )
