"""Surveys the NVFP4 weights of a checkpoint, of any software, without refusing those that are damaged."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from .._files.files import CHUNK_BYTES, pieces
from .._files.safetensors import FLOATS, JSON, Planned
from .._files.source import Source, read_hf_quant
from .base import Layout, Parts, Quantization
from .forms import TILE, in_layout_form, padded_shape, unswizzled
from .layouts import LAYOUTS, nvfp4_values
from .loaders import Reading, linear_modules
from .modelopt import ALGORITHMS
from .names import KV_BIAS, KV_SCALE, Group, family_of, groups_of, split_expert, split_role
from .stored import Stored, layout_of, named_modules, no_nvfp4, scale_shapes
from .unsupported import config_refusal, other_kv_cache, tensor_refusal

TINY = np.finfo(np.float32).tiny
NAN, _MINUS_ZERO = 0x7F, 0x80  # as E4M3
# Entries of configs that change no value, which the configs made here lack.
_HARMLESS = {"version", "producer", "quantization_status", "global_compression_ratio", "activation_scheme", "observer"}
_HARMLESS |= {"exclude_modules", "scale_dtype", "zp_dtype"}
Lie = Literal["plain", "padded", "missing", "wrong"]


@dataclass(frozen=True)
class Item:
    """Describes one NVFP4 weight as it is stored.

    Attributes:
      module: the name of its module, or of a stack of experts.
      layout: the layout of the checkpoint.
      parts: the names of its tensors.
      codes, scales: its codes and block scales; None if there are none.
      lie: how the block scales are stored: as the layout says, with padding (and maybe swizzled), or in another way.
      global_scale: float32 as stored, of any shape; None if there is none, or no float.
      activation: the scale of its activations, likewise.
      e4m3_max: the largest block scale, where the layout stores an amax.
    """

    module: str
    layout: Layout
    parts: Parts
    codes: Planned | None
    scales: Planned | None
    lie: Lie
    global_scale: np.ndarray | None
    activation: np.ndarray | None
    e4m3_max: Literal[448, 256]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """[N, K], or [E, N, K] of a stack; None if codes or block scales have no such shape."""
        if self.codes is None or self.scales is None or self.lie in ("missing", "wrong"):
            return None
        *rows, packed = self.codes.shape
        if len(rows) == 2 and self.scales.shape[2] == packed:  # stored [E, K, N]
            return rows[0], packed, 2 * rows[1]
        return *rows, 2 * packed

    @property
    def decode(self) -> np.ndarray | None:
        """S_dec of the weight."""
        return None if self.global_scale is None else self.layout.to_decode(self.global_scale, self.e4m3_max)

    @property
    def bad_globals(self) -> int:
        """How many global scales are zero, negative, infinite or NaN. An amax may be zero."""
        return 0 if self.global_scale is None else _count_bad(self.global_scale, zero=self.layout.stores_amax)

    @cached_property
    def activation_decode(self) -> np.ndarray | None:
        """S_dec of the activations; NaN where it is zero, negative, not finite, or too small to be inverted."""
        if self.activation is None:
            return None
        value = self.layout.to_decode(self.activation)
        usable = np.isfinite(self.activation) & (self.activation > 0) & (value >= TINY)
        return np.where(usable, value, np.float32(np.nan))

    @property
    def family(self) -> tuple[str, object]:
        """What it shares with weights that multiply the same or similar activations: fused ones, and other experts."""
        expert, (parent, roles) = split_expert(self.module), family_of(self.module)
        return (expert[0] if expert else parent), roles


def _count_bad(x: np.ndarray, *, zero: bool = False) -> int:
    return int((~np.isfinite(x) | (x < 0) | ((x == 0) & (not zero))).sum())


@dataclass(frozen=True)
class Survey:
    """Holds what was found in a checkpoint.

    Attributes:
      stored: the checkpoint.
      items: its NVFP4 weights by module, in the order of their names.
      ranks: of tensor parallelism, that the model is to be split over; None if that is not known.
    """

    stored: Stored
    items: dict[str, Item]
    ranks: int | None

    @property
    def source(self) -> Source:
        return self.stored.source

    @property
    def layout(self) -> Layout:
        return self.stored.layout

    @cached_property
    def fused(self) -> list[Group]:
        """The groups of weights that loaders fuse."""
        return groups_of(self.items, k=lambda m: (self.items[m].shape or (None,))[-1])

    @cached_property
    def unequal_globals(self) -> dict[str, np.ndarray]:
        """S_dec, [E or 1, parts], of weights that were fused from parts and have a global scale for each, by module."""
        found = {}
        for item in self.items.values() if not self.layout.stores_amax else ():
            experts = math.prod((item.shape or ())[:-2])
            if item.shape and item.decode is not None and item.decode.size > experts and not item.decode.size % experts:
                found[item.module] = item.decode.reshape(experts, -1)
        return found

    @cached_property
    def other_forms(self) -> dict[str, str]:
        """How weights are stored that are shown as the layout stores them, by module."""
        views, items = self.source.views.keys(), self.items.values()
        out = {i.module: "numbers" for i in items if not views.isdisjoint(filter(None, i.parts))}
        out |= {i.module: "blocks of 32" for i in items if i.parts.scales in views}
        return out | {i.module: "tiles" for i in items if i.parts.codes in views}

    @cached_property
    def in_tiles(self) -> tuple[list[str], int]:
        """The block scales of at most 64 weights that look like tiles, and of how many the order shows.

        Rows and columns of a weight differ in size, so in the right order they explain more of the variance of its
        scales. In another order they explain less than half of that.
        """
        plain = [i.scales for i in self.items.values() if i.scales and i.lie == "plain" and len(i.scales.shape) == 2]
        fitting = [entry.name for entry in plain if padded_shape(*entry.shape) == entry.shape]
        found, clear = [], 0
        for name in fitting[:64] if not self.other_forms else ():
            x = self.source.read(name, slice(0, 4 * TILE[0])).view(np.uint8)
            (rows, noise), (tiles, noise_of_tiles) = map(_explained, (x, unswizzled(x, *x.shape)))
            if max(rows / noise, tiles / noise_of_tiles) > 0.1:
                clear += 1
                found += [name] if tiles > 2 * rows else []
        return found, clear

    @cached_property
    def unquantized(self) -> list[str]:
        """The modules in 16 or 32 bits that loaders look up in the list of unquantized ones."""
        return linear_modules(e for n in self.stored.others if (e := self.source.entry(n)).tag in FLOATS)

    @cached_property
    def kv_scales(self) -> list[str]:
        """The names of scales of keys and values."""
        return [n for n in self.stored.others if KV_SCALE.fullmatch(n) or split_role(n)[1] == "kv_scale"]

    @cached_property
    def config(self) -> JSON | None:
        """The ``quantization_config`` of config.json, if there is one."""
        found = (c.get("quantization_config") for c in self.source.configs)
        return next((c for c in found if isinstance(c, dict)), None)

    @cached_property
    def hf_quant(self) -> JSON | None:
        """The part ``quantization`` of hf_quant_config.json, if there is one."""
        section = read_hf_quant(self.source).get("quantization")
        return section if isinstance(section, dict) else None

    @cached_property
    def algorithms(self) -> set[str]:
        """What the configs of Model Optimizer name as the algorithm."""
        named = (c.get("quant_algo") for c in (self.config, self.hf_quant) if c)
        return {str(name).upper() for name in named if name is not None}

    @cached_property
    def mixed(self) -> bool:
        """Whether other formats stand beside NVFP4: then no config can be made from the tensors alone."""
        packed = ("F8_E4M3", "F8_E5M2", "I8", "U8")
        others = (self.source.entry(n) for n in self.stored.others)
        coded = any(e.tag in packed and len(e.shape) >= 2 and not e.name.endswith("scale") for e in others)
        named = self.algorithms <= {*nvfp4_values("quant_algo")}
        return coded or not named or (self.config or {}).get("format") not in (None, *nvfp4_values("format"))

    @cached_property
    def weight_only(self) -> bool | None:
        """Whether the config leaves activations in high precision; None if it does not say."""
        return self.layout.weight_only(self.algorithms, self.groups)

    @cached_property
    def groups(self) -> list[JSON]:
        """The groups of weights that the config describes."""
        return _groups_in(self.config or {})

    @cached_property
    def one_input(self) -> bool:
        """Whether all groups quantize activations alike."""
        return all(g.get("input_activations") == self.groups[0].get("input_activations") for g in self.groups)

    @cached_property
    def dynamic(self) -> bool:
        """Whether loaders compute any scale of activations as the model runs."""
        schemes = ((c or {}).get("activation_scheme") for c in (self.config, self.hf_quant))
        return "dynamic" in schemes or any(_is_dynamic(g) for g in self.groups)

    @cached_property
    def plain_config(self) -> bool:
        """Whether the configs describe NVFP4 in one way for all weights, and configs made anew would lose nothing."""
        if self.mixed or self.dynamic or not self.one_input or config_refusal(self.source) is not None:
            return False
        other_cache = other_kv_cache(self.source) or any(map(KV_BIAS.fullmatch, self.source.places))
        if other_cache or self.other_forms or not self.items.keys() <= self.block_scales.keys():
            return False
        if tensor_refusal(self.source, self.stored.others) is not None:  # such as AWQ's factors
            return False
        made = self.layout.config(Quantization([], weight_only=False, kv_cache="FP8"))
        known = {*_keys(made), "kv_cache_quant_algo", *_HARMLESS}
        hf_quant = read_hf_quant(self.source)
        sections = [c.get("quantization_config") or {} for c in self.source.configs]
        sections += [hf_quant.pop("quantization", None) or {}, hf_quant]
        groups = [g for section in sections for g in _groups_in(section)]
        numbers = [n for g in groups for n in (g.get("weights"), g.get("input_activations")) if isinstance(n, dict)]
        entries = [entry for section in (*sections, *groups, *numbers) for entry in section.items()]
        four_bits = all(n.get("num_bits") in (None, 4) for n in numbers)
        return four_bits and all(key in known or _is_empty(value) for key, value in entries)

    def leaves_activations(self, module: str) -> bool:
        """Tells whether loaders look for no scale of a module's activations, while they may for those of others."""
        if self.layout.targets is not None and not self.one_input:
            group = self._group_of(module, self.layout.targets)
            return group.get("input_activations") is None or _is_dynamic(group)
        if self.dynamic:
            return True
        return self.stored.algorithm(module) == ALGORITHMS[1]

    def _group_of(self, module: str, reads: Reading) -> JSON:
        """Finds the group that loaders take: the first that names the module, or its class."""
        targets = [(g, [t for t in g.get("targets") or () if isinstance(t, str)]) for g in self.groups]
        named = (g for g, found in targets if any(reads(t, module) for t in found))
        return next(named, next((g for g, found in targets if "Linear" in found), {}))

    @cached_property
    def block_scales(self) -> dict[str, tuple[int, int, int]]:
        """How many block scales of a weight are NaN, how many negative, of how many; if their order is clear."""
        counted = {}
        for module, item in self.items.items():
            nan = negative = total = 0
            for x in self._block_scales(item):
                total += x.size
                if x.max() >= NAN:
                    is_nan = (x & NAN) == NAN
                    nan += int(is_nan.sum())
                    negative += int(((x > _MINUS_ZERO) & ~is_nan).sum())
            if total:
                counted[module] = nan, negative, total
        return counted

    def _block_scales(self, item: Item) -> Iterator[np.ndarray]:
        """Gives them as uint8, some rows at a time."""
        if item.lie == "padded" and (x := self.unpadded(item)) is not None:
            yield x
        elif item.lie == "plain":
            parts = pieces(self.source.rows(item.parts.scales), CHUNK_BYTES)
            yield from (data.view(np.uint8) for _, data in parts)

    def unpadded(self, item: Item) -> np.ndarray | None:
        """Computes the block scales [N, K/16] of padded ones, as uint8; None if they may lie in two ways.

        GEMMs read scales in tiles of 128x4, so some software stores them padded to whole tiles, or also in the order
        of the tiles (swizzled). Where the zeros of the padding are tells the order; uint8 in one axis is swizzled.
        """
        assert item.codes is not None
        ((n, k),) = scale_shapes(item.codes.shape)
        raw = self.source.read(item.parts.scales).view(np.uint8)
        padded = padded_shape(n, k)
        orders = [] if raw.ndim == 1 else [raw]
        if raw.shape in (padded, (math.prod(padded),)):
            swizzled = unswizzled(raw, *padded)
            swizzled_only = raw.ndim == 1 and item.scales is not None and item.scales.tag == "U8"
            orders = [swizzled] if swizzled_only else [raw.reshape(padded), swizzled]
        possible = [x[:n, :k] for x in orders if not x[n:].any() and not x[:, k:].any()]
        if not possible or any((x != possible[0]).any() for x in possible):
            return None
        return np.ascontiguousarray(possible[0])


def _explained(scales: np.ndarray) -> tuple[float, float]:
    """Estimates how much variance of E4M3 bits, about a logarithm, rows and columns explain, and what is left."""
    x = scales.astype(np.float64)
    n, k = x.shape
    rows, columns = x.mean(1), x.mean(0)
    left = float(np.square(x - rows[:, None] - columns + x.mean()).sum()) / ((n - 1) * (k - 1)) + 1e-9
    return float(rows.var(ddof=1) - left / k + columns.var(ddof=1) - left / n), left


def _groups_in(section: JSON) -> list[JSON]:
    found = section.get("config_groups")
    return [g for g in found.values() if isinstance(g, dict)] if isinstance(found, dict) else []


def _is_dynamic(group: JSON) -> bool:
    inputs = group.get("input_activations")
    return isinstance(inputs, dict) and inputs.get("dynamic") is True


def _keys(section: JSON) -> Iterator[str]:
    for key, value in section.items():
        yield from (key, *(_keys(value) if isinstance(value, dict) else ()))


def _is_empty(value: object) -> bool:
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else not value


def survey(source: Source, ranks: int | None = None) -> Survey:
    """Finds the NVFP4 weights of an open checkpoint, complete or not.

    Raises:
      CheckpointError: it has none.
    """
    layout = layout_of(source)
    if layout is None:
        raise no_nvfp4(source)
    modules, stacks = named_modules(source, layout)
    modules |= {m for n in source.places if (m := _coded_module(source, layout, n))}
    stored = Stored(in_layout_form(source, layout, modules, stacks), layout, sorted(modules), stacks)
    return Survey(stored, {module: _item(stored, module) for module in stored.modules}, ranks)


def _coded_module(source: Source, layout: Layout, name: str) -> str:
    """Gives the module of a tensor of codes that has block scales, with or without a global scale."""
    module = name.removesuffix(layout.suffixes.codes) if name.endswith(layout.suffixes.codes) else ""
    scales = module + layout.suffixes.scales
    coded = bool(module) and source.entry(name).tag == "U8" and scales in source.places
    return module if coded and source.entry(scales).tag == layout.scales_tag == "F8_E4M3" else ""


def _item(stored: Stored, module: str) -> Item:
    source, layout, parts = stored.source, stored.layout, stored.parts(module)
    codes, scales = (source.entry(n) if n in source.places else None for n in (parts.codes, parts.scales))
    lie: Lie = "missing" if codes is None or scales is None else _lie(codes, scales, layout, module in stored.stacks)
    global_scale, activation = (_numbers(source, name) for name in (parts.global_scale, parts.activation))
    return Item(module, layout, parts, codes, scales, lie, global_scale, activation, stored.e4m3_max)


def _numbers(source: Source, name: str | None) -> np.ndarray | None:
    if name is None or name not in source.places or source.entry(name).tag not in FLOATS:
        return None
    return np.asarray(source.read(name), np.float32)


def _lie(codes: Planned, scales: Planned, layout: Layout, stacked: bool) -> Lie:
    if codes.tag != "U8" or len(codes.shape) != (3 if stacked else 2) or 0 in codes.shape:
        return "wrong"
    fitting = scale_shapes(codes.shape)
    if scales.tag == layout.scales_tag and scales.shape in fitting:
        return "plain"
    if stacked or not fitting or scales.tag not in ("F8_E4M3", "U8"):
        return "wrong"
    n, k = fitting[0]
    one_axis = scales.shape == (math.prod(padded_shape(n, k)),)
    larger = len(scales.shape) == 2 and scales.shape != (n, k) and scales.shape[0] >= n and scales.shape[1] >= k
    return "padded" if one_axis or larger else "wrong"


def module_entries(source: Source) -> Iterator[tuple[str, Planned]]:
    """Gives the weights of all modules, quantized or not, by module: one tensor each, in the order of their names."""
    for entry in source.entries():
        for suffix in {layout.suffixes.codes for layout in LAYOUTS.values()}:
            if entry.name.endswith(suffix):
                yield entry.name.removesuffix(suffix), entry
