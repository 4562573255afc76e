"""Trains the language model over meshes of devices, in bfloat16 and in NVFP4, and lists what each step moves.

    pip install ".[examples]"
    python examples/sharded_train.py
    python examples/sharded_train.py --mesh 1,8,1 2,2,2 --recipe row_scaled --steps 5
    python examples/sharded_train.py --preset gpu --mesh 1,2,1 1,1,2 --steps 20

Uses the accelerators if there are two or more, else eight virtual CPU devices. A mesh has the sizes of "data" (every
device has all weights), "fsdp" (weights are split, and gathered for each layer) and "tensor" (each device multiplies by
its part of the weights). The NVFP4 step quantizes a weight where it is kept and gathers the packed bytes, so it moves
0.28 of the bytes of bfloat16; one all-reduce a step finds the amaxes of all weights. ``lm/sharded.py`` has the
layout of each weight, docs/sharding.md says which layouts cost which collective.

For every mesh two tables show the collectives of a step (those in the loop over layers count once a layer), the losses,
the time of a step and the memory of the compiled step. The last column compares the bytes of the first step's quantized
weights with those of the first mesh: they are the same on every mesh.
"""

import argparse
import os
import time
from dataclasses import replace
from typing import Any

# JAX reads this when it starts. It concerns CPU devices only, so it changes nothing about accelerators.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh

from jnvfp4 import Recipe
from lm import sharded
from lm.collectives import collectives, table
from lm.config import Config, step_count
from lm.data import stdlib_text, train_batch
from lm.recipes import RECIPES
from lm.train import make_train_step

PRESETS = {
    "cpu": Config(
        layers=2, width=128, heads=4, kv_heads=4, mlp_width=512, seq=64, batch=16, steps=3, peak_lr=3e-3, val_batches=1
    ),
    "gpu": Config(
        layers=12, width=768, heads=12, kv_heads=12, mlp_width=3072, seq=512, batch=32, steps=10, peak_lr=1e-3,
        val_batches=1,
    ),
}  # fmt: skip
MESHES = {"cpu": ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2)), "gpu": ((1, 1, 1), (1, 2, 1), (1, 1, 2))}


def mesh_sizes(value: str) -> tuple[int, ...]:
    """Reads an argument of --mesh."""
    parts = value.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be the sizes of data, fsdp and tensor, such as 2,2,2, got {value}")
    return tuple(map(int, parts))


def run(recipe: Recipe | None, config: Config, mesh: Mesh, text: np.ndarray) -> tuple[Any, str]:
    """Trains in bfloat16 or by a recipe, and prints losses, time and memory.

    Returns:
      the compiled step, and the digest of the first step's quantized weights, if there are any.
    """
    params, state = sharded.init(0, config, mesh)
    kept = sharded.shardings(params, mesh), sharded.shardings(state, mesh)
    if recipe is None:
        train_step = make_train_step(sharded.bf16_linear(mesh), config, 0, out_shardings=(*kept, None))
        digest = ""
    else:
        linear, prepare = sharded.nvfp4_linear(recipe, mesh), sharded.with_amaxes(recipe)
        train_step = make_train_step(linear, config, 0, prepare, out_shardings=(*kept, None))
        digest = sharded.digest(sharded.quantize_weights(params, recipe))

    batches = [sharded.place(train_batch(text, config, 0, step), mesh) for step in range(1, config.steps + 1)]
    compiled = train_step.lower(params, state, batches[0]).compile()
    losses, begin = [], time.perf_counter()
    for step, batch in enumerate(batches):
        params, state, loss = compiled(params, state, batch)
        losses.append(float(loss))
        if step == 0:
            begin = time.perf_counter()
    milliseconds = 1e3 * (time.perf_counter() - begin) / max(1, config.steps - 1)

    memory = compiled.memory_analysis()
    mebibytes = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**20
    print(f"  {'bf16' if recipe is None else 'NVFP4'}: losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"    {milliseconds:.1f} ms a step, {mebibytes:.1f} MiB a device{digest and ', weights ' + digest}")
    return compiled, digest


def print_collectives(bf16: Any, nvfp4: Any) -> None:
    """Prints the collectives of both steps by kind and dtype: how many, and the bytes that they result in."""
    tables = table(bf16), table(nvfp4)
    print(f"    {'collective':28}{'bf16':>24}{'NVFP4':>24}")
    for key in sorted(tables[0] | tables[1]):
        cells = [f"{t[key][0]} x, {t[key][1]:,} B" if key in t else "-" for t in tables]
        print(f"    {' '.join(key):28}{cells[0]:>24}{cells[1]:>24}")


def weight_bytes(compiled: Any) -> int:
    """Returns the bytes that the all-gathers of the loops over layers result in, on one device."""
    return sum(c.nbytes * c.times for c in collectives(compiled) if c.kind == "all-gather" and c.times > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="sizes of the model")
    parser.add_argument("--mesh", type=mesh_sizes, nargs="+", help="sizes of data, fsdp and tensor, such as 2,2,2")
    parser.add_argument("--recipe", choices=RECIPES, default="pretrain")
    parser.add_argument("--steps", type=step_count, help="training steps on each mesh")
    args = parser.parse_args()
    if len(jax.devices()) == 1:
        jax.config.update("jax_platforms", "cpu")
    config = PRESETS[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    text, _ = stdlib_text()
    first = ""
    for sizes in args.mesh or MESHES[args.preset]:
        mesh = sharded.make_mesh(sizes)
        print(f"\nmesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}")
        bf16, _ = run(None, config, mesh, text)
        nvfp4, digest = run(RECIPES[args.recipe](), config, mesh, text)
        print_collectives(bf16, nvfp4)
        if gathered := weight_bytes(bf16):
            print(f"    bytes gathered for the layers: {weight_bytes(nvfp4) / gathered:.3f} of those in bf16")
        first = first or digest
        print(f"    quantized weights: {'the bytes of the first mesh' if digest == first else 'OTHER BYTES'}")


if __name__ == "__main__":
    main()
