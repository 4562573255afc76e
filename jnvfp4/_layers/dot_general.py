"""``dot_general`` and ``DotGeneral``: products in the notation of ``jax.lax``, through ``linear``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._core.mesh import Axes, Placement, axes_of_dims
from .._core.tensor import NVFP4Tensor
from .._ops.arguments import operation
from ..recipes import DEFAULT, Recipe
from .gather import as_pair
from .keys import check_path, key_of_product
from .layer import Call, multiply
from .linear import Dense
from .stats import SHAPE, probe_of
from .weights import LayerChecks, QuantizedWeight, WeightAxes, Weights


@operation
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: object = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    recipe: Recipe = DEFAULT,
    key: jax.Array | None = None,
    w_gather: tuple[Placement, Placement] | None = None,
    w_amax: ArrayLike | None = None,
    stats: jax.Array | None = None,
    **unsupported: object,
) -> jax.Array:
    """Computes ``jax.lax.dot_general`` through ``linear``: for model code that takes a ``dot_general`` argument.

    Args:
      lhs: the activations (x of the recipe), float32, bfloat16 or float16, of any rank. Several contracting axes count
        as one of the size K. Each example of the batch axes has its own amax.
      rhs: the weights (w of the recipe), of the same dtypes and any rank. If its axes are in the order of Flax (batch,
        contracting, free), it is read as it is (``linear(..., w_axes="kn")``). Otherwise, or if the recipe rounds w
        stochastically, it is transposed to [N, K] first.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: only None or the default, because the operands are quantized.
      preferred_element_type: float32, bfloat16 or float16; the dtype of ``lax.dot_general`` if None.
      out_sharding: how the result is sharded over an Explicit mesh. If it is None, the rows have the sharding of lhs
        and the columns that of rhs.
      recipe: as in ``linear``.
      key: as in ``linear``; it is split over the batch axes.
      w_gather: as in ``linear``, by the axes of rhs. Only the first of several axes that are flattened into one may be
        sharded. A batch axis has the same sharding in both.
      w_amax: as in ``linear``, with the batch axes of rhs: one for each example.
      stats: as in ``linear``, where each example of the batch axes counts as a call.
      **unsupported: newer arguments of ``lax.dot_general``; each must be None.

    Returns:
      An array [*batch, *lhs free, *rhs free] of that dtype, as ``lax.dot_general`` returns it. It is differentiable.

    Raises:
      ValueError, TypeError: operands or arguments do not fit; the message names them.
    """
    check = LayerChecks("dot_general", recipe)
    check_options(check.op, precision, out_sharding, unsupported)
    w_gather = as_pair(check.op, w_gather)
    options = DotOptions(key, preferred_element_type, out_sharding, w_gather, w_amax, stats=stats)
    return contract(check, lhs, rhs, dimension_numbers, options)


class DotOptions(NamedTuple):
    """Holds what a product takes beside its operands and its recipe."""

    key: jax.Array | None = None
    dtype: DTypeLike | None = None  # of the result; that of lax.dot_general if None
    out_sharding: Placement | None = None
    w_gather: tuple[Placement, Placement] | None = None  # by the axes of the weights
    w_amax: ArrayLike | None = None
    pad: bool | None = None  # as in DotGeneral; None adds no zeros, also where the recipe needs them
    stats: jax.Array | None = None


def check_options(op: str, precision: object, out_sharding: object, unsupported: Mapping[str, object]) -> None:
    """Checks the arguments that ``lax.dot_general`` has too, and refuses those that mean nothing here."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in (None, "default", lax.Precision.DEFAULT) for p in precisions):
        raise ValueError(
            f"{op}: precision must be None or 'default', got {precision!r}; operands that are quantized have no other, "
            "so leave it out, or keep the layer in high precision (a Rule with recipe None)"
        )
    if out_sharding is not None and not isinstance(out_sharding, NamedSharding | PartitionSpec):
        raise TypeError(f"{op}: out_sharding must be a NamedSharding, a PartitionSpec or None, got {out_sharding!r}")
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{op}: {name} must be None, got {value!r}")


def contract(
    check: LayerChecks,
    lhs: ArrayLike,
    rhs: ArrayLike | NVFP4Tensor | QuantizedWeight,
    dimension_numbers: lax.DotDimensionNumbers,
    options: DotOptions,
) -> jax.Array:
    """Computes ``dot_general``."""
    op, recipe = check.op, check.recipe
    if isinstance(rhs, NVFP4Tensor | QuantizedWeight):
        kind = type(rhs).__name__
        got = "an NVFP4Tensor" if kind == "NVFP4Tensor" else kind
        raise TypeError(f"{op}: rhs must be an array, got {got}; jnvfp4.linear takes one as w")
    a, b = check.float_array("lhs", lhs), check.float_array("rhs", rhs)
    dtype = dtype_of_lax(a, b) if options.dtype is None else options.dtype
    out_dtype = check.float_dtype("preferred_element_type", dtype)
    (lc, rc), (lb, rb) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
    left, right = _axes_of(op, "lhs", a, lc, lb), _axes_of(op, "rhs", b, rc, rb)
    for kind, left_axes, right_axes in (("contracting", lc, rc), ("batch", lb, rb)):
        if [a.shape[i] for i in left_axes] != [b.shape[i] for i in right_axes]:
            raise ValueError(
                f"{op}: {kind} axes must have the same sizes, got axes {left_axes} of "
                f"lhs.shape={a.shape} and axes {right_axes} of rhs.shape={b.shape}"
            )
    in_flax_order = right.batch + right.contracting + right.free == tuple(range(b.ndim))
    w_axes: WeightAxes = "kn" if in_flax_order and not _draws_for_w(recipe) else "nk"
    call = Call(op, recipe, Weights(w_axes), Dense, out_dtype)
    x = _flattened(op, a, left.batch, *((i,) for i in left.free), left.contracting)
    groups = right[1:] if w_axes == "kn" else right[:0:-1]
    w = _flattened(op, b, right.batch, *groups)
    w_gather = _of_matrix(op, options.w_gather, right.batch, groups)
    w_amax = _of_examples(check, options.w_amax, b, right.batch)
    n = math.prod(b.shape[i] for i in right.free)
    if options.pad is not None:
        x, w = padded(x, w, w_axes, *recipe.units_of(options.pad))
    if lb:  # each matrix of x [B, M, K] and its own of w have a key of their own
        if options.stats is not None and getattr(options.stats, "shape", SHAPE) != SHAPE:
            raise ValueError(f"{call.op}: stats must have shape {SHAPE} with batch axes, got {options.stats.shape}")
        key = call.needed_key(options.key)
        keys = None if key is None else jax.random.split(key, x.shape[0])

        def one(x: jax.Array, w: jax.Array, key: jax.Array | None, amax: jax.Array | None) -> jax.Array:
            return multiply(call, x, w, key, w_gather, w_amax=amax, stats=options.stats)

        out = jax.vmap(one)(x, w, keys, w_amax)
    else:
        out = multiply(call, x[0], w[0], options.key, w_gather, w_amax=w_amax, stats=options.stats)
    if out.shape[-1] != n:
        out = lax.slice_in_dim(out, 0, n, axis=-1)
    of_x = [(a.shape[i],) for i in left.free]
    out = _split(out, *([tuple(a.shape[i] for i in lb)] if lb else []), *of_x, tuple(b.shape[i] for i in right.free))
    return out if options.out_sharding is None else jax.sharding.reshard(out, options.out_sharding)


def _of_matrix(
    op: str, pair: tuple[Placement, Placement] | None, batch: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[Placement, Placement] | None:
    """Turns shardings by the axes of rhs into those of the matrix whose axes are the groups."""
    if pair is None:
        return None
    specs = [sharding.spec if isinstance(sharding, NamedSharding) else sharding for sharding in pair]
    ndim = sum(map(len, (batch, *groups)))
    if any(len(spec) > ndim for spec in specs):
        raise ValueError(f"{op}: w_gather must have at most {ndim} entries, one for each axis of rhs, got {pair}")
    entries = [dict(enumerate(spec)) for spec in specs]
    late = [i for group in (batch, *groups) for i in group[1:]]
    if any(found.get(i) is not None for found in entries for i in late):
        raise ValueError(
            f"{op}: w_gather may shard only the first of several axes that are flattened into one, got {pair} with the "
            f"groups of axes {groups}"
        )
    if any(entries[0].get(i) != entries[1].get(i) for i in batch):
        raise ValueError(f"{op}: w_gather must not gather the batch axes {batch}, got {pair}")
    flat = [PartitionSpec(*(found.get(group[0]) if group else None for group in groups)) for found in entries]
    placed = [
        NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
        for sharding, spec in zip(pair, flat, strict=True)
    ]
    return placed[0], placed[1]


def _of_examples(check: LayerChecks, amax: ArrayLike | None, w: jax.Array, batch: tuple[int, ...]) -> jax.Array | None:
    """Flattens the batch axes of an amax."""
    if amax is None:
        return None
    array, wanted = check.amax(amax), tuple(w.shape[i] for i in batch)
    if array.shape != wanted:
        raise ValueError(f"{check.op}: w_amax must have the batch axes of rhs, {wanted}, got shape {array.shape}")
    return array.reshape(-1) if batch else array


def padded(x: jax.Array, w: jax.Array, w_axes: WeightAxes, unit_n: int, unit_k: int) -> tuple[jax.Array, jax.Array]:
    """Adds zeros to x [..., K] and w up to multiples of the units: they add nothing to a sum or to an amax."""
    k, n = x.shape[-1], w.shape[-1 if w_axes == "kn" else -2]
    more_k, more_n = -k % unit_k, -n % unit_n
    return _with_zeros(x, 0, more_k), _with_zeros(w, *((more_k, more_n) if w_axes == "kn" else (more_n, more_k)))


def _with_zeros(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Adds zeros at the end of the last two axes."""
    if not rows and not columns:
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, rows), (0, columns)))


@dataclass(frozen=True)
class LayerProduct:
    """Holds how a layer of a model multiplies; ``DotGeneral`` says what its attributes are."""

    recipe: Recipe = DEFAULT
    path: str | None = None
    w_gather: tuple[Placement, Placement] | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        LayerChecks(kind, self.recipe)
        as_pair(kind, self.w_gather)
        check_path(kind, self.path)

    def checks(self, precision: object, out_sharding: object, unsupported: Mapping[str, object]) -> LayerChecks:
        """Checks arguments of a call, and returns what checks the others."""
        kind = type(self).__name__
        op = kind if self.path is None else f"{kind} of layer {self.path!r}"
        check_options(op, precision, out_sharding, unsupported)
        return LayerChecks(op, self.recipe)

    def key_or_own(self, check: LayerChecks, key: jax.Array | None) -> jax.Array | None:
        """Returns a key that is passed, or that of the layer."""
        return key_of_product(check.op, type(self).__name__, self.path, check.recipe) if key is None else key

    @property
    def probe(self) -> jax.Array | None:
        """Returns the probe of the layer, where its statistics are collected."""
        return probe_of(self.path)


class DotGeneral(LayerProduct):
    """Stands in for ``jax.lax.dot_general`` where model code takes one, and multiplies by a recipe.

    It holds no arrays and compares by value, so it can be an attribute of a module or a static argument of jit.

    Attributes:
      recipe: how each GEMM quantizes its operands.
      path: the name of the layer in its model, such as "block_3/mlp/up", which a layer that rounds stochastically folds
        into the key of ``step_key`` where no key is passed.
      w_gather: as in ``jnvfp4.dot_general``.
      pad: whether K and N become multiples of 16 even where the recipe needs none.
    """

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        key: jax.Array | None = None,
        w_amax: ArrayLike | None = None,
        **unsupported: object,
    ) -> jax.Array:
        """Computes ``jnvfp4.dot_general``, with zeros added where K or N is no multiple of what the recipe needs.

        The zeros change no value that the operands hold: they are never an amax, and they add nothing to a sum.
        Arguments, result and errors are those of ``jnvfp4.dot_general``, but where ``key`` is None and the recipe
        rounds stochastically, the key is that of ``step_key``, with the path folded in.
        """
        check = self.checks(precision, out_sharding, unsupported)
        key = self.key_or_own(check, key)
        options = DotOptions(key, preferred_element_type, out_sharding, self.w_gather, w_amax, self.pad, self.probe)
        return contract(check, lhs, rhs, dimension_numbers, options)


def dtype_of_lax(a: jax.Array, b: jax.Array) -> np.dtype:
    """Returns the dtype of lax.dot_general, which promotes also where jax.numpy_dtype_promotion is strict."""
    vectors = (jax.ShapeDtypeStruct((1,), v.dtype) for v in (a, b))
    return jax.eval_shape(lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))), *vectors).dtype


class _Axes(NamedTuple):
    """Holds the axes of an operand of ``dot_general`` by role."""

    batch: tuple[int, ...]
    contracting: tuple[int, ...]
    free: tuple[int, ...]


def _axes_of(op: str, name: str, array: jax.Array, contracting: tuple[int, ...], batch: tuple[int, ...]) -> _Axes:
    free = tuple(i for i in range(array.ndim) if i not in contracting and i not in batch)
    if len(free) + len(contracting) + len(batch) != array.ndim:
        raise ValueError(
            f"{op}: contracting {contracting} and batch {batch} axes must be distinct axes of {name}, "
            f"got {name}.shape={array.shape}"
        )
    return _Axes(batch, contracting, free)


def _flattened(op: str, array: jax.Array, *groups: tuple[int, ...]) -> jax.Array:
    """Transposes to the order of the groups of axes and makes each one axis."""
    axes = axes_of_dims(jax.typeof(array))
    if any(axes[i] is not None for group in groups for i in group[1:]):
        raise ValueError(
            f"{op}: an Explicit mesh may shard only the first of several axes that are flattened into one, got "
            f"{jax.typeof(array)} with the groups of axes {groups}; reshard it first"
        )
    sizes = [math.prod(array.shape[i] for i in group) for group in groups]
    moved = array.transpose([axis for group in groups for axis in group])
    return _reshaped(moved, sizes, [axes[group[0]] if group else None for group in groups])


def _split(array: jax.Array, *sizes: tuple[int, ...]) -> jax.Array:
    """Splits each axis into several, of which the first keeps the sharding."""
    axes = axes_of_dims(jax.typeof(array))
    split = [[entry, *(None,) * (len(parts) - 1)][: len(parts)] for entry, parts in zip(axes, sizes, strict=True)]
    return _reshaped(array, [n for parts in sizes for n in parts], [entry for parts in split for entry in parts])


def _reshaped(array: jax.Array, sizes: list[int], axes: Axes) -> jax.Array:
    """Reshapes to ``sizes``; on an Explicit mesh JAX must be told the sharding of merged and split axes."""
    if not any(entry is not None for entry in axes):
        return array.reshape(sizes)
    sharding = NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec(*axes))
    return lax.reshape(array, sizes, out_sharding=sharding)


def _draws_for_w(recipe: Recipe) -> bool:
    """Says whether w is rounded stochastically; its random bits are then those of w [N, K]."""
    return any(spec is not None and spec.rounding == "stochastic" for spec in recipe.weight_specs)
