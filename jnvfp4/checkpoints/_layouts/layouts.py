"""Lists the layouts: a new one is an object in a file of its own, and a line here."""

from collections.abc import Callable
from typing import Literal

from .base import Layout
from .compressed_tensors import COMPRESSED_TENSORS
from .modelopt import MODELOPT
from .te import TE

LayoutName = Literal["modelopt", "compressed-tensors", "te"]
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS, TE)}


def layouts_with(has: Callable[[Layout], bool]) -> str:
    """Names the layouts that have a property, such as "modelopt or te"."""
    return " or ".join(name for name, layout in LAYOUTS.items() if has(layout))


def nvfp4_values(key: str) -> tuple[str, ...]:
    """Lists the values of an entry of configs that say NVFP4 in any layout."""
    return tuple(value for layout in LAYOUTS.values() for value in layout.nvfp4.get(key, ()))
