"""One JAX primitive per file: abstract eval, batching, lowering and sharding rule of one operation."""

from .self_check import cases as _cases  # noqa: F401  (a primitive is checked by the cases of its name)
