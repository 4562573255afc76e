"""Equinox: ``apply`` quantizes the ``equinox.nn.Linear`` layers of a model. Needs equinox 0.13."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ._core.tensor import PyTree
from ._layers.dot_general import DotGeneral
from ._layers.keys import key_of_layer
from ._native.compat import is_mapped
from .policy import Layer, Policy, check_policy, depths_of, is_weight, layers_of, path_of_parameter

__all__ = ["Linear", "apply"]

Model = TypeVar("Model")
Kinds: TypeAlias = dict[type, Callable[[tuple, Any], Layer] | None]  # what describes a module, if it multiplies


class Linear(eqx.nn.Linear):
    """Multiplies as ``equinox.nn.Linear`` does, by a recipe; ``apply`` makes it.

    ``jax.vmap`` over tokens, once or several times, makes one product of all of them, with one amax, as
    ``jnvfp4.linear`` of x [..., K] does. A vmap around ``jax.lax.scan``, ``jax.checkpoint`` or ``jax.jit`` is not seen
    within: there each example has its own amax, and its own gradient of the weights until they are summed.

    Attributes:
      product: the ``jnvfp4.DotGeneral`` that multiplies, with the recipe and the path of the layer.
    """

    product: DotGeneral = eqx.field(static=True)

    def __init__(self, layer: eqx.nn.Linear, product: DotGeneral) -> None:
        """Takes the weights of a layer."""
        for name, value in _fields(layer).items():
            setattr(self, name, value)
        self.product = product

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Computes weight x + bias for one token x [in_features]; ``key`` is ignored, as Equinox does."""
        y = _of_tokens(self.product, x, self.weight, key_of_layer(str(self.product.path), self.product.recipe))
        return y if self.bias is None else y + self.bias


def apply(model: Model, policy: Policy) -> Model:
    """Returns a model whose ``equinox.nn.Linear`` layers multiply by a policy.

    Those of ``equinox.nn.MLP`` and ``MultiheadAttention`` are among them. A warning names convolutions, subclasses of
    ``equinox.nn.Linear`` and weights of other modules that the policy would quantize and this function cannot.

    Args:
      model: an Equinox module or tree. If a policy was applied before, this one replaces it.
      policy: which layers are quantized, and how. Paths are as in the tree: "layers/3/up".

    Returns:
      A copy of the model with the same weights. Their names and shapes do not change. Make the state of an optimizer
      from this copy, because its tree has other types of modules than that of the model.

    Raises:
      ValueError: as in ``Policy.plan``.
      TypeError: policy is not a Policy.
    """
    check_policy("apply", policy)
    layers = list(layers_in(model, _OF_EQUINOX))
    plan, depths = policy.plan(layers), depths_of(layers)
    for layer in layers:
        if layer.reason is not None:
            policy.warn("apply", layer, depths)

    def replaced(keys: tuple, node: PyTree) -> PyTree:
        path = path_of(keys)
        recipe = plan[path].recipe if type(node) in (eqx.nn.Linear, Linear) else None
        if recipe is None:
            return _plain(node) if isinstance(node, Linear) else node
        return Linear(node, DotGeneral(recipe, path, **policy.options_of(path)))

    return jax.tree_util.tree_map_with_path(replaced, model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))


# ---------------------------------------------------------------- the product
def _of_tokens(dot: DotGeneral, x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
    """Multiplies x [*tokens, K] by w [N, K]; of a vmap over tokens, which is the innermost transformation, at once."""

    def product(x: jax.Array, w: jax.Array, key: jax.Array | None) -> jax.Array:
        return dot(x, w, (((x.ndim - 1,), (1,)), ((), ())), key=key)

    # A derivative of what a custom_vmap returns is unknown to JAX. Here the mapping comes after it, and goes first.
    if not is_mapped(x, w, key):
        return product(x, w, key)
    mapped = jax.custom_batching.custom_vmap(product)

    @mapped.def_vmap
    def rule(_: int, in_batched: list, x: jax.Array, w: jax.Array, key: jax.Array | None) -> tuple[jax.Array, bool]:
        over_x, *others = in_batched
        if over_x and not any(others):
            return _of_tokens(dot, x, w, key), True
        return jax.vmap(product, [0 if over else None for over in in_batched])(x, w, key), True  # several models

    return mapped(x, w, key)


# ---------------------------------------------------------------- what a model consists of
def layers_in(model: PyTree, kinds: Kinds) -> Iterator[Layer]:
    """Lists the modules of a model that are of some kinds, and other arrays that may multiply."""
    for keys, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, tuple(kinds))):
        describe = next((of for kind, of in kinds.items() if isinstance(node, kind)), _own)
        if describe is not None and (layer := describe(keys, node)) is not None:
            yield layer


def path_of(keys: tuple) -> str:
    """Returns the path of a module of a tree."""
    return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in keys)


def _layer(keys: tuple, linear: eqx.nn.Linear) -> Layer:
    *counted, n, k = linear.weight.shape
    reason = None
    if type(linear) not in (eqx.nn.Linear, Linear):
        reason = f"of type {type(linear).__name__}, which jnvfp4 does not quantize"
    elif "scalar" in (linear.in_features, linear.out_features):
        reason = "of a scalar"
    return Layer(path_of(keys), linear.weight.shape, (n, k), bool(counted), reason)


def _convolution(keys: tuple, module: eqx.nn.Conv | eqx.nn.ConvTranspose) -> Layer:
    reason = f"of type {type(module).__name__}, which jnvfp4 does not quantize"
    return Layer(path_of(keys), module.weight.shape, reason=reason)


def _own(keys: tuple, array: Any) -> Layer | None:
    """Describes an array of a module that is no layer, if it may be weights."""
    if not (eqx.is_inexact_array_like(array) and keys and is_weight(path_of(keys[-1:]), jnp.shape(array))):
        return None
    path = path_of_parameter(path_of(keys[:-1]), path_of(keys[-1:]))
    return Layer(path, jnp.shape(array), reason="not of equinox.nn.Linear; jnvfp4.linear in its module quantizes it")


_OTHERS = (eqx.nn.Embedding, eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm, eqx.nn.PReLU)
_OF_EQUINOX: Kinds = {
    eqx.nn.Linear: _layer,
    eqx.nn.Conv: _convolution,
    eqx.nn.ConvTranspose: _convolution,
    **dict.fromkeys(_OTHERS),
}
KINDS = dict(_OF_EQUINOX)
"""How modules are described, by their types; ``jnvfp4.haliax`` adds its own."""


@layers_of.register(eqx.Module)
def _layers_of_module(model: eqx.Module, *_: object, **__: object) -> list[Layer]:
    """Lists the layers of a model, whose inputs tell nothing more."""
    return list(layers_in(model, KINDS))


def _fields(layer: eqx.nn.Linear) -> dict[str, Any]:
    names = ("weight", "bias", "in_features", "out_features", "use_bias")
    return {name: getattr(layer, name) for name in names}


def _plain(layer: Linear) -> eqx.nn.Linear:
    """Returns the plain layer of Equinox, whose constructor would draw new weights."""
    plain = object.__new__(eqx.nn.Linear)
    for name, value in _fields(layer).items():
        object.__setattr__(plain, name, value)
    return plain
