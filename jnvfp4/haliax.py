"""haliax and Levanter: ``DotGeneral`` for a ``Linear``, ``apply`` for a whole model."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax.quantization import DotGeneralOp

from ._core.mesh import Placement
from ._core.tensor import PyTree
from ._layers.dot_general import DotGeneral as _DotGeneral
from .equinox import KINDS, Kinds, layers_in, path_of
from .policy import Layer, Policy, check_policy
from .recipes import DEFAULT, Recipe

__all__ = ["DotGeneral", "apply"]

Model = TypeVar("Model")


class DotGeneral(eqx.Module):
    """Makes a module of a ``jnvfp4.DotGeneral``, by the protocol ``haliax.quantization.DotGeneralOp``.

    Its arguments are those of ``jnvfp4.DotGeneral``.

    Attributes:
      product: the ``jnvfp4.DotGeneral`` that multiplies; ``apply`` sets its path.
    """

    product: _DotGeneral = eqx.field(static=True)

    def __init__(
        self,
        recipe: Recipe = DEFAULT,
        path: str | None = None,
        w_gather: tuple[Placement, Placement] | None = None,
        pad: bool = False,
    ) -> None:
        self.product = _DotGeneral(recipe, path, w_gather, pad)

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, *args: Any, **options: Any
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general`` of activations and weights."""
        return self.product(lhs, rhs, dimension_numbers, *args, **options)


def apply(model: Model, policy: Policy) -> Model:
    """Returns a model whose ``haliax.nn.Linear`` layers multiply by a policy; also those that are ``Stacked``.

    Args:
      model: an Equinox module or tree, such as a Levanter model. If a policy was applied before, this one replaces it.
      policy: which layers are quantized, and how. Paths are as in the tree: "transformer/layers/mlp/up_proj".

    Returns:
      A copy of the model with the same weights. Their names and shapes do not change. Make the state of an optimizer
      from this copy, because its tree has other types of modules than that of the model.

    Raises:
      ValueError: as in ``Policy.plan``.
    """
    check_policy("apply", policy)
    plan = policy.plan(layers_in(model, _OF_HALIAX))

    def replaced(keys: tuple, node: PyTree) -> PyTree:
        path = _path(keys)
        recipe = plan[path].recipe if isinstance(node, hnn.Linear) else None
        if recipe is None:
            ours = isinstance(node, hnn.Linear) and isinstance(node.dot_general, DotGeneral)
            return dataclasses.replace(node, dot_general=DotGeneralOp.default()) if ours else node
        return dataclasses.replace(node, dot_general=DotGeneral(recipe, path, **policy.options_of(path)))

    return jax.tree_util.tree_map_with_path(replaced, model, is_leaf=lambda node: isinstance(node, hnn.Linear))


def _layer(keys: tuple, linear: hnn.Linear) -> Layer:
    n, k = (math.prod(axis.size for axis in _axes(of)) for of in (linear.Out, linear.In))
    shape = tuple(axis.size for axis in linear.weight.axes)
    own = {axis.name for axis in (*_axes(linear.In), *_axes(linear.Out))}
    return Layer(_path(keys), shape, (n, k), any(axis.name not in own for axis in linear.weight.axes))


def _axes(axes: hax.Axis | Sequence[hax.Axis]) -> tuple[hax.Axis, ...]:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _path(keys: tuple) -> str:
    return "/".join(part for part in path_of(keys).split("/") if part != "stacked")


_OF_HALIAX: Kinds = {hnn.Linear: _layer, hax.NamedArray: None}
KINDS.update(_OF_HALIAX)  # at last: of a module whose import fails nothing stays
