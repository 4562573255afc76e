"""NVFP4 checkpoints into another layout, or back into ordinary ones."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

import jnvfp4
from jnvfp4.convert.companions import copy_companions
from jnvfp4.convert.configs import JSON, hf_quant_config, quantization_config
from jnvfp4.convert.encode import CHUNK_BYTES, slices
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.files import write_whole
from jnvfp4.convert.layouts import (
    COMPRESSED_TENSORS,
    LAYOUTS,
    MODELOPT,
    TE,
    Layout,
    LayoutName,
    decode_scale,
    global_of,
)
from jnvfp4.convert.loaders import check, ignore_list
from jnvfp4.convert.plan import HF_QUANT, json_bytes
from jnvfp4.convert.policy import linear_modules
from jnvfp4.convert.room import check_room
from jnvfp4.convert.safetensors import DTYPES, Entry, Planned, Writer
from jnvfp4.convert.source import CONFIG, INDEX, leads_out, read_json
from jnvfp4.convert.stored import Stored, Weight, open_stored

Pieces = Iterator[tuple[str, int, np.ndarray]]  # name, index of the first element, data
Warn = Callable[[str], object]


def repack(path: Path | str, out: Path | str, layout: LayoutName, *, warn: Warn = warnings.warn) -> int:
    """Gives an NVFP4 checkpoint the names and globals of another layout. Codes and block scales stay the same bytes.

    The ignore list is made anew, since each layout's loaders read it in their own way; an FP8 KV cache is taken over.

    Args:
      path: an NVFP4 checkpoint of any layout.
      out: the output, empty or new.
      layout: modelopt or compressed-tensors.
      warn: called with what is odd but no error.

    Returns: how many globals do not come back as they were on the way back (1 / (1 / S) is not always S).

    Raises:
      CheckpointError: the checkpoint is damaged; its weights are row-scaled, or experts in one tensor, and the layout
        has no place for that; layout te, since an amax does not follow from a scale; loaders would disagree about what
        is quantized; no room.
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

    files = _configs(stored, to)
    for text in _write(stored, Path(out), planned, pieces, files, single_file=Path(path).is_file()):
        warn(text)
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


def _configs(stored: Stored, to: Layout) -> dict[str, JSON]:
    """config.json with its quantization_config, and for modelopt its own file; checked against what loaders read."""
    kept = linear_modules(map(stored.source.entry, stored.others))
    ignore = ignore_list(kept, stored.modules, to.name)
    check(ignore, kept, stored.modules, to.name)
    weight_only = not any(_activation(stored, m) is not None for m in stored.modules)
    fp8 = _has_fp8_kv_cache(stored)
    config = quantization_config(to.name, ignore, weight_only=weight_only, fp8_kv_cache=fp8)
    if fp8 and to is COMPRESSED_TENSORS:
        config["kv_cache_scheme"] = _FP8_KV_CACHE
    files: dict[str, JSON] = {}
    if to is MODELOPT:
        files[HF_QUANT] = hf_quant_config(ignore, jnvfp4.__version__, weight_only=weight_only, fp8_kv_cache=fp8)
    if stored.source.config is not None:
        files[CONFIG] = {**stored.source.config, "quantization_config": config}
    return files


_FP8_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def _has_fp8_kv_cache(stored: Stored) -> bool:
    """Whether the configs ask for an FP8 KV cache. Another kind is an error: loaders of the layouts differ in it."""
    old, path = (stored.source.config or {}).get("quantization_config"), stored.source.directory / HF_QUANT
    if leads_out(path, stored.source.directory):
        raise CheckpointError("is a link out of the directory", "a file in it", file=path)
    own = read_json(path) if path.is_file() else {}
    sections = [old, old.get("quantization") if isinstance(old, dict) else None, own.get("quantization")]
    keys = ("kv_cache_quant_algo", "kv_cache_scheme")
    claims = [claim for s in sections if isinstance(s, dict) for key in keys if (claim := s.get(key))]
    for claim in claims:
        fields = claim.items() if isinstance(claim, dict) else ()
        known = all(v in (None, _FP8_KV_CACHE[k]) for k, v in fields if k in _FP8_KV_CACHE)
        if claim != "FP8" and not (known and {"num_bits", "type"} <= dict(fields).keys()):
            raise CheckpointError(
                f"the KV cache is {claim!r:.200}", "FP8 or none", file=stored.source.directory, code=Exit.CONFLICT
            )
    return bool(claims)


# ---------------------------------------------------------------- back to high precision
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def dequantize(path: Path | str, out: Path | str, dtype: str = "BF16", *, warn: Warn = warnings.warn) -> None:
    """Writes an ordinary checkpoint of the decoded values q * (s * S_dec), rounded to `dtype` (BF16, F16 or F32).

    Args:
      path: an NVFP4 checkpoint of any layout.
      out: the output, empty or new.
      dtype: of the decoded weights; kept tensors are copied.
      warn: called with what is odd but no error.

    Raises:
      CheckpointError: the checkpoint is damaged; a value is too large for `dtype`; no room.
    """
    stored = open_stored(Path(path))
    if dtype not in _NAMES:
        raise CheckpointError(f"dtype is {dtype!r}", "BF16, F16 or F32", code=Exit.USAGE)
    for module in stored.modules:
        _check_range(stored.weight(module), dtype)

    def planned(module: str) -> list[Planned]:
        w = stored.weight(module)
        shape = (w.shape[0], w.shape[2], w.shape[1]) if w.kn else w.shape
        return [Planned(w.name, dtype, shape)]

    def pieces(module: str) -> Pieces:
        w = stored.weight(module)
        each = math.prod(w.shape[1:])
        for rows in _slices(w):
            v = w.values(rows).astype(DTYPES[dtype])
            yield w.name, rows.start * each, v.transpose(0, 2, 1) if w.kn else v

    config = stored.source.config
    files = {} if config is None else {CONFIG: _ordinary(config, _NAMES[dtype])}
    for text in _write(stored, Path(out), planned, pieces, files, single_file=Path(path).is_file()):
        warn(text)


def _slices(w: Weight) -> Iterator[slice]:
    return (slice(e, e + 1) for e in range(w.shape[0])) if w.stacked else slices(w.shape, 4, CHUNK_BYTES)


def _check_range(w: Weight, dtype: str) -> None:
    """Raises where values become infinite. Only where the global makes that possible is the weight read."""
    most = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    if 6 * 448 * float(np.abs(w.decode).max()) <= most:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        count = sum(int((~np.isfinite(w.values(rows).astype(DTYPES[dtype]))).sum()) for rows in _slices(w))
    if count:
        raise CheckpointError(
            f"has {count} values that are not finite in {dtype}", f"at most {most:g}", tensor=w.name,
            hint="--dtype bf16 or f32",
        )  # fmt: skip


def _ordinary(config: JSON, dtype: str) -> JSON:
    """The config of a model of this dtype; of a model in several parts also that of its language model."""
    out = {**config, "torch_dtype": dtype}
    out.pop("quantization_config", None)
    if "dtype" in config:
        out["dtype"] = dtype
    text = config.get("text_config")
    if isinstance(text, dict):
        out["text_config"] = {**text, **{k: dtype for k in ("torch_dtype", "dtype") if k in text}}
    return out


# ---------------------------------------------------------------- files
def _write(
    stored: Stored,
    out: Path,
    planned: Callable[[str], list[Planned]],
    pieces: Callable[[str], Pieces],
    files: Mapping[str, JSON],
    *,
    single_file: bool,
) -> list[str]:
    """Shard by shard: a weight goes where its codes are; config and index last. Returns warnings."""
    source = stored.source
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("is not empty", "an empty or new directory", file=out, code=Exit.USAGE)
    modules: dict[str, list[str]] = {name: [] for name in sorted(source.files)}
    kept: dict[str, list[str]] = {name: [] for name in modules}
    for module in stored.modules:
        modules[source.places[stored.parts(module).codes]].append(module)
    for name in stored.others:
        kept[source.places[name]].append(name)
    plans = {
        shard: [p for m in modules[shard] for p in planned(m)] + [_as_it_is(source.entry(n)) for n in kept[shard]]
        for shard in modules
    }
    plans = {shard: plan for shard, plan in plans.items() if plan}
    sizes = [sum(p.nbytes for p in plan) for plan in plans.values()]
    check_room(out, sizes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for shard, plan in plans.items():
            _write_shard(stored, out / shard, plan, kept[shard], modules[shard], pieces)
        odd = copy_companions(source.directory, out, single_file)
        for name, value in files.items():
            write_whole(out / name, json_bytes(value))
        if len(plans) > 1:
            places = {p.name: shard for shard, plan in plans.items() for p in plan}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}
            write_whole(out / INDEX, json_bytes(index))
    except OSError as e:
        raise CheckpointError(f"cannot be written ({e.strerror})", file=e.filename or out, code=Exit.IO) from e
    return odd


def _as_it_is(entry: Entry) -> Planned:
    return Planned(entry.name, entry.tag, entry.shape)


def _write_shard(
    stored: Stored,
    path: Path,
    plan: list[Planned],
    kept: list[str],
    modules: list[str],
    pieces: Callable[[str], Pieces],
) -> None:
    """Writes one file. Pages of a tensor that was read are released."""
    source = stored.source
    with Writer(path, plan, {"format": "pt", "jnvfp4_version": jnvfp4.__version__}) as file:
        for name in kept:
            file.put(name, source.array(name))
            source.release(name)
        for module in modules:
            for name, at, data in pieces(module):
                file.put(name, data, at)
            stored.release(module)
