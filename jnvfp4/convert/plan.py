"""What will be written: the tensors of every output shard, known from headers alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jnvfp4.convert.configs import hf_quant_config, quantization_config
from jnvfp4.convert.errors import CheckpointError
from jnvfp4.convert.layouts import LAYOUTS, Layout
from jnvfp4.convert.loaders import check, ignore_list
from jnvfp4.convert.names import Group, module_of
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.policy import FLOATS, Decision, decide, kept_modules, prepared, tensor_of
from jnvfp4.convert.safetensors import Entry, Planned
from jnvfp4.convert.source import CONFIG, Source, read_json
from jnvfp4.spec import BLOCK

HF_QUANT = "hf_quant_config.json"


@dataclass(frozen=True)
class Plan:
    """Decisions, groups and the list that tells loaders what is kept.

    Attributes:
      decisions: by tensor name.
      groups: of modules that are quantized.
      ignore: entries for the config.
      input_scales: the activation scale of each module, where one is written.
    """

    source: Source
    options: ConvertOptions
    decisions: dict[str, Decision]
    groups: list[Group]
    ignore: list[str]
    input_scales: dict[str, float]

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.options.format]

    def outputs(self, entry: Entry) -> list[Planned]:
        """What one tensor of the input becomes."""
        if not self.decisions[entry.name].quantizes:
            narrow = self.options.high_precision_dtype == "bf16" and entry.tag in FLOATS
            return [Planned(entry.name, "BF16" if narrow else entry.tag, entry.shape)]
        module, layout, d = module_of(entry.name), self.layout, self.decisions[entry.name]
        parts, (n, k) = layout.parts(module, d.stacked), d.matrix
        experts = entry.shape[:1] if d.stacked else ()
        shapes = [(*experts, k // m, n) if d.kn else (*experts, n, k // m) for m in (2, BLOCK)]
        each = experts or ((n,) if self.options.recipe == "row-scaled" else layout.global_shape)
        out = [
            Planned(parts.codes, "U8", shapes[0]),
            Planned(parts.scales, layout.scales_tag, shapes[1]),
            Planned(parts.scale, "F32", each),
        ]
        if module in self.input_scales:
            out.append(Planned(parts.activation, "F32", experts or layout.global_shape))
        return out

    def shards(self) -> dict[str, list[Entry]]:
        """The tensors of the input that go into each output file: those of the input file of the same name."""
        shards: dict[str, list[Entry]] = {name: [] for name in sorted(self.source.files)}
        for entry in self.source.entries():
            shards[self.source.places[entry.name]].append(entry)
        most = self.options.max_shard_bytes
        if most is None:
            left = {name: entries for name, entries in shards.items() if entries}
            return left if len(left) > 1 or len(shards) == 1 else {"model.safetensors": next(iter(left.values()))}
        parts: list[list[Entry]] = [[]]
        size = 0
        for entry in [e for entries in shards.values() for e in entries]:
            own = sum(p.nbytes for p in self.outputs(entry))
            if parts[-1] and size + own > most:
                parts.append([])
                size = 0
            parts[-1].append(entry)
            size += own
        names = (f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts)))
        return dict(zip(names, parts, strict=True)) if len(parts) > 1 else {"model.safetensors": parts[0]}

    @property
    def nbytes(self) -> int:
        """Of all tensors that will be written."""
        return sum(p.nbytes for entry in self.source.entries() for p in self.outputs(entry))


def make_plan(source: Source, options: ConvertOptions) -> Plan:
    """Decides everything that can be decided without data, and checks that loaders agree.

    Raises:
      CheckpointError: a rule that means nothing, a weight that cannot be quantized, a conflict with a loader.
    """
    source = prepared(source, options)
    _refuse_quantized(source)
    decisions, groups = decide(source, options)
    ignore = _ignore_list(decisions, groups, options)
    plan = Plan(source, options, decisions, groups, ignore, _input_scales(options, groups))
    names: dict[str, str] = {}
    for entry in source.entries():
        for p in plan.outputs(entry):
            other = names.setdefault(p.name, entry.name)
            if other != entry.name:
                raise CheckpointError(f"{entry.name!r} and {other!r} both become it", "one of them", tensor=p.name)
    return plan


def _ignore_list(decisions: dict[str, Decision], groups: list[Group], options: ConvertOptions) -> list[str]:
    """What the configs say is kept, if every loader reads it so."""
    kept, quantized = kept_modules(decisions), [m for g in groups for m in g.members]
    ignore = ignore_list(kept, quantized, options.format)
    check(ignore, kept, quantized, options.format)
    return ignore


def _refuse_quantized(source: Source) -> None:
    config = (source.config or {}).get("quantization_config")
    if config:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise CheckpointError(
            f"is quantized already ({method})", "a model in high precision", file=source.directory / CONFIG,
            hint="repack changes the layout of NVFP4, dequantize undoes it; --dequantize-input fp8-block decodes FP8",
        )  # fmt: skip
    for name in source.places:
        if name.endswith("weight_scale_inv"):
            raise CheckpointError(
                "is a scale of quantized weights", "a model in high precision", tensor=name,
                hint="--dequantize-input fp8-block decodes it",
            )  # fmt: skip


def _input_scales(options: ConvertOptions, groups: list[Group]) -> dict[str, float]:
    """The scale of the activations of every quantized module; the largest of a group."""
    if options.weight_only or LAYOUTS[options.format].activation is None:
        return {}
    if not isinstance(options.input_scale, Path):
        return {m: float(options.input_scale) for g in groups for m in g.members}
    amaxes = read_json(options.input_scale)
    unknown = sorted(set(amaxes) - {m for g in groups for m in g.members})
    if unknown and not options.allow_unmatched:
        raise CheckpointError(
            f"names {unknown[0]!r}", "modules that are quantized", file=options.input_scale,
            hint="--allow-unmatched accepts it",
        )  # fmt: skip
    out: dict[str, float] = {}
    for group in groups:
        found = [amaxes[m] for m in group.members if m in amaxes]
        if not found or not all(_is_amax(v) for v in found):
            raise CheckpointError(
                f"has {found} for {group.members}", "an amax above 0 for each module", file=options.input_scale
            )
        out |= dict.fromkeys(group.members, max(found) / 2688.0)
    return out


def _is_amax(v: object) -> bool:
    """Whether the scale that follows is a float32, and its reciprocal too."""
    return isinstance(v, int | float) and not isinstance(v, bool) and 1e-30 < v < 1e30


# ---------------------------------------------------------------- configs
def config_files(plan: Plan, version: str) -> dict[str, dict[str, Any]]:
    """The JSON files beside the shards, by name; `config.json` is that of the source with a quantization_config."""
    o = plan.options
    own = {"recipe": o.recipe, "amax_scope": o.spec.format.amax_scope, "e4m3_max": o.scale_max}
    fp8 = o.kv_cache == "fp8"
    quantization = quantization_config(o.format, plan.ignore, weight_only=o.weight_only, fp8_kv_cache=fp8, own=own)
    files: dict[str, dict[str, Any]] = {CONFIG: {**(plan.source.config or {}), "quantization_config": quantization}}
    if o.format == "modelopt":
        files[HF_QUANT] = hf_quant_config(plan.ignore, version, weight_only=o.weight_only, fp8_kv_cache=fp8)
    return files


def index_of(plan: Plan) -> dict[str, Any] | None:
    """The index file, or None where there is one shard."""
    shards = plan.shards()
    if len(shards) < 2:
        return None
    names = {p.name: name for name, entries in shards.items() for e in entries for p in plan.outputs(e)}
    return {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(names.items()))}


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def keep_groups(plan: Plan, groups: list[Group], reason: str) -> Plan:
    """The same plan with some groups kept."""
    decisions = dict(plan.decisions)
    for group in groups:
        for name in (tensor_of(decisions, m) for m in group.members):
            decisions[name] = replace(decisions[name], reason=reason)
    out = set(groups)
    left = [g for g in plan.groups if g not in out]
    if not left and not plan.options.allow_empty:
        raise CheckpointError(f"no tensor is quantized: all are {reason}", hint="--allow-empty converts all the same")
    quantized = {m for g in left for m in g.members}
    scales = {m: s for m, s in plan.input_scales.items() if m in quantized}
    return Plan(plan.source, plan.options, decisions, left, _ignore_list(decisions, left, plan.options), scales)
