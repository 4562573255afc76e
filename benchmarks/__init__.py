"""Benchmarks of jnvfp4: ``python -m benchmarks quantize|gemm``. See benchmarks/README.md."""
