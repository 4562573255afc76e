"""``jnvfp4.stats``: the statistics of layers equal a NumPy count, under every transform of a training step."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import elements, make_mesh, put, run, shard

import jnvfp4
from jnvfp4 import (
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    QuantizedWeight,
    Recipe,
    calibration,
    recipes,
    reference,
    stats,
)
from jnvfp4._core.softfloat import from_bits, to_bits
from jnvfp4._layers import layer
from jnvfp4._layers import stats as stats_of_layers

SEEDS = range(5)  # 50 cases with the ten of CONFIGS
KEY = jax.random.key(3)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
rotated = jax.jit(reference.rht16)


@dataclass(frozen=True)
class Config:
    """What a layer is called with. y and so dy are float32."""

    recipe: Recipe
    shape: tuple[int, ...]  # of x
    columns: int = 48  # of y
    dtype: str = "bfloat16"
    w_dtype: str = "float32"
    options: tuple = ()  # of linear

    def linear(self, x, w, probe):
        options = {"key": KEY, "out_dtype": jnp.float32, **dict(self.options)}
        return jnvfp4.linear(x, w, self.recipe, stats=probe, **options)


ROTATED = Recipe((NVFP4_RHT, NVFP4_RHT), (NVFP4_RHT_SR, NVFP4_RHT), "dequantized")
CONFIGS = {
    "pretrain": Config(recipes.pretrain(), (32, 64)),
    "rotated": Config(ROTATED, (48, 64), dtype="float32"),
    "rows": Config(recipes.row_scaled(), (2, 512, 64), dtype="float16"),  # so many rows that one in eight is measured
    "windows": Config(recipes.window64(), (16, 64, 128), 64),  # as here
    "4over6": Config(recipes.four_over_six("all"), (32, 96), dtype="float32", w_dtype="bfloat16"),
    "tiles": Config(Recipe((NVFP4_2D, NVFP4_2D), (NVFP4_SR, NVFP4_2D)), (32, 64), 32),
    "only gradients": Config(replace(recipes.pretrain(), fprop=None), (40, 64)),  # tokens are padded to 48
    "weight-only": Config(recipes.inference(weight_only=True), (24, 64)),
    "rl": Config(recipes.rl(four_over_six=True), (40, 80), dtype="float16"),
    "kn": Config(recipes.pretrain_4over6(requantize=True), (32, 64), options=(("w_axes", "kn"),)),
}


def random(shape, dtype, seed):
    """Magnitudes over many powers of two, zeros, and outliers; every third array is tiny or huge as a whole."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 3, size=shape)) * (rng.random(shape) > 0.2)
    x[..., ::17] *= 20
    x[..., ::5, 16:32] = 0  # and scales that are subnormal
    x[..., 1::5, 32:48] *= 2.0**-12
    scale = 2.0 ** [0, 10, -60][seed % 3] if dtype != "float16" else 1
    return jnp.asarray(x * scale, dtype)


def operands(config, seed):
    """Two different x, w and dy."""
    shape = (2, config.columns, config.shape[-1])
    w = random(shape, config.w_dtype, 3 * seed + 1)
    x, dy = (random((2, *config.shape[:-1], n), dtype, 3 * seed + i) for i, n, dtype in (
        (0, config.shape[-1], config.dtype), (2, config.columns, "float32"),
    ))  # fmt: skip
    return x, jnp.swapaxes(w, 1, 2) if dict(config.options).get("w_axes") == "kn" else w, dy


# ---------------------------------------------------------------- the count in NumPy
def count(x, t) -> np.ndarray:
    """The row of one tensor, in float64."""
    if x is None:
        return np.zeros(7)
    blocks = to_bits(jnp.asarray(x)).reshape(*t.scale.shape, 16)
    blocks = rotated(blocks) if t.format.rht else blocks
    x64 = np.abs(np.asarray(from_bits(blocks), np.float64))
    scale = np.asarray(t.scale).view(np.uint8)
    amax = np.asarray(reference.per_block(t.amax, t.ndim, t.format.amax_scope), np.float64)
    codes = E2M1[np.asarray(reference.unpack_codes(t.data)) & 7].reshape(x64.shape)
    step = np.where(scale == 0, 0, scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    step = (step * amax / (6 * t.format.e4m3_max))[..., None]
    if np.prod(scale.shape[:-1]) >= 512:
        x64, codes, step = (of[..., ::16, :, :] for of in (x64, codes, step))
        scale = scale[..., ::16, :]
    shares = [
        np.mean(x64 != 0),
        np.mean((x64 != 0) & (codes == 0)),
        np.mean((x64 > 6 * (1 + 2**-20) * step) & (step != 0)),
        np.mean((scale & 0x78 == 0) & (scale & 7 != 0)),
    ]
    error = np.sqrt(np.sum((codes * step - x64) ** 2) / np.sum(x64**2))
    return np.array([1, *shares, error, np.max(np.abs(t.amax))])


def counted(made) -> np.ndarray:
    """The count of what a layer made of an array: of the tensor along K, else of the transposed one."""
    (row, col), x = made.pair, np.asarray(made.array)
    if row is not None or col is None:
        return count(x if row is not None else None, row)
    turned = np.swapaxes(x, -1, -2) if made.matrices else np.moveaxis(x, -1, 0)
    more = col.shape[-1] - turned.shape[-1]
    found = count(np.pad(turned, [(0, 0)] * (x.ndim - 1) + [(0, more)]), col)
    found[1:4] *= np.prod(col.shape) / x.size  # zeros that were added are no elements
    return found


def want(config, x, w, dy) -> np.ndarray:
    """The counts of what the layer makes of x, w and dy in an eager gradient."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(layer.statistics, name, lambda probe, *made: (found.extend(made), probe)[1])
        _, pull = jax.vjp(partial(config.linear, x, w), stats.probe())
        pull(dy)
    assert len(found) == 3
    return np.stack([counted(made) for made in found])


# ---------------------------------------------------------------- one layer as a step has it
def one(config, x, w, dy, probe):
    return jnp.sum(config.linear(x, w, probe) * dy)


def plain(config, x, w, dy):
    return jax.grad(partial(one, config), 3)(x[0], w[0], dy[0], stats.probe())[None]


def remat(policy, config, x, w, dy):
    f = jax.checkpoint(config.linear, policy=policy)
    return jax.grad(lambda probe: jnp.sum(f(x[0], w[0], probe) * dy[0]))(stats.probe())[None]


def microbatches(config, x, w, dy):
    """Of one weight, by a loop over gradients."""
    grad = jax.grad(lambda probe, x, dy: one(config, x, w[0], dy, probe))
    add = lambda total, of: (total + grad(stats.probe(), *of), None)  # noqa: E731
    return lax.scan(add, jnp.zeros((3, 7)), (x, dy))[0][None]


def layers(config, x, w, dy):
    """Of two layers, in the loop that is differentiated."""

    def loss(probes):
        return lax.scan(lambda total, of: (total + one(config, *of), None), 0.0, (x, w, dy, probes))[0]

    return jax.grad(loss)(stats.probe(True, (2,)))


def mapped(config, x, w, dy):
    losses = jax.vmap(partial(one, config), (0, 0, 0, None))
    return jax.grad(lambda probe: jnp.sum(losses(x, w, dy, probe)))(stats.probe())[None]


# Of two x, w and dy: the statistics of the first, of both, their sum, or the sum for both x and dy with the first w.
DRIVERS = {
    "plain": (plain, "first"),
    "remat": (partial(remat, None), "first"),
    "save_packed": (partial(remat, jnvfp4.remat.save_packed), "first"),
    "microbatches": (microbatches, "one w"),
    "layers": (layers, "both"),
    "vmap": (mapped, "sum"),
    "auto": (plain, "first"),
    "explicit": (plain, "first"),
}


def placed(kind, x, w, dy):
    """The operands over eight devices; on an Explicit mesh only what needs no gather."""
    mesh = make_mesh(jax.devices("cpu")[:8], "xy", kind)
    splits = kind == "auto" or x.shape[1] % 32 == 0 or x.ndim > 3
    rows = P(None, "x" if splits else None, *(None,) * (x.ndim - 2))
    specs = (rows, P() if kind == "explicit" else P(None, None, "y"), rows)
    return [put(v, mesh, spec) for v, spec in zip((x, w, dy), specs, strict=True)]


def assert_counts(got, want):
    """Shares and the amax by their rounding to float32, errors by their sums in float32."""
    assert got.shape == want.shape
    off = np.abs(np.asarray(got, np.float64) - want)
    assert np.all(off <= np.abs(want) * np.array([0, *4 * [2e-7], 1e-5, 2e-7])), (got, want)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_statistics_equal_a_count_in_numpy(config, driver, cpu):
    f, of = DRIVERS[driver]
    run = jax.jit(partial(f, config))
    for seed in SEEDS:
        x, w, dy = operands(config, seed)
        count = 1 if of == "first" else 2
        counts = np.stack([want(config, x[i], w[0 if of == "one w" else i], dy[i]) for i in range(count)])
        got = run(*(placed(driver, x, w, dy) if driver in ("auto", "explicit") else (x, w, dy)))
        assert_counts(got, counts.sum(0, keepdims=True) if of in ("sum", "one w") else counts)


# ---------------------------------------------------------------- a probe that is off, and none
SMALL = CONFIGS["pretrain"]


def first(config, seed=0):
    return [v[0] for v in operands(config, seed)]


def test_a_traced_flag_chooses_between_two_gradients():
    x, w, dy = first(SMALL)
    with_probe = jax.grad(partial(one, SMALL), 3)
    off = lambda: jnp.zeros_like(stats.probe())  # noqa: E731
    step = jax.jit(lambda on: jax.lax.cond(on, lambda: with_probe(x, w, dy, stats.probe()), off))
    assert not step(False).any()
    assert_counts(step(True), np.asarray(plain(SMALL, *operands(SMALL, 0))[0], np.float64))


@pytest.mark.parametrize("shape", [3, (-3,), (2.0,)])
def test_shapes_of_probes_are_checked(shape):
    with pytest.raises(TypeError, match=r"probe: shape must be a tuple of integers, none below 0, got"):
        stats.probe(True, shape)


def instructions(f, *args) -> list[str]:
    """The optimized program without names of instructions and places in this file."""
    text = jax.jit(f).lower(*args).compile().as_text().split("\n\n", 1)[1]
    return sorted(re.sub(r"%?[\w.-]+\.\d+|, metadata=\{[^}]*\}|frontend_attributes=\{[^}]*\}", "", text).splitlines())


def test_without_a_probe_the_program_is_that_without_statistics(monkeypatch):
    """No line of it is another's; and a program with a probe computes the same results by the same instructions."""
    x, w, dy = first(SMALL)
    grad = lambda *args: jax.grad(partial(one, SMALL), (0, 1))(*args)  # noqa: E731
    assert stats.probe(False) is None
    with_dead_probe = instructions(lambda x, w, dy: grad(x, w, dy, stats.probe()), x, w, dy)
    monkeypatch.setattr(stats_of_layers, "measure", None)  # which nothing calls
    assert instructions(lambda x, w, dy: grad(x, w, dy, None), x, w, dy) == with_dead_probe


@pytest.mark.parametrize("policy", [None, jnvfp4.remat.save_packed], ids=["plain", "save_packed"])
def test_a_probe_keeps_no_original(policy, capsys):
    """But 84 bytes."""
    f = jax.checkpoint(SMALL.linear, policy=policy) if policy else SMALL.linear
    sizes = []
    for probe in (None, stats.probe()):
        _, pull = jax.vjp(lambda x, w, probe=probe: f(x, w, probe), *first(SMALL)[:2])
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(pull)))
    assert 0 <= sizes[1] - sizes[0] <= 2 * 84


# ---------------------------------------------------------------- devices
def test_devices_exchange_scalars(cpu):
    """Four counts and two sums of each tensor."""
    x, w, dy = placed("auto", *operands(SMALL, 0))
    grads = {
        "without": jax.grad(lambda x, w, dy: one(SMALL, x, w, dy, None), (0, 1)),
        "with": lambda *args: jax.grad(partial(one, SMALL), (0, 1, 3))(*args, stats.probe()),
    }
    found = {name: run(f, x[0], w[0], dy[0])[1] for name, f in grads.items()}
    sums, others = (
        {name: [c for c in of if (c[0] == "all-reduce") == reduces] for name, of in found.items()}
        for reduces in (True, False)
    )
    assert others["with"] == others["without"]
    counts = {name: sum(elements(shape) for _, shape in of) for name, of in sums.items()}
    assert counts["with"] - counts["without"] == 3 * 7


def test_blocks_that_devices_split_along_k_count_once(cpu):
    x, mesh = random((64, 256), "float32", 0), make_mesh(jax.devices("cpu")[:8], "x")
    t, spec = jnvfp4.quantize(x), P(None, "x")
    measure = lambda x, t: stats_of_layers.measure(x, t, x.size)  # noqa: E731
    got, collectives = run(measure, put(x, mesh, spec), shard(t, mesh, spec))
    assert_counts(got[None], count(x, t)[None])
    assert {op for op, _ in collectives} == {"all-reduce"}


def test_devices_of_a_shard_map_are_calls(cpu):
    """Each measures its part, which here is the whole."""
    x, w, dy = first(SMALL)
    mesh = make_mesh(jax.devices("cpu")[:8], "x")
    local = lambda x, probe: one(SMALL, x, w, dy, probe)[None]  # noqa: E731
    losses = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    got = jax.jit(jax.grad(lambda x, probe: jnp.sum(losses(x, probe)), 1))(jnp.concatenate([x] * 8), stats.probe())
    assert_counts(got, 8 * want(SMALL, x, w, dy))


RECIPES = {"none": Recipe(None, None, None), "inference": recipes.inference(), "pretrain": recipes.DEFAULT}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("w", ["array", "frozen"])
def test_the_hessian_of_a_layer(cpu, recipe, w):
    """Of x before it is quantized; microbatches, scans and devices add theirs."""
    x, dense, dy = operands(SMALL, 0)
    if w == "frozen":
        recipe, dense = recipes.inference(), [jnvfp4.quantize(of) for of in dense]
    loss = lambda h, x: jnp.sum(jnvfp4.linear(x, dense[0], recipe, stats=h).astype(jnp.float32))  # noqa: E731
    grad, zeros = jax.jit(jax.grad(loss)), jnp.zeros((64, 64))
    np.testing.assert_array_equal(grad(zeros, x), calibration.hessian(x))
    add = lambda total, of: (total + grad(zeros, of), None)  # noqa: E731
    on_devices, *_ = placed("auto", x, dense, dy) if w == "array" else (x,)
    for got in (jax.lax.scan(add, zeros, x)[0], grad(zeros, on_devices)):
        np.testing.assert_allclose(got, calibration.hessian(x), rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- other layers and weights
def statistics(f) -> stats.StepStats:
    return stats.read(jax.jit(jax.grad(f))(stats.probe()))


def test_weights_that_are_quantized_before_have_their_statistics(cpu):
    x, w, dy = first(SMALL)
    weight = QuantizedWeight.of(w, SMALL.recipe)
    assert_counts(jax.grad(lambda probe: one(SMALL, x, weight, dy, probe))(stats.probe()), want(SMALL, x, w, dy))


def test_frozen_weights_have_none(cpu):
    x, w, dy = first(SMALL)
    got = statistics(lambda probe: one(SMALL, x, jnvfp4.quantize(w, NVFP4_2D), dy, probe))
    assert [float(of.calls) for of in got] == [1, 0, 0]  # dx is in high precision
    assert float(got.x.underflow_share) > 0
    assert not any(jax.tree.leaves(got.w) + jax.tree.leaves(got.dy))


def test_experts_count_together(cpu):
    x, _, dy = first(SMALL)
    w, sizes = jnp.stack([random((48, 64), "float32", i) * 4.0**i for i in range(3)]), jnp.array([10, 0, 14], jnp.int32)
    got = statistics(lambda p: jnp.sum(jnvfp4.grouped_linear(x, w, sizes, out_dtype=jnp.float32, stats=p) * dy))
    made = jax.vmap(partial(jnvfp4.quantize, spec=NVFP4_2D))(w)
    held = jnp.where(jnp.arange(32)[:, None] < 24, x, 0)
    counts = np.stack([count(held, jnvfp4.quantize(held)), count(w, made)])
    assert_counts(np.stack([jax.tree.leaves(got.x), jax.tree.leaves(got.w)]), counts)
    assert float(got.dy.calls) == 1


def test_examples_of_a_batch_axis_are_calls(cpu):
    x, w, _ = operands(SMALL, 0)
    numbers = (((2,), (2,)), ((0,), (0,)))
    by = {
        "dot_general": lambda p: jnvfp4.dot_general(x, w, numbers, stats=p),
        "einsum": lambda p: jnvfp4.einsum("bmk,bnk->bmn", x, w, stats=p),
    }
    got = {name: statistics(lambda p, f=f: jnp.sum(jnp.sin(f(p).astype(jnp.float32)))) for name, f in by.items()}
    counts = sum(count(x[i], jnvfp4.quantize(x[i])) for i in range(2))
    for of in got.values():
        assert_counts(np.stack(jax.tree.leaves(of.x)), counts / [1, *6 * [2]])
        assert float(of.w.calls) == float(of.dy.calls) == 2


def test_special_values_are_shown(cpu):
    x, w, dy = first(SMALL)
    zero = statistics(lambda p: one(SMALL, 0 * x, w, dy, p)).x
    assert jax.tree.leaves(zero) == [1, 0, 0, 0, 0, 0, 0]
    bad = statistics(lambda p: one(SMALL, x.at[3, 5].set(jnp.nan), w, dy, p)).x
    assert np.isnan(bad.relative_error)
    assert np.isnan(bad.amax)
    for value in (jnp.nan, jnp.inf, 1e30):  # in a row of many that is not looked at
        x_of_many = jnp.tile(x, (32, 1)).at[5, 7].set(value)
        unseen = statistics(lambda p, x=x_of_many: jnp.sum(jnp.sin(SMALL.linear(x, w, p)))).x
        assert np.isnan(unseen.relative_error), value
    subnormal = statistics(lambda p: one(SMALL, x, w, jnp.full_like(dy, 1e-40), p)).dy
    assert float(subnormal.relative_error) == 0


def test_float32_subnormals_are_not_zero(cpu):
    """XLA and NumPy flush them in arithmetic alone."""
    x = jnp.ones((32, 128), jnp.float32).at[7].set(jnp.float32(1e-40))
    counts = stats_of_layers.measure(x, jnvfp4.quantize(x), x.size)
    assert (float(counts[1]), float(counts[2])) == (1, 1 / 32)  # nonzero, of which those of a row became 0


def test_sums_over_many_elements_do_not_drift(cpu):
    """A float32 sum of one element after another would be 1 % off here."""
    x = jax.random.normal(jax.random.key(0), (511, 65536))
    t = jnvfp4.quantize(x)
    np.testing.assert_allclose(stats_of_layers.measure(x, t, x.size)[5], count(x, t)[5], rtol=1e-4)


# ---------------------------------------------------------------- models, by the paths of their layers
NEAREST = jnvfp4.Policy(default=recipes.DEFAULT, keep=())
NOTHING = jnvfp4.Policy(default=Recipe(None, None, None), keep=())  # which reaches layers all the same


def by_path(decisions):
    return {decision.path: stats.probe() for decision in decisions if decision.recipe is not None}


def k_of(decision, has_nk=False):
    """K of a layer's weights: Flax has [K, N], and the last layer of an attention sums over two axes."""
    sums_heads = len(decision.shape) == 3 and decision.path.endswith("out")
    return decision.shape[-1] if has_nk else int(np.prod(decision.shape[: 1 + sums_heads]))


def check_hessians(loss, ks, known=()):
    """Every layer has X^T X of its own inputs, which are known of some."""
    found = jax.jit(jax.grad(loss))({path: jnp.zeros((k, k)) for path, k in ks.items()})
    for path, h in found.items():
        np.testing.assert_allclose(h, h.T, rtol=1e-5, atol=1e-5 * float(jnp.max(h)))
        assert np.linalg.eigvalsh(np.asarray(h, np.float64))[-1] > 0, path
    for path in found:
        if path.endswith("query"):  # which multiplies what the keys' layer does
            np.testing.assert_array_equal(found[path], found[path.removesuffix("query") + "key"])
    for path, x in dict(known).items():
        np.testing.assert_allclose(found[path], calibration.hessian(x), rtol=1e-5, atol=1e-5)


def check_model(loss, probes):
    """Every layer has its own statistics, those of its weights also where no other has a probe."""
    gradient = jax.jit(jax.grad(loss))
    found = gradient(probes)
    for path, of in found.items():
        assert [float(n.calls) for n in stats.read(of)] == [1, 1, 1], path
        assert 0.01 < float(stats.read(of).dy.relative_error) < 0.5
    # Weights alone have the same bits in another program.
    one_path, of_w = min(probes), stats_of_layers.OPERANDS.index("w")
    alone = gradient({one_path: probes[one_path]})[one_path]
    np.testing.assert_array_equal(alone[of_w], found[one_path][of_w])
    assert len({of[of_w].tobytes() for of in found.values()}) == len(found)


def test_layers_of_linen_models():
    pytest.importorskip("flax", "0.12")
    from flax_models import TOKENS, Transformer

    from jnvfp4.flax.linen import intercept

    model = Transformer(layers=1)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)

    def loss(probes, policy=NEAREST):
        with intercept(policy), stats.collect(probes):
            return jnp.sum(jnp.sin(model.apply(variables, TOKENS).astype(jnp.float32)))

    decisions = NEAREST.explain(model, TOKENS)
    check_model(loss, by_path(decisions))
    check_hessians(partial(loss, policy=NOTHING), {d.path: k_of(d) for d in decisions})


def test_layers_of_a_linen_scan_have_the_mean_of_their_statistics():
    pytest.importorskip("flax", "0.12")
    from flax_models import Stack, X

    from jnvfp4.flax.linen import intercept

    model, policy = Stack(scan=True), NEAREST
    variables = jax.jit(model.init)(jax.random.key(0), X)

    @jax.jit
    @jax.grad
    def grad(probes):
        with intercept(policy), stats.collect(probes):
            return jnp.sum(jnp.sin(model.apply(variables, X)))

    found = grad(by_path(policy.explain(model, X)))
    assert {float(stats.read(of).w.calls) for of in found.values()} == {model.layers}


@pytest.mark.parametrize("driven", [False, True], ids=["nnx", "qwix"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_of_nnx_models(driven):
    pytest.importorskip("flax", "0.12")
    from flax import nnx
    from flax_models import TOKENS, NnxTransformer

    model = NnxTransformer(nnx.Rngs(0))
    decisions = NEAREST.explain(model)
    if driven:
        qwix = pytest.importorskip("qwix")
        from jnvfp4.qwix import Provider

        model = qwix.quantize_model(model, Provider(NEAREST), TOKENS)
    else:
        model = jnvfp4.flax.nnx.apply(model, NEAREST)
    graph, state = nnx.split(model)

    def loss(probes):
        with stats.collect(probes):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(TOKENS).astype(jnp.float32)))

    check_model(loss, by_path(decisions))
    check_hessians(loss, {d.path: k_of(d) for d in decisions})


def test_layers_of_equinox_models():
    """Where a custom rule of vmap multiplies all tokens at once."""
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(32, 32, 64, 1, key=KEY)
    decisions, x = NEAREST.explain(mlp), jnp.linspace(-1, 2, 16 * 32).reshape(16, 32)
    plain, mlp = (jnvfp4.equinox.apply(mlp, policy) for policy in (NOTHING, NEAREST))

    def loss(probes, mlp=mlp):
        with stats.collect(probes):
            return jnp.sum(jnp.sin(jax.vmap(mlp)(x)))

    check_model(loss, by_path(decisions))
    with jax.default_matmul_precision("highest"):  # a GPU would round the hidden layer to TF32, each GEMM its own way
        hidden = jax.nn.relu(x @ plain.layers[0].weight.T + plain.layers[0].bias)
        known = {"layers/0": x, "layers/1": hidden}
        check_hessians(partial(loss, mlp=plain), {d.path: k_of(d, has_nk=True) for d in decisions}, known)


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ([], "probes must be a dict of probes by path"),
        ({1: None}, "probes must have strings for paths, got 1"),
        ({"up": jnp.ones(7)}, r"probes\['up'\] must be float32 of shape \(3, 7\)"),
    ],
)
def test_wrong_probes_are_refused(probes, message):
    with pytest.raises((TypeError, ValueError), match=message), stats.collect(probes):
        pass


def test_a_function_that_was_traced_before_takes_the_probes_of_this_step():
    """Its trace of another step would bring probes from there, whose gradient is zero here."""
    x, w, dy = first(SMALL)
    product = jnvfp4.DotGeneral(recipes.DEFAULT, "up")
    inner = jax.jit(lambda x, w: product(x, w, (((1,), (1,)), ((), ()))))

    def loss(probe):
        with stats.collect({"up": probe}):
            return jnp.sum(inner(x, w).astype(jnp.float32) * dy)

    inner(x, w)
    for _ in range(2):
        assert stats.read(jax.grad(loss)(stats.probe())).x.calls == 1
    with pytest.raises(RuntimeError, match="left"), stats.collect({"up": stats.probe()}):
        raise RuntimeError("left")
    assert product.probe is None
