"""NVFP4 for JAX: quantize, dequantize and scaled matmul as primitives, the same bits on every platform."""

from . import _native

_native.extensions()

from . import recipes as recipes  # noqa: E402
from .linear import dot_general as dot_general  # noqa: E402
from .linear import fake_quant as fake_quant  # noqa: E402
from .linear import linear as linear  # noqa: E402
from .ops import dequantize as dequantize  # noqa: E402
from .ops import matmul_nt as matmul_nt  # noqa: E402
from .ops import quantize as quantize  # noqa: E402
from .ops import quantize_pair as quantize_pair  # noqa: E402
from .producers import rms_norm_quantize as rms_norm_quantize  # noqa: E402
from .producers import silu_mul_quantize as silu_mul_quantize  # noqa: E402
from .recipe import Recipe as Recipe  # noqa: E402
from .report import QuantizationReport as QuantizationReport  # noqa: E402
from .report import quantization_report as quantization_report  # noqa: E402
from .spec import NVFP4 as NVFP4  # noqa: E402
from .spec import NVFP4_2D as NVFP4_2D  # noqa: E402
from .spec import NVFP4_RHT as NVFP4_RHT  # noqa: E402
from .spec import NVFP4_RHT_SR as NVFP4_RHT_SR  # noqa: E402
from .spec import NVFP4_SR as NVFP4_SR  # noqa: E402
from .spec import ROW_SCALED as ROW_SCALED  # noqa: E402
from .spec import WINDOW64 as WINDOW64  # noqa: E402
from .spec import Format as Format  # noqa: E402
from .spec import QuantSpec as QuantSpec  # noqa: E402
from .spec import four_over_six as four_over_six  # noqa: E402
from .support import supports as supports  # noqa: E402
from .tensor import NVFP4Tensor as NVFP4Tensor  # noqa: E402

__version__ = "0.1.0"
