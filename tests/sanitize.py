"""Runs every CUDA kernel on small, odd shapes: the program that compute-sanitizer watches. Not a pytest file."""

import jax
import jax.numpy as jnp
import numpy as np

import jnvfp4

jax.config.update("jax_default_device", jax.devices("cuda")[0])
rng = np.random.default_rng(0)

for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    x = jnp.asarray(rng.standard_normal((2, 80, 144)), dtype)
    ragged = jnp.asarray(rng.standard_normal((33, 48)), dtype)
    for spec in jnvfp4.spec.SUPPORTED_SPECS:
        for transpose in (False, True):
            t = jnvfp4.quantize(x, spec, transpose=transpose)
            jnvfp4.quantize(x, spec, amax=t.amax, transpose=transpose)
            jnvfp4.dequantize(t, dtype).block_until_ready()
        if spec.block_rows == 1:
            jnvfp4.quantize(ragged, spec)
            # Source rows that do not start on 16 bytes.
            jnvfp4.quantize(jnp.asarray(rng.standard_normal((64, 35)), dtype), spec, transpose=True)
    a, b = jnvfp4.quantize(ragged, jnvfp4.ROW_SCALED), jnvfp4.quantize(ragged[:31], jnvfp4.ROW_SCALED)
    jnvfp4.matmul_nt(a, b, out_dtype=dtype, bias=jnp.ones(31)).block_until_ready()
    jnvfp4.matmul_nt(a, jnvfp4.quantize(ragged[:32]), out_dtype=dtype).block_until_ready()
    if dtype != jnp.float32:
        jnvfp4.matmul_nt(ragged, b, out_dtype=dtype).block_until_ready()
    batched = jnvfp4.quantize(jnp.asarray(rng.standard_normal((2, 5, 48)), dtype))
    jnvfp4.matmul_nt(batched, batched, out_dtype=dtype).block_until_ready()
print("every kernel ran")
