"""What only a GPU can show: tensors of more than 2^31 elements, and CUDA graphs."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_same_tensor

from jnvfp4 import Format, QuantSpec, dequantize, quantize, quantize_pair, transpose
from jnvfp4._primitives._base import bind
from jnvfp4._primitives._sides import Side
from jnvfp4._primitives.quantize import quantize_p
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, ROW_SCALED, WINDOW64, four_over_six, name_of

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


def end_of(t, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """The codes and scales of the last rows of what was quantized."""
    if transposed:
        return t.data[:, -PIECE // 2 :], t.scale[:, -PIECE // 16 :]
    return t.data[-PIECE:], t.scale[-PIECE:]


SPECS = [NVFP4, NVFP4_2D, NVFP4_RHT, ROW_SCALED, WINDOW64, four_over_six()]


@pytest.mark.parametrize(
    ("spec", "transposed"),
    [*((spec, False) for spec in SPECS), *((spec, True) for spec in SPECS[:3])],
    ids=lambda v: str(v) if isinstance(v, bool) else name_of(v),
)
def test_the_end_of_a_huge_tensor(huge, spec, transposed):
    t = quantize(huge, spec, transpose=transposed)
    amax = t.amax[-PIECE:] if t.amax.ndim else t.amax
    end = quantize(huge[-PIECE:], spec, amax=amax, transpose=transposed)
    assert_same_tensor(end_of(t, transposed), (end.data, end.scale))


def test_random_bits_at_the_end_of_a_huge_tensor(huge):
    key, first = jax.random.key(1), (ROWS - PIECE) * (COLS // 16)
    t = quantize(huge, NVFP4_SR, key=key)
    stream = jnp.concatenate([jax.random.bits(key, (2,), jnp.uint32), jnp.asarray([first, 0], jnp.uint32)])
    sides = (Side(NVFP4_SR, transpose=False, has_amax=True),)
    end = bind(quantize_p, huge[-PIECE:], t.amax, stream, params=sides, implementation=None)
    assert_same_tensor((t.data[-PIECE:], t.scale[-PIECE:].view(jnp.uint8)), tuple(end))


@pytest.mark.parametrize("pair", [(NVFP4, NVFP4), (NVFP4, NVFP4_RHT), (NVFP4_2D, NVFP4_2D)], ids=str)
def test_the_end_of_a_huge_pair(huge, pair):
    pair_of_all = quantize_pair(huge, *pair)
    ends = quantize_pair(huge[-PIECE:], *pair, amax=tuple(t.amax for t in pair_of_all))
    for transposed, (t, end) in enumerate(zip(pair_of_all, ends, strict=True)):
        assert_same_tensor(end_of(t, bool(transposed)), (end.data, end.scale))


def test_what_reads_a_huge_tensor(huge):
    t = quantize(huge, NVFP4_2D)
    end = quantize(huge[-PIECE:], NVFP4_2D, amax=t.amax)
    assert_same_tensor(dequantize(t, jnp.bfloat16)[-PIECE:], dequantize(end, jnp.bfloat16))
    moved = transpose(end)
    assert_same_tensor(end_of(transpose(t), True), (moved.data, moved.scale))


GRAPH_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jnvfp4
x, key = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16), jax.random.key(1)

def step(x, key):
    a, b = jnvfp4.quantize(x, jnvfp4.ROW_SCALED), jnvfp4.quantize(x, transpose=True)
    rounded, rotated = jnvfp4.quantize(x, jnvfp4.NVFP4_SR, key=key), jnvfp4.quantize(x, jnvfp4.NVFP4_RHT)
    windows, better = jnvfp4.quantize(x, jnvfp4.WINDOW64), jnvfp4.quantize(x, jnvfp4.spec.four_over_six())
    pairs = [jnvfp4.quantize_pair(x, jnvfp4.NVFP4_SR, jnvfp4.NVFP4_RHT_SR, key=key), jnvfp4.quantize_pair(
        x, jnvfp4.NVFP4_2D, jnvfp4.NVFP4_2D), jnvfp4.quantize_pair(x, jnvfp4.WINDOW64, jnvfp4.WINDOW64)]
    values = [jnvfp4.dequantize(t) for t in (a, rotated, windows)]
    values += [jnvfp4.transpose(jnvfp4.quantize(x, jnvfp4.NVFP4_2D))]
    products = [jnvfp4.matmul_nt(t, jnvfp4.quantize(x)) for t in (a, rounded, windows, better)]
    return a, b, rounded, rotated, windows, better, pairs, values, products

compiled = jax.jit(step)
first = jax.block_until_ready(compiled(x, key))
for _ in range(3):  # the first runs record, later ones replay
    again = jax.block_until_ready(compiled(x, key))
for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again)):
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
eager = (jnvfp4.quantize(x, jnvfp4.ROW_SCALED), jnvfp4.quantize(x, transpose=True),
         jnvfp4.quantize(x, jnvfp4.NVFP4_SR, key=key), jnvfp4.quantize(x, jnvfp4.NVFP4_RHT))
for one, two in zip(jax.tree.leaves(eager), jax.tree.leaves(first[:4])):
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
"""


GROUPS_GRAPH_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jnvfp4

def tensor(seed, *shape):  # of sums that are exact in any order
    data = jax.random.bits(jax.random.key(seed), (*shape[:-1], shape[-1] // 2), jnp.uint8)
    scale = jnp.ones((*shape[:-1], shape[-1] // 16), jnp.float8_e4m3fn)
    return jnvfp4.NVFP4Tensor(data, scale, jnp.full(shape[:-2], 6 * 448.0, jnp.float32), jnvfp4.Format())

@jax.jit
def step(left, right, sizes):
    return jnvfp4.grouped_matmul_nt(left, right, sizes, out_dtype=jnp.float32)

left, right = tensor(0, 300, 256), tensor(1, 4, 130, 256)
a, b = (np.asarray(jnvfp4.dequantize(t)) for t in (left, right))
for sizes in 3 * [(300, 0, 0, 0), (1, 200, 0, 99), (0, 0, 5, 0), (64, 64, 64, 64), (0, 0, 0, 0), (0, 0, 1, 299)]:
    got = np.asarray(step(left, right, jnp.array(sizes, jnp.int32)))
    want, begin = np.zeros_like(got), 0
    for g, size in enumerate(sizes):
        want[begin : begin + size] = a[begin : begin + size] @ b[g].T
        begin += size
    assert np.array_equal(got, want), sizes
"""


def plan_of_graphs(script: str, tmp_path) -> str:
    """Runs the script with XLA command buffers, and returns what XLA runs for its function ``step``."""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, cwd=tmp_path)
    (plan,) = (p.read_text() for p in pathlib.Path(tmp_path).glob("*jit_step.thunk_sequence_after_thunk_passes.txt"))
    return plan


def test_a_graph_is_replayed_with_other_sizes_of_groups(gpu, tmp_path):
    """Nothing of the sizes that it was recorded with stays in it."""
    plan = plan_of_graphs(GROUPS_GRAPH_SCRIPT, tmp_path)
    if gpu.compute_capability == "9.0":
        calls = [line for line in plan.splitlines() if "kCustomCall" in line]
        assert calls
        assert all(line.startswith(" ") for line in calls), plan  # indented: inside the command buffer


def test_cuda_graphs_hold_every_kernel(gpu, tmp_path):
    """The kernels recorded in XLA command buffers: the dumped plan has them all inside one."""
    plan = plan_of_graphs(GRAPH_SCRIPT, tmp_path)
    calls = [line for line in plan.splitlines() if "kCustomCall" in line]
    assert "kCommandBuffer" in plan
    assert calls
    assert all(line.startswith(" ") for line in calls), plan  # indented: inside the command buffer


@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D, NVFP4_SR, ROW_SCALED, four_over_six()], ids=name_of)
def test_more_matrices_than_a_dimension_of_the_grid(gpu, spec):
    """Each with an amax and a key of its own, quantized."""
    count, cpu = 65536 + 7, jax.devices("cpu")[0]
    x = jax.random.normal(jax.random.key(0), (count, spec.block_rows, 16), jnp.float32).astype(jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1), count)

    def each(x, key):
        t = quantize(x, spec, key=key)
        return t, dequantize(t, x.dtype)

    got, want = (jax.jit(jax.vmap(each))(*jax.device_put((x, keys), d)) for d in (gpu, cpu))
    assert_same_tensor(got, want)


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_gpus_search_by_the_reference(gpu, scope):
    spec, x = QuantSpec(Format(scope), select="search"), np.random.default_rng(0).standard_normal((2, 48, 80))
    x = jnp.asarray(x, jnp.bfloat16)
    assert_same_tensor(*(quantize(jax.device_put(x, d), spec) for d in (gpu, jax.devices("cpu")[0])))
    with pytest.raises(NotImplementedError, match=r"implementation='native' cannot run here: no kernel for select"):
        quantize(jax.device_put(x, gpu), spec, implementation="native")


# Data on which the two errors of 4over6 are far apart, close, or the same.
FILTER_DATA = {
    "normal": lambda n: n,
    "heavy tail": lambda n: n**3,
    "lognormal": lambda n: jnp.exp2(4 * n),
    "integers": lambda n: jnp.round(2 * n),
    "grid": lambda n: jnp.round(2 * jnp.clip(n, -3, 3)) / 2 * 1.0009765625,
    "sparse": lambda n: jnp.where(jnp.abs(n) < 1.645, 0, n),
    "linear values": lambda n: n.at[0, 0].set(6.5625),
}


@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("e4m3_max", [256, 448])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("data", FILTER_DATA)
def test_quick_errors_decide_as_the_rule(gpu, data, error, e4m3_max, block_rows):
    """A million blocks: where their bound does not separate the quick errors, the kernels must sum by the rule."""
    spec = four_over_six(error, e4m3_max=e4m3_max, block_rows=block_rows)
    n = jax.random.normal(jax.random.key(e4m3_max), (4096, 4096), jnp.float32)
    x = FILTER_DATA[data](n).astype(jnp.bfloat16)
    found = jax.jit(lambda x: quantize_pair(x, spec, spec))
    assert_same_tensor(*(found(jax.device_put(x, device)) for device in (gpu, jax.devices("cpu")[0])))
