"""The list of public operations, and the checks of the arguments that they share.

A check raises ``<op>: <what> must <rule>, got <value>`` or returns the argument as the primitives take it.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import softfloat
from .._core.tensor import NVFP4Tensor
from .._primitives._checks import FLOAT_DTYPES, check_float
from ..spec import BLOCK, QuantSpec, check_choice, four_over_six

Implementation = Literal["native", "reference"] | None
Accumulation = Literal["fast", "pinned"]
AmaxPair = tuple[jax.Array | None, jax.Array | None]
FLOATS = "float32, bfloat16 or float16"

# ---------------------------------------------------------------- the list of operations
OPERATIONS: dict[str, Callable] = {}
F = TypeVar("F", bound=Callable)


def operation(function: F) -> F:
    """Adds a public operation to those that ``supports`` answers for."""
    OPERATIONS[function.__name__] = function
    return function


# ---------------------------------------------------------------- arrays
def describe(value: object) -> str:
    """Returns what an error says it got: of an array its dtype and shape, never its contents."""
    return f"an array {value.dtype} {value.shape}" if isinstance(value, jax.Array | np.ndarray) else repr(value)


@dataclass(frozen=True)
class Checks:
    """Checks the arguments of an operation, whose name errors begin with; most checks return the argument converted."""

    op: str

    def tensor(self, name: str, value: object) -> NVFP4Tensor:
        """Returns an NVFP4Tensor; refuses anything else."""
        if isinstance(value, NVFP4Tensor):
            return value
        got = describe(value) if isinstance(value, jax.Array | np.ndarray) else type(value).__name__
        raise TypeError(f"{self.op}: {name} must be an NVFP4Tensor, got {got}; jnvfp4.quantize makes one of an array")

    def array(self, name: str, value: object) -> jax.Array:
        """Converts what ``jnp.asarray`` takes; refuses quantized tensors and a masked array."""
        if isinstance(value, NVFP4Tensor):
            raise TypeError(
                f"{self.op}: {name} must be an array, got an NVFP4Tensor; jnvfp4.dequantize gives its values"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"{self.op}: {name} must have no mask, got a NumPy masked array; {name}.filled(0) is an array with 0 "
                f"for the masked values, {name}.data is one with what lies under the mask"
            )
        dtype = value.dtype if isinstance(value, np.ndarray | np.generic) else None
        if dtype is not None and not dtype.isnative:
            raise TypeError(
                f"{self.op}: {name} must be of native byte order, got dtype {dtype}; "
                f'convert it with .astype({name}.dtype.newbyteorder("="))'
            )
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            if dtype is not None:
                raise TypeError(
                    f"{self.op}: {name} must be of a dtype that JAX has ({FLOATS} for floats), got {dtype}"
                ) from error
            raise TypeError(f"{self.op}: {name} must be an array, got {reprlib.repr(value)}") from error

    def float_array(self, name: str, value: object) -> jax.Array:
        """Converts like ``array``; refuses types other than float32, bfloat16 and float16."""
        array = self.array(name, value)
        check_float(self.op, name, array.dtype)
        return array

    def int32(self, name: str, value: object) -> jax.Array:
        """Converts like ``array``; refuses integers of the host that JAX would cut to 32 bits."""
        if isinstance(value, np.ndarray | np.generic) and value.dtype != np.int32:
            raise TypeError(
                f"{self.op}: {name} must be int32, got {value.dtype}; if all of them fit, pass {name}.astype(np.int32)"
            )
        return self.array(name, value)

    def group_sizes(self, sizes: object, rows: int) -> jax.Array:
        """Converts like ``int32``; refuses sums above M. Primitives check more."""
        array = self.int32("group_sizes", sizes)
        known = sizes if isinstance(sizes, list | tuple) or (isinstance(sizes, np.ndarray) and sizes.ndim == 1) else ()
        if all(isinstance(size, int | np.integer) for size in known):
            total = sum(max(0, int(size)) for size in known)
            if total > rows:
                raise ValueError(f"{self.op}: group_sizes must have a sum of at most M={rows}, got {total}")
        return array

    def amax(self, amax: ArrayLike) -> jax.Array:
        """Converts an amax; a Python number becomes float32. The primitives refuse other dtypes."""
        if isinstance(amax, int | float):
            return jax.device_put(self._float32(amax))  # explicitly, which jax.transfer_guard allows
        return self.array("amax", amax)

    def _float32(self, amax: float) -> np.float32:
        """Rounds a number; refuses one that only infinity could stand for."""
        try:
            with np.errstate(over="ignore"):
                value = np.float32(amax)
        except OverflowError:  # an int beyond float64
            value = np.float32(np.inf)
        if np.isinf(value) and amax not in (math.inf, -math.inf):
            got = float(amax) if isinstance(amax, float) else f"an int of {amax.bit_length()} bits"
            raise ValueError(
                f"{self.op}: amax must be within float32, whose largest number is {np.finfo(np.float32).max}, got {got}"
            )
        return value

    def norm(self, norm: object) -> tuple[jax.Array, float]:
        """Converts the pair (gain, epsilon) of a norm."""
        if not (isinstance(norm, tuple) and len(norm) == 2):
            # Of a list not the numbers of a gain.
            got = f"a {type(norm).__name__} of {len(norm)}" if isinstance(norm, list | tuple) else describe(norm)
            raise ValueError(f"{self.op}: norm must be None or a tuple (gain, epsilon), got {got}")
        gain, epsilon = norm
        known = isinstance(epsilon, int | float | np.floating) and not isinstance(epsilon, bool)
        least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if not (known and least <= epsilon <= most):
            raise ValueError(
                f"{self.op}: the epsilon of norm must be a Python number that float32 holds, above 0, got "
                f"{describe(epsilon)}"
            )
        return self.array("the gain of norm", gain), float(epsilon)

    def amax_pair(self, amax: object) -> AmaxPair:
        """Converts None or the pair (amax of the rows, amax of the columns), either of which may be None."""
        if amax is None:
            return None, None
        if not (isinstance(amax, tuple) and len(amax) == 2):
            raise ValueError(f"{self.op}: amax must be None or a pair (row_amax, col_amax), got {describe(amax)}")
        row, col = (None if value is None else self.amax(value) for value in amax)
        return row, col

    def lowering(self, implementation: str | None, kernels: Sequence[str] = ()) -> None:
        """Refuses what is neither None, "native", "reference" nor the name of one of ``kernels``."""
        check_choice(self.op, "implementation", implementation, (None, "native", *kernels, "reference"))

    def spec(self, name: str, spec: object) -> None:
        if not isinstance(spec, QuantSpec):
            remedy = "; a recipe holds specs, such as recipe.fprop.x" if hasattr(spec, "fprop") else ""
            remedy = "; call it: jnvfp4.spec.four_over_six()" if spec is four_over_six else remedy
            raise TypeError(f"{self.op}: {name} must be a QuantSpec, got {describe(spec)}{remedy}")

    def float_dtype(self, name: str, dtype: DTypeLike | None) -> np.dtype:
        """Converts a dtype; refuses types other than float32, bfloat16 and float16."""
        try:
            result = None if dtype is None else jnp.dtype(dtype)
        except TypeError:
            result = None
        if result not in FLOAT_DTYPES:
            raise TypeError(f"{self.op}: {name} must be {FLOATS}, got {dtype if result is None else result}")
        return result

    def stochastic_key(self, key: jax.Array | None, *specs: QuantSpec) -> jax.Array | None:
        """Returns the key where one of ``specs`` rounds stochastically, and None, whatever the key, where none does."""
        if all(spec.rounding == "nearest" for spec in specs):
            return None
        if key is None:
            raise ValueError(f'{self.op}: key must be a JAX PRNG key for rounding="stochastic", got None')
        return self.key(key)

    def key(self, key: jax.Array) -> jax.Array:
        """Raises unless ``key`` is one PRNG key, typed or of raw uint32 words."""
        dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        if not (typed and shape == ()) and not (dtype == jnp.uint32 and len(shape or ()) == 1):
            raise TypeError(f"{self.op}: key must be one JAX PRNG key, as jax.random.key gives, got {describe(key)}")
        return key

    def choice(self, name: str, value: object, choices: Sequence[object]) -> None:
        """Refuses what is not one of some values."""
        check_choice(self.op, name, value, choices)


@partial(jax.jit, inline=True)  # an eager call transfers no constants
def magnitude(amax: jax.Array) -> jax.Array:
    """Computes |amax| on bits, since a float abs may change a NaN."""
    return softfloat.from_bits(softfloat.to_bits(amax) & softfloat.ABS)


@partial(jax.jit, inline=True)
def fold_amax(key: jax.Array, amax: jax.Array) -> jax.Array:
    """Folds the bits of an amax into a key, by which other data draw other bits."""
    return jax.random.fold_in(key, softfloat.to_bits(amax))


@partial(jax.jit, static_argnums=1, inline=True)
def random_stream(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Makes the ``stream`` operand of the primitives for an array [..., M, K]: uint32, four words for each matrix.

    Two words of key, then the index of the matrix's first block of 16 in the whole array, low word first.
    """
    lead, words = shape[:-2], jax.random.bits(key, (2,), jnp.uint32)
    if not lead:
        return jnp.concatenate([words, jnp.zeros((2,), jnp.uint32)])
    blocks, index = math.prod(shape[-2:]) // BLOCK, jnp.arange(math.prod(lead), dtype=jnp.uint32)
    high, low = softfloat.mul_wide(blocks & 0xFFFFFFFF, index)
    first = jnp.stack([low, high + np.uint32(blocks >> 32) * index], axis=-1)
    return jnp.concatenate([jnp.broadcast_to(words, (*lead, 2)), first.reshape(*lead, 2)], axis=-1)
