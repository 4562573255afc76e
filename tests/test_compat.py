"""The private corner of JAX that jnvfp4 touches still exists, and is still needed."""

import pathlib
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax._src import dispatch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4 import quantize
from jnvfp4._native import compat
from jnvfp4._primitives._base import PRIMITIVES
from jnvfp4._primitives.quantize import quantize_p

PACKAGE = pathlib.Path(jnvfp4.__file__).parent


def test_every_primitive_is_listed():
    """One for each file of _primitives that makes any."""
    makers = [path for path in (PACKAGE / "_primitives").glob("[a-z]*.py") if "make_primitive(" in path.read_text()]
    assert {p.name for p in PRIMITIVES} == {f"nvfp4_{path.stem}" for path in makers}
    assert len(PRIMITIVES) == len(makers) > 0


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda p: p.name)
def test_lowering_is_given_the_devices(primitive):
    assert primitive in dispatch.prim_requires_devices_during_lowering


def test_without_it_a_sharded_jit_fails(monkeypatch):
    """When this stops failing, compat.py can go."""
    monkeypatch.setattr(
        dispatch, "prim_requires_devices_during_lowering", dispatch.prim_requires_devices_during_lowering - {quantize_p}
    )
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    x = jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, P("x")))
    with pytest.raises(AssertionError, match="file a bug"):
        jax.jit(lambda x: quantize(x, amax=1.0)).lower(x)


def test_without_leaving_it_compile_time_evaluation_fails(monkeypatch):
    monkeypatch.setattr(compat, "without_constant_folding", nullcontext)
    with jax.ensure_compile_time_eval(), pytest.raises(AssertionError):
        quantize(jnp.ones((48, 144)))  # a shape that nothing else compiles


def test_only_compat_imports_private_jax():
    private = re.compile(r"^\s*(?:from|import) jax\._src|jax\._src\.\w+", re.M)
    assert {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())} == {"compat.py"}


def test_lowering_context_has_what_the_mesh_of_set_mesh_needs():
    """compat.with_mesh replaces one field of the lowering context; JAX's own shard_map does the same."""
    devices = jax.devices("cpu")[:2]
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=devices)):
        text = jax.jit(lambda: quantize(jnp.ones((32, 64)), amax=1.0)).lower().as_text()
    assert "CustomSPMDPartitioning" in text


def test_xla_counts_no_flops_of_a_custom_call():
    """When this fails, docs/support.md need not tell how to count them."""
    with jax.default_device(jax.devices("cpu")[0]):
        t = quantize(jnp.ones((32, 64)))
        lowered = jax.jit(jnvfp4.matmul_nt).lower(t, t)
    assert lowered.cost_analysis()["flops"] == lowered.compile().cost_analysis()["flops"] == -1


def test_xla_is_told_the_shardings_of_an_explicit_mesh(monkeypatch):
    """Without the marks Shardy chooses the sharding of what a primitive returns."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    x = jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, P("x")))
    lower = lambda: jax.jit(lambda x: quantize(x, amax=1.0).data).lower(x).as_text()  # noqa: E731
    assert "sdy.sharding_constraint" in lower()
    monkeypatch.setattr(compat, "with_explicit_shardings", lambda ctx, results: results)
    assert "sdy.sharding_constraint" not in lower()
