"""Writes a checkpoint of quantized weights: shard by shard, a slice of a weight at a time."""

import hashlib
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np

import jnvfp4
from jnvfp4.convert.companions import copy_companions
from jnvfp4.convert.encode import Amax, Where, encode, find_amax, slices
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.files import locked, remove_temporaries, write_whole
from jnvfp4.convert.layouts import FLOAT_MAX, Parts, global_of
from jnvfp4.convert.names import Group, module_of
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.plan import HF_QUANT, Plan, config_files, index_of, json_bytes, keep_groups, make_plan
from jnvfp4.convert.policy import Decision, tensor_of
from jnvfp4.convert.progress import NAME as RECORD
from jnvfp4.convert.progress import Progress
from jnvfp4.convert.room import check_room
from jnvfp4.convert.safetensors import DTYPES, Entry, Writer
from jnvfp4.convert.source import CONFIG, INDEX, Source, open_source
from jnvfp4.convert.workers import in_order
from jnvfp4.spec import BLOCK

Report = Callable[[str, int], None]  # a tensor's name, and how many bytes of the input are done with it
TINY_AMAX = 7.9e-36  # below it 2688 / amax is no float32


@dataclass
class Result:
    """What a conversion did.

    Attributes:
      plan: what was decided.
      amaxes: of every quantized module, shared by its group.
      device: that quantized.
      seconds: for each tensor that was written, not for those of resumed shards.
      bytes_before, bytes_after: of all tensors.
      warnings: what is odd but no error.
    """

    plan: Plan
    amaxes: dict[str, np.ndarray]
    device: jax.Device
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    warnings: list[str] = field(default_factory=list)


def convert_checkpoint(
    src: Path | str,
    dst: Path | str,
    options: ConvertOptions | None = None,
    *,
    device: jax.Device | None = None,
    implementation: Literal["native", "reference"] | None = None,
    workers: int = 2,
    overwrite: bool = False,
    resume: bool = False,
    report: Report = lambda name, done: None,
) -> Result:
    """Converts a Hugging Face checkpoint to NVFP4.

    Nothing is written before every header, rule and loader is checked; every file appears whole; config and index come
    last, so that an interrupted output never looks complete.

    Args:
      src: a directory of safetensors files, or one file.
      dst: the output, empty or new.
      options: what is quantized, how, and in which layout.
      device: where weights are quantized, by default the first CPU device. The bytes are the same everywhere.
      implementation: as for `jnvfp4.quantize`.
      workers: how many tensors are worked on at once. The bytes are the same with any number.
      overwrite: whether `dst` may have files.
      resume: whether shards that an interrupted conversion left in `dst` are used.
      report: called as the conversion goes on.

    Raises:
      CheckpointError: bad input, a conflict with a loader, no room.
    """
    src, dst = Path(src), Path(dst)
    options = ConvertOptions() if options is None else options
    source = open_source(src)
    plan = make_plan(source, options)
    _check_target(source, dst, overwrite or resume)
    progress = Progress(dst, source, options)
    if resume:
        progress.resume()
    source = plan.source
    _check_room(plan, dst, progress.shards)
    amaxes, bad = _amaxes(plan, workers)
    source.warnings += [
        f"{m}: amax {float(a.max()):.3g} is so small that its S_enc is the largest float32"
        for m, a in amaxes.items()
        if 0 < a.max() < TINY_AMAX
    ]
    if bad:
        plan = keep_groups(plan, bad, "not finite")
        _check_room(plan, dst, progress.shards)
    where = Where(jax.local_devices(backend="cpu")[0] if device is None else device, implementation)
    metadata = {
        "format": "pt",
        "jnvfp4_version": jnvfp4.__version__,
        "source": _digest(source),
        "recipe": options.recipe,
    }
    if not options.share_qkv:
        metadata["share_qkv"] = "false"
    seconds: dict[str, float] = {}
    try:
        dst.mkdir(parents=True, exist_ok=True)
        with locked(dst):
            _check_target(source, dst, overwrite or resume)  # once more: another conversion may have ended
            _prepare(plan, dst, resume)
            with progress:
                for name, entries in plan.shards().items():
                    if resume and progress.done(dst / name):
                        report(name, sum(e.nbytes for e in entries))
                        continue
                    seconds |= _write_shard(plan, dst / name, entries, amaxes, metadata, where, workers, report)
                    progress.add(dst / name)
                _finish(plan, dst)
    except OSError as e:
        raise CheckpointError(f"cannot be written ({e.strerror})", file=e.filename or dst, code=Exit.IO) from e
    before = sum(e.nbytes for e in source.entries())
    return Result(plan, amaxes, where.device, seconds, before, plan.nbytes, source.warnings)


def _check_target(source: Source, dst: Path, overwrite: bool) -> None:
    if dst.exists() and dst.resolve() == source.directory.resolve():
        raise CheckpointError("is the source", "another directory", file=dst, code=Exit.USAGE)
    if dst.exists() and not dst.is_dir():
        raise CheckpointError("is a file", "a directory", file=dst, code=Exit.USAGE)
    if dst.is_dir() and any(dst.iterdir()) and not overwrite:
        raise CheckpointError(
            "is not empty",
            "an empty or new directory",
            file=dst,
            code=Exit.USAGE,
            hint="--resume goes on, --overwrite starts again",
        )


def _prepare(plan: Plan, dst: Path, resume: bool) -> None:
    """Of an older output removes what makes it look complete."""
    others = (path.name for path in plan.source.directory.iterdir())
    remove_temporaries(dst, {*plan.shards(), *others, CONFIG, INDEX, HF_QUANT, RECORD})
    for path in (dst / CONFIG, dst / INDEX, dst / HF_QUANT, *(() if resume else dst.glob("*.safetensors"))):
        path.unlink(missing_ok=True)


def _check_room(plan: Plan, dst: Path, done: Container[str]) -> None:
    shards = [entries for name, entries in plan.shards().items() if name not in done]
    sizes = [sum(p.nbytes for e in entries for p in plan.outputs(e)) for entries in shards]
    check_room(dst, sizes)


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    for e in source.entries():
        digest.update(f"{e.name} {e.tag} {e.shape}\n".encode())
    return digest.hexdigest()


def _amax_of(plan: Plan, module: str) -> Amax:
    """The amax of a weight: [], of each row [N], or of each expert of a stack [E]."""
    name = tensor_of(plan.decisions, module)
    x = plan.source.array(name)
    try:
        if not plan.decisions[name].stacked:
            return find_amax(x, plan.options.recipe == "row-scaled")
        each = [find_amax(expert, False) for expert in x]
    finally:
        plan.source.release(name)
    first = next(((e, *a.first) for e, a in enumerate(each) if a.first is not None), None)
    return Amax(np.array([a.value for a in each], np.float32), sum(a.not_finite for a in each), first)


def _amaxes(plan: Plan, workers: int) -> tuple[dict[str, np.ndarray], list[Group]]:
    """The amax of every group, by module, and the groups that are not finite."""
    out: dict[str, np.ndarray] = {}
    bad = []
    members = [m for group in plan.groups for m in group.members]
    each = dict(zip(members, in_order(lambda m: _amax_of(plan, m), members, workers), strict=True))
    for group in plan.groups:
        found = {m: each[m] for m in group.members}
        wrong = next(((m, a) for m, a in found.items() if a.not_finite), None)
        if wrong is not None:
            module, a = wrong
            if plan.options.on_nonfinite == "error":
                raise CheckpointError(
                    f"has {a.not_finite} values that are not finite, the first at {a.first}", "finite values",
                    tensor=tensor_of(plan.decisions, module), hint="--on-nonfinite skip keeps its group",
                )  # fmt: skip
            bad.append(group)
        elif plan.options.recipe == "row-scaled":
            out |= {m: a.value for m, a in found.items()}
        else:
            joint = np.asarray(np.maximum.reduce([a.value for a in found.values()]))
            out |= dict.fromkeys(found, joint)
    return out, bad


Pieces = Iterator[tuple[str, int, np.ndarray]]  # name, index of the first element, data


def _copied(x: np.ndarray, name: str, most_bytes: int) -> Pieces:
    if not x.shape:
        yield name, 0, x
        return
    row = x.size // x.shape[0] if x.shape[0] else 0
    for rows in slices(x.shape, x.dtype.itemsize, most_bytes):
        yield name, rows.start * row, x[rows]


def _pieces(plan: Plan, entry: Entry, amaxes: dict[str, np.ndarray], where: Where) -> Pieces:
    """What one tensor becomes, a slice at a time."""
    x, d, options = plan.source.array(entry.name), plan.decisions[entry.name], plan.options
    if not d.quantizes:
        (kept,) = plan.outputs(entry)
        for name, at, data in _copied(x, entry.name, options.chunk_bytes):
            yield name, at, data.astype(DTYPES[kept.tag], copy=False)
        return
    zero = FLOAT_MAX if options.zero_amax == "te-reference" else 1.0
    module, layout, shapes = module_of(entry.name), plan.layout, {p.name: p.shape for p in plan.outputs(entry)}
    parts, amax = layout.parts(module, d.stacked), np.asarray(amaxes[module], np.float32)
    yield parts.scale, 0, global_of(layout, amax, options.scale_max, zero).reshape(shapes[parts.scale])
    if module in plan.input_scales:
        scale = np.float32(plan.input_scales[module])
        value = scale if layout.meaning == "decode" else np.float32(1) / scale
        yield parts.activation, 0, np.full(shapes[parts.activation], value, np.float32)
    for e, expert in enumerate(x if d.stacked else [x]):
        own = amax[e] if d.stacked else amax
        yield from _encoded(expert.T if d.kn else expert, own, e, d, parts, plan, where)


def _encoded(
    x: np.ndarray, amax: np.ndarray, expert: int, d: Decision, parts: Parts, plan: Plan, where: Where
) -> Pieces:
    """Codes and block scales of a weight, or of one expert, which is whole where its axes change places."""
    n, k = d.matrix
    tag = DTYPES[plan.layout.scales_tag]
    both: list[list[np.ndarray]] = [[], []]
    for first, codes, scales in encode(x, amax, plan.options.spec, where, plan.options.chunk_bytes):
        if d.kn:
            both[0].append(codes)
            both[1].append(scales)
        else:
            yield parts.codes, (expert * n + first) * (k // 2), codes
            yield parts.scales, (expert * n + first) * (k // BLOCK), scales.view(tag)
    if d.kn:
        yield parts.codes, expert * n * (k // 2), np.concatenate(both[0]).T
        yield parts.scales, expert * n * (k // BLOCK), np.concatenate(both[1]).T.copy().view(tag)


def _write_shard(
    plan: Plan,
    path: Path,
    entries: list[Entry],
    amaxes: dict[str, np.ndarray],
    metadata: dict[str, str],
    where: Where,
    workers: int,
    report: Report,
) -> dict[str, float]:
    """Writes one file; returns how long each tensor took."""
    seconds = {}
    with Writer(path, [p for e in entries for p in plan.outputs(e)], metadata) as out:

        def write(entry: Entry) -> tuple[Entry, float]:
            begun = time.monotonic()
            for name, at, data in _pieces(plan, entry, amaxes, where):
                out.put(name, data, at)
            plan.source.release(entry.name)
            return entry, time.monotonic() - begun

        for entry, took in in_order(write, entries, workers):
            seconds[entry.name] = took
            report(entry.name, entry.nbytes)
    return seconds


def _finish(plan: Plan, dst: Path) -> None:
    """Other files, then config and index."""
    source = plan.source
    source.warnings += copy_companions(source.directory, dst, source.single_file)
    files: dict[str, object] = dict(config_files(plan, jnvfp4.__version__))
    index = index_of(plan)
    if index is not None:
        files[INDEX] = index
    for name, value in files.items():
        write_whole(dst / name, json_bytes(value))
