"""What ``jax.checkpoint`` saves of ``linear`` by the policies of ``jnvfp4.remat``, and the memory of compiled steps."""

import contextlib
import io
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_tensor, primitives
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put, run
from operands import normal

from jnvfp4 import linear, recipes, remat

PACKED = 9 / 16  # bytes of an element: a code of four bits, and a sixteenth of a scale
RECIPES = {
    "default": recipes.DEFAULT,
    "pretrain": recipes.pretrain(),
    "4over6": recipes.pretrain_4over6(),
    "window64": recipes.window64(stochastic_rounding=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
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
    block = lambda x, w: jnp.tanh(linear(x, w))  # noqa: E731
    saved = {
        name: saved_bytes(jax.checkpoint(block, policy=by_name(name)), X, W, capsys=capsys)
        for name in (remat.RESIDUAL_NAME, remat.BACKWARD_NAME)
    }
    size = X.size + W.size
    assert 2 * PACKED * size <= saved[remat.RESIDUAL_NAME] <= 2 * PACKED * size + 64
    assert (2 + PACKED) * size <= saved[remat.BACKWARD_NAME] <= (2 + PACKED) * size + 64  # and x and w, to start from


def test_recompute_quantize_saves_nothing_packed(capsys):
    block = jax.checkpoint(lambda x, w: linear(x, w), policy=remat.recompute_quantize)
    saved = saved_bytes(block, X, W, capsys=capsys)
    assert 2 * (X.size + W.size) <= saved <= 2 * (X.size + W.size) + 64
    leaves = jax.tree.leaves(jax.vjp(block, X, W)[1])
    assert not any(leaf.dtype == jnp.uint8 for leaf in leaves)


def counts(policy, f=None, x=X):
    f = f or (lambda x, w: jnp.sum(jnp.tanh(linear(x, w)).astype(jnp.float32)))
    names = primitives(jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy), (0, 1)))(x, W).jaxpr)
    return {name: names.count(f"nvfp4_{name}") for name in ("quantize_pair", "quantize", "matmul", "rht_amax")}


def squares(x, w):
    """Its gradient reads the product itself, not what another operation makes of it."""
    y = linear(x, w)
    return jnp.sum(y * y)


def test_what_runs_again():
    """Of a block that needs the result of its product: the quantizers, the product, or the search for an amax."""
    everything = {"quantize_pair": 3, "quantize": 0, "matmul": 3, "rht_amax": 2}
    assert counts(jax.checkpoint_policies.everything_saveable) == everything
    assert counts(remat.recompute_quantize) == everything | {"quantize_pair": 5}
    assert counts(remat.recompute_quantize, squares) == everything | {"quantize_pair": 5}
    assert counts(remat.save_packed) == everything | {"quantize_pair": 5, "matmul": 4, "rht_amax": 3}


def test_policies_change_no_bit():
    def gradients(wrap):
        losses = {
            name: lambda x, w, r=recipe: jnp.sum(jnp.tanh(linear(x, w, r, key=KEY)).astype(jnp.float32))
            for name, recipe in RECIPES.items()
        }
        return jax.jit(lambda *v: {name: jax.grad(wrap(loss), (0, 1))(*v) for name, loss in losses.items()})(X, W)

    want = gradients(lambda f: f)
    for policy in (remat.save_packed, remat.recompute_quantize):
        assert_same_tensor(gradients(lambda f, policy=policy: jax.checkpoint(f, policy=policy)), want)


# ---------------------------------------------------------------- memory of compiled steps
LAYERS, WIDTH, TOKENS = 8, 512, 1024


def temporary_bytes(policy, weights, x, product=linear):
    """Of a step of layers with weights in float32, which are cast before they are quantized."""

    def layer(h, w):
        return jax.lax.optimization_barrier(product(h, w.astype(jnp.bfloat16))), None

    def loss(weights):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].astype(jnp.float32) ** 2)

    step = jax.jit(lambda weights: weights - jax.grad(loss)(weights), donate_argnums=0)
    return step.lower(weights).compile().memory_analysis().temp_size_in_bytes


def operands():
    return normal((LAYERS, WIDTH, WIDTH), 1, "fp32") * 0.05, normal((TOKENS, WIDTH), 2)


def test_no_cast_is_kept_beside_what_is_packed():
    """Of x and w of each layer there is one packed copy more than where nothing is saved."""
    weights, x = operands()
    none = temporary_bytes(jax.checkpoint_policies.nothing_saveable, weights, x)
    packed = temporary_bytes(remat.save_packed, weights, x)
    copies = LAYERS * PACKED * (TOKENS * WIDTH + WIDTH * WIDTH)
    inputs = LAYERS * 2 * TOKENS * WIDTH  # what "nothing" keeps of each layer to start from
    assert packed - none <= 1.02 * copies
    assert packed <= none - inputs + 1.02 * (copies + inputs)


def test_packed_residuals_need_less_memory_than_bf16():
    weights, x = operands()
    packed = temporary_bytes(remat.save_packed, weights, x)
    of_bf16 = temporary_bytes(jax.checkpoint_policies.everything_saveable, weights, x, lambda h, w: h @ w.T)
    saved = LAYERS * 2 * (TOKENS * WIDTH + WIDTH * WIDTH)
    assert of_bf16 - packed >= 0.7 * saved


def test_gathered_weights_are_kept_as_a_part():
    """A device keeps its part of the packed weights from the forward to the backward pass, and of its tokens."""
    mesh = make_mesh(jax.devices("cpu")[:8], "x")
    weights, x = operands()
    weights, x = put(weights, mesh, P(None, "x")), put(x, mesh, P("x"))
    product = partial(linear, w_gather=(P("x"), P()))
    none = temporary_bytes(jax.checkpoint_policies.nothing_saveable, weights, x, product)
    packed = temporary_bytes(remat.save_packed, weights, x, product)
    copies = LAYERS * PACKED * (TOKENS * WIDTH + WIDTH * WIDTH) / 8
    assert packed - none <= 1.05 * copies


@pytest.mark.parametrize(("policy", "times"), [(None, 1), (remat.save_packed, 2)], ids=["whole", "part"])
def test_a_gathered_weight_is_kept_whole_or_gathered_again(policy, times):
    """Without jax.checkpoint dx reads the bytes that the forward pass gathered; with it each pass gathers them."""
    mesh = make_mesh(jax.devices("cpu")[:8], "x")
    x, w = (put(normal((512, 256), i), mesh, P("x")) for i in range(2))
    layer = partial(linear, w_gather=(P("x"), P()))
    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)
        names = {line.split(" ")[0] for line in saved(layer, x, w)}
        assert names == {"u8[512,128]", "u8[512,16]", "u8[256,256]", "u8[256,32]", "f32[]"}
    _, found = run(jax.grad(lambda x, w: jnp.sum(jnp.tanh(layer(x, w)).astype(jnp.float32)), (0, 1)), x, w)
    assert [shape for op, shape in found if op == "all-gather"].count("u8[512,128]") == times


def saved(f, *args) -> list[str]:
    """What jax.checkpoint saves of f: a line for each array."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_saved_residuals(f, *args)
    return [line for line in printed.getvalue().splitlines() if "from the argument" not in line]
