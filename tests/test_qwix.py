"""Models that Qwix drives by a policy have the bits of the same models under ``jnvfp4.flax``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_bitwise, assert_same_tensor, products, recorded_keys

pytest.importorskip("flax", "0.12")
pytest.importorskip("qwix")

import qwix
from flax import linen as nn
from flax import nnx
from flax_models import (
    GROUPS,
    KEY,
    NEAREST,
    SR,
    TOKENS,
    Mlp,
    Moe,
    NnxMlp,
    NnxMoe,
    NnxOwn,
    NnxTransformer,
    Stack,
    Transformer,
    X,
    init,
    shapes,
)
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put

from jnvfp4 import Policy, RaggedDot, Recipe, Rule, einsum, linear, quantize, step_key
from jnvfp4._layers.keys import fold_path
from jnvfp4.flax.linen import intercept
from jnvfp4.flax.nnx import apply
from jnvfp4.qwix import Provider
from jnvfp4.spec import NVFP4, NVFP4_SR

pytestmark = [
    pytest.mark.usefixtures("cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of Qwix, about Flax


MOE = "gate", "up", "down"


def loss(logits):
    return jnp.sum(jnp.sin(logits.astype(jnp.float32)))


def test_a_linen_model_has_the_bits_of_intercept():
    model, policy = Mlp(), Policy([Rule("up|down", SR)])
    variables = jax.jit(model.init)(jax.random.key(0), X)
    driven = qwix.quantize_model(model, Provider(policy))
    assert_same_tensor(driven.init(jax.random.key(0), X), variables)

    @jax.jit
    def ours(variables, key):
        with intercept(policy):
            return loss(model.apply(variables, X, rngs={"sr": key}))

    theirs = jax.jit(lambda variables, key: loss(driven.apply(variables, X, rngs={"sr": key})))
    assert_same_tensor(jax.value_and_grad(theirs)(variables, KEY), jax.value_and_grad(ours)(variables, KEY))


def test_an_nnx_model_has_the_bits_of_apply():
    model, policy = NnxMlp(nnx.Rngs(0)), Policy([Rule("up|down", SR)])
    with step_key(KEY):
        driven = qwix.quantize_model(model, Provider(policy), X)

    @nnx.jit
    def step(model, key):
        with step_key(key):
            return nnx.value_and_grad(lambda m: loss(m(X)))(model)

    got, want = step(driven, KEY), step(apply(model, policy), KEY)
    assert_bitwise(got[0], want[0])
    assert_same_tensor(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(want[1]))


@pytest.mark.long
def test_experts_of_an_nnx_model_have_the_bits_of_ragged_dot():
    """Of three parameters of one shape, which a derivative does not tell apart, all have the key of the first."""
    model, policy = nnx.Sequential(NnxMoe(nnx.Rngs(0))), Policy([Rule("layers/0/.*", SR)])
    assert [(d.path, d.recipe) for d in Policy().explain(model)] == [(f"layers/0/{n}", None) for n in MOE]
    with pytest.warns(
        UserWarning, match="'layers/0/gate' is of type NnxMoe, which jnvfp4.qwix.Provider reaches and app"
    ):
        apply(nnx.clone(model), Policy([Rule("layers/0/(up|down)", None)], default=SR))
    provider = Provider(policy)
    with step_key(KEY):
        driven = qwix.quantize_model(model, provider, X)
    assert [(d.path, d.recipe) for d in provider.explain()] == [(f"layers/0/{name}", SR) for name in sorted(MOE)]
    apart = Provider(Policy([Rule("layers/0/(gate|up)", SR), Rule("layers/0/down", NEAREST)]))
    text = "parameters of one shape that Qwix cannot tell apart must have one recipe, .* layers/0/down, layers/0/gate"
    with step_key(KEY), pytest.raises(ValueError, match=text):
        qwix.quantize_model(model, apart, X)

    @nnx.jit
    def step(model, key):
        with step_key(key):
            return nnx.value_and_grad(lambda m: loss(m(X)))(model)

    def by_hand(weights, key):
        with step_key(key):
            h, sizes = X.reshape(-1, 32).astype(jnp.bfloat16), GROUPS
            gate, up, down = (w.astype(jnp.bfloat16) for w in weights)
            product = RaggedDot(SR, "layers/0/down")
            y = product(nn.silu(product(h, gate, sizes)) * product(h, up, sizes), down, sizes, w_axes="nk")
            return loss(X + y.reshape(X.shape).astype(X.dtype))

    weights = [getattr(model.layers[0], name)[...] for name in MOE]
    value, grads = step(driven, KEY)
    want, of_weights = jax.jit(jax.value_and_grad(by_hand))(weights, KEY)
    assert_bitwise(value, want)
    for name, grad in zip(MOE, of_weights, strict=True):
        assert_bitwise(grads["layers"][0][name][...], grad, name)


def test_all_layers_of_a_model_are_reached():
    """Attention, an einsum, dense layers and experts, in Linen and in NNX."""
    model, provider = Transformer(layers=1), Provider(Policy([Rule("blocks?[_/].*", NEAREST)]))
    driven = qwix.quantize_model(model, provider)
    variables = shapes(model, TOKENS)
    assert products(lambda v: driven.apply(v, TOKENS), variables) == 7
    driven = qwix.quantize_model(NnxTransformer(nnx.Rngs(0), layers=1), provider, TOKENS)
    assert products(driven, TOKENS) == 7
    for model in (Moe(), Moe(sharded)):
        moe = qwix.quantize_model(model, Provider(Policy(default=NEAREST)))
        text = str(jax.make_jaxpr(lambda v, moe=moe: moe.apply(v, X))(shapes(model)))
        assert text.count("nvfp4_grouped_matmul[") == 3


def sharded(f):
    """Splits experts along their last axis: along K of down, and along N of the others."""
    mesh, of_w = make_mesh(jax.devices("cpu")[:2], "x"), P(None, None, "x")
    split = lambda x, *weights: jax.lax.psum(f(x, *weights), "x")  # noqa: E731
    return jax.shard_map(split, mesh=mesh, in_specs=(P(), of_w, of_w, of_w), out_specs=P())


class Flipped(nn.Module):
    """Weights first, as einsum and as dot_general, and a module with two parameters."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (48, 32))
        v = self.param("v", nn.initializers.normal(1.0), (16, 48))
        y = jnp.einsum("fd,bsd->bsf", w, x)
        return jax.lax.dot_general(v, y, (((1,), (2,)), ((), ())))


def test_weights_may_be_the_left_operand():
    model = Flipped()
    variables = model.init(jax.random.key(0), X)
    got = qwix.quantize_model(model, Provider(Policy(default=NEAREST))).apply(variables, X)
    w, v = variables["params"]["w"], variables["params"]["v"]
    want = einsum("bsf,nf->nbs", einsum("bsd,fd->bsf", X, w), v)
    assert_bitwise(got, want)


class Scaled(nn.Module):
    """Einsums that are no products, with the weights on either side, or with arguments that are not passed on."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (48, 32))
        y = jnp.einsum("bsd,fd->bsf", jnp.einsum(x, [0, 1, 2], [0, 1, 2]), w, optimize="optimal")
        return y[..., None] + jnp.einsum("fd, bsd -> bsfd", w, x) + jnp.einsum("bsd,fd->bsfd", x, w)


def test_an_einsum_that_is_no_product_stays_as_it_is():
    model, variables = Scaled(), Scaled().init(jax.random.key(0), X)
    provider = Provider(Policy(default=NEAREST))
    assert_bitwise(qwix.quantize_model(model, provider).apply(variables, X), model.apply(variables, X))
    (decision,) = provider.explain()
    assert decision[1:3] == ((48, 32), None)
    assert decision.why.startswith("no product: einsum: x and w must share a letter that the result leaves out")


class Square(nn.Module):
    """Multiplies activations by a parameter of their shape."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (32, 32)).astype(x.dtype)
        return jax.lax.dot_general(jnp.sin(x) + x, w, (((1,), (0,)), ((), ())))


def test_of_two_operands_of_one_shape_the_right_one_is_the_parameter():
    x, model = X.reshape(32, 32).astype(jnp.bfloat16), Square()
    variables, driven = init(model, x), qwix.quantize_model(model, Provider(Policy(default=NEAREST)))
    want = linear(jnp.sin(x) + x, variables["params"]["w"].astype(x.dtype), NEAREST, w_axes="kn")
    assert_bitwise(jax.jit(driven.apply)(variables, x), jax.jit(lambda: want)())


class Several(nn.Module):
    """A parameter of two arrays."""

    @nn.compact
    def __call__(self, x):
        a, b = self.param("ab", lambda _: (jnp.ones((32, 48)), jnp.ones((48, 32))))
        return x @ a @ b


def test_only_arrays_are_parameters():
    model = qwix.quantize_model(Several(), Provider(Policy(default=NEAREST)))
    assert products(lambda v: model.apply(v, X), shapes(Several())) == 0


class FlippedExperts(nn.Module):
    """Weights first, with a batch axis."""

    out_sharding: Any = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (2, 48, 32))
        return jax.lax.dot_general(w, x, (((2,), (2,)), ((0,), (0,))), out_sharding=self.out_sharding)


def test_weights_with_a_batch_axis_may_be_the_left_operand():
    """The axes of the result and its sharding are those of the product as it is written."""
    mesh = make_mesh(jax.devices("cpu")[:2], "x", kind="explicit")
    variables = FlippedExperts().init(jax.random.key(0), X)
    want = einsum("ebd,efd->efb", X, variables["params"]["w"])
    with jax.set_mesh(mesh):
        model = qwix.quantize_model(FlippedExperts(P(None, "x")), Provider(Policy(default=NEAREST)))
        got = jax.jit(model.apply)(put(variables, mesh, P()), put(X, mesh, P()))
    assert_sharded(got, mesh, P(None, "x"))
    assert_bitwise(got, want)


def test_every_parameter_of_a_module_is_a_layer():
    variables = Flipped().init(jax.random.key(0), X)
    with recorded_keys() as drawn, step_key(KEY):
        for rngs in (None, {"sr": KEY}):
            qwix.quantize_model(Flipped(), Provider(Policy(default=SR))).apply(variables, X, rngs=rngs)
    assert len(set(drawn)) == 4


def test_first_and_last_layers_stay_in_high_precision():
    model = Stack(layers=4)
    variables = shapes(model)
    driven = qwix.quantize_model(model, Provider(Policy(default=NEAREST, first_bf16=1, last_bf16=2)))
    assert products(lambda v: driven.apply(v, X), variables) == 2


def test_the_policy_is_checked():
    variables = Mlp().init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="every rule must match a layer, got 'gate'"):
        qwix.quantize_model(Mlp(), Provider(Policy([Rule("gate", SR)]))).apply(variables, X)
    with pytest.raises(ValueError, match="layer 'up': key must be given"):
        jax.grad(lambda x: jnp.sum(qwix.quantize_model(Mlp(), Provider(Policy(default=SR))).apply(variables, x)))(X)
    with pytest.raises(ValueError, match="parameters of one shape that Qwix cannot tell apart must have one recipe"):
        qwix.quantize_model(nnx.Sequential(Alike()), Provider(Policy([Rule("layers/0/other", NEAREST)])), X)
    with pytest.raises(TypeError, match=r"Provider: policy must be a jnvfp4\.Policy, got \[\]"):
        Provider([])


def test_a_module_of_nnx_that_multiplies_by_itself_is_reached():
    x = jnp.ones((16, 32))
    model = qwix.quantize_model(nnx.Sequential(NnxOwn()), Provider(Policy([Rule("layers/0", NEAREST)])), x)
    assert products(model, x) == 1
    with pytest.raises(ValueError, match="every rule must match a layer, got 'layers/1'"):
        qwix.quantize_model(nnx.Sequential(NnxOwn()), Provider(Policy([Rule("layers/1", NEAREST)])), x)


class Weighted(nnx.Module):
    """Multiplies by a parameter of another name than those of Flax, as modules of Tunix and MaxText do."""

    def __init__(self, shape, rngs, name="w"):
        self.name = name
        setattr(self, name, nnx.Param(jax.random.normal(rngs.params(), shape, jnp.bfloat16)))

    def __call__(self, x):
        return jnp.einsum("BTD,DNH->BNTH", x, getattr(self, self.name)[...])


class Weights(nnx.Module):
    """Two of them, a layer of Flax, whose kernel is read in other ways, and a vector."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(32, jnp.bfloat16))
        self.attn, self.wi = Weighted((32, 2, 16), rngs), Weighted((32, 2, 16), rngs, "wi")
        self.up = nnx.Linear(32, 48, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        x = x * self.weight[...]
        return self.attn(x), self.wi(x), self.up(x)


def test_rules_and_explain_see_parameters_of_any_name():
    model, policy = Weights(nnx.Rngs(0)), Policy([Rule("wi/wi|attn", NEAREST)])
    provider = Provider(policy)
    driven = qwix.quantize_model(model, provider, X)
    assert products(driven, X) == 2
    assert [(d.path, d.shape, d.recipe, d.why) for d in provider.explain()] == [
        ("attn", (32, 2, 16), NEAREST, "rule 'wi/wi|attn'"),
        ("wi/wi", (32, 2, 16), NEAREST, "rule 'wi/wi|attn'"),
        ("up", (32, 48), None, "no rule matches"),
    ]
    explained = Policy([]).explain(model)
    assert [d.path for d in explained] == ["attn", "up", "wi/wi"]
    assert "jnvfp4.qwix.Provider reaches and apply does not" in str(explained)
    with pytest.raises(ValueError, match="every rule must match a layer, got ''"):  # a vector is none
        qwix.quantize_model(model, Provider(Policy([Rule("", NEAREST)])), X)


def test_lora_freezes_the_weights_in_nvfp4_and_leaves_its_adapters():
    lora = qwix.LoraProvider(module_path="attn|up", rank=4, alpha=8.0)
    plain, x = Weights(nnx.Rngs(0)), X.astype(jnp.bfloat16)
    model = qwix.quantize_model(plain, Provider(Policy([Rule("(attn|up).*", NEAREST)]), lora=lora), x, rngs=nnx.Rngs(1))
    for module, kernel in ((model.attn, plain.attn.w), (model.up, plain.up.kernel)):
        kept = (module.w if module is model.attn else module.kernel).get_value().tensor
        assert_same_tensor(kept, quantize(kernel[...].reshape(32, -1).T, NEAREST.fprop.w))
    assert isinstance(model.wi.wi[...], jax.Array)  # no rule matches
    # Adapters start at zero.
    assert_bitwise(nnx.jit(lambda m: m(x))(model)[0], einsum("BTD,DNH->BNTH", x, plain.attn.w[...], recipe=NEAREST))
    grads = nnx.grad(lambda m: sum(loss(y) for y in m(x)), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    assert set(nnx.to_pure_dict(grads)) == {"attn", "up"}
    graph, state = nnx.split(model)
    assert products(lambda state: nnx.merge(graph, state)(x), state) == 2
    with pytest.raises(TypeError, match=r"Frozen: weights in NVFP4 must be read as a whole, by \[\.\.\.\], got \[0\]"):
        model.up.kernel[0]
    model.up.precision = "highest"
    with pytest.raises(ValueError, match="layer 'up': precision must be None or 'default', got 'highest'"):
        model(x)
    with pytest.raises(TypeError, match=r"Provider: lora must be a qwix\.LoraProvider or None, got 4"):
        Provider(Policy(), lora=4)
    for policy in (Policy(w_gather=(P("x"), P())), Policy([Rule("up", NEAREST, (P("x"), P()))])):
        with pytest.raises(ValueError, match=r"Provider: policy must have no w_gather with lora, .*, got \(P"):
            Provider(policy, lora=lora)


class Batched(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 32, 48)))

    def __call__(self, x):
        return jnp.einsum("bsd,bde->bse", x, self.kernel[...])


class Alike(nnx.Module):
    """Two parameters of one shape, of which Qwix knows no other thing."""

    def __init__(self):
        self.kernel, self.other = nnx.Param(jnp.ones((32, 48))), nnx.Param(jnp.ones((32, 48)))

    def __call__(self, x):
        return jnp.einsum("bsd,de->bse", x, 2 * self.kernel[...]) + jnp.einsum("bsd,de->bse", x, 3 * self.other[...])


KEPT = {  # by why they are: K is padded in each call, or N of tiles of 16
    "K": (partial(nnx.Linear, 40, 32), NEAREST),
    "N": (partial(nnx.Linear, 32, 40), NEAREST),
    "high precision": (partial(nnx.Linear, 32, 32), Recipe(None, None, None)),
    "a product for each example": (Batched, NEAREST),
    "one of two": (Alike, NEAREST),
}


@pytest.mark.parametrize(("make", "recipe"), KEPT.values(), ids=KEPT)
def test_lora_keeps_what_does_not_fit(make, recipe):
    layer = make(rngs=nnx.Rngs(0)) if isinstance(make, partial) else make()
    provider = Provider(Policy(default=recipe), lora=qwix.LoraProvider(module_path="none", rank=4, alpha=8.0))
    x = jnp.ones((2, 4, layer.kernel.shape[-2]))
    model = qwix.quantize_model(nnx.Sequential(layer), provider, x, rngs=nnx.Rngs(1))
    assert isinstance(model.layers[0].kernel[...], jax.Array)
    assert jax.eval_shape(model, x).shape == (2, 4, layer.kernel.shape[-1])


def test_lora_leaves_a_linen_model_as_it_is():
    provider = Provider(Policy(default=NEAREST), lora=qwix.LoraProvider(module_path="none", rank=4, alpha=8.0))
    model = qwix.quantize_model(Mlp(), provider)
    assert products(lambda v: model.apply(v, X), shapes(Mlp())) == 2


class Positional(nnx.Module):
    """Contracts the axes of x in another order, and gives the precision and the dtype of its result by their places."""

    def __init__(self):
        self.w = nnx.Param(jax.random.normal(KEY, (4, 8, 64), jnp.bfloat16))

    def __call__(self, x):
        return jax.lax.dot_general(x, self.w[...], (((2, 1), (0, 1)), ((), ())), None, jnp.float32)


def test_lora_passes_on_the_key_and_the_options_of_a_product():
    recipe, x = Recipe((NVFP4_SR, NVFP4), None, None), X.reshape(-1, 8, 4).astype(jnp.bfloat16)
    lora = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
    with step_key(KEY):
        provider = Provider(Policy(default=recipe), lora=lora)
        model = qwix.quantize_model(nnx.Sequential(Positional()), provider, x, rngs=nnx.Rngs(1))
        got, kept = model(x), model.layers[0].w.get_value().tensor  # adapters start at zero
        rows = x.mT.reshape(-1, 32)
        assert_bitwise(got, linear(rows, kept, recipe, key=fold_path(KEY, "layers/0"), out_dtype=jnp.float32))
