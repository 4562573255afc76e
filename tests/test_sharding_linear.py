"""``linear`` and its gradients on meshes: bits, shardings and collectives, whatever is split, and inside shard_map."""

import functools
import math
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, key_for
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    KINDS,
    assert_sharded,
    axes_of,
    dtypes_of,
    elements,
    every_kind,
    home,
    is_maximum,
    make_mesh,
    put,
    run,
    ways,
)
from operands import normal

from jnvfp4 import Recipe, grouped_linear, linear, quantize, recipes
from jnvfp4._ops.quantize import Orientation, quantize_sides
from jnvfp4.spec import NVFP4, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, SUPPORTED_SPECS, WINDOW64

B, S, K, N = 8, 256, 256, 128
RECIPES = {
    "pretrain": recipes.pretrain(),
    "pretrain_1d": recipes.pretrain(weight_tiles=False, rht=False, stochastic_rounding=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "row_scaled": recipes.row_scaled(),
    "window64": recipes.window64(),
    "inference": recipes.inference(),
    "requantized": recipes.pretrain_4over6(requantize=True),
}
PRETRAIN = partial(linear, recipe=RECIPES["pretrain"], key=KEY)


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


def flat_operands():
    """The same tokens as one axis."""
    x, w, dy = operands()
    return x.reshape(B * S, K), w, dy.reshape(B * S, N)


# ---------------------------------------------------------------- a step in every layout
# x [M, K] or [B, S, K] and w [N, K] on a mesh (x, y): data, tensor, fully sharded, context and sequence parallelism.
# y and dy are split like the tokens of x and N of w.
STEPS = {
    "data": (P("x", None), P()),
    "column": (P(None, None), P("x")),
    "row": (P(None, "x"), P(None, "x")),
    "data and column": (P("x", None), P("y")),
    "data and row": (P("x", "y"), P(None, "y")),
    "fsdp along K": (P("x", None), P(None, "y")),
    "fsdp along the axis of the data": (P("x", None), P(None, "x")),
    "fsdp and tensor": (P("x", None), P("y", "x")),
    "x along K": (P(None, "y"), P()),
    "x along K, w along N": (P(None, "y"), P("x")),
    "context": (P("x", "y", None), P()),
    "context alone": (P(None, "y", None), P()),
    "sequence and K": (P(None, "y", "x"), P()),
}


def step_by_every_recipe(x, w, dy):
    """In one program."""
    return {
        name: dict(zip(("y", "dx", "dw"), vjp_of(partial(linear, recipe=recipe, key=KEY), x, w, dy), strict=True))
        for name, recipe in RECIPES.items()
        if name != "inference"
    }


@functools.cache
def on_one_device(device):
    """The results of one device, with flattened tokens."""
    return jax.jit(step_by_every_recipe)(*jax.device_put(flat_operands(), device))


def whole_sums(kind, of_x, of_w) -> set[str]:
    """The results of which no device has a part of the sum; their order is pinned on a CPU. XLA may split K as w is."""
    of_k = of_x[-1:] if kind == "explicit" else (*of_x[-1:], *of_w[1:])
    split = {"y": of_k, "dx": of_w[:1], "dw": of_x[:-1]}
    return {name for name, axes in split.items() if not any(axes)}


QUICK_STEPS = {"auto": {"data", "row", "context"}, "explicit": {"column", "data and row", "fsdp and tensor"}}
STEPS_OF_KINDS = [
    pytest.param(kind, *step, id=f"{kind}-{name}", marks=[pytest.mark.long] * (name not in QUICK_STEPS[kind]))
    for name, step in STEPS.items()
    for kind in KINDS
]


@pytest.mark.parametrize(("kind", "of_x", "of_w"), STEPS_OF_KINDS)
def test_a_step_in_any_layout(devices, kind, of_x, of_w):
    """The quantized operands are the same; so is a sum that no device splits. Gradients are split like operands."""
    mesh, n = make_mesh(devices, kind=kind), (*of_w, None)[0]
    x, w, dy = operands() if len(of_x) == 3 else flat_operands()
    placed = put(x, mesh, of_x), put(w, mesh, of_w), put(dy, mesh, P(*of_x[:-1], n))
    got, found = run(step_by_every_recipe, *placed)
    for recipe, results in on_one_device(devices[0]).items():
        gemms = {"y": RECIPES[recipe].fprop, "dx": RECIPES[recipe].dgrad, "dw": RECIPES[recipe].wgrad}
        for name, want in results.items():
            value, what = np.asarray(got[recipe][name]).reshape(want.shape), f"{recipe} {name}"
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-3, err_msg=what)
            pinned = isinstance(gemms[name], tuple) and name in whole_sums(kind, of_x, of_w)
            if pinned and devices[0].platform == "cpu":
                assert_bitwise(value, want, what)
        if kind == "explicit":
            assert_sharded(got[recipe]["dx"], mesh, of_x)
            assert_sharded(got[recipe]["dw"], mesh, of_w)
    if of_w == P() and of_x[-1] is None:  # tokens alone are split: no activation moves, only sums of dw
        for results in got.values():
            assert_sharded(results["y"], mesh, of_x)
            assert_sharded(results["dx"], mesh, of_x)
        split = any(ways(mesh, entry) > 1 for entry in of_x)
        assert set(moved(found)) == ({"all-reduce"} if split else set())
        sums = re.findall(r"b?f\d+\[[\d,]*\]", str(found))
        assert dtypes_of(sums) == ({"f32"} if split else set())
        if devices[0].platform == "cpu":
            assert set(sums) == ({f"f32[{N},{K}]"} if split else set())
        else:  # XLA combines them
            assert sum(map(elements, sums)) % (N * K) == 0


# ---------------------------------------------------------------- sequence parallelism
PERMUTED = (5, 2, 7, 0, 1, 6, 3, 4)


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
    gathered = {dtypes_of([shape]).pop(): elements(shape) for op, shape in found if op == "all-gather"}
    codes = rows * S * K // 2  # in any shape: on GPUs XLA gathers along the first axis
    assert gathered.pop("u8") == codes
    assert list(gathered.values()) == [codes // 8]  # the scales, on a CPU in 16 bits
    assert set(moved(found)) == {"all-gather"}
    np.testing.assert_allclose(y, linear(*home(devices, (x, w)), Recipe()), rtol=1e-5, atol=1e-3)


SEQUENCES = {  # of tokens that are no blocks: the recipe, and a sharding that an Explicit mesh refuses, with the reason
    24: (Recipe(), P("x", "y"), "the last leading axis must be a multiple of 16, since recipe has blocks"),
    16: (recipes.pretrain(), P(None, ("x", "y")), "axis 1 of .* must split it into multiples of 16"),
}


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_blocks_of_tokens_that_no_device_has(devices, sequence):
    """Tokens are flattened, or XLA gathers those of a sequence; an Explicit mesh is told why it cannot be."""
    (recipe, refused, why), shapes = SEQUENCES[sequence], ((B, sequence, K), (N, K), (B, sequence, N))
    x, w, dy = (normal(shape, seed, "fp32") for seed, shape in enumerate(shapes, 1))
    f = partial(vjp_of, partial(linear, recipe=recipe, key=KEY))
    want = jax.jit(f)(*home(devices, (x, w, dy)))
    mesh = make_mesh(devices)
    got = jax.jit(f)(put(x, mesh, P("x", "y")), put(w, mesh, P()), put(dy, mesh, P("x")))
    for value, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-3)
    mesh = make_mesh(devices, kind="explicit")
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(f, put(x, mesh, refused), put(w, mesh, P()), put(dy, mesh, refused))
    y = linear(put(x, mesh, P("x", "y")), put(w, mesh, P()), Recipe(dgrad=None, wgrad=None))  # no blocks of tokens
    assert_sharded(y, mesh, P("x", "y"))


# ---------------------------------------------------------------- Explicit meshes
# x [B, S, K] and w [N, K], each axis of the mesh (a, b, c) in any place: data, context, tensor and fully sharded.
QUICK_LAYOUTS = [(P("a", "b"), P(), "nk"), (P("a"), P("b", "a"), "kn"), (P("a", None, "b"), P(), "nk")]
LONG_LAYOUTS = [
    *((P("a", None, "b"), P("b"), "kn"), (P("a"), P(None, "a"), "kn"), (P("a"), P("b", "c"), "nk")),
    *((P("a", "b"), P(None, "b"), "kn"), (P("a", "b"), P("c", "a"), "nk"), (P("a", "b", "c"), P("c"), "nk")),
]
EXPLICIT_LAYOUTS = [*QUICK_LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.long) for layout in LONG_LAYOUTS)]


def sizes_of(found, sums: bool) -> Counter:
    """The elements of results by dtype: of sums, or of all other collectives."""
    total: Counter = Counter()
    for op, shape in found:
        if ("reduce" in op) == sums and not is_maximum(shape):
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
                total[dtype] += math.prod(map(int, dims.split(",")))
    return total


@pytest.mark.parametrize(("of_x", "of_w", "w_axes"), EXPLICIT_LAYOUTS)
def test_an_explicit_mesh_moves_packed_bytes_where_a_plain_product_moves_floats(of_x, of_w, w_axes):
    """The same sums, at most two packed copies (of x or w, along K and along the other axis) for one of floats."""
    mesh = three_axes(kind="explicit")
    x, w, dy = operands()
    of_n = of_w[0] if of_w else None
    if w_axes == "kn":
        w, of_w = w.T, P(*(*of_w, None, None)[1::-1])
    products = partial(PRETRAIN, w_axes=w_axes), lambda x, w: jnp.einsum(f"bsk,{w_axes}->bsn", x, w)
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


@pytest.mark.parametrize("recipe", ["pretrain", "dequantized", "inference"])
def test_devices_compute_parts_of_a_gradient_that_is_split(recipe):
    """dx is split along K, and w is whole: each device multiplies by its part of w."""
    mesh = three_axes(kind="explicit")
    args = (put(v, mesh, spec) for v, spec in zip(operands(), (P("a", None, "b"), P(), P("a")), strict=True))
    pulled = partial(vjp_of, partial(linear, recipe=RECIPES[recipe], key=KEY))
    text = jax.jit(lambda *args: pulled(*args)[1]).lower(*args).compile().as_text()
    assert f"f32[{B // 2},{S},{K // 2}]" in text
    assert not re.search(rf"f32\[({B // 2},{S}|{B * S // 2}),{K}\]", text)


TWICE = [("pretrain", "nk"), ("pretrain", "kn"), ("inference", "nk"), ("frozen", "nk")]


@pytest.mark.parametrize(("recipe", "w_axes"), TWICE)
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
PAIRS = [(NVFP4, NVFP4_RHT), (NVFP4_SR, NVFP4_RHT_SR), *((s, s) for s in (WINDOW64, ROW_SCALED)), (NVFP4, WINDOW64)]
ROWS_LAYOUTS = {
    "none": (None, None),
    "three": ("xy", P(None, "x", "y")),
    "last_and_k": ("xy", P(None, None, "y", "x")),
    "last_over_both": ("xy", P(None, None, ("y", "x"))),
    "k": ("x", P(None, None, None, "x")),
}


@partial(jax.jit, static_argnums=1)
def quantize_by_every_spec(x, row_axes):
    alone = [[Orientation(spec, turned)] for spec in SUPPORTED_SPECS for turned in (False, True)]
    pairs = [[Orientation(a), Orientation(b, True)] for a, b in PAIRS]
    return [quantize_sides(x, sides, row_axes, key_for(sides[0].spec)) for sides in (*alone, *pairs)]


@pytest.mark.long
@pytest.mark.parametrize(("axes", "spec"), ROWS_LAYOUTS.values(), ids=ROWS_LAYOUTS)
def test_rows_of_several_axes_have_the_bytes_of_one(devices, axes, spec):
    """Every spec and orientation; random bits too, though the rows of a device are not neighbours in the whole."""
    x = normal((4, 2, 512, 512))
    placed = home(devices, x) if spec is None else put(x, make_mesh(devices, axes), spec)
    want, got = quantize_by_every_spec(home(devices, x.reshape(-1, 512)), 1), quantize_by_every_spec(placed, 3)
    for value, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise(np.asarray(value).reshape(exact.shape), exact)


# ---------------------------------------------------------------- partly manual shard_map
def check_manual_shards(got, mesh, layout, operands, batches, sequences=1):
    """Each, of so many of either leading axis, has the bits of its own run on one device; dw is their sum."""
    f, (x, w, dy) = jax.jit(partial(vjp_of, PRETRAIN)), home(jax.devices("cpu"), operands)
    parts = [[jnp.split(v, sequences, 1) for v in jnp.split(whole, batches)] for whole in (x, dy)]
    wants = [[f(part, w, of_dy) for part, of_dy in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]
    for i in range(2):  # y and dx
        assert_bitwise(got[i], np.concatenate([np.concatenate([want[i] for want in row], 1) for row in wants]))
        assert_sharded(got[i], mesh, layout)
    total = sum(np.asarray(want[2]) for row in wants for want in row)
    np.testing.assert_allclose(got[2], total, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("layout", [P(("a", "c"), "b"), P("a", ("b", "c"))], ids=str)
def test_a_partly_manual_shard_map_within_another(layout):
    """The last axis is automatic: tokens stay split over it, and the collectives are those of a plain product."""
    mesh, (x, w, dy) = three_axes(), operands()

    def nested(f):
        of_b = P(None, "b")
        inner = jax.shard_map(f, in_specs=(of_b, P(), of_b), out_specs=(of_b, of_b, P()), axis_names={"b"})
        of_a = P("a")
        specs = {"in_specs": (of_a, P(), of_a), "out_specs": (of_a, of_a, P())}
        return jax.shard_map(lambda *args: inner(*args), mesh=mesh, axis_names={"a"}, **specs)

    args = put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, layout)
    with jax.set_mesh(mesh):
        got, found = run(nested(partial(vjp_of, PRETRAIN)), *args)
        _, of_plain = run(nested(partial(vjp_of, plain)), *args)
    assert moved(found) == moved(of_plain)
    assert set(moved(found)) == {"all-reduce"}
    check_manual_shards(got, mesh, layout, (x, w, dy), 2, 2)


@pytest.mark.parametrize(("manual", "order"), [(("c",), range(8)), (("a", "c"), PERMUTED)], ids=["c", "ac"])
def test_linear_in_a_partly_manual_shard_map(manual, order):
    """Tokens stay split over the automatic axes."""
    mesh, (x, w, dy) = three_axes(order), operands()
    layout = P(manual, tuple(name for name in mesh.axis_names if name not in manual))
    specs = {"in_specs": (P(manual), P(), P(manual)), "out_specs": (P(manual), P(manual), P())}
    mapped = jax.shard_map(partial(vjp_of, PRETRAIN), mesh=mesh, axis_names=set(manual), **specs)
    got, found = run(mapped, put(x, mesh, layout), put(w, mesh, P()), put(dy, mesh, layout))
    assert set(moved(found)) == {"all-reduce"}
    assert {shape for _, shape in found if not is_maximum(shape)} == {f"f32[{N},{K}]"}
    check_manual_shards(got, mesh, layout, (x, w, dy), 2 ** len(manual))


# ---------------------------------------------------------------- shard_map
@pytest.mark.parametrize("recipe", [Recipe(dgrad=None, wgrad=None), Recipe()], ids=["high precision", "quantized"])
def test_gradient_of_a_replicated_weight_is_summed_over_devices(devices, recipe):
    """As for x @ w.T, by the transpose of shard_map; each device quantizes its tokens by their own amax."""
    x, w = normal((32 * len(devices), 64), 1, "fp32"), normal((32, 64), 2, "fp32")
    product = partial(linear, recipe=recipe)
    mapped = jax.shard_map(product, mesh=make_mesh(devices, "x"), in_specs=(P("x"), P()), out_specs=P("x"))
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), (0, 1)))(x, w)
    one = jax.jit(jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1)))
    parts = [one(*home(devices, (part, w))) for part in jnp.split(x, len(devices))]
    np.testing.assert_allclose(dx, jnp.concatenate([p[0] for p in parts]), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(dw, sum(np.asarray(p[1]) for p in parts), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("differs", ["key", "w_amax", "key of experts"])
def test_gradient_of_shared_operands_where_only_the_key_or_the_amax_differs(devices, differs):
    """Every device has its own random bits or amax for the same x and w; the gradients are the sums of theirs."""
    mesh, (x, w) = make_mesh(devices, "x"), (normal((32, 64), 1, "fp32"), normal((32, 64), 2, "fp32"))

    def loss(x, w, i):
        options = {"key": jax.random.fold_in(KEY, i)}
        if differs == "w_amax":
            options = {"key": KEY, "w_amax": jnp.float32(2) + i}
        if differs == "key of experts":
            return jnp.sum(grouped_linear(x, w[None], np.int32([32]), recipes.pretrain(), **options) ** 2)
        return jnp.sum(linear(x, w, recipes.pretrain(), **options) ** 2)

    def local(x, w):
        return jax.grad(loss, (0, 1))(x, w, jax.lax.axis_index("x"))

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))(x, w)
    one = jax.jit(jax.grad(loss, (0, 1)))
    parts = [one(*home(devices, (x, w, i))) for i in range(len(devices))]
    for i in range(2):
        np.testing.assert_allclose(got[i], sum(np.asarray(p[i]) for p in parts), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_bias_gradient_is_summed_over_devices(devices, bias_dtype):
    mesh, x = make_mesh(devices, "x"), normal((32 * len(devices), 64), 1)
    w, bias = normal((32, 64), 2), jnp.ones((32,), bias_dtype)
    f = jax.shard_map(lambda x, w, b: linear(x, w, bias=b), mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    db = jax.jit(jax.grad(lambda b: jnp.sum(f(x, w, b).astype(jnp.float32))))(bias)
    assert db.dtype == bias_dtype
    np.testing.assert_array_equal(db.astype(jnp.float32), np.full(32, x.shape[0]))
