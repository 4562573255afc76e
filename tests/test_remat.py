"""What ``jax.checkpoint`` saves of ``linear`` by the policies of ``jnvfp4.remat``, and the memory of compiled steps."""

import functools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_tensor, primitives
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put, run
from operands import normal

from jnvfp4 import NVFP4_RHT, NVFP4_RHT_SR, Recipe, dequantize, linear, quantize, recipes, remat

PACKED = 9 / 16  # bytes of an element: a code of four bits, and a sixteenth of a scale
RECIPES = {
    "default": recipes.DEFAULT,
    "pretrain": recipes.pretrain(),
    "4over6": recipes.pretrain_4over6(),
    "requantized": recipes.pretrain_4over6(requantize=True),
    "window64": recipes.window64(stochastic_rounding=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "dequantized dx": Recipe((NVFP4_RHT, NVFP4_RHT), (NVFP4_RHT_SR, NVFP4_RHT), "dequantized"),
}
KEY = jax.random.key(3)
X, W = normal((512, 1024), 1), normal((256, 1024), 2)
ITEMSIZE = {"u8": 1, "u16": 2, "u32": 4, "bf16": 2, "f32": 4, "key<fry>": 8}


def saved_bytes(f, *operands, capsys) -> int:
    """The bytes that JAX keeps from the forward to the backward pass."""
    capsys.readouterr()
    print_saved_residuals(f, *operands)
    lines = re.findall(r"^([\w<>]+)\[([\d,]*)\]", capsys.readouterr().out, flags=re.M)
    assert lines
    return sum(ITEMSIZE[dtype] * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape in lines)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "save_packed"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_linear_saves_nine_of_thirty_two_bits(capsys, recipe, checkpointed):
    """Neither its arguments nor anything else of 16 bits; windows have an amax for every 64 elements."""
    f = partial(linear, recipe=recipe, key=KEY)
    got = saved_bytes(jax.checkpoint(f, policy=remat.save_packed) if checkpointed else f, X, W, capsys=capsys)
    of_bf16 = saved_bytes(lambda x, w: x @ w.T, X, W, capsys=capsys)
    assert of_bf16 == 2 * (X.size + W.size)
    amaxes = X.size / 16 if recipe is RECIPES["window64"] else 0
    assert 0 <= got - PACKED * (X.size + W.size) - amaxes <= 64
    assert got <= (0.30 if not amaxes else 0.32) * of_bf16


def test_the_operands_of_the_forward_pass_have_a_name_too(capsys):
    """By which four tensors are saved where the product runs again, and two where its result is not needed."""
    by_name = jax.checkpoint_policies.save_only_these_names
    layer = lambda x, w: jnp.tanh(linear(x, w))  # noqa: E731
    saved = {
        name: saved_bytes(jax.checkpoint(layer, policy=by_name(name)), X, W, capsys=capsys)
        for name in (remat.RESIDUAL_NAME, remat.BACKWARD_NAME)
    }
    size = X.size + W.size
    assert 2 * PACKED * size <= saved[remat.RESIDUAL_NAME] <= 2 * PACKED * size + 64
    assert (2 + PACKED) * size <= saved[remat.BACKWARD_NAME] <= (2 + PACKED) * size + 64  # and x and w, to start from


def test_recompute_quantize_saves_nothing_packed(capsys):
    layer = jax.checkpoint(lambda x, w: linear(x, w), policy=remat.recompute_quantize)
    saved = saved_bytes(layer, X, W, capsys=capsys)
    assert 2 * (X.size + W.size) <= saved <= 2 * (X.size + W.size) + 64
    leaves = jax.tree.leaves(jax.vjp(layer, X, W)[1])
    assert not any(leaf.dtype == jnp.uint8 for leaf in leaves)


# ---------------------------------------------------------------- what runs again
def block(x, w, recipe=recipes.DEFAULT):
    """Needs the result of its product for the gradient."""
    return jnp.sum(jnp.sin(linear(x, w, recipe, key=KEY).astype(jnp.float32)))


def squares(x, w):
    """Its gradient reads the product itself, not what another operation makes of it."""
    y = linear(x, w)
    return jnp.sum(y * y)


def counts(f):
    names = primitives(jax.make_jaxpr(jax.grad(f, (0, 1)))(X, W).jaxpr)
    return {name: names.count(f"nvfp4_{name}") for name in ("quantize_pair", "quantize", "matmul", "rht_amax")}


policies = jax.checkpoint_policies
SAVE = policies.save_only_these_names(remat.RESIDUAL_NAME)
ONCE = {"quantize_pair": 3, "quantize": 0, "matmul": 3, "rht_amax": 2}
AGAIN = {"quantize_pair": 5, "quantize": 0, "matmul": 4, "rht_amax": 3}
RUNS = {
    "everything": (policies.everything_saveable, ONCE),
    "residuals": (SAVE, ONCE | {"matmul": 4}),
    "recompute_quantize": (remat.recompute_quantize, ONCE | {"quantize_pair": 5}),
    "save_packed": (remat.save_packed, AGAIN),
    "no policy": (None, AGAIN),
    "dots": (policies.dots_saveable, AGAIN),  # they do not see the products, as docs/training.md says
    "no_batch_dims": (policies.dots_with_no_batch_dims_saveable, AGAIN),
}


@pytest.mark.parametrize(("policy", "runs"), RUNS.values(), ids=RUNS)
def test_operations_that_run_again(policy, runs):
    """The quantizers, the product, or the search for an amax."""
    assert counts(jax.checkpoint(block, policy=policy)) == runs
    assert counts(jax.checkpoint(squares, policy=policy)) == runs


def test_each_operand_is_read_once():
    """x, w and dy by one fused kernel each; what is rotated, x and dy, by another for both amaxes."""
    loss = partial(block, recipe=recipes.pretrain())
    assert counts(loss) == ONCE
    names = primitives(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W).jaxpr)
    assert names.count("reduce_max") == 1  # of w: rht_amax finds those of x and dy too
    forward = primitives(jax.make_jaxpr(linear)(X, W).jaxpr)
    assert (forward.count("nvfp4_quantize"), forward.count("nvfp4_quantize_pair")) == (2, 0)


SMALL = normal((32, 64), 1), normal((16, 64), 2)


def test_the_compiled_gradient_quantizes_in_three_pairs(native):
    f = jax.jit(jax.grad(jax.checkpoint(block, policy=SAVE), (0, 1)))
    text = f.lower(*SMALL).compile().as_text()
    assert text.count('custom_call_target="nvfp4_quantize') == text.count('nvfp4_quantize_pair"') == 3


POLICIES = {
    "default": None,
    "names": SAVE,
    "everything": policies.everything_saveable,
    "primitive": lambda primitive, *_, **__: primitive.name in ("nvfp4_quantize", "nvfp4_quantize_pair"),
    "save_packed": remat.save_packed,
    "recompute_quantize": remat.recompute_quantize,
}
OF_RECIPE = {"pretrain": POLICIES, "window64": ["save_packed"], "dequantized": ["save_packed", "recompute_quantize"]}


def test_policies_change_no_bit(native):
    losses = {name: partial(block, recipe=RECIPES[name]) for name in OF_RECIPE}

    @jax.jit
    def gradients(x, w):
        want = {name: jax.grad(loss, (0, 1))(x, w) for name, loss in losses.items()}
        cases = [(name, policy) for name, of in OF_RECIPE.items() for policy in of]
        got = [jax.grad(jax.checkpoint(losses[n], policy=POLICIES[p]), (0, 1))(x, w) for n, p in cases]
        return got, [want[name] for name, _ in cases]

    assert_same_tensor(*gradients(*SMALL))


def test_remat_keeps_large_scales():
    """JAX rounds the floats that it saves as if E4M3 had infinities; 448 must survive."""
    x, t = normal((32, 48), dtype="fp32"), quantize(normal((32, 48)))

    def loss(x, t):
        return jnp.sum(jnp.sin(x * dequantize(quantize(jax.lax.stop_gradient(x))) * dequantize(t)))

    @jax.jit
    def gradients(x, t):
        return [jax.grad(jax.checkpoint(loss, policy=policy))(x, t) for policy in POLICIES.values()]

    want = jax.jit(jax.grad(loss))(x, t)
    for got in gradients(x, t):
        np.testing.assert_allclose(got, want, rtol=1e-6)


# ---------------------------------------------------------------- memory of compiled steps
LAYERS, WIDTH, TOKENS = 8, 512, 1024


@functools.cache
def temporary_bytes(policy, product=linear, shardings=(None, None)) -> int:
    """Of a step of layers with weights in float32, which are cast before they are quantized."""

    def layer(h, w):
        return jax.lax.optimization_barrier(product(h, w.astype(jnp.bfloat16))), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].astype(jnp.float32) ** 2)

    step = jax.jit(lambda weights, x: weights - jax.grad(loss)(weights, x), donate_argnums=0)
    types = ((LAYERS, WIDTH, WIDTH), jnp.float32), ((TOKENS, WIDTH), jnp.bfloat16)
    arguments = (jax.ShapeDtypeStruct(*of, sharding=sharding) for of, sharding in zip(types, shardings, strict=True))
    return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_no_cast_is_kept_beside_what_is_packed():
    """Of x and w of each layer there is one packed copy more than where nothing is saved."""
    none = temporary_bytes(jax.checkpoint_policies.nothing_saveable)
    packed = temporary_bytes(remat.save_packed)
    copies = LAYERS * PACKED * (TOKENS * WIDTH + WIDTH * WIDTH)
    inputs = LAYERS * 2 * TOKENS * WIDTH  # what "nothing" keeps of each layer to start from
    assert packed - none <= 1.02 * copies
    assert packed <= none - inputs + 1.02 * (copies + inputs)


def test_packed_residuals_need_less_memory_than_bf16():
    of_bf16 = temporary_bytes(jax.checkpoint_policies.everything_saveable, lambda x, w: x @ w.T)
    saved = LAYERS * 2 * (TOKENS * WIDTH + WIDTH * WIDTH)
    assert of_bf16 - temporary_bytes(remat.save_packed) >= 0.7 * saved


def test_gathered_weights_are_kept_as_a_part():
    """A device keeps its part of the packed weights from the forward to the backward pass, and of its tokens."""
    mesh = make_mesh(jax.devices("cpu")[:8], "x")
    shardings = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P("x"))
    product = partial(linear, w_gather=(P("x"), P()))
    none = temporary_bytes(jax.checkpoint_policies.nothing_saveable, product, shardings)
    packed = temporary_bytes(remat.save_packed, product, shardings)
    copies = LAYERS * PACKED * (TOKENS * WIDTH + WIDTH * WIDTH) / 8
    assert packed - none <= 1.05 * copies


@pytest.mark.parametrize(("policy", "times"), [(None, 1), (remat.save_packed, 2)], ids=["whole", "part"])
def test_a_gathered_weight_is_kept_whole_or_gathered_again(policy, times, capsys):
    """Without jax.checkpoint dx reads the bytes that the forward pass gathered; with it each pass gathers them."""
    mesh = make_mesh(jax.devices("cpu")[:8], "x")
    x, w = (put(normal((512, 256), i), mesh, P("x")) for i in range(2))
    layer = partial(linear, w_gather=(P("x"), P()))
    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
        capsys.readouterr()
        print_saved_residuals(layer, x, w)
        lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
        names = {line.split(" ")[0] for line in lines}
        assert names == {"u8[512,128]", "u8[512,16]", "u8[256,256]", "u8[256,32]", "f32[]"}
    _, found = run(jax.grad(lambda x, w: jnp.sum(jnp.tanh(layer(x, w)).astype(jnp.float32)), (0, 1)), x, w)
    assert [shape for op, shape in found if op == "all-gather"].count("u8[512,128]") == times
