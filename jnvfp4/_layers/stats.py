"""Statistics of the FP4 tensors of a layer: the gradient of an array that the layer takes, which JAX itself sums.

They are counted from codes and scales that the layer makes anyway, and from what these were made of. The counts and
sums of a tensor are one reduction over its blocks, whose operands XLA computes in registers; so codes are decoded by
shifts and masks, and no value is stored.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import reference
from .._core.softfloat import ABS, Bits, to_bits
from .._core.tensor import NVFP4Tensor
from .._ops.arguments import Checks, describe
from ..spec import BLOCK
from .quantizer import Pair, named

OPERANDS = ("x", "w", "dy")  # rows of a probe
COLUMNS = ("calls", "nonzero", "underflow", "saturated", "subnormal_scales", "relative_error", "amax")
SHAPE = (len(OPERANDS), len(COLUMNS))
CLIP = np.float32(6 * (1 + 2**-20))  # 6, and room for the roundings of the quantizer and of what compares with it


# ---------------------------------------------------------------- probes
@overload
def probe(on: Literal[True] = True, shape: tuple[int, ...] = ()) -> jax.Array: ...
@overload
def probe(on: ArrayLike, shape: tuple[int, ...] = ()) -> jax.Array | None: ...
def probe(on: ArrayLike = True, shape: tuple[int, ...] = ()) -> jax.Array | None:
    """Makes the array whose gradient is the statistics of a layer: the argument ``stats`` of ``jnvfp4.linear``.

    Args:
      on: whether the layer collects. A boolean that is traced, such as ``step % 100 == 0``, decides when the program
        runs: each layer then has a ``lax.cond``, for which a GPU waits. True decides when it is traced, if the probe is
        made inside ``jax.jit``, and so does False.
      shape: leading axes, such as the number of layers that ``lax.scan`` loops over.

    Returns:
      float32 [*shape, 3, 7], ones where ``on``, else zeros; for False itself None, with which a layer has the program
      that it has without statistics. ``jnvfp4.stats.read`` reads the gradient.

    Raises:
      TypeError: on is not one boolean.
    """
    if isinstance(on, bool):
        return jnp.ones((*shape, *SHAPE), jnp.float32) if on else None
    array = Checks("probe").array("on", on)
    if array.dtype != bool or array.shape != ():
        raise TypeError(f"probe: on must be one boolean, got {describe(array)}")
    return jnp.broadcast_to(array.astype(jnp.float32), (*shape, *SHAPE))


_probes: ContextVar[Mapping[str, jax.Array | None] | None] = ContextVar("jnvfp4_probes", default=None)
_trace_of_probes = jax.make_user_context(None)  # as in ``step_key``: no cached trace brings the tracers of another


@contextmanager
def collect(probes: Mapping[str, jax.Array | None]) -> Iterator[None]:
    """Gives layers of a model their probes: ``with jnvfp4.stats.collect(probes): loss = ...``, where loss is traced.

    It reaches all that multiplies by a policy: Flax Linen and NNX, Qwix, Equinox, haliax, and a ``DotGeneral``,
    ``Einsum`` or ``RaggedDot`` with a path.

    Args:
      probes: what ``probe`` makes, by the paths of layers; those of ``Policy.explain``. Layers of other paths collect
        nothing. The layers that a scan of the model runs have one path, and so the mean of their statistics.

    Raises:
      TypeError, ValueError: a path is no string, or a probe is none.
    """
    check = Checks("collect")
    if not isinstance(probes, Mapping):
        raise TypeError(f"collect: probes must be a dict of probes by path, got {describe(probes)}")
    for path, value in probes.items():
        if not isinstance(path, str):
            raise TypeError(f"collect: probes must have strings for paths, got {path!r}")
        check_probe(check, f"probes[{path!r}]", value)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(dict(probes)))
    with _trace_of_probes(object()) if traced else nullcontext():
        token = _probes.set(probes)
        try:
            yield
        finally:
            _probes.reset(token)


def probe_of(path: str | None) -> jax.Array | None:
    """Returns the probe that ``collect`` gives to the layer of a path."""
    probes = _probes.get()
    return None if probes is None or path is None else probes.get(path)


def check_probe(check: Checks, name: str, value: object) -> jax.Array | None:
    """Refuses what is no probe of one layer."""
    if value is None:
        return None
    array = check.array(name, value)
    if array.shape != SHAPE or array.dtype != jnp.float32:
        raise ValueError(
            f"{check.op}: {name} must be float32 of shape {SHAPE}, as jnvfp4.stats.probe makes it, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


# ---------------------------------------------------------------- in a layer
class Made(NamedTuple):
    """Holds an array and the tensors that a layer makes of it, along its last axis and transposed.

    An array of activations [*rows, K] is transposed as one matrix; of ``matrices`` [..., N, K], each is.
    """

    array: jax.Array
    pair: Pair
    matrices: bool = False

    def measured(self) -> jax.Array:
        """Returns the row of the statistics, of the first tensor that there is; zeros without one."""
        (row, col), x = self.pair, self.array
        if row is not None:
            return measure(x, row, x.size)
        if col is None:
            return jnp.zeros(SHAPE[1:], jnp.float32)
        turned = jnp.swapaxes(x, -1, -2) if self.matrices else jnp.moveaxis(x, -1, 0)
        more = col.shape[-1] - turned.shape[-1]
        return measure(jnp.pad(turned, ((0, 0),) * (x.ndim - 1) + ((0, more),)) if more else turned, col, x.size)


def forward(stats: jax.Array | None, x: Made, w: Made | None) -> jax.Array | None:
    """Returns what the forward pass saves: the rows of x and w, and that of the probe for dy."""
    if stats is None:
        return None
    rows = stats[:2] if w is not None else stats[:1]
    found = _switched(rows, *([x] if w is None else [x, w]))
    rest = jnp.zeros_like(stats[1:2]) if w is None else stats[:0]  # a frozen w was not quantized here
    return named(jnp.concatenate([found, rest, stats[2:]]), True)


def backward(saved: jax.Array | None, dy: Made) -> jax.Array | None:
    """Returns the gradient of the probe."""
    return None if saved is None else jnp.concatenate([saved[:2], _switched(saved[2:], dy)])


def _switched(rows: jax.Array, *made: Made) -> jax.Array:
    """Measures where the rows of the probe are not zero, else returns these zeros."""
    measured: Callable[[], jax.Array] = lambda: jnp.stack([of.measured() for of in made])  # noqa: E731
    return lax.cond(jnp.any(rows != 0), measured, lambda: rows)


# ---------------------------------------------------------------- one tensor
def measure(x: jax.Array, t: NVFP4Tensor, size: int) -> jax.Array:
    """Returns the row of one call for a tensor and what it was made of, x [..., M, K] with zeros beyond ``size``."""
    blocks = x.reshape(*t.scale.shape, BLOCK)
    scale = lax.bitcast_convert_type(t.scale, jnp.uint8)
    amaxes, largest = jnp.abs(t.amax), t.tensor_amax
    own = reference.per_block(amaxes, t.ndim, t.format.amax_scope)
    factor = inverse_power(own)
    values, nonzero = _rotated(blocks, factor) if t.format.rht else _magnitudes(blocks, factor)
    step = (_float(reference.e4m3_decode(scale)) * (own * factor)) * np.float32(1 / (6 * t.format.e4m3_max))
    codes, coded = _codes(t.data.reshape(*scale.shape, BLOCK // 2))
    limit = jnp.where(scale & 0x7F == 0, np.float32(np.inf), step * CLIP)
    saturated = sum((v > limit).astype(jnp.int32) for v in values)
    step *= np.float32(2**14)
    error = sum(jnp.square(code * step - v) for code, v in zip(codes, values, strict=True))
    norm = sum(map(jnp.square, values))
    if amaxes.ndim:  # to units of the whole tensor
        ratio = jnp.square(_power(_exponent(own) - _exponent(largest)))
        error, norm = error * ratio, norm * ratio
    subnormal = ((scale & 0x78 == 0) & (scale & 7 != 0)).astype(jnp.int32)
    counts = [nonzero, nonzero - coded, saturated, subnormal]
    *counts, error, norm = _sums(*(jnp.broadcast_to(v, scale.shape) for v in (*counts, error, norm)))
    shares = [n.astype(jnp.float32) / max(of, 1) for n, of in zip(counts, (size, size, size, scale.size), strict=True)]
    relative = jnp.where(norm == 0, np.float32(0), jnp.sqrt(error / norm))
    return jnp.stack([jnp.ones_like(relative), *shares, relative, largest])


def _sums(*operands: jax.Array) -> list[jax.Array]:
    """Sums all in one loop."""
    zeros = [np.zeros((), v.dtype) for v in operands]
    add = lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True))  # noqa: E731
    return list(lax.reduce(operands, tuple(zeros), add, tuple(range(operands[0].ndim))))


def _magnitudes(blocks: jax.Array, factor: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Returns the magnitudes of the 16 elements of each block times ``factor``, and how many are not zero."""
    bits = [to_bits(blocks[..., i]) & ABS for i in range(BLOCK)]
    return [_float(b) * factor for b in bits], sum((b != 0).astype(jnp.int32) for b in bits)


def _rotated(blocks: jax.Array, factor: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Does the same for the rotated values, as ``reference.rht16`` rotates; ``factor`` is a power of two."""
    v = [_bfloat16(_float(to_bits(blocks[..., i])) * factor) * (-1 if 0xD7E8 >> i & 1 else 1) for i in range(BLOCK)]
    for stride in (1, 2, 4, 8):
        v = [v[i ^ stride] - v[i] if i & stride else v[i] + v[i ^ stride] for i in range(BLOCK)]
    v = [jnp.abs(_bfloat16(value * np.float32(0.25))) for value in v]
    return v, sum((value != 0).astype(jnp.int32) for value in v)


def _codes(data: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Decodes the magnitudes of the bytes [..., 8] of blocks times 2^-14, and counts codes that are not zero.

    The three bits of a magnitude are the last two of the exponent and the first of the fraction of a float16 number.
    """
    # Of bytes, which a compiler loads as words: XLA would store what a bitcast to words makes.
    words = [sum(data[..., 4 * h + i].astype(jnp.uint32) << 8 * i for i in range(4)) for h in range(2)]
    found = []
    for i in range(BLOCK):
        word, shift = words[i // 8], 4 * (i % 8) - 9
        placed = (word >> shift if shift > 0 else word << -shift) & 0xE00
        found.append(lax.bitcast_convert_type(placed.astype(jnp.uint16), jnp.float16).astype(jnp.float32))
    ones = ((word | word >> 1 | word >> 2) & 0x11111111 for word in words)
    return found, sum(lax.population_count(word).astype(jnp.int32) for word in ones)


# ---------------------------------------------------------------- floats
def inverse_power(amax: jax.Array) -> jax.Array:
    """Returns the power of two that brings amax to [1, 2), or to [2, 4) if it is 2^127 or more; 0 for subnormals.

    Squares overflow and underflow early, and XLA may flush what is subnormal.
    """
    exponent = _exponent(amax)
    return jnp.where(exponent == 0, np.float32(0), _power(jnp.clip(127 - exponent, -126, 126)))


def _exponent(x: jax.Array) -> jax.Array:
    return (lax.bitcast_convert_type(x, jnp.uint32) >> 23 & 0xFF).astype(jnp.int32)


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent; 0 below 2^-126."""
    return _float((jnp.maximum(exponent + 127, 0) << 23).astype(jnp.uint32))


def _float(bits: Bits) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bfloat16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, 8, 7)  # XLA may delete two casts
