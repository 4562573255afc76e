"""A call of a layer, dense or grouped: the checks of its arguments, the operands of its GEMMs, and its derivative."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core.mesh import Entry, Placement, axes_of_dims, match_varying, resharded
from .._core.tensor import NVFP4Tensor
from .._ops.arguments import Accumulation, Checks, Implementation
from .._ops.quantize import dequantize
from .._primitives._groups import check_sizes
from ..recipes import Recipe
from ..spec import QuantSpec
from . import stats as statistics
from .keys import PASS_KEY, needs_key
from .quantizer import DY, Operand, Pair, Quantizer, SpecPair, T, X, named, pack, unpack
from .stats import Made
from .weights import LayerChecks, WeightAxes, Weights

Form = Literal["forward", "transposed", "original"] | None
Given = jax.Array | None  # an argument that a call may lack
Known = Given | Pair  # of w: its amax, or its quantized forms for fprop and dgrad
# x and w as the backward pass reads them, key, group_sizes, and the statistics of x and w
Residuals = tuple[Any, Any, Given, Given, Given]


class Products(ABC):
    """Computes the GEMMs of one call of a layer, of quantized operands and in high precision.

    ``group_sizes`` is None for a dense layer. Gradients have the dtypes of ``call.dtypes``.
    """

    transposes_w = False  # whether dgrad transposes the w of fprop also where a quantizer could make both

    def __init__(self, call: "Call", group_sizes: Given, tokens: int) -> None:
        self.call, self.weights = call, call.weights

    @staticmethod
    @abstractmethod
    def n_and_k(call: "Call", x: jax.Array, w: Operand) -> tuple[int, int]:
        """Returns N and K; raises where x and w do not fit."""

    @staticmethod
    def tokens(call: "Call", x: jax.Array, w: Operand) -> jax.Array:
        """Returns x [*rows, K] as the GEMMs read it; raises where its sharding and that of w do not fit."""
        return x

    def masked(self, x: jax.Array) -> jax.Array:
        """Returns x [*rows, K] without what rows hold that no GEMM reads."""
        return x

    @abstractmethod
    def quantized_weights(self, quantizer: Quantizer, w: jax.Array, specs: SpecPair, amax: Given) -> Pair:
        """Quantizes w along its last axis and along the one before, by the specs that are given."""

    @abstractmethod
    def weights_again(self, quantizer: Quantizer, w: NVFP4Tensor, dtype: DTypeLike, spec: QuantSpec) -> NVFP4Tensor:
        """Quantizes the values of w [..., N, K] along N."""

    @abstractmethod
    def fprop(self, x: Operand, w: NVFP4Tensor, bias: Given) -> jax.Array:
        """Computes y of w [..., N, K]."""

    @abstractmethod
    def fprop_in_high_precision(self, x: jax.Array, w: jax.Array, bias: Given) -> jax.Array: ...

    @abstractmethod
    def dgrad(self, dy: NVFP4Tensor, w: NVFP4Tensor) -> jax.Array:
        """Computes dx of w [..., K, N]."""

    @abstractmethod
    def dgrad_in_high_precision(self, dy: jax.Array, w: Operand) -> jax.Array:
        """Computes dx of the original w, or of the one that fprop read."""

    @abstractmethod
    def wgrad(self, dy: NVFP4Tensor, x: NVFP4Tensor) -> jax.Array:
        """Computes dw, in the axes of w, of dy and x quantized along their rows."""

    @abstractmethod
    def wgrad_in_high_precision(self, dy: jax.Array, x: jax.Array) -> jax.Array: ...


class OfOperands(NamedTuple, Generic[T]):
    """Holds one value for each operand that may have a gradient."""

    x: T
    w: T
    bias: T


_NO_AXES: OfOperands[tuple[Entry, ...]] = OfOperands((), (), ())
_NO_DTYPES: OfOperands[Any] = OfOperands(None, None, None)


@dataclass(frozen=True)
class Call(LayerChecks):
    """Holds the static arguments of one call of a layer, and checks the others."""

    weights: Weights
    products: type[Products]
    out_dtype: Any = None  # None is that of x
    accumulation: Accumulation = "fast"
    implementation: str | None = None
    axes: OfOperands[tuple[Entry, ...]] = _NO_AXES  # mesh axes by dimension, for gradients
    dtypes: OfOperands[Any] = _NO_DTYPES  # None has no gradient
    differentiated: bool = True

    @property
    def common(self) -> Implementation:
        """Returns the implementation of quantizers and gradient GEMMs: a kernel is named for the forward GEMM alone."""
        if self.implementation == "native":
            return "native"
        return "reference" if self.implementation == "reference" else None

    def with_types(self, *operands: Operand | None) -> "Call":
        """Returns the call with mesh axes and dtypes of x, w and bias; those of a tensor have no gradient."""
        arrays = [v if isinstance(v, jax.Array) else None for v in operands]
        axes = OfOperands(*(() if v is None else tuple(axes_of_dims(jax.typeof(v))) for v in arrays))
        return replace(self, axes=axes, dtypes=OfOperands(*(None if v is None else v.dtype for v in arrays)))

    @property
    def kept(self) -> tuple[Form, Form]:
        """Returns the forms of x and of w that the backward pass reads; None where it reads none."""
        if self.weights.frozen or not self.differentiated:
            return None, None
        return _form(self.recipe.wgrad, False), _form(self.recipe.dgrad, self.weights.one)

    def dtype_of_x(self, x: jax.Array) -> None:
        """Refuses an array that the forward GEMM does not read."""
        fprop = self.recipe.fprop
        if fprop is not None and fprop.x is None and x.dtype == jnp.float32:
            raise TypeError(f"{self.op}: x must be bfloat16 or float16 for a weight-only recipe, got {x.dtype}")

    def needed_key(self, key: Given) -> Given:
        """Returns the key if the recipe needs one, else None. Only a call with gradients needs one for them."""
        if not self.recipe.stochastic:
            return None
        if key is None:
            if self.recipe.stochastic_forward:
                raise needs_key(self.op, PASS_KEY)
            return None
        return self.key(key)


def _form(gradient: tuple | Literal["dequantized"] | None, one: bool) -> Form:
    if gradient is None:
        return "original"
    return "forward" if gradient == "dequantized" or one else "transposed"


def call_of(
    op: str,
    products: type[Products],
    recipe: Recipe,
    w_axes: WeightAxes,
    out_dtype: DTypeLike | None,
    accumulation: Accumulation,
    implementation: str | None,
    kernels: Sequence[str],
) -> Call:
    """Checks the settings of ``linear`` and ``grouped_linear``."""
    check = Checks(op)
    check.lowering(implementation, kernels)
    check.choice("accumulation", accumulation, get_args(Accumulation))
    check.choice("w_axes", w_axes, get_args(WeightAxes))
    dtype = None if out_dtype is None else check.float_dtype("out_dtype", out_dtype)
    return Call(op, recipe, Weights(w_axes), products, dtype, accumulation, implementation)


def multiply(
    call: Call,
    x: ArrayLike,
    w: object,
    key: Given,
    w_gather: tuple[Placement, Placement] | None,
    *,
    w_amax: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    group_sizes: ArrayLike | None = None,
    stats: ArrayLike | None = None,
) -> jax.Array:
    """Checks the arguments of a layer and computes it."""
    products, known = call.products, call.weight_amax(w, w_amax)
    w, forms, recipe = call.operand(w)
    call = replace(call, recipe=recipe)
    key = call.needed_key(key)
    x = call.float_array("x", x)
    bias = None if bias is None else call.float_array("bias", bias)
    sizes = None if group_sizes is None else call.group_sizes(group_sizes, math.prod(x.shape[:1]))
    call.dtype_of_x(x)
    n, k = products.n_and_k(call, x, w)
    probe = statistics.check_probe(call, "stats", stats, None if sizes is not None else k)
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{call.op}: bias must have shape (N,)=({n},), got {bias.shape}")
    if sizes is not None:
        check_sizes(call.op, sizes, w.shape[0])
    call.contractions(w.shape, n, k)
    weights, w = call.placed(w, w_gather)
    one = recipe.one_weight and (w_gather is not None or (products.transposes_w and forms is None))
    call = replace(call, weights=weights._replace(one=one), out_dtype=call.out_dtype or x.dtype)
    leaves, structure = jax.tree.flatten((products.tokens(call, x, w), w, bias, sizes, probe, forms))
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    *operands, sizes, probe, forms = jax.tree.unflatten(structure, match_varying(*leaves, like=(key, known)))
    sizes = resharded(sizes, [None])  # where a group begins depends on all sizes before it
    y = layer(*operands, key, known if forms is None else forms, sizes, probe, call.with_types(*operands))
    return y.reshape(*x.shape[:-1], n)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def layer(
    x: jax.Array, w: Operand, bias: Given, key: Given, known: Known, group_sizes: Given, stats: Given, call: Call
) -> jax.Array:
    """Computes y [*rows, N] of x [*rows, K]; ``call`` says of which w."""
    return _forward(x, w, bias, key, known, group_sizes, None, replace(call, differentiated=False))[0]


def _forward(
    x: jax.Array, w: Operand, bias: Given, key: Given, known: Known, group_sizes: Given, stats: Given, call: Call
) -> tuple[jax.Array, Residuals]:
    recipe, weights, (kept_x, kept_w) = call.recipe, call.weights, call.kept
    if call.differentiated and recipe.stochastic and key is None:
        raise needs_key(call.op, PASS_KEY)
    products, quantizer = call.products(call, group_sizes, x.shape[0]), Quantizer(key, call.common)
    x = products.masked(x)
    of_x, of_w = recipe.fprop or (None, None)
    of_x_t = recipe.wgrad_specs.x if recipe.wgrad_specs and kept_x == "transposed" else None
    key_of_x, unit = quantizer.key_of(X, of_x, of_x_t), recipe.unit_of_wgrad
    again = recipe.requantize and of_x is not None
    x_row, x_t = quantizer.pair(x, (of_x, None if again else of_x_t), key_of_x, unit=unit)
    if again and x_row is not None and of_x_t is not None:
        x_t = quantizer.again(x_row, x.dtype, of_x_t, key_of_x, unit)
    made_of_x = Made(x, (x_row, x_t))
    qx, saved_x = _named(x if x_row is None else x_row, kept_x, x_t, x)
    if isinstance(w, NVFP4Tensor):
        # w is an argument, which a policy that saves residuals by their name need not copy.
        y = products.fprop(qx, weights.for_fprop(unpack(w)), bias)
        return y, (None, w, key, group_sizes, statistics.forward(stats, made_of_x, Made(x, (None, None))))
    if isinstance(known, tuple):  # arguments, as above
        w_row, w_t = map(unpack, known)
        qw, saved_w = w_row, _saved(kept_w, w_row, w_t, w)
    else:
        of_w_t = recipe.dgrad_specs.w if recipe.dgrad_specs and kept_w == "transposed" else None
        of_array = None if recipe.requantizes_w else of_w_t
        pair = products.quantized_weights(quantizer, w, weights.ordered(of_w, of_array), known)
        w_row, w_t = weights.ordered(*pair)
        if recipe.requantizes_w and w_row is not None and of_w_t is not None:
            w_row = weights.kept(w_row)
            w_t = products.weights_again(quantizer, w_row, w.dtype, of_w_t)
        # Named before they are gathered: a checkpoint policy saves the quantizers' work, and the part of a device.
        qw, saved_w = _named(w_row, kept_w, w_t, w)
    if qw is None:
        y = products.fprop_in_high_precision(x, w, bias)
    else:
        qw = weights.for_fprop(qw)
        y = products.fprop(qx, qw, bias)
    made_of_w = Made(w if stats is None else weights.as_nk(w), (w_row, w_t), matrices=True)
    found = statistics.forward(stats, made_of_x, made_of_w)
    return y, (pack(saved_x), pack(qw if kept_w == "forward" else saved_w), key, group_sizes, found)


def _saved(form: Form, forward: Operand | None, transposed: NVFP4Tensor | None, original: jax.Array) -> Any:
    """Returns what the backward pass reads; where it reads nothing, the operand of the forward GEMM."""
    return {"transposed": transposed, "original": original}.get(form or "", forward)


def _named(forward: Operand | None, form: Form, transposed: NVFP4Tensor | None, original: jax.Array) -> tuple[Any, Any]:
    """Names the operand of the forward GEMM and what the backward pass reads, which may be the same; returns both."""
    forward = forward if forward is None else named(forward, form == "forward")
    saved = _saved(form, forward, transposed, original)
    return forward, named(saved, True) if form in ("transposed", "original") else saved


def _backward(call: Call, residuals: Residuals, dy: jax.Array) -> tuple[Given, ...]:
    x, w, key, group_sizes, found = residuals
    x, w, recipe, weights = unpack(x), unpack(w), call.recipe, call.weights
    products, quantizer = call.products(call, group_sizes, dy.shape[0]), Quantizer(key, call.common)
    dy = products.masked(dy)
    dgrad, wgrad = recipe.dgrad_specs, recipe.wgrad_specs
    of_dy = dgrad and dgrad.dy, wgrad and wgrad.dy
    dy_row, dy_t = quantizer.pair(dy, of_dy, quantizer.key_of(DY, *of_dy), unit=recipe.unit_of_wgrad)
    if dy_row is None:
        w = weights.for_fprop(w) if weights.frozen else w
        dx = products.dgrad_in_high_precision(dy, w)
    else:
        dx = products.dgrad(dy_row, weights.for_dgrad(w, recipe, call.common))
    if weights.frozen:
        dw = None
    elif dy_t is None:
        dw = products.wgrad_in_high_precision(dy, dense(x, dy.dtype, call.common))
    else:
        dw = products.wgrad(dy_t, x)
    rows = tuple(range(dy.ndim - 1))
    db = None if call.dtypes.bias is None else jnp.sum(dy.astype(jnp.float32), rows).astype(call.dtypes.bias)
    gradients = zip((dx, dw, db), call.axes, strict=True)
    of_stats = statistics.backward(found, Made(dy, (dy_row, dy_t)))
    return *(g if g is None else resharded(g, axes) for g, axes in gradients), None, None, None, of_stats


def dense(t: Operand, dtype: DTypeLike, implementation: Implementation) -> jax.Array:
    """Returns the values of a tensor, or an array as it is."""
    return dequantize(t, dtype, implementation=implementation) if isinstance(t, NVFP4Tensor) else t


layer.defvjp(_forward, _backward)
