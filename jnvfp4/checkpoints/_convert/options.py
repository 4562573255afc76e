"""Options of a conversion."""

import dataclasses
import re
import typing
from collections.abc import Container
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...spec import NVFP4, QuantSpec
from .._files.errors import CheckpointError, Exit
from .._files.files import CHUNK_BYTES
from .._layouts.layouts import LAYOUTS, LayoutName

Preset = Literal["linear", "moe-experts"]
ExpertLayout = Literal["auto", "nk", "kn"]


@dataclass(frozen=True)
class ConvertOptions:
    """Options of ``convert_checkpoint``. docs/checkpoints.md describes the flags of the command, which set them.

    Attributes:
      layout: the layout of the output.
      spec: how weights are quantized: rounded to nearest, not rotated, with an amax per tensor or (layout te) per row.
      preset: which weights are quantized, before the rules below: every projection, or those of experts.
      targets: patterns (``jnvfp4._patterns.matches``); only modules that match one are quantized.
      ignore: patterns; modules that match one are kept.
      start_layers, end_layers: the numbers of decoder layers that are kept at either end.
      keep_containing: texts; tensors that have one in their name are kept.
      keep_containing_megatron: the same for a source with Megatron's names, such as
        ``decoder.layers.0.mlp.linear_fc1.weight``.
      weight_only: whether the output has no activation scales and its config keeps activations in high precision.
      input_scale: the activation scale of every module, or a JSON file with the activations' amax of each module.
      kv_cache: the KV cache that the config asks for.
      experts: "keep" leaves experts as they are; "per-expert" gives each its own tensors; "stacked" puts all in one.
      expert_layout: axes of a stack of experts, [E, N, K] or [E, K, N]; "auto" decides by the model type.
      dequantize_input: "fp8-block" decodes FP8 weights with a scale for every 128x128 block, as in DeepSeek-V3.
      share: expressions for further groups of modules that share a global scale.
      share_qkv: whether q, k and v share one.
      max_shard_bytes: the size of output shards; None keeps the shards of the source.
      on_nonfinite: what a NaN or infinity in a weight does: raise an error, or keep the weight's group.
      on_bad_shape: what a K that is no multiple of 16 does: raise an error, or keep the weight.
      allow_empty: whether a conversion may quantize nothing.
      allow_unmatched: whether a rule may match nothing.
      strict: whether a rule that selects only a part of a group is an error; otherwise the whole group is kept.
      cast_f64: whether F64 weights are quantized, after a cast to float32.
      high_precision_dtype: "bf16" casts kept floating-point tensors.
      zero_amax: S_enc of a weight of zeros: 1, or the largest float32 as in Transformer Engine's Python reference.
      chunk_bytes: the bytes of a weight that are quantized at once.
    """

    layout: LayoutName = "modelopt"
    spec: QuantSpec = NVFP4
    preset: Preset = "linear"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    start_layers: int = 0
    end_layers: int = 0
    keep_containing: tuple[str, ...] = ()
    keep_containing_megatron: tuple[str, ...] = ()
    weight_only: bool = False
    input_scale: float | Path = 1.0
    kv_cache: Literal["none", "fp8"] = "none"
    experts: Literal["keep", "per-expert", "stacked"] = "keep"
    expert_layout: ExpertLayout = "auto"
    dequantize_input: Literal["none", "fp8-block"] = "none"
    share: tuple[str, ...] = ()
    share_qkv: bool = True
    max_shard_bytes: int | None = None
    on_nonfinite: Literal["error", "skip"] = "error"
    on_bad_shape: Literal["error", "keep"] = "error"
    allow_empty: bool = False
    allow_unmatched: bool = False
    strict: bool = False
    cast_f64: bool = False
    high_precision_dtype: Literal["keep", "bf16"] = "keep"
    zero_amax: Literal["one", "te-reference"] = "one"
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(ConvertOptions).items():
            _check_type(name, getattr(self, name), hint)
        for name, least in (("start_layers", 0), ("end_layers", 0), ("chunk_bytes", 1), ("max_shard_bytes", 1)):
            _check_count(name, getattr(self, name), least)
        _check_input_scale(self.input_scale)
        _check_spec(self.spec, self.layout)
        for pattern in (p for p in (*self.targets, *self.ignore) if p.startswith("re:")):
            _expression(pattern)
        for pattern in self.share:
            _check_share(pattern)
        check_clashes(self, [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default])

    @property
    def row_scaled(self) -> bool:
        """Whether every row of a weight has its own amax."""
        return self.spec.format.amax_scope == "row"

    @property
    def recipe(self) -> str:
        """The name of the spec that a checkpoint has for people to read; nothing depends on it."""
        return "4over6" if self.spec.select != "max6" else "row-scaled" if self.row_scaled else "nvfp4"


def check_clashes(options: ConvertOptions, explicit: Container[str]) -> None:
    """Raises if an option that was set has no effect because of another one.

    Args:
      options: all options.
      explicit: the names of the options that were set, also if they were set to their default.

    Raises:
      CheckpointError: names both options.
    """
    o = options
    no_activations = LAYOUTS[o.layout].activation is None
    clashes = (
        ("input_scale", "weight_only", o.weight_only, "no input_scale, as no activation scale is written"),
        ("input_scale", "layout", no_activations, "no input_scale, as no activation scale is written"),
        ("kv_cache", "layout", o.kv_cache == "fp8" and o.layout != "modelopt", "layout modelopt for an FP8 KV cache"),
    )
    for name, other, clash, expected in clashes:
        if clash and name in explicit:
            text = f"{name} is {getattr(o, name)} and {other} {getattr(o, other)}"
            raise CheckpointError(text, expected, code=Exit.USAGE)


# ---------------------------------------------------------------- checks of one option
def _check_type(name: str, value: object, hint: object) -> None:
    """Checks options that are bool, a Literal or a tuple of texts."""
    choices = (False, True) if hint is bool else typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices and not any(type(value) is type(c) and value == c for c in choices):
        raise CheckpointError(f"{name} is {value!r}", f"one of {', '.join(map(str, choices))}", code=Exit.USAGE)
    if typing.get_origin(hint) is tuple and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        raise CheckpointError(f"{name} is {value!r}", "a tuple of texts", code=Exit.USAGE)


def _check_count(name: str, value: object, least: int) -> None:
    if value is None and name == "max_shard_bytes":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"{name} is {value!r}", f"an integer, {least} or more", code=Exit.USAGE)


def _check_input_scale(scale: Any) -> None:
    if isinstance(scale, Path):
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise CheckpointError(f"input_scale is {scale!r}", "a number or the Path of a JSON file", code=Exit.USAGE)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        value = np.float32(scale)
        both = np.array([value, 1 / value])  # layouts store one or the other
    if not (np.isfinite(both) & (both > 0)).all():
        raise CheckpointError(
            f"input_scale is {scale!r}",
            "a number above 0 that is finite in float32, as is its reciprocal",
            code=Exit.USAGE,
        )


def _check_spec(spec: QuantSpec, layout: LayoutName) -> None:
    if not isinstance(spec, QuantSpec):
        raise CheckpointError(f"spec is {spec!r}", "a QuantSpec", code=Exit.USAGE)
    if spec.rounding != "nearest" or spec.format.rht or spec.format.amax_scope == "window64":
        raise CheckpointError(
            f"spec is {spec}", "rounding to nearest, no rht, and an amax for each tensor or row", code=Exit.USAGE
        )
    if spec.format.amax_scope == "row" and layout != "te":
        raise CheckpointError(
            f"spec has an amax for each row and layout is {layout}", "layout te, which can store them", code=Exit.USAGE
        )


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as e:
        raise CheckpointError(f"{pattern!r} is no regular expression ({e})", code=Exit.USAGE) from e


def _check_share(pattern: str) -> None:
    if _expression(pattern).groups < 1:
        raise CheckpointError(
            f"share {pattern!r} has no group", r"one for the parent's name, as in (.*)\.(a|b)_proj", code=Exit.USAGE
        )
