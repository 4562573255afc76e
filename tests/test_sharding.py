"""Sharded runs equal the unsharded run bit for bit, with exactly the collectives a layout needs."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from operands import exact_tensor, normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    Recipe,
    dequantize,
    fake_quant,
    four_over_six,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4._primitives.quantize import local_stream
from jnvfp4.spec import FUSED_PAIRS, SUPPORTED_SPECS, name_of

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Specs that shard in different ways; the rest differ from them inside a block only.
SPECS = {
    "nvfp4": NVFP4,
    "nvfp4_2d": NVFP4_2D,
    "rht": NVFP4_RHT,
    "row": ROW_SCALED,
    "window64": WINDOW64,
    "4over6": four_over_six(),
    "4over6_2d": four_over_six(block_rows=16),
}
VARIED_SPECS = (*SPECS.values(), NVFP4_SR, NVFP4_RHT_SR)
X = Case("x", (512, 1024))  # either axis splits into eight times 64
KEY = jax.random.key(7)

# Mesh "xy" has two axes, mesh "x" has one; every layout of [M, K] over them.
LAYOUTS = [
    ("xy", P("x", None)),
    ("xy", P(None, "y")),
    ("xy", P("x", "y")),
    ("xy", P(("x", "y"), None)),
    ("xy", P(None, ("x", "y"))),
    ("x", P("x", None)),
    ("x", P(None, "x")),
]
every_layout = pytest.mark.parametrize(("axes", "spec"), LAYOUTS, ids=lambda v: str(v).replace(" ", ""))
every_kind = pytest.mark.parametrize("kind", KINDS)
every_spec = pytest.mark.parametrize("qspec", SPECS.values(), ids=SPECS)
transposed_or_not = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])


# ---------------------------------------------------------------- helpers
def make_mesh(devices, axes="xy", kind="auto"):
    shape = (2, len(devices) // 2) if axes == "xy" else (len(devices),)
    return jax.make_mesh(shape, tuple(axes), axis_types=(KINDS[kind],) * len(axes), devices=devices)


def axes_of(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def ways(mesh, entry) -> int:
    return math.prod(mesh.shape[a] for a in axes_of(entry))


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def shard(tensor, mesh, spec):
    """An NVFP4Tensor with data, scale and (as far as it has the axes) amax sharded."""
    amax = put(tensor.amax, mesh, P(*spec[: tensor.amax.ndim]))
    return NVFP4Tensor(put(tensor.data, mesh, spec), put(tensor.scale, mesh, spec), amax, tensor.format)


def home(devices, x):
    """x on the first device: the unsharded run."""
    return jax.tree.map(lambda v: jax.device_put(v, devices[0]), x)


_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast)(?:-start)?\("
)


def run(f, *args) -> tuple:
    """The result of jit(f), and (instruction, result type) of each collective of the compiled program."""
    compiled = jax.jit(f).lower(*args).compile()
    found = _COLLECTIVE.findall(compiled.as_text())
    return compiled(*args), [(op, re.sub(r"\{[^}]*\}", "", shape)) for shape, op in found]


def is_maximum(shape: str) -> bool:
    """Whether a collective of this type can only be that of amax bits: a few integers, combined or not."""
    return re.sub(r"u(16|32)\[\d?\]|[(), ]", "", shape) == ""


def assert_scalar_maxima(found, mesh, entries):
    """All-reduces of one number, at most one per mesh axis that splits anything, at least one if any does."""
    split = [a for entry in entries for a in axes_of(entry) if mesh.shape[a] > 1]
    assert all(op == "all-reduce" and is_maximum(shape) for op, shape in found), found
    assert min(1, len(split)) <= len(found) <= len(split), (found, split)


def assert_sharded(x, mesh, spec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)


def given_amax(shape, scope, transpose):
    """An amax of its own for whatever has one, below and above the largest magnitudes."""
    rows, cols = shape[::-1] if transpose else shape
    if scope == "tensor":
        return jnp.float32(3.5)
    parts = (rows,) if scope == "row" else (rows, cols // 64)
    return jnp.linspace(1.0, 4.0, math.prod(parts), dtype=jnp.float32).reshape(parts)


def key_for(qspec):
    return KEY if qspec.rounding == "stochastic" else None


# ---------------------------------------------------------------- quantize
@partial(jax.jit, static_argnums=(2, 3))
def quantize_by(x, amaxes, transpose, specs):
    """All in one program, since 34 cost less than two alone. ``amaxes``: by scope, or empty."""
    return {
        name_of(s): quantize(x, s, amax=amaxes.get(s.format.amax_scope), key=key_for(s), transpose=transpose)
        for s in specs
    }


def assert_split_like(tensors, mesh, spec):
    for t in tensors:
        assert_sharded(t.data, mesh, spec)
        assert_sharded(t.scale, mesh, spec)
        assert_sharded(t.amax, mesh, P(*spec[: t.amax.ndim]))


def turn(spec, transpose):
    return P(*reversed(spec)) if transpose else spec


def check_quantize_with_amax(devices, kind, axes, spec, transpose, specs):
    mesh, x, turned = make_mesh(devices, axes, kind), jnp.asarray(X.make()), turn(spec, transpose)
    amaxes = {scope: given_amax(x.shape, scope, transpose) for scope in ("tensor", "row", "window64")}
    placed = {scope: put(a, mesh, P(*turned[: a.ndim])) for scope, a in amaxes.items()}
    got, found = run(lambda x, a: quantize_by(x, a, transpose, specs), put(x, mesh, spec), placed)
    assert_same_tensor(got, quantize_by(*home(devices, (x, amaxes)), transpose, specs))
    assert_split_like(got.values(), mesh, turned)
    assert found == []


def check_quantize_with_found_amax(devices, kind, axes, spec, transpose, specs):
    mesh, x, turned = make_mesh(devices, axes, kind), jnp.asarray(X.make()), turn(spec, transpose)
    got, found = run(lambda x: quantize_by(x, {}, transpose, specs), put(x, mesh, spec))
    assert_same_tensor(got, quantize_by(home(devices, x), {}, transpose, specs))
    assert_split_like(got.values(), mesh, turned)
    assert {op for op, _ in found} <= {"all-reduce"}


@transposed_or_not
@every_layout
@every_kind
def test_quantize_with_amax_needs_no_collective(devices, kind, axes, spec, transpose):
    check_quantize_with_amax(devices, kind, axes, spec, transpose, VARIED_SPECS)


@transposed_or_not
@every_layout
def test_quantize_finds_the_amax_of_the_whole(devices, axes, spec, transpose):
    check_quantize_with_found_amax(devices, "auto", axes, spec, transpose, VARIED_SPECS)


@transposed_or_not
def test_every_spec_with_amax(devices, transpose):
    check_quantize_with_amax(devices, "auto", "xy", P("y", "x"), transpose, SUPPORTED_SPECS)


@transposed_or_not
def test_every_spec_with_a_found_amax(devices, transpose):
    check_quantize_with_found_amax(devices, "explicit", "x", P(None, "x"), transpose, SUPPORTED_SPECS)


COUNTED = {name: SPECS[name] for name in ("nvfp4", "rht", "row", "window64")}


@transposed_or_not
@pytest.mark.parametrize("qspec", COUNTED.values(), ids=COUNTED)
@every_layout
def test_quantize_reduces_only_the_amax(devices, axes, spec, qspec, transpose):
    mesh, x, turned = make_mesh(devices, axes), jnp.asarray(X.make()), turn(spec, transpose)
    got, found = run(partial(quantize, spec=qspec, transpose=transpose), put(x, mesh, spec))
    if qspec.format.amax_scope == "tensor":
        assert_scalar_maxima(found, mesh, spec)
    else:
        rows = got.amax.shape[0] // ways(mesh, turned[0])
        split = qspec is ROW_SCALED and ways(mesh, turned[1]) > 1
        assert found == [("all-reduce", f"u32[{rows}]")] * split


@pytest.mark.parametrize("qspec", [ROW_SCALED, NVFP4_RHT_SR], ids=name_of)
def test_quantize_under_the_reference_lowering(devices, qspec):
    mesh, x = make_mesh(devices, kind="explicit"), normal((32, 128))
    f = partial(quantize, spec=qspec, key=key_for(qspec), implementation="reference")
    with jax.set_mesh(mesh):
        got = jax.jit(f)(put(x, mesh, P("x", "y")))
    assert_same_tensor(got, quantize(home(devices, x), qspec, key=key_for(qspec)))


@every_layout
def test_eager_calls_stay_sharded(devices, axes, spec):
    mesh, x = make_mesh(devices, axes), normal((128, 512))
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
@pytest.mark.parametrize(
    "spec",
    [
        P("x", None, None),
        P("x", "y", None),
        P(None, "x", "y"),
        P(
            ("x", "y"),
        ),
    ],
    ids=str,
)
def test_leading_axes(devices, kind, spec):
    mesh, x = make_mesh(devices, kind=kind), normal((8, 32, 256))
    f = partial(quantize, amax=jnp.float32(4))
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
STREAMS = {
    "rows": ("x", P(None, "x", None)),
    "columns": ("x", P(None, None, "x")),
    "leading": ("x", P("x", None, None)),
    "rows_columns": ("xy", P(None, "x", "y")),
    "columns_rows": ("xy", P(None, "y", "x")),
    "leading_columns": ("xy", P("x", None, "y")),
    "columns_over_both": ("xy", P(None, None, ("y", "x"))),
}


@jax.jit
def round_stochastically(x, key):
    """Rows and columns, fused and alone, rotated or not."""
    alone = [quantize(x, s, key=key, transpose=t) for s in (NVFP4_SR, NVFP4_RHT_SR) for t in (False, True)]
    return alone, quantize_pair(x, NVFP4_SR, NVFP4_RHT_SR, key=key), quantize_pair(x, NVFP4_SR, NVFP4_SR, key=key)


def check_streams(devices, axes, spec):
    mesh, x = make_mesh(devices, axes), normal((8, 128, 256))
    got = round_stochastically(put(x, mesh, spec), KEY)
    assert_split_like(got[0][::2], mesh, spec)
    assert_same_tensor(got, round_stochastically(*home(devices, (x, KEY))))


@pytest.mark.parametrize(("axes", "spec"), STREAMS.values(), ids=STREAMS)
def test_stochastic_rounding_in_any_layout(devices, axes, spec):
    check_streams(devices, axes, spec)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stochastic_rounding_on_any_number_of_devices(devices, count):
    if count > len(devices):
        pytest.skip(f"needs {count} devices, found {len(devices)}")
    for name in ("columns", "rows_columns"):
        if count > 1 or name == "columns":
            check_streams(devices[:count], *STREAMS[name])


def test_vmap_of_keys_over_a_sharded_axis(devices):
    mesh, x, keys = make_mesh(devices, "x"), normal((8, 32, 64)), jax.random.split(KEY, 8)
    f = jax.vmap(lambda x, key: quantize(x, NVFP4_SR, amax=jnp.float32(4), key=key))
    got, found = run(f, put(x, mesh, P("x")), put(keys, mesh, P("x")))
    assert_same_tensor(got, f(*home(devices, (x, keys))))
    assert found == []


@pytest.mark.parametrize(("row", "col"), [("x", "y"), ("y", "x"), (("y", "x"), None), (None, ("x", "y"))], ids=str)
def test_the_first_block_of_a_shard(devices, row, col):
    """Of a matrix of more than 2^32 blocks, whose own first block carries into the high word."""
    mesh, rows, blocks, base = make_mesh(devices), 1 << 20, 1 << 16, (5 << 32) + 0xFFFFFFF0
    stream = np.array([1, 2, base & 0xFFFFFFFF, base >> 32], np.uint32)
    f = lambda s: local_stream(mesh, s, row, col, rows, blocks)[None, None]  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(row, col), check_vma=False)
    got = np.asarray(jax.jit(mapped)(stream))
    assert (got[..., 0] == 1).all()
    assert (got[..., 1] == 2).all()
    first = got[..., 2].astype(object) + (got[..., 3].astype(object) << 32)
    height, width = rows // ways(mesh, row), blocks // ways(mesh, col)
    want = [[base + i * height * blocks + j * width for j in range(first.shape[1])] for i in range(first.shape[0])]
    assert first.tolist() == want


# ---------------------------------------------------------------- quantize_pair
EVERY_PAIR = tuple(sorted(FUSED_PAIRS, key=lambda pair: tuple(map(name_of, pair))))
VARIED_PAIRS = (
    (NVFP4, NVFP4_RHT),
    (NVFP4_SR, NVFP4_RHT_SR),
    (NVFP4_2D, NVFP4_2D),
    (ROW_SCALED, ROW_SCALED),
    (WINDOW64, WINDOW64),
)


def quantize_pairs(x, amaxes, pairs):
    """``amaxes``: those of rows and of columns by scope, or None."""
    return {
        "/".join(map(name_of, pair)): quantize_pair(
            x,
            *pair,
            amax=amaxes and tuple(a.get(s.format.amax_scope) for a, s in zip(amaxes, pair, strict=True)),
            key=next((KEY for s in pair if s.rounding == "stochastic"), None),
        )
        for pair in pairs
    }


@partial(jax.jit, static_argnums=2)
def pairs_of_single_calls(x, amaxes, pairs):
    return {
        "/".join(map(name_of, pair)): tuple(
            quantize(x, s, amax=(amaxes or ({}, {}))[t].get(s.format.amax_scope), key=key_for(s), transpose=bool(t))
            for t, s in enumerate(pair)
        )
        for pair in pairs
    }


def check_pairs(devices, kind, axes, spec, pairs, given):
    mesh, x, amaxes, placed = make_mesh(devices, axes, kind), jnp.asarray(X.make()), None, None
    if given:
        amaxes = tuple({scope: given_amax(x.shape, scope, t) for scope in ("tensor", "row")} for t in (False, True))
        placed = tuple(
            {scope: put(a, mesh, P(*turn(spec, t)[: a.ndim])) for scope, a in both.items()}
            for t, both in enumerate(amaxes)
        )
    got, found = run(lambda x, a: quantize_pairs(x, a, pairs), put(x, mesh, spec), placed)
    assert_same_tensor(got, pairs_of_single_calls(*home(devices, (x, amaxes)), pairs))
    for t, tensors in enumerate(zip(*got.values(), strict=True)):
        assert_split_like(tensors, mesh, turn(spec, t))
    assert {op for op, _ in found} <= ({"all-reduce"} if not given else set())


@every_layout
def test_quantize_pair_finds_both_amax(devices, axes, spec):
    check_pairs(devices, "auto", axes, spec, VARIED_PAIRS, given=False)


@every_layout
def test_quantize_pair_with_amax_needs_no_collective(devices, axes, spec):
    check_pairs(devices, "explicit", axes, spec, VARIED_PAIRS, given=True)


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
def test_every_fused_pair(devices, given):
    check_pairs(devices, "explicit", "xy", P("y", "x"), EVERY_PAIR, given)


def test_quantize_pair_reduces_only_the_two_amax(devices):
    mesh, x = make_mesh(devices), jnp.asarray(X.make())
    _, found = run(partial(quantize_pair, col_spec=NVFP4_RHT), put(x, mesh, P("x", "y")))
    assert {op for op, _ in found} <= {"all-reduce"}
    assert all(is_maximum(shape) for _, shape in found), found


@every_layout
def test_fake_quant(devices, axes, spec):
    mesh, x = make_mesh(devices, axes, "explicit"), normal((128, 512))
    got, found = run(fake_quant, put(x, mesh, spec))
    assert_bitwise(got, fake_quant(home(devices, x)))
    assert_sharded(got, mesh, spec)
    assert_scalar_maxima(found, mesh, spec)


@partial(jax.jit, static_argnums=(2,))
def fake_quants(x, amaxes, specs):
    return {name_of(s): fake_quant(x, s, amax=amaxes.get(s.format.amax_scope), key=key_for(s)) for s in specs}


@every_layout
def test_fake_quant_with_amax_needs_no_collective(devices, axes, spec):
    mesh, x = make_mesh(devices, axes, "explicit"), normal((128, 512))
    amaxes = {scope: given_amax(x.shape, scope, False) for scope in ("tensor", "row", "window64")}
    placed = {scope: put(a, mesh, P(*spec[: a.ndim])) for scope, a in amaxes.items()}
    got, found = run(lambda x, a: fake_quants(x, a, VARIED_SPECS), put(x, mesh, spec), placed)
    assert_same_tensor(got, fake_quants(*home(devices, (x, amaxes)), VARIED_SPECS))
    for y in got.values():
        assert_sharded(y, mesh, spec)
    assert found == []


@every_layout
def test_fake_quant_finds_the_amax_of_the_whole(devices, axes, spec):
    mesh, x = make_mesh(devices, axes), normal((128, 512))
    got, found = run(lambda x: fake_quants(x, {}, VARIED_SPECS), put(x, mesh, spec))
    assert_same_tensor(got, fake_quants(home(devices, x), {}, VARIED_SPECS))
    for y in got.values():
        assert_sharded(y, mesh, spec)
    assert {op for op, _ in found} <= {"all-reduce"}


# ---------------------------------------------------------------- blocks that would straddle devices
STRADDLES = {
    "8_elements_each": ((32, 64), P(None, ("x", "y"))),
    "6_blocks_over_y": ((32, 96), P(None, "y")),
    "3_blocks_of_rows_over_x": ((48, 48), P("x", None)),
    "6_blocks_of_rows_over_y": ((96, 48), P("y", None)),
    "6_windows_of_rows_over_y": ((384, 64), P("y", None)),
    "5_blocks_over_x": ((32, 80), P(None, "x")),
    "half_windows": ((32, 256), P(None, ("x", "y"))),
    "3_windows_over_x": ((32, 192), P(None, "x")),
}


@transposed_or_not
@pytest.mark.parametrize(("shape", "spec"), STRADDLES.values(), ids=STRADDLES)
def test_blocks_that_would_straddle_devices(devices, shape, spec, transpose):
    specs = tuple(s for s in VARIED_SPECS if shape[1] % s.unit == 0 and shape[0] % s.block_rows == 0)
    if transpose:
        shape, spec = shape[::-1], P(*reversed(spec))
    mesh, x = make_mesh(devices), normal(shape)
    if any(n % ways(mesh, entry) for n, entry in zip(shape, spec, strict=True)):
        pytest.skip("JAX splits only evenly")
    got = quantize_by(put(x, mesh, spec), {}, transpose, specs)
    assert_same_tensor(got, quantize_by(home(devices, x), {}, transpose, specs))
    if not transpose:
        assert_same_tensor(fake_quants(put(x, mesh, spec), {}, specs), fake_quants(home(devices, x), {}, specs))


@pytest.mark.parametrize(("shape", "spec"), STRADDLES.values(), ids=STRADDLES)
def test_pairs_of_blocks_that_would_straddle_devices(devices, shape, spec):
    mesh, x = make_mesh(devices), normal(shape)
    pairs = tuple(p for p in VARIED_PAIRS if shape[0] % p[1].unit == 0 and shape[1] % p[0].unit == 0)
    if any(n % ways(mesh, entry) for n, entry in zip(shape, spec, strict=True)):
        pytest.skip("JAX splits only evenly")
    got = jax.jit(partial(quantize_pairs, amaxes=None, pairs=pairs))(put(x, mesh, spec))
    assert_same_tensor(got, pairs_of_single_calls(home(devices, x), None, pairs))


@pytest.mark.parametrize("k", [64, 96, 256, 320])
def test_dequantize_and_matmul_of_an_indivisible_k(devices, k):
    """Data in whole bytes on each device, but no whole blocks (64, 96) or windows (256, 320)."""
    mesh, spec = make_mesh(devices, "x"), P(None, "x")
    scopes = ("tensor", "window64") if k % 64 == 0 else ("tensor",)
    operands = {scope: (exact(scope, (32, k), 1), exact_tensor((16, k), 2)) for scope in scopes}

    def sharded(t):
        return NVFP4Tensor(put(t.data, mesh, spec), put(t.scale, mesh, P()), put(t.amax, mesh, P()), t.format)

    def f(operands):
        return {scope: (dequantize(a), matmul_nt(a, b), matmul_nt(b, a)) for scope, (a, b) in operands.items()}

    placed = {scope: tuple(map(sharded, pair)) for scope, pair in operands.items()}
    assert_same_tensor(jax.jit(f)(placed), f(home(devices, operands)))


@pytest.mark.parametrize(
    ("shape", "spec", "qspec"),
    [((32, 48), P(None, "x"), NVFP4), ((48, 32), P("x", None), NVFP4_2D)],
    ids=["k", "rows_of_2d"],
)
def test_explicit_meshes_refuse_to_split_a_block(devices, shape, spec, qspec):
    mesh = make_mesh(devices, kind="explicit")
    with pytest.raises(ValueError, match=r"must split it into multiples of 16; reshard it first"):
        jax.eval_shape(partial(quantize, spec=qspec), put(normal(shape), mesh, spec))
    with pytest.raises(ValueError, match=r"fake_quant: axis \d .* must split it into multiples of 16"):
        jax.eval_shape(partial(fake_quant, spec=qspec), put(normal(shape), mesh, spec))


# ---------------------------------------------------------------- dequantize
def dequantize_all(tensors):
    return {
        (name, back): dequantize(t, jnp.bfloat16, rotate_back=back)
        for name, t in tensors.items()
        for back in (True, False)
    }


@every_layout
@every_kind
def test_dequantize_needs_no_collective(devices, kind, axes, spec):
    mesh, x = make_mesh(devices, axes, kind), normal((128, 512))
    tensors = {name_of(s): quantize(x, s) for s in (NVFP4, ROW_SCALED, NVFP4_RHT, WINDOW64)}
    got, found = run(dequantize_all, {name: shard(t, mesh, spec) for name, t in tensors.items()})
    assert_same_tensor(got, dequantize_all(home(devices, tensors)))
    for value in got.values():
        assert_sharded(value, mesh, spec)
    assert found == []


# ---------------------------------------------------------------- matmul_nt
def exact(scope, shape, seed):
    """``exact_tensor`` with an amax of its own for every row or window, as it may be within exact sums."""
    t, rng = exact_tensor(shape, seed), np.random.default_rng(seed)
    if scope == "tensor":
        return t
    parts = shape[:-1] if scope == "row" else (*shape[:-1], shape[-1] // 64)
    amax = 6 * 448.0 * 2.0 ** rng.integers(-1, 2, parts)
    return NVFP4Tensor(t.data, t.scale, jnp.asarray(amax, jnp.float32), Format(scope))


# a [M, K], b [N, K] -> result, on mesh (x, y); and the collectives.
GEMMS = {
    "m": (P("x", None), P(None, None), P("x", None)),
    "n": (P(None, None), P("y", None), P(None, "y")),
    "m_n": (P("x", None), P("y", None), P("x", "y")),
    "mm": (P(("x", "y"), None), P(None, None), P(("x", "y"), None)),
    "nn": (P(None, None), P(("x", "y"), None), P(None, ("x", "y"))),
}
SPLIT_K_GEMMS = {
    "k": (P(None, "x"), P(None, "x"), P(None, None)),
    "m_k": (P("y", "x"), P(None, "x"), P("y", None)),
    "n_k": (P(None, "x"), P("y", "x"), P(None, "y")),
    "kk": (P(None, ("x", "y")), P(None, ("x", "y")), P(None, None)),
}
GATHERED_GEMMS = {
    "k_of_a": (P(None, "x"), P(None, None)),
    "k_of_b": (P(None, None), P(None, "x")),
    "k_k_differ": (P(None, "x"), P(None, "y")),
    "m_of_a_k_of_b": (P("x", None), P(None, "x")),
}
M, N, K = 64, 32, 512


# The amax scope of a ("dense": not quantized) and that of b.
SCOPES = [("tensor", "tensor"), ("row", "tensor"), ("dense", "tensor")]
SCOPES += [("window64", "tensor"), ("row", "window64"), ("window64", "window64")]


@pytest.fixture
def operands():
    """a and b of order-independent products, for every kind of either."""
    found = []
    for scope_a, scope_b in SCOPES:
        a = exact("tensor" if scope_a == "dense" else scope_a, (M, K), 1)
        found.append((dequantize(a, jnp.bfloat16) if scope_a == "dense" else a, exact(scope_b, (N, K), 2)))
    return found


def multiply(operands, **options):
    """All in one program."""
    return {str(scopes): matmul_nt(a, b, **options) for scopes, (a, b) in zip(SCOPES, operands, strict=True)}


def place(operands, mesh, *specs):
    put_any = lambda t, spec: (shard if isinstance(t, NVFP4Tensor) else put)(t, mesh, spec)  # noqa: E731
    return [tuple(map(put_any, pair, specs)) for pair in operands]


@pytest.mark.parametrize("layout", GEMMS.values(), ids=GEMMS)
@every_kind
def test_matmul_over_m_and_n_needs_no_collective(devices, kind, layout, operands):
    mesh, (sa, sb, so) = make_mesh(devices, kind=kind), layout
    got, found = run(multiply, place(operands, mesh, sa, sb))
    assert_same_tensor(got, multiply(home(devices, operands)))
    for y in got.values():
        assert_sharded(y, mesh, so)
    assert found == []


@pytest.mark.parametrize("layout", SPLIT_K_GEMMS.values(), ids=SPLIT_K_GEMMS)
@every_kind
def test_matmul_over_k_adds_once_in_float32(devices, kind, layout, operands):
    mesh, (sa, sb, so) = make_mesh(devices, kind=kind), layout
    f = partial(multiply, bias=normal((N,)))
    got, found = run(f, place(operands, mesh, sa, sb))
    assert_same_tensor(got, f(home(devices, operands)))
    for y in got.values():
        assert_sharded(y, mesh, so)
    local = M // ways(mesh, so[0]) * (N // ways(mesh, so[1]))
    sums = [part for _, shape in found for part in re.findall(r"(\w+)\[([\d,]*)\]", shape)]  # combined or not
    assert all(op == "all-reduce" for op, _ in found)
    assert all(dtype == "f32" for dtype, _ in sums)
    elements = sum(math.prod(map(int, dims.split(","))) for _, dims in sums)
    assert elements == local * len(operands) * (ways(mesh, sa[1]) > 1)
    assert {op for op, _ in found} <= {"all-reduce"}


@pytest.mark.parametrize("layout", GATHERED_GEMMS.values(), ids=GATHERED_GEMMS)
@every_kind
def test_matmul_gathers_a_k_that_only_one_side_splits(devices, kind, layout, operands):
    mesh = make_mesh(devices, kind=kind)
    got, found = run(multiply, place(operands, mesh, *layout))
    assert_same_tensor(got, multiply(home(devices, operands)))
    assert "all-reduce" not in {op for op, _ in found}


@pytest.mark.parametrize("layout", GEMMS.values(), ids=GEMMS)
def test_matmul_of_real_numbers_over_m_and_n(layout):
    """The pinned order along K makes any data bitwise on the CPU."""
    devices = jax.devices("cpu")[:8]
    mesh, (a, b) = make_mesh(devices), (quantize(normal((M, K), s)) for s in (1, 2))
    got = jax.jit(matmul_nt)(shard(a, mesh, layout[0]), shard(b, mesh, layout[1]))
    assert_bitwise(got, matmul_nt(*home(devices, (a, b))))


@pytest.mark.parametrize("layout", GEMMS.values(), ids=GEMMS)
def test_matmul_of_windows_over_m_and_n(devices, layout):
    """Their order along K is pinned on every platform."""
    mesh, (x, w) = make_mesh(devices), (normal((M, K), s) for s in (1, 2))
    pairs = [(quantize(x, sa), quantize(w, sb)) for sa, sb in ((WINDOW64, NVFP4), (ROW_SCALED, WINDOW64))]
    f = jax.jit(lambda pairs: [matmul_nt(a, b) for a, b in pairs])
    assert_same_tensor(f(place(pairs, mesh, *layout[:2])), f(home(devices, pairs)))


@pytest.mark.parametrize("layout", SPLIT_K_GEMMS.values(), ids=SPLIT_K_GEMMS)
def test_matmul_of_real_numbers_over_k(devices, layout):
    mesh, (a, b) = make_mesh(devices), (quantize(normal((M, K), s)) for s in (1, 2))
    f = partial(matmul_nt, out_dtype=jnp.float32)
    got = np.asarray(jax.jit(f)(shard(a, mesh, layout[0]), shard(b, mesh, layout[1])))
    absolute = np.abs(np.asarray(dequantize(a))) @ np.abs(np.asarray(dequantize(b))).T
    bound = 2 * K * 2.0**-24 * absolute  # of any two orders of K additions
    assert (np.abs(got - np.asarray(f(*home(devices, (a, b))))) <= bound).all()


def test_matmul_over_k_rounds_its_result(devices):
    """A cast that follows sees bfloat16 values: XLA must not delete the round trip."""
    mesh = make_mesh(devices, "x")
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    got = jax.jit(lambda a, b: matmul_nt(a, b).astype(jnp.float32))(*(shard(t, mesh, P(None, "x")) for t in (a, b)))
    assert_bitwise(got, matmul_nt(*home(devices, (a, b))).astype(jnp.float32))


@every_kind
def test_matmul_with_leading_axes(devices, kind):
    mesh, a = make_mesh(devices, kind=kind), exact_tensor((4, M, K), 1)
    for b, spec_b in ((exact_tensor((N, K), 2), P("y")), (exact_tensor((4, N, K), 3), P("x", "y"))):
        got, found = run(matmul_nt, shard(a, mesh, P("x")), shard(b, mesh, spec_b))
        assert_bitwise(got, matmul_nt(*home(devices, (a, b))))
        assert_sharded(got, mesh, P("x", None, "y"))
        assert found == []


def test_matmul_with_m_and_n_on_one_axis(devices):
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    want = matmul_nt(*home(devices, (a, b)))
    mesh = make_mesh(devices, "x")
    assert_bitwise(jax.jit(matmul_nt)(shard(a, mesh, P("x")), shard(b, mesh, P("x"))), want)


def test_matmul_with_m_and_n_on_one_explicit_axis(devices):
    mesh = make_mesh(devices, "x", "explicit")
    a, b = (shard(exact_tensor((32, K), s), mesh, P("x")) for s in (1, 2))
    with pytest.raises(ValueError, match="sharded over a common mesh axis"):
        jax.eval_shape(matmul_nt, a, b)


def test_quantize_and_multiply_end_to_end(devices):
    """Both amax, then one sum: nothing else moves."""
    mesh, (x, w) = make_mesh(devices), (normal((M, K), s) for s in (1, 2))

    def f(x, w):
        return matmul_nt(quantize(x), quantize(w))

    _, found = run(f, put(x, mesh, P("x", "y")), put(w, mesh, P(None, "y")))
    sums = [shape for _, shape in found if shape == f"f32[{M // 2},{M}]"]
    assert len(sums) == (mesh.shape["y"] > 1)
    assert all(op == "all-reduce" for op, _ in found)
    assert all(is_maximum(shape) for _, shape in found if shape not in sums)


# ---------------------------------------------------------------- shard_map
@pytest.mark.parametrize("check_vma", [True, False])
@every_spec
def test_quantize_in_shard_map(devices, qspec, check_vma):
    mesh, x = make_mesh(devices), normal((128, 512))
    amax = given_amax(x.shape, qspec.format.amax_scope, False)
    row = P(*P("x", "y")[: amax.ndim])
    f = partial(quantize, spec=qspec)
    out = NVFP4Tensor(P("x", "y"), P("x", "y"), row, qspec.format)
    local = jax.shard_map(
        lambda x, a: f(x, amax=a), mesh=mesh, in_specs=(P("x", "y"), row), out_specs=out, check_vma=check_vma
    )
    got, found = run(local, put(x, mesh, P("x", "y")), put(amax, mesh, row))
    assert_same_tensor(got, f(home(devices, x), amax=home(devices, amax)))
    assert found == []


def test_random_bits_in_shard_map_are_those_of_the_block(devices):
    """Indices are local, so that equal blocks round alike unless each device folds its index into the key."""
    mesh, x = make_mesh(devices, "x"), normal((32, 64))
    copies = jnp.tile(x, (len(devices), 1))

    def local(x, fold):
        key = jax.random.fold_in(KEY, jax.lax.axis_index("x")) if fold else KEY
        return quantize(x, NVFP4_SR, amax=jnp.float32(4), key=key).data

    for fold in (False, True):
        f = jax.shard_map(partial(local, fold=fold), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        got = jnp.split(jax.jit(f)(put(copies, mesh, P("x"))), len(devices))
        for i, part in enumerate(got):
            key = jax.random.fold_in(KEY, i) if fold else KEY
            assert_bitwise(part, quantize(home(devices, x), NVFP4_SR, amax=4.0, key=key).data)
        assert (len({part.tobytes() for part in map(np.asarray, got)}) > 1) == fold


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_some_manual_axes(devices, kind):
    """The rest of the mesh stays automatic: right, though JAX may gather over it."""
    mesh, x = make_mesh(devices, kind=kind), normal((32, 512))

    b = exact_tensor((N, 512))

    def f(x, b):
        t = quantize(x, ROW_SCALED)
        return t, dequantize(t), matmul_nt(x, b)

    manual = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    got = jax.jit(manual)(put(x, mesh, P("x", "y")), shard(b, mesh, P("y")))
    want = f(*home(devices, (x, b)))
    assert_same_tensor(got[:2], want[:2])
    np.testing.assert_allclose(*(np.asarray(y[2], np.float32) for y in (got, want)), rtol=2**-7)


def test_wrong_out_specs_are_refused(devices):
    """The results vary over the manual axes of their operands."""
    mesh, x = make_mesh(devices, "x"), normal((32, 64))
    f = jax.shard_map(quantize, mesh=mesh, in_specs=P("x"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(f, x)


def test_matmul_in_shard_map_with_a_replicated_side(devices):
    mesh, (a, b) = make_mesh(devices, "x"), (exact_tensor((M, K), 1), exact_tensor((N, K), 2))
    sharded = NVFP4Tensor(P("x"), P("x"), P(), a.format)
    f = jax.shard_map(matmul_nt, mesh=mesh, in_specs=(sharded, P()), out_specs=P("x"))
    assert_bitwise(jax.jit(f)(a, b), matmul_nt(*home(devices, (a, b))))


# ---------------------------------------------------------------- linear
# x [M, K], w [N, K], dy [M, N] on mesh (x, y); which of y, dx, dw come from one device's whole sum.
LINEARS = {
    "data": (P("x", None), P(None, None), P("x", None), ("y", "dx")),
    "column": (P(None, None), P("x", None), P(None, "x"), ("y", "dw")),
    "row": (P(None, "x"), P(None, "x"), P(None, None), ("dx", "dw")),
    "data_column": (P("x", None), P("y", None), P("x", "y"), ("y",)),
    "data_row": (P("x", "y"), P(None, "y"), P("x", None), ("dx",)),
}


def _vjp(x, w, dy):
    y, pull = jax.vjp(partial(linear, recipe=Recipe()), x, w)
    dx, dw = pull(dy)
    return {"y": y, "dx": dx, "dw": dw}


@pytest.mark.parametrize("layout", LINEARS.values(), ids=LINEARS)
@every_kind
def test_linear_and_its_gradients(devices, kind, layout):
    mesh, (sx, sw, sdy, exact) = make_mesh(devices, kind=kind), layout
    x, w, dy = normal((256, 128), 1, "fp32"), normal((64, 128), 2, "fp32"), normal((256, 64), 3, "fp32")
    want = jax.jit(_vjp)(*home(devices, (x, w, dy)))
    got = jax.jit(_vjp)(put(x, mesh, sx), put(w, mesh, sw), put(dy, mesh, sdy))
    for name in want:
        if name in exact and devices[0].platform == "cpu":
            assert_bitwise(got[name], want[name], name)
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-3, err_msg=name)


RECIPES = {
    "pretrain": recipes.pretrain(),
    "pretrain_1d": recipes.pretrain(weight_tiles=False, rht=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "high_precision": recipes.pretrain(backward="high_precision"),
    "row_scaled": recipes.row_scaled(),
    "weights": recipes.four_over_six("weights"),
    "activations": recipes.four_over_six("activations", "mse", fast=True),
    "all": recipes.four_over_six("all", e4m3_max=448, stochastic_rounding=False),
    "window64": recipes.window64(),
    "inference": recipes.inference(),
    "weight_only": recipes.inference(weight_only=True),
}


@jax.jit
def vjp_by_every_recipe(x, w, dy):
    """All in one program. Weight-only takes x in 16 bits."""
    found = {}
    for name, recipe in RECIPES.items():
        left = x.astype(jnp.bfloat16) if name == "weight_only" else x
        y, pull = jax.vjp(partial(linear, recipe=recipe, key=KEY), left, w)
        found[name] = dict(zip(("y", "dx", "dw"), (y, *pull(dy.astype(y.dtype))), strict=True))
    return found


@pytest.mark.parametrize("layout", LINEARS.values(), ids=LINEARS)
def test_linear_by_every_recipe(devices, layout):
    """The quantized operands are the same; so is a sum that no device splits, where its order is pinned."""
    mesh, (sx, sw, sdy, exact) = make_mesh(devices), layout
    x, w, dy = normal((256, 128), 1, "fp32"), normal((64, 128), 2, "fp32"), normal((256, 64), 3, "fp32")
    want = vjp_by_every_recipe(*home(devices, (x, w, dy)))
    got = vjp_by_every_recipe(put(x, mesh, sx), put(w, mesh, sw), put(dy, mesh, sdy))
    for recipe, results in want.items():
        pairs = {"y": RECIPES[recipe].fprop, "dx": RECIPES[recipe].dgrad, "dw": RECIPES[recipe].wgrad}
        for name, value in results.items():
            what = f"{recipe} {name}"
            if name in exact and devices[0].platform == "cpu" and isinstance(pairs[name], tuple):
                assert_bitwise(got[recipe][name], value, what)
            rtol, atol = (2**-7, 2**-6) if value.dtype == jnp.bfloat16 else (1e-5, 1e-3)
            left, right = (np.asarray(v, np.float32) for v in (got[recipe][name], value))
            np.testing.assert_allclose(left, right, rtol=rtol, atol=atol, err_msg=what)


def test_data_parallel_gradients_need_two_kinds_of_reduction(devices):
    """Scalar amax reductions and one sum of dw."""
    mesh = make_mesh(devices, "x")
    x, w, dy = normal((256, 128), 1), normal((64, 128), 2), normal((256, 64), 3)
    _, found = run(_vjp, put(x, mesh, P("x")), put(w, mesh, P()), put(dy, mesh, P("x")))
    assert [shape for _, shape in found if not is_maximum(shape)] == ["f32[64,128]"]
    assert {op for op, _ in found} == {"all-reduce"}


def _plain(x, w):
    return jnp.matmul(x, w.T, precision="highest")


def _sharded_grads(devices, product):
    """dx and dw of sum(product^2) with the batch in a shard_map and w replicated."""
    mesh = make_mesh(devices, "x")
    f = jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    return jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))


def test_gradient_of_a_replicated_weight_is_summed_over_devices(devices):
    """As for x @ w.T, the transpose of shard_map adds dw over the devices, here in high precision."""
    x, w = normal((32 * len(devices), 64), 1, "fp32"), normal((32, 64), 2, "fp32")
    recipe = Recipe(dgrad=None, wgrad=None)
    dx, dw = _sharded_grads(devices, partial(linear, recipe=recipe))(x, w)
    y = jnp.concatenate([linear(*home(devices, (part, w)), recipe) for part in jnp.split(x, len(devices))])
    x, w = home(devices, (x, w))
    np.testing.assert_allclose(dx, 2 * _plain(y, w.T), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(dw, 2 * _plain(y.T, x.T), rtol=1e-4, atol=1e-2)


def test_quantized_gradient_of_a_replicated_weight():
    """Each device quantizes its tokens by their own amax; dw is the sum of what they find."""
    devices = jax.devices("cpu")[:8]
    x, w = normal((32 * len(devices), 64), 1, "fp32"), normal((32, 64), 2, "fp32")
    dx, dw = _sharded_grads(devices, linear)(x, w)
    one = jax.jit(jax.grad(lambda x, w: jnp.sum(linear(x, w) ** 2), (0, 1)))
    parts = [one(*home(devices, (part, w))) for part in jnp.split(x, len(devices))]
    np.testing.assert_allclose(dx, jnp.concatenate([p[0] for p in parts]), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, sum(p[1] for p in parts), rtol=1e-5, atol=1e-3)


def test_gradients_in_shard_map_agree_with_plain_products(devices):
    """The quantized gradients point where those of x @ w.T do."""
    x, w = normal((32 * len(devices), 64), 1, "fp32"), normal((32, 64), 2, "fp32")
    for got, want in zip(_sharded_grads(devices, linear)(x, w), _sharded_grads(devices, _plain)(x, w), strict=True):
        got, want = np.asarray(got).ravel(), np.asarray(want).ravel()
        assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > 0.98
        assert abs(np.linalg.norm(got) / np.linalg.norm(want) - 1) < 0.05


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_bias_gradient_is_summed_over_devices(devices, bias_dtype):
    mesh, x = make_mesh(devices, "x"), normal((32 * len(devices), 64), 1)
    w, bias = normal((32, 64), 2), jnp.ones((32,), bias_dtype)
    f = jax.shard_map(lambda x, w, b: linear(x, w, bias=b), mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    db = jax.jit(jax.grad(lambda b: jnp.sum(f(x, w, b).astype(jnp.float32))))(bias)
    assert db.dtype == bias_dtype
    np.testing.assert_array_equal(db.astype(jnp.float32), np.full(32, x.shape[0]))


def test_linear_names_axes_it_cannot_flatten():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        x = put(normal((4, 32, 64)), mesh, P(None, "x"))
        with pytest.raises(ValueError, match="linear: of the leading axes of x only the first may be sharded"):
            linear(x, put(normal((16, 64)), mesh, P()))
