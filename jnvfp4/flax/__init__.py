"""NVFP4 for Flax models as they are: ``jnvfp4.flax.linen``, ``jnvfp4.flax.nnx`` and ``calibrate``. Needs flax 0.12."""

from . import linen as linen
from . import nnx as nnx
from ._calibrate import calibrate as calibrate
