"""Statistics of the FP4 tensors of a layer: the gradient of an array that the layer takes, which JAX itself sums.

They are counted from codes and scales that the layer makes anyway, and from what these were made of.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._core.tensor import NVFP4Tensor, parts_of, with_scale_bytes
from .._ops.arguments import Checks, describe
from .._primitives._base import bind
from .._primitives.measure import TINY, MeasureParams, measure_p
from ..calibration import hessian
from .quantizer import Pair, named

OPERANDS = ("x", "w", "dy")  # rows of a probe
COLUMNS = ("calls", "nonzero", "underflow", "saturated", "subnormal_scales", "relative_error", "amax")
MANY, EVERY = 512, 16  # of tensors with so many rows one in so many counts: all took 14 % of a step (h100_stats.json)
SHAPE = (len(OPERANDS), len(COLUMNS))


# ---------------------------------------------------------------- probes
@overload
def probe(on: Literal[True] = True, shape: tuple[int, ...] = ()) -> jax.Array: ...
@overload
def probe(on: bool, shape: tuple[int, ...] = ()) -> jax.Array | None: ...
def probe(on: bool = True, shape: tuple[int, ...] = ()) -> jax.Array | None:
    """Makes the array whose gradient is the statistics of a layer: the argument ``stats`` of ``jnvfp4.linear``.

    Args:
      on: whether the layer collects, which decides what is traced: in a jitted step, a static argument.
      shape: leading axes, such as the number of layers that ``lax.scan`` loops over.

    Returns:
      Zeros, float32 [*shape, 3, 7], whose values mean nothing; ``jnvfp4.stats.read`` reads their gradient. None if not
      ``on``, with which a layer has the program that it has without statistics.

    Raises:
      TypeError: on is no bool, or shape no tuple of integers.
    """
    if not (isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise TypeError(f"probe: shape must be a tuple of integers, none below 0, got {shape!r}")
    if not isinstance(on, bool | np.bool_):
        raise TypeError(
            f"probe: on must be True or False, got {describe(on)}; a traced flag chooses by jax.lax.cond between a "
            "gradient with probes and one without"
        )
    return jnp.zeros((*shape, *SHAPE), jnp.float32) if on else None


_probes: ContextVar[Mapping[str, jax.Array | None] | None] = ContextVar("jnvfp4_probes", default=None)
_trace_of_probes = jax.make_user_context(None)  # as in ``step_key``: no cached trace brings the tracers of another


@contextmanager
def collect(probes: Mapping[str, jax.Array | None]) -> Iterator[None]:
    """Gives layers of a model their probes: ``with jnvfp4.stats.collect(probes): loss = ...``, where loss is traced.

    It reaches all that multiplies by a policy: Flax Linen and NNX, Qwix, Equinox, haliax, and a ``DotGeneral``,
    ``Einsum`` or ``RaggedDot`` with a path.

    Args:
      probes: what ``probe`` makes, by the paths of layers; those of ``Policy.explain``. Layers of other paths collect
        nothing. The layers that a scan of the model runs have one path, and so the mean of their statistics. The
        gradient of zeros, float32 [K, K], is X^T X of what a layer multiplies, before it is quantized, and the sum over
        layers of one path. K is padded where the layer pads, and several axes of K have the order of w's.

    Raises:
      TypeError, ValueError: a path is no string, or a probe is none.
    """
    check = Checks("collect")
    if not isinstance(probes, Mapping):
        raise TypeError(f"collect: probes must be a dict of probes by path, got {describe(probes)}")
    for path, value in probes.items():
        if not isinstance(path, str):
            raise TypeError(f"collect: probes must have strings for paths, got {path!r}")
        check_probe(check, f"probes[{path!r}]", value, k=max(getattr(value, "shape", ()), default=None))
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


def check_probe(check: Checks, name: str, value: object, k: int | None) -> jax.Array | None:
    """Refuses what is no probe of one layer; ``k`` is the K of its x, or None where there is no X^T X."""
    if value is None:
        return None
    array = check.array(name, value)
    if array.shape not in (SHAPE, (k, k)) or array.dtype != jnp.float32:
        or_square = "" if k is None else f" or of {k, k} for X^T X,"
        raise ValueError(
            f"{check.op}: {name} must be float32 of shape {SHAPE}, as jnvfp4.stats.probe makes it,{or_square} got "
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


def forward(stats: jax.Array | None, x: Made, w: Made) -> jax.Array | None:
    """Returns what the forward pass saves: the rows of x and w, or X^T X."""
    if stats is None:
        return None
    return named(jnp.stack([x.measured(), w.measured()]) if stats.shape == SHAPE else hessian(x.array), True)


def backward(saved: jax.Array | None, dy: Made) -> jax.Array | None:
    """Returns the gradient of the probe."""
    if saved is None or saved.shape != (SHAPE[0] - 1, SHAPE[1]):
        return saved
    return jnp.concatenate([saved, dy.measured()[None]])


# ---------------------------------------------------------------- one tensor
def measure(x: jax.Array, t: NVFP4Tensor, size: int) -> jax.Array:
    """Returns the row of one call for a tensor and what it was made of, x [..., M, K] with zeros beyond ``size``."""
    largest, stored, rows = t.tensor_amax, with_scale_bytes(t), math.prod(x.shape[:-1])
    params = MeasureParams(t.format, EVERY if rows >= MANY else 1)
    counts, sums = bind(measure_p, x, *parts_of(stored), largest, params=params, implementation=None)
    of_block = np.array([size, size, size, t.scale.size], np.float32) / np.float32(max(t.scale.size, 1))
    *counts, seen = counts.astype(jnp.float32)
    error, norm = sums
    none = (counts[0] == 0) | (jnp.abs(largest) < TINY)
    unknown = ~jnp.isfinite(largest) | ((norm == 0) & ~none)  # squares of what is far below the amax are 0
    relative = jnp.where(unknown, np.float32(np.nan), jnp.where(none, np.float32(0), jnp.sqrt(error / norm)))
    shares = jnp.stack(counts) / jnp.maximum(seen * of_block, np.float32(1))
    return jnp.concatenate([jnp.ones(1, jnp.float32), shares, jnp.stack([relative, largest])])
