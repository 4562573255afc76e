"""Benchmarks of jnvfp4: ``python -m benchmarks quantize|gemm|linear|plot|compare``. See benchmarks/README.md."""
