"""Linen models as they are: which layers are quantized, with which bits and keys, and that nothing else changes."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor

pytest.importorskip("flax", "0.12")

from flax import linen as nn
from flax_models import TOKENS, Mlp, Stack, Transformer, products, record_keys, stacked

from jnvfp4 import Policy, Rule, layer_key, linear, recipes, step_key
from jnvfp4.checkpoints import ConvertOptions
from jnvfp4.flax import calibrate, linen
from jnvfp4.flax.linen import dot_general_cls, intercept

SR, NEAREST = recipes.pretrain(), recipes.DEFAULT
POLICY = Policy([Rule("block_.*", SR)])
ALL = Policy(default=SR, keep=())
KEY = jax.random.key(5)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32)


pytestmark = pytest.mark.usefixtures("cpu")


def shapes(model, x=X):
    """Of the variables, without computing them."""
    return jax.eval_shape(model.init, jax.random.key(0), x)


def init(model, x=X):
    """Variables without a run of the model, since any values will do."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda v: jnp.asarray(rng.normal(0, 0.2, v.shape), v.dtype), shapes(model, x))


def quantized(model, policy, x=X, **options):
    """A function of the variables, by a policy."""

    def apply(variables):
        with intercept(policy):
            return model.apply(variables, x, **options)

    return apply


def run(model, variables, x=X, policy=ALL, key=KEY, rngs=None):
    """Loss and gradients, jitted, by way (a), or by (b) if there are ``rngs``."""

    @jax.jit
    def step(variables, key):
        def loss(variables):
            keys = {"sr": key} if rngs else None
            with intercept(policy):
                return jnp.sum(jnp.sin(model.apply(variables, x, rngs=keys).astype(jnp.float32)))

        if rngs or key is None:
            return jax.value_and_grad(loss)(variables)
        with step_key(key):
            return jax.value_and_grad(loss)(variables)

    return step(variables, key)


# ---------------------------------------------------------------- which layers, and nothing else
def test_explain_lists_the_layers_of_a_model():
    model = Transformer()
    decisions = {d.path: (d.shape, d.recipe, d.why) for d in POLICY.explain(model, TOKENS)}
    parts = ["/up", "/down", "_gate", *(f"_attention/{p}" for p in ("query", "key", "value", "out"))]
    assert set(decisions) == {"lm_head", *(f"block_{i}{part}" for i in range(2) for part in parts)}
    assert decisions["lm_head"] == ((32, 48), None, "keep 'lm_head'")
    assert decisions["block_1_attention/out"] == ((2, 16, 32), SR, "rule 'block_.*'")
    assert decisions["block_0/up"] == ((32, 64), SR, "rule 'block_.*'")


def test_parameters_do_not_change():
    model = Transformer()
    plain = shapes(model, TOKENS)
    with intercept(POLICY):
        assert shapes(model, TOKENS) == plain
    nearest = Policy([Rule("block_.*", NEAREST)])
    _, changed = jax.eval_shape(quantized(model, nearest, TOKENS, mutable=True), plain)
    assert jax.tree.structure(changed) == jax.tree.structure(plain)


def test_only_products_with_weights_are_quantized():
    """Of ten products of a block, those of queries with keys and of scores with values stay as they are."""
    model, policy = Transformer(layers=1), Policy([Rule("block_.*", NEAREST)])
    variables = shapes(model, TOKENS)
    assert products(quantized(model, policy, TOKENS), variables) == 7
    plain, program = (str(jax.make_jaxpr(quantized(model, p, TOKENS))(variables)) for p in (Policy(), policy))
    assert len(re.findall(r"= dot_general\[", plain)) - len(re.findall(r"= dot_general\[", program)) == 7


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


LAYERS_OF_TEN = {"dense": nn.Dense(10), "einsum": nn.Einsum((32, 10), "bsd,de->bse", use_bias=False)}


@pytest.mark.parametrize("model", LAYERS_OF_TEN.values(), ids=LAYERS_OF_TEN)
def test_a_layer_of_ten_features_is_padded(model):
    policy = Policy(default=NEAREST)
    assert policy.explain(model, X)[0].why == "default; N padded from 10 to 16"
    assert jax.eval_shape(quantized(model, policy), shapes(model)).shape == (2, 16, 10)


def test_a_model_within_a_model_has_its_own_layers():
    """A teacher that is applied within the student."""

    class Student(nn.Module):
        teacher: dict

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32, name="block_0")(x)
            x = x - Mlp().apply(self.teacher, x)
            return nn.Dense(32, name="block_3")(x)

    model = Student(init(Mlp()))
    variables = shapes(model)
    for rule, count in (("block_3", 1), ("block_.*", 2), ("up|block_0", 2)):
        assert products(quantized(model, Policy([Rule(rule, NEAREST)])), variables) == count
    with pytest.raises(ValueError, match="got 'up', which matches none of block_0, block_3"):
        products(quantized(model, Policy([Rule("up", NEAREST)])), variables)


@pytest.mark.parametrize("attribute", ["dot_general", "dot_general_cls"])
def test_a_layer_with_a_product_of_its_own_keeps_it(attribute):
    own = {"dot_general": jax.lax.dot_general, "dot_general_cls": lambda: jax.lax.dot_general}[attribute]
    model = nn.Dense(48, **{attribute: own})
    variables = init(model)
    policy = Policy(default=NEAREST)
    assert policy.explain(model, X)[0].why == "has a dot_general of its own"
    with intercept(policy):
        got = model.apply(variables, X)
    assert_bitwise(got, nn.Dense(48).apply(variables, X))


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


class Own(nn.Module):
    """Multiplies by itself, as some models do."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (32, 48))


OTHERS = {
    "own": (Own(), "of type Own, which jnvfp4.qwix.Provider reaches and intercept does not"),
    "convolution": (nn.Conv(32, (3,)), "of type Conv, which jnvfp4 does not quantize"),
}


@pytest.mark.parametrize(("module", "why"), OTHERS.values(), ids=OTHERS)
def test_a_module_without_a_hook_is_named(module, why):
    model = nn.Sequential([module, nn.Dense(32)])
    decision = Policy(default=NEAREST).explain(model, X)[0]
    assert (decision.path, decision.recipe, decision.why) == ("layers_0", None, why)
    with pytest.warns(UserWarning, match=f"intercept: layer 'layers_0' is {why}"):
        jax.eval_shape(quantized(model, Policy(default=NEAREST)), shapes(model))
    jax.eval_shape(quantized(model, Policy([Rule("layers_0", None)], default=NEAREST)), shapes(model))
    with pytest.raises(ValueError, match="every rule with a recipe must match a layer that can be quantized"):
        Policy([Rule("layers_0", NEAREST)]).explain(model, X)


def test_an_error_names_the_layer():
    for model, op in (
        (nn.Dense(32, precision="highest", name="up"), "DotGeneral"),
        (nn.Einsum((32, 32), "bsd,de->bse", precision="highest", name="up"), "einsum"),
    ):
        message = f"{op} of layer 'up': precision must be None or 'default', got 'highest'; .* Rule with recipe None"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(quantized(model, Policy(default=NEAREST)), shapes(model))


def test_an_einsum_that_is_no_product_stays_as_it_is():
    model = nn.Einsum((32, 8), "bsd,de->bsde", use_bias=False)
    decision = Policy(default=NEAREST).explain(nn.Sequential([model]), X)[0]
    assert decision.recipe is None
    assert "must share a letter that the result leaves out" in decision.why


def test_first_and_last_layers_stay_in_high_precision():
    model = Stack(layers=4)
    policy = Policy(default=NEAREST, first_bf16=1, last_bf16=2)
    assert products(quantized(model, policy), shapes(model)) == 2  # those of one Mlp


def test_scanned_layers_have_no_ends():
    model, policy = Stack(scan=True), Policy(default=NEAREST, last_bf16=1)
    message = r"layers must not be scanned for last_bf16=1, .* got block/up with weights \(3, 32, 64\)"
    with pytest.raises(ValueError, match=message):
        policy.explain(model, X)
    message = r"must have numbers in their paths for last_bf16=1 \(scanned layers have none\), got block/down, block/up"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(quantized(model, policy), shapes(model))


def test_the_policy_is_checked():
    message = "every rule must match a layer, got 'gate', which matches none of down, up"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(quantized(Mlp(), Policy([Rule("gate", SR)])), shapes(Mlp()))
    with pytest.raises(TypeError, match=r"intercept: policy must be a jnvfp4.Policy, got 'pretrain'"):
        intercept("pretrain").__enter__()
    with pytest.raises(TypeError, match=r"Policy.explain: a Linen module must come with .* explain\(model, \*inputs\)"):
        Policy(default=NEAREST).explain(Mlp())
    with pytest.raises(TypeError, match=r"got its parameters too; write .*, without the parameters"):
        Policy(default=NEAREST).explain(Mlp(), {"params": {}}, jnp.ones((16, 16)))


# ---------------------------------------------------------------- bits


def test_loss_and_gradients_have_the_bits_of_linear():
    def by_hand(variables, key):
        p = variables["params"]
        h = nn.LayerNorm().apply({"params": p["norm"]}, X).astype(jnp.bfloat16)
        with step_key(key):
            h = linear(h, p["up"]["kernel"].astype(jnp.bfloat16), SR, key=layer_key("up"), w_axes="kn")
            h = nn.gelu(h + p["up"]["bias"].astype(jnp.bfloat16))
            y = linear(h, p["down"]["kernel"].astype(jnp.bfloat16), SR, key=layer_key("down"), w_axes="kn")
        return jnp.sum(jnp.sin((X + y.astype(X.dtype)).astype(jnp.float32)))

    variables = init(Mlp())
    assert_same_tensor(run(Mlp(), variables), jax.jit(jax.value_and_grad(by_hand))(variables, KEY))


def test_loops_and_remat_change_no_bit():
    """Of one layer, and of its products: XLA may sum a norm in another order."""
    variables = init(Stack(layers=1))
    want_loss, want = run(Stack(layers=1), variables)
    loss, got = run(Stack(layers=1, scan=True, indexed=True), stacked(variables))
    assert_bitwise(loss, want_loss)
    assert_same_tensor(got, stacked(want))
    loss, got = run(Stack(layers=1, remat=True), variables)
    assert_bitwise(loss, want_loss)
    for layer in ("up", "down"):
        assert_bitwise(*(tree["params"]["block_0"][layer]["kernel"] for tree in (got, want)), layer)


# ---------------------------------------------------------------- keys
def test_a_layer_without_a_key_raises():
    model = quantized(Mlp(), ALL)
    jax.eval_shape(model, shapes(Mlp()))  # without a gradient
    with pytest.raises(ValueError, match="layer 'up': key must be given") as error:
        jax.eval_shape(jax.grad(lambda variables: jnp.sum(model(variables))), shapes(Mlp()))
    assert "rngs={'sr': key}" in str(error.value)


SPLIT = (("params", True), ("sr", True))
STACKS = {
    "a, unrolled": (Stack(2), False),
    "a, scanned": (Stack(2, scan=True, indexed=True), False),
    "b, unrolled": (Stack(2), True),
    "b, remat": (Stack(2, remat=True), True),
    "b, scanned": (Stack(2, scan=True, split_rngs=SPLIT), True),
    "b, scanned remat": (Stack(2, scan=True, remat=True, split_rngs=SPLIT), True),
}


def sow_keys(monkeypatch):
    """Makes each product store its key in the collection "keys" of its layer."""
    original = linen.key_in

    def sowing(module, path, recipe):
        key = original(module, path, recipe)
        module.sow("keys", "drawn", jax.random.key_data(key))
        return key

    monkeypatch.setattr(linen, "key_in", sowing)


@pytest.mark.parametrize(("model", "rngs"), STACKS.values(), ids=STACKS)
def test_every_layer_of_every_step_draws_its_own_bits(monkeypatch, model, rngs):
    variables = init(model)
    sow_keys(monkeypatch)

    @jax.jit
    def step(variables, key):
        with intercept(ALL):
            if rngs:
                return model.apply(variables, X, rngs={"sr": key}, mutable=["keys"])[1]
            with step_key(key):
                return model.apply(variables, X, mutable=["keys"])[1]

    drawn = [leaf.reshape(-1, 2) for key in (KEY, jax.random.key(6)) for leaf in jax.tree.leaves(step(variables, key))]
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8  # two steps, two blocks, two layers


OF_EACH, OF_ALL = (("params", True),), (("params", True), ("sr", False))
DIFFER = "key must differ .* pass split_rngs={'sr': True} to nn.scan"
ALIKE = {
    "step_key without an index": (Stack(scan=True), False, r"in a loop that JAX traces once.*layer_index\(i\)"),
    "one stream": (Stack(scan=True, split_rngs=OF_ALL), True, DIFFER),
    "one stream, remat": (Stack(scan=True, remat=True, split_rngs=OF_ALL), True, DIFFER),
    "no stream": (Stack(scan=True, split_rngs=OF_EACH), True, "key must be given"),
}


@pytest.mark.parametrize(("model", "rngs", "text"), ALIKE.values(), ids=ALIKE)
def test_scanned_layers_that_would_draw_the_same_bits_raise(model, rngs, text):
    with pytest.raises(ValueError, match=f"layer 'block/up': {text}"):
        run(model, init(Stack(scan=True)), rngs=rngs)


class Caller(nn.Module):
    """Draws no bits itself, and calls a model that does."""

    @nn.compact
    def __call__(self, x, variables, rngs):
        return Mlp().apply(variables, x, rngs=rngs)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_microbatches_that_share_a_stream_raise(remat):
    variables = init(Mlp())
    model, of_model = Stack(layers=1, remat=remat), {"params": {"block_0": variables["params"]}}
    scanned = Stack(layers=1, remat=remat, scan=True, indexed=True)  # its layers have no stream

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
    losses(lambda key: Caller().apply({}, X, variables, {"sr": key}, rngs={"sr": KEY}))
    losses(lambda key: scanned.apply(stacked(of_model), X, rngs={"sr": KEY}))


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
    shared = lambda key: jax.lax.map(lambda x: model.apply(variables, x, rngs={"sr": key}), X)  # noqa: E731
    with pytest.raises(ValueError, match="key must differ between the iterations"):
        jax.eval_shape(shared, KEY)


def test_the_class_draws_by_the_path_of_its_layer(monkeypatch):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.Dense(32, dot_general_cls=dot_general_cls(SR), name=f"layer_{i}")(x)
            return x

    variables, drawn = init(Model()), record_keys(monkeypatch)
    with step_key(KEY):
        Model().apply(variables, X)
        jax.effects_barrier()
        want = [tuple(np.asarray(jax.random.key_data(layer_key(f"layer_{i}"))).tolist()) for i in range(2)]
    assert drawn == want


def test_attention_takes_the_class():
    dot = dot_general_cls(NEAREST)
    model = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=dot, out_dot_general_cls=dot)
    assert products(lambda v: model.apply(v, X), shapes(model)) == 4


# ---------------------------------------------------------------- calibrate
def test_calibrate_writes_the_scales_of_a_conversion(tmp_path):
    model = Transformer(layers=1)
    variables = init(model, TOKENS)
    path = tmp_path / "amax.json"
    found = calibrate(model.bind(variables), POLICY, [TOKENS, (TOKENS + 1,), {"tokens": TOKENS}], path)
    assert json.loads(path.read_text()) == found
    assert set(found) == {d.path.replace("/", ".") for d in POLICY.explain(model, TOKENS) if d.recipe}
    _, seen = model.apply(variables, TOKENS, capture_intermediates=True)
    norm = seen["intermediates"]["block_0_norm"]["__call__"][0].astype(jnp.bfloat16)
    assert found["block_0_attention.query"] >= float(jnp.abs(norm).max())
    ConvertOptions(input_amax=path)
    renamed = calibrate(model.bind(variables), POLICY, [TOKENS], path, name=lambda of: f"model.{of}", percentile=99.0)
    assert "model.block_0/up" in renamed


def test_calibrate_refuses_what_it_cannot_measure(tmp_path):
    path = tmp_path / "amax.json"
    with pytest.raises(TypeError, match=r"calibrate: model must be .*, got Mlp; model.bind\(variables\) binds it"):
        calibrate(Mlp(), ALL, [X], path)
    scanned = Stack(scan=True)
    with pytest.raises(TypeError, match="calibrate: layer 'block/up' must run by itself, got traced activations"):
        calibrate(scanned.bind(init(scanned)), ALL, [X], path)
    with pytest.raises(ValueError, match="calibrate: the policy must quantize a layer that the model calls, got none"):
        calibrate(Mlp().bind(init(Mlp())), Policy(), [X], path)
    assert not path.exists()
