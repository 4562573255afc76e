"""Sharded quantization equals the unsharded run bit for bit, with exactly the collectives a layout needs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_tensor, key_for, quantize_as, quantize_pair_as
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    LAYOUTS,
    VARIED_SPECS,
    X,
    assert_scalar_maxima,
    assert_sharded,
    elements,
    every_kind,
    given_amax,
    home,
    is_maximum,
    make_mesh,
    put,
    run,
    shard,
    shard_data,
    ways,
)
from operands import exact_tensor, exact_with_scope, normal

from jnvfp4 import NVFP4, NVFP4_2D, dequantize, matmul_nt, quantize, quantize_pair
from jnvfp4._primitives._sides import Side
from jnvfp4.spec import FUSED_PAIRS, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, SUPPORTED_SPECS, WINDOW64, name_of


# ---------------------------------------------------------------- quantize
@partial(jax.jit, static_argnums=(2, 3))
def quantize_by(x, amaxes, transpose, specs):
    """All in one program, since 34 cost less than two alone. ``amaxes``: by scope, or empty."""
    return {name_of(s): quantize_as(s, x, amaxes, KEY, transpose) for s in specs}


def assert_split_like(tensors, mesh, spec):
    for t in tensors:
        assert_sharded(t.data, mesh, spec)
        assert_sharded(t.scale, mesh, spec)
        assert_sharded(t.amax, mesh, P(*spec[: t.amax.ndim]))


def turn(spec, transpose):
    return P(*reversed(spec)) if transpose else spec


EVERY_PAIR = tuple(sorted(FUSED_PAIRS, key=lambda pair: tuple(map(name_of, pair))))
VARIED_PAIRS = ((NVFP4_SR, NVFP4_RHT_SR), (ROW_SCALED, ROW_SCALED), (WINDOW64, WINDOW64))


def single_calls(pair, x, amaxes, key):
    sides = zip(pair, amaxes, (False, True), strict=True)
    return tuple(quantize_as(spec, x, of_side, key, transpose) for spec, of_side, transpose in sides)


@partial(jax.jit, static_argnums=(2, 3, 4))
def by_quantizers(x, amaxes, specs, pairs, quantize_both):
    """Either orientation, and both at once. ``amaxes``: of rows and of columns by scope, or empty."""
    of_pairs = {"/".join(map(name_of, pair)): quantize_both(pair, x, amaxes, KEY) for pair in pairs}
    return [quantize_by(x, amaxes[t], bool(t), specs) for t in (0, 1)], of_pairs


def check_quantizers(devices, kind, axes, spec, given, specs=VARIED_SPECS, pairs=VARIED_PAIRS):
    mesh, x, amaxes = make_mesh(devices, axes, kind), jnp.asarray(X.make()), ({}, {})
    if given:
        scopes = ("tensor", "row", "window64")
        amaxes = tuple({scope: given_amax(x.shape, scope, t) for scope in scopes} for t in (False, True))
    placed = tuple(
        {scope: put(a, mesh, P(*turn(spec, t)[: a.ndim])) for scope, a in of_side.items()}
        for t, of_side in enumerate(amaxes)
    )
    got, found = run(lambda x, a: by_quantizers(x, a, specs, pairs, quantize_pair_as), put(x, mesh, spec), placed)
    assert_same_tensor(got, by_quantizers(*home(devices, (x, amaxes)), specs, pairs, single_calls))
    alone, of_pairs = got
    for t, tensors in enumerate(zip(*of_pairs.values(), strict=True)):
        assert_split_like([*alone[t].values(), *tensors], mesh, turn(spec, t))
    assert {op for op, _ in found} <= (set() if given else {"all-reduce"})


few_layouts = pytest.mark.parametrize(("axes", "spec"), LAYOUTS[2::2], ids=lambda v: str(v).replace(" ", ""))


@few_layouts
@every_kind
def test_quantizers_with_amax_need_no_collective(devices, kind, axes, spec):
    check_quantizers(devices, kind, axes, spec, given=True)


@pytest.mark.parametrize(("axes", "spec"), [LAYOUTS[i] for i in (0, 1, 2, 4)], ids=str)
def test_quantizers_find_the_amax_of_the_whole(devices, axes, spec):
    check_quantizers(devices, "auto", axes, spec, given=False)


@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.long)], ids=["found", "given"])
def test_every_spec_and_fused_pair(devices, given):
    check_quantizers(devices, "explicit", "xy", P("y", "x"), given, SUPPORTED_SPECS, EVERY_PAIR)


# Each layout with some of the specs whose amaxes are found in different ways, and an orientation.
COUNTED = [
    pytest.param(*layout, spec, i % 2 == 1, id=f"{name_of(spec)}-{layout[1]}-{i % 2}".replace(" ", ""))
    for i, layout in enumerate(LAYOUTS)
    for spec in (ROW_SCALED, (NVFP4, NVFP4_RHT, WINDOW64)[i % 3])
]


@pytest.mark.parametrize(("axes", "spec", "qspec", "transpose"), COUNTED)
def test_quantize_reduces_only_the_amax(devices, axes, spec, qspec, transpose):
    mesh, x, turned = make_mesh(devices, axes), jnp.asarray(X.make()), turn(spec, transpose)
    got, found = run(partial(quantize, spec=qspec, transpose=transpose), put(x, mesh, spec))
    if qspec.format.amax_scope == "tensor":
        assert_scalar_maxima(found, mesh, spec)
    else:
        rows = got.amax.shape[0] // ways(mesh, turned[0])
        split = qspec is ROW_SCALED and ways(mesh, turned[1]) > 1
        assert found == [("all-reduce", f"u32[{rows}]")] * split


@pytest.mark.parametrize("qspec", [ROW_SCALED, NVFP4_RHT], ids=name_of)
def test_an_amax_of_special_numbers_over_devices(devices, qspec):
    """Magnitudes are compared as bits: NaN of either sign and payload is the largest, nothing is flushed to zero."""
    mesh, bits = make_mesh(devices, "x"), np.zeros((32, 1024), np.uint32)
    for row, special in enumerate([0x7FC00001, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF]):
        bits[row, 5::128] = 0x3F800000 if special & 0x7F800000 else 0
        bits[row, 700] = special
    x = jnp.asarray(bits.view(np.float32))
    for rows in (x, x[5:7]) if qspec is ROW_SCALED else (x[5:7],):
        got = quantize(put(rows, mesh, P(None, "x")), qspec)
        assert_same_tensor(got, quantize(home(devices, rows), qspec))


def test_quantize_under_the_reference_lowering(devices):
    mesh, x = make_mesh(devices, kind="explicit"), normal((32, 128))
    f = partial(quantize, spec=NVFP4_SR, key=KEY)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(f, implementation="reference"))(put(x, mesh, P("x", "y")))
    assert_same_tensor(got, f(home(devices, x)))


def test_eager_calls_stay_sharded(devices):
    x = normal((128, 512))
    for axes, spec in LAYOUTS[2:5]:
        mesh = make_mesh(devices, axes)
        got = quantize(put(x, mesh, spec))
        assert_sharded(got.data, mesh, spec)
        assert_same_tensor(got, quantize(home(devices, x)))


@every_kind
def test_an_ambient_mesh_and_an_unsharded_array(devices, kind):
    """jax.set_mesh makes jit compile for all its devices, though no argument says how they are arranged."""
    x = normal((32, 64))
    want = quantize(home(devices, x), ROW_SCALED)
    with jax.set_mesh(make_mesh(devices, kind=kind)):
        assert_same_tensor(quantize(np.asarray(x), ROW_SCALED), want)


def test_a_sharding_constraint_is_enough(devices):
    mesh, x = make_mesh(devices), normal((32, 512))
    with jax.set_mesh(mesh):
        f = jax.jit(lambda: quantize(jax.lax.with_sharding_constraint(x, P("x", "y")), amax=jnp.float32(4)))
        got = f()
    assert_sharded(got.scale, mesh, P("x", "y"))
    assert_same_tensor(got, quantize(home(devices, x), amax=jnp.float32(4)))


@every_kind
def test_split_leading_axes_need_no_collective(devices, kind):
    mesh, x = make_mesh(devices, kind=kind), normal((8, 32, 256))
    f = partial(quantize, amax=jnp.float32(4))
    for spec in (P("x", "y"), P(None, "x", "y"), P(("x", "y"))):
        got, found = run(f, put(x, mesh, spec))
        assert_same_tensor(got, f(home(devices, x)))
        assert_sharded(got.data, mesh, spec)
        assert found == []


@every_kind
def test_vmap_over_a_sharded_axis_has_no_collective(devices, kind):
    mesh, x = make_mesh(devices, "x", kind), normal((8, 32, 64))
    f = jax.vmap(lambda x: [quantize(x, s, key=key_for(s)) for s in VARIED_SPECS])
    got, found = run(f, put(x, mesh, P("x")))
    assert_same_tensor(got, jax.jit(f)(home(devices, x)))
    assert all(t.amax.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), t.amax.ndim) for t in got)
    assert found == []


# ---------------------------------------------------------------- random bits do not depend on the devices
STREAMS = {  # on all devices, or on so many
    "leading_columns": (None, "xy", P("x", None, "y")),
    "columns_rows": (None, "xy", P(None, "y", "x")),
    "columns_over_both": (None, "xy", P(None, None, ("y", "x"))),
    "1": (1, "x", P(None, "x")),
    "2": (2, "xy", P(None, "y", "x")),
    "4": (4, "xy", P(None, "y", "x")),
}


@jax.jit
def round_stochastically(x, key):
    """Rows and columns, fused and alone, rotated or not."""
    alone = [quantize(x, s, key=key, transpose=t) for s in (NVFP4_SR, NVFP4_RHT_SR) for t in (False, True)]
    return alone, quantize_pair(x, NVFP4_SR, NVFP4_RHT_SR, key=key), quantize_pair(x, NVFP4_SR, NVFP4_SR, key=key)


@pytest.mark.parametrize(("count", "axes", "spec"), STREAMS.values(), ids=STREAMS)
def test_stochastic_rounding_in_any_layout(devices, count, axes, spec):
    if count and count > len(devices):
        pytest.skip(f"needs {count} devices, found {len(devices)}")
    mesh, x = make_mesh(devices[:count], axes), normal((8, 128, 256))
    got = round_stochastically(put(x, mesh, spec), KEY)
    assert_split_like(got[0][::2], mesh, spec)
    assert_same_tensor(got, round_stochastically(*home(devices, (x, KEY))))


def test_vmap_of_keys_over_a_sharded_axis(devices):
    mesh, x, keys = make_mesh(devices, "x"), normal((8, 32, 64)), jax.random.split(KEY, 8)
    f = jax.vmap(lambda x, key: quantize(x, NVFP4_SR, amax=jnp.float32(4), key=key))
    got, found = run(f, put(x, mesh, P("x")), jax.device_put(keys, NamedSharding(mesh, P("x"))))
    assert_same_tensor(got, f(*home(devices, (x, keys))))
    assert found == []


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
@pytest.mark.parametrize(("row", "col"), [("x", "y"), (("y", "x"), None), (None, ("x", "y"))], ids=str)
def test_the_first_block_of_a_shard(devices, row, col, transpose):
    """Of a matrix of more than 2^32 blocks, whose own first block carries into the high word."""
    mesh, rows, blocks, base = make_mesh(devices), 1 << 20, 1 << 16, (5 << 32) + 0xFFFFFFF0
    stream = np.array([1, 2, base & 0xFFFFFFFF, base >> 32], np.uint32)
    side, shape = Side(NVFP4_SR, transpose, has_amax=True), (rows, 16 * blocks)
    axes, shape = ([col, row], shape[::-1]) if transpose else ([row, col], shape)
    f = lambda s: side.local_stream(mesh, s, axes, shape)[None, None]  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(row, col), check_vma=False)
    got = np.asarray(jax.jit(mapped)(stream))
    assert (got[..., 0] == 1).all()
    assert (got[..., 1] == 2).all()
    first = got[..., 2].astype(object) + (got[..., 3].astype(object) << 32)
    height, width = rows // ways(mesh, row), blocks // ways(mesh, col)
    want = [[base + i * height * blocks + j * width for j in range(first.shape[1])] for i in range(first.shape[0])]
    assert first.tolist() == want


def test_quantize_pair_reduces_only_the_two_amax(devices):
    mesh, x = make_mesh(devices), jnp.asarray(X.make())
    _, found = run(partial(quantize_pair, col_spec=NVFP4_RHT), put(x, mesh, P("x", "y")))
    assert {op for op, _ in found} == {"all-reduce"}
    assert all(is_maximum(shape) for _, shape in found), found
    assert sum(elements(shape) for _, shape in found) == 2, found  # combined or not


# ---------------------------------------------------------------- blocks that would straddle devices
STRADDLES = {
    "8_elements_each": ((32, 64), P(None, ("x", "y"))),
    "6_blocks_over_y": ((32, 96), P(None, "y")),
    "6_blocks_of_rows_over_y": ((96, 48), P("y", None)),
    "6_windows_of_rows_over_y": ((384, 64), P("y", None)),
    "half_windows": ((32, 256), P(None, ("x", "y"))),
    "3_windows_over_x": ((32, 192), P(None, "x")),
}


@pytest.mark.parametrize(("shape", "spec"), STRADDLES.values(), ids=STRADDLES)
def test_blocks_that_would_straddle_devices(devices, shape, spec):
    mesh, x = make_mesh(devices), normal(shape)
    if any(n % ways(mesh, entry) for n, entry in zip(shape, spec, strict=True)):
        pytest.skip("JAX splits only evenly")
    varied = (NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64)
    specs = tuple(s for s in varied if shape[1] % s.unit == 0 and shape[0] % s.block_rows == 0)
    pairs = tuple(p for p in VARIED_PAIRS if shape[0] % p[1].unit == 0 and shape[1] % p[0].unit == 0)

    @partial(jax.jit, static_argnums=1)
    def f(x, quantize_both):
        of_pairs = [quantize_both(pair, x, ({}, {}), KEY) for pair in pairs]
        return quantize_by(x, {}, False, specs), of_pairs

    assert_same_tensor(f(put(x, mesh, spec), quantize_pair_as), f(home(devices, x), single_calls))


@pytest.mark.parametrize("k", [64, 96, 256, 320])
def test_dequantize_and_matmul_of_an_indivisible_k(devices, k):
    """Data in whole bytes on each device, but no whole blocks (64, 96) or windows (256, 320)."""
    mesh, spec = make_mesh(devices, "x"), P(None, "x")
    scopes = ("tensor", "window64") if k % 64 == 0 else ("tensor",)
    operands = {scope: (exact_with_scope(scope, (32, k), 1), exact_tensor((16, k), 2)) for scope in scopes}

    def f(operands):
        return {scope: (dequantize(a), matmul_nt(a, b), matmul_nt(b, a)) for scope, (a, b) in operands.items()}

    placed = {scope: tuple(shard_data(t, mesh, spec) for t in pair) for scope, pair in operands.items()}
    assert_same_tensor(jax.jit(f)(placed), f(home(devices, operands)))


# ---------------------------------------------------------------- dequantize
def dequantize_all(tensors):
    ways = [(name, back) for name in tensors for back in (True, False)]
    return {(name, back): dequantize(tensors[name], jnp.bfloat16, rotate_back=back) for name, back in ways}


@few_layouts
@every_kind
def test_dequantize_needs_no_collective(devices, kind, axes, spec):
    mesh, x = make_mesh(devices, axes, kind), normal((128, 512))
    tensors = {name_of(s): quantize(x, s) for s in (NVFP4, ROW_SCALED, NVFP4_RHT, WINDOW64)}
    got, found = run(dequantize_all, {name: shard(t, mesh, spec) for name, t in tensors.items()})
    assert_same_tensor(got, dequantize_all(home(devices, tensors)))
    for value in got.values():
        assert_sharded(value, mesh, spec)
    assert found == []
