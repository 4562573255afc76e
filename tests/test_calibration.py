"""GPTQ: against an oracle in float64, and what it must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_tensor
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put

import jnvfp4
from jnvfp4 import NVFP4, ROW_SCALED, Format, NVFP4Tensor, QuantSpec
from jnvfp4.calibration import gptq, hessian
from jnvfp4.spec import four_over_six

SPECS = {
    "nvfp4": NVFP4,
    "row": ROW_SCALED,
    "4over6": four_over_six("mse"),
    "4over6_row": four_over_six(amax_scope="row"),
    "search": QuantSpec(select="search"),
    "search_row": QuantSpec(Format("row"), select="search"),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def layer(seed: int, n: int, k: int, tokens: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and inputs whose channels are correlated and of different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(k, k)) * np.geomspace(1, 0.01, k)[:, None]
    return rng.normal(size=(n, k)).astype(np.float32), (rng.normal(size=(tokens, k)) @ mixed).astype(np.float32)


def oracle(w: np.ndarray, x: np.ndarray, spec: jnvfp4.QuantSpec, damping: float) -> np.ndarray:
    """The values of GPTQ as its paper states it: H^-1 as such, one column at a time, in float64."""
    h = x.T.astype(np.float64) @ x
    h += damping * np.mean(np.diag(h)) * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left, values = w.astype(np.float64), np.zeros(w.shape)
    amax, ones = jnvfp4.quantize(w, spec).amax, jnp.full((len(w), 8), 0x22, jnp.uint8)
    for j in range(w.shape[1]):
        block = slice(j // 16 * 16, j // 16 * 16 + 16)
        if j % 16 == 0:
            scales = jnvfp4.quantize(left[:, block].astype(np.float32), spec, amax=amax).scale
        values[:, j] = nearest(left[:, j], NVFP4Tensor(ones, scales, amax, spec.format))
        left[:, j:] -= np.outer((left[:, j] - values[:, j]) / upper[j, j], upper[j, j:])
    return values


def nearest(column: np.ndarray, ones: NVFP4Tensor) -> np.ndarray:
    """Rounds to the grid of a row's scale; ``ones`` has the code of 1 everywhere."""
    step = np.asarray(jnvfp4.dequantize(ones), np.float64)[:, :1]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([-grid[::-1], grid]) * step
    return np.take_along_axis(values, np.argmin(np.abs(values - column[:, None]), axis=1)[:, None], axis=1)[:, 0]


def change(w: np.ndarray, x: np.ndarray, values: np.ndarray) -> float:
    """How much the outputs of a layer change, relative to them."""
    return float(np.linalg.norm(x @ (values - w).T) / np.linalg.norm(x @ w.T))


@every_spec
def test_gptq_is_that_of_its_paper(cpu, spec):
    w, x = layer(1, 48, 64)
    got = np.asarray(jnvfp4.dequantize(gptq(w, hessian(x), spec)), np.float64)
    want = oracle(w, x, spec, 0.01)
    # A last bit may turn a tie, which the columns behind then make up for in another way.
    assert np.mean(np.isclose(got, want, rtol=1e-5, atol=0)) > 0.99
    plain = change(w, x, np.asarray(jnvfp4.dequantize(jnvfp4.quantize(w, spec))))
    assert change(w, x, got) == pytest.approx(change(w, x, want), rel=0.02)
    assert change(w, x, got) < 0.7 * plain


@every_spec
@pytest.mark.parametrize("scale", [0.0, 3.0], ids=["never seen", "not correlated"])
def test_inputs_that_are_not_correlated_change_nothing(cpu, spec, scale):
    w, _ = layer(2, 32, 64)
    assert_same_tensor(gptq(w, scale * jnp.eye(64), spec), jnvfp4.quantize(w, spec))


def test_hessians_of_batches_add_up_and_their_factor_does_not_matter(cpu):
    w, x = layer(3, 32, 64)
    np.testing.assert_allclose(hessian(x[:200]) + hessian(x[200:].reshape(8, -1, 64)), hessian(x), rtol=1e-4, atol=1e-2)
    largest = 2.0 ** (127 - np.floor(np.log2(hessian(x).max())))  # beside it sums would overflow
    for factor in (2.0**-10, largest):  # a power of two: not a bit
        assert_same_tensor(gptq(w, factor * hessian(x)), gptq(w, hessian(x)))


@pytest.mark.parametrize("h", [-1e-3 * np.eye(64), np.fliplr(np.eye(64))], ids=["negative", "indefinite"])
def test_what_is_no_hessian_gives_nan(cpu, h):
    w, _ = layer(9, 32, 64)
    assert np.isnan(np.asarray(jnvfp4.dequantize(gptq(w, np.float32(h))))).any()


def test_channels_without_input_are_rounded_by_themselves(cpu):
    w, x = layer(4, 32, 64)
    x[:, 16:48] = 0
    got, plain = (np.asarray(jnvfp4.dequantize(t)) for t in (gptq(w, hessian(x)), jnvfp4.quantize(w)))
    np.testing.assert_array_equal(got[:, 16:48], plain[:, 16:48])
    assert np.isfinite(got).all()
    assert change(w, x, got) < change(w, x, plain)


@every_spec
def test_a_larger_amax_may_be_given(cpu, spec):
    w, _ = layer(8, 32, 64)
    amax = 2 * jnvfp4.quantize(w, spec).amax
    assert_same_tensor(gptq(w, jnp.eye(64), spec, amax=amax), jnvfp4.quantize(w, spec, amax=amax))


def test_experts_are_quantized_each_by_itself(cpu):
    ws, xs = (jnp.stack(parts) for parts in zip(*(layer(seed, 32, 64) for seed in (5, 6)), strict=True))
    both = gptq(ws, jax.vmap(hessian)(xs))
    for i in range(2):
        alone = np.asarray(jnvfp4.dequantize(gptq(ws[i], hessian(xs[i]))))
        found = np.asarray(jnvfp4.dequantize(jax.tree.map(lambda part, i=i: part[i], both)))
        assert np.mean(found == alone) > 0.99


def test_explicit_meshes_are_refused_by_name():
    mesh = make_mesh(jax.devices("cpu")[:8], "x", "explicit")
    x = put(np.ones((128, 64), np.float32), mesh, P("x"))
    for call in (lambda: hessian(x), lambda: gptq(x, jnp.eye(64))):
        with pytest.raises(
            ValueError, match=r"[xw] must not be sharded on an Explicit mesh, got float32\[128@x,64\]; res"
        ):
            call()


def test_rows_and_tokens_may_be_sharded(devices):
    w, x = layer(7, 64, 128)
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    rows = NamedSharding(mesh, P("rows", None))
    h = jax.jit(hessian)(jax.device_put(x, rows))
    got = jax.jit(gptq)(jax.device_put(w, rows), h)
    with jax.default_device(devices[0]):
        want = jnvfp4.dequantize(gptq(w, hessian(x)))
    assert np.mean(np.asarray(jnvfp4.dequantize(got)) == np.asarray(want)) > 0.95
    assert change(w, x, np.asarray(jnvfp4.dequantize(got))) == pytest.approx(change(w, x, np.asarray(want)), rel=0.05)
