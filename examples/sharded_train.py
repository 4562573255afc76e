"""Trains the language model over meshes of devices, in bfloat16 and in NVFP4, and lists what each step moves.

    pip install ".[examples]"
    python examples/sharded_train.py
    python examples/sharded_train.py --mesh 1,8,1 2,2,2 --recipe row_scaled --steps 5
    python examples/sharded_train.py --preset gpu --mesh 1,2,1 1,1,2 --steps 20

Uses the accelerators if there are two or more, else eight virtual CPU devices. A mesh has the sizes of "data" (every
device has all weights), "fsdp" (weights are split, and gathered for each layer) and "tensor" (each device multiplies by
its part of the weights). The NVFP4 step quantizes a weight where it is kept and gathers the packed bytes, so it moves
0.28 of the bytes of bfloat16; one all-reduce per step finds the amaxes of all weights. ``lm/sharded.py`` has the
layout of each weight, docs/sharding.md says which layouts cost which collective.

For every mesh two tables show the collectives of a step (those in the loop over layers count once per layer), the
losses, the time of a step and the memory of the compiled step. The last column compares the bytes of the first step's
quantized weights with those of the first mesh: they are the same on every mesh.
"""

import argparse
import os
from dataclasses import replace
from typing import Any

# JAX reads this when it starts. It concerns CPU devices only, so it changes nothing about accelerators.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

from lm import sharded
from lm.collectives import collectives, table
from lm.config import step_count
from lm.data import stdlib_text
from lm.recipes import RECIPES

MESHES = {"cpu": ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2)), "gpu": ((1, 1, 1), (1, 2, 1), (1, 1, 2))}


def mesh_sizes(value: str) -> tuple[int, ...]:
    """Reads an argument of --mesh."""
    parts = value.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be the sizes of data, fsdp and tensor, such as 2,2,2, got {value}")
    return tuple(map(int, parts))


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
    parser.add_argument("--preset", choices=sharded.SIZES, default="cpu", help="sizes of the model")
    parser.add_argument("--mesh", type=mesh_sizes, nargs="+", help="sizes of data, fsdp and tensor, such as 2,2,2")
    parser.add_argument("--recipe", choices=RECIPES, default="pretrain")
    parser.add_argument("--steps", type=step_count, help="training steps on each mesh")
    args = parser.parse_args()
    if len(jax.devices()) == 1:
        jax.config.update("jax_platforms", "cpu")
    config = sharded.SIZES[args.preset]
    config = replace(config, steps=args.steps or config.steps)
    text, _ = stdlib_text()
    first = ""
    for sizes in args.mesh or MESHES[args.preset]:
        mesh = sharded.make_mesh(sizes)
        print(f"\nmesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}")
        bf16 = sharded.train(None, config, mesh, text)
        print(sharded.report("bf16", bf16))
        nvfp4 = sharded.train(RECIPES[args.recipe](), config, mesh, text)
        print(sharded.report("NVFP4", nvfp4))
        print_collectives(bf16.compiled, nvfp4.compiled)
        if gathered := weight_bytes(bf16.compiled):
            print(f"    bytes gathered for the layers: {weight_bytes(nvfp4.compiled) / gathered:.3f} of those in bf16")
        first = first or nvfp4.digest
        print(f"    quantized weights: {'the bytes of the first mesh' if nvfp4.digest == first else 'OTHER BYTES'}")


if __name__ == "__main__":
    main()
