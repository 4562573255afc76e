"""Qwix: ``Provider`` quantizes by a policy what ``qwix.quantize_model`` intercepts. Needs qwix 0.1.8 and Flax."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.typing import DTypeLike
from qwix._src.utils import flax_util

from ._core.tensor import NVFP4Tensor, PyTree
from ._layers.dot_general import DotGeneral, check_options
from ._layers.einsum import Einsum, contraction, sizes_of
from ._layers.grouped_linear import RaggedDot
from ._layers.keys import key_of_layer
from ._layers.linear import linear
from ._layers.weights import WeightAxes
from ._ops.quantize import quantize
from .flax import linen
from .policy import Decision, Explanation, Layer, Policy, ProductOptions, check_policy, depths_of, path_of_parameter
from .recipes import Recipe

__all__ = ["Provider"]

Found = tuple[Recipe, str, ProductOptions]  # how a layer multiplies, and its path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """Holds weights that are not trained.

    Attributes:
      tensor: [N, K], the axes that the product leaves and those that it contracts.
      shape: of the array that was quantized.
      contracted: its axes of K.
      dtype: its dtype.
    """

    tensor: NVFP4Tensor
    shape: tuple[int, ...] = field(metadata={"static": True})
    contracted: tuple[int, ...] = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Returns the number of axes of the array."""
        return len(self.shape)

    def __getitem__(self, index: EllipsisType) -> "Frozen":
        """Returns the weights: layers of NNX read ``kernel[...]``."""
        if index is not ...:
            raise TypeError(f"Frozen: weights in NVFP4 must be read as a whole, by [...], got [{index!r}]")
        return self

    def dot(
        self,
        op: str,
        x: jax.Array,
        contracted: Sequence[int],
        recipe: Recipe,
        key: jax.Array | None,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        **unsupported: object,
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general`` of x and the weights, [*x free, *weights free]; dx is not quantized."""
        check_options(op, precision, None, unsupported)
        free = [axis for axis in range(x.ndim) if axis not in contracted]
        rows = x.transpose(*free, *contracted).reshape(*(x.shape[axis] for axis in free), -1)
        columns = [size for axis, size in enumerate(self.shape) if axis not in self.contracted]
        product = linear(rows, self.tensor, recipe, key=key, out_dtype=preferred_element_type)
        return product.reshape(*rows.shape[:-1], *columns)


def freeze(w: jax.Array, contracted: Sequence[int], recipe: Recipe) -> Frozen:
    """Quantizes weights as the forward pass of the recipe does; N and K must fit its spec."""
    assert recipe.fprop is not None
    free = [axis for axis in range(w.ndim) if axis not in contracted]
    matrix = w.transpose(*free, *contracted).reshape(-1, math.prod(w.shape[axis] for axis in contracted))
    return Frozen(quantize(matrix, recipe.fprop.w), w.shape, tuple(contracted), jnp.dtype(w.dtype))


class Provider(qwix.QuantizationProvider):
    """Quantizes a model by a policy: ``qwix.quantize_model(model, Provider(policy), ...)``.

    A product is quantized if one of its operands is a parameter of the module that is being called. Qwix tells it by
    what JAX has traced, or else by its shape; of two operands with the shape of a parameter it is the right one, and
    parameters of one shape need one rule. Paths are those of modules, as in the rules of Qwix, and the name of a
    parameter that is not called kernel, weight or w: "layers/3/moe/up". A recipe that rounds stochastically takes its
    keys from ``jnvfp4.step_key``, or from ``rngs={'sr': key}`` of a Linen model. ``quantize_model`` calls an NNX model
    once, which needs a key too.

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
        self.met: dict[str, Decision] = {}

    def explain(self) -> Explanation:
        """Lists the products of a parameter that calls of the model have met since it was traced, with the reason."""
        return Explanation(self.met.values())

    def get_intercept_map(self) -> dict[str, Callable]:
        """Returns the functions that Qwix replaces, by name."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
            "jax.lax.ragged_dot": self.ragged_dot,
            "jax.lax.ragged_dot_general": self.ragged_dot_general,
        }

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
        (recipe, path, of_w), side = found
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
        (recipe, path, of_w), side = found
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
        return Einsum(recipe, path, **of_w)(of_x_and_w, x, w, key=self._key(recipe, path), **options)

    def ragged_dot(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Computes ``jax.lax.ragged_dot``, quantized if its weights are a parameter."""
        return self._of_experts(jax.lax.ragged_dot, "kn", lhs, rhs, *args, **options)

    def ragged_dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
        *args: Any,
        **options: Any,
    ) -> jax.Array:
        """Computes ``jax.lax.ragged_dot_general``, quantized if it is the product of a layer of experts."""

        def of_jax(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *args: Any, **options: Any) -> jax.Array:
            numbers = ragged_dot_dimension_numbers
            return jax.lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, *args, **options)

        w_axes = _axes_of_experts(ragged_dot_dimension_numbers)
        if w_axes is None:
            return of_jax(lhs, rhs, group_sizes, *args, **options)
        return self._of_experts(of_jax, w_axes, lhs, rhs, group_sizes, *args, **options)

    def _of_experts(
        self, of_jax: Callable, w_axes: WeightAxes, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any
    ) -> jax.Array:
        k, n = rhs.shape[1:] if w_axes == "kn" else rhs.shape[:0:-1]
        found = None if self._is_initializing() else self._decide(_names_of(rhs, in_parts=True), (n, k))
        if found is None:
            return of_jax(lhs, rhs, *args, **options)
        recipe, path, of_w = found
        product, key = RaggedDot(recipe, path, **of_w), self._key(recipe, path)
        return product(lhs, rhs, *args, key=key, w_axes=w_axes, **options)

    def _layer(self, lhs: jax.Array, rhs: jax.Array) -> tuple[Found, int] | None:
        """Returns what multiplies, and which operand holds the weights; None for other products."""
        if self._is_initializing():
            return None
        # Of two that may be parameters, by their shapes, it is the right one, as in the layers of Flax.
        weights = [(side, names) for side, w in ((1, rhs), (0, lhs)) if (names := _names_of(w))]
        if not weights or weights[0][1][0].endswith(("lora_a", "lora_b")):
            return None
        found = self._decide(weights[0][1])
        return None if found is None else (found, weights[0][0])

    def _decide(self, names: list[str], sizes: tuple[int, int] | None = None) -> Found | None:
        """Returns the recipe, path and options of a layer whose weights are one of some parameters; None for none."""
        if not names:
            return None
        module = flax_util.get_current_module()
        shapes, path = _shapes_in(module), _path_of(module)
        layers = [Layer(path_of_parameter(path, name), shapes[name], sizes) for name in names]
        decisions = [self.policy.decide(layer, self.depths) for layer in layers]
        self.met |= {decision.path: decision for decision in decisions}
        found = [(decision.recipe, self.policy.options_of(decision.path)) for decision in decisions]
        if any(other != found[0] for other in found):
            raise ValueError(
                "Policy: parameters of one shape that Qwix cannot tell apart must have one recipe, w_gather and pad, "
                f"got several for {', '.join(decision.path for decision in decisions)}; give them one rule"
            )
        recipe, options = found[0]
        return None if recipe is None else (recipe, layers[0].path, options)

    @staticmethod
    def _is_initializing() -> bool:
        module = flax_util.get_current_module()
        return isinstance(module, nn.Module) and (module.scope is None or module.is_initializing())

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
        name, *others = _names_of(w)
        if others:
            return None
        frozen = freeze(w, dimension_numbers[0][1], recipe)
        setattr(module, name, flax_nnx.Param(frozen))
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


def _names_of(w: jax.Array | Frozen, in_parts: bool = False) -> list[str]:
    """Returns which parameters of the module an operand may be: the one that Qwix finds, or all of its shape.

    ``in_parts`` adds those whose shape is a multiple, of which ``shard_map`` has a part.
    """
    try:
        name = flax_util.find_param(w)
    except ValueError:  # it is one of several
        name = None
    shapes = _shapes_in(flax_util.get_current_module())
    alike = [name] if name else [name for name, shape in shapes.items() if shape == w.shape]
    return alike or [name for name, shape in shapes.items() if in_parts and _is_part(w.shape, shape)]


def _path_of(module: nn.Module | flax_nnx.Module) -> str:
    path = flax_util.get_current_module_path
    return linen.path_of(module) if isinstance(module, nn.Module) else "/".join(map(str, path()))


def _shapes_in(module: nn.Module | flax_nnx.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that a module has itself, in the order of their names."""
    if isinstance(module, flax_nnx.Module):
        own = {name: value for name, value in vars(module).items() if isinstance(value, flax_nnx.Param)}
    else:
        own = flax_util.unbox(dict(module.variables.get("params", {})))
    return {name: own[name].shape for name in sorted(own) if hasattr(own[name], "shape")}


def _is_part(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(part) == len(whole) and all(p and not w % p for p, w in zip(part, whole, strict=True))


def _axes_of_experts(dimension_numbers: jax.lax.RaggedDotDimensionNumbers) -> WeightAxes | None:
    """Returns the order of the weights in a ``lax.ragged_dot_general`` that ``RaggedDot`` computes; None for others."""
    contracting, batch = dimension_numbers.dot_dimension_numbers
    found = [
        [list(map(int, axes)) for axes in (*contracting, *batch)],
        list(dimension_numbers.lhs_ragged_dimensions),
        list(dimension_numbers.rhs_group_dimensions),
    ]
    if found == [[[1], [1], [], []], [0], [0]]:
        return "kn"
    return "nk" if found == [[[1], [2], [], []], [0], [0]] else None


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
