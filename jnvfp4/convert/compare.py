"""What is in a checkpoint, and where two differ: from headers, and byte by byte."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jnvfp4.convert.encode import CHUNK_BYTES, slices
from jnvfp4.convert.names import groups_of
from jnvfp4.convert.source import Source, open_source
from jnvfp4.convert.stored import layout_of, open_stored, stored_of


def inspect(path: Path | str) -> dict[str, Any]:
    """Layout, groups, kept tensors and sizes of a checkpoint; JSON values. Reads headers only."""
    source = open_source(Path(path))
    layout = layout_of(source)
    out: dict[str, Any] = {
        "layout": layout.name if layout else None,
        "files": {name: sum(e.nbytes for e in f.entries.values()) for name, f in source.files.items()},
        "tensors": len(source.places),
        "bytes": sum(e.nbytes for e in source.entries()),
        "dtypes": _bytes_by_dtype(source),
        "warnings": source.warnings,
    }
    if layout is not None:
        stored = stored_of(source)
        elements = sum(2 * source.entry(stored.parts(m).codes).nbytes for m in stored.modules)
        out |= {
            "quantized": stored.modules,
            "kept": list(stored.others),
            "groups": [list(g.members) for g in groups_of(stored.modules) if len(g.members) > 1],
            "ratio_to_16_bits": out["bytes"] / (2 * elements + sum(source.entry(n).nbytes for n in stored.others)),
        }
    return out


def _bytes_by_dtype(source: Source) -> dict[str, int]:
    out: dict[str, int] = {}
    for e in source.entries():
        out[e.tag] = out.get(e.tag, 0) + e.nbytes
    return dict(sorted(out.items()))


@dataclass
class Difference:
    """Of two checkpoints: tensors that one of them lacks, and counts of what differs in the others.

    Attributes:
      only_first, only_second: names.
      codes, scales, globals: by weight, how many packed bytes, block scales and globals differ.
      others: kept tensors with other bytes, dtypes or shapes.
    """

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    scales: dict[str, int] = field(default_factory=dict)
    globals: dict[str, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not (self.only_first or self.only_second or self.codes or self.scales or self.globals or self.others)


def diff(first: Path | str, second: Path | str) -> Difference:
    """Compares two checkpoints, in whatever layouts: codes and block scales as bytes, globals as S_dec."""
    a, b = open_stored(Path(first)), open_stored(Path(second))
    out = Difference()
    names = [{*(s.name(m) for m in s.modules), *s.others} for s in (a, b)]
    out.only_first, out.only_second = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    for module in sorted(set(a.modules) & set(b.modules)):
        v, w, name = a.weight(module), b.weight(module), a.name(module)
        if v.shape != w.shape:
            out.others.append(name)
            continue
        counts = {
            "codes": _differing(v.codes, w.codes),
            "scales": _differing(v.scales, w.scales),
            "globals": int((v.decode.reshape(-1) != w.decode.reshape(-1)).sum()),
        }
        for what, count in counts.items():
            if count:
                getattr(out, what)[name] = count
        a.release(module)
        b.release(module)
    for name in sorted(set(a.others) & set(b.others)):
        e, f = a.source.entry(name), b.source.entry(name)
        if e.tag != f.tag or e.shape != f.shape or _differing(*(_raw(s.source, name) for s in (a, b))):
            out.others.append(name)
        a.source.release(name)
        b.source.release(name)
    return out


def _raw(source: Source, name: str) -> np.ndarray:
    return source.array(name).reshape(-1).view(np.uint8)


def _differing(x: np.ndarray, y: np.ndarray) -> int:
    """How many elements differ, a slice at a time."""
    each = slices(x.shape, x.dtype.itemsize, CHUNK_BYTES)
    return sum(int(np.count_nonzero(x[rows] != y[rows])) for rows in each)
