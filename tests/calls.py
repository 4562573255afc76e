"""A valid call of every FFI target, and calls that differ from it in one operand, result or attribute."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_SR, NVFP4_SR_UNBIASED, ROW_SCALED, WINDOW64, QuantSpec
from jnvfp4._native import plans

U8, U32, F32, BF16 = jnp.uint8, jnp.uint32, jnp.float32, jnp.bfloat16
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Array:
    """An operand or result: its name in errors, its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    may_be: tuple[tuple[int, ...], ...] = ()  # other shapes that are accepted
    also: tuple[Any, ...] = ()  # other dtypes that are accepted

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def random(self) -> jax.Array:
        """Random bytes; zeros for types of less than a byte."""
        dtype = jnp.dtype(self.dtype)
        if dtype in (jnp.int4, jnp.float4_e2m1fn):
            return jnp.zeros(self.shape, dtype)
        drawn = np.random.default_rng(0).bytes(math.prod(self.shape) * dtype.itemsize)
        return jnp.asarray(np.frombuffer(drawn, dtype).reshape(self.shape))


@dataclass(frozen=True)
class Call:
    target: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    in_place: bool = False  # each result is the operand of its number

    def run(self) -> Any:
        operands = [o.random() for o in self.operands]
        same = {i: i for i, pair in enumerate(zip(self.operands, self.results, strict=False)) if pair[0] == pair[1]}
        results, aliases = [r.struct() for r in self.results], same if self.in_place else None
        options = {"has_side_effect": True, "input_output_aliases": aliases}
        call = jax.ffi.ffi_call(f"nvfp4_{self.target}", results, **options)
        return jax.block_until_ready(call(*operands, **self.attrs))


def absent(name: str, dtype: Any = F32) -> Array:
    """An operand or result that the call does without; any shape without elements says so."""
    more = ((), (1,), (3,)) if name == "scratch" else ()  # more scratch than needed does no harm
    return Array(name, (0,), dtype, ((0, 1), (1, 0), *more))


def side(lead: tuple[int, ...], rows: int, cols: int, spec: QuantSpec, given: bool, name: str = "") -> tuple:
    """The amax, the stream, and the results data, scale and found amax of one orientation."""
    scope = spec.format.amax_scope
    shape = {"tensor": (), "row": (*lead, rows), "window64": (*lead, rows, cols // 64)}[scope]
    others = (lead,) if scope == "tensor" else ()
    amax = Array(f"{name}amax", shape, F32, others) if given else absent(f"{name}amax")
    stochastic = spec.rounding == "stochastic"
    stream = Array(f"{name}stream", (*lead, 4), U32) if stochastic else absent(f"{name}stream", U32)
    found = absent(f"{name}found amax") if given else Array(f"{name}found amax", shape, F32)
    data = Array(f"{name}data", (*lead, rows, cols // 2), U8)
    return amax, stream, (data, Array(f"{name}scale", (*lead, rows, cols // 16), U8), found)


def quantize_call(spec: QuantSpec, given: bool, transpose: bool = False, cols: int = 128) -> Call:
    lead, rows = (2,), 64
    amax, stream, results = side(lead, *((cols, rows) if transpose else (rows, cols)), spec, given)
    attrs = {"transpose": transpose, "spec": spec.ffi_attrs(), "row_blocks": np.int32(16)}
    return Call("quantize", (Array("x", (*lead, rows, cols), BF16, also=FLOATS), amax, stream), results, attrs)


def pair_call(spec: QuantSpec, given: bool, rows: int = 64) -> Call:
    cols = 128
    row_amax, row_stream, row = side((), rows, cols, spec, given, "row ")
    col_amax, col_stream, col = side((), cols, rows, spec, given, "col ")
    attrs = {"row_spec": spec.ffi_attrs(), "col_spec": spec.ffi_attrs()}
    attrs |= {"row_blocks": np.int32(8), "col_blocks": np.int32(4)}
    operands = (Array("x", (rows, cols), F32, also=FLOATS), row_amax, col_amax, row_stream, col_stream)
    return Call("quantize_pair", operands, (*row, *col), attrs)


def tensor(name: str, rows: int, cols: int, windows: bool) -> tuple[Array, Array, Array]:
    amax = Array(f"{name}amax", (rows, cols // 64), F32) if windows else Array(f"{name}amax", (), F32, ((rows,),))
    return Array(f"{name}data", (rows, cols // 2), U8), Array(f"{name}scale", (rows, cols // 16), U8), amax


def scratch_of(needed: int) -> Array:
    more = ((needed, 1), (1, needed), (needed + 1,), (2 * needed,))  # as in absent()
    return Array("scratch", (needed,), U8, more) if needed else absent("scratch", U8)


def matmul_call(kernel: str, dense: bool = False, windows: bool = False, k: int = 128) -> Call:
    m, n = 72 if windows else 24, 32  # more rows than kernels of GPUs take that need no scratch, which would run then
    a = (Array("a", (m, k), BF16, also=(jnp.float16,)), absent("a scale", U8), absent("a amax"))
    bias = Array("bias", (n,), BF16, ((0,), (m, n)) if kernel.startswith("cpu") else ((0,),), FLOATS)
    left, capability = "bfloat16" if dense else "nvfp4", 80 if kernel.startswith("sm80") else 0
    problem = {"shape": (1, m, n, k), "a": left, "windows": windows, "out": "float32", "pinned": False}
    needed = plans.plan_matmul(**problem, capability=capability, kernel=kernel).scratch_bytes
    results = (Array("out", (m, n), F32, also=FLOATS), scratch_of(needed))
    gain = replace(absent("gain"), also=FLOATS)  # only a kernel of Hopper takes one
    operands = (*(a if dense else tensor("a ", m, k, windows)), *tensor("b ", n, k, False), bias, gain)
    attrs = {"kernel": kernel, "pinned": False, "a_windows": windows, "b_windows": False, "epsilon": np.float32(1)}
    attrs |= {"a_e4m3_max": np.int32(448), "b_e4m3_max": np.int32(448)}
    return Call("matmul", operands, results, attrs)


def norm_call() -> Call:
    m, n, k = 3, 32, 256
    bias, gain = Array("bias", (n,), BF16, ((0,), (m, n)), FLOATS), Array("gain", (k,), BF16, ((0,),), FLOATS)
    call = matmul_call("sm90_dense_small_m", dense=True, k=k)
    a = replace(call.operands[0], shape=(m, k))
    results = (replace(call.results[0], shape=(m, n)), absent("scratch", U8))
    return replace(call, operands=(a, *call.operands[1:-2], bias, gain), results=results)


def grouped_call(kernel: str, dense: bool, m: int = 24) -> Call:
    g, n, k = 3, 32, 128
    left = "bfloat16" if dense else "nvfp4"
    capability = 90 if kernel.startswith("sm90") else 0
    scratch = plans.plan_grouped(
        shape=(m, g, n, k), a=left, out="float32", pinned=False, capability=capability
    ).scratch_bytes
    a = (Array("a", (m, k), BF16, also=(jnp.float16,)), absent("a scale", U8), absent("a amax"))
    data, scale = Array("b data", (g, n, k // 2), U8), Array("b scale", (g, n, k // 16), U8)
    b = (data, scale, Array("b amax", (g,), F32, ((g, n),)))
    operands = (*(a if dense else tensor("a ", m, k, False)), *b, Array("group sizes", (g,), jnp.int32))
    attrs = {"kernel": kernel, "pinned": False, "a_e4m3_max": np.int32(448), "b_e4m3_max": np.int32(448)}
    return Call("grouped_matmul", operands, (Array("out", (m, n), F32, also=FLOATS), scratch_of(scratch)), attrs)


def dequantize_call(windows: bool, cols: int = 128) -> Call:
    attrs = {"e4m3_max": np.int32(448), "windows": windows, "rotate_back": False}
    return Call("dequantize", tensor("", 16, cols, windows), (Array("out", (16, cols), BF16, also=FLOATS),), attrs)


def transpose_call(rows: int = 48, cols: int = 80) -> Call:
    data, scale, _ = tensor("", rows, cols, False)
    scales = (jnp.float8_e4m3fn,)
    results = (Array("out data", (cols, rows // 2), U8), Array("out scale", (cols, rows // 16), U8, also=scales))
    return Call("transpose", (data, replace(scale, also=scales)), results)


def rht_amax_call(rows: int = 16, cols: int = 32) -> Call:
    attrs = {"transpose": False, "keep": np.int32(1)}
    other_sizes = ((2, 17, 32), (2, 8, 32), (2, 32, 32), (2, 16, 16), (2, 16, 64))
    x = Array("x", (2, rows, cols), BF16, other_sizes, FLOATS)
    return Call("rht_amax", (x,), (Array("amax", (2,), F32), Array("plain_amax", (2,), F32)), attrs)


def epilogue_call() -> Call:
    operands = (Array("y", (16, 32), F32), Array("a amax", (), F32, ((16,), (0,))), Array("b amax", (), F32, ((32,),)))
    bias, out = Array("bias", (32,), BF16, ((0,), (16, 32)), FLOATS), Array("out", (16, 32), BF16, also=FLOATS)
    attrs = {"a_e4m3_max": np.int32(448), "b_e4m3_max": np.int32(448), "b_batched": False}
    return Call("epilogue", (*operands, bias), (out,), attrs)


def decode_call() -> Call:
    data, scale, _ = tensor("", 16, 128, False)
    return Call("decode", (data, scale), (Array("out", (16, 128), BF16, also=(jnp.float16,)),))


def cache(side: str, lead: tuple[int, ...], depth: int) -> tuple[Array, Array, Array]:
    scale = Array(f"{side} scale", (*lead, depth // 16), jnp.float8_e4m3fn, also=(U8,))
    return Array(f"{side} data", (*lead, depth // 2), U8), scale, Array(f"{side} amax", lead, F32)


def cache_call(
    target: str,
    paged: bool = False,
    capability: int = 0,
    depth: int = 64,
    tokens: int = 128,
    room: int = 64,
    pool: int = 7,
) -> Call:
    """Attention or appending for three sequences with two KV heads; ``room``: tokens of a page, ``pool``: its pages."""
    batch, heads, group = 3, 2, 5
    lead = (pool, heads, room) if paged else (batch, heads, tokens)
    pages = Array("pages", (batch, tokens // 64), jnp.int32) if paged else absent("pages", jnp.int32)
    if paged:  # a table of another width is one of another capacity, a pool may have any number of pages
        pages = replace(pages, may_be=((batch, 1), (batch, 3), (batch, 4)))
    parts = (*cache("keys", lead, depth), *cache("values", lead, depth))
    if target == "append_kv":
        new = [Array(name, (batch, heads, depth), BF16) for name in ("k", "v")]
        return Call(target, (*parts, *new, Array("positions", (batch,), jnp.int32), pages), parts, in_place=True)
    q, attrs = Array("q", (batch, heads, group, depth), BF16), {"sm_scale": np.float32(0.1)}
    problem = (batch, heads, group, depth, tokens)
    needed = plans.plan_decode_attention(shape=problem, capability=capability).scratch_bytes
    results = replace(q, name="out"), scratch_of(needed)
    return Call(target, (q, *parts, Array("lengths", (batch,), jnp.int32), pages), results, attrs)


def valid_calls(platform: str, hopper: bool = True) -> dict[str, Call]:
    """Name -> a call that runs on "cpu" or "cuda"; on GPUs, whether those for Hopper are among them."""
    cpu = platform == "cpu"
    blocks, elements = (f"{'cpu' if cpu else 'sm80'}_{kernel}" for kernel in ("nvfp4_blocks", "dense_elements"))
    calls = {
        "quantize": quantize_call(NVFP4, True),
        "quantize tiles": quantize_call(NVFP4_2D, True, transpose=True),
        "quantize stochastic": quantize_call(NVFP4_SR, True),
        "quantize headroom": quantize_call(NVFP4_SR_UNBIASED, True),
        "quantize rows": quantize_call(ROW_SCALED, True),
        "quantize rows found": quantize_call(ROW_SCALED, False),
        "quantize columns found": quantize_call(ROW_SCALED, False, transpose=True),
        "quantize windows": quantize_call(WINDOW64, True),
        "quantize windows found": quantize_call(WINDOW64, False),
        "pair": pair_call(NVFP4, True),
        "pair stochastic": pair_call(NVFP4_SR, True),
        "pair headroom": pair_call(NVFP4_SR_UNBIASED, True),
        "pair windows": pair_call(WINDOW64, False),
        "dequantize": dequantize_call(False),
        "dequantize windows": dequantize_call(True),
        "transpose": transpose_call(),
        "rht_amax": rht_amax_call(),
        "matmul": matmul_call(blocks),
        "matmul windows": matmul_call(blocks, windows=True),
        "matmul dense": matmul_call(elements, dense=True),
    }
    for paged, where in ((False, ""), (True, " in pages")):
        calls[f"attention{where}"] = cache_call("decode_attention", paged, 0 if cpu else 80)
        calls[f"append{where}"] = cache_call("append_kv", paged)
    if not cpu:
        calls |= {"decode": decode_call(), "epilogue": epilogue_call()}
    if not cpu and not hopper:
        return calls
    if not cpu:
        calls["matmul norm"] = norm_call()
    blocks, elements = (blocks, elements) if cpu else ("sm90_nvfp4_grouped", "sm90_dense_grouped")
    return calls | {
        "grouped": grouped_call(blocks, False),
        "grouped few rows": grouped_call(blocks, False, 16),  # for which a kernel of Hopper needs no scratch
        "grouped dense": grouped_call(elements, True),
    }


# ---------------------------------------------------------------- calls that are wrong in one place
def wrong_shapes(array: Array) -> Iterator[tuple[int, ...]]:
    """Another rank, a longer, shorter or missing axis; not those that are accepted too."""
    shape = array.shape
    yield from (s for s in [(*shape, 1), (1, *shape), shape[1:], (3,)] if s != shape)
    for axis, size in enumerate(shape):
        for other in (size + 1, size // 2, 2 * size, 0):
            if other != size:
                yield (*shape[:axis], other, *shape[axis + 1 :])


WRONG_DTYPES = (jnp.uint8, jnp.float16, jnp.float32, jnp.int4, jnp.float4_e2m1fn)


def wrong_arrays(array: Array) -> Iterator[Array]:
    for shape in dict.fromkeys(wrong_shapes(array)):
        if shape not in array.may_be:
            yield replace(array, shape=shape)
    for dtype in WRONG_DTYPES:
        if jnp.dtype(dtype) not in [jnp.dtype(d) for d in (array.dtype, *array.also)]:
            yield replace(array, dtype=dtype)


def with_shapes(call: Call, **shapes: tuple[int, ...]) -> Call:
    """The call with other shapes of the arrays of some names, in which "_" stands for a space."""
    shapes = {name.replace("_", " "): shape for name, shape in shapes.items()}

    def changed(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(replace(a, shape=shapes.get(a.name, a.shape)) for a in arrays)

    assert shapes.keys() <= {a.name for a in call.operands + call.results}
    return replace(call, operands=changed(call.operands), results=changed(call.results))


WRONG_SPECS = [
    {"amax_scope": "column"},
    {"e4m3_max": np.int32(0)},
    {"e4m3_max": np.int32(-448)},
    {"block_rows": np.int32(0)},
    {"block_rows": np.int32(-1)},
    {"block_rows": np.int32(17)},
    {"block_rows": np.int32(2**31 - 1)},
    {"select": ""},
    {"error_math": "fp8"},
    {"rounding": "up"},
    {"amax_scope": "window64", "rht": True},
    {"select": "mae", "rounding": "stochastic"},
    {"rounding": "nearest", "scale_headroom": True},
    {"block_rows": np.int32(16), "rounding": "stochastic"},
    {"block_rows": np.int32(16), "rht": True},
]
WRONG_ATTRS = {
    "row_blocks": [np.int32(-1), np.int32(0), np.int32(7)],  # rows have 8 blocks
    "col_blocks": [np.int32(-1), np.int32(0), np.int32(3)],  # columns have 4
    "epsilon": [np.float32(0), np.float32(-1e-5), np.float32(np.nan)],
    "keep": [np.int32(-1), np.int32(2), np.int32(99)],
    "e4m3_max": [np.int32(0), np.int32(-1), np.int32(449)],
    "a_e4m3_max": [np.int32(0), np.int32(-448)],
    "b_e4m3_max": [np.int32(0), np.int32(257)],
    "kernel": ["", "sm90_unheard_of", "decode"],
}


def wrong_attrs(attrs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attrs.items():
        if isinstance(value, dict):
            yield from ((name, {**value, **change}) for change in WRONG_SPECS)
        yield from ((name, wrong) for wrong in WRONG_ATTRS.get(name, ()))
