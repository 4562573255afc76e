"""fake_quant is dequantize(quantize(x)) bit for bit, with the gradient of the identity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DISTRIBUTIONS, DTYPES, ODD, RAGGED_ROWS, Case
from helpers import assert_bitwise, assert_same_tensor, find_amax, key_for
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    WINDOW64,
    dequantize,
    fake_quant,
    four_over_six,
    quantize,
)
from jnvfp4.spec import SUPPORTED_SPECS, name_of

KEY = jax.random.key(3)
KINDS = [NVFP4, NVFP4_2D, ROW_SCALED, NVFP4_RHT, NVFP4_SR, NVFP4_SR_UNBIASED, WINDOW64]
TENSOR_SPECS = tuple(s for s in SUPPORTED_SPECS if s.format.amax_scope == "tensor")


def fits(spec, shape) -> bool:
    return shape[-1] % spec.unit == 0 and shape[-2] % spec.block_rows == 0


@partial(jax.jit, static_argnums=(0,))
def fused(specs, x, amaxes):
    return {
        name_of(s): fake_quant(x, s, amax=amaxes.get(s.format.amax_scope), key=key_for(s), implementation="native")
        for s in specs
    }


@partial(jax.jit, static_argnums=(0,))
def composed(specs, x, amaxes):
    return {
        name_of(s): dequantize(
            quantize(x, s, amax=amaxes.get(s.format.amax_scope), key=key_for(s), implementation="native"), x.dtype
        )
        for s in specs
    }


def check(x, amaxes=None, specs=SUPPORTED_SPECS) -> None:
    """By all specs that x fits, in one program each. ``amaxes``: by scope."""
    specs = tuple(s for s in specs if fits(s, x.shape))
    assert specs
    assert_same_tensor(fused(specs, x, amaxes or {}), composed(specs, x, amaxes or {}))


# ---------------------------------------------------------------- values
SHAPES = [
    Case("one_block", (1, 16)),
    Case("windows", (3, 192), "fp32"),
    *ODD,
    RAGGED_ROWS[-1],
    Case("pieces", (2, 272, 192)),  # several of what a CPU thread takes at a time, of each matrix
    Case("long_rows", (16, 16464), "fp16"),  # more than a CUDA thread block holds of a row, blocks an odd number
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: c.name)
def test_every_spec(native, case):
    check(jnp.asarray(case.make()))


def given(shape) -> dict:
    """An amax of its own for whatever has one, of either sign, below and above the largest magnitudes."""

    def amaxes(*parts):
        values = jnp.linspace(1.0, 5.0, int(np.prod(parts)), dtype=jnp.float32).reshape(parts)
        return values * jnp.where(jnp.arange(values.size).reshape(parts) % 3 == 1, -1.0, 1.0)

    *lead, rows, cols = shape
    scopes = {"tensor": amaxes(*lead), "row": amaxes(*lead, rows)}
    return scopes | ({"window64": amaxes(*lead, rows, cols // 64)} if cols % 64 == 0 else {})


@pytest.mark.parametrize("case", [SHAPES[0], SHAPES[1], ODD[-1], SHAPES[-2]], ids=lambda c: c.name)
def test_every_spec_with_given_amax(native, case):
    x = jnp.asarray(case.make())
    check(x, given(x.shape))


def test_one_amax_for_several_matrices(native):
    x = normal((3, 32, 48))
    for amax in (2.0, -2.0):
        check(x, {"tensor": jnp.float32(amax)}, TENSOR_SPECS)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_odd_values(native, dtype):
    """Every distribution with an amax of its own."""
    x = np.stack([Case("x", (32, 64), dtype, distribution).make() for distribution in DISTRIBUTIONS])
    check(jnp.asarray(x), {"tensor": jnp.asarray(np.stack([find_amax(part) for part in x]))})


def with_special_values(dtype) -> jax.Array:
    """[6, 32, 128]: of each matrix one element, in a tile of its own, is no number or infinite, or all are zeros."""
    x = np.asarray(Case("x", (6, 32, 128), dtype).make())
    for i, value in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        x[i, 5, 70] = value
    x[4] = np.where(np.arange(128) % 2, np.zeros((), x.dtype), -np.zeros((), x.dtype))
    x[5, 3, 16:32] = -0.0
    return jnp.asarray(x)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_special_values(native, dtype):
    x = with_special_values(dtype)
    check(x, {"tensor": jnp.float32(4)})
    check(x, {"tensor": jnp.asarray([4, 4, np.inf, np.inf, 0, 4], jnp.float32)}, TENSOR_SPECS)
    check(x)  # one NaN amax for all with scope tensor


def test_special_values_leave_other_blocks_alone(native):
    """The same blocks become NaN, and an infinite element the largest value, on every platform."""
    x = with_special_values("fp32")
    y = np.asarray(fake_quant(x, amax=4.0, implementation="native"))
    nan = np.zeros(y.shape, bool)
    nan[:2, 5, 64:80] = True
    np.testing.assert_array_equal(np.isnan(y), nan)
    assert_bitwise(y[:2][nan[:2]], np.full(32, np.nan, np.float32))
    assert y[2, 5, 70] == -y[3, 5, 70] == 4.0
    assert_bitwise(y[4], x[4])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_extreme_amaxes(native, dtype):
    """Decoded values that under- and overflow, 0 times infinity among them."""
    amaxes = jnp.asarray([0.0, 1e-45, 1e-38, 1e29, 1e30, 1e36, 3.4028235e38, np.inf, np.nan], jnp.float32)
    x = jnp.asarray(Case("x", (len(amaxes), 16, 64), dtype, "powers").make())
    each = jnp.broadcast_to(amaxes[:, None, None], (len(amaxes), 16, 1))
    check(x, {"tensor": amaxes, "row": each[..., 0], "window64": each})


def test_a_key_decides_the_random_bits(native):
    x = normal((32, 64))
    a, b, again = (np.asarray(fake_quant(x, NVFP4_SR, key=jax.random.key(i))) for i in (0, 1, 0))
    assert (a != b).any()
    assert_bitwise(a, again)


@pytest.mark.parametrize(
    "spec",
    [
        NVFP4_RHT,
        NVFP4_SR,
        *(pytest.param(s, marks=pytest.mark.long) for s in (NVFP4_2D, ROW_SCALED, WINDOW64, four_over_six())),
    ],
    ids=name_of,
)
def test_every_backend(backend, spec):
    x, key = normal((16, 64)), key_for(spec)
    want = dequantize(quantize(x, spec, key=key), x.dtype)
    assert_bitwise(jax.jit(partial(fake_quant, spec=spec, implementation=backend.implementation))(x, key=key), want)


def test_the_reference_takes_the_magnitude_of_amax():
    x = normal((16, 16))
    assert_bitwise(fake_quant(x, amax=-2.0, implementation="reference"), fake_quant(x, amax=2.0))


@pytest.mark.parametrize("spec", SUPPORTED_SPECS, ids=name_of)
def test_it_is_close(spec):
    """A rotated tensor is rotated back."""
    x = normal((64, 128), dtype="fp32")
    error = np.linalg.norm(fake_quant(x, spec, key=key_for(spec)) - x) / np.linalg.norm(x)
    assert 0.01 < error < (0.2 if spec.rounding == "stochastic" else 0.13)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (16, 0)], ids=str)
def test_no_elements(native, shape):
    for spec in KINDS:
        y = fake_quant(jnp.zeros(shape, jnp.bfloat16), spec, key=key_for(spec))
        assert (y.shape, y.dtype) == (shape, jnp.bfloat16)


# ---------------------------------------------------------------- derivatives
def test_gradient_is_the_identity():
    x, dy = normal((32, 48), 1), normal((32, 48), 2)
    for f in (fake_quant, jax.jit(fake_quant), lambda x: fake_quant(x, amax=1.0)):
        assert_bitwise(jax.vjp(f, x)[1](dy)[0], dy)


@pytest.mark.parametrize("spec", KINDS, ids=name_of)
def test_gradient_is_the_identity_for_every_kind_of_spec(spec):
    x, dy = normal((32, 64), 1), normal((32, 64), 2)
    f = jax.jit(lambda x, key: jax.vjp(partial(fake_quant, spec=spec, key=key), x)[1](dy)[0])
    assert_bitwise(f(x, key_for(spec)), dy)


def test_forward_mode():
    x, dx = normal((32, 48), 1), normal((32, 48), 2)
    y, dy = jax.jvp(fake_quant, (x,), (dx,))
    assert_bitwise(y, fake_quant(x))
    assert_bitwise(dy, dx)


def test_amax_has_no_gradient():
    x = normal((32, 48), dtype="fp32")
    grad = jax.grad(lambda a: jnp.sum(fake_quant(x, amax=a)))(jnp.float32(2))
    assert_bitwise(grad, jnp.zeros(()))


def test_it_trains_through():
    """Second-order and mixed derivatives pass too: the derivative is the identity everywhere."""
    x = normal((16, 16), dtype="fp32")
    hessian = jax.jacfwd(jax.grad(lambda x: jnp.sum(fake_quant(x) ** 2)))(x).reshape(256, 256)
    np.testing.assert_allclose(hessian, 2 * np.eye(256), atol=1e-6)


# ---------------------------------------------------------------- vmap
def test_vmap_of_keys(native):
    x, keys = normal((3, 32, 48)), jax.random.split(KEY, 3)
    got = jax.vmap(lambda x, key: fake_quant(x, NVFP4_SR, key=key))(x, keys)
    assert_bitwise(got, jnp.stack([fake_quant(x[i], NVFP4_SR, key=keys[i]) for i in range(3)]))


def test_vmap_of_amaxes():
    x, amax = normal((3, 32, 48)), jnp.asarray([1.0, 2.0, 3.0])
    got = jax.vmap(lambda x, a: fake_quant(x, amax=a))(x, amax)
    assert_same_tensor(got, jnp.stack([fake_quant(x[i], amax=amax[i]) for i in range(3)]))
    grads = jax.vmap(jax.grad(lambda x: jnp.sum(fake_quant(x).astype(jnp.float32))))(x)
    assert_bitwise(grads, jnp.ones_like(x))


@pytest.mark.parametrize("spec", [NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64], ids=name_of)
def test_vmap_of_the_array_alone(native, spec):
    """Along an inner axis; an amax and a key are those of every example."""
    x, key = normal((32, 3, 64)), key_for(spec)
    amax = given((32, 64))[spec.format.amax_scope]
    for f in (partial(fake_quant, spec=spec, key=key), partial(fake_quant, spec=spec, key=key, amax=amax)):
        assert_bitwise(jax.vmap(f, in_axes=1, out_axes=1)(x), jnp.stack([f(x[:, i]) for i in range(3)], axis=1))


# ---------------------------------------------------------------- several devices
def test_shard_map(devices):
    """Each device finds the amax of its part, and counts random bits from there."""
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    specs = (NVFP4_SR, ROW_SCALED, WINDOW64)
    x = normal((32 * len(devices), 64))

    def local(x):
        return [fake_quant(x, s, key=key_for(s)) for s in specs]

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    got = f(jax.device_put(x, NamedSharding(mesh, P("x"))))
    parts = [local(part) for part in jnp.split(jax.device_put(x, devices[0]), len(devices))]
    for i in range(len(specs)):
        assert_bitwise(got[i], jnp.concatenate([part[i] for part in parts]))


@pytest.mark.parametrize("varies", ["key", "amax"])
def test_gradient_in_shard_map_of_an_array_that_all_devices_share(devices, varies):
    """The identity's gradient is one on each device, and shard_map adds them up."""
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)

    def local(w):
        i = jax.lax.axis_index("x")
        options = {"key": jax.random.fold_in(KEY, i)} if varies == "key" else {"amax": i.astype(jnp.float32) + 1}
        return fake_quant(w, NVFP4_SR if varies == "key" else NVFP4, **options).sum()[None]

    loss = jax.shard_map(jax.grad(lambda w: local(w)[0]), mesh=mesh, in_specs=P(), out_specs=P())
    whole = jax.grad(lambda w: jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("x"))(w).sum())
    for f in (loss, whole):
        np.testing.assert_array_equal(jax.jit(f)(jnp.ones((16, 32))), np.full((16, 32), len(devices)))
