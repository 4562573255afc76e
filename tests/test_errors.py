"""Bad input: the exception and the words of ``rules.py``, at trace time and of eager calls; values that are none."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FLOAT_MAX
from rules import RULES, X

from jnvfp4 import quantize

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@every_rule
def test_abstract_arrays_are_refused(rule):
    """`<op>: <what> must <rule>, got <value>`: no message prints braces of a forgotten f-string."""
    call, abstract = rule.bind()
    with pytest.raises(rule.error, match=rule.pattern) as raised:
        jax.eval_shape(call, *abstract)
    assert not re.search(r"\{\w+[.!:}]", str(raised.value))
    assert len(str(raised.value)) < 500


@every_rule
def test_arrays_are_refused(rule):
    call, abstract = rule.bind()
    arrays = [jnp.zeros(s.shape, s.dtype) for s in abstract]
    with pytest.raises(rule.error, match=rule.pattern):
        call(*arrays)


# ---------------------------------------------------------------- implementation
def test_native_without_a_kernel_for_the_platform_fails_when_lowered():
    f = jax.jit(partial(quantize, implementation="native"))
    with pytest.raises(NotImplementedError, match=r"nvfp4_quantize: implementation='native' has no kernel .*built: "):
        f.trace(jnp.ones((16, 16))).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_platforms_without_kernels_use_the_reference(implementation):
    f = jax.jit(partial(quantize, implementation=implementation))
    text = f.trace(jnp.ones((16, 16))).lower(lowering_platforms=("tpu",)).as_text()
    assert "nvfp4_quantize" not in text
    assert "stablehlo.multiply" not in re.sub(r".*ui32.*", "", text)  # integers only


# ---------------------------------------------------------------- values at the edge of a rule
def test_the_largest_float32_and_infinity_are_an_amax():
    found = [float(quantize(X, amax=v).amax) for v in (3.4028235e38, -3.4028235e38, np.inf)]
    assert found == [FLOAT_MAX, FLOAT_MAX, np.inf]
