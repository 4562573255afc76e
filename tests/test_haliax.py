"""haliax models multiply by a policy, also where their layers are stacked and folded."""

# ruff: noqa: E402

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, recorded_draws, skip_unless_haliax_runs

skip_unless_haliax_runs()

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from flax_models import KEY, NEAREST, SR
from jax.sharding import PartitionSpec as P

from jnvfp4 import NVFP4, NVFP4_SR, Policy, Recipe, Rule, linear, step_key
from jnvfp4._layers.keys import fold_path
from jnvfp4.haliax import DotGeneral, apply

pytestmark = [
    pytest.mark.usefixtures("cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of haliax, about JAX
Batch, In, Hidden, Layers = hax.Axis("batch", 16), hax.Axis("in", 32), hax.Axis("hidden", 64), hax.Axis("layers", 3)
X = hax.named(jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float32), (Batch, In))


class Block(eqx.Module):
    """Two layers, their weights in either order."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        return Block(
            hnn.Linear.init(In, Hidden, key=key, out_first=False), hnn.Linear.init(Hidden, In, key=key, out_first=True)
        )

    def __call__(self, x):
        return x + self.down(hnn.gelu(self.up(x)))


class Model(eqx.Module):
    """A stack of blocks and a head."""

    layers: hnn.Stacked
    head: hnn.Linear

    @staticmethod
    def init(key):
        layers = hnn.Stacked.init(Layers, Block)(key=jax.random.split(key, 3))
        return Model(layers, hnn.Linear.init(In, hax.Axis("classes", 10), key=key))

    def __call__(self, x):
        return self.head(self.layers.fold(x))


MODEL = Model.init(jax.random.key(0))
POLICY = Policy([Rule("layers/.*", SR)])


@eqx.filter_jit
def run(model, key):
    with step_key(key):
        return eqx.filter_value_and_grad(lambda m: jnp.sum(jnp.sin(m(X).array)))(model)


@pytest.mark.parametrize("out_first", [False, True])
def test_a_layer_has_the_bits_of_linear(out_first):
    layer = hnn.Linear.init(In, Hidden, key=jax.random.key(0), out_first=out_first, dot_general=DotGeneral(SR, "up"))

    @eqx.filter_jit
    def step(layer, key):
        with step_key(key):
            weight = layer.weight.array * layer.reparam.active_scale
            want = linear(X.array, weight, SR, key=fold_path(key, "up"), w_axes="nk" if out_first else "kn")
            return layer(X).array, want + layer.bias.array

    assert_bitwise(*step(layer, KEY))


def test_explain_lists_stacked_layers():
    assert [(d.path, d.shape, d.why) for d in POLICY.explain(MODEL)] == [
        ("layers/up", (3, 32, 64), "rule 'layers/.*'"),
        ("layers/down", (3, 32, 64), "rule 'layers/.*'"),
        ("head", (10, 32), "keep 'head'"),
    ]
    with pytest.raises(ValueError, match="layers must not be scanned for first_bf16=1"):
        Policy(default=SR, first_bf16=1).explain(MODEL)


def test_the_weights_do_not_change():
    adapted = apply(MODEL, POLICY)
    assert adapted.layers.stacked.up.weight is MODEL.layers.stacked.up.weight
    assert isinstance(adapted.layers.stacked.up.dot_general, DotGeneral)
    placed = (P("x"), P())
    head = apply(adapted, Policy([Rule("head", SR)], keep=()))  # replaces the first
    assert isinstance(head.head.dot_general, DotGeneral)
    assert not isinstance(head.layers.stacked.up.dot_general, DotGeneral)
    gathered = apply(MODEL, Policy([Rule("layers/.*", SR, placed)]))
    assert gathered.layers.stacked.up.dot_general.product.w_gather == placed
    assert adapted.head.dot_general is MODEL.head.dot_general
    padded = apply(MODEL, Policy([Rule("head", NEAREST, pad=True)], keep=())).head.dot_general.product
    assert (padded.path, padded.pad, adapted.layers.stacked.up.dot_general.product.pad) == ("head", True, False)
    trained = [[a.shape for a in jax.tree.leaves(eqx.filter(m, eqx.is_inexact_array))] for m in (adapted, MODEL)]
    assert trained[0] == trained[1]


def test_every_layer_of_every_step_draws_its_own_bits():
    with recorded_draws() as drawn:
        for key in (KEY, jax.random.key(6)):
            run(apply(MODEL, Policy([Rule("layers/.*", Recipe((NVFP4_SR, NVFP4), None, None))])), key)
    assert len(set(drawn)) == 12  # two steps, three blocks, two layers


def test_a_layer_without_a_key_raises():
    with pytest.raises(ValueError, match="layer 'layers/up': key must be given"):
        jax.grad(lambda x: jnp.sum(apply(MODEL, POLICY)(hax.named(x, X.axes)).array))(X.array)
    apply(MODEL, POLICY)(X)  # without a gradient
    layer = hnn.Linear.init(In, Hidden, key=jax.random.key(0), dot_general=DotGeneral(SR))
    with step_key(KEY), pytest.raises(ValueError, match=r"DotGeneral: key must be given.*path=\.\.\."):
        layer(X)
    hnn.Linear.init(In, Hidden, key=jax.random.key(0), dot_general=DotGeneral(NEAREST))(X)
