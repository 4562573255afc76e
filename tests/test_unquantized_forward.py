"""``Recipe(fprop=None)``: y in high precision, and the gradients that the other two GEMMs say."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put
from operands import normal

from jnvfp4 import NVFP4, NVFP4_2D, RESIDUAL_NAME, DotGeneral, Recipe, linear, quantize, recipes

KEY = jax.random.key(3)
GRADIENTS = {
    "pretrain": recipes.pretrain(),
    "rows": recipes.row_scaled(),
    "windows": recipes.window64(),
    "dgrad alone": Recipe(wgrad=None),
    "wgrad alone": Recipe(dgrad=None),
    "neither": Recipe(dgrad=None, wgrad=None),
}
X, W, DY = normal((24, 64), 1), normal((48, 64), 2), normal((24, 48), 3)
DENSE = (((1,), (0,)), ((), ()))


@pytest.fixture(autouse=True)
def cpu():
    """Where the pinned order along K makes every product bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def run(x, w, dy, recipe, **options):
    y, pull = jax.vjp(lambda x, w: linear(x, w, recipe, key=KEY, **options), x, w)
    return y, *pull(dy)


def plain(x, w, axis=1, dtype=None):
    y = lax.dot_general(x, w, (((1,), (axis,)), ((), ())), precision="highest", preferred_element_type=jnp.float32)
    return y.astype(dtype or x.dtype)


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize("recipe", GRADIENTS.values(), ids=GRADIENTS)
def test_only_the_forward_gemm_differs(recipe, w_axes):
    w = W if w_axes == "nk" else W.T
    got = jax.jit(partial(run, recipe=replace(recipe, fprop=None), w_axes=w_axes))(X, w, DY)
    want = jax.jit(partial(run, recipe=recipe, w_axes=w_axes))(X, w, DY)
    assert_bitwise(got[0], plain(X, W))
    assert_bitwise(got[1], want[1], "dx")
    assert_bitwise(got[2], want[2], "dw")


def test_the_value_is_the_same_without_gradients():
    recipe = replace(recipes.pretrain(), fprop=None)
    bias = jnp.linspace(-1, 1, 48)
    for options in ({}, {"bias": bias}):
        assert_bitwise(linear(X, W, recipe, key=KEY, **options), run(X, W, DY, recipe, **options)[0])
    got = linear(X, W, recipe, key=KEY, bias=bias)
    assert_bitwise(got, (plain(X, W, dtype=jnp.float32) + bias).astype(jnp.bfloat16))


def test_float32_stays_float32():
    x, w = X.astype(jnp.float32) + 1e-6, W.astype(jnp.float32)
    y = linear(x, w, Recipe(None))
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, rtol=1e-4, atol=1e-4)


def test_the_backward_pass_keeps_quantized_tensors():
    program = str(jax.make_jaxpr(lambda x, w: run(x, w, DY, Recipe(None)))(X, W))
    assert program.count("nvfp4_matmul[") == 2
    saved = jax.ad_checkpoint.checkpoint_policies.save_only_these_names(RESIDUAL_NAME)
    loss = jax.checkpoint(lambda w: jnp.sum(jnp.sin(linear(X, w, Recipe(None)).astype(jnp.float32))), policy=saved)
    jax.grad(loss)(W)


def test_sizes_fit_the_gradients_alone():
    free = Recipe(None, None, (NVFP4, NVFP4))
    x, w, dy = normal((16, 50), 1), normal((10, 50), 2), normal((16, 10), 3)
    assert run(x, w, dy, free)[2].shape == (10, 50)
    with pytest.raises(ValueError, match="linear: K must be a multiple of 16, got K=50"):
        linear(x, normal((16, 50)), Recipe(None, (NVFP4, NVFP4_2D), None))
    assert DotGeneral(Recipe(None))(x, w.T, DENSE).shape == (16, 10)


def test_sharded_over_tokens():
    mesh = make_mesh(jax.devices("cpu")[:8], kind="explicit")
    x, w, dy = normal((64, 128), 1), normal((64, 128), 2), normal((64, 64), 3)
    want = run(x, w, dy, Recipe(None))
    with jax.set_mesh(mesh):
        got = jax.jit(partial(run, recipe=Recipe(None)))(
            put(x, mesh, P("x", None)), put(w, mesh, P("y", None)), put(dy, mesh, P("x", "y"))
        )
    for g, v, spec in zip(got, want, (P("x", "y"), P("x", None), P("y", None)), strict=True):
        assert_sharded(g, mesh, spec)
        np.testing.assert_allclose(np.float32(g), np.float32(v), rtol=0.02, atol=0.3)


def test_a_step_in_training_switches_to_it():
    """The recipe is static: one compiled step each."""
    traces = []

    @partial(jax.jit, static_argnames="recipe")
    def step(w, key, recipe):
        traces.append(recipe)
        return jax.grad(lambda w: jnp.sum(jnp.sin(linear(X, w, recipe, key=key).astype(jnp.float32))))(w)

    recipe = recipes.pretrain()
    for i in range(6):
        step(W, jax.random.key(i), recipe if i < 4 else replace(recipe, fprop=None))
    assert traces == [recipe, replace(recipe, fprop=None)]


@pytest.mark.parametrize("field", ["dgrad", "wgrad"])
def test_nothing_to_dequantize(field):
    with pytest.raises(ValueError, match=f'Recipe: {field} must not be "dequantized" for fprop=None'):
        Recipe(None, **{field: "dequantized"})


def test_quantized_operands_need_a_format():
    with pytest.raises(ValueError, match=r"linear: recipe\.fprop must be a pair for an NVFP4Tensor w, got None"):
        linear(X, quantize(W), Recipe(None))
