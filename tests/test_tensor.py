"""NVFP4Tensor: shapes, pytree behaviour, and placeholders in its fields."""

import copy
import operator
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, rotate
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh
from operands import normal

from jnvfp4 import NVFP4Tensor, dequantize, fake_quant, quantize, quantize_pair
from jnvfp4.spec import NVFP4, NVFP4_RHT, ROW_SCALED, SUPPORTED_SPECS, WINDOW64, Format, name_of

FORMATS = {spec.format: spec for spec in reversed(SUPPORTED_SPECS) if spec.rounding == "nearest"}
every_format = pytest.mark.parametrize("spec", FORMATS.values(), ids=name_of)
every_scope = pytest.mark.parametrize("spec", [NVFP4, ROW_SCALED, WINDOW64], ids=name_of)


@pytest.fixture
def tensor():
    return quantize(normal((2, 32, 48)), amax=jnp.full((2,), 3.0))


@every_scope
def test_fields_have_the_documented_shapes_and_dtypes(spec):
    t = quantize(normal((2, 32, 192)), spec)
    assert (t.shape, t.ndim, t.dtype) == ((2, 32, 192), 3, jnp.dtype(jnp.float4_e2m1fn))
    amax = {"tensor": (), "row": (2, 32), "window64": (2, 32, 3)}[spec.format.amax_scope]
    assert [v.shape for v in (t.data, t.scale, t.amax)] == [(2, 32, 96), (2, 32, 12), amax]
    assert [v.dtype for v in (t.data, t.scale, t.amax)] == [jnp.uint8, jnp.float8_e4m3fn, jnp.float32]


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


def test_copies_and_pickles(tensor):
    for other in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), jax.device_get(tensor)):
        assert_same_tensor(other, tensor)
    assert_same_tensor(dequantize(jax.device_get(tensor)), dequantize(tensor))
    with pytest.raises(AttributeError):
        tensor.data = None


# ---------------------------------------------------------------- sizes and text
@every_format
def test_size_and_bytes(spec):
    t = quantize(normal((3, 32, 192)), spec)
    assert t.size == 3 * 32 * 192
    assert t.nbytes == sum(np.asarray(part).nbytes for part in jax.tree.leaves(t))
    abstract = jax.eval_shape(lambda: t)
    assert (abstract.size, abstract.nbytes) == (t.size, t.nbytes)


def test_bytes_are_those_of_all_devices():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu")[:8])
    t = quantize(normal((32, 192)), ROW_SCALED)
    assert jax.device_put(t, t.shardings(mesh, P("x"))).nbytes == t.nbytes


def test_the_repr_is_short(tensor):
    assert repr(tensor) == "NVFP4Tensor(shape=(2, 32, 48), format=nvfp4_tensor_448, nbytes=1736)"
    assert repr(jax.eval_shape(lambda: tensor)) == repr(tensor)
    texts = []
    jax.jit(lambda t: texts.append(repr(t)))(tensor)
    assert texts == [repr(tensor)]
    assert repr(jax.tree.map(lambda a: a.dtype, tensor)).startswith("NVFP4Tensor(data=dtype('uint8'), scale=")
    assert repr(NVFP4Tensor(1, None, "c")) == f"NVFP4Tensor(data=1, scale=None, amax='c', format={Format()!r})"


# ---------------------------------------------------------------- t[i]
def indices():
    """Of leading axes (2, 3)."""
    return {
        "integer": 1,
        "negative": -1,
        "both": (0, 2),
        "slice": slice(1, None),
        "slices": (slice(None), slice(0, 2)),
        "mixed": (0, slice(None, None, 2)),
        "new_axis": (None, 1),
        "integers": np.array([1, 0, 1]),
        "jax_integers": (slice(None), jnp.array([2, 0])),
        "pairs": (jnp.array([0, 1]), np.array([2, 2])),
        "jax_integer": jnp.int32(1),
        "booleans": np.array([False, True]),
        "booleans_of_both": np.array([[False, True, True], [True, False, False]]),
        "nothing": (),
        "none_left": slice(0, 0),
    }


@pytest.mark.parametrize("name", indices())
@every_format
def test_an_index_takes_matrices(spec, name):
    """Of each matrix of the array, quantized with the amax of all where the scope is the tensor."""
    x, index = normal((2, 3, 16, 192)), indices()[name]
    t = quantize(x, spec)
    if spec.format.amax_scope == "tensor":
        want = quantize(x[index], spec, amax=t.amax)
    else:
        want = quantize(x[index], spec)
    assert_same_tensor(t[index], want)
    assert_same_tensor(jax.device_get(t)[jax.device_get(index)], want)


@pytest.mark.parametrize("name", ["integer", "slices", "mixed", "new_axis", "pairs", "booleans_of_both"])
def test_an_index_takes_the_amax_of_each_matrix(name):
    x, amax, index = normal((2, 3, 16, 32)), jnp.arange(1.0, 7.0).reshape(2, 3), indices()[name]
    assert_same_tensor(quantize(x, amax=amax)[index], quantize(x[index], amax=amax[index]))


def test_an_index_may_be_traced(tensor):
    """The experts that tokens are for."""
    experts = jnp.array([1, 0, 1])
    assert_same_tensor(jax.jit(lambda t, i: t[i])(tensor, experts), tensor[experts])
    assert_same_tensor(jax.jit(lambda t, i: t[i])(tensor, jnp.int32(1)), tensor[1])


BEYOND = [2, -3, (0, 0), (0, ..., 1), ..., (slice(None), 5), "data", 1.0, (None, 0, 0), np.array([0, 2])]


@pytest.mark.parametrize("index", BEYOND, ids=str)
def test_an_index_beyond_the_leading_axes_is_refused(tensor, index):
    with pytest.raises(IndexError, match=r"must be one of the leading axes \(2,\) of shape \(2, 32, 48\), got"):
        tensor[index]


def test_an_index_beyond_the_axes_of_the_amax_is_refused():
    """vmap of an array of four axes finds one amax for each example."""
    t = jax.vmap(quantize)(normal((2, 3, 16, 48)))
    assert t.amax.shape == (2,)
    for index in ((0, 1), (slice(None), 1)):
        with pytest.raises(IndexError, match=r"must be one of the axes \(2,\) that the amax .* got .*t\[i\]\[j\]"):
            t[index]
    assert_same_tensor(t[0][1], NVFP4Tensor(t.data[0, 1], t.scale[0, 1], t.amax[0], t.format))
    assert jax.vmap(lambda t: t[1])(t).shape == (2, 16, 48)


def test_a_matrix_has_no_index_and_no_iteration(tensor):
    assert_same_tensor(list(tensor), [tensor[0], tensor[1]])
    with pytest.raises(IndexError, match=r"leading axes \(\) of shape \(32, 48\), got \(0,\); to .* jnvfp4.dequantize"):
        tensor[0][0]
    with pytest.raises(TypeError, match=r"iteration needs a leading axis, got shape \(32, 48\)"):
        iter(tensor[0])


def test_a_tensor_without_rows_is_true():
    assert quantize(jnp.zeros((0, 0, 64)))


# ---------------------------------------------------------------- what an array has and it has not
@pytest.mark.parametrize("name", ["T", "mT", "transpose"])
def test_there_is_no_transpose(tensor, name):
    assert not hasattr(tensor, name)
    with pytest.raises(AttributeError, match=r"jnvfp4\.quantize\(..., transpose=True\), or, .* jnvfp4\.transpose"):
        getattr(tensor, name)


OPERATORS = ["add", "sub", "mul", "truediv", "matmul", "lt", "le", "gt", "ge", "eq", "ne"]
CONVERSIONS = {
    "np.asarray": np.asarray,
    "np.array": lambda t: np.array(t, np.float32),
    "jnp.asarray": jnp.asarray,
    "jnp.array": lambda t: jnp.array(t, jnp.float32),
    "np.stack": lambda t: np.stack([t, t]),
    "jnp.stack": lambda t: jnp.stack([t, t]),
    "jnp.dot": lambda t: jnp.dot(t, t),
    "times": lambda t: jnp.ones(48) * t,
    "jit": jax.jit(lambda t: jnp.sum(t)),
    **{name: getattr(operator, name) for name in ("neg", "abs")},
    **{f"{name} 2": lambda t, name=name: getattr(operator, name)(t, 2) for name in OPERATORS},
    **{f"2 {name}": lambda t, name=name: getattr(operator, name)(2, t) for name in OPERATORS},
    "astype": lambda t: t.astype(jnp.float32),
    "reshape": lambda t: t.reshape(-1),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_array_operations_raise(tensor, convert):
    with pytest.raises(TypeError, match=r"not an array, got shape \(2, 32, 48\) .* jnvfp4.dequantize\(t\) .* t.data"):
        convert(tensor)


# ---------------------------------------------------------------- shardings
LAYOUTS = [
    P(),
    P("x"),
    P(None, "y"),
    P(None, "y", "x"),
    P("x", None, "y"),
    P(None, None, ("x", "y")),
    P(None, ("x", "y")),
]


def mesh_of(kind="auto"):
    return make_mesh(jax.devices("cpu")[:8], "xy", kind)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@every_format
def test_one_partition_spec_for_the_parts(spec, layout):
    """The amax has as many entries of it as axes. Shapes make the shardings of results and of arguments."""
    mesh, x = mesh_of(), normal((2, 32, 512))
    f = jax.jit(partial(quantize, spec=spec))
    shardings = jax.eval_shape(f, x).shardings(mesh, layout)
    t = jax.jit(f, out_shardings=shardings)(x)
    assert_same_tensor((t, jax.device_put(f(x), shardings)), (f(x), f(x)))
    assert_sharded(t.data, mesh, layout)
    assert_sharded(t.scale, mesh, layout)
    assert_sharded(t.amax, mesh, P(*layout[: t.amax.ndim]))
    assert_same_tensor(jax.jit(dequantize, in_shardings=(shardings,))(t), dequantize(f(x)))


def test_an_amax_for_each_matrix_is_sharded_like_them(tensor):
    mesh = mesh_of()
    placed = jax.device_put(tensor, tensor.shardings(mesh, P("x", "y")))
    assert_sharded(placed.amax, mesh, P("x"))
    chosen = tensor.shardings(mesh, P("x", P.UNCONSTRAINED))  # XLA may choose an axis
    assert_same_tensor(jax.jit(lambda t: jax.lax.with_sharding_constraint(t, chosen))(tensor), tensor)


SHARDINGS = {
    "block": (P(None, ("x", "y")), ValueError, r"spec must split K into multiples of 16, got .* K=64, 8 ways"),
    "rank": (P(None, None, "x"), ValueError, r"spec must have at most 2 entries for shape \(32, 64\), got"),
    "name": ("x", TypeError, "spec must be a PartitionSpec, got 'x'"),
}


@pytest.mark.parametrize(("layout", "error", "text"), SHARDINGS.values(), ids=SHARDINGS)
def test_shardings_that_do_not_fit(layout, error, text):
    with pytest.raises(error, match=r"NVFP4Tensor\.shardings: " + text):
        quantize(normal((32, 64))).shardings(mesh_of(), layout)
    with pytest.raises(ValueError, match=r"multiples of 64, got .* K=128, 4 ways"):
        quantize(normal((32, 128)), WINDOW64).shardings(mesh_of(), P(None, "y"))


# ---------------------------------------------------------------- the amax of the whole tensor
@every_scope
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
def test_tensor_amax_is_that_of_the_input(native, spec, transpose):
    x = normal((2, 64, 128), dtype="fp32")
    got = jax.jit(lambda x: quantize(x, spec, transpose=transpose).tensor_amax)(x)
    assert_bitwise(got, np.abs(np.asarray(x)).max())


def test_tensor_amax_of_other_tensors():
    """Of an amax per matrix, of a rotated tensor, whose values are rotated, and of nothing."""
    assert_bitwise(quantize(normal((3, 16, 32)), amax=jnp.asarray([1.0, 5.0, 2.0])).tensor_amax, np.float32(5))
    x = normal((16, 64))
    assert_bitwise(quantize(x, NVFP4_RHT).tensor_amax, np.abs(rotate(np.asarray(x))).max())
    for spec in (NVFP4, ROW_SCALED, WINDOW64):
        assert_bitwise(quantize(jnp.zeros((0, 64)), spec).tensor_amax, np.float32(0))


@every_scope
def test_nan_wins_the_tensor_amax(native, spec):
    x = normal((16, 128), dtype="fp32").at[3, 70].set(jnp.nan).at[5, 9].set(jnp.inf)
    assert_bitwise(quantize(x, spec).tensor_amax, np.array(0x7FC00000, np.uint32).view(np.float32))


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
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves((t, row, col)))
    assert not jax.typeof(fake_quant(jnp.ones((16, 32)), amax=jnp.asarray(2.0))).weak_type
