"""fake_quant is dequantize(quantize(x)) bit for bit, with the gradient of the identity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, key_for
from jax.sharding import PartitionSpec as P
from meshes import given_amax, make_mesh
from operands import normal

from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, dequantize, fake_quant, quantize
from jnvfp4.spec import name_of

KEY = jax.random.key(3)
KINDS = [NVFP4, NVFP4_2D, NVFP4_RHT_SR, ROW_SCALED, WINDOW64]


def given(spec):
    return given_amax((32, 64), spec.format.amax_scope, False)


@pytest.mark.parametrize("spec", KINDS, ids=name_of)
def test_fake_quant_is_dequantize_of_quantize(native, spec):
    """With the amax of x, and with one that is passed."""
    x, key = normal((32, 64)), key_for(spec)
    for amax in (None, given(spec)):
        want = dequantize(quantize(x, spec, amax=amax, key=key), x.dtype)
        assert_bitwise(fake_quant(x, spec, amax=amax, key=key), want)


# ---------------------------------------------------------------- derivatives
@pytest.mark.parametrize("spec", KINDS, ids=name_of)
def test_gradient_is_the_identity(spec):
    """In both modes; an amax has none."""
    x, dy, amax = normal((32, 64), 1), normal((32, 64), 2), given(spec)
    f = partial(fake_quant, spec=spec, key=key_for(spec))
    for g in (f, jax.jit(f), partial(f, amax=amax)):
        assert_bitwise(jax.vjp(g, x)[1](dy)[0], dy)
    y, tangent = jax.jvp(f, (x,), (dy,))
    assert_bitwise(y, f(x))
    assert_bitwise(tangent, dy)
    assert_bitwise(jax.grad(lambda a: jnp.sum(f(x, amax=a)).astype(jnp.float32))(amax), jnp.zeros_like(amax))


def test_second_derivatives_are_those_of_the_identity():
    """Second-order and mixed derivatives pass too: the derivative is the identity everywhere."""
    x = normal((16, 16), dtype="fp32")
    hessian = jax.jacfwd(jax.grad(lambda x: jnp.sum(fake_quant(x) ** 2)))(x).reshape(256, 256)
    np.testing.assert_allclose(hessian, 2 * np.eye(256), atol=1e-6)


# ---------------------------------------------------------------- vmap
def test_vmap_of_keys_and_amaxes(native):
    x, keys, amax = normal((3, 32, 48)), jax.random.split(KEY, 3), jnp.asarray([1.0, 2.0, 3.0])
    f = lambda x, key, a: fake_quant(x, NVFP4_RHT_SR, key=key, amax=a)  # noqa: E731
    assert_bitwise(jax.vmap(f)(x, keys, amax), jnp.stack([f(x[i], keys[i], amax[i]) for i in range(3)]))
    grads = jax.vmap(jax.grad(lambda *args: jnp.sum(f(*args).astype(jnp.float32))))(x, keys, amax)
    assert_bitwise(grads, jnp.ones_like(x))


@pytest.mark.parametrize("spec", KINDS[1:], ids=name_of)
def test_vmap_of_the_array_alone(native, spec):
    """Along an inner axis; an amax and a key are those of every example."""
    x, key = normal((32, 3, 64)), key_for(spec)
    amax = given(spec)
    for f in (partial(fake_quant, spec=spec, key=key), partial(fake_quant, spec=spec, key=key, amax=amax)):
        assert_bitwise(jax.vmap(f, in_axes=1, out_axes=1)(x), jnp.stack([f(x[:, i]) for i in range(3)], axis=1))


# ---------------------------------------------------------------- several devices
@pytest.mark.parametrize("varies", ["key", "amax"])
def test_gradient_in_shard_map_of_an_array_that_all_devices_share(devices, varies):
    """The identity's gradient is one on each device, and shard_map adds them up."""
    mesh = make_mesh(devices, "x")

    def local(w):
        i = jax.lax.axis_index("x")
        options = {"key": jax.random.fold_in(KEY, i)} if varies == "key" else {"amax": i.astype(jnp.float32) + 1}
        return fake_quant(w, NVFP4_RHT_SR if varies == "key" else NVFP4, **options).sum()[None]

    loss = jax.shard_map(jax.grad(lambda w: local(w)[0]), mesh=mesh, in_specs=P(), out_specs=P())
    whole = jax.grad(lambda w: jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("x"))(w).sum())
    for f in (loss, whole):
        np.testing.assert_array_equal(jax.jit(f)(jnp.ones((16, 32))), np.full((16, 32), len(devices)))
