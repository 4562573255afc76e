"""grouped_matmul_nt: each group of rows has the bits of matmul_nt, wherever groups begin and end."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GOLDEN
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, assert_vmap_is_a_loop, decoded, primitives, random_tensor
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, make_mesh, run
from operands import exact_tensor, normal

import jnvfp4
from jnvfp4 import NVFP4Tensor, export_checks, grouped_matmul_nt, matmul_nt, quantize, supports
from jnvfp4._native import load, plans
from jnvfp4._primitives import grouped_matmul
from jnvfp4._primitives._groups import Rows, chunks_of, rows_of
from jnvfp4._primitives._products import ProductParams
from jnvfp4.checkpoints import NameRule, from_hf, open_checkpoint
from jnvfp4.spec import NVFP4, ROW_SCALED

M, N, K, G = 80, 40, 64, 5
BOUNDARIES = {
    "one of each": (0, 1, 15, 16, 17),
    "all in the first": (80, 0, 0, 0, 0),
    "all in the last": (0, 0, 0, 0, 80),
    "all in one": (0, 0, 80, 0, 0),
    "whole": (16, 16, 16, 16, 16),
    "none": (0, 0, 0, 0, 0),
    "less than M": (1, 17, 0, 15, 3),
    "more than M": (17, 30, 1, 100, 16),
    "one with more than M": (2**31 - 1, 2**31 - 1, 5, 2**31 - 1, 1),
    "negative": (-3, 20, -(2**31), 40, -1),
}
every_boundary = pytest.mark.parametrize("sizes", BOUNDARIES.values(), ids=BOUNDARIES)
LEFT = {"nvfp4": NVFP4, "row": ROW_SCALED, "dense": None}
every_left = pytest.mark.parametrize("left", LEFT)


def ends_of(sizes, rows: int) -> list[tuple[int, int]]:
    """The rows of each group, in plain Python."""
    found, end = [], 0
    for size in sizes:
        begin, end = end, min(rows, end + max(0, int(size)))
        found.append((begin, end))
    return found


def taken(a, begin: int, end: int):
    if not isinstance(a, NVFP4Tensor):
        return a[begin:end]
    amax = a.amax[begin:end] if a.amax.ndim else a.amax
    return NVFP4Tensor(a.data[begin:end], a.scale[begin:end], amax, a.format)


def by_group(a, b, sizes, **options) -> np.ndarray:
    """matmul_nt of the rows of each group, and zeros. Of few rows all are multiplied, by one program."""
    rows = (a.data if isinstance(a, NVFP4Tensor) else a).shape[0]
    y = np.zeros((rows, b.shape[-2]), options.get("out_dtype", jnp.bfloat16))
    for g, (begin, end) in enumerate(ends_of(sizes, rows)):
        if end > begin:
            first, last = (0, rows) if rows <= 128 else (begin, end)
            of_group = np.asarray(matmul_nt(taken(a, first, last), b[g], **options))
            y[begin:end] = of_group[begin - first : end - first]
    return y


def operands(left: str, rows: int = M, groups: int = G, seed: int = 0):
    x, w = normal((rows, K), seed), normal((groups, N, K), seed + 1)
    spec = LEFT[left]
    b = jax.vmap(lambda w: quantize(w, spec or ROW_SCALED))(w)
    return x if spec is None else quantize(x, spec), b


def int32(sizes) -> jax.Array:
    return jnp.asarray(np.asarray(sizes, np.int32))


# ---------------------------------------------------------------- the bits of matmul_nt
@every_boundary
@every_left
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_each_group_has_the_bits_of_matmul_nt(cpu, implementation, left, sizes):
    a, b = operands(left)
    got = grouped_matmul_nt(a, b, int32(sizes), implementation=implementation)
    assert_bitwise(got, by_group(a, b, sizes))


@every_boundary
@every_left
def test_the_pinned_order_has_the_bits_of_the_cpu(native, left, sizes):
    """Whatever the group's place, and whatever other groups there are."""
    a, b = operands(left)
    if native.platform == "cuda" and not isinstance(a, NVFP4Tensor):
        pytest.skip("no GPU has a kernel of a 16-bit left operand")
    want = by_group(*jax.device_put((a, b), jax.devices("cpu")[0]), sizes, accumulation="pinned")
    assert_bitwise(grouped_matmul_nt(a, b, int32(sizes), accumulation="pinned"), want)


def test_a_device_without_a_kernel_of_the_pinned_order(cpu):
    """It is an error where the program is lowered, as for a kernel by name."""
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    product = jax.jit(partial(grouped_matmul_nt, accumulation="pinned"))
    x = jnp.ones((4, K), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match='accumulation="pinned" with a 16-bit a, which the CPU, GPUs of Hop'):
        jax.export.export(product, platforms=["cuda"], disabled_checks=export_checks())(
            x, operands("row")[1], int32([1] * G)
        )


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_a_sum_of_negative_zeros_is_positive(cpu, implementation):
    """Of one block: XLA replaces 0 + x by x in a loop of one turn."""
    a, b = random_tensor(0, (3, 16), scales=[0]), random_tensor(1, (1, 5, 16))
    a, b = (replace(t, data=jnp.full_like(t.data, codes)) for t, codes in ((a, 0xAA), (b, 0x22)))  # of -1 and 1
    got = grouped_matmul_nt(a, b, int32([3]), out_dtype=jnp.float32, implementation=implementation)
    assert_bitwise(got, np.zeros((3, 5), np.float32))


def test_sizes_may_be_of_the_host_or_a_list_of_traced_numbers(cpu):
    a, b = exact("nvfp4", 40, 3)
    want = grouped_matmul_nt(a, b, int32((20, 13, 7)))
    multiply = jax.jit(lambda first, second: grouped_matmul_nt(a, b, [first, second, 7]))
    for got in (grouped_matmul_nt(a, b, [20, 13, 7]), multiply(20, 13)):
        assert_bitwise(got, want)


def test_boundaries_that_are_drawn(cpu):
    rng = np.random.default_rng(0)
    a, b = operands("nvfp4")
    product = jax.jit(grouped_matmul_nt)
    for _ in range(40):
        sizes = rng.choice([0, 0, 1, 15, 16, 17, 31, 33, 64, 80, -1], G)
        assert_bitwise(product(a, b, int32(sizes)), by_group(a, b, sizes))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_of_the_result(cpu, dtype):
    a, b = operands("row")
    sizes = BOUNDARIES["less than M"]
    assert_bitwise(grouped_matmul_nt(a, b, int32(sizes), out_dtype=dtype), by_group(a, b, sizes, out_dtype=dtype))


def exact(left: str, rows: int, groups: int, cols: int = N, depth: int = K):
    """Operands whose sums are exact in any order, and amaxes that differ by powers of two."""
    a, b = exact_tensor((rows, depth), 1), exact_tensor((groups, cols, depth), 2)
    b = NVFP4Tensor(b.data, b.scale, b.amax * 2.0 ** (jnp.arange(groups) % 5), b.format)
    if left == "row":
        a = NVFP4Tensor(a.data, a.scale, a.amax * 2.0 ** (jnp.arange(rows) % 3), jnvfp4.Format("row"))
    if left in ("bfloat16", "float16"):
        a = jnp.asarray(np.random.default_rng(0).integers(-8, 9, (rows, depth)), left)
    return (jnp.asarray(decoded(a), jnp.bfloat16) if left == "dense" else a), b


@every_boundary
@pytest.mark.parametrize("left", ["nvfp4", "dense"])
@pytest.mark.parametrize("implementation", ["native", "reference", "decode_then_ragged_dot"])
def test_sums_that_are_exact_have_the_bits_of_the_cpu_on_a_gpu(implementation, left, sizes):
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    a, b = jax.device_put(exact(left, M, G), jax.devices("cpu")[0])
    want = by_group(a, b, sizes, out_dtype=jnp.float32)
    with jax.default_device(gpus()[0]):
        a, b = jax.device_put((a, b), gpus()[0])
        got = grouped_matmul_nt(a, b, int32(sizes), out_dtype=jnp.float32, implementation=implementation)
    assert_bitwise(got, want)


def test_rows_that_no_group_holds_are_zero_whatever_they_have(backend):
    a, b = exact("dense", M, G)
    a = a.at[36:].set(jnp.nan)
    got = np.asarray(grouped_matmul_nt(a, b, int32((1, 17, 0, 15, 3)), implementation=backend.implementation))
    assert np.isfinite(got[:36].astype(np.float32)).all()
    assert (got[36:].view(np.uint16) == 0).all()


def test_one_amax_is_that_of_all_groups(native):
    x, w = normal((M, K)), normal((G, N, K), 1)
    a, b = quantize(x), quantize(w)
    each = NVFP4Tensor(b.data, b.scale, jnp.broadcast_to(b.amax, (G,)), b.format)
    sizes = int32((16, 1, 15, 17, 0))
    assert b.amax.ndim == 0
    assert_bitwise(grouped_matmul_nt(a, b, sizes), grouped_matmul_nt(a, each, sizes))


@pytest.mark.parametrize(("rows", "groups"), [(0, 3), (16, 0), (0, 0)])
def test_nothing_to_multiply(native, rows, groups):
    b = quantize(jnp.ones((groups, N, K)), amax=jnp.ones((groups,)))
    y = grouped_matmul_nt(jnp.ones((rows, K), jnp.bfloat16), b, int32([4] * groups))
    assert_bitwise(y, np.zeros((rows, N), jnp.bfloat16))


# ---------------------------------------------------------------- XLA's products on other GPUs
def decode_on_the_host(parts, dtype):
    result = jax.ShapeDtypeStruct((*parts[0].shape[:-1], 2 * parts[0].shape[-1]), dtype)
    decode = lambda *parts: decoded(NVFP4Tensor(*parts, np.float32(1))).astype(dtype)  # noqa: E731
    return jax.pure_callback(decode, result, *parts[:2])


@partial(jax.jit, static_argnums=0)
def decode_then_ragged_dot(params, *operands):
    return grouped_matmul._decode_then_ragged_dot(params, params.split(operands))


@every_boundary
@every_left
def test_decode_then_ragged_dot(cpu, monkeypatch, left, sizes):
    """The operations that XLA gets on a GPU without kernels; nvfp4_decode is a kernel of GPUs."""
    monkeypatch.setattr(grouped_matmul, "decode", decode_on_the_host)
    a, b = exact(left, M, G)
    flat = [*((a,) if left == "dense" else (a.data, a.scale, a.amax)), b.data, b.scale, b.amax, int32(sizes)]
    params = ProductParams(None if left == "dense" else a.format, b.format, jnp.dtype(jnp.float32))
    assert_bitwise(decode_then_ragged_dot(params, *flat), by_group(a, b, sizes, out_dtype=jnp.float32))


# ---------------------------------------------------------------- the plan
def plan(a="nvfp4", capability=90, shape=(128, 4, 128, 256), kernel=None, pinned=False):
    return plans.plan_grouped(shape=shape, a=a, out="bfloat16", pinned=pinned, capability=capability, kernel=kernel)


def test_the_kernel_of_each_device():
    assert plan(capability=0).kernel == "cpu_nvfp4_blocks"
    assert plan("float16", capability=0).kernel == "cpu_dense_elements"
    for capability in (80, 89, 100, 120):
        for left in ("nvfp4", "bfloat16"):
            assert plan(left, capability)[:3] == ("decode_then_ragged_dot", 0, "")
    assert plan(capability=90, kernel="decode_then_ragged_dot").reason == ""


def test_the_kernels_of_the_pinned_order():
    """The CPU's is the only one of a 16-bit left operand; without any, the text says what there is."""
    for left in ("nvfp4", "bfloat16"):
        assert plan(left, 0, pinned=True) == plan(left, 0)
    assert plan(pinned=True)[:3:2] == ("sm90_nvfp4_pinned_grouped", "")
    few = (16, 4, 128, 256)  # rows that the fast order multiplies without a list of tiles
    assert plan(shape=few, pinned=True).scratch_bytes > plan(shape=few).scratch_bytes == 0
    empty, full = (plan(shape=(3, groups, 128, 256), pinned=True) for groups in (300, 3))
    assert empty == full  # a group without rows has no tile
    for left, capability in (("bfloat16", 90), ("nvfp4", 80), ("nvfp4", 120), ("float16", None)):
        assert plan(left, capability, pinned=True)[:3] == ("", 0, "no kernel multiplies these operands there")
    free = ("nvfp4", "sm90_nvfp4_grouped"), ("float16", "sm90_dense_grouped"), ("nvfp4", "decode_then_ragged_dot")
    for left, kernel in free:
        assert "its order of summation is not pinned" in plan(left, kernel=kernel, pinned=True).reason


WHY_NOT = {
    "a GPU's on the CPU": (("nvfp4", 0), "decode_then_ragged_dot", "not on the CPU"),
    "the CPU's on a GPU": (("nvfp4", 90), "cpu_nvfp4_blocks", "runs on the CPU, not on compute capability 9.0"),
    "Hopper's on another": (("nvfp4", 100), "sm90_nvfp4_grouped", "runs on GPUs of compute capability 9.0"),
    "of Hopper, an array": (("bfloat16", 90), "sm90_nvfp4_grouped", "must be an NVFP4 tensor"),
    "of Hopper, pinned, an array": (("bfloat16", 90), "sm90_nvfp4_pinned_grouped", "must be an NVFP4 tensor"),
    "of Hopper, a tensor": (("nvfp4", 90), "sm90_dense_grouped", "must be a bfloat16 or float16 array"),
    "no K": (("nvfp4", 90, (128, 4, 128, 0)), "sm90_nvfp4_grouped", "K must be at least 16"),
    "an array": (("bfloat16", 0), "cpu_nvfp4_blocks", "must be an NVFP4 tensor"),
    "a tensor": (("nvfp4", 0), "cpu_dense_elements", "must be a bfloat16 or float16 array"),
}


@pytest.mark.parametrize(("where", "kernel", "reason"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_a_kernel_cannot(where, kernel, reason):
    assert reason in plan(*where, kernel=kernel).reason


HUGE = 2**30


@pytest.mark.parametrize(
    "shape",
    [(HUGE + 1, 4, 128, 256), (128, HUGE + 1, 1, 256), (128, 2**16, 2**14 + 1, 256), (128, 4, 128, HUGE + 16)],
    ids=["rows", "groups", "rows of all experts", "K"],
)
def test_sizes_that_kernels_of_hopper_do_not_count(shape):
    for left, kernel in (("nvfp4", "nvfp4_grouped"), ("float16", "dense_grouped"), ("nvfp4", "nvfp4_pinned_grouped")):
        assert "it takes at most 2^30 rows of a, 2^30 rows of b" in plan(left, 90, shape, f"sm90_{kernel}").reason
    assert plan(shape=shape).kernel == "decode_then_ragged_dot"
    assert plan(shape=(HUGE, 2**16, 2**14, HUGE)).kernel == "sm90_nvfp4_grouped"


def test_a_kernel_that_cannot_run_here_is_refused(cpu):
    a, b = operands("nvfp4")
    with pytest.raises(NotImplementedError, match="grouped_matmul_nt: implementation='cpu_dense_elements' cannot run"):
        grouped_matmul_nt(a, b, int32([1] * G), implementation="cpu_dense_elements")
    assert supports("grouped_matmul_nt", a, b, int32([1] * G)).kernel == "cpu_nvfp4_blocks"


@pytest.mark.parametrize("left", ["nvfp4", "dense"])
def test_a_program_for_any_gpu(left):
    """XLA's operations around its ragged_dot, and no call that only some GPUs can run."""
    if not load.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    a, b = operands(left)
    exported = jax.export.export(jax.jit(grouped_matmul_nt), platforms=["cuda"], disabled_checks=export_checks())
    text = exported(a, b, int32([1] * G)).mlir_module()
    assert text.count("@nvfp4_decode(") == (2 if left == "nvfp4" else 1)
    assert "chlo.ragged_dot" in text
    assert "nvfp4_grouped_matmul" not in text.replace("nvfp4_grouped_matmul.", "")


# ---------------------------------------------------------------- transformations
def test_there_is_no_derivative():
    a, b = operands("dense")
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda a: grouped_matmul_nt(a, b, int32([1] * G)).sum().astype(jnp.float32))(a)


def test_sizes_stay_on_the_device(cpu):
    """One program for all sizes, whose values no host reads."""
    a, b = operands("nvfp4")
    traced = 0

    @jax.jit
    def product(a, b, sizes):
        nonlocal traced
        traced += 1
        return grouped_matmul_nt(a, b, sizes * 2)

    sizes = [int32(s) for s in itertools.islice(BOUNDARIES.values(), 3)]
    with jax.transfer_guard("disallow"):
        results = [product(a, b, s) for s in sizes]
    assert traced == 1
    for s, y in zip(sizes, results, strict=True):
        assert_bitwise(y, by_group(a, b, np.asarray(s) * 2))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (None, 0, None), (None, None, 0), (1, None, None)], ids=str)
@pytest.mark.parametrize("left", ["row", "dense"])
def test_vmap_is_a_loop(cpu, left, axes):
    examples = [operands(left, seed=i) for i in range(3)]
    sizes = [int32(s) for s in itertools.islice(BOUNDARIES.values(), 3)]
    stacked = [jax.tree.map(lambda *v: jnp.stack(v), *parts) for parts in zip(*examples, strict=True)]
    of_leaves = [jax.tree.map(lambda _, axis=axis: axis, v) for v, axis in zip([*stacked, sizes[0]], axes, strict=True)]
    arguments = [
        jax.tree.map(lambda v, axis=axis: v[0] if axis is None else jnp.moveaxis(v, 0, axis), v)
        for v, axis in zip([*stacked, jnp.stack(sizes)], axes, strict=True)
    ]
    assert_vmap_is_a_loop(grouped_matmul_nt, arguments, of_leaves)


# ---------------------------------------------------------------- sharding
SHARDINGS = {
    "tokens": (P("x", None), P()),
    "tokens over both": (P(("x", "y"), None), P()),
    "experts": (P(), P("y", None, None)),
    "experts and tokens": (P("x", None), P("y", None, None)),
    "experts and tokens over one axis": (P("x", None), P("x", None, None)),
    "columns": (P("y", None), P(None, "x", None)),
    "experts, tokens and columns": (P("y", None), P("y", "x", None)),
    "K": (P(None, "y"), P(None, None, "y")),
    "K and experts": (P(None, "y"), P("x", None, "y")),
    "K of one": (P("x", "y"), P()),
}
CROSSED = ("tokens over both", "experts and tokens", "experts, tokens and columns", "K", "K and experts")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", ["nvfp4", "dense"])
@pytest.mark.parametrize(
    "layout", [name if name in CROSSED else pytest.param(name, marks=pytest.mark.long) for name in SHARDINGS]
)
def test_sharded_equals_unsharded(devices, layout, left, kind):
    rows, groups, sizes = 64, 8, int32((9, 0, 20, 5, 3, 0, 11, 4))
    a, b = exact(left, rows, groups)
    want = grouped_matmul_nt(a, b, sizes)
    mesh = make_mesh(devices, "xy", kind)

    def put(v, spec):
        of = v.shardings(mesh, spec) if isinstance(v, NVFP4Tensor) else NamedSharding(mesh, spec)
        return jax.device_put(v, of)

    placed = put(a, SHARDINGS[layout][0]), put(b, SHARDINGS[layout][1]), put(sizes, P())
    outs = (None, P("x", None), P("y", "x")) if kind == "auto" else (None,)
    for out in outs:
        options = {} if out is None else {"out_shardings": NamedSharding(mesh, out)}
        with jax.set_mesh(mesh):
            assert_bitwise(jax.jit(lambda *v: grouped_matmul_nt(*v), **options)(*placed), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [(P("x"), P()), (P("x"), P("y")), (P("x"), P(None, "y"))], ids=str)
def test_vmap_over_split_examples(devices, layout, kind):
    """No loop goes through a split axis, which an Explicit mesh would refuse."""
    examples, b = [exact("dense", 64, 8)[0] * 2.0**i for i in range(8)], exact("dense", 64, 8)[1]
    a = jnp.stack(examples).astype(jnp.bfloat16)
    sizes = jnp.stack([jnp.roll(int32((9, 0, 20, 5, 3, 0, 11, 4)), i) for i in range(8)])
    product = jax.vmap(grouped_matmul_nt, (0, None, 0))
    want = product(a, b, sizes)
    mesh = make_mesh(devices, "xy", kind)
    of_a = NamedSharding(mesh, layout[0])
    placed = jax.device_put(a, of_a), jax.device_put(b, b.shardings(mesh, layout[1])), jax.device_put(sizes, of_a)
    with jax.set_mesh(mesh):
        got = jax.jit(product)(*placed)
    assert_bitwise(got, want)
    if kind == "explicit":
        assert got.sharding.spec[0] == "x"


def test_a_sum_over_experts_keeps_negative_zeros(devices):
    """Results that are too small for float16: -0 on the device that has the expert, 0 on the others."""
    a, b = exact("dense", 64, 8)
    b = NVFP4Tensor(b.data, b.scale, b.amax * 2.0**-60, b.format)
    sizes = int32([8] * 8)
    want = np.asarray(grouped_matmul_nt(a, b, sizes, out_dtype=jnp.float16))
    assert (want == 0).all()
    assert np.signbit(want).any()
    mesh = make_mesh(devices, "x")
    placed = jax.device_put(b, b.shardings(mesh, P("x", None, None)))
    for of_rows, collective in ((P(), "all-reduce"), (P("x"), "reduce-scatter"), (P(None, "x"), "reduce-scatter")):
        product = jax.jit(partial(grouped_matmul_nt, out_dtype="float16"), out_shardings=NamedSharding(mesh, of_rows))
        got, found = run(product, a, placed, sizes)
        assert collective in {op for op, _ in found}
        assert_bitwise(got, want)


def test_an_odd_number_of_columns_is_summed_over_experts(devices):
    a, b = exact("nvfp4", 64, 8)
    b, sizes = NVFP4Tensor(b.data[:, :39], b.scale[:, :39], b.amax, b.format), int32([8] * 8)
    placed = jax.device_put(b, b.shardings(make_mesh(devices, "x"), P("x", None, None)))
    assert_bitwise(jax.jit(grouped_matmul_nt)(a, placed, sizes), grouped_matmul_nt(a, b, sizes))


def test_no_weight_is_gathered_where_experts_are_split(devices):
    """Each device multiplies by its own experts; only rows of the result are summed."""
    a, b = exact("nvfp4", 64, 8)
    mesh = make_mesh(devices, "x")
    placed = jax.device_put(b, b.shardings(mesh, P("x", None, None)))
    compiled = jax.jit(grouped_matmul_nt).lower(a, placed, int32([8] * 8)).compile().as_text()
    assert "all-gather" not in compiled
    assert re.search(r"u32\[64,20\]\S* all-reduce", compiled), "pairs of bfloat16"


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_inside_shard_map(cpu, implementation):
    """Every device has its experts and its own groups."""
    mesh = jax.make_mesh((8,), ("e",), axis_types=(KINDS["auto"],), devices=jax.devices("cpu")[:8])
    a, b = operands("nvfp4", groups=8)
    sizes = np.random.default_rng(0).integers(0, 30, (8, 1)).astype(np.int32)
    product = lambda a, b, s: grouped_matmul_nt(a, b, s[0], implementation=implementation)[None]  # noqa: E731
    f = jax.shard_map(product, mesh=mesh, in_specs=(P(), P("e"), P("e")), out_specs=P("e"))
    got = jax.jit(f)(a, b, jnp.asarray(sizes))
    for i in range(8):
        assert_bitwise(got[i], by_group(a, b[i : i + 1], sizes[i]))


# ---------------------------------------------------------------- the rows of groups
@every_boundary
def test_rows_of_groups(sizes):
    for rows in (M, 2**31 - 1):  # of which two sizes may have a sum beyond int32
        of = rows_of(int32(sizes), rows)
        assert list(zip(of.starts.tolist(), of.ends.tolist(), strict=True)) == ends_of(sizes, rows)


@pytest.mark.parametrize("rows", [1, 16, 80, 2000])
@every_boundary
def test_chunks_cover_each_row_of_a_group_once(rows, sizes):
    of = rows_of(int32(sizes), rows)
    chunks = chunks_of(of, rows)
    groups = np.full(rows, -1)
    for group, begin, end in zip(*(np.asarray(v) for v in chunks.turns), strict=True):
        assert 0 <= end - begin <= chunks.size <= rows
        assert (groups[begin:end] == -1).all()
        groups[begin:end] = group
    want = np.full(rows, -1)
    for group, (begin, end) in enumerate(ends_of(sizes, rows)):
        want[begin:end] = group
    assert (groups == want).all()


def size_of_chunks(rows: int, groups: int) -> int:
    of = [jax.ShapeDtypeStruct((groups,), jnp.int32)] * 2
    found = []
    jax.eval_shape(lambda *of: found.append(chunks_of(Rows(*of), rows).size), *of)
    return found[0]


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 10000, 32768, 2**18])
@pytest.mark.parametrize("groups", [1, 7, 8, 64])
def test_a_loop_over_chunks_computes_half_as_many_rows_again(rows, groups):
    chunks = jax.eval_shape(lambda sizes: chunks_of(rows_of(sizes, rows), rows).group, int32([0] * groups))
    assert rows <= chunks.shape[0] * size_of_chunks(rows, groups) <= 1.5 * rows
    assert size_of_chunks(64, 256) == 16  # small groups cost a chunk each


# ---------------------------------------------------------------- experts of a checkpoint
def test_experts_of_a_checkpoint_load_straight_into_it(native):
    checkpoint = open_checkpoint(GOLDEN / "moe" / "te_modelopt")
    expert = r"model.layers.0.mlp.experts.{expert:\d+}."
    rule = NameRule(expert + "{which:gate|up|down}_proj.weight", "experts/{which}", stack=("expert",))
    experts = from_hf({name: v for name, v in checkpoint.items() if ".experts." in name}, [rule])["experts"]
    assert {name: v.shape for name, v in experts.items()} == {
        **dict.fromkeys(("gate", "up"), (4, 64, 128)),
        "down": (4, 128, 64),
    }
    assert {v.amax.shape for v in experts.values()} == {(4,)}
    sizes = (3, 0, 17, 10)
    x = normal((32, 128))
    got = grouped_matmul_nt(x, experts["gate"], int32(sizes), out_dtype=jnp.float32)
    for e, (begin, end) in enumerate(ends_of(sizes, 32)):
        w = jnvfp4.dequantize(checkpoint[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"])
        want = np.asarray(x[begin:end], np.float32) @ np.asarray(w).T
        np.testing.assert_allclose(got[begin:end], want, rtol=1e-4, atol=1e-4)


def test_one_call_a_product():
    a, b = operands("nvfp4")
    names = primitives(jax.make_jaxpr(grouped_matmul_nt)(a, b, int32([1] * G)).jaxpr)
    assert names == ["nvfp4_grouped_matmul"]
