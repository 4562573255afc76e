"""Shards ``quantize`` and ``linear`` over a mesh of devices and compares the results with those of one device.

    pip install .
    python examples/sharded_linear.py

Uses the accelerators if there are two or more, else eight virtual CPU devices. Every case prints how its results are
sharded and which collectives XLA compiled, and compares them with the same call on one device: quantized tensors have
the same bytes, and GEMMs are close, as sums have another order. A u32[] all-reduce finds the amax of a tensor; there is
one per mesh axis that the tensor is sharded over.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

# JAX reads this when it starts. It concerns CPU devices only, so it changes nothing about accelerators.
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
    """Makes a mesh with the axes "data" and "model" of two, four or eight devices."""
    devices = jax.devices() if len(jax.devices()) >= 2 else jax.devices("cpu")
    count = max(n for n in (2, 4, 8) if n <= len(devices))
    return Mesh(np.array(devices[:count]).reshape(-1, 2), ("data", "model"))


def collectives(compiled: Any) -> str:
    """Lists the collectives of the compiled HLO, such as "2x all-reduce f32[]"."""
    matches = COLLECTIVE.findall(compiled.as_text())
    counts = Counter(f"{name} {re.sub(r'{[^}]*}', '', shape)}" for shape, name in matches)
    return ", ".join(f"{count}x {collective}" for collective, count in sorted(counts.items())) or "none"


def run(title: str, mesh: Mesh, function: Callable[..., Any], specs: tuple[P, ...], *arrays: Array) -> Any:
    """Jits the function, calls it on sharded arrays and prints the shardings and the collectives."""
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    result = compiled(*placed)
    print(f"\n{title}\n  operands     {', '.join(map(str, specs))}")
    for path, leaf in jax.tree.leaves_with_path(result):
        print(f"  result       {jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}")
    print(f"  collectives  {collectives(compiled)}")
    return result


def assert_same_bytes(sharded: Any, single: Any) -> None:
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    print("  checked      the same bytes as on one device")


def assert_close(sharded: Any, single: Any) -> None:
    """Compares sums, whose order depends on the sharding: over devices, or in the GEMM of a GPU."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    assert worst < 0.01, worst
    print(f"  checked      relative difference to one device {worst:.1e}")


def automatic_sharding(mesh: Mesh, x: Array, w: Array) -> None:
    """Lets jit shard every operation; it decides from the shardings of the arguments."""
    single = jnvfp4.quantize(x)
    for spec in (P("data", None), P(None, "model"), P("data", "model")):
        assert_same_bytes(run("quantize", mesh, jnvfp4.quantize, (spec,), x), single)

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
    """Shards by shard_map, where a call sees the block of one device; the caller finds the amax of the whole tensor."""

    def quantize_block(block: Array) -> jnvfp4.NVFP4Tensor:
        amax = lax.pmax(jnp.max(jnp.abs(block)), ("data", "model"))
        return jnvfp4.quantize(block, amax=amax)

    spec = P("data", "model")
    parts = jnvfp4.NVFP4Tensor(spec, spec, P(), jnvfp4.NVFP4.format)  # type: ignore[arg-type]
    quantize = jax.shard_map(quantize_block, mesh=mesh, in_specs=spec, out_specs=parts)
    assert_same_bytes(run("shard_map: quantize", mesh, quantize, (spec,), x), jnvfp4.quantize(x))

    # Every device quantizes its tokens with the amax of its block; JAX sums the gradient of w over "data".
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
