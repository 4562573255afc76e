"""Equinox models multiply by a policy: under vmap over tokens as ``linear`` of all of them."""

import sys
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, recorded_draws

pytest.importorskip("equinox")

import equinox as eqx

from jnvfp4 import NVFP4, NVFP4_SR, Policy, Recipe, Rule, linear, recipes, step_key
from jnvfp4._layers.keys import fold_path
from jnvfp4.equinox import Linear, apply

pytestmark = pytest.mark.usefixtures("cpu")
SR, NEAREST, KEY = recipes.pretrain(), recipes.DEFAULT, jax.random.key(5)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32)
MODEL = eqx.nn.MLP(32, 10, 64, 1, key=jax.random.key(0))
POLICY = Policy([Rule("layers/.*", SR)])


def run(call, model, x=X):
    """Loss and gradients of a function of the model and all tokens."""

    @eqx.filter_jit
    def step(model, x, key):
        with step_key(key):
            loss = lambda model: jnp.sum(jnp.sin(call(model, x)))  # noqa: E731
            return eqx.filter_value_and_grad(loss)(model)

    value, grads = step(model, x, KEY)
    return value, jax.tree.leaves(eqx.filter(grads, eqx.is_inexact_array))


def twice(model, x):
    """As models of one sequence are called on a batch."""
    return jax.vmap(jax.vmap(model))(x)


def by_hand(model, x):
    for i, layer in enumerate(model.layers):
        n = len(layer.weight)
        y = linear(x, jnp.pad(layer.weight, ((0, -n % 16), (0, 0))), SR, key=fold_path(KEY, f"layers/{i}"))
        x = y[..., :n] + layer.bias
        x = x if i else jax.nn.relu(x)
    return x


def test_a_vmap_over_tokens_is_one_product():
    """Of all tokens of a batch, forward and backward, with one amax; also where a layer is mapped by itself."""
    got, want = run(twice, apply(MODEL, POLICY)), run(by_hand, MODEL)
    assert_same_tensor(got, want)
    step = lambda x: jax.grad(lambda x: jnp.sum(twice(apply(MODEL, Policy(default=NEAREST)), x)))(x)  # noqa: E731
    assert str(jax.make_jaxpr(step)(X)).count("nvfp4_matmul[") == 6  # three of each layer


def test_gradients_of_every_example_stay_apart():
    """Where the gradient is within vmap; and where a checkpoint hides vmap, the sum of those of the examples."""
    layer = apply(MODEL.layers[0], Policy(default=NEAREST))
    loss = lambda layer, x: jnp.sum(jnp.sin(jax.vmap(layer)(x)))  # noqa: E731
    grads = [eqx.filter_grad(loss)(layer, x).weight for x in X]
    got = jax.vmap(lambda x: eqx.filter_grad(loss)(layer, x).weight)(X)
    for of_example, want in zip(got, grads, strict=True):
        np.testing.assert_allclose(of_example, want, rtol=1e-5, atol=1e-5)
    hidden = lambda layer, x: jnp.sum(jax.vmap(lambda x: eqx.filter_checkpoint(loss)(layer, x))(x))  # noqa: E731
    np.testing.assert_allclose(eqx.filter_grad(hidden)(layer, X).weight, sum(grads), rtol=1e-4, atol=1e-4)


def test_models_that_are_mapped_have_their_own_products():
    """An ensemble, of which each model has the bits that it has alone."""
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 48, key=key))(jax.random.split(KEY, 3))
    call = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(eqx.if_array(0), None))
    got = call(apply(models, Policy(default=NEAREST)), X[0])
    for y, w, b in zip(got, models.weight, models.bias, strict=True):
        assert_bitwise(y, linear(X[0], w) + b)


def test_the_tree_of_the_model():
    adapted = apply(MODEL, POLICY)
    assert all(type(layer) is Linear and isinstance(layer, eqx.nn.Linear) for layer in adapted.layers)
    assert adapted.layers[0].weight is MODEL.layers[0].weight
    assert [a.shape for a in jax.tree.leaves(eqx.filter(adapted, eqx.is_array))] == [(64, 32), (64,), (10, 64), (10,)]
    assert jax.tree.structure(apply(adapted, Policy())) == jax.tree.structure(MODEL)
    assert [layer.product.recipe for layer in apply(adapted, Policy(default=NEAREST)).layers] == [NEAREST] * 2
    assert_bitwise(twice(apply(adapted, Policy()), X), twice(MODEL, X))


def test_explain_lists_layers_of_equinox(monkeypatch):
    """Without haliax, and where haliax does not import."""
    attention = eqx.nn.MultiheadAttention(2, 32, key=KEY)
    model = {"attention": attention, "conv": eqx.nn.Conv1d(4, 4, 3, key=KEY), "lm_head": MODEL.layers[1]}
    monkeypatch.delitem(sys.modules, "haliax", raising=False)
    for warning in (nullcontext(), pytest.warns(UserWarning, match="layers of haliax are not listed, as it fails")):
        with warning:
            found = {d.path: d for d in POLICY.explain(MODEL)}
        assert (found["layers/1"].shape, found["layers/1"].recipe) == ((10, 64), SR)
        assert found["layers/1"].why == "rule 'layers/.*'; N padded from 10 to 16"
        monkeypatch.setitem(sys.modules, "haliax", types.ModuleType("haliax"))  # without the parts that jnvfp4 needs
        monkeypatch.delitem(sys.modules, "jnvfp4.haliax", raising=False)
    monkeypatch.delitem(sys.modules, "haliax")
    assert [d.path for d in POLICY.explain(eqx.nn.Sequential([MODEL, attention]))][2:] == [
        f"layers/1/{name}_proj" for name in ("query", "key", "value", "output")
    ]
    with pytest.warns(
        UserWarning, match="apply: layer 'conv' is of type Conv1d, which jnvfp4 does not quantize; a rule"
    ):
        adapted = apply(model, Policy(default=NEAREST))
    assert type(adapted["lm_head"]) is eqx.nn.Linear  # kept
    out = jax.vmap(lambda x: adapted["attention"](x, x, x))
    assert str(jax.make_jaxpr(out)(X)).count("nvfp4_matmul[") == 4


class Own(eqx.nn.Linear):
    """Computes something else."""


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Own(32, 32, key=KEY), "of type Own, which jnvfp4 does not quantize"),
        (eqx.nn.Linear(32, "scalar", key=KEY), "of a scalar"),
    ],
    ids=["subclass", "scalar"],
)
def test_other_linear_layers_stay_as_they_are(layer, why):
    policy = Policy(default=NEAREST)
    assert policy.explain(eqx.nn.Sequential([layer]))[0].why == why
    with pytest.warns(UserWarning, match=f"apply: layer 'layers/0' is {why}"):
        assert apply({"layers": [layer]}, policy)["layers"][0] is layer


class Gated(eqx.Module):
    """Multiplies by an array of its own, and has others that do not multiply."""

    up: eqx.nn.Linear
    arrays: dict
    others: list

    def __init__(self):
        self.up = eqx.nn.Linear(32, 32, key=KEY)
        self.arrays = {"down": jnp.ones((32, 32)), "pos": jnp.ones((16, 32)), "table": jnp.ones((16, 32), jnp.int32)}
        self.others = [eqx.nn.Embedding(32, 32, key=KEY), eqx.nn.LayerNorm((16, 32))]


def test_an_array_that_is_no_layer_is_named():
    model, why = [Gated(), eqx.nn.GRUCell(32, 32, key=KEY)], "not of equinox.nn.Linear; jnvfp4.linear in its module"
    explained = Policy(default=NEAREST).explain(eqx.nn.Sequential(model))
    others = [f"layers/{path}" for path in ("0/arrays/down", "1/weight_ih", "1/weight_hh")]
    assert [d.path for d in explained] == ["layers/0/up", *others]
    assert [d.why.startswith(why) for d in explained] == [False, True, True, True]
    assert explained.quantized == 1 / 8
    with pytest.warns(
        UserWarning, match=f"apply: layer '(0/arrays/down|1/weight_.h)' is {why} quantizes it; a rule"
    ) as found:
        apply(model, Policy(default=NEAREST))
    assert len(found) == 3
    apply(model, Policy([Rule("0/arrays/down|1/.*", None)], default=NEAREST))


def test_every_layer_of_every_step_draws_its_own_bits():
    """Also of layers that are stacked, in a loop over them."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(jax.random.split(KEY, 3))

    @eqx.filter_jit
    def step(layers, key):
        arrays, static = eqx.partition(layers, eqx.is_array)
        body = lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None)  # noqa: E731
        with step_key(key):
            return jax.lax.scan(body, X[0], arrays)[0]

    forward = Policy(default=Recipe((NVFP4_SR, NVFP4), None, None))
    stacked = apply({"layers": {"up": layers}}, forward)["layers"]["up"]
    with recorded_draws() as drawn:
        for key in (KEY, jax.random.key(6)):
            step(stacked, key)
        run(twice, apply(MODEL, forward))
    assert len(drawn) == len(set(drawn)) == 3 * 2 + 2
    with pytest.raises(ValueError, match="layers must not be scanned for first_bf16=1"):
        Policy(default=SR, first_bf16=1).explain(eqx.nn.Sequential([layers]))


def test_a_layer_without_a_key_raises():
    model = apply(MODEL, POLICY)
    twice(model, X)  # without a gradient
    with pytest.raises(ValueError, match="layer 'layers/0': key must be given"):
        jax.grad(lambda x: jnp.sum(twice(model, x)))(X)


def test_other_policies_and_rules_without_a_layer_are_refused():
    with pytest.raises(TypeError, match=r"apply: policy must be a jnvfp4\.Policy, got 'pretrain'"):
        apply(MODEL, "pretrain")
    with pytest.raises(
        ValueError, match="every rule must match a layer, got 'up', which matches none of layers/0, lay"
    ):
        apply(MODEL, Policy([Rule("up", SR)]))
