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
