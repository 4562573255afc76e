"""Matches patterns that a user writes against the names of modules, and finds the layer in a name."""

import fnmatch
import re

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


def layer_of(name: str) -> int | None:
    """Finds the number of the decoder layer in ``[...].layers.N.``; the layers of MTP modules have none."""
    match = _LAYER.search(name)
    return int(match[1]) if match and "mtp" not in name[: match.start()].split(".") else None


def without_number(path: str) -> tuple[str, int | None]:
    """Takes the number of the layer out of the path of a module: 'block_3/mlp/up' gives ('block/mlp/up', 3).

    That is the number at the end of a part of the path, other than the last part: of the first that is named a layer or
    a block, or else of the first that has one. A part may be a number itself: 'layers/3/up' gives ('layers/up', 3).
    """
    parts = path.split("/")
    numbered = [(i, match) for i, part in enumerate(parts[:-1]) if (match := _NUMBERED.fullmatch(part))]
    if not numbered:
        return path, None
    at, match = next((found for found in numbered if _names_a_layer(parts, *found)), numbered[0])
    stem = [match[1]] if match[1] else []
    return "/".join([*parts[:at], *stem, *parts[at + 1 :]]), int(match[2])


_NUMBERED = re.compile(r"(.*?)_?(\d{1,9})")
_LAYER_NAME = re.compile(r".*(layer|block).*|h", re.IGNORECASE)


def _names_a_layer(parts: list[str], at: int, match: re.Match[str]) -> bool:
    name = match[1] or (parts[at - 1] if at else "")
    return _LAYER_NAME.fullmatch(name) is not None
