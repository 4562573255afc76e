"""linear with a quantized w: the product of the tensor as it is, and dx alone from its dequantized values."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, key_of_operand
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import KINDS, home, make_mesh, put, shard
from operands import normal

from jnvfp4 import NVFP4Tensor, Recipe, dequantize, linear, matmul_nt, quantize, recipes
from jnvfp4.recipes import DEFAULT
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64

KEY = jax.random.key(3)
RECIPES = {
    "plain": Recipe(),
    "pretrain": recipes.pretrain(),
    "pretrain_high_precision": recipes.pretrain(backward="high_precision"),
    "pretrain_dequantized": recipes.pretrain(backward="dequantized"),
    "row_scaled": recipes.row_scaled(),
    "rows_of_w": Recipe((NVFP4, ROW_SCALED), (NVFP4, ROW_SCALED), None),
    "4over6_all": recipes.four_over_six("all"),
    "window64": recipes.window64(),
    "windows_of_w": Recipe((WINDOW64, WINDOW64), None, (WINDOW64, WINDOW64)),
    "rotated": Recipe((NVFP4_RHT, NVFP4_RHT), (NVFP4_RHT_SR, NVFP4_RHT), "dequantized"),
    "inference": recipes.inference(),
    "weight_only": recipes.inference(weight_only=True),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
X, W, DY = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)


def frozen(recipe, w=W):
    return quantize(w, recipe.fprop.w)


def run(x, w, dy, recipe=DEFAULT, **options):
    y, pull = jax.vjp(lambda x: linear(x, w, recipe, **options), x)
    return y, pull(dy)[0]


def dense(dy, w):
    return lax.dot_general(dy, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(dy.dtype)


# ---------------------------------------------------------------- the composition
def by_every_recipe(f, weights):
    """f(x, w, dy, recipe) by each recipe with its weight, in one program."""
    every = jax.jit(lambda x, weights, dy: {name: f(x, weights[name], dy, RECIPES[name]) for name in RECIPES})
    return every(X, weights, DY)


def composed(x, w, dy, recipe):
    qx = x if recipe.fprop.x is None else quantize(x, recipe.fprop.x)
    return matmul_nt(qx, w), dense(dy, dequantize(w, jnp.bfloat16))


def quantizing(x, w, dy, recipe):
    """The layer that quantizes w, with dgrad from the dequantized w."""
    recipe = replace(recipe, dgrad="dequantized", wgrad=None)
    y, pull = jax.vjp(lambda x: linear(x, w, recipe), x)
    return y, pull(dy)[0]


def test_every_recipe_is_its_composition(native):
    """And the layer that quantizes w."""
    weights = {name: frozen(recipe) for name, recipe in RECIPES.items()}
    got = by_every_recipe(run, weights)
    for want in (by_every_recipe(composed, weights), by_every_recipe(quantizing, dict.fromkeys(RECIPES, W))):
        if native.platform == "cpu":
            assert_same_tensor(got, want)
        for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (g, w)), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_float_types(cpu, dtype):
    x, dy = normal((20, 64), 1, dtype), normal((20, 48), 3, dtype)
    y, dx = run(x, frozen(Recipe()), dy)
    assert_bitwise(y, matmul_nt(quantize(x), frozen(Recipe()), out_dtype=x.dtype))
    assert (y.dtype, dx.dtype) == (x.dtype, x.dtype)


def test_leading_axes_bias_and_out_dtype(cpu):
    x, bias = normal((2, 5, 3, 64), 1), jnp.linspace(-1, 1, 48)
    y, pull = jax.vjp(lambda x, b: linear(x, frozen(Recipe()), bias=b, out_dtype=jnp.float32), x, bias)
    flat = matmul_nt(quantize(x.reshape(30, 64)), frozen(Recipe()), bias=bias, out_dtype=jnp.float32)
    assert_bitwise(y.reshape(30, 48), flat)
    dx, db = pull(jnp.ones_like(y))
    assert (dx.shape, dx.dtype, db.dtype) == (x.shape, x.dtype, bias.dtype)
    assert_bitwise(db, jnp.full(48, 30.0))


@pytest.mark.parametrize("rows", [5, 16, 0])
def test_any_number_of_rows(cpu, rows):
    """Of w too, in tiles: it was quantized before. Its leaves may be on the host."""
    w = jax.tree.map(lambda v: v[:rows] if v.ndim else v, frozen(Recipe()))
    for of_w in (w, jax.device_get(w)):
        y, dx = run(X, of_w, DY[:, :rows])
        assert_bitwise(y, matmul_nt(quantize(X), w))
        assert_bitwise(dx, dense(DY[:, :rows], dequantize(w, jnp.bfloat16)))


@pytest.mark.parametrize("implementation", [None, "native", "reference"])
def test_the_implementation_is_that_of_every_call(implementation):
    jaxpr = jax.make_jaxpr(partial(run, implementation=implementation))(X, frozen(Recipe()), DY)
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name.startswith("nvfp4")]
    assert sorted(e.primitive.name for e in found) == ["nvfp4_dequantize", "nvfp4_matmul", "nvfp4_quantize"]
    assert {e.params["implementation"] for e in found} == {implementation}


def test_only_the_rounding_of_x_needs_a_key(cpu):
    """Not that of w, which is over, and not that of gradients."""
    of_w, of_x = (Recipe(pair, (NVFP4_SR, NVFP4), None) for pair in ((NVFP4, NVFP4_SR), (NVFP4_SR, NVFP4)))
    assert_bitwise(linear(X, quantize(W), of_w), matmul_nt(quantize(X), quantize(W)))
    with pytest.raises(ValueError, match="linear: key must be given"):
        linear(X, quantize(W), of_x)
    want = matmul_nt(quantize(X, NVFP4_SR, key=key_of_operand(KEY, 0, X)), quantize(W))
    assert_bitwise(linear(X, quantize(W), of_x, key=KEY), want)


# ---------------------------------------------------------------- what is kept, and what has no gradient
@every_recipe
def test_nothing_is_kept_but_the_tensor(recipe):
    """Neither x nor a w of 16 bits."""
    w = frozen(recipe)
    kept = jax.eval_shape(lambda x, w: jax.tree.leaves(jax.vjp(lambda x: linear(x, w, recipe), x)[1]), X, w)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) == w.nbytes
    assert {leaf.dtype for leaf in kept if leaf.size} == {jnp.dtype(jnp.uint8), jnp.dtype(jnp.float32)}


def test_the_tensor_is_a_constant():
    loss = lambda x, w: jnp.sum(linear(x, w).astype(jnp.float32))  # noqa: E731
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(loss, 1)(X, frozen(Recipe()))
    zeros = jax.grad(loss, 1, allow_int=True)(X, quantize(W))
    assert not any(np.any(np.asarray(g, bool)) for g in jax.tree.leaves(zeros))
    with pytest.raises(NotImplementedError, match="nvfp4_quantize has no derivative"):
        jax.grad(lambda w: loss(X, quantize(w)))(W.astype(jnp.float32))


# ---------------------------------------------------------------- transforms
def loss_of(x, w, recipe=DEFAULT):
    return jnp.sum(jnp.sin(linear(x, w, recipe).astype(jnp.float32)))


VMAPS = {"x": (0, None, 0), "both": (0, 0, 0), "w": (None, 0, None)}


@pytest.mark.parametrize("axes", VMAPS.values(), ids=VMAPS)
def test_vmap_of_a_frozen_weight_is_a_loop(cpu, axes):
    names = "plain", "weight_only", "row_scaled", "rows_of_w"
    x, dy = (normal((3, 32, n), i) if axes[0] == 0 else normal((32, n), i) for n, i in ((64, 1), (48, 2)))
    w = normal((3, 48, 64) if axes[1] == 0 else (48, 64), 2)
    vmapped = jax.vmap if axes[1] == 0 else lambda f: f
    weights = {name: vmapped(partial(quantize, spec=RECIPES[name].fprop.w))(w) for name in names}
    f = jax.jit(lambda x, w, dy: {name: run(x, w[name], dy, RECIPES[name]) for name in names})
    one = lambda v, axis, i: v if axis is None else jax.tree.map(lambda part: part[i], v)  # noqa: E731
    want = [f(*(one(v, axis, i) for v, axis in zip((x, weights, dy), axes, strict=True))) for i in range(3)]
    assert_same_tensor(jax.vmap(f, axes)(x, weights, dy), jax.tree.map(lambda *parts: jnp.stack(parts), *want))


POLICIES = {
    "default": None,
    "names": jax.checkpoint_policies.save_only_these_names("nvfp4_residual"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def test_remat_changes_no_bit(native):
    """Of scales too: JAX rounds the floats that it saves as if E4M3 had infinities."""
    w = frozen(Recipe())
    assert np.asarray(w.scale, np.float32).max() == 448
    losses = {name: jax.checkpoint(loss_of, policy=policy) for name, policy in POLICIES.items()}
    captured = jax.jit(lambda x: {name: jax.grad(partial(f, w=w))(x) for name, f in losses.items()})(X)
    passed = jax.jit(lambda x, w: {name: jax.grad(f)(x, w) for name, f in losses.items()})(X, w)
    want = dict.fromkeys(POLICIES, jax.jit(jax.grad(loss_of))(X, w))
    assert_same_tensor((captured, passed), (want, want))


def test_remat_copies_no_weight():
    """It is an argument, and no residual that a policy saves by its name."""
    f = jax.checkpoint(loss_of, policy=POLICIES["names"])
    jaxpr = jax.make_jaxpr(jax.grad(f))(X, frozen(Recipe()))
    names = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "name"]
    assert {e.invars[0].aval.shape for e in names} <= {X.shape, (32, 32), (32, 4), ()}


# ---------------------------------------------------------------- over devices
SHARDED = [(kind, *of) for kind in KINDS for of in ((P("x", None), P("y", None)), (P(None, "y"), P(None, "y")))]


@pytest.mark.parametrize(("kind", "of_x", "of_w"), SHARDED, ids=str)
def test_a_sharded_frozen_weight_has_the_bits_of_one_device(devices, kind, of_x, of_w):
    mesh = make_mesh(devices, kind=kind)
    x, w, dy = normal((64, 512), 1), quantize(normal((128, 512), 2), NVFP4_2D), normal((64, 128), 3)
    f = jax.jit(run)
    y, dx = f(put(x, mesh, of_x), shard(w, mesh, of_w), put(dy, mesh, P(of_x[0], of_w[0])))
    want_y, want_dx = f(*home(devices, (x, w, dy)))
    if devices[0].platform == "cpu" and of_x[1] is None:
        assert_bitwise(y, want_y)
    for got, want in ((y, want_y), (dx, want_dx)):
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (got, want)), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_a_frozen_weight_inside_shard_map(devices, parallel):
    """Tokens over devices, or rows of w, where dx is a sum over devices."""
    mesh = make_mesh(devices, "x")
    x, w, dy = normal((256, 128), 1), quantize(normal((256, 128), 2)), normal((256, 256), 3)
    of_w = P() if parallel == "data" else P("x", None)
    of_x, of_dy = (P("x", None), P("x", None)) if parallel == "data" else (P(), P(None, "x"))
    specs = (of_x, NVFP4Tensor(of_w, of_w, P(), w.format), of_dy)

    def local(x, w, dy):
        return run(x, w, dy, recipes.inference(weight_only=True))

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(of_dy, of_x)))
    y, dx = f(x, w, dy)
    want_y, want_dx = jax.jit(local)(*home(devices, (x, w, dy)))
    if devices[0].platform == "cpu":
        assert_bitwise(y, want_y)
    np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (dx, want_dx)), rtol=0.02, atol=0.5)
