"""A tour of jnvfp4: quantize a matrix, dequantize it, multiply, transpose, differentiate.

    pip install .
    python examples/quantize.py

Runs in seconds on a CPU or a GPU. The matrices are random normal numbers.
"""

import jax
import jax.numpy as jnp
from jax import Array

import jnvfp4


def relative_error(result: Array, exact: Array) -> str:
    error = jnp.linalg.norm(result.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    return f"{100 * float(error):.2f}%"


def first_elements(x: Array) -> str:
    return " ".join(f"{float(value):6.3f}" for value in x[0, :8])


def main() -> None:
    x_key, w_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (512, 1024))
    w = jax.random.normal(w_key, (256, 1024))

    print("Quantize: 4-bit codes, an 8-bit scale per 16 of them, a float32 amax (largest magnitude) for the tensor.")
    qx, qw = jnvfp4.quantize(x), jnvfp4.quantize(w)
    for name, part in (("data", qx.data), ("scale", qx.scale), ("amax", qx.amax)):
        print(f"  {name:5} {part.dtype.name:13} {part.shape}")
    size = qx.data.nbytes + qx.scale.nbytes + qx.amax.nbytes
    print(f"  {size / x.size:.4f} bytes per element, against {x.itemsize} in float32")

    print("\nDequantize: the first eight elements before and after.")
    print(f"  x           {first_elements(x)}")
    print(f"  dequantized {first_elements(jnvfp4.dequantize(qx))}")
    print(f"  relative error over all of x: {relative_error(jnvfp4.dequantize(qx), x)}")

    print("\nSpecs: NVFP4_2D gives a matrix and its transpose the same values; ROW_SCALED has an amax for each row.")
    for name in ("NVFP4", "NVFP4_2D", "ROW_SCALED"):
        q = jnvfp4.quantize(x, getattr(jnvfp4, name))
        error = relative_error(jnvfp4.dequantize(q), x)
        print(f"  {name:10} amax of shape {q.amax.shape!s:6} relative error {error}")

    print("\nMultiply: x w^T from the quantized tensors, and from x in bfloat16 with a quantized w.")
    exact = x @ w.T
    print(f"  both quantized: {relative_error(jnvfp4.matmul_nt(qx, qw), exact)}")
    print(f"  only w:         {relative_error(jnvfp4.matmul_nt(x.astype(jnp.bfloat16), qw), exact)}")

    print("\nTranspose: blocks run along the last axis, so the transpose is quantized from x, not from qx.")
    qx_t = jnvfp4.quantize(x, transpose=True)
    print(f"  quantize(x).shape {qx.shape}, quantize(x, transpose=True).shape {qx_t.shape}")

    print("\nDifferentiate: linear quantizes the operands of the forward GEMM and of both gradient GEMMs.")

    def loss(x: Array, w: Array) -> Array:
        return jnp.mean(jnvfp4.linear(x, w) ** 2)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    exact_gradients = jax.grad(lambda x, w: jnp.mean((x @ w.T) ** 2), argnums=(0, 1))(x, w)
    for name, result, exact in zip(("dx", "dw"), gradients, exact_gradients, strict=True):
        print(f"  {name} {result.dtype} {result.shape}: relative error {relative_error(result, exact)}")


if __name__ == "__main__":
    main()
