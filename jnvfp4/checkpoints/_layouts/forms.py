"""Shows weights that are stored in other forms of NVFP4 as the layouts store them; all readers see them so.

- ComfyUI marks a layer ``M`` by JSON, in a tensor ``M.comfy_quant`` of bytes or under ``_quantization_metadata`` in a
  file's metadata: comfy-kitchen stores block scales in the order of tiles, and the even element in the high half.
- Blocks of 32 (Model Optimizer's nvfp4_bs32) have scales [N, K/32], where a config has ``group_size`` 32.
- A global scale may have an axis more, [E, 1] or [E, 1, 1], or one number per fused weight, [E, 2] or (3,), if they are
  equal: loaders refuse others, or use that of gate for up too.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from .._files.errors import CheckpointError
from .._files.files import Rows
from .._files.safetensors import FLOATS, JSON, Planned, json_object
from .._files.source import Source, View, read_hf_quant
from .base import Layout
from .names import WEIGHT

Merge = Callable[[np.ndarray, int], np.ndarray]
TILE = (128, 4)  # rows and columns of block scales that GEMMs read as one piece
_MARKER, _IN_METADATA = ".comfy_quant", "_quantization_metadata"
_MARKED = {"nvfp4": 16, "mxfp8": 32, "float8_e4m3fn": 0}  # formats of marked layers, with the sizes of their blocks
_HARMLESS = ("format", "full_precision_matrix_mult")  # entries of marks that change no value
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")  # that a file's metadata may lack


def in_layout_form(source: Source, layout: Layout, modules: Iterable[str], stacks: frozenset[str]) -> Source:
    """Shows NVFP4 weights as a layout stores them, and those that ComfyUI marks.

    Raises:
      CheckpointError: a mark has an unknown format.
    """
    source = without_marks(source)
    entries, views, sections = source.places, list[View](), (*source.configs, read_hf_quant(source))
    blocks_of_32 = any(size == 32 for section in sections for size in values_of(section, "group_size"))
    for module in modules:
        parts = layout.parts(module, module in stacks)
        if blocks_of_32 and {parts.codes, parts.scales} <= entries.keys():
            views += _halved(source, source.entry(parts.codes), source.entry(parts.scales))
        largest = np.min if layout.meaning == "encode" else np.max  # amax of activations, which loaders take
        for name, merge in () if layout.stores_amax else ((parts.global_scale, None), (parts.activation, largest)):
            if name is not None and name in entries:
                views += _one_number(source, source.entry(name), module in stacks, merge)
    return source.with_views(views)


def values_of(section: object, key: str) -> Iterator[object]:
    """Gives the values of a key on all levels of a JSON value."""
    for k, v in section.items() if isinstance(section, dict) else ():
        if k == key:
            yield v
        yield from values_of(v, key)


def _view(source: Source, tensor: Planned, parts: tuple[str, ...], compute: Callable[[slice], np.ndarray]) -> View:
    rows = Rows(tensor.shape, tensor.dtype, compute)
    return View(tensor, source, parts, lambda: rows)


# ---------------------------------------------------------------- ComfyUI
def without_marks(source: Source) -> Source:
    """Shows the weights that ComfyUI marks in rows, and no marks."""
    marks = _marks(source)
    if not marks:
        return source
    source = source.with_views([v for m, mark in marks.items() for v in _in_rows(source, m, _MARKED[mark["format"]])])
    return replace(source, places={n: f for n, f in source.places.items() if not n.endswith(_MARKER)})


def _marks(source: Source) -> dict[str, JSON]:
    """Reads the marks of layers, by module."""
    found: dict[str, JSON] = {}
    for file in source.files.values():
        text = file.metadata.get(_IN_METADATA, "{}").encode()
        layers = json_object(text, file.path, f"{_IN_METADATA} ").get("layers")
        for layer, mark in layers.items() if isinstance(layers, dict) else ():
            module = next((p + layer for p in _PREFIXES if p + layer + WEIGHT in source.places), layer)
            found[module] = mark if isinstance(mark, dict) else {"format": mark}
        for name in (n for n in file.entries if n.endswith(_MARKER)):
            text = file.read(name).tobytes()
            found[name.removesuffix(_MARKER)] = json_object(text, file.path, f"{name} ")
    for module, mark in found.items():
        block = _MARKED.get(str(mark.get("format")))
        odd = any(v and k not in _HARMLESS and (k, v) != ("group_size", block) for k, v in mark.items())
        if block is None or odd or module + WEIGHT not in source.places:
            expected = f"a layer with the format {' or '.join(_MARKED)} alone"
            hint = "read it with ComfyUI"
            raise CheckpointError(f"is marked {mark!r:.200}", expected, tensor=module + WEIGHT, hint=hint)
    return found


def _in_rows(source: Source, module: str, block: int) -> Iterator[View]:
    """Shows a marked layer with the even element in the low half, and block scales in rows."""
    name, scales = module + WEIGHT, f"{module}.weight_scale"
    if not block or scales not in source.places or {name, scales} & source.views.keys():  # shown already
        return
    codes, stored = source.entry(name), source.entry(scales)
    per_element = 2 if block == 16 else 1
    *_, n, k = (1, 1, *codes.shape)
    shape = n, -(-k * per_element // block)
    if len(codes.shape) != 2 or stored.nbytes != math.prod(padded_shape(*shape)):
        expected = f"{list(padded_shape(*shape))}, whole tiles of {'x'.join(map(str, TILE))}"
        raise CheckpointError(f"has shape {list(stored.shape)}", expected, tensor=scales)
    tensor = Planned(scales, stored.tag, shape)
    yield _view(source, tensor, (scales,), lambda rows: unswizzled(source.read(scales), *shape)[rows])
    if block == 16:
        yield _view(source, codes, (name,), lambda rows: (x := source.read(name, rows)) << 4 | x >> 4)


def padded_shape(n: int, k: int) -> tuple[int, int]:
    """Gives the shape of block scales [n, k] in whole tiles."""
    return math.ceil(n / TILE[0]) * TILE[0], math.ceil(k / TILE[1]) * TILE[1]


def unswizzled(stored: np.ndarray, n: int, k: int) -> np.ndarray:
    """Puts block scales in the order of tiles into rows, [n, k]."""
    rows, columns = padded_shape(n, k)
    tiles = stored.reshape(rows // TILE[0], columns // TILE[1], 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)[:n, :k]


# ---------------------------------------------------------------- blocks of 32, and several numbers
def _halved(source: Source, codes: Planned, scales: Planned) -> Iterator[View]:
    *rows, k = scales.shape or (0,)
    if codes.shape == (*rows, 16 * k):
        tensor = Planned(scales.name, scales.tag, (*rows, 2 * k))
        yield _view(source, tensor, (scales.name,), lambda r: np.repeat(source.read(scales.name, r), 2, axis=-1))


def _one_number(source: Source, entry: Planned, stacked: bool, merge: Merge | None) -> Iterator[View]:
    """Shows several numbers for a weight, or for an expert of a stack, as one; without ``merge`` only equal ones."""
    count = entry.shape[0] if stacked and entry.shape else 1
    several = math.prod(entry.shape) // max(count, 1)
    plain = entry.shape in ((), (1,), (count,)) if stacked or entry.shape == (1,) else not entry.shape
    if entry.tag not in FLOATS or plain or not 1 <= several <= 3:
        return
    numbers = source.read(entry.name).astype(np.float32).reshape(count, several)
    if merge is None and (numbers != numbers[:, :1]).any():
        return
    tensor, one = Planned(entry.name, "F32", (count,)), (merge or np.max)(numbers, 1)
    yield _view(source, tensor, (entry.name,), lambda rows: one[rows])
