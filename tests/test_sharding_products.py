"""Sharded products equal unsharded ones, as does every primitive on any kind of mesh and inside shard_map."""

import contextlib
import os
import pathlib
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, key_for
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    KINDS,
    SPECS,
    assert_sharded,
    axes_of,
    dtypes_of,
    elements,
    every_kind,
    given_amax,
    home,
    make_mesh,
    put,
    run,
    shard,
    shard_data,
    ways,
)
from operands import exact_tensor, exact_with_scope, norm_operands, normal

import jnvfp4
from jnvfp4 import NVFP4Tensor, dequantize, fake_quant, matmul_nt, quantize, quantize_pair
from jnvfp4._primitives import matmul
from jnvfp4._primitives._base import Proposal
from jnvfp4._primitives._matmul_routes import MatmulParams
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64, Format

# ---------------------------------------------------------------- matmul_nt
# a [M, K], b [N, K] -> result, on mesh (x, y).
GEMMS = {
    "m": (P("x", None), P(None, None), P("x", None)),
    "n": (P(None, None), P("y", None), P(None, "y")),
    "m_n": (P("x", None), P("y", None), P("x", "y")),
    "mm": (P(("x", "y"), None), P(None, None), P(("x", "y"), None)),
    "nn": (P(None, None), P(("x", "y"), None), P(None, ("x", "y"))),
    "k": (P(None, "x"), P(None, "x"), P(None, None)),
    "m_k": (P("y", "x"), P(None, "x"), P("y", None)),
    "n_k": (P(None, "x"), P("y", "x"), P(None, "y")),
    "kk": (P(None, ("x", "y")), P(None, ("x", "y")), P(None, None)),
    "k_of_a": (P(None, "x"), P(None, None), None),  # gathered
    "k_of_b": (P(None, None), P(None, "x"), None),
    "k_k_differ": (P(None, "x"), P(None, "y"), None),
    "m_of_a_k_of_b": (P("x", None), P(None, "x"), None),
}
M, N, K = 64, 32, 512


# The amax scope of a ("dense": not quantized) and that of b.
SCOPES = [("row", "tensor"), ("dense", "tensor"), ("window64", "tensor"), ("row", "window64")]


@pytest.fixture
def operands():
    """a and b of order-independent products, for every kind of either."""
    found = []
    for scope_a, scope_b in SCOPES:
        a = exact_with_scope("tensor" if scope_a == "dense" else scope_a, (M, K), 1)
        found.append((dequantize(a, jnp.bfloat16) if scope_a == "dense" else a, exact_with_scope(scope_b, (N, K), 2)))
    return found


def multiply(operands, bias=None):
    """All in one program."""
    return {str(scopes): matmul_nt(a, b, bias=bias) for scopes, (a, b) in zip(SCOPES, operands, strict=True)}


def place(operands, mesh, *specs):
    put_any = lambda t, spec: (shard if isinstance(t, NVFP4Tensor) else put)(t, mesh, spec)  # noqa: E731
    return [tuple(map(put_any, pair, specs)) for pair in operands]


LAYOUTS_IN_TURN = [
    pytest.param(kind, *layout, id=f"{kind}-{name}", marks=[pytest.mark.long] * bool((i + 2 * (kind == "auto")) % 3))
    for i, (name, layout) in enumerate(GEMMS.items())
    for kind in KINDS
]


@pytest.mark.parametrize(("kind", "of_a", "of_b", "of_y"), LAYOUTS_IN_TURN)
def test_products_have_the_bits_of_one_device(devices, kind, of_a, of_b, of_y, operands):
    """Over M and N without a collective; over K by one sum in float32; a K that only one side splits is gathered."""
    mesh = make_mesh(devices, kind=kind)
    bias = normal((N,))
    got, found = run(multiply, place(operands, mesh, of_a, of_b), put(bias, mesh, P()))
    assert_same_tensor(got, multiply(*home(devices, (operands, bias))))
    if of_y is None:
        assert "all-reduce" not in {op for op, _ in found}
        return
    for y in got.values():
        assert_sharded(y, mesh, of_y)
    assert {op for op, _ in found} <= {"all-reduce"}
    sums = [shape for _, shape in found]  # combined or not
    assert dtypes_of(sums) <= {"f32"}
    local = M // ways(mesh, of_y[0]) * (N // ways(mesh, of_y[1]))
    assert sum(map(elements, sums)) == local * len(operands) * (ways(mesh, of_a[1]) > 1)


@pytest.mark.parametrize(("kind", "of_a", "of_b", "of_y"), LAYOUTS_IN_TURN)
def test_norms_and_residuals_have_the_bits_of_one_device(devices, kind, of_a, of_b, of_y):
    """The residual is split as the result; where K is split, so is the gain, and devices sum a number for each row."""
    mesh, half = make_mesh(devices, kind=kind), jnp.bfloat16
    a, (gain, epsilon), _, _ = norm_operands(half, (M, N, K), half)
    b, residual = exact_with_scope("tensor", (N, K), 2), normal((M, N), dtype="bf16")
    f = jax.jit(lambda a, b, gain, residual: matmul_nt(a, b, norm=(gain, epsilon), bias=residual))
    whole = P("y", "x") if of_y is None else of_y
    placed = put(a, mesh, of_a), shard(b, mesh, of_b), put(gain, mesh, P()), put(residual, mesh, whole)
    got, found = run(f, *placed)
    assert_bitwise(got, f(*home(devices, (a, b, gain, residual))))
    if of_y is None:
        return
    assert_sharded(got, mesh, of_y)
    local = M // ways(mesh, of_y[0]) * (N // ways(mesh, of_y[1]) + 1)
    sums = [shape for op, shape in found if op == "all-reduce"]
    assert sum(map(elements, sums)) == local * (ways(mesh, of_a[1]) > 1)


@pytest.mark.parametrize("name", ["m", "n", "m_and_n", "m_of_two"])
def test_a_scattered_sum_gets_its_part_of_a_residual(devices, name):
    mesh, (sa, sb, so, _), half = make_mesh(devices), SCATTERED_GEMMS[name], jnp.bfloat16
    a, norm, _, _ = norm_operands(half, (M, N, K))
    b, residual = exact_with_scope("tensor", (N, K), 2), normal((M, N))
    f = jax.jit(lambda *of: matmul_nt(*of[:2], norm=norm, bias=of[2]), out_shardings=NamedSharding(mesh, so))
    got = f(put(a, mesh, sa), shard(b, mesh, sb), residual)
    assert_sharded(got, mesh, so)
    assert_bitwise(got, matmul_nt(*home(devices, (a, b)), norm=norm, bias=residual))


# a, b, the result asked for, and the axes of K that a reduce-scatter splits each dimension of it over.
SCATTERED_GEMMS = {
    "m": (P(None, "x"), P(None, "x"), P("x", None), ("x", None)),
    "n": (P(None, "y"), P(None, "y"), P(None, "y"), (None, "y")),
    "m_after_m": (P("y", "x"), P(None, "x"), P(("y", "x"), None), ("x", None)),
    "m_before_m": (P("y", "x"), P(None, "x"), P(("x", "y"), None), ("x", None)),
    "n_beside_m": (P("y", "x"), P(None, "x"), P("y", "x"), (None, "x")),
    "m_over_both": (P(None, ("x", "y")), P(None, ("x", "y")), P(("x", "y"), None), (("x", "y"), None)),
    "m_and_n": (P(None, ("x", "y")), P(None, ("x", "y")), P("x", "y"), ("x", "y")),
    "m_of_two": (P(None, ("x", "y")), P(None, ("x", "y")), P("y", None), ("y", None)),
}


@pytest.mark.parametrize("name", SCATTERED_GEMMS)
def test_matmul_over_k_scatters_its_sum_where_the_result_is_split(devices, name, operands):
    """Each device receives its part of the sum alone, and adds its part of the bias."""
    mesh, (sa, sb, so, over) = make_mesh(devices), SCATTERED_GEMMS[name]
    bias = None if name.startswith("n") else normal((N,))
    asked = NamedSharding(mesh, so)
    if list(SCATTERED_GEMMS).index(name) % 2:
        f = jax.jit(multiply, out_shardings=asked)
    else:
        f = lambda operands, bias: jax.lax.with_sharding_constraint(multiply(operands, bias), asked)  # noqa: E731
    got, found = run(f, place(operands, mesh, sa, sb), bias)
    assert_same_tensor(got, multiply(home(devices, operands), bias=home(devices, bias)))
    for y in got.values():
        assert_sharded(y, mesh, so)
    summed = M // ways(mesh, sa[0]) * N
    assert {op for op, _ in found} <= {"reduce-scatter", "all-reduce", "collective-permute"}
    scatters = ways(mesh, [*axes_of(over[0]), *axes_of(over[1])][0]) > 1  # on two devices the axis y has one
    assert ("reduce-scatter" in {op for op, _ in found}) == scatters
    # All of one kind together: on GPUs XLA combines the all-reduces that follow over another axis.
    sums = [sum(elements(shape) for op, shape in found if op == kind) for kind in ("reduce-scatter", "all-reduce")]
    assert not scatters or max(sums) < summed * len(operands)


@pytest.mark.parametrize(
    ("axes", "m", "row", "result", "want"),
    [
        ("x", 16, None, "x", ("x",)),
        ("x", 12, None, "x", None),
        ("xy", 16, "y", ("y", "x"), ("y", "x")),
        ("xy", 12, "y", ("y", "x"), ("y",)),  # 12 rows divide by both axes, and not by their product
    ],
)
def test_a_sum_is_scattered_only_where_it_divides(axes, m, row, result, want):
    """jit asks for no uneven result, XLA may: what the callback answers decides."""
    mesh = make_mesh(jax.devices("cpu")[:8], axes)
    dense, data, scale, amax = (m, K), (N, K // 2), (N, K // 16), ()
    params = MatmulParams(None, Format(), jnp.dtype(jnp.float32))
    operands = [[row, "x"], [None, "x"], [None, "x"], []]
    proposed = Proposal(mesh, operands, [dense, data, scale, amax], [[result, None]])
    _, (y,), _ = matmul._partition(params, proposed)
    assert y == [want, None]


@pytest.mark.parametrize("layout", [GEMMS["m_n"], GEMMS["nn"]], ids=["m_n", "nn"])
def test_matmul_of_real_numbers_over_m_and_n(devices, layout):
    """The pinned order along K makes any data bitwise."""
    mesh, (x, w) = make_mesh(devices), (normal((M, K), s) for s in (1, 2))
    pairs = [(NVFP4, NVFP4), (WINDOW64, NVFP4), (ROW_SCALED, WINDOW64)]
    pairs = [(quantize(x, sa), quantize(w, sb)) for sa, sb in pairs]
    f = jax.jit(lambda pairs: [matmul_nt(a, b, accumulation="pinned") for a, b in pairs])
    assert_same_tensor(f(place(pairs, mesh, *layout[:2])), f(home(devices, pairs)))


@pytest.mark.parametrize("layout", [GEMMS["m_k"], GEMMS["kk"]], ids=["m_k", "kk"])
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
    """XLA moves one of them on an Auto mesh; an Explicit one is told."""
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    auto, explicit = ([shard(t, make_mesh(devices, "x", kind), P("x")) for t in (a, b)] for kind in KINDS)
    assert_bitwise(jax.jit(matmul_nt)(*auto), matmul_nt(*home(devices, (a, b))))
    for of_y, part in (P("x"), f"u8[{N},{K // 2}]"), (P(None, "x"), f"u8[{M},{K // 2}]"):  # and only that is gathered
        got, found = run(jax.jit(matmul_nt, out_shardings=NamedSharding(auto[0].data.sharding.mesh, of_y)), *auto)
        assert_bitwise(got, matmul_nt(*home(devices, (a, b))))
        assert [shape for _, shape in found if "u8" in shape] == [part]
    with pytest.raises(ValueError, match="sharded over a common mesh axis"):
        jax.eval_shape(matmul_nt, *explicit)


in_bytes = partial(shard_data, spec=P(None, "x"))
SPLIT_BLOCKS = [  # the axis that would be split, the least part of it, and the call
    (1, 16, "quantize", lambda mesh: quantize(put(normal((32, 48)), mesh, P(None, "x")))),
    (0, 16, "quantize", lambda mesh: quantize(put(normal((48, 32)), mesh, P("x", None)), NVFP4_2D)),
    (1, 64, "quantize", lambda mesh: quantize(put(normal((32, 192)), mesh, P(None, "x")), WINDOW64)),
    (1, 16, "fake_quant", lambda mesh: fake_quant(put(normal((32, 48)), mesh, P(None, "x")))),
    (1, 8, "dequantize", lambda mesh: dequantize(in_bytes(exact_tensor((32, 48)), mesh))),
    (1, 8, "matmul_nt", lambda mesh: matmul_nt(in_bytes(exact_tensor((M, 48)), mesh), exact_tensor((N, 48)))),
    (1, 8, "matmul_nt", lambda mesh: matmul_nt(exact_tensor((M, 48)), in_bytes(exact_tensor((N, 48)), mesh))),
    (1, 16, "matmul_nt", lambda mesh: matmul_nt(put(normal((M, 48)), mesh, P(None, "x")), exact_tensor((N, 48)))),
]


@pytest.mark.parametrize(("axis", "unit", "op", "call"), SPLIT_BLOCKS)
def test_explicit_meshes_refuse_to_split_a_block(devices, axis, unit, op, call):
    text = f"{op}: axis {axis} .* is sharded over 'x' .* must split it into multiples of {unit}; reshard it first"
    with pytest.raises(ValueError, match=text):
        call(make_mesh(devices, kind="explicit"))


def test_an_auto_mesh_splits_no_window(devices):
    mesh, k = make_mesh(devices, "x"), 32 * len(devices)
    a, b = exact_with_scope("window64", (M, k), 1), exact_tensor((N, k), 2)
    assert_bitwise(jax.jit(matmul_nt)(in_bytes(a, mesh), in_bytes(b, mesh)), matmul_nt(*home(devices, (a, b))))


@pytest.mark.parametrize("k_axis", [None, "x"])
def test_a_subnormal_bias_survives_a_sum_over_devices(k_axis):
    """XLA's float addition would flush it."""
    devices = jax.devices("cpu")[:8]
    mesh, a, b = make_mesh(devices, "x"), exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    a = NVFP4Tensor(jnp.zeros_like(a.data), a.scale, a.amax, a.format)
    bias = jnp.resize(jnp.asarray([1e-40, -3e-45, 2.0**-126], jnp.float32), N)
    f = jax.jit(partial(matmul_nt, out_dtype=jnp.float32))
    assert_bitwise(f(*(shard(t, mesh, P(None, k_axis)) for t in (a, b)), bias=bias), np.tile(bias, (M, 1)))


# ---------------------------------------------------------------- everything
@partial(jax.jit, static_argnums=0)
def every_primitive(implementation, x, a, b):
    """One call or more of each, in one program."""
    options = {"implementation": implementation}
    found = [quantize(x, s, key=key_for(s), **options) for s in (ROW_SCALED, NVFP4_2D, NVFP4_RHT_SR)]
    found += [quantize_pair(x, WINDOW64, WINDOW64, **options), fake_quant(x, ROW_SCALED, **options)]
    found += [matmul_nt(a, b, bias=jnp.ones((N,)), **options), dequantize(a, **options)]
    signs = jnp.where(found[-1] < 0, -1, 1).astype(jnp.bfloat16)
    return [*found, matmul_nt(signs, b, norm=(jnp.ones(K), 1e-9), bias=jnp.ones((M, N)), **options)]


@contextlib.contextmanager
def without_shardy():
    """By XLA's former way to propagate shardings, by a callback instead of a rule."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


# What runs on a device is traced without the mesh of jax.set_mesh, which would type local blocks by it, and again for
# its part of a mesh, with the indices of that part. Each context has a number of columns that nothing else compiles.
CONTEXTS = {
    "explicit mesh": (256, "explicit", jax.set_mesh),
    "compile-time evaluation": (512, "auto", lambda mesh: jax.ensure_compile_time_eval()),
    "no Shardy": (768, "auto", lambda mesh: without_shardy()),
}


@pytest.mark.parametrize("implementation", ["native", pytest.param("reference", marks=pytest.mark.long)])
@pytest.mark.parametrize(("columns", "kind", "context"), CONTEXTS.values(), ids=CONTEXTS)
def test_every_primitive_has_the_bits_of_one_device(devices, columns, kind, context, implementation):
    mesh, x = make_mesh(devices, kind=kind), normal((128, columns))
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    want = every_primitive("native", *home(devices, (x, a, b)))
    placed = put(x, mesh, P("x", "y")), shard(a, mesh, P("x", "y")), shard(b, mesh, P(None, "y"))
    with context(mesh):
        got = every_primitive(implementation, *placed)
    assert_same_tensor(got, want)
    assert_sharded(got[0].data, mesh, P("x", "y"))
    assert_sharded(got[0].amax, mesh, P("x"))


# Each operand in turn is a constant, which has no sharding when GSPMD asks for that of the results.
CONSTANT_OPERANDS = """
import jax, jax.numpy as jnp
from helpers import assert_same_tensor
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put
from operands import normal
from jnvfp4 import *

jax.config.update("jax_use_shardy_partitioner", False)
mesh, x, row = make_mesh(jax.devices()), normal((128, 512)), jnp.full((128,), 4.0)
a = quantize(x)
parts = a.data, a.scale, a.amax

calls = [
    (lambda x, amax: quantize(x, ROW_SCALED, amax=amax), x, row),
    (lambda x, amax: quantize_pair(x, amax=(amax, amax)), x, jnp.float32(4)),
    (lambda x, amax: fake_quant(x, ROW_SCALED, amax=amax), x, row),
    (lambda *parts: dequantize(NVFP4Tensor(*parts)), *parts),
    (lambda x, *parts: matmul_nt(x, NVFP4Tensor(*parts)), x, *parts),
    (lambda bias, *parts: matmul_nt(a, NVFP4Tensor(*parts), bias=bias), row, *parts),
]
for f, *operands in calls:
    for constant in range(len(operands)):
        def call(*others):
            value = jnp.full_like(operands[constant], 2)
            return f(*others[:constant], value, *others[constant:])

        others = operands[:constant] + operands[constant + 1 :]
        sharded = [put(v, mesh, P("x") if v.ndim else P()) for v in others]
        assert_same_tensor(jax.jit(call)(*sharded), jax.jit(call)(*others))
"""


@pytest.mark.long
def test_constant_operands_without_shardy():
    """In a process of its own, which XLA would abort at an exception in the callback."""
    paths = [str(pathlib.Path(jnvfp4.__file__).parent.parent), str(pathlib.Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CONSTANT_OPERANDS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_quantize_in_shard_map(devices, check_vma):
    mesh, x, both = make_mesh(devices), normal((128, 512)), P("x", "y")
    amaxes = {name: given_amax(x.shape, s.format.amax_scope, False) for name, s in SPECS.items()}
    of_amax = {name: P(*both[: a.ndim]) for name, a in amaxes.items()}
    f = lambda x, amaxes: {name: quantize(x, s, amax=amaxes[name]) for name, s in SPECS.items()}  # noqa: E731
    out = {name: NVFP4Tensor(both, both, of_amax[name], s.format) for name, s in SPECS.items()}
    local = jax.shard_map(f, mesh=mesh, in_specs=(both, of_amax), out_specs=out, check_vma=check_vma)
    placed = {name: put(a, mesh, of_amax[name]) for name, a in amaxes.items()}
    got, found = run(local, put(x, mesh, both), placed)
    assert_same_tensor(got, f(*home(devices, (x, amaxes))))
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


@every_kind
@pytest.mark.parametrize("manual", ["x", "y"])
def test_a_manual_axis(devices, kind, manual):
    """Amaxes of rows and sums are those of each manual shard. JAX may gather over the rest of an Explicit mesh."""
    mesh, other = make_mesh(devices, kind=kind), "y" if manual == "x" else "x"
    of_b = P(None, other) if kind == "auto" else P(other)  # along K without a gather, and along N
    x, w, b = normal((64, 512), 1), normal((128, 512), 2), exact_tensor((N, 512))

    def f(x, w, b):
        t = quantize(x, ROW_SCALED)
        return t, dequantize(t), matmul_nt(t, quantize(w, ROW_SCALED), out_dtype=jnp.float32), matmul_nt(x, b)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(manual), P(), P()), out_specs=P(manual), axis_names={manual})
    got, found = run(mapped, put(x, mesh, P(manual, other)), put(w, mesh, P(None, other)), shard(b, mesh, of_b))
    want = f(*home(devices, (x, w, b)))
    assert_same_tensor(got[:2], want[:2])
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(*(np.asarray(y[3], np.float32) for y in (got, want)), rtol=2**-7)
    if kind == "auto":
        assert {op for op, _ in found} == ({"all-reduce"} if mesh.shape[other] > 1 else set())
        assert_sharded(got[0].data, mesh, P(manual, other))


def test_wrong_out_specs_are_refused(devices):
    """The results vary over the manual axes of their operands."""
    mesh, x = make_mesh(devices, "x"), normal((32, 64))
    f = jax.shard_map(quantize, mesh=mesh, in_specs=P("x"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(f, x)


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("left", ["nvfp4", "dense"])
def test_matmul_in_shard_map_with_a_replicated_side(devices, left, implementation):
    """The loops of the reference begin with zeros, which vary over no axis."""
    mesh = make_mesh(devices, "x")
    x, b = normal((64, 64)), quantize(normal((32, 64), 1))
    product = partial(matmul_nt, accumulation="pinned", implementation=implementation)
    multiply = (lambda x, b: product(quantize(x, ROW_SCALED), b)) if left == "nvfp4" else product
    got = jax.jit(jax.shard_map(multiply, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))(x, b)
    assert_bitwise(got, multiply(x, b))


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_a_norm_and_a_residual_in_shard_map(devices, implementation):
    """The norm is that of the rows of a device; where they are split along K, of its part."""
    mesh, half = make_mesh(devices, "x"), jnp.bfloat16
    a, (gain, epsilon), _, b = norm_operands(half, (M, N, K), half)
    residual = normal((M, N))

    def f(a, b, gain, residual):
        return matmul_nt(
            a, b, norm=(gain, epsilon), bias=residual, out_dtype=jnp.float32, implementation=implementation
        )

    rows = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P(), P(), P("x")), out_specs=P("x"))
    assert_bitwise(jax.jit(rows)(a, b, gain, residual), f(a, b, gain, residual))
    part = K // len(devices)
    of_k = (P(None, "x"), NVFP4Tensor(P(None, "x"), P(None, "x"), P(), b.format), P("x"), P())
    parts = jax.jit(jax.shard_map(lambda *of: f(*of)[None], mesh=mesh, in_specs=of_k, out_specs=P("x")))
    first = NVFP4Tensor(b.data[:, : part // 2], b.scale[:, : part // 16], b.amax, b.format)
    assert_bitwise(parts(a, b, gain, residual)[0], f(a[:, :part], first, gain[:part], residual))
