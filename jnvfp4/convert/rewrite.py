"""NVFP4 checkpoints into another layout, or back into ordinary ones."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

import jnvfp4
from jnvfp4.convert.configs import hf_quant_config, quantization_config
from jnvfp4.convert.encode import slices
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.files import write_whole
from jnvfp4.convert.layouts import LAYOUTS, TE, Layout, LayoutName, decode_scale, global_of
from jnvfp4.convert.plan import HF_QUANT, json_bytes
from jnvfp4.convert.safetensors import DTYPES, Planned, Writer
from jnvfp4.convert.source import CONFIG, INDEX
from jnvfp4.convert.stored import Stored, Weight, open_stored
from jnvfp4.convert.verify import CHUNK

Pieces = Iterator[tuple[str, int, np.ndarray]]  # name, index of the first element, data


def repack(path: Path | str, out: Path | str, layout: LayoutName) -> int:
    """Gives an NVFP4 checkpoint the names and globals of another layout. Codes and block scales stay the same bytes.

    Returns: how many globals do not come back as they were on the way back (1 / (1 / S) is not always S).

    Raises:
      CheckpointError: the checkpoint is damaged; its weights are row-scaled, or experts in one tensor, and the layout
        has no place for that; layout te, since an amax does not follow from a scale.
    """
    stored, to = open_stored(Path(path)), LAYOUTS[layout]
    if to is TE:
        raise CheckpointError(
            "layout te stores an amax",
            "modelopt or compressed-tensors: it does not follow from a scale",
            code=Exit.USAGE,
        )
    if stored.stacks and not to.stacks:
        raise CheckpointError(
            "is a stack of experts", f"one weight for each, in {to.name}", tensor=min(stored.stacks), code=Exit.USAGE
        )
    changed = 0

    def planned(module: str) -> list[Planned]:
        w, parts, entry = stored.weight(module), to.parts(module, module in stored.stacks), stored.source.entry
        if w.stored.size > 1 and not w.stacked:
            raise CheckpointError("has an amax for each row", "layout te", tensor=w.name, code=Exit.USAGE)
        each = w.stored.shape if w.stacked else to.global_shape
        out = [
            Planned(parts.codes, "U8", entry(stored.parts(module).codes).shape),
            Planned(parts.scales, to.scales_tag, entry(stored.parts(module).scales).shape),
            Planned(parts.scale, "F32", each),
        ]
        if _activation(stored, module) is not None:
            out.append(Planned(parts.activation, "F32", each))
        return out

    def pieces(module: str) -> Pieces:
        nonlocal changed
        old, new, get = stored.parts(module), to.parts(module, module in stored.stacks), stored.source.array
        own = get(old.scale)
        value = _turned(own, stored, to)
        if stored.layout is not TE and stored.layout is not to:
            changed += int((decode_scale(value).reshape(-1) != own.reshape(-1)).sum())
        yield new.codes, 0, get(old.codes)
        yield new.scales, 0, get(old.scales).view(DTYPES[to.scales_tag])
        yield new.scale, 0, value
        activation = _activation(stored, module)
        if activation is not None:
            yield new.activation, 0, _turned(activation, stored, to)

    _write(stored, Path(out), planned, pieces, _config(stored, to))
    return changed


def _activation(stored: Stored, module: str) -> np.ndarray | None:
    name = stored.parts(module).activation
    return stored.source.array(name) if stored.layout.activation and name in stored.source.places else None


def _turned(value: np.ndarray, stored: Stored, to: Layout) -> np.ndarray:
    """A stored global as the other layout stores it."""
    value = np.asarray(value, np.float32)
    if stored.layout is TE:
        return global_of(to, value, stored.e4m3_max)
    return value if stored.layout.meaning == to.meaning else decode_scale(value)


def _config(stored: Stored, to: Layout) -> dict[str, dict[str, object]]:
    """config.json's quantization_config, and for modelopt its own file."""
    old = (stored.source.config or {}).get("quantization_config") or {}
    ignore = old.get("ignore") or ["lm_head"]
    weight_only = not any(_activation(stored, m) is not None for m in stored.modules)
    files = {CONFIG: quantization_config(to.name, ignore, weight_only=weight_only)}
    if to.name == "modelopt":
        files[HF_QUANT] = hf_quant_config(ignore, jnvfp4.__version__, weight_only=weight_only)
    return files


def dequantize(path: Path | str, out: Path | str, dtype: str = "BF16") -> None:
    """Writes an ordinary checkpoint of the decoded values q * (s * S_dec), rounded to `dtype` (BF16, F16 or F32)."""
    stored = open_stored(Path(path))
    if dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"dtype is {dtype!r}", "BF16, F16 or F32", code=Exit.USAGE)

    def planned(module: str) -> list[Planned]:
        w = stored.weight(module)
        shape = (w.shape[0], w.shape[2], w.shape[1]) if w.kn else w.shape
        return [Planned(w.name, dtype, shape)]

    def pieces(module: str) -> Pieces:
        w: Weight = stored.weight(module)
        each = math.prod(w.shape[1:])
        for rows in (slice(e, e + 1) for e in range(w.shape[0])) if w.stacked else slices(w.shape, 4, CHUNK):
            v = w.values(rows).astype(DTYPES[dtype])
            yield w.name, rows.start * each, v.transpose(0, 2, 1) if w.kn else v

    _write(stored, Path(out), planned, pieces, {})


def _write(
    stored: Stored,
    out: Path,
    planned: Callable[[str], list[Planned]],
    pieces: Callable[[str], Pieces],
    configs: Mapping[str, dict[str, object]],
) -> None:
    """Shard by shard: a weight goes where its codes are; config and index last."""
    source = stored.source
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("is not empty", "an empty or new directory", file=out, code=Exit.USAGE)
    out.mkdir(parents=True, exist_ok=True)
    others, total = list(stored.others), 0
    places: dict[str, str] = {}
    for shard in sorted(source.files):
        modules = [m for m in stored.modules if source.places[stored.parts(m).codes] == shard]
        kept = [source.entry(n) for n in others if source.places[n] == shard]
        plan = [p for m in modules for p in planned(m)] + [Planned(e.name, e.tag, e.shape) for e in kept]
        if not plan:
            continue
        with Writer(out / shard, plan, {"format": "pt", "jnvfp4_version": jnvfp4.__version__}) as file:
            for e in kept:
                file.put(e.name, source.array(e.name))
            for module in modules:
                for name, at, data in pieces(module):
                    file.put(name, data, at)
        places |= {p.name: shard for p in plan}
        total += sum(p.nbytes for p in plan)
    for path in sorted(source.directory.iterdir()):
        own = path.suffix == ".safetensors" or path.name in (CONFIG, INDEX, HF_QUANT)
        if path.is_file() and not path.is_symlink() and not own:
            shutil.copyfile(path, out / path.name)
    for name, value in configs.items():
        if name != CONFIG:
            write_whole(out / name, json_bytes(value))
    if source.config is not None:
        rest = {k: v for k, v in source.config.items() if k != "quantization_config"}
        quantized = {"quantization_config": configs[CONFIG]} if CONFIG in configs else {}
        write_whole(out / CONFIG, json_bytes({**rest, **quantized}))
    if len(set(places.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_whole(out / INDEX, json_bytes(index))
