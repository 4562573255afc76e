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
    ROW_SCALED,
    Format,
    NVFP4Tensor,
    Recipe,
    dequantize,
    fake_quant,
    linear,
    matmul_nt,
    quantize,
)

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {"nvfp4": NVFP4, "nvfp4_2d": NVFP4_2D, "row": ROW_SCALED}
X = Case("x", (128, 512))

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


def given_amax(x, qspec, transpose):
    if qspec.format.amax_scope == "tensor":
        return jnp.float32(3.5)
    rows = x.shape[-1] if transpose else x.shape[-2]
    return jnp.linspace(1.0, 4.0, rows, dtype=jnp.float32)


# ---------------------------------------------------------------- quantize
@transposed_or_not
@every_spec
@every_layout
@every_kind
def test_quantize_with_amax_needs_no_collective(devices, kind, axes, spec, qspec, transpose):
    mesh, x = make_mesh(devices, axes, kind), jnp.asarray(X.make())
    amax = given_amax(x, qspec, transpose)
    turned = P(*reversed(spec)) if transpose else spec
    amax_s = put(amax, mesh, P(*turned[: amax.ndim]))
    f = partial(quantize, spec=qspec, transpose=transpose)
    want = f(home(devices, x), amax=home(devices, amax))
    got, found = run(lambda x, a: f(x, amax=a), put(x, mesh, spec), amax_s)
    assert_same_tensor(got, want)
    assert_sharded(got.data, mesh, turned)
    assert_sharded(got.scale, mesh, turned)
    assert found == []


@transposed_or_not
@every_spec
@every_layout
@every_kind
def test_quantize_reduces_only_the_amax(devices, kind, axes, spec, qspec, transpose):
    mesh, x = make_mesh(devices, axes, kind), jnp.asarray(X.make())
    f = partial(quantize, spec=qspec, transpose=transpose)
    turned = P(*reversed(spec)) if transpose else spec
    got, found = run(f, put(x, mesh, spec))
    assert_same_tensor(got, f(home(devices, x)))
    assert_sharded(got.data, mesh, turned)
    assert_sharded(got.scale, mesh, turned)
    assert_sharded(got.amax, mesh, P(*turned[: got.amax.ndim]))
    if qspec is not ROW_SCALED:
        assert_scalar_maxima(found, mesh, spec)
    else:
        rows = got.amax.size // ways(mesh, turned[0])
        assert found == [("all-reduce", f"u32[{rows}]")] * (ways(mesh, turned[1]) > 1)


@every_layout
def test_quantize_under_the_reference_lowering(devices, axes, spec):
    mesh, x = make_mesh(devices, axes, "explicit"), normal((32, 128))
    f = partial(quantize, spec=ROW_SCALED, implementation="reference")
    with jax.set_mesh(mesh):
        got = jax.jit(f)(put(x, mesh, spec))
    assert_same_tensor(got, f(home(devices, x)))


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
    got, found = run(jax.vmap(quantize), put(x, mesh, P("x")))
    assert_same_tensor(got, jax.vmap(quantize)(home(devices, x)))
    assert_sharded(got.amax, mesh, P("x"))
    assert found == []


@every_layout
@every_kind
def test_fake_quant(devices, kind, axes, spec):
    mesh, x = make_mesh(devices, axes, kind), normal((128, 512))
    got, found = run(fake_quant, put(x, mesh, spec))
    assert_bitwise(got, fake_quant(home(devices, x)))
    assert_sharded(got, mesh, spec)
    assert_scalar_maxima(found, mesh, spec)


# ---------------------------------------------------------------- blocks that would straddle devices
STRADDLES = {
    "8_elements_each": ((32, 64), P(None, ("x", "y"))),
    "6_blocks_over_y": ((32, 96), P(None, "y")),
    "3_blocks_over_x": ((32, 48), P("x", None)),
    "5_blocks_over_x": ((32, 80), P(None, "x")),
}


@transposed_or_not
@every_spec
@pytest.mark.parametrize(("shape", "spec"), STRADDLES.values(), ids=STRADDLES)
def test_blocks_that_would_straddle_devices(devices, shape, spec, qspec, transpose):
    if qspec is NVFP4_2D:
        shape = (48, shape[1])
    if transpose:
        shape, spec = shape[::-1], P(*reversed(spec))
    mesh, x = make_mesh(devices), normal(shape)
    if any(n % ways(mesh, entry) for n, entry in zip(shape, spec, strict=True)):
        pytest.skip("JAX splits only evenly")
    f = partial(quantize, spec=qspec, transpose=transpose)
    assert_same_tensor(jax.jit(f)(put(x, mesh, spec)), f(home(devices, x)))


@pytest.mark.parametrize("k", [64, 96])
def test_dequantize_and_matmul_of_an_indivisible_k(devices, k):
    mesh, spec = make_mesh(devices, "x"), P(None, "x")
    a, b = exact_tensor((32, k), 1), exact_tensor((16, k), 2)

    def sharded(t):
        return NVFP4Tensor(put(t.data, mesh, spec), put(t.scale, mesh, P()), put(t.amax, mesh, P()), t.format)

    assert_bitwise(jax.jit(dequantize)(sharded(a)), dequantize(home(devices, a)))
    assert_bitwise(jax.jit(matmul_nt)(sharded(a), sharded(b)), matmul_nt(*home(devices, (a, b))))


@pytest.mark.parametrize(
    ("shape", "spec", "qspec"),
    [((32, 48), P(None, "x"), NVFP4), ((48, 32), P("x", None), NVFP4_2D)],
    ids=["k", "rows_of_2d"],
)
def test_explicit_meshes_refuse_to_split_a_block(devices, shape, spec, qspec):
    mesh = make_mesh(devices, kind="explicit")
    with pytest.raises(ValueError, match=r"must split it into multiples of 16; reshard it first"):
        jax.eval_shape(partial(quantize, spec=qspec), put(normal(shape), mesh, spec))


# ---------------------------------------------------------------- dequantize
@pytest.mark.parametrize("qspec", [NVFP4, ROW_SCALED], ids=["nvfp4", "row"])
@every_layout
@every_kind
def test_dequantize_needs_no_collective(devices, kind, axes, spec, qspec):
    mesh, t = make_mesh(devices, axes, kind), quantize(normal((128, 512)), qspec)
    f = partial(dequantize, dtype=jnp.bfloat16)
    got, found = run(f, shard(t, mesh, spec))
    assert_bitwise(got, f(home(devices, t)))
    assert_sharded(got, mesh, spec)
    assert found == []


# ---------------------------------------------------------------- matmul_nt
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


@pytest.fixture(params=["tensor", "row", "dense"])
def operands(request):
    """a and b of order-independent products, a with a tensor amax, a row amax or unquantized."""
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    if request.param == "row":
        a = NVFP4Tensor(a.data, a.scale, jnp.full((M,), 6 * 448.0).at[3].set(448.0 * 3), Format("row"))
    if request.param == "dense":
        a = dequantize(a, jnp.bfloat16)
    return a, b


def _place(t, mesh, spec):
    return shard(t, mesh, spec) if isinstance(t, NVFP4Tensor) else put(t, mesh, spec)


@pytest.mark.parametrize("layout", GEMMS.values(), ids=GEMMS)
@every_kind
def test_matmul_over_m_and_n_needs_no_collective(devices, kind, layout, operands):
    mesh, (a, b) = make_mesh(devices, kind=kind), operands
    sa, sb, so = layout
    got, found = run(matmul_nt, _place(a, mesh, sa), _place(b, mesh, sb))
    assert_bitwise(got, matmul_nt(*home(devices, (a, b))))
    assert_sharded(got, mesh, so)
    assert found == []


@pytest.mark.parametrize("layout", SPLIT_K_GEMMS.values(), ids=SPLIT_K_GEMMS)
@every_kind
def test_matmul_over_k_adds_once_in_float32(devices, kind, layout, operands):
    mesh, (a, b) = make_mesh(devices, kind=kind), operands
    sa, sb, so = layout
    f = partial(matmul_nt, bias=normal((N,)))
    got, found = run(f, _place(a, mesh, sa), _place(b, mesh, sb))
    assert_bitwise(got, f(*home(devices, (a, b))))
    assert_sharded(got, mesh, so)
    local = f"f32[{M // ways(mesh, so[0])},{N // ways(mesh, so[1])}]"
    assert found == [("all-reduce", local)] * (ways(mesh, sa[1]) > 1)


@pytest.mark.parametrize("layout", GATHERED_GEMMS.values(), ids=GATHERED_GEMMS)
@every_kind
def test_matmul_gathers_a_k_that_only_one_side_splits(devices, kind, layout, operands):
    mesh, (a, b) = make_mesh(devices, kind=kind), operands
    got, found = run(matmul_nt, _place(a, mesh, layout[0]), _place(b, mesh, layout[1]))
    assert_bitwise(got, matmul_nt(*home(devices, (a, b))))
    assert "all-reduce" not in {op for op, _ in found}


@pytest.mark.parametrize("layout", GEMMS.values(), ids=GEMMS)
def test_matmul_of_real_numbers_over_m_and_n(layout):
    """The pinned order along K makes any data bitwise on the CPU."""
    devices = jax.devices("cpu")[:8]
    mesh, (a, b) = make_mesh(devices), (quantize(normal((M, K), s)) for s in (1, 2))
    got = jax.jit(matmul_nt)(shard(a, mesh, layout[0]), shard(b, mesh, layout[1]))
    assert_bitwise(got, matmul_nt(*home(devices, (a, b))))


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
    amax = given_amax(x, qspec, False)
    row = P("x") if amax.ndim else P()
    f = partial(quantize, spec=qspec)
    out = NVFP4Tensor(P("x", "y"), P("x", "y"), row, qspec.format)
    local = jax.shard_map(
        lambda x, a: f(x, amax=a), mesh=mesh, in_specs=(P("x", "y"), row), out_specs=out, check_vma=check_vma
    )
    got, found = run(local, put(x, mesh, P("x", "y")), put(amax, mesh, row))
    assert_same_tensor(got, f(home(devices, x), amax=home(devices, amax)))
    assert found == []


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
