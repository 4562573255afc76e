"""Linen models as they are: which layers are quantized, with which bits and keys, and that nothing else changes."""

import threading
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, products, recorded_keys, words

pytest.importorskip("flax", "0.12")

from flax import linen as nn
from flax_models import (
    ALL,
    GROUPS,
    KEY,
    NEAREST,
    SR,
    TOKENS,
    Mlp,
    Moe,
    MoeBlock,
    ScannedBlock,
    Stack,
    Transformer,
    X,
    experts,
    init,
    shapes,
    stacked,
)
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from jnvfp4 import Policy, RaggedDot, Rule, layer_key, linear, recipes, step_key
from jnvfp4.flax import linen
from jnvfp4.flax.linen import dot_general_cls, intercept

POLICY = Policy([Rule("block_.*", SR)])
pytestmark = pytest.mark.usefixtures("cpu")


def quantized(model, policy, x=X, **options):
    """A function of the variables, by a policy."""

    def apply(variables):
        with intercept(policy):
            return model.apply(variables, x, **options)

    return apply


def run(model, variables, rngs=False):
    """Loss and gradients, jitted, by way (a), or by (b) if there are ``rngs``."""

    @jax.jit
    def step(variables, key):
        def loss(variables):
            with intercept(ALL):
                y = model.apply(variables, X, rngs={"sr": key} if rngs else None)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        with nullcontext() if rngs else step_key(key):
            return jax.value_and_grad(loss)(variables)

    return step(variables, KEY)


# ---------------------------------------------------------------- which layers, and nothing else


def test_parameters_do_not_change():
    model = Transformer()
    plain = shapes(model, TOKENS)
    with intercept(POLICY):
        assert shapes(model, TOKENS) == plain
    nearest = Policy([Rule("block_.*", NEAREST)])
    _, changed = jax.eval_shape(quantized(model, nearest, TOKENS, mutable=True), plain)
    assert jax.tree.structure(changed) == jax.tree.structure(plain)


def test_a_jitted_function_follows_the_policy():
    """Also one that was traced before, under another policy or none; of two the inner one decides."""
    variables, apply = init(Mlp()), jax.jit(Mlp().apply)
    plain, by_rows = apply(variables, X), Policy(default=recipes.row_scaled(stochastic_rounding=False))
    with intercept(Policy(default=NEAREST)):
        tensors = apply(variables, X)
        with intercept(by_rows):
            inner = apply(variables, X)
    with intercept(by_rows):
        assert_bitwise(apply(variables, X), inner)
    assert len({np.asarray(y).tobytes() for y in (plain, tensors, inner)}) == 3
    assert_bitwise(apply(variables, X), plain)
    assert apply._cache_size() == 3


def test_a_model_of_one_layer():
    """Bound to its variables: a policy that has ended leaves nothing in it."""
    variables = init(nn.Dense(48))
    model, params = nn.Dense(48).bind(variables), variables["params"]
    with intercept(Policy(default=NEAREST)):
        assert_bitwise(model(X), linear(X, params["kernel"], NEAREST, w_axes="kn") + params["bias"])
    assert_bitwise(model(X), nn.Dense(48).apply(variables, X))


def test_missing_parameters_are_an_error_of_flax():
    with pytest.raises(nn.module.errors.ScopeCollectionNotFound), intercept(Policy(default=NEAREST)):
        nn.Dense(48).apply({}, X)


def test_a_model_within_a_model_has_its_own_layers():
    """A teacher that is applied within the student."""

    class Student(nn.Module):
        teacher: dict

        @nn.compact
        def __call__(self, x):
            x = Mlp(name="block_0")(x)
            x = x - Mlp().apply(self.teacher, x)
            return Mlp(name="block_3")(x)

    model = Student(init(Mlp()))
    variables = shapes(model)
    for rule, count in (("block_3/up", 1), ("block_.*", 4), ("up|block_0/up", 2)):
        assert products(quantized(model, Policy([Rule(rule, NEAREST)])), variables) == count
    assert products(quantized(model, Policy(default=NEAREST, last_bf16=1)), variables) == 4  # all but block_3
    with pytest.raises(ValueError, match="got 'up', which matches none of block_0/down, block_0/up, block_3/down"):
        products(quantized(model, Policy([Rule("up", NEAREST)])), variables)


def test_models_that_are_called_in_turn_are_each_known():
    """A second model within one ``intercept`` has its own layers, numbers and checks."""
    one, two = Stack(layers=2), Stack(layers=4)

    def both(variables):
        with intercept(Policy(default=NEAREST, last_bf16=1)):
            return [model.apply(v, X) for model, v in zip((one, two), variables, strict=True)]

    assert products(both, (shapes(one), shapes(two))) == 2 + 6  # all blocks but the last of each
    with intercept(Policy([Rule("block_0/.*", NEAREST)])):
        one.apply(init(one), X)
        with pytest.raises(ValueError, match=r"got 'block_0/\.\*', which matches none of down, up"):
            Mlp().apply(init(Mlp()), X)


def test_k_of_a_general_layer_is_without_its_batch():
    """Together with its batch it would be a multiple of 16."""
    (layer,) = Policy(default=NEAREST).explain(nn.DenseGeneral(48, axis=-1, batch_dims=(0,)), jnp.ones((4, 8, 40)))
    assert layer.why == "default; K padded from 40 to 48"


def test_an_einsum_has_the_dtype_of_its_attribute():
    """Though parameters are float32."""
    model = nn.Einsum((32, 48), "bsd,de->bse", dtype=jnp.bfloat16)
    variables = jax.tree.map(lambda v: v.astype(jnp.float32), init(model))
    got = quantized(model, Policy(default=NEAREST))(variables)
    assert got.dtype == jnp.bfloat16
    kernel, bias = (variables["params"][name].astype(jnp.bfloat16) for name in ("kernel", "bias"))
    assert_bitwise(got, linear(X.astype(jnp.bfloat16), kernel, NEAREST, w_axes="kn") + bias)


def test_a_head_with_tied_weights_has_its_name():
    """Some models apply it as a model by itself."""

    class Tied(nn.Module):
        def setup(self):
            self.embed = nn.Embed(48, 32)
            self.up = nn.Dense(32)
            self.lm_head = nn.Dense(48, use_bias=False)

        def __call__(self, tokens):
            x = self.up(self.embed(tokens))
            return self.lm_head.apply({"params": {"kernel": self.embed.embedding.T}}, x)

    variables = shapes(Tied(), TOKENS)
    for keep, count in (("lm_head",), 1), ((), 2):
        policy = Policy(default=NEAREST, keep=keep)
        assert products(quantized(Tied(), policy, TOKENS), variables) == count
    _, head = policy.explain(Tied(), TOKENS)
    assert (head.path, head.shape, head.recipe) == ("lm_head", (32, 48), NEAREST)


def test_the_bias_of_an_einsum_is_along_its_letters():
    plain, model = (nn.Einsum((32, 48), "bsd,de->bes", use_bias=bias) for bias in (False, True))
    y, variables = quantized(plain, Policy(default=NEAREST))(init(plain)), init(model)
    variables["params"]["kernel"] = init(plain)["params"]["kernel"]
    got = quantized(model, Policy(default=NEAREST))(variables)
    assert_bitwise(got, y + variables["params"]["bias"][:, None])


def test_an_einsum_that_is_no_product_stays_as_it_is():
    model = nn.Einsum((32, 8), "bsd,de->bsde", use_bias=False)
    decision = Policy(default=NEAREST).explain(nn.Sequential([model]), X)[0]
    assert decision.recipe is None
    assert "must share a letter that the result leaves out" in decision.why


def test_a_layer_gathers_as_its_rule_says():
    of_policy, of_rule = (P("x"), P()), (P(None, "x"), P())
    policy = Policy([Rule("up", NEAREST, of_rule)], default=NEAREST, w_gather=of_policy)
    with jax.set_mesh(make_mesh(jax.devices("cpu")[:2], "x")):
        found = equations(jax.make_jaxpr(quantized(Mlp(), policy))(shapes(Mlp())).jaxpr)
        placed = [eqn for eqn in found if eqn.primitive.name == "sharding_constraint"]
    weights = [eqn.params["sharding"].spec for eqn in placed if eqn.invars[0].aval.dtype == jnp.bfloat16]
    assert weights == [P(None, "x"), P("x", None)]


def test_first_and_last_layers_stay_in_high_precision():
    model = Stack(layers=4)
    policy = Policy(default=NEAREST, first_bf16=1, last_bf16=2)
    assert products(quantized(model, policy), shapes(model)) == 2  # those of one Mlp


def test_scanned_layers_have_no_numbers():
    model, policy = Stack(scan=True), Policy(default=NEAREST, last_bf16=1)
    message = r"must have numbers in their paths for last_bf16=1 \(scanned layers have none\), got block/down, block/up"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(quantized(model, policy), shapes(model))
    beside = nn.Sequential([model, Mlp()])  # which has a number
    with pytest.raises(ValueError, match=r"layers must not be scanned for last_bf16=1, .* got layers_0/block/up"):
        jax.eval_shape(quantized(beside, policy), shapes(beside))


def test_a_vector_is_no_layer():
    class Gain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("kernel", nn.initializers.ones, (32,))

    model = nn.Sequential([Gain(), nn.Dense(32)])
    with pytest.raises(ValueError, match="every rule must match a layer, got 'layers_0'"):
        jax.eval_shape(quantized(model, Policy([Rule("layers_0", NEAREST)])), shapes(model))


def test_explain_of_a_module_needs_its_inputs():
    with pytest.raises(TypeError, match=r"Policy.explain: a Linen module must come with .* explain\(model, \*inputs\)"):
        Policy(default=NEAREST).explain(Mlp())
    with pytest.raises(TypeError, match=r"got its parameters too; write .*, without the parameters"):
        Policy(default=NEAREST).explain(Mlp(), {"params": {}}, jnp.ones((16, 16)))


# ---------------------------------------------------------------- bits


def test_loops_and_remat_change_no_bit():
    """Of one layer, and of its products: XLA may sum a norm in another order."""
    variables = init(Stack(layers=1))
    want_loss, want = run(Stack(layers=1), variables)
    loss, got = run(Stack(layers=1, scan=True, indexed=True), stacked(variables))
    assert_bitwise(loss, want_loss)
    assert_same_tensor(got, stacked(want))
    loss, got = run(Stack(layers=1, lift=nn.remat), variables)
    assert_bitwise(loss, want_loss)
    for layer in ("up", "down"):
        assert_bitwise(*(tree["params"]["block_0"][layer]["kernel"] for tree in (got, want)), layer)


# ---------------------------------------------------------------- keys
SPLIT = (("params", True), ("sr", True), ("dropout", False))
STACKS = {
    "a, unrolled": (Stack(2), False),
    "a, scanned": (Stack(2, scan=True, indexed=True), False),
    "b, unrolled": (Stack(2), True),
    "b, remat": (Stack(2, lift=nn.remat), True),
    "b, scanned": (Stack(2, scan=True, split_rngs=SPLIT), True),
    "b, scanned remat": (Stack(2, scan=True, lift=nn.remat, split_rngs=SPLIT), True),
    "b, scanned block": (ScannedBlock(split_sr=True), True),
    "b, scanned jit": (ScannedBlock(split_sr=True, lift=lambda m: nn.jit(nn.remat(m))), True),
}


@pytest.mark.parametrize(("model", "rngs"), STACKS.values(), ids=STACKS)
def test_every_layer_of_every_step_draws_its_own_bits(monkeypatch, model, rngs):
    """Whatever streams they share. The keys are variables: newer Flax scans no module that has a callback."""
    variables, original = init(model), linen.key_in

    def sowing(module, path, recipe):
        key = original(module, path, recipe)
        module.sow("keys", "drawn", jax.random.key_data(key))
        return key

    monkeypatch.setattr(linen, "key_in", sowing)

    @jax.jit
    def step(variables, key):
        with intercept(ALL), nullcontext() if rngs else step_key(key):
            return model.apply(variables, X, rngs={"sr": key, "dropout": KEY} if rngs else None, mutable=["keys"])[1]

    drawn = [leaf.reshape(-1, 2) for key in (KEY, jax.random.key(6)) for leaf in jax.tree.leaves(step(variables, key))]
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8  # two steps, two blocks, two layers


class OnePart(nn.Module):
    """A loop whose iterations differ in one part of what Flax passes to them."""

    part: str

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, carry, x):
                y = Mlp(name="mlp")(carry if x is None else x)
                return (y, None) if x is None else (carry, y)

        of_each, carried = self.part == "variables", self.part == "carry"
        axes = {"variable_axes": {"params": 0}} if of_each else {"variable_broadcast": "params"}
        rngs, in_axes = {"params": of_each, "sr": False}, nn.broadcast if of_each else 0
        loop = nn.scan(nn.jit(Block), in_axes=in_axes, split_rngs=rngs, length=2, **axes)(name="block")
        return loop(*((x, None) if carried else (None, x)))[not carried]


OF_EACH, OF_ALL = (("params", True),), (("params", True), ("sr", False))
DIFFER = "key must differ .* pass split_rngs={'sr': True} to nn.scan"
ALIKE = {
    "one stream": (Stack(scan=True, split_rngs=OF_ALL), DIFFER),
    "one stream, remat": (Stack(scan=True, lift=nn.remat, split_rngs=OF_ALL), DIFFER),
    "one stream, jit": (ScannedBlock(split_sr=False, lift=nn.jit), DIFFER),
    "one stream, jit of remat": (ScannedBlock(split_sr=False, lift=lambda m: nn.jit(nn.remat(m))), DIFFER),
    "one stream, remat of jit": (ScannedBlock(split_sr=False, lift=lambda m: nn.remat(nn.jit(m))), DIFFER),
    "one stream, block": (ScannedBlock(split_sr=False), DIFFER),
    **{f"one stream, {part} apart": (OnePart(part), DIFFER) for part in ("carry", "args", "variables")},
    "no stream": (Stack(scan=True, split_rngs=OF_EACH), "key must be given"),
}


@pytest.mark.parametrize(("model", "text"), ALIKE.values(), ids=ALIKE)
def test_scanned_layers_that_would_draw_the_same_bits_raise(model, text):
    with pytest.raises(ValueError, match=f"layer 'block/(mlp/)?up': {text}"):
        run(model, init(model), rngs=True)


class Caller(nn.Module):
    """Draws no bits itself, and calls a model that does."""

    @nn.compact
    def __call__(self, x, variables, rngs):
        return Mlp().apply(variables, x, rngs=rngs)


@pytest.mark.parametrize("lift", [lambda block: block, nn.remat, nn.jit], ids=["plain", "remat", "jit"])
def test_microbatches_that_share_a_stream_raise(lift):
    variables = init(Mlp())
    model, of_model = Stack(layers=1, lift=lift), {"params": {"block_0": variables["params"]}}
    scanned = Stack(layers=1, lift=lift, scan=True, indexed=True)  # its layers have no stream

    def losses(call, policy=ALL):
        def body(_, i):
            key = jax.random.fold_in(KEY, i)
            with intercept(policy), step_key(key):
                return None, call(key).sum()

        return jax.eval_shape(lambda key: jax.lax.scan(body, None, jnp.arange(2))[1], KEY)

    shared = lambda _: model.apply(of_model, X, rngs={"sr": KEY})  # noqa: E731
    with pytest.raises(ValueError, match=r"layer 'block_0/up': key must differ .* rngs={'sr': .*fold_in\(key, i\)}"):
        losses(shared)
    losses(shared, Policy(default=NEAREST))
    losses(lambda key: model.apply(of_model, X, rngs={"sr": key}))
    caller = lift(Caller)()
    losses(lambda key: caller.apply({}, X, variables, {"sr": key}, rngs={"sr": KEY}))
    losses(lambda key: scanned.apply(stacked(of_model), X, rngs={"sr": KEY}))
    split = Stack(layers=1, lift=lift, scan=True, split_rngs=SPLIT)  # within a loop that does not
    with pytest.raises(ValueError, match=f"layer 'block/up': {DIFFER}"):
        losses(lambda _: split.apply(stacked(of_model), X, rngs={"sr": KEY}))
    losses(lambda key: split.apply(stacked(of_model), X, rngs={"sr": key}))
    of_experts, policy = init(ScannedExperts()), Policy([Rule("block/moe/(gate|up|down)", SR)])
    with pytest.raises(ValueError, match=f"layer 'block/moe/gate': {DIFFER}"):
        losses(lambda _: ScannedExperts().apply(of_experts, X, rngs={"sr": KEY}), policy)
    losses(lambda key: ScannedExperts().apply(of_experts, X, rngs={"sr": key}), policy)
    alike = Stack(layers=1, lift=lift, scan=True, split_rngs=OF_ALL)  # a key of each microbatch, for all its layers
    with pytest.raises(ValueError, match=f"layer 'block/up': {DIFFER}"):
        losses(lambda key: alike.apply(stacked(of_model), X, rngs={"sr": key}))


@pytest.mark.long
def test_a_constant_key_inside_jit_raises():
    """It would be the same in every step."""
    variables = init(Mlp())
    with intercept(ALL):
        step = jax.jit(lambda variables, key: Mlp().apply(variables, X, rngs={"sr": key}))
        message = r"layer 'up': the key of rngs={'sr': key} must be traced .* 'jit', got a constant, .* as an argument"
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda variables: Mlp().apply(variables, X, rngs={"sr": KEY}))(variables)
        assert_bitwise(Mlp().apply(variables, X, rngs={"sr": KEY}), step(variables, KEY))
        jax.grad(lambda variables: Mlp().apply(variables, X, rngs={"sr": KEY}).sum())(variables)
        nn.remat(Mlp)().apply(variables, X, rngs={"sr": KEY})  # which gives the key to what it traces


def test_a_layer_that_is_called_twice_draws_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(32, name="up")
            return layer(layer(x))

    with recorded_keys() as drawn, intercept(ALL):
        Twice().apply(init(Twice()), X, rngs={"sr": KEY})
        for name in ("up", "down"):  # a model each, as heads with tied weights are
            nn.Dense(32, name=name).apply(init(nn.Dense(32)), X, rngs={"sr": KEY})
    assert len(set(drawn)) == 4


# ---------------------------------------------------------------- dot_general_cls
def test_a_class_for_the_arguments_of_a_model():
    model = nn.Dense(48, dot_general_cls=dot_general_cls(SR), name="up")
    variables = init(model)
    assert set(variables) == {"params"}
    assert_same_tensor(variables, init(nn.Dense(48, name="up")))
    got = model.apply(variables, X, rngs={"sr": KEY})
    assert got.shape == (2, 16, 48)
    assert dot_general_cls(SR) is dot_general_cls(recipes.pretrain())
    with pytest.raises(ValueError, match="key must be given"):
        jax.grad(lambda x: jnp.sum(model.apply(variables, x)))(X)
    for layer, of in (model, variables), (nn.remat(nn.Dense)(48, dot_general_cls=dot_general_cls(SR)), variables):
        shared = lambda key: jax.lax.map(lambda x: layer.apply(of, x, rngs={"sr": key}), X)  # noqa: B023, E731
        with pytest.raises(ValueError, match="key must differ between the iterations"):
            jax.eval_shape(shared, KEY)
    with pytest.raises(ValueError, match=r"the key of rngs={'sr': key} must be traced .* pass the key to the jitted"):
        jax.eval_shape(lambda x: model.apply(variables, x, rngs={"sr": KEY}), X)


def test_the_class_draws_by_the_path_of_its_layer():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.Dense(32, dot_general_cls=dot_general_cls(SR), name=f"layer_{i}")(x)
            return x

    with recorded_keys() as drawn, step_key(KEY):
        Model().apply(init(Model()), X)
        want = [words(layer_key(f"layer_{i}")) for i in range(2)]
    assert drawn == want


def test_attention_takes_the_class():
    dot = dot_general_cls(NEAREST)
    model = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=dot, out_dot_general_cls=dot)
    assert products(lambda v: model.apply(v, X), shapes(model)) == 4


# ---------------------------------------------------------------- experts
EXPERTS = Policy([Rule("moe/(gate|up|down)", SR)])
ROWS = recipes.row_scaled(stochastic_rounding=False)


def grouped(f, *args) -> int:
    """How many products of experts a function has."""
    return str(jax.make_jaxpr(f)(*args)).count("nvfp4_grouped_matmul[")


def test_experts_are_explained():
    policy = Policy([Rule("moe/(gate|up)", SR), Rule("moe/down", ROWS)])
    assert {d.path: (d.shape, d.recipe) for d in policy.explain(MoeBlock(), X) if d.path.startswith("moe")} == {
        "moe/router": ((32, 1), None),
        "moe/gate": ((4, 32, 64), SR),
        "moe/up": ((4, 32, 64), SR),
        "moe/down": ((4, 32, 64), ROWS),
    }
    assert grouped(quantized(MoeBlock(), policy), shapes(MoeBlock())) == 3
    with pytest.raises(ValueError, match=r"every rule must match a layer, got 'moe', .* moe/gate, moe/up, moe/down;"):
        Policy([Rule("moe", SR)]).explain(MoeBlock(), X)


def test_experts_within_jit_are_explained_each_time():
    class Jitted(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("up", nn.initializers.normal(), (4, 32, 48))
            return jax.jit(lambda x, w: jax.lax.ragged_dot(x, w, GROUPS))(x.reshape(-1, 32), w)

    for _ in range(2):
        assert [d.path for d in Policy(default=NEAREST).explain(Jitted(), X)] == ["up"]


def test_experts_have_the_bits_of_ragged_dot():
    """By keys of their names, and in the order of axes that the model has."""
    variables = init(Moe())

    def by_hand(params):
        product = {name: RaggedDot(SR, name) for name in ("gate", "up", "down")}
        w = {name: params[name].astype(jnp.bfloat16) for name in product}
        h = X.reshape(-1, 32).astype(jnp.bfloat16)
        h = nn.silu(product["gate"](h, w["gate"], GROUPS)) * product["up"](h, w["up"], GROUPS)
        y = product["down"](h, w["down"], GROUPS, w_axes="nk").reshape(X.shape).astype(X.dtype)
        return X + nn.sigmoid(X @ params["router"]["kernel"] + params["router"]["bias"]) * y

    def step(call, params, key):
        with step_key(key):
            return jax.value_and_grad(lambda params: jnp.sum(jnp.sin(call(params))))(params)

    intercepted = lambda params: quantized(Moe(), Policy([Rule("gate|up|down", SR)]))({"params": params})  # noqa: E731
    got, want = (jax.jit(partial(step, call))(variables["params"], KEY) for call in (intercepted, by_hand))
    assert_same_tensor(got, want)


@pytest.mark.long
def test_an_eager_call_tells_experts_by_their_values():
    """It casts them, so that they are other arrays than the parameters, of which three have one shape."""
    variables, policy = init(MoeBlock()), Policy([Rule("moe/(gate|up)", NEAREST), Rule("moe/down", ROWS)])
    call = quantized(MoeBlock(), policy)
    np.testing.assert_allclose(call(variables), jax.jit(call)(variables), atol=0.05)  # a norm has other last bits


def sharded(f):
    mesh = make_mesh(jax.devices("cpu")[:2], "x")
    of_w = P(None, None, "x")  # of K of down, and of N of the others
    split = lambda x, *weights: jax.lax.psum(f(x, *weights), "x")  # noqa: E731
    return jax.shard_map(split, mesh=mesh, in_specs=(P(), of_w, of_w, of_w), out_specs=P())


def test_experts_in_shard_map_are_told_by_their_shapes():
    model = MoeBlock(sharded)
    variables, split = shapes(model), Policy([Rule("moe/(gate|up)", NEAREST), Rule("moe/down", ROWS)])
    assert [d.path for d in EXPERTS.explain(model, X)][3:] == ["moe/gate", "moe/up", "moe/down"]
    assert grouped(quantized(model, Policy(default=NEAREST)), variables) == 3
    with pytest.raises(
        ValueError, match=r"experts of one shape inside shard_map must have one recipe, .*, got Recipe\("
    ):
        grouped(quantized(model, split), variables)


class ScannedExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"params": True, "sr": True}
        loop = nn.scan(lambda block, x, _: (block(x), None), {"params": 0}, split_rngs=split, length=3)
        return loop(MoeBlock(name="block"), x, None)[0]


def test_scanned_experts():
    policy = Policy([Rule("block/moe/up", NEAREST)])
    assert ("block/moe/up", (3, 4, 32, 64), NEAREST) in {d[:3] for d in policy.explain(ScannedExperts(), X)}
    assert grouped(quantized(ScannedExperts(), policy), shapes(ScannedExperts())) == 1
    with pytest.raises(
        ValueError, match=r"layers must not be scanned for last_bf16=1, .* got block/moe/up with weights"
    ):
        Policy([Rule("block/moe/up", NEAREST)], last_bf16=1).explain(ScannedExperts(), X)


class Tied(nn.Module):
    """Experts that are a sum of two parameters, whose names mean nothing then."""

    @nn.compact
    def __call__(self, x):
        a, b = (self.param(name, nn.initializers.ones, (4, 32, 64)) for name in "ab")
        return jax.lax.ragged_dot(x.reshape(-1, 32), a + b, GROUPS)


def test_experts_that_are_no_parameter_are_named():
    policy, why = Policy(default=NEAREST), "a ragged_dot whose weights are not one parameter of its module, which"
    (decision,) = policy.explain(Tied(name="moe"), X)
    assert (decision.path, decision.shape, decision.recipe) == ("moe", (4, 32, 64), None)
    assert decision.why.startswith(why)
    with pytest.warns(UserWarning, match=f"intercept: layer 'moe' is {why}"):
        assert grouped(quantized(Tied(name="moe"), policy), shapes(Tied())) == 0


def test_a_kernel_of_experts_needs_no_warning():
    """It has the path of its module."""

    class Kernel(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.lax.ragged_dot(
                x.reshape(-1, 32), self.param("kernel", nn.initializers.ones, (4, 32, 64)), GROUPS
            )

    model = nn.Sequential([Kernel()])
    policy = Policy([Rule("layers_0", NEAREST)])
    assert policy.explain(model, X)[0].recipe == NEAREST
    assert grouped(quantized(model, policy), shapes(model)) == 1


@pytest.mark.long
def test_only_calls_of_the_model_and_its_thread_are_taken():
    functions, variables = (jax.lax.ragged_dot, jax.lax.ragged_dot_general), init(Moe())
    weights = [variables["params"][name] for name in ("gate", "up", "down")]
    want = experts(X, *weights)
    with intercept(Policy(default=NEAREST)):
        found = [experts(X, *weights)]  # of no module
        with intercept(Policy(default=NEAREST)):
            pass

        def other_thread():
            with jax.default_device(jax.devices("cpu")[0]):  # which each thread has for itself
                found.append(Moe().apply(variables, X))

        other = threading.Thread(target=other_thread)
        other.start()
        other.join()
        taken = Moe().apply(variables, X)
        contracted = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        dw = jax.lax.ragged_dot_general(X[0], X[0], jnp.array([16]), contracted)
    assert (jax.lax.ragged_dot, jax.lax.ragged_dot_general) == functions
    assert_bitwise(found[0], want)
    assert_bitwise(found[1], Moe().apply(variables, X))
    assert not np.array_equal(taken, found[1])
    assert dw.shape == (1, 32, 32)
