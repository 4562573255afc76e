"""Flax Linen: ``intercept`` quantizes the layers of a model as it is; ``dot_general_cls`` is for its arguments."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
from flax import linen as nn

from .._core.tensor import PyTree
from .._layers.dot_general import DotGeneral
from .._layers.einsum import einsum_of_layer, sizes_of
from .._layers.keys import check_step, fold_path, key_of_layer, must_vary
from .._layers.weights import WeightAxes
from ..policy import Layer, Policy, check_policy, depths_of, is_of_experts, layers_of, path_of_parameter
from ..recipes import Recipe
from ._experts import Experts, product_of, ragged_dots
from ._linen_loops import shares_stream

__all__ = ["NVFP4DotGeneral", "dot_general_cls", "intercept"]

_KEY_ARGUMENT = "pass the key to the jitted step as an argument"
_SPLIT_RNGS = (
    "pass split_rngs={'sr': True} to nn.scan over layers, or rngs={'sr': jax.random.fold_in(key, i)} to apply in a "
    "loop over microbatches"
)
_policy_of_trace = jax.make_user_context(None)  # so that a jitted function is traced again for another policy


@contextmanager
def intercept(policy: Policy) -> Iterator[None]:
    """Quantizes the layers of Linen models that are called within: ``with intercept(policy): model.apply(...)``.

    These are ``nn.Dense``, ``nn.DenseGeneral`` (also as projections of attention) and ``nn.Einsum``, and their
    subclasses; and experts, which a module gives to ``jax.lax.ragged_dot`` or ``ragged_dot_general`` as rhs, by their
    parameters: "block_3/moe/up". Calls by a name that was imported from ``jax.lax`` before are missed silently.
    Parameters, their names and shapes stay as they are. ``init`` runs the model without quantizing, because it returns
    only parameters. A layer that has a dot_general of its own keeps it. A warning names convolutions and other modules
    with a kernel that the policy would quantize and this function cannot.

    A recipe that rounds stochastically needs ``rngs={'sr': key}`` of ``apply``, or ``jnvfp4.step_key``. Without both
    the gradient of a layer raises; an evaluation needs neither, unless the forward GEMM rounds stochastically.

    Args:
      policy: which layers are quantized, and how. Paths are as in ``params``: "block_3/mlp/up".

    Raises:
      ValueError: from ``apply``, as ``Policy.plan`` does; or the key of ``rngs`` or ``step_key`` is a constant of the
        function that is being traced, which would round alike in every step.
      TypeError: policy is not a Policy.
    """
    check_policy("intercept", policy)
    interceptor = Interceptor(policy)
    with _policy_of_trace(policy), nn.intercept_methods(interceptor), ragged_dots(interceptor.experts):
        yield


@cache
def dot_general_cls(recipe: Recipe) -> Callable[[], nn.Module]:
    """Makes the ``dot_general_cls`` argument of ``nn.Dense`` and ``nn.DenseGeneral``, also that of attention.

    Args:
      recipe: how the layer is quantized.

    Returns:
      A class of modules without parameters that are called like ``jax.lax.dot_general``. The same recipe gives the same
      class. The random bits of a layer come from ``rngs={'sr': key}`` or ``jnvfp4.step_key``. A loop that gives all
      iterations the same stream "sr" is an error; if a loop within it splits the stream, only ``intercept`` sees that.
    """
    return partial(NVFP4DotGeneral, recipe=recipe)


class NVFP4DotGeneral(nn.Module):
    """Multiplies as ``jnvfp4.DotGeneral`` does, by the path of the layer that it is part of.

    Attributes:
      recipe: how the layer is quantized.
    """

    recipe: Recipe

    @nn.compact
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, *args: Any, **options: Any
    ) -> jax.Array:
        """Computes ``jax.lax.dot_general`` of activations and weights."""
        if self.is_initializing():  # parameters alone matter, and there may be no key
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **options)
        path = "/".join(self.path[:-1])
        if options.get("key") is None:
            options["key"] = key_in(self, path, self.recipe)
        return DotGeneral(self.recipe, path)(lhs, rhs, dimension_numbers, *args, **options)


@dataclass(frozen=True, eq=False)
class _LinenDot:
    """Multiplies by a recipe, with the key of the layer that is being called."""

    module: nn.Module
    product: DotGeneral

    def key(self) -> jax.Array | None:
        return key_in(self.module, str(self.product.path), self.product.recipe)

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        return self.product(*operands, key=self.key(), **options)


def key_in(module: nn.Module, path: str, recipe: Recipe) -> jax.Array | None:
    """Returns the key for a layer, if it needs one: from the stream "sr" if the model has one, or of ``step_key``."""
    if not recipe.stochastic:
        return None
    if not module.has_rng("sr"):
        return key_of_layer(path, recipe)
    key = _stream_of(module)
    if _shares_stream(module):
        raise must_vary(f"layer {path!r}", _SPLIT_RNGS)
    check_step(f"layer {path!r}", key, "the key of rngs={'sr': key}", _KEY_ARGUMENT)
    return fold_path(module.make_rng("sr"), path)


def _stream_of(module: nn.Module) -> jax.Array:
    assert module.scope is not None
    rng: Any = module.scope.rngs["sr"]
    return getattr(rng, "rng", rng)


def _shares_stream(module: nn.Module) -> bool:
    """Says whether a loop being traced gives a module the same stream "sr" in all iterations."""
    return module.has_rng("sr") and shares_stream("sr", _stream_of(module))


class Interceptor:
    """Runs layers of the model by the policy. It knows the whole model from the call of its root."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.depths: Mapping[str, int] = {}
        self.depth_of_calls = 0  # of models that call models
        self.shared = False  # whether a module that is being called shares its stream, which a loop within may split
        self.module: nn.Module | None = None  # which is being called
        self.parameters = Experts()
        self.reached: set[str] = set()  # paths of experts

    def __call__(self, call: Callable, args: tuple, options: dict, context: nn.module.InterceptorContext) -> PyTree:
        module = context.module
        if module.scope is None or module.is_initializing():
            return call(*args, **options)
        with nullcontext() if module.path else self._inside(module), self._called(module):
            if context.method_name == "__call__" and isinstance(module, LAYERS):
                return self._layer(module, call, args, options)
            result = call(*args, **options)
            layer = _unknown(module) if context.method_name == "__call__" else None
            if layer is not None and layer.path not in self.reached:
                self.policy.warn("intercept", layer, self.depths)
            return result

    @contextmanager
    def _inside(self, model: nn.Module) -> Iterator[None]:
        """Learns the layers of a model; it may call another model, after which its own are known again."""
        known = self.shapes, self.depths, self.depth_of_calls
        layers = layers_of_params(model)
        if not self.depth_of_calls:
            self.policy.plan(layers)  # for its checks, which are about the outermost model
        self.shapes, self.depths = {layer.path: layer.shape for layer in layers}, depths_of(layers)
        self.depth_of_calls += 1
        try:
            yield
        finally:
            self.shapes, self.depths, self.depth_of_calls = known

    @contextmanager
    def _called(self, module: nn.Module) -> Iterator[None]:
        before = self.shared, self.module
        self.shared, self.module = _shares_stream(module) or (self.shared and bool(module.path)), module
        try:
            yield
        finally:
            self.shared, self.module = before

    def _layer(self, module: nn.Module, call: Callable, args: tuple, options: dict) -> PyTree:
        if "kernel" not in module.variables.get("params", {}):
            return call(*args, **options)  # Flax says what is missing
        layer = describe(module, args, options, self.shapes)
        recipe = self.policy.decide(layer, self.depths).recipe
        if recipe is None:
            return call(*args, **options)
        return self.run(module, layer.path, recipe, call, args, options)

    def run(self, module: nn.Module, path: str, recipe: Recipe, call: Callable, args: tuple, options: dict) -> PyTree:
        """Runs a layer that the policy quantizes."""
        self._check_stream(module, path, recipe)
        dot = _LinenDot(module, DotGeneral(recipe, path, **self.policy.options_of(path)))
        if isinstance(module, nn.Einsum):
            return _einsum(module, dot, *args, **options)
        before = module.dot_general
        object.__setattr__(module, "dot_general", dot)  # modules are frozen, but the call has made this copy
        try:
            return call(*args, **options)
        finally:
            object.__setattr__(module, "dot_general", before)

    def _check_stream(self, module: nn.Module, path: str, recipe: Recipe) -> None:
        if recipe.stochastic and self.shared and module.has_rng("sr"):
            raise must_vary(f"layer {path!r}", _SPLIT_RNGS)

    def experts(self, call: Callable, w_axes: WeightAxes, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any):
        """Runs a ``ragged_dot`` by the policy."""
        module = self.module
        if module is None or module.is_initializing():
            return call(lhs, rhs, *args, **options)
        layers = experts_of(self.parameters, module, rhs, w_axes, self.shapes)
        path = layers[0].path
        self.reached.add(path)
        if layers[0].reason is not None:
            self.policy.warn("intercept", layers[0], self.depths)
        product = product_of(self.policy, self.depths, layers)
        if product is None:
            return call(lhs, rhs, *args, **options)
        self._check_stream(module, path, product.recipe)
        key = key_in(module, path, product.recipe)
        return product(lhs, rhs, *args, key=key, w_axes=w_axes, **options)


LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum)


def _einsum(module: nn.Einsum, dot: _LinenDot, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """Does what ``nn.Einsum`` does, which has no hook for its product."""
    subscripts = _subscripts(module, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias = None
    if module.use_bias:
        shape, broadcast_shape = module._get_bias_shape(subscripts, inputs, kernel)
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    operands: Any = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
    product, (x, w) = dot.product, operands[:2]
    of_layer = partial(einsum_of_layer, product.path, subscripts, x, w, product.recipe, dot.key(), product.w_gather)
    dtype = module.preferred_element_type
    y = of_layer(precision=module.precision, preferred_element_type=dtype, pad=product.pad)
    return y if bias is None else y + operands[2].reshape(broadcast_shape)


def _subscripts(module: nn.Einsum, einsum_str: str | None) -> str:
    return nn.merge_param("einsum_str", module.einsum_str, einsum_str).replace(" ", "")


# ---------------------------------------------------------------- what a model consists of
def path_of(module: nn.Module) -> str:
    """Returns the path of a module; where it is applied as a model by itself, as for tied weights, its name."""
    return "/".join(module.path) or module.name or ""


def describe(module: nn.Module, args: tuple, options: dict, shapes: Mapping[str, tuple[int, ...]]) -> Layer:
    """Describes a layer that is being called; ``shapes`` are those of all weights of the model by path."""
    path = path_of(module)
    kernel = nn.unbox(module.variables["params"]["kernel"]).shape
    sizes, reason = _sizes(module, kernel, args, options)
    whole = shapes.get(path, kernel)
    return Layer(path, whole, sizes, len(whole) > len(kernel), reason)


def experts_of(
    experts: Experts, module: nn.Module, w: jax.Array, w_axes: WeightAxes, shapes: Mapping[str, tuple[int, ...]]
) -> list[Layer]:
    """Describes the experts w that a module multiplies by; ``shapes`` are as in ``describe``."""
    layers = experts.layers(module.scope, path_of(module), parameters_of(module), w, w_axes)
    whole = [shapes.get(layer.path, layer.shape) for layer in layers]
    return [
        layer._replace(shape=shape, stacked=len(shape) > len(layer.shape))
        for layer, shape in zip(layers, whole, strict=True)
    ]


def parameters_of(module: nn.Module) -> dict[str, jax.Array]:
    """Returns the parameters that a module has itself, by name."""
    own = [
        (name, value) for name, value in module.variables.get("params", {}).items() if not isinstance(value, Mapping)
    ]
    # What a box holds: to unbox it may make another array of it.
    return {name: leaves[0] for name, value in own if len(leaves := jax.tree.leaves(value)) == 1}


def _unknown(module: nn.Module) -> Layer | None:
    """Describes a module that has a kernel and no hook for its product, such as a convolution."""
    kernel = nn.unbox(module.variables.get("params", {})).get("kernel")
    if getattr(kernel, "ndim", 0) < 2:
        return None
    return Layer(path_of(module), kernel.shape, reason=unknown(module, "intercept"))


def unknown(module: object, op: str) -> str:
    """Says why a module that has a kernel is no layer for ``op``."""
    of_flax = type(module).__module__.startswith("flax.")
    which = "jnvfp4 does not quantize" if of_flax else f"jnvfp4.qwix.Provider reaches and {op} does not"
    return f"of type {type(module).__name__}, which {which}"


def _sizes(
    module: nn.Module, kernel: tuple[int, ...], args: tuple, options: dict
) -> tuple[tuple[int, int] | None, str | None]:
    """Returns N and K, or why the layer cannot be quantized."""
    if isinstance(module, nn.Einsum):
        return _einsum_sizes(module, kernel, *args, **options)
    own = module.dot_general_cls is not None or not isinstance(module.dot_general, _LinenDot | None)
    if own:
        return None, "has a dot_general of its own"
    batch = len(_tuple(getattr(module, "batch_dims", ())))
    contracted = len(_tuple(getattr(module, "axis", -1)))
    return (math.prod(kernel[batch + contracted :]), math.prod(kernel[batch : batch + contracted])), None


def _einsum_sizes(
    module: nn.Einsum, kernel: tuple[int, ...], inputs: jax.Array, einsum_str: str | None = None
) -> tuple[tuple[int, int] | None, str | None]:
    return sizes_of(_subscripts(module, einsum_str), inputs.ndim, kernel)


def _tuple(axes: int | Iterable[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def layers_of_params(model: nn.Module, params: PyTree = None) -> list[Layer]:
    """Lists what may be layers of a model: its parameters of two or more axes named kernel, and those of experts."""
    tree = model.variables.get("params", {}) if params is None else params
    leaves = jax.tree_util.tree_leaves_with_path(nn.unbox(tree))
    named = [([str(getattr(k, "key", k)) for k in keys], leaf) for keys, leaf in leaves]
    kernels = [
        ("/".join(path), name, leaf.shape)
        for (*path, name), leaf in named
        if (leaf.ndim >= 2 if name == "kernel" else is_of_experts(name, leaf.shape))
    ]
    return [Layer(path_of_parameter(path or model.name or "", name), shape) for path, name, shape in kernels]


@layers_of.register(nn.Module)
def _layers_of_module(module: nn.Module, *inputs: PyTree, **keywords: Any) -> list[Layer]:
    """Lists the layers that ``init`` calls, without computing anything."""
    called: dict[str, Layer] = {}
    parameters, modules = Experts(), list[nn.Module]()

    def see(call: Callable, args: tuple, options: dict, context: nn.module.InterceptorContext) -> PyTree:
        modules.append(context.module)
        result = call(*args, **options)
        modules.pop()
        if context.method_name == "__call__":
            known = isinstance(context.module, LAYERS)
            layer = describe(context.module, args, options, {}) if known else _unknown(context.module)
            if layer is not None:
                called[layer.path] = layer
        return result

    def see_experts(call: Callable, w_axes: WeightAxes, lhs: jax.Array, rhs: jax.Array, *args: Any, **options: Any):
        layer, *_ = experts_of(parameters, modules[-1], rhs, w_axes, {})
        called[layer.path] = layer
        return call(lhs, rhs, *args, **options)

    with_params = any("params" in value for value in inputs if isinstance(value, Mapping))
    if with_params or not (inputs or keywords):
        got = "its parameters too" if with_params else "no inputs"
        raise TypeError(
            f"Policy.explain: a Linen module must come with what it is called with, got {got}; "
            "write explain(model, *inputs), without the parameters, or pass these instead of the model"
        )
    with _policy_of_trace(object()), nn.intercept_methods(see), ragged_dots(see_experts):
        variables = jax.eval_shape(partial(module.init, **keywords), jax.random.key(0), *inputs)
    shapes = {layer.path: layer.shape for layer in layers_of_params(module, variables["params"])}
    # A layer that is applied as a model of its own, such as a head with tied weights, has no parameters of this one.
    whole = {path: shapes.get(path, layer.shape) for path, layer in called.items()}
    return [
        layer._replace(shape=whole[path], stacked=len(whole[path]) > len(layer.shape)) for path, layer in called.items()
    ]
