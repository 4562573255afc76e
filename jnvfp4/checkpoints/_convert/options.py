"""Options of a conversion."""

import re
import typing
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from ...spec import NVFP4, QuantSpec
from .._files.errors import OptionError
from .._files.files import CHUNK_BYTES
from .._layouts.layouts import LAYOUTS, LayoutName, layouts_with

Preset = Literal["linear", "moe-experts"]
ExpertLayout = Literal["auto", "nk", "kn"]


@dataclass(frozen=True)
class ConvertOptions:
    """Options of ``convert_checkpoint``. docs/checkpoints.md describes the flags of the command, which set them.

    Attributes:
      layout: the layout of the output.
      spec: how weights are quantized: rounded to nearest, not rotated, with an amax per tensor or (layout te) per row.
      hessians: a safetensors file, or a folder of some, with ``jnvfp4.calibration.hessian`` of what layers multiply:
        float32 [K, K] (stacks of experts: [E, K, K]) by the name that the weight or its module has in the output. One
        of q_proj, k_proj and v_proj, except of cross-attention, or of gate_proj and up_proj (w1 and w3) is enough;
        where two of three have one, the third needs its own. Weights that have one are rounded by GPTQ, whose bits may
        differ between devices.
      preset: which weights are quantized, before the rules below: every projection, or only the experts.
      targets: patterns (``jnvfp4._patterns.matches``); only modules that match one are quantized.
      ignore: patterns; modules that match one are left unquantized.
      start_layers, end_layers: the numbers of decoder layers at either end that are left unquantized.
      weight_only: whether the output has no activation scales and its config keeps activations in high precision.
      input_amax: the amax of the activations, from which their scale follows: one number for all modules, or a JSON
        file with the amax of each (``write_input_amaxes`` writes it). None writes scales of 1.0, with a warning.
      on_missing_amax: how to treat a module that the file of amaxes does not name: an error, or, for an expert, which
        calibration may never reach, the largest amax of the same projection of its sibling experts.
      kv_cache: the KV cache that the config asks for.
      experts: "keep" leaves experts as they are; "per-expert" gives each its own tensors; "stacked" puts all in one.
      expert_layout: axes of a stack of experts, [E, N, K] or [E, K, N]; "auto" decides by the config.
      dequantize_input: "fp8" decodes FP8 weights with one scale, a scale per row, or one per 128x128 block or 32
        elements (MXFP8); "mxfp4" also decodes MXFP4 and gives it NVFP4 scales that are powers of 2.
      share: expressions for further groups of modules that share a global scale.
      max_shard_bytes: the size of output shards; None keeps the shards of the source.
      on_nonfinite: how to treat a NaN or infinity in a weight: an error, or leave the weight's group unquantized.
      on_bad_shape: how to treat a K that is no multiple of 16: an error, or leave the weight unquantized.
      strict: whether a rule that selects a part of a group is an error; otherwise the group is left unquantized.
      chunk_bytes: the bytes of a weight that are quantized at once.
    """

    layout: LayoutName = "modelopt"
    spec: QuantSpec = NVFP4
    hessians: Path | None = None
    preset: Preset = "linear"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    start_layers: int = 0
    end_layers: int = 0
    weight_only: bool = False
    input_amax: float | Path | None = None
    on_missing_amax: Literal["error", "siblings"] = "error"
    kv_cache: Literal["none", "fp8"] = "none"
    experts: Literal["keep", "per-expert", "stacked"] = "keep"
    expert_layout: ExpertLayout = "auto"
    dequantize_input: Literal["none", "fp8", "mxfp4"] = "none"
    share: tuple[str, ...] = ()
    max_shard_bytes: int | None = None
    on_nonfinite: Literal["error", "skip"] = "error"
    on_bad_shape: Literal["error", "keep"] = "error"
    strict: bool = False
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(ConvertOptions).items():
            _check_type(name, getattr(self, name), hint)
        _check_spec(self.spec, self.layout)
        if self.dequantize_input == "mxfp4" and self.spec != NVFP4:
            clauses = {"dequantize_input": "is mxfp4", "spec": f"is {self.recipe}, {self.spec.block_rows}x16"}
            raise OptionError(clauses, "nvfp4 with 1x16 blocks, which can have the scales of MXFP4")
        _check_hessians(self)
        for name in ("targets", "ignore", "share"):
            for pattern in getattr(self, name):
                _check_pattern(name, pattern)
        _check_activations(self)

    @property
    def row_scaled(self) -> bool:
        """Whether every row of a weight has its own amax."""
        return self.spec.format.amax_scope == "row"

    @property
    def recipe(self) -> str:
        """The name of the spec that a checkpoint has for people to read; nothing depends on it."""
        name = "4over6" if self.spec.select in ("mae", "mse") else "row-scaled" if self.row_scaled else "nvfp4"
        return f"{name}{'-search' * (self.spec.select == 'search')}{'-gptq' * (self.hessians is not None)}"


def is_number(v: object) -> bool:
    """Tells whether a value is a real number, of Python or NumPy; True and False are none."""
    return isinstance(v, Real) and not isinstance(v, bool)


def is_amax(v: Any) -> bool:
    """Tells whether the scale that follows from an amax is finite in float32, as is its reciprocal."""
    return is_number(v) and 1e-30 < v < 1e30


def _check_activations(o: ConvertOptions) -> None:
    """Raises if an option of activations has a wrong value, or no effect because of another option."""
    if not (o.input_amax is None or isinstance(o.input_amax, Path) or is_amax(o.input_amax)):
        is_path = not is_number(o.input_amax)
        expected = "a number or the Path of a JSON file" if is_path else "a number above 1e-30 and below 1e30"
        raise OptionError({"input_amax": f"is {o.input_amax!r}"}, expected)
    if o.input_amax is not None and (o.weight_only or LAYOUTS[o.layout].suffixes.activation is None):
        other = {"weight_only": "is used"} if o.weight_only else {"layout": f"is {o.layout}"}
        expected = "one of them, as no activation scale is written then"
        raise OptionError({"input_amax": f"is {o.input_amax}", **other}, expected)
    if o.on_missing_amax != "error" and not isinstance(o.input_amax, Path):
        clauses = {"on_missing_amax": f"is {o.on_missing_amax}", "input_amax": f"is {o.input_amax}"}
        raise OptionError(clauses, "a JSON file of amaxes, in which a module may be missing")
    if o.kv_cache == "fp8" and not LAYOUTS[o.layout].unscaled_kv_cache:
        expected = f"layout {layouts_with(lambda x: x.unscaled_kv_cache)} for an FP8 KV cache"
        raise OptionError({"kv_cache": f"is {o.kv_cache}", "layout": f"is {o.layout}"}, expected)


# ---------------------------------------------------------------- checks of one option
def _check_type(name: str, value: object, hint: object) -> None:
    """Checks options that are bool, a Literal, a tuple of texts or an integer."""
    choices = (False, True) if hint is bool else typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if choices and not any(type(value) is type(c) and value == c for c in choices):
        raise OptionError({name: f"is {value!r}"}, " or ".join(map(str, choices)))
    if typing.get_origin(hint) is tuple and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        raise OptionError({name: f"is {value!r}"}, "a tuple of texts")
    least = 0 if name in ("start_layers", "end_layers") else 1
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if hint in (int, int | None) and not is_count and (value is not None or hint is int):
        raise OptionError({name: f"is {value!r}"}, f"an integer, {least} or more")


def _check_spec(spec: QuantSpec, layout: LayoutName) -> None:
    if not isinstance(spec, QuantSpec):
        raise OptionError({"spec": f"is {spec!r}"}, "a QuantSpec")
    if spec.rounding != "nearest" or spec.format.rht or spec.format.amax_scope == "window64":
        raise OptionError({"spec": f"is {spec}"}, "rounding to nearest, no rht, and an amax per tensor or row")
    if spec.format.amax_scope == "row" and not LAYOUTS[layout].stores_amax:
        clauses = {"spec": "has an amax per row", "layout": f"is {layout}"}
        raise OptionError(clauses, f"layout {layouts_with(lambda x: x.stores_amax)}, which can store them")


def _check_hessians(o: ConvertOptions) -> None:
    """Raises if the option has a wrong value, or an effect that another option rules out."""
    if not (o.hessians is None or isinstance(o.hessians, Path)):
        raise OptionError({"hessians": f"is {o.hessians!r}"}, "the Path of a file, or of a folder")
    if o.hessians is not None and o.spec.block_rows != 1:
        clauses = {"hessians": f"is {o.hessians}", "spec": f"has {o.spec.block_rows}x16 blocks"}
        raise OptionError(clauses, "1x16 blocks, which GPTQ rounds a column at a time")
    if o.hessians is not None and o.dequantize_input == "mxfp4":
        clauses = {"hessians": f"is {o.hessians}", "dequantize_input": "is mxfp4"}
        raise OptionError(clauses, "one of them, since values of MXFP4 are kept")


def _check_pattern(name: str, pattern: str) -> None:
    """Checks regular expressions, which patterns of ``share`` always are."""
    if name != "share" and not pattern.startswith("re:"):
        return
    try:
        groups = re.compile(pattern.removeprefix("re:")).groups
    except re.error as e:
        raise OptionError({name: f"has {pattern!r}, which is no regular expression ({e})"}) from e
    if name == "share" and groups < 1:
        expected = r"one for the parent's name, as in (.*)\.(a|b)_proj"
        raise OptionError({"share": f"has {pattern!r} without a group"}, expected)
