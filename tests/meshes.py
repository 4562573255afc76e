"""Meshes, layouts, and what the tests of sharded programs look at: collectives and where results are."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from helpers import amax_shape
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jnvfp4 import NVFP4Tensor, QuantSpec
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR_UNBIASED, ROW_SCALED, WINDOW64, four_over_six

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Specs that shard in different ways; the rest differ from them inside a block only.
SPECS = {
    "nvfp4": NVFP4,
    "nvfp4_2d": NVFP4_2D,
    "rht": NVFP4_RHT,
    "row": ROW_SCALED,
    "window64": WINDOW64,
    "4over6": four_over_six(),
    "4over6_2d": four_over_six(block_rows=16),
    "search": QuantSpec(select="search"),
}
VARIED_SPECS = (NVFP4, NVFP4_2D, NVFP4_RHT, ROW_SCALED, WINDOW64, NVFP4_RHT_SR_UNBIASED, four_over_six(block_rows=16))
X = Case("x", (512, 1024))  # either axis splits into eight times 64
KEY = jax.random.key(7)

# Mesh "xy" has two axes, mesh "x" has one; every layout of [M, K] over them.
LAYOUTS = [
    ("xy", P("x", None)),
    ("xy", P(None, "y")),
    ("xy", P("x", "y")),
    ("xy", P(("x", "y"), None)),
    ("xy", P(None, ("x", "y"))),
    ("x", P("x", None)),
    ("x", P(None, "x")),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_mesh(devices, axes="xy", kind="auto"):
    shape = (2, len(devices) // 2) if axes == "xy" else (len(devices),)
    return jax.make_mesh(shape, tuple(axes), axis_types=(KINDS[kind],) * len(axes), devices=devices)


def axes_of(entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def ways(mesh, entry) -> int:
    return math.prod(mesh.shape[a] for a in axes_of(entry))


def put(x, mesh, spec):
    """From NumPy, since JAX compiles a program to split the array of a device."""
    return jax.device_put(jax.tree.map(np.asarray, x), NamedSharding(mesh, spec))


def shard(tensor, mesh, spec):
    """An NVFP4Tensor with data, scale and (as far as it has the axes) amax sharded."""
    amax = put(tensor.amax, mesh, P(*spec[: tensor.amax.ndim]))
    return NVFP4Tensor(put(tensor.data, mesh, spec), put(tensor.scale, mesh, spec), amax, tensor.format)


def shard_data(t, mesh, spec):
    """An NVFP4Tensor with data alone sharded."""
    return NVFP4Tensor(put(t.data, mesh, spec), put(t.scale, mesh, P()), put(t.amax, mesh, P()), t.format)


def home(devices, x):
    """x on the first device: the unsharded run."""
    return jax.tree.map(lambda v: jax.device_put(v, devices[0]), x)


_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast)(-start)?\("
)


def run(f, *args) -> tuple:
    """The result of jit(f), and (instruction, result type) of each collective of the compiled program."""
    compiled = jax.jit(f).lower(*args).compile()
    return compiled(*args), collectives(compiled.as_text())


def collectives(hlo: str) -> list[tuple[str, str]]:
    """Instruction and result type of each; of gathers and scatters that XLA combines, one for each result."""
    found = []
    for shape, op, start in _COLLECTIVE.findall(hlo):
        result = re.sub(r"\{[^}]*\}", "", shape)
        if start and result.startswith("(("):  # operands, then results
            result = result[result.index(")") + 1 : -1].lstrip(", ")
        elif start and op in ("all-gather", "collective-permute"):
            result = re.findall(r"\w+\[[\d,]*\]", result)[1]
        combined = op in ("all-gather", "reduce-scatter") and result.startswith("(")
        found += [(op, part) for part in (re.findall(r"\w+\[[\d,]*\]", result) if combined else [result])]
    return found


def dtypes_of(shapes) -> set[str]:
    return {name for shape in shapes for name in re.findall(r"(\w+)\[", shape)}


def elements(shape: str) -> int:
    """Of a result, or of all that are combined in one."""
    return sum(math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", shape))


def is_maximum(shape: str) -> bool:
    """Whether a collective of this type can only be that of amax bits: a few integers, combined or not."""
    return re.sub(r"u(16|32)\[\d?\]|[(), ]", "", shape) == ""


def assert_scalar_maxima(found, mesh, entries):
    """All-reduces of one number, at most one per mesh axis that splits anything, at least one if any does."""
    split = [a for entry in entries for a in axes_of(entry) if mesh.shape[a] > 1]
    assert all(op == "all-reduce" and is_maximum(shape) for op, shape in found), found
    assert min(1, len(split)) <= len(found) <= len(split), (found, split)


def assert_sharded(x, mesh, spec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)


def given_amax(shape, scope, transpose):
    """An amax of its own for whatever has one, below and above the largest magnitudes."""
    if scope == "tensor":
        return jnp.float32(3.5)
    parts = amax_shape(scope, shape[::-1] if transpose else shape)
    return jnp.linspace(1.0, 4.0, math.prod(parts), dtype=jnp.float32).reshape(parts)
