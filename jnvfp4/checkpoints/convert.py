"""Converts a Hugging Face checkpoint to NVFP4."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from .._version import __version__
from ._convert.encode import Implementation
from ._convert.options import ConvertOptions
from ._convert.plan import Plan, make_plan, plan_without
from ._convert.resume import ResumeRecord
from ._convert.shards import OnProgress, ShardWriter, find_amaxes
from ._files.companions import check_companions, copy_companions, remove_partial_copies
from ._files.errors import CheckpointError, Exit, io_error
from ._files.files import RECORD, check_free_space, checked_path, locked, remove_temporaries, unfinished, write_json
from ._files.safetensors import VERSION, File
from ._files.source import CONFIG, HF_QUANT, INDEXES, SHARD, open_source
from ._layouts.loaded import loaded_otherwise
from ._layouts.loaders import TITLES, VERSIONS
from ._layouts.survey import survey

_RECIPE = "recipe"  # in the metadata of converted shards alone
TINY_AMAX = 7.9e-36  # below it 2688 / amax overflows float32


@dataclass(frozen=True)
class Result:
    """Describes a finished conversion, or one that was only checked (``dry_run``).

    Attributes:
      plan: what was decided.
      amaxes: the amax of every quantized module, which its group shares.
      device: the device that quantized.
      seconds: the time per written tensor; resumed shards have none.
      bytes_before, bytes_after: the bytes of all tensors in source and output.
      inexact_blocks: for each module from MXFP4, how many blocks of 16 have other values than in the source.
      by_gptq: the modules that are rounded by hessians, if only of some of their experts.
      warnings: sentences about findings that are no errors.
    """

    plan: Plan
    amaxes: Mapping[str, np.ndarray]
    device: jax.Device
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    inexact_blocks: Mapping[str, int] = field(default_factory=dict)
    by_gptq: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def convert_checkpoint(
    source: Path | str,
    output: Path | str,
    options: ConvertOptions | None = None,
    *,
    device: jax.Device | None = None,
    implementation: Implementation = None,
    workers: int = 2,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress = lambda name, nbytes: None,
) -> Result:
    """Converts a Hugging Face checkpoint to NVFP4.

    Every header, rule and loader is checked before anything is written. Files appear complete, and config and index are
    written last, so that an interrupted output never looks finished.

    Args:
      source: a directory of safetensors files, or one such file.
      output: a new or empty directory.
      options: which weights are quantized, how, and in which layout they are stored.
      device: the device that quantizes, by default the first CPU device. The bytes are the same on every device,
        except of weights that are rounded by GPTQ.
      implementation: as for ``jnvfp4.quantize``.
      workers: how many tensors are worked on at once. The bytes are the same with any number.
      overwrite: whether ``output`` may have files. Its config, its index and the shards that a conversion wrote are
        removed, which a warning says; a shard of anything else is an error.
      resume: whether finished shards of an interrupted conversion in ``output`` are used.
      dry_run: whether only the checks are made, those of weights and hessians too, and nothing is written.
      on_progress: called with a tensor's name and its bytes when it is written, or with a shard's if it is resumed.

    Raises:
      CheckpointError: the source is damaged, changes meanwhile or cannot be converted, loaders would disagree, or the
        disk is full.
    """
    output = checked_path(output)
    plan = make_plan(open_source(Path(source)), options or ConvertOptions())
    record = ResumeRecord(output, plan.source, plan.options)
    _check_output(plan, output, overwrite, resume, record)
    if resume:
        record.resume()
    _check_space(plan, output, record)
    check_companions(plan.source)
    amaxes, not_finite, inexact = find_amaxes(plan, workers)
    device = jax.local_devices(backend="cpu")[0] if device is None else device
    unseen = {} if plan.hessians is None else plan.hessians.check(device)
    plan.check_unchanged()
    if not_finite:
        plan = plan_without(plan, not_finite)
        _check_space(plan, output, record)
    found = plan.warnings + _of_unseen(plan, unseen) + _tiny_amaxes(amaxes)
    result = Result(plan, amaxes, device, {}, plan.source.nbytes, plan.nbytes, inexact, _by_gptq(plan, unseen), found)
    if dry_run:
        return result
    writer = ShardWriter(plan, amaxes, _metadata(plan), device, implementation, workers, on_progress)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output):
            _check_output(plan, output, overwrite, resume, record)  # again: another conversion may have finished
            removed = _remove_leftovers(plan, output, resume)
            with unfinished(output, record.state, lambda: record.shards):
                seconds = _write_shards(writer, output, record)
                not_copied = copy_companions(plan.source, output)
                plan.check_unchanged()
                for name, value in plan.files.items():
                    write_json(output / name, value)
    except OSError as e:
        raise io_error(e, output, "finished shards are kept; --resume goes on" if record.is_kept else "") from e
    return replace(result, seconds=seconds, warnings=found + removed + not_copied + _read_otherwise(output))


# ---------------------------------------------------------------- checks
def _check_output(plan: Plan, output: Path, overwrite: bool, resume: bool, record: ResumeRecord) -> None:
    def wrong(observed: str, expected: str, hint: str = "", file: Path = output) -> CheckpointError:
        return CheckpointError(observed, expected, file=file, code=Exit.USAGE, hint=hint)

    if not output.exists():
        return
    if output.resolve() == plan.source.directory.resolve():
        raise wrong("is the source", "another directory")
    if not output.is_dir():
        raise wrong("is a file", "a directory")
    foreign = next((path for path in sorted(output.glob(f"*{SHARD}")) if not _is_converted(path)), None)
    if foreign is not None and not resume:
        hint = "--overwrite removes no other: move it away, or use another directory"
        raise wrong("was not written by a conversion", "only shards that were", hint, foreign)
    if any(output.iterdir()) and not (overwrite or resume):
        hint = f"{'--resume goes on, ' * record.fits()}--overwrite starts again"
        raise wrong("is not empty", "an empty or new directory", hint)


def _is_converted(path: Path) -> bool:
    """Tells whether a conversion wrote a shard, which its metadata says."""
    try:
        return {VERSION, _RECIPE} <= File(path).metadata.keys()
    except CheckpointError:
        return False


def _check_space(plan: Plan, output: Path, record: ResumeRecord) -> None:
    """Raises if the disk has no room for the shards that are not finished."""
    sizes = [sum(item.nbytes for item in items) for name, items in plan.shards.items() if name not in record.shards]
    check_free_space(output, sizes)


def _of_unseen(plan: Plan, unseen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Warns of hessians that have seen nothing."""
    if not (named := [matrix for of_tensor in unseen.values() for matrix in of_tensor]):
        return ()
    text = f"{len(named)} hessians are 0, as of inputs that were never seen; weights are quantized without them"
    return (f"{plan.options.hessians}: {text}: {'; '.join(named)}",)


def _by_gptq(plan: Plan, unseen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    def has_seen(module: str) -> bool:
        shape = plan.weights[module].choice.entry.shape
        return len(unseen[plan.with_hessian[module]]) < (shape[0] if plan.weights[module].choice.stacked else 1)

    return tuple(filter(has_seen, plan.with_hessian))


def _tiny_amaxes(amaxes: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(
        f"{module}: amax {float(amax.max()):.3g} is so small that its S_enc is the largest float32"
        for module, amax in amaxes.items()
        if 0 < amax.max() < TINY_AMAX
    )


def _read_otherwise(output: Path) -> tuple[str, ...]:
    """Warns of the weights that loaders of the output read otherwise than they are stored."""
    s = survey(open_source(output))
    warnings = []
    for name, title in TITLES.items():
        if title in s.layout.loaders and (found := loaded_otherwise(s, name)):
            module, first = next(iter(found.items()))
            what = f"{title} {VERSIONS[name]} reads {len(found)} modules otherwise than they are stored"
            warnings.append(f"{what}: {module} {first.reason}")
    return tuple(warnings)


# ---------------------------------------------------------------- files
def _remove_leftovers(plan: Plan, output: Path, resume: bool) -> tuple[str, ...]:
    """Removes an older output, and the temporary files of killed runs; gives a warning of what an output has lost."""
    remove_partial_copies(plan.source, output)
    others = (CONFIG, *INDEXES, HF_QUANT)
    remove_temporaries(output, {*plan.shards, *others, RECORD})
    shards = [] if resume else sorted(output.glob(f"*{SHARD}"))
    older = [path for path in (*(output / name for name in others), *shards) if os.path.lexists(path)]
    for path in older:
        path.unlink()
    return (f"{output}: {', '.join(path.name for path in older)} of an older checkpoint removed",) if older else ()


def _write_shards(writer: ShardWriter, output: Path, record: ResumeRecord) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, items in writer.plan.shards.items():
        path = output / name
        if record.is_finished(path):
            writer.on_progress(name, sum(item.choice.entry.nbytes for item in items))
            continue
        seconds |= writer.write(path, items)
        record.add(path)
    return seconds


def _metadata(plan: Plan) -> dict[str, str]:
    tensors = "".join(f"{e.name} {e.tag} {e.shape}\n" for e in plan.source.entries())
    source = hashlib.sha256(tensors.encode()).hexdigest()
    return {"format": "pt", VERSION: __version__, "source": source, _RECIPE: plan.options.recipe}
