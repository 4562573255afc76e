"""What quantization did to every tensor: a converted checkpoint decoded again and compared with its source."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jnvfp4.convert.encode import CHUNK_BYTES, slices
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.names import groups_of
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.peer import Decoder, peer_decoder
from jnvfp4.convert.policy import FLOATS, prepared
from jnvfp4.convert.source import Source, open_source
from jnvfp4.convert.stored import Stored, Weight, open_stored
from jnvfp4.convert.views import FP8_SCALE

LARGEST_SCALE = 0x7E  # 448
SUSPICIOUS = 0.15  # Gaussian weights come out at about 0.094


@dataclass(frozen=True)
class Error:
    """How far a quantized weight is from its source.

    Attributes:
      rel_err: |w - d| / |w|, Frobenius norms; 0 for a zero weight.
      snr_db: -20 log10(rel_err), or None where it is infinite.
      max_abs_err: the largest |w - d|.
      cosine: of the angle between them, or None for a zero weight.
      saturated: share of codes +-6.
      zero_codes: share of codes 0 and -0.
      zero_scales, largest_scales: shares of block scales 0 and 448.
    """

    rel_err: float
    snr_db: float | None
    max_abs_err: float
    cosine: float | None
    saturated: float
    zero_codes: float
    zero_scales: float
    largest_scales: float


def error_of(w: np.ndarray, weight: Weight, most_bytes: int = CHUNK_BYTES) -> Error:
    """Compares a weight [N, K] with what it was quantized to; sums in float64, a slice of rows at a time."""
    difference = square = decoded = product = worst = 0.0
    pairs, scales = np.zeros(256, np.int64), np.zeros(256, np.int64)  # how often each byte stands there
    for rows in slices(w.shape, 8, most_bytes):
        a, b = w[rows].astype(np.float64), weight.values(rows).astype(np.float64)
        difference += float(np.square(a - b).sum())
        square, decoded, product = (
            square + float(np.square(a).sum()),
            decoded + float(np.square(b).sum()),
            product + float((a * b).sum()),
        )
        worst = max(worst, float(np.abs(a - b).max(initial=0)))
        pairs += np.bincount(weight.codes[rows].reshape(-1), minlength=256)
        scales += np.bincount(weight.scales[rows].reshape(-1), minlength=256)
    both = pairs.reshape(16, 16)
    codes = both.sum(0) + both.sum(1)
    rel = math.sqrt(difference / square) if square else 0.0
    norms = math.sqrt(square) * math.sqrt(decoded)
    return Error(
        rel_err=rel,
        snr_db=-20 * math.log10(rel) if rel else None,
        max_abs_err=worst,
        cosine=product / norms if norms else None,
        saturated=float(codes[7] + codes[15]) / w.size,
        zero_codes=float(codes[0] + codes[8]) / w.size,
        zero_scales=float(scales[0]) / weight.scales.size,
        largest_scales=float(scales[0x7E]) / weight.scales.size,
    )


@dataclass(frozen=True)
class Record:
    """One tensor of the report.

    Attributes:
      stored: the global, where it is one number.
      error: None for a tensor that was kept.
      sha256: of what was written.
      peer_differs: how many elements compressed-tensors decodes to the next bfloat16 number; None where it did not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: float | None
    error: Error | None
    sha256: str
    peer_differs: int | None = None


def _sha256(*arrays: np.ndarray, dtype: np.dtype | None = None) -> str:
    """Of arrays one after the other, as if they were of another dtype."""
    digest = hashlib.sha256()
    for a in arrays:
        for rows in slices(a.shape, a.dtype.itemsize, CHUNK_BYTES) if a.shape else (...,):
            part = a[rows] if dtype is None else a[rows].astype(dtype, copy=False)
            digest.update(np.asarray(part, order="C").tobytes())
    return digest.hexdigest()


def verify(
    src: Path | str, out: Path | str, max_rel_error: float = 0.2, expert_layout: Literal["auto", "nk", "kn"] = "auto"
) -> list[Record]:
    """Decodes every weight of `out` and compares it with `src`; kept tensors must be the same bytes.

    Args:
      src: what was converted.
      out: what came of it.
      max_rel_error: what a weight may be off by, |w - d| / |w|.
      expert_layout: as in `ConvertOptions`, where experts were taken out of one tensor.

    Raises:
      VerificationError: exit code 5 where a tensor is missing or another one, an error is larger than `max_rel_error`,
        members of a group have different globals, or compressed-tensors, where it is installed and the layout is its
        own, decodes something else.
    """
    stored = open_stored(Path(out))
    source = _seen_as(open_source(Path(src)), stored, expert_layout)
    failures: list[CheckpointError] = []
    records: list[Record] = []

    def note(check: Callable[[], Record | None]) -> None:
        try:
            if record := check():
                records.append(record)
        except CheckpointError as e:
            failures.append(e)

    note(partial(_check_groups, stored))
    decode = peer_decoder(stored)
    for name in stored.others:
        note(partial(_kept, source, stored, name))
    for module in stored.modules:
        note(partial(_quantized, source, stored, module, decode))
    missing = set(source.places) - {*(stored.name(m) for m in stored.modules), *stored.others}
    if missing:
        failures.append(_wrong(min(missing), "is missing", "", stored))
    records.sort(key=lambda r: r.name)
    for r in records:
        if r.error and not r.error.rel_err <= max_rel_error:
            observed = f"relative error is {r.error.rel_err:.4g}"
            failures.append(_wrong(r.name, observed, f"at most {max_rel_error:g}", stored))
    if failures:
        raise VerificationError(failures, records)
    return records


class VerificationError(CheckpointError):
    """What verification found, the first of it in the message; `records` are of all tensors that could be compared."""

    def __init__(self, failures: list[CheckpointError], records: list[Record]):
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        super().__init__(f"{failures[0]}{more}", code=Exit.VERIFICATION)
        self.failures, self.records = failures, records


def _quantized(source: Source, stored: Stored, module: str, decode: Decoder | None) -> Record:
    name = stored.name(module)
    if name not in source.places:
        raise _wrong(name, "is not in the source", "", stored)
    entry, weight = source.entry(name), stored.weight(module)
    try:
        w = source.array(name).transpose(0, 2, 1) if weight.kn else source.array(name)
        if w.shape != weight.shape:
            raise _wrong(name, f"has shape {list(weight.shape)}", f"{list(w.shape)}", stored)
        if not np.isfinite(weight.decode).all() or not (weight.decode > 0).all():
            raise _wrong(name, f"has a global of {weight.stored}", "one that is finite and above 0", stored)
        if weight.scales.max(initial=0) > LARGEST_SCALE:
            raise _wrong(name, "has block scales that are negative or no numbers", "0 to 448", stored)
        with np.errstate(invalid="ignore"):  # values that are infinite
            error = error_of(w, weight)
        record = Record(
            name, entry.shape, entry.tag,
            float(weight.stored.reshape(-1)[0]) if weight.stored.size == 1 else None,
            error, _sha256(weight.codes, weight.scales, weight.stored),
            _against(decode(module), weight, stored) if decode else None,
        )  # fmt: skip
    finally:
        source.release(name)
        stored.release(module)
    return record


def _against(theirs: np.ndarray, weight: Weight, stored: Stored) -> int:
    """How many elements another reader has rounded the other way; more than that is an error."""
    count = 0
    for rows in slices(weight.shape, 4, CHUNK_BYTES):
        own = weight.values(rows).astype(theirs.dtype).view(np.int16).astype(np.int32)
        apart = np.abs(own - theirs[rows].view(np.int16))
        if apart.max(initial=0) > 1:
            observed = f"compressed-tensors decodes {int((apart > 1).sum())} other values"
            raise _wrong(weight.name, observed, "the same", stored)
        count += int(np.count_nonzero(apart))
    return count


def _seen_as(source: Source, stored: Stored, expert_layout: Literal["auto", "nk", "kn"]) -> Source:
    """The source as it was converted, which the names of the output tell."""
    names = {*(stored.name(m) for m in stored.modules), *stored.others}
    fp8 = any(n.endswith(FP8_SCALE) for n in source.places)
    if fp8:
        source = prepared(source, ConvertOptions(dequantize_input="fp8-block"))
    if not names <= set(source.places):
        source = prepared(source, ConvertOptions(experts="per-expert", expert_layout=expert_layout))
    if not names <= set(source.places):
        source = prepared(source, ConvertOptions(experts="stacked"))
    return source


def _wrong(name: str, observed: str, expected: str, stored: Stored) -> CheckpointError:
    return CheckpointError(observed, expected, file=stored.source.directory, tensor=name, code=Exit.VERIFICATION)


def _kept(source: Source, stored: Stored, name: str) -> Record:
    entry = stored.source.entry(name)
    if name not in source.places:
        raise _wrong(name, "is not in the source", "", stored)
    other = source.entry(name)
    narrowed = entry.tag == "BF16" and other.tag in FLOATS
    if entry.shape != other.shape or (entry.tag != other.tag and not narrowed):
        raise _wrong(name, f"is {entry.tag} {list(entry.shape)}", f"{other.tag} {list(other.shape)}", stored)
    digest = _sha256(stored.source.array(name))
    if digest != _sha256(source.array(name), dtype=entry.dtype):
        raise _wrong(name, "has other bytes than in the source", "the same", stored)
    source.release(name)
    stored.source.release(name)
    return Record(name, entry.shape, entry.tag, None, None, digest)


def _check_groups(stored: Stored) -> None:
    share_qkv = not any(f.metadata.get("share_qkv") == "false" for f in stored.source.files.values())
    for group in groups_of(stored.modules, share_qkv=share_qkv):
        globals_ = {m: stored.weight(m).stored.tobytes() for m in group.members}
        first = group.members[0]
        other = next((m for m in group.members if globals_[m] != globals_[first] and len(globals_[m]) == 4), None)
        if other is not None:
            raise CheckpointError(
                f"has another global than {stored.name(first)!r}", "one in a group that loaders fuse",
                tensor=stored.name(other), code=Exit.VERIFICATION,
            )  # fmt: skip


def as_json(records: list[Record]) -> list[dict[str, Any]]:
    """Records as JSON values: no infinity, no NaN."""
    out = []
    for r in records:
        error = {k: (v if v is None or math.isfinite(v) else None) for k, v in vars(r.error).items()} if r.error else {}
        out.append(
            {
                "name": r.name,
                "shape": list(r.shape),
                "dtype": r.dtype,
                "global": r.stored,
                **error,
                "sha256": r.sha256,
                **({} if r.peer_differs is None else {"differs_in_compressed_tensors": r.peer_differs}),
            }
        )
    return out
