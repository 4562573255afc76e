"""Describes a checkpoint from its headers, and finds where two checkpoints differ."""

import json
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ._files.files import CHUNK_BYTES, pieces, slices
from ._files.safetensors import JSON
from ._files.source import CONFIG, HF_QUANT, Source, Warn, open_source, read_hf_quant
from ._layouts.names import WEIGHT, is_kv_scale, module_of
from ._layouts.stored import Stored, layout_of, open_stored, stored_of
from ._layouts.unsupported import config_refusal, mlx_refusal, other_kv_cache, tensor_refusal


def inspect(source: Path | str) -> JSON:
    """Describes a checkpoint as JSON values: layout, groups, formats of modules and sizes. Only headers are read."""
    opened = open_source(Path(source))
    layout, dtypes = layout_of(opened), Counter[str]()
    for entry in opened.entries():
        dtypes[entry.tag] += entry.nbytes
    out: JSON = {
        "layout": layout.name if layout else None,
        "files": {name: sum(e.nbytes for e in f.entries.values()) for name, f in opened.files.items()},
        "tensors": len(opened.places),
        "bytes": opened.nbytes,
        "dtypes": dict(sorted(dtypes.items())),
        "warnings": [*opened.file_warnings, *opened.warnings],
    }
    if layout is None and (refusal := mlx_refusal(opened)):
        out["warnings"].append(str(refusal).partition("\n")[0])
    if layout is not None:
        stored = stored_of(opened)
        refusals = filter(None, (config_refusal(opened), tensor_refusal(stored.source, stored.kept)))
        out["warnings"] += [str(r).partition("\n")[0] for r in refusals]
        out["warnings"] += filter(None, [other_kv_cache(opened)])
        elements = sum(2 * opened.entry(stored.parts(m).codes).nbytes for m in stored.modules)
        elements += sum(w.entry.nbytes for w in stored.fp8.values())
        at_16_bits = 2 * elements + sum(stored.source.entry(n).nbytes for n in stored.kept)
        out |= {
            "quantized": stored.modules,
            "fp8": {m: w.granularity for m, w in stored.fp8.items()},
            "pre_quant_scales": [name for m in stored.modules if (name := stored.pre_quant_scale(m))],
            "kv_scales": [n for n in stored.kept if is_kv_scale(n)],
            "kept": [n for n in stored.kept if not is_kv_scale(n)],
            "groups": [list(g.members) for g in stored.fused if len(g.members) > 1],
            "ratio_to_16_bits": out["bytes"] / at_16_bits,
        }
    return out


@dataclass
class Difference:
    """Counts where two checkpoints differ.

    Attributes:
      only_first, only_second: the names of tensors that only one of them has.
      codes, scales, globals: how many bytes of codes, block scales and global scales differ, by weight.
      activations: how many activation scales differ, or are only in one of them, by weight.
      others: the names of tensors that differ in dtype or shape, among them weights that only one checkpoint quantizes,
        and of unquantized tensors that differ in bytes.
      configs: the entries of config.json and hf_quant_config.json that differ. Two layouts describe the quantization in
        different words, so those entries are compared only within one layout.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    scales: dict[str, int] = field(default_factory=dict)
    globals: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not any(vars(self).values())


def diff(first: Path | str, second: Path | str, *, warn: Warn = warnings.warn) -> Difference:
    """Compares two NVFP4 checkpoints of any layouts.

    Codes, block scales and other tensors are compared as bytes; global and activation scales as decode scales; configs
    by their entries. Other files, such as tokenizers, are not compared. ``warn`` is called with a sentence about each
    file that may be no part of one of them.
    """
    a, b = open_stored(Path(first)), open_stored(Path(second))
    for stored in (a, b):
        stored.source.warn_of_files(warn)
    names_a, names_b = set(a.names), set(b.names)
    quantized_in_one = {a.name(m) for m in a.modules} ^ {b.name(m) for m in b.modules}
    out = Difference(
        sorted(names_a - names_b),
        sorted(names_b - names_a),
        others=sorted(quantized_in_one & names_a & names_b),
        configs=_different_configs(a, b),
    )
    for module in sorted(set(a.modules) & set(b.modules)):
        _compare_weights(a, b, module, out)
    out.others += [n for n in sorted({*a.others} & {*b.others}) if not _same_other(a, b, n)]
    return out


def _same_other(a: Stored, b: Stored, name: str) -> bool:
    """Compares a tensor that is no NVFP4 weight; two FP8 weights as they are stored, with their scales."""
    module = module_of(name)
    if not (name.endswith(WEIGHT) and module in a.fp8 and module in b.fp8):
        return _same_tensor(a.source, b.source, name)
    v, w = a.fp8[module], b.fp8[module]
    if not _same_tensor(v.source, w.source, name) or v.unit != w.unit or (v.scales != w.scales).any():
        return False
    x, y = (None if f.activation is None else f.source.read(f.activation).reshape(-1) for f in (v, w))
    return np.array_equal(x, y) if x is not None and y is not None else x is y


def _compare_weights(a: Stored, b: Stored, module: str, out: Difference) -> None:
    v, w, name = a.weight(module), b.weight(module), a.name(module)
    if v.shape != w.shape:
        out.others.append(name)
        return
    x, y = (_activations(s, module) for s in (a, b))
    counts = (
        (out.codes, _count_different(v.codes, w.codes)),
        (out.scales, _count_different(v.scales, w.scales)),
        (out.globals, int((v.decode.reshape(-1) != w.decode.reshape(-1)).sum())),
        (out.activations, int((x != y).sum()) if x.size == y.size else max(x.size, y.size)),
    )
    for by_name, count in counts:
        if count:
            by_name[name] = count
    a.release(module)
    b.release(module)


def _activations(stored: Stored, module: str) -> np.ndarray:
    """Gives the decode scales of a module's activations, an empty array if there are none."""
    scale = stored.activation(module)
    return np.empty(0) if scale is None else stored.layout.to_decode(scale).reshape(-1)


def _different_configs(a: Stored, b: Stored) -> list[str]:
    """Names the entries of the configs that differ, each with its file."""
    of_a, of_b = ({f"{CONFIG}: {k}": v for k, v in (s.source.config or {}).items()} for s in (a, b))
    for entries, stored in ((of_a, a), (of_b, b)):
        quantization = entries.pop(f"{CONFIG}: quantization_config", None)
        if a.layout is b.layout:
            entries |= _entries(f"{CONFIG}: quantization_config", quantization)
            hf_quant = dict(read_hf_quant(stored.source))
            entries |= _entries(f"{HF_QUANT}: quantization", hf_quant.pop("quantization", None))
            entries |= {f"{HF_QUANT}: {k}": v for k, v in hf_quant.items()}
    # As text: for Python 1 is True, and an entry that is null would be equal to none.
    text_a, text_b = ({k: json.dumps(v, sort_keys=True) for k, v in entries.items()} for entries in (of_a, of_b))
    return sorted(k for k in of_a.keys() | of_b.keys() if text_a.get(k) != text_b.get(k))


def _entries(name: str, section: object) -> JSON:
    return {f"{name}.{k}": v for k, v in section.items()} if isinstance(section, dict) else {name: section}


def _same_tensor(a: Source, b: Source, name: str) -> bool:
    e, f = a.entry(name), b.entry(name)
    if (e.tag, e.shape) != (f.tag, f.shape):
        return False
    arrays = (source.array(name) for source in (a, b))
    pairs = zip(*(pieces(x if x.shape else x.reshape(1), CHUNK_BYTES) for x in arrays), strict=True)
    same = all(x.tobytes() == y.tobytes() for (_, x), (_, y) in pairs)
    a.release(name)
    b.release(name)
    return same


def _count_different(x: np.ndarray, y: np.ndarray) -> int:
    parts = slices(x.shape, x.dtype.itemsize, CHUNK_BYTES)
    return sum(int(np.count_nonzero(x[rows] != y[rows])) for rows in parts)
