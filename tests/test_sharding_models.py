"""Weights gathered as bytes in models of Flax, and quantized weights moved from mesh to mesh by orbax."""

import re
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx
from flax_models import TOKENS, WIDTH, NnxTransformer, Stack, Transformer, cross_entropy, stacked
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put, run
from operands import normal

from jnvfp4 import NVFP4_2D, ROW_SCALED, Policy, Rule, linear, quantize, recipes
from jnvfp4.flax import linen as jlinen
from jnvfp4.flax import nnx as jnnx
from jnvfp4.sharding import WeightAmax, step_amax, weight_amax

DEVICES = jax.devices("cpu")[:2]  # a part of 32 rows has a block of 16
GATHER = (P("x"), P())
QUANTIZED = Policy(default=recipes.DEFAULT)
GATHERED = Policy(default=recipes.DEFAULT, w_gather=GATHER)


def place(params, mesh, first=0):
    """Kernels split along their first axis, or along the next if they are stacked."""

    def spec(keys, w):
        if "kernel" not in jax.tree_util.keystr(keys):
            return P()
        return P(*[None] * first, "x") if w.shape[first] % 32 == 0 else P()

    return jax.tree_util.tree_map_with_path(lambda keys, w: put(w, mesh, spec(keys, w)), params)


def linen_loss(model, policy, params, x, amaxes=None):
    with jlinen.intercept(policy), nullcontext() if amaxes is None else step_amax(amaxes):
        return jnp.sum(model.apply(params, x).astype(jnp.float32) ** 2)


def amaxes_reduced(found) -> list[int]:
    """The lengths of vectors of amaxes in all-reduces, which XLA may have combined with others."""
    return [int(n) for op, shape in found if op == "all-reduce" for n in re.findall(r"u32\[(\d+)\]", shape)]


def codes_gathered(found) -> int:
    assert not [s for op, s in found if op == "all-gather" and re.search(r"(bf16|f32)\[\d+,\d+", s)], found
    return sum("u8" in shape for op, shape in found if op == "all-gather")


@pytest.mark.long
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_linen_gathers_bytes_and_finds_amaxes_at_once(scan):
    """The kernels of a scanned model have an amax for each layer, which layer_index tells apart."""
    mesh, x = make_mesh(DEVICES, "x"), normal((128, WIDTH), 1, "fp32")
    model = Stack(scan=scan, indexed=True)
    params = Stack().init(jax.random.key(0), x)
    params = stacked(params) if scan else params
    placed = place(params, mesh, int(scan)), put(x, mesh, P("x"))
    want = jax.jit(jax.grad(partial(linen_loss, model, QUANTIZED)))(*placed)

    def gradients(params, x):
        amaxes = weight_amax(params, GATHERED, stacked="block/.*" if scan else None)
        return jax.grad(partial(linen_loss, model, GATHERED, amaxes=amaxes))(params, x)

    got, found = run(gradients, *placed)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * float(jnp.abs(b).max()))
    assert codes_gathered(found)
    assert amaxes_reduced(found) == [6]  # two kernels, three layers


@pytest.mark.long
def test_linen_einsum_and_attention_take_amaxes():
    model = Transformer()
    tokens = jnp.arange(32).reshape(2, 16)  # each once: a GPU adds the gradients of an embedding in any order
    params = model.init(jax.random.key(0), tokens)

    def loss(params, with_amaxes):
        amaxes = weight_amax(params, QUANTIZED) if with_amaxes else None
        with jlinen.intercept(QUANTIZED), nullcontext() if amaxes is None else step_amax(amaxes):
            return cross_entropy(model.apply(params, tokens), tokens)

    got, want = (jax.jit(jax.grad(partial(loss, with_amaxes=yes)))(params) for yes in (True, False))
    assert_same_tensor(got, want)
    tree = weight_amax(params, QUANTIZED)["params"]
    assert tree["block_0_gate"]["kernel"].value.shape == ()
    assert tree["lm_head"]["kernel"] is None


@pytest.mark.long
@pytest.mark.parametrize("box", ["state", "pure"])
def test_nnx_takes_amaxes_and_gathers_bytes(box):
    mesh = make_mesh(DEVICES, "x")
    policy = Policy([Rule(r"blocks/\d/(gate|mlp/(up|down))", recipes.DEFAULT, GATHER)])
    model = jnnx.apply(NnxTransformer(nnx.Rngs(0)), policy)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, with_amaxes):
        tree = nnx.to_pure_dict(params) if box == "pure" else params
        amaxes = weight_amax(tree, policy) if with_amaxes else None
        with nullcontext() if amaxes is None else step_amax(amaxes):
            return cross_entropy(nnx.merge(graph, params, rest)(jnp.tile(TOKENS, (4, 1))), jnp.tile(TOKENS, (4, 1)))

    placed = place(params, mesh)
    got, found = run(jax.grad(partial(loss, with_amaxes=True)), placed)
    assert_same_tensor(got, jax.jit(jax.grad(partial(loss, with_amaxes=False)))(placed))
    assert codes_gathered(found)
    assert amaxes_reduced(found) == [6]  # three kernels in two blocks


def test_a_model_whose_paths_step_amax_does_not_have():
    model, x = Stack(), normal((16, WIDTH))
    params = model.init(jax.random.key(0), x)
    amaxes = {"params": {"block_0": {"up": {"kernel": WeightAmax(jnp.float32(1), (WIDTH, 2 * WIDTH))}}}}
    with pytest.raises(ValueError, match="layer 'block_0/down': step_amax must have the path"):
        jax.jit(partial(linen_loss, model, QUANTIZED))(params, x, amaxes=amaxes)


# ---------------------------------------------------------------- inference
@pytest.mark.filterwarnings("ignore")  # of orbax and of what it imports
@pytest.mark.parametrize("spec", [NVFP4_2D, ROW_SCALED], ids=["tiles", "rows"])
def test_quantized_weights_move_to_another_mesh_through_a_store(tmp_path, spec):
    """Sharded over four by two devices, saved, and restored onto eight by one; the model reads what it read before."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    cpus = jax.devices("cpu")[:8]
    before = jax.make_mesh((4, 2), ("x", "y"), devices=cpus)
    after = jax.make_mesh((8,), ("z",), devices=cpus)
    w, x = normal((256, 512), 1), normal((64, 512), 2)
    t = quantize(w, spec)
    tree = {"up": jax.device_put(t, t.shardings(before, P("x", "y")))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", tree)
    abstract = jax.eval_shape(lambda: t)
    wanted = jax.tree.map(
        lambda part, sharding: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding),
        abstract,
        abstract.shardings(after, P("z")),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "weights", {"up": wanted})["up"]
    assert_same_tensor(restored, t)
    assert_sharded(restored.data, after, P("z"))
    recipe = recipes.inference() if spec is NVFP4_2D else recipes.Recipe((recipes.NVFP4, ROW_SCALED), None, None)
    got = jax.jit(lambda x, q: linear(x, q, recipe))(put(x, after, P()), restored)
    assert_bitwise(got, linear(x, t, recipe))
    gathered, found = run(lambda x, q: linear(x, q, recipe, w_gather=(P("z"), P())), put(x, after, P("z")), restored)
    assert_bitwise(gathered, linear(x, t, recipe))
    assert codes_gathered(found) == 2
