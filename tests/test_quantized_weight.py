"""A weight quantized once for several microbatches: every bit is that of its array, and no loop quantizes it again."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import KINDS, elements, home, is_maximum, make_mesh, put, run
from operands import normal
from test_grouped_linear import RECIPES as GROUPED
from test_linear import ALL_RECIPES, KEY

from jnvfp4 import QuantizedWeight, Recipe, grouped_linear, linear, quantize, recipes
from jnvfp4.spec import NVFP4, NVFP4_2D

RECIPES = {
    name: recipe
    for name, recipe in ALL_RECIPES.items()
    if not any(spec is not None and spec.rounding == "stochastic" for spec in recipe.weight_specs)
}
X, W, DY = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)
TWICE = recipes.pretrain_4over6()  # other values of w in dgrad than in fprop


def vjp_of(x, w, dy, recipe, weight=None, product=linear, **options):
    """y, dx, dw of an array w; by ``weight``, its quantized forms, where they are given."""

    def y_of(x, w):
        return product(x, w if weight is None else replace(weight, array=w), recipe=recipe, **options)

    y, pull = jax.vjp(y_of, x, w)
    return y, *pull(dy)


def quantizers_of(jaxpr, *shape):
    """The quantizers and reductions that read an array of this shape, whatever its leading axes are."""
    names = "nvfp4_quantize", "nvfp4_quantize_pair", "nvfp4_rht_amax", "reduce_max", "argmax"
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]
    return [eqn.primitive.name for eqn in found if eqn.invars[0].aval.shape[-2:] == shape]


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("w_axes", ["nk", "kn"])
def test_every_recipe_has_the_bits_of_the_array(cpu, w_axes):
    w = (W if w_axes == "nk" else W.T).astype(jnp.float32)
    assert len(RECIPES) >= 25

    def results(x, w, dy, weights):
        of = partial(vjp_of, x, w, dy, key=KEY, w_axes=w_axes)
        return {name: of(recipe, weights and weights[name]) for name, recipe in RECIPES.items()}

    quantized = {name: QuantizedWeight.of(w, recipe, w_axes=w_axes) for name, recipe in RECIPES.items()}
    assert_same_tensor(*(jax.jit(results)(X, w, DY, weights) for weights in (quantized, None)))


def test_the_forms_are_read_and_the_gradient_is_that_of_the_array(cpu):
    """Of another array than was quantized, to see which is read; and through ``of``, whose forms are constants."""
    weight, bias = QuantizedWeight.of(W, TWICE), jnp.linspace(-1, 1, 48)
    options = {"key": KEY, "bias": bias, "out_dtype": jnp.float32, "accumulation": "pinned"}
    dy = DY.astype(jnp.float32)
    assert_same_tensor(vjp_of(X, 2 * W, dy, TWICE, weight, **options), vjp_of(X, W, dy, TWICE, **options))
    loss = lambda w: jnp.sum(linear(X, QuantizedWeight.of(w, TWICE), TWICE, key=KEY).astype(jnp.float32) ** 2)  # noqa: E731
    plain = lambda w: jnp.sum(linear(X, w, TWICE, key=KEY).astype(jnp.float32) ** 2)  # noqa: E731
    assert_bitwise(*(jax.jit(jax.grad(f))(W.astype(jnp.float32)) for f in (loss, plain)))
    assert (weight.fprop.shape, weight.dgrad.shape) == ((48, 64), (64, 48))
    assert_same_tensor(weight.fprop, quantize(W, TWICE.fprop.w))
    assert_same_tensor(weight.dgrad, quantize(W, NVFP4_2D, transpose=True))


def test_the_amax_and_the_implementation_are_those_of_the_quantizers(cpu):
    given = QuantizedWeight.of(W, w_amax=9.0)
    assert_same_tensor((given.fprop, given.dgrad), (quantize(W, NVFP4_2D, amax=9.0), quantize(W.T, NVFP4_2D, amax=9.0)))
    for implementation in (None, "reference"):
        make = lambda w, i=implementation: QuantizedWeight.of(w, TWICE, implementation=i)  # noqa: E731
        ours = [e for e in equations(jax.make_jaxpr(make)(W).jaxpr) if e.primitive.name.startswith("nvfp4")]
        assert {eqn.params["implementation"] for eqn in ours} == {implementation}


# ---------------------------------------------------------------- microbatches
LAYERS = normal((3, 64, 64), 4, "fp32") / 8
BATCHES = normal((4, 32, 64), 5)
POLICIES = {
    "none": lambda f: f,
    "nothing": jax.checkpoint,
    "names": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("nvfp4_residual")),
}


def accumulated(layers, batches, recipe, once, policy="none"):
    """The gradient of layers in a loop, summed over microbatches in a loop around it."""
    weights = jax.vmap(partial(QuantizedWeight.of, recipe=recipe))(layers) if once else None

    def loss(layers, batch, key):
        @POLICIES[policy]
        def layer(h, of):
            w, key = of
            return jnp.tanh(linear(h, w, recipe, key=key)), None

        stack = replace(weights, array=layers) if once else layers
        return jnp.sum(lax.scan(layer, batch, (stack, jax.random.split(key, 3)))[0].astype(jnp.float32) ** 2)

    def microbatch(total, of):
        return total + jax.grad(loss)(layers, *of), None

    keys = jax.random.split(KEY, len(batches))
    return lax.scan(microbatch, jnp.zeros_like(layers), (batches, keys))[0]


LOOPED = {"default": recipes.DEFAULT, "pretrain": recipes.pretrain(), "twice": TWICE, "inference": recipes.inference()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOOPED)
def test_microbatches_have_the_bits_of_arrays_whatever_is_saved(cpu, name, policy):
    of = partial(accumulated, recipe=LOOPED[name], policy=policy)
    assert_bitwise(*(jax.jit(partial(of, once=once))(LAYERS, BATCHES) for once in (True, False)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOOPED)
def test_a_weight_is_quantized_outside_the_loop_over_microbatches_alone(name, policy):
    """And its amax found there. Within that loop only x and dy [32, 64] are read by quantizers."""
    jaxpr = jax.make_jaxpr(partial(accumulated, recipe=LOOPED[name], once=True, policy=policy))(LAYERS, BATCHES).jaxpr
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inside = loop.params["jaxpr"].jaxpr
    assert not quantizers_of(inside, 64, 64)
    assert quantizers_of(inside, 32, 64)
    assert set(quantizers_of(jaxpr, 64, 64)) - {"reduce_max"}
    without = jax.make_jaxpr(partial(accumulated, recipe=LOOPED[name], once=False, policy=policy))(LAYERS, BATCHES)
    assert quantizers_of(without.jaxpr, 64, 64)  # in the loop


def test_forms_are_no_residuals_of_a_loop_over_layers():
    """The backward loop reads the codes of the stack itself; a policy by names copies none."""
    for policy in ("none", "names"):
        jaxpr = jax.make_jaxpr(partial(accumulated, recipe=recipes.DEFAULT, once=True, policy=policy))(LAYERS, BATCHES)
        loops = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
        stacked = [v.aval.shape for eqn in loops for v in eqn.outvars]
        assert (3, 64, 32) not in stacked  # the codes of x are [3, 64, 16] and [3, 32, 32]
        assert (3, 64, 16) in stacked


# ---------------------------------------------------------------- transforms
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, 0), (None, 0, 0)], ids=["x", "both", "w"])
def test_vmap_of_a_weight_quantized_once(cpu, axes):
    x, w, dy = (
        normal((3, *v.shape), i) if axis == 0 else v for i, (v, axis) in enumerate(zip((X, W, DY), axes, strict=True))
    )
    of = lambda recipe: jax.vmap(lambda x, w, dy: vjp_of(x, w, dy, recipe, QuantizedWeight.of(w, recipe)), axes)  # noqa: E731
    plain = lambda recipe: jax.vmap(partial(vjp_of, recipe=recipe), axes)  # noqa: E731
    names = "plain", "weight_only", "dequantized_backward", "other_w_of_dgrad"
    got, want = (jax.jit(lambda *v, f=f: {n: f(RECIPES[n])(*v) for n in names})(x, w, dy) for f in (of, plain))
    assert_same_tensor(got, want)


# ---------------------------------------------------------------- over devices
SHARDED = [
    *((kind, "nk", P("x", None), P("y", None), None) for kind in KINDS),
    *((kind, "kn", P(None, "y"), P("y", None), None) for kind in KINDS),
    *((kind, "nk", P("x", None), P("x", None), (P("x", None), P())) for kind in KINDS),
    *((kind, "kn", P("x", None), P("y", "x"), (P("y", "x"), P("y", None))) for kind in KINDS),
]
ON_MESH = {"one": recipes.DEFAULT, "twice": TWICE, "dequantized": recipes.pretrain(backward="dequantized")}
ON_MESH["high precision"] = recipes.inference()


@pytest.mark.parametrize("name", ON_MESH)
@pytest.mark.parametrize(("kind", "w_axes", "of_x", "of_w", "gather"), SHARDED, ids=str)
def test_on_a_mesh_it_moves_what_its_array_moves(devices, kind, w_axes, of_x, of_w, gather, name):
    """Gathered weights too: as bytes, and once where dgrad reads the tensor of fprop. An array that no GEMM reads may
    differ from what was quantized."""
    mesh, w, recipe = make_mesh(devices, kind=kind), normal((256, 256), 2), ON_MESH[name]
    along_n = (*(gather[1] if gather else of_w), None, None)[w_axes.index("n")]
    x, dy = put(normal((128, 256), 1), mesh, of_x), put(normal((128, 256), 3), mesh, P(of_x[0], along_n))
    weight = jax.jit(partial(QuantizedWeight.of, recipe=recipe, w_axes=w_axes))(put(w, mesh, of_w))
    f = partial(vjp_of, recipe=recipe, key=KEY, w_axes=w_axes, w_gather=gather)
    array = put(w if recipe.dgrad is None else 2 * w, mesh, of_w)
    got, found = run(lambda x, w, dy, weight: f(x, w, dy, weight=weight), x, array, dy, weight)
    want, of_array = run(f, x, put(w, mesh, of_w), dy)
    if devices[0].platform == "cpu":
        assert_same_tensor(got, want)
    assert [v.sharding for v in got] == [v.sharding for v in want]
    # On a GPU XLA gathers either along the first axis and transposes, or not.
    part = (lambda s: s) if devices[0].platform == "cpu" else (lambda s: (s.partition("[")[0], elements(s)))
    moved = lambda found: Counter((op, part(s)) for op, s in found if not is_maximum(s))  # noqa: E731
    assert moved(found) == moved(of_array)


def test_a_weight_quantized_once_inside_shard_map(devices):
    """Replicated weights, whose gradient is summed over the devices that tokens are split over."""
    mesh = make_mesh(devices, "x")
    x, dy = normal((256, 64), 1), normal((256, 48), 3)

    def both(x, w, dy, weight):
        of = partial(vjp_of, x, dy=dy, recipe=TWICE, key=KEY)
        return of(2 * w, weight=weight), of(w), of(w, weight=QuantizedWeight.of(w, TWICE))

    of_one = (P("x"), P("x"), P())
    specs = {"in_specs": (P("x"), P(), P("x"), P()), "out_specs": (of_one, of_one, of_one)}
    given, array, inside = jax.jit(jax.shard_map(both, mesh=mesh, **specs))(x, W, dy, QuantizedWeight.of(W, TWICE))
    assert_same_tensor(given, array)
    assert_same_tensor(inside, array)
    total = sum(vjp_of(*home(devices, (a, W, b)), TWICE, key=KEY)[2].astype(jnp.float32) for a, b in
                zip(jnp.split(x, len(devices)), jnp.split(dy, len(devices)), strict=True))  # fmt: skip
    np.testing.assert_allclose(np.asarray(array[2], np.float32), total, rtol=0.05, atol=0.2)


# ---------------------------------------------------------------- experts
@pytest.mark.parametrize("w_axes", ["nk", "kn"])
def test_grouped_linear_takes_experts_quantized_once(cpu, w_axes):
    """By every recipe. The transpose for dx is no more work than that of a dense layer: it was quantized, too."""
    sizes, w = jnp.array([9, 0, 20], jnp.int32), normal((3, 48, 64), 2, "fp32")
    w = w if w_axes == "nk" else w.mT
    chosen = {name: recipe for name, recipe in GROUPED.items() if name != "stochastic"}

    def results(x, w, dy, once):
        def of(recipe):
            make = partial(QuantizedWeight.of, recipe=replace(recipe, wgrad=None), w_axes=w_axes)
            options = {"product": grouped_linear, "group_sizes": sizes, "key": KEY, "w_axes": w_axes}
            return vjp_of(x, w, dy, recipe, jax.vmap(make)(w) if once else None, **options)

        return {name: of(recipe) for name, recipe in chosen.items()}

    assert_same_tensor(*(jax.jit(partial(results, once=once))(X, w, DY) for once in (True, False)))
    jaxpr = jax.make_jaxpr(partial(results, once=True))(X, w, DY).jaxpr
    assert "nvfp4_transpose" not in {eqn.primitive.name for eqn in equations(jaxpr)}


def test_a_recipe_with_the_same_specs_of_w_reads_it(cpu):
    """Its other operands may be quantized in another way; those of w may not."""
    weight = QuantizedWeight.of(W, recipes.pretrain())
    assert_bitwise(linear(X, weight), linear(X, W))
    with pytest.raises(ValueError, match=r"linear: w must be .*, NVFP4 and NVFP4_2D, got NVFP4_2D and NVFP4_2D; make"):
        linear(X, weight, Recipe((NVFP4, NVFP4)))
