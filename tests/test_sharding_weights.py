"""Weights gathered as bytes: ``jnvfp4.sharding``, ``w_gather`` and ``w_amax``."""

import functools
import re
from dataclasses import replace
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    SPECS,
    assert_sharded,
    collectives,
    dtypes_of,
    elements,
    every_kind,
    home,
    is_maximum,
    make_mesh,
    put,
    run,
    shard,
    ways,
)
from operands import normal

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_SR,
    ROW_SCALED,
    DotGeneral,
    NVFP4Tensor,
    Policy,
    QuantizedWeight,
    RaggedDot,
    Recipe,
    Rule,
    dequantize,
    dot_general,
    einsum,
    grouped_linear,
    linear,
    quantize,
    recipes,
)
from jnvfp4.sharding import all_gather, gather_quantized

CPUS = jax.devices("cpu")[:8]
ROWS, COLUMNS, WHOLE = P("x", None), P(None, "x"), P(None, None)
FSDP = {"rows": ROWS, "columns": COLUMNS}
every_layout = pytest.mark.parametrize("layout", FSDP.values(), ids=FSDP)


def gathers(found) -> list[str]:
    return sorted(shape for op, shape in found if op == "all-gather")


# ---------------------------------------------------------------- all_gather
@pytest.mark.parametrize("axis", [0, -1])
def test_all_gather_moves_bytes(devices, axis):
    """Of every spec in one program; and the float amaxes that are split, of rows or of windows."""
    mesh, x, spec = make_mesh(devices, "x"), normal((128, 512)), COLUMNS if axis else ROWS
    tensors = {name: quantize(x, s) for name, s in SPECS.items()}
    parts = {name: NVFP4Tensor(spec, spec, P(*spec[: t.amax.ndim]), t.format) for name, t in tensors.items()}
    f = lambda tensors: {name: all_gather(t, "x", axis=axis) for name, t in tensors.items()}  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(parts,), out_specs=P(), check_vma=False)
    got, found = run(mapped, {name: shard(t, mesh, spec) for name, t in tensors.items()})
    assert_same_tensor(got, tensors)
    assert {op for op, _ in found} == {"all-gather"}
    floats = [shape for shape in gathers(found) if not shape.startswith("u8")]
    assert len(floats) == sum(t.amax.ndim > axis % 2 for t in tensors.values())


def test_all_gather_of_leading_axes_and_over_two(devices):
    mesh, rows = make_mesh(devices), P(("x", "y"))
    for t in (quantize(normal((128, 64)), ROW_SCALED), jax.vmap(quantize)(normal((8, 32, 64)))):
        f = lambda t: all_gather(t, ("x", "y"))  # noqa: E731
        assert_same_tensor(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=P(), check_vma=False))(t), t)


def test_all_gather_after_a_quantizer_of_the_part(devices):
    """With the amax of the whole; without it each device has an amax of its own, which is refused."""
    mesh, x = make_mesh(devices, "x"), normal((128, 64))

    def f(x, common):
        amax = jax.lax.pmax(jnp.max(jnp.abs(x)).astype(jnp.float32), "x") if common else None
        t = all_gather(quantize(x, amax=amax), "x")
        return jax.tree.map(lambda part: part[None] if part.ndim else jnp.reshape(part, (1,)), t).data

    mapped = lambda common: jax.shard_map(partial(f, common=common), mesh=mesh, in_specs=P("x"), out_specs=P("x"))  # noqa: E731
    got = jax.jit(mapped(True))(x)
    for part in got:
        assert_bitwise(part, quantize(home(devices, x)).data)
    text = r"the amax of q, .* varies over \['x'\]; quantize with .*abs\(x\)\).astype\(jnp.float32\), 'x'"
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(mapped(False), x)


# ---------------------------------------------------------------- gather_quantized
@every_layout
@every_kind
def test_gather_quantized_gathers_bytes(devices, kind, layout):
    """The amax of a row is found for the whole row."""
    mesh, w = make_mesh(devices, "x", kind), normal((512, 512))
    f = lambda w: {n: gather_quantized(w, s, sharded=layout, gathered=WHOLE) for n, s in SPECS.items()}  # noqa: E731
    got, found = run(f, put(w, mesh, layout))
    assert_same_tensor(got, {name: quantize(home(devices, w), s) for name, s in SPECS.items()})
    for t in got.values():
        for part in (t.data, t.scale, t.amax):
            assert_sharded(part, mesh, P())
    floats = [shape for shape in gathers(found) if not shape.startswith("u8")]
    assert len(floats) == sum(t.amax.ndim > (layout == COLUMNS) for t in got.values())
    assert {op for op, shape in found if not is_maximum(shape)} <= {"all-gather", "all-reduce"}


OTHER_GATHERS = {  # the kinds of the axes of the mesh, the shape of w, its spec, where it is and where it is wanted
    "a stack and a key": ("auto", (4, 64, 64), NVFP4_SR, P(None, ("x", "y")), P(None, "y")),
    "a mesh of both kinds": ("both", (256, 64), NVFP4_2D, P(("x", "y")), P("x")),
}


@pytest.mark.parametrize(("kind", "shape", "spec", "sharded", "gathered"), OTHER_GATHERS.values(), ids=OTHER_GATHERS)
def test_gather_quantized_of_a_part_of_the_axes(devices, kind, shape, spec, sharded, gathered):
    kinds = (AxisType.Explicit if kind == "both" else AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, len(devices) // 2), ("x", "y"), axis_types=kinds, devices=devices)
    w = normal(shape)
    options = {"amax": 4.0, "key": KEY} if spec is NVFP4_SR else {}
    f = lambda w: gather_quantized(w, spec, sharded=sharded, gathered=gathered, **options)  # noqa: E731
    got, found = run(f, put(w, mesh, P()))
    assert_same_tensor(got, quantize(home(devices, w), spec, **options))
    assert_sharded(got.data, mesh, gathered)
    assert dtypes_of(gathers(found)) <= {"u8"}
    assert gathers(found) or kind == "auto" or devices[0].platform != "cpu"


def test_gather_quantized_with_the_mesh_of_set_mesh_or_of_a_sharding():
    """An array that nobody has placed knows no mesh."""
    mesh, w = make_mesh(CPUS, "x"), normal((256, 64))
    named = {"sharded": NamedSharding(mesh, ROWS), "gathered": NamedSharding(mesh, WHOLE)}
    assert_same_tensor(jax.jit(lambda w: gather_quantized(w, NVFP4, **named))(w), quantize(w))
    with jax.set_mesh(mesh):
        assert_same_tensor(jax.jit(lambda w: gather_quantized(w, NVFP4, sharded=ROWS, gathered=WHOLE))(w), quantize(w))
    with pytest.raises(ValueError, match=r"gather_quantized: sharded must be of NamedSharding where no mesh is known"):
        jax.jit(lambda w: gather_quantized(w, NVFP4, sharded=ROWS, gathered=WHOLE))(w)


def test_gather_quantized_has_no_derivative():
    mesh, w = make_mesh(CPUS, "x"), normal((256, 64), dtype="fp32")
    f = lambda w: jnp.sum(dequantize(gather_quantized(w, NVFP4, sharded=ROWS, gathered=WHOLE)))  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"gather_quantized has no derivative.*linear\(x, w, w_gather="):
        jax.grad(f)(put(w, mesh, ROWS))
    held = lambda s, w: s * f(w)  # noqa: E731
    assert jax.grad(held)(1.0, put(w, mesh, ROWS)) == pytest.approx(float(dequantize(quantize(w)).sum()), rel=1e-4)


# ---------------------------------------------------------------- linear(w_gather=)
def vjp_of(x, w, dy, **options):
    y, pull = jax.vjp(partial(linear, **options), x, w)
    return {"y": y, **dict(zip(("dx", "dw"), pull(dy.astype(y.dtype)), strict=True))}


def test_a_gradient_in_16_bits_is_scattered_in_float32(devices):
    mesh = make_mesh(devices, "x")
    x, w, dy = normal((256, 256), 1), normal((256, 256), 2), normal((256, 256), 3)
    f = partial(vjp_of, recipe=Recipe(), w_gather=(ROWS, WHOLE))
    got, found = run(f, put(x, mesh, ROWS), put(w, mesh, ROWS), put(dy, mesh, ROWS))
    assert got["dw"].dtype == jnp.bfloat16
    assert [shape for op, shape in found if op == "reduce-scatter"] == [f"f32[{256 // len(devices)},256]"]


TWICE = recipes.pretrain(weight_tiles=False, stochastic_rounding=False)
# One of each way to read w.
RECIPES = {
    "one tensor for both GEMMs": recipes.DEFAULT,
    "quantized twice": TWICE,
    "quantized of the quantized": recipes.pretrain_4over6(requantize=True),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "high precision": recipes.inference(),
    "windows": recipes.window64(),
    "an amax per row": Recipe(fprop=(NVFP4, ROW_SCALED), dgrad=(NVFP4, ROW_SCALED)),
    "backward alone": Recipe(fprop=None),
}


def by_every_recipe(f):
    """f by each recipe, in one program: it costs little more than that of one recipe."""
    return jax.jit(lambda *operands: {name: f(*operands, recipe=recipe) for name, recipe in RECIPES.items()})


RESULTS = ("y", "dx", "dw")


def in_order(f):
    """Those of f as a tuple: XLA places what no constraint holds by the order of results, too."""
    return lambda *operands: itemgetter(*RESULTS)(f(*operands))


GATHERED = normal((512, 256), 1, "fp32"), normal((512, 256), 2, "fp32"), normal((512, 512), 3, "fp32")


@functools.cache
def ungathered(name, w_axes):
    """The results and gradients of one device."""
    x, w, dy = home(CPUS, GATHERED)
    return jax.jit(partial(vjp_of, recipe=RECIPES[name], key=KEY, w_axes=w_axes))(x, w if w_axes == "nk" else w.T, dy)


FSDP_OF_ROWS, FSDP_OF_COLUMNS = (ROWS, WHOLE), (COLUMNS, WHOLE)
TENSOR_PARALLEL = {"nk": (P("y", "x"), P("y", None)), "kn": (P("x", "y"), P(None, "y"))}  # over y for good
STEPS = [
    *(("auto", "x", "nk", FSDP_OF_ROWS, name) for name in RECIPES),
    ("auto", "x", "kn", FSDP_OF_COLUMNS, "one tensor for both GEMMs"),
    ("explicit", "x", "nk", FSDP_OF_COLUMNS, "one tensor for both GEMMs"),
    ("explicit", "x", "kn", FSDP_OF_ROWS, "one tensor for both GEMMs"),
    ("explicit", "x", "nk", FSDP_OF_ROWS, "backward alone"),
    ("auto", "xy", "nk", TENSOR_PARALLEL["nk"], "one tensor for both GEMMs"),
    ("auto", "xy", "kn", TENSOR_PARALLEL["kn"], "one tensor for both GEMMs"),
    ("auto", "xy", "kn", TENSOR_PARALLEL["kn"], "backward alone"),
]


@pytest.mark.parametrize(
    ("kind", "axes", "w_axes", "gather", "name"), STEPS, ids=[f"{s[0]} {s[4]} {s[2]}" for s in STEPS]
)
def test_linear_with_gathered_weights(devices, kind, axes, w_axes, gather, name):
    """A quantized weight is gathered as bytes; what computes in high precision from w gathers w.

    A weight in tiles is gathered once, since its transpose has the bytes of the other orientation; others are gathered
    for either product.
    """
    mesh, recipe, want = make_mesh(devices, axes, kind), RECIPES[name], ungathered(name, w_axes)
    x, w, dy = (v.T if v is GATHERED[1] and w_axes == "kn" else v for v in GATHERED)
    along_n = gather[1][w_axes.index("n")]
    placed = put(x, mesh, P("x")), put(w, mesh, gather[0]), put(dy, mesh, P("x", along_n))
    got, found = run(in_order(partial(vjp_of, recipe=recipe, key=KEY, w_axes=w_axes, w_gather=gather)), *placed)
    got = dict(zip(RESULTS, got, strict=True))
    for result, gemm, summed in (("y", recipe.fprop, False), ("dx", recipe.dgrad, along_n), ("dw", None, True)):
        np.testing.assert_allclose(got[result], want[result], rtol=1e-5, atol=1e-3, err_msg=result)
        if isinstance(gemm, tuple) and not summed and devices[0].platform == "cpu":
            assert_bitwise(got[result], want[result], result)
    assert_sharded(got["y"], mesh, P("x", along_n))
    assert_sharded(got["dx"], mesh, P("x"))
    assert_sharded(got["dw"], mesh, gather[0])
    # Nothing else moves: w is gathered from where it is, for dgrad too, and scales as bytes.
    assert {op for op, _ in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    part_of_w = ",".join(str(n // ways(mesh, entry)) for n, entry in zip(w.shape, gather[0], strict=True))
    if recipe.wgrad_specs:
        assert ("reduce-scatter", f"f32[{part_of_w}]") in found
    n, k = dy.shape[1] // ways(mesh, along_n), x.shape[1]
    codes = [bool(recipe.fprop), bool(recipe.dgrad_specs and not recipe.one_weight)]
    if devices[0].platform == "cpu":  # on a GPU XLA may gather along the first axis, and transpose
        assert [gathers(found).count(s) for s in (f"u8[{n},{k // 2}]", f"u8[{k},{n // 2}]")] == codes
    assert [elements(s) for s in gathers(found)].count(n * k // 2) == sum(codes)
    floats = [shape for shape in gathers(found) if not shape.startswith("u8") and elements(shape) >= n * k]
    assert bool(floats) == (recipe.fprop is None or recipe.dgrad is None)
    assert dtypes_of(gathers(found)) <= {"u8", "f32"}


def test_quantized_weights_have_the_same_bytes_on_any_number_of_devices():
    """Those of the forward pass, and all that is saved for the backward pass."""
    x, w = normal((512, 256), 1), normal((512, 256), 2)

    def saved(x, w, gather, recipe):
        fprop = recipe.fprop and gather_quantized(w, recipe.fprop.w, sharded=gather[0], gathered=gather[1])
        _, pull = jax.vjp(lambda x, w: linear(x, w, recipe, key=KEY, w_gather=gather), x, w)
        return fprop, [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype in (jnp.uint8, jnp.float32)]  # and no key

    def on(count, layout):
        mesh = make_mesh(CPUS[:count], "x")
        return by_every_recipe(partial(saved, gather=(layout, WHOLE)))(put(x, mesh, ROWS), put(w, mesh, layout))

    want = on(1, ROWS)
    quantized = by_every_recipe(lambda w, recipe: recipe.fprop and quantize(w, recipe.fprop.w))(*home(CPUS, (w,)))
    assert_same_tensor({name: fprop for name, (fprop, _) in want.items()}, quantized)
    for name, recipe in RECIPES.items():
        assert sum(leaf.dtype == jnp.uint8 for leaf in want[name][1]) >= 2 * isinstance(recipe.wgrad, tuple), name
    for count, layout in ((4, COLUMNS), (8, ROWS)):
        assert_same_tensor(on(count, layout), want, f"{count} devices, {layout}: ")


def test_high_precision_where_n_has_an_axis_of_k():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3, devices=CPUS)
    x, w, f = normal((64, 128), 1, "fp32"), normal((128, 128), 2, "fp32"), partial(linear, recipe=Recipe(fprop=None))
    got = jax.jit(f)(put(x, mesh, P(None, ("b", "a"))), put(w, mesh, P("a", "b")))
    np.testing.assert_allclose(got, f(x, w), rtol=1e-5, atol=1e-3)


def test_frozen_weights_are_gathered_as_bytes(devices):
    mesh, x, w = make_mesh(devices, "x"), normal((256, 256), 1, "fp32"), normal((256, 256), 2)
    q = quantize(w)
    f = lambda x, q, pair: jax.vjp(lambda x: linear(x, q, w_gather=pair), x)[1](x)  # noqa: E731
    got, found = run(partial(f, pair=(ROWS, WHOLE)), put(x, mesh, ROWS), shard(q, mesh, ROWS))
    np.testing.assert_allclose(got[0], f(*home(devices, (x, q)), None)[0], rtol=1e-5, atol=1e-3)
    assert dtypes_of(gathers(found)) == {"u8"}


@every_kind
def test_gathered_weights_in_a_partly_manual_shard_map(kind):
    """Tokens are split by shard_map, weights over the axis that it leaves alone."""
    mesh = make_mesh(CPUS, kind=kind)
    x, w = normal((128, 256), 1, "fp32"), normal((128, 256), 2, "fp32")

    def manual(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})

    f = lambda x, w: linear(x, w, Recipe(), w_gather=(P("y"), WHOLE))  # noqa: E731
    grad = jax.grad(lambda x, w: jnp.sum(manual(f)(x, w) ** 2), (0, 1))
    got, found = run(grad, put(x, mesh, P("x")), put(w, mesh, P("y")))
    plain = lambda x, w: linear(x, w, Recipe())  # noqa: E731
    placed = put(x, mesh, P("x")), put(w, mesh, P())
    want = jax.jit(jax.grad(lambda x, w: jnp.sum(manual(plain)(x, w) ** 2), (0, 1)))(*placed)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)
    assert {"u8[128,128]", "u8[128,16]"} <= set(gathers(found))
    if kind == "auto" or jax.__version_info__ >= (0, 11):  # before that shard_map itself gathers explicit operands
        assert not any(elements(shape) >= 128 * 256 and "f32" in shape for shape in gathers(found)), found


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
def test_blocks_of_weights_are_whole_along_k_alone(w_axes):
    """Without tiles and without dgrad N may be split anywhere."""
    mesh, x, w = make_mesh(CPUS, "x"), normal((128, 64), 1), normal((24, 64), 2)
    w = w if w_axes == "nk" else w.T
    f = partial(linear, recipe=recipes.inference(), w_axes=w_axes)
    along_n, along_k = (ROWS, COLUMNS) if w_axes == "nk" else (COLUMNS, ROWS)
    placed = put(x, mesh, ROWS), put(w, mesh, P())
    assert_bitwise(jax.jit(partial(f, w_gather=(along_n, WHOLE)))(*placed), f(*home(CPUS, (x, w))))
    with pytest.raises(ValueError, match=r"w_gather.sharded must split axis . of shape .* into multiples of 16"):
        f(*placed, w_gather=(along_k, WHOLE))
    frozen = placed[0], shard(quantize(w if w_axes == "nk" else w.T), mesh, P())
    assert jax.eval_shape(partial(linear, w_gather=(ROWS, WHOLE)), *frozen).shape == (128, 24)
    with pytest.raises(ValueError, match=r"sharded must split axis 1 of shape \(24, 64\) into multiples of 16"):
        linear(*frozen, w_gather=(COLUMNS, WHOLE))


# ---------------------------------------------------------------- experts
EXPERTS = normal((256, 128), 1, "fp32"), normal((4, 256, 128), 2, "fp32"), normal((256, 256), 3, "fp32")
GROUPS = jnp.array([64, 0, 100, 60], jnp.int32)  # of 256 rows
EXPERT_STEPS = {  # the kind of mesh, its axes, the shardings, and the recipe
    **{name: ("auto", "x", (P(None, "x"), P()), name) for name in RECIPES if name != "windows"},
    "columns": ("explicit", "x", (P(None, None, "x"), P()), "one tensor for both GEMMs"),
    "expert parallel": ("auto", "xy", (P("x", "y"), P("x")), "one tensor for both GEMMs"),
    "expert parallel, explicit": ("explicit", "xy", (P("x", None, "y"), P("x")), "quantized twice"),
}


def grouped_vjp(x, w, dy, recipe, w_gather=None, w_axes="nk"):
    if w_axes == "nk":
        f = lambda x, w: grouped_linear(x, w, GROUPS, recipe, key=KEY, w_gather=w_gather)  # noqa: E731
    else:
        f = lambda x, w: RaggedDot(recipe, w_gather=w_gather)(x, w, GROUPS, key=KEY)  # noqa: E731
    y, pull = jax.vjp(f, x, w)
    return {"y": y, **dict(zip(("dx", "dw"), pull(dy), strict=True))}


@pytest.mark.parametrize("w_axes", ["nk", "kn"])
@pytest.mark.parametrize(
    ("kind", "axes", "gather", "name"),
    # By default one tensor and two; test_linear_with_gathered_weights reads w in the other ways.
    [pytest.param(*v, id=i, marks=[pytest.mark.long] * (v[3] not in [*RECIPES][:2])) for i, v in EXPERT_STEPS.items()],
)
def test_experts_are_gathered_as_bytes(kind, axes, gather, name, w_axes):
    """The tiles of the experts of a device, once or for either product, and nothing else of a quantized product."""
    mesh, recipe, rows = make_mesh(CPUS, axes, kind), RECIPES[name], P(axes[-1])
    x, w, dy = EXPERTS
    w = w if w_axes == "nk" else w.mT
    want = jax.jit(partial(grouped_vjp, recipe=recipe, w_axes=w_axes))(*home(CPUS, (x, w, dy)))
    placed = put(x, mesh, rows), put(w, mesh, gather[0]), put(dy, mesh, rows)
    with jax.set_mesh(mesh):
        got, found = run(in_order(partial(grouped_vjp, recipe=recipe, w_gather=gather, w_axes=w_axes)), *placed)
    got = dict(zip(RESULTS, got, strict=True))
    assert_bitwise(got["y"], want["y"])
    for result in ("dx", "dw"):
        np.testing.assert_allclose(got[result], want[result], rtol=1e-5, atol=1e-3, err_msg=result)
    assert_sharded(got["dw"], mesh, gather[0])
    n, k, experts = 256, 128, 4 // ways(mesh, gather[1][0] if len(gather[1]) else None)
    once = [f"u8[{experts},{n},{k // 2}]", f"u8[{experts},{n},{k // 16}]"] if recipe.fprop else []
    again = [f"u8[{experts},{k},{n // 2}]", f"u8[{experts},{k},{n // 16}]"]
    again = again if recipe.dgrad_specs and not recipe.one_weight else []
    amaxes = [f"f32[{experts},{w.shape[1]}]"] if name == "an amax per row" else []  # of the axis that is split
    original = [f"f32[{experts},{','.join(map(str, w.shape[1:]))}]"] * (recipe.fprop is None or recipe.dgrad is None)
    assert gathers(found) == sorted([*once, *again, *amaxes, *original])
    assert any(op == "reduce-scatter" and shape.startswith("f32") for op, shape in found)


def test_experts_that_were_quantized_before_are_gathered_as_often():
    mesh, gather, recipe = make_mesh(CPUS, "x"), (P(None, "x"), P()), RECIPES["one tensor for both GEMMs"]
    x, w, dy = EXPERTS
    placed = put(x, mesh, P("x")), put(w, mesh, gather[0]), put(dy, mesh, P("x"))
    weights = jax.vmap(lambda w: QuantizedWeight.of(w, recipe))(placed[1])

    def of_weights(x, w, dy):
        return grouped_vjp(x, replace(weights, array=w), dy, recipe, gather)

    with jax.set_mesh(mesh):
        want, wanted = run(partial(grouped_vjp, recipe=recipe, w_gather=gather), *placed)
        got, found = run(of_weights, *placed)
    assert gathers(found) == gathers(wanted)
    assert_bitwise(got["y"], want["y"])


def test_frozen_experts_are_gathered_as_bytes():
    mesh, (x, w, _) = make_mesh(CPUS, "x"), EXPERTS
    q = jax.vmap(quantize)(w)
    placed = put(x, mesh, ROWS), jax.device_put(q, q.shardings(mesh, P(None, "x")))
    gather = (P(None, "x"), P())
    for product in (partial(grouped_linear, w_gather=gather), RaggedDot(recipes.DEFAULT, w_gather=gather)):
        got, found = run(lambda x, q, product=product: product(x, q, GROUPS), *placed)
        assert_bitwise(got, grouped_linear(*home(CPUS, (x, q)), GROUPS))
        assert gathers(found) == ["u8[4,256,64]", "u8[4,256,8]"]


def test_a_gather_that_does_not_fit_experts_raises():
    mesh, (x, w, _) = make_mesh(CPUS, "x"), EXPERTS
    with jax.set_mesh(mesh):
        for gather, text in (
            ((P("x"), P()), r"w_gather.sharded must split axis 0 of shape \(4, 256, 64\) into multiples of 1, got"),
            ((P(None, None, "x"), P()), r"w_gather.sharded must split axis 2 of shape .* into multiples of 16, got"),
            ((P(), P(None, "x")), "w_gather.gathered must not split w into more parts than w_gather.sharded"),
        ):
            with pytest.raises(ValueError, match=f"grouped_linear: {text}"):
                grouped_linear(x[:, :64], w[..., :64], GROUPS, w_gather=gather)
    with jax.set_mesh(make_mesh(CPUS)), pytest.raises(ValueError, match=r"gathered must not split w .*, got 2 by"):
        grouped_linear(x, w, GROUPS, w_gather=(P(), P("x")))
    for op, make in (("RaggedDot", RaggedDot), ("grouped_linear", partial(grouped_linear, x, w, GROUPS))):
        with pytest.raises(TypeError, match=f"{op}: w_gather must be None or a pair"):
            make(w_gather=P("x"))


# ---------------------------------------------------------------- w_amax
def test_a_given_amax_changes_no_bit():
    x, w, dy = normal((128, 128), 1, "fp32"), normal((64, 128), 2, "fp32"), normal((128, 64), 3, "fp32")

    def results(**options):
        chosen = {name: recipe for name, recipe in RECIPES.items() if name != "an amax per row"}
        f = partial(vjp_of, key=KEY, **options)
        return jax.jit(lambda *v: {name: f(*v, recipe=recipe) for name, recipe in chosen.items()})(x, w, dy)

    assert_same_tensor(results(w_amax=-jnp.max(jnp.abs(w))), results())
    with pytest.raises(ValueError, match="linear: w_amax must be None for an NVFP4Tensor w"):
        linear(x, quantize(w), w_amax=1.0)


@pytest.mark.parametrize(
    "recipe",
    [recipes.DEFAULT, recipes.pretrain_4over6(), Recipe(fprop=None), Recipe(dgrad=(NVFP4, ROW_SCALED))],
    ids=["one pass", "two", "backward alone", "forward alone"],
)
def test_a_given_amax_is_used(recipe):
    """A larger one gives other codes, and no search for one is left."""
    x, w = normal((64, 64), 1), normal((64, 64), 2)
    made = lambda amax: jax.tree.leaves(jax.vjp(lambda w: linear(x, w, recipe, key=KEY, w_amax=amax), w))  # noqa: E731
    assert any((a != b).any() for a, b in zip(made(None), made(100.0), strict=True))
    text = str(jax.make_jaxpr(lambda w: linear(x, w, recipe, key=KEY, w_amax=1.0))(w))
    assert text.count("reduce_max") == (recipe.fprop is not None)  # of x


# ---------------------------------------------------------------- a step of a model
LAYERS, WIDTH, TOKENS = 4, 256, 512
STACK = P(None, "x", None)


def model(params, x, product, amaxes):
    def layer(h, scanned):
        w, amax = scanned
        return jnp.tanh(product("down", jnp.tanh(product("up", h, w["up"], amax["up"])), w["down"], amax["down"])), None

    return jax.lax.scan(layer, x, (params, amaxes))[0]


def by_policy(policy):
    def product(path, x, w, amax):
        found = policy.plan(jnvfp4.policy.Layer(p, (WIDTH, WIDTH)) for p in ("up", "down"))[path]
        return DotGeneral(found.recipe, path, policy.gather_of(path))(x, w, (((1,), (0,)), ((), ())), w_amax=amax)

    return product


def step(params, x, product, at_once=True):
    """With the amaxes of all layers of a weight found ``at_once``, outside the loop, or in it."""
    find = lambda w: jnp.max(jnp.abs(w), (1, 2)).astype(jnp.float32) if at_once else None  # noqa: E731
    amaxes = {name: find(w) for name, w in params.items()}

    def loss(params):
        return jnp.sum(model(params, x, product, amaxes).astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda w, g: (w - 0.01 * g).astype(w.dtype), params, gradients)


def model_operands(mesh):
    params = {name: normal((LAYERS, WIDTH, WIDTH), i) * 0.1 for i, name in enumerate(("up", "down"))}
    return put(params, mesh, STACK), put(normal((TOKENS, WIDTH), 3), mesh, ROWS)


def maxima(found) -> int:
    """How many amaxes the all-reduces of a program find; XLA may combine those of an iteration."""
    return sum(elements(shape) for op, shape in found if op == "all-reduce" and re.search(r"\bu(16|32)\[", shape))


GATHERING = Policy(default=recipes.DEFAULT, w_gather=(ROWS, WHOLE))


@functools.cache
def compiled_step(devices: tuple, at_once: bool) -> tuple:
    """The new weights, the collectives and the program of a step that gathers its weights."""
    args = model_operands(make_mesh(devices, "x"))
    compiled = jax.jit(partial(step, product=by_policy(GATHERING), at_once=at_once)).lower(*args).compile()
    return compiled(*args), collectives(compiled.as_text()), compiled.as_text()


def test_an_fsdp_step_moves_nine_of_thirty_two_bits(devices):
    """Of each weight in the forward and in the backward loop, as with bf16, whose bytes count as two an element."""
    mesh = make_mesh(devices, "x")
    _, plain = run(partial(step, product=lambda _, x, w, amax: x @ w), *model_operands(mesh))
    got, found, _ = compiled_step(tuple(devices), at_once=False)
    of_bf16 = 2 * sum(map(elements, gathers(plain)))
    assert of_bf16 == 2 * 4 * WIDTH * WIDTH  # two weights, in two loops
    assert sum(map(elements, gathers(found))) <= 0.29 * of_bf16
    assert dtypes_of(gathers(found)) == {"u8"}  # of a byte each
    moved = {(op, shape) for op, shape in found if op != "all-gather" and not is_maximum(shape)}
    part = f"f32[{WIDTH // len(devices)},{WIDTH}]"
    assert {op for op, _ in moved} == {"reduce-scatter"}
    assert set(re.findall(r"f32\[[\d,]*\]", str(moved))) == {part}
    for w in jax.tree.leaves(got):
        assert_sharded(w, mesh, STACK)


def test_given_amaxes_leave_no_all_reduce_for_weights_in_the_loop(devices):
    """No bit differs."""
    (alone, each, _), (together, once, _) = (compiled_step(tuple(devices), at_once) for at_once in (False, True))
    assert_same_tensor(together, alone)
    assert maxima(once) > 0  # of x and dy; those of the stacks are maxima of floats
    on_cpu = devices[0].platform == "cpu"
    assert maxima(each) - maxima(once) in ((2,) if on_cpu else (2, 4))  # a GPU may split off an iteration


def test_no_quantizer_reads_a_gathered_weight(devices):
    _, _, text = compiled_step(tuple(devices), at_once=True)
    calls = re.findall(r"custom_call_target=\"nvfp4_quantize\w*\", operand_layout_constraints=\{(\w+\[[\d,]*\])", text)
    part = TOKENS // len(devices)
    assert set(calls) == {f"bf16[{part},{WIDTH}]", f"bf16[{WIDTH // len(devices)},{WIDTH}]"}


def test_xla_gathers_codes_unasked(devices):
    """Of an unconstrained weight on an Auto mesh. Scales are float8 there, which a CPU widens to 16 bits."""
    mesh = make_mesh(devices, "x")
    product = by_policy(Policy(default=recipes.DEFAULT))
    _, found = run(partial(step, product=product, at_once=False), *model_operands(mesh))
    of_codes = [shape for shape in gathers(found) if f"[{WIDTH},{WIDTH // 2}]" in shape.replace("[1,", "[")]
    assert of_codes
    assert dtypes_of(of_codes) == {"u8"}
    assert set(map(elements, gathers(found))) == {WIDTH * WIDTH // 2, WIDTH * WIDTH // 16}
    if devices[0].platform == "cpu":  # a GPU may have an iteration of a loop apart
        assert sum(map(elements, gathers(found))) == 4 * WIDTH * (WIDTH // 2 + WIDTH // 16)


# ---------------------------------------------------------------- dot_general, einsum
def grads_of(f, *operands):
    y, pull = jax.vjp(f, *operands)
    return y, *pull(y)


NUMBERS = (((1, 2), (0, 1)), ((), ()))  # of Flax; two contracting axes count as one, of which the first is sharded
# Each expert has an amax of its own, and stays on its devices along the axis of experts.
GATHERED_PRODUCTS = {
    "dot_general": (partial(dot_general, dimension_numbers=NUMBERS), ((256, 128, 2), (128, 2, 64)), P("x"), (0, 1, 2)),
    "experts": (partial(einsum, "ebk,enk->ebn"), ((2, 256, 128), (2, 128, 128)), P(None, "x"), (1, 2)),
}


@pytest.mark.parametrize(("product", "shapes", "spec", "axes"), GATHERED_PRODUCTS.values(), ids=GATHERED_PRODUCTS)
def test_products_with_gathered_weights(product, shapes, spec, axes):
    mesh, product = make_mesh(CPUS, "x"), partial(product, recipe=Recipe())
    x, w = normal(shapes[0], 1, "fp32"), normal(shapes[1], 2, "fp32")
    want = jax.jit(partial(grads_of, product))(*home(CPUS, (x, w)))
    given = partial(product, w_gather=(spec, P()), w_amax=jnp.max(jnp.abs(w), axes))
    got, found = run(partial(grads_of, given), put(x, mesh, spec), put(w, mesh, spec))
    assert_same_tensor(got[:2], want[:2])
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-3)  # a sum over devices
    assert_sharded(got[2], mesh, spec)
    codes = [shape for shape in gathers(found) if elements(shape) > 1024]  # others are amaxes of experts
    assert codes
    assert dtypes_of(codes) == {"u8"}


# ---------------------------------------------------------------- policies
def test_a_rule_has_its_own_gather():
    other = (COLUMNS, WHOLE)
    policy = Policy([Rule("up", recipes.DEFAULT, other)], default=recipes.DEFAULT, w_gather=(ROWS, WHOLE))
    assert policy.gather_of("up") == other
    assert policy.gather_of("down") == (ROWS, WHOLE)
    assert hash(policy) == hash(Policy(policy.rules, default=policy.default, w_gather=policy.w_gather))
    for make in (partial(Rule, "up", None), Policy, partial(DotGeneral, recipes.DEFAULT, "up")):
        with pytest.raises(TypeError, match="w_gather must be None or a pair"):
            make(w_gather=ROWS)


# ---------------------------------------------------------------- what is refused
def on_x(shape, seed=0, kind="auto", spec=WHOLE):
    return put(normal(shape, seed), make_mesh(CPUS, "x", kind), spec)


def in_shard_map(f):
    """Called with a part of a tensor or array, of 16 rows."""
    mapped = jax.shard_map(f, mesh=make_mesh(CPUS, "x"), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return lambda: jax.eval_shape(mapped, quantize(normal((128, 64)), ROW_SCALED))


def gather_of(sharded, gathered, shape=(128, 64)):
    return lambda: gather_quantized(on_x(shape), NVFP4_2D, sharded=sharded, gathered=gathered)


def linear_with(**options):
    return lambda: linear(on_x((64, 256), 1), on_x((64, 256), 2), **options)


def einsum_with(**options):
    return lambda: einsum("ebcd,ecdn->ebn", normal((2, 16, 2, 32)), normal((2, 2, 32, 16)), recipe=Recipe(), **options)


OTHER_MESH = NamedSharding(jax.make_mesh((4, 2), ("x", "y"), devices=CPUS), P())
REFUSED = [
    (r"all_gather: axis_name must be manual axes .*, \['x'\], got 'y'", in_shard_map(lambda t: all_gather(t, "y"))),
    (r"all_gather: axis_name must be manual axes .*, \[\], got 'x'",
     lambda: all_gather(quantize(normal((32, 64))), "x")),
    (r"axis must be an integer from -2 to 1 for .*, got 2", in_shard_map(lambda t: all_gather(t, "x", axis=2))),
    ("axis must be an integer .* got True", in_shard_map(lambda t: all_gather(t, "x", axis=True))),
    *((r"all_gather: axis_name must be a string or a tuple of strings, got " + re.escape(repr(name)),
       in_shard_map(lambda t, name=name: all_gather(t, name))) for name in ((), ("x", 3))),
    ("all_gather: q must be an NVFP4Tensor", in_shard_map(lambda t: all_gather(t.data, "x"))),
    (r"sharded must have at most 2 entries for shape \(128, 64\)", gather_of(P("x", None, None), WHOLE)),
    (r"sharded must have axes of the mesh, \['x'\], got 'z' in P\('z',\)$", gather_of(P("z"), WHOLE)),
    (r"sharded must split axis 1 of shape .* into multiples of 16, got .* 8 ways", gather_of(P(None, "x"), WHOLE)),
    (r"sharded must split axis 1 of shape \(16, 256\) into multiples of 64",
     lambda: gather_quantized(on_x((16, 256)), jnvfp4.WINDOW64, sharded=COLUMNS, gathered=WHOLE)),
    ("gathered must split axis 1", gather_of(P("x"), P(None, "x"))),
    (r"sharded must split axis 0 of shape \(64, 64\) into multiples of 16", gather_of(ROWS, WHOLE, (64, 64))),
    ("gather_quantized: w must have rank 2 or more",
     lambda: gather_quantized(normal((64,)), NVFP4, sharded=P(), gathered=P())),
    ("gather_quantized: sharded must be a PartitionSpec or a NamedSharding, got 'x'", gather_of("x", WHOLE)),
    ("gather_quantized: gathered must be a PartitionSpec or a NamedSharding, got None", gather_of(ROWS, None)),
    ("gather_quantized: gathered must be of the mesh", gather_of(ROWS, OTHER_MESH)),
    (r"leaves alone, \[\], got 'x' .* there is jnvfp4.sharding.all_gather",
     in_shard_map(lambda t: gather_quantized(dequantize(t), NVFP4, sharded=ROWS, gathered=WHOLE))),
    ("linear: w_gather must be None or a pair", linear_with(w_gather=ROWS)),
    ("linear: w_gather must be None or a pair", linear_with(w_gather=(ROWS, None))),
    (r"linear: w_gather.sharded must have axes of the mesh, \['x'\], got 'y'", linear_with(w_gather=(P("y"), WHOLE))),
    ("linear: w_gather.sharded must have at most 2 entries", linear_with(w_gather=(P("x", None, None), WHOLE))),
    (r"w_gather.sharded must split axis 0 of .* multiples of 16", linear_with(w_gather=(ROWS, WHOLE))),
    (r"w_gather.sharded must split axis 0 of .* multiples of 16", linear_with(w_gather=(ROWS, WHOLE), recipe=TWICE)),
    ("w_amax must be None, since no spec that", linear_with(w_amax=1.0, recipe=Recipe(2 * (NVFP4_RHT,), None, None))),
    ("w_amax must be None, since no spec", linear_with(w_amax=1.0, recipe=Recipe((NVFP4, ROW_SCALED), None, None))),
    (r"linear: w_amax must be float32 of shape \(\), got .* \(2,\)", linear_with(w_amax=jnp.ones(2))),
    (r"linear: w_amax must be float32 of shape \(\), got float16", linear_with(w_amax=jnp.float16(1))),
    (r"over different axes of an Explicit mesh, got 'x' for both, .* w_gather.gath",
     lambda: linear(*(on_x((256, 256), i, "explicit", ROWS) for i in (1, 2)), w_gather=(ROWS, ROWS))),
    ("w_gather may shard only the first of several axes", einsum_with(w_gather=(P(None, None, "x"), P()))),
    ("w_gather may shard only the first of several axes", lambda: einsum(
        "abmk,abkn->abmn", normal((2, 8, 16, 32)), normal((2, 8, 32, 16)), w_gather=(P(None, "x"), P(None, "x")))),
    (r"einsum: w_gather must not gather the batch axes \(0,\)", einsum_with(w_gather=(P("x"), P()))),
    (r"einsum: w_amax must have the batch axes of rhs, \(2,\), got shape \(\)", einsum_with(w_amax=1.0)),
    ("einsum: w_gather must be None or a pair", einsum_with(w_gather="x")),
    ("einsum: w_gather must have at most 4 entries", einsum_with(w_gather=(P(None, None, None, None, "z"), P()))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_raise(message, call):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


SWAPPED = {
    "linear": linear,
    "kn": partial(linear, w_axes="kn"),
    "high precision": partial(linear, recipe=Recipe(None, None, None)),
    "NVFP4Tensor": lambda x, w, w_gather: linear(x, quantize(w), w_gather=w_gather),
    "dot_general": partial(dot_general, dimension_numbers=(((1,), (0,)), ((), ()))),
    "DotGeneral": lambda x, w, w_gather: DotGeneral(recipes.DEFAULT, "up", w_gather)(x, w, (((1,), (0,)), ((), ()))),
    "einsum": lambda x, w, w_gather: einsum("bk,kn->bn", x, w, w_gather=w_gather),
    "policy": lambda x, w, w_gather: by_policy(Policy(default=recipes.DEFAULT, w_gather=w_gather))("up", x, w, None),
    "gather_quantized": lambda _, w, w_gather: gather_quantized(w, NVFP4, sharded=w_gather[0], gathered=w_gather[1]),
}


@pytest.mark.parametrize("call", SWAPPED.values(), ids=SWAPPED)
def test_a_pair_the_wrong_way_round_is_refused(call):
    """Each device would keep all of w, and products would read a part."""
    text = r"gathered must not split w into more parts than .*sharded, got 8 by .*'x'.* and [12] by .*; swap them"
    for axes, swapped in (("xy", (ROWS, P("x", "y"))), ("x", (WHOLE, ROWS))):
        mesh = make_mesh(CPUS, axes)
        x, w = put(normal((64, 256), 1), mesh, P()), put(normal((256, 256), 2), mesh, P())
        with pytest.raises(ValueError, match=text):
            call(x, w, w_gather=swapped)
    for kept in (P(P.UNCONSTRAINED), P(None, P.UNCONSTRAINED)):  # what these split is not known
        jax.eval_shape(partial(call, w_gather=(kept, ROWS)), x, w)
