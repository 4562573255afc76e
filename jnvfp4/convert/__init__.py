"""Checkpoints: Hugging Face models in NVFP4, for vLLM, SGLang, TensorRT-LLM, compressed-tensors and JAX."""

from jnvfp4.convert.checkpoint import Checkpoint, open_checkpoint
from jnvfp4.convert.compare import Difference, diff, inspect
from jnvfp4.convert.convert import Result, convert_checkpoint
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.maps import Rule, from_hf, to_hf
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.report import write_report
from jnvfp4.convert.rewrite import dequantize, repack
from jnvfp4.convert.save import save_checkpoint
from jnvfp4.convert.verify import Record, verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConvertOptions",
    "Difference",
    "Exit",
    "Record",
    "Result",
    "Rule",
    "convert_checkpoint",
    "dequantize",
    "diff",
    "from_hf",
    "inspect",
    "open_checkpoint",
    "repack",
    "save_checkpoint",
    "to_hf",
    "verify",
    "write_report",
]
