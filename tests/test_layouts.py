"""Context, sequence and partly manual parallelism: ``linear`` keeps the axes of x [B, S, K] and moves no activation."""

import math
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    KINDS,
    assert_sharded,
    axes_of,
    every_kind,
    home,
    is_maximum,
    key_for,
    make_mesh,
    put,
    run,
)
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Recipe,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4._ops.quantize import quantize_pair_rows, quantize_rows
from jnvfp4.spec import SUPPORTED_SPECS

B, S, K, N = 8, 256, 256, 128
RECIPES = {
    "pretrain": recipes.pretrain(),
    "pretrain_1d": recipes.pretrain(weight_tiles=False, rht=False, stochastic_rounding=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "high_precision": recipes.pretrain(backward="high_precision"),
    "row_scaled": recipes.row_scaled(),
    "all": recipes.four_over_six("all", e4m3_max=448, stochastic_rounding=False),
    "window64": recipes.window64(),
    "inference": recipes.inference(),
}


def operands():
    return normal((B, S, K), 1, "fp32"), normal((N, K), 2, "fp32"), normal((B, S, N), 3, "fp32")


def three_axes(order=range(8), kind="auto"):
    devices, names = jax.devices("cpu")[:8], ("a", "b", "c")
    grid = np.array([devices[i] for i in order]).reshape(2, 2, 2)
    return jax.sharding.Mesh(grid, names, axis_types=(KINDS[kind],) * 3)


def vjp_of(product, x, w, dy):
    y, pull = jax.vjp(product, x, w)
    return (y, *pull(dy))


def plain(x, w, out_sharding=None):
    return jnp.einsum("bsk,nk->bsn", x, w, out_sharding=out_sharding)


def moved(found) -> Counter:
    """What collectives move, but for amaxes."""
    return Counter(op for op, shape in found if not is_maximum(shape))


# ---------------------------------------------------------------- context and sequence parallelism
@every_kind
def test_context_parallel_moves_what_a_plain_product_moves(devices, kind):
    """No activation is gathered; y and dx have the sharding of x."""
    mesh, layout = make_mesh(devices, kind=kind), P("x", "y")
    x, w, dy = operands()
    args = put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, layout)
    product = partial(linear, recipe=RECIPES["pretrain"], key=KEY)
    (y, dx, dw), found = run(partial(vjp_of, product), *args)
    _, of_plain = run(partial(vjp_of, plain), *args)
    assert set(moved(found)) == set(moved(of_plain)) == {"all-reduce"}
    assert {shape for op, shape in found if not is_maximum(shape)} == {f"f32[{N},{K}]"}
    for value, spec in ((y, layout), (dx, layout), (dw, P())):
        assert_sharded(value, mesh, spec)


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_context_parallel_has_the_bits_of_flattened_tokens(devices, recipe):
    """On one device and on many: fprop and dgrad bit for bit, wgrad up to the order of its sums over devices."""
    x, w, dy = operands()
    product = partial(linear, recipe=RECIPES[recipe], key=KEY)
    flat = [v.reshape(B * S, -1) for v in (x, dy)]
    want = jax.jit(partial(vjp_of, product))(*home(devices, (flat[0], w, flat[1])))
    pinned = {"y": RECIPES[recipe].fprop, "dx": RECIPES[recipe].dgrad, "dw": RECIPES[recipe].wgrad}
    mesh = make_mesh(devices)
    for layout in (None, P("x", "y"), P("y", "x"), P(None, ("x", "y")), P(None, "y", "x")):
        of_dy = None if layout is None else P(*layout[:2])
        args = (
            home(devices, (x, w, dy))
            if layout is None
            else (put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, of_dy))
        )
        got, _ = run(partial(vjp_of, product), *args)
        for (name, pair), value, exact in zip(pinned.items(), got, want, strict=True):
            value, what = np.asarray(value).reshape(exact.shape), f"{name} {layout}"
            np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-3, err_msg=what)
            whole = layout is None or (name == "dx") or (name == "y" and len(layout) == 2)
            if whole and isinstance(pair, tuple) and devices[0].platform == "cpu":
                assert_bitwise(value, exact, what)


def needs_both_axes(mesh):
    if mesh.size < 4:
        pytest.skip(f"needs 4 devices, found {mesh.size}")


@every_kind
def test_a_sum_over_k_is_scattered_over_the_sequence(devices, kind):
    """Sequence parallel, row-parallel weights: half the bytes of the all-reduce of a plain product."""
    mesh = make_mesh(devices, kind=kind)
    needs_both_axes(mesh)
    x, w, _ = operands()
    asked = NamedSharding(mesh, P("x", "y"))

    def f(x, w):
        y = linear(x, w, Recipe())
        return jax.lax.with_sharding_constraint(y, asked) if kind == "auto" else jax.sharding.reshard(y, asked)

    y, found = run(f, put(x, mesh, P("x", None, "y")), put(w, mesh, P(None, "y")))
    assert moved(found) == {"reduce-scatter": 1}
    assert_sharded(y, mesh, P("x", "y"))


def test_sequence_parallel_tokens_are_gathered_packed(devices):
    """Column-parallel weights: y is split along N, so the tokens meet, as bytes."""
    mesh = make_mesh(devices)
    needs_both_axes(mesh)
    x, w, _ = operands()
    f = lambda x, w: jax.lax.with_sharding_constraint(linear(x, w, Recipe()), asked)  # noqa: E731
    asked = NamedSharding(mesh, P("x", None, "y"))
    y, found = run(f, put(x, mesh, P("x", "y")), put(w, mesh, P("y")))
    rows = B // mesh.shape["x"]
    gathered = [shape for op, shape in found if op == "all-gather"]
    assert f"u8[{rows},{S},{K // 2}]" in gathered
    assert len(gathered) == 2  # data and scale
    assert set(moved(found)) == {"all-gather"}
    np.testing.assert_allclose(y, linear(*home(devices, (x, w)), Recipe()), rtol=1e-5, atol=1e-3)


def test_blocks_of_tokens_that_would_be_in_two_sequences(devices):
    """S is no multiple of 16, so that tokens are flattened: right, and an Explicit mesh is told why it cannot be."""
    x, w, dy = normal((B, 24, K), 1, "fp32"), normal((N, K), 2, "fp32"), normal((B, 24, N), 3, "fp32")
    product = partial(linear, recipe=Recipe())
    want = jax.jit(partial(vjp_of, product))(*home(devices, (x, w, dy)))
    mesh = make_mesh(devices)
    got, _ = run(partial(vjp_of, product), *(put(v, mesh, s) for v, s in ((x, P("x", "y")), (w, P()), (dy, P("x")))))
    for value, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-3)
    mesh = make_mesh(devices, kind="explicit")
    with pytest.raises(ValueError, match="the last leading axis must be a multiple of 16, since recipe has blocks"):
        linear(put(x, mesh, P("x", "y")), put(w, mesh, P()), Recipe())
    y = linear(put(x, mesh, P("x", "y")), put(w, mesh, P()), Recipe(dgrad=None, wgrad=None))  # no blocks of tokens
    assert_sharded(y, mesh, P("x", "y"))


def test_shards_of_a_sequence_that_would_split_a_block(devices):
    """16 tokens a sequence over devices: XLA gathers the tokens of a sequence for its blocks along them."""
    x, w, dy = normal((B, 16, K), 1, "fp32"), normal((N, K), 2, "fp32"), normal((B, 16, N), 3, "fp32")
    product, mesh = partial(linear, recipe=RECIPES["pretrain"], key=KEY), make_mesh(devices)
    want = jax.jit(partial(vjp_of, product))(*home(devices, (x, w, dy)))
    place = lambda of_x: (put(x, mesh, of_x), put(w, mesh, P()), put(dy, mesh, of_x))  # noqa: E731
    got, _ = run(partial(vjp_of, product), *place(P("x", "y")))
    for value, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-3)
    mesh = make_mesh(devices, kind="explicit")
    with pytest.raises(ValueError, match=r"axis 1 of shape .* must split it into multiples of 16"):
        jax.jit(partial(vjp_of, product))(*place(P(None, ("x", "y"))))


# ---------------------------------------------------------------- Explicit meshes
# x [B, S, K] and w [N, K], each axis of the mesh (a, b, c) in any place: data, context, tensor and fully sharded.
EXPLICIT_LAYOUTS = [
    (P("a", "b"), P()),
    (P("a"), P(None, "a")),
    (P("a"), P(None, "b")),
    (P("a"), P("b", "a")),
    (P("a"), P("b", "c")),
    (P("a", "b"), P(None, "b")),
    (P("a", "b"), P("c", "a")),
    (P("a", None, "b"), P()),
    (P("a", None, "b"), P("b")),
    (P("a", None, "b"), P("c")),
    (P("a", "b", "c"), P("c")),
]


def sizes_of(found, sums: bool) -> Counter:
    """The elements of results by dtype: of sums, or of all other collectives."""
    total: Counter = Counter()
    for op, shape in found:
        if ("reduce" in op) == sums and not is_maximum(shape):
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
                total[dtype] += math.prod(map(int, dims.split(",")))
    return total


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize(("of_x", "of_w"), EXPLICIT_LAYOUTS, ids=str)
def test_an_explicit_mesh_moves_packed_bytes_where_a_plain_product_moves_floats(of_x, of_w, w_axes):
    """The same sums, at most two packed copies (of x or w, along K and along the other axis) for one of floats."""
    mesh = three_axes(kind="explicit")
    x, w, dy = operands()
    of_n = of_w[0] if of_w else None
    if w_axes == "kn":
        w, of_w = w.T, P(*(*of_w, None, None)[1::-1])
    products = (
        partial(linear, recipe=RECIPES["pretrain"], key=KEY, w_axes=w_axes),
        lambda x, w: jnp.einsum(f"bsk,{w_axes}->bsn", x, w),
    )
    of_y = P(*(*of_x, None)[:2], of_n)
    args = put(x, mesh, of_x), put(w, mesh, of_w), put(dy, mesh, of_y)
    (got, found), (want, of_plain) = (run(partial(vjp_of, product), *args) for product in products)
    for value, exact in zip(got, want, strict=True):
        assert jax.typeof(value) == jax.typeof(exact)
        assert value.sharding.is_equivalent_to(exact.sharding, exact.ndim)
    assert sizes_of(found, sums=True) <= sizes_of(of_plain, sums=True)
    ours, plains = sizes_of(found, sums=False), sizes_of(of_plain, sums=False)
    # dw is summed in parts along K, which are gathered, where x is split along K over an axis that w has not.
    in_parts = of_x[-1] == "b" and len(of_x) == 3 and "b" not in of_w
    assert ours["f32"] == in_parts * N * K // math.prod(mesh.shape[axis] for axis in axes_of(of_n))
    assert set(ours) <= {"f32", "u8", "f16"}  # a CPU widens the scales
    assert ours["u8"] + ours["f16"] <= 2 * 9 / 16 * plains["f32"]  # a value is 9/16 bytes
    alone = run(partial(vjp_of, products[0]), *home(jax.devices("cpu"), (x, w, dy)))[0]
    for value, exact in zip(got, alone, strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("recipe", ["pretrain", "dequantized", "high_precision"])
def test_devices_compute_parts_of_a_gradient_that_is_split(recipe):
    """dx is split along K, and w is whole: each device multiplies by its part of w."""
    mesh = three_axes(kind="explicit")
    args = (put(v, mesh, spec) for v, spec in zip(operands(), (P("a", None, "b"), P(), P("a")), strict=True))
    pulled = partial(vjp_of, partial(linear, recipe=RECIPES[recipe], key=KEY))
    text = jax.jit(lambda *args: pulled(*args)[1]).lower(*args).compile().as_text()
    assert f"f32[{B // 2},{S},{K // 2}]" in text
    assert not re.search(rf"f32\[({B // 2},{S}|{B * S // 2}),{K}\]", text)


@pytest.mark.parametrize(
    ("recipe", "w_axes"), [*((name, w_axes) for name in RECIPES for w_axes in ("nk", "kn")), ("frozen", "nk")]
)
def test_an_axis_that_the_result_would_have_twice(recipe, w_axes):
    """lax.dot_general refuses it too; w is gathered first, or lies along K."""
    mesh, (x, w, _) = three_axes(kind="explicit"), operands()
    x, along_n = put(x, mesh, P(("a", "b"))), put(w, mesh, P("b"))
    product = partial(linear, recipe=Recipe() if recipe == "frozen" else RECIPES[recipe], key=KEY, w_axes=w_axes)
    turned = quantize(along_n) if recipe == "frozen" else along_n if w_axes == "nk" else along_n.T
    expected = "linear: the leading axes of x and N of w must be sharded over different axes .* got 'b' for both"
    with pytest.raises(ValueError, match=expected):
        product(x, turned)
    with pytest.raises(Exception, match="illegally sharded result"):
        plain(x, along_n)
    whole = jax.tree.map(lambda v: jax.sharding.reshard(v, NamedSharding(mesh, P())), turned)
    assert_sharded(product(x, whole), mesh, P(("a", "b")))


# ---------------------------------------------------------------- quantizers
PAIRS = [
    (NVFP4, NVFP4_RHT),
    (NVFP4_SR, NVFP4_RHT_SR),
    (WINDOW64, WINDOW64),
    (ROW_SCALED, ROW_SCALED),
    (NVFP4, WINDOW64),
]
ROWS_LAYOUTS = {
    "none": (None, None),
    "first": ("xy", P("y")),
    "two": ("xy", P("x", None, "y")),
    "three": ("xy", P(None, "x", "y")),
    "last_and_k": ("xy", P(None, None, "y", "x")),
    "last_over_both": ("xy", P(None, None, ("y", "x"))),
    "k": ("x", P(None, None, None, "x")),
}


@jax.jit
def quantize_kept(x):
    alone = [quantize_rows(x, s, 3, key=key_for(s), transpose=t) for s in SUPPORTED_SPECS for t in (False, True)]
    return alone, [quantize_pair_rows(x, a, b, 3, key=key_for(a)) for a, b in PAIRS]


@jax.jit
def quantize_flat(x):
    alone = [quantize(x, s, key=key_for(s), transpose=t) for s in SUPPORTED_SPECS for t in (False, True)]
    return alone, [quantize_pair(x, a, b, key=key_for(a)) for a, b in PAIRS]


@pytest.mark.long
@pytest.mark.parametrize(("axes", "spec"), ROWS_LAYOUTS.values(), ids=ROWS_LAYOUTS)
def test_rows_of_several_axes_have_the_bytes_of_one(devices, axes, spec):
    """Every spec and orientation; random bits too, though the rows of a device are not neighbours in the whole."""
    x = normal((4, 2, 512, 512))
    placed = home(devices, x) if spec is None else put(x, make_mesh(devices, axes), spec)
    want, got = quantize_flat(home(devices, x.reshape(-1, 512))), quantize_kept(placed)
    for value, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(np.asarray(value).reshape(exact.shape), exact)


# ---------------------------------------------------------------- vmap
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_linear_with_leading_axes(in_axes):
    x, w = normal((3, 2, 32, 64), 1, "fp32"), normal((3, 32, 64), 2, "fp32")
    x, w = (v if axis == 0 else v[0] for v, axis in zip((x, w), in_axes, strict=True))

    def f(x, w):
        return vjp_of(partial(linear, recipe=Recipe()), x, w, jnp.ones((2, 32, 32), jnp.float32))

    got = jax.jit(jax.vmap(f, in_axes))(x, w)
    for i in range(3):
        one = jax.jit(f)(*(v[i] if axis == 0 else v for v, axis in zip((x, w), in_axes, strict=True)))
        for value, exact in zip(got, one, strict=True):
            assert_bitwise(value[i], exact)


# ---------------------------------------------------------------- partly manual shard_map
@pytest.mark.parametrize("layout", [P(("a", "c"), "b"), P("a", ("b", "c"))], ids=str)
def test_a_partly_manual_shard_map_within_another(layout):
    """The last axis is automatic: tokens stay split over it, and the collectives are those of a plain product."""
    mesh, (x, w, dy) = three_axes(), operands()
    f = partial(vjp_of, partial(linear, recipe=RECIPES["pretrain"], key=KEY))

    def nested(f):
        of_b = P(None, "b")
        inner = jax.shard_map(f, in_specs=(of_b, P(), of_b), out_specs=(of_b, of_b, P()), axis_names={"b"})
        of_a = P("a")
        specs = {"in_specs": (of_a, P(), of_a), "out_specs": (of_a, of_a, P())}
        return jax.shard_map(lambda *args: inner(*args), mesh=mesh, axis_names={"a"}, **specs)

    args = put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, layout)
    with jax.set_mesh(mesh):
        (y, dx, dw), found = run(nested(f), *args)
        _, of_plain = run(nested(partial(vjp_of, plain)), *args)
    assert moved(found) == moved(of_plain)
    assert set(moved(found)) == {"all-reduce"}
    devices = jax.devices("cpu")
    quarters = [[jnp.split(half, 2, 1) for half in jnp.split(home(devices, v), 2)] for v in (x, dy)]
    pairs = [list(zip(*rows, strict=True)) for rows in zip(*quarters, strict=True)]
    wants = [[jax.jit(f)(part, home(devices, w), of_dy) for part, of_dy in row] for row in pairs]
    for value, i in ((y, 0), (dx, 1)):
        assert_bitwise(value, np.concatenate([np.concatenate([want[i] for want in row], 1) for row in wants]))
        assert_sharded(value, mesh, layout)
    np.testing.assert_allclose(dw, sum(np.asarray(want[2]) for row in wants for want in row), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("order", [range(8), (5, 2, 7, 0, 1, 6, 3, 4)], ids=["in_order", "permuted"])
@pytest.mark.parametrize("manual", [("a",), ("b",), ("c",), ("a", "c")], ids=str)
def test_linear_in_a_partly_manual_shard_map(manual, order):
    """Tokens stay split over the automatic axes; each manual shard has the bits of its own run on one device."""
    mesh, (x, w, dy) = three_axes(order), operands()
    rest = tuple(name for name in mesh.axis_names if name not in manual)
    f = partial(vjp_of, partial(linear, recipe=RECIPES["pretrain"], key=KEY))
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(P(manual), P(), P(manual)),
        out_specs=(P(manual), P(manual), P()),
        axis_names=set(manual),
    )
    layout = P(manual, rest)
    (y, dx, dw), found = run(mapped, put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, layout))
    assert set(moved(found)) == {"all-reduce"}
    assert {shape for _, shape in found if not is_maximum(shape)} == {f"f32[{N},{K}]"}
    devices, count = jax.devices("cpu"), 2 ** len(manual)
    parts = zip(*(jnp.split(home(devices, v), count) for v in (x, dy)), strict=True)
    wants = [jax.jit(f)(part, home(devices, w), of_dy) for part, of_dy in parts]
    for value, i in ((y, 0), (dx, 1)):
        assert_bitwise(value, np.concatenate([want[i] for want in wants]))
        assert_sharded(value, mesh, layout)
    np.testing.assert_allclose(dw, sum(np.asarray(want[2]) for want in wants), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("manual", ["x", "y"])
def test_collectives_of_a_partly_manual_shard_map_stay_in_their_group(manual):
    """Where K is split over the automatic axis: amaxes of rows and the sum are those of each manual shard."""
    devices = jax.devices("cpu")[:8]
    mesh, x, w = make_mesh(devices), normal((64, 512), 1), normal((128, 512), 2)
    other = "y" if manual == "x" else "x"

    def f(x, w):
        q = quantize(x, ROW_SCALED)
        return q.data, q.amax, matmul_nt(q, quantize(w, ROW_SCALED), out_dtype=jnp.float32)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(manual), P()), out_specs=P(manual), axis_names={manual})
    got, found = run(mapped, put(x, mesh, P(manual, other)), put(w, mesh, P(None, other)))
    want = f(*home(devices, (x, w)))
    assert_bitwise(got[0], want[0])
    assert_bitwise(got[1], want[1])
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-3)
    assert {op for op, _ in found} == {"all-reduce"}
    assert_sharded(got[0], mesh, P(manual, other))
