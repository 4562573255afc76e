"""The CPU kernels give the same bytes with every instruction set this processor has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tagged
from helpers import assert_same_tensor

import jnvfp4
from jnvfp4 import _native
from jnvfp4.spec import SUPPORTED_SPECS

LESSER = ["portable", "avx2"]


@pytest.fixture(params=LESSER)
def both(request):
    """Runs a function with the best instruction set and with a lesser one."""
    cpu = _native.extensions()["cpu"]
    best = cpu.isa()
    if best == request.param or not cpu.use_isa(request.param):
        pytest.skip(f"this processor's best is {best}")
    cpu.use_isa(best)

    def run(function):
        results = []
        for name in (best, request.param):
            assert cpu.use_isa(name)
            with jax.default_device(jax.devices("cpu")[0]):
                results.append(jax.block_until_ready(function()))
        return results

    yield run
    cpu.use_isa(best)


@pytest.mark.parametrize("case", tagged("quick"), ids=lambda c: c.name)
def test_quantize_and_dequantize(both, case):
    x = case.make()

    def tensors_and_values():
        tensors = [jnvfp4.quantize(x, s, transpose=t) for s in SUPPORTED_SPECS for t in (False, True)]
        return tensors, [jnvfp4.dequantize(t, x.dtype) for t in tensors]

    assert_same_tensor(*both(tensors_and_values))


@pytest.mark.parametrize("m", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_matmul(both, m, dtype):
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, 208), np.float32), rng.standard_normal((77, 208), np.float32)
    b = jnvfp4.quantize(b, jnvfp4.ROW_SCALED)

    def product():
        left = jnvfp4.quantize(a) if dtype is None else jnp.asarray(a, dtype)
        return jnvfp4.matmul_nt(left, b, out_dtype=jnp.float32)

    assert_same_tensor(*both(product))


def test_an_unknown_instruction_set_is_refused():
    assert not _native.extensions()["cpu"].use_isa("mmx")
