"""linear and dot_general are the composition of quantize and matmul_nt that the recipe says."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, home, make_mesh, put
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Recipe,
    dequantize,
    dot_general,
    linear,
    matmul_nt,
    quantize,
    recipes,
)
from jnvfp4._layers import linear as linear_module
from jnvfp4._layers.linear import Quantizer
from jnvfp4._native import plans

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
}
NAMED = {
    "pretrain": recipes.pretrain(),
    "pretrain_high_precision": recipes.pretrain(backward="high_precision"),
    "pretrain_dequantized": recipes.pretrain(backward="dequantized"),
    "pretrain_no_rht": recipes.pretrain(rht=False),
    "pretrain_nearest": recipes.pretrain(stochastic_rounding=False),
    "pretrain_no_tiles": recipes.pretrain(weight_tiles=False),
    "pretrain_unbiased": recipes.pretrain(unbiased=True),
    "pretrain_plain": recipes.pretrain(rht=False, stochastic_rounding=False, weight_tiles=False),
    "row_scaled": recipes.row_scaled(),
    "row_scaled_nearest": recipes.row_scaled(stochastic_rounding=False),
    "row_scaled_high_precision": recipes.row_scaled(backward="high_precision"),
    "row_scaled_dequantized": recipes.row_scaled(backward="dequantized"),
    "4over6_weights": recipes.four_over_six(),
    "4over6_weights_no_rht": recipes.four_over_six(error="mse", e4m3_max=448, fast=True, rht=False),
    "4over6_activations": recipes.four_over_six("activations", "mse"),
    "4over6_all": recipes.four_over_six("all"),
    "4over6_all_nearest": recipes.four_over_six("all", "mse", fast=True, stochastic_rounding=False),
    "4over6_all_high_precision": recipes.four_over_six("all", backward="high_precision"),
    "4over6_all_dequantized": recipes.four_over_six("all", backward="dequantized"),
    "window64": recipes.window64(),
    "window64_nearest": recipes.window64(stochastic_rounding=False),
    "window64_high_precision": recipes.window64(backward="high_precision"),
    "window64_dequantized": recipes.window64(backward="dequantized"),
    "pretrain_4over6": recipes.pretrain_4over6(),
    "rl": recipes.rl(),
    "rl_high_precision": recipes.rl(backward="high_precision"),
    "rl_4over6": recipes.rl(four_over_six=True),
    "inference": recipes.inference(),
    "inference_weight_only": recipes.inference(weight_only=True),
}
ALL_RECIPES = {**RECIPES, **{f"recipes_{name}": recipe for name, recipe in NAMED.items()}}
STOCHASTIC = {name: recipe for name, recipe in ALL_RECIPES.items() if recipe.stochastic}
NEAREST = {name: recipe for name, recipe in ALL_RECIPES.items() if not recipe.stochastic}


@pytest.fixture
def cpu():
    """Where the pinned order along K makes every composition bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# ---------------------------------------------------------------- the composition, spelled out
def pad(x, unit):
    return jnp.pad(x, ((0, -x.shape[0] % unit), (0, 0)))


def dense(a, b, dims, dtype):
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def operand(x, spec, index, key, transpose=False):
    """Operand 0 (x), 1 (w) or 2 (dy), with random bits of its own."""
    own = jax.random.fold_in(key, index) if spec.rounding == "stochastic" else None
    return quantize(x, spec, key=own, transpose=transpose)


def by_tokens(x, spec, index, key):
    return _crop(operand(pad(x, 16), spec, index, key), x.shape[0])


def composition(x, w, dy, recipe, bias=None, key=KEY, w_axes="nk"):
    """y, dx, dw of linear for x [M, K]."""
    kn = w_axes == "kn"
    x_spec, w_spec = recipe.fprop
    qx = x if x_spec is None else by_tokens(x, x_spec, 0, key)
    qw = operand(w, w_spec, 1, key, transpose=kn)
    y = matmul_nt(qx, qw, out_dtype=x.dtype, bias=bias)
    if isinstance(recipe.dgrad, tuple):
        dy_spec, w_spec = recipe.dgrad
        wt = operand(w, w_spec, 1, key, transpose=not kn)
        dx = matmul_nt(by_tokens(dy, dy_spec, 2, key), wt, out_dtype=x.dtype)
    elif recipe.dgrad is None:
        dx = dense(dy, w, ((1,), (1,) if kn else (0,)), x.dtype)
    else:
        dx = dense(dy, dequantize(qw, dy.dtype), ((1,), (0,)), x.dtype)
    if isinstance(recipe.wgrad, tuple):
        unit = 64 if WINDOW64 in recipe.wgrad else 16
        dyt, xt = (
            operand(pad(v, unit), s, i, key, True) for v, s, i in zip((dy, x), recipe.wgrad, (2, 0), strict=True)
        )
        dw = matmul_nt(*((xt, dyt) if kn else (dyt, xt)), out_dtype=w.dtype)
    else:
        saved = x if recipe.wgrad is None or x_spec is None else dequantize(qx, dy.dtype)
        dw = dense(*((saved, dy) if kn else (dy, saved)), ((0,), (0,)), w.dtype)
    return y, dx, dw


def _crop(t, rows):
    """The first rows of a tensor; zero rows change no amax."""
    return jax.tree.map(lambda v: v[:rows] if v.ndim else v, t)


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
    assert_composed(native, (x, w if w_axes == "nk" else w.T, dy), ALL_RECIPES, w_axes=w_axes)


TOKENS_OF = {
    1: ["plain"],
    7: ["plain", "dequantized_backward", "mixed", "rotated", "windows"]
    + [f"recipes_{name}" for name in ("row_scaled", "4over6_all", "window64")],
    70: ["plain", "stochastic", "windows", "recipes_pretrain", "recipes_window64"],
}


@pytest.mark.parametrize("tokens", TOKENS_OF)
def test_any_number_of_tokens(native, tokens):
    operands = normal((tokens, 64), 1), normal((48, 64), 2), normal((tokens, 48), 3)
    assert_composed(native, operands, TOKENS_OF[tokens])


@pytest.mark.parametrize("w_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("x_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["plain", "high_precision_backward", "dequantized_backward"])
def test_results_and_gradients_have_the_dtypes_of_their_operands(x_dtype, w_dtype, recipe):
    x, w = normal((16, 32), 1, x_dtype), normal((16, 32), 2, w_dtype)
    y, dx, dw = run(x, w, normal((16, 16), 3, x_dtype), RECIPES[recipe])
    assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, w.dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_float_types(native, dtype):
    operands = normal((20, 64), 1, dtype), normal((48, 64), 2, dtype), normal((20, 48), 3, dtype)
    assert_composed(native, operands, ["plain"])


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_bias(native, bias_dtype):
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    bias = jnp.linspace(-1, 1, 48).astype(bias_dtype)
    got = jax.jit(partial(run, recipe=Recipe(), bias=bias))(x, w, dy)
    assert_same(native, got, composition(x, w, dy, Recipe(), bias))
    db = jax.vjp(lambda b: linear(x, w, bias=b), bias)[1](dy)[0]
    assert db.dtype == bias_dtype
    exact, one_rounding = np.asarray(dy, np.float64).sum(0), float(jnp.finfo(bias_dtype).eps)
    np.testing.assert_allclose(np.asarray(db, np.float64), exact, rtol=one_rounding, atol=1e-6)


def test_leading_axes_are_tokens(native):
    x, w, dy = normal((2, 5, 3, 64), 1), normal((48, 64), 2), normal((2, 5, 3, 48), 3)
    y, dx, dw = jax.jit(partial(run, recipe=Recipe()))(x, w, dy)
    flat = composition(x.reshape(30, 64), w, dy.reshape(30, 48), Recipe())
    assert_same(native, (y.reshape(30, 48), dx.reshape(30, 64), dw), flat)


def test_a_vector_is_one_token(cpu):
    x, w = normal((64,), 1), normal((48, 64), 2)
    assert_bitwise(linear(x, w), linear(x[None], w)[0])


def test_no_tokens():
    x, w, dy = jnp.zeros((0, 64), jnp.bfloat16), normal((48, 64), 2), jnp.zeros((0, 48), jnp.bfloat16)
    results = jax.jit(lambda *v: {name: run(*v, recipe) for name, recipe in ALL_RECIPES.items()})(x, w, dy)
    for name, (y, dx, dw) in results.items():
        assert (y.shape, dx.shape) == ((0, 48), (0, 64)), name
        assert_bitwise(dw, jnp.zeros_like(w), name)


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


@pytest.mark.parametrize("name", ["recipes_pretrain", "recipes_window64", "stochastic", "rotated", "mixed"])
def test_the_value_is_the_same_with_and_without_gradients(cpu, name):
    x, w, dy = normal((20, 64), 1), normal((48, 64), 2), normal((20, 48), 3)
    recipe = ALL_RECIPES[name]
    assert_bitwise(linear(x, w, recipe, key=KEY), run(x, w, dy, recipe)[0])


# ---------------------------------------------------------------- options
def equations(jaxpr):
    """All equations, of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def equations_of(f, *args):
    return list(equations(jax.make_jaxpr(f)(*args).jaxpr))


SMALL = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)


@pytest.mark.parametrize("recipe", ["plain", "high_precision_backward", "dequantized_backward", "recipes_pretrain"])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16, "float16"])
def test_out_dtype(native, recipe, out_dtype):
    """Of the result alone; the gradients keep the dtypes of their operands."""
    x, w, dy = SMALL[0], SMALL[1].astype(jnp.float32), SMALL[2].astype(out_dtype)
    recipe = ALL_RECIPES[recipe]
    y, dx, dw = jax.jit(partial(run, recipe=recipe, out_dtype=out_dtype))(x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.dtype(out_dtype), x.dtype, w.dtype)
    qx, qw = by_tokens(x, recipe.fprop.x, 0, KEY), operand(w, recipe.fprop.w, 1, KEY)
    if native.platform == "cpu":
        assert_bitwise(y, matmul_nt(qx, qw, out_dtype=out_dtype))


def test_out_dtype_is_that_of_x_if_not_given():
    x, w, _ = SMALL
    assert linear(x, w.astype(jnp.float32), out_dtype=None).dtype == x.dtype


@pytest.mark.parametrize("implementation", [None, "native", "reference"])
@pytest.mark.parametrize("recipe", ["plain", "dequantized_backward", "recipes_pretrain", "recipes_window64", "mixed"])
def test_the_implementation_is_that_of_every_quantizer_and_gemm(recipe, implementation):
    f = partial(run, recipe=ALL_RECIPES[recipe], implementation=implementation)
    ours = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name.startswith("nvfp4")]
    assert len(ours) >= 4
    assert {eqn.params["implementation"] for eqn in ours} == {implementation}


def test_the_reference_gives_the_same_bits(cpu):
    x, w, dy = (normal((16, 16), seed) for seed in (1, 2, 3))  # of one shape, for which each operation is compiled once
    reference, native = (run(x, w, dy, Recipe(), implementation=i) for i in ("reference", "native"))
    for name, got, want in zip(("y", "dx", "dw"), reference, native, strict=True):
        assert_bitwise(got, want, name)


@pytest.fixture
def products(monkeypatch):
    """The options of every product, in order; each runs by the best kernel."""
    calls = []

    def recorded(product):
        def record(*operands, accumulation, implementation, **options):
            calls.append((accumulation, implementation))
            return product(*operands, accumulation="fast", implementation=None, **options)

        return record

    for name in ("matmul_nt", "contract_rows"):
        monkeypatch.setattr(linear_module, name, recorded(getattr(linear_module, name)))
    monkeypatch.setattr(plans, "matmul_kernels", lambda: ("a_kernel",))
    return calls


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_accumulation_is_that_of_all_three_gemms(products, accumulation, w_axes):
    x, w, dy = SMALL
    run(x, w if w_axes == "nk" else w.T, dy, Recipe(), accumulation=accumulation, w_axes=w_axes)
    linear(x, w, accumulation=accumulation)
    assert products == [(accumulation, None)] * 4


def test_accumulation_is_fast_by_default(products):
    run(*SMALL, Recipe())
    dot_general(*SMALL[:2], NT)
    assert products == [("fast", None)] * 4


def test_a_kernel_is_named_for_the_forward_gemm_alone(products):
    f = partial(run, recipe=recipes.pretrain(), implementation="a_kernel")
    ours = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name.startswith("nvfp4")]
    assert products == [("fast", "a_kernel"), ("fast", None), ("fast", None)]
    assert {eqn.params["implementation"] for eqn in ours} == {None}


def test_gradients_in_high_precision_are_no_tf32(cpu):
    """Which only a GPU would show in the bits."""
    f = partial(run, recipe=RECIPES["high_precision_backward"])
    dots = [eqn for eqn in equations_of(f, *SMALL) if eqn.primitive.name == "dot_general"]
    assert [eqn.params["precision"] for eqn in dots] == [(lax.Precision.HIGHEST,) * 2] * 2


# ---------------------------------------------------------------- w [K, N]
FLAX_AND_TRANSPOSED = ["plain", "weight_only", "row_scaled", "mixed", "rotated", "windows", "other_w_of_dgrad"]
FLAX_AND_TRANSPOSED += [
    f"recipes_{name}" for name in ("pretrain", "pretrain_no_tiles", "4over6_all", "window64", "inference")
]


def test_w_of_flax_order_has_the_bits_of_its_transpose(cpu):
    """The result and dx, and dw transposed where a quantized GEMM makes it."""
    x, w, dy = normal((7, 64), 1), normal((64, 48), 2), normal((7, 48), 3)
    results = [
        jax.jit(lambda *v, axes=axes: [run(*v, ALL_RECIPES[name], w_axes=axes) for name in FLAX_AND_TRANSPOSED])
        for axes in ("kn", "nk")
    ]
    results = results[0](x, w, dy), results[1](x, w.T, dy)
    for name, (y, dx, dw), (want_y, want_dx, want_dw) in zip(FLAX_AND_TRANSPOSED, *results, strict=True):
        assert_bitwise(y, want_y, f"y {name}")
        if isinstance(ALL_RECIPES[name].dgrad, tuple):
            assert_bitwise(dx, want_dx, f"dx {name}")
        if isinstance(ALL_RECIPES[name].wgrad, tuple):
            assert_bitwise(dw, want_dw.T, f"dw {name}")


def test_random_bits_of_w_are_those_of_the_array_as_it_is_passed(cpu):
    x, w = normal((32, 64), 1), normal((64, 48), 2)
    recipe = ALL_RECIPES["stochastic"]
    y, other = linear(x, w, recipe, key=KEY, w_axes="kn"), linear(x, w.T, recipe, key=KEY)
    assert np.mean(np.asarray(y != other)) > 0.5


@pytest.mark.parametrize("name", ["recipes_pretrain", "stochastic", "rotated"])
def test_the_value_of_flax_order_is_the_same_with_and_without_gradients(cpu, name):
    x, w, dy = normal((20, 64), 1), normal((64, 48), 2), normal((20, 48), 3)
    recipe = ALL_RECIPES[name]
    assert_bitwise(linear(x, w, recipe, key=KEY, w_axes="kn"), run(x, w, dy, recipe, w_axes="kn")[0])


def moved(f, *args):
    """The transposes and copies of [K, N] or [N, K] in float32 that the compiled program has, fused or not."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(r"= f32\[(?:192,112|112,192)\]\S* (transpose|copy)\(", text)


FLAX_ORDER = ["plain", "stochastic", "high_precision_backward", "dequantized_backward", "weight_only"]
FLAX_ORDER += [f"recipes_{name}" for name in ("pretrain", "row_scaled", "4over6_all", "window64", "inference")]


@pytest.mark.parametrize("name", FLAX_ORDER)
def test_w_of_flax_order_is_neither_transposed_nor_copied(native, name):
    x, w, dy = normal((32, 192), 1), normal((192, 112), 2, "fp32"), normal((32, 112), 3)
    assert not moved(partial(run, recipe=ALL_RECIPES[name], w_axes="kn"), x, w, dy)
    assert not moved(lambda x, w: linear(x, w, ALL_RECIPES[name], key=KEY, w_axes="kn"), x, w)


def test_a_transpose_of_w_would_show(native):
    x, w, dy = normal((32, 192), 1), normal((192, 112), 2, "fp32"), normal((32, 112), 3)
    assert moved(lambda x, w, dy: run(x, w.T, dy, recipes.pretrain()), x, w, dy)


def test_w_of_flax_order_over_devices(devices):
    """Tokens over one axis and N over the other: the bits of one device."""
    mesh = make_mesh(devices)
    x, w, dy = normal((256, 128), 1), normal((128, 256), 2), normal((256, 256), 3)
    f = jax.jit(partial(run, recipe=recipes.pretrain(), w_axes="kn"))
    y, dx, dw = f(put(x, mesh, P("x", None)), put(w, mesh, P(None, "y")), put(dy, mesh, P("x", "y")))
    want_y, want_dx, want_dw = f(*home(devices, (x, w, dy)))
    if devices[0].platform == "cpu":
        assert_bitwise(y, want_y)
    for got, want in ((dx, want_dx), (dw, want_dw)):  # sums over devices
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (got, want)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize("name", ["high_precision_backward", "dequantized_backward"])
def test_gradients_in_high_precision_on_an_explicit_mesh(devices, name, w_axes):
    """They sum over an axis of the mesh: dx over that of N, dw over that of the tokens."""
    mesh, (x, w, dy) = (
        make_mesh(devices, kind="explicit"),
        (normal((64, 128), 1), normal((256, 128), 2), normal((64, 256), 3)),
    )
    of_w = P("y", None)
    if w_axes == "kn":
        w, of_w = w.T, P(None, "y")
    f = jax.jit(partial(run, recipe=RECIPES[name], w_axes=w_axes))
    got = f(put(x, mesh, P("x", None)), put(w, mesh, of_w), put(dy, mesh, P("x", "y")))
    for g, want, spec in zip(got, f(*home(devices, (x, w, dy))), (P("x", "y"), P("x", None), of_w), strict=True):
        assert_sharded(g, mesh, spec)
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (g, want)), rtol=0.02, atol=0.1)


# ---------------------------------------------------------------- the key
@pytest.mark.parametrize("recipe", STOCHASTIC.values(), ids=STOCHASTIC)
def test_a_stochastic_recipe_needs_a_key(recipe):
    with pytest.raises(ValueError, match="linear: key must be a JAX PRNG key, since the recipe rounds"):
        jax.eval_shape(partial(linear, recipe=recipe), normal((16, 64)), normal((16, 64)))


@pytest.mark.parametrize("recipe", NEAREST.values(), ids=NEAREST)
def test_other_recipes_ignore_the_key(recipe):
    """Neither drawn from nor kept for the backward pass."""
    x, w, dy = normal((16, 64), 1), normal((16, 64), 2), normal((16, 16), 3)

    def traces(key):
        kept = lambda x, w: jax.tree.leaves(jax.vjp(partial(linear, recipe=recipe, key=key), x, w)[1])  # noqa: E731
        run_with_key = partial(run, recipe=recipe, key=key)
        return str(jax.make_jaxpr(run_with_key)(x, w, dy)), str(jax.make_jaxpr(kept)(x, w))

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


def test_raw_keys_are_accepted(cpu):
    x, w, dy = normal((16, 64), 1), normal((48, 64), 2), normal((16, 48), 3)
    raw, typed = (run(x, w, dy, recipes.pretrain(), key=make(3)) for make in (jax.random.PRNGKey, jax.random.key))
    assert_same_tensor(raw, typed)


@pytest.mark.parametrize("specs", [(NVFP4, NVFP4_RHT), (NVFP4_RHT, NVFP4), (NVFP4, None), (None, NVFP4)], ids=str)
def test_a_quantizer_takes_an_amax_whatever_the_axes_of_x(cpu, specs):
    x, amax = normal((2, 32, 64), 1), (jnp.float32(7), jnp.float32(9))
    quantizer = Quantizer(None, None)
    kept, flat = (quantizer.pair(v, specs, None, amax, 16) for v in (x, x.reshape(64, 64)))
    assert_same_tensor(jax.tree.map(lambda v, of_flat: v.reshape(of_flat.shape), kept, flat), flat)


# ---------------------------------------------------------------- what the backward pass keeps
# Bytes of x and w: half of one per code, one per 16 for a scale, and what the amax needs.
TOKENS, DEPTH, ROWS = 48, 128, 32
PACKED = {
    "tensor": lambda rows, depth: 9 * rows * depth // 16 + 4,
    "row": lambda rows, depth: 9 * rows * depth // 16 + 4 * rows,
    "window64": lambda rows, depth: 9 * rows * depth // 16 + 4 * rows * depth // 64,
}


def residuals(recipe):
    kept = lambda x, w: jax.tree.leaves(jax.vjp(partial(linear, recipe=recipe, key=KEY), x, w)[1])  # noqa: E731
    leaves = jax.eval_shape(kept, normal((TOKENS, DEPTH), 1), normal((ROWS, DEPTH), 2))
    return [v for v in leaves if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)]


def nbytes(leaves) -> int:
    return sum(v.size * v.dtype.itemsize for v in leaves)


QUANTIZED_BACKWARD = {n: r for n, r in ALL_RECIPES.items() if isinstance(r.dgrad, tuple) and isinstance(r.wgrad, tuple)}


@pytest.mark.parametrize("recipe", QUANTIZED_BACKWARD.values(), ids=QUANTIZED_BACKWARD)
def test_residuals_are_packed_tensors(recipe):
    """The transposes of w and x, and nothing of the forward GEMM."""
    tokens = TOKENS if recipe.wgrad[1] is not WINDOW64 else 64
    want = PACKED[recipe.dgrad[1].format.amax_scope](DEPTH, ROWS) + PACKED[recipe.wgrad[1].format.amax_scope](
        DEPTH, tokens
    )
    kept = residuals(recipe)
    assert nbytes(kept) == want
    assert {v.dtype for v in kept if v.size} == {jnp.dtype(jnp.uint8), jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", ["dequantized_backward", "recipes_4over6_all_dequantized", "rotated"])
def test_dequantized_gradients_keep_the_packed_operands_of_the_forward_pass(name):
    recipe = ALL_RECIPES[name]
    transposed = isinstance(recipe.dgrad, tuple)
    want = PACKED["tensor"](TOKENS, DEPTH) + PACKED["tensor"](*((DEPTH, ROWS) if transposed else (ROWS, DEPTH)))
    assert nbytes(residuals(recipe)) == want


def test_dequantized_gradients_keep_windows(cpu):
    kept = residuals(NAMED["window64_dequantized"])
    assert nbytes(kept) == PACKED["window64"](TOKENS, DEPTH) + PACKED["tensor"](ROWS, DEPTH)


@pytest.mark.parametrize("name", [n for n, r in NAMED.items() if r.dgrad is None and r.wgrad is None])
def test_high_precision_gradients_keep_the_original_operands(name):
    assert nbytes(residuals(NAMED[name])) == 2 * (TOKENS + ROWS) * DEPTH


# ---------------------------------------------------------------- how good the gradients are
def cosine(a, b):
    a, b = (np.asarray(v, np.float64).ravel() for v in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_gradients_point_in_the_direction_of_the_exact_ones(native):
    x, w, dy = normal((128, 192), 1), normal((64, 192), 2), normal((128, 64), 3)
    names = "pretrain", "row_scaled", "4over6_weights", "4over6_all", "window64"
    results = jax.jit(lambda *v: {name: run(*v, NAMED[name]) for name in names})(x, w, dy)
    x, w, dy = (np.asarray(v, np.float64) for v in (x, w, dy))
    for name, (_, dx, dw) in results.items():
        assert cosine(dx, dy @ w) > 0.98, name
        assert cosine(dw, dy.T @ x) > 0.98, name


def test_stochastic_gradients_are_right_on_average(cpu):
    """The mean of dx over 64 keys has an eighth of one draw's error: rounding dy is unbiased."""
    x, w, dy = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
    draws = jax.jit(jax.vmap(lambda key: run(x, w, dy, recipes.pretrain(), key=key)[1:]))(jax.random.split(KEY, 64))
    exact = np.asarray(dy, np.float64) @ dequantize(quantize(w, NVFP4_2D))
    dx = np.asarray(draws[0], np.float64)
    one, mean = (np.linalg.norm(v - exact) for v in (dx[0], dx.mean(0)))
    assert mean < one / 6


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


def representable(shape, seed):
    """Numbers that NVFP4 holds exactly, since every block has a 6."""
    values = np.random.default_rng(seed).choice([6.0, -6.0, 3.0, -1.5, 0.0], shape, p=[0.4, 0.4, 0.1, 0.05, 0.05])
    return jnp.asarray(values, jnp.float32)


def by_product(f, *operands):
    """f of both operands and the dimension numbers of each product, all in one program."""
    return jax.jit(lambda *v: {name: f(*(a[name] for a in v), PRODUCTS[name][2]) for name in PRODUCTS})(*operands)


def operands_of_products(make):
    return [{name: make(product[i], i + 1) for name, product in PRODUCTS.items()} for i in range(2)]


def test_dot_general_is_lax_dot_general_on_representable_numbers(native):
    operands = operands_of_products(representable)
    want = by_product(partial(lax.dot_general, precision="highest"), *operands)
    for name, got in by_product(dot_general, *operands).items():
        assert (got.shape, got.dtype) == (want[name].shape, want[name].dtype), name
        np.testing.assert_allclose(got, want[name], rtol=1e-5, err_msg=name)


def test_dot_general_has_gradients_of_the_operands_shapes():
    def gradients(product):
        def both(a, b, dims):
            return jax.grad(lambda a, b: jnp.sum(product(a, b, dims).astype(jnp.float32)), (0, 1))(a, b)

        return by_product(both, *operands_of_products(normal))

    grads, want = gradients(dot_general), gradients(lax.dot_general)
    for name, product in PRODUCTS.items():
        assert [g.shape for g in grads[name]] == [*product[:2]], name
        assert all(cosine(g, w) > 0.98 for g, w in zip(grads[name], want[name], strict=True)), name


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_preferred_element_type(cpu, dtypes, preferred):
    lhs, rhs = (normal((16, 32), i, d) for i, d in enumerate(dtypes))
    dims = (((1,), (1,)), ((), ()))
    got = dot_general(lhs, rhs, dims, preferred_element_type=preferred)
    assert got.dtype == (preferred or lax.dot_general(lhs, rhs, dims).dtype)
    assert_bitwise(got, matmul_nt(quantize(lhs), quantize(rhs, NVFP4_2D), out_dtype=got.dtype))


def test_batch_elements_have_their_own_amax(cpu):
    lhs, rhs = normal((3, 16, 32), 1), normal((3, 16, 32), 2)
    lhs = lhs.at[1].multiply(100)
    got = dot_general(lhs, rhs, (((2,), (2,)), ((0,), (0,))))
    assert_bitwise(got, jnp.stack([linear(a, b) for a, b in zip(lhs, rhs, strict=True)]))


@pytest.mark.parametrize("precision", [None, "default", lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2])
def test_default_precisions_are_accepted(precision):
    x = normal((16, 16))
    assert_bitwise(dot_general(x, x, (((1,), (1,)), ((), ())), precision), linear(x, x))


def test_dot_general_takes_a_recipe(cpu):
    x, w = normal((16, 32), 1), normal((16, 32), 2)
    got = dot_general(x, w, (((1,), (1,)), ((), ())), recipe=RECIPES["weight_only"])
    assert_bitwise(got, linear(x, w, RECIPES["weight_only"]))


NT = (((1,), (1,)), ((), ()))
BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


def test_dot_general_passes_the_key_on(cpu):
    x, w, recipe = normal((16, 64), 1), normal((48, 64), 2), ALL_RECIPES["stochastic"]
    assert_bitwise(dot_general(x, w, NT, recipe=recipe, key=KEY), linear(x, w, recipe, key=KEY))


def test_batch_elements_have_their_own_keys(cpu):
    lhs, rhs, recipe = normal((3, 16, 64), 1), normal((3, 32, 64), 2), ALL_RECIPES["stochastic"]
    got = dot_general(lhs, rhs, BATCHED_NT, recipe=recipe, key=KEY)
    pairs = zip(lhs, rhs, jax.random.split(KEY, 3), strict=True)
    assert_bitwise(got, jnp.stack([linear(a, b, recipe, key=key) for a, b, key in pairs]))


def test_equal_batch_elements_are_rounded_differently(native):
    lhs, rhs = jnp.stack([normal((16, 64), 1)] * 4), jnp.stack([normal((32, 64), 2)] * 4)
    f = partial(dot_general, dimension_numbers=BATCHED_NT, recipe=ALL_RECIPES["recipes_pretrain"], key=KEY)
    y, pull = jax.vjp(jax.jit(f), lhs, rhs)
    dlhs, drhs = pull(jnp.stack([normal((16, 32), 3)] * 4))
    assert all((y[0] == v).all() for v in y)
    assert len({np.asarray(v).tobytes() for v in dlhs}) == len({np.asarray(v).tobytes() for v in drhs}) == 4


def test_batched_products_of_other_recipes_ignore_the_key():
    x = normal((2, 16, 32), 1)
    assert_bitwise(dot_general(x, x, BATCHED_NT, key=KEY), dot_general(x, x, BATCHED_NT))


# ---------------------------------------------------------------- dot_general of w in the order of Flax
KN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    "name", ["plain", "stochastic_columns", "stochastic_rows", "recipes_pretrain", "recipes_4over6_all"]
)
def test_a_product_in_flax_order_has_the_bits_of_linear(cpu, name):
    """Where w is rounded stochastically, of w transposed."""
    x, w, recipe = normal((16, 64), 1), normal((64, 48), 2), ALL_RECIPES[name]
    y, pull = jax.vjp(lambda x, w: dot_general(x, w, KN, recipe=recipe, key=KEY), x, w)
    want, wanted_pull = jax.vjp(lambda x, w: linear(x, w.T, recipe, key=KEY), x, w)
    assert_bitwise(y, want)
    if isinstance(recipe.dgrad, tuple):
        assert_same_tensor(pull(y), wanted_pull(y))


FLAX_PRODUCTS = {
    "dense": ((32, 192), (192, 112), KN),
    "dense_of_leading_axes": ((2, 16, 192), (192, 112), (((2,), (0,)), ((), ()))),
    "heads": ((32, 192), (192, 7, 16), KN),
    "from_heads": ((32, 12, 16), (12, 16, 112), (((1, 2), (0, 1)), ((), ()))),
    "batch": ((2, 32, 192), (2, 192, 112), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize(("left", "right", "dims"), FLAX_PRODUCTS.values(), ids=FLAX_PRODUCTS)
def test_a_product_in_flax_order_transposes_nothing(native, left, right, dims):
    x, w = normal(left, 1), normal(right, 2, "fp32")

    def f(x, w):
        y, pull = jax.vjp(lambda x, w: dot_general(x, w, dims, recipe=recipes.pretrain(), key=KEY), x, w)
        return y, pull(y)

    text = jax.jit(f).lower(x, w).compile().as_text()
    for shape in re.findall(r"= f32\[([\d,]+)\]\S* (?:transpose|copy)\(", text):
        assert math.prod(map(int, shape.split(","))) != w.size, shape
