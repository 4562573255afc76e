"""``step_key``: layers and steps have keys of their own, and other data draw other bits, whatever traces them."""

import hashlib
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, key_of_operand, recorded_draws, refused, words
from operands import normal

from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, DotGeneral, Recipe, linear, recipes, step_key
from jnvfp4._core.patterns import layer_path
from jnvfp4._layers.keys import key_of_layer

SR = recipes.pretrain()
A, B = jax.random.key(1), jax.random.key(2)
DENSE = (((1,), (0,)), ((), ()))
X, W = normal((16, 32), 1), normal((32, 32), 2)


pytestmark = pytest.mark.usefixtures("cpu")


def key_bits(path: str):
    """What a layer draws, as numbers that tell keys apart."""
    return jax.random.bits(key_of_layer(path, SR), (2,), jnp.uint32)


def gradient_bits(x=X, w=W, path="up"):
    """The gradient of a layer that rounds dy stochastically."""
    return jax.grad(lambda w: jnp.sum(jnp.sin(DotGeneral(SR, path)(x, w, DENSE, None, jnp.float32))))(w)


def of_path(key, path):
    return jax.random.fold_in(key, np.uint32(int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")))


@pytest.fixture
def leaks():
    """Raises where a tracer outlives its trace. JAX keeps those of a jitted function that does, so it is not tried."""
    with jax.checking_leaks():
        yield


# ---------------------------------------------------------------- the key of a layer
@pytest.mark.parametrize(
    ("path", "stem", "number"),
    [
        ("block_3/mlp/up", "block/mlp/up", 3),
        ("block3/mlp/up", "block/mlp/up", 3),
        ("layers/12/mlp/up", "layers/mlp/up", 12),
        ("block/Dense_1", "block/Dense_1", None),  # the last part is the layer itself
        ("Block_3/Attention_0/Dense_1", "Block/Attention_0/Dense_1", 3),
        ("Model_0/Block_3/Dense_1", "Model_0/Block/Dense_1", 3),
        ("transformer/h/5/mlp/c_fc", "transformer/h/mlp/c_fc", 5),
        ("transformer_1/h/3/attn", "transformer_1/h/attn", 3),
        ("tower_2/proj", "tower/proj", 2),
    ],
)
def test_the_number_of_a_layer(path, stem, number):
    prefix, found, rest = layer_path(path)
    assert ("/".join(filter(None, (prefix, rest))), found) == (stem, number)


def test_a_layer_folds_its_path():
    with step_key(A):
        assert words(key_of_layer("block_3/mlp/up", SR)) == words(of_path(A, "block_3/mlp/up"))


def test_layers_and_steps_differ():
    paths = ["up", "down", "block_0/up", "block_1/up", "block_0/down", "blocks/0/up"]
    drawn = []
    for key in (A, B):
        with step_key(key):
            drawn += [tuple(np.asarray(key_bits(path)).tolist()) for path in paths]
    assert len(set(drawn)) == len(drawn)


def test_an_explicit_key_comes_first():
    with step_key(A):
        got = DotGeneral(SR, "up")(X, W, DENSE, key=B)
    assert_bitwise(got, linear(X, W, SR, key=B, w_axes="kn"))


def test_a_step_ends():
    with step_key(A), step_key(B):
        inner = key_bits("up")
    with step_key(B):
        assert_bitwise(key_bits("up"), inner)
    with pytest.raises(ZeroDivisionError), step_key(A):
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="layer 'up': key must be given, since the recipe rounds stochastically"):
        gradient_bits()


# ---------------------------------------------------------------- errors
def test_a_layer_without_a_key_names_the_three_ways():
    with pytest.raises(ValueError, match="layer 'up': key must be given") as error:
        gradient_bits()
    for way in ("jnvfp4.step_key(key)", "rngs={'sr': key}", "rngs=nnx.Rngs(sr=seed)"):
        assert way in str(error.value)


@pytest.mark.parametrize("recipe", [SR, Recipe(fprop=(NVFP4_SR, NVFP4))], ids=["gradients", "forward"])
def test_an_evaluation_needs_a_key_only_for_the_forward_gemm(recipe):
    layer = jax.jit(lambda x: DotGeneral(recipe, "up")(x, W, DENSE))
    if recipe.stochastic_forward:
        with pytest.raises(ValueError, match="layer 'up': key must be given"):
            layer(X)
        return
    y = layer(X)

    @jax.jit
    def with_key(x, key):
        with step_key(key):
            return DotGeneral(recipe, "up")(x, W, DENSE)

    assert_bitwise(y, with_key(X, A))
    with pytest.raises(ValueError, match="layer 'up': key must be given"):  # also of the function that JAX has traced
        jax.grad(lambda x: jnp.sum(layer(x)))(X)


def test_a_layer_without_a_path_cannot_have_a_key():
    text = r"DotGeneral: key must be given.*DotGeneral\(recipe, path=\.\.\."
    with step_key(A), pytest.raises(ValueError, match=text):
        DotGeneral(SR)(X, W, DENSE)
    with pytest.raises(ValueError, match=text):
        DotGeneral(Recipe(fprop=(NVFP4_SR, NVFP4)))(X, W, DENSE)
    with pytest.raises(TypeError, match="DotGeneral: path must be a string or None, got 3"):
        DotGeneral(SR, 3)


def test_a_recipe_without_random_bits_needs_no_key():
    want = linear(X, W, w_axes="kn")
    assert_bitwise(DotGeneral(recipes.DEFAULT)(X, W, DENSE), want)
    assert_bitwise(jax.jit(lambda: DotGeneral(recipes.DEFAULT, "up")(X, W, DENSE))(), want)


@pytest.mark.parametrize("key", [None, 3, jax.random.split(A)])
def test_other_keys_are_refused(key):
    with refused("TypeError: step_key: key must be one JAX PRNG key"), step_key(key):
        pass


# ---------------------------------------------------------------- transforms
def test_two_calls_of_a_step_are_one_trace():
    traces = []

    def step(key, w):
        traces.append(1)
        with step_key(key):
            return gradient_bits(w=w)

    jitted = jax.jit(step)
    first, second, again = jitted(A, W), jitted(B, W), jitted(A, W)
    assert len(traces) == 1
    assert (first != second).any()
    assert_bitwise(first, again)
    assert_bitwise(first, step(A, W))


def test_eager_steps_compile_nothing_again(caplog):
    def eager(key):
        with step_key(key):
            return gradient_bits()

    eager(A)
    with jax.log_compiles():
        eager(B)
    assert not [record for record in caplog.records if "Compiling" in record.message]


INNER = {
    "jit": jax.jit(key_bits, static_argnums=0),
    "jit of remat": jax.jit(jax.checkpoint(key_bits, static_argnums=0), static_argnums=0),
    "remat": lambda path: jax.checkpoint(lambda: key_bits(path))(),
    "cond": lambda path: jax.lax.cond(True, lambda: key_bits(path), lambda: jnp.zeros(2, jnp.uint32)),
}


@pytest.mark.parametrize("name", ["jit", "jit of remat"])
def test_a_jitted_layer_never_sees_a_stale_key(name):
    """It is one object that several steps, of other traces, call: JAX must not take its first trace again."""

    def step(key, layer=INNER[name]):
        with step_key(key):
            return layer("up"), layer("down")

    plain = partial(step, layer=key_bits)
    for key in (A, B):
        assert_same_tensor(jax.jit(lambda k: step(k))(key), jax.jit(lambda k: plain(k))(key))
    assert_same_tensor(jax.jit(lambda k, m: (step(k), step(m)))(A, B), (plain(A), plain(B)))


@pytest.mark.parametrize("name", ["remat", "cond"])
def test_other_inner_functions_see_the_key(leaks, name):
    @jax.jit
    def step(key):
        with step_key(key):
            return INNER[name]("up"), key_bits("up")

    for key in (A, B):
        assert_bitwise(*step(key))


# ---------------------------------------------------------------- one key, other data
DRAWS = Recipe((NVFP4_SR, NVFP4_2D), (NVFP4_SR, NVFP4_2D), (NVFP4_RHT_SR, NVFP4_RHT))  # of x and of dy
MICROBATCHES = normal((3, 16, 32), 3, "fp32"), normal((3, 16, 32), 4, "fp32")  # those in bfloat16 may share an amax


def in_turn(f):
    """Calls of one function that JAX has traced once, with its key as a constant."""
    jitted = jax.jit(f)
    return jax.tree.map(lambda *v: jnp.stack(v), *[jitted(*of) for of in zip(*MICROBATCHES, strict=True)])


def in_fori_loop(f):
    def body(i, results):
        return jax.tree.map(lambda v, new: v.at[i].set(new), results, f(*(of[i] for of in MICROBATCHES)))

    shapes = jax.eval_shape(jax.vmap(f), *MICROBATCHES)
    return jax.lax.fori_loop(0, 3, body, jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes))


LOOPS = {
    "eager": lambda f: jax.tree.map(lambda *v: jnp.stack(v), *[f(*of) for of in zip(*MICROBATCHES, strict=True)]),
    "steps": in_turn,
    "scan": lambda f: jax.lax.scan(lambda _, of: (None, f(*of)), None, MICROBATCHES)[1],
    "scan of remat": lambda f: jax.lax.scan(lambda _, of: (None, jax.checkpoint(f)(*of)), None, MICROBATCHES)[1],
    "fori_loop": in_fori_loop,
    "vmap": lambda f: jax.vmap(f)(*MICROBATCHES),
}


@cache
def alone():
    """Results and gradients of the microbatches by themselves, and the documented keys from which they draw."""
    of_x, of_dy = MICROBATCHES
    layer = partial(linear, w=W, recipe=DRAWS, key=of_path(A, "up"), w_axes="kn")
    both = [(y, *pull(dy)) for (y, pull), dy in zip((jax.vjp(layer, x) for x in of_x), of_dy, strict=True)]
    keys = [words(key_of_operand(of_path(A, "up"), i, v)) for i, of in ((0, of_x), (2, of_dy)) for v in of]
    return tuple(map(jnp.stack, zip(*both, strict=True))), keys


@pytest.mark.parametrize("name", LOOPS)
def test_microbatches_with_one_key_draw_their_own_bits(name):
    def one(x, dy):
        y, pull = jax.vjp(lambda x: DotGeneral(DRAWS, "up")(x, W, DENSE), x)
        return y, *pull(dy)

    def step(key):
        with step_key(key):
            return LOOPS[name](one)

    with recorded_draws() as drawn:
        got = (step if name in ("eager", "steps") else jax.jit(step))(A)
    want, keys = alone()
    assert set(drawn) == set(keys)
    assert len(set(keys)) == 6
    assert_same_tensor(got, want)


def test_equal_data_and_a_given_amax_draw_equal_bits():
    recipe, amax = Recipe((NVFP4, NVFP4_SR), None, None), jnp.float32(4)
    layer = lambda w, **options: linear(X, w, recipe, key=A, **options)  # noqa: E731
    with recorded_draws() as drawn:
        layer(W), layer(W[::-1]), layer(2 * W), layer(W, w_amax=amax), layer(2 * W, w_amax=amax)
        rotated = Recipe(recipe.fprop, (NVFP4_RHT, NVFP4_RHT), None)  # the pass for the rotated w finds the amax of w
        jax.vjp(lambda x: linear(x, W, rotated, key=A, w_amax=amax), X)
    of_w = words(jax.random.fold_in(A, 1))
    same, other = (words(key_of_operand(A, 1, w)) for w in (W, 2 * W))
    assert drawn == [same, same, other, of_w, of_w, same]


def test_a_second_trace_has_its_own_key(leaks):
    """Of another shape, and after an error in the first."""

    @jax.jit
    def step(key, x):
        with step_key(key):
            drawn = key_bits("up")
            if x.shape[0] == 48:
                raise ZeroDivisionError
            return drawn

    first = step(A, X)
    with pytest.raises(ZeroDivisionError):
        step(A, normal((48, 32)))
    with step_key(B):
        assert_bitwise(step(B, normal((32, 32))), key_bits("up"))
    assert_bitwise(step(A, X), first)


def test_shard_map_sees_the_key():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    @jax.jit
    def step(key):
        with step_key(key):
            f = jax.shard_map(lambda x: x + key_bits("up"), mesh=mesh, in_specs=spec, out_specs=spec)
            return f(jnp.zeros((2, 2), jnp.uint32)), key_bits("up")

    got, want = step(A)
    assert_bitwise(got, jnp.stack([want, want]))
