"""Qwix: ``Provider`` quantizes by a policy what ``qwix.quantize_model`` intercepts. Needs qwix 0.1.8 and Flax."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen as nn
from flax import nnx as flax_nnx
from qwix._src.utils import flax_util

from ._core.tensor import PyTree
from ._layers.dot_general import DotGeneral
from ._layers.einsum import contraction, einsum_of_layer, sizes_of
from ._layers.frozen import Frozen, freeze
from ._layers.keys import key_of_layer
from ._layers.weights import WeightAxes
from ._native.compat import made_of
from .flax import linen, nnx
from .flax._experts import Experts, intercepted, product_of
from .policy import Decision, Explanation, Layer, Policy, ProductOptions, check_policy, depths_of, path_of_parameter
from .recipes import Recipe

__all__ = ["Provider"]

Found = tuple[Recipe, str, ProductOptions, int]  # what _layer returns


class Provider(qwix.QuantizationProvider):
    """Quantizes a model by a policy: ``qwix.quantize_model(model, Provider(policy), ...)``.

    A product is quantized if one of its operands is a parameter of the module that is being called; products of two
    activations never are. Paths are those of modules, as in the rules of Qwix, and the name of a parameter that is not
    called kernel, weight or w: "layers/3/moe/up". A recipe that rounds stochastically takes its keys from
    ``jnvfp4.step_key``, or from ``rngs={'sr': key}`` of a Linen model. ``quantize_model`` calls an NNX model once,
    which needs a key too.

    Args:
      policy: which layers are quantized, and how.
      lora: adds adapters to an NNX model, which stay in high precision. ``quantize_model`` then stores the weights of
        the layers that the policy quantizes in NVFP4, as ``recipe.fprop`` quantizes w, for one device; those of
        experts, of batched products and of sizes that its blocks do not fit stay arrays. It needs ``rngs`` too.

    Raises:
      TypeError: policy is not a Policy, or lora is neither a LoraProvider nor None.
      ValueError: lora comes with a policy that has ``w_gather``.
    """

    def __init__(self, policy: Policy, *, lora: qwix.LoraProvider | None = None) -> None:
        check_policy("Provider", policy)
        if not isinstance(lora, qwix.LoraProvider | None):
            raise TypeError(f"Provider: lora must be a qwix.LoraProvider or None, got {lora!r}")
        gathers = [w_gather for w_gather in (policy.w_gather, *(rule.w_gather for rule in policy.rules)) if w_gather]
        if lora is not None and gathers:
            raise ValueError(
                f"Provider: policy must have no w_gather with lora, whose weights are for one device, got {gathers[0]}"
            )
        super().__init__(rules=[])
        self.policy = policy
        self.lora = lora
        self.depths: Mapping[str, int] = {}
        self.parameters = Experts()
        self.met: dict[str, Decision] = {}

    def explain(self) -> Explanation:
        """Lists the products of a parameter that calls of the model have met since it was traced, with the reason."""
        return Explanation(self.met.values())

    def get_intercept_map(self) -> dict[str, Callable]:
        """Returns the functions that Qwix replaces, by name."""
        ours = {"jax.lax.dot_general": self.dot_general, "jax.numpy.einsum": self.einsum}
        of_jax: dict[str, Callable] = {
            "ragged_dot": jax.lax.ragged_dot,
            "ragged_dot_general": jax.lax.ragged_dot_general,
        }
        experts = {f"jax.lax.{name}": function for name, function in intercepted(self.experts, of_jax).items()}
        return super().get_intercept_map() | ours | experts

    def get_interceptors(self) -> Sequence[Callable]:
        """Returns what makes the interceptors; Qwix applies the last one first."""
        return [*super().get_interceptors(), *([] if self.lora is None else self.lora.get_interceptors())]

    def process_model_inputs(
        self, model: nn.Module | flax_nnx.Module, model_args: Sequence[PyTree], model_kwargs: dict[str, PyTree]
    ) -> tuple[nn.Module | flax_nnx.Module, Sequence[PyTree], dict[str, PyTree]]:
        """Checks the policy against the model before a call of it."""
        layers = _layers_in(model)
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
        product, sharding = DotGeneral(recipe, path, **of_w), options.pop("out_sharding", None)
        if side == 1 and (frozen := self._frozen(rhs, dimension_numbers, recipe)) is not None:
            result = self._frozen_dot(path, frozen, lhs, dimension_numbers[0][0], recipe, *args, **options)
        elif side == 1:
            result = product(lhs, rhs, dimension_numbers, *args, key=self._key(recipe, path), **options)
        else:
            contracted, batch = ((of_rhs, of_lhs) for of_lhs, of_rhs in dimension_numbers)
            flipped = product(rhs, lhs, (contracted, batch), *args, key=self._key(recipe, path), **options)
            batches, free = len(batch[0]), lhs.ndim - len(contracted[1]) - len(batch[1])  # of the weights: at last
            result = jnp.moveaxis(flipped, range(flipped.ndim - free, flipped.ndim), range(batches, batches + free))
        return result if sharding is None else jax.sharding.reshard(result, sharding)

    def einsum(self, subscripts: str, *operands: jax.Array, **options: Any) -> jax.Array:
        """Computes ``jnp.einsum``, quantized if it is a product and an operand is a parameter."""
        if options.get("_dot_general") is jax.lax.dot_general:  # as LoraProvider passes it
            del options["_dot_general"]
        found = self._layer(*operands) if isinstance(subscripts, str) and len(operands) == 2 else None
        if found is None:
            return jnp.einsum(subscripts, *operands, **options)
        recipe, path, of_w, side = found
        x, w = operands if side == 1 else operands[::-1]
        of_x_and_w = subscripts if side == 1 else _flipped(subscripts)
        reason = sizes_of(of_x_and_w, x.ndim, w.shape)[1]
        if others := set(options) - {"precision", "preferred_element_type", "out_sharding"}:
            reason = f"einsum with the argument {min(others)}"
        if reason is not None:
            self.met[path] = Decision(path, w.shape, None, f"no product: {reason}")
            return jnp.einsum(subscripts, *operands, **options)
        numbers, order = contraction("einsum", of_x_and_w, x.ndim, w.ndim)
        if side == 1 and (frozen := self._frozen(w, numbers, recipe)) is not None:
            sharding = options.pop("out_sharding", None)
            result = self._frozen_dot(path, frozen, x, numbers[0][0], recipe, **options).transpose(order)
            return result if sharding is None else jax.sharding.reshard(result, sharding)
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
        self.met[layers[0].path] = self.policy.decide(layers[0], self.depths)
        if product is None:
            return call(lhs, rhs, *args, **options)
        key = self._key(product.recipe, layers[0].path)
        return product(lhs, rhs, *args, key=key, w_axes=w_axes, **options)

    def _layer(self, lhs: jax.Array, rhs: jax.Array) -> Found | None:
        """Returns the recipe, path and options, and which operand holds the weights; None for other products."""
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module) and (module.scope is None or module.is_initializing()):
            return None
        is_linen = isinstance(module, nn.Module)
        params = (linen if is_linen else nnx).parameters_of(module)
        found = [made_of(operand, params) for operand in (lhs, rhs)]
        if not any(found):  # operands of which a trace knows nothing are told by their shapes
            guessed = (flax_util.find_param(v) if f is None else None for v, f in zip((lhs, rhs), found, strict=True))
            found = [[] if name is None else [name] for name in guessed]
        weights = [(side, names[0]) for side, names in enumerate(found) if names]
        if len(weights) != 1:
            return None
        ((side, name),) = weights
        if name.endswith(("lora_a", "lora_b")):
            return None
        path = linen.path_of(module) if is_linen else "/".join(map(str, flax_util.get_current_module_path()))
        layer = Layer(path_of_parameter(path, name), tuple((lhs, rhs)[side].shape))
        decision = self.policy.decide(layer, self.depths)
        self.met[layer.path] = decision
        return (
            None if decision.recipe is None else (decision.recipe, layer.path, self.policy.options_of(layer.path), side)
        )

    def _frozen(
        self, w: jax.Array | Frozen, dimension_numbers: jax.lax.DotDimensionNumbers, recipe: Recipe
    ) -> Frozen | None:
        """Returns the weights in NVFP4; in the call that ``quantize_model`` makes they replace the parameter."""
        if isinstance(w, Frozen):
            return w
        module, batch = flax_util.get_current_module(), dimension_numbers[1][1]
        first = getattr(module, "disable_quant_stats_update", False)  # as Qwix marks the modules of NNX
        if self.lora is None or not first or batch or recipe.fprop is None:
            return None
        k = math.prod(w.shape[axis] for axis in dimension_numbers[0][1])
        if k % recipe.fprop.w.unit or w.size // k % recipe.fprop.w.block_rows:  # the array is padded in each call
            return None
        frozen = freeze(w, dimension_numbers[0][1], recipe)
        setattr(module, flax_util.find_param(w), flax_nnx.Param(frozen))
        return frozen

    def _frozen_dot(
        self, path: str, w: Frozen, x: jax.Array, axes: Sequence[int], recipe: Recipe, *args: Any, **options: Any
    ) -> jax.Array:
        return w.dot(f"layer {path!r}", x, axes, recipe, self._key(recipe, path), *args, **options)

    def _key(self, recipe: Recipe, path: str) -> jax.Array | None:
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module):
            return linen.key_in(module, path, recipe)
        return key_of_layer(path, recipe)


def _layers_in(model: nn.Module | flax_nnx.Module) -> list[Layer]:
    """Lists the parameters of two or more axes, but for biases and scales."""
    found: dict[str, Layer] = {}
    for module, name, shape in _parameters_in(model):
        if len(shape) > 1 and name not in ("bias", "scale"):
            path = path_of_parameter(module, name)
            found.setdefault(path, Layer(path, shape))
    return list(found.values())


def _parameters_in(model: nn.Module | flax_nnx.Module) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields the path of a module and the name and shape of a parameter of it."""
    if isinstance(model, flax_nnx.Module):
        for keys, module in flax_nnx.iter_modules(model):
            for name, value in vars(module).items():
                if isinstance(value, flax_nnx.Param):
                    yield "/".join(map(str, keys)), name, value.shape
    elif not model.is_initializing():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(model.variables.get("params", {}))):
            *parts, name = (str(getattr(k, "key", k)) for k in keys)
            yield "/".join(parts) or model.name or "", name, leaf.shape


def _flipped(subscripts: str) -> str:
    """Exchanges the operands of an einsum; without an arrow the order of its result does not depend on theirs."""
    operands, arrow, result = subscripts.partition("->")
    return ",".join(reversed(operands.split(","))) + arrow + result
