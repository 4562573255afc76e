r"""Converts between Hugging Face names and the tree of a JAX model, by rules that work in both directions.

For example, with the layers stacked:

    RULES = [
        NameRule("model.embed_tokens.weight", "embedding"),
        NameRule(
            r"model.layers.{layer:\d+}.self_attn.{p:[qkvo]}_proj.weight", "layers/attention/{p}", stack=("layer",)
        ),
        NameRule(r"model.layers.{layer:\d+}.input_layernorm.weight", "layers/norm", stack=("layer",)),
    ]
    tree = from_hf(open_checkpoint(source), RULES)
    save_checkpoint(to_hf(tree, RULES), output)
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from .._core.tensor import NVFP4Tensor, PyTree
from ._files.errors import CheckpointError, Exit

Tensor = NVFP4Tensor | jax.Array | np.ndarray
Fields = dict[str, str]
_FIELD = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


@dataclass(frozen=True)
class NameRule:
    """Says where tensors with certain Hugging Face names are in a tree, and how they are rearranged there.

    A template is text with fields: ``{p}`` matches a part without dots or slashes, ``{p:[qkv]}`` matches the regular
    expression after the colon. From Hugging Face to the tree a tensor is first transposed, then split, then stacked.

    Attributes:
      name: template of the Hugging Face name; each of its fields is in ``path`` or in ``stack``.
      path: template of the keys in the tree, with ``/`` between them.
      stack: fields that count from 0, such as layers. Tensors that differ in them become one, with an axis per field.
      axis: the first of these axes in the result.
      transpose: whether the last two axes are swapped: [out, in] in Hugging Face, [in, out] in the tree. Not allowed
        for quantized weights, whose blocks lie along K.
      split: an axis and a number of parts, such as heads: [.., parts * n, ..] becomes [.., parts, n, ..]. Not allowed
        for quantized weights.
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
                raise _wrong(self, f"has a brace outside of a field in {template!r}", "{name} or {name:expression}")
        in_name, in_path = ([f for f, _ in _FIELD.findall(t)] for t in (self.name, self.path))
        if sorted(in_name) != sorted([*in_path, *self.stack]):
            observed = f"has the fields {in_name} in its name, {in_path} in its path and stacks {list(self.stack)}"
            raise _wrong(self, observed, "each field once in the name, and once in the path or in stack")
        try:
            _ = self.patterns
        except re.error as e:
            raise _wrong(self, f"has a wrong expression ({e})", "regular expressions in fields") from e

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The regular expressions that match the name and the path."""
        expressions = {f: e or "[^./]+" for f, e in _FIELD.findall(self.name)}
        return _pattern(self.name, expressions), _pattern(self.path, expressions)

    def fields_of_name(self, name: str) -> Fields | None:
        """Finds the values of the fields in a Hugging Face name; None if the rule does not match it."""
        match = self.patterns[0].fullmatch(name)
        return match.groupdict() if match else None

    def fields_of_path(self, path: str) -> Fields | None:
        """Finds the values of the fields in a path of the tree; None if the rule does not match it."""
        match = self.patterns[1].fullmatch(path)
        return match.groupdict() if match else None


def _pattern(template: str, expressions: Mapping[str, str]) -> re.Pattern[str]:
    parts = _FIELD.split(template)  # text, field, expression, text, ...
    text, fields = parts[::3], parts[1::3]
    groups = [f"(?P<{f}>{expressions.get(f, '')})" for f in fields]
    return re.compile("".join(re.escape(t) + g for t, g in itertools.zip_longest(text, groups, fillvalue="")))


def _filled(template: str, fields: Fields) -> str:
    return _FIELD.sub(lambda m: fields[m[1]], template)


def _wrong(rule: NameRule, observed: str, expected: str, tensor: str | None = None, hint: str = "") -> CheckpointError:
    return CheckpointError(f"rule {rule.name!r} {observed}", expected, tensor=tensor, hint=hint, code=Exit.USAGE)


# ---------------------------------------------------------------- both directions
def from_hf(tensors: Mapping[str, Tensor], rules: Sequence[NameRule]) -> dict[str, PyTree]:
    """Builds the tree of a JAX model from tensors with Hugging Face names.

    Args:
      tensors: the tensors by name, such as ``open_checkpoint(source)`` or the result of its ``to_device``. The tensors
        of one leaf are read together, leaf after leaf.
      rules: exactly one for every name.

    Returns:
      nested dictionaries, with NVFP4Tensors and arrays as leaves.

    Raises:
      CheckpointError: a name matches no rule or two, a rule matches no name, two names have one place, tensors
        cannot be stacked, or a quantized weight would be transposed or split.
    """
    places: dict[str, dict[tuple[int, ...], str]] = {}
    rule_of: dict[str, NameRule] = {}
    for name, (rule, fields) in _assigned(tensors, rules, NameRule.fields_of_name, "name").items():
        path = _filled(rule.path, fields)
        others = places.setdefault(path, {})
        index = _index(rule, fields, name)
        if index in others or rule_of.setdefault(path, rule) is not rule:
            other = next(iter(others.values()))
            raise _wrong(rule, f"puts it at {path!r}, where {other!r} is", "a place for each name", name)
        others[index] = name
    tree: dict[str, PyTree] = {}
    for path, names in places.items():
        _put(tree, path, _stacked(rule_of[path], path, {i: (n, tensors[n]) for i, n in names.items()}))
    return tree


def to_hf(tree: Mapping[str, PyTree], rules: Sequence[NameRule]) -> dict[str, Tensor]:
    """Gives the tensors of a tree their Hugging Face names: the inverse of ``from_hf``, for ``save_checkpoint``.

    Args:
      tree: nested dictionaries.
      rules: exactly one for every leaf.

    Returns:
      the tensors by name.

    Raises:
      CheckpointError: a leaf matches no rule or two, a rule matches no leaf, two leaves lead to one name, or a
        quantized weight would be transposed or merged.
    """
    leaves = _leaves(tree)
    out: dict[str, Tensor] = {}
    for path, (rule, fields) in _assigned(leaves, rules, NameRule.fields_of_path, "path").items():
        for index, t in _unstacked(rule, path, leaves[path]):
            name = _filled(rule.name, fields | dict(zip(rule.stack, map(str, index), strict=True)))
            if name in out:
                raise _wrong(rule, f"and another rule lead to one name, {name!r}", "one leaf for each", tensor=path)
            if rule.fields_of_name(name) is None:
                observed = f"gives it the name {name!r}, which the rule does not match"
                raise _wrong(rule, observed, "a name that it matches", path)
            out[name] = _rearranged(rule, name, t, back=True)
    return out


def _assigned(
    names: Iterable[str], rules: Sequence[NameRule], match: Callable[[NameRule, str], Fields | None], what: str
) -> dict[str, tuple[NameRule, Fields]]:
    out: dict[str, tuple[NameRule, Fields]] = {}
    for name in names:
        matching = [(rule, fields) for rule in rules if (fields := match(rule, name)) is not None]
        if len(matching) != 1:
            observed = f"matches {' and '.join(repr(r.name) for r, _ in matching)}" if matching else "matches no rule"
            raise CheckpointError(observed, f"one rule for each {what}", tensor=name, code=Exit.USAGE)
        out[name] = matching[0]
    used = [rule for rule, _ in out.values()]
    for rule in rules:
        if rule not in used:
            raise _wrong(rule, f"matches no {what}", "rules that match")
    return out


# ---------------------------------------------------------------- trees
def _put(tree: dict[str, PyTree], path: str, leaf: Tensor) -> None:
    *parents, last = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"path {path!r} goes through a leaf", "leaves at the ends", code=Exit.USAGE)
    if last in tree:
        raise CheckpointError(f"path {path!r} is a leaf and a branch", "one of them", code=Exit.USAGE)
    tree[last] = leaf


def _leaves(tree: Mapping[str, PyTree], prefix: str = "") -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for key, value in tree.items():
        out |= _leaves(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


# ---------------------------------------------------------------- tensors
def _index(rule: NameRule, fields: Fields, name: str) -> tuple[int, ...]:
    values = [fields[f] for f in rule.stack]
    if not all(v.isdecimal() and str(int(v)) == v for v in values):
        raise _wrong(rule, f"stacks {values}", "numbers", tensor=name)
    return tuple(map(int, values))


def _stacked(rule: NameRule, path: str, parts: dict[tuple[int, ...], tuple[str, Tensor]]) -> Tensor:
    if not rule.stack:
        ((name, t),) = parts.values()
        return _rearranged(rule, name, t)
    sizes = tuple(max(column) + 1 for column in zip(*parts, strict=True))
    indices = list(itertools.product(*map(range, sizes)))
    missing = [i for i in indices if i not in parts]
    if missing:
        lacks = dict(zip(rule.stack, missing[0], strict=True))
        raise _wrong(rule, f"finds no tensor for {lacks} of {path!r}", f"all of {sizes}")
    first, one = parts[indices[0]]
    for name, t in parts.values():
        if _kind(t) != _kind(one):
            hint = "quantize all layers or none, or give them a rule that does not stack"
            raise _wrong(rule, f"stacks {_kind(t)} on {_kind(one)} ({first!r})", "the same", name, hint)
    ordered = [_with_amaxes(_rearranged(rule, *parts[i])) for i in indices]
    axis = _axis(rule, first, ordered[0], 1)

    def stack(*leaves: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        xp = jnp if isinstance(leaves[0], jax.Array) else np
        return xp.stack(leaves, axis).reshape(*leaves[0].shape[:axis], *sizes, *leaves[0].shape[axis:])

    return jax.tree.map(stack, *ordered)


def _unstacked(rule: NameRule, path: str, t: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    if not rule.stack:
        return [((), t)]
    axis = _axis(rule, path, t, 1 - len(rule.stack))
    sizes = t.shape[axis : axis + len(rule.stack)]
    if len(sizes) < len(rule.stack) or not math.prod(sizes):
        raise _wrong(rule, f"finds the shape {list(t.shape)}", f"axes for {list(rule.stack)}", tensor=path)
    t, before = _with_amaxes(t), (slice(None),) * axis
    return [(i, jax.tree.map(lambda x, i=i: x[(*before, *i)], t)) for i in itertools.product(*map(range, sizes))]


def _axis(rule: NameRule, name: str, t: Tensor, more: int) -> int:
    """Gives the first stacked axis of a tensor that gets ``more`` axes, and raises if blocks would not stay last."""
    last = t.ndim + more - 1 - (2 if isinstance(t, NVFP4Tensor) else 0)
    if not 0 <= rule.axis <= last:
        what = "a quantized weight" if isinstance(t, NVFP4Tensor) else "an array"
        raise _wrong(rule, f"stacks at axis {rule.axis} {what} {list(t.shape)}", f"an axis of 0 to {last}", tensor=name)
    return rule.axis


def _with_amaxes(t: Tensor) -> Tensor:
    """Gives every matrix of a quantized tensor its own amax, also if all have the same."""
    if isinstance(t, NVFP4Tensor) and t.format.amax_scope == "tensor":
        return replace(t, amax=jnp.broadcast_to(t.amax, t.shape[:-2]))
    return t


def _kind(t: Tensor) -> str:
    if isinstance(t, NVFP4Tensor):
        return f"NVFP4 {list(t.shape)} {t.format}"
    return f"{t.dtype} {list(t.shape)}"


def _rearranged(rule: NameRule, name: str, t: Tensor, back: bool = False) -> Tensor:
    """Transposes and splits a tensor, or merges and transposes it back."""
    if isinstance(t, NVFP4Tensor):
        if rule.transpose or rule.split:
            verb = "transposes" if rule.transpose else "splits"
            hint = "transpose or split before quantizing, or leave the quantized weight [N, K]"
            raise _wrong(rule, f"{verb} it, which is quantized in blocks of 16 along K", "an array", name, hint)
        return t
    if rule.split and back:
        axis, parts = rule.split
        if not 0 <= axis < t.ndim - 1 or t.shape[axis] != parts:
            raise _wrong(rule, f"merges {list(t.shape)}", f"{parts} at axis {axis} and one more axis", tensor=name)
        t = t.reshape(*t.shape[:axis], -1, *t.shape[axis + 2 :])
    if rule.transpose:
        if t.ndim < 2:
            raise _wrong(rule, f"transposes {list(t.shape)}", "two axes or more", tensor=name)
        t = t.swapaxes(-1, -2)
    if rule.split and not back:
        axis, parts = rule.split
        if not 0 <= axis < t.ndim or t.shape[axis] % parts:
            raise _wrong(rule, f"splits {list(t.shape)}", f"a multiple of {parts} at axis {axis}", tensor=name)
        t = t.reshape(*t.shape[:axis], parts, t.shape[axis] // parts, *t.shape[axis + 1 :])
    return t
