"""What Linen and NNX models have in common: the layers that are quantized, their bits and keys, and the errors."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, refused

pytest.importorskip("flax", "0.12")

import flax_models as models
from flax import linen as nn
from flax import nnx
from flax_models import ALL, KEY, NEAREST, SR, TOKENS, X, init

from jnvfp4 import Policy, Rule, linear, recipes, step_key
from jnvfp4._layers.keys import fold_path
from jnvfp4.checkpoints import ConvertOptions
from jnvfp4.flax import calibrate
from jnvfp4.flax.linen import intercept
from jnvfp4.flax.nnx import apply

BLOCKS, EVERY = "blocks?[_/].*", Policy(default=NEAREST)
pytestmark = pytest.mark.usefixtures("cpu")


class Linen:
    """Models that multiply by a policy within ``intercept``."""

    op, first, block = "intercept", "layers_0", "block_{}"
    parts = "/up", "/down", "_gate", "_attention/query", "_attention/key", "_attention/value", "_attention/out"
    linear, mlp, transformer, own = nn.Dense, models.Mlp, models.Transformer, models.LinenOwn
    scanned = staticmethod(lambda: models.Stack(scan=True))
    conv = staticmethod(lambda: nn.Conv(32, (3,)))
    einsum = staticmethod(lambda subscripts, shape, **options: nn.Einsum(shape, subscripts, use_bias=False, **options))
    sequential = staticmethod(lambda *modules: nn.Sequential(modules))
    params = staticmethod(lambda model, x=X: init(model, x)["params"])
    bind = staticmethod(lambda model, params: model.bind({"params": params}))
    attention_norm = staticmethod(lambda params: params["block_0_norm"])

    @staticmethod
    def call(model, policy, params, x=X):
        with intercept(policy):
            return model.apply({"params": params}, x)


class Nnx:
    """Models that ``apply`` changes in place."""

    op, first, block = "apply", "layers/0", "blocks/{}"
    parts = tuple(part.replace("_", "/") for part in ("/mlp/up", "/mlp/down", *Linen.parts[2:]))

    @staticmethod
    def linear(features, **options):
        kind = nnx.LinearGeneral if "dot_general_cls" in options else nnx.Linear  # which has no such argument
        return kind(32, features, rngs=nnx.Rngs(0), **options)

    mlp = staticmethod(lambda: models.NnxMlp(nnx.Rngs(0)))
    transformer = staticmethod(lambda layers: models.NnxTransformer(nnx.Rngs(0), layers))
    own, sequential = models.NnxOwn, nnx.Sequential
    scanned = staticmethod(lambda: models.NnxStack(scan=True))
    conv = staticmethod(lambda: nnx.Conv(32, 32, (3,), rngs=nnx.Rngs(0)))
    einsum = staticmethod(lambda *args, **options: nnx.Einsum(*args, rngs=nnx.Rngs(0), **options))
    params = staticmethod(lambda model, x=X: nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    attention_norm = staticmethod(lambda params: params["blocks"][0]["norm"])

    @staticmethod
    def bind(model, params):
        model = nnx.clone(model)
        nnx.update(model, params)
        return model

    @staticmethod
    def call(model, policy, params, x=X):
        return apply(Nnx.bind(model, params), policy)(x)


@pytest.fixture(params=[Linen, Nnx])
def api(request):
    return request.param


def program(api, model, policy, x=X) -> str:
    return str(jax.make_jaxpr(lambda params: api.call(model, policy, params, x))(api.params(model, x)))


def test_explain_lists_the_layers_of_a_model(api):
    policy = Policy([Rule(BLOCKS, SR)])
    decisions = {d.path: (d.shape, d.recipe, d.why) for d in policy.explain(api.transformer(2), TOKENS)}
    assert set(decisions) == {"lm_head", *(api.block.format(i) + part for i in range(2) for part in api.parts)}
    assert decisions["lm_head"] == ((32, 48), None, "keep 'lm_head'")
    assert decisions[api.block.format(1) + api.parts[-1]] == ((2, 16, 32), SR, f"rule '{BLOCKS}'")
    assert decisions[api.block.format(0) + api.parts[0]] == ((32, 64), SR, f"rule '{BLOCKS}'")


def test_only_products_with_weights_are_quantized(api):
    """Of ten products of a block, those of queries with keys and of scores with values stay as they are."""
    policies = Policy(), Policy([Rule(BLOCKS, NEAREST)])
    plain, quantized = (program(api, api.transformer(1), policy, TOKENS) for policy in policies)
    assert [text.count("nvfp4_matmul[") for text in (plain, quantized)] == [0, 7]
    assert plain.count(" dot_general[") - quantized.count(" dot_general[") == 7


def test_a_layer_of_ten_features_is_padded(api):
    for model in (api.linear(10), api.einsum("bsd,de->bse", (32, 10)), api.einsum("bsd,bde->bse", (2, 32, 10))):
        assert EVERY.explain(model, X)[0].why == "default; N padded from 10 to 16"
        call = lambda params: api.call(model, EVERY, params)  # noqa: B023, E731
        assert jax.eval_shape(call, api.params(model)).shape == (2, 16, 10)


def test_a_rule_may_pad_a_head(api):
    """No result depends on the zeros, which a forward pass would not need."""
    inference = recipes.inference()
    for model in (api.linear(10), api.einsum("bsd,de->bse", (32, 10))):
        head, found = api.sequential(model), []
        params = api.params(head)
        for pad in (False, True):
            policy = Policy([Rule(api.first, inference, pad=pad)])
            assert (policy.explain(head, X)[0].why == f"rule '{api.first}'; N padded from 10 to 16") == pad
            call = partial(api.call, head, policy)
            assert f"f32[2,16,{16 if pad else 10}] = nvfp4_matmul[" in str(jax.make_jaxpr(call)(params))
            y, pull = jax.vjp(call, params)
            found.append((y, pull(jnp.cos(y))[0]))
        (want, want_dw), (got, dw) = found
        assert_bitwise(got, want)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), dw, want_dw)


def test_the_dtype_that_an_einsum_prefers_is_that_of_its_product(api):
    model = api.einsum("bsd,de->bse", (32, 32), dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    assert jax.eval_shape(lambda params: api.call(model, EVERY, params), api.params(model)).dtype == jnp.float32


def test_a_layer_with_a_product_of_its_own_keeps_it(api):
    product = lambda *args, **others: 2 * jax.lax.dot_general(*args, **others)  # noqa: E731
    for options in {"dot_general": product}, {"dot_general_cls": lambda: product}:
        model = api.linear(48, use_bias=False, **options)
        params = api.params(model)
        assert EVERY.explain(model, X)[0].why == "has a dot_general of its own"
        assert_bitwise(api.call(model, EVERY, params), 2 * (X @ params["kernel"]))


OWN = "of type {}, which jnvfp4.qwix.Provider reaches and {} does not"
OTHERS = {
    "kernel": (lambda api: api.own(), "", OWN),
    "another name": (lambda api: api.own("down"), "/down", OWN),
    "convolution": (lambda api: api.conv(), "", "of type {}, which jnvfp4 does not quantize"),
}


@pytest.mark.parametrize(("make", "name", "why"), OTHERS.values(), ids=OTHERS)
def test_a_module_without_a_hook_is_named(api, make, name, why):
    """By its weights, whatever their name, and not by an embedding, which is added."""
    module = make(api)
    model, why, path = (
        api.sequential(module, api.linear(32)),
        why.format(type(module).__name__, api.op),
        api.first + name,
    )
    explained = EVERY.explain(model, X)
    assert [(d.path, d.recipe) for d in explained] == [(path, None), (api.first.replace("0", "1"), NEAREST)]
    assert explained[0].why == why
    with pytest.warns(
        UserWarning, match=f"{api.op}: layer '{path}' is {why}; a rule with recipe None ends this"
    ) as found:
        program(api, model, EVERY)
    assert len(found) == 1
    program(api, model, Policy([Rule(path, None)], default=NEAREST))
    blocks = api.sequential(api.sequential(module), api.sequential(api.linear(32)))
    program(api, blocks, Policy(default=NEAREST, first_bf16=1))
    with pytest.raises(ValueError, match="every rule with a recipe must match a layer that can be quantized"):
        Policy([Rule(path, NEAREST)]).explain(model, X)


def test_an_error_names_the_layer(api):
    einsum = api.einsum("bsd,de->bse", (32, 32), precision="highest")
    for layer, op in (api.linear(32, precision="highest"), "DotGeneral"), (einsum, "Einsum"):
        text = f"{op} of layer '{api.first}': precision must be None or 'default', got 'highest'; .* recipe None"
        with pytest.raises(ValueError, match=text):
            program(api, api.sequential(layer), EVERY)


WRONG_POLICIES = {
    "rule": (Policy([Rule("gate", SR)]), "every rule must match a layer, got 'gate', which matches none of down, up"),
    "type": ("pretrain", "TypeError: {}: policy must be a jnvfp4.Policy, got 'pretrain'"),
}


@pytest.mark.parametrize(("policy", "text"), WRONG_POLICIES.values(), ids=WRONG_POLICIES)
def test_policies_that_do_not_fit_the_model_are_refused(api, policy, text):
    with refused(text.format(api.op)):
        program(api, api.mlp(), policy)


def test_loss_and_gradients_have_the_bits_of_linear(api):
    def by_hand(p, key):
        h = nn.LayerNorm().apply({"params": p["norm"]}, X).astype(jnp.bfloat16)
        h = linear(h, p["up"]["kernel"].astype(jnp.bfloat16), SR, key=fold_path(key, "up"), w_axes="kn")
        h = nn.gelu(h + p["up"]["bias"].astype(jnp.bfloat16))
        y = linear(h, p["down"]["kernel"].astype(jnp.bfloat16), SR, key=fold_path(key, "down"), w_axes="kn")
        return X + y.astype(X.dtype)

    def step(call, params, key):
        with step_key(key):
            return jax.value_and_grad(lambda params: jnp.sum(jnp.sin(call(params, key))))(params)

    model = api.mlp()
    calls = by_hand, lambda params, _: api.call(model, ALL, params)
    want, got = (jax.jit(partial(step, call))(api.params(model), KEY) for call in calls)
    assert_same_tensor(got, want)


def test_a_layer_without_a_key_raises(api):
    model = api.mlp()
    program(api, model, ALL)  # without a gradient
    with pytest.raises(ValueError, match=r"layer 'up': key must be given.*rngs={'sr': key}.*rngs=nnx.Rngs\(sr=seed\)"):
        jax.eval_shape(jax.grad(lambda params: jnp.sum(api.call(model, ALL, params))), api.params(model))


def test_scanned_layers_have_no_ends(api):
    model = api.scanned()
    message = r"layers must not be scanned for last_bf16=1, .* got block/\w+ with weights \(3, (32, 64|64, 32)\)"
    with pytest.raises(ValueError, match=message):
        Policy(default=NEAREST, last_bf16=1).explain(model, X)


def test_calibrate_writes_the_scales_of_a_conversion(api, tmp_path):
    model, path, policy = api.transformer(1), tmp_path / "amax.json", Policy([Rule(BLOCKS, SR)])
    params = api.params(model, TOKENS)
    bound = api.bind(model, params)
    found = calibrate(bound, policy, [TOKENS, (TOKENS + 1,), {"tokens": TOKENS}], path)
    assert json.loads(path.read_text()) == found
    assert set(found) == {d.path.replace("/", ".") for d in policy.explain(model, TOKENS) if d.recipe}
    x = nn.LayerNorm().apply({"params": api.attention_norm(params)}, params["embed"]["embedding"][TOKENS])
    query = api.block.format(0) + api.parts[3]
    assert found[query.replace("/", ".")] >= float(jnp.abs(x.astype(jnp.bfloat16)).max())
    ConvertOptions(input_amax=path)
    options = {"name": lambda path: f"model.{path}", "percentile": 100}
    once, twice = (calibrate(bound, policy, [TOKENS], path, headroom=h, **options) for h in (1, 2))
    assert f"model.{query}" in once
    assert twice == {name: 2 * amax for name, amax in once.items()}


def test_calibrate_refuses_what_it_cannot_measure(api, tmp_path):
    path, scanned, model = tmp_path / "amax.json", api.scanned(), api.mlp()
    with pytest.raises(TypeError, match="calibrate: layer 'block/up' must run by itself, got traced activations"):
        calibrate(api.bind(scanned, api.params(scanned)), ALL, [X], path)
    with pytest.raises(ValueError, match="calibrate: the policy must quantize a layer that the model calls, got none"):
        calibrate(api.bind(model, api.params(model)), Policy(), [X], path)
    for other, name in (models.Mlp(), "Mlp"), (lambda x: x, "function"):
        with pytest.raises(TypeError, match=rf"calibrate: model must be .*, got {name}; model.bind\(variables\) binds"):
            calibrate(other, ALL, [X], path)
    assert not path.exists()
