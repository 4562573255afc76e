"""``DotGeneral`` and ``einsum``: every product has the bits of ``linear``, and kernels are not transposed in memory."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put
from operands import normal

import jnvfp4
from jnvfp4 import NVFP4_SR, DotGeneral, Recipe, einsum, linear, recipes
from jnvfp4._layers.einsum import contraction

SR = recipes.pretrain()
KEY = jax.random.key(3)
DENSE = (((2,), (0,)), ((), ()))  # x [B, S, K] by a kernel [K, N]


@pytest.fixture(autouse=True)
def cpu():
    """Where the pinned order along K makes every product bitwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def both_passes(f, *operands):
    y, pull = jax.vjp(f, *operands)
    return y, *pull(normal(y.shape, 9, "fp32").astype(y.dtype))


def assert_same_passes(f, g, *operands):
    for name, got, want in zip(("y", "x", "w"), both_passes(f, *operands), both_passes(g, *operands), strict=True):
        assert_bitwise(got, want, name)


# ---------------------------------------------------------------- DotGeneral
def test_it_is_a_value():
    assert DotGeneral(recipes.pretrain()) == DotGeneral(recipes.pretrain())
    assert len({DotGeneral(recipes.pretrain()), DotGeneral(recipes.pretrain()), DotGeneral()}) == 2
    with pytest.raises(AttributeError):
        DotGeneral().recipe = SR


def test_a_kernel_has_the_bits_of_linear():
    x, w = normal((2, 24, 64), 1), normal((64, 48), 2)
    assert_same_passes(
        lambda x, w: DotGeneral(SR)(x, w, DENSE, key=KEY), lambda x, w: linear(x, w, SR, key=KEY, w_axes="kn"), x, w
    )


def test_several_contracting_axes_count_as_one():
    """As in the output projection of attention: heads x head_dim."""
    x, w = normal((2, 24, 4, 16), 1), normal((4, 16, 48), 2)
    assert_same_passes(
        lambda x, w: DotGeneral(SR)(x, w, (((2, 3), (0, 1)), ((), ())), key=KEY),
        lambda x, w: linear(x.reshape(2, 24, 64), w.reshape(64, 48), SR, key=KEY, w_axes="kn"),
        x,
        w,
    )


def test_batch_axes_have_an_amax_and_a_key_each():
    x, w = normal((3, 24, 64), 1) * jnp.array([1, 8, 64], jnp.bfloat16)[:, None, None], normal((3, 64, 48), 2)

    def by_hand(x, w):
        keys = jax.random.split(KEY, 3)
        return jnp.stack([linear(x[i], w[i], SR, key=keys[i], w_axes="kn") for i in range(3)])

    assert_same_passes(lambda x, w: DotGeneral(SR)(x, w, (((2,), (1,)), ((0,), (0,))), key=KEY), by_hand, x, w)


@pytest.mark.parametrize(("k", "n"), [(64, 10), (50, 48), (3, 1)])
@pytest.mark.parametrize("recipe", [recipes.pretrain(stochastic_rounding=False), recipes.window64(), Recipe()])
def test_what_does_not_fit_is_padded_with_zeros(recipe, k, n):
    x, w = normal((2, 24, k), 1), normal((k, n), 2)
    unit = 64 if recipe == recipes.window64() else 16
    more_k, more_n = -k % unit, -n % 16

    def by_hand(x, w):
        x, w = jnp.pad(x, ((0, 0), (0, 0), (0, more_k))), jnp.pad(w, ((0, more_k), (0, more_n)))
        return linear(x, w, recipe, key=KEY, w_axes="kn")[..., :n]

    assert_same_passes(lambda x, w: DotGeneral(recipe)(x, w, DENSE, key=KEY), by_hand, x, w)


def test_a_vector_of_activations_is_padded():
    x, w = normal((50,), 1), normal((50, 10), 2)
    assert_bitwise(DotGeneral()(x, w, (((0,), (0,)), ((), ()))), DotGeneral()(x[None], w, (((1,), (0,)), ((), ())))[0])


def test_dot_general_itself_does_not_pad():
    with pytest.raises(ValueError, match="dot_general: N must be a multiple of 16"):
        jnvfp4.dot_general(normal((2, 16, 64)), normal((64, 10)), DENSE)


def test_it_takes_what_flax_passes():
    x, w = normal((2, 16, 64), 1), normal((64, 48), 2)
    want = DotGeneral()(x, w, DENSE)
    assert_bitwise(DotGeneral()(x, w, DENSE, precision=None, out_sharding=None, preferred_element_type=None), want)
    assert DotGeneral()(x, w, DENSE, None, jnp.float32).dtype == jnp.float32
    assert DotGeneral()(x, w, DENSE, precision=jax.lax.Precision.DEFAULT, algorithm=None).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"precision": "highest"}, ValueError, "DotGeneral: precision must be None or 'default', got 'highest'"),
        ({"algorithm": 1}, ValueError, "DotGeneral: algorithm must be None, got 1"),
        ({"out_sharding": 1}, TypeError, "DotGeneral: out_sharding must be a NamedSharding, a PartitionSpec or None"),
    ],
)
def test_other_arguments_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        DotGeneral()(normal((2, 16, 64)), normal((64, 48)), DENSE, **options)
    with pytest.raises(TypeError, match="DotGeneral: recipe must be a Recipe, got None"):
        DotGeneral(None)


# ---------------------------------------------------------------- no copy of a kernel
KERNELS = {
    "dense": (DENSE, (2, 48, 64), (64, 80), (64, 80)),
    "qkv": (DENSE, (2, 48, 64), (64, 5, 16), (64, 80)),
    "attention out": ((((2, 3), (0, 1)), ((), ())), (2, 48, 4, 16), (4, 16, 80), (64, 80)),
    "experts": ((((2,), (1,)), ((0,), (0,))), (3, 48, 64), (3, 64, 80), (3, 64, 80)),
    "out first": ((((2,), (1,)), ((), ())), (2, 48, 64), (80, 64), (80, 64)),
}


def transposed_copies(text: str, rows: int, columns: int) -> list[str]:
    """Instructions that make a float32 or bfloat16 array of the kernel's transpose, or change its layout."""
    made = re.compile(
        rf"(f32|bf16)\[(\d+,)?{columns},{rows}\]\S* (transpose|copy|fusion)\(|"
        rf"(f32|bf16)\[(\d+,)?{rows},{columns}\]\{{(0,1|1,2,0|0,1,2)\S* (transpose|copy|fusion)\("
    )
    return [line for line in text.splitlines() if made.search(line)]


@pytest.mark.parametrize(("dims", "x_shape", "w_shape", "matrix"), KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_kernel_is_transposed_in_memory(dims, x_shape, w_shape, matrix, dtype):
    """Neither the kernel nor its gradient, in the compiled program of both passes."""
    x, w = normal(x_shape, 1), normal(w_shape, 2, dtype)
    loss = lambda x, w: jnp.sum(DotGeneral(SR)(x, w, dims, None, jnp.float32, key=KEY))  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert "nvfp4_quantize" in text
    assert transposed_copies(text, *matrix[-2:]) == []


def test_the_search_for_copies_finds_one():
    w = normal((64, 80), 2, "fp32")
    text = jax.jit(lambda w: jnvfp4.quantize(w.T).data).lower(w).compile().as_text()
    assert transposed_copies(text, 64, 80)


# ---------------------------------------------------------------- out_sharding
@pytest.mark.parametrize(
    ("of_x", "of_w", "wanted"),
    [
        (P("x", None, None), P(None, "y"), P("x", None, "y")),
        (P("x", None, None), P(None, "y"), P("x", None, None)),
        (P("x", None, "y"), P("y", None), P("x", None, None)),
        (P("x", None, "y"), P("y", None), P("x", None, "y")),
        (P(None, None, None), P(None, "y"), P("x", None, "y")),
    ],
    ids=str,
)
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
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="of axes that count as one, only the first may be sharded on"),
    ):
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
    "abk,mkn->nmba": ((2, 24, 64), (3, 64, 16)),
}


@pytest.mark.parametrize(("subscripts", "shapes"), EINSUMS.items(), ids=EINSUMS)
def test_an_einsum_is_that_of_numpy(subscripts, shapes):
    """Operands of few bits, whose products have no rounding error."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.choice([-1.0, 0.5, 2.0], shape), jnp.bfloat16) for shape in shapes)
    recipe = recipes.inference()
    amax = [v.at[(0,) * v.ndim].set(3.0) for v in (x, w)]  # values that NVFP4 holds exactly
    got = einsum(subscripts, *amax, recipe=recipe, preferred_element_type=jnp.float32)
    want = np.einsum(subscripts, *(np.asarray(v, np.float32) for v in amax))
    np.testing.assert_allclose(np.asarray(got), want, rtol=0.1, atol=2.0)
    exact = jnp.einsum(subscripts, *amax, preferred_element_type=jnp.float32)
    assert (got.shape, got.dtype) == (exact.shape, exact.dtype)


def test_an_einsum_has_the_bits_of_linear():
    x, w = normal((2, 24, 64), 1), normal((64, 3, 16), 2)
    assert_same_passes(
        lambda x, w: einsum("bsd,dhk->bhsk", x, w, recipe=SR, key=KEY),
        lambda x, w: jnp.swapaxes(linear(x, w.reshape(64, 48), SR, key=KEY, w_axes="kn").reshape(2, 24, 3, 16), 1, 2),
        x,
        w,
    )


def test_the_order_of_the_result_changes_no_bit():
    x, w = normal((2, 24, 64), 1), normal((64, 48), 2)
    want = einsum("bsd,df->bsf", x, w)
    for order in itertools.permutations("bsf"):
        got = einsum(f"bsd,df->{''.join(order)}", x, w)
        assert_bitwise(got.transpose([order.index(letter) for letter in "bsf"]), want)


def test_the_axes_of_a_kernel_stay_in_their_order():
    for subscripts, (x, w) in EINSUMS.items():
        (_, contracted), (_, batch) = contraction("einsum", subscripts, len(x), len(w)).dimension_numbers
        assert list(batch) == sorted(batch)
        assert list(contracted) == sorted(contracted)


@pytest.mark.parametrize(
    ("subscripts", "match"),
    [
        ("bsd->bs", "subscripts must have two operands, got 1 in 'bsd->bs'"),
        ("bsd,df,fg->bsg", "subscripts must have two operands, got 3"),
        ("bdd,df->bf", "x must have each letter once, got 'd' twice in 'bdd,df->bf'"),
        ("bsd,dd->bs", "w must have each letter once"),
        ("bsd,df->bbf", "the result must have each letter once"),
        ("bsd,df->bf", "a letter of one operand alone must be in the result, got 's'; sum it first"),
        ("bsd,df->bs", "a letter of one operand alone must be in the result, got 'f'"),
        ("bsd,df->bsfq", "the result must have letters of x or w, got 'q'"),
        ("bsd,ef->bsdef", "x and w must share a letter that the result leaves out, got none"),
        ("bd,df->bf", "x must have one axis a letter of 'bd', got 3 axes"),
        ("...sd,...df->...sf", "an ellipsis must stand for the same axes of x and w"),
        ("bs1,1f->bsf", "subscripts must consist of letters, got '1'"),
    ],
)
def test_other_einsums_are_refused(subscripts, match):
    with pytest.raises(ValueError, match=f"^einsum: {match}"):
        einsum(subscripts, normal((2, 16, 64)), normal((64, 48)))


def test_arguments_of_einsum_are_checked():
    x, w = normal((2, 16, 64)), normal((64, 48))
    with pytest.raises(TypeError, match="einsum: subscripts must be a string such as"):
        einsum([0, 1], x, w)
    with pytest.raises(TypeError, match="einsum: w must be an array, got an NVFP4Tensor"):
        einsum("bsd,df->bsf", x, jnvfp4.quantize(w))
    with pytest.raises(ValueError, match="einsum: precision must be None or 'default', got 'highest'"):
        einsum("bsd,df->bsf", x, w, precision="highest")
    with pytest.raises(ValueError, match="einsum: key must be a JAX PRNG key, since the recipe rounds stochastically"):
        einsum("bsd,df->bsf", x, w, recipe=SR)


def test_a_spec_that_draws_for_w_takes_the_order_of_linear():
    recipe = Recipe((NVFP4_SR, NVFP4_SR), None, None)
    x, w = normal((24, 64), 1), normal((64, 48), 2)
    assert_bitwise(einsum("sd,df->sf", x, w, recipe=recipe, key=KEY), linear(x, w.T, recipe, key=KEY))
