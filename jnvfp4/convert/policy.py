"""Which weights are quantized, and why the others are kept."""

import fnmatch
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.layouts import LAYOUTS
from jnvfp4.convert.names import (
    INSEPARABLE,
    MEGATRON,
    WEIGHT,
    Group,
    groups_of,
    is_embedding,
    is_expert,
    is_head,
    is_other,
    is_router,
    is_stack,
    layer_of,
    module_of,
)
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.safetensors import Entry
from jnvfp4.convert.source import CONFIG, Source
from jnvfp4.convert.views import ViewedSource, fp8_decoded, per_expert, stacked
from jnvfp4.spec import BLOCK

FLOATS = ("BF16", "F16", "F32")


@dataclass
class Decision:
    """What happens to one tensor: it is quantized, or kept for a reason."""

    entry: Entry
    reason: str  # empty: quantized
    kn: bool = False  # a stack of experts [E, K, N]

    @property
    def quantizes(self) -> bool:
        return not self.reason

    @property
    def stacked(self) -> bool:
        return len(self.entry.shape) == 3

    @property
    def matrix(self) -> tuple[int, int]:
        """N and K, of one expert of a stack."""
        n, k = self.entry.shape[-2:]
        return (k, n) if self.kn else (n, k)


def tensor_of(names: Container[str], module: str) -> str:
    """The name of a module's weight."""
    return name if (name := module + WEIGHT) in names else module


# Model types whose experts lie in one tensor [E, K, N]; those of others are [E, N, K].
KN_MODELS = ("llama4", "llama4_text", "gpt_oss")


def is_kn(entry: Entry, source: Source, options: ConvertOptions) -> bool:
    """Whether the last axis of a stack is N."""
    if isinstance(source, ViewedSource) and source.is_view(entry.name):
        return False
    if options.expert_layout != "auto":
        return options.expert_layout == "kn"
    model = next((m for c in source.configs if (m := c.get("model_type"))), None)
    if model is None:
        fits = [entry.shape[axis] % BLOCK == 0 for axis in (2, 1)]
        if all(fits):
            raise CheckpointError(
                f"may be [E, N, K] or [E, K, N], and {CONFIG} does not say",
                "a model_type", tensor=entry.name, hint="--expert-layout nk or kn",
            )  # fmt: skip
        return not fits[0]
    return model in KN_MODELS


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of `--targets` or `--ignore` means a module."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return module == pattern or module.startswith(pattern if pattern.endswith(".") else pattern + ".")


def names(pattern: str, module: str) -> bool:
    """Whether a pattern means this module itself, not only what is around it."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], module) is not None
    return matches(pattern, module) and pattern.rpartition(".")[2] == module.rpartition(".")[2]


class Policy:
    """The rules of a conversion, and which of them were of use."""

    def __init__(self, options: ConvertOptions, layers: int | None):
        self.options, self.layers = options, layers
        self._used: set[str] = set()
        n, m = options.start_layers, options.end_layers
        if (n or m) and layers is None:
            raise CheckpointError(
                "num_hidden_layers is not in config.json", "it, to count layers from either end", code=Exit.BAD_INPUT
            )
        if layers is not None and n + m >= layers and (n or m) and not options.allow_empty:
            raise CheckpointError(
                f"{n} layers at the start and {m} at the end are kept, of {layers}", "fewer", code=Exit.USAGE,
                hint="--allow-empty converts all the same",
            )  # fmt: skip

    def decision(self, entry: Entry, source: Source) -> Decision:
        d = Decision(entry, self.reason_to_keep(entry))
        if d.quantizes and d.stacked:
            if not LAYOUTS[self.options.format].stacks or self.options.recipe == "row-scaled":
                raise CheckpointError(
                    f"is a stack of experts, recipe {self.options.recipe}, format {self.options.format}",
                    "format modelopt or te, one amax for an expert", tensor=entry.name, code=Exit.USAGE,
                    hint=f"--experts per-expert, or --ignore {module_of(entry.name)}",
                )  # fmt: skip
            d.kn = is_kn(entry, source, self.options)
        if d.quantizes:
            d.reason = self._shape(d)
        return d

    def reason_to_keep(self, entry: Entry) -> str:
        """Empty if the tensor is to be quantized, as far as name and dtype say."""
        if not entry.name.endswith(WEIGHT) and not _is_stacked(entry):
            return "no weight"
        module = module_of(entry.name)
        return self._rule(entry.name, module) or self._kind(entry, module)

    def _use(self, rule: str) -> str:
        self._used.add(rule)
        return rule

    def _rule(self, name: str, module: str) -> str:
        o, layer = self.options, layer_of(name)
        found = [self._use(f"ignore {p}") for p in o.ignore if matches(p, module)]
        found += [self._use(f"contains {s}") for s in (*o.keep_containing, *o.keep_containing_megatron) if s in name]
        if layer is not None and layer < o.start_layers:
            found.append(self._use("layer at the start"))
        if layer is not None and self.layers is not None and self.layers - o.end_layers <= layer < self.layers:
            found.append(self._use("layer at the end"))
        targeted = [self._use(f"targets {p}") for p in o.targets if matches(p, module)]
        if found:
            return found[0]
        return "not among the targets" if o.targets and not targeted else ""

    def _kind(self, entry: Entry, module: str) -> str:
        wanted = any(names(p, module) for p in self.options.targets)
        if len(entry.shape) != 2 and not _is_stacked(entry):
            return self._unfit(entry, wanted, f"rank {len(entry.shape)}", "rank 2")
        if entry.tag not in (*FLOATS, *(("F64",) if self.options.cast_f64 else ())):
            return self._unfit(entry, wanted, f"dtype {entry.tag}", "a float dtype")
        if is_router(module):
            return self._unfit(entry, wanted, "a router", "a projection: routers are never quantized")
        if is_head(module):
            return self._unfit(entry, wanted, "a head", "a projection: loaders keep heads")
        if not wanted:
            if is_embedding(module):
                return "embedding"
            if is_other(module):
                return "no projection of the language model"
            if self.options.preset == "moe-experts" and not is_expert(entry.name):
                return "no expert"
        if 0 in entry.shape:
            return self._unfit(entry, wanted, f"shape {list(entry.shape)}", "no empty axis")
        return ""

    def _shape(self, d: Decision) -> str:
        _, k = d.matrix
        if k % BLOCK == 0:
            return ""
        if self.options.on_bad_shape == "keep":
            return f"K = {k} is no multiple of {BLOCK}"
        raise CheckpointError(
            f"K is {k}", f"a multiple of {BLOCK}", tensor=d.entry.name,
            hint=f"--ignore {module_of(d.entry.name)}, or --on-bad-shape keep",
        )  # fmt: skip

    @staticmethod
    def _unfit(entry: Entry, wanted: bool, observed: str, expected: str) -> str:
        if wanted:
            verb = "is" if observed.startswith("a ") else "has"
            raise CheckpointError(f"{verb} {observed}", expected, tensor=entry.name, hint="it is named by --targets")
        return observed

    def check_use(self) -> None:
        """A rule that meant nothing is an error."""
        o = self.options
        rules = [f"ignore {p}" for p in o.ignore] + [f"contains {s}" for s in o.keep_containing]
        rules += [f"contains {s}" for s in o.keep_containing_megatron]
        rules += [f"targets {p}" for p in o.targets]
        unused = [r for r in rules if r not in self._used]
        if unused and not o.allow_unmatched:
            raise CheckpointError(
                f"the rule {unused[0]!r} matches no tensor", code=Exit.USAGE, hint="--allow-unmatched accepts it"
            )


def prepared(source: Source, options: ConvertOptions) -> Source:
    """The source as it is converted: FP8 decoded, experts one by one or in one tensor, where options say so."""
    if options.dequantize_input == "fp8-block":
        source = fp8_decoded(source)
    if options.experts == "per-expert":
        given = source
        return per_expert(given, lambda entry: is_kn(entry, given, options))
    return stacked(source) if options.experts == "stacked" else source


def decide(source: Source, options: ConvertOptions) -> tuple[dict[str, Decision], list[Group]]:
    """What happens to every tensor, and the groups of those that are quantized.

    A group is quantized or kept as a whole; gate and up both exist, and all members have one K.
    """
    if options.keep_containing_megatron and not any(MEGATRON.match(name) for name in source.places):
        raise CheckpointError(
            f"no name is Megatron's, but {options.keep_containing_megatron[0]!r} is to be found in one",
            "decoder.layers.N. or mtp.layers.N. at the beginning of names", code=Exit.USAGE,
            hint="--extra-high-precision-layers-hf looks into Hugging Face names",
        )  # fmt: skip
    policy = Policy(options, source.layers)
    decisions = {e.name: policy.decision(e, source) for e in source.entries()}
    policy.check_use()
    modules = [module_of(n) for n, d in decisions.items() if n.endswith(WEIGHT) or _is_stacked(d.entry)]
    groups = groups_of(modules, options.share, options.share_qkv)
    _check_share(modules, options)
    for group in groups:
        _whole(group, decisions, source, options)
    quantized = [g for g in groups if decisions[tensor_of(decisions, g.members[0])].quantizes]
    if not quantized and not options.allow_empty:
        raise CheckpointError("no tensor is quantized", hint="--allow-empty converts all the same", code=Exit.USAGE)
    return decisions, quantized


def _check_share(modules: list[str], options: ConvertOptions) -> None:
    """A rule that shares nothing is an error."""
    without = len(groups_of(modules, (), options.share_qkv))
    for pattern in () if options.allow_unmatched else options.share:
        if len(groups_of(modules, [pattern], options.share_qkv)) == without:
            raise CheckpointError(
                f"share {pattern!r} puts no two modules together", code=Exit.USAGE, hint="--allow-unmatched accepts it"
            )


def _whole(group: Group, decisions: dict[str, Decision], source: Source, options: ConvertOptions) -> None:
    members = [decisions[tensor_of(decisions, m)] for m in group.members]
    quantized = [d for d in members if d.quantizes]
    if not quantized:
        return
    if len(quantized) < len(members):
        kept = next(d for d in members if not d.quantizes)
        text = f"is kept ({kept.reason}), but {quantized[0].entry.name!r} shares its global"
        if options.strict:
            raise CheckpointError(text, "a group as a whole", tensor=kept.entry.name, code=Exit.USAGE)
        source.warnings.append(f"{kept.entry.name} {text}: the group is kept")
        for d in quantized:
            d.reason = f"{kept.reason}, of its group"
        return
    for role in group.missing:
        if any(role in fused for fused in INSEPARABLE):
            raise CheckpointError(
                f"module {group.parent!r} has {group.roles[0]} but no {role}", "both", hint="--ignore keeps it"
            )
        if len(group.roles) > 1:
            source.warnings.append(f"{group.parent}: no {role}")
    first = members[0]
    other = next((d for d in members if (d.matrix[1], d.stacked) != (first.matrix[1], first.stacked)), None)
    if other is not None:
        raise CheckpointError(
            f"K is {first.matrix[1]}, and that of {other.entry.name!r} {other.matrix[1]}",
            "one K in a group",
            tensor=first.entry.name,
        )


def kept_modules(decisions: dict[str, Decision]) -> list[str]:
    """Linear modules that are kept: those a loader asks the ignore list for."""
    return linear_modules(d.entry for d in decisions.values() if d.reason)


def linear_modules(entries: Iterable[Entry]) -> list[str]:
    """Modules of those tensors that a linear layer may have."""
    weights = (e.name for e in entries if (e.name.endswith(WEIGHT) and len(e.shape) == 2) or _is_stacked(e))
    return [m for m in map(module_of, weights) if not is_embedding(m)]


def _is_stacked(entry: Entry) -> bool:
    """Whether a tensor holds one projection of all experts."""
    return len(entry.shape) == 3 and is_stack(entry.name)
