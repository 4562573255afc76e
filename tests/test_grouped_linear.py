"""grouped_linear and RaggedDot: each expert is what linear is for its rows, and rows of no group change nothing."""

import functools
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, equations, key_of_operand, primitives, refused
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, make_mesh, put, run
from operands import near_tie, normal
from test_grouped import BOUNDARIES, ends_of, int32

import jnvfp4
from jnvfp4 import NVFP4Tensor, RaggedDot, Recipe, grouped_linear, quantize, recipes
from jnvfp4._layers.keys import fold_path
from jnvfp4._primitives._groups import rows_of
from jnvfp4._primitives.grouped_contract import grouped_contract_p
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_SR, four_over_six

M, N, K, G = 80, 48, 64, 5
SIZES = (0, 1, 15, 16, 17)
KEY = jax.random.key(3)
PLAIN = Recipe((NVFP4, NVFP4), (NVFP4, NVFP4), (NVFP4, NVFP4))
# The transpose of the tile in W has another scale than the tile, whose two errors are close: see operands.near_tie.
TILES_OF_4OVER6 = four_over_six("mse", block_rows=16)
RECIPES = {
    "default": recipes.DEFAULT,
    "pretrain": recipes.pretrain(),
    "plain": PLAIN,
    "rows": recipes.row_scaled(),
    "4over6": recipes.four_over_six(),
    "tiles of 4over6": Recipe((NVFP4, TILES_OF_4OVER6), (NVFP4, TILES_OF_4OVER6), None),
    "two e4m3_max": Recipe((NVFP4, four_over_six(e4m3_max=256)), (four_over_six(e4m3_max=256), NVFP4), None),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "requantized dx alone": Recipe((NVFP4, NVFP4), (NVFP4, NVFP4), None, requantize=True),
    "requantized dw alone": Recipe((NVFP4, NVFP4), None, (NVFP4, NVFP4), requantize=True),
    "requantized": recipes.pretrain_4over6(requantize=True),
    "high precision": recipes.pretrain(backward="high_precision"),
    "weight only": recipes.inference(weight_only=True),
    "nothing": Recipe(None, None, None),
    "stochastic": Recipe((NVFP4_SR, NVFP4_SR), (NVFP4_SR, NVFP4_SR), (NVFP4_SR, NVFP4_SR)),
}


X, W, DY = normal((M, K), 1), normal((G, N, K), 2).at[3].set(0).at[3, :16, :16].set(near_tie()), normal((M, N), 3)


def with_gradients(f, *arguments, dy=DY):
    def both(dy, *arguments):
        y, pull = jax.vjp(f, *arguments)
        return y, *pull(dy.astype(y.dtype))

    return jax.jit(both)(dy, *arguments)


def dense(x, w, sizes):
    """The same in float32, by a loop over groups."""
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    parts = [jnp.dot(x[i:j], w[g].T, precision="highest") for g, (i, j) in enumerate(ends_of(sizes, len(x)))]
    held = sum(map(len, parts))
    return jnp.concatenate([*parts, jnp.zeros((len(x) - held, w.shape[1]))])


def relative_error(got, want) -> float:
    got, want = (np.asarray(v, np.float32) for v in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


# ---------------------------------------------------------------- values and gradients
class Case(NamedTuple):
    """A recipe by its name, and the other arguments that a value or a gradient depends on."""

    recipe: str
    x: str = "bfloat16"
    out: str | None = None
    w_axes: str = "nk"


CASES = [
    Case("default", out="float32"),
    Case("pretrain", x="float32", w_axes="kn"),
    Case("plain", x="float16", out="bfloat16"),
    Case("rows", w_axes="kn"),
    Case("4over6", out="float16"),
    Case("tiles of 4over6"),
    Case("two e4m3_max"),
    Case("requantized"),
    Case("requantized", w_axes="kn"),
    Case("dequantized", x="float32", out="bfloat16"),
    Case("dequantized", out="float32", w_axes="kn"),
    Case("high precision", out="float32"),
    Case("weight only", x="float16"),
    Case("nothing", x="float32", w_axes="kn"),
    Case("stochastic"),
    Case("stochastic", w_axes="kn"),
]


def operands_of(case: Case):
    w = W.astype(jnp.float32)
    return X.astype(case.x), w if case.w_axes == "nk" else w.mT


@functools.cache
def results_of_cases(platform: str):
    """The results and gradients of every case on a platform, in one program, since it costs little more than two."""

    def one(case, x, stored):
        f = partial(grouped_linear, group_sizes=int32(SIZES), recipe=RECIPES[case.recipe], key=KEY)
        return with_gradients(partial(f, out_dtype=case.out, w_axes=case.w_axes), x, stored)

    every = jax.jit(lambda operands: [one(case, *of_case) for case, of_case in zip(CASES, operands, strict=True)])
    return every([operands_of(case) for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_products_and_gradients_are_those_of_the_documented_operands(native, case):
    """Products of quantized operands have the bits of ``grouped_matmul_nt``; sums in high precision have an order."""
    recipe, sizes = RECIPES[case.recipe], SIZES
    y, dx, dw = results_of_cases(native.platform)[CASES.index(case)]
    (x, stored), w = operands_of(case), W.astype(jnp.float32)
    assert (y.dtype, dx.dtype, dw.dtype) == (case.out or case.x, case.x, jnp.float32)

    held = (jnp.arange(M) < sum(sizes))[:, None]
    x, dy = jnp.where(held, x, 0), jnp.where(held, DY.astype(y.dtype), 0)
    of_w = jax.random.fold_in(KEY, 1)
    experts = jax.vmap(lambda g, w: key_of_operand(of_w, g, w))(jnp.arange(G), stored)

    def weights(spec, along):
        one = lambda w, key: quantize(w, spec, key=key, transpose=along != case.w_axes[1])  # noqa: E731
        if along == "n" and recipe.requantize:
            return jax.vmap(partial(quantize, spec=spec, transpose=True))(jnvfp4.dequantize(qw, stored.dtype))
        return jax.vmap(one)(stored, experts)

    def multiplied(a, b, want):
        """Checks a product by its bits if its operands are quantized, else within the last places."""
        dtype = want.dtype
        if isinstance(b, NVFP4Tensor):
            return assert_bitwise(want, jnvfp4.grouped_matmul_nt(a, b, int32(sizes), out_dtype=dtype))
        assert relative_error(want, dense(a, b, sizes)) < (1e-5 if dtype == jnp.float32 else 0.005)
        return None

    qw = None if recipe.fprop is None else weights(recipe.fprop.w, "k")
    qx = quantize(x, recipe.fprop.x, key=key_of_operand(KEY, 0, x)) if recipe.fprop and recipe.fprop.x else x
    multiplied(qx, w if qw is None else qw, y)
    if recipe.dgrad_specs:
        multiplied(quantize(dy, recipe.dgrad.dy, key=key_of_operand(KEY, 2, dy)), weights(recipe.dgrad.w, "n"), dx)
    else:
        multiplied(dy, (w if recipe.dgrad is None else jnvfp4.dequantize(qw, dy.dtype)).mT, dx)
    of_x = jnvfp4.dequantize(qx, dy.dtype) if recipe.wgrad == "dequantized" and isinstance(qx, NVFP4Tensor) else x
    of_dy, of_x = (np.asarray(v, np.float64) for v in (dy, of_x))
    want = np.stack([of_dy[i:j].T @ of_x[i:j] for i, j in ends_of(sizes, M)])
    assert relative_error(dw if case.w_axes == "nk" else dw.mT, want) < 1e-5


def test_rows_that_no_group_holds_change_nothing(cpu):
    """By three recipes in one program."""

    @jax.jit
    def passes(x, dy):
        sizes = int32((16, 0, 16, 0, 16))
        of = {name: partial(grouped_linear, group_sizes=sizes, recipe=RECIPES[name], key=KEY) for name in names}
        return {name: with_gradients(f, x, W, dy=dy) for name, f in of.items()}

    names = "default", "plain", "pretrain"
    want, got = passes(X.at[48:].set(0), DY.at[48:].set(0)), passes(X.at[48:].set(jnp.nan), DY.at[48:].set(1e30))
    assert_same_tensor(got, want)
    for y, dx, _ in got.values():
        assert not np.asarray(y[48:]).any()
        assert not np.asarray(dx[48:]).any()


def test_dx_reads_the_tiles_of_the_forward_product(cpu):
    """The weights are quantized once, and their transpose has the bytes that a quantizer would give."""
    f = partial(grouped_linear, group_sizes=int32(SIZES), recipe=recipes.DEFAULT)
    names = primitives(jax.make_jaxpr(partial(with_gradients, f))(X, W).jaxpr)
    assert (names.count("nvfp4_transpose"), names.count("nvfp4_grouped_matmul")) == (1, 2)
    assert names.count("nvfp4_quantize_pair") == 0


@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_products_forward_and_backward_have_the_order_that_is_asked_for(accumulation):
    f = partial(grouped_linear, group_sizes=int32(SIZES), recipe=recipes.DEFAULT, accumulation=accumulation)
    text = str(jax.make_jaxpr(partial(with_gradients, f))(X, W))
    assert re.findall(r"ProductParams\([^|]*?accumulation='(\w+)'", text) == [accumulation] * 2


@pytest.mark.parametrize("implementation", [None, "native", "reference", "cpu_nvfp4_blocks"])
def test_the_implementation_is_that_of_every_quantizer_and_product(implementation):
    """A kernel is named for the forward product alone."""
    options = {"group_sizes": int32(SIZES), "key": KEY, "implementation": implementation}
    others = None if implementation == "cpu_nvfp4_blocks" else implementation
    for recipe in ("pretrain", "dequantized"):
        f = partial(grouped_linear, recipe=RECIPES[recipe], **options)
        jaxpr = jax.make_jaxpr(partial(with_gradients, f))(X, W).jaxpr
        found = [(eqn.primitive.name, eqn.params) for eqn in equations(jaxpr)]
        products = [of["implementation"] for name, of in found if name == "nvfp4_grouped_matmul"]
        assert products == [implementation, others][: 1 + (recipe == "pretrain")]
        made = {of["implementation"] for name, of in found if re.match("nvfp4_(de)?quantize|nvfp4_transpose", name)}
        assert made == {others}


def test_nothing_is_given_to_ragged_dot():
    """XLA would expand it, or give it to cuDNN."""
    for recipe in RECIPES.values():
        f = partial(grouped_linear, group_sizes=int32(SIZES), recipe=recipe, key=KEY)
        assert "ragged" not in str(jax.make_jaxpr(partial(with_gradients, f))(X, W))


def test_weights_that_are_quantized_already(cpu):
    """With any N, also where the recipe would make tiles of 16 x 16."""
    experts = jax.vmap(quantize)(W[:, :40])
    f = lambda x: grouped_linear(x, experts, int32(SIZES), Recipe((NVFP4, NVFP4_2D), None, None))  # noqa: E731
    y, dx = with_gradients(f, X, dy=DY[:, :40])
    x = jnp.where(jnp.arange(M)[:, None] < sum(SIZES), X, 0)
    assert_bitwise(y, jnvfp4.grouped_matmul_nt(quantize(x), experts, int32(SIZES)))
    assert dx.dtype == X.dtype
    assert relative_error(dx, dense(DY[:, :40], jnvfp4.dequantize(experts).mT, SIZES)) < 0.01


def test_dw_where_every_group_has_a_part_that_is_not_whole(cpu):
    """There are as many parts as shapes allow."""
    sizes, rows = (17, 17), 34
    f = lambda x, w: grouped_linear(x, w, int32(sizes), Recipe(None, None, None))  # noqa: E731
    dw = with_gradients(f, X[:rows], W[:2], dy=DY[:rows])[2]
    x, dy = (np.asarray(v[:rows], np.float64) for v in (X, DY))
    assert relative_error(dw, np.stack([dy[i:j].T @ x[i:j] for i, j in ends_of(sizes, rows)])) < 0.005


def test_without_rows_the_gradient_of_w_is_zero(cpu):
    f = lambda x, w: grouped_linear(x, w, int32(SIZES))  # noqa: E731
    y, dx, dw = with_gradients(f, X[:0], W, dy=DY[:0])
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert_bitwise(dw, np.zeros(W.shape, jnp.bfloat16))


# ---------------------------------------------------------------- transformations
def test_vmap_is_a_loop(cpu):
    x, dy = jnp.stack([X, X[::-1], 2 * X]), jnp.stack([DY, DY[::-1], -DY])
    sizes = jnp.stack([int32(s) for s in list(BOUNDARIES.values())[:3]])
    f = jax.jit(lambda x, s, dy: with_gradients(lambda x, w: grouped_linear(x, w, s), x, W, dy=dy))
    got = jax.vmap(f)(x, sizes, dy)
    for i in range(3):
        assert_same_tensor(jax.tree.map(lambda v, i=i: v[i], got), f(x[i], sizes[i], dy[i]))


def test_a_checkpointed_layer_has_the_same_bits(cpu):
    f = lambda x, w: grouped_linear(x, w, int32(SIZES))  # noqa: E731
    policies = jnvfp4.remat.save_packed, None
    every = [f, *(jax.checkpoint(f, policy=policy) for policy in policies)]
    want, *got = jax.jit(lambda x, w: [with_gradients(g, x, w) for g in every])(X, W)
    assert_same_tensor(got, [want] * 2)


class Layout(NamedTuple):
    """How operands are split, and whether no sum but that of dw, over tokens, depends on it."""

    x: P
    w: P
    same_bits: bool
    sizes: P = P()


LAYOUTS = {
    "experts and their sizes": Layout(P(), P("y", None, None), True, P("y")),
    "tokens and sizes": Layout(P("x", None), P("y", None, None), True, P(("x", "y"))),
    "tokens and experts over one axis": Layout(P(("x", "y"), None), P(("x", "y"), None, None), True),
    "tokens and columns": Layout(P("x", None), P(None, "y", None), False),
    "K": Layout(P(None, "y"), P(None, None, "y"), False),
}


@partial(jax.jit, static_argnums=4)
def step(x, w, sizes, dy, recipe):
    f = lambda x, w: grouped_linear(x, w, sizes, RECIPES[recipe], key=KEY)  # noqa: E731
    return with_gradients(f, x, w, dy=dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("recipe", ["default", "pretrain", "dequantized", "stochastic"])
def test_sharded_equals_unsharded(cpu, recipe, layout, kind):
    """But for the order of sums over devices."""
    rows, groups = 256, 8
    x, w, dy = normal((rows, 128)), normal((groups, 128, 128), 1), normal((rows, 128), 2)
    sizes = int32((32, 0, 48, 16, 16, 64, 0, 32))

    want = step(x, w, sizes, dy, recipe)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(KINDS[kind],) * 2, devices=jax.devices("cpu")[:8])
    of_dy = P(layout.x[0] if len(layout.x) else None, layout.w[1])
    specs = (layout.x, layout.w, layout.sizes, of_dy)
    placed = [put(v, mesh, s) for v, s in zip((x, w, sizes, dy), specs, strict=True)]
    with jax.set_mesh(mesh):
        got = step(*placed, recipe)
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 0.003
    if layout.same_bits:
        assert_same_tensor(got[:2], want[:2])
    elif layout is LAYOUTS["tokens and columns"]:  # only dx is summed over columns
        assert_bitwise(got[0], want[0])


def test_products_in_high_precision_over_k_are_rounded_once(cpu):
    x, w = (jnp.round(32 * v) for v in (normal((M, 128), 1), normal((G, 16, 128), 2)))  # exact sums
    f, mesh = jax.jit(partial(grouped_linear, recipe=RECIPES["nothing"])), make_mesh(jax.devices("cpu")[:8], "x")
    got = f(put(x, mesh, P(None, "x")), put(w, mesh, P(None, None, "x")), int32(SIZES))
    assert_bitwise(got, f(x, w, int32(SIZES)))


@pytest.mark.parametrize(
    ("kind", "of_operands", "of_y", "collectives"),
    [
        ("auto", P("x"), P(None, "x"), {"reduce-scatter"}),
        ("auto", P(), P("x"), set()),
        ("explicit", P(None, "x"), P(None, "x"), {"all-gather"}),
    ],
    ids=["rows", "experts", "columns of both"],
)
def test_the_gradient_of_weights_is_made_where_it_is_wanted(cpu, kind, of_operands, of_y, collectives):
    a, b = jnp.round(normal((64, 16)) * 4), jnp.round(normal((64, 20 if kind == "auto" else 24), 1) * 4)  # exact sums
    rows = rows_of(int32((20, 0, 12, 8, 0, 1, 2, 16)), len(a))
    contract = lambda a, b: grouped_contract_p.bind(a, b, *rows, params=None, implementation=None)[0]  # noqa: E731
    want, mesh = contract(a, b), make_mesh(jax.devices("cpu")[:8], "x", kind)
    with jax.set_mesh(mesh):
        contract = jax.jit(contract, out_shardings=NamedSharding(mesh, of_y))
        got, found = run(contract, *(put(v, mesh, of_operands) for v in (a, b)))
    assert {op for op, _ in found} == collectives
    assert_bitwise(got, want)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["default", "dequantized", "stochastic", "nothing"])
def test_vmap_over_split_examples(cpu, recipe, kind):
    x, dy = jnp.stack([X, X[::-1]]), jnp.stack([DY, -DY])
    sizes = jnp.stack([int32(SIZES), int32(SIZES[::-1])])

    def step(x, w, sizes, dy):
        one = partial(grouped_linear, recipe=RECIPES[recipe], key=KEY)
        return with_gradients(lambda x, w: jax.vmap(one, (0, None, 0))(x, w, sizes), x, w, dy=dy)

    want = jax.jit(step)(x, W, sizes, dy)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(KINDS[kind],), devices=jax.devices("cpu")[:2])
    of = (x, P("x")), (W, P()), (sizes, P("x")), (dy, P("x"))
    placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in of]
    with jax.set_mesh(mesh):
        got = jax.jit(step)(*placed)
    assert_same_tensor(got[:2], want[:2])
    assert relative_error(got[2], want[2]) < 0.003


# ---------------------------------------------------------------- RaggedDot
@pytest.mark.parametrize(("dtype", "frozen"), [(None, False), ("float32", True)])
def test_ragged_dot_is_grouped_linear(cpu, dtype, frozen):
    w, w_axes = (jax.vmap(quantize)(W), "nk") if frozen else (W.mT, "kn")
    f = lambda x, w=w: RaggedDot()(x, w, int32(SIZES), preferred_element_type=dtype)  # noqa: E731
    g = lambda x, w=w: grouped_linear(x, w, int32(SIZES), out_dtype=dtype, w_axes=w_axes)  # noqa: E731
    operands = (X,) if frozen else (X, w)
    got = with_gradients(f, *operands)
    assert_same_tensor(got, with_gradients(g, *operands))
    assert got[0].dtype == (dtype or X.dtype)
    assert jax.eval_shape(f, X, W.mT.astype(jnp.float32)).dtype == jnp.float32  # as of lax.ragged_dot


def test_ragged_dot_in_high_precision_is_that_of_lax(cpu):
    x, w = X.astype(jnp.float32), W.mT.astype(jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def passes(product, sizes):
        return with_gradients(lambda x, w: product(x, w, sizes), x, w)

    for sizes in BOUNDARIES.values():
        clamped = int32([end - begin for begin, end in ends_of(sizes, M)])
        got, want = passes(RaggedDot(Recipe(None, None, None)), int32(sizes)), passes(jax.lax.ragged_dot, clamped)
        for value, reference in zip(got, want, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)


def test_ragged_dot_adds_zeros(cpu):
    """What they add is in no amax and in no sum."""
    x, w = X[:, :50], W.mT[:, :50, :41]
    y, dx, dw = with_gradients(lambda x, w: RaggedDot()(x, w, int32(SIZES)), x, w, dy=DY[:, :41])
    assert (y.shape, dx.shape, dw.shape) == ((M, 41), (M, 50), (G, 50, 41))
    padded = (jnp.pad(x, ((0, 0), (0, 14))), jnp.pad(w, ((0, 0), (0, 14), (0, 7))))
    assert_bitwise(y, grouped_linear(*padded, int32(SIZES), w_axes="kn")[:, :41])


def test_ragged_dot_may_add_zeros_that_a_recipe_does_not_need(cpu):
    recipe, w = recipes.inference(), W.mT[:, :, :41]
    assert_bitwise(*(RaggedDot(recipe, pad=pad)(X, w, int32(SIZES)) for pad in (False, True)))
    jaxpr = jax.make_jaxpr(lambda x, w: RaggedDot(recipe, pad=True)(x, w, int32(SIZES)))(X, w)
    assert f"bf16[{M},48] = nvfp4_grouped_matmul[" in str(jaxpr)


def test_ragged_dot_takes_its_key_from_the_step(cpu):
    recipe = Recipe((NVFP4_SR, NVFP4), None, None)
    layer = RaggedDot(recipe, path="moe/up")
    with jnvfp4.step_key(KEY):
        got = layer(X, W.mT, int32(SIZES))
        RaggedDot(Recipe(wgrad=(NVFP4_SR, NVFP4)))(X, W.mT, int32(SIZES))  # dw is not quantized, so needs no key
    assert_bitwise(got, layer(X, W.mT, int32(SIZES), key=fold_path(KEY, "moe/up")))
    with pytest.raises(ValueError, match=r"^RaggedDot: key must be given"):
        RaggedDot(recipe)(X, W.mT, int32(SIZES))


def ragged(w=W.mT, **options):
    return RaggedDot()(X, w, int32(SIZES), **options)


RAGGED = {
    "precision": (lambda: ragged(precision="highest"), "RaggedDot: precision must be None"),
    "group_offset": (lambda: ragged(group_offset=1), "RaggedDot: group_offset must be None"),
    "K": (lambda: ragged(W), "RaggedDot: the last axis of x and axis 1 of w"),
    "rank": (lambda: ragged(W[0]), r"RaggedDot: w must have rank 3, \[G, K, N\]"),
}


@pytest.mark.parametrize(("make", "text"), RAGGED.values(), ids=RAGGED)
def test_ragged_dot_refuses(make, text):
    with refused(text):
        make()


def test_ragged_dot_compares_by_value():
    assert RaggedDot() == RaggedDot(recipes.DEFAULT)
    assert hash(RaggedDot(path="a")) == hash(RaggedDot(path="a"))
