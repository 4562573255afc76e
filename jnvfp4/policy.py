"""``Policy``, which says by the paths of layers how each is quantized, and ``explain``, which shows it for a model."""

import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import singledispatch
from types import MappingProxyType
from typing import NamedTuple, TypedDict

import jax

from ._core.mesh import Placement
from ._core.patterns import check_path_pattern, layer_path, matches_path, part_in
from ._core.tensor import PyTree
from ._layers.gather import as_pair
from ._ops.arguments import describe
from .recipes import Recipe, to_recipe

__all__ = ["KEEP", "Decision", "Explanation", "Layer", "Policy", "Rule"]

KEEP = (
    "embed",
    "embedding",
    "embedder",
    "token_embedder",
    "wte",
    "wpe",
    "router",
    "lm_head",
    "logits_dense",
    "head",
)
"""Parts of paths whose layers a ``Policy`` keeps in high precision unless it is told otherwise."""


@dataclass(frozen=True)
class Rule:
    """Gives a recipe to the layers that a pattern selects.

    Attributes:
      path: a regular expression for the whole path of a layer, such as "block_[0-9]+/mlp/(up|down)"; or a function that
        takes the path and says whether the rule applies.
      recipe: how these layers are quantized; None keeps them in high precision.
      w_gather: as in ``jnvfp4.linear``, by the axes of the weights as these layers hold them (without those that count
        layers); None takes that of the policy.
      pad: whether zeros make K and N multiples of 16 even where the recipe takes any number, as a forward pass does of
        N: the rows of a vocabulary head. What a recipe needs is always added. No result depends on it.

    Raises:
      ValueError, TypeError: path is no pattern, or recipe is neither a Recipe nor None, or w_gather is no pair, or pad
        is no bool.
    """

    path: str | Callable[[str], bool]
    recipe: Recipe | None
    w_gather: tuple[Placement, Placement] | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        _check_recipe("Rule", "recipe", self.recipe)
        as_pair("Rule", self.w_gather)
        if not isinstance(self.pad, bool):
            raise TypeError(f"Rule: pad must be True or False, got {self.pad!r}")
        check_path_pattern("Rule", "path", self.path)

    @property
    def name(self) -> str:
        """Returns what ``explain`` calls the rule."""
        return repr(self.path) if isinstance(self.path, str) else getattr(self.path, "__name__", repr(self.path))


class ProductOptions(TypedDict):
    """What a policy says of a product besides its recipe, as keyword arguments of ``DotGeneral`` and ``RaggedDot``."""

    w_gather: tuple[Placement, Placement] | None
    pad: bool


class Layer(NamedTuple):
    """Describes a layer of a model that multiplies activations by weights.

    Attributes:
      path: its path in the model.
      shape: of its weights, as the model holds them.
      sizes: N and K of the product, or None where they are not known.
      stacked: whether its weights are those of several layers, of which a loop takes one at a time.
      reason: why it cannot be quantized, or None.
    """

    path: str
    shape: tuple[int, ...]
    sizes: tuple[int, int] | None = None
    stacked: bool = False
    reason: str | None = None


class Decision(NamedTuple):
    """Says how a layer is quantized, and why. ``recipe`` is None for high precision."""

    path: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    why: str


class Explanation(tuple[Decision, ...]):
    """Holds the decisions for every layer of a model; ``print`` shows them as a table."""

    @property
    def quantized(self) -> float:
        """The share of the layers' weights that is quantized, from 0 to 1."""
        return sum(math.prod(d.shape) for d in self if d.recipe is not None) / max(self._weights, 1)

    @property
    def _weights(self) -> int:
        return sum(math.prod(d.shape) for d in self)

    def __str__(self) -> str:
        cells = [("path", "shape", "recipe", "why")]
        cells += [
            (d.path, "x".join(map(str, d.shape)), "-" if d.recipe is None else d.recipe.name, d.why) for d in self
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        lines.append(f"quantized: {100 * self.quantized:.1f} % of {self._weights:,} weights")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Policy:
    """Says how each layer of a model is quantized, by its path. It is static, hashable data.

    The first rule whose pattern matches the path decides, then ``default``. But layers of ``keep``, ``first_bf16`` and
    ``last_bf16`` stay in high precision whatever the rules say. Only products of activations and weights are layers:
    the scores of attention and its sums of values are never quantized.

    Attributes:
      rules: in the order in which they are tried.
      default: the recipe of layers that no rule matches; None keeps them in high precision.
      first_bf16: how many layers at the beginning of the model stay in high precision, by the number in their paths
        (``block_0/...``, ``layers/0/...``). Layers with different names are counted each by itself.
      last_bf16: the same at the end.
      keep: names; a layer stays in high precision if one of them is a whole part of its path, as "lm_head" is of
        "decoder/lm_head".
      w_gather: as in ``Rule``, for the layers whose rule has none.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
    """

    rules: Sequence[Rule] = ()
    _: KW_ONLY
    default: Recipe | None = None
    first_bf16: int = 0
    last_bf16: int = 0
    keep: Sequence[str] = KEEP
    w_gather: tuple[Placement, Placement] | None = None

    def __post_init__(self) -> None:
        _check_recipe("Policy", "default", self.default)
        if isinstance(self.keep, str):
            raise TypeError(f"Policy: keep must be names in a tuple, got {self.keep!r}")
        if isinstance(self.rules, Rule | Recipe | str):
            raise TypeError(
                f"Policy: rules must be a list of Rule, got {self.rules!r}; Policy(default=recipe) is for every layer"
            )
        for field, fits, what in (
            ("rules", lambda rule: isinstance(rule, Rule), "a Rule"),
            ("keep", _is_part, "the name of a part of a path, without a slash"),
        ):
            values = tuple(getattr(self, field))
            object.__setattr__(self, field, values)
            for value in values:
                if not fits(value):
                    raise TypeError(f"Policy: each of {field} must be {what}, got {value!r}")
        _check_count("first_bf16", self.first_bf16)
        _check_count("last_bf16", self.last_bf16)
        as_pair("Policy", self.w_gather)

    def explain(self, model: PyTree, *inputs: PyTree, **keywords: object) -> Explanation:
        """Lists every layer of a model with its recipe and the reason.

        Args:
          model: a model of Flax NNX, Equinox or haliax; a Flax Linen module; or a tree of parameters, such as that of
            Linen's ``init``, whose layers are the arrays of two or more axes named kernel, weight or w. Other weights
            that multiply are listed with a reason: of a Linen module by their use, else by their shape and name.
          *inputs: what a Linen module is called with, without its parameters: arrays or ``jax.ShapeDtypeStruct``.
            Nothing is computed. Other models need none.
          **keywords: its keywords, such as ``train=False``.

        Returns:
          The decisions, in the order of the model; ``print`` shows them as a table and the share that is quantized.

        Raises:
          ValueError: as in ``plan``.
          TypeError: the model is none of these.
        """
        return Explanation(self.plan(_layers_of_model(model, *inputs, **keywords)).values())

    def plan(self, layers: Iterable[Layer]) -> Mapping[str, Decision]:
        """Decides for all layers of a model, which must have different paths.

        Returns:
          The decisions by path.

        Raises:
          ValueError: a rule has no effect, because it matches no layer, or only such as earlier rules match, as
            ``keep`` names, or as cannot be quantized; or ``first_bf16`` or ``last_bf16`` is given and the layers have
            no numbers, are all kept by it, or are scanned, so that one trace serves all of them.
        """
        layers = list(layers)
        self._check_rules(layers)
        depths = depths_of(layers)
        decisions = {layer.path: self.decide(layer, depths) for layer in layers}
        if self._ends:
            self._check_ends(layers, depths, decisions)
        return decisions

    def decide(self, layer: Layer, depths: Mapping[str, int]) -> Decision:
        """Decides for one layer; ``depths`` is the number of layers by what stands before their number."""
        recipe, why = self.default, "no rule matches" if self.default is None else "default"
        if (rule := self._rule_of(layer.path)) is not None:
            recipe, why = rule.recipe, f"rule {rule.name}"
        if layer.reason is not None:
            recipe, why = None, layer.reason
        elif (part := part_in(self.keep, layer.path)) is not None:
            recipe, why = None, f"keep {part!r}"
        elif recipe is not None and self._ends and layer.stacked:
            raise ValueError(
                f"Policy: layers must not be scanned for {self._ends}, since one trace serves all of them, got "
                f"{layer.path} with weights {layer.shape}; unroll the first and last layers of the model"
            )
        elif recipe is not None and (end := self._end(layer.path, depths)):
            recipe, why = None, end
        if recipe is not None and layer.sizes is not None:
            why += _padding(layer.sizes, recipe.units_of(self._pads(layer.path)))
        return Decision(layer.path, layer.shape, recipe, why)

    def warn(self, op: str, layer: Layer, depths: Mapping[str, int] = MappingProxyType({})) -> None:
        """Warns of a layer that would be quantized if it were not for its reason."""
        if self.decide(layer._replace(reason=None), depths).recipe is not None:
            warnings.warn(
                f"{op}: layer {layer.path!r} is {layer.reason}; a rule with recipe None ends this warning", stacklevel=3
            )

    def gather_of(self, path: str) -> tuple[Placement, Placement] | None:
        """Returns ``w_gather`` for a layer that is quantized: that of the rule that decides, or else of the policy."""
        rule = self._rule_of(path)
        return self.w_gather if rule is None or rule.w_gather is None else rule.w_gather

    def options_of(self, path: str) -> ProductOptions:
        """Returns ``w_gather`` and ``pad`` for the product of a layer that is quantized."""
        return {"w_gather": self.gather_of(path), "pad": self._pads(path)}

    def _pads(self, path: str) -> bool:
        rule = self._rule_of(path)
        return rule is not None and rule.pad

    def _rule_of(self, path: str) -> Rule | None:
        return next((rule for rule in self.rules if matches_path(rule.path, path)), None)

    def _end(self, path: str, depths: Mapping[str, int]) -> str | None:
        """Returns why a layer at the beginning or the end stays in high precision."""
        of_layer = layer_path(path)
        if of_layer.number is None or of_layer.prefix not in depths:
            return None
        if of_layer.number < self.first_bf16:
            return f"first_bf16={self.first_bf16}"
        last = of_layer.number >= depths[of_layer.prefix] - self.last_bf16
        return f"last_bf16={self.last_bf16} of {depths[of_layer.prefix]} layers" if last else None

    def _check_rules(self, layers: list[Layer]) -> None:
        for rule in self.rules:
            matched = [layer.path for layer in layers if matches_path(rule.path, layer.path)]
            if not matched:
                raise ValueError(
                    f"Policy: every rule must match a layer, got {rule.name}, which matches none of "
                    f"{_listed(layers) or 'no layers'}{_hint(rule, layers)}"
                )
            decided = [layer for layer in layers if self._rule_of(layer.path) is rule]
            if not decided:
                first = self._rule_of(matched[0])
                assert first is not None
                raise ValueError(
                    f"Policy: every rule must decide for a layer, got {rule.name}, whose layers match an earlier rule, "
                    f"as {matched[0]} matches {first.name}; the first that matches decides"
                )
            if rule.recipe is not None:
                self._check_effect(rule, decided)

    def _check_effect(self, rule: Rule, decided: list[Layer]) -> None:
        """Refuses a rule with a recipe that none of its layers can have."""
        if all(part_in(self.keep, layer.path) for layer in decided):
            raise ValueError(
                f"Policy: every rule must match a layer that keep does not name, got {rule.name}, which matches "
                f"{_listed(decided)}; leave {part_in(self.keep, decided[0].path)!r} out of keep"
            )
        reasons = [f"{layer.path} ({layer.reason})" for layer in decided if layer.reason is not None]
        if len(reasons) == len(decided):
            raise ValueError(
                f"Policy: every rule with a recipe must match a layer that can be quantized, got {rule.name}, which "
                f"matches {', '.join(reasons[:3])}"
            )

    def _check_ends(self, layers: list[Layer], depths: Mapping[str, int], decisions: Mapping[str, Decision]) -> None:
        """Refuses ``first_bf16`` and ``last_bf16`` that mean nothing, or all layers."""
        if not depths:
            raise ValueError(
                f"Policy: layers must have numbers in their paths for {self._ends} (scanned layers have none), got "
                f"{_listed(layers) or 'no layers'}"
            )
        ended = [path for path, decision in decisions.items() if decision.why.startswith(("first_bf16", "last_bf16"))]
        if ended and all(decision.recipe is None for decision in decisions.values()):
            raise ValueError(
                f"Policy: {self._ends} must leave a layer to quantize, got none of "
                f"{', '.join(f'{prefix} 0 to {depth - 1}' for prefix, depth in depths.items())}"
            )

    @property
    def _ends(self) -> str:
        return ", ".join(f"{name}={n}" for name in ("first_bf16", "last_bf16") if (n := getattr(self, name)))


def _listed(layers: list[Layer]) -> str:
    return ", ".join(layer.path for layer in layers[:8]) + (", ..." if len(layers) > 8 else "")


def _hint(rule: Rule, layers: list[Layer]) -> str:
    """Helps with a pattern that is only part of a path."""
    if isinstance(rule.path, str) and any(re.search(rule.path, layer.path) for layer in layers):
        return f"; a pattern is for the whole path, and {'.*' + rule.path + '.*'!r} for a part of it"
    return ""


def depths_of(layers: Iterable[Layer]) -> dict[str, int]:
    """Counts the layers by what stands before their number in a path."""
    depths: dict[str, int] = {}
    for layer in layers:
        prefix, number, _ = layer_path(layer.path)
        if number is not None:
            depths[prefix] = max(depths.get(prefix, 0), number + 1)
    return depths


def _padding(sizes: tuple[int, int], units: tuple[int, int]) -> str:
    """Says which zeros ``DotGeneral`` adds."""
    padded = [(axis, size, size + -size % unit) for axis, size, unit in zip("NK", sizes, units, strict=True)]
    added = [f"{axis} padded from {size} to {to}" for axis, size, to in padded if to != size]
    return f"; {', '.join(added)}" if added else ""


# ---------------------------------------------------------------- models
_MODULES = ("flax", "equinox", "haliax")  # of jnvfp4, by the name of the library whose models they know


def _layers_of_model(model: PyTree, *inputs: PyTree, **keywords: object) -> list[Layer]:
    """Lists the layers of a model, after an import of what knows the libraries that are in use."""
    for library in _MODULES:
        if library not in sys.modules:  # so that the model has none of its layers
            continue
        try:
            importlib.import_module(f"{__package__}.{library}")
        except (ImportError, AttributeError) as error:
            if library != "haliax":
                raise
            # It does not run with every JAX, and then a model of Equinox has none of its layers.
            warnings.warn(
                f"Policy.explain: layers of haliax are not listed, as it fails to import: {error}", stacklevel=3
            )
    return layers_of(model, *inputs, **keywords)


@singledispatch
def layers_of(tree: PyTree, *_: PyTree, **__: object) -> list[Layer]:
    """Lists the layers of a model; the module of jnvfp4 for its library registers how.

    Of a tree of parameters they are the arrays of two or more axes named kernel, weight or w.
    """
    found: dict[str, Layer] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        module, name = _split(keys)
        path, shape = path_of_parameter(module, name), tuple(getattr(leaf, "shape", ()))
        if not is_weight(name, shape):
            continue
        if path in found:
            raise ValueError(
                f"Policy.explain: a layer must have one array named kernel, weight or w, got two in {path!r}"
            )
        found[path] = Layer(path, shape, reason=None if name in WEIGHT_NAMES else "named neither kernel, weight nor w")
    if all(layer.reason for layer in found.values()):
        got = describe(tree) if isinstance(tree, jax.Array) else f"a {type(tree).__name__} without any"
        got = "a class; make an instance" if isinstance(tree, type) else got
        raise TypeError(
            "Policy.explain: model must be one of Flax, Equinox or haliax, or a tree of parameters with arrays of two "
            "or more axes named "
            f"kernel, weight or w, got {got}"
        )
    return list(found.values())


WEIGHT_NAMES = ("kernel", "weight", "w")
_OTHER_NAMES = ("bias", "scale", "norm", "emb", "pos")


def _split(keys: tuple) -> tuple[str, str]:
    """Returns the path of a module and the name of its parameter, which a box such as ``nnx.Param`` may hold."""
    path = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]
    if path[-1:] == ["value"]:
        path = path[:-1]
    if path[:1] == ["params"]:
        path = path[1:]
    return "/".join(path[:-1]), "".join(path[-1:])


def path_of_parameter(module: str, name: str) -> str:
    """Returns the path of the layer whose weights are a parameter of a module, which may have several."""
    return module if name in WEIGHT_NAMES else f"{module}/{name}".lstrip("/")


def is_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Says whether a parameter may multiply, by its name and shape; position embeddings often have an axis of 1."""
    if len(shape) < 2 or name in WEIGHT_NAMES:
        return len(shape) >= 2
    return 1 not in shape and not any(part.startswith(_OTHER_NAMES) for part in name.lower().split("_"))


# ---------------------------------------------------------------- checks
def check_policy(op: str, policy: object) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"{op}: policy must be a jnvfp4.Policy, got {policy!r}")


def _check_recipe(op: str, name: str, recipe: object) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"{op}: {name} must be a Recipe or None, got {describe(recipe)}{to_recipe(recipe)}")


def _is_part(value: object) -> bool:
    return isinstance(value, str) and value != "" and "/" not in value


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"Policy: {name} must be an integer of at least 0, got {value!r}")
