"""Matches patterns that a user writes against the names of modules, and finds the layer in a name.

A checkpoint names modules with dots ('model.layers.3.mlp.up_proj'), a model with slashes ('block_3/mlp/up').
docs/models.md explains the patterns of both.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def matches(pattern: str, module: str) -> bool:
    """Tells whether a pattern selects a module.

    Args:
      pattern: the name of a module, which selects it and all modules below it; or ``re:`` and a regular expression
        for the beginning of the name; or a name with ``*`` for any text.
      module: the module's name, with dots.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return module == pattern or module.startswith(pattern if pattern.endswith(".") else pattern + ".")


def names_exactly(pattern: str, module: str) -> bool:
    """Tells whether a pattern selects this module itself, not only a module that it is part of."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], module) is not None
    return matches(pattern, module) and pattern.rpartition(".")[2] == module.rpartition(".")[2]


def matches_path(pattern: str | Callable[[str], bool], path: str) -> bool:
    """Tells whether a regular expression is that of the whole path of a module, or a function selects it."""
    return bool(pattern(path)) if callable(pattern) else re.fullmatch(pattern, path) is not None


def check_path_pattern(op: str, name: str, pattern: object) -> None:
    """Refuses what ``matches_path`` cannot take: neither a function nor a regular expression."""
    if callable(pattern):
        return
    if not isinstance(pattern, str):
        raise TypeError(f"{op}: {name} must be a regular expression or a function of the path, got {pattern!r}")
    if pattern.startswith("re:"):
        raise ValueError(f"{op}: {name} must be a regular expression, got {pattern!r}; leave out 're:'")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{op}: {name} must be a regular expression, got {pattern!r}: {error}") from None


def part_in(parts: Sequence[str], path: str) -> str | None:
    """Returns the first of ``parts`` that is a whole part of a path."""
    return next((part for part in parts if part in path.split("/")), None)


def layer_of(name: str) -> int | None:
    """Finds the number of the decoder layer in ``[...].layers.N.``; the layers of MTP modules have none."""
    match = _LAYER.search(name)
    return int(match[1]) if match and "mtp" not in name[: match.start()].split(".") else None


class LayerPath(NamedTuple):
    """Holds the path of a module in two parts, around the number of the layer that it is in, None if it has none."""

    prefix: str
    number: int | None
    rest: str


def layer_path(path: str) -> LayerPath:
    """Finds the number of the layer in the path of a module: 'block_3/mlp/up' gives ('block', 3, 'mlp/up').

    That is the number at the end of a part of the path, other than the last part: of the first that is named a layer or
    a block, or else of the first that has one. A part may be a number itself: 'layers/3/up' gives ('layers', 3, 'up').
    """
    parts = path.split("/")
    numbered = [(i, match) for i, part in enumerate(parts[:-1]) if (match := _NUMBERED.fullmatch(part))]
    if not numbered:
        return LayerPath("", None, path)
    at, match = next((found for found in numbered if _names_a_layer(parts, *found)), numbered[0])
    prefix = "/".join(filter(None, [*parts[:at], match[1]]))
    return LayerPath(prefix, int(match[2]), "/".join(parts[at + 1 :]))


_NUMBERED = re.compile(r"(.*?)_?(\d{1,9})")
_LAYER_NAME = re.compile(r".*(layer|block).*|h", re.IGNORECASE)


def _names_a_layer(parts: list[str], at: int, match: re.Match[str]) -> bool:
    name = match[1] or (parts[at - 1] if at else "")
    return _LAYER_NAME.fullmatch(name) is not None
