"""One JAX primitive per file: abstract eval, batching, lowering and sharding rule of one operation."""
