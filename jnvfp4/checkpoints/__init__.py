"""Converts, opens, saves and checks NVFP4 checkpoints with Hugging Face names.

Layouts: Model Optimizer (vLLM, SGLang, TensorRT-LLM), compressed-tensors, and one for JAX alone.
"""

from ._convert.options import ConvertOptions
from ._files.errors import CheckpointError, Exit
from .calibrate import write_input_amaxes
from .compare import Difference, diff, inspect
from .convert import Result, convert_checkpoint
from .fix import fix_checkpoint
from .load import Checkpoint, open_checkpoint
from .report_files import write_report
from .rewrite import dequantize_checkpoint, repack_checkpoint
from .rules import Finding, lint
from .save import save_checkpoint
from .trees import NameRule, from_hf, to_hf
from .verify import Record, VerificationError, verify_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConvertOptions",
    "Difference",
    "Exit",
    "Finding",
    "NameRule",
    "Record",
    "Result",
    "VerificationError",
    "convert_checkpoint",
    "dequantize_checkpoint",
    "diff",
    "fix_checkpoint",
    "from_hf",
    "inspect",
    "lint",
    "open_checkpoint",
    "repack_checkpoint",
    "save_checkpoint",
    "to_hf",
    "verify_checkpoint",
    "write_input_amaxes",
    "write_report",
]
