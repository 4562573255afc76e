"""Verifies a converted checkpoint: decodes every weight and compares it with the source."""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ._convert.options import ExpertLayout
from ._convert.views import decoded, has_blocks_along_n, per_expert, stacked
from ._files.errors import CheckpointError, Exit, OptionError
from ._files.files import CHUNK_BYTES, Rows, slices
from ._files.safetensors import JSON, Planned
from ._files.source import Source, Warn, open_source
from ._layouts.base import Peer
from ._layouts.fp8 import Fp8Weight
from ._layouts.loaded import Loaded, loaded_otherwise
from ._layouts.loaders import TITLES, LoaderName
from ._layouts.names import WEIGHT, is_kv_scale, module_of
from ._layouts.stored import Stored, Weight, layout_of, open_stored
from ._layouts.survey import Survey, survey

LARGEST_SCALE = 0x7E  # the E4M3 bits of 448
SUSPICIOUS = 0.15  # a relative error; Gaussian weights have about 0.094


@dataclass(frozen=True)
class ErrorStats:
    """Measures how far a quantized weight is from its source.

    Attributes:
      relative_error: |w - d| / |w|, Frobenius norms; 0 for a zero weight.
      snr_db: -20 log10(relative_error), or None if it is infinite.
      max_abs_error: the largest |w - d|.
      cosine: the cosine of the angle between them, or None for a zero weight.
      largest_code_share: the share of codes 6 and -6, of FP8 448 and -448.
      zero_code_share: the share of codes 0 and -0.
      zero_scale_share, saturated_scale_share: the shares of block scales 0 and 448; 0 for FP8, which has none.
    """

    relative_error: float
    snr_db: float | None
    max_abs_error: float
    cosine: float | None
    largest_code_share: float
    zero_code_share: float
    zero_scale_share: float
    saturated_scale_share: float


@dataclass
class _Sums:
    """Adds up, in float64, what measures the difference between a weight and its decoded values."""

    difference: float = 0.0
    square: float = 0.0
    decoded: float = 0.0
    product: float = 0.0
    worst: float = 0.0

    def add(self, weight: np.ndarray, values: np.ndarray) -> None:
        a, b = weight.astype(np.float64), values.astype(np.float64)
        self.difference += float(np.square(a - b).sum())
        self.square += float(np.square(a).sum())
        self.decoded += float(np.square(b).sum())
        self.product += float((a * b).sum())
        self.worst = max(self.worst, float(np.abs(a - b).max(initial=0)))

    def stats(self, *shares: float) -> ErrorStats:
        relative = math.sqrt(self.difference / self.square) if self.square else 0.0
        norms = math.sqrt(self.square) * math.sqrt(self.decoded)
        snr = -20 * math.log10(relative) if relative else None
        return ErrorStats(relative, snr, self.worst, self.product / norms if norms else None, *shares)


def error_stats(w: np.ndarray | Rows, weight: Weight, max_bytes: int = CHUNK_BYTES) -> ErrorStats:
    """Compares a weight with its quantized form, over a slice of rows at a time."""
    sums = _Sums()
    pairs, scales = np.zeros(256, np.int64), np.zeros(256, np.int64)  # how often each byte occurs
    for rows in slices(w.shape, 8, max_bytes):
        sums.add(w[rows], weight.values(rows))
        pairs += np.bincount(weight.codes[rows].reshape(-1), minlength=256)
        scales += np.bincount(weight.scales[rows].reshape(-1), minlength=256)
    by_code = pairs.reshape(16, 16)  # high and low code of a byte
    codes = by_code.sum(0) + by_code.sum(1)
    return sums.stats(
        float(codes[7] + codes[15]) / math.prod(w.shape),
        float(codes[0] + codes[8]) / math.prod(w.shape),
        float(scales[0]) / weight.scales.size,
        float(scales[LARGEST_SCALE]) / weight.scales.size,
    )


def fp8_error_stats(w: np.ndarray | Rows, weight: Fp8Weight) -> ErrorStats:
    """Compares a weight with its FP8 form, over a slice of rows at a time."""
    sums, codes = _Sums(), np.zeros(256, np.int64)
    for rows in slices(w.shape, 8, CHUNK_BYTES):
        sums.add(w[rows], weight.values(rows))
        codes += np.bincount(weight.source.read(weight.entry.name, rows).view(np.uint8).reshape(-1), minlength=256)
    largest, zero = (float(codes[c] + codes[c | 0x80]) / math.prod(w.shape) for c in (LARGEST_SCALE, 0))
    return sums.stats(largest, zero, 0.0, 0.0)


@dataclass(frozen=True)
class Record:
    """Describes one tensor of a verified checkpoint.

    Attributes:
      name: the tensor's name in the source.
      shape: its shape in the source.
      dtype: its safetensors dtype in the source; of an unquantized tensor in the output.
      global_scale: the stored global scale, if it is one number.
      error: errors of a quantized weight, also of FP8; None for an unquantized tensor.
      sha256: digest of the stored tensors; empty if they were not read.
      peer_differs: how many elements compressed-tensors decodes to the next bfloat16 number; None if it was not asked.
      error_as_loaded: the relative error of the weight that the loader multiplies by, from the stored weight if only
        scales were read; None if no loader was named, or if it does not load the weight.
      reason: why a loader reads the tensor otherwise than it is stored; empty if it does not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    global_scale: float | None
    error: ErrorStats | None
    sha256: str
    peer_differs: int | None = None
    error_as_loaded: float | None = None
    reason: str = ""


class VerificationError(CheckpointError):
    """Reports what a verification found; the first finding is in the message.

    Attributes:
      failures: all findings.
      records: the tensors that could be compared.
    """

    def __init__(self, failures: list[CheckpointError], records: list[Record]):
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        super().__init__(f"{failures[0]}{more}", code=Exit.VERIFICATION)
        self.failures, self.records = failures, records


def verify_checkpoint(
    source: Path | str,
    output: Path | str,
    max_relative_error: float = 0.2,
    expert_layout: ExpertLayout = "auto",
    *,
    loader: LoaderName | None = None,
    scales_only: bool = False,
    warn: Warn = warnings.warn,
) -> list[Record]:
    """Decodes every weight of a converted checkpoint and compares it with the source; other tensors must be unchanged.

    Args:
      source: the checkpoint that was converted.
      output: the converted checkpoint.
      max_relative_error: the largest |w - d| / |w| of a weight.
      expert_layout: as in ``ConvertOptions``, needed if experts were taken out of one tensor.
      loader: whose reading of scales and configs is compared with the source too, see ``Record.error_as_loaded``.
      scales_only: reads no codes and nothing of the source but headers: only what the loader changes is found.
      warn: called with a sentence about each file that may be no part of a checkpoint.

    Returns:
      a record of every tensor, or of every NVFP4 weight if ``scales_only``, in the order of their names.

    Raises:
      VerificationError: a tensor is missing or changed, an error is larger than ``max_relative_error``, members of a
        group have different global scales, or compressed-tensors decodes other values (asked if it is installed and
        the layout is its own); or the loader does not load a weight, or with such an error, or (with a loader) a
        weight is damaged or in another form.
      CheckpointError: one of the checkpoints is damaged, or the loader does not read the layout.
    """
    if not max_relative_error >= 0:
        raise OptionError({"max_relative_error": f"is {max_relative_error}"}, "a number, 0 or more")
    if loader not in (None, *TITLES):
        raise OptionError({"loader": f"is {loader!r}"}, " or ".join(TITLES))
    if scales_only and loader is None:
        raise OptionError({"scales_only": "is used without loader"}, "both")
    opened, written = open_source(Path(source)), open_source(Path(output))
    for s in (opened, written):
        s.warn_of_files(warn)
    if layout_of(opened) is not None and layout_of(written) is None:
        hint = f"the source comes first: swap it with {str(source)!r}, which is quantized"
        raise CheckpointError("is not quantized", "the converted checkpoint", file=Path(output), hint=hint)
    stored = open_stored(Path(output), all_fit=loader is None)
    original = _as_converted(opened, stored, expert_layout)
    failures: list[CheckpointError] = []
    records: list[Record] = []
    peer = stored.layout.peer((stored.source.config or {}).get("quantization_config"))
    otherwise = {} if loader is None else _loaded_otherwise(survey(written), stored, loader)
    checks: list[Callable[[], Record | None]] = [partial(_check_groups, stored)]
    kept = [n for n in stored.kept if n in original.places or not is_kv_scale(n)]  # a source has no scales of a cache
    checks += [partial(_check_kept, original, stored, name) for name in kept]
    checks += [partial(_check_fp8, original, stored, module) for module in stored.fp8]
    checks += [partial(_check_quantized, original, stored, module, peer, expert_layout) for module in stored.modules]
    if scales_only:
        checks = [checks[0], *(partial(_check_headers, original, stored, module) for module in stored.modules)]
    for check in checks:
        try:
            if record := check():
                records.append(record)
        except CheckpointError as e:
            failures.append(e)
    if missing := set(original.places) - set(stored.names):
        failures.append(_failure(min(missing), "is missing", "", stored))
    records.sort(key=lambda r: r.name)
    if loader is not None:
        by_name = {_name(stored, m): m for m in otherwise}
        records = [_as_loaded(r, otherwise.get(by_name.get(r.name, "")), original, stored) for r in records]
        known = {r.name for r in records}
        records += [_unread(n, otherwise[m], original, stored) for n, m in by_name.items() if n not in known]
    for r in records:
        as_stored = None if r.error is None else r.error.relative_error
        for error, how in ((as_stored, ""), (r.error_as_loaded if r.reason else None, f", as {loader} loads it")):
            if error is not None and not error <= max_relative_error:
                observed = f"relative error is {error:.4g}{how}{r.reason and how and f': it {r.reason}'}"
                failures.append(_failure(r.name, observed, f"at most {max_relative_error:g}", stored))
        if r.reason and r.error_as_loaded is None:
            failures.append(_failure(r.name, f"{r.reason} (as {loader} loads it)", "", stored))
    if failures:
        raise VerificationError(failures, records)
    return records


def _as_converted(source: Source, stored: Stored, expert_layout: ExpertLayout) -> Source:
    """Infers the form in which the source was converted from the names in the output, and shows the source so."""
    weights = (*stored.modules, *stored.unfit, *stored.fp8)
    names = {*map(stored.name, weights), *(n for n in stored.kept if not is_kv_scale(n))}
    source = decoded(decoded(source, "fp8"), "mxfp4")
    if not names <= set(source.places):
        source = per_expert(source, expert_layout)
    if not names <= set(source.places):
        source = stacked(source)
    return source


def _failure(name: str, observed: str, expected: str, stored: Stored) -> CheckpointError:
    return CheckpointError(observed, expected, file=stored.source.directory, tensor=name, code=Exit.VERIFICATION)


# ---------------------------------------------------------------- checks of one tensor or group
def _original(source: Source, stored: Stored, name: str) -> Planned:
    if name not in source.places:
        raise _failure(name, "is not in the source", "", stored)
    return source.entry(name)


def _check_quantized(
    source: Source, stored: Stored, module: str, peer: Peer | None, expert_layout: ExpertLayout
) -> Record:
    name = stored.name(module)
    entry, weight = _original(source, stored, name), stored.weight(module)
    try:
        w = _swapped(source.array(name)) if weight.kn else source.array(name)
        if w.shape != weight.shape:
            raise _failure(name, f"has shape {list(weight.shape)}", f"{list(w.shape)}", stored)
        if expert_layout == "auto" and len(w.shape) == 3 and has_blocks_along_n(module, w.shape, source.config):
            raise _failure(name, "has blocks along N", "K", stored)
        if not np.isfinite(weight.decode).all() or not (weight.decode > 0).all():
            observed = f"has a global scale of {weight.global_scale}"
            raise _failure(name, observed, "a finite one above 0", stored)
        if weight.scales.max(initial=0) > LARGEST_SCALE:
            raise _failure(name, "has block scales that are negative or NaN", "0 to 448", stored)
        with np.errstate(invalid="ignore"):  # decoded values may be infinite
            error = error_stats(w, weight)
        return Record(
            name,
            entry.shape,
            entry.tag,
            float(weight.global_scale.reshape(-1)[0]) if weight.global_scale.size == 1 else None,
            error,
            _sha256(weight.codes, weight.scales, weight.global_scale),
            compare_with_peer(peer(weight.codes, weight.scales, weight.global_scale), weight, stored) if peer else None,
        )
    finally:
        source.release(name)
        stored.release(module)


def _swapped(x: np.ndarray | Rows) -> Rows:
    """Shows a stack with its last two axes swapped."""
    e, k, n = x.shape
    return Rows((e, n, k), x.dtype, lambda experts: x[experts].transpose(0, 2, 1))


def _check_fp8(source: Source, stored: Stored, module: str) -> Record:
    name, weight = stored.name(module), stored.fp8[module]
    entry, w = _original(source, stored, name), source.rows(name)
    if w.shape != weight.entry.shape:
        raise _failure(name, f"has shape {list(weight.entry.shape)}", f"{list(w.shape)}", stored)
    digest = _sha256(*(weight.source.array(e.name) for e in (weight.entry, weight.scale)))
    return Record(name, entry.shape, entry.tag, None, fp8_error_stats(w, weight), digest)


def _check_kept(source: Source, stored: Stored, name: str) -> Record:
    entry, other = stored.source.entry(name), _original(source, stored, name)
    if (entry.tag, entry.shape) != (other.tag, other.shape):
        raise _failure(name, f"is {entry.tag} {list(entry.shape)}", f"{other.tag} {list(other.shape)}", stored)
    digest = _sha256(stored.source.array(name))
    if digest != _sha256(source.array(name)):
        raise _failure(name, "has other bytes than in the source", "the same", stored)
    source.release(name)
    stored.source.release(name)
    return Record(name, entry.shape, entry.tag, None, None, digest)


def _check_groups(stored: Stored) -> None:
    """Raises if modules that loaders fuse have different global scales."""
    for group in stored.fused:
        scales = {m: stored.weight(m).global_scale.tobytes() for m in group.members}
        first = group.members[0]
        # Loaders keep one number for a group; amaxes of rows, which only layout te has, are no such number.
        other = next((m for m in group.members if scales[m] != scales[first] and len(scales[m]) == 4), None)
        if other is not None:
            observed, name = f"has another global scale than {stored.name(first)!r}", stored.name(other)
            raise CheckpointError(observed, "one in a group that loaders fuse", tensor=name, code=Exit.VERIFICATION)


def _check_headers(source: Source, stored: Stored, module: str) -> Record:
    name, weight = stored.name(module), stored.weight(module)
    entry = _original(source, stored, name)
    shape = (*entry.shape[:-2], *entry.shape[:-3:-1]) if weight.kn else entry.shape
    if shape != weight.shape:
        raise _failure(name, f"has shape {list(weight.shape)}", f"{list(shape)}", stored)
    return Record(name, entry.shape, entry.tag, None, None, "")


# ---------------------------------------------------------------- what a loader reads
def _loaded_otherwise(s: Survey, stored: Stored, loader: LoaderName) -> dict[str, Loaded]:
    """Gives the modules that a loader reads otherwise than they are stored, and those that nobody reads."""
    otherwise = loaded_otherwise(s, loader)
    for module, error in stored.unfit.items():
        if module not in s.unequal_globals:
            part, what = str(error.tensor).removeprefix(module)[1:], str(error).partition("\n")[0].partition("': ")[2]
            otherwise[module] = Loaded(f"does not fit: {part} {what}")
    return otherwise


def _as_loaded(record: Record, found: Loaded | None, source: Source, stored: Stored) -> Record:
    """Adds the error of the weight that a loader multiplies by."""
    own = record.error.relative_error if record.error else None if record.sha256 else 0.0
    if found is None or found.global_scale is None or (found.in_rows and record.error is None):
        return replace(record, error_as_loaded=None if found else own, reason=found.reason if found else "")
    module = module_of(record.name) if record.name not in stored.stacks else record.name
    weight = stored.weight(module)
    taken = replace(weight, global_scale=found.global_scale)
    if record.error is None:
        with np.errstate(divide="ignore", invalid="ignore"):
            own = float(np.abs(taken.decode.astype(np.float64) / weight.decode - 1).max())
        return replace(record, error_as_loaded=own, reason=found.reason)
    if found.in_rows:
        views, parts = stored.source.views, stored.parts(module)
        codes, scales = (views[n].source.read(n) for n in (parts.codes, parts.scales))
        taken = replace(taken, codes=codes, scales=scales.view(np.uint8))
    w = _swapped(source.array(record.name)) if weight.kn else source.array(record.name)
    error = error_stats(w, taken).relative_error
    source.release(record.name)
    stored.release(module)
    return replace(record, error_as_loaded=error, reason=found.reason)


def _name(stored: Stored, module: str) -> str:
    quantized = module in stored.modules or module in stored.unfit
    name = stored.name(module) if quantized else module + WEIGHT
    return name if quantized or name in stored.source.places else module


def _unread(name: str, found: Loaded, source: Source, stored: Stored) -> Record:
    entries = [s.entry(name) for s in (source, stored.source) if name in s.places]
    shape, tag = (entries[0].shape, entries[0].tag) if entries else ((), "")
    return Record(name, shape, tag, None, None, "", reason=found.reason)


def _sha256(*arrays: np.ndarray) -> str:
    """Computes one digest of some arrays."""
    digest = hashlib.sha256()
    for a in arrays:
        for rows in slices(a.shape, a.dtype.itemsize, CHUNK_BYTES) if a.shape else (...,):
            digest.update(np.asarray(a[rows], order="C").tobytes())
    return digest.hexdigest()


def compare_with_peer(theirs: np.ndarray, weight: Weight, stored: Stored) -> int:
    """Counts the elements that another reader rounds to the next number, and raises if it decodes anything else."""
    count = 0
    for rows in slices(weight.shape, 4, CHUNK_BYTES):
        ours = weight.values(rows).astype(theirs.dtype).view(np.int16).astype(np.int32)
        steps = np.abs(ours - theirs[rows].view(np.int16))
        if steps.max(initial=0) > 1:
            observed = f"{stored.layout.name} decodes {int((steps > 1).sum())} other values"
            raise _failure(weight.name, observed, "the same", stored)
        count += int(np.count_nonzero(steps))
    return count


# ---------------------------------------------------------------- JSON
# The keys in JSON files of what ErrorStats has, in the same order.
_KEYS = ("rel_err", "snr_db", "max_abs_err", "cosine", "saturated", "zero_codes", "zero_scales", "largest_scales")


def as_json(records: list[Record]) -> list[JSON]:
    """Gives records as JSON values, with null for infinity and NaN."""
    out = []
    for r in records:
        t: JSON = {"name": r.name, "shape": list(r.shape), "dtype": r.dtype, "global": r.global_scale}
        if r.error:
            values = (v if v is None or math.isfinite(v) else None for v in vars(r.error).values())
            t |= dict(zip(_KEYS, values, strict=True))
        t["sha256"] = r.sha256
        if r.reason or r.error_as_loaded is not None:
            t |= {"rel_err_as_loaded": r.error_as_loaded, "reason": r.reason or None}
        if r.peer_differs is not None:
            t["differs_in_compressed_tensors"] = r.peer_differs
        out.append(t)
    return out
