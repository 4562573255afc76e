r"""Between Hugging Face names and the tree of a JAX model: rules that are read in both directions.

For example, with the layers stacked:

    RULES = [
        Rule("model.embed_tokens.weight", "embedding"),
        Rule(r"model.layers.{layer:\d+}.self_attn.{p:[qkvo]}_proj.weight", "layers/attention/{p}", stack=("layer",)),
        Rule(r"model.layers.{layer:\d+}.input_layernorm.weight", "layers/norm", stack=("layer",)),
    ]
    tree = from_hf(open_checkpoint(path), RULES)
    save_checkpoint(to_hf(tree, RULES), out)
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.tensor import NVFP4Tensor

Tensor = NVFP4Tensor | jax.Array | np.ndarray
Fields = dict[str, str]
_FIELD = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


@dataclass(frozen=True)
class Rule:
    """Where the tensors of some names stand in a tree, and how they differ there.

    A template is text with fields: `{p}` is a part without dots or slashes, `{p:[qkv]}` what the expression after the
    colon matches. In the order from Hugging Face to the tree: transposed, split, stacked.

    Attributes:
      name: template of the Hugging Face name; each of its fields stands in `path` or in `stack`.
      path: template of the keys, with `/` between them.
      stack: fields whose values count from 0, such as layers: their tensors become one, with an axis for each field.
      axis: of the result, where the axes of `stack` begin.
      transpose: whether the last two axes change places: [out, in] here, [in, out] there. No quantized weight can.
      split: axis and number of parts, such as heads: [.., parts * n, ..] becomes [.., parts, n, ..]. No quantized
        weight can be.
    """

    name: str
    path: str
    stack: tuple[str, ...] = ()
    axis: int = 0
    transpose: bool = False
    split: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for template in (self.name, self.path):
            if "{" in _FIELD.sub("", template) or "}" in _FIELD.sub("", template):
                raise _wrong(self, f"has a brace that is no field in {template!r}", "{name} or {name:expression}")
        in_name, in_path = ([f for f, _ in _FIELD.findall(t)] for t in (self.name, self.path))
        if sorted(in_name) != sorted([*in_path, *self.stack]):
            raise _wrong(
                self,
                f"has the fields {in_name} in its name, {in_path} in its path and stacks {list(self.stack)}",
                "each field once in the name, and either in the path or stacked",
            )
        try:
            _ = self.patterns
        except re.error as e:
            raise _wrong(self, f"is no expression ({e})", "regular expressions in fields") from e

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Of name and path."""
        expressions = {f: e or "[^./]+" for f, e in _FIELD.findall(self.name)}
        return _pattern(self.name, expressions), _pattern(self.path, expressions)

    def fields_of_name(self, name: str) -> Fields | None:
        found = self.patterns[0].fullmatch(name)
        return found.groupdict() if found else None

    def fields_of_path(self, path: str) -> Fields | None:
        found = self.patterns[1].fullmatch(path)
        return found.groupdict() if found else None


def _pattern(template: str, expressions: Mapping[str, str]) -> re.Pattern[str]:
    parts = _FIELD.split(template)  # text, field, expression, text, ...
    text, fields = parts[::3], parts[1::3]
    groups = [f"(?P<{f}>{expressions.get(f, '')})" for f in fields]
    return re.compile("".join(re.escape(t) + g for t, g in itertools.zip_longest(text, groups, fillvalue="")))


def _filled(template: str, fields: Fields) -> str:
    return _FIELD.sub(lambda m: fields[m[1]], template)


def _wrong(rule: Rule, observed: str, expected: str, *, tensor: str | None = None, hint: str = "") -> CheckpointError:
    return CheckpointError(f"rule {rule.name!r} {observed}", expected, tensor=tensor, hint=hint, code=Exit.USAGE)


# ---------------------------------------------------------------- both directions
def from_hf(tensors: Mapping[str, Tensor], rules: Sequence[Rule]) -> dict[str, Any]:
    """The tree that the rules make of a checkpoint's tensors.

    Args:
      tensors: by their Hugging Face names, such as `open_checkpoint(path)` or what its `to_device` returns. Those of
        one place in the tree are read together, those of another after them.
      rules: for every name exactly one.

    Returns:
      nested dictionaries, with NVFP4Tensor and arrays as leaves.

    Raises:
      CheckpointError: a name without a rule or with two, a rule for no name, two names for one place, tensors that
        cannot be stacked, a quantized weight that would be transposed or split.
    """
    places: dict[str, dict[tuple[int, ...], str]] = {}
    rule_of: dict[str, Rule] = {}
    for name, (rule, fields) in _assigned(tensors, rules, Rule.fields_of_name, "name").items():
        path = _filled(rule.path, fields)
        others = places.setdefault(path, {})
        index = _index(rule, fields, name)
        if index in others or rule_of.setdefault(path, rule) is not rule:
            other = next(iter(others.values()))
            raise _wrong(rule, f"and the rule of {other!r} give one place, {path!r}", "one name for each", tensor=name)
        others[index] = name
    tree: dict[str, Any] = {}
    for path, names in places.items():
        _put(tree, path, _stacked(rule_of[path], path, {i: (n, tensors[n]) for i, n in names.items()}))
    return tree


def to_hf(tree: Mapping[str, Any], rules: Sequence[Rule]) -> dict[str, Tensor]:
    """The tensors of a tree by their Hugging Face names: the inverse of `from_hf`, for `save_checkpoint`.

    Args:
      tree: nested dictionaries.
      rules: for every leaf exactly one.

    Returns:
      the tensors by name.

    Raises:
      CheckpointError: a leaf without a rule or with two, a rule for no leaf, two leaves for one name, a quantized
        weight that would be transposed or merged.
    """
    leaves = _leaves(tree)
    out: dict[str, Tensor] = {}
    for path, (rule, fields) in _assigned(leaves, rules, Rule.fields_of_path, "path").items():
        for index, t in _unstacked(rule, path, leaves[path]):
            name = _filled(rule.name, fields | dict(zip(rule.stack, map(str, index), strict=True)))
            if name in out:
                raise _wrong(rule, f"and another rule give one name, {name!r}", "one leaf for each", tensor=path)
            if rule.fields_of_name(name) is None:
                raise _wrong(
                    rule, f"makes {name!r} of it, which it does not match", "the name it came from", tensor=path
                )
            out[name] = _backward(rule, name, t)
    return out


def _assigned(
    names: Iterable[str], rules: Sequence[Rule], match: Callable[[Rule, str], Fields | None], what: str
) -> dict[str, tuple[Rule, Fields]]:
    """The one rule of each name."""
    out: dict[str, tuple[Rule, Fields]] = {}
    for name in names:
        found = [(rule, fields) for rule in rules if (fields := match(rule, name)) is not None]
        if len(found) != 1:
            observed = f"matches {' and '.join(repr(r.name) for r, _ in found)}" if found else "matches no rule"
            raise CheckpointError(observed, f"one rule for each {what}", tensor=name, code=Exit.USAGE)
        out[name] = found[0]
    used = [rule for rule, _ in out.values()]
    for rule in rules:
        if rule not in used:
            raise _wrong(rule, f"matches no {what}", "rules that are for something")
    return out


# ---------------------------------------------------------------- trees
def _put(tree: dict[str, Any], path: str, leaf: Tensor) -> None:
    *parents, last = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"path {path!r} goes through a leaf", "leaves at the ends", code=Exit.USAGE)
    if last in tree:
        raise CheckpointError(f"path {path!r} is a leaf and a branch", "one of them", code=Exit.USAGE)
    tree[last] = leaf


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for key, value in tree.items():
        out |= _leaves(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


# ---------------------------------------------------------------- tensors
def _index(rule: Rule, fields: Fields, name: str) -> tuple[int, ...]:
    values = [fields[f] for f in rule.stack]
    if not all(v.isdecimal() and str(int(v)) == v for v in values):
        raise _wrong(rule, f"stacks {values}", "numbers", tensor=name)
    return tuple(map(int, values))


def _stacked(rule: Rule, path: str, parts: dict[tuple[int, ...], tuple[str, Tensor]]) -> Tensor:
    """One tensor of those at all indices."""
    if not rule.stack:
        ((name, t),) = parts.values()
        return _forward(rule, name, t)
    sizes = tuple(max(column) + 1 for column in zip(*parts, strict=True))
    indices = list(itertools.product(*map(range, sizes)))
    missing = [i for i in indices if i not in parts]
    if missing:
        lacks = dict(zip(rule.stack, missing[0], strict=True))
        raise _wrong(rule, f"finds nothing for {lacks} of {path!r}", f"all of {sizes}")
    first, one = parts[indices[0]]
    for name, t in parts.values():
        if _kind(t) != _kind(one):
            raise _wrong(
                rule, f"stacks {_kind(t)} on {_kind(one)} ({first!r})", "the same", tensor=name,
                hint="quantize all layers or none, or give them a rule that does not stack",
            )  # fmt: skip
    ordered = [_with_amaxes(_forward(rule, *parts[i])) for i in indices]
    axis = _axis(rule, first, ordered[0], 1)

    def stack(*leaves: Any) -> Any:
        xp: Any = jnp if isinstance(leaves[0], jax.Array) else np
        return xp.stack(leaves, axis).reshape(*leaves[0].shape[:axis], *sizes, *leaves[0].shape[axis:])

    return jax.tree.map(stack, *ordered)


def _unstacked(rule: Rule, path: str, t: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """The tensors of all indices."""
    if not rule.stack:
        return [((), t)]
    axis = _axis(rule, path, t, 1 - len(rule.stack))
    sizes = t.shape[axis : axis + len(rule.stack)]
    if len(sizes) < len(rule.stack) or not math.prod(sizes):
        raise _wrong(rule, f"finds the shape {list(t.shape)}", f"axes for {list(rule.stack)}", tensor=path)
    t, before = _with_amaxes(t), (slice(None),) * axis
    return [(i, jax.tree.map(lambda x, i=i: x[(*before, *i)], t)) for i in itertools.product(*map(range, sizes))]


def _axis(rule: Rule, name: str, t: Tensor, more: int) -> int:
    """Where the stacked axes begin, of a tensor that will have `more` axes of them; blocks of 16 stay the last axis."""
    last = t.ndim + more - 1 - (2 if isinstance(t, NVFP4Tensor) else 0)
    if not 0 <= rule.axis <= last:
        what = "a quantized weight" if isinstance(t, NVFP4Tensor) else "an array"
        raise _wrong(rule, f"stacks at axis {rule.axis} {what} {list(t.shape)}", f"an axis of 0 to {last}", tensor=name)
    return rule.axis


def _with_amaxes(t: Tensor) -> Tensor:
    """With an amax for each matrix, also where one is that of all."""
    if isinstance(t, NVFP4Tensor) and t.format.amax_scope == "tensor":
        return replace(t, amax=jnp.broadcast_to(t.amax, t.shape[:-2]))
    return t


def _kind(t: Tensor) -> str:
    if isinstance(t, NVFP4Tensor):
        return f"NVFP4 {list(t.shape)} {t.format}"
    return f"{t.dtype} {list(t.shape)}"


def _forward(rule: Rule, name: str, t: Tensor) -> Tensor:
    """Transposed and split."""
    if isinstance(t, NVFP4Tensor):
        return _unchanged(rule, name, t)
    if rule.transpose:
        t = _transposed(rule, name, t)
    if rule.split:
        axis, parts = rule.split
        if not 0 <= axis < t.ndim or t.shape[axis] % parts:
            raise _wrong(rule, f"splits {list(t.shape)}", f"a multiple of {parts} at axis {axis}", tensor=name)
        t = t.reshape(*t.shape[:axis], parts, t.shape[axis] // parts, *t.shape[axis + 1 :])
    return t


def _backward(rule: Rule, name: str, t: Tensor) -> Tensor:
    """Merged and transposed."""
    if isinstance(t, NVFP4Tensor):
        return _unchanged(rule, name, t)
    if rule.split:
        axis, parts = rule.split
        if not 0 <= axis < t.ndim - 1 or t.shape[axis] != parts:
            raise _wrong(rule, f"merges {list(t.shape)}", f"{parts} at axis {axis} and one more axis", tensor=name)
        t = t.reshape(*t.shape[:axis], -1, *t.shape[axis + 2 :])
    return _transposed(rule, name, t) if rule.transpose else t


def _transposed(rule: Rule, name: str, t: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    if t.ndim < 2:
        raise _wrong(rule, f"transposes {list(t.shape)}", "two axes or more", tensor=name)
    return t.swapaxes(-1, -2)


def _unchanged(rule: Rule, name: str, t: NVFP4Tensor) -> NVFP4Tensor:
    if rule.transpose or rule.split:
        raise _wrong(
            rule,
            f"{'transposes' if rule.transpose else 'splits'} it, which is quantized in blocks of 16 along K",
            "an array",
            tensor=name,
            hint="transpose or split before quantizing, or leave the quantized weight [N, K]",
        )
    return t
