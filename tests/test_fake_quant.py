"""fake_quant is dequantize(quantize(x)) bit for bit, with the gradient of the identity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, key_for
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
    quantize,
)
from jnvfp4.spec import SUPPORTED_SPECS, name_of

KEY = jax.random.key(3)
KINDS = [NVFP4, NVFP4_2D, ROW_SCALED, NVFP4_RHT, NVFP4_SR, NVFP4_SR_UNBIASED, WINDOW64]


# ---------------------------------------------------------------- values
def given(shape) -> dict:
    """An amax of its own for whatever has one, of either sign, below and above the largest magnitudes."""

    def amaxes(*parts):
        values = jnp.linspace(1.0, 5.0, int(np.prod(parts)), dtype=jnp.float32).reshape(parts)
        return values * jnp.where(jnp.arange(values.size).reshape(parts) % 3 == 1, -1.0, 1.0)

    *lead, rows, cols = shape
    scopes = {"tensor": amaxes(*lead), "row": amaxes(*lead, rows)}
    return scopes | ({"window64": amaxes(*lead, rows, cols // 64)} if cols % 64 == 0 else {})


@pytest.mark.parametrize("spec", KINDS, ids=name_of)
def test_it_is_the_composition(backend, spec):
    """With the amax of x, and with one that is passed."""
    x, key, options = normal((32, 64)), key_for(spec), {"implementation": backend.implementation}
    for amax in (None, given(x.shape)[spec.format.amax_scope]):
        want = dequantize(quantize(x, spec, amax=amax, key=key, **options), x.dtype, **options)
        assert_bitwise(fake_quant(x, spec, amax=amax, key=key, **options), want)


def test_a_key_decides_the_random_bits(native):
    x = normal((32, 64))
    a, b, again = (np.asarray(fake_quant(x, NVFP4_SR, key=jax.random.key(i))) for i in (0, 1, 0))
    assert (a != b).any()
    assert_bitwise(a, again)


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
