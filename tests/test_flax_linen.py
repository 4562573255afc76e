"""Linen models as they are: which layers are quantized, with which bits and keys, and that nothing else changes."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, key_of_operand, products, recorded_keys, words

pytest.importorskip("flax", "0.12")

from flax import linen as nn
from flax_models import ALL, KEY, NEAREST, SR, TOKENS, WIDTH, Mlp, MoeBlock, Stack, Transformer, X, init, shapes
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from jnvfp4 import NVFP4, NVFP4_SR, Policy, Recipe, Rule, linear, matmul_nt, quantize, recipes, step_key
from jnvfp4._layers.keys import fold_path
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


def test_sizes_of_a_general_layer_are_without_its_batch():
    """Together with its batch K would be a multiple of 16, and so would N together with K."""
    for n, k, which in ((48, 40, "K"), (40, 48, "N")):
        (layer,) = Policy(default=NEAREST).explain(nn.DenseGeneral(n, axis=-1, batch_dims=(0,)), jnp.ones((4, 8, k)))
        assert layer.why == f"default; {which} padded from 40 to 48"


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
    layer = nn.Einsum((32, 8), use_bias=False)  # of the first call is what explain says
    calls = [lambda x: (x, "bsd,de->bse"), layer, lambda _: (X, "bsd,de->bsde"), layer]
    assert [d.recipe for d in Policy(default=NEAREST).explain(nn.Sequential(calls), X)] == [NEAREST]


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


def test_remat_changes_no_bit():
    """Of one layer, and of its products: XLA may sum a norm in another order."""
    variables = init(Stack(layers=1))
    want_loss, want = run(Stack(layers=1), variables)
    loss, got = run(Stack(layers=1, lift=nn.remat), variables)
    assert_bitwise(loss, want_loss)
    for layer in ("up", "down"):
        assert_bitwise(*(tree["params"]["block_0"][layer]["kernel"] for tree in (got, want)), layer)


# ---------------------------------------------------------------- keys
SPLIT = (("params", True), ("sr", True))
STACKS = {
    "a, unrolled": (Stack(2), False),
    "b, unrolled": (Stack(2), True),
    "b, remat": (Stack(2, lift=nn.remat), True),
    "b, scanned": (Stack(2, scan=True, split_rngs=SPLIT), True),
    "b, scanned remat": (Stack(2, scan=True, lift=nn.remat, split_rngs=SPLIT), True),
}


@pytest.fixture
def sown_keys(monkeypatch):
    """Makes the keys of layers variables: newer Flax scans no module that has a callback."""
    original = linen.key_in

    def sowing(module, path, recipe):
        key = original(module, path, recipe)
        module.sow("keys", "drawn", jax.random.key_data(key))
        return key

    monkeypatch.setattr(linen, "key_in", sowing)


@pytest.mark.parametrize(("model", "rngs"), STACKS.values(), ids=STACKS)
def test_every_layer_of_every_step_draws_its_own_bits(sown_keys, model, rngs):
    """Whatever streams they share."""
    variables = init(model)

    @jax.jit
    def step(variables, key):
        with intercept(ALL), nullcontext() if rngs else step_key(key):
            return model.apply(variables, X, rngs={"sr": key} if rngs else None, mutable=["keys"])[1]

    drawn = [leaf.reshape(-1, 2) for key in (KEY, jax.random.key(6)) for leaf in jax.tree.leaves(step(variables, key))]
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8  # two steps, two blocks, two layers


class Chain(nn.Module):
    """A scanned layer, whose iterations share one stream "sr"."""

    lift: Any

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0, "keys": 0}, {"params": True, "sr": False}
        loop = nn.scan(lambda layer, x, _: (layer(x), None), variable_axes=axes, split_rngs=rngs, length=2)
        return loop(self.lift(nn.Dense)(32, use_bias=False, name="up"), x, None)[0]


LIFTS = {"plain": lambda block: block, "remat": nn.remat, "jit of remat": lambda block: nn.jit(nn.remat(block))}


@pytest.mark.parametrize("lift", LIFTS.values(), ids=LIFTS)
@pytest.mark.parametrize("rngs", [False, True], ids=["a", "b"])
def test_layers_and_microbatches_that_share_a_key_draw_their_own_bits(sown_keys, rngs, lift):
    model, policy = Chain(lift), Policy(default=Recipe((NVFP4_SR, NVFP4), None, None))
    variables, batches = init(model), jnp.stack([X, X[::-1] ** 2])

    @jax.jit
    def losses(key):
        def microbatch(_, x):
            with intercept(policy), nullcontext() if rngs else step_key(key):
                return None, model.apply(variables, x, rngs={"sr": key} if rngs else None, mutable=["keys"])

        return jax.lax.scan(microbatch, None, batches)[1]

    got, sown = losses(KEY)
    (words_of_layers,) = jax.tree.leaves(sown)
    (one,) = np.unique(words_of_layers.reshape(-1, 2), axis=0)  # for both microbatches and both layers
    key, drawn = jax.random.wrap_key_data(one), set()
    for y, x in zip(got, batches, strict=True):
        for w in variables["params"]["up"]["kernel"]:
            of_x = key_of_operand(key, 0, x)
            drawn.add(words(of_x))
            x = matmul_nt(quantize(x, NVFP4_SR, key=of_x), quantize(w, NVFP4, transpose=True), out_dtype=x.dtype)
        assert_bitwise(y, x)
    assert len(drawn) == 4


def test_a_scanned_stack_without_the_stream_has_no_key():
    model = Stack(scan=True)
    with pytest.raises(ValueError, match="layer 'block/up': key must be given"):
        run(model, init(model), rngs=True)


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


def test_the_class_draws_by_the_path_of_its_layer():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.Dense(32, dot_general_cls=dot_general_cls(SR), name=f"layer_{i}")(x)
            return x

    with recorded_keys() as drawn, step_key(KEY):
        Model().apply(init(Model()), X)
        want = [words(fold_path(KEY, f"layer_{i}")) for i in range(2)]
    assert drawn == want


def test_attention_takes_the_class():
    dot = dot_general_cls(NEAREST)
    model = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=dot, out_dot_general_cls=dot)
    assert products(lambda v: model.apply(v, X), shapes(model)) == 4


# ---------------------------------------------------------------- weights of no layer
class Weights(nn.Module):
    """Multiplies by parameters of its own, of which jnvfp4 quantizes one, and adds and looks up others."""

    @nn.compact
    def __call__(self, x, _=None):
        weights = ("cast", "scaled", "quantized", "kept", "table", "latents")
        w = {name: self.param(name, nn.initializers.normal(), (WIDTH, WIDTH)) for name in weights}
        w["cast"] *= self.param("norms", nn.initializers.ones, (1, WIDTH))
        x = jnp.einsum("bsd,ed->bse", x.astype(jnp.bfloat16), w["cast"].astype(jnp.bfloat16))
        x = jax.jit(lambda x, w: (x, w / 2))(x, w["scaled"])
        x = x[0] @ x[1] + w["table"][jnp.argmax(x[0], -1)]
        x = linear(x, w["quantized"])
        x = jax.lax.cond(jnp.any(x), jnp.matmul, jnp.matmul, x, w["kept"])
        return x + nn.Dense(WIDTH, name="up")(w["latents"][:16]), None


class ScannedWeights(nn.Module):
    @nn.compact
    def __call__(self, x):
        loop = nn.scan(nn.remat(Weights), {"params": 0}, split_rngs={"params": True}, length=3)
        return loop(name="block")(x, None)[0]


@pytest.mark.parametrize(
    ("model", "lead"), [(Weights(name="block"), ()), (ScannedWeights(), (3,))], ids=["one", "scan"]
)
def test_weights_of_no_layer_are_told_by_their_use(model, lead):
    explained = Policy(default=NEAREST).explain(model, X)
    others = {d.path: d.shape for d in explained if d.recipe is None}
    names = ("cast", "scaled", "kept")
    assert others == {f"block/{name}": (*lead, WIDTH, WIDTH) for name in names}
    variables = shapes(model)
    with (
        pytest.warns(UserWarning, match=r"intercept: layer 'block/\w+' is of type Weights, which jnvfp4.qwix") as found,
        intercept(Policy(default=NEAREST)),
    ):
        jax.make_jaxpr(lambda v: [model.apply(v, X) for _ in range(2)])(variables)
    assert len(found) == len(names)  # once
    jax.make_jaxpr(quantized(model, Policy([Rule("block/(cast|scaled|kept)", None)], default=NEAREST)))(variables)


def test_a_tied_head_is_explained():
    """Whose weights ``keep`` names."""

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(48, 32, name="embed")
            return embed.attend(nn.Dense(32, name="up")(embed(tokens)))

    explained = Policy(default=NEAREST).explain(Tied(), TOKENS)
    assert [(d.path, d.why) for d in explained if not d.recipe] == [
        ("embed/embedding", "of type Embed, which jnvfp4 does not quantize")
    ]
    assert products(quantized(Tied(), Policy(default=NEAREST), TOKENS), shapes(Tied(), TOKENS)) == 1


# ---------------------------------------------------------------- experts
def test_experts_are_named_and_stay_as_they_are():
    """Also those that are scanned: the model itself calls ``jnvfp4.RaggedDot``."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            loop = nn.scan(lambda block, x, _: (block(x), None), {"params": 0}, split_rngs={"params": True}, length=3)
            return loop(MoeBlock(name="block"), x, None)[0]

    for model, prefix, lead in (MoeBlock(), "", ()), (Scanned(), "block/", (3,)):
        policy, weights = Policy([Rule(f"{prefix}moe/router", None)], default=NEAREST), ("gate", "up", "down")
        why = "of type Moe, which jnvfp4.qwix.Provider reaches and intercept does not"
        found = [d for d in policy.explain(model, X) if d.path.startswith(f"{prefix}moe/") and "router" not in d.path]
        assert found == [(f"{prefix}moe/{name}", (*lead, 4, 32, 64), None, why) for name in weights]
        match = f"intercept: layer '{prefix}moe/(gate|up|down)' is {why}; a rule with"
        with pytest.warns(UserWarning, match=match) as warned:
            assert products(quantized(model, policy), shapes(model)) == 2
        assert len(warned) == len(weights)
    with pytest.raises(ValueError, match="every rule with a recipe must match a layer that can be quantized, got 'moe"):
        quantized(MoeBlock(), Policy([Rule("moe/(gate|up|down)", SR)]))(shapes(MoeBlock()))
