"""The command ``conform``: what this library gives for the vectors of ``jnvfp4.conformance``, on each platform."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import reference
from .._core.softfloat import from_bits, to_bits
from .._core.tensor import NVFP4Tensor
from .._ops.matmul import matmul_nt
from .._ops.quantize import dequantize, quantize
from .._version import __version__
from ..conformance.__main__ import Arrays, Case, Vectors, compare, load, table
from ..spec import Format, QuantSpec

Implementation = Any  # "native", "reference" or None, as in ``quantize``


def results_of(vectors: Vectors, implementation: Implementation, rules: tuple[str, ...] = ()) -> Arrays:
    """Computes the outputs of all cases, or of some rules, on the default device.

    The casts and other steps of operations, which are no functions of their own, are those of ``jnvfp4.reference``.
    """
    found: Arrays = {}
    for name, case in vectors.cases.items():
        rule = name.split("/")[0]
        if rule in rules or not rules:
            outputs = _outputs(rule.partition(" ")[2], case, implementation)
            found |= {f"{name}/{output}": np.asarray(array) for output, array in outputs}
    (device,) = jnp.zeros(()).devices()
    found["meta"] = np.array(json.dumps({"implementation": f"jnvfp4, {device.device_kind}", "version": __version__}))
    return found


def tables() -> list[tuple[str, bool]]:
    """Returns for the first device of each platform a table of rules, and whether all of them are equal."""
    found = []
    for platform in ("cpu", "cuda"):
        try:
            device = jax.local_devices(backend=platform)[0]
        except RuntimeError:  # JAX has no such platform here
            continue
        with jax.default_device(device):
            found.append(_table(results_of(load(), None)))
    return found


def record(path: Path) -> list[tuple[str, bool]]:
    """Writes what the default device gives; returns its table."""
    results = results_of(load(), None)
    with open(path, "wb") as file:  # of a path, NumPy changes the suffix
        np.savez_compressed(file, **dict[str, Any](results))
    return [_table(results)]


def _table(results: Arrays) -> tuple[str, bool]:
    found = compare(results, load())
    return table(results, found), set(found.values()) <= {"equal", "not offered"}


def _outputs(rule: str, case: Case, implementation: Implementation) -> Iterator[tuple[str, Any]]:
    if "x" in case and "select" in case:
        yield from _of_tensor(_quantized(case, implementation))
    elif rule == "dequantize":
        t = NVFP4Tensor(*_bytes(case["data"], case["scale"], case["amax"]), Format(case["scope"], case["e4m3_max"]))
        yield "y", _stored(dequantize(t, case["dtype"], implementation=implementation))
    elif rule.startswith("product"):
        yield "y", _stored(_product(case, implementation))
    elif rule in _STEPS:
        yield from zip(*_STEPS[rule](case), strict=True)


def _quantized(case: Case, implementation: Implementation) -> NVFP4Tensor:
    scoped = Format(case["scope"], case["e4m3_max"], case["rht"])
    spec = QuantSpec(scoped, case["block_rows"], case["select"], case["error_math"], case["rounding"], case["headroom"])
    key = jax.random.wrap_key_data(jnp.asarray(case["key"])) if "key" in case else None
    call = partial(quantize, amax=case.get("amax"), key=key, transpose=case["transpose"], implementation=implementation)
    return call(_array(case["x"]), spec)


def _of_tensor(t: NVFP4Tensor) -> Iterator[tuple[str, Any]]:
    yield from (("data", t.data), ("scale", np.asarray(t.scale).view(np.uint8)), ("amax", t.amax))


def _bytes(data: np.ndarray, scale: np.ndarray, amax: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(data), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(amax)


def _product(case: Case, implementation: Implementation) -> jax.Array:
    def operand(side: str) -> NVFP4Tensor:
        arrays = _bytes(*(case[f"{side}_{field}"] for field in ("data", "scale", "amax")))
        return NVFP4Tensor(*arrays, Format(_scope(case[f"{side}_amax"]), case[f"{side}_e4m3_max"]))

    a = _array(case["a"]) if "a" in case else operand("a")
    options = {"bias": case.get("bias"), "accumulation": "pinned", "implementation": implementation}
    return matmul_nt(a, operand("b"), out_dtype=case["dtype"], **options)


def _scope(amax: np.ndarray) -> Any:
    return ("tensor", "row", "window64")[amax.ndim]


def _array(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x)


def _stored(array: jax.Array) -> np.ndarray:
    y = np.asarray(array)
    return y.view(np.uint16) if y.dtype == ml_dtypes.bfloat16 else y


def _rotated(case: Case) -> jax.Array:
    x = _array(case["x"])
    return from_bits(reference.rht16(to_bits(x).reshape(*x.shape[:-1], -1, 16)).reshape(x.shape))


def _scales(case: Case) -> tuple[jax.Array, jax.Array]:
    amax, e4m3_max = to_bits(jnp.asarray(case["amax"])), case["e4m3_max"]
    return from_bits(reference.encode_scale(amax, e4m3_max)), from_bits(reference.global_scale(amax, e4m3_max)[0])


def _random(case: Case) -> jax.Array:
    low, high = (jnp.asarray((case["index"] >> np.uint64(32 * i)).astype(np.uint32)) for i in (0, 1))
    return reference.random_bits(tuple(jnp.asarray(case["words"])), low, high, case["transpose"]).astype(jnp.uint8)


_STEPS = {
    "elements": lambda c: (("code",), (reference.e2m1_encode(to_bits(jnp.asarray(c["x"]))),)),
    "scales": lambda c: (("byte",), (reference.e4m3_encode(to_bits(jnp.asarray(c["x"]))),)),
    "packing": lambda c: (("data",), (reference.pack_codes(jnp.asarray(c["code"])),)),
    "tensor scale": lambda c: (("encode", "decode"), _scales(c)),
    "rotation": lambda c: (("y",), (_rotated(c),)),
    "stochastic cast": lambda c: (
        ("code",),
        (reference.e2m1_encode_stochastic(to_bits(jnp.asarray(c["v"])), jnp.asarray(c["r"])),),
    ),
    "random bytes": lambda c: (("r",), (_random(c),)),
}
