"""The language model over a mesh of devices with the axes "data", "fsdp" and "tensor".

Batches are split over "data" and "fsdp". Weights are split over "fsdp", which gathers them for a layer, and over
"tensor", where every device multiplies by its own part: "qkv" and "mlp_up" by their rows (column parallel),
"attention_out" and "mlp_down" by their columns (row parallel), so that one sum follows each pair.
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from lm.config import Config
from lm.data import train_batch
from lm.model import Linear, Tree, init_params, quantized_linear, stacks
from lm.train import init_optimizer, make_train_step

SIZES = {
    "cpu": Config(
        layers=2, width=128, heads=4, kv_heads=4, mlp_width=512, seq=64, batch=16, steps=3, peak_lr=3e-3, val_batches=1
    ),
    "gpu": Config(
        layers=12, width=768, heads=12, kv_heads=12, mlp_width=3072, seq=512, batch=32, steps=10, peak_lr=1e-3,
        val_batches=1,
    ),
}  # fmt: skip
AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"), None)
# Of a weight [N, K]: as it is kept, and as a layer multiplies by it.
COLUMN = (P(("tensor", "fsdp"), None), P("tensor", None))
ROW = (P("fsdp", "tensor"), P(None, "tensor"))
WEIGHTS = {"qkv": COLUMN, "attention_out": ROW, "mlp_up": COLUMN, "mlp_down": ROW}


def make_mesh(sizes: tuple[int, ...]) -> Mesh:
    """Makes a mesh of the first devices with the sizes of "data", "fsdp" and "tensor"."""
    count = int(np.prod(sizes))
    if count > len(jax.devices()):
        raise ValueError(f"a mesh of {sizes} must have at most {len(jax.devices())} devices, got {count}")
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES)


def shardings(params: Tree, mesh: Mesh) -> Tree:
    """Returns how the weights, or an optimizer state with copies of their tree and with amaxes, are kept."""

    def sharding(path: Any, leaf: Array) -> NamedSharding:
        name = str(path[-1].key)
        if name in WEIGHTS and leaf.ndim == 3:
            return NamedSharding(mesh, P(None, *WEIGHTS[name][0]))
        return NamedSharding(mesh, P(None, "fsdp") if name in ("embedding", "head", "position") else P())

    return jax.tree.map_with_path(sharding, params)


def init(seed: int, config: Config, mesh: Mesh, recipe: jnvfp4.Recipe | None) -> tuple[Tree, Tree]:
    """Draws the weights and makes the optimizer state where they are kept; the values do not depend on the mesh."""

    def draw() -> tuple[Tree, Tree]:
        params = init_params(jax.random.key(seed), config)
        return params, init_optimizer(params, recipe)

    return jax.jit(draw, out_shardings=shardings(jax.eval_shape(draw), mesh))()


def place(batch: np.ndarray, mesh: Mesh) -> Array:
    """Splits a batch that every process has over the mesh."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])


# Linear layers


def constrain(x: Array, mesh: Mesh, *entries: Any) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))


def on_mesh(linear: Linear, mesh: Mesh) -> Linear:
    """Returns the layer with tokens split as the batch is, and with features split where its weight is."""

    def placed(x: Array, w: Any, key: Array, name: str) -> Array:
        n, k = WEIGHTS[name][1]
        return constrain(linear(constrain(x, mesh, *BATCH, k), w, key, name), mesh, *BATCH, n)

    return placed


def bf16_linear(mesh: Mesh) -> Linear:
    """Returns the product in bfloat16 that gathers a weight in 16 bits."""

    def linear(x: Array, w: Array, key: Array, name: str) -> Array:
        kept, gathered = WEIGHTS[name]
        return x @ constrain(constrain(w.astype(x.dtype), mesh, *kept), mesh, *gathered).T

    return on_mesh(linear, mesh)


def nvfp4_linear(recipe: jnvfp4.Recipe, mesh: Mesh) -> Linear:
    """Returns the layer that quantizes a weight where it is kept and gathers the packed bytes."""
    return on_mesh(quantized_linear(recipe, lambda name: tuple(NamedSharding(mesh, p) for p in WEIGHTS[name])), mesh)


# Bits


def quantize_weights(params: Tree, recipe: jnvfp4.Recipe) -> Tree:
    """Quantizes the weights of the linear layers where they are kept, as a step does."""
    assert recipe.fprop is not None
    spec = recipe.fprop.w
    quantize = jax.jit(jax.vmap(lambda w: jnvfp4.quantize(w, spec)))
    return {name: quantize(w) for name, w in stacks(params).items()}


def digest(tree: Tree) -> str:
    """Returns a hash of the bytes of global arrays, the same in every process and for every mesh."""
    state = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        as_bytes = jax.lax.bitcast_convert_type(leaf, jnp.uint8) if leaf.dtype.itemsize == 1 else leaf
        whole = multihost_utils.process_allgather(as_bytes, tiled=True)
        state.update(np.ascontiguousarray(whole).tobytes())
    return state.hexdigest()[:16]


# Training


@dataclass(frozen=True)
class Run:
    """Holds what a training run showed.

    Attributes:
      losses: of each step.
      milliseconds: of a step after the first.
      mebibytes: memory of a device that the compiled step needs, its arguments included.
      digest: of the bytes of the first step's quantized weights; empty for bfloat16.
      compiled: the compiled step.
    """

    losses: list[float]
    milliseconds: float
    mebibytes: float
    digest: str
    compiled: Any


def train(recipe: jnvfp4.Recipe | None, config: Config, mesh: Mesh, text: np.ndarray) -> Run:
    """Trains over a mesh by a recipe, or in bfloat16 if it is None."""
    params, state = init(0, config, mesh, recipe)
    kept = shardings(params, mesh), shardings(state, mesh), None, None
    if recipe is None:
        train_step, digested = make_train_step(bf16_linear(mesh), config, 0, out_shardings=kept), ""
    else:
        train_step = make_train_step(nvfp4_linear(recipe, mesh), config, 0, out_shardings=kept)
        digested = digest(quantize_weights(params, recipe))

    batches = [place(train_batch(text, config, 0, step), mesh) for step in range(1, config.steps + 1)]
    compiled = train_step.lower(params, state, batches[0]).compile()
    losses, begin = [], 0.0
    for batch in batches:
        params, state, loss, _ = compiled(params, state, batch)
        losses.append(float(loss))  # waits for the step
        begin = begin or time.perf_counter()
    milliseconds = 1e3 * (time.perf_counter() - begin) / max(1, config.steps - 1)
    memory = compiled.memory_analysis()
    mebibytes = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**20
    return Run(losses, milliseconds, mebibytes, digested, compiled)


def report(name: str, run: Run) -> str:
    losses = ", ".join(f"{loss:.4f}" for loss in run.losses)
    weights = f", weights {run.digest}" if run.digest else ""
    return f"  {name}: losses {losses}\n    {run.milliseconds:.1f} ms a step, {run.mebibytes:.1f} MiB a device{weights}"
