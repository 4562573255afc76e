"""Weights whose block scales are in tiles: the results of the NVFP4Tensor, wherever and however they are used."""

from dataclasses import replace
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, random_tensor
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import home, make_mesh, put
from operands import normal

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    PackedWeight,
    Recipe,
    four_over_six,
    linear,
    matmul_nt,
    prepack_weight,
    quantize,
    recipes,
    supports,
)
from jnvfp4.sharding import all_gather

SPECS = {"plain": NVFP4, "2d": NVFP4_2D, "rows": ROW_SCALED, "rotated": NVFP4_RHT, "4over6": four_over_six()}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
SHAPES = [(16, 16), (1, 32), (47, 80), (128, 64), (300, 208), (2, 3, 130, 48), (0, 16)]
X, W, DY = normal((32, 64), 1), normal((48, 64), 2), normal((32, 48), 3)


def recipe_of(spec):
    return Recipe((replace(NVFP4, format=Format(rht=True)) if spec.format.rht else NVFP4, spec), None, None)


def run(x, w, dy, recipe, **options):
    y, pull = jax.vjp(lambda x: linear(x, w, recipe, **options), x)
    return y, pull(dy)[0]


# ---------------------------------------------------------------- the value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_unpack_gives_the_tensor_back(shape, scope):
    w = random_tensor(0, shape, Format(scope), scales=range(256))
    packed = prepack_weight(w)
    *lead, rows, cols = shape
    assert packed.tiles.shape == (*lead, -(-rows // 128), -(-cols // 64) * 512)
    assert (packed.shape, packed.ndim, packed.tiles.dtype) == (shape, len(shape), jnp.uint8)
    assert packed.nbytes == packed.data.nbytes + packed.tiles.nbytes + packed.amax.nbytes
    assert_same_tensor(packed.unpack(), w)
    assert_same_tensor(jax.jit(lambda w: prepack_weight(w).unpack())(w), w)


def test_it_shows_its_shape_and_is_no_array():
    packed = prepack_weight(quantize(W))
    assert repr(packed) == f"PackedWeight(shape=(48, 64), format=nvfp4_tensor_448, nbytes={packed.nbytes})"
    assert repr(PackedWeight(1, 2, 3)).startswith("PackedWeight(data=1, tiles=2, amax=3, format=Format(")
    for convert in (np.asarray, jnp.asarray):
        with pytest.raises(TypeError, match=r"a PackedWeight is not an array, got shape \(48, 64\)"):
            convert(packed)


def test_leaves_on_the_host(native):
    w = quantize(W)
    assert_same_tensor(prepack_weight(jax.device_get(w)), prepack_weight(w))
    assert_bitwise(matmul_nt(X, jax.device_get(prepack_weight(w))), matmul_nt(X, w))


def test_names_of_leaves_are_those_of_no_tensor():
    """A store that keeps leaves by name finds neither in place of the other, nor one of another format."""
    names = lambda t: {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(t)}  # noqa: E731
    trees = [make(quantize(W, spec)) for spec in (NVFP4, ROW_SCALED) for make in (prepack_weight, lambda w: w)]
    found = [names(t) for t in trees]
    assert sum(map(len, found)) == len(set().union(*found)) == 12
    assert jnvfp4.from_state(jnvfp4.to_state({"w": trees[0]}))["w"].tiles is trees[0].tiles


@pytest.mark.filterwarnings("ignore")  # of orbax and of what it imports
def test_orbax_restores_what_it_saved(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"w": prepack_weight(quantize(W, ROW_SCALED))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "orbax", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
    assert_same_tensor(restored, tree)


# ---------------------------------------------------------------- products
@every_spec
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_products(native, spec, implementation, accumulation):
    w, options = quantize(W, spec), {"implementation": implementation, "accumulation": accumulation}
    a = quantize(X, NVFP4_RHT if spec.format.rht else NVFP4)
    multiply = jax.jit(partial(matmul_nt, **options, bias=jnp.linspace(-1, 1, 48)))
    assert_bitwise(multiply(a, prepack_weight(w)), multiply(a, w))
    if not spec.format.rht:
        assert_bitwise(multiply(X, prepack_weight(w)), multiply(X, w))


def test_sizes_of_zero():
    for m, n in ((0, 16), (16, 0)):
        assert matmul_nt(normal((m, 32)), prepack_weight(quantize(normal((n, 32))))).shape == (m, n)


@every_spec
def test_linear_and_its_gradient(native, spec):
    w, recipe = quantize(W, spec), recipe_of(spec)
    f = jax.jit(partial(run, recipe=recipe, bias=jnp.linspace(-1, 1, 48)))
    assert_same_tensor(f(X, prepack_weight(w), DY), f(X, w, DY))


def test_weights_of_16_bit_inputs(native):
    w, recipe = quantize(W), recipes.inference(weight_only=True)
    f = jax.jit(partial(run, recipe=recipe))
    assert_same_tensor(f(X, prepack_weight(w), DY), f(X, w, DY))


def test_supports_answers_for_it():
    packed = prepack_weight(quantize(W))
    assert supports("linear", X, packed)
    assert supports("matmul_nt", X, packed) == supports("matmul_nt", X, quantize(W))


# ---------------------------------------------------------------- transforms
@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)], ids=["x", "both", "w"])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "several"])
@pytest.mark.parametrize("spec", [NVFP4, ROW_SCALED], ids=["plain", "rows"])
def test_vmap(native, axes, lead, spec):
    """Of a product whose operands may have leading axes already."""
    of_a, of_w = ((3,) if axis == 0 else () for axis in axes)
    a, w = normal((*of_a, *lead, 32, 64), 1), quantize(normal((*of_w, *lead, 48, 64), 2), spec)
    if of_w:
        w = jax.vmap(partial(quantize, spec=spec))(normal((*of_w, *lead, 48, 64), 2))
    for bias in (None, jnp.linspace(-1, 1, 48)):
        f = jax.jit(jax.vmap(partial(matmul_nt, bias=bias, accumulation="pinned"), axes))
        packed = jax.vmap(prepack_weight)(w) if of_w else prepack_weight(w)
        assert_bitwise(f(a, packed), f(a, w))


def test_scan_over_layers(native):
    weights, x = jax.vmap(quantize)(normal((3, 64, 64), 2)), normal((16, 64), 1)

    def by_scan(x, weights):
        return jnp.sum(lax.scan(lambda x, w: (linear(x, w, recipes.inference()), None), x, weights)[0] ** 2)

    f = jax.jit(jax.grad(by_scan))
    assert_bitwise(f(x, jax.vmap(prepack_weight)(weights)), f(x, weights))


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable"])
def test_remat_changes_no_bit(native, policy):
    w = quantize(W)
    loss = lambda x, w: jnp.sum(jnp.sin(linear(x, w).astype(jnp.float32)))  # noqa: E731
    f = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    assert_bitwise(jax.jit(jax.grad(f))(X, prepack_weight(w)), jax.jit(jax.grad(loss))(X, w))


def test_the_backward_pass_keeps_the_weight_alone():
    packed = prepack_weight(quantize(W))
    kept = jax.tree.leaves(jax.vjp(lambda x: linear(x, packed), X)[1])
    assert sum(leaf.nbytes for leaf in kept) == packed.nbytes


def test_it_is_a_constant():
    loss = lambda x, w: jnp.sum(linear(x, w).astype(jnp.float32))  # noqa: E731
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(loss, 1)(X, prepack_weight(quantize(W)))


def test_export(native):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    w = prepack_weight(quantize(W))
    f = jax.jit(lambda x, w: (matmul_nt(x, w), w))
    exported = jax.export.export(f, platforms=[native.platform], disabled_checks=jnvfp4.export_checks())(X, w)
    assert_same_tensor(jax.export.deserialize(exported.serialize()).call(X, w), f(X, w))


# ---------------------------------------------------------------- over devices
LAYOUTS = {  # of x, of w, and of its tiles as the product reads them
    "tokens": (P("x", None), P(None, None)),
    "n": (P(None, None), P("y", None)),
    "tokens_and_n": (P("x", None), P("y", None)),
    "k_of_x": (P(None, "y"), P(None, None)),
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("of_x", "of_w"), LAYOUTS.values(), ids=LAYOUTS)
def test_sharded(devices, kind, of_x, of_w):
    """N is split between tiles, and no byte of w moves."""
    mesh = make_mesh(devices, kind=kind)
    rows = 128 * len(devices)
    x, w, dy = normal((64, 128), 1), quantize(normal((rows, 128), 2), ROW_SCALED), normal((64, rows), 3)
    packed = prepack_weight(w)
    packed_there = jax.device_put(packed, packed.shardings(mesh, of_w))
    f = jax.jit(partial(run, recipe=recipe_of(ROW_SCALED), accumulation="pinned"))
    args = put(x, mesh, of_x), packed_there, put(dy, mesh, P(of_x[0], of_w[0]))
    y, dx = f(*args)
    want_y, want_dx = f(*home(devices, (x, w, dy)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(of_x[0], of_w[0])), 2)
    if devices[0].platform == "cpu" or of_x[1] is None:
        assert_bitwise(y, want_y)
    np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (dx, want_dx)), rtol=0.02, atol=0.2)
    if of_x[1] is None:
        forward = jax.jit(partial(linear, recipe=recipe_of(ROW_SCALED)))
        assert "all-gather" not in forward.lower(*args[:2]).compile().as_text()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("rows", [128, 192], ids=["part of a tile", "more than a tile"])
def test_n_that_splits_a_tile_is_gathered(devices, kind, rows):
    mesh = make_mesh(devices, "x", kind)
    w = quantize(normal((rows, 128), 2))
    packed = prepack_weight(w)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x", None))
    there = jax.device_put(packed, PackedWeight(split, whole, whole, w.format))
    f = jax.jit(partial(matmul_nt, accumulation="pinned"))
    assert_bitwise(f(put(normal((32, 128), 1), mesh, P()), there), f(*home(devices, (normal((32, 128), 1), w))))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P()], ids=str)
@pytest.mark.parametrize("rows", [128, 1024])
def test_a_sharded_tensor_is_packed(devices, kind, spec, rows):
    mesh = make_mesh(devices, "x", kind)
    w = quantize(normal((rows, 128), 2))
    there = jax.device_put(w, w.shardings(mesh, spec))
    packed = jax.jit(prepack_weight)(there)
    assert_same_tensor(jax.device_get(packed), jax.device_get(prepack_weight(w)))
    assert_same_tensor(jax.device_get(jax.jit(lambda p: p.unpack())(packed)), jax.device_get(w))


def test_shard_map(devices):
    """Each device has whole tiles of its rows."""
    mesh = make_mesh(devices, "x")
    w = quantize(normal((128 * len(devices), 64), 2))
    packed = prepack_weight(w)
    of_w = PackedWeight(P("x", None), P("x", None), P(), w.format)
    local = partial(matmul_nt, accumulation="pinned")
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), of_w), out_specs=P(None, "x")))
    assert_bitwise(f(X, packed), jax.jit(local)(*home(devices, (X, w))))


# ---------------------------------------------------------------- refused
PACKED = prepack_weight(quantize(W))
ONLY = r"; only matmul_nt \(as b\) and linear \(as w\) take one, and its unpack\(\) is the NVFP4Tensor"
SIZES = jnp.array([32], jnp.int32)
NT = (((1,), (1,)), ((), ()))
INVALID = {
    "quantize": (lambda: quantize(PACKED), f"quantize: x must be an array, got a PackedWeight{ONLY}"),
    "quantize_pair": (lambda: jnvfp4.quantize_pair(PACKED), f"quantize_pair: x must .* a PackedWeight{ONLY}"),
    "fake_quant": (lambda: jnvfp4.fake_quant(PACKED), f"fake_quant: x must be an array, got a PackedWeight{ONLY}"),
    "dequantize": (lambda: jnvfp4.dequantize(PACKED), f"dequantize: t must be an NVFP4Tensor, got PackedWeight{ONLY}"),
    "transpose": (lambda: jnvfp4.transpose(PACKED), f"transpose: q must be an NVFP4Tensor, got PackedWeight{ONLY}"),
    "a": (lambda: matmul_nt(PACKED, PACKED), f"matmul_nt: a must be an array, got a PackedWeight{ONLY}"),
    "grouped a": (lambda: jnvfp4.grouped_matmul_nt(PACKED, quantize(W[None]), SIZES), "a must be an array, got a Pac"),
    "grouped b": (
        lambda: jnvfp4.grouped_matmul_nt(X, PACKED, SIZES),
        f"grouped_matmul_nt: b must be an NVFP4Tensor, got PackedWeight{ONLY}",
    ),
    "grouped_linear": (
        lambda: jnvfp4.grouped_linear(X, PACKED, SIZES),
        f"grouped_linear: w must be an array, got a PackedWeight{ONLY}",
    ),
    "RaggedDot": (lambda: jnvfp4.RaggedDot()(X, PACKED, SIZES), f"RaggedDot: rhs must .* a PackedWeight{ONLY}"),
    "x": (lambda: linear(PACKED, PACKED), f"linear: x must be an array, got a PackedWeight{ONLY}"),
    "quantized": (lambda: linear(X, W, quantized=PACKED), "linear: quantized must be a Produced, .* got PackedWeight"),
    "dot_general": (lambda: jnvfp4.dot_general(X, PACKED, NT), f"rhs must be an array, got a PackedWeight{ONLY}"),
    "einsum": (lambda: jnvfp4.einsum("mk,nk->mn", X, PACKED), f"must be an array, got a PackedWeight{ONLY}"),
    "producer": (lambda: jnvfp4.rms_norm_quantize(PACKED, jnp.ones(64)), f"must be an array, got a PackedWeight{ONLY}"),
    "all_gather": (lambda: all_gather(PACKED, "x"), f"all_gather: q must be an NVFP4Tensor, got PackedWeight{ONLY}"),
    "packed twice": (lambda: prepack_weight(PACKED), f"prepack_weight: w must be .*, got PackedWeight{ONLY}"),
    "array": (lambda: prepack_weight(W), "prepack_weight: w must be an NVFP4Tensor, got ArrayImpl"),
    "b": (lambda: matmul_nt(X, W), "matmul_nt: b must be an NVFP4Tensor or a PackedWeight, got ArrayImpl"),
    "windows": (
        lambda: prepack_weight(quantize(W, WINDOW64)),
        'prepack_weight: w must have amax_scope "tensor" or "row", got "window64", whose products read no tiles',
    ),
    "windows of parts": (
        lambda: matmul_nt(quantize(X), replace(PACKED, format=Format("window64"))),
        'matmul_nt: b must have amax_scope "tensor" or "row" where it is packed, got "window64"',
    ),
    "scale": (
        lambda: prepack_weight(replace(quantize(W), scale=jnp.zeros((48, 4)))),
        "prepack_weight: w.scale must be float8_e4m3fn, got float32",
    ),
    "tiles": (
        lambda: matmul_nt(X, replace(PACKED, tiles=PACKED.tiles[:, :-1])),
        r"matmul_nt: b.tiles must have shape \(1, 512\) for data \(48, 32\), got \(1, 511\); jnvfp4.prepack_weight",
    ),
    "type of tiles": (
        lambda: linear(X, replace(PACKED, tiles=PACKED.tiles.astype(jnp.float32))),
        "linear: w.tiles must be uint8, got float32",
    ),
    "format": (
        lambda: linear(X, prepack_weight(quantize(W, ROW_SCALED))),
        "linear: w must have the format of recipe.fprop.w, nvfp4_tensor_448, got nvfp4_row_448",
    ),
    "kn": (lambda: linear(X, PACKED, w_axes="kn"), "linear: w_axes must be 'nk' for a PackedWeight w"),
    "no fprop": (
        lambda: linear(X, PACKED, Recipe(None, None, None)),
        "recipe.fprop must be a pair for a PackedWeight w",
    ),
    "w_amax": (lambda: linear(X, PACKED, w_amax=1.0), "linear: w_amax must be None for a PackedWeight w"),
    "w_gather": (
        lambda: linear(X, PACKED, w_gather=(P(), P())),
        r"linear: w_gather must be None for a PackedWeight w, got .*; pass its unpack\(\), or shard it by w.shardings",
    ),
    "rank": (
        lambda: linear(X, prepack_weight(quantize(normal((2, 48, 64))))),
        r"linear: w must have rank 2, \[N, K\], got w.shape=\(2, 48, 64\)",
    ),
}


@pytest.mark.parametrize(("call", "text"), INVALID.values(), ids=INVALID)
def test_what_does_not_fit_is_refused(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("x", "spec must be a PartitionSpec, got 'x'"),
        (P(None, None, "x"), r"spec must have at most 2 entries for shape \(\d+, 64\)"),
        (P(None, "x"), r"spec must not split K, got .*; an NVFP4Tensor can be split there"),
        (P("x"), r"spec must split N into multiples of 128, got .* for N=\d+, \d+ ways"),
    ],
    ids=["type", "entries", "K", "N"],
)
def test_shardings_that_do_not_fit(devices, spec, text):
    packed = prepack_weight(quantize(normal((64 * len(devices), 64))))
    with pytest.raises((TypeError, ValueError), match=f"PackedWeight.shardings: {text}"):
        packed.shardings(make_mesh(devices, "x"), spec)


def call_native(w, scale, tiled=True):
    """The FFI call of the CPU, of which jnvfp4 never asks for tiles."""
    results = [jax.ShapeDtypeStruct((32, 48), jnp.float32), jax.ShapeDtypeStruct((0,), jnp.uint8)]
    none, a = (jnp.zeros(0, jnp.uint8), jnp.zeros(0)), X.astype(jnp.bfloat16)
    attrs = {"kernel": "cpu_dense_elements", "pinned": False, "a_windows": False, "b_windows": False, "b_tiled": tiled}
    attrs |= {"a_e4m3_max": np.int32(448), "b_e4m3_max": np.int32(448)}
    return jax.ffi.ffi_call("nvfp4_matmul", results)(a, *none, w.data, scale, w.amax, jnp.zeros(0), **attrs)


@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        (PACKED.tiles, "cpu_dense_elements cannot: it reads no block scales in tiles"),
        (PACKED.tiles[:, :-1], r"b tiles must have shape \(1,512\), got \(1,511\)"),
        (PACKED.tiles.astype(jnp.float32), r"b tiles must be uint8, got float32"),
    ],
    ids=["kernel", "shape", "type"],
)
def test_the_handler_refuses_tiles(tiles, text):
    if not jnvfp4._native.available("cpu"):
        pytest.skip("no CPU kernels")
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call_native(PACKED, tiles))


def test_it_is_a_pytree_of_its_own():
    assert jax.tree.structure(PACKED) != jax.tree.structure(quantize(W))
    assert isinstance(jax.tree.map(lambda v: v, PACKED), PackedWeight)
    assert isinstance(PACKED.unpack(), NVFP4Tensor)
