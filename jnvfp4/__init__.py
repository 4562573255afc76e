"""NVFP4 for JAX: quantize, dequantize and scaled matmul as primitives; the same quantized bits on every platform."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import attention as attention
from . import calibration as calibration
from . import recipes as recipes
from . import remat as remat
from . import sharding as sharding
from . import stats as stats
from ._core.state import from_state as from_state
from ._core.state import to_state as to_state
from ._core.tensor import NVFP4Tensor as NVFP4Tensor
from ._layers.dot_general import DotGeneral as DotGeneral
from ._layers.dot_general import dot_general as dot_general
from ._layers.einsum import einsum as einsum
from ._layers.grouped_linear import RaggedDot as RaggedDot
from ._layers.grouped_linear import grouped_linear as grouped_linear
from ._layers.keys import step_key as step_key
from ._layers.linear import linear as linear
from ._layers.weights import QuantizedWeight as QuantizedWeight
from ._ops.matmul import grouped_matmul_nt as grouped_matmul_nt
from ._ops.matmul import matmul_nt as matmul_nt
from ._ops.quantize import dequantize as dequantize
from ._ops.quantize import fake_quant as fake_quant
from ._ops.quantize import quantize as quantize
from ._ops.quantize import quantize_pair as quantize_pair
from ._ops.quantize import transpose as transpose
from ._reports.support import Support as Support
from ._reports.support import export_checks as export_checks
from ._reports.support import supports as supports
from ._self_check import cases as _cases  # noqa: F401  (a primitive is checked by the cases of its name)
from ._version import __version__ as __version__
from .policy import Policy as Policy
from .policy import Rule as Rule
from .recipes import Recipe as Recipe
from .spec import NVFP4 as NVFP4
from .spec import NVFP4_2D as NVFP4_2D
from .spec import NVFP4_RHT as NVFP4_RHT
from .spec import NVFP4_RHT_SR as NVFP4_RHT_SR
from .spec import NVFP4_RHT_SR_UNBIASED as NVFP4_RHT_SR_UNBIASED
from .spec import NVFP4_SR as NVFP4_SR
from .spec import NVFP4_SR_UNBIASED as NVFP4_SR_UNBIASED
from .spec import ROW_SCALED as ROW_SCALED
from .spec import WINDOW64 as WINDOW64
from .spec import Format as Format
from .spec import QuantSpec as QuantSpec

if not _TYPE_CHECKING:  # for whom `import jnvfp4.flax` says what it holds

    def __getattr__(name: str):
        """Imports the module for another library when it is first used: ``jnvfp4.flax`` imports Flax, and so on."""
        if name in ("equinox", "flax", "haliax", "qwix"):
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
