"""jit, vmap, grad, remat and scan of the operations: a vmap is a Python loop of calls, bit for bit."""

from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, assert_vmap_is_a_loop, quantize_as, quantize_pair_as, stack
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put
from operands import exact_tensor, normal

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_RHT_SR_UNBIASED,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    Recipe,
    dequantize,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4.recipes import DEFAULT
from jnvfp4.spec import four_over_six, name_of

SIZE = 3
KEY = jax.random.key(5)
SIZES = jnp.array([9, 30], jnp.int32)  # of groups
# Specs with different operands; the rest differ from them inside a block only.
SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, four_over_six(amax_scope="row"))
transposed_or_not = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])


# ---------------------------------------------------------------- vmap of quantize and dequantize
ROWS, COLS = 64, 128  # either is a multiple of 64


def amaxes_of(transpose, axis):
    """An amax for every scope, for each example unless ``axis`` is None; nothing if it is "found"."""
    if axis == "found":
        return {}
    batch = () if axis is None else (SIZE,)
    rows, cols = (COLS, ROWS) if transpose else (ROWS, COLS)
    shapes = {"tensor": batch, "row": (*batch, rows), "window64": (*batch, rows, cols // 64)}
    rng = np.random.default_rng(1)
    return {scope: jnp.asarray(rng.uniform(1, 4, shape), jnp.float32) for scope, shape in shapes.items()}


@partial(jax.jit, static_argnums=(3, 4))
def quantize_by(x, amaxes, key, specs, transpose):
    """``x`` by all specs in one program, since that costs little more than one. ``amaxes``: by scope, or empty."""
    return {name_of(s): quantize_as(s, x, amaxes, key, transpose) for s in specs}


# The batch axes of x, of the amaxes (None: one for all, "found": none is given) and of the key.
BATCHED = [(0, "found", 0), (0, None, None), (0, 0, None), (None, 0, 0), (None, None, 0)]


@transposed_or_not
@pytest.mark.parametrize(("x_axis", "amax_axis", "key_axis"), BATCHED, ids=str)
def test_vmap_of_quantize(native, transpose, x_axis, amax_axis, key_axis):
    x = normal((ROWS, COLS) if x_axis is None else (SIZE, ROWS, COLS))
    amaxes = amaxes_of(transpose, amax_axis)
    key = KEY if key_axis is None else jax.random.split(KEY, SIZE)
    f = lambda x, amaxes, key: quantize_by(x, amaxes, key, SPECS, transpose)  # noqa: E731
    assert_vmap_is_a_loop(f, (x, amaxes, key), (x_axis, dict.fromkeys(amaxes, amax_axis), key_axis))


def test_one_key_rounds_equal_examples_alike(native):
    """The index restarts in every example, unlike that of a leading axis."""
    x = jnp.broadcast_to(normal((ROWS, COLS)), (2, ROWS, COLS))
    f = partial(quantize, spec=NVFP4_SR, amax=jnp.float32(4), key=KEY)
    one, two = jax.vmap(f)(x).data
    assert_bitwise(one, two)
    assert not np.array_equal(*f(x).data)


@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (2, 1), (0, -1), (-1, 2)])
def test_vmap_over_other_axes(native, in_axis, out_axis):
    x = jnp.moveaxis(normal((SIZE, 32, 48)), 0, in_axis)
    amax = jnp.asarray([1.0, 2.0, 3.0])
    f = lambda x, a: (lambda t: (t.data, t.scale))(quantize(x, amax=a))  # noqa: E731
    assert_vmap_is_a_loop(f, (x, amax), (in_axis, 0), out_axis)


@transposed_or_not
def test_nested_vmap_of_quantize(native, transpose):
    """Keys of the outer axis only, x of both."""
    x, keys = normal((2, SIZE, ROWS, COLS)), jax.random.split(KEY, 2)
    f = lambda x, key: quantize_by(x, {}, key, SPECS, transpose)  # noqa: E731
    got = jax.vmap(jax.vmap(f, (0, None)))(x, keys)
    want = [f(x[i, j], keys[i]) for i in range(2) for j in range(SIZE)]
    assert_same_tensor(got, jax.tree.map(lambda *p: stack(*p).reshape(2, SIZE, *p[0].shape), *want))


@pytest.mark.parametrize("shape", [(ROWS, COLS), (2, ROWS, COLS)], ids=str)
@pytest.mark.parametrize("in_axis", [0, 1, -1])
def test_vmap_of_the_amax_after_rotation(native, shape, in_axis):
    """One for each example, over all of its leading axes."""
    sizes = 2.0 ** jnp.arange(SIZE).reshape(-1, *[1] * len(shape))
    x = jnp.moveaxis(normal((SIZE, *shape), dtype="fp32") * sizes, 0, in_axis)
    for transpose in (False, True):
        f = lambda x, t=transpose: quantize(x, NVFP4_RHT, transpose=t).amax  # noqa: E731
        assert jax.vmap(f, in_axis)(x).shape == (SIZE,)
        assert_vmap_is_a_loop(f, (x,), (in_axis,))


def test_vmap_of_an_amax_per_matrix(native):
    x, amax = normal((SIZE, 2, 32, 48)), jnp.asarray(np.random.default_rng(0).uniform(1, 3, (SIZE, 2)), jnp.float32)
    f = lambda x, a: quantize(x, amax=a)  # noqa: E731
    for given, axes in ((amax, (0, 0)), (amax[0], (0, None)), (amax[:, 0], (0, 0))):
        assert_vmap_is_a_loop(f, (x, given), axes)
    assert_vmap_is_a_loop(jax.vmap(f), (x, amax[0]), (0, None))
    assert_vmap_is_a_loop(jax.vmap(f, (0, None)), (jnp.swapaxes(x, 0, 1), amax[0]), (0, 0))


# ---------------------------------------------------------------- vmap of quantize_pair
PAIRS = (
    (NVFP4, NVFP4_RHT),
    (NVFP4_SR, NVFP4_RHT_SR),
    (NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED),
    (NVFP4_2D, NVFP4_2D),
    (ROW_SCALED, ROW_SCALED),
    (four_over_six(), four_over_six()),
    (WINDOW64, WINDOW64),
)


@jax.jit
def quantize_pairs(x, row_amaxes, col_amaxes, key):
    """The amaxes by scope, or empty."""
    return [quantize_pair_as(pair, x, (row_amaxes, col_amaxes), key) for pair in PAIRS]


ONE_OF_FOUR = [tuple(0 if i == j else None for i in range(4)) for j in range(4)]


@pytest.mark.parametrize("batched", [(0, 0, 0, 0), (0, "found", "found", 0), *ONE_OF_FOUR], ids=str)
def test_vmap_of_quantize_pair(native, batched):
    """Any of x, the two amax and the key may be shared."""
    x_axis, *amax_axes, key_axis = batched
    x = normal((ROWS, COLS) if x_axis is None else (SIZE, ROWS, COLS))
    amaxes = [amaxes_of(transpose, axis) for transpose, axis in zip((False, True), amax_axes, strict=True)]
    key = KEY if key_axis is None else jax.random.split(KEY, SIZE)
    axes = (x_axis, *map(dict.fromkeys, amaxes, amax_axes), key_axis)
    assert_vmap_is_a_loop(quantize_pairs, (x, *amaxes, key), axes)


# ---------------------------------------------------------------- vmap of dequantize
AMAX_FORMATS = {
    "tensor": ((), Format()),
    "row": ((32,), Format("row")),
    "window64": ((32, 2), Format("window64")),
    "rht": ((), Format(rht=True)),
}
SOME_OF_THREE = list(product([0, None], repeat=3))[:-1]


@pytest.mark.parametrize("batched", SOME_OF_THREE, ids=str)
def test_vmap_of_dequantize(native, batched):
    t = exact_tensor((SIZE, 32, 128))
    leaves = {name: _batched_leaves(t, amax, batched) for name, (amax, _) in AMAX_FORMATS.items()}
    f = jax.jit(lambda leaves: {n: dequantize(NVFP4Tensor(*of, AMAX_FORMATS[n][1])) for n, of in leaves.items()})
    assert_vmap_is_a_loop(f, (leaves,), (dict.fromkeys(leaves, batched),))


def test_an_amax_for_each_example_of_vmap_needs_vmap_to_decode(native):
    t = jax.vmap(jax.vmap(quantize))(normal((2, 3, 4, 16, 32)))
    assert t.amax.shape == (2, 3)
    hint = r"got \(2, 3\); it has one for each index of the first 2 axes, so call dequantize in jax.vmap over these 2"
    with pytest.raises(ValueError, match="dequantize: t.amax must have shape .*" + hint):
        dequantize(t)
    assert jax.vmap(jax.vmap(dequantize))(t).shape == t.shape


def test_vmap_gives_each_matrix_an_amax_and_not_each_row(native):
    t = quantize(normal((SIZE, 2, 32, 48)), amax=jnp.full((SIZE, 2), 3.0))
    f = lambda d, s, a: dequantize(NVFP4Tensor(d, s, a))  # noqa: E731
    for amax, axis in ((t.amax, 0), (t.amax[0], None), (t.amax[:, 0], 0), (t.amax[0, 0], None)):
        assert_vmap_is_a_loop(f, (t.data, t.scale, amax), (0, 0, axis))
        if axis == 0:
            eqns = jax.make_jaxpr(jax.vmap(f))(t.data, t.scale, amax).jaxpr.eqns
            found = [eqn.invars[2].aval.shape for eqn in eqns if eqn.primitive.name == "nvfp4_dequantize"]
            assert found == [(SIZE, 2)]


# ---------------------------------------------------------------- vmap of matmul_nt
M, N, K = 16, 8, 128


def _batched_leaves(t, amax_shape, axes):
    """data, scale and amax of a batched tensor, without the batch axis where ``axes`` says None."""
    rng = np.random.default_rng(t.shape[-2])
    amax = jnp.asarray(2688.0 * 2.0 ** rng.integers(-2, 3, (SIZE, *amax_shape)), jnp.float32)
    parts = (t.data, t.scale, amax)
    return tuple(p if axis == 0 else p[0] for p, axis in zip(parts, axes, strict=True))


class Product(NamedTuple):
    """Operands of ``matmul_nt``: which of data, scale and amax have a batch axis, and which axes they have besides."""

    a: tuple = (0, 0, 0)
    b: tuple = (0, 0, 0)
    scopes: tuple[str, str] = ("tensor", "tensor")
    leads: tuple = ((), ())
    amax_per_matrix: bool = False
    bias: int | str | None = "none"  # the axis of one [N]; or of the shape of a result: one "whole", or "wholes"
    dtype: str | None = None  # of an a that is no tensor
    norm: int | str | None = "none"  # the axis of the gain, or none

    def operands(self):
        """The operands, and the axes for vmap."""
        sides = zip((M, N), (self.a, self.b), self.scopes, self.leads, strict=True)
        (a, a_axes), (b, b_axes) = (self._tensor(*side) for side in sides)
        if self.dtype is not None:
            a = jnp.round(4 * normal((*(SIZE,) * (self.a[0] == 0), M, K), 1, self.dtype))
            a = a if self.norm == "none" else jnp.where(a < 0, -2, 2).astype(a.dtype)  # squares sum exactly
            a_axes = self.a[0]
        result = (*self.leads[0], M, N)
        wholes = {"whole": normal(result, 3), "wholes": normal((SIZE, *result), 3)}
        bias = {"none": None, None: normal((N,), 3), 0: normal((SIZE, N), 3), 1: normal((N, SIZE), 3), **wholes}
        gain = {"none": None, None: normal((K,), 4), 0: normal((SIZE, K), 4), 1: normal((K, SIZE), 4)}[self.norm]
        axes = {"none": None, "whole": None, "wholes": 0}
        axes = a_axes, b_axes, axes.get(self.bias, self.bias), axes.get(self.norm, self.norm)
        return (a, b, bias[self.bias], None if gain is None else jnp.round(2 * gain)), axes

    def _tensor(self, rows, axes, scope, lead):
        t = exact_tensor((SIZE, *lead, rows, K), rows)
        amax = {"tensor": lead if self.amax_per_matrix else (), "row": (rows,), "window64": (rows, K // 64)}[scope]
        return _batched_leaves(t, amax, axes), axes

    def multiply(self, a, b, bias, gain):
        a = a if self.dtype else NVFP4Tensor(*a, Format(self.scopes[0]))
        dtype = a.dtype if self.dtype else jnp.float32
        accumulation = "pinned" if "window64" in self.scopes else "fast"
        b = NVFP4Tensor(*b, Format(self.scopes[1]))
        norm = None if gain is None else (gain, 1e-9)
        return matmul_nt(a, b, bias=bias, norm=norm, out_dtype=dtype, accumulation=accumulation)


ALL, DATA, AMAX, NONE = (0, 0, 0), (0, 0, None), (None, None, 0), (None, None, None)
SOME = [*product((ALL, DATA, AMAX, NONE), (ALL, DATA, AMAX))]
OWN = ((ALL, ALL, False), (ALL, ALL, True), (ALL, NONE, True), (NONE, ALL, True))  # each matrix with an amax
LEADS = [((2,), ()), ((2,), (2,)), ((2, 2), ()), ((2, 2), (2, 2))]
PRODUCTS = [
    *(Product(NONE, NONE, bias=0), Product((0, None, None), NONE), Product((None, 0, None), NONE)),
    *(Product(NONE, (0, None, None)), Product(NONE, (None, 0, None)), Product(NONE, ALL), Product(ALL, NONE)),
    *(Product(a, b, bias=bias) for (a, b), bias in zip(SOME, ["none", None, 0] * 4, strict=True)),
    *(Product(a, b, scopes) for (a, b), scopes in product(SOME[::2], [("row", "row"), ("window64", "tensor")])),
    *(Product(a, b, scopes) for a, b in SOME[::5] for scopes in [("row", "window64"), ("window64", "window64")]),
    *(Product(a, b, leads=leads, amax_per_matrix=own) for a, b, own in OWN for leads in LEADS),
    *(Product(a, b, dtype=d) for a, b in ((ALL, ALL), (ALL, NONE), (NONE, ALL)) for d in ("bf16", "fp16")),
    *(Product(bias=axis, dtype="bf16") for axis in (0, 1)),
    *(Product(a, b, bias=bias) for (a, b), bias in zip(SOME, ["wholes", "whole"] * 6, strict=True)),
    *(Product(ALL, b, leads=leads, bias=bias) for b in (ALL, NONE) for leads in LEADS for bias in ("whole", "wholes")),
    *(Product(NONE, NONE, bias="wholes"), Product(NONE, NONE, dtype="bf16", norm=0)),
    *(
        Product(a, b, dtype=dtype, norm=norm, bias=bias)
        for a, b in ((ALL, ALL), (ALL, NONE), (NONE, ALL))
        for norm, dtype, bias in ((None, "bf16", "none"), (0, "fp16", "wholes"), (1, "bf16", None), (None, "fp16", 0))
    ),
]


def test_vmap_of_matmul(native):
    """Whichever parts of operands are batched: all cases in one program."""
    operands, axes = zip(*(case.operands() for case in PRODUCTS), strict=True)
    f = jax.jit(lambda all: {str(c): c.multiply(*of) for c, of in zip(PRODUCTS, all, strict=True)})
    assert_vmap_is_a_loop(f, (operands,), (axes,))


def test_nested_vmap_of_matmul(native):
    """All pairs of three a and two b."""
    a, b = exact_tensor((SIZE, M, K), 1), exact_tensor((2, N, K), 2)
    a_axes, b_axes = NVFP4Tensor(0, 0, None), NVFP4Tensor(0, 0, None)
    f = jax.vmap(jax.vmap(matmul_nt, (None, b_axes)), (a_axes, None))
    want = [[np.asarray(matmul_nt(a[i], b[j])) for j in range(2)] for i in range(SIZE)]
    assert_bitwise(f(a, b), np.stack(want))


@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (2, 1), (0, 2)])
def test_vmap_of_matmul_over_other_axes(native, in_axis, out_axis):
    def parts(t):
        return jnp.moveaxis(t.data, 0, in_axis), jnp.moveaxis(t.scale, 0, in_axis), t.amax

    operands = tuple(parts(exact_tensor((SIZE, rows, K), rows)) for rows in (M, N))
    axes = ((in_axis, in_axis, None),) * 2
    assert_vmap_is_a_loop(lambda a, b: matmul_nt(NVFP4Tensor(*a), NVFP4Tensor(*b)), operands, axes, out_axis)


# ---------------------------------------------------------------- vmap of linear and dot_general
VMAPS_OF_LINEAR = {  # the recipe, what is batched of x, w and the key, and the tokens
    "default, shared w": (DEFAULT, (0, None, None), (30,)),
    "default, own w": (DEFAULT, (0, 0, None), (30,)),
    "leading axes, shared w": (DEFAULT, (0, None, None), (2, 32)),
    "leading axes, own w": (DEFAULT, (0, 0, None), (2, 32)),
    "pretrain, shared w": (recipes.pretrain(), (0, None, 0), (30,)),
    "pretrain, shared x": (recipes.pretrain(), (None, 0, 0), (30,)),
    "window64": (recipes.window64(), (0, None, 0), (30,)),
    "row_scaled": (recipes.row_scaled(), (None, None, 0), (30,)),
}


def test_vmap_of_linear_and_its_gradients(cpu):
    """All cases in one program."""

    def one(recipe, x, w, key):
        y, pull = jax.vjp(partial(linear, recipe=recipe, key=key), x, w)
        return y, pull(normal(y.shape))

    @jax.jit
    def f(operands):
        return {name: one(recipe, *operands[name]) for name, (recipe, _, _) in VMAPS_OF_LINEAR.items()}

    axes, operands, w, keys = {}, {}, normal((SIZE, 16, 64), 2), jax.random.split(KEY, SIZE)
    for name, (_, of_case, tokens) in VMAPS_OF_LINEAR.items():
        parts = zip((normal((SIZE, *tokens, 64), 1), w, keys), of_case, strict=True)
        axes[name], operands[name] = of_case, tuple(v if axis == 0 else v[0] for v, axis in parts)
    assert_vmap_is_a_loop(f, (operands,), (axes,))


def test_gradient_of_vmap_sums_over_a_shared_weight(cpu):
    x, w = normal((SIZE, 32, 48), 1, "fp32"), normal((16, 48), 2, "fp32")
    loss = lambda w, x: jnp.sum(linear(x, w) ** 2)  # noqa: E731
    got = jax.jit(jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, x))))(w)
    one = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(got, sum(one(w, x[i]) for i in range(SIZE)), rtol=1e-5, atol=1e-4)


def test_nested_vmap_of_linear_with_split_rows(cpu):
    """Each example has an amax, and the random bits of a device's rows are not neighbours."""
    mesh = make_mesh(jax.devices("cpu")[:2], "x")
    x, w = normal((2, SIZE, 2, 32, 64), 1), normal((16, 64), 3)
    f = jax.jit(lambda x: linear(x, w, Recipe((NVFP4_SR, NVFP4), None, None), key=KEY))
    got = jax.jit(jax.vmap(jax.vmap(f)))(put(x, mesh, P(None, None, None, "x")))
    assert_bitwise(got, np.stack([[np.asarray(f(v)) for v in of_row] for of_row in x]))


# ---------------------------------------------------------------- jit, scan, eval_shape, make_jaxpr
OPERATIONS = {
    "quantize": quantize,
    "quantize_amax": partial(quantize, amax=2.0),
    "quantize_row": partial(quantize, spec=ROW_SCALED),
    "quantize_transposed": partial(quantize, spec=NVFP4_2D, transpose=True),
    "quantize_rht_sr": lambda x: quantize(x, NVFP4_RHT_SR, key=KEY, transpose=True),
    "quantize_window64": partial(quantize, spec=WINDOW64),
    "quantize_4over6": partial(quantize, spec=four_over_six("mse", fast=True)),
    "quantize_pair": quantize_pair,
    "quantize_pair_sr": lambda x: quantize_pair(x, NVFP4_SR, NVFP4_RHT_SR, key=KEY),
    "quantize_pair_window64": partial(quantize_pair, row_spec=WINDOW64, col_spec=WINDOW64),
    "quantize_pair_unfused": lambda x: quantize_pair(x, WINDOW64, NVFP4_SR, key=KEY),
    "dequantize": lambda x: dequantize(quantize(x), jnp.bfloat16),
    "dequantize_rht": lambda x: dequantize(quantize(x, NVFP4_RHT), jnp.bfloat16),
    "matmul_nt": lambda x: matmul_nt(quantize(x), quantize(x)),
    "matmul_window64": lambda x: matmul_nt(quantize(x, WINDOW64), quantize(x)),
    "weight_only": lambda x: matmul_nt(x, quantize(x)),
    "grouped_matmul_nt": lambda x: jnvfp4.grouped_matmul_nt(x, quantize(jnp.stack([x, x])), SIZES),
    "grouped_linear": lambda x: jnvfp4.grouped_linear(x, jnp.stack([x, x]), SIZES),
    "linear": lambda x: linear(x, x),
    "linear_pretrain": lambda x: linear(x, x, recipes.pretrain(), key=KEY),
    "linear_unbiased": lambda x: linear(x, x, recipes.pretrain(unbiased=True), key=KEY),
    "fake_quant": jnvfp4.fake_quant,
    "fake_quant_amax": partial(jnvfp4.fake_quant, amax=2.0),
    "fake_quant_sr": lambda x: jnvfp4.fake_quant(x, NVFP4_SR, key=KEY),
}


def by_every_operation(x):
    return {name: f(x) for name, f in OPERATIONS.items()}


jitted = jax.jit(by_every_operation)


def test_neither_jit_nor_64_bit_mode_changes_a_bit(native):
    x = normal((64, 64))
    want = jitted(x)
    assert_same_tensor(by_every_operation(x), want)
    with jax.enable_x64(True):
        assert_same_tensor(jitted(x), want)


def test_scan_equals_a_loop(native):
    xs = normal((SIZE, 64, 64))
    got = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, by_every_operation(x)), 0, xs)[1])(xs)
    assert_same_tensor(got, jax.tree.map(stack, *map(jitted, xs)))


def test_eval_shape_predicts_the_result():
    """Also of weakly typed arrays, of which no result is."""
    x = normal((64, 64))
    weak = jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=True)
    result = jitted(x)
    for shapes in (jax.eval_shape(by_every_operation, x), jax.eval_shape(by_every_operation, weak)):
        assert jax.tree.structure(shapes) == jax.tree.structure(result)
        for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(result), strict=True):
            assert (shape.shape, shape.dtype, shape.weak_type) == (leaf.shape, leaf.dtype, False)


def test_compile_time_evaluation(native):
    """In a shape that nothing else compiles, so that the operations are lowered under it."""
    x = normal((64, 192))

    def evaluated(x):
        with jax.ensure_compile_time_eval():
            return by_every_operation(x)

    def constant(_):
        result = evaluated(x)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result))
        return result

    want = jitted(x)
    for got in (evaluated(x), jax.jit(constant)(x), jax.jit(evaluated)(x)):
        assert_same_tensor(got, want)


# Of x [64, 64], the same as two matrices, and its first row.
GUARDED = {
    **{name: lambda x, *_, f=f: f(x) for name, f in OPERATIONS.items()},
    "quantize_pair_amax": lambda x, *_: quantize_pair(x, amax=(2, 3.0)),
    "quantize_matrices": lambda x, matrices, _: quantize(matrices, NVFP4_SR, key=KEY),
    "quantize_vmap": lambda x, matrices, _: jax.vmap(partial(quantize, spec=NVFP4_SR, key=KEY))(matrices),
    "matmul_bias": lambda x, _, row: matmul_nt(quantize(x), quantize(x), bias=row),
    "dot_general": lambda x, *_: jnvfp4.dot_general(x, x, (((1,), (1,)), ((), ()))),
    "tensor_amax": lambda x, *_: quantize(x, ROW_SCALED).tensor_amax,
    "quantization_report": lambda x, *_: jnvfp4.stats.quantization_report(x, amax=2.0),
    "supports": lambda x, *_: jnvfp4.supports("matmul_nt", x, quantize(x)).native,
}


@pytest.fixture
def key_of_device(native, monkeypatch):
    """KEY and SIZES lie on the default device of the process; here, on that of the test."""
    for name in ("KEY", "SIZES"):
        monkeypatch.setitem(globals(), name, jax.device_put(globals()[name], native.device))


@pytest.mark.usefixtures("key_of_device")
@pytest.mark.parametrize("f", GUARDED.values(), ids=GUARDED)
def test_eager_calls_transfer_nothing(native, f):
    x = normal((64, 64))
    operands = x, x.reshape(2, 32, 64), x[0]
    with jax.transfer_guard("disallow"):
        f(*operands)


@pytest.mark.usefixtures("key_of_device")
@pytest.mark.parametrize("recipe", [DEFAULT, recipes.pretrain(), recipes.window64()], ids=["default", "sr", "window64"])
def test_eager_gradients_transfer_nothing(native, recipe):
    x, w, bias = normal((50, 64), 1), normal((64, 64), 2), normal((64,), 3)
    with jax.transfer_guard("disallow"):
        y, pull = jax.vjp(lambda *v: linear(*v[:2], recipe, bias=v[2], key=KEY), x, w, bias)
        pull(y)


def test_the_transfer_of_an_operand_is_guarded(native):
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
        quantize(np.ones((64, 64), np.float32))


def test_a_tensor_crosses_cond_and_while():
    t = quantize(normal((16, 32)))
    chosen = jax.jit(lambda p, t: jax.lax.cond(p, lambda t: t, lambda t: quantize(dequantize(t)), t))(True, t)
    assert_same_tensor(chosen, t)
    kept = jax.lax.fori_loop(0, 3, lambda _, t: t, t)
    assert_same_tensor(kept, t)


# ---------------------------------------------------------------- derivatives
UNDIFFERENTIABLE = {
    "quantize": lambda x: quantize(x).amax,
    "quantize_row": lambda x: quantize(x, ROW_SCALED).amax,
    "quantize_amax": lambda x: quantize(jnp.ones((16, 16)), amax=x[0, 0]).scale,
    "quantize_rht": lambda x: quantize(x, NVFP4_RHT).amax,
    "quantize_sr": lambda x: quantize(x, NVFP4_SR, key=KEY).scale,
    "quantize_pair": lambda x: quantize_pair(x)[1].scale,
    "dequantize": lambda x: dequantize(quantize(x)),
    "transpose": lambda x: jnvfp4.transpose(quantize(x, NVFP4_2D)).scale,
    "matmul_nt": lambda x: matmul_nt(x.astype(jnp.bfloat16), exact_tensor((8, 16))),
    "matmul_bias": lambda x: matmul_nt(exact_tensor((8, 16)), exact_tensor((16, 16)), bias=x[0]),
}


@pytest.mark.parametrize("f", UNDIFFERENTIABLE.values(), ids=UNDIFFERENTIABLE)
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.grad], ids=["jvp", "grad"])
def test_primitives_have_no_derivative(f, mode):
    total = lambda x: jnp.sum(f(x).astype(jnp.float32))  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"nvfp4_\w+ has no derivative.*jnvfp4\.linear.*reverse mode only"):
        mode(total)(jnp.ones((16, 16)))


def test_what_is_quantized_is_a_constant():
    """A captured tensor, and what ``stop_gradient`` says is one."""
    x, t = normal((16, 16), dtype="fp32"), quantize(normal((16, 16)))
    f = lambda x: jnp.sum(x * dequantize(quantize(jax.lax.stop_gradient(x))) + x * dequantize(t))  # noqa: E731
    assert_bitwise(jax.grad(f)(x), dequantize(quantize(x)) + dequantize(t))


# ---------------------------------------------------------------- settings of JAX
def test_without_jit_the_bits_are_the_same():
    x = normal((16, 32))
    f = lambda: (quantize(x), linear(x, x), quantize_pair(x, NVFP4_SR, NVFP4_RHT_SR, key=KEY))  # noqa: E731
    with jax.disable_jit():
        got = f()
    assert_same_tensor(got, f())


NOTHING = [
    (lambda w: linear(jnp.ones((0, 16)), w), [(3, 16, 16)], (3, 0, 16)),
    (linear, [(3, 4, 0), (3, 16, 0)], (3, 4, 16)),
    (linear, [(0, 4, 16), (0, 16, 16)], (0, 4, 16)),
]


@pytest.mark.parametrize(("f", "shapes", "out"), NOTHING)
def test_vmap_of_zero_sizes(f, shapes, out):
    y = jax.vmap(f)(*(jnp.ones(shape) for shape in shapes))
    assert y.shape == out
    assert not np.any(np.asarray(y))


@pytest.mark.long
@pytest.mark.parametrize("spec", [NVFP4_RHT_SR, four_over_six(block_rows=16), WINDOW64], ids=name_of)
def test_the_reference_needs_no_rank_promotion(spec):
    x = normal((2, 16, 64))
    key = jax.random.key(0) if spec.rounding == "stochastic" else None
    with jax.numpy_rank_promotion("raise"):
        t = quantize(x, spec, key=key, implementation="reference")
        dequantize(t, implementation="reference")
