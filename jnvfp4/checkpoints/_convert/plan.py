"""Plans a conversion from headers alone: what every tensor becomes, the shards, and the files beside them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...spec import BLOCK
from .._files.errors import CheckpointError
from .._files.files import check_finite
from .._files.safetensors import JSON, Planned
from .._files.source import CONFIG, PARAMS, Source, index_file, read_json
from .._layouts.base import Layout, Parts, Quantization
from .._layouts.fp8 import fp8_weights
from .._layouts.layouts import LAYOUTS
from .._layouts.loaders import linear_modules
from .._layouts.names import Group, is_kv_scale, module_of, sibling_experts, split_role
from .._layouts.unsupported import factors, mlx_refusal
from .choices import Choice, choose
from .hessians import Hessians, open_hessians
from .options import ConvertOptions, is_amax
from .views import converted_view


@dataclass(frozen=True)
class Item:
    """Describes the outputs of one tensor of the source; ``parts`` is None if the tensor is left unquantized."""

    choice: Choice
    module: str
    parts: Parts | None
    outputs: tuple[Planned, ...]

    @property
    def name(self) -> str:
        """The tensor's name in the source."""
        return self.choice.entry.name

    @property
    def nbytes(self) -> int:
        """The bytes that are written for it."""
        return sum(p.nbytes for p in self.outputs)


@dataclass(frozen=True)
class Plan:
    """Holds everything that is decided before data is read.

    Attributes:
      source: the tensors in the form that is converted.
      options: the options of the conversion.
      groups: the groups of modules that are quantized.
      items: what every tensor becomes, by its name in the source.
      weights: the quantized items, by module.
      shards: the items of each output file, by file name.
      ignore: the ignore list, which names the unquantized modules to loaders.
      input_scales: the activation scales, by module.
      hessians: of what the weights multiply, if they are rounded by GPTQ.
      files: the JSON files beside the shards by name, in the order in which they are written.
      other_warnings: warnings, except of uncalibrated activations.
    """

    source: Source
    options: ConvertOptions
    groups: tuple[Group, ...]
    items: Mapping[str, Item]
    weights: Mapping[str, Item]
    shards: Mapping[str, tuple[Item, ...]]
    ignore: tuple[str, ...]
    input_scales: Mapping[str, float]
    hessians: Hessians | None
    files: Mapping[str, JSON]
    other_warnings: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about findings that are no errors."""
        if not self.input_scales or self.options.input_amax is not None:
            return self.other_warnings
        return (
            *self.other_warnings,
            f"the activation scales are uncalibrated: all {len(self.input_scales)} are {_UNMEASURED}, so that "
            "activations with a standard deviation below 0.1 lose accuracy; --weight-only writes none, "
            "--input-amax FILE those that jnvfp4.checkpoints.write_input_amaxes has measured",
        )

    @property
    def layout(self) -> Layout:
        """The layout of the output."""
        return LAYOUTS[self.options.layout]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that are written."""
        return sum(item.nbytes for item in self.items.values())

    @property
    def with_hessian(self) -> dict[str, str]:
        """The names of the hessians by the modules that are rounded by them."""
        names = {} if self.hessians is None else self.hessians.names
        return {module: name for module, name in names.items() if module in self.weights}

    def check_unchanged(self) -> None:
        """Raises if a file that is read is another one than when it was opened."""
        self.source.check_unchanged()
        if self.hessians is not None:
            self.hessians.source.check_unchanged()


def make_plan(source: Source, options: ConvertOptions) -> Plan:
    """Decides everything that can be decided without data, and checks that loaders agree with it.

    Raises:
      CheckpointError: the source is quantized already, its config has NaN or infinity, a rule matches nothing, a weight
        cannot be quantized, or a loader would read the ignore list differently.
    """
    view = converted_view(source, options)
    _refuse_quantized(view)
    check_finite(view.config, source.directory / CONFIG)
    choices, groups, warnings = choose(view, options)
    scales, uncalibrated = _input_scales(options, groups, {*map(module_of, choices)})
    hessians = None if options.hessians is None else open_hessians(options.hessians, choices)
    warnings = view.file_warnings + view.warnings + warnings + uncalibrated + _of_gates(view, groups)
    warnings += _without_hessians(hessians, options.hessians)
    return _plan_of(view, options, choices, groups, scales, hessians, warnings)


def _without_hessians(hessians: Hessians | None, path: Path | None) -> tuple[str, ...]:
    if hessians is None or not hessians.missing:
        return ()
    text = f"{len(hessians.missing)} modules have no hessian, and are quantized without one"
    return (f"{path}: {text}: {', '.join(hessians.missing)}",)


def _of_gates(source: Source, groups: Collection[Group]) -> tuple[str, ...]:
    """Warns of projections half of whose rows are a gate: Model-Optimizer#2091 measured 2 to 6 times the perplexity."""
    models = ("qwen3_next", "qwen3_5")  # that have a gate unless their config says otherwise
    if not any(c.get("attn_output_gate", str(c.get("model_type")).startswith(models)) for c in source.configs):
        return ()
    found = [m for g in groups for m in g.members if split_role(m)[1] in ("q_proj", "qkv_proj")]
    text = f"half of the rows of {len(found)} modules is a gate, such as {found[:1]}; NVFP4 may ruin the model"
    return (f"attn_output_gate: {text}; --ignore '*.{split_role(found[0])[1]}' keeps their groups",) if found else ()


def plan_without(plan: Plan, not_finite: Collection[Group]) -> Plan:
    """Plans the same conversion without the groups that have NaN or infinity."""
    groups = tuple(g for g in plan.groups if g not in not_finite)
    if not groups:
        raise CheckpointError("no tensor is quantized: all are not finite")
    choices = {name: item.choice for name, item in plan.items.items()}
    for item in (plan.weights[m] for g in not_finite for m in g.members):
        choices[item.name] = replace(item.choice, reason="not finite")
    scales = {m: plan.input_scales[m] for g in groups for m in g.members if m in plan.input_scales}
    return _plan_of(plan.source, plan.options, choices, groups, scales, plan.hessians, plan.other_warnings)


def _plan_of(
    source: Source,
    options: ConvertOptions,
    choices: Mapping[str, Choice],
    groups: tuple[Group, ...],
    input_scales: Mapping[str, float],
    hessians: Hessians | None,
    other_warnings: tuple[str, ...],
) -> Plan:
    kept = linear_modules(d.entry for d in choices.values() if not d.quantizes)
    layout, format_ = LAYOUTS[options.layout], options.spec.format
    ignore = layout.ignore_list(kept, [m for g in groups for m in g.members])
    items = {name: _item(d, options, input_scales) for name, d in choices.items()}
    _check_names(items)
    weights = {item.module: item for item in items.values() if item.choice.quantizes}
    shards = _shards(source, items, options.max_shard_bytes)
    spec = {"recipe": options.recipe, "amax_scope": format_.amax_scope, "e4m3_max": format_.e4m3_max}
    quantization = Quantization(ignore, options.weight_only, "FP8" if options.kv_cache == "fp8" else "", spec)
    configs = layout.config_files(source.config or {}, quantization, source.params)
    outputs = {name: [p for item in items for p in item.outputs] for name, items in shards.items()}
    index = index_file(outputs, source.stem)
    files = configs | index  # the index is last, so that an interrupted output looks incomplete
    ignored = tuple(ignore)
    return Plan(source, options, groups, items, weights, shards, ignored, input_scales, hessians, files, other_warnings)


def _refuse_quantized(source: Source) -> None:
    if refusal := mlx_refusal(source):
        raise refusal
    config, expected = (source.config or {}).get("quantization_config"), "a model in high precision"
    if config:
        method = config.get("quant_method", config.get("qformat_weight")) if isinstance(config, dict) else config
        hint = (
            "repack changes the layout of NVFP4, dequantize undoes it; --dequantize-input fp8 decodes FP8, mxfp4 MXFP4"
        )
        file = source.directory / (CONFIG if source.params is None else PARAMS)
        raise CheckpointError(f"is quantized already ({method})", expected, file=file, hint=hint)
    suffixes = tuple(suffix for layout in LAYOUTS.values() for suffix in layout.global_suffixes)
    scales = [name for name in source.places if name.endswith(suffixes) or is_kv_scale(name)]
    scales += [name for name, _ in factors(source, source.places)]
    if scales:
        hint = "--dequantize-input fp8 decodes FP8 weights" if any(fp8_weights(source)) else ""
        raise CheckpointError("is a scale of quantized weights or of a KV cache", expected, tensor=scales[0], hint=hint)


# ---------------------------------------------------------------- what a tensor becomes
def _item(choice: Choice, options: ConvertOptions, input_scales: Mapping[str, float]) -> Item:
    entry = choice.entry
    module = module_of(entry.name)
    if not choice.quantizes:
        return Item(choice, module, None, (entry,))
    layout, (n, k) = LAYOUTS[options.layout], choice.matrix
    parts = layout.parts(module, choice.stacked)
    experts = entry.shape[:1] if choice.stacked else ()
    codes, scales = ((*experts, k // m, n) if entry.kn else (*experts, n, k // m) for m in (2, BLOCK))
    numbers = experts or ((n,) if options.row_scaled else layout.global_shape)
    return Item(choice, module, parts, tuple(layout.planned(parts, codes, scales, numbers, module in input_scales)))


def _check_names(items: Mapping[str, Item]) -> None:
    """Raises if two tensors of the source become one of the output, or would be read as a part of another."""
    names: dict[str, str] = {}
    for item in items.values():
        parts = item.parts or [p.name for p in item.outputs]
        for name in filter(None, parts):
            other = names.setdefault(name, item.name)
            if other != item.name:
                raise CheckpointError(f"{item.name!r} and {other!r} both become it", "one of them", tensor=name)


# ---------------------------------------------------------------- activation scales
_UNIT_SCALE_AMAX = 2688.0  # 6 * 448
_UNMEASURED = 1.0  # the scale that is written for activations that nobody measured; loaders need one


def _input_scales(
    options: ConvertOptions, groups: Collection[Group], in_model: Collection[str]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Finds the activation scale of every quantized module, and warns of those taken from sibling experts.

    A group has the largest of its members.
    """
    if options.weight_only or LAYOUTS[options.layout].suffixes.activation is None:
        return {}, ()
    modules = [m for g in groups for m in g.members]
    if options.input_amax is None:
        return dict.fromkeys(modules, _UNMEASURED), ()
    if not isinstance(options.input_amax, Path):
        return dict.fromkeys(modules, float(options.input_amax) / _UNIT_SCALE_AMAX), ()
    amaxes = _read_amaxes(options.input_amax, modules, in_model)
    of_siblings: dict[str | None, float] = {}
    for module, amax in amaxes.items() if options.on_missing_amax == "siblings" else ():
        if siblings := sibling_experts(module):
            of_siblings[siblings] = max(amax, of_siblings.get(siblings, 0.0))
    scales: dict[str, float] = {}
    uncalibrated: list[str] = []
    for group in groups:
        named = [amaxes[m] for m in group.members if m in amaxes]
        if not named and of_siblings:
            named = [of_siblings[s] for s in map(sibling_experts, group.members) if s in of_siblings]
            uncalibrated += group.members
        if not named:
            observed = f"has no amax for {group.members[0]!r}"
            has_siblings = options.on_missing_amax == "error" and sibling_experts(group.members[0])
            hint = (
                "--on-missing-amax siblings takes that of its sibling experts" if has_siblings else "--ignore keeps it"
            )
            expected = "one for each module that is quantized, or for another one of its group"
            raise CheckpointError(observed, expected, file=options.input_amax, hint=hint)
        scales |= dict.fromkeys(group.members, max(named) / _UNIT_SCALE_AMAX)
    if not uncalibrated:
        return scales, ()
    text = f"{len(uncalibrated)} modules have no amax, and take the largest of their sibling experts"
    return scales, (f"{options.input_amax}: {text}: {', '.join(uncalibrated)}",)


def _read_amaxes(path: Path, modules: Collection[str], in_model: Collection[str]) -> dict[str, float]:
    """Reads a file of amaxes by module. It may have amaxes of modules that are left unquantized.

    Raises:
      CheckpointError: it names a module that the model has not, or has no amax for one that it names.
    """
    amaxes = read_json(path)
    if unknown := sorted(amaxes.keys() - in_model):
        raise CheckpointError(f"names {unknown[0]!r}", "modules of the model", file=path)
    known = {m: amaxes[m] for m in modules if m in amaxes}
    if (wrong := next((m for m, amax in known.items() if not is_amax(amax)), None)) is not None:
        observed = f"has the amax {known[wrong]!r:.100} for {wrong!r}"
        raise CheckpointError(observed, "a number above 1e-30 and below 1e30", file=path)
    return {m: float(amax) for m, amax in known.items()}


# ---------------------------------------------------------------- files
def _shards(source: Source, items: Mapping[str, Item], max_bytes: int | None) -> dict[str, tuple[Item, ...]]:
    """Puts the items into output files: one per file of the source, or files of at most ``max_bytes``."""
    by_file: dict[str, list[Item]] = {name: [] for name in sorted(source.files)}
    for name, item in items.items():
        by_file[source.places[name]].append(item)
    if max_bytes is None:
        shards = {name: tuple(part) for name, part in by_file.items() if part}
        if len(by_file) == 1:  # keeps its name
            return shards
    else:
        parts = _cut([item for part in by_file.values() for item in part], max_bytes)
        shards = {f"{source.stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors": tuple(p) for i, p in enumerate(parts)}
    return shards if len(shards) > 1 else {f"{source.stem}.safetensors": next(iter(shards.values()))}


def _cut(items: list[Item], max_bytes: int) -> list[list[Item]]:
    """Cuts the items into parts of at most ``max_bytes``; an item that is larger is a part of its own."""
    parts: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if parts[-1] and size + item.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.nbytes
    return parts
