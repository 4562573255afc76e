"""Operands that several test modules share, and products of them by the kernel of a name."""

import contextlib
import faulthandler
import functools
import itertools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import stand_in
from cases import DTYPES, Case
from helpers import amax_shape, bits, decoded, random_tensor

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor

HALVES = {name: DTYPES[name] for name in ("bf16", "fp16")}
LEFT = {"nvfp4": None, **HALVES}  # the type of a left operand; None for an NVFP4 tensor
ROW = Format(amax_scope="row")
TENSOR = Format()
WINDOW = Format(amax_scope="window64")
NARROW = (0x30, 0x38, 0x40)  # scales 1/2, 1, 2

every_left = pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
every_out_dtype = pytest.mark.parametrize("out", DTYPES.values(), ids=DTYPES)


def over(name, values):
    return pytest.mark.parametrize(name, values, ids=["-".join(map(str, v)) for v in values])


def normal(shape, seed=0, dtype="bf16"):
    return jnp.asarray(Case("normal", shape, dtype).make(seed))


def near_tie() -> jnp.ndarray:
    """A tile whose errors for 4 and 6 are so close that the order of their sums decides, by four_over_six("mse"): the
    quantizer chooses another scale for its transpose."""
    return jnp.asarray(np.round(4 * np.random.default_rng(13594).standard_normal((16, 16))) / 4, jnp.bfloat16)


def exact_tensor(shape, seed=0) -> NVFP4Tensor:
    """A tensor whose products sum exactly in any order: few bits, and an alpha of 1 with its like."""
    rng = np.random.default_rng(seed)
    *lead, rows, k = shape
    data = rng.integers(0, 256, (*lead, rows, k // 2), np.uint8)
    scale = rng.choice([0.5, 1.0, 2.0], (*lead, rows, k // 16))
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale, jnp.float8_e4m3fn), jnp.float32(6 * 448), Format())


def exact_with_scope(scope, shape, seed) -> NVFP4Tensor:
    """``exact_tensor`` with an amax of its own for every row or window, as it may be within exact sums."""
    t, rng = exact_tensor(shape, seed), np.random.default_rng(seed)
    if scope == "tensor":
        return t
    amax = 6 * 448.0 * 2.0 ** rng.integers(-1, 2, amax_shape(scope, shape))
    return NVFP4Tensor(t.data, t.scale, jnp.asarray(amax, jnp.float32), Format(scope))


# ---------------------------------------------------------------- operands of matmul_nt
def quantized(shape, a_format=TENSOR, b_format=TENSOR, seed=0, **kwargs) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    m, n, k = shape
    return random_tensor(seed, (m, k), a_format, **kwargs), random_tensor(seed + 1, (n, k), b_format, **kwargs)


def dense(shape: tuple[int, ...], dtype, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def order_free(a, b) -> bool:
    """All products are multiples of one unit and the sum of their magnitudes is below 2^24 units."""
    values = [decoded(t).astype(np.float64) for t in (a, b)]
    units = [np.min(np.abs(v[v != 0])) for v in values]
    unit = 2.0 ** np.floor(np.log2(units[0])) * 2.0 ** np.floor(np.log2(units[1])) / 4
    multiples = all(np.all(v / (u / 2) == np.round(v / (u / 2))) for v, u in zip(values, units, strict=True))
    return multiples and np.max(np.abs(values[0]) @ np.abs(values[1]).T) < 2.0**24 * unit


def with_nan_scale(t: NVFP4Tensor, *row: int) -> NVFP4Tensor:
    scale = bits(t.scale).copy()
    scale[(*row, 1)] = 0x7F
    return NVFP4Tensor(t.data, jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), t.amax, t.format)


def random_operands(
    left, shape, *, order_free=False, a_format=TENSOR, b_format=TENSOR, lead=(), b_lead=(), a_amax=None, b_amax=None
):
    """Random operands; if ``order_free``, such that their products add up to the same bits in any order, up to K of
    14336: the factors of windows are powers of two then."""
    (m, n, k), windows = shape, WINDOW in (a_format, b_format)

    def tensor(seed, shape, fmt, amax):
        if order_free and windows and amax is None:
            powers = np.random.default_rng(seed + 10).integers(-1, 2, amax_shape(fmt.amax_scope, shape))
            amax = 6 * fmt.e4m3_max * 2.0**powers
        return random_tensor(seed, shape, fmt, amax=amax, scales=NARROW if order_free else range(1, 0x7F))

    b = tensor(1, (*b_lead, n, k), b_format, b_amax)
    if left is None:
        return tensor(0, (*lead, m, k), a_format, a_amax), b
    if order_free:
        return jnp.asarray(np.random.default_rng(0).integers(-8, 9, (*lead, m, k)).astype(left)), b
    return dense((*lead, m, k), left), b


order_free_operands = functools.partial(random_operands, order_free=True)


def norm_operands(left, shape, gain_dtype=np.float32, lead=()):
    """a, a norm of it, what that is, and b. No order changes a bit: the elements of a row have one magnitude, a power
    of two, which is their root mean square, and the gains are integers."""
    m, n, k = shape
    rng = np.random.default_rng(m + n + k)
    signs, sizes = rng.choice([-1.0, 1.0], (*lead, m, k)), 2.0 ** rng.integers(-3, 4, (*lead, m, 1))
    gain = rng.integers(-8, 9, k).astype(gain_dtype)
    b = order_free_operands(left, shape)[1]
    norm = jnp.asarray(gain), 1e-12  # half a unit in the last place of the least mean is 2^-31
    return jnp.asarray((signs * sizes).astype(left)), norm, jnp.asarray((signs * gain).astype(left)), b


def identity(left, k, first=0, rows=None) -> NVFP4Tensor | jax.Array:
    """Rows of a matrix with ones on its diagonal, exact in NVFP4: code 2 and scale 1."""
    ones = np.eye(rows or k, k, first, dtype=np.uint8)
    if left is not None:
        return jnp.asarray(ones.astype(left))
    codes, scale = 2 * ones, np.ones((len(ones), k // 16), ml_dtypes.float8_e4m3fn)
    return NVFP4Tensor(jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4), jnp.asarray(scale), jnp.float32(6 * 448))


# ---------------------------------------------------------------- products by the kernel of a name
@contextlib.contextmanager
def hang_guard(seconds: int = 300) -> Iterator[None]:
    """Stops the process if a kernel never ends, since nothing else can; operands are made on the CPU."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    faulthandler.cancel_dump_traceback_later()


def multiply_on(device, kernel: str, a, b, bias=None, out=np.float32, norm=None) -> np.ndarray:
    """Multiplies on a device by the kernel of a name."""
    a, b, bias = jax.device_put((a, b, bias), device)
    norm = norm and (jax.device_put(norm[0], device), norm[1])
    with jax.default_device(device):
        return np.asarray(jnvfp4.matmul_nt(a, b, bias=bias, norm=norm, out_dtype=out, implementation=kernel))


_devices = itertools.count()


@contextlib.contextmanager
def library_on_cpu() -> Iterator[stand_in.Process]:
    """The stand-in for cuBLASLt, on a device that no test has used; operands are made on the CPU."""
    if not stand_in.compiler():
        pytest.skip("no g++")
    process = stand_in.started()
    process("reset", next(_devices))
    with jax.default_device(jax.devices("cpu")[0]):
        yield process


def ask_stand_in(library, a, b, bias=None, out=np.float32, capability=100, kernel="") -> tuple[np.ndarray, str, str]:
    """The result of a product as ``matmul_nt`` would lower it, the kernel that ran and the error."""

    def operand(t) -> dict:
        amax = np.asarray(t.amax)
        rows = t.data.size // t.data.shape[-1]
        parts = {"data": np.asarray(t.data), "scale": bits(t.scale), "amax": amax.reshape(-1)}
        return {**parts, "rows_per_amax": rows // amax.size, "e4m3_max": t.format.e4m3_max}

    *lead, cols, half = b.data.shape
    out, rows, batch = np.dtype(out), a.data.shape[:-1], int(np.prod(lead))
    shape = (batch, int(np.prod(rows)) // batch, cols, 2 * half)
    bias = None if bias is None else (bias.dtype.name, bits(bias))
    result, ran, error = library("multiply", operand(a), operand(b), bias, out.name, shape, capability, kernel)
    return result.view(out).reshape(*rows, cols), ran, error


def multiply_by_stand_in(library, kernel: str, a, b, bias=None, out=np.float32, **options) -> np.ndarray:
    result, ran, error = ask_stand_in(library, a, b, bias, out, kernel=kernel, **options)
    assert (ran, error, library("complaint")) == (kernel, "", "")
    return result
