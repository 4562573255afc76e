"""rms_norm_quantize and silu_mul_quantize: y by its formula, the bytes of quantize(y), meshes, gradients."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case
from helpers import assert_bitwise, assert_same_tensor, canonical_nans, half_ulp, key_for, round_to
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put, run
from operands import normal
from test_isa import both  # noqa: F401  (a fixture)

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_RHT_SR_UNBIASED,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    WINDOW64,
    Produced,
    Recipe,
    four_over_six,
    linear,
    quantize,
    quantize_pair,
    recipes,
    rms_norm_quantize,
    silu_mul_quantize,
)
from jnvfp4._primitives.produce import RmsNorm, SiluMul, produce_p
from jnvfp4.spec import FUSED_PAIRS, SUPPORTED_SPECS, name_of

F32, BF16 = np.float32, ml_dtypes.bfloat16
EPS = 1e-6
SPECS = (
    *(NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, NVFP4_SR_UNBIASED, ROW_SCALED, WINDOW64),
    *(four_over_six(), four_over_six(amax_scope="row")),
)
PAIRS = [
    (NVFP4, NVFP4_RHT),
    (NVFP4_SR, NVFP4_RHT_SR),
    (NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED),
    (WINDOW64, WINDOW64),
    (ROW_SCALED, ROW_SCALED),
]
PAIRS += [(NVFP4_2D, NVFP4_2D), (NVFP4, ROW_SCALED)]  # the last is two calls
PRODUCERS = {"norm": rms_norm_quantize, "gate": silu_mul_quantize}
every_producer = pytest.mark.parametrize("producer", PRODUCERS)


# ---------------------------------------------------------------- the formulas of docs/producers.md, in NumPy
def sum_by_halves(t):
    """[..., n] -> [...], n a power of two."""
    while t.shape[-1] > 1:
        half = t.shape[-1] // 2
        t = t[..., :half] + t[..., half:]
    return t[..., 0]


def norm_by_formula(x, weight, eps=EPS):
    return round_to(norm_unrounded(x, weight, eps), BF16)


def norm_unrounded(x, weight, eps=EPS):
    with np.errstate(all="ignore"):
        v, w = np.asarray(x).astype(F32), np.asarray(weight).astype(F32)
        blocks = sum_by_halves((v * v).reshape(*v.shape[:-1], -1, 16))
        pad = (1 << (blocks.shape[-1] - 1).bit_length()) - blocks.shape[-1]
        total = sum_by_halves(np.pad(blocks, [(0, 0)] * (v.ndim - 1) + [(0, pad)]))
        factor = F32(1) / np.sqrt(total / F32(v.shape[-1]) + F32(eps))
        return v * factor[..., None] * w


def gate_by_formula(gate, up):
    return round_to(gate_unrounded(gate, up), BF16)


def gate_unrounded(gate, up):
    with np.errstate(all="ignore"):
        g, u = np.asarray(gate).astype(F32), np.asarray(up).astype(F32)
        tiny = g < -80
        c = np.where(g < -190, F32(-190), g)
        t = c * F32(-1.44269502)
        t = np.where(t < -64, F32(-64), t)
        m = t + F32(12582912)
        f = t - (m - F32(12582912))
        p = np.array(0x3D61FBB0, np.uint32).view(F32)
        for c_k in (0x3E786F0D, 0x3F31798D, 0x3F7FFB49):
            p = p * f + np.array(c_k, np.uint32).view(F32)
        n = m.view(np.uint32) - np.uint32(0x4B400000) - np.where(tiny, np.uint32(150), np.uint32(0))
        e = (p.view(np.uint32) + (n << np.uint32(23))).view(F32)
        r = F32(1) / (np.where(tiny, F32(0), F32(1)) + e)
        power = np.where(tiny, F32(2**-75), F32(1))
        return c * r * (u * power) * power


def norm_exactly(x, weight, eps=EPS):
    v = np.asarray(x).astype(np.longdouble)
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + eps) * np.asarray(weight).astype(np.longdouble)


def gate_exactly(gate, up):
    g = np.asarray(gate).astype(np.longdouble)
    with np.errstate(over="ignore", under="ignore"):
        return g / (1 + np.exp(-g)) * np.asarray(up).astype(np.longdouble)


def assert_within_one_ulp(y, exact):
    """Of bfloat16; what is beyond its largest number by half a step or more is infinite."""
    y, largest = np.asarray(y).astype(np.longdouble), np.longdouble(ml_dtypes.finfo(BF16).max)
    ulp = 2 * half_ulp(np.abs(exact).astype(np.float64), BF16)
    beyond = np.abs(exact) > largest
    with np.errstate(invalid="ignore"):
        close = np.abs(y - exact) <= ulp
        overflowed = np.isinf(y) & (np.sign(y) == np.sign(exact))
    wrong = np.argwhere(~np.where(beyond, overflowed | close, close))
    assert not wrong.size, f"{len(wrong)} of {y.size}, first at {tuple(wrong[0])}"


@partial(jax.jit, static_argnums=(0, 3))
def values(producer, a, b, implementation=None):
    """y alone."""
    op = RmsNorm(EPS) if producer == "norm" else SiluMul()
    params = {"specs": (None, None), "given": (False, False), "values": True, "implementation": implementation}
    return produce_p.bind(a, b, op=op, **params)[0]


def operands(producer, shape, dtype="bf16", seed=0):
    a = normal(shape, seed, dtype)
    return a, normal(shape[-1:] if producer == "norm" else shape, seed + 1, dtype)


# ---------------------------------------------------------------- y
ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16)
UPS = [1.0, -3.0, 1.9921875, 1e-3, 65504.0, -1e30, 3.38e38, 1e-38, 9.2e-41, 0.0]


def test_every_gate(backend):
    """All 65,536 bfloat16 gates, infinite ones and NaN among them, with factors of every size."""
    gate = np.tile(ALL_BF16, (len(UPS), 1))
    up = np.broadcast_to(np.array(UPS, BF16)[:, None], gate.shape)
    y = values("gate", gate, up, backend.implementation)
    assert_bitwise(y, gate_by_formula(gate, up))
    finite = np.isfinite(ALL_BF16.astype(F32))
    assert_within_one_ulp(np.asarray(y)[:, finite], gate_exactly(gate[:, finite], up[:, finite]))


def test_gates_that_are_not_finite():
    """inf * u; -inf is its limit -0, times u; NaN of either is NaN, and so is inf * 0 and 0 * inf."""
    inf, nan = np.inf, np.nan
    gate = np.array([inf, inf, inf, -inf, -inf, -inf, nan, 1, 0, -1], F32)
    up = np.array([2, -2, 0, 2, -2, nan, 2, nan, inf, inf], F32)
    want = np.array([inf, -inf, nan, -0.0, 0.0, nan, nan, nan, nan, -inf], BF16)
    pad = lambda v: np.pad(v, (0, 6))[None]  # noqa: E731
    assert_bitwise(values("gate", pad(gate), pad(up))[0, :10], canonical_nans(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_every_dtype(native, dtype):
    gate = np.concatenate([Case("x", (5, 112), dtype, d).make() for d in ("normal", "heavy", "powers", "one_hot")])
    gate = np.concatenate([gate, gate[:10] * np.array(30, gate.dtype)])
    up = np.roll(gate, 7, 1)
    y = values("gate", gate, up)
    assert_bitwise(y, gate_by_formula(gate, up))
    assert_within_one_ulp(y, gate_exactly(gate, up))


@every_producer
def test_beside_ties(backend, producer):
    """Factors that put y next to a tie of bfloat16, so that a last bit lost in float32 shows."""
    x = np.random.default_rng(5).uniform(-9, 9, (32, 1, 128)).astype(F32)
    unrounded = {"norm": norm_unrounded, "gate": gate_unrounded}[producer]
    tie = F32(1 + 2**-8) / unrounded(x, np.ones_like(x))
    for factor in (tie, np.nextafter(tie, F32(0)), np.nextafter(tie, F32(np.inf))):
        b = factor[:, 0] if producer == "norm" else factor  # a weight for each row
        want = round_to(unrounded(x, factor), BF16)
        assert_bitwise(values(producer, x, b, backend.implementation), want)


NORM_INPUTS = ["normal", "heavy", "zeros", "signed_zeros", "one_hot", "subnormal", "powers", "outlier_rows"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [16, 48, 1040])
def test_norms(native, dtype, cols):
    x = np.concatenate([Case("x", (3, cols), dtype, d).make() for d in NORM_INPUTS])
    weight = np.asarray(normal((cols,), 9, "fp32"))
    for w in (weight, weight.astype(DTYPES[dtype]), np.full(cols, 2.0**15, F32)):
        y = values("norm", x, w)
        assert_bitwise(y, norm_by_formula(x, w))
        assert_within_one_ulp(y, norm_exactly(x, w))


@pytest.mark.parametrize("cols", [16, 528])
def test_norms_of_the_reference(cols):
    x = np.concatenate([Case("x", (1, cols), "fp32", d).make() for d in NORM_INPUTS])
    x[0, 3], x[1, 5] = np.nan, np.inf
    weight = np.asarray(normal((cols,), 9, "fp32"))
    assert_bitwise(values("norm", x, weight, "reference"), norm_by_formula(x, weight))
    assert_bitwise(values("norm", x, weight), norm_by_formula(x, weight))


@pytest.mark.parametrize("cols", [4096, 8208, 16400, 70000, 140000])
def test_long_rows(native, cols):
    """More than a GPU's thread block holds at once, in every way that a row can be split."""
    x, weight = normal((2, cols), 3, "fp32"), normal((cols,), 4, "fp32")
    want = norm_by_formula(x, weight)
    assert_bitwise(values("norm", x, weight), want)
    assert_same_tensor(rms_norm_quantize(x, weight, ROW_SCALED).row, quantize(want, ROW_SCALED))
    assert_same_tensor(silu_mul_quantize(x, x, ROW_SCALED).row, quantize(gate_by_formula(x, x), ROW_SCALED))


def test_eps_and_its_place():
    x, weight = np.full((1, 32), 1e-3, F32), np.ones(32, F32)
    for eps in (1e-5, 1e-2, 1):
        assert_bitwise(
            rms_norm_quantize(x, weight, eps=eps, return_values=True).values, norm_by_formula(x, weight, eps)
        )


def test_a_row_whose_squares_overflow_is_zero():
    x, weight = np.full((1, 16), 3e19, F32), np.ones(16, F32)
    assert_bitwise(values("norm", x, weight), np.zeros((1, 16), BF16))


# ---------------------------------------------------------------- the bytes of quantize
def given_amax(shape, spec, transpose=False):
    *lead, rows, cols = (*shape[:-2], shape[-1], shape[-2]) if transpose else shape
    parts = {"tensor": (), "row": (*lead, rows), "window64": (*lead, rows, cols // 64)}[spec.format.amax_scope]
    return jnp.linspace(1.5, 4.0, math.prod(parts), dtype=jnp.float32).reshape(parts)


@partial(jax.jit, static_argnums=(0, 3, 4))
def by_specs(producer, a, b, specs, given):
    """By each spec: the results without and with y, and what quantize makes of y."""
    out = {}
    for spec in specs:
        call = partial(PRODUCERS[producer], a, b, spec, key=key_for(spec))
        amax = given_amax(a.shape, spec) if given else None
        alone, beside = call(amax=amax), call(amax=amax, return_values=True)
        out[name_of(spec)] = alone, beside, (quantize(beside.values, spec, amax=amax, key=key_for(spec)), None)
    return out


@partial(jax.jit, static_argnums=(0, 3, 4))
def by_pairs(producer, a, b, pairs, given):
    out = {}
    for pair in pairs:
        call = partial(PRODUCERS[producer], a, b, *pair, key=key_for(*pair))
        amax = tuple(given_amax(a.shape, s, t) for s, t in zip(pair, (False, True), strict=True)) if given else None
        alone, beside = call(amax=amax), call(amax=amax, return_values=True)
        tensors = quantize_pair(beside.values, *pair, amax=amax, key=key_for(*pair))
        out[tuple(map(name_of, pair))] = alone, beside, tensors
    return out


def check_bytes(f, producer, shape, dtype, which, given):
    a, b = operands(producer, shape, dtype)
    want = values(producer, a, b)
    for name, (alone, beside, tensors) in f(producer, a, b, tuple(which), given).items():
        assert_bitwise(beside.values, want, f"{name} y")
        assert_same_tensor(alone, Produced(*tensors), str(name))
        assert_same_tensor((beside.row, beside.col), tensors, f"{name} beside y")


found_or_given = pytest.mark.parametrize("given", [False, True], ids=["found", "given"])


@every_producer
@found_or_given
def test_bytes_by_spec(native, producer, given):
    check_bytes(by_specs, producer, (2, 32, 192), "bf16", SPECS, given)


@every_producer
@found_or_given
def test_bytes_by_pair(native, producer, given):
    check_bytes(by_pairs, producer, (2, 64, 192), "bf16", PAIRS, given)


@every_producer
@pytest.mark.parametrize(("shape", "dtype"), [((1, 16), "fp32"), ((3, 17, 48), "fp16"), ((48, 80), "fp32")], ids=str)
def test_bytes_of_odd_shapes(native, producer, shape, dtype):
    rows = shape[-2] % 16 == 0
    specs = [s for s in SPECS if s is not WINDOW64 and (rows or s.block_rows == 1)]
    check_bytes(by_specs, producer, shape, dtype, specs, given=True)
    check_bytes(by_specs, producer, shape, dtype, specs, given=False)
    if rows:
        check_bytes(by_pairs, producer, shape, dtype, [p for p in PAIRS if WINDOW64 not in p], given=True)


@pytest.mark.long
@every_producer
@found_or_given
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_by_every_spec_and_pair(native, producer, given, dtype):
    check_bytes(by_specs, producer, (80, 192), dtype, SUPPORTED_SPECS, given)
    check_bytes(by_pairs, producer, (128, 192), dtype, sorted(FUSED_PAIRS, key=repr), given)


@every_producer
@pytest.mark.parametrize(
    "pair",
    [(ROW_SCALED, None), pytest.param((NVFP4_SR, NVFP4_RHT_SR), marks=pytest.mark.long)],
    ids=["row", "pair"],
)
def test_the_reference_makes_the_same(producer, pair):
    a, b = operands(producer, (32, 48))
    amax = None if pair[1] is None else (given_amax(a.shape, pair[0]), given_amax(a.shape, pair[1], True))
    stochastic = {"key": key_for(*pair)} if pair[1] else {}
    f = partial(PRODUCERS[producer], a, b, *pair, amax=amax, return_values=True, **stochastic)
    assert_same_tensor(f(implementation="native"), f(implementation="reference"))


@every_producer
def test_what_is_one_pass(producer):
    """One primitive where no amax has to be found over y first; else y, then quantize."""

    def primitives(spec, col_spec=None, amax=None):
        a, b = operands(producer, (64, 64))
        f = lambda a, b: PRODUCERS[producer](a, b, spec, col_spec, amax=amax)  # noqa: E731
        return [e.primitive.name for e in jax.make_jaxpr(f)(a, b).eqns if e.primitive.name.startswith("nvfp4")]

    one, two = jnp.float32(1), (jnp.float32(1), jnp.float32(1))
    for arguments in ((ROW_SCALED,), (WINDOW64,), (NVFP4, None, one), (NVFP4, NVFP4, two), (WINDOW64, WINDOW64)):
        assert primitives(*arguments) == ["nvfp4_produce"]
    assert primitives(NVFP4) == ["nvfp4_produce", "nvfp4_quantize"]
    assert primitives(NVFP4, NVFP4) == ["nvfp4_produce", "nvfp4_quantize_pair"]
    assert primitives(NVFP4, NVFP4, (one, None)) == ["nvfp4_produce", "nvfp4_quantize_pair"]


@every_producer
def test_instruction_sets(both, producer):  # noqa: F811
    a, b = operands(producer, (3, 17, 80), "fp16")
    assert_same_tensor(*both(lambda: PRODUCERS[producer](a, b, ROW_SCALED, return_values=True)))


# ---------------------------------------------------------------- transforms
KEY = jax.random.key(5)
VMAPS = {"both": (0, 0), "first": (0, None), "second": (None, 0), "last_axis": (2, None)}


@every_producer
@pytest.mark.parametrize("axes", VMAPS.values(), ids=VMAPS)
def test_vmap_is_a_loop(native, producer, axes):
    def f(a, b):
        q = PRODUCERS[producer](a, b, NVFP4_SR, amax=jnp.float32(2), key=KEY)
        if a.shape[0] % 64:
            return q, PRODUCERS[producer](a, b, ROW_SCALED, return_values=True)
        return q, PRODUCERS[producer](a, b, WINDOW64, WINDOW64, return_values=True)

    size, parts = 3, []
    for axis, shape in zip(axes, ((64, 64), (64,) if producer == "norm" else (64, 64)), strict=True):
        shape = shape if axis is None else (*shape[:axis], size, *shape[axis:])
        parts.append(normal(shape, len(parts)))
    got = jax.jit(jax.vmap(f, axes))(*parts)
    for i in range(size):
        one = [p if axis is None else jnp.take(p, i, axis) for p, axis in zip(parts, axes, strict=True)]
        assert_same_tensor(jax.tree.map(lambda v, i=i: v[i], got), f(*one))


def test_vmap_of_a_weight_beside_leading_axes(native):
    x, weight = normal((2, 3, 4, 48)), normal((2, 48), 1)
    got = jax.vmap(lambda x, w: rms_norm_quantize(x, w, ROW_SCALED))(x, weight)
    for i in range(2):
        assert_same_tensor(jax.tree.map(lambda v, i=i: v[i], got), rms_norm_quantize(x[i], weight[i], ROW_SCALED))


@every_producer
def test_jit_equals_eager_and_empty_is_empty(native, producer):
    a, b = operands(producer, (17, 48))
    f = partial(PRODUCERS[producer], row_spec=NVFP4, return_values=True)
    assert_same_tensor(jax.jit(f)(a, b), f(a, b))
    empty = f(a[:0], b if producer == "norm" else b[:0])
    assert empty.row.shape == empty.values.shape == (0, 48)


# ---------------------------------------------------------------- meshes
LAYOUTS = [("xy", P("x", "y")), ("xy", P(("x", "y"), None)), ("x", P(None, "x"))]


def sharded_results(producer, a, b):
    f = PRODUCERS[producer]
    amax = jnp.float32(2)
    return {
        "given": f(a, b, amax=amax),
        "found": f(a, b, return_values=True),
        "row": f(a, b, ROW_SCALED, return_values=True),
        "window": f(a, b, WINDOW64),
        "stochastic": f(a, b, NVFP4_SR, NVFP4_RHT_SR, amax=(amax, amax), key=KEY),
        "tiles": f(a, b, NVFP4_2D, amax=amax),
    }


@pytest.mark.parametrize("spec", [P("x", None, None), P("x", "y", None), P(None, "y", None)], ids=str)
def test_sharded_norms_with_a_weight_for_each_example(devices, spec):
    mesh, x, weight = make_mesh(devices, "xy"), normal((2, 64, 128)), normal((2, 128), 1)
    f = jax.jit(jax.vmap(lambda x, w: rms_norm_quantize(x, w, ROW_SCALED)))
    got = f(put(x, mesh, spec), put(weight, mesh, P(spec[0], None)))
    assert_same_tensor(got, f(*(jax.device_put(v, devices[0]) for v in (x, weight))))
    assert_sharded(got.row.data, mesh, spec)


@every_producer
@pytest.mark.parametrize(("axes", "spec"), LAYOUTS, ids=lambda v: str(v).replace(" ", ""))
def test_sharded_equals_unsharded(devices, producer, axes, spec):
    a, b = operands(producer, (512, 1024))
    mesh = make_mesh(devices, axes)
    second = P(spec[-1]) if producer == "norm" else spec
    f = partial(sharded_results, producer)
    got = jax.jit(f)(put(a, mesh, spec), put(b, mesh, second))
    home = [jax.device_put(v, devices[0]) for v in (a, b)]
    assert_same_tensor(got, jax.jit(f)(*home))
    if producer == "gate" or spec[1] is None:  # XLA may split what a norm was gathered for
        assert_sharded(got["given"].row.data, mesh, spec)
        assert_sharded(got["row"].values, mesh, spec)
        assert_sharded(got["stochastic"].col.data, mesh, P(*reversed(spec)))


def test_a_gate_reduces_only_the_amax(devices):
    mesh = make_mesh(devices, "x")
    a, b = (put(v, mesh, P(None, "x")) for v in operands("gate", (32, 1024)))
    _, found = run(partial(silu_mul_quantize, row_spec=ROW_SCALED), a, b)
    assert found == [("all-reduce", "u32[32]")]
    _, found = run(lambda a, b: silu_mul_quantize(a, b, amax=jnp.float32(2)), a, b)
    assert found == []


def test_a_norm_keeps_its_rows_whole(devices):
    mesh = make_mesh(devices, "x", "explicit")
    x, weight = operands("norm", (32, 1024))
    with pytest.raises(ValueError, match=r"rms_norm_quantize: axis 1 of shape \(32, 1024\) is sharded over 'x'"):
        jax.jit(rms_norm_quantize)(put(x, mesh, P(None, "x")), weight)
    got = jax.jit(rms_norm_quantize)(put(x, mesh, P("x", None)), put(weight, mesh, P(None)))
    assert got.row.data.sharding.spec == P("x", None)


@every_producer
def test_shard_map(devices, producer):
    mesh = make_mesh(devices, "x")
    a, b = operands(producer, (16 * len(devices), 64))
    specs = (P("x"), P() if producer == "norm" else P("x"))
    f = partial(PRODUCERS[producer], row_spec=ROW_SCALED, return_values=True)
    placed = [put(v, mesh, s) for v, s in zip((a, b), specs, strict=True)]
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x")))(*placed)
    assert_same_tensor(got, f(*(jax.device_put(v, devices[0]) for v in (a, b))))


# ---------------------------------------------------------------- gradients
def norm_in_float32(x, weight):
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def gate_in_float32(gate, up):
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)


FORMULAS = {"norm": norm_in_float32, "gate": gate_in_float32}


@every_producer
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(native, producer, dtype):
    """Those of the float32 formula, of a loss that weighs y."""
    a, b = operands(producer, (2, 24, 80), dtype)
    cotangent = normal(a.shape, 3).astype(jnp.float32)  # what y.dtype holds exactly

    def loss(f):
        return lambda a, b: jnp.sum(f(a, b).astype(jnp.float32) * cotangent)

    y = lambda a, b: PRODUCERS[producer](a, b, ROW_SCALED, return_values=True).values  # noqa: E731
    got = jax.jit(jax.grad(loss(y), (0, 1)))(a, b)
    want = jax.grad(loss(FORMULAS[producer]), (0, 1))(a, b)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        scale = float(jnp.max(jnp.abs(w.astype(jnp.float32))))
        tolerance = 2.0 ** {"fp32": -18, "bf16": -7, "fp16": -9}[dtype]
        np.testing.assert_allclose(g.astype(jnp.float32), w.astype(jnp.float32), tolerance, tolerance * scale)


@every_producer
def test_the_tensors_have_no_gradient(producer):
    a, b = operands(producer, (16, 64), "fp32")
    amaxes = lambda a, b: jnp.sum(PRODUCERS[producer](a, b, ROW_SCALED, return_values=True).row.amax)  # noqa: E731
    assert all(not np.any(np.asarray(g)) for g in jax.grad(amaxes, (0, 1))(a, b))
    with pytest.raises(NotImplementedError, match="nvfp4_produce has no derivative"):
        jax.grad(lambda a: jnp.sum(PRODUCERS[producer](a, b, ROW_SCALED).row.amax))(a)


def test_gradients_in_shard_map_sum_over_a_shared_weight(devices):
    mesh = make_mesh(devices, "x")
    x, weight = operands("norm", (16 * len(devices), 64), "fp32")

    def loss(x, weight):
        return jax.lax.psum(jnp.sum(rms_norm_quantize(x, weight, ROW_SCALED, return_values=True).values), "x")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    placed = [put(v, mesh, s) for v, s in zip((x, weight), (P("x"), P()), strict=True)]
    got = jax.jit(jax.grad(lambda *v: mapped(*v).astype(jnp.float32), 1))(*placed)
    want = jax.grad(lambda w: jnp.sum(norm_in_float32(x, w)))(weight)
    np.testing.assert_allclose(got, want, 1e-4, 1e-3)


def test_gradients_in_shard_map_where_only_the_key_differs(devices):
    """The values are the same on every device, whatever the key rounds to."""
    mesh = make_mesh(devices, "x")
    x, weight = operands("norm", (16, 64), "fp32")

    def values(weight):
        key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("x"))
        return jnp.sum(rms_norm_quantize(x, weight, NVFP4_SR, key=key, return_values=True).values)

    got = jax.jit(jax.shard_map(jax.grad(values), mesh=mesh, in_specs=P(), out_specs=P()))(weight)
    want = jax.grad(lambda w: len(devices) * jnp.sum(norm_in_float32(x, w)))(weight)
    np.testing.assert_allclose(got, want, 1e-4, 1e-3)


RECIPES = {
    "plain": (Recipe(), (NVFP4, NVFP4)),
    "row_only": (Recipe(), (NVFP4, None)),
    "row_scaled": (recipes.row_scaled(stochastic_rounding=False), (ROW_SCALED, ROW_SCALED)),
    "pretrain": (recipes.pretrain(), (NVFP4, NVFP4_RHT)),
    "inference": (recipes.inference(), (NVFP4, None)),
}


@pytest.mark.parametrize(("recipe", "pair"), RECIPES.values(), ids=RECIPES)
def test_linear_takes_what_was_quantized(recipe, pair):
    """The result and every gradient of the composition that quantizes y itself."""
    (x, weight), w = operands("norm", (32, 64)), normal((48, 64), 8)
    key = KEY if recipe.stochastic else None

    def layer(fused, x, weight, w):
        produced = rms_norm_quantize(x, weight, *pair, return_values=True)
        out = linear(produced.values, w, recipe, key=key, quantized=produced if fused else None)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    with jax.default_device(jax.devices("cpu")[0]):
        run = [jax.jit(jax.value_and_grad(partial(layer, f), (0, 1, 2), has_aux=True)) for f in (True, False)]
        fused, plain = (f(x, weight, w) for f in run)
    assert_same_tensor(fused, plain)


@pytest.mark.parametrize("form", ["produced", "tensors"])
@pytest.mark.parametrize("col_spec", [None, NVFP4_RHT], ids=["row", "pair"])
def test_linear_reads_what_was_quantized_and_nothing_else(col_spec, form):
    """Of another array, so that it shows: the product, and the gradient of w if its operand is passed too."""
    (x, weight), other, w = operands("norm", (32, 64)), normal((32, 64), 6), normal((48, 64), 8)
    produced = rms_norm_quantize(other, weight, NVFP4, col_spec, return_values=True)
    z = produced.values
    q = produced if form == "produced" else produced.row if col_spec is None else (produced.row, produced.col)
    with jax.default_device(jax.devices("cpu")[0]):
        out, gradient = jax.vjp(lambda w: linear(x, w, quantized=q), w)
        want, wanted_gradient = jax.vjp(lambda w: linear(z, w), w)
        assert_bitwise(linear(x, w, quantized=q), want)
        assert_bitwise(out, want)
        from_x = jax.vjp(lambda w: linear(x, w), w)[1](want)
        assert_same_tensor(gradient(want), from_x if col_spec is None else wanted_gradient(want))


@every_producer
def test_a_key_that_nothing_uses_is_ignored(producer):
    a, b = operands(producer, (16, 64))
    f = PRODUCERS[producer]
    assert_same_tensor(f(a, b, NVFP4, NVFP4, key=KEY), f(a, b, NVFP4, NVFP4))
    for values in (False, True):
        assert_same_tensor(f(a, b, key="no key", return_values=values), f(a, b, return_values=values))


# ---------------------------------------------------------------- errors
def a(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ERRORS = {
    "norm K": (
        rms_norm_quantize,
        [a(4, 40), a(40)],
        {},
        ValueError,
        r"K must be a multiple of 16, got x.shape=\(4, 40",
    ),
    "gate K": (silu_mul_quantize, [a(4, 40), a(4, 40)], {}, ValueError, r"multiple of 16, got gate.shape=\(4, 40\)"),
    "norm dtype": (rms_norm_quantize, [a(4, 16, dtype=jnp.int32), a(16)], {}, TypeError, "x must be .* got int32"),
    "weight dtype": (
        rms_norm_quantize,
        [a(4, 16), a(16, dtype=jnp.int32)],
        {},
        TypeError,
        "weight must be .* got int32",
    ),
    "weight shape": (rms_norm_quantize, [a(4, 16), a(32)], {}, ValueError, r"shape \(K,\)=\(16,\), got \(32,\)"),
    "weight rank": (
        rms_norm_quantize,
        [a(4, 16), a(4, 16)],
        {},
        ValueError,
        r"rank 1, \[K\], got weight.shape=\(4, 16",
    ),
    "up shape": (silu_mul_quantize, [a(4, 16), a(4, 32)], {}, ValueError, r"the same shape .* float32\(4, 32\)"),
    "up dtype": (silu_mul_quantize, [a(4, 16), a(4, 16, dtype=BF16)], {}, ValueError, "got float32.* and bfloat16"),
    "rank": (rms_norm_quantize, [a(16), a(16)], {}, ValueError, r"x must have rank 2 or more, .* got x.shape=\(16,\)"),
    "tiles": (
        silu_mul_quantize,
        [a(4, 16), a(4, 16)],
        {"row_spec": NVFP4_2D},
        ValueError,
        "block_rows=16 .* gate.shape",
    ),
    "columns": (silu_mul_quantize, [a(4, 16), a(4, 16)], {"col_spec": NVFP4}, ValueError, "M .the quantized axis.* 16"),
    "eps": (rms_norm_quantize, [a(4, 16), a(16)], {"eps": 0.0}, ValueError, "eps must be a positive normal .* got 0.0"),
    "eps type": (rms_norm_quantize, [a(4, 16), a(16)], {"eps": "x"}, TypeError, "eps must be a number, got 'x'"),
    "spec": (
        rms_norm_quantize,
        [a(4, 16), a(16)],
        {"row_spec": "nvfp4"},
        TypeError,
        "row_spec must be a QuantSpec, got 'nvfp4'",
    ),
    "col spec": (
        silu_mul_quantize,
        [a(16, 16), a(16, 16)],
        {"col_spec": 4},
        TypeError,
        "col_spec must be a QuantSpec, got 4",
    ),
    "a pair of amax without col_spec": (
        rms_norm_quantize,
        [a(16, 16), a(16)],
        {"amax": (1.0, 1.0)},
        ValueError,
        r"amax must have shape \(\) .*, got \(2,\)",
    ),
    "key": (silu_mul_quantize, [a(4, 16), a(4, 16)], {"row_spec": NVFP4_SR}, ValueError, "key must be a JAX PRNG key"),
    "pair amax": (
        rms_norm_quantize,
        [a(16, 16), a(16)],
        {"col_spec": NVFP4, "amax": 1.0},
        ValueError,
        r"amax must be None or a pair \(row_amax, col_amax\), got 1.0",
    ),
    "amax shape": (
        rms_norm_quantize,
        [a(4, 16), a(16)],
        {"amax": np.ones(3, F32)},
        ValueError,
        r"amax must have shape \(\)",
    ),
    "values": (rms_norm_quantize, [a(4, 16), a(16)], {"return_values": 1}, ValueError, "return_values must be True or"),
    "implementation": (
        rms_norm_quantize,
        [a(4, 16), a(16)],
        {"implementation": "x"},
        ValueError,
        "implementation must",
    ),
}


@pytest.mark.parametrize(("f", "arrays", "arguments", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors(f, arrays, arguments, error, text):
    with pytest.raises(error, match=f"^{f.__name__}: .*{text}"):
        jax.eval_shape(partial(f, **arguments), *arrays)


T = quantize(jnp.ones((16, 64)))
COLS = quantize(jnp.ones((16, 64)), transpose=True)
W64 = Recipe(wgrad=(WINDOW64, NVFP4))
# x's shape, quantized, recipe, text
QUANTIZED_ERRORS = {
    "no tensor": ((16, 64), "x", Recipe(), "quantized must be a Produced, an NVFP4Tensor or a pair of them, got 'x'"),
    "three": ((16, 64), (T, None, None), Recipe(), "quantized must be a Produced, an NVFP4Tensor or a pair of them"),
    "pair of arrays": ((16, 64), (1, 2), Recipe(), "quantized.row must be an NVFP4Tensor or None, got 1"),
    "rank": (
        (2, 8, 64),
        T,
        Recipe(),
        r"x must have rank 2, .*, where quantized is passed, got x.shape=\(2, 8, 64\); fl",
    ),
    "format": (
        (16, 64),
        quantize(jnp.ones((16, 64)), ROW_SCALED),
        Recipe(),
        r"quantized.row must have the format of recipe.fprop.x, Format\(.*'tensor'.*, got Format\(.*'row'",
    ),
    "shape": ((32, 64), T, Recipe(), r"quantized.row must have shape \(32, 64\), got \(16, 64\)"),
    "columns, shape": ((16, 64), (None, T), Recipe(), r"quantized.col must have shape \(64, 16\), got \(16, 64\)"),
    "columns": (
        (16, 64),
        Produced(T, COLS),
        recipes.inference(),
        "quantized.col must be None, since the recipe has no recipe.wgrad.x to read it by, got Format",
    ),
    "weight only": (
        (16, 64),
        T,
        recipes.inference(weight_only=True),
        "quantized.row must be None, since the recipe has no recipe.fprop.x to read it by",
    ),
    "tokens": (
        (16, 64),
        (T, COLS),
        W64,
        r"M must be a multiple of 64 where quantized.col is passed, since recipe.wgrad contracts over it, got x.shape="
        r"\(16, 64\); pad x before it is quantized, or pass quantized.row alone",
    ),
}


@pytest.mark.parametrize(("shape", "quantized", "recipe", "text"), QUANTIZED_ERRORS.values(), ids=QUANTIZED_ERRORS)
def test_linear_refuses_what_it_would_not_make(shape, quantized, recipe, text):
    with pytest.raises(ValueError, match=f"^linear: {text}"):
        linear(normal(shape), normal((32, 64)), recipe, quantized=quantized)


def test_tokens_need_no_multiple_without_the_columns(devices):
    """Then x is padded and quantized for wgrad in linear."""
    w = normal((64, 64))
    y, pull = jax.vjp(lambda w: linear(jnp.ones((16, 64)), w, W64, quantized=T), w)
    assert pull(y)[0].shape == w.shape
