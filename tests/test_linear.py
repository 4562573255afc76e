"""linear is the composition of quantize and matmul_nt that the recipe says."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, key_of_operand
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import KINDS, assert_sharded, home, make_mesh, put
from operands import normal
from test_recipes import TABLE

from jnvfp4 import Recipe, dequantize, linear, matmul_nt, quantize, recipes
from jnvfp4._layers.linear import Quantizer
from jnvfp4._native import plans
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64

ROW = (ROW_SCALED, ROW_SCALED)
SR = (NVFP4_SR, NVFP4_SR)
KEY = jax.random.key(3)
RECIPES = {
    "plain": Recipe(),
    "weight_only": Recipe(fprop=(None, NVFP4_2D)),
    "weight_only_forward": Recipe(fprop=(None, NVFP4), dgrad=None, wgrad=None),
    "high_precision_backward": Recipe(dgrad=None, wgrad=None),
    "dequantized_backward": Recipe(dgrad="dequantized", wgrad="dequantized"),
    "row_scaled": Recipe(fprop=ROW, dgrad=ROW, wgrad=ROW),
    "mixed": Recipe(fprop=(NVFP4_2D, NVFP4), dgrad=None, wgrad=(ROW_SCALED, NVFP4)),
    "stochastic": Recipe(fprop=SR, dgrad=SR, wgrad=(NVFP4_RHT_SR, NVFP4_RHT_SR)),
    "rotated": Recipe((NVFP4_RHT, NVFP4_RHT), (NVFP4_RHT_SR, NVFP4_RHT), "dequantized"),
    "windows": Recipe((WINDOW64, WINDOW64), "dequantized", (WINDOW64, WINDOW64)),
    "other_w_of_dgrad": Recipe((NVFP4, NVFP4_2D), (NVFP4, ROW_SCALED), None),
    "stochastic_columns": Recipe((NVFP4, NVFP4), (NVFP4, NVFP4_SR), (NVFP4, NVFP4_SR)),
    "stochastic_rows": Recipe(SR, (NVFP4_SR, NVFP4), (NVFP4, NVFP4)),
    "forward_in_high_precision": Recipe(None),
    "dgrad_alone": Recipe(None, wgrad=None),
    "wgrad_alone": Recipe(None, dgrad=None),
    "dequantized_windows": recipes.window64(backward="dequantized"),
    "requantized": recipes.pretrain_4over6(requantize=True),
    "requantized_tiles": replace(recipes.pretrain(), requantize=True),
    "requantized_w": Recipe((None, NVFP4), (NVFP4_SR, NVFP4_SR), (NVFP4, NVFP4), requantize=True),
    "requantized_windows": replace(recipes.window64(), requantize=True),
    "requantized_wgrad": Recipe((NVFP4, NVFP4), None, (NVFP4, NVFP4), requantize=True),
    "requantized_nothing": replace(recipes.pretrain_4over6(requantize=True), fprop=None),
    "requantized_stochastic": Recipe(SR, SR, (NVFP4_RHT_SR, NVFP4_RHT_SR), requantize=True),
}
ALL_RECIPES = {**RECIPES, **{f"recipes_{name}": recipe for name, (recipe, *_) in TABLE.items()}}
SMALL = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)


# ---------------------------------------------------------------- the composition, spelled out
def pad(x, unit):
    return jnp.pad(x, ((0, -x.shape[0] % unit), (0, 0)))


def dense(a, b, dims, dtype):
    y = lax.dot_general(a, b, (dims, ((), ())), precision="highest", preferred_element_type=jnp.float32)
    return y.astype(dtype)


def operand(x, spec, index, key, transpose=False):
    """Operand 0 (x), 1 (w) or 2 (dy), with random bits of its own."""
    own = key_of_operand(key, index, x) if spec.rounding == "stochastic" else None
    return quantize(x, spec, key=own, transpose=transpose)


def by_tokens(x, spec, index, key):
    """With zero rows to fill tiles, which change no amax."""
    t = operand(pad(x, 16), spec, index, key)
    return jax.tree.map(lambda v: v[: x.shape[0]] if v.ndim else v, t)


def composition(x, w, dy, recipe, bias=None, key=KEY, w_axes="nk"):
    """y, dx, dw of linear for x [M, K]."""
    kn, again = w_axes == "kn", recipe.requantize and recipe.fprop is not None
    if recipe.fprop is None:
        y = dense(x, w, ((1,), (0,) if kn else (1,)), jnp.float32)
        y = (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
    else:
        x_spec, w_spec = recipe.fprop
        qx = x if x_spec is None else by_tokens(x, x_spec, 0, key)
        qw = operand(w, w_spec, 1, key, transpose=kn)
        y = matmul_nt(qx, qw, out_dtype=x.dtype, bias=bias)
    if isinstance(recipe.dgrad, tuple):
        dy_spec, w_spec = recipe.dgrad
        if again:
            wt = operand(dequantize(qw, w.dtype), w_spec, 1, key, transpose=True)
        else:
            wt = operand(w, w_spec, 1, key, transpose=not kn)
        dx = matmul_nt(by_tokens(dy, dy_spec, 2, key), wt, out_dtype=x.dtype)
    elif recipe.dgrad is None:
        dx = dense(dy, w, ((1,), (1,) if kn else (0,)), x.dtype)
    else:
        dx = dense(dy, dequantize(qw, dy.dtype), ((1,), (0,)), x.dtype)
    if isinstance(recipe.wgrad, tuple):
        unit = 64 if WINDOW64 in recipe.wgrad else 16
        x_hat = dequantize(qx, x.dtype) if again and x_spec is not None else x
        of = zip((dy, x_hat), recipe.wgrad, (2, 0), strict=True)
        dyt, xt = (operand(pad(v, unit), spec, i, key, True) for v, spec, i in of)
        dw = matmul_nt(*((xt, dyt) if kn else (dyt, xt)), out_dtype=w.dtype)
    else:
        saved = x if recipe.wgrad is None or x_spec is None else dequantize(qx, dy.dtype)
        dw = dense(*((saved, dy) if kn else (dy, saved)), ((0,), (0,)), w.dtype)
    return y, dx, dw


def run(x, w, dy, recipe, bias=None, key=KEY, **options):
    y, pull = jax.vjp(partial(linear, recipe=recipe, bias=bias, key=key, **options), x, w)
    return y, *pull(dy)


def assert_same(native, got, want, what=""):
    """Bit for bit on the CPU; on a GPU the GEMM library chooses an order for each program."""
    for name, g, w in zip(("y", "dx", "dw"), got, want, strict=True):
        name = f"{name} {what}"
        if native.platform == "cpu":
            assert_bitwise(g, w, name)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        tolerance = 4 * float(jnp.finfo(w.dtype).eps)
        scale = np.abs(np.asarray(w, np.float32)).max(initial=0)
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (g, w)), atol=tolerance * scale, err_msg=name)


def assert_composed(native, operands, names, **options):
    """That linear is its composition, by all recipes in two programs: one costs little more than that of one recipe."""
    got, want = (
        jax.jit(lambda *v, f=f: {name: f(*v, ALL_RECIPES[name], **options) for name in names})(*operands)
        for f in (run, composition)
    )
    for name in names:
        assert_same(native, got[name], want[name], name)


# ---------------------------------------------------------------- linear
@pytest.mark.parametrize("w_axes", ["nk", "kn"])
def test_every_recipe_is_its_composition(native, w_axes):
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    if w_axes == "nk":
        assert_composed(native, (x, w, dy), ALL_RECIPES)
    else:
        assert_composed(native, (x, w.T, dy), RECIPES, w_axes="kn")


SOME = ["plain", "dequantized_backward", "mixed", "rotated", "row_scaled", "windows", "recipes_pretrain"]
SOME += ["requantized", "requantized_windows"]
TOKENS_OF = {1: ["plain"], 7: SOME}


@pytest.mark.parametrize("tokens", TOKENS_OF)
def test_any_number_of_tokens(native, tokens):
    operands = normal((tokens, 64), 1), normal((48, 64), 2), normal((tokens, 48), 3)
    assert_composed(native, operands, TOKENS_OF[tokens])
    (x, w, _), tiles = operands, Recipe((NVFP4_2D, NVFP4_2D), None, None)
    assert_bitwise(linear(x, w, tiles), linear(pad(x, 16), w, tiles)[:tokens])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_float_types(native, dtype):
    operands = normal((20, 64), 1, dtype), normal((48, 64), 2, dtype), normal((20, 48), 3, dtype)
    assert_composed(native, operands, ["plain", "forward_in_high_precision", "requantized"])


def test_gemms_in_high_precision_round_neither_operand_to_the_dtype_of_the_other(cpu):
    f, operands = partial(run, recipe=Recipe(None, None, None)), (SMALL[0], normal((48, 64), 2, "fp32"), SMALL[2])
    got, want = f(*operands), f(*(v.astype(jnp.float32) for v in operands))
    assert_same_tensor(got, jax.tree.map(lambda g, w: w.astype(g.dtype), got, want))


def test_a_bias_is_added_and_has_a_gradient(native):
    (x, w, dy), bias = SMALL, jnp.linspace(-1, 1, 48)
    assert_composed(native, SMALL, ["plain", "forward_in_high_precision"], bias=bias.astype(jnp.bfloat16))
    pull = jax.jit(lambda b, dy: jax.vjp(lambda b: linear(x, w, bias=b), b)[1](dy)[0])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        db = pull(bias.astype(dtype), dy)
        assert db.dtype == dtype
        exact, one_rounding = np.asarray(dy, np.float64).sum(0), float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(db, np.float64), exact, rtol=one_rounding, atol=1e-6)


TILES_OF_TOKENS = {"x": Recipe((NVFP4_2D, NVFP4), None, None), "dy": Recipe(dgrad=(NVFP4_2D, NVFP4), wgrad=None)}


@pytest.mark.parametrize("recipe", [Recipe(), *TILES_OF_TOKENS.values()], ids=["blocks", *TILES_OF_TOKENS])
def test_leading_axes_are_tokens(native, recipe):
    """Also where a tile has tokens of two of them."""
    x, w, dy = normal((2, 5, 3, 64), 1), normal((48, 64), 2), normal((2, 5, 3, 48), 3)
    y, dx, dw = jax.jit(partial(run, recipe=recipe))(x, w, dy)
    flat = composition(x.reshape(30, 64), w, dy.reshape(30, 48), recipe)
    assert_same(native, (y.reshape(30, 48), dx.reshape(30, 64), dw), flat)


def test_numpy_operands_closed_over_weights_and_a_vector(cpu):
    """A vector is one token."""
    x, w = np.asarray(normal((32, 64), 1)), np.asarray(normal((48, 64), 2))
    assert_bitwise(jax.jit(lambda x: linear(x, w))(x), linear(jnp.asarray(x), jnp.asarray(w)))
    assert_bitwise(linear(x[0], w), linear(x[:1], w)[0])


def test_without_tokens_the_gradient_of_w_is_zero():
    x, w, dy = jnp.zeros((0, 64), jnp.bfloat16), normal((48, 64), 2), jnp.zeros((0, 48), jnp.bfloat16)
    results = jax.jit(lambda *v: {name: run(*v, recipe) for name, recipe in RECIPES.items()})(x, w, dy)
    for name, (y, dx, dw) in results.items():
        assert (y.shape, dx.shape) == ((0, 48), (0, 64)), name
        assert_bitwise(dw, jnp.zeros_like(w), name)


def test_sizes_fit_the_gemms_that_are_quantized(cpu):
    x, w, dy = normal((32, 64), 1), normal((5, 64), 2), normal((32, 5), 3)
    recipe = Recipe(fprop=(NVFP4, NVFP4), dgrad=None)
    assert_same_tensor(*(jax.jit(partial(f, recipe=recipe))(x, w, dy) for f in (run, composition)))
    free = Recipe(None, None, (NVFP4, NVFP4))
    assert run(normal((16, 50)), normal((10, 50)), normal((16, 10)), free)[2].shape == (10, 50)
    with pytest.raises(
        ValueError, match=r"N must be a multiple of 16, since recipe\.wgrad quantizes dy in 16x16 tiles"
    ):
        linear(x, w, Recipe((NVFP4, NVFP4), None, (NVFP4_2D, NVFP4)))
    with pytest.raises(ValueError, match="linear: K must be a multiple of 16, got K=50"):
        linear(normal((16, 50)), normal((16, 50)), Recipe(None, wgrad=None))


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
def test_the_value_is_the_same_with_and_without_gradients(cpu, w_axes):
    x, w, dy = normal((20, 64), 1), normal((48, 64), 2), normal((20, 48), 3)
    names = "recipes_pretrain", "stochastic", "rotated", "mixed", "forward_in_high_precision"
    values = jax.jit(lambda x, w: {n: linear(x, w, ALL_RECIPES[n], key=KEY, w_axes=w_axes) for n in names})
    results = jax.jit(lambda x, w, dy: {n: run(x, w, dy, ALL_RECIPES[n], w_axes=w_axes)[0] for n in names})
    w = w if w_axes == "nk" else w.T
    assert_same_tensor(values(x, w), results(x, w, dy))


# ---------------------------------------------------------------- options
def equations_of(f, *args):
    return list(equations(jax.make_jaxpr(f)(*args).jaxpr))


@pytest.mark.parametrize("recipe", ["plain", "high_precision_backward", "dequantized_backward", "recipes_pretrain"])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16, "float16"])
def test_out_dtype_is_that_of_the_result_alone(native, recipe, out_dtype):
    """Of the result alone; the gradients keep the dtypes of their operands."""
    x, w, dy = SMALL[0], SMALL[1].astype(jnp.float32), SMALL[2].astype(out_dtype)
    recipe = ALL_RECIPES[recipe]
    y, dx, dw = jax.jit(partial(run, recipe=recipe, out_dtype=out_dtype))(x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.dtype(out_dtype), x.dtype, w.dtype)
    qx, qw = by_tokens(x, recipe.fprop.x, 0, KEY), operand(w, recipe.fprop.w, 1, KEY)
    if native.platform == "cpu":
        assert_bitwise(y, matmul_nt(qx, qw, out_dtype=out_dtype))
        if recipe.dgrad == "dequantized":
            assert_bitwise(dx, dense(dy, dequantize(qw, dy.dtype), ((1,), (0,)), dx.dtype))


@pytest.mark.parametrize("implementation", [None, "native", "reference"])
@pytest.mark.parametrize("recipe", SOME)
def test_the_implementation_is_that_of_every_quantizer_and_gemm(recipe, implementation):
    f = partial(run, recipe=ALL_RECIPES[recipe], implementation=implementation)
    ours = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name.startswith("nvfp4")]
    assert len(ours) >= 4
    assert {eqn.params["implementation"] for eqn in ours} == {implementation}


def matmuls_of(f, *args):
    """The accumulation and the implementation of each GEMM."""
    gemms = [eqn for eqn in equations_of(f, *args) if eqn.primitive.name == "nvfp4_matmul"]
    return [(eqn.params["params"].accumulation, eqn.params["implementation"]) for eqn in gemms]


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_accumulation_is_that_of_all_three_gemms(accumulation, w_axes):
    x, w, dy = SMALL
    w = w if w_axes == "nk" else w.T
    options, of_each = {"accumulation": accumulation, "w_axes": w_axes}, [(accumulation, None)]
    assert matmuls_of(partial(run, recipe=Recipe(), **options), x, w, dy) == 3 * of_each
    assert matmuls_of(partial(linear, **options), x, w) == of_each
    assert matmuls_of(partial(linear, w_axes=w_axes), x, w) == [("fast", None)]


def test_a_kernel_is_named_for_the_forward_gemm_alone():
    kernel = plans.matmul_kernels()[0]
    f = partial(run, recipe=recipes.pretrain(), implementation=kernel)
    assert matmuls_of(f, *SMALL) == [("fast", kernel), ("fast", None), ("fast", None)]
    quantizers = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name.startswith("nvfp4_quantize")]
    assert {eqn.params["implementation"] for eqn in quantizers} == {None}


def test_gradients_in_high_precision_are_no_tf32(cpu):
    """Which only a GPU would show in the bits."""
    f = partial(run, recipe=RECIPES["high_precision_backward"])
    dots = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name == "dot_general"]
    assert [eqn.params["precision"] for eqn in dots] == [(lax.Precision.HIGHEST,) * 2] * 2


# ---------------------------------------------------------------- the amax of w
def test_the_amax_of_w_is_for_the_whole_unrotated_w(cpu):
    x, w, dy = SMALL
    plain, rotated = (NVFP4, NVFP4), (NVFP4_RHT, NVFP4_RHT)
    y, dx, _ = run(x, w, dy, Recipe(plain, rotated, None), w_amax=9.0)
    assert_bitwise(y, matmul_nt(quantize(x), quantize(w, amax=9.0), out_dtype=x.dtype))
    found = quantize(dy, NVFP4_RHT), quantize(w, NVFP4_RHT, transpose=True)
    assert_bitwise(dx, matmul_nt(*found, out_dtype=x.dtype))
    with pytest.raises(ValueError, match="linear: w_amax must be None, since no spec that reads w has"):
        linear(x, w, Recipe(rotated, rotated, None), w_amax=9.0)
    again = Recipe(plain, plain, None, requantize=True)
    read = quantize(w, amax=9.0)
    of_values = quantize(dy), quantize(dequantize(read, w.dtype), transpose=True)
    assert_bitwise(run(x, w, dy, again, w_amax=9.0)[1], matmul_nt(*of_values, out_dtype=x.dtype))
    with pytest.raises(ValueError, match="linear: w_amax must be None, since no spec that reads w has"):
        linear(x, w, Recipe((NVFP4, ROW_SCALED), plain, None, requantize=True), w_amax=9.0)


# ---------------------------------------------------------------- w [K, N]
def moved(f, *args):
    """The transposes and copies of [K, N] or [N, K] in float32 that the compiled program has, fused or not."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(r"= f32\[(?:192,112|112,192)\]\S* (transpose|copy)\(", text)


FLAX_ORDER = ["plain", "stochastic", "high_precision_backward", "dequantized_backward", "weight_only"]
FLAX_ORDER += [f"recipes_{name}" for name in ("pretrain", "row_scaled", "4over6 all", "window64", "inference")]


def test_w_of_flax_order_is_neither_transposed_nor_copied(native):
    """By all recipes in one program, each of operands of its own: XLA would copy equal results."""
    x, w, dy = normal((32, 192), 1), normal((192, 112), 2, "fp32"), normal((32, 112), 3)

    def passes(x, w, dy):
        return [run(x + i, w, dy + i, ALL_RECIPES[name], w_axes="kn") for i, name in enumerate(FLAX_ORDER)]

    def values(x, w):
        return [linear(x + i, w, ALL_RECIPES[name], key=KEY, w_axes="kn") for i, name in enumerate(FLAX_ORDER)]

    assert not moved(passes, x, w, dy)
    assert not moved(values, x, w)


def test_a_transpose_of_w_would_show(native):
    x, w, dy = normal((32, 192), 1), normal((192, 112), 2, "fp32"), normal((32, 112), 3)
    assert moved(lambda x, w, dy: run(x, w.T, dy, recipes.pretrain()), x, w, dy)


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize("name", ["high_precision_backward", "dequantized_backward", "forward_in_high_precision"])
def test_products_in_high_precision_on_an_explicit_mesh(devices, name, w_axes):
    """They sum over an axis of the mesh: dx over that of N, dw over that of the tokens."""
    mesh, of_w = make_mesh(devices, kind="explicit"), P("y", None)
    x, w, dy = normal((64, 128), 1), normal((256, 128), 2), normal((64, 256), 3)
    if w_axes == "kn":
        w, of_w = w.T, P(None, "y")
    f = jax.jit(partial(run, recipe=RECIPES[name], w_axes=w_axes))
    got = f(put(x, mesh, P("x", None)), put(w, mesh, of_w), put(dy, mesh, P("x", "y")))
    for g, want, spec in zip(got, f(*home(devices, (x, w, dy))), (P("x", "y"), P("x", None), of_w), strict=True):
        assert_sharded(g, mesh, spec)
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (g, want)), rtol=0.02, atol=0.1)


# ---------------------------------------------------------------- the key
@pytest.mark.parametrize("name", ["stochastic", "stochastic_rows", "stochastic_columns", "recipes_pretrain"])
def test_a_stochastic_recipe_needs_a_key(name):
    with pytest.raises(ValueError, match="linear: key must be given, since the recipe rounds stochastically"):
        jax.eval_shape(partial(run, recipe=ALL_RECIPES[name], key=None), *SMALL)


def test_a_stochastic_forward_pass_needs_a_key_without_gradients():
    with pytest.raises(ValueError, match="linear: key must be given, since the recipe rounds stochastically"):
        linear(*SMALL[:2], RECIPES["stochastic"])


@pytest.mark.parametrize("name", ["plain", "dequantized_backward", "recipes_window64, nearest", "recipes_inference"])
def test_other_recipes_ignore_the_key(name):
    """Neither drawn from nor kept for the backward pass."""
    recipe = ALL_RECIPES[name]

    def traces(key):
        kept = lambda x, w: jax.tree.leaves(jax.vjp(partial(linear, recipe=recipe, key=key), x, w)[1])  # noqa: E731
        run_with_key = partial(run, recipe=recipe, key=key)
        return str(jax.make_jaxpr(run_with_key)(*SMALL)), str(jax.make_jaxpr(kept)(*SMALL[:2]))

    assert traces(KEY) == traces(None)


def test_another_key_gives_other_gradients_and_the_same_value(native):
    """Only dy is rounded stochastically."""
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    f = jax.jit(partial(run, recipe=recipes.pretrain()))
    (y, dx, dw), (y2, dx2, dw2), again = (f(x, w, dy, key=jax.random.key(i)) for i in (5, 6, 5))
    assert_same_tensor(again, (y, dx, dw))
    assert_bitwise(y, y2)
    assert np.mean(np.asarray(dx != dx2)) > 0.5
    assert np.mean(np.asarray(dw != dw2)) > 0.5


@pytest.mark.parametrize("specs", [(NVFP4, NVFP4_RHT), (NVFP4_RHT, NVFP4), (NVFP4, None), (None, NVFP4), ROW], ids=str)
def test_a_quantizer_takes_an_amax_whatever_the_axes_of_x(cpu, specs):
    """And finds those of rows."""
    x, amax = normal((2, 32, 64), 1), (None, None) if specs == ROW else (jnp.float32(7), jnp.float32(9))
    kept, flat = (Quantizer(None, None).pair(v, specs, None, amax, 16) for v in (x, x.reshape(64, 64)))
    of = zip(specs, amax, (False, True), strict=True)
    want = tuple(None if s is None else quantize(x.reshape(64, 64), s, amax=a, transpose=t) for s, a, t in of)
    assert_same_tensor(flat, want)
    assert_same_tensor(jax.tree.map(lambda v, of_flat: v.reshape(of_flat.shape), kept, flat), flat)


# ---------------------------------------------------------------- rows in the pinned order
ROWS, COLUMNS, DEPTH = 8192, 80, 256
FEW_ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 129, 512)


def products_of_rows(x):
    """Products of x [..., M, K], all in the pinned order, whose amaxes belong to rows, or are given."""
    w = normal((COLUMNS, DEPTH), 2)
    qw, pinned = quantize(w), {"accumulation": "pinned", "out_dtype": jnp.float32}
    return {
        "one amax": matmul_nt(quantize(x, amax=jnp.float32(4)), qw, **pinned),
        "row": matmul_nt(quantize(x, ROW_SCALED), qw, bias=w[:, 0], **pinned),
        "window64": matmul_nt(quantize(x, WINDOW64), qw, **pinned),
        "16-bit": matmul_nt(x, qw, **pinned),
        "rl": linear(x, w, recipes.rl(), accumulation="pinned"),
        "rl with 4over6": linear(x, w, recipes.rl(four_over_six=True), accumulation="pinned"),
        "frozen": linear(x, qw, recipes.rl(), accumulation="pinned"),
    }


@pytest.fixture(scope="module")
def all_rows():
    x = normal((ROWS, DEPTH), 1)
    with jax.default_device(jax.devices("cpu")[0]):
        return x, jax.jit(products_of_rows)(x)


def assert_rows(all_rows, products, begin, end):
    for name, want in all_rows[1].items():
        assert_bitwise(products[name], want[begin:end], f"{name}, rows {begin} to {end}")


@pytest.mark.parametrize(
    "sizes", [FEW_ROWS, pytest.param(range(3, 513, 5), marks=pytest.mark.long)], ids=["few", "each fifth up to 512"]
)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_place(native, all_rows, sizes):
    x, product = np.asarray(all_rows[0]), jax.jit(products_of_rows)
    for m in sizes:
        for begin in (0, 37 * m % (ROWS - m), ROWS - m):
            assert_rows(all_rows, product(x[begin : begin + m]), begin, begin + m)
    assert_rows(all_rows, product(x), 0, ROWS)


@pytest.mark.parametrize("batch", [2, 24])
def test_a_row_has_the_same_bits_in_a_batch_and_under_vmap(native, all_rows, batch):
    x = np.asarray(all_rows[0][: 16 * batch]).reshape(batch, 16, DEPTH)
    for product in (products_of_rows, jax.vmap(products_of_rows)):
        of_rows = jax.tree.map(lambda y: np.asarray(y).reshape(-1, COLUMNS), jax.jit(product)(x))
        assert_rows(all_rows, of_rows, 0, 16 * batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("x"), P(("x", "y"))], ids=str)
def test_a_row_has_the_same_bits_where_tokens_are_split(devices, all_rows, spec, kind):
    mesh = make_mesh(devices, kind=kind)
    with jax.set_mesh(mesh):
        products = jax.jit(products_of_rows)(put(all_rows[0][:64], mesh, spec))
    assert_rows(all_rows, products, 0, 64)
    for y in products.values():
        assert_sharded(y, mesh, P(*spec, None))
