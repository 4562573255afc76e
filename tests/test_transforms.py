"""jit, vmap, grad, remat and scan of the operations: a vmap is a Python loop of calls, bit for bit."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, primitives
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
    four_over_six,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4.recipes import DEFAULT
from jnvfp4.spec import SUPPORTED_SPECS, name_of

SIZE = 3
KEY = jax.random.key(5)
SIZES = jnp.array([9, 30], jnp.int32)  # of groups
# Specs with different operands; the rest differ from them inside a block only.
SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, four_over_six(amax_scope="row"))
transposed_or_not = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])


@pytest.fixture
def cpu():
    """Where the pinned order along K makes every composition bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# ---------------------------------------------------------------- helpers
def take(args, axes, i):
    """Example i of every leaf that has a batch axis."""
    return jax.tree.map(
        lambda axis, x: x if axis is None else jnp.take(x, i, axis), axes, args, is_leaf=lambda v: v is None
    )


def assert_vmap_is_a_loop(f, args, axes, out_axes=0):
    size = next(x.shape[a] for x, a in zip(*map(_leaves, (args, axes)), strict=True) if a is not None)
    got = jax.vmap(f, axes, out_axes)(*args)
    calls = [f(*take(args, axes, i)) for i in range(size)]
    assert_same_tensor(got, jax.tree.map(lambda *parts: jnp.stack(parts, out_axes), *calls))


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda v: v is None)


def quantizations(f, *args) -> int:
    """How many orientations are quantized: two by each fused pair."""
    names = primitives(jax.make_jaxpr(f)(*args).jaxpr)
    return names.count("nvfp4_quantize") + 2 * names.count("nvfp4_quantize_pair")


# ---------------------------------------------------------------- vmap of quantize and dequantize
ROWS, COLS = 64, 128  # either is a multiple of 64
SCOPES = ("tensor", "row", "window64")


def amax_for(transpose, batch=()):
    """An amax for every scope."""
    rows, cols = (COLS, ROWS) if transpose else (ROWS, COLS)
    shapes = {"tensor": batch, "row": (*batch, rows), "window64": (*batch, rows, cols // 64)}
    rng = np.random.default_rng(1)
    return {scope: jnp.asarray(rng.uniform(1, 4, shape), jnp.float32) for scope, shape in shapes.items()}


@partial(jax.jit, static_argnums=(3, 4))
def quantize_by(x, amaxes, key, specs, transpose):
    """``x`` by all specs in one program, since that costs little more than one. ``amaxes``: by scope, or empty."""
    return {name_of(s): _quantize(x, s, amaxes.get(s.format.amax_scope), key, transpose) for s in specs}


def _quantize(x, spec, amax, key, transpose):
    return quantize(x, spec, amax=amax, key=key if spec.rounding == "stochastic" else None, transpose=transpose)


AMAX_AXES = {
    "found": ((0, {}), {}),
    "shared": ((0, dict.fromkeys(SCOPES)), ()),
    "own": ((0, dict.fromkeys(SCOPES, 0)), (SIZE,)),
    "own_of_one_x": ((None, dict.fromkeys(SCOPES, 0)), (SIZE,)),
}


@transposed_or_not
@pytest.mark.parametrize("key_axis", [None, 0], ids=["one_key", "own_key"])
@pytest.mark.parametrize(("axes", "batch"), AMAX_AXES.values(), ids=AMAX_AXES)
def test_vmap_of_quantize(native, transpose, axes, batch, key_axis):
    x = normal((ROWS, COLS) if axes[0] is None else (SIZE, ROWS, COLS))
    amaxes = amax_for(transpose, batch) if axes[1] else {}
    key = KEY if key_axis is None else jax.random.split(KEY, SIZE)
    f = lambda x, amaxes, key: quantize_by(x, amaxes, key, SPECS, transpose)  # noqa: E731
    assert_vmap_is_a_loop(f, (x, amaxes, key), (*axes, key_axis))


@transposed_or_not
def test_vmap_by_every_spec(native, transpose):
    args = normal((SIZE, ROWS, COLS)), {}, jax.random.split(KEY, SIZE)
    assert_vmap_is_a_loop(lambda *args: quantize_by(*args, SUPPORTED_SPECS, transpose), args, (0, {}, 0))


def test_vmap_of_the_key_alone(native):
    x = normal((ROWS, COLS))
    got = jax.vmap(lambda key: quantize(x, NVFP4_SR, key=key))(jax.random.split(KEY, SIZE))
    calls = [quantize(x, NVFP4_SR, key=key) for key in jax.random.split(KEY, SIZE)]
    assert_same_tensor(got, jax.tree.map(lambda *parts: jnp.stack(parts), *calls))
    assert not np.array_equal(got.data[0], got.data[1])


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
    assert_same_tensor(got, jax.tree.map(lambda *p: jnp.stack(p).reshape(2, SIZE, *p[0].shape), *want))


@pytest.mark.parametrize("shape", [(ROWS, COLS), (2, ROWS, COLS)], ids=str)
@pytest.mark.parametrize("in_axis", [0, 1, -1])
def test_vmap_of_the_amax_after_rotation(native, shape, in_axis):
    """One for each example, over all of its leading axes."""
    x = jnp.moveaxis(
        normal((SIZE, *shape), dtype="fp32") * 2.0 ** jnp.arange(SIZE).reshape(-1, *[1] * len(shape)), 0, in_axis
    )
    for transpose in (False, True):
        f = lambda x, t=transpose: quantize(x, NVFP4_RHT, transpose=t).amax  # noqa: E731
        assert jax.vmap(f, in_axis)(x).shape == (SIZE,)
        assert_vmap_is_a_loop(f, (x,), (in_axis,))


def test_nested_vmap_with_amax_batched_once(native):
    x, amax = normal((2, SIZE, 32, 48)), jnp.asarray([1.0, 2.0, 3.0])
    inner = jax.vmap(lambda x, a: quantize(x, amax=a))
    assert_vmap_is_a_loop(inner, (x, amax), (0, None))
    outer = jax.vmap(lambda x, a: quantize(x, amax=a), (0, None))
    assert_vmap_is_a_loop(outer, (jnp.swapaxes(x, 0, 1), amax), (0, 0))


def test_vmap_of_an_amax_per_matrix(native):
    x, amax = normal((SIZE, 2, 32, 48)), jnp.asarray(np.random.default_rng(0).uniform(1, 3, (SIZE, 2)), jnp.float32)
    f = lambda x, a: quantize(x, amax=a)  # noqa: E731
    assert_vmap_is_a_loop(f, (x, amax), (0, 0))
    assert_vmap_is_a_loop(f, (x, amax[0]), (0, None))
    assert_vmap_is_a_loop(f, (x, amax[:, 0]), (0, 0))


@pytest.mark.long
def test_vmap_of_the_reference():
    x, amax = normal((SIZE, 16, 32)), jnp.asarray([1.0, 2.0, 3.0])
    assert_vmap_is_a_loop(lambda x, a: quantize(x, amax=a, implementation="reference"), (x, amax), (0, 0))


# ---------------------------------------------------------------- vmap of quantize_pair
PAIRS = (
    (NVFP4, NVFP4_RHT),
    (NVFP4_SR, NVFP4_RHT_SR),
    (NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED),
    (NVFP4_2D, NVFP4_2D),
    (ROW_SCALED, ROW_SCALED),
    (four_over_six(), four_over_six()),
)


@jax.jit
def quantize_pairs(x, row_amaxes, col_amaxes, key):
    """The amaxes by scope, or empty."""
    return [
        quantize_pair(
            x,
            *pair,
            amax=tuple(a.get(s.format.amax_scope) for a, s in zip((row_amaxes, col_amaxes), pair, strict=True)),
            key=key if pair[0].rounding == "stochastic" else None,
        )
        for pair in PAIRS
    ]


@pytest.mark.parametrize("batched", list(product([0, None], repeat=4))[:-1], ids=str)
def test_vmap_of_quantize_pair(native, batched):
    """Any of x, the two amax and the key may be shared."""
    x_axis, row_axis, col_axis, key_axis = batched
    x = normal((ROWS, COLS) if x_axis is None else (SIZE, ROWS, COLS))
    amaxes = [amax_for(t, () if axis is None else (SIZE,)) for t, axis in ((False, row_axis), (True, col_axis))]
    key = KEY if key_axis is None else jax.random.split(KEY, SIZE)
    axes = (x_axis, dict.fromkeys(SCOPES, row_axis), dict.fromkeys(SCOPES, col_axis), key_axis)
    assert_vmap_is_a_loop(quantize_pairs, (x, *amaxes, key), axes)


def test_vmap_of_quantize_pair_that_finds_the_amax(native):
    args = normal((SIZE, ROWS, COLS)), {}, {}, jax.random.split(KEY, SIZE)
    assert_vmap_is_a_loop(quantize_pairs, args, (0, {}, {}, 0))


@pytest.mark.parametrize("in_axis", [0, 1, -1])
def test_vmap_of_a_pair_of_windows(native, in_axis):
    x = jnp.moveaxis(normal((SIZE, ROWS, COLS)), 0, in_axis)
    assert_vmap_is_a_loop(partial(quantize_pair, row_spec=WINDOW64, col_spec=WINDOW64), (x,), (in_axis,))


# ---------------------------------------------------------------- vmap of dequantize
AMAX_FORMATS = {
    "tensor": ((), Format()),
    "row": ((32,), Format("row")),
    "window64": ((32, 2), Format("window64")),
    "rht": ((), Format(rht=True)),
}


@pytest.mark.parametrize("batched", list(product([0, None], repeat=3))[:-1], ids=str)
@pytest.mark.parametrize(("amax_shape", "fmt"), AMAX_FORMATS.values(), ids=AMAX_FORMATS)
def test_vmap_of_dequantize(native, batched, amax_shape, fmt):
    leaves = _batched_leaves(exact_tensor((SIZE, 32, 128)), amax_shape, batched)
    assert_vmap_is_a_loop(lambda *parts: dequantize(NVFP4Tensor(*parts, fmt)), leaves, batched)


def test_vmap_of_dequantize_with_leading_axes(native):
    t = quantize(normal((SIZE, 2, 32, 48)), amax=jnp.full((SIZE, 2), 3.0))
    for amax, axis in ((t.amax, 0), (t.amax[0], None), (t.amax[:, 0], 0), (t.amax[0, 0], None)):
        f = lambda d, s, a: dequantize(NVFP4Tensor(d, s, a))  # noqa: E731
        assert_vmap_is_a_loop(f, (t.data, t.scale, amax), (0, 0, axis))


def test_an_amax_for_each_example_of_vmap_needs_vmap_to_decode(native):
    t = jax.vmap(jax.vmap(quantize))(normal((2, 3, 4, 16, 32)))
    assert t.amax.shape == (2, 3)
    hint = r"got \(2, 3\); it has one for each index of the first 2 axes, so call dequantize in jax.vmap over these 2"
    with pytest.raises(ValueError, match="dequantize: t.amax must have shape .*" + hint):
        dequantize(t)
    assert jax.vmap(jax.vmap(dequantize))(t).shape == t.shape


def amax_operands(f, *args) -> list[tuple[int, ...]]:
    """The shapes of the third operand of each of jnvfp4's primitives."""
    eqns = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return [eqn.invars[2].aval.shape for eqn in eqns if eqn.primitive.name == "nvfp4_dequantize"]


def test_vmap_gives_each_matrix_an_amax_and_not_each_row(native):
    t = quantize(normal((SIZE, 2, 32, 48)), amax=jnp.full((SIZE, 2), 3.0))
    f = jax.vmap(lambda d, s, a: dequantize(NVFP4Tensor(d, s, a)))
    assert amax_operands(f, t.data, t.scale, jnp.asarray([1.0, 2.0, 3.0])) == [(SIZE, 2)]
    assert amax_operands(f, t.data, t.scale, t.amax) == [(SIZE, 2)]


# ---------------------------------------------------------------- vmap of matmul_nt
M, N, K = 16, 8, 48


def _batched_leaves(t, amax_shape, axes):
    """data, scale and amax of a batched tensor, without the batch axis where ``axes`` says None."""
    rng = np.random.default_rng(t.shape[-2])
    amax = jnp.asarray(2688.0 * 2.0 ** rng.integers(-2, 3, (SIZE, *amax_shape)), jnp.float32)
    parts = (t.data, t.scale, amax)
    return tuple(p if axis == 0 else p[0] for p, axis in zip(parts, axes, strict=True))


def _matmul(a, b, bias, scope="tensor"):
    return matmul_nt(NVFP4Tensor(*a, Format(scope)), NVFP4Tensor(*b), bias=bias, out_dtype=jnp.float32)


@pytest.mark.parametrize("bias_axis", ["no", None, 0], ids=["no_bias", "shared_bias", "own_bias"])
@pytest.mark.parametrize("a_axes", list(product([0, None], repeat=3)), ids=str)
def test_vmap_of_matmul_over_every_set_of_operands(native, a_axes, bias_axis):
    """All 2^6 choices of batched data, scale and amax of a and b."""
    a_t, b_t = exact_tensor((SIZE, M, K), 1), exact_tensor((SIZE, N, K), 2)
    a, bias = _batched_leaves(a_t, (), a_axes), normal((SIZE, N), 3)
    bias, bias_axis = {"no": (None, None), None: (bias[0], None), 0: (bias, 0)}[bias_axis]
    for b_axes in product([0, None], repeat=3):
        axes = (a_axes, b_axes, bias_axis)
        if any(axis == 0 for axis in _leaves(axes)):
            assert_vmap_is_a_loop(_matmul, (a, _batched_leaves(b_t, (), b_axes), bias), axes)


@pytest.mark.parametrize("a_axes", [(0, 0, 0), (0, 0, None), (None, None, 0), (None, None, None)], ids=str)
@pytest.mark.parametrize("b_axes", [(0, 0, 0), (0, 0, None), (None, None, 0)], ids=str)
def test_vmap_of_matmul_with_an_amax_per_row(native, a_axes, b_axes):
    a = _batched_leaves(exact_tensor((SIZE, M, K), 1), (M,), a_axes)
    b = _batched_leaves(exact_tensor((SIZE, N, K), 2), (N,), b_axes)
    assert_vmap_is_a_loop(partial(_matmul, bias=None, scope="row"), (a, b), (a_axes, b_axes))


@pytest.mark.parametrize("a_axes", [(0, 0, 0), (0, 0, None), (None, None, 0), (None, None, None)], ids=str)
@pytest.mark.parametrize("b_axes", [(0, 0, 0), (0, 0, None), (None, None, 0)], ids=str)
@pytest.mark.parametrize("scopes", [("window64", "tensor"), ("row", "window64"), ("window64", "window64")], ids=str)
def test_vmap_of_matmul_with_an_amax_per_window(native, a_axes, b_axes, scopes):
    a, b = (
        _batched_leaves(
            exact_tensor((SIZE, rows, 128), rows), {"tensor": (), "row": (rows,), "window64": (rows, 2)}[s], axes
        )
        for rows, s, axes in ((M, scopes[0], a_axes), (N, scopes[1], b_axes))
    )

    def f(a, b):
        a, b = (NVFP4Tensor(*parts, Format(scope)) for parts, scope in zip((a, b), scopes, strict=True))
        return matmul_nt(a, b, out_dtype=jnp.float32, accumulation="pinned")

    assert_vmap_is_a_loop(f, (a, b), (a_axes, b_axes))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_vmap_of_weight_only_matmul(native, axes, dtype):
    a = jnp.round(4 * normal((SIZE, M, K) if axes[0] == 0 else (M, K), 1, dtype))
    b_axes = (axes[1],) * 3
    b = _batched_leaves(exact_tensor((SIZE, N, K), 2), (), b_axes)
    assert_vmap_is_a_loop(lambda a, b: matmul_nt(a, NVFP4Tensor(*b)), (a, b), (axes[0], b_axes))


# Leading axes of a and b (without the batch axis), and which of the two have the batch axis.
LEADING = {
    "a": ((2,), ()),
    "both": ((2,), (2,)),
    "a_twice": ((2, 2), ()),
    "both_twice": ((2, 2), (2, 2)),
}


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.parametrize("leads", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("amax", ["one", "per_matrix"])
def test_vmap_of_matmul_with_leading_axes(native, leads, axes, amax):
    operands = []
    for lead, rows, axis in zip(leads, (M, N), axes, strict=True):
        batch = (SIZE,) if axis == 0 else ()
        t = exact_tensor((*batch, *lead, rows, K), rows)
        shape = (*batch, *(lead if amax == "per_matrix" else ()))
        powers = np.random.default_rng(rows).integers(-2, 3, shape)
        operands.append((t.data, t.scale, jnp.asarray(2688.0 * 2.0**powers, jnp.float32)))
    assert_vmap_is_a_loop(partial(_matmul, bias=None), tuple(operands), tuple((axis,) * 3 for axis in axes))


def test_nested_vmap_of_matmul(native):
    """All pairs of three a and two b."""
    a, b = exact_tensor((SIZE, M, K), 1), exact_tensor((2, N, K), 2)
    a_axes, b_axes = NVFP4Tensor(0, 0, None), NVFP4Tensor(0, 0, None)
    f = jax.vmap(jax.vmap(matmul_nt, (None, b_axes)), (a_axes, None))
    assert_bitwise(
        f(a, b), jnp.stack([jnp.stack([matmul_nt(_at(a, i), _at(b, j)) for j in range(2)]) for i in range(SIZE)])
    )


def _at(t, i):
    return NVFP4Tensor(t.data[i], t.scale[i], t.amax, t.format)


@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (2, 1), (0, 2)])
def test_vmap_of_matmul_over_other_axes(native, in_axis, out_axis):
    a, b = exact_tensor((SIZE, M, K), 1), exact_tensor((SIZE, N, K), 2)

    def parts(t):
        return jnp.moveaxis(t.data, 0, in_axis), jnp.moveaxis(t.scale, 0, in_axis), t.amax

    axes = ((in_axis, in_axis, None),) * 2
    assert_vmap_is_a_loop(partial(_matmul, bias=None), (parts(a), parts(b)), axes, out_axis)


def test_matmul_without_leading_axes_of_b_shares_it(native):
    a, b = exact_tensor((2, SIZE, M, K), 1), exact_tensor((N, K), 2)
    want = [[matmul_nt(_at(_at(a, i), j), b) for j in range(SIZE)] for i in range(2)]
    assert_bitwise(matmul_nt(a, b), jnp.stack([jnp.stack(row) for row in want]))


# ---------------------------------------------------------------- vmap of linear and dot_general
VMAPS_OF_LINEAR = {
    **{f"default-{axes}": (DEFAULT, axes) for axes in [(0, 0, None), (0, None, None), (None, 0, None)]},
    **{f"pretrain-{axes}": (recipes.pretrain(), axes) for axes in [(0, 0, None), (0, None, 0), (None, 0, 0)]},
    "window64": (recipes.window64(), (0, None, 0)),
    "row_scaled": (recipes.row_scaled(), (None, None, 0)),
    "4over6": (recipes.four_over_six("all"), (0, 0, 0)),
}


def test_vmap_of_linear_and_its_gradients(cpu):
    """All cases in one program."""
    x, w, keys, dy = normal((SIZE, 30, 64), 1), normal((SIZE, 16, 64), 2), jax.random.split(KEY, SIZE), normal((30, 16))

    def one(recipe, x, w, key):
        y, pull = jax.vjp(partial(linear, recipe=recipe, key=key), x, w)
        return y, pull(dy)

    @jax.jit
    def f(operands):
        return {name: one(recipe, *operands[name]) for name, (recipe, _) in VMAPS_OF_LINEAR.items()}

    axes = {name: axes for name, (_, axes) in VMAPS_OF_LINEAR.items()}
    operands = {
        name: tuple(v if axis == 0 else v[0] for v, axis in zip((x, w, keys), of_case, strict=True))
        for name, of_case in axes.items()
    }
    assert_vmap_is_a_loop(f, (operands,), (axes,))


def test_gradient_of_vmap_sums_over_a_shared_weight(cpu):
    x, w = normal((SIZE, 32, 48), 1, "fp32"), normal((16, 48), 2, "fp32")
    loss = lambda w, x: jnp.sum(linear(x, w) ** 2)  # noqa: E731
    got = jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, x)))(w)
    np.testing.assert_allclose(got, sum(jax.grad(loss)(w, x[i]) for i in range(SIZE)), rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- jit, scan, eval_shape, make_jaxpr
OPERATIONS = {
    "quantize": quantize,
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
    "fake_quant_sr": lambda x: jnvfp4.fake_quant(x, NVFP4_SR, key=KEY),
}
every_operation = pytest.mark.parametrize("f", OPERATIONS.values(), ids=OPERATIONS)


@transposed_or_not
def test_jit_equals_eager_for_every_spec(native, transpose):
    x = normal((ROWS, COLS))
    want = {name_of(s): _quantize(x, s, None, KEY, transpose) for s in SUPPORTED_SPECS}
    assert_same_tensor(quantize_by(x, {}, KEY, SUPPORTED_SPECS, transpose), want)


def by_every_operation(x):
    return {name: f(x) for name, f in OPERATIONS.items()}


def test_jit_equals_eager(native):
    x = normal((64, 64))
    assert_same_tensor(jax.jit(by_every_operation)(x), by_every_operation(x))


@every_operation
def test_64_bit_mode_changes_no_bit(native, f):
    x = normal((64, 64))
    want = f(x)
    with jax.enable_x64(True):
        assert_same_tensor(f(x), want)


def test_a_python_amax_in_64_bit_mode(native):
    x = normal((64, 64))
    want = quantize(x, amax=2.0), jnvfp4.fake_quant(x, amax=2.0)
    with jax.enable_x64(True):
        assert_same_tensor((quantize(x, amax=2.0), jnvfp4.fake_quant(x, amax=2.0)), want)


def test_scan_equals_a_loop(native):
    xs = normal((SIZE, 64, 64))
    got = jax.lax.scan(lambda carry, x: (carry, by_every_operation(x)), 0, xs)[1]
    assert_same_tensor(got, jax.tree.map(lambda *parts: jnp.stack(parts), *(by_every_operation(x) for x in xs)))


@every_operation
def test_eval_shape_predicts_the_result(f):
    x = normal((64, 64))
    shapes, result = jax.eval_shape(f, x), f(x)
    assert jax.tree.structure(shapes) == jax.tree.structure(result)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(result), strict=True):
        assert (shape.shape, shape.dtype, shape.weak_type) == (leaf.shape, leaf.dtype, leaf.weak_type)


def gradient_of_linear(x):
    return jax.grad(lambda x: jnp.sum(linear(x, x, recipes.pretrain(), key=KEY).astype(jnp.float32)))(x)


def by_the_reference(x):
    return quantize(x, NVFP4_RHT_SR, key=KEY, implementation="reference")


@pytest.mark.parametrize(
    "f", [by_every_operation, gradient_of_linear, pytest.param(by_the_reference, marks=pytest.mark.long)]
)
def test_compile_time_evaluation(native, f):
    """In a shape that nothing else compiles, so that the operations are lowered under it."""
    x = normal((64, 192))

    def evaluated(x):
        with jax.ensure_compile_time_eval():
            return f(x)

    def constant(_):
        result = evaluated(x)
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result))
        return result

    eager, folded, traced = evaluated(x), jax.jit(constant)(x), jax.jit(evaluated)(x)
    for got in (eager, folded, traced):
        assert_same_tensor(got, f(x))


# Of x [64, 64], the same as two matrices, and its first row.
GUARDED = {
    **{name: lambda x, *_, f=f: f(x) for name, f in OPERATIONS.items()},
    "quantize_amax": lambda x, *_: quantize(x, amax=2.0),
    "quantize_pair_amax": lambda x, *_: quantize_pair(x, amax=(2, 3.0)),
    "quantize_matrices": lambda x, matrices, _: quantize(matrices, NVFP4_SR, key=KEY),
    "quantize_vmap": lambda x, matrices, _: jax.vmap(partial(quantize, spec=NVFP4_SR, key=KEY))(matrices),
    "matmul_bias": lambda x, _, row: matmul_nt(quantize(x), quantize(x), bias=row),
    "dot_general": lambda x, *_: jnvfp4.dot_general(x, x, (((1,), (1,)), ((), ()))),
    "tensor_amax": lambda x, *_: quantize(x, ROW_SCALED).tensor_amax,
    "quantization_report": lambda x, *_: jnvfp4.quantization_report(x, amax=2.0),
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


@pytest.mark.parametrize("amax", [1.0, 1, np.float32(1)], ids=["float", "int", "float32"])
def test_results_are_not_weakly_typed(amax):
    t = quantize(np.ones((16, 16), np.float32), amax=amax)
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(t))


@every_operation
def test_results_of_weakly_typed_arrays_are_not(f):
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, weak_type=True)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(jax.eval_shape(f, x)))


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (quantize, "nvfp4_quantize"),
        (partial(quantize, spec=ROW_SCALED), "nvfp4_quantize"),
        (partial(quantize, spec=NVFP4_RHT), "nvfp4_rht_amax"),
        (quantize_pair, "nvfp4_quantize_pair"),
        (lambda x: dequantize(quantize(x)), "nvfp4_dequantize"),
        (lambda x: matmul_nt(x.astype(jnp.bfloat16), quantize(x)), "nvfp4_matmul"),
    ],
    ids=["quantize", "quantize_row", "quantize_rht", "quantize_pair", "dequantize", "matmul_nt"],
)
def test_jaxprs_show_the_primitive(f, name):
    assert primitives(jax.make_jaxpr(f)(jnp.ones((16, 32))).jaxpr).count(name) == 1


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
    with pytest.raises(NotImplementedError, match=r"nvfp4_\w+ has no derivative.*jnvfp4\.linear.*stop_gradient"):
        mode(total)(jnp.ones((16, 16)))


def test_stop_gradient_makes_a_constant():
    x = normal((16, 16), dtype="fp32")
    grad = jax.grad(lambda x: jnp.sum(x * dequantize(quantize(jax.lax.stop_gradient(x)))))(x)
    assert_bitwise(grad, dequantize(quantize(x)))


def test_a_captured_tensor_is_a_constant():
    t = quantize(normal((16, 32)))
    with jax.default_matmul_precision("highest"):
        grad = jax.grad(lambda x: jnp.sum(x @ dequantize(t).T))(jnp.ones((4, 32)))
    np.testing.assert_allclose(grad, np.broadcast_to(dequantize(t).sum(0), (4, 32)), rtol=1e-6)


# ---------------------------------------------------------------- remat
SAVE = jax.checkpoint_policies.save_only_these_names("nvfp4_residual")


def _loss(x, w, recipe=DEFAULT):
    key = KEY if recipe.stochastic else None
    return jnp.sum(jnp.sin(linear(x, w, recipe, key=key).astype(jnp.float32)))


PRETRAIN_LOSS = partial(_loss, recipe=recipes.pretrain())
both_losses = pytest.mark.parametrize("loss", [_loss, PRETRAIN_LOSS], ids=["default", "pretrain"])


@pytest.fixture
def operands():
    return normal((32, 48), 1), normal((16, 48), 2)


@both_losses
def test_named_residuals_spare_the_second_quantization(operands, loss):
    """x and w for the forward pass and for the gradients, dy twice: six with jax.checkpoint too."""
    plain = quantizations(jax.grad(loss, (0, 1)), *operands)
    saved = quantizations(jax.grad(jax.checkpoint(loss, policy=SAVE), (0, 1)), *operands)
    assert (plain, saved) == (6, 6)
    assert quantizations(jax.grad(jax.checkpoint(loss), (0, 1)), *operands) > 6


DOTS = [jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.dots_with_no_batch_dims_saveable]


@pytest.mark.parametrize("policy", DOTS, ids=["dots", "no_batch_dims"])
def test_policies_of_dots_do_not_see_the_products(operands, policy):
    """As docs/recipes.md says: they save nothing of linear, as no policy does."""

    def counts(**options):
        names = primitives(jax.make_jaxpr(jax.grad(jax.checkpoint(_loss, **options), (0, 1)))(*operands).jaxpr)
        return [names.count(f"nvfp4_{name}") for name in ("quantize_pair", "matmul")]

    assert counts(policy=policy) == counts() == [5, 4]
    assert counts(policy=SAVE) == [3, 4]


def test_a_step_of_the_pretraining_recipe_reads_each_operand_once(operands):
    """x, w and dy by one fused kernel each; what is rotated, x and dy, by another for both amaxes."""
    names = primitives(jax.make_jaxpr(jax.grad(PRETRAIN_LOSS, (0, 1)))(*operands).jaxpr)
    count = lambda name: names.count(f"nvfp4_{name}")  # noqa: E731
    assert [count(name) for name in ("quantize_pair", "quantize", "rht_amax", "matmul")] == [3, 0, 2, 3]
    assert names.count("reduce_max") == 1  # of w: rht_amax finds those of x and dy too


def test_a_forward_pass_alone_quantizes_twice(operands):
    """Eager calls too: nothing is prepared for a gradient that nobody takes."""
    assert quantizations(linear, *operands) == 2


def test_the_compiled_gradient_quantizes_in_three_pairs(native, operands):
    f = jax.jit(jax.grad(jax.checkpoint(_loss, policy=SAVE), (0, 1)))
    text = f.lower(*operands).compile().as_text()
    assert text.count('custom_call_target="nvfp4_quantize') == text.count('nvfp4_quantize_pair"') == 3


@both_losses
def test_saved_residuals_are_packed(operands, loss):
    """Nothing of x's or w's own dtype is kept from the forward to the backward pass."""
    f = partial(linear, **({"recipe": recipes.pretrain(), "key": KEY} if loss is PRETRAIN_LOSS else {}))
    kept = [leaf for leaf in jax.tree.leaves(jax.vjp(f, *operands)[1]) if leaf.size > 1]
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.uint8)}


def save_quantized(primitive, *_, **__):
    return primitive.name in ("nvfp4_quantize", "nvfp4_quantize_pair")


POLICIES = {
    "default": None,
    "names": SAVE,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "primitive": save_quantized,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@both_losses
def test_remat_changes_no_bit(native, operands, policy, loss):
    got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(*operands)
    assert_same_tensor(got, jax.jit(jax.grad(loss, (0, 1)))(*operands))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_remat_keeps_large_scales(policy):
    """JAX rounds the floats that it saves as if E4M3 had infinities; 448 must survive."""
    x = normal((32, 48), dtype="fp32")

    def loss(x):
        return jnp.sum(jnp.sin(x * dequantize(quantize(jax.lax.stop_gradient(x)))))

    got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(x), rtol=1e-6)


def test_remat_of_a_function_of_a_tensor():
    x, t = normal((32, 48), dtype="fp32"), quantize(normal((32, 48)))
    loss = lambda x, t: jnp.sum(jnp.sin(x * dequantize(t)))  # noqa: E731
    got = jax.jit(jax.grad(jax.checkpoint(loss)))(x, t)
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(x, t), rtol=1e-6)


def test_scan_over_layers_with_remat(native):
    """The usual shape of a deep model: weights stacked, one checkpointed layer scanned."""
    x, ws = normal((32, 48), 1), normal((SIZE, 48, 48), 2)

    def loss(ws, layer):
        return jnp.sum(jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0].astype(jnp.float32))

    layer = lambda h, w: jnp.tanh(linear(h, w, Recipe()))  # noqa: E731
    got = jax.jit(jax.grad(lambda ws: loss(ws, jax.checkpoint(layer, policy=SAVE))))(ws)
    assert_bitwise(got, jax.jit(jax.grad(lambda ws: loss(ws, layer)))(ws))


def test_scan_over_layers_with_a_key_each(native):
    """Each step folds its index into the key: the gradients are those of the layers written out."""
    x, ws = normal((32, 64), 1), normal((SIZE, 64, 64), 2)
    recipe = recipes.pretrain()

    def layer(h, w, i):
        return jnp.tanh(linear(h, w, recipe, key=jax.random.fold_in(KEY, i)))

    def scanned(ws):
        step = jax.checkpoint(lambda h, wi: (layer(h, *wi), None), policy=SAVE)
        return jnp.sum(jax.lax.scan(step, x, (ws, jnp.arange(SIZE)))[0].astype(jnp.float32))

    def written_out(ws):
        h = x
        for i in range(SIZE):
            h = layer(h, ws[i], i)
        return jnp.sum(h.astype(jnp.float32))

    assert_bitwise(jax.jit(jax.grad(scanned))(ws), jax.jit(jax.grad(written_out))(ws))


def test_without_jit():
    x = normal((16, 32))
    f = lambda: (quantize(x), linear(x, x), quantize_pair(x, NVFP4_SR, NVFP4_RHT_SR, key=KEY))  # noqa: E731
    with jax.disable_jit():
        got = f()
    assert_same_tensor(got, f())


@pytest.mark.parametrize(
    ("f", "shapes", "out"),
    [
        (lambda w: linear(jnp.ones((0, 16)), w), [(3, 16, 16)], (3, 0, 16)),
        (linear, [(3, 4, 0), (3, 16, 0)], (3, 4, 16)),
        (linear, [(0, 4, 16), (0, 16, 16)], (0, 4, 16)),
    ],
)
def test_vmap_of_zero_sizes(f, shapes, out):
    y = jax.vmap(f)(*(jnp.ones(shape) for shape in shapes))
    assert y.shape == out
    assert not np.any(np.asarray(y))


# ---------------------------------------------------------------- settings of JAX
@pytest.mark.long
@pytest.mark.parametrize("spec", [NVFP4_RHT_SR, four_over_six(block_rows=16), WINDOW64], ids=name_of)
def test_the_reference_needs_no_rank_promotion(spec):
    x = normal((2, 16, 64))
    key = jax.random.key(0) if spec.rounding == "stochastic" else None
    with jax.numpy_rank_promotion("raise"):
        t = quantize(x, spec, key=key, implementation="reference")
        dequantize(t, implementation="reference")
