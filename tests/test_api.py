"""The public names, and what holds for every public operation."""

import inspect
import itertools
import pkgutil
import subprocess
import sys
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_tensor, primitives
from operands import normal

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Recipe,
    attention,
    calibration,
    recipes,
)
from jnvfp4._ops.arguments import OPERATIONS

PUBLIC = {name: value for name, value in vars(jnvfp4).items() if not name.startswith("_")}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
FUNCTIONS |= {name: getattr(attention, name) for name in ("append_kv", "decode_attention")}
FUNCTIONS |= {name: getattr(calibration, name) for name in ("gptq",)}
IN_MODULES = {
    f"{module.__name__}.{name}": value
    for module in (jnvfp4.sharding, jnvfp4.remat, jnvfp4.stats)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__
}
STATS = ("collect", "probe", "quantization_report", "read")
IN_MODULES |= {f"jnvfp4.stats.{name}": getattr(jnvfp4.stats, name) for name in STATS}


# ---------------------------------------------------------------- names
def test_no_public_name_hides_a_module():
    """`import jnvfp4.name` and `jnvfp4.name` are the same."""
    modules = {module.name for module in pkgutil.iter_modules(jnvfp4.__path__)}
    hidden = {name for name in modules & set(vars(jnvfp4)) if not isinstance(getattr(jnvfp4, name), ModuleType)}
    assert not hidden
    assert jnvfp4.Recipe is jnvfp4.recipes.Recipe


# They are about operations, make specs or keys, move trees to a store and back, or move bytes of a weight.
NO_OPERATIONS = ("supports", "export_checks", "to_state", "from_state", "step_key")


def test_operations_are_the_public_functions():
    """Every one is registered, so that `supports` answers for it."""
    operations = {name: f for name, f in FUNCTIONS.items() if name not in NO_OPERATIONS}
    assert operations == {**OPERATIONS}


def test_an_import_loads_no_device_and_no_other_library():
    """No backend, not the converter, and no library, also where a name is asked for that does not exist."""
    modules = "jnvfp4.cli flax qwix haliax equinox optax"
    code = (
        f"import sys, jnvfp4; hasattr(jnvfp4, 'linen'); from jax._src import xla_bridge as b; "
        f"print(b._backends, [n for n in '{modules}'.split() if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "{} []\n"


def test_the_names_in_public_modules():
    of = {
        "sharding": ("all_gather", "gather_quantized"),
        "remat": ("recompute_quantize", "save_packed"),
        "stats": STATS,
    }
    assert {name for name in jnvfp4.stats.__all__ if name.islower()} == set(STATS)
    assert IN_MODULES.keys() == {f"jnvfp4.{module}.{name}" for module, names in of.items() for name in names}
    assert jnvfp4._version.__version__ == jnvfp4.__version__  # so that modules need not import the package


@pytest.mark.parametrize("name", [*FUNCTIONS, *IN_MODULES])
def test_docstrings_begin_with_a_verb(name):
    """In the third person: "Quantizes ..."."""
    first = inspect.getdoc((FUNCTIONS | IN_MODULES)[name]).split()[0]
    assert first[0].isupper()
    assert first.endswith("s")


# ---------------------------------------------------------------- quantize_pair
ONE_CALL = {"plain": (NVFP4, NVFP4), "rotated": (NVFP4, NVFP4_RHT), "rows": (ROW_SCALED, ROW_SCALED)}
TWO_CALLS = {"rows and plain": (ROW_SCALED, NVFP4), "rotated rows": (NVFP4_RHT, NVFP4), "windows": (WINDOW64, NVFP4)}


def ours(f, *operands):
    """The equations of jnvfp4's primitives."""
    return [eqn for eqn in jax.make_jaxpr(f)(*operands).eqns if eqn.primitive.name.startswith("nvfp4")]


@pytest.mark.parametrize("pair", [*ONE_CALL.values(), *TWO_CALLS.values()], ids=[*ONE_CALL, *TWO_CALLS])
def test_a_pair_ignores_the_signs_of_its_amaxes(native, pair):
    x = normal((64, 128))
    amax = [jnp.full(t.amax.shape, 3.0 + i) for i, t in enumerate(jnvfp4.quantize_pair(x, *pair))]
    got = jnvfp4.quantize_pair(x, *pair, amax=(-amax[0], -amax[1]))
    assert_same_tensor(got, jnvfp4.quantize_pair(x, *pair, amax=tuple(amax)))
    row = jnvfp4.quantize(x, pair[0], amax=-amax[0])
    col = jnvfp4.quantize(x, pair[1], amax=-amax[1], transpose=True)
    assert_same_tensor(got, (row, col))


@pytest.mark.parametrize("implementation", [None, "native", "reference"])
@pytest.mark.parametrize("pair", [*ONE_CALL.values(), *TWO_CALLS.values()], ids=[*ONE_CALL, *TWO_CALLS])
def test_every_call_of_a_pair_has_its_implementation(pair, implementation):
    calls = ours(lambda x: jnvfp4.quantize_pair(x, *pair, implementation=implementation), normal((64, 128)))
    names = [eqn.primitive.name for eqn in calls if eqn.primitive.name != "nvfp4_rht_amax"]
    assert names == (["nvfp4_quantize_pair"] if pair in ONE_CALL.values() else ["nvfp4_quantize"] * 2)
    assert {eqn.params["implementation"] for eqn in calls} == {implementation}


@pytest.mark.parametrize("pair", [(NVFP4, NVFP4), (NVFP4_2D, NVFP4)], ids=["one call", "two calls"])
def test_both_orientations_share_the_amax_of_the_tensor(pair):
    jaxpr = jax.make_jaxpr(lambda x: jnvfp4.quantize_pair(x, *pair))(normal((64, 128))).jaxpr
    assert primitives(jaxpr).count("reduce_max") == 1


def test_two_calls_find_the_amax_of_rows_themselves():
    first, second = ours(lambda x: jnvfp4.quantize_pair(x, ROW_SCALED, NVFP4), normal((64, 128)))
    assert [eqn.params["params"][0].has_amax for eqn in (first, second)] == [False, True]


# ---------------------------------------------------------------- jax_numpy_rank_promotion="raise"
KEY = jax.random.key(5)
X, W, DY = normal((2, 32, 64), 1), normal((48, 64), 2), normal((2, 32, 48), 3)
BIAS = normal((48,), 5)
KV = attention.KVCache.zeros((2, 1, 64, 64))
ROWS, LENGTHS = normal((2, 1, 64), 4), jnp.array([3, 0], jnp.int32)
WS, SIZES = jnp.stack([W, -W]), jnp.array([16, 10], jnp.int32)
CALLS = {
    **{
        f"quantize {name}": (partial(jnvfp4.quantize, spec=spec, key=KEY), (X,))
        for name, spec in {"nvfp4": NVFP4, "tiles": NVFP4_2D, "sr": NVFP4_SR, "rht": NVFP4_RHT}.items()
    },
    "quantize rows": (partial(jnvfp4.quantize, spec=ROW_SCALED, transpose=True), (X,)),
    "quantize windows": (partial(jnvfp4.quantize, spec=WINDOW64), (X,)),
    "quantize 4over6": (partial(jnvfp4.quantize, spec=jnvfp4.spec.four_over_six(amax_scope="row")), (X,)),
    "quantize_pair": (partial(jnvfp4.quantize_pair, row_spec=NVFP4_SR, col_spec=NVFP4_RHT_SR, key=KEY), (X,)),
    "dequantize": (jnvfp4.dequantize, (jnvfp4.quantize(X, ROW_SCALED),)),
    "dequantize rotated": (jnvfp4.dequantize, (jnvfp4.quantize(X, NVFP4_RHT),)),
    "transpose": (jnvfp4.transpose, (jnvfp4.quantize(X, NVFP4_2D),)),
    "matmul_nt": (
        lambda a, b, c: jnvfp4.matmul_nt(a, b, bias=c),
        (jnvfp4.quantize(X, ROW_SCALED), jnvfp4.quantize(W), BIAS),
    ),
    "matmul_nt windows": (jnvfp4.matmul_nt, (jnvfp4.quantize(X, WINDOW64), jnvfp4.quantize(W))),
    "matmul_nt weight-only": (jnvfp4.matmul_nt, (X, jnvfp4.quantize(W))),
    "grouped_matmul_nt": (jnvfp4.grouped_matmul_nt, (jnvfp4.quantize(X[0], ROW_SCALED), jnvfp4.quantize(WS), SIZES)),
    "grouped_matmul_nt weight-only": (jnvfp4.grouped_matmul_nt, (X[0], jnvfp4.quantize(WS), SIZES)),
    "decode_attention": (attention.decode_attention, (ROWS, KV, LENGTHS)),
    "append_kv": (attention.append_kv, (KV, ROWS, ROWS, LENGTHS)),
    "gptq": (calibration.gptq, (W, jnp.eye(64))),
    "report": (partial(jnvfp4.stats.quantization_report, spec=jnvfp4.spec.four_over_six(block_rows=16)), (X,)),
}
DIFFERENTIABLE = {
    "fake_quant": (partial(jnvfp4.fake_quant, spec=NVFP4_SR, key=KEY), (X,)),
    "linear": (lambda x, w, b: jnvfp4.linear(x, w, recipes.pretrain(), bias=b, key=KEY), (X, W, BIAS)),
    "linear stats": (
        lambda x, w, p: jnvfp4.linear(x, w, recipes.pretrain(), key=KEY, stats=p),
        (X, W, jnp.ones((3, 7))),
    ),
    "linear kn": (lambda x, w: jnvfp4.linear(x, w, Recipe(), w_axes="kn"), (X, W.T)),
    "linear windows": (lambda x, w: jnvfp4.linear(x, w, recipes.window64(), key=KEY), (X, W)),
    "linear dequantized": (lambda x, w: jnvfp4.linear(x, w, recipes.pretrain(backward="dequantized")), (X, W)),
    "linear weight-only": (lambda x, w: jnvfp4.linear(x, w, recipes.inference(weight_only=True)), (X, W)),
    "linear frozen": (lambda x, b: jnvfp4.linear(x, jnvfp4.quantize(W), bias=b), (X, BIAS)),
    "grouped_linear": (lambda x, w: jnvfp4.grouped_linear(x, w, SIZES, recipes.pretrain(), key=KEY), (X[0], WS)),
    "grouped_linear kn": (lambda x, w: jnvfp4.grouped_linear(x, w, SIZES, w_axes="kn"), (X[0], WS.mT)),
    "einsum": (lambda x, w: jnvfp4.einsum("bsk,nk->nbs", x, w), (X, W)),
    "dot_general": (lambda x, w: jnvfp4.dot_general(x, w, (((2,), (2,)), ((0,), (0,)))), (X, jnp.stack([W, W]))),
}


def with_gradients(f):
    def run(*operands):
        y, pull = jax.vjp(f, *operands)
        return y, pull(y)

    return run


PROMOTED = {**CALLS, **{name: (with_gradients(f), operands) for name, (f, operands) in DIFFERENTIABLE.items()}}


def test_the_calls_are_of_every_public_operation():
    assert {name.split()[0] for name in PROMOTED} - {"report"} == set(OPERATIONS)


@pytest.mark.parametrize(("f", "operands"), PROMOTED.values(), ids=PROMOTED)
def test_no_operation_needs_promotion(native, f, operands):
    """Neither of ranks nor of dtypes, while it is traced and lowered."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(lambda *v: f(*v)).lower(*operands)


FLOATS = ("float32", "bfloat16", "float16")
DOT_GENERALS = (jnvfp4.dot_general, jax.lax.dot_general)
MIXED = {
    "linear high precision": partial(jnvfp4.linear, recipe=recipes.pretrain(backward="high_precision")),
    "linear dequantized": partial(jnvfp4.linear, recipe=recipes.pretrain(backward="dequantized")),
    "dot_general": partial(jnvfp4.dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("dtypes", list(itertools.permutations(FLOATS, 2)), ids=str)
@pytest.mark.parametrize("f", MIXED.values(), ids=MIXED)
def test_operands_of_different_dtypes_need_no_promotion(native, f, dtypes):
    x, w = X[0].astype(dtypes[0]), W.astype(dtypes[1])
    programs = []
    for mode in ("standard", "strict"):
        with jax.numpy_dtype_promotion(mode):
            programs.append(jax.jit(lambda *v: with_gradients(f)(*v)).lower(x, w).as_text())
    assert programs[0] == programs[1]


@pytest.mark.parametrize("mode", ["standard", "strict"])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=2)), ids=str)
def test_dot_general_has_the_dtype_of_lax_dot_general(dtypes, mode):
    x, w = X[0].astype(dtypes[0]), W.astype(dtypes[1])
    with jax.numpy_dtype_promotion(mode):
        got, want = (jax.eval_shape(partial(f, dimension_numbers=(((1,), (1,)), ((), ()))), x, w) for f in DOT_GENERALS)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
