"""NNX models as they are: which layers are quantized, with which bits and keys, and that nothing else changes."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, recorded_draws, recorded_keys, refused, words

pytest.importorskip("flax", "0.12")

from flax import nnx
from flax_models import ALL, KEY, NEAREST, SR, TOKENS, WIDTH, NnxMlp, NnxStack, NnxTransformer, X
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put

from jnvfp4 import NVFP4, NVFP4_SR, DotGeneral, Policy, Recipe, Rule, linear, step_key
from jnvfp4._layers.keys import fold_path
from jnvfp4.flax import calibrate
from jnvfp4.flax.nnx import apply

POLICY = Policy([Rule("blocks/.*", SR)])
pytestmark = pytest.mark.usefixtures("cpu")


def transformer(layers=1):
    return NnxTransformer(nnx.Rngs(0), layers)


def mlp():
    return NnxMlp(nnx.Rngs(0))


def value(y):
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


@nnx.jit
def run(model, x, key=None):
    """Loss and gradients; by way (a) with a key, else by (c)."""

    def loss(model):
        return value(model(x))

    if key is None:
        return nnx.value_and_grad(loss)(model)
    with step_key(key):
        return nnx.value_and_grad(loss)(model)


def leaves(tree):
    return jax.tree.map(lambda v: v, nnx.to_pure_dict(tree))


# ---------------------------------------------------------------- which layers, and nothing else


@pytest.mark.parametrize("box", ["state", "pure"])
def test_parameters_are_explained_as_their_model(box):
    params = nnx.state(transformer(), nnx.Param)
    found = POLICY.explain(nnx.to_pure_dict(params) if box == "pure" else params)
    assert sorted(d.path for d in found) == sorted(d.path for d in POLICY.explain(transformer()))


def test_the_state_does_not_change():
    model = transformer()
    before = nnx.state(model)
    tree = jax.tree.structure(before)
    assert apply(model, POLICY) is model
    assert jax.tree.structure(nnx.state(model)) == tree
    assert_same_tensor(leaves(nnx.state(model)), leaves(before))
    apply(model, POLICY, rngs=nnx.Rngs(sr=1))
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == jax.tree.structure(nnx.state(transformer(), nnx.Param))


def test_another_policy_replaces_the_first():
    model, plain = transformer(), transformer()
    apply(model, POLICY, rngs=nnx.Rngs(sr=1))
    apply(model, Policy([Rule(".*/up", NEAREST)]))
    assert model.blocks[0].mlp.up.dot_general == DotGeneral(NEAREST, "blocks/0/mlp/up")
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(plain))
    apply(model, Policy())
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert_bitwise(model(TOKENS), plain(TOKENS))


def test_another_policy_keeps_the_streams():
    """As at the end of a training run, whose forward pass is then in bfloat16."""
    model, policy = apply(mlp(), ALL, rngs=nnx.Rngs(sr=1)), Policy(default=replace(SR, fprop=None))
    model.up.dot_general.stream()
    model.eval()
    before = nnx.state(model, nnx.RngState)
    apply(model, policy)
    assert (model.up.dot_general.product, model.up.dot_general.deterministic) == (
        DotGeneral(policy.default, "up"),
        True,
    )
    assert str(nnx.state(model, nnx.RngState)) == str(before)
    apply(model, policy, rngs=nnx.Rngs(sr=1))  # from the start
    assert model.up.dot_general.stream.count[...] == 0


def test_a_layer_gathers_as_its_rule_says():
    of_policy, of_rule = (P("x"), P()), (P(None, "x"), P())
    model = apply(mlp(), Policy([Rule("up", NEAREST, of_rule)], default=NEAREST, w_gather=of_policy))
    assert [layer.dot_general.w_gather for layer in (model.up, model.down)] == [of_rule, of_policy]
    einsum = nnx.Einsum("bsd,de->bse", (WIDTH, WIDTH), rngs=nnx.Rngs(0))
    einsum = apply(einsum, Policy(default=NEAREST, w_gather=of_policy))
    with jax.set_mesh(make_mesh(jax.devices("cpu")[:2], "x")):
        found = equations(jax.make_jaxpr(einsum)(X).jaxpr)
    placed = [eqn.params["sharding"].spec for eqn in found if eqn.primitive.name == "sharding_constraint"]
    assert P("x", None) in placed


def test_split_and_merge_change_no_bit():
    graph, state = nnx.split(apply(mlp(), ALL))

    @jax.jit
    def step(state, x, key):
        with step_key(key):
            return value(nnx.merge(graph, state)(x))

    assert_bitwise(step(state, X, KEY), run(apply(mlp(), ALL), X, KEY)[0])


def test_out_sharding_reaches_the_product():
    mesh = make_mesh(jax.devices("cpu")[:8], kind="explicit")
    model = apply(nnx.Linear(32, 64, use_bias=False, rngs=nnx.Rngs(0)), Policy(default=NEAREST))
    want = model(X)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: model(x, out_sharding=P("x", None, "y")))(put(X, mesh, P("x", None, None)))
    assert_sharded(got, mesh, P("x", None, "y"))
    assert_bitwise(got, want)


def test_a_batch_axis_counts_no_layers():
    """``LinearGeneral`` with weights for each member of the batch is one layer, not a stack of them."""
    layer = nnx.LinearGeneral(WIDTH, 48, axis=-1, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    model = apply(layer, ALL, rngs=nnx.Rngs(sr=3))
    assert model.dot_general.stream.key[...].shape == ()
    assert model(X).shape == (2, 16, 48)
    (decision,) = ALL.explain(layer)
    assert decision.recipe == SR


def test_adapters_of_lora_stay_as_they_are():
    model = nnx.LoRALinear(32, 48, lora_rank=4, rngs=nnx.Rngs(0))
    model.lora.lora_b[...] = jnp.ones((4, 48))
    policy = Policy(default=NEAREST)
    stacked = nnx.vmap(lambda rngs: nnx.LoRALinear(32, 48, lora_rank=4, rngs=rngs))(nnx.Rngs(0).split(2))
    assert [[d.path for d in policy.explain(m)] for m in (model, stacked)] == [[""], [""]]
    apply(model, policy)
    base = linear(X, model.kernel[...], NEAREST, w_axes="kn") + model.bias[...]
    assert_bitwise(model(X), base + X @ model.lora.lora_a[...] @ model.lora.lora_b[...])


def test_an_einsum_has_the_bits_of_linear():
    model = apply(nnx.Einsum("...d,dhk->...hk", (32, 2, 16), (2, 16), rngs=nnx.Rngs(0)), Policy(default=NEAREST))
    want = linear(X, model.kernel[...].reshape(32, 32), NEAREST, w_axes="kn").reshape(2, 16, 2, 16)
    assert_bitwise(model(X), want + model.bias[...])
    own = nnx.Einsum("bsd,de->bse", (32, 48), einsum_op=lambda *a, **k: jnp.einsum(*a, **k), rngs=nnx.Rngs(0))
    assert Policy(default=NEAREST).explain(own)[0].why == "has an einsum_op of its own"
    decision = Policy(default=NEAREST).explain(nnx.Einsum("bsd,dd->bs", (32, 32), rngs=nnx.Rngs(0)))[0]
    assert (decision.recipe, "w must have each letter once" in decision.why) == (None, True)
    both = nnx.Einsum("bs...,...e->bse", (32, 48), rngs=nnx.Rngs(0))  # an ellipsis in the weights too
    assert Policy(default=NEAREST).explain(both)[0].recipe == NEAREST
    assert_bitwise(apply(both, Policy(default=NEAREST))(X), linear(X, both.kernel[...], NEAREST, w_axes="kn"))


WRONG = {
    "model": ((3, POLICY), "TypeError: apply: model must be an nnx.Module, got int"),
    "rngs": ((None, ALL, 3), "TypeError: apply: rngs must be nnx.Rngs or None, got 3"),
    "stream": ((None, ALL, nnx.Rngs(params=0)), r"apply: rngs must have the stream 'sr', got \['params'\]"),
}


@pytest.mark.parametrize(("arguments", "text"), WRONG.values(), ids=WRONG)
def test_arguments_are_checked(arguments, text):
    model, policy, *rngs = arguments
    with refused(text):
        apply(mlp() if model is None else model, policy, rngs=rngs[0] if rngs else None)


# ---------------------------------------------------------------- loops over microbatches
CARRY = nnx.StateAxes({nnx.RngState: nnx.Carry, ...: None})
MICROBATCHES = (X, jnp.arange(len(X)))


def looped(loop, axes, **options):
    """Calls a function of the model and of a microbatch for all of them."""
    return lambda f: lambda model: loop(f, in_axes=(axes, 0), out_axes=0, **options)(model, MICROBATCHES)


def lax_scanned(*carried):
    """Loops over the microbatches with part of the state in the carry."""

    def loop(f):
        def run(model):
            graph, carry, rest = nnx.split(model, carried, ...)

            def body(carry, microbatch):
                model = nnx.merge(graph, carry, rest, copy=True)
                y = f(model, microbatch)
                return nnx.state(model, carried), y

            return jax.lax.scan(body, carry, MICROBATCHES)[1]

        return run

    return loop


def forward(model, microbatch):
    return model(microbatch[0])


def rematted(model, microbatch):
    return nnx.remat(lambda m, x: m(x))(model, microbatch[0])


SCAN, VMAP, SIMPLE_VMAP = looped(nnx.scan, None), looped(nnx.vmap, None), looped(nnx.vmap, None, graph_updates=False)
LOOPS = {
    "scan": (SCAN, forward),
    "scan, remat": (SCAN, rematted),
    "scan, keys apart": (looped(nnx.scan, nnx.StateAxes({nnx.RngKey: None, ...: None})), forward),
    "scan, carried": (looped(nnx.scan, CARRY), rematted),
    "vmap": (VMAP, forward),
    "vmap, remat": (SIMPLE_VMAP, rematted),
    "lax.scan": (lax_scanned(nnx.BatchStat), forward),
    "lax.scan, carried": (lax_scanned(nnx.RngCount), forward),
    "Python": (lambda f: lambda model: [f(model, (x, i)) for i, x in enumerate(X)], forward),
}


@pytest.mark.parametrize("evaluates", [False, True], ids=["stream", "one key"])
@pytest.mark.parametrize(("loop", "f"), LOOPS.values(), ids=LOOPS)
def test_microbatches_draw_their_own_bits(loop, f, evaluates):
    """Whether or not the loop gives all of them the same key, as the model that evaluates does."""
    forward = Policy(default=Recipe((NVFP4_SR, NVFP4), None, None))
    model = apply(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), forward, rngs=nnx.Rngs(sr=3))
    model = nnx.view(model, deterministic=evaluates)
    with recorded_draws() as drawn:
        nnx.jit(loop(f))(model)
    assert len(drawn) == len(set(drawn)) == len(X)


@pytest.mark.parametrize("recipe", [SR, Recipe(fprop=(NVFP4_SR, NVFP4))], ids=["gradients", "forward"])
def test_an_evaluation_advances_no_stream(recipe):
    model = apply(mlp(), Policy(default=recipe, keep=()), rngs=nnx.Rngs(sr=3))
    model.eval()
    counts = lambda: jax.tree.leaves(nnx.state(model, nnx.RngCount))  # noqa: E731
    before = counts()
    call = nnx.jit(lambda model, x: model(x))
    assert_bitwise(call(model, X), call(model, X))
    jax.grad(lambda x: jnp.sum(model(x)))(X)
    assert before
    assert counts() == before
    model.train()
    model(X)
    assert counts() == [count + 1 for count in before]


# ---------------------------------------------------------------- keys
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_streams_give_every_layer_of_every_step_its_own_bits(scan):
    model = apply(NnxStack(scan=scan), ALL, rngs=nnx.Rngs(sr=3))
    call = nnx.jit(lambda model: model(X))
    with recorded_keys() as drawn:
        for _ in range(2):
            call(model)
    assert len(set(drawn)) == 12  # two steps, three blocks, two layers


def test_layers_that_are_stacked_twice_have_a_key_each():
    make = nnx.vmap(nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)))
    model = apply(make(nnx.Rngs(0).split((2, 3))), ALL, rngs=nnx.Rngs(sr=3))
    keys = jax.random.key_data(model.dot_general.stream.key[...])
    assert keys.shape[:2] == (2, 3)
    assert len(np.unique(keys.reshape(6, -1), axis=0)) == 6
    with pytest.raises(ValueError, match=r"layer '': key must be one of those of the scanned layers, got \(2, 3\)"):
        model.dot_general(X[0], X[0])  # outside their loops


def test_streams_under_remat():
    """The recomputed layer draws the bits of the first time, and the next step draws others."""
    model, plain = (apply(mlp(), ALL, rngs=nnx.Rngs(sr=3)) for _ in range(2))
    again = nnx.jit(lambda m: nnx.value_and_grad(lambda m: value(rematted(m, (X,))))(m))
    for _ in range(2):
        (loss, grads), (want, wanted) = again(model), run(plain, X)
        assert_bitwise(loss, want)
        for layer in ("up", "down"):
            assert_bitwise(*(leaves(g)[layer]["kernel"] for g in (grads, wanted)))


def test_a_stream_folds_the_path():
    """So a stream that two layers share, such as the default one, would still give each its own bits."""
    model = apply(mlp(), ALL, rngs=nnx.Rngs(3))
    want = [fold_path(nnx.clone(getattr(model, name).dot_general.stream)(), name) for name in ("up", "down")]
    with recorded_keys() as drawn:
        model(X)
    assert drawn == [words(key) for key in want]


def test_keys_and_streams_are_no_new_trace():
    keyed, streamed, traces = apply(mlp(), ALL), apply(mlp(), ALL, rngs=nnx.Rngs(sr=3)), []

    @nnx.jit
    def step(model, key=None):
        traces.append(1)
        with nullcontext() if key is None else step_key(key):
            return model(X)

    for key in (KEY, jax.random.key(7)):
        step(keyed, key)
        step(streamed)
    assert len(traces) == 2


# ---------------------------------------------------------------- training and calibration
def test_the_optimizer_sees_parameters_alone():
    optax = pytest.importorskip("optax")
    model, plain = apply(mlp(), ALL, rngs=nnx.Rngs(sr=1)), mlp()
    optimizers = [nnx.Optimizer(m, optax.adam(3e-3), wrt=nnx.Param) for m in (model, plain)]
    trees = [jax.tree.structure(nnx.state(optimizer)) for optimizer in optimizers]
    assert trees[0] == trees[1]

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizers[0])) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


def test_calibrate_restores_the_model_after_an_error(tmp_path):
    model = apply(NnxStack(scan=True), Policy(default=NEAREST))
    before = nnx.graphdef(model)
    with pytest.raises(TypeError, match="got traced activations"):
        calibrate(model, ALL, [X], tmp_path / "a.json")
    assert nnx.graphdef(model) == before
