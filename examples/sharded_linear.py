"""Sharding: ``quantize`` and ``linear`` over a mesh of devices, with the same bytes as on one device.

    pip install .
    python examples/sharded_linear.py

Uses the accelerators if there are two or more, else eight virtual CPU devices. Every case prints how its
results are sharded and which collectives XLA compiled, and is checked against the same call on one device.
The u32[] all-reduces are the maxima behind a tensor's amax, one for each mesh axis that the tensor is sharded over.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

# Read when JAX starts. It concerns CPU devices only, so it does no harm where there are accelerators.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4

M, N, K = 512, 512, 1024
COLLECTIVE = re.compile(
    r" = (\S+|\(.+?\)) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def make_mesh() -> Mesh:
    """Axes "data" and "model" over two, four or eight devices."""
    devices = jax.devices() if len(jax.devices()) >= 2 else jax.devices("cpu")
    count = max(n for n in (2, 4, 8) if n <= len(devices))
    return Mesh(np.array(devices[:count]).reshape(-1, 2), ("data", "model"))


def collectives(compiled: Any) -> str:
    """Such as "2x all-reduce f32[]", from the compiled HLO."""
    matches = COLLECTIVE.findall(compiled.as_text())
    found = Counter(f"{name} {re.sub(r'{[^}]*}', '', shape)}" for shape, name in matches)
    return ", ".join(f"{count}x {what}" for what, count in sorted(found.items())) or "none"


def run(title: str, mesh: Mesh, function: Callable[..., Any], specs: tuple[P, ...], *arrays: Array) -> Any:
    """Calls the function jitted on sharded arrays and prints what became of the sharding."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    result = compiled(*placed)
    print(f"\n{title}\n  operands     {', '.join(map(str, specs))}")
    for path, leaf in jax.tree.leaves_with_path(result):
        print(f"  result       {jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}")
    print(f"  collectives  {collectives(compiled)}")
    return result


def assert_same_bytes(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    print("  checked      the same bytes as on one device")


def assert_close(got: Any, want: Any) -> None:
    """For sums whose order depends on the sharding: over devices, or inside a GPU's GEMM."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    assert worst < 0.01, worst
    print(f"  checked      relative difference to one device {worst:.1e}")


def automatic_sharding(mesh: Mesh, x: Array, w: Array) -> None:
    """jit decides the sharding of every operation from that of the arguments."""
    whole = jnvfp4.quantize(x)
    for spec in (P("data", None), P(None, "model"), P("data", "model")):
        assert_same_bytes(run("quantize", mesh, jnvfp4.quantize, (spec,), x), whole)

    y = jnvfp4.linear(x, w)
    specs = P("data", None), P(None, None)
    assert_close(run("linear, data parallel", mesh, jnvfp4.linear, specs, x, w), y)
    specs = P("data", None), P("model", None)
    assert_close(run("linear, data parallel and tensor parallel over N", mesh, jnvfp4.linear, specs, x, w), y)
    specs = P("data", "model"), P(None, "model")
    assert_close(run("linear, data parallel and tensor parallel over K", mesh, jnvfp4.linear, specs, x, w), y)

    specs = P("data", None), P("model", None)
    assert_close(run("gradients of linear", mesh, gradients, specs, x, w), gradients(x, w))


def loss(x: Array, w: Array) -> Array:
    return jnp.mean(jnvfp4.linear(x, w) ** 2)


gradients = jax.grad(loss, argnums=(0, 1))


def manual_sharding(mesh: Mesh, x: Array, w: Array) -> None:
    """In shard_map every call sees one device's block, so an amax of the whole tensor is asked for by hand."""

    def quantize_block(block: Array) -> jnvfp4.NVFP4Tensor:
        amax = lax.pmax(jnp.max(jnp.abs(block)), ("data", "model"))
        return jnvfp4.quantize(block, amax=amax)

    spec = P("data", "model")
    parts = jnvfp4.NVFP4Tensor(spec, spec, P(), jnvfp4.NVFP4.format)  # type: ignore[arg-type]
    quantize = jax.shard_map(quantize_block, mesh=mesh, in_specs=spec, out_specs=parts)
    assert_same_bytes(run("shard_map: quantize", mesh, quantize, (spec,), x), jnvfp4.quantize(x))

    # Each device quantizes its tokens with their own amax; JAX sums the weights' gradient over "data".
    def mean_loss(block: Array, w: Array) -> Array:
        return lax.pmean(loss(block, w), "data")

    specs = P("data", None), P(None, None)
    sharded_loss = jax.shard_map(mean_loss, mesh=mesh, in_specs=specs, out_specs=P())
    sharded_gradient = jax.grad(sharded_loss, argnums=1)
    dw = run("shard_map: weight gradient of data-parallel linear", mesh, sharded_gradient, specs, x, w)
    float_dw = jax.grad(lambda w: jnp.mean((x @ w.T) ** 2))(w)
    for name, value in (("sharded", dw), ("one device", gradients(x, w)[1])):
        error = np.linalg.norm(np.asarray(value) - np.asarray(float_dw)) / np.linalg.norm(float_dw)
        print(f"  {name:12} relative error to a float32 gradient {error:.3f}")


def main() -> None:
    mesh = make_mesh()
    print(f"{mesh.devices.size} devices ({mesh.devices.flat[0].device_kind}), mesh {dict(mesh.shape)}")
    with jax.default_device(mesh.devices.flat[0]):
        x_key, w_key = jax.random.split(jax.random.key(0))
        x, w = jax.random.normal(x_key, (M, K)), jax.random.normal(w_key, (N, K))
        automatic_sharding(mesh, x, w)
        manual_sharding(mesh, x, w)


if __name__ == "__main__":
    main()
