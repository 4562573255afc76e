"""linear, dot_general and fake_quant are the composition of quantize and matmul_nt that the recipe says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor
from jax import lax
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    ROW_SCALED,
    Recipe,
    dequantize,
    dot_general,
    fake_quant,
    linear,
    matmul_nt,
    quantize,
)

ROW = (ROW_SCALED, ROW_SCALED)
RECIPES = {
    "default": Recipe(),
    "weight_only": Recipe(fprop=(None, NVFP4_2D)),
    "weight_only_forward": Recipe(fprop=(None, NVFP4), dgrad=None, wgrad=None),
    "high_precision_backward": Recipe(dgrad=None, wgrad=None),
    "dequantized_backward": Recipe(dgrad="dequantized", wgrad="dequantized"),
    "row_scaled": Recipe(fprop=ROW, dgrad=ROW, wgrad=ROW),
    "mixed": Recipe(fprop=(NVFP4_2D, NVFP4), dgrad=None, wgrad=(ROW_SCALED, NVFP4)),
}


@pytest.fixture
def cpu():
    """Where the pinned order along K makes every composition bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# ---------------------------------------------------------------- the composition, spelled out
def pad16(x):
    return jnp.pad(x, ((0, -x.shape[0] % 16), (0, 0)))


def dense(a, b, dims, dtype):
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def composition(x, w, dy, recipe, bias=None, implementation=None):
    """y, dx, dw of linear for x [M, K]."""
    q, mm = partial(quantize, implementation=implementation), partial(matmul_nt, implementation=implementation)
    x_spec, w_spec = recipe.fprop
    tokens = x.shape[0]
    qx = x if x_spec is None else _crop(q(pad16(x), x_spec), tokens)
    qw = q(w, w_spec)
    y = mm(qx, qw, out_dtype=x.dtype, bias=bias)
    if isinstance(recipe.dgrad, tuple):
        qdy = _crop(q(pad16(dy), recipe.dgrad[0]), tokens)
        dx = mm(qdy, q(w, recipe.dgrad[1], transpose=True), out_dtype=x.dtype)
    else:
        dx = dense(dy, w if recipe.dgrad is None else dequantize(qw, dy.dtype), ((1,), (0,)), x.dtype)
    if isinstance(recipe.wgrad, tuple):
        dyt, xt = (q(pad16(v), s, transpose=True) for v, s in zip((dy, x), recipe.wgrad, strict=True))
        dw = mm(dyt, xt, out_dtype=w.dtype)
    else:
        saved = x if recipe.wgrad is None or x_spec is None else dequantize(qx, dy.dtype)
        dw = dense(dy, saved, ((0,), (0,)), w.dtype)
    return y, dx, dw


def _crop(t, rows):
    """The first rows of a tensor; zero rows change no amax."""
    return jax.tree.map(lambda v: v[:rows] if v.ndim else v, t)


def run(x, w, dy, recipe, bias=None):
    y, pull = jax.vjp(partial(linear, recipe=recipe, bias=bias), x, w)
    return y, *pull(dy)


def assert_same(native, got, want):
    """Bit for bit on the CPU; on a GPU the GEMM library chooses an order for each program."""
    for name, g, w in zip(("y", "dx", "dw"), got, want, strict=True):
        if native.platform == "cpu":
            assert_bitwise(g, w, name)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        tolerance = 4 * float(jnp.finfo(w.dtype).eps)
        scale = np.abs(np.asarray(w, np.float32)).max(initial=0)
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (g, w)), atol=tolerance * scale, err_msg=name)


# ---------------------------------------------------------------- linear
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_linear_is_its_composition(native, recipe):
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    assert_same(native, jax.jit(partial(run, recipe=recipe))(x, w, dy), composition(x, w, dy, recipe))


def test_linear_is_the_composition_of_the_reference(cpu):
    x, w = normal((16, 32), 1), normal((16, 32), 2)
    qx, qw = (quantize(v, spec, implementation="reference") for v, spec in ((x, NVFP4), (w, NVFP4_2D)))
    assert_bitwise(linear(x, w), matmul_nt(qx, qw, implementation="reference"))


@pytest.mark.parametrize("tokens", [1, 7, 20])
@pytest.mark.parametrize("recipe", ["default", "dequantized_backward", "mixed"])
def test_any_number_of_tokens(native, tokens, recipe):
    x, w, dy = normal((tokens, 64), 1), normal((48, 64), 2), normal((tokens, 48), 3)
    recipe = RECIPES[recipe]
    assert_same(native, jax.jit(partial(run, recipe=recipe))(x, w, dy), composition(x, w, dy, recipe))


@pytest.mark.parametrize("w_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("x_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["default", "high_precision_backward", "dequantized_backward"])
def test_results_and_gradients_have_the_dtypes_of_their_operands(x_dtype, w_dtype, recipe):
    x, w = normal((16, 32), 1, x_dtype), normal((16, 32), 2, w_dtype)
    y, dx, dw = run(x, w, normal((16, 16), 3, x_dtype), RECIPES[recipe])
    assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, w.dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_float_types(native, dtype):
    x, w, dy = normal((20, 64), 1, dtype), normal((48, 64), 2, dtype), normal((20, 48), 3, dtype)
    assert_same(native, jax.jit(partial(run, recipe=Recipe()))(x, w, dy), composition(x, w, dy, Recipe()))


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_bias(native, bias_dtype):
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    bias = jnp.linspace(-1, 1, 48).astype(bias_dtype)
    got = jax.jit(partial(run, recipe=Recipe(), bias=bias))(x, w, dy)
    assert_same(native, got, composition(x, w, dy, Recipe(), bias))
    db = jax.vjp(lambda b: linear(x, w, bias=b), bias)[1](dy)[0]
    assert db.dtype == bias_dtype
    np.testing.assert_allclose(db.astype(jnp.float32), dy.astype(jnp.float32).sum(0), rtol=2**-7, atol=1e-2)


def test_leading_axes_are_tokens(native):
    x, w, dy = normal((2, 5, 3, 64), 1), normal((48, 64), 2), normal((2, 5, 3, 48), 3)
    y, dx, dw = jax.jit(partial(run, recipe=Recipe()))(x, w, dy)
    flat = composition(x.reshape(30, 64), w, dy.reshape(30, 48), Recipe())
    assert_same(native, (y.reshape(30, 48), dx.reshape(30, 64), dw), flat)


def test_a_vector_is_one_token(cpu):
    x, w = normal((64,), 1), normal((48, 64), 2)
    assert_bitwise(linear(x, w), linear(x[None], w)[0])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_tokens(recipe):
    x, w, dy = jnp.zeros((0, 64), jnp.bfloat16), normal((48, 64), 2), jnp.zeros((0, 48), jnp.bfloat16)
    y, dx, dw = run(x, w, dy, recipe)
    assert (y.shape, dx.shape) == ((0, 48), (0, 64))
    assert_bitwise(dw, jnp.zeros_like(w))


def test_n_is_free_where_no_gemm_contracts_over_it(cpu):
    x, w, dy = normal((32, 64), 1), normal((5, 64), 2), normal((32, 5), 3)
    recipe = Recipe(fprop=(NVFP4, NVFP4), dgrad=None)
    for got, want in zip(run(x, w, dy, recipe), composition(x, w, dy, recipe), strict=True):
        assert_bitwise(got, want)


def test_numpy_operands_and_closed_over_weights(cpu):
    x, w = np.asarray(normal((32, 64), 1)), np.asarray(normal((48, 64), 2))
    assert_bitwise(jax.jit(lambda x: linear(x, w))(x), linear(jnp.asarray(x), jnp.asarray(w)))


def test_recipes_are_static_arguments(cpu):
    x, w = normal((32, 64), 1), normal((48, 64), 2)
    f = jax.jit(linear, static_argnums=2)
    assert_bitwise(f(x, w, Recipe()), linear(x, w))
    assert f._cache_size() == 1
    f(x, w, Recipe(dgrad=(NVFP4, NVFP4_2D)))
    assert f._cache_size() == 1


def test_second_derivatives_name_the_limit():
    x, w = normal((32, 64), 1, "fp32"), normal((48, 64), 2, "fp32")
    inner = jax.grad(lambda x: jnp.sum(linear(x, w) ** 2))
    with pytest.raises(NotImplementedError, match="has no derivative"):
        jax.grad(lambda x: jnp.sum(inner(x) ** 2))(x)


def test_gradients_descend():
    """Twenty steps on a least-squares problem, all three GEMMs in NVFP4."""
    x, target = normal((64, 32), 1, "fp32"), normal((16, 32), 2, "fp32")
    loss = lambda w: jnp.mean((linear(x, w) - x @ target.T) ** 2)  # noqa: E731
    w = start = jnp.zeros((16, 32))
    step = jax.jit(lambda w: w - 2.0 * jax.grad(loss)(w))
    for _ in range(20):
        w = step(w)
    assert loss(w) < 0.05 * loss(start)


# ---------------------------------------------------------------- dot_general
# lhs shape, rhs shape, dimension numbers
PRODUCTS = {
    "matrices": ((32, 48), (48, 16), (((1,), (0,)), ((), ()))),
    "nt": ((32, 48), (16, 48), (((1,), (1,)), ((), ()))),
    "dense_layer": ((2, 5, 48), (48, 32), (((2,), (0,)), ((), ()))),
    "two_contracting": ((8, 3, 16), (3, 16, 32), (((1, 2), (0, 1)), ((), ()))),
    "two_in_other_order": ((8, 3, 16), (16, 3, 32), (((2, 1), (0, 1)), ((), ()))),
    "heads": ((4, 32), (32, 2, 8), (((1,), (0,)), ((), ()))),
    "batch": ((3, 16, 32), (3, 32, 16), (((2,), (1,)), ((0,), (0,)))),
    "batch_inside": ((16, 3, 32), (32, 16, 3), (((2,), (0,)), ((1,), (2,)))),
    "two_batch": ((2, 3, 16, 32), (3, 2, 16, 32), (((3,), (3,)), ((0, 1), (1, 0)))),
    "vector": ((48,), (48, 16), (((0,), (0,)), ((), ()))),
}
every_product = pytest.mark.parametrize(("left", "right", "dims"), PRODUCTS.values(), ids=PRODUCTS)


def representable(shape, seed):
    """Numbers that NVFP4 holds exactly, since every block has a 6."""
    values = np.random.default_rng(seed).choice([6.0, -6.0, 3.0, -1.5, 0.0], shape, p=[0.4, 0.4, 0.1, 0.05, 0.05])
    return jnp.asarray(values, jnp.float32)


@every_product
def test_dot_general_is_lax_dot_general_on_representable_numbers(native, left, right, dims):
    lhs, rhs = representable(left, 1), representable(right, 2)
    got, want = dot_general(lhs, rhs, dims), lax.dot_general(lhs, rhs, dims, precision="highest")
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@every_product
def test_dot_general_has_gradients_of_the_operands_shapes(left, right, dims):
    lhs, rhs = normal(left, 1), normal(right, 2)

    def gradients(product):
        return jax.jit(jax.grad(lambda a, b: jnp.sum(product(a, b, dims).astype(jnp.float32)), (0, 1)))(lhs, rhs)

    grads, want = gradients(dot_general), gradients(lax.dot_general)
    assert [g.shape for g in grads] == [left, right]
    for g, w in zip(grads, want, strict=True):
        g, w = (np.asarray(v, np.float64).ravel() for v in (g, w))
        assert g @ w / np.linalg.norm(g) / np.linalg.norm(w) > 0.98


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_preferred_element_type(cpu, dtypes, preferred):
    lhs, rhs = (normal((16, 32), i, d) for i, d in enumerate(dtypes))
    dims = (((1,), (1,)), ((), ()))
    got = dot_general(lhs, rhs, dims, preferred_element_type=preferred)
    assert got.dtype == (preferred or jnp.promote_types(lhs.dtype, rhs.dtype))
    assert_bitwise(got, matmul_nt(quantize(lhs), quantize(rhs, NVFP4_2D), out_dtype=got.dtype))


def test_batch_elements_have_their_own_amax(cpu):
    lhs, rhs = normal((3, 16, 32), 1), normal((3, 16, 32), 2)
    lhs = lhs.at[1].multiply(100)
    got = dot_general(lhs, rhs, (((2,), (2,)), ((0,), (0,))))
    assert_bitwise(got, jnp.stack([linear(a, b) for a, b in zip(lhs, rhs, strict=True)]))


@pytest.mark.parametrize("precision", [None, "default", lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2])
def test_default_precisions_are_accepted(precision):
    x = normal((16, 16))
    dot_general(x, x, (((1,), (1,)), ((), ())), precision)


def test_dot_general_takes_a_recipe(cpu):
    x, w = normal((16, 32), 1), normal((16, 32), 2)
    got = dot_general(x, w, (((1,), (1,)), ((), ())), recipe=RECIPES["weight_only"])
    assert_bitwise(got, linear(x, w, RECIPES["weight_only"]))


# ---------------------------------------------------------------- fake_quant
@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D, ROW_SCALED], ids=["nvfp4", "nvfp4_2d", "row"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_fake_quant_value(backend, spec, dtype):
    if backend.implementation == "reference" and dtype != "bf16":
        pytest.skip("one dtype of the slow reference")
    x = normal((32, 48), dtype=dtype)
    want = dequantize(quantize(x, spec), x.dtype)
    assert_bitwise(jax.jit(partial(fake_quant, spec=spec, implementation=backend.implementation))(x), want)


def test_fake_quant_with_a_given_amax():
    x = normal((32, 48))
    assert_bitwise(fake_quant(x, amax=2.0), dequantize(quantize(x, amax=2.0), x.dtype))


def test_fake_quant_gradient_is_the_identity():
    x, dy = normal((32, 48), 1), normal((32, 48), 2)
    for f in (fake_quant, jax.jit(fake_quant), partial(fake_quant, spec=ROW_SCALED), lambda x: fake_quant(x, amax=1.0)):
        assert_bitwise(jax.vjp(f, x)[1](dy)[0], dy)


def test_fake_quant_forward_mode():
    x, dx = normal((32, 48), 1), normal((32, 48), 2)
    y, dy = jax.jvp(fake_quant, (x,), (dx,))
    assert_bitwise(y, fake_quant(x))
    assert_bitwise(dy, dx)


def test_fake_quant_amax_has_no_gradient():
    x = normal((32, 48), dtype="fp32")
    grad = jax.grad(lambda a: jnp.sum(fake_quant(x, amax=a)))(jnp.float32(2))
    assert_bitwise(grad, jnp.zeros(()))


def test_fake_quant_under_vmap():
    x, amax = normal((3, 32, 48)), jnp.asarray([1.0, 2.0, 3.0])
    got = jax.vmap(lambda x, a: fake_quant(x, amax=a))(x, amax)
    assert_same_tensor(got, jnp.stack([fake_quant(x[i], amax=amax[i]) for i in range(3)]))
    grads = jax.vmap(jax.grad(lambda x: jnp.sum(fake_quant(x).astype(jnp.float32))))(x)
    assert_bitwise(grads, jnp.ones_like(x))


def test_fake_quant_trains_through():
    """Second-order and mixed derivatives pass too: the derivative is the identity everywhere."""
    x = normal((16, 16), dtype="fp32")
    hessian = jax.jacfwd(jax.grad(lambda x: jnp.sum(fake_quant(x) ** 2)))(x).reshape(256, 256)
    np.testing.assert_allclose(hessian, 2 * np.eye(256), atol=1e-6)
