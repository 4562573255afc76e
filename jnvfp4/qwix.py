"""Qwix: ``Provider`` quantizes by a policy what ``qwix.quantize_model`` intercepts. Needs qwix 0.1.8 and Flax."""

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
from ._layers.gather import Placement
from ._layers.keys import key_of_layer
from .flax import linen
from .policy import WEIGHT_NAMES, Decision, Explanation, Layer, Policy, check_policy, depths_of
from .recipes import Recipe

__all__ = ["Provider"]

Found = tuple[Recipe, str, tuple[Placement, Placement] | None, int]  # what _layer returns


class Provider(qwix.QuantizationProvider):
    """Quantizes a model by a policy: ``qwix.quantize_model(model, Provider(policy), ...)``.

    A product is quantized if one of its operands is a parameter of the module that is being called; products of two
    activations never are. Paths are those of modules, as in the rules of Qwix. A recipe that rounds stochastically
    takes its keys from ``jnvfp4.step_key``, or from ``rngs={'sr': key}`` of a Linen model. ``quantize_model`` calls an
    NNX model once, which needs a key too.

    Args:
      policy: which layers are quantized, and how.
      lora: adds adapters to an NNX model, which stay in high precision. ``quantize_model`` then stores the weights of
        the layers that the policy quantizes in NVFP4, as ``recipe.fprop`` quantizes w. It needs ``rngs`` too.

    Raises:
      TypeError: policy is not a Policy, or lora is neither a LoraProvider nor None.
    """

    def __init__(self, policy: Policy, *, lora: qwix.LoraProvider | None = None) -> None:
        check_policy("Provider", policy)
        if not isinstance(lora, qwix.LoraProvider | None):
            raise TypeError(f"Provider: lora must be a qwix.LoraProvider or None, got {lora!r}")
        super().__init__(rules=[])
        self.policy = policy
        self.lora = lora
        self.depths: Mapping[str, int] = {}
        self.met: dict[str, Decision] = {}

    def explain(self) -> Explanation:
        """Lists the products of a parameter that calls of the model have met since it was traced, with the reason."""
        return Explanation(self.met.values())

    def get_intercept_map(self) -> dict[str, Callable]:
        """Returns the functions that Qwix replaces, by name."""
        ours = {"jax.lax.dot_general": self.dot_general, "jax.numpy.einsum": self.einsum}
        return super().get_intercept_map() | ours

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
        self.depths = depths_of(layers)
        return super().process_model_inputs(model, model_args, model_kwargs)

    def dot_general(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, *args: Any, **options: Any
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general``, quantized if an operand is a parameter."""
        found = self._layer(lhs, rhs)
        if found is None:
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)
        recipe, path, w_gather, side = found
        if side == 1 and (frozen := self._frozen(rhs, dimension_numbers, recipe)) is not None:
            return frozen.dot(lhs, dimension_numbers[0][0], recipe, options.get("preferred_element_type"))
        product, key = DotGeneral(recipe, path, w_gather), self._key(recipe, path)
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
        if options.get("_dot_general") is jax.lax.dot_general:  # as LoraProvider passes it
            del options["_dot_general"]
        found = self._layer(*operands) if isinstance(subscripts, str) and len(operands) == 2 else None
        if found is None:
            return jnp.einsum(subscripts, *operands, **options)
        recipe, path, w_gather, side = found
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
            product = frozen.dot(x, numbers[0][0], recipe, options.get("preferred_element_type"))
            return product.transpose(order)
        return einsum_of_layer(path, of_x_and_w, x, w, recipe, self._key(recipe, path), w_gather, **options)

    def _layer(self, lhs: jax.Array, rhs: jax.Array) -> Found | None:
        """Returns the recipe, path and ``w_gather``, and which operand holds the weights; None for other products."""
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module) and (module.scope is None or module.is_initializing()):
            return None
        names = [flax_util.find_param(operand) for operand in (lhs, rhs)]
        if (names[0] is None) == (names[1] is None):
            return None
        side = 0 if names[1] is None else 1
        if str(names[side]).endswith(("lora_a", "lora_b")):
            return None
        is_linen = isinstance(module, nn.Module)
        path = linen.path_of(module) if is_linen else "/".join(map(str, flax_util.get_current_module_path()))
        layer = Layer(path, tuple((lhs, rhs)[side].shape))
        decision = self.policy.decide(layer, self.depths)
        # A module may have several parameters, each of which is a layer.
        named = path if names[side] in WEIGHT_NAMES else f"{path}/{names[side]}"
        self.met[named] = decision._replace(path=named)
        return None if decision.recipe is None else (decision.recipe, named, self.policy.gather_of(path), side)

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
        frozen = freeze(w, dimension_numbers[0][1], recipe)
        setattr(module, flax_util.find_param(w), flax_nnx.Param(frozen))
        return frozen

    def _key(self, recipe: Recipe, path: str) -> jax.Array | None:
        module = flax_util.get_current_module()
        if isinstance(module, nn.Module):
            return linen.key_in(module, path, recipe)
        return key_of_layer(path, recipe)


def _layers_in(model: nn.Module | flax_nnx.Module) -> list[Layer]:
    """Lists the modules that have a parameter of two or more axes, whatever its name."""
    found: dict[str, Layer] = {}
    for path, shape in _parameters_in(model):
        if len(shape) > 1:
            found.setdefault(path, Layer(path, shape))
    return list(found.values())


def _parameters_in(model: nn.Module | flax_nnx.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the path of a module and the shape of a parameter of it."""
    if isinstance(model, flax_nnx.Module):
        for keys, module in flax_nnx.iter_modules(model):
            for value in vars(module).values():
                if isinstance(value, flax_nnx.Param):
                    yield "/".join(map(str, keys)), value.shape
    elif not model.is_initializing():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(model.variables.get("params", {}))):
            yield "/".join(str(getattr(k, "key", k)) for k in keys[:-1]) or model.name or "", leaf.shape


def _flipped(subscripts: str) -> str:
    """Exchanges the operands of an einsum; without an arrow the order of its result does not depend on theirs."""
    operands, arrow, result = subscripts.partition("->")
    return ",".join(reversed(operands.split(","))) + arrow + result
