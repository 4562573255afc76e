"""jax.export and ahead-of-time compilation. More than one device: through a fully manual shard_map."""

import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import pytest
from conftest import skip_or_fail
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    dequantize,
    export_checks,
    fake_quant,
    grouped_linear,
    grouped_matmul_nt,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
    transpose,
)
from jnvfp4._native import load
from jnvfp4.spec import four_over_six, name_of

pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

KEY = jax.random.key(3)


def round_trip(f, *args, **kwargs):
    exported = jax.export.export(jax.jit(f), disabled_checks=export_checks(), **kwargs)(*args)
    return jax.export.deserialize(exported.serialize())


def forward(x, w):
    qx, qw = quantize(x), quantize(w, NVFP4_2D)
    return matmul_nt(qx, qw, out_dtype=jnp.float32), dequantize(qx), quantize(w, ROW_SCALED).amax


def gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(linear(x, w).astype(jnp.float32)), (0, 1))(x, w)


def stochastic_gradients(x, w):
    loss = lambda x, w: jnp.sum(linear(x, w, recipes.pretrain(), key=KEY).astype(jnp.float32))  # noqa: E731
    return jax.grad(loss, (0, 1))(x, w)


every_function = pytest.mark.parametrize("f", [forward, gradients, stochastic_gradients])


@every_function
def test_export_and_ahead_of_time_compilation_of_one_device(native, f):
    x, w = normal((32, 64), 1), normal((48, 64), 2)
    want = jax.jit(f)(x, w)
    assert_same_tensor(jax.jit(round_trip(f, x, w, platforms=[native.platform]).call)(x, w), want)
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (x, w))
    assert_same_tensor(jax.jit(lambda *v: f(*v)).lower(*shapes).compile()(x, w), want)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(NVFP4, "m, 64"), (NVFP4_SR, "m, 64"), (WINDOW64, "m, 64"), (NVFP4_SR, "b, 16, 64"), (NVFP4_RHT, "b, 16, 64")],
    ids=lambda v: v if isinstance(v, str) else name_of(v),
)
def test_export_with_a_symbolic_size(native, spec, shape):
    key = KEY if spec is NVFP4_SR else None

    def f(x):
        t = quantize(x, spec, key=key)
        return t, dequantize(t), fake_quant(x, spec, key=key)

    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.bfloat16)
    restored, compiled = round_trip(f, symbolic, platforms=[native.platform]), jax.jit(f)
    for size in (1, 7):
        x = normal((size, *symbolic.shape[1:]))
        assert_same_tensor(jax.jit(restored.call)(x), compiled(x))


@pytest.mark.parametrize("f", [lambda x, w: matmul_nt(quantize(x), quantize(w)), linear], ids=["matmul_nt", "linear"])
@pytest.mark.parametrize("shape", ["m, 64", "b, 16, 64"])
def test_a_product_of_a_symbolic_size_is_refused(native, f, shape):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*x.shape[:-2], 48, 64) if f is not linear else (48, 64), jnp.bfloat16)
    message = r"matmul_nt: the sizes of a product must be known when a program is lowered, got \(.*[bm].*\) .*reference"
    with pytest.raises(NotImplementedError, match=message):
        round_trip(f, x, w, platforms=[native.platform])


@pytest.mark.long
def test_the_reference_exports_a_product_of_a_symbolic_size():
    w = normal((48, 64), 2)
    restored = round_trip(
        partial(linear, implementation="reference"),
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, 64"), jnp.bfloat16),
        jax.ShapeDtypeStruct(w.shape, w.dtype),
    )
    for m in (1, 32):
        x = normal((m, 64), 1)
        assert_bitwise(restored.call(x, w), jax.jit(partial(linear, implementation="reference"))(x, w))


SYMBOLIC_GROUPS = (
    jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, 64"), jnp.bfloat16),
    jax.ShapeDtypeStruct((4, 48, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((4,), jnp.int32),
)


def of_experts(x, w, sizes, implementation=None):
    return grouped_matmul_nt(x, jax.vmap(quantize)(w), sizes, implementation=implementation)


def test_a_grouped_product_of_a_symbolic_size_is_refused(native):
    message = r"^grouped_matmul_nt: the sizes of a product must be known .*, got \(m, 48\) .*reference"
    with pytest.raises(NotImplementedError, match=message):
        round_trip(of_experts, *SYMBOLIC_GROUPS, platforms=[native.platform])


def test_the_reference_exports_a_grouped_product_of_a_symbolic_size():
    f = partial(of_experts, implementation="reference")
    restored = round_trip(f, *SYMBOLIC_GROUPS)
    w, sizes = normal((4, 48, 64), 2), jnp.array([3, 0, 10, 40], jnp.int32)
    for m in (1, 30):
        x = normal((m, 64), 1)
        assert_bitwise(restored.call(x, w, sizes), of_experts(x, w, sizes))


def test_a_loop_over_a_symbolic_number_of_rows_is_refused():
    def f(x, w, sizes):
        return jax.grad(lambda w: grouped_linear(x, w, sizes, implementation="reference").astype(jnp.float32).sum())(w)

    text = r"^grouped_linear: the numbers of rows and groups must be known .* m rows"
    with pytest.raises(NotImplementedError, match=text):
        round_trip(f, *SYMBOLIC_GROUPS)


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_RHT, ROW_SCALED, WINDOW64, four_over_six(e4m3_max=256)], ids=name_of)
def test_a_tensor_is_an_argument_and_a_result(native, spec):
    q = quantize(normal((32, 64)), spec)

    def f(t):
        return dequantize(t), t

    restored = round_trip(f, q, platforms=[native.platform])
    values, same = restored.call(q)
    assert same.format == q.format
    assert_bitwise(values, dequantize(q))
    assert_same_tensor(same, q)


def manual_linear(mesh):
    """Data-parallel forward and weight gradient on local blocks."""

    def local(x, w):
        y, pull = jax.vjp(linear, x, w)
        return y, jax.lax.psum(pull(jnp.ones_like(y))[1].astype(jnp.float32), "x")

    return jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()), check_vma=False)


def test_export_of_a_fully_manual_shard_map(devices):
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    x = jax.device_put(normal((32 * len(devices), 64), 1), NamedSharding(mesh, P("x")))
    w = jax.device_put(normal((48, 64), 2), NamedSharding(mesh, P()))
    f = manual_linear(mesh)
    restored = round_trip(f, x, w, platforms=["cuda" if devices[0].platform == "gpu" else "cpu"])
    assert restored.nr_devices == len(devices)
    for got, want in zip(jax.jit(restored.call)(x, w), jax.jit(f)(x, w), strict=True):
        assert_bitwise(got, want)


def test_ahead_of_time_compilation_of_sharded_arguments(devices):
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    sharding = NamedSharding(mesh, P("x"))
    shape = jax.ShapeDtypeStruct((32 * len(devices), 64), jnp.bfloat16, sharding=sharding)
    x = jax.device_put(normal(shape.shape), sharding)
    compiled = jax.jit(quantize).lower(shape).compile()
    assert_same_tensor(compiled(x), jax.jit(quantize)(x))


TARGETS = {
    "quantize": (quantize, "nvfp4_quantize"),
    "quantize_sr": (partial(quantize, spec=NVFP4_SR, key=KEY), "nvfp4_quantize"),
    "quantize_row": (partial(quantize, spec=ROW_SCALED), "nvfp4_quantize"),
    "quantize_rht": (partial(quantize, spec=NVFP4_RHT), "nvfp4_rht_amax"),
    "quantize_pair": (quantize_pair, "nvfp4_quantize_pair"),
    "quantize_pair_windows": (partial(quantize_pair, row_spec=WINDOW64, col_spec=WINDOW64), "nvfp4_quantize_pair"),
    "dequantize": (lambda x: dequantize(quantize(x)), "nvfp4_dequantize"),
    "transpose": (lambda x: transpose(quantize(x, NVFP4_2D)), "nvfp4_transpose"),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("f", "target"), TARGETS.values(), ids=TARGETS)
def test_lowering_for_a_platform_that_is_not_here(f, target, platform):
    if not load.available(platform):
        skip_or_fail(platform, f"no {platform} kernels in this build")
    exported = jax.export.export(jax.jit(f), platforms=[platform], disabled_checks=export_checks())(
        jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    )
    assert re.search(rf"@{target}\b", exported.mlir_module())


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_RHT_SR], ids=name_of)
def test_export_for_a_platform_without_kernels_is_portable(spec):
    """The reference is ordinary StableHLO: nothing to register, no custom call."""
    shape, key = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), KEY if spec is NVFP4_RHT_SR else None
    exported = jax.export.export(jax.jit(partial(quantize, spec=spec, key=key)), platforms=["tpu"])(shape)
    assert "custom_call" not in exported.mlir_module()
