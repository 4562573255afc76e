"""Weights gathered as bytes in models of Flax, and quantized weights moved from mesh to mesh by orbax."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx
from flax_models import TOKENS, WIDTH, NnxTransformer, Stack, cross_entropy, stacked
from helpers import assert_bitwise, assert_same_tensor
from jax.sharding import PartitionSpec as P
from meshes import assert_sharded, make_mesh, put, run
from operands import normal

from jnvfp4 import NVFP4_2D, ROW_SCALED, Policy, Rule, linear, quantize, recipes
from jnvfp4.flax import linen as jlinen
from jnvfp4.flax import nnx as jnnx

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


def linen_loss(model, policy, params, x):
    with jlinen.intercept(policy):
        return jnp.sum(model.apply(params, x).astype(jnp.float32) ** 2)


def codes_gathered(found) -> int:
    assert not [s for op, s in found if op == "all-gather" and re.search(r"(bf16|f32)\[\d+,\d+", s)], found
    return sum("u8" in shape for op, shape in found if op == "all-gather")


@pytest.mark.long
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_linen_gathers_bytes(scan):
    mesh, x = make_mesh(DEVICES, "x"), normal((128, WIDTH), 1, "fp32")
    model = Stack(scan=scan)
    params = Stack().init(jax.random.key(0), x)
    params = stacked(params) if scan else params
    placed = place(params, mesh, int(scan)), put(x, mesh, P("x"))
    want = jax.jit(jax.grad(partial(linen_loss, model, QUANTIZED)))(*placed)
    got, found = run(jax.grad(partial(linen_loss, model, GATHERED)), *placed)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * float(jnp.abs(b).max()))
    assert codes_gathered(found)


@pytest.mark.long
def test_nnx_gathers_bytes():
    mesh, tokens = make_mesh(DEVICES, "x"), jnp.tile(TOKENS, (4, 1))
    rule = Rule(r"blocks/\d/(gate|mlp/(up|down))", recipes.DEFAULT, GATHER)
    losses = []
    for policy in (Policy([rule]), Policy([replace(rule, w_gather=None)])):
        graph, params, rest = nnx.split(jnnx.apply(NnxTransformer(nnx.Rngs(0)), policy), nnx.Param, ...)
        losses.append(
            lambda params, graph=graph, rest=rest: cross_entropy(nnx.merge(graph, params, rest)(tokens), tokens)
        )
    placed = place(params, mesh)
    got, found = run(jax.grad(losses[0]), placed)
    assert_same_tensor(got, jax.jit(jax.grad(losses[1]))(placed))
    assert codes_gathered(found)


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
