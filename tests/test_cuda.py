"""What only a GPU can show: tensors of more than 2^31 elements, and CUDA graphs."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_same_tensor

from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, dequantize, quantize

ROWS, COLS, PIECE = 131328, 16384, 256  # 2^31 + 2^22 elements


@pytest.fixture(scope="module")
def gpu():
    if not gpus():
        skip_or_fail("cuda", "no CUDA device")
    return gpus()[0]


@pytest.fixture(scope="module")
def huge(gpu):
    """bfloat16, larger than 32-bit indices reach; the last rows differ from all others."""
    with jax.default_device(gpu):
        x = jax.random.normal(jax.random.key(0), (PIECE, COLS), jnp.bfloat16)
        x = jnp.tile(x, (ROWS // PIECE, 1))
        return x.at[-PIECE:].multiply(2)


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D, ROW_SCALED])
def test_the_end_of_a_huge_tensor(huge, spec):
    t = quantize(huge, spec)
    amax = t.amax[-PIECE:] if t.amax.ndim else t.amax
    end = quantize(huge[-PIECE:], spec, amax=amax)
    assert_same_tensor((t.data[-PIECE:], t.scale[-PIECE:]), (end.data, end.scale))


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D])
def test_the_end_of_a_huge_transposed_tensor(huge, spec):
    t = quantize(huge, spec, transpose=True)
    end = quantize(huge[-PIECE:], spec, amax=t.amax, transpose=True)
    assert_same_tensor((t.data[:, -PIECE // 2 :], t.scale[:, -PIECE // 16 :]), (end.data, end.scale))


def test_dequantize_the_end_of_a_huge_tensor(huge):
    t = quantize(huge)
    end = quantize(huge[-PIECE:], amax=t.amax)
    assert_same_tensor(dequantize(t, jnp.bfloat16)[-PIECE:], dequantize(end, jnp.bfloat16))


GRAPH_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jnvfp4
x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)

def step(x):
    a, b = jnvfp4.quantize(x, jnvfp4.ROW_SCALED), jnvfp4.quantize(x, transpose=True)
    return a, b, jnvfp4.dequantize(a), jnvfp4.matmul_nt(a, jnvfp4.quantize(x))

compiled = jax.jit(step)
first = jax.block_until_ready(compiled(x))
for _ in range(3):  # the first runs record, later ones replay
    again = jax.block_until_ready(compiled(x))
for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
eager = (jnvfp4.quantize(x, jnvfp4.ROW_SCALED), jnvfp4.quantize(x, transpose=True))
for one, two in zip(jax.tree.leaves(eager), jax.tree.leaves(first[:2])):
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
"""


def test_cuda_graphs(gpu, tmp_path):
    """The kernels recorded in XLA command buffers: the dumped plan has them all inside one."""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    subprocess.run([sys.executable, "-c", GRAPH_SCRIPT], env=env, check=True, cwd=tmp_path)
    (plan,) = (p.read_text() for p in pathlib.Path(tmp_path).glob("*jit_step.thunk_sequence_after_thunk_passes.txt"))
    calls = [line for line in plan.splitlines() if "kCustomCall" in line]
    assert "kCommandBuffer" in plan
    assert calls
    assert all(line.startswith(" ") for line in calls), plan  # indented: inside the command buffer
