"""The CPU kernels give the same bytes with every instruction set this processor has."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DISTRIBUTIONS, DTYPES, ODD, Case
from conftest import LESSER_ISAS, lesser_isa
from helpers import assert_same_tensor, find_amax, key_for

import jnvfp4
from jnvfp4._native import load
from jnvfp4.spec import FUSED_PAIRS, SUPPORTED_SPECS


@pytest.fixture(params=LESSER_ISAS)
def both(request):
    """Runs a function with the best instruction set and with a lesser one."""
    with lesser_isa(request.param) as best:

        def run(function):
            results = []
            for name in (best, request.param):
                assert load.extensions()["cpu"].use_isa(name)
                with jax.default_device(jax.devices("cpu")[0]):
                    results.append(jax.block_until_ready(function()))
            return results

        yield run


def every_result(x) -> list:
    """Both orientations by every spec, and their values; window64 where it fits."""
    results = []
    for spec, transpose in product(SUPPORTED_SPECS, (False, True)):
        if x.shape[-2 if transpose else -1] % spec.unit == 0:
            t = jnvfp4.quantize(x, spec, key=key_for(spec), transpose=transpose)
            results += [t, jnvfp4.dequantize(t, x.dtype)]
    return results


@pytest.mark.long
@pytest.mark.parametrize("case", [*ODD, Case("windows", (64, 192), "bf16", "heavy")], ids=lambda c: c.name)
def test_quantize_and_dequantize(both, case):
    x = case.make()
    assert_same_tensor(*both(lambda: every_result(x)))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_quantize_odd_values(both, dtype):
    """Every distribution with an amax of its own, by the kinds of kernel that differ."""
    x = np.stack([Case("x", (32, 64), dtype, distribution).make() for distribution in DISTRIBUTIONS])
    amax = np.stack([find_amax(part) for part in x])
    specs = [spec for spec in SUPPORTED_SPECS if spec.format.amax_scope == "tensor"]
    assert_same_tensor(*both(lambda: [jnvfp4.quantize(x, s, amax=amax, key=key_for(s)) for s in specs]))


@pytest.mark.parametrize("case", ODD, ids=lambda c: c.name)
def test_every_isa_quantizes_pairs_alike(both, case):
    x = case.make()
    pairs = [pair for pair in sorted(FUSED_PAIRS, key=repr) if jnvfp4.WINDOW64 not in pair]
    assert_same_tensor(*both(lambda: [jnvfp4.quantize_pair(x, *p, key=key_for(*p)) for p in pairs]))


@pytest.mark.parametrize("shape", [(144, 272), (3, 48, 128)], ids=str)
def test_every_isa_transposes_alike(both, shape):
    q = jnvfp4.quantize(Case("x", shape).make(), jnvfp4.NVFP4_2D)
    assert_same_tensor(*both(lambda: jnvfp4.transpose(q)))


@pytest.mark.parametrize("m", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_every_isa_multiplies_alike(both, m, dtype):
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, 208), np.float32), rng.standard_normal((77, 208), np.float32)
    b = jnvfp4.quantize(b, jnvfp4.ROW_SCALED)

    def product():
        left = jnvfp4.quantize(a) if dtype is None else jnp.asarray(a, dtype)
        return jnvfp4.matmul_nt(left, b, out_dtype=jnp.float32)

    assert_same_tensor(*both(product))


@pytest.mark.parametrize("others", [["mmx"], ["avx2", "avx512"], ["neon_dot"]], ids="-".join)
def test_an_instruction_set_that_the_processor_lacks_is_refused(others):
    cpu = load.extensions()["cpu"]
    best = cpu.isa()
    if best in others:
        pytest.skip(f"this processor has {best}")
    assert not any(cpu.use_isa(other) for other in others)
    assert cpu.isa() == best
