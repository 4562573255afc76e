"""Digests of what the quantizers of a training step write, from the same operands on any mesh.

As a script it is one of several processes and prints them as JSON:

    python step_bytes.py PROCESS PROCESSES COORDINATOR
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jnvfp4 import NVFP4, ROW_SCALED, NVFP4Tensor, QuantSpec, Recipe, quantize, recipes

EVERY_RECIPE = {
    "default": recipes.DEFAULT,
    "pretrain": recipes.pretrain(),
    "pretrain_1d": recipes.pretrain(weight_tiles=False),
    "unbiased": recipes.pretrain(unbiased=True),
    "dequantized": recipes.pretrain(backward="dequantized"),
    "high_precision": recipes.pretrain(backward="high_precision"),
    "row_scaled": recipes.row_scaled(),
    "four_over_six": recipes.four_over_six(),
    "four_over_six_all": recipes.four_over_six("all", "mse", e4m3_max=448, fast=True),
    "window64": recipes.window64(),
    "pretrain_4over6": recipes.pretrain_4over6(),
    "rl": recipes.rl(),
    "rl_4over6": recipes.rl(four_over_six=True),
    "inference": recipes.inference(),
    "rows_of_w": Recipe(fprop=(NVFP4, ROW_SCALED), dgrad=(NVFP4, ROW_SCALED)),
    "backward_alone": Recipe(fprop=None),
}
SHAPES = {"x": (512, 256), "w": (512, 256), "dy": (512, 512)}  # whole windows of 64 on eight devices
TRANSPOSED = {"fprop": (), "dgrad": ("w",), "wgrad": ("dy", "x")}  # operands that a GEMM contracts along their rows


def quantizers(recipe: Recipe) -> dict[str, tuple[str, QuantSpec, bool]]:
    """By GEMM and operand: the operand, its spec, and whether it is transposed."""
    gemms = {"fprop": recipe.fprop, "dgrad": recipe.dgrad_specs, "wgrad": recipe.wgrad_specs}
    return {
        f"{gemm}.{operand}": (operand, spec, operand in TRANSPOSED[gemm])
        for gemm, specs in gemms.items()
        if specs is not None
        for operand, spec in specs._asdict().items()
        if spec is not None
    }


def operands(mesh: Mesh) -> dict[str, jax.Array]:
    """Split along their rows, as FSDP splits tokens and weights."""
    sharding, random = NamedSharding(mesh, P(mesh.axis_names[0], None)), np.random.default_rng(0)
    values = {name: random.standard_normal(shape).astype(jnp.bfloat16) for name, shape in SHAPES.items()}
    return {name: jax.make_array_from_callback(v.shape, sharding, v.__getitem__) for name, v in values.items()}


def digest(tensor: NVFP4Tensor) -> str:
    """Of the whole tensor, which every process finds out."""
    state = hashlib.sha256()
    for part in (tensor.data, jax.lax.bitcast_convert_type(tensor.scale, jnp.uint8), tensor.amax):
        state.update(np.asarray(multihost_utils.process_allgather(part, tiled=True)).tobytes())
    return state.hexdigest()


def digests(devices: list) -> dict[str, str]:
    """By recipe, GEMM and operand."""
    given = operands(Mesh(np.array(devices), ("x",)))
    found: dict[tuple[str, QuantSpec, bool], str] = {}
    result = {}
    for name, recipe in EVERY_RECIPE.items():
        for which, use in quantizers(recipe).items():
            operand, spec, transpose = use
            key = jax.random.fold_in(jax.random.key(7), list(SHAPES).index(operand))
            if spec.rounding != "stochastic":
                key = None
            if use not in found:
                f = jax.jit(lambda v, k, spec=spec, transpose=transpose: quantize(v, spec, key=k, transpose=transpose))
                found[use] = digest(f(given[operand], key))
            result[f"{name} {which}"] = found[use]
    return result


if __name__ == "__main__":
    process, processes, coordinator = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(processes), int(process))
    print(json.dumps(digests(jax.devices())))
