"""What a conversion can be told."""

import dataclasses
import re
import typing
from collections.abc import Container
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jnvfp4.convert.encode import CHUNK_BYTES
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.layouts import LAYOUTS, LayoutName
from jnvfp4.spec import Format, QuantSpec, four_over_six

RecipeName = Literal["nvfp4", "4over6", "row-scaled"]
Preset = Literal["linear", "moe-experts"]


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as e:
        raise CheckpointError(f"{pattern!r} is no regular expression ({e})", code=Exit.USAGE) from e


def _check_share(pattern: str) -> None:
    if _expression(pattern).groups < 1:
        raise CheckpointError(
            f"share {pattern!r} has no group", r"one of the parent's name, as in (.*)\.(a|b)_proj", code=Exit.USAGE
        )


def _check_type(name: str, value: object, hint: object) -> None:
    """One of the choices of a Literal or of bool; else what only `_check_numbers` knows."""
    choices = (False, True) if hint is bool else typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices and not any(type(value) is type(c) and value == c for c in choices):
        raise CheckpointError(f"{name} is {value!r}", f"one of {', '.join(map(str, choices))}", code=Exit.USAGE)
    if typing.get_origin(hint) is tuple and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        raise CheckpointError(f"{name} is {value!r}", "a tuple of texts", code=Exit.USAGE)


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `convert_checkpoint`; those of the command by the same names (docs/checkpoints.md).

    Attributes:
      format: layout of the output.
      recipe: how weights are quantized.
      preset: which weights are, before the rules below: every projection, or those of experts.
      targets: only weights whose module matches one of these patterns.
      ignore: modules that are kept: a name, a name and all below it, `re:` and an expression, or with `*`.
      start_layers, end_layers: how many decoder layers at either end are kept.
      keep_containing: kept is what has one of these in its name.
      keep_containing_megatron: the same for a source with Megatron's names (`decoder.layers.0.mlp.linear_fc1.weight`).
      error, e4m3_max: of 4over6.
      block_rows: 16 for 16x16 blocks, 1 for 1x16.
      weight_only: no scale of activations is written.
      input_scale: scale of activations for every module, or a JSON file with the amax of each.
      kv_cache: what the config says of the KV cache.
      experts: whether experts stay one by one or in one tensor, as they are, or become one or the other.
      expert_layout: axes of the experts in one tensor, [E, N, K] or [E, K, N]; "auto" goes by the model type.
      dequantize_input: "fp8-block" decodes weights in FP8 with a scale for every 128x128 block, as DeepSeek-V3 has.
      share, share_qkv: further groups with one global; whether q, k and v are one.
      max_shard_bytes: output shards of at most so many bytes instead of those of the input.
      on_nonfinite, on_bad_shape: an error, or the group or weight is kept.
      allow_empty, allow_unmatched: a conversion that quantizes nothing, a rule that matches nothing.
      strict: a rule that splits a group is an error instead of widened to it.
      cast_f64: whether F64 weights are quantized, from float32.
      high_precision_dtype: of kept tensors of real numbers: as they are, or "bf16".
      zero_amax: S_enc of a weight of zeros: 1, or the largest float32, as Transformer Engine's Python reference has.
      chunk_bytes: how much of a weight is on its way at once.
    """

    format: LayoutName = "modelopt"
    recipe: RecipeName = "nvfp4"
    preset: Preset = "linear"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    start_layers: int = 0
    end_layers: int = 0
    keep_containing: tuple[str, ...] = ()
    keep_containing_megatron: tuple[str, ...] = ()
    error: Literal["mae", "mse"] = "mae"
    e4m3_max: Literal[448, 256] = 256
    block_rows: Literal[1, 16] = 1
    weight_only: bool = False
    input_scale: float | Path = 1.0
    kv_cache: Literal["none", "fp8"] = "none"
    experts: Literal["keep", "per-expert", "stacked"] = "keep"
    expert_layout: Literal["auto", "nk", "kn"] = "auto"
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
        self._check_numbers()
        if self.recipe == "row-scaled" and self.format != "te":
            raise CheckpointError(
                f"recipe is row-scaled and format {self.format}",
                "format te, which has an amax for each row",
                code=Exit.USAGE,
            )
        for pattern in (p for p in (*self.targets, *self.ignore) if p.startswith("re:")):
            _expression(pattern)
        for pattern in self.share:
            _check_share(pattern)
        check_meaning(self, [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default])

    def _check_numbers(self) -> None:
        for name, least in (("start_layers", 0), ("end_layers", 0), ("chunk_bytes", 1), ("max_shard_bytes", 1)):
            value = getattr(self, name)
            if value is None and name == "max_shard_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(f"{name} is {value!r}", f"an integer, {least} or more", code=Exit.USAGE)
        scale: Any = self.input_scale
        if isinstance(scale, Path):
            return
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise CheckpointError(f"input_scale is {scale!r}", "a number or the Path of a JSON file", code=Exit.USAGE)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            value = np.float32(scale)
            both = np.array([value, 1 / value])  # layouts store one or the other
        if not (np.isfinite(both) & (both > 0)).all():
            raise CheckpointError(
                f"input_scale is {scale!r}", "a number above 0 that float32 has, as its reciprocal", code=Exit.USAGE
            )

    @property
    def spec(self) -> QuantSpec:
        if self.recipe == "4over6":
            return four_over_six(self.error, e4m3_max=self.e4m3_max, block_rows=self.block_rows)
        scope: Literal["row", "tensor"] = "row" if self.recipe == "row-scaled" else "tensor"
        return QuantSpec(Format(scope), block_rows=self.block_rows)

    @property
    def scale_max(self) -> int:
        """The E4M3 maximum that the globals are made with."""
        return self.e4m3_max if self.recipe == "4over6" else 448


def check_meaning(options: ConvertOptions, given: Container[str]) -> None:
    """Refuses a setting that would say nothing beside the others.

    Args:
      options: all of them.
      given: names of the attributes that were set, also to what they are by default.

    Raises:
      CheckpointError: names both settings.
    """
    o = options
    clashes = (
        ("error", "recipe", o.recipe != "4over6", "recipe 4over6 for --4over6-err-mode"),
        ("e4m3_max", "recipe", o.recipe != "4over6", "recipe 4over6 for --e4m3-max"),
        ("input_scale", "weight_only", o.weight_only, "no scale of activations, as none is written"),
        ("input_scale", "format", LAYOUTS[o.format].activation is None, "no scale of activations, as none is written"),
        ("kv_cache", "format", o.kv_cache == "fp8" and o.format != "modelopt", "modelopt, whose config has it"),
        ("block_rows", "recipe", o.block_rows == 16 and o.recipe == "row-scaled", "1x16 blocks, without --2d"),
    )
    for name, other, clash, expected in clashes:
        if clash and name in given:
            text = f"{name} is {getattr(o, name)} and {other} {getattr(o, other)}"
            raise CheckpointError(text, expected, code=Exit.USAGE)
