"""NVFP4Tensor: shapes, pytree behaviour, and placeholders in its fields."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, rotate
from jax.sharding import PartitionSpec as P
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_RHT,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    dequantize,
    fake_quant,
    quantize,
    quantize_pair,
    silu_mul_quantize,
)
from jnvfp4.spec import name_of


@pytest.fixture
def tensor():
    return quantize(normal((2, 32, 48)), amax=jnp.full((2,), 3.0))


def test_shape_is_that_of_the_elements(tensor):
    assert (tensor.shape, tensor.ndim, tensor.dtype) == ((2, 32, 48), 3, jnp.dtype(jnp.float4_e2m1fn))


@pytest.mark.parametrize(
    ("spec", "amax"),
    [(NVFP4, ()), (ROW_SCALED, (2, 32)), (WINDOW64, (2, 32, 3))],
    ids=["tensor", "row", "window64"],
)
def test_fields(spec, amax):
    t = quantize(normal((2, 32, 192)), spec)
    assert [(v.shape, v.dtype.name) for v in (t.data, t.scale, t.amax)] == [
        ((2, 32, 96), "uint8"),
        ((2, 32, 12), "float8_e4m3fn"),
        (amax, "float32"),
    ]


def test_leaves_are_named(tensor):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tensor)]
    assert paths == [".data", ".scale", ".amax"]


def test_format_is_structure(tensor):
    other = NVFP4Tensor(tensor.data, tensor.scale, tensor.amax, Format(e4m3_max=256))
    assert jax.tree.structure(tensor) != jax.tree.structure(other)
    assert hash(jax.tree.structure(tensor)) == hash(jax.tree.structure(jax.tree.map(jnp.array, tensor)))


def test_a_new_format_retraces():
    traces = []

    @jax.jit
    def f(t):
        traces.append(t.format)
        return dequantize(t)

    t = quantize(normal((16, 32)))
    f(t), f(t), f(NVFP4Tensor(t.data, t.scale, t.amax, Format(e4m3_max=256)))
    assert traces == [Format(), Format(e4m3_max=256)]


@pytest.mark.parametrize("placeholder", [None, P("x"), 0, object()], ids=["none", "spec", "axis", "object"])
def test_fields_take_placeholders(tensor, placeholder):
    filled = jax.tree.map(lambda _: placeholder, tensor)
    assert (filled.data, filled.scale, filled.amax, filled.format) == (*[placeholder] * 3, tensor.format)


def test_shapes_stand_in_for_arrays(tensor):
    shapes = jax.eval_shape(lambda: tensor)
    assert shapes.shape == tensor.shape
    assert isinstance(shapes.scale, jax.ShapeDtypeStruct)


def test_copies_and_pickles(tensor):
    for other in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), jax.device_get(tensor)):
        assert_same_tensor(other, tensor)


def test_numpy_leaves_are_accepted(tensor):
    on_host = jax.device_get(tensor)
    assert_same_tensor(dequantize(on_host), dequantize(tensor))


def test_tensors_stack_leaf_by_leaf(tensor):
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), tensor, tensor)
    assert stacked.shape == (2, 2, 32, 48)
    assert_same_tensor(jax.tree.map(lambda v: v[1], stacked), tensor)


def test_it_is_frozen(tensor):
    with pytest.raises(AttributeError):
        tensor.data = None


# ---------------------------------------------------------------- the amax of the whole tensor
SCOPES = {"tensor": NVFP4, "row": ROW_SCALED, "window64": WINDOW64}
every_scope = pytest.mark.parametrize("spec", SCOPES.values(), ids=SCOPES)


@every_scope
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
def test_tensor_amax(native, spec, transpose):
    x = normal((2, 64, 128), dtype="fp32")
    got = jax.jit(lambda x: quantize(x, spec, transpose=transpose).tensor_amax)(x)
    assert_bitwise(got, np.abs(np.asarray(x)).max())


def test_tensor_amax_of_an_amax_per_matrix():
    x = normal((3, 16, 32))
    assert_bitwise(quantize(x, amax=jnp.asarray([1.0, 5.0, 2.0])).tensor_amax, np.float32(5))


def test_tensor_amax_of_a_rotated_tensor_is_that_of_the_rotated_values():
    x = normal((16, 64))
    assert_bitwise(quantize(x, NVFP4_RHT).tensor_amax, np.abs(rotate(np.asarray(x))).max())


@every_scope
def test_nan_wins_the_tensor_amax(native, spec):
    x = normal((16, 128), dtype="fp32").at[3, 70].set(jnp.nan).at[5, 9].set(jnp.inf)
    assert_bitwise(quantize(x, spec).tensor_amax, np.array(0x7FC00000, np.uint32).view(np.float32))


@every_scope
def test_tensor_amax_of_nothing_is_zero(spec):
    assert_bitwise(quantize(jnp.zeros((0, 64)), spec).tensor_amax, np.float32(0))


def test_a_subnormal_tensor_amax_survives_jit(native):
    x = jnp.full((16, 64), 1e-40)
    assert_bitwise(jax.jit(lambda x: quantize(x, WINDOW64).tensor_amax)(x), np.float32(1e-40))


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_RHT, ROW_SCALED], ids=name_of)
def test_a_weakly_typed_amax_makes_no_weakly_typed_tensor(spec):
    """Of jnp.asarray(2.0) and the like."""
    amax = jnp.full(16, 2.0) if spec == ROW_SCALED else jnp.asarray(2.0)
    assert jax.typeof(jnp.asarray(2.0)).weak_type
    t = quantize(jnp.ones((16, 32)), spec, amax=amax)
    row, col = quantize_pair(jnp.ones((16, 32)), amax=(jnp.asarray(2.0), jnp.asarray(2.0)))
    produced = silu_mul_quantize(jnp.ones((16, 32)), jnp.ones((16, 32)), amax=jnp.asarray(2.0))
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves((t, row, col, produced)))
    assert not jax.typeof(fake_quant(jnp.ones((16, 32)), amax=jnp.asarray(2.0))).weak_type
