"""``DotGeneral`` and ``einsum``: every product has the bits of ``linear``, and kernels are not transposed in memory."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, refused
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put
from operands import normal

from jnvfp4 import DotGeneral, Recipe, dot_general, einsum, linear, matmul_nt, quantize, recipes
from jnvfp4._layers.einsum import contraction
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_SR

SR = recipes.pretrain()
KEY = jax.random.key(3)
DENSE = (((2,), (0,)), ((), ()))  # x [B, S, K] by a kernel [K, N]


pytestmark = pytest.mark.usefixtures("cpu")


def both_passes(f, *operands):
    y, pull = jax.vjp(f, *operands)
    return y, *pull(normal(y.shape, 9, "fp32").astype(y.dtype))


def assert_same_passes(f, g, *operands):
    """Of a result and its gradients, bit for bit."""
    got, want = (jax.jit(partial(both_passes, of))(*operands) for of in (f, g))
    assert_same_tensor(got, want)


# ---------------------------------------------------------------- dot_general
# lhs shape, rhs shape, dimension numbers
PRODUCTS = {
    "nt": ((32, 48), (16, 48), (((1,), (1,)), ((), ()))),
    "dense_layer": ((2, 5, 48), (48, 32), (((2,), (0,)), ((), ()))),
    "two_contracting": ((8, 3, 16), (3, 16, 32), (((1, 2), (0, 1)), ((), ()))),
    "two_in_other_order": ((8, 3, 16), (16, 3, 32), (((2, 1), (0, 1)), ((), ()))),
    "heads": ((4, 32), (32, 2, 8), (((1,), (0,)), ((), ()))),
    "batch": ((3, 16, 32), (3, 32, 16), (((2,), (1,)), ((0,), (0,)))),
    "batch_inside": ((16, 3, 32), (32, 16, 3), (((2,), (0,)), ((1,), (2,)))),
    "two_batch": ((2, 3, 16, 32), (3, 2, 16, 32), (((3,), (3,)), ((0, 1), (1, 0)))),
    "vector": ((48,), (48, 16), (((0,), (0,)), ((), ()))),
}


def representable(shape, seed):
    """Numbers that NVFP4 holds exactly, since every block has a 6."""
    values = np.random.default_rng(seed).choice([6.0, -6.0, 3.0, -1.5, 0.0], shape, p=[0.4, 0.4, 0.1, 0.05, 0.05])
    return jnp.asarray(values, jnp.float32)


def by_product(f, *operands):
    """f of both operands and the dimension numbers of each product, all in one program."""
    return jax.jit(lambda *v: {name: f(*(a[name] for a in v), PRODUCTS[name][2]) for name in PRODUCTS})(*operands)


def operands_of_products(make):
    return [{name: make(product[i], i + 1) for name, product in PRODUCTS.items()} for i in range(2)]


def test_dot_general_is_that_of_lax_on_representable_numbers(native):
    operands = operands_of_products(representable)
    want = by_product(partial(jax.lax.dot_general, precision="highest"), *operands)
    for name, got in by_product(dot_general, *operands).items():
        assert (got.shape, got.dtype) == (want[name].shape, want[name].dtype), name
        np.testing.assert_allclose(got, want[name], rtol=1e-5, err_msg=name)


def cosine(a, b):
    a, b = (np.asarray(v, np.float64).ravel() for v in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_dot_general_has_gradients_of_the_operands_shapes():
    def gradients(product):
        def both(a, b, dims):
            return jax.grad(lambda a, b: jnp.sum(product(a, b, dims).astype(jnp.float32)), (0, 1))(a, b)

        return by_product(both, *operands_of_products(normal))

    grads, want = gradients(dot_general), gradients(jax.lax.dot_general)
    for name, product in PRODUCTS.items():
        assert [g.shape for g in grads[name]] == [*product[:2]], name
        assert all(cosine(g, w) > 0.98 for g, w in zip(grads[name], want[name], strict=True)), name


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "bf16")])
def test_preferred_element_type(dtypes, preferred):
    lhs, rhs = (normal((16, 32), i, d) for i, d in enumerate(dtypes))
    dims = (((1,), (1,)), ((), ()))
    got = dot_general(lhs, rhs, dims, preferred_element_type=preferred)
    assert got.dtype == (preferred or jax.lax.dot_general(lhs, rhs, dims).dtype)
    assert_bitwise(got, matmul_nt(quantize(lhs), quantize(rhs, NVFP4_2D), out_dtype=got.dtype))
    assert_bitwise(einsum("mk,nk->mn", lhs, rhs, preferred_element_type=preferred), got)


NN = (((1,), (0,)), ((), ()))
DRAWS_ROWS = Recipe((NVFP4_SR, NVFP4_SR), (NVFP4_SR, NVFP4), (NVFP4, NVFP4))
DRAWS_COLUMNS = Recipe((NVFP4, NVFP4), (NVFP4, NVFP4_SR), (NVFP4, NVFP4_SR))


@pytest.mark.parametrize("recipe", [SR, DRAWS_ROWS, DRAWS_COLUMNS], ids=["pretrain", "rows", "columns"])
def test_a_product_in_flax_order_has_the_bits_of_linear(recipe):
    """Where w is rounded stochastically, of w transposed."""
    of_dot_general = lambda x, w: dot_general(x, w, NN, recipe=recipe, key=KEY)  # noqa: E731
    of_linear = lambda x, w: linear(x, w.T, recipe, key=KEY)  # noqa: E731
    assert_same_passes(of_dot_general, of_linear, normal((16, 64), 1), normal((64, 48), 2))


# ---------------------------------------------------------------- DotGeneral
def test_a_dot_general_compares_by_value():
    assert DotGeneral(recipes.pretrain()) == DotGeneral(recipes.pretrain())
    assert len({DotGeneral(recipes.pretrain()), DotGeneral(recipes.pretrain()), DotGeneral()}) == 2
    with pytest.raises(AttributeError):
        DotGeneral().recipe = SR


def by_linear(x, w):
    return linear(x, w, SR, key=KEY, w_axes="kn")


def experts_by_linear(x, w):
    """Each with an amax and a key of its own."""
    keys = jax.random.split(KEY, 3)
    return jnp.stack([linear(x[i] * 8**i, w[i], SR, key=keys[i], w_axes="kn") for i in range(3)])


def experts(x, w):
    return DotGeneral(SR)(x * 8 ** jnp.arange(3)[:, None, None], w, (((2,), (1,)), ((0,), (0,))), key=KEY)


AMAXES = jnp.arange(3.0, 9.0).reshape(2, 3)


def examples_by_linear(x, w):
    return jnp.stack([jnp.stack([linear(x[i, j], w[j, i], w_amax=AMAXES[i, j]) for j in range(3)]) for i in range(2)])


LAYERS = {
    "kernel": (lambda x, w: DotGeneral(SR)(x, w, DENSE, key=KEY), by_linear, (2, 24, 64), (64, 48)),
    "attention out": (
        lambda x, w: DotGeneral(SR)(x, w, (((2, 3), (0, 1)), ((), ())), key=KEY),
        lambda x, w: by_linear(x.reshape(2, 24, 64), w.reshape(64, 48)),
        (2, 24, 4, 16),
        (4, 16, 48),
    ),
    "experts": (experts, experts_by_linear, (3, 24, 64), (3, 64, 48)),
    "given amaxes": (
        lambda x, w: dot_general(x, w, PRODUCTS["two_batch"][2], w_amax=AMAXES),
        examples_by_linear,
        *PRODUCTS["two_batch"][:2],
    ),
    "einsum": (
        lambda x, w: einsum("bsd,dhk->bhsk", x, w, recipe=SR, key=KEY),
        lambda x, w: jnp.swapaxes(by_linear(x, w.reshape(64, 48)).reshape(2, 24, 3, 16), 1, 2),
        (2, 24, 64),
        (64, 3, 16),
    ),
}


@pytest.mark.parametrize(("f", "g", "x_shape", "w_shape"), LAYERS.values(), ids=LAYERS)
def test_layers_have_the_bits_of_linear(f, g, x_shape, w_shape):
    assert_same_passes(f, g, normal(x_shape, 1), normal(w_shape, 2))


@pytest.mark.parametrize(("k", "n"), [(64, 10), (50, 48), (3, 1)])
@pytest.mark.parametrize("recipe", [recipes.pretrain(stochastic_rounding=False), recipes.window64(), Recipe()])
def test_sizes_that_are_no_multiples_are_padded_with_zeros(recipe, k, n):
    x, w = normal((2, 24, k), 1), normal((k, n), 2)
    unit = 64 if recipe == recipes.window64() else 16
    more_k, more_n = -k % unit, -n % 16

    def by_hand(x, w):
        x, w = jnp.pad(x, ((0, 0), (0, 0), (0, more_k))), jnp.pad(w, ((0, more_k), (0, more_n)))
        return linear(x, w, recipe, key=KEY, w_axes="kn")[..., :n]

    assert_same_passes(lambda x, w: DotGeneral(recipe)(x, w, DENSE, key=KEY), by_hand, x, w)


def test_a_vector_of_activations_is_padded_and_dot_general_itself_does_not_pad():
    x, w = normal((50,), 1), normal((50, 10), 2)
    assert_bitwise(DotGeneral()(x, w, (((0,), (0,)), ((), ()))), DotGeneral()(x[None], w, (((1,), (0,)), ((), ())))[0])
    with pytest.raises(ValueError, match="dot_general: N must be a multiple of 16"):
        dot_general(normal((2, 16, 64)), normal((64, 10)), DENSE)


def test_arguments_that_flax_passes_are_accepted():
    x, w = normal((2, 16, 64), 1), normal((64, 48), 2)
    want = DotGeneral()(x, w, DENSE)
    assert_bitwise(DotGeneral()(x, w, DENSE, precision=None, out_sharding=None, preferred_element_type=None), want)
    assert DotGeneral()(x, w, DENSE, None, jnp.float32).dtype == jnp.float32
    for precision in ("default", jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT,) * 2):
        assert_bitwise(DotGeneral()(x, w, DENSE, precision=precision, algorithm=None), want)


OTHERS = {
    "precision": ({"precision": "highest"}, "DotGeneral: precision must be None or 'default', got 'highest'"),
    "algorithm": ({"algorithm": 1}, "DotGeneral: algorithm must be None, got 1"),
    "out_sharding": ({"out_sharding": 1}, "TypeError: DotGeneral: out_sharding must be a NamedSharding, a Part"),
}


@pytest.mark.parametrize(("options", "text"), OTHERS.values(), ids=OTHERS)
def test_other_arguments_are_refused(options, text):
    with refused(text):
        DotGeneral()(normal((2, 16, 64)), normal((64, 48)), DENSE, **options)
    with pytest.raises(TypeError, match="DotGeneral: recipe must be a Recipe, got None"):
        DotGeneral(None)


# ---------------------------------------------------------------- no copy of a kernel
KERNELS = {
    "dense": (DENSE, (2, 48, 64), (64, 80)),
    "qkv": (DENSE, (2, 48, 64), (64, 5, 16)),
    "attention out": ((((2, 3), (0, 1)), ((), ())), (2, 48, 4, 16), (4, 16, 80)),
    "experts": ((((2,), (1,)), ((0,), (0,))), (3, 48, 64), (3, 64, 80)),
}


def transposed_copies(text: str, rows: int, columns: int) -> list[str]:
    """Instructions that make a float32 or bfloat16 array of the kernel's transpose, or change its layout."""
    made = re.compile(
        rf"(f32|bf16)\[(\d+,)?{columns},{rows}\]\S* (transpose|copy|fusion)\(|"
        rf"(f32|bf16)\[(\d+,)?{rows},{columns}\]\{{(0,1|1,2,0|0,1,2)\S* (transpose|copy|fusion)\("
    )
    return [line for line in text.splitlines() if made.search(line)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_kernel_is_transposed_in_memory(dtype):
    """Neither the kernels nor their gradients, in the compiled program of both passes."""
    operands = {name: (normal(x, 1), normal(w, 2, dtype)) for name, (_, x, w) in KERNELS.items()}

    def loss(operands):
        of = ((x, w, KERNELS[name][0]) for name, (x, w) in operands.items())
        return sum(jnp.sum(DotGeneral(SR)(x, w, dims, None, jnp.float32, key=KEY)) for x, w, dims in of)

    text = jax.jit(jax.grad(loss)).lower(operands).compile().as_text()
    assert "nvfp4_quantize" in text
    assert [line for shape in ((64, 80), (80, 64)) for line in transposed_copies(text, *shape)] == []


def test_the_search_for_copies_finds_one():
    w = normal((64, 80), 2, "fp32")
    text = jax.jit(lambda w: quantize(w.T).data).lower(w).compile().as_text()
    assert transposed_copies(text, 64, 80)


# ---------------------------------------------------------------- out_sharding
OF_N, OF_TOKENS = P("x", None, "y"), P("x", None, None)
ASKED = [(OF_TOKENS, P(None, "y"), OF_N), (OF_N, P("y", None), OF_TOKENS), (P(None, None, None), P(None, "y"), OF_N)]


@pytest.mark.parametrize(("of_x", "of_w", "wanted"), ASKED, ids=str)
def test_out_sharding_is_honoured(of_x, of_w, wanted):
    mesh = make_mesh(jax.devices("cpu")[:8], kind="explicit")
    x, w = normal((4, 32, 256), 1), normal((256, 128), 2)
    want = both_passes(lambda x, w: DotGeneral()(x, w, DENSE), x, w)

    @jax.jit
    def run(x, w):
        y, pull = jax.vjp(lambda x, w: DotGeneral()(x, w, DENSE, out_sharding=NamedSharding(mesh, wanted)), x, w)
        dy = jax.sharding.reshard(normal(y.shape, 9, "fp32").astype(y.dtype), jax.typeof(y).sharding)
        return y, *pull(dy)

    with jax.set_mesh(mesh):
        got = run(put(x, mesh, of_x), put(w, mesh, of_w))
    assert_sharded(got[0], mesh, wanted)
    for g, v, of in zip(got, want, (wanted, of_x, of_w), strict=True):
        assert_sharded(g, mesh, of)
        np.testing.assert_allclose(np.float32(g), np.float32(v), rtol=0.02, atol=0.3)


def test_a_merged_axis_must_not_be_sharded():
    """But for the first of those that count as one: the array would not be split in its order."""
    mesh = make_mesh(jax.devices("cpu")[:8], kind="explicit")
    x, w = normal((24, 4, 16), 1), normal((4, 16, 48), 2)
    text = "an Explicit mesh may shard only the first of several axes"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=text):
        DotGeneral()(put(x, mesh, P(None, None, "x")), put(w, mesh, P()), (((1, 2), (0, 1)), ((), ())))


def test_einsum_shards_its_result():
    mesh = make_mesh(jax.devices("cpu")[:8], kind="explicit")
    x, w = normal((4, 32, 256), 1), normal((256, 8, 16), 2)
    wanted = P("x", "y", None, None)
    with jax.set_mesh(mesh):
        y = einsum("bsd,dhk->bhsk", put(x, mesh, P("x", None, None)), put(w, mesh, P(None, "y", None)))
        z = einsum("bsd,dhk->bhsk", put(x, mesh, P("x")), put(w, mesh, P()), out_sharding=wanted)
    assert_sharded(y, mesh, wanted)
    assert_sharded(z, mesh, wanted)
    assert_bitwise(y, einsum("bsd,dhk->bhsk", x, w))
    assert_bitwise(z, y)


# ---------------------------------------------------------------- einsum
EINSUMS = {
    "bsd,df->bsf": ((2, 24, 64), (64, 48)),
    "bsd,df->fbs": ((2, 24, 64), (64, 48)),
    "bsd,fd->bsf": ((2, 24, 64), (48, 64)),
    "bsd,dhk->bhsk": ((2, 24, 64), (64, 3, 16)),
    "bshk,hkd->bsd": ((2, 24, 4, 16), (4, 16, 48)),
    "bskh,hkd->sdb": ((2, 24, 16, 4), (4, 16, 48)),
    "ecm,emh->ech": ((3, 24, 64), (3, 64, 48)),
    "ecm,emh->hce": ((3, 24, 64), (3, 64, 48)),
    "bsm,ghm->bsgh": ((2, 24, 64), (3, 16, 64)),
    "...d,df->...f": ((2, 24, 64), (64, 48)),
    "...A,AB->...B": ((2, 24, 64), (64, 48)),
    "...d,...df->...f": ((3, 64), (3, 64, 48)),
    "bsd,df": ((2, 24, 64), (64, 48)),
    "...d,df": ((2, 24, 64), (64, 48)),
    "abk,mkn->nmba": ((2, 24, 64), (3, 64, 16)),
}


def test_an_einsum_is_that_of_numpy():
    operands = {name: [representable(shape, i) for i, shape in enumerate(of)] for name, of in EINSUMS.items()}
    recipe = recipes.inference()
    got = jax.jit(lambda operands: {name: einsum(name, *of, recipe=recipe) for name, of in operands.items()})(operands)
    for name, (x, w) in operands.items():
        np.testing.assert_allclose(got[name], np.einsum(name, x, w), rtol=1e-5, err_msg=name)


def test_the_order_of_the_result_changes_no_bit():
    x, w = normal((2, 24, 64), 1), normal((64, 48), 2)
    orders = [*itertools.permutations("bsf")]
    results = jax.jit(lambda x, w: [einsum(f"bsd,df->{''.join(order)}", x, w) for order in orders])(x, w)
    for order, got in zip(orders, results, strict=True):
        assert_bitwise(got.transpose([order.index(letter) for letter in "bsf"]), einsum("bsd,df->bsf", x, w))


def test_the_axes_of_a_kernel_stay_in_their_order():
    for subscripts, (x, w) in EINSUMS.items():
        (_, contracted), (_, batch) = contraction("einsum", subscripts, len(x), len(w)).dimension_numbers
        assert list(batch) == sorted(batch)
        assert list(contracted) == sorted(contracted)


def test_gradients_of_an_einsum_need_a_key():
    with pytest.raises(ValueError, match="einsum: key must be given, since the recipe rounds stochastically"):
        jax.vjp(partial(einsum, "bsd,df->bsf", recipe=SR), normal((2, 16, 64)), normal((64, 48)))
