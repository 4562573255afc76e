"""Flax Linen: ``intercept`` quantizes the layers of a model as it is; ``dot_general_cls`` is for its arguments."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
from flax import linen as nn
from jax.extend.core import Literal

from .._core.tensor import PyTree
from .._layers.dot_general import DotGeneral
from .._layers.einsum import Einsum, sizes_of
from .._layers.keys import fold_path, key_of_layer
from ..policy import Layer, Policy, check_policy, depths_of, layers_of, path_of_parameter
from ..recipes import Recipe

__all__ = ["NVFP4DotGeneral", "dot_general_cls", "intercept"]

_policy_of_trace = jax.make_user_context(None)  # so that a jitted function is traced again for another policy


@contextmanager
def intercept(policy: Policy) -> Iterator[None]:
    """Quantizes the layers of Linen models that are called within: ``with intercept(policy): model.apply(...)``.

    These are ``nn.Dense``, ``nn.DenseGeneral`` (also as projections of attention) and ``nn.Einsum``, and their
    subclasses. Parameters, their names and shapes stay as they are. ``init`` runs the model without quantizing, because
    it returns only parameters. A layer that has a dot_general of its own keeps it. A warning names convolutions,
    experts and other weights that the policy would quantize and this function cannot; to find them a model that has
    some is traced once more.

    A recipe that rounds stochastically needs ``rngs={'sr': key}`` of ``apply``, or ``jnvfp4.step_key``. Without both
    the gradient of a layer raises; an evaluation needs neither, unless the forward GEMM rounds stochastically.

    Args:
      policy: which layers are quantized, and how. Paths are as in ``params``: "block_3/mlp/up".

    Raises:
      ValueError: from ``apply``, as ``Policy.plan`` does.
      TypeError: policy is not a Policy.
    """
    check_policy("intercept", policy)
    with _policy_of_trace(policy), nn.intercept_methods(Interceptor(policy)):
        yield


@cache
def dot_general_cls(recipe: Recipe) -> Callable[[], nn.Module]:
    """Makes the ``dot_general_cls`` argument of ``nn.Dense`` and ``nn.DenseGeneral``, also that of attention.

    Args:
      recipe: how the layer is quantized.

    Returns:
      A class of modules without parameters that are called like ``jax.lax.dot_general``. The same recipe gives the same
      class. The random bits of a layer come from ``rngs={'sr': key}`` or ``jnvfp4.step_key``.
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
    product: DotGeneral | Einsum

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        key = key_in(self.module, str(self.product.path), self.product.recipe)
        return self.product(*operands, key=key, **options)


def key_in(module: nn.Module, path: str, recipe: Recipe) -> jax.Array | None:
    """Returns the key for a layer, if it needs one: from the stream "sr" if the model has one, or of ``step_key``."""
    if not recipe.stochastic:
        return None
    if not module.has_rng("sr"):
        return key_of_layer(path, recipe)
    return fold_path(module.make_rng("sr"), path)


class Interceptor:
    """Runs layers of the model by the policy. It knows the whole model from the call of its root."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        self.depths: Mapping[str, int] = {}
        self.depth_of_calls = 0  # of models that call models
        self.others: dict[str, Layer] = {}  # which the policy would quantize, if they multiply
        self.asked: set[str] = set()  # whether they do
        self.asks = False

    def __call__(self, call: Callable, args: tuple, options: dict, context: nn.module.InterceptorContext) -> PyTree:
        module = context.module
        if self.asks or module.scope is None or module.is_initializing():
            return call(*args, **options)
        with nullcontext() if module.path else self._inside(module, partial(self._ask, context, args, options)):
            if context.method_name == "__call__" and isinstance(module, LAYERS):
                return self._layer(module, call, args, options)
            result = call(*args, **options)
            self.others |= {layer.path: layer for layer in _unknown(context) if self._would_quantize(layer)}
            return result

    def _would_quantize(self, layer: Layer) -> bool:
        decided = self.policy.decide(layer._replace(reason=None), self.depths)
        return layer.path not in self.asked and decided.recipe is not None

    @contextmanager
    def _inside(self, model: nn.Module, ask: Callable[[], None]) -> Iterator[None]:
        """Learns the layers of a model; it may call another model, after which its own are known again."""
        known = self.shapes, self.depths, self.depth_of_calls, self.others
        layers = layers_of_params(model)
        self.shapes, self.depths = {layer.path: layer.shape for layer in layers}, depths_of(layers)
        if not self.depth_of_calls:
            self.policy.plan(layers)  # for its checks, which are about the outermost model
        self.depth_of_calls, self.others = self.depth_of_calls + 1, {}
        try:
            yield
            if self.others:
                ask()
        finally:
            self.shapes, self.depths, self.depth_of_calls, self.others = known

    def _ask(self, context: nn.module.InterceptorContext, args: tuple, options: dict) -> None:
        """Warns of weights of no layer, if a second trace of the model says that they multiply."""
        model, scope = context.module, context.module.scope
        assert scope is not None
        rngs = {name: getattr(rng, "as_jax_rng", lambda rng=rng: rng)() for name, rng in scope.rngs.items()}
        of_apply = {"rngs": rngs, "method": context.method_name, "mutable": scope.mutable}
        unbound = model.clone(_deep_clone=True, _reset_names=True)
        self.asks = True
        try:
            found = _multiplied(unbound, model.variables, args, options, **of_apply)
        finally:
            self.asks = False
        self.asked |= self.others.keys()
        for path in self.others.keys() & found:
            self.policy.warn("intercept", self.others[path], self.depths)

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
        kind = Einsum if isinstance(module, nn.Einsum) else DotGeneral
        dot = _LinenDot(module, kind(recipe, path, **self.policy.options_of(path)))
        if isinstance(module, nn.Einsum):
            return _einsum(module, dot, *args, **options)
        before = module.dot_general
        object.__setattr__(module, "dot_general", dot)  # modules are frozen, but the call has made this copy
        try:
            return call(*args, **options)
        finally:
            object.__setattr__(module, "dot_general", before)


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
    x, w, _ = operands
    dtype = module.preferred_element_type
    y = dot(subscripts, x, w, precision=module.precision, preferred_element_type=dtype)
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


def _unknown(context: nn.module.InterceptorContext) -> Iterator[Layer]:
    """Describes the parameters that the call of a module without a hook for its products may multiply by."""
    module, of_flax = context.module, type(context.module).__module__.startswith("flax.")
    names = ("embedding",) if context.method_name == "attend" else ("kernel",)
    if isinstance(module, LAYERS) or context.method_name == "setup":
        return
    for name, boxed in module.variables.get("params", {}).items():
        value = nn.unbox(boxed)
        is_matrix = getattr(value, "ndim", 0) >= 2 and value.size > max(value.shape)  # a vector scales
        if is_matrix and (name in names or not of_flax):
            yield Layer(path_of_parameter(path_of(module), name), value.shape, reason=unknown(module, "intercept"))


def _multiplied(
    model: nn.Module, variables: PyTree, args: tuple, options: dict, rngs: PyTree, **of_apply: Any
) -> frozenset[str]:
    """Returns the paths of the parameters by which a call of a model multiplies what depends on its inputs."""
    params = nn.unbox(variables["params"])
    leaves, tree = jax.tree.flatten((args, options, {**variables, "params": {}}, rngs))
    is_array = [hasattr(leaf, "shape") for leaf in leaves]

    def call(params: PyTree, arrays: list[jax.Array]) -> None:
        values = iter(arrays)
        merged = [next(values) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)]
        args, options, others, rngs = jax.tree.unflatten(tree, merged)
        model.apply({**others, "params": params}, *args, rngs=rngs, **of_apply, **options)

    arrays = [leaf for array, leaf in zip(is_array, leaves, strict=True) if array]
    made = [frozenset([path]) for path, *_ in _named(model, params)] + [None] * len(arrays)
    return _products(jax.make_jaxpr(call)(params, arrays).jaxpr, made)[0]


Made = frozenset[str] | None  # the parameters that a value is made of; None for what depends on the inputs


def _products(jaxpr: Any, made: list[Made]) -> tuple[frozenset[str], list[Made]]:
    """Returns the parameters that products take as their other operand, and what the results are made of."""
    of: dict[Any, Made] = dict(zip(jaxpr.invars, made, strict=True))
    read = lambda v: frozenset() if isinstance(v, Literal) else of.get(v, frozenset())  # noqa: E731
    found: frozenset[str] = frozenset()
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        is_product = eqn.primitive.name in _PRODUCTS
        if is_product and None in operands[:2]:
            found |= operands[0] or operands[1] or frozenset()
        known = [] if is_product else [v for v in operands if v is not None]
        results: list[Made] = [None if None in operands else frozenset().union(*known)] * len(eqn.outvars)
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner: Any = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and (count := len(inner.invars)) <= len(operands):
                more, outs = _products(inner, operands[len(operands) - count :])
                found |= more
                results = outs if len(outs) == len(results) else results
        of.update(zip(eqn.outvars, results, strict=True))
    return found, [read(v) for v in jaxpr.outvars]


_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")


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
    """Lists what may be layers of a model: its parameters of two or more axes."""
    tree = model.variables.get("params", {}) if params is None else params
    named = _named(model, nn.unbox(tree))
    return [
        Layer(path, v.shape, reason=None if name == "kernel" else "not named kernel")
        for path, name, v in named
        if v.ndim >= 2 and name not in ("bias", "scale")
    ]


def _named(model: nn.Module, params: PyTree) -> list[tuple[str, str, jax.Array]]:
    """Lists the parameters of a model, after the paths of the layers that they may be the weights of, and names."""
    leaves = [([str(getattr(k, "key", k)) for k in keys], v) for keys, v in jax.tree_util.tree_leaves_with_path(params)]
    return [(path_of_parameter("/".join(path) or model.name or "", name), name, v) for (*path, name), v in leaves]


@layers_of.register(nn.Module)
def _layers_of_module(module: nn.Module, *inputs: PyTree, **keywords: Any) -> list[Layer]:
    """Lists the layers that ``init`` calls, without computing anything."""
    called: dict[str, Layer] = {}
    others: set[str] = set()

    def see(call: Callable, args: tuple, options: dict, context: nn.module.InterceptorContext) -> PyTree:
        result = call(*args, **options)
        if isinstance(context.module, LAYERS) and context.method_name == "__call__":
            layer = describe(context.module, args, options, {})
            called.setdefault(layer.path, layer)
        for layer in _unknown(context):
            if called.setdefault(layer.path, layer) is layer:
                others.add(layer.path)
        return result

    with_params = any("params" in value for value in inputs if isinstance(value, Mapping))
    if with_params or not (inputs or keywords):
        got = "its parameters too" if with_params else "no inputs"
        raise TypeError(
            f"Policy.explain: a Linen module must come with what it is called with, got {got}; "
            "write explain(model, *inputs), without the parameters, or pass these instead of the model"
        )
    with _policy_of_trace(object()), nn.intercept_methods(see):
        variables = jax.eval_shape(partial(module.init, **keywords), jax.random.key(0), *inputs)
    if others:
        params = {"params": variables["params"]}  # so that apply makes a cache, as init did
        others -= _multiplied(module, params, inputs, keywords, {"params": jax.random.key(0)}, mutable=True)
    shapes = {layer.path: layer.shape for layer in layers_of_params(module, variables["params"])}
    # A layer that is applied as a model of its own, such as a head with tied weights, has no parameters of this one.
    whole = {path: shapes.get(path, layer.shape) for path, layer in called.items()}
    return [
        layer._replace(shape=whole[path], stacked=len(whole[path]) > len(layer.shape))
        for path, layer in called.items()
        if path not in others
    ]
