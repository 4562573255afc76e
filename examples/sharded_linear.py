"""Sharding: ``quantize`` and ``linear`` over a mesh of devices, with the same bytes as on one.

python examples/sharded_linear.py

Uses the real accelerators if there are two or more, else eight virtual CPU devices. Every case prints how the
results are sharded and which collectives XLA compiled, and checks the results against the unsharded ones.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

# Before JAX starts. It makes CPU devices only, so it changes nothing where JAX finds accelerators.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
