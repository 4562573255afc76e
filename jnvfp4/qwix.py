"""Qwix: ``Provider`` quantizes by a policy what ``qwix.quantize_model`` intercepts. Needs qwix 0.1.8 and Flax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen as nn
from flax import nnx as flax_nnx
from qwix._src.utils import flax_util

from ._core.tensor import PyTree
from ._layers.dot_general import DotGeneral
from ._layers.einsum import einsum_of_layer, sizes_of
from ._layers.keys import key_of_layer
from ._layers.weights import WeightAxes
from .flax import linen, nnx
from .flax._experts import Experts, intercepted, product_of
from .policy import Layer, Policy, check_policy, depths_of, path_of_parameter
from .recipes import Recipe

__all__ = ["Provider"]

Found = tuple[Recipe, str, dict[str, Any], int]  # what _layer returns


class Provider(qwix.QuantizationProvider):
    """Quantizes a model by a policy: ``qwix.quantize_model(model, Provider(policy), ...)``.

    A product is quantized if one of its operands is a parameter of the module that is being called; products of two
    activations never are. Paths are those of modules, as in the rules of Qwix; experts, which ``jax.lax.ragged_dot``
    multiplies by, have the name of their parameter too: "layers/3/moe/up". A recipe that rounds stochastically
    takes its keys from ``jnvfp4.step_key``, or from ``rngs={'sr': key}`` of a Linen model. ``quantize_model`` calls an
    NNX model once, which needs a key too.

    Args:
      policy: which layers are quantized, and how.

    Raises:
      TypeError: policy is not a Policy.
    """

    def __init__(self, policy: Policy) -> None:
        check_policy("Provider", policy)
        super().__init__(rules=[])
        self.policy = policy
        self.depths: Mapping[str, int] = {}
        self.parameters = Experts()

    def get_intercept_map(self) -> dict[str, Callable]:
        """Returns the functions that Qwix replaces, by name."""
        ours = {"jax.lax.dot_general": self.dot_general, "jax.numpy.einsum": self.einsum}
        of_jax: dict[str, Callable] = {
            "ragged_dot": jax.lax.ragged_dot,
            "ragged_dot_general": jax.lax.ragged_dot_general,
        }
        experts = {f"jax.lax.{name}": function for name, function in intercepted(self.experts, of_jax).items()}
        return super().get_intercept_map() | ours | experts

    def process_model_inputs(
        self, model: nn.Module | flax_nnx.Module, model_args: Sequence[PyTree], model_kwargs: dict[str, PyTree]
    ) -> tuple[nn.Module | flax_nnx.Module, Sequence[PyTree], dict[str, PyTree]]:
        """Checks the policy against the model before a call of it."""
        if isinstance(model, flax_nnx.Module):
            layers = [layer._replace(reason=None) for _, layer in nnx.layers_in(model)]
        else:
            layers = [] if model.is_initializing() else linen.layers_of_params(model)
        if layers:
            self.policy.plan(layers)  # for its checks
        self.depths, self.parameters = depths_of(layers), Experts()
        return super().process_model_inputs(model, model_args, model_kwargs)

    def dot_general(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, *args: Any, **options: Any
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general``, quantized if an operand is a parameter."""
        found = self._layer(lhs, rhs)
        if found is None:
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)
        recipe, path, of_w, side = found
        product, key = DotGeneral(recipe, path, **of_w), self._key(recipe, path)
        if side == 1:
            return product(lhs, rhs, dimension_numbers, *args, key=key, **options)
        contracted, batch = ((of_rhs, of_lhs) for of_lhs, of_rhs in dimension_numbers)
        sharding = options.pop("out_sharding", None)
        flipped = product(rhs, lhs, (contracted, batch), *args, key=key, **options)
        batches, free = len(batch[0]), lhs.ndim - len(contracted[1]) - len(batch[1])  # of the weights, which come last
        result = jnp.moveaxis(flipped, range(flipped.ndim - free, flipped.ndim), range(batches, batches + free))
        return result if sharding is None else jax.sharding.reshard(result, sharding)

    def einsum(self, subscripts: str, *operands: jax.Array, **options: Any) -> jax.Array:
        """Computes ``jnp.einsum``, quantized if it is a product and an operand is a parameter."""
        known = {"precision", "preferred_element_type", "out_sharding"}
        simple = isinstance(subscripts, str) and len(operands) == 2
        found = self._layer(*operands) if simple and not set(options) - known else None
        if found is None:
            return jnp.einsum(subscripts, *operands, **options)
        recipe, path, of_w, side = found
        x, w = operands if side == 1 else operands[::-1]
        of_x_and_w = subscripts if side == 1 else _flipped(subscripts)
        if sizes_of(of_x_and_w, jnp.ndim(x), jnp.shape(w))[0] is None:  # no product of two operands
            return jnp.einsum(subscripts, *operands, **options)
        return einsum_of_layer(path, of_x_and_w, x, w, recipe, self._key(recipe, path), **of_w, **options)

    def experts(
        self, call: Callable, w_axes: WeightAxes, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any
    ) -> jax.Array:
        """Computes ``jax.lax.ragged_dot``, quantized if its weights are a parameter."""
        module = flax_util.get_current_module()
        if not isinstance(module, nn.Module):
            path = "/".join(map(str, flax_util.get_current_module_path()))
            layers = self.parameters.layers(module, path, nnx.parameters_of(module), rhs, w_axes)
        elif module.scope is None or module.is_initializing():
            return call(lhs, rhs, *args, **options)
        else:
            layers = linen.experts_of(self.parameters, module, rhs, w_axes, {})
        product = product_of(self.policy, self.depths, layers)
        if product is None:
            return call(lhs, rhs, *args, **options)
        key = self._key(product.recipe, layers[0].path)
        return product(lhs, rhs, *args, key=key, w_axes=w_axes, **options)

    def _layer(self, lhs: jax.Array, rhs: jax.Array) -> Found | None:
        """Returns the recipe, path and options, and which operand holds the weights; None for other products."""
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module) and (module.scope is None or module.is_initializing()):
            return None
        names = [flax_util.find_param(operand) for operand in (lhs, rhs)]
        if (names[0] is None) == (names[1] is None):
            return None
        side = 0 if names[1] is None else 1
        is_linen = isinstance(module, nn.Module)
        path = linen.path_of(module) if is_linen else "/".join(map(str, flax_util.get_current_module_path()))
        layer = Layer(path, tuple((lhs, rhs)[side].shape))
        recipe = self.policy.decide(layer, self.depths).recipe
        if recipe is None:
            return None
        return recipe, path_of_parameter(path, names[side]), self.policy.options_of(path), side

    def _key(self, recipe: Recipe, path: str) -> jax.Array | None:
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module):
            return linen.key_in(module, path, recipe)
        return key_of_layer(path, recipe)


def _flipped(subscripts: str) -> str:
    """Exchanges the operands of an einsum; without an arrow the order of its result does not depend on theirs."""
    operands, arrow, result = subscripts.partition("->")
    return ",".join(reversed(operands.split(","))) + arrow + result
