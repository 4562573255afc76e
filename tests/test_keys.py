"""``step_key``, ``layer_index`` and ``layer_key``: each layer and step has a key of its own, whatever traces it."""

import hashlib
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, refused
from operands import normal

from jnvfp4 import NVFP4, NVFP4_SR, DotGeneral, Recipe, layer_index, layer_key, linear, recipes, step_key
from jnvfp4._core.patterns import layer_path

SR = recipes.pretrain()
A, B = jax.random.key(1), jax.random.key(2)
DENSE = (((1,), (0,)), ((), ()))
X, W = normal((16, 32), 1), normal((32, 32), 2)


pytestmark = pytest.mark.usefixtures("cpu")


def key_bits(path: str):
    """What a layer draws, as numbers that tell keys apart."""
    return jax.random.bits(layer_key(path), (2,), jnp.uint32)


def gradient_bits(x=X, w=W, path="up"):
    """The gradient of a layer that rounds dy stochastically."""
    return jax.grad(lambda w: jnp.sum(jnp.sin(DotGeneral(SR, path)(x, w, DENSE, None, jnp.float32))))(w)


def by_hand(key, path, *indices):
    words = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")
    key = jax.random.fold_in(key, np.uint32(words))
    for index in indices:
        key = jax.random.fold_in(key, index)
    return key


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
    assert (layer_path(path).without_number, layer_path(path).number) == (stem, number)
    with step_key(A):
        want = by_hand(A, stem) if number is None else by_hand(A, stem, number)
        assert (jax.random.key_data(layer_key(path)) == jax.random.key_data(want)).all()


def test_an_index_replaces_the_number():
    with step_key(A), layer_index(3):
        assert_bitwise(key_bits("block/up"), jax.random.bits(by_hand(A, "block/up", 3), (2,), jnp.uint32))
        inside = key_bits("block/Attention_0/Dense_1"), key_bits("block_5/up")
        with layer_index(4):
            assert_bitwise(key_bits("up"), jax.random.bits(by_hand(A, "up", 3, 4), (2,), jnp.uint32))
    with step_key(A):
        assert_bitwise(inside[0], key_bits("block_3/Attention_0/Dense_1"))
    assert_bitwise(inside[1], jax.random.bits(by_hand(A, "block_5/up", 3), (2,), jnp.uint32))


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
    with step_key(B), layer_index(1), step_key(B):  # forgets the indices of the step around it
        assert_bitwise(key_bits("up"), inner)
    with pytest.raises(ZeroDivisionError), step_key(A), layer_index(0):
        1 / 0  # noqa: B018
    with layer_index(3), pytest.raises(ValueError, match="rounds stochastically"):
        layer_key("up")


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


ENCLOSED = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda: jax.lax.scan(lambda c, _: (c, f()), 0, None, length=2),
    "cond": lambda f: lambda: jax.lax.cond(True, f, f),
    "nested jit": lambda f: jax.jit(lambda: jax.jit(f)()),
}


@pytest.mark.parametrize("enclose", ENCLOSED.values(), ids=ENCLOSED)
def test_a_step_entered_outside_the_traced_function_raises(enclose):
    """It would be a constant there, and stale in the next step."""
    with step_key(A), pytest.raises(ValueError, match="layer 'up': the key of step_key must be traced"):
        enclose(gradient_bits)()


NO_KEY, NO_INDEX = (
    "TypeError: step_key: key must be one JAX PRNG key",
    "TypeError: layer_index: index must be one integer",
)
REFUSED = [
    *((step_key, key, NO_KEY) for key in (None, 3, jax.random.split(A))),
    *((layer_index, index, "layer_index: index must be at least 0, got -1") for index in (-1, np.int32(-1))),
    (layer_index, 1.0, f"{NO_INDEX}, got 1.0"),
    (layer_index, True, f"{NO_INDEX}, got True"),
    *((layer_index, index, NO_INDEX) for index in (jnp.arange(2), "1")),
]


@pytest.mark.parametrize(("enter", "value", "text"), REFUSED)
def test_other_keys_and_indices_are_refused(enter, value, text):
    with refused(text), enter(value):
        pass


def test_a_constant_key_inside_jit_raises():
    @jax.jit
    def step():
        with step_key(A):
            return gradient_bits()

    with pytest.raises(ValueError, match=r"step_key: the key of step_key must be traced .* for 'jit', got a constant"):
        step()


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


def test_a_jitted_layer_never_sees_a_stale_index():
    layer = jax.jit(lambda: key_bits("up"))

    @jax.jit
    def step(key):
        with step_key(key):
            drawn = []
            for i in range(3):
                with layer_index(i):
                    drawn.append(layer())
            return jnp.stack(drawn)

    @jax.jit
    def scanned(key):
        def body(c, i):
            with layer_index(i):
                return c, layer()

        with step_key(key):
            return jax.lax.scan(body, 0, jnp.arange(3))[1]

    assert_bitwise(step(A), scanned(A))
    assert len(np.unique(np.asarray(step(A)), axis=0)) == 3
    assert (step(A) != step(B)).any()


@pytest.mark.parametrize("name", ["remat", "cond"])
def test_other_inner_functions_see_the_key(leaks, name):
    @jax.jit
    def step(key):
        with step_key(key):
            return INNER[name]("up"), key_bits("up")

    for key in (A, B):
        assert_bitwise(*step(key))


def test_layers_scanned_and_unrolled_have_the_same_bits(leaks):
    stacked = normal((2, 32, 32), 5)

    def block(x, w, path):
        return jnp.sin(DotGeneral(SR, path)(x, w, DENSE, None, jnp.float32)).astype(x.dtype)

    def unrolled(key, w):
        with step_key(key):
            x = X
            for i in range(2):
                x = block(x, w[i], f"block_{i}/up")
            return jnp.sum(x.astype(jnp.float32))

    def scanned(key, w):
        def body(x, of_layer):
            i, w = of_layer
            with layer_index(i):
                return block(x, w, "block/up"), None

        with step_key(key):
            x, _ = jax.lax.scan(jax.checkpoint(body), X, (jnp.arange(2), w))
            return jnp.sum(x.astype(jnp.float32))

    for got, want in zip(*(jax.jit(jax.value_and_grad(f, 1))(A, stacked) for f in (scanned, unrolled)), strict=True):
        assert_bitwise(got, want)


LOOPS = {
    "scan": lambda body: jax.lax.scan(lambda c, i: (c, body(i)), 0, jnp.arange(2))[1],
    "map": lambda body: jax.lax.map(body, jnp.arange(2)),
    "fori_loop": lambda body: jax.lax.fori_loop(0, 2, lambda i, c: c + body(i), jnp.zeros(2, jnp.uint32)),
    "while_loop": lambda body: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + body(c[0])), (0, jnp.zeros(2, jnp.uint32))
    ),
    "condition": lambda body: jax.lax.while_loop(lambda i: i + body(i)[0] % 2 < 2, lambda i: i + 1, 0),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_needs_an_index(loop):
    def step(key, index):
        def body(i):
            if index is None:
                return key_bits("up")
            with layer_index(index(i)):
                return key_bits("up")

        with step_key(key):
            return loop(body)

    with pytest.raises(ValueError, match=r"layer 'up': in a loop that JAX traces once.*enter jnvfp4.layer_index\(i\)"):
        jax.jit(lambda k: step(k, None))(A)
    with pytest.raises(ValueError, match="that JAX traces once, layers must have an index that the loop passes"):
        jax.jit(lambda k: step(k, lambda i: 3))(A)  # the same in every iteration
    jax.jit(lambda k: step(k, lambda i: i))(A)


def test_a_loop_over_microbatches_needs_a_key_or_an_index_too():
    def layers(enter=layer_index):
        def body(c, i):
            with enter(i):
                return c, key_bits("up")

        return jax.lax.scan(body, 0, jnp.arange(2))[1]

    def outside(key, enter):
        with step_key(key):
            return jax.lax.map(lambda m: layers(enter), jnp.arange(3))

    def inside(key):
        def microbatch(m):
            with step_key(jax.random.fold_in(key, m)):
                return layers()

        return jax.lax.map(microbatch, jnp.arange(3))

    def of_each(key):
        folded = lambda m, i: jax.random.fold_in(jax.random.fold_in(key, m), i)  # noqa: E731
        return jax.lax.map(lambda m: layers(lambda i: step_key(folded(m, i))), jnp.arange(3))

    for enter in (layer_index, nullcontext):
        with pytest.raises(ValueError, match="here number 1 of 2 from the outside"):
            jax.jit(partial(outside, enter=enter))(A)
    for step in (inside, of_each):
        assert len(np.unique(np.asarray(jax.jit(step)(A)).reshape(6, 2), axis=0)) == 6


def test_vmap_shares_the_bits_unless_an_index_differs(leaks):
    @jax.jit
    def step(key):
        def example(i):
            with layer_index(i):
                return key_bits("up")

        with step_key(key):
            shared = jax.vmap(lambda x: key_bits("up"))(jnp.arange(3))
            return shared, jax.vmap(example)(jnp.arange(3)), key_bits("up")

    assert_bitwise(jax.vmap(step)(jnp.stack([B, A]))[2][1], step(A)[2])  # and over keys
    shared, own, one = step(A)
    for row in shared:
        assert_bitwise(row, one)
    assert len(np.unique(np.asarray(own), axis=0)) == 3


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
