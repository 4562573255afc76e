"""The same for products, and for everything inside shard_map and linear."""

import math
import os
import pathlib
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    KEY,
    assert_sharded,
    axes_of,
    every_kind,
    every_spec,
    given_amax,
    home,
    is_maximum,
    key_for,
    make_mesh,
    put,
    run,
    shard,
    ways,
)
from operands import exact_tensor, exact_with_scope, normal

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    Recipe,
    dequantize,
    fake_quant,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4._primitives import matmul
from jnvfp4._primitives._base import Proposal
from jnvfp4._primitives._matmul_routes import MatmulParams

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


# The amax scope of a ("dense": not quantized) and that of b.
SCOPES = [("tensor", "tensor"), ("row", "tensor"), ("dense", "tensor")]
SCOPES += [("window64", "tensor"), ("row", "window64"), ("window64", "window64")]


@pytest.fixture
def operands():
    """a and b of order-independent products, for every kind of either."""
    found = []
    for scope_a, scope_b in SCOPES:
        a = exact_with_scope("tensor" if scope_a == "dense" else scope_a, (M, K), 1)
        found.append((dequantize(a, jnp.bfloat16) if scope_a == "dense" else a, exact_with_scope(scope_b, (N, K), 2)))
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
ask_for_result = pytest.mark.parametrize("how", ["out_shardings", "constraint"])


def scattered_products(operands, bias, sharding, how):
    def f(operands, bias):
        found = multiply(operands, bias=bias)
        return jax.lax.with_sharding_constraint(found, sharding) if how == "constraint" else found

    jitted = jax.jit(f, out_shardings=sharding) if how == "out_shardings" else jax.jit(f)
    return run(jitted, operands, bias)


@ask_for_result
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("layout", SCATTERED_GEMMS.values(), ids=SCATTERED_GEMMS)
def test_matmul_over_k_scatters_its_sum_where_the_result_is_split(devices, layout, with_bias, how, operands):
    """Each device receives its part of the sum alone, and adds its part of the bias."""
    mesh, (sa, sb, so, over) = make_mesh(devices), layout
    bias = normal((N,)) if with_bias else None
    got, found = scattered_products(place(operands, mesh, sa, sb), bias, NamedSharding(mesh, so), how)
    assert_same_tensor(got, multiply(home(devices, operands), bias=home(devices, bias)))
    for y in got.values():
        assert_sharded(y, mesh, so)
    summed = M // ways(mesh, sa[0]) * N
    sizes = {"reduce-scatter": [], "all-reduce": [], "collective-permute": []}
    for op, shape in found:
        sizes[op] += [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]*)\]", shape)]
    scatters = ways(mesh, [*axes_of(over[0]), *axes_of(over[1])][0]) > 1  # on two devices the axis y has one
    assert (len(sizes["reduce-scatter"]) > 0) == scatters
    if scatters:
        assert max(sizes["reduce-scatter"] + sizes["all-reduce"], default=0) < summed


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
    """Their order along K is the CPU's."""
    mesh, (x, w) = make_mesh(devices), (normal((M, K), s) for s in (1, 2))
    pairs = [(quantize(x, sa), quantize(w, sb)) for sa, sb in ((WINDOW64, NVFP4), (ROW_SCALED, WINDOW64))]
    f = jax.jit(lambda pairs: [matmul_nt(a, b, accumulation="pinned") for a, b in pairs])
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
    maxima = [shape for _, shape in found if shape not in sums]
    assert sum(shape.count("[]") for shape in maxima) >= 1 + (mesh.shape["y"] > 1), found
    assert all(map(is_maximum, maxima)), found


@pytest.mark.parametrize("which", ["a", "b", "dense"])
def test_matmul_refuses_to_split_a_block_of_an_explicit_mesh(devices, which):
    mesh = make_mesh(devices, kind="explicit")
    a, b = exact_tensor((M, 48), 1), exact_tensor((N, 48), 2)
    if which == "dense":
        a = put(dequantize(a, jnp.bfloat16), mesh, P(None, "x"))
    else:
        a, b = (shard_bytes(t, mesh) if which == name else t for name, t in (("a", a), ("b", b)))
    with pytest.raises(ValueError, match=r"matmul_nt: axis 1 .* is sharded over 'x' .* must split it into multiples"):
        jax.eval_shape(matmul_nt, a, b)


def shard_bytes(t, mesh):
    """Data alone split along K."""
    return NVFP4Tensor(put(t.data, mesh, P(None, "x")), put(t.scale, mesh, P()), put(t.amax, mesh, P()), t.format)


@pytest.mark.parametrize("bias", [1e-40, -3e-45, 2.0**-126], ids=str)
@pytest.mark.parametrize("k_axis", [None, "x"])
def test_a_subnormal_bias_survives_a_sum_over_devices(k_axis, bias):
    """XLA's float addition would flush it."""
    devices = jax.devices("cpu")[:8]
    mesh, a, b = make_mesh(devices, "x"), exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    a = NVFP4Tensor(jnp.zeros_like(a.data), a.scale, a.amax, a.format)
    f = jax.jit(partial(matmul_nt, bias=jnp.full((N,), bias, jnp.float32), out_dtype=jnp.float32))
    got = f(*(shard(t, mesh, P(None, k_axis)) for t in (a, b)))
    assert_bitwise(got, np.full((M, N), bias, np.float32))


# ---------------------------------------------------------------- everything
@partial(jax.jit, static_argnums=0)
def every_primitive(implementation, x, a, b):
    """One call or more of each, in one program."""
    options = {"implementation": implementation}
    found = [quantize(x, s, key=key_for(s), **options) for s in (ROW_SCALED, NVFP4_2D, NVFP4_RHT_SR)]
    found += [quantize_pair(x, WINDOW64, WINDOW64, **options), fake_quant(x, ROW_SCALED, **options)]
    return [*found, matmul_nt(a, b, bias=jnp.ones((N,)), **options), dequantize(a, **options)]


@pytest.mark.parametrize("implementation", ["native", pytest.param("reference", marks=pytest.mark.long)])
def test_every_primitive_under_an_explicit_mesh(devices, implementation):
    """What runs on a device is traced without the mesh of jax.set_mesh, which would type local blocks by it."""
    mesh, x = make_mesh(devices, kind="explicit"), normal((128, 256))
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    want = every_primitive("native", *home(devices, (x, a, b)))
    placed = put(x, mesh, P("x", "y")), shard(a, mesh, P("x", "y")), shard(b, mesh, P(None, "y"))
    with jax.set_mesh(mesh):
        got = every_primitive(implementation, *placed)
    assert_same_tensor(got, want)


def test_every_primitive_in_compile_time_evaluation(devices):
    """What runs on a device is traced again for its part of a mesh, with the indices of that part."""
    mesh, x = make_mesh(devices), normal((128, 512))  # a shape that nothing else compiles
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    want = every_primitive("native", *home(devices, (x, a, b)))
    placed = put(x, mesh, P("x", "y")), shard(a, mesh, P("x", "y")), shard(b, mesh, P(None, "y"))
    with jax.ensure_compile_time_eval():
        got = every_primitive("native", *placed)
    assert_same_tensor(got, want)
    assert_sharded(got[0].data, mesh, P("x", "y"))


@pytest.fixture
def gspmd():
    """XLA's former way to propagate shardings, by a callback instead of a rule."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def test_every_primitive_without_shardy(devices, gspmd):
    mesh, x = make_mesh(devices), normal((128, 256))
    a, b = exact_tensor((M, K), 1), exact_tensor((N, K), 2)
    want = every_primitive("native", *home(devices, (x, a, b)))
    got = every_primitive(
        "native", put(x, mesh, P("x", "y")), shard(a, mesh, P("x", "y")), shard(b, mesh, P(None, "y"))
    )
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


@pytest.mark.parametrize("left", ["nvfp4", "dense"])
def test_the_reference_where_axes_are_checked(devices, left):
    """Its loops begin with zeros, which vary over no axis."""
    mesh = make_mesh(devices, "x")
    x, b = normal((64, 64)), quantize(normal((32, 64), 1))
    product = partial(matmul_nt, implementation="reference")
    multiply = (lambda x, b: product(quantize(x, ROW_SCALED), b)) if left == "nvfp4" else product
    got = jax.jit(jax.shard_map(multiply, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))(x, b)
    assert_bitwise(got, multiply(x, b))


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


def test_gradient_of_shared_operands_where_only_the_key_differs(devices):
    """Every device draws its own random bits for the same x and w; the gradients are the sums of theirs."""
    mesh, (x, w) = make_mesh(devices, "x"), (normal((32, 64), 1, "fp32"), normal((32, 64), 2, "fp32"))

    def loss(x, w, key):
        return jnp.sum(linear(x, w, recipes.pretrain(), key=key) ** 2)

    def local(x, w):
        return jax.grad(loss, (0, 1))(x, w, jax.random.fold_in(KEY, jax.lax.axis_index("x")))

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))(x, w)
    one = jax.jit(jax.grad(loss, (0, 1)))
    parts = [one(*home(devices, (x, w, jax.random.fold_in(KEY, i)))) for i in range(len(devices))]
    for i in range(2):
        np.testing.assert_allclose(got[i], sum(np.asarray(p[i]) for p in parts), rtol=1e-5, atol=1e-3)


# x [M, K] and w [N, K] of an Explicit mesh (x, y), in the layouts of data, tensor and fully sharded parallelism.
EXPLICIT_LAYOUTS = {
    "data": (P("x"), P()),
    "fsdp along K": (P("x"), P(None, "y")),
    "fsdp along the axis of the data": (P("x"), P(None, "x")),
    "fsdp and tensor": (P("x"), P("y", "x")),
    "tensor along N": (P(), P("x")),
    "tensor along K": (P(None, "y"), P(None, "y")),
    "x along K": (P(None, "y"), P()),
    "x along K, w along N": (P(None, "y"), P("x")),
}
BACKWARDS = {
    "quantized": recipes.pretrain(stochastic_rounding=False),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "high precision": recipes.inference(),
}


@pytest.mark.parametrize("layout", EXPLICIT_LAYOUTS)
@pytest.mark.parametrize(
    "recipe", ["quantized", "high precision", "frozen", pytest.param("dequantized", marks=pytest.mark.long)]
)
def test_gradients_have_the_shardings_of_explicit_operands(layout, recipe):
    devices = jax.devices("cpu")[:8]
    mesh, (of_x, of_w) = make_mesh(devices, kind="explicit"), EXPLICIT_LAYOUTS[layout]
    x, w, bias = normal((128, 256), 1, "fp32"), normal((64, 256), 2, "fp32"), normal((1, 64), 3, "fp32")[0]
    frozen = recipe == "frozen"

    def gradients(x, w, bias):
        fixed = () if frozen else (w,)
        q = quantize(w) if frozen else None
        spec = BACKWARDS.get(recipe, Recipe())
        loss = lambda x, bias, *w: jnp.mean(linear(x, q if frozen else w[0], spec, bias=bias) ** 2)  # noqa: E731
        return jax.grad(loss, tuple(range(2 + len(fixed))))(x, bias, *fixed)

    want = jax.jit(gradients)(*home(devices, (x, w, bias)))
    placed = put(x, mesh, of_x), put(w, mesh, of_w), put(bias, mesh, P())
    got = jax.jit(gradients)(*placed)
    for gradient, operand, exact in zip(got, (placed[0], placed[2], placed[1]), want, strict=False):
        assert gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-5 * float(jnp.abs(exact).max()))


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_bias_gradient_is_summed_over_devices(devices, bias_dtype):
    mesh, x = make_mesh(devices, "x"), normal((32 * len(devices), 64), 1)
    w, bias = normal((32, 64), 2), jnp.ones((32,), bias_dtype)
    f = jax.shard_map(lambda x, w, b: linear(x, w, bias=b), mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    db = jax.jit(jax.grad(lambda b: jnp.sum(f(x, w, b).astype(jnp.float32))))(bias)
    assert db.dtype == bias_dtype
    np.testing.assert_array_equal(db.astype(jnp.float32), np.full(32, x.shape[0]))
