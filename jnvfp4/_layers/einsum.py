"""``einsum`` of activations and weights: the einsums that are a ``dot_general`` and a transposition of its result."""

import math
from collections import Counter
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._core.mesh import Placement
from .._ops.arguments import operation
from ..recipes import DEFAULT, Recipe
from .dot_general import DotOptions, LayerProduct, check_options, contract
from .gather import as_pair
from .weights import LayerChecks

_ELLIPSIS = "..."
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Contraction(NamedTuple):
    """Holds an einsum as the arguments of ``dot_general`` and the order of the axes of its result."""

    dimension_numbers: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
    order: tuple[int, ...]


@operation
def einsum(
    subscripts: str,
    x: ArrayLike,
    w: ArrayLike,
    *,
    recipe: Recipe = DEFAULT,
    key: jax.Array | None = None,
    precision: object = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    w_gather: tuple[Placement, Placement] | None = None,
    w_amax: ArrayLike | None = None,
    stats: jax.Array | None = None,
) -> jax.Array:
    """Computes ``jnp.einsum`` of activations and weights through ``linear``.

    Args:
      subscripts: those of an einsum with two operands that is a product: each letter occurs once in an operand, at
        least one letter is in both operands and not in the result, and a letter that the result leaves out is in both.
        A letter in all three is a batch axis, for each example of which there is an amax. The result may have any order
        of axes. An ellipsis stands for the same axes everywhere, and without "->" the result is as in ``jnp.einsum``.
      x: the activations (x of the recipe), float32, bfloat16 or float16. They come first in ``subscripts``, too: where
        the weights do, swap both.
      w: the weights (w of the recipe), of the same dtypes. They are transposed in memory unless their axes have the
        order batch, contracting, free, or batch, free, contracting.
      recipe: as in ``linear``.
      key: as in ``dot_general``.
      precision: as in ``dot_general``.
      preferred_element_type: as in ``dot_general``.
      out_sharding: as in ``dot_general``, of the result in the order of ``subscripts``.
      w_gather: as in ``dot_general``, by the axes of w.
      w_amax: as in ``dot_general``.
      stats: as in ``dot_general``.

    Returns:
      The array of ``jnp.einsum``. Where K or N is no multiple of what the recipe needs, zeros are added inside.

    Raises:
      ValueError, TypeError: the einsum is no product of two operands, or an argument does not fit.
    """
    check = LayerChecks("einsum", recipe)
    check_options(check.op, precision, out_sharding, {})
    w_gather = as_pair(check.op, w_gather)
    options = DotOptions(key, preferred_element_type, out_sharding, w_gather, w_amax, pad=False, stats=stats)
    return contract_einsum(check, subscripts, x, w, options)


def contract_einsum(check: LayerChecks, subscripts: str, x: ArrayLike, w: ArrayLike, options: DotOptions) -> jax.Array:
    """Computes ``einsum``."""
    x, w = check.float_array("x", x), check.float_array("w", w)
    found, sharding = contraction(check.op, subscripts, x.ndim, w.ndim), options.out_sharding
    product = contract(check, x, w, found.dimension_numbers, options._replace(out_sharding=None))
    result = product.transpose(found.order)
    return result if sharding is None else jax.sharding.reshard(result, sharding)


class Einsum(LayerProduct):
    """Stands in for ``jnp.einsum`` of activations and weights, and multiplies by a recipe."""

    def __call__(
        self,
        subscripts: str,
        x: ArrayLike,
        w: ArrayLike,
        *,
        key: jax.Array | None = None,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Placement | None = None,
        **unsupported: object,
    ) -> jax.Array:
        """Computes ``jnvfp4.einsum``, with the key of the layer if none is passed."""
        check = self.checks(precision, out_sharding, unsupported)
        key = self.key_or_own(check, key)
        options = DotOptions(key, preferred_element_type, out_sharding, self.w_gather, None, self.pad, self.probe)
        return contract_einsum(check, subscripts, x, w, options)


def contraction(op: str, subscripts: str, x_ndim: int, w_ndim: int) -> Contraction:
    """Reads the subscripts of an einsum; raises where it is no ``dot_general``."""
    if not isinstance(subscripts, str):
        raise TypeError(f"{op}: subscripts must be a string such as 'bsd,df->bsf', got {subscripts!r}")
    x, w, out = _spelled_out(op, subscripts, x_ndim, w_ndim)
    for name, letters in (("x", x), ("w", w), ("the result", out)):
        if repeated := [letter for letter, count in Counter(letters).items() if count > 1]:
            raise _refusal(op, f"{name} must have each letter once, got {repeated[0]!r} twice", subscripts)
    if unknown := set(out) - set(x) - set(w):
        raise _refusal(op, f"the result must have letters of x or w, got {min(unknown)!r}", subscripts)
    if summed := (set(x) ^ set(w)) - set(out):
        raise _refusal(
            op, f"a letter of one operand alone must be in the result, got {min(summed)!r}; sum it first", subscripts
        )
    batch = [letter for letter in w if letter in x and letter in out]
    contracting = [letter for letter in w if letter in x and letter not in out]
    if not contracting:
        raise _refusal(op, "x and w must share a letter that the result leaves out, got none", subscripts)
    made = [*batch, *(v for v in x if v in out and v not in batch), *(v for v in w if v in out and v not in batch)]
    contracted, batched = (
        (tuple(map(x.index, letters)), tuple(map(w.index, letters))) for letters in (contracting, batch)
    )
    return Contraction((contracted, batched), tuple(map(made.index, out)))


def sizes_of(subscripts: str, x_ndim: int, w_shape: tuple[int, ...]) -> tuple[tuple[int, int] | None, str | None]:
    """Returns N and K of an einsum, or why it is no product."""
    try:
        found = contraction("einsum", subscripts, x_ndim, len(w_shape))
    except ValueError as error:
        return None, str(error)
    (_, contracted), (_, batch) = found.dimension_numbers
    free = math.prod(size for axis, size in enumerate(w_shape) if axis not in (*contracted, *batch))
    return (free, math.prod(w_shape[axis] for axis in contracted)), None


def _refusal(op: str, what: str, subscripts: str) -> ValueError:
    return ValueError(f"{op}: {what} in {subscripts!r}")


def _spelled_out(op: str, subscripts: str, x_ndim: int, w_ndim: int) -> tuple[str, str, str]:
    """Returns the letters of x, w and the result, with letters for an ellipsis."""
    text = subscripts.replace(" ", "")
    operands, arrow, out = text.partition("->")
    terms = operands.split(",")
    if len(terms) != 2:
        raise _refusal(op, f"subscripts must have two operands, got {len(terms)}", subscripts)
    if not arrow:
        counts = Counter(operands.replace(_ELLIPSIS, "").replace(",", ""))
        once = "".join(sorted(letter for letter, count in counts.items() if count == 1))
        out = (_ELLIPSIS if _ELLIPSIS in operands else "") + once
    free = [letter for letter in _LETTERS if letter not in text]
    hidden = [ndim - len(term.replace(_ELLIPSIS, "")) for term, ndim in zip(terms, (x_ndim, w_ndim), strict=True)]
    counts_of = [more for term, more in zip(terms, hidden, strict=True) if _ELLIPSIS in term]
    if len(set(counts_of)) > 1:
        raise _refusal(op, f"an ellipsis must stand for the same axes of x and w, got {counts_of} axes", subscripts)
    for name, term, more, ndim in zip("xw", terms, hidden, (x_ndim, w_ndim), strict=True):
        if more < 0 or (more > 0 and _ELLIPSIS not in term):
            raise _refusal(op, f"{name} must have one axis a letter of {term!r}, got {ndim} axes", subscripts)
    letters = "".join(free[: counts_of[0]]) if counts_of else ""
    x, w, out = (term.replace(_ELLIPSIS, letters) for term in (*terms, out))
    if bad := [letter for letter in x + w + out if letter not in _LETTERS]:
        raise _refusal(op, f"subscripts must consist of letters, got {bad[0]!r}", subscripts)
    return x, w, out
