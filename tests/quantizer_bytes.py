"""Digests of what quantizers write, from the same operand on any mesh.

As a script it is one of two processes and prints them as JSON:

    python quantizer_bytes.py COORDINATOR PROCESS
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

from jnvfp4 import NVFP4Tensor, quantize
from jnvfp4.spec import SUPPORTED_SPECS, name_of


@jax.jit
def quantize_by_every_spec(x: jax.Array) -> dict[str, NVFP4Tensor]:
    """In either orientation, in one program."""
    key = jax.random.key(7)
    return {
        f"{name_of(spec)} {'columns' if transpose else 'rows'}": quantize(
            x, spec, key=key if spec.rounding == "stochastic" else None, transpose=transpose
        )
        for spec in SUPPORTED_SPECS
        for transpose in (False, True)
    }


def digest(tensor: NVFP4Tensor) -> str:
    """Of the whole tensor, which every process finds out."""
    state = hashlib.sha256()
    for part in (tensor.data, jax.lax.bitcast_convert_type(tensor.scale, jnp.uint8), tensor.amax):
        state.update(np.asarray(multihost_utils.process_allgather(part, tiled=True)).tobytes())
    return state.hexdigest()


def digests(devices: list) -> dict[str, str]:
    """Of a matrix split along its rows, as FSDP splits tokens and weights; whole windows of 64 on eight devices."""
    x = np.random.default_rng(0).standard_normal((512, 256)).astype(jnp.bfloat16)
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x", None))
    tensors = quantize_by_every_spec(jax.make_array_from_callback(x.shape, sharding, x.__getitem__))
    return {name: digest(tensor) for name, tensor in tensors.items()}


if __name__ == "__main__":
    coordinator, process = sys.argv[1:]
    jax.distributed.initialize(coordinator, 2, int(process))
    print(json.dumps(digests(jax.devices())))
