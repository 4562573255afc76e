"""``transpose``: the bytes of ``quantize(x, spec, transpose=True)``, from those of ``quantize(x, spec)``."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, assert_vmap_is_a_loop, bits, unpack_codes
from jax.sharding import PartitionSpec as P
from meshes import LAYOUTS, X, assert_sharded, every_kind, home, make_mesh, put, run, shard, shard_data
from operands import near_tie, normal

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, Format, NVFP4Tensor, dequantize, quantize
from jnvfp4.spec import SUPPORTED_SPECS, four_over_six, name_of

SPECS = [spec for spec in SUPPORTED_SPECS if spec.block_rows == 16]
# Tiles down and across: one, odd numbers, whole and partial squares of the kernels (8, 16 and 32 tiles on a side).
TILES = [(1, 1), (1, 17), (17, 1), (3, 5), (8, 8), (7, 16), (16, 9), (33, 2), (18, 34), (32, 36), (35, 64)]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=name_of)
NAN = 0x7F


def random_tiles(down: int, across: int, lead=(), seed=0) -> NVFP4Tensor:
    """Any codes, and any of the 256 scale bytes for each tile."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*lead, 16 * down, 8 * across), np.uint8)
    scale = rng.integers(0, 256, (*lead, down, across), np.uint8).repeat(16, axis=-2)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.float32(3.0), Format())


def by_numpy(q: NVFP4Tensor) -> NVFP4Tensor:
    codes = np.swapaxes(unpack_codes(q.data), -1, -2)
    of_tiles = np.swapaxes(bits(q.scale)[..., ::16, :], -1, -2)
    scale = jnp.asarray(of_tiles.repeat(16, axis=-2).view(ml_dtypes.float8_e4m3fn))
    return NVFP4Tensor(jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4), scale, q.amax, q.format)


# ---------------------------------------------------------------- bytes
def test_it_is_what_quantize_makes_of_the_transpose(native):
    for case in cases.tagged("quick"):
        x = case.make()
        got = jnvfp4.transpose(quantize(x, NVFP4_2D), implementation="native")
        assert_same_tensor(got, quantize(x, NVFP4_2D, transpose=True), case.name)


def test_numbers_that_are_not_finite(native):
    for special in (np.nan, np.inf, -np.inf):
        x = cases.ODD[0].make()
        x[17, 35] = special
        for amax in (None, 2.0):
            got = jnvfp4.transpose(quantize(x, NVFP4_2D, amax=amax))
            assert_same_tensor(got, quantize(x, NVFP4_2D, amax=amax, transpose=True))


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_code_and_scale_byte(backend, tiles):
    """Of many matrices a GPU takes squares of 64 tiles."""
    many = max(tiles) < 6 and backend.implementation == "native"
    for lead in ((), (2, 3), (300,))[: 3 if many else 2 if max(tiles) < 18 else 1]:
        q = random_tiles(*tiles, lead)
        assert_same_tensor(jnvfp4.transpose(q, implementation=backend.implementation), by_numpy(q), str(lead))


@every_spec
def test_the_values_of_every_spec_are_transposed_exactly(native, spec):
    """With 4over6 too, where quantizing the transposed array gives other bytes; twice is nothing."""
    q = quantize(normal((2, 48, 80)), spec)
    got = jnvfp4.transpose(q, spec)
    assert_same_tensor(got, by_numpy(q))
    assert got.shape == (2, 80, 48)
    assert_bitwise(dequantize(got), np.swapaxes(dequantize(q), -1, -2))
    assert_same_tensor(jnvfp4.transpose(got, spec), q)


def test_the_quantizer_may_choose_another_scale_for_the_transpose_of_a_tile(native):
    x, spec = near_tie(), four_over_six("mse", block_rows=16)
    t = jnvfp4.transpose(quantize(x, spec), spec)
    assert (np.asarray(quantize(x, spec, transpose=True).scale) != np.asarray(t.scale)).all()


# ---------------------------------------------------------------- tensors that were not made in tiles
def mixed(lead=()) -> tuple[NVFP4Tensor, tuple]:
    """A tensor in which the rows of one tile, and of no other, have different scales; and the place of the tile."""
    q, at = random_tiles(9, 10, lead), (*(n - 1 for n in lead), 8, 9)
    scale = bits(q.scale).copy()
    scale[(*at[:-2], 16 * 8 + 11, 9)] ^= 1
    return NVFP4Tensor(q.data, jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), q.amax, q.format), at


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_a_tile_of_several_scales_gets_nan(backend, lead):
    q, (*index, row, col) = mixed(lead)
    got = jax.jit(partial(jnvfp4.transpose, implementation=backend.implementation))(q)
    want = by_numpy(q)
    scale = bits(want.scale).copy()
    scale[(*index, slice(16 * col, 16 * col + 16), row)] = NAN
    assert_bitwise(got.data, want.data)
    assert_bitwise(bits(got.scale), scale)


@pytest.mark.parametrize(
    ("lead", "place"), [((), r"\(128, 144\)"), ((2,), r"\(1, 128, 144\)")], ids=["matrix", "batch"]
)
def test_the_reference_refuses_a_tile_of_several_scales(lead, place):
    q, _ = mixed(lead)
    text = r"transpose: the 16 rows of each 16x16 tile of q must have one scale, got the scale bytes \[\d+, \d+\] in "
    with pytest.raises(ValueError, match=text + rf"the tile at {place}; q was not made with block_rows=16"):
        jnvfp4.transpose(q, implementation="reference")


def test_a_tensor_of_rows_is_noticed(backend):
    q = quantize(normal((32, 64)), NVFP4)
    got = jax.jit(partial(jnvfp4.transpose, implementation=backend.implementation))(q)
    assert np.all(bits(got.scale) == NAN)
    with pytest.raises(ValueError, match="q was not made with block_rows=16"):
        jnvfp4.transpose(q, implementation="reference")


# ---------------------------------------------------------------- transforms
BATCHED = [(0, 0, None), (0, 0, 0), (1, 0, None), (0, None, None), (None, 0, 0), (-1, -1, None)]


@pytest.mark.parametrize("axes", BATCHED, ids=str)
def test_vmap_is_a_loop(native, axes):
    q = random_tiles(3, 5, (4,))
    parts = (q.data, q.scale, jnp.arange(4.0))
    parts = [v[0] if axis is None else jnp.moveaxis(v, 0, axis) for v, axis in zip(parts, axes, strict=True)]
    f = lambda *v: jnvfp4.transpose(NVFP4Tensor(*v))  # noqa: E731
    assert_vmap_is_a_loop(f, parts, axes)
    assert_bitwise(jax.vmap(f, axes, NVFP4Tensor(0, 0, axes[2]))(*parts).amax, parts[2])


# ---------------------------------------------------------------- devices
def turn(spec):
    return P(*reversed(spec))


def check_no_collective(devices, kind, axes, spec, implementation=None):
    mesh, specs = make_mesh(devices, axes, kind), (NVFP4_2D, four_over_six(block_rows=16))
    tensors = [quantize(X.make(), s) for s in specs]
    f = lambda ts: [jnvfp4.transpose(q, s, implementation=implementation) for q, s in zip(ts, specs, strict=True)]  # noqa: E731
    got, found = run(f, [shard(q, mesh, spec) for q in tensors])
    assert_same_tensor(got, list(map(jnvfp4.transpose, home(devices, tensors), specs)))
    for q in got:
        assert_sharded(q.data, mesh, turn(spec))
        assert_sharded(q.scale, mesh, turn(spec))
    assert found == []


@pytest.mark.parametrize(("axes", "spec"), LAYOUTS[1:5], ids=str)
def test_split_tiles_need_no_collective(devices, axes, spec):
    check_no_collective(devices, "auto", axes, spec)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_on_an_explicit_mesh(devices, implementation):
    check_no_collective(devices, "explicit", "xy", P("x", "y"), implementation)


@every_kind
def test_leading_axes_over_devices(devices, kind):
    mesh, q = make_mesh(devices, "x", kind), quantize(normal((8, 32, 48)), NVFP4_2D, amax=jnp.linspace(1, 4, 8))
    got, found = run(jnvfp4.transpose, shard(q, mesh, P("x")))
    assert_same_tensor(got, jnvfp4.transpose(home(devices, q)))
    for part in (got.data, got.scale, got.amax):
        assert_sharded(part, mesh, P("x"))
    assert found == []


@pytest.mark.parametrize(("shape", "spec"), [((64, 192), P("x", None)), ((192, 64), P(None, "x"))], ids=["rows", "k"])
def test_tiles_that_would_straddle_devices(devices, shape, spec):
    """Whole rows and bytes on each device, but no whole tiles: gathered on an Auto mesh, refused on an Explicit one."""
    q = quantize(normal(shape), NVFP4_2D)
    got = jax.jit(jnvfp4.transpose)(shard_data(q, make_mesh(devices, "x"), spec))
    assert_same_tensor(got, jnvfp4.transpose(home(devices, q)))
    if any(n // 16 % len(devices) for n, entry in zip(shape, spec, strict=True) if entry):
        with pytest.raises(
            ValueError, match=r"transpose: axis \d of .* must split it into multiples of (16|8); reshard"
        ):
            jax.eval_shape(jnvfp4.transpose, shard_data(q, make_mesh(devices, "x", "explicit"), spec))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_inside_shard_map(devices, implementation):
    mesh, q, spec = make_mesh(devices), quantize(X.make(), NVFP4_2D), P("x", "y")

    def f(data, scale, amax):
        t = jnvfp4.transpose(NVFP4Tensor(data, scale, amax), implementation=implementation)
        return t.data, t.scale

    local = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, P()), out_specs=turn(spec))
    got = jax.jit(local)(put(q.data, mesh, spec), put(q.scale, mesh, spec), q.amax)
    want = jnvfp4.transpose(home(devices, q))
    assert_same_tensor(got, (want.data, want.scale))


def test_the_reference_checks_a_sharded_tensor(devices):
    q, _ = mixed()
    mesh = make_mesh(devices[:1], "x", "explicit")
    with pytest.raises(ValueError, match="q was not made with block_rows=16"):
        jnvfp4.transpose(shard(q, mesh, P("x")), implementation="reference")
