"""Decides which weights are quantized, and why the others are left in high precision."""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from ..._core.patterns import layer_of, matches, names_exactly
from ...spec import BLOCK
from .._files.errors import CheckpointError, Exit, OptionError
from .._files.safetensors import FLOATS, Planned
from .._files.source import Source
from .._layouts.layouts import LAYOUTS, layouts_with
from .._layouts.loaders import is_expert_stack, is_other_stack
from .._layouts.names import (
    INSEPARABLE,
    WEIGHT,
    Group,
    groups_of,
    is_embedding,
    is_expert,
    is_head,
    is_in_16_bits,
    is_mtp,
    is_other,
    is_router,
    module_of,
    mtp_layers,
    split_role,
    without_numbers,
)
from .options import ConvertOptions
from .views import is_kn

_CONV1D = ("c_attn", "q_attn", "c_fc", "c_proj")


@dataclass(frozen=True)
class Choice:
    """Quantizes a tensor, or leaves it unquantized for a ``reason``."""

    entry: Planned
    reason: str

    @property
    def quantizes(self) -> bool:
        """Whether the tensor is quantized."""
        return not self.reason

    @property
    def stacked(self) -> bool:
        """Whether a quantized tensor is a stack of experts."""
        return len(self.entry.shape) == 3

    @property
    def matrix(self) -> tuple[int, int]:
        """N and K of the weight, or of one expert of a stack."""
        n, k = self.entry.shape[-2:]
        return (k, n) if self.entry.kn else (n, k)

    @property
    def k(self) -> int | None:
        """K of a tensor that has one."""
        return self.matrix[1] if len(self.entry.shape) > 1 else None


def tensor_of(names: Container[str], module: str) -> str:
    """Names the weight of a module, which is the module itself for a stack of experts."""
    return name if (name := module + WEIGHT) in names else module


def _choice(entry: Planned, source: Source, options: ConvertOptions, mtp: tuple[str, ...]) -> Choice:
    """Decides about one tensor, without regard to its group; ``mtp`` are the layers of ``mtp_layers``."""
    if not entry.name.endswith(WEIGHT) and not is_expert_stack(entry):
        return Choice(entry, "no weight")
    module = module_of(entry.name)
    choice = Choice(entry, _rule(entry.name, source.layers, options) or _kind(entry, module, options, mtp))
    if choice.quantizes and choice.stacked:
        if not LAYOUTS[options.layout].stacks or options.row_scaled:
            observed = f"is a stack of experts, recipe {options.recipe}, layout {options.layout}"
            expected = f"layout {layouts_with(lambda x: x.stacks)}, one amax per expert"
            hint = f"--experts per-expert, or --ignore {module}"
            raise CheckpointError(observed, expected, tensor=entry.name, code=Exit.USAGE, hint=hint)
        choice = Choice(replace(entry, kn=is_kn(entry, source, options.expert_layout)), "")
    if not choice.quantizes or choice.matrix[1] % BLOCK == 0:
        return choice
    if options.on_bad_shape == "keep":
        return replace(choice, reason=f"K = {choice.matrix[1]} is no multiple of {BLOCK}")
    hint = f"--ignore {module}, or --on-bad-shape keep"
    raise CheckpointError(f"K is {choice.matrix[1]}", f"a multiple of {BLOCK}", tensor=entry.name, hint=hint)


def _rule(name: str, layers: int | None, o: ConvertOptions) -> str:
    """Names the option that keeps a weight; empty if none does."""
    module, layer = module_of(name), layer_of(name)
    reasons = [f"ignore {p}" for p in o.ignore if matches(p, module)]
    if layer is not None and layer < o.start_layers:
        reasons.append("layer at the start")
    if layer is not None and layers is not None and layers - o.end_layers <= layer < layers:
        reasons.append("layer at the end")
    if o.targets and not any(matches(p, module) for p in o.targets):
        reasons.append("not among the targets")
    return next(iter(reasons), "")


def _kind(entry: Planned, module: str, options: ConvertOptions, mtp: tuple[str, ...]) -> str:
    """Gives the property of a tensor that keeps it; raises if the user asked for it by name, unless that decides."""
    wanted = any(names_exactly(p, module) for p in options.targets)
    only_experts = options.preset == "moe-experts"
    for applies, verb, observed, expected in (
        (len(entry.shape) != 2 and not is_expert_stack(entry), "has", f"rank {len(entry.shape)}", "rank 2"),
        (is_router(module), "is", "a router", "a projection: routers are never quantized"),
        (is_head(module), "is", "a head", "a projection: loaders keep heads"),
        (is_embedding(module) and not wanted, "", "embedding", ""),
        (is_other(module) and not wanted, "", "no projection of the language model", ""),
        (is_mtp(module, mtp) and not wanted, "", "multi-token prediction", ""),
        (is_in_16_bits(module) and not wanted, "", "in 16 bits in loaders", ""),
        (only_experts and not is_expert(entry.name) and not wanted, "", "no expert", ""),
        (0 in entry.shape, "has", f"shape {list(entry.shape)}", "no empty axis"),
        (entry.tag not in FLOATS, "has", _dtype(entry), "a float dtype"),  # last: alone it has a warning
    ):
        if applies and wanted:
            raise CheckpointError(f"{verb} {observed}", expected, tensor=entry.name, hint="--targets names it")
        if applies:
            return observed
    return ""


def _dtype(entry: Planned) -> str:
    return f"dtype {entry.tag}"


def _of_other_dtypes(choices: Iterable[Choice]) -> list[str]:
    """Warns of the weights that only their dtype keeps, since their values may be codes of another quantizer."""
    names: dict[str, list[str]] = {}
    for choice in choices:
        if choice.reason == _dtype(choice.entry):
            names.setdefault(choice.reason, []).append(choice.entry.name)
    kept = f"are kept, as only {', '.join(FLOATS)} are quantized"
    return [f"weights of {dtype} {kept}: {', '.join(of)}" for dtype, of in names.items()]


def _of_other_stacks(choices: Iterable[Choice]) -> list[str]:
    names = sorted(c.entry.name for c in choices if is_other_stack(c.entry))
    return [f"stacks of experts that no reader has in NVFP4 are kept: {', '.join(names)}"] if names else []


def _check_conv1d(choices: Iterable[Choice]) -> None:
    """Raises if weights of transformers' Conv1D, as in GPT-2, would be quantized; their N above K tells the axes."""
    found = [d for d in choices if split_role(module_of(d.entry.name))[1] in _CONV1D and len(d.entry.shape) == 2]
    turned = any(d.entry.shape[0] < d.entry.shape[1] and not d.entry.name.endswith("c_proj.weight") for d in found)
    if turned and (wrong := next((d.entry for d in found if d.quantizes), None)):
        observed = f"is [K, N] = {list(wrong.shape)}, as Conv1D of transformers has it"
        hint = f"transpose the weights of {', '.join(_CONV1D)} in the model, or --ignore keeps them"
        raise CheckpointError(observed, "[N, K]", tensor=wrong.name, hint=hint)


def _check_layers(layers: int | None, o: ConvertOptions) -> None:
    """Raises if the layers at either end cannot be counted, or are all layers."""
    if not o.start_layers and not o.end_layers:
        return
    if layers is None:
        raise CheckpointError("config.json has no num_hidden_layers", "it, to count layers from either end")
    if o.start_layers + o.end_layers >= layers:
        observed = f"{o.start_layers} layers at the start and {o.end_layers} at the end are kept, of {layers}"
        raise CheckpointError(observed, "fewer", code=Exit.USAGE)


def _check_matches(modules: list[str], options: ConvertOptions) -> None:
    """Raises if an option matches no weight, or an expression of ``share`` puts no modules into one group."""
    alone = len(groups_of(modules))
    for option, wrong, applies in (
        ("ignore", "matches no tensor", lambda p: any(matches(p, m) for m in modules)),
        ("targets", "matches no tensor", lambda p: any(matches(p, m) for m in modules)),
        ("share", "puts no two modules together", lambda p: len(groups_of(modules, [p])) < alone),
    ):
        for pattern in getattr(options, option):
            if not applies(pattern):
                raise OptionError({option: f"has {pattern!r}, which {wrong}"})


def choose(source: Source, options: ConvertOptions) -> tuple[dict[str, Choice], tuple[Group, ...], tuple[str, ...]]:
    """Decides about every tensor. A group is quantized as a whole or not at all.

    Returns:
      the choice for each tensor by name, the groups that are quantized, and warnings about dtypes and groups.

    Raises:
      CheckpointError: a rule matches nothing, a weight cannot be quantized, gate or up is missing, members of a group
        differ in K, or nothing is left to quantize.
    """
    _check_layers(source.layers, options)
    mtp = mtp_layers(map(module_of, source.places), source.mtp_from)
    choices = {e.name: _choice(e, source, options, mtp) for e in source.entries()}
    _check_conv1d(choices.values())
    names = [n for n, d in choices.items() if n.endswith(WEIGHT) or is_expert_stack(d.entry)]
    modules = [*map(module_of, names)]
    _check_matches(modules, options)
    for name, choice in choices.items():
        if is_expert_stack(choice.entry) and name + WEIGHT in choices:  # both are the weight of one module
            raise CheckpointError(f"is the weight of a module, as {name!r} is", "one of them", tensor=name + WEIGHT)
    groups = groups_of(modules, options.share, lambda m: choices[tensor_of(choices, m)].k)
    warnings = _of_other_dtypes(choices.values()) + _of_other_stacks(choices.values())
    alike = {*map(without_numbers, modules)}
    for group in groups:
        members = [choices[tensor_of(choices, m)] for m in group.members]
        changed, odd = _as_a_whole(group, members, alike, options.strict)
        choices |= {d.entry.name: d for d in changed}
        warnings += odd
    quantized = tuple(g for g in groups if choices[tensor_of(choices, g.members[0])].quantizes)
    if not quantized:
        reasons = Counter(choices[name].reason for name in names).most_common()
        hint = ", ".join(f"{count} kept: {reason}" for reason, count in reasons)
        raise CheckpointError("no tensor is quantized", hint=hint, code=Exit.USAGE)
    return choices, quantized, tuple(warnings)


def _as_a_whole(
    group: Group, members: list[Choice], alike: Container[str], strict: bool
) -> tuple[list[Choice], list[str]]:
    """Makes one choice for a group: gives the choices that change, and warnings."""
    quantized = [d for d in members if d.quantizes]
    if not quantized:
        return [], []
    if len(quantized) < len(members):
        kept = next(d for d in members if not d.quantizes)
        text = f"is kept ({kept.reason}), but {quantized[0].entry.name!r} shares its global scale"
        if strict:
            raise CheckpointError(text, "a group as a whole", tensor=kept.entry.name, code=Exit.USAGE)
        changed = [replace(d, reason=f"{kept.reason}, of its group") for d in quantized]
        return changed, [f"{kept.entry.name} {text}: the group is kept"]
    warnings = _missing_roles(group, alike)
    first = members[0]
    other = next((d for d in members if (d.matrix[1], d.stacked) != (first.matrix[1], first.stacked)), None)
    if other is not None:
        observed = f"K is {first.matrix[1]}, but {other.entry.name!r} has K = {other.matrix[1]}"
        raise CheckpointError(observed, "one K in a group", tensor=first.entry.name)
    return [], warnings


def _missing_roles(group: Group, alike: Container[str]) -> list[str]:
    """Warns of a missing q, k or v, and raises if gate or up is missing.

    There are MLPs without a gate, and attention with a gate alone, but then no layer or expert has both: ``alike`` are
    the names of all modules without numbers.
    """
    parent, _, first = group.members[0].rpartition(".")
    for role in group.missing:
        fused = next((f for f in INSEPARABLE if role in f), ())
        is_up = first == "w1" and "experts" not in parent  # of experts it is the gate
        alone = role in fused[:1] or is_up or "att" in parent
        if fused and (not alone or without_numbers(f"{parent}.{role}") in alike):
            raise CheckpointError(f"module {parent!r} has {first} but no {role}", "both", hint="--ignore keeps it")
    return [f"{parent}: no {role}" for role in group.missing if len(group.members) > 1]
