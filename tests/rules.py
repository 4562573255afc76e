"""What is refused, and with which words: a rule stands here once, for every layer that checks it.

``rule(words, operation, *operands, **options)`` is a wrong call of a public function, or of each function of a tuple.
``test_errors.py`` makes it with arrays, and with abstract ones. ``handler`` is an FFI call that breaks the same rule,
with words of its handler; ``test_ffi.py`` makes it. What handlers alone refuse is appended to ``OF_HANDLERS``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import (
    Call,
    cache_call,
    dequantize_call,
    grouped_call,
    matmul_call,
    pair_call,
    quantize_call,
    rht_amax_call,
    transpose_call,
    with_shapes,
)

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    Policy,
    QuantizedWeight,
    QuantSpec,
    RaggedDot,
    Recipe,
    dequantize,
    dot_general,
    einsum,
    fake_quant,
    from_state,
    grouped_linear,
    grouped_matmul_nt,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    recipes,
    to_state,
    transpose,
)
from jnvfp4 import Rule as PolicyRule
from jnvfp4.attention import KVCache, append_kv, decode_attention
from jnvfp4.calibration import gptq, hessian
from jnvfp4.spec import four_over_six
from jnvfp4.stats import probe, quantization_report, read

F32, BF16, U8, I8, I32, E4M3 = jnp.float32, jnp.bfloat16, jnp.uint8, jnp.int8, jnp.int32, jnp.float8_e4m3fn
RHT, ROW, WINDOW = Format(rht=True), Format("row"), Format("window64")
SR_RECIPE = Recipe(fprop=(NVFP4_SR, NVFP4_2D))
FLOATS = "float32, bfloat16 or float16"
QUANTIZERS = (quantize, quantize_pair, fake_quant, quantization_report)
LAST = (((1,), (1,)), ((), ()))  # of dot_general: both last axes
X = np.ones((16, 32), np.float32)
CPU_BLOCKS, CPU_ELEMENTS = "cpu_nvfp4_blocks", "cpu_dense_elements"  # shapes are checked before the kernel is chosen


@dataclass(frozen=True)
class Rule:
    operation: Callable
    error: type[Exception]
    words: str  # after "<operation>: "; "..." stands for anything
    operands: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.operation.__qualname__}: {self.words}"

    @property
    def pattern(self) -> str:
        """A regular expression for the error."""
        return "^" + ".*".join(map(re.escape, self.name.split("...")))

    def bind(self) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
        """The wrong call as a function of its abstract arrays, and these."""
        leaves, tree = jax.tree.flatten((self.operands, self.options))
        abstract = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

        def call(*arrays):
            given = iter(arrays)
            filled = [next(given) if is_array else leaf for is_array, leaf in zip(abstract, leaves, strict=True)]
            operands, options = jax.tree.unflatten(tree, filled)
            return self.operation(*operands, **options)

        return call, [leaf for is_array, leaf in zip(abstract, leaves, strict=True) if is_array]


RULES: list[Rule] = []
OF_HANDLERS: list[tuple[Call, str]] = []  # wrong calls of FFI targets, and words of their errors


def rule(words: str, operations: Callable | tuple[Callable, ...], *operands, handler=None, **options) -> None:
    error = TypeError if words.startswith("TypeError: ") else ValueError
    for operation in operations if isinstance(operations, tuple) else (operations,):
        RULES.append(Rule(operation, error, words.removeprefix("TypeError: "), operands, options))
    OF_HANDLERS.extend([] if handler is None else [handler])


def a(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def t(rows, k, fmt=NVFP4.format, *, lead=(), data=U8, scale=E4M3, amax=(), amax_dtype=F32, scale_k=None):
    """The shape of an NVFP4Tensor, as wrong as the arguments say."""
    blocks = k // 16 if scale_k is None else scale_k
    return NVFP4Tensor(
        a(*lead, rows, k // 2, dtype=data), a(*lead, rows, blocks, dtype=scale), a(*amax, dtype=amax_dtype), fmt
    )


LINE = NVFP4Tensor(a(16, dtype=U8), a(2, dtype=E4M3), a())  # a tensor of rank 1


# ---------------------------------------------------------------- quantizers: shapes
part_of_block = (quantize_call(NVFP4, True, cols=120), "quantized axis that is a multiple of 16")
rule("K must be a multiple of 16, got x.shape=(16, 100); pad it to 112", QUANTIZERS, a(16, 100), handler=part_of_block)
rule("K must be a multiple of 16, got x.shape=(4, 20); pad it to 32", quantize, a(4, 20), spec=NVFP4_RHT)
rule("K must be a multiple of 16", fake_quant, a(16, 20), spec=NVFP4_RHT, handler=(rht_amax_call(cols=24), "of 16"))
rule("K must be a multiple of 16, got x.shape=(16, 20)", quantize_pair, a(16, 20), col_spec=ROW_SCALED)
part_of_window = (quantize_call(WINDOW64, True, cols=96), "multiple of 64")
text = 'K must be a multiple of 64 for amax_scope="window64", got x.shape=(8, 80); pad it to 128'
rule(text, (quantize, fake_quant), a(8, 80), spec=WINDOW64, handler=part_of_window)
text = "M (the quantized axis, since it is transposed) must be a multiple of 16, got x.shape=(20, 64); pad it to 32"
rule(text, quantize, a(20, 64), transpose=True)
rule(text, quantize_pair, a(20, 64))
rule("M ... must be a multiple of 16, got x.shape=(20, 16)", quantize_pair, a(20, 16), col_spec=NVFP4_RHT)
text = "M (... transposed) must be a multiple of 64 for ..., got x.shape=(80, 64); pad it to 128"
rule(text, quantize, a(80, 64), spec=WINDOW64, transpose=True)
part_of_window = (pair_call(WINDOW64, False, rows=96), "multiple of 64")
rule(text, quantize_pair, a(80, 64), col_spec=WINDOW64, handler=part_of_window)
part_of_tile = (quantize_call(NVFP4_2D, True, transpose=True, cols=120), "multiples of 16 for block_rows=16")
text = "block_rows=16 needs both M and K to be multiples of 16, got x.shape=(20, 64); pad M to 32, or take a spec of"
rule(text, (quantize, fake_quant), a(20, 64), spec=NVFP4_2D, handler=part_of_tile)
rule(text, quantize_pair, a(20, 64), row_spec=NVFP4_2D, col_spec=ROW_SCALED)
rule("x must have rank 2 or more, [..., M, K], got x.shape=(64,)", QUANTIZERS, a(64))
rule("x must have rank 2 or more", quantize, a())
OF_HANDLERS.append((quantize_call(ROW_SCALED, False, cols=0), "multiple of 16 and not 0"))
OF_HANDLERS.append((rht_amax_call(rows=0), "x must have elements"))

# ---------------------------------------------------------------- quantizers: arrays and their types
rule(f"TypeError: x must be {FLOATS}, got int32", QUANTIZERS, a(16, 16, dtype=I32))
rule(f"TypeError: x must be {FLOATS}, got float8_e4m3fn; cast it", quantize, a(16, 16, dtype=E4M3))
rule(f"TypeError: x must be {FLOATS}, got int8", quantize, a(16, 16, dtype=I8), spec=ROW_SCALED)
rule(f"TypeError: x must be {FLOATS}, got int32", quantize_pair, a(16, 16, dtype=I32), col_spec=NVFP4_RHT)
rule("TypeError: x must be an array, got an NVFP4Tensor", QUANTIZERS, t(16, 32))
rule("TypeError: x must be an array, got [[1000...]]", quantize, [[10**400] * 16])
rule("TypeError: x must be an array, got None", (quantize, quantization_report), None)
text = ' must be of native byte order, got dtype >f{}; convert it with .astype({}.dtype.newbyteorder("="))'
rule("TypeError: x" + text.format(4, "x"), quantize, X.astype(">f4"))
rule("TypeError: x" + text.format(2, "x"), quantize_pair, X.astype(">f2"))
rule("TypeError: w" + text.format(4, "w"), linear, X, X.astype(">f4"))
rule("TypeError: a" + text.format(2, "a"), matmul_nt, X.astype(">f2"), t(16, 32))
rule("TypeError: amax" + text.format(4, "amax"), quantize, X, amax=np.array(3, ">f4"))
for dtype in map(np.dtype, ("M8[s]", object, np.longdouble)):
    text = f"TypeError: x must be of a dtype that JAX has ({FLOATS} for floats), got {dtype}"
    rule(text, quantize, X.astype(dtype))
text = "TypeError: x must have no mask, got a NumPy masked array; x.filled(0) is ..., x.data is "
rule(text, quantize, np.ma.masked_array(X, X > 0))

# ---------------------------------------------------------------- quantizers: the amax
text = 'amax must have shape () or (4,) for amax_scope="tensor" and x.shape=(4, 16, 32), got (16,)'
rule(text, quantize, a(4, 16, 32), amax=a(16))
rule("amax must have shape", (quantize, fake_quant, quantization_report), a(16, 32), amax=a(3))
rule('amax must have shape (8,) for amax_scope="row"', quantize, a(8, 32), ROW_SCALED, amax=a(32))
rule("amax must have shape (32,)", quantize, a(16, 32), ROW_SCALED, amax=a(16), transpose=True)
rule("amax must have shape (8,)", quantize, a(8, 32), ROW_SCALED, amax=a())
text = 'amax must have shape (8, 2) for amax_scope="window64" and x.shape=(8, 128), got (8,)'
rule(text, quantize, a(8, 128), WINDOW64, amax=a(8))
text = "amax must have shape (8, 2) for ..., got (128, 1)"
rule(text, quantize, a(128, 8), WINDOW64, amax=a(128, 1), transpose=True)
rule("amax must have shape (8, 1) for ..., got ()", quantize, a(8, 64), WINDOW64, amax=1.0)
text = 'amax must have shape () for amax_scope="tensor" and x.shape=(16, 32), got (32,)'
rule(text, quantize_pair, a(16, 32), amax=(None, a(32)))
text = "amax must have shape (128, 1) for ..., got (128,)"
rule(text, quantize_pair, a(64, 128), WINDOW64, WINDOW64, amax=(None, a(128)))
rule("amax must be None or a pair (row_amax, col_amax)", quantize_pair, a(16, 32), amax=a())
text = "TypeError: amax must be float32, got bfloat16"
rule(text, (quantize, fake_quant), a(8, 32), amax=a(dtype=BF16))
rule(text, quantize_pair, a(16, 32), NVFP4, ROW_SCALED, amax=(a(dtype=BF16), None))
rule("TypeError: amax must be float32, got int", quantize, a(8, 32), amax=np.array(3))
rule("TypeError: amax must be an array, got 'large'", quantize, a(16, 16), amax="large")
for amax in (1e39, -1e39, 2**128, 10**400, -(10**5000)):
    text = "amax must be within float32, whose largest number is 3.4...e+38, got "
    rule(text, (quantize, fake_quant, quantization_report), X, amax=amax)

# ---------------------------------------------------------------- quantizers: settings
text = "implementation must be None, 'native' or 'reference', got 'cuda'"
rule(text, (quantize, quantize_pair, fake_quant), a(16, 32), implementation="cuda")
rule(text, (dequantize, transpose), t(16, 32), implementation="cuda")
rule("implementation must be", dequantize, t(16, 32), implementation=1)
rule("transpose must be True or False, got 'no'", quantize, a(16, 64), transpose="no")
rule("stats must be float32 of shape (3, 7)... or of (32, 32) for X^T X", linear, a(8, 32), a(16, 32), stats=a(16, 16))
rule("stats must be float32 of shape ... got bfloat16", linear, X, X, stats=a(3, 7, dtype=BF16))
text = "TypeError: on must be True or False, got np.float32(1.0); a traced flag chooses by jax.lax.cond"
rule(text, probe, np.float32(1))
rule("gradient must have shape ... got (7,)", read, a(7))
rule("transpose must be True or False", quantization_report, X, transpose=1)
rule("TypeError: spec must be a QuantSpec, got Format(", (quantize, fake_quant), a(8, 32), spec=Format())
rule("TypeError: spec must be a QuantSpec", quantization_report, X, spec=None)
rule("TypeError: spec must be a QuantSpec, got <...; call it: jnvfp4.spec.four_over_six()", quantize, X, four_over_six)
rule("TypeError: spec must be a QuantSpec, got ...; a recipe ... recipe.fprop.x", quantize, X, Recipe())
rule("TypeError: spec must be a QuantSpec, got an array float32 (16, 32)", quantize, a(16, 32), a(16, 32))
rule("TypeError: row_spec must be a QuantSpec, got 'nvfp4'", quantize_pair, a(16, 16), row_spec="nvfp4")
rule("TypeError: col_spec must be a QuantSpec, got None", quantize_pair, a(16, 16), col_spec=None)
text = 'key must be a JAX PRNG key for rounding="stochastic", got None'
rule(text, (quantize, fake_quant, quantization_report), a(8, 32), spec=NVFP4_SR)
rule(text, quantize_pair, a(16, 16), col_spec=NVFP4_SR)
text = "TypeError: key must be one JAX PRNG key, as jax.random.key gives, got "
rule(text + "3", (quantize, quantize_pair), a(16, 32), NVFP4_SR, key=3)
for wrong in (*(jax.random.split(make(0), 3) for make in (jax.random.key, jax.random.PRNGKey)), 7, np.zeros(2)):
    rule(text, (quantize, fake_quant), X, NVFP4_SR, key=wrong)
    rule(text, quantize_pair, X, col_spec=NVFP4_SR, key=wrong)
    rule(text, linear, X, X, SR_RECIPE, key=wrong)

# ---------------------------------------------------------------- dequantize
part_of_block = (dequantize_call(False, cols=120), "multiple of 16 codes")
part_of_window = (dequantize_call(True, cols=96), "multiple of 64 codes")
rule("K of t must be a multiple of 16, got K=40", dequantize, t(16, 40, scale_k=2), handler=part_of_block)
text = 'K of t must be a multiple of 64 for "window64", got K=96'
rule(text, dequantize, t(16, 96, WINDOW, amax=(16, 1)), handler=part_of_window)
rule("t must have rank 2 or more", dequantize, LINE)
rule("TypeError: t must be an NVFP4Tensor, got an array float32 (16, 16); jnv", dequantize, a(16, 16))
rule(f"TypeError: dtype must be {FLOATS}, got int8", dequantize, t(16, 32), dtype=I8)
rule(f"TypeError: dtype must be {FLOATS}, got None", dequantize, t(16, 32), dtype=None)
rule(f"TypeError: dtype must be {FLOATS}, got fp4", dequantize, t(16, 32), dtype="fp4")
rule("rotate_back must be True or False, got 1", dequantize, t(16, 32), rotate_back=1)
rule("TypeError: t.data must be uint8, got int8", dequantize, t(16, 32, data=I8))
rule("TypeError: t.scale must be float8_e4m3fn, got uint8", dequantize, t(16, 32, scale=U8))
rule("TypeError: t.amax must be float32, got bfloat16", dequantize, t(16, 32, amax_dtype=BF16))
rule("t.scale must have shape (16, 2) for data (16, 16), got (16, 3)", dequantize, t(16, 32, scale_k=3))
wrong_rows = (with_shapes(dequantize_call(False), amax=(4,)), "amax must have shape (), or (16), got (4)")
rule("t.amax must have shape () or (16,)", dequantize, t(16, 32, amax=(4,)), handler=wrong_rows)
rule('t.amax must have shape (16,) ...amax_scope="row"', dequantize, t(16, 32, ROW))
text = 't.amax must have shape (16, 2) for data (16, 64) and amax_scope="window64", got (16,)'
rule(text, dequantize, t(16, 128, WINDOW, amax=(16,)))
rule("t.amax must have shape (16, 1) for", dequantize, t(16, 64, WINDOW))
text = 't.amax must have shape () or (16,) for data (16, 32) and amax_scope="tensor", got (16, 1)'
rule(text, dequantize, t(16, 64, amax=(16, 1)))

# ---------------------------------------------------------------- transpose
part_of_tile = (transpose_call(rows=40), "16x16 tiles"), (transpose_call(cols=72), "16x16 tiles")
text = "M and K of q must be multiples of 16, got q.shape=(24, 32)"
rule(text, transpose, t(24, 32), handler=part_of_tile[0])
rule("K of q must be a multiple of 16, got K=40", transpose, t(16, 40, scale_k=2), handler=part_of_tile[1])
rule("q must have rank 2 or more, [..., M, K], got data (16,)", transpose, LINE)
rule("TypeError: q must be an NVFP4Tensor, got ...", transpose, a(16, 16))
rule("TypeError: spec must be a QuantSpec, got '2d'", transpose, t(16, 16), spec="2d")
text = "spec must have block_rows=16, got NVFP4 with block_rows=1; make ... quantize(..., "
rule(text, transpose, t(16, 32), spec=NVFP4)
text = "spec must have the format of q, Format(...256, ...), got NVFP4_2D with Format(...448, ...)"
rule(text, transpose, t(16, 32, Format(e4m3_max=256)))
text = "spec must have the format of q, ...448, ..., got FOUR_OVER_SIX_2D_MAE_256 with"
rule(text, transpose, t(16, 32), spec=four_over_six(block_rows=16))
rule("spec must have the format of q", transpose, t(16, 32, ROW, amax=(16,)))
text = "...format of q, ...rht=True..., got NVFP4_2D with ...; pass the spec that made q, or make the transpose from"
rule(text, transpose, t(16, 32, RHT))
rule("TypeError: q.data must be uint8, got int8", transpose, t(16, 32, data=I8))
rule("TypeError: q.scale must be float8_e4m3fn, got uint8", transpose, t(16, 32, scale=U8))
rule("q.scale must have shape (16, 2) for data", transpose, t(16, 32, scale_k=3))
text = "q.amax must have shape () or (2,) for data ..., got (2, 16); the rows of a tile share one"
rule(text, transpose, t(16, 32, lead=(2,), amax=(2, 16)))

# ---------------------------------------------------------------- products
part_of_block = (matmul_call(CPU_BLOCKS, k=120), "multiple of 16 codes")
two_depths = (with_shapes(matmul_call(CPU_BLOCKS), b_data=(32, 32), b_scale=(32, 4)), "must have the same K")
two_batches = (
    with_shapes(
        matmul_call(CPU_BLOCKS),
        **{"a_data": (2, 24, 64), "a_scale": (2, 24, 8), "out": (2, 24, 32)},
        **{"b_data": (3, 32, 64), "b_scale": (3, 32, 8)},
    ),
    "b must have rank 2 or the leading axes (2)",
)
part_of_residual = (with_shapes(matmul_call(CPU_BLOCKS), bias=(1, 32)), "must have shape (32) or (24,32), got (1,32)")
norm_of_codes = (with_shapes(matmul_call(CPU_BLOCKS), gain=(128,)), "gain must have no elements with an a that is")
gain_of_rows = (with_shapes(matmul_call(CPU_ELEMENTS, dense=True), gain=(24, 128)), "gain must have shape (128)")
rule("K of a must be a multiple of 16", matmul_nt, t(8, 40), t(8, 40), handler=part_of_block)
rule("a and b must have the same K, got K=32 and K=48", matmul_nt, t(8, 32), t(8, 48), handler=two_depths)
rule("a and b must have the same K, got K=48 and K=32", matmul_nt, a(8, 48, dtype=BF16), t(8, 32))
OF_HANDLERS.append((matmul_call(CPU_BLOCKS, k=0), "the same K, not 0"))
OF_HANDLERS.append((matmul_call(CPU_ELEMENTS, dense=True, windows=True), "a_windows must be false with a 16-bit a"))
text = "b must be [N, K] or have the leading axes of a, got a [(2,), M, K] and b [(3,), N, K]"
rule(text, matmul_nt, t(8, 32, lead=(2,)), t(8, 32, lead=(3,)), handler=two_batches)
rule("b must be [N, K] or have the leading axes of a", matmul_nt, t(8, 32), t(8, 32, lead=(3,)))
rule("a must have rank 2 or more", matmul_nt, a(32, dtype=BF16), t(8, 32))
text = "TypeError: an unquantized a must be bfloat16 or float16, got float32; cast it to bfloat16, or quantize it"
rule(text, matmul_nt, a(8, 32), t(8, 32))
text = "TypeError: b must be an NVFP4Tensor, got an array bfloat16 (8, 32); jnvfp4.quantize makes one of an array"
rule(text, matmul_nt, t(8, 32), a(8, 32, dtype=BF16))
text = "a and b must both be rotated (format.rht) or neither, got a.rht={}, b.rht={}"
rule(text.format(True, False), matmul_nt, t(8, 32, RHT), t(8, 32))
rule(text.format(False, True), matmul_nt, a(8, 32, dtype=BF16), t(8, 32, RHT))
rule(text.format(False, True), matmul_nt, t(8, 32), t(8, 32, RHT))
rule("a and b must both be rotated", matmul_nt, t(8, 64, RHT), t(8, 64, WINDOW, amax=(8, 1)))
text = 'b must have amax_scope "tensor" or "row" where a is not quantized, got "window64"; quantize a'
rule(text, matmul_nt, a(8, 64, dtype=BF16), t(8, 64, WINDOW, amax=(8, 1)))
text = 'K of b must be a multiple of 64 for "window64", got K=96'
rule(text, matmul_nt, t(8, 96), t(8, 96, WINDOW, amax=(8, 1)))
text = 'a.amax must have shape (8, 2) for data (8, 64) and amax_scope="window64", got (8, 1)'
rule(text, matmul_nt, t(8, 128, WINDOW, amax=(8, 1)), t(8, 128))
rule("b.amax must have shape (4, 2) for ..., got (4,)", matmul_nt, t(8, 128), t(4, 128, WINDOW, amax=(4,)))
rule("a.scale must have shape (8, 2)", matmul_nt, t(8, 32, scale_k=1), t(8, 32))
rule("b.amax must have shape () or (8,)", matmul_nt, t(8, 32), t(8, 32, amax=(2,)))
rule("b.amax must have shape (8,)", matmul_nt, t(8, 32), t(8, 32, ROW))
rule("TypeError: b.data must be uint8", matmul_nt, t(8, 32), t(8, 32, data=I8))
text = "bias must have shape (N,)=(4,) or that of the result, (8, 4), got "
rule(text + "(8,)", matmul_nt, t(8, 32), t(4, 32), bias=a(8))
rule(text + "(1, 4)", matmul_nt, t(8, 32), t(4, 32), bias=a(1, 4), handler=part_of_residual)
rule(f"TypeError: bias must be {FLOATS}, got int32", matmul_nt, t(8, 32), t(4, 32), bias=a(4, dtype=I32))
x, gain = a(8, 32, dtype=BF16), a(32)
text = "norm must be None where a is quantized; normalize a before jnvfp4.quantize"
rule(text, matmul_nt, t(8, 32), t(4, 32), norm=(gain, 1e-5), handler=norm_of_codes)
text = "norm must be None or a tuple (gain, epsilon), got "
rule(text + "an array float32 (32,)", matmul_nt, x, t(4, 32), norm=gain)
rule(text + "1e-05", matmul_nt, x, t(4, 32), norm=1e-5)
rule(text + "a list of 2", matmul_nt, x, t(4, 32), norm=[gain, 1e-5])
text = "the gain of norm must have shape (K,)=(32,), got (8, 32)"
rule(text, matmul_nt, x, t(4, 32), norm=(a(8, 32), 1e-5), handler=gain_of_rows)
rule(f"TypeError: the gain of norm must be {FLOATS}, got int32", matmul_nt, x, t(4, 32), norm=(a(32, dtype=I32), 1e-5))
rule("TypeError: the gain of norm must be an array", matmul_nt, x, t(4, 32), norm=("rms", 1e-5))
text = "the epsilon of norm must be a Python number that float32 holds, above 0, got "
for epsilon in (0.0, -1e-5, 1e-50, 1e39, float("nan"), None, True):
    rule(f"{text}{epsilon!r}", matmul_nt, x, t(4, 32), norm=(gain, epsilon))
rule(f"{text}an array float32 ()", matmul_nt, x, t(4, 32), norm=(gain, a()))
norm_of_cpu = with_shapes(matmul_call(CPU_ELEMENTS, dense=True), gain=(128,)), "takes no norm of these operands"
rule(f"TypeError: out_dtype must be {FLOATS}, got float64", matmul_nt, t(8, 32), t(4, 32), out_dtype=jnp.float64)
text = "implementation must be None, 'native'... or 'reference', got 'cuda'"
rule(text, matmul_nt, t(8, 32), t(8, 32), implementation="cuda")
rule("accumulation must be 'fast' or 'pinned', got 'exact'", matmul_nt, t(8, 32), t(8, 32), accumulation="exact")

# ---------------------------------------------------------------- grouped products
left, experts, sizes = t(32, 64), t(16, 64, lead=(3,), amax=(3,)), a(3, dtype=I32)
grouped, dense = grouped_call(CPU_BLOCKS, False), grouped_call(CPU_ELEMENTS, True)
matrices = (with_shapes(grouped, a_data=(2, 24, 64), a_scale=(2, 24, 8)), "a data must have rank 2")
one_matrix = with_shapes(grouped, b_data=(32, 64), b_scale=(32, 8), b_amax=(32,), group_sizes=(1,))
no_depth = (with_shapes(dense, a=(24, 0), b_data=(3, 32, 0), b_scale=(3, 32, 0)), "the same K, not 0")
text = "a must have rank 2, [M, K], got shape ...vmap"
rule(text, grouped_matmul_nt, t(32, 64, lead=(2,)), experts, sizes, handler=matrices)
text = "b must have rank 3, [G, N, K]"
rule(text, grouped_matmul_nt, left, t(16, 64), sizes, handler=(one_matrix, "b data must have rank 3"))
rule("a and b must have the same K, got K=32 and K=64", grouped_matmul_nt, t(32, 32), experts, sizes, handler=no_depth)
OF_HANDLERS.append((with_shapes(grouped, b_amax=()), "b amax must have shape (G,) or (G, N)"))
rule("TypeError: b must be an NVFP4Tensor", grouped_matmul_nt, left, a(3, 16, 64), sizes)
text = "TypeError: an unquantized a must be bfloat16 or float16, got float32"
rule(text, grouped_matmul_nt, a(32, 64), experts, sizes)
rule("TypeError: group_sizes must be int32, got float32; ...astype", grouped_matmul_nt, left, experts, a(3))
for wrong in (np.array([2**40 + 3, 0, 1]), np.ones(3, np.int64), np.uint64(3)):  # of which JAX keeps the low 32 bits
    text = f"TypeError: group_sizes must be int32, got {wrong.dtype}; ...astype"
    rule(text, grouped_matmul_nt, left, experts, wrong)
text = "TypeError: group_sizes must be int32, got int8; ...astype(jnp.int32)"
rule(text, grouped_matmul_nt, left, experts, a(3, dtype=I8))
for known in (np.array([20, 9, 4], np.int32), [-3, 20, 13], (20, 9, 4)):
    rule("group_sizes must have a sum of at most M=32, got 33", grouped_matmul_nt, left, experts, known)
rule(
    "accumulation must be 'fast' or 'pinned', got 'exact'",
    grouped_matmul_nt,
    left,
    experts,
    sizes,
    accumulation="exact",
)
rule("group_sizes must have shape (G,)=(3,)", grouped_matmul_nt, left, experts, a(2, dtype=I32))
rule("group_sizes must have shape (G,)=(3,)", grouped_matmul_nt, left, experts, np.full((2, 3), 9, np.int32))
rule("TypeError: group_sizes must be int32, got float32", grouped_matmul_nt, left, experts, [30.0, 9.0, 1.0])
text = "a must have amax_scope ...window64...sum"
rule(text, grouped_matmul_nt, t(32, 64, WINDOW, amax=(32, 1)), experts, sizes)
rule("b must have amax_scope", grouped_matmul_nt, left, t(16, 64, WINDOW, lead=(3,), amax=(3, 16, 1)), sizes)
rule("a and b must both be rotated", grouped_matmul_nt, t(32, 64, RHT), experts, sizes)
text = "implementation must be None, 'native', 'sm90_nvf"
rule(text, grouped_matmul_nt, left, experts, sizes, implementation="sm90_nvfp4_fused")
rule(f"TypeError: out_dtype must be {FLOATS}", grouped_matmul_nt, left, experts, sizes, out_dtype=I8)

# ---------------------------------------------------------------- linear
rule("w must have rank 2, [N, K], got w.shape=(2, 16, 32)", linear, a(8, 32), a(2, 16, 32))
rule("w must have rank 2, [K, N], got w.shape=(32,)", linear, a(8, 32), a(32), w_axes="kn")
text = "the last axis of x and the {} axis of w must have the same size K, got x.shape=(8, 32), w.shape=(48, 32)"
rule(text.format("first"), linear, a(8, 32), a(48, 32), w_axes="kn")
rule(text.format("last").replace("48, 32", "16, 48"), linear, a(8, 32), a(16, 48))
rule("the last axis of x and the last axis of w must have the same size K", linear, a(), a(16, 48))
rule("K must be a multiple of 16, got K=40 in w.shape=(16, 40); pad K of x and w to 48", linear, a(8, 40), a(16, 40))
text = "K must be a multiple of 64, got K=80 in w.shape=(16, 80); pad K of x and w to 128"
rule(text, linear, a(8, 80), a(16, 80), recipes.window64(stochastic_rounding=False))
text = "N must be a multiple of 16, since recipe.dgrad contracts over it, got N=20 in w.shape=(32, 20); pad N to 32 or"
rule(text, linear, a(8, 32), a(32, 20), w_axes="kn")
rule(text.replace("32, 20", "20, 32"), linear, a(8, 32), a(20, 32), Recipe(fprop=(NVFP4, NVFP4)))
text = "N must be a multiple of 16, since recipe.fprop quantizes w in 16x16 tiles"
rule(text, linear, a(8, 32), a(20, 32), Recipe(dgrad=None))
text = "N must be a multiple of 16, since recipe.wgrad quantizes dy in 16x16 tiles"
rule(text, linear, a(16, 32), a(20, 32), Recipe(fprop=(NVFP4, NVFP4), dgrad=None, wgrad=(NVFP4_2D, NVFP4)))
text = "N must be a multiple of 64, since recipe.dgrad contracts over it, ... pad N to 64"
rule(text, linear, a(8, 32), a(16, 32), Recipe(dgrad=(WINDOW64, NVFP4)))
rule("bias must have shape (N,)=(16,), got (32,)", linear, a(8, 32), a(32, 16), bias=a(32), w_axes="kn")
rule("bias must have shape (N,)=(16,), got (8,)", linear, a(8, 32), a(16, 32), bias=a(8))
rule("w_axes must be 'nk' or 'kn', got 'NK'", linear, a(8, 32), a(16, 32), w_axes="NK")
rule("accumulation must be 'fast' or 'pinned', got None", linear, a(8, 32), a(16, 32), accumulation=None)
text = "implementation must be None, 'native'... or 'reference', got 'cuda'"
rule(text, linear, a(8, 32), a(16, 32), implementation="cuda")
rule(f"TypeError: out_dtype must be {FLOATS}, got int8", linear, a(8, 32), a(16, 32), out_dtype=I8)
text = "TypeError: recipe must be a Recipe, got "
rule(text + "NVFP4; make one: jnvfp4.Recipe(fprop=(x spec, w spec)", linear, a(8, 32), a(16, 32), NVFP4)
rule(text + "'pretrain'; pass jnvfp4.recipes.pretrain()", linear, a(8, 32), a(16, 32), "pretrain")
rule(text + "an array float32 (16,); pass bias=", linear, a(8, 32), a(16, 32), a(16))
rule(text + "an array key<fry> (); pass key=", linear, a(8, 32), a(16, 32), jax.random.key(0))
uncalled = text + "<function pretrain...>; call it: jnvfp4.recipes.pretrain()"
rule(uncalled, linear, a(8, 32), a(16, 32), recipes.pretrain)
rule("...(8, 32), w.shape=(32, 48); make it of w [K, N] by quantize(w, transpose=True)", linear, a(8, 32), t(32, 48))
rule("...w.shape=(32, 16); pass w_axes='kn' for w [K, N]", linear, a(8, 32), a(32, 16))
rule("...w.shape=(16, 32); pass w_axes='nk' for w [N, K]", linear, a(8, 32), a(16, 32), w_axes="kn")
text = "key must be given, since the recipe rounds stochastically, got none; pass the argument key, or in a model (a)"
rule(text, linear, a(8, 32), a(16, 32), SR_RECIPE)
rule(f"TypeError: x must be {FLOATS}, got int32", linear, a(8, 32, dtype=I32), a(16, 32))
rule(f"TypeError: w must be {FLOATS}, got int8", linear, a(8, 32), a(16, 32, dtype=I8))
rule("TypeError: x must be an array, got an NVFP4Tensor", linear, t(8, 32), a(16, 32))
for recipe in (Recipe(fprop=(None, NVFP4_2D)), recipes.inference(weight_only=True)):
    text = "TypeError: x must be bfloat16 or float16 for a weight-only recipe, got float32"
    rule(text, linear, a(8, 32), a(16, 32), recipe)

# ---------------------------------------------------------------- linear with a quantized w
x, frozen = a(32, 64), t(48, 64)
text = "w must have the format of recipe.fprop.w, nvfp4_tensor_448, got nvfp4_row_448; ...: Recipe(fprop=(None, ROW_"
rule(text, linear, x, t(48, 64, ROW, amax=(48,)))
rule("...got nvfp4_tensor_256; ...: recipes.four_over_six()", linear, x, t(48, 64, Format(e4m3_max=256)))
rule("recipe.fprop must be a pair for an NVFP4Tensor w, got None", linear, x, frozen, Recipe(None))
text = "w_axes must be 'nk' for an NVFP4Tensor w, ...got 'kn'; ...quantize(w, transpose=True)"
rule(text, linear, x, frozen, w_axes="kn")
rule("w must have rank 2, [N, K], got w.shape=(2, 48, 64)", linear, x, t(48, 64, lead=(2,)))
rule("...must have the same size K, got x.shape=(32, 32), w", linear, a(32, 32), frozen)
rule("K must be a multiple of 64, got K=48", linear, a(32, 48), t(48, 48), recipes.window64())
rule("w.amax must have shape ()", linear, x, t(48, 64, amax=(3,)))
rule("TypeError: w.scale must be float8_e4m3fn", linear, x, t(48, 64, scale=F32))
rule("bias must have shape (N,)=(48,), got", linear, x, frozen, bias=a(3))
rule("TypeError: x must be an array, got an NVFP4Tensor", linear, t(32, 64), frozen)
weight_only = "TypeError: x must be bfloat16 or float16 for a weight-only recipe"
rule(weight_only, linear, x, frozen, recipes.inference(weight_only=True))
rule("TypeError: recipe must be a Recipe", linear, x, frozen, NVFP4)

# ---------------------------------------------------------------- weights quantized for several microbatches
make, specs = QuantizedWeight.of, (NVFP4_2D, NVFP4_2D)
rule("w must have rank 2, [N, K], got w.shape=(3, 48, 64); use jax.vmap", make, a(3, 48, 64))
rule("w must have rank 2, [K, N], got w.shape=(48,)", make, a(48), w_axes="kn")
rule("K must be a multiple of 16, got K=40 in w.shape=(48, 40)", make, a(48, 40))
rule("recipe must round w to nearest, got NVFP4_SR and NVFP4_2D; ...", make, a(48, 64), Recipe((NVFP4, NVFP4_SR)))
rule("recipe must round w to nearest, got None and NVFP4_SR", make, a(48, 64), Recipe(None, (NVFP4, NVFP4_SR)))
rule("w_axes must be 'nk' or 'kn', got 'NK'", make, a(48, 64), w_axes="NK")
rule("w_amax must be None, since no spec that reads w", make, a(48, 64), Recipe((NVFP4, ROW_SCALED), None), w_amax=1.0)
rule("w_amax must be float32 of shape (), got float32 of shape (3,)", make, a(48, 64), w_amax=a(3))
rule("implementation must be", make, a(48, 64), implementation="cuda")
rule("TypeError: recipe must be a Recipe, got NVFP4", make, a(48, 64), NVFP4)
rule("TypeError: w must be an array, got an NVFP4Tensor", make, t(48, 64))
rule(f"TypeError: w must be {FLOATS}, got int8", make, a(48, 64, dtype=I8))
square = QuantizedWeight(a(64, 64), t(64, 64), t(64, 64), specs, "kn")
for again in (True, False):
    recipe = Recipe((NVFP4, NVFP4), (NVFP4, NVFP4), requantize=again)
    held = QuantizedWeight(a(48, 64), t(48, 64), t(64, 48), recipe.weight_specs, requantized=not again)
    text = f"w must be made with requantize={again}, as the recipe says, got one with {not again}; make it by Quantized"
    rule(text, linear, x, held, recipe)
rule("w_axes must be 'kn' for a QuantizedWeight that was made with it, got 'nk'", linear, x, square)
made = QuantizedWeight(a(48, 64), t(48, 64), t(64, 48), specs)
text = "w must be quantized by the specs of w in ..., NVFP4_2D and None, got NVFP4_2D and NVFP4_2D; make it by"
rule(text, linear, x, made, Recipe(dgrad=None))
text = "w.array must have the shape of what was quantized, got (32, 64) beside a form of shape "
rule(text + "(48, 64)", linear, x, QuantizedWeight(a(32, 64), t(48, 64), t(64, 32), specs))
rule(text + "(64, 48)", linear, x, QuantizedWeight(a(32, 64), t(32, 64), t(64, 48), specs))
rule(text.replace("32, 64", "48,") + "(48, 64)", linear, x, QuantizedWeight(a(48), t(48, 64), t(64, 48), specs))
rule("w_amax must be None for a QuantizedWeight w, which has an amax, got 1.0", linear, x, made, w_amax=1.0)
rule("...must have the same size K, got x.shape=(32, 32), w", linear, a(32, 32), made)
rule("TypeError: rhs must be an array, got QuantizedWeig", dot_general, x, made, LAST)

# ---------------------------------------------------------------- grouped_linear
w, sizes = a(3, 48, 64), a(3, dtype=I32)
rule("w must have rank 3, [G, N, K]", grouped_linear, x, a(48, 64), sizes)
rule("w must have one expert or more", grouped_linear, x, a(0, 48, 64), a(0, dtype=I32))
rule("x must have rank 2, [M, K]...vmap", grouped_linear, a(1, 32, 64), w, sizes)
rule("the last axis of x and axis 2 of w must have the same size K", grouped_linear, a(32, 32), w, sizes)
rule("...w.shape=(3, 64, 48); pass w_axes='kn' for w [G, K, N]", grouped_linear, x, a(3, 64, 48), sizes)
rule("K must be a multiple of 16, got K=40", grouped_linear, a(32, 40), a(3, 48, 40), sizes)
rule("TypeError: group_sizes must be int32", grouped_linear, x, w, a(3))
rule("group_sizes must have shape (G,)=(3,)", grouped_linear, x, w, a(2, dtype=I32))
rule("TypeError: group_sizes must be int32, got int64; ...astype", grouped_linear, x, w, np.array((0, 1, 15)))
rule("TypeError: recipe must be a Recipe", grouped_linear, x, w, sizes, recipe=None)
rule("key must be given, ...; pass the argument key, or", grouped_linear, x, w, sizes, recipe=SR_RECIPE)
windows, key = Recipe(None, (WINDOW64, WINDOW64), None), jax.random.key(0)
rule("recipe.fprop must have amax_scope...window64", grouped_linear, x, w, sizes, recipe=recipes.window64(), key=key)
rule("recipe.dgrad must have amax_scope...window64", grouped_linear, x, w, sizes, recipe=windows)
rule("accumulation must be 'fast' or 'pinned', got None", grouped_linear, x, w, sizes, accumulation=None)
text = "implementation must be None, 'native' or 'reference' where recipe.fprop is None, got 'cpu_nvfp4_blocks'"
rule(text, grouped_linear, x, w, sizes, recipe=Recipe(None, None, None), implementation="cpu_nvfp4_blocks")
rule("w_axes must be 'nk' or 'kn'", grouped_linear, x, w, sizes, w_axes="gnk")
rule("w must have rank 3, [G, N, K], got w.shape=(48, 64)", grouped_linear, x, made, sizes)
rule("w must have the format of", grouped_linear, x, t(48, 64, ROW, lead=(3,), amax=(3, 48)), sizes)
rule(weight_only, grouped_linear, x, w, sizes, recipe=recipes.inference(weight_only=True))
rule("TypeError: recipe must be a Recipe", RaggedDot, "pretrain")
rule("TypeError: path must be a string or None", RaggedDot, path=3)

# ---------------------------------------------------------------- dot_general
two, batch = (a(16, 32), a(16, 32)), (((2,), (2,)), ((0,), (0,)))
rule("TypeError: recipe must be a Recipe, got None", dot_general, *two, LAST, recipe=None)
text = "key must be given, since the recipe rounds stochastically, got none; pass the argument key, or in a model (a)"
rule(text, dot_general, *two, LAST, recipe=SR_RECIPE)
rule("key must be given", dot_general, a(2, 8, 32), a(2, 16, 32), batch, recipe=SR_RECIPE)
rule("precision must be None or 'default', got 'highest'", dot_general, *two, LAST, precision="highest")
rule("precision must be None or 'default'", dot_general, *two, LAST, precision=("default", "high"))
text = "TypeError: out_sharding must be a NamedSharding, a PartitionSpec or None, got 'x'"
rule(text, dot_general, *two, LAST, out_sharding="x")
text = "contracting axes must have the same sizes, got axes (1,) of lhs.shape=(16, 32)"
rule(text, dot_general, a(16, 32), a(16, 48), LAST)
rule("K must be a multiple of 16", dot_general, a(16, 20), a(16, 20), LAST)
text = "contracting (1,) and batch (1,) axes must be distinct axes of lhs"
rule(text, dot_general, *two, (((1,), (1,)), ((1,), (1,))))
batched = a(2, 16, 32), a(2, 16, 32), (((2,), (2,)), ((0,), (0,)))
rule("stats must have shape (3, 7) with batch axes, got (32, 32)", dot_general, *batched, stats=a(32, 32))
text = "batch axes must have the same sizes, got axes (0,) of lhs.shape=(2, 16, 32) and axes (0,) of rhs"
rule(text, dot_general, a(2, 16, 32), a(3, 16, 32), batch)
text = f"TypeError: preferred_element_type must be {FLOATS}, got int32"
rule(text, dot_general, *two, LAST, preferred_element_type=I32)
rule(f"TypeError: lhs must be {FLOATS}, got int32", dot_general, a(16, 32, dtype=I32), a(16, 32), LAST)
text = "TypeError: rhs must be an array, got an NVFP4Tensor; ....linear takes"
rule(text, dot_general, a(16, 32), t(16, 32), LAST)

# ---------------------------------------------------------------- einsum
x, w = a(2, 16, 64), a(64, 48)
for subscripts, text in {
    "bsd->bs": "subscripts must have two operands, got 1 in 'bsd->bs'",
    "bsd,df,fg->bsg": "subscripts must have two operands, got 3",
    "bdd,df->bf": "x must have each letter once, got 'd' twice in 'bdd,df->bf'",
    "bsd,dd->bs": "w must have each letter once",
    "bsd,df->bbf": "the result must have each letter once",
    "bsd,df->bf": "a letter of one operand alone must be in the result, got 's'; sum it first",
    "bsd,df->bs": "a letter of one operand alone must be in the result, got 'f'",
    "bsd,df->bsfq": "the result must have letters of x or w, got 'q'",
    "bsd,ef->bsdef": "x and w must share a letter that the result leaves out, got none",
    "bd,df->bf": "x must have one axis a letter of 'bd', got 3 axes",
    "...sd,...df->...sf": "an ellipsis must stand for the same axes of x and w",
    "bs1,1f->bsf": "subscripts must consist of letters, got '1'",
}.items():
    rule(text, einsum, subscripts, x, w)
rule("TypeError: subscripts must be a string such as", einsum, [0, 1], x, w)
rule("TypeError: w must be an array, got an NVFP4Tensor", einsum, "bsd,df->bsf", x, t(64, 48))
rule("precision must be None or 'default', got 'highest'", einsum, "bsd,df->bsf", x, w, precision="highest")

# ---------------------------------------------------------------- specs
rule("amax_scope must be 'tensor', 'row' or 'window64', got 'column'", Format, "column")
rule("e4m3_max must be 448 or 256, got 240", Format, e4m3_max=240)
rule("rht must be False or True, got 1", Format, rht=1)
rule("...window64 goes with neither rht nor e4m3_max=256", Format, "window64", rht=True)
rule('...rht needs amax_scope="tensor" and e4m3_max=448', Format, "row", rht=True)
rule("format must be a Format, got 'tensor'", QuantSpec, "tensor")
rule("block_rows must be 1 or 16, got 2", QuantSpec, block_rows=2)
rule("select must be 'max6', 'mae', 'mse' or 'search', got 'max4'", QuantSpec, select="max4")
rule("error_math must be 'fp32' or 'fp16', got 'bf16'", QuantSpec, select="mse", error_math="bf16")
rule("rounding must be 'nearest' or 'stochastic', got 'up'", QuantSpec, rounding="up")
text = """...e4m3_max=256 needs select="mae" or "mse"...got format=Format(...e4m3_max=256..., select='max6'"""
rule(text, QuantSpec, Format(e4m3_max=256))  # which has no name
rule('...error_math="fp16" needs select="mae" or "mse"', QuantSpec, error_math="fp16")
rule('...e4m3_max=256 needs select="mae" or "mse"', QuantSpec, Format(e4m3_max=256), select="search")
rule('...error_math="fp16" needs select="mae" or "mse"', QuantSpec, select="search", error_math="fp16")
rule('...rounding="stochastic" needs select="max6", not "search"', QuantSpec, select="search", rounding="stochastic")
rule('...rht=True needs select="max6", not "search"', QuantSpec, RHT, select="search")
rule('...needs block_rows=1, select="max6" and rounding="nearest"', QuantSpec, WINDOW, select="search")
rule('...block_rows=16 needs select="max6", "mae" or "mse"', QuantSpec, block_rows=16, select="search")
rule('...rounding="stochastic" needs select', QuantSpec, select="mse", rounding="stochastic")
rule('...rht=True needs select="max6", not "mae"', QuantSpec, RHT, select="mae")
for scope in (ROW, WINDOW):
    text = f'...amax_scope="{scope.amax_scope}" needs block_rows=1...and rounding="nearest"'
    rule(text, QuantSpec, scope, block_rows=16)
    rule(text, QuantSpec, scope, rounding="stochastic")
text = '...block_rows=16 needs rounding="nearest" and rht=False..., got format=...block_rows=16'
rule(text, QuantSpec, block_rows=16, rounding="stochastic")
rule(text, QuantSpec, RHT, 16)
rule("scale_headroom must be ..., got 1", QuantSpec, rounding="stochastic", scale_headroom=1)
text = 'scale_headroom=True needs rounding="stochastic" and block_rows=1..., got ...scale_headroom=True'
rule(text, QuantSpec, scale_headroom=True)
rule("error must be 'mae' or 'mse', got 'max'", four_over_six, "max")
rule("...window64", four_over_six, amax_scope="window64")

# ---------------------------------------------------------------- recipes
text = "backward must be 'nvfp4', 'high_precision' or 'dequantized', got 'fp8'"
rule(text, (recipes.pretrain, recipes.row_scaled, recipes.four_over_six, recipes.window64), backward="fp8")
text = "scope must be 'weights', 'activations' or 'all', got 'gradients'"
rule(text, recipes.four_over_six, "gradients")
text = 'rht must be False for scope="activations", since wgrad reads 4over6 activations, got True'
rule(text, recipes.four_over_six, "activations", rht=True)
rule("backward must be 'dequantized' or 'high_precision', got 'nvfp4'", recipes.rl, backward="nvfp4")
text = "{} must be True or False, got {!r}"
for maker, option, value in (
    (recipes.rl, "four_over_six", 1),
    (recipes.pretrain_4over6, "stochastic_rounding", None),
    (recipes.pretrain_4over6, "requantize", None),
    (recipes.pretrain, "unbiased", 1),
    (recipes.pretrain, "rht", "no"),
    (recipes.inference, "weight_only", 1),
    (recipes.inference, "four_over_six", "no"),
    (recipes.four_over_six, "fast", "no"),
):
    rule(text.format(option, value), maker, **{option: value})
text = 'rht must be left out for backward="dequantized", which quantizes no gradient, got False'
rule(text, recipes.pretrain, backward="dequantized", rht=False)
text = 'stochastic_rounding must be left out for backward="high_precision"'
rule(text, recipes.row_scaled, backward="high_precision", stochastic_rounding=True)
text = "unbiased must be False for {}, which rounds nothing stochastically, got True"
rule(text.format("stochastic_rounding=False"), recipes.pretrain, unbiased=True, stochastic_rounding=False)
rule(text.format('backward="dequantized"'), recipes.pretrain, unbiased=True, backward="dequantized")
text = "{} operands must both be rotated (format.rht) or neither, got"
rule(text.format("fprop"), Recipe, (NVFP4_RHT, NVFP4))
rule(text.format("fprop"), Recipe, (None, NVFP4_RHT))
rule(text.format("dgrad"), Recipe, dgrad=(NVFP4, NVFP4_RHT))
rule(text.format("wgrad"), Recipe, wgrad=(NVFP4_RHT_SR, WINDOW64))
rule('fprop weight-only needs a w spec with amax_scope "tensor" or "row", got', Recipe, (None, WINDOW64))
for pair in ([NVFP4, NVFP4], NVFP4, (NVFP4, None)):
    rule("fprop must be a pair (x spec or None, w spec) or None, got ", Recipe, pair)
rule("dgrad must be a pair (dy spec, w spec)...or None, got", Recipe, dgrad=(None, NVFP4))
for pair in ((NVFP4,) * 3, (NVFP4,)):
    rule("wgrad must be a pair (dy spec, x spec)...or None, got (", Recipe, wgrad=pair)
rule('wgrad must be a pair (dy spec, x spec), "dequantized" or None, got', Recipe, wgrad="bf16")
for field in ("dgrad", "wgrad"):
    rule("...must not be... for fprop=None", Recipe, None, **{field: "dequantized"})
for value in (1, None, "dequantized"):
    rule(f"requantize must be True or False, got {value!r}", Recipe, None, requantize=value)

# ---------------------------------------------------------------- policies
rule("path must be a regular expression, got 'a(': missing )", PolicyRule, "a(", Recipe())
rule("path must be a regular expression, got 're:a.*'; leave out 're:'", PolicyRule, "re:a.*", Recipe())
rule("TypeError: path must be a regular expression or a function of the path, got 3", PolicyRule, 3, Recipe())
rule("TypeError: recipe must be a Recipe or None, got 'pretrain'", PolicyRule, "a", "pretrain")
rule("TypeError: default must be a Recipe or None, got 'x'", Policy, default="x")
text = "TypeError: ...a list of Rule, got Rule(...Policy(default=recipe)"
rule(text, Policy, PolicyRule("a", Recipe()))
rule("TypeError: rules must be a list of Rule, got Recipe(...Policy(def", Policy, Recipe())
rule("TypeError: rules must be a list of Rule, got 'block_", Policy, "block_.*")
rule("TypeError: each of rules must be a Rule, got 'a'", Policy, ["a"])
rule("TypeError: keep must be names in a tuple, got 'head'", Policy, keep="head")
rule("TypeError: each of keep must be the name of a part ..., got 'a/b'", Policy, keep=("a/b",))
rule("TypeError: each of keep must be the name of a part ..., got ''", Policy, keep=("",))
rule("first_bf16 must be an integer of at least 0, got -1", Policy, first_bf16=-1)
rule("last_bf16 must be an integer of at least 0, got True", Policy, last_bf16=True)

# ---------------------------------------------------------------- states of tensors
tensors = to_state(t(32, 64))
data, scale, amax = (f"{part}_nvfp4_tensor_448" for part in ("data", "scale", "amax"))
for text, state in {
    f"must have ...{scale}...got ['amax_": {name: v for name, v in tensors.items() if name != scale},
    "must have ..., got ...'other'": {**tensors, "other": 1},
    "must have ..., got ...'data_nvfp4_row_448'": {**tensors, "data_nvfp4_row_448": tensors[data]},
    "the names in ['w'] must be ...nvfp4_tensor_448..., got nvfp4_tensor_240": {
        name.replace("448", "240"): v for name, v in tensors.items()
    },
    "must be nvfp4_tensor_448, ... got [3, 448, 0]": {**tensors, "format": np.array([3, 448, 0])},
    "must be nvfp4_tensor_448, ... got [0]": {**tensors, "format": np.array([0])},
    f"{data} in ['w'] must be an array, got [[": {**tensors, data: [[1]]},
    f"{amax} in ['w'] must be an array, got None": {**tensors, amax: None},
    f"{scale} in ['w'] must be an array, got None": {**tensors, scale: None},
    "scale ... must be uint8 or float8_e4m3fn, got": {**tensors, scale: np.zeros((32, 4), "V1")},
}.items():
    rule(f"...{text}", from_state, {"w": state})

# ---------------------------------------------------------------- a KV cache
CACHED = (decode_attention, append_kv)


def kv(capacity=128, depth=64, fmt=ROW, lead=(3, 2), values=None, pages=None, **wrong):
    """A cache for three sequences with two heads, as wrong as the arguments say."""
    keys = t(capacity, depth, fmt, lead=lead, amax=(*lead, capacity), **wrong)
    return KVCache(keys, values or keys, pages)


def dense_kv(capacity=128, depth=64, lead=(3, 2), dtype=BF16, pages=None):
    return KVCache(a(*lead, capacity, depth, dtype=dtype), a(*lead, capacity, depth, dtype=dtype), pages)


def cache_rule(words, cache=None, batch=3, depth=64, handler=None, rows_of=BF16):
    """What both operations refuse in a cache."""
    cache = kv() if cache is None else cache
    n = a(batch, dtype=I32)
    rule(words, decode_attention, a(batch, 4, depth, dtype=rows_of), cache, n, handler=handler)
    rows = a(batch, 2, depth, dtype=rows_of)
    rule(words, append_kv, cache, rows, rows, n)


IN_POOL = {"lead": (7, 2), "capacity": 64}
pages = a(3, 2, dtype=I32)
cache_rule("TypeError: cache must be a jnvfp4.attention.KVCache, got tuple", (kv().keys, kv().values))
cache_rule("TypeError: cache.keys and cache.values must both be NVFP4Tensors or", kv(values=a(3, 2, 128, 64)))
cache_rule(
    "cache.keys must have the format of ROW_SCALED, nvfp4_row_448, got nvfp4_row_256", kv(fmt=Format("row", 256))
)
tensor_scoped = t(128, 64, lead=(3, 2))
cache_rule(
    "cache.keys must have the format of ROW_SCALED, ..., got nvfp4_tensor_448", KVCache(tensor_scoped, tensor_scoped)
)
cache_rule("cache.keys must have rank 4, [B, Hkv, capacity, D] or [P, Hkv, 64, D], got rank 3; jax.vmap", kv(lead=(3,)))
cache_rule("cache.keys must have rank 4, ..., got rank 5", dense_kv(lead=(3, 2, 2)))
cache_rule("cache.keys and cache.values must have the same shape, got (3, 2, 128, 64) and", kv(values=kv(192).keys))
cache_rule("TypeError: cache.keys.data must be uint8, got int8", kv(data=I8))
odd = (cache_call("decode_attention", tokens=96), "of a multiple of 64 tokens")
text = "the capacity of the cache must be a multiple of 64, got {}; make it {}: what lies behind"
cache_rule(text.format(96, 128), kv(96), handler=odd)
cache_rule(text.format(100, 128), dense_kv(100))
OF_HANDLERS.append((cache_call("decode_attention", tokens=0), "of a multiple of 64 tokens, not 0"))
text = "cache.keys must have shape [B, ...] with B=2, as the new tokens have it, got (3, 2, 128, 64); a pool"
cache_rule(text, batch=2)
cache_rule(text, dense_kv(), batch=2)
sizes = (cache_call("append_kv", depth=80), "D must be 64 or 128, got 80")
text = "a head must have ... in the cache too, got new tokens of D={} and cache.keys of shape (3, 2, 128, {})"
cache_rule(text.format(80, 80), kv(depth=80), depth=80, handler=sizes)
cache_rule(text.format(64, 128), kv(depth=128))
short = (cache_call("append_kv", paged=True, room=32), "pages of 64 tokens")
text = "the pages of cache.keys must have 64 tokens, and there must be one or more, got shape ({}, 2, {}, 64)"
cache_rule(text.format(7, 128), kv(lead=(7, 2), pages=pages), handler=short)
cache_rule(text.format(7, 128), dense_kv(lead=(7, 2), pages=pages))
none = (cache_call("decode_attention", paged=True, pool=0), "keys data must have one or more pages of 64 tokens")
cache_rule(text.format(0, 64), kv(64, lead=(0, 2), pages=pages), handler=none)
cache_rule(text.format(0, 64), dense_kv(64, lead=(0, 2), pages=pages))
cache_rule("TypeError: cache.pages must be int32, got float32", kv(**IN_POOL, pages=a(3, 2)))
cache_rule("cache.pages must have shape [B, max_pages] with B=3, got (2, 2)", kv(**IN_POOL, pages=a(2, 2, dtype=I32)))
cache_rule("cache.pages must have shape [B, max_pages] with B=3, got (3,)", kv(**IN_POOL, pages=a(3, dtype=I32)))
cache_rule("cache.pages must have shape [B, max_pages] with B=3, got (3, 0)", kv(**IN_POOL, pages=a(3, 0, dtype=I32)))
cache_rule("TypeError: cache.keys and cache.values must be NVFP4Tensors, or bfloat16 or", dense_kv(dtype=F32))
text = "TypeError: cache.keys and cache.values must be NVFP4Tensors, or bfloat16 or float16 arrays of the same shape"
cache_rule(text, KVCache(dense_kv().keys, dense_kv(dtype=jnp.float16).keys))
text = "TypeError: beside a cache of bfloat16 with D=64 the dtype and D of the new token must be the same, got {}"
cache_rule(text.format("float16 and D=64"), dense_kv(), rows_of=jnp.float16)
cache_rule(text.format("bfloat16 and D=128"), dense_kv(), depth=128)

q, rows, n = a(3, 4, 64, dtype=BF16), a(3, 2, 64, dtype=BF16), a(3, dtype=I32)
text = "{} must have shape [B, {}, D], one token of each sequence, got (3, {}, 2, 64); several tokens of a sequence are"
rule(text.format("q", "Hq", 4), decode_attention, a(3, 4, 2, 64, dtype=BF16), kv(), n)
rule(text.format("k", "Hkv", 2), append_kv, kv(), a(3, 2, 2, 64), a(3, 2, 2, 64), n)
rule("TypeError: q must be an array, got an NVFP4Tensor", decode_attention, kv().keys, kv(), n)
rule("TypeError: q must be bfloat16 or float16, got float32; cast it", decode_attention, a(3, 4, 64), kv(), n)
for cache in (kv(), dense_kv()):
    text = "the query heads of q must be a multiple of the KV heads of the cache, got 3 and 2"
    rule(text, decode_attention, a(3, 3, 64, dtype=BF16), cache, n)
    rule("TypeError: lengths must be int32, got float32", decode_attention, q, cache, a(3))
    rule("lengths must have shape (3,), one for each sequence, got ()", decode_attention, q, cache, a(dtype=I32))
    rule(
        "TypeError: sm_scale must be None or a finite Python number, got inf",
        decode_attention,
        q,
        cache,
        n,
        sm_scale=np.inf,
    )
    for scale in (a(), True, 10**400, 1e39):  # the last is no float32
        rule("TypeError: sm_scale must be None or a finite", decode_attention, q, cache, n, sm_scale=scale)
    rule(text.replace("3 and 2", "4 and 0"), decode_attention, q, kv(lead=(3, 0)), n)
    text = "TypeError: {0} must be int32, got int64; if all of them fit, pass {0}.astype(np.int32)"
    rule(text.format("lengths"), decode_attention, q, cache, np.full(3, 2**32 + 4))
    rule(text.format("positions"), append_kv, cache, rows, rows, np.full(3, 2**32 + 4))
    rule(text.format("cache.pages"), decode_attention, q, cache._replace(pages=np.zeros((3, 2), np.int64)), n)
    rule("TypeError: positions must be int32, got float32", append_kv, cache, rows, rows, a(3))
    rule(
        "positions must have shape (3,), one for each sequence, got (2,)", append_kv, cache, rows, rows, a(2, dtype=I32)
    )
    text = "k and v must have the same shape and dtype, got bfloat16 (3, 2, 64) and float32 (3, 2, 64)"
    rule(text, append_kv, cache, rows, a(3, 2, 64), n)
    text = "k must have the KV heads of the cache, 2, got shape (3, 4, 64)"
    rule(text, append_kv, cache, q, q, n)
rule(f"TypeError: k must be {FLOATS}, got int8", append_kv, kv(), a(3, 2, 64, dtype=I8), a(3, 2, 64, dtype=I8), n)
text = "implementation must be None, 'native' or 'reference', got 'cuda'"
rule(text, decode_attention, q, kv(), n, implementation="cuda")
rule(text, append_kv, kv(), rows, rows, n, implementation="cuda")

zeros = KVCache.zeros
text = "shape must be [B, Hkv, capacity, D], or [P, Hkv, 64, D] with pages, of integers, ... D=64 or 128, got {}"
for shape in ((3, 0, 64, 64), (3, 2, 64, 80), (2, 64, 64), (), 5, np.array(5), (-1, 2, 64, 64), (2.5, 2, 64, 64)):
    rule(text.format(repr(shape)), zeros, shape)
rule("TypeError: dtype must be float4_e2m1fn, bfloat16 or float16, got foo", zeros, (3, 2, 64, 64), "foo")
rule(text.replace("=64 or 128", " above 0").format((3, 2, 64, 0)), zeros, (3, 2, 64, 0), BF16)
rule("the capacity of the cache must be a multiple of 64, got 100; make it 128", zeros, (3, 2, 100, 64))
rule("the capacity of the cache must be a multiple of 64, got 0; make it 64", zeros, (5, 3, 2, 0, 64), BF16)
rule("the pages of cache.keys must have 64 tokens, ..., got shape (7, 2, 128, 64)", zeros, (7, 2, 128, 64), pages=pages)
rule("the pages of cache.keys must ... be one or more, got shape (0, 2, 64, 64)", zeros, (0, 2, 64, 64), pages=pages)
rule("pages must have shape [B, max_pages], got (3,)", zeros, (7, 2, 64, 64), pages=a(3, dtype=I32))
rule("TypeError: cache.pages must be int32, got float32", zeros, (7, 2, 64, 64), pages=a(3, 2))
rule("cache.pages must have shape [B, max_pages] with B=3, got (3, 0)", zeros, (7, 2, 64, 64), pages=a(3, 0, dtype=I32))

# ---------------------------------------------------------------- calibration
EYE, WEIGHT = a(64, 64), a(32, 64)
rule("x must have shape [..., K], got a scalar", hessian, a())
rule("w must have shape [..., N, K] with K a positive multiple of 16, got (32, 72)", gptq, a(32, 72), a(72, 72))
rule("w must have shape [..., N, K] with K a positive multiple of 16, got (64,)", gptq, a(64), EYE)
rule("w must have shape [..., N, K] with K a positive multiple of 16, got (32, 0)", gptq, a(32, 0), a(0, 0))
rule("amax must be float32 (), got bfloat16 ()", gptq, WEIGHT, EYE, amax=jnp.bfloat16(1))
rule("hessian must be float32 (64, 64), [..., K, K], got bfloat16 (64, 64)", gptq, WEIGHT, a(64, 64, dtype=BF16))
rule("hessian must be float32 (2, 64, 64), [..., K, K], got float32 (64, 64)", gptq, a(2, 32, 64), EYE)
for of_spec in (NVFP4_2D, NVFP4_SR, NVFP4_RHT, WINDOW64):
    text = 'spec must have block_rows=1, rounding="nearest", rht=False and amax_scope "tensor" or "row", got '
    rule(text + repr(of_spec), gptq, WEIGHT, EYE, of_spec)
rule("amax must be float32 (32,), got float32 ()", gptq, WEIGHT, EYE, ROW_SCALED, amax=1.0)
for damping in (0, 1.0, True, "0.1"):
    rule(f"damping must be a Python number above 0 and below 1, got {damping!r}", gptq, WEIGHT, EYE, damping=damping)
