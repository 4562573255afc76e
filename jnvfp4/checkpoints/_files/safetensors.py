"""Reads and writes the safetensors format: checked headers, tensors without copies, files that appear complete.

The ``safetensors`` package cannot give F8_E4M3 to numpy and does not notice several kinds of damage that should be
found before a long conversion. The format is described at https://github.com/huggingface/safetensors.
"""

import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from .errors import CheckpointError, Exit, reading
from .files import replacing

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MAX_AXES = 32  # the limit of numpy 1
MAX_BYTES = 1 << 62  # of an array, whose size numpy keeps as a signed number of 64 bits
MAX_NESTING = 64  # of JSON values: Python's parser accepts deeper ones than its writer
JSON = dict[str, Any]  # an object of JSON: values are None, bool, int, float, str, and lists and dicts of these
METADATA = "__metadata__"
VERSION = "jnvfp4_version"  # in the metadata of every file that this library writes

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # of dtypes that share bytes: arrays of them are the bytes
DTYPES |= dict.fromkeys(BITS, np.dtype(np.uint8))
FLOATS = ("BF16", "F16", "F32")  # the dtypes of weights that are quantized without a cast


@dataclass(frozen=True)
class Planned:
    """Describes a tensor that is in a file, is computed from others, or will be written.

    ``kn`` says whether a stack of experts is [E, K, N], None if that is not known; ``mxfp4`` that it was in MXFP4.
    """

    name: str
    tag: str
    shape: tuple[int, ...]
    kn: bool | None = field(default=None, kw_only=True)
    mxfp4: bool = field(default=False, kw_only=True)

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tag]

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of an array of it: of bytes, where elements share them."""
        if self.tag not in BITS:
            return self.shape
        *rows, k = self.shape or (1,)
        whole = k * BITS[self.tag] % 8 == 0
        return (*rows, k * BITS[self.tag] // 8) if whole else (self.nbytes,)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS.get(self.tag, 8 * self.dtype.itemsize) // 8


@dataclass(frozen=True)
class Entry(Planned):
    """Describes a tensor of a file, whose bytes are [begin, end) of the file."""

    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


# ---------------------------------------------------------------- reading
def _header_text(file: BinaryIO, size: int, path: Path) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"is {size} bytes long", "a header length of 8 bytes", file=path)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"header length is {length}", f"at most {MAX_HEADER_BYTES}", file=path)
    if 8 + length > size:
        observed = f"header length is {length}, but the file is {size} bytes long"
        raise CheckpointError(observed, "a complete file", file=path)
    return file.read(length)


def _unique_keys(pairs: list[tuple[str, object]]) -> JSON:
    """Builds an object for ``json.loads(object_pairs_hook=)``, and raises ValueError if a key appears twice."""
    out: JSON = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r:.200} appears twice")
        out[key] = value
    return out


def _check_writable(value: object, levels: int = MAX_NESTING) -> None:
    """Raises ValueError for JSON that Python can read but not write again: lone surrogates, very deep nesting."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"is nested deeper than {MAX_NESTING}")
        for v in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_writable(v, levels - 1)


def json_object(text: bytes, path: Path, what: str = "") -> JSON:
    """Parses a JSON object in UTF-8, or raises an error about ``what``, a part of the file ``path``.

    Raises:
      CheckpointError: the text is no JSON object, a key appears twice, or Python could not write it again.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique_keys)
        _check_writable(value)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{what}is not valid JSON ({e})", file=path) from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}is a JSON {type(value).__name__}", "an object", file=path)
    return value


def _parse_header(header: JSON, start: int, size: int, path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{METADATA} is {metadata!r:.80}", "strings by name", file=path)
    entries = {name: _entry(name, value, start, size, path) for name, value in header.items()}
    end = start
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != end:
            kind = "overlaps the tensor before it" if entry.begin < end else "leaves a gap before it"
            observed = f"begins at byte {entry.begin} and {kind}"
            raise CheckpointError(observed, f"byte {end}", file=path, tensor=entry.name)
        end = entry.end
    if end != size:
        observed = f"has {size - end} bytes behind its tensors, which end at byte {end}"
        raise CheckpointError(observed, f"{end} bytes", file=path)
    return entries, metadata


def _is_count(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v < MAX_BYTES


def _entry(name: str, value: object, start: int, size: int, path: Path) -> Entry:
    def wrong(observed: str, expected: str) -> CheckpointError:
        return CheckpointError(observed, expected, file=path, tensor=name)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"is described by {value!r:.80}", "dtype, shape and data_offsets")
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        raise wrong(f"dtype is {tag!r:.40}", f"one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise wrong(f"shape is {shape!r:.80}", "integers that are not negative")
    if len(shape) > MAX_AXES:
        raise wrong(f"has {len(shape)} axes", f"at most {MAX_AXES}")
    if math.prod(n or 1 for n in shape) * DTYPES[tag].itemsize >= MAX_BYTES:  # numpy's rule, also for empty arrays
        raise wrong(f"shape is {shape!r:.80}", f"less than {MAX_BYTES} bytes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise wrong(f"data_offsets are {offsets!r:.80}", "two integers that are not negative")
    begin, end = (start + n for n in offsets)
    if not begin <= end <= size:
        raise wrong(f"is at bytes {begin} to {end} of a file of {size} bytes", "bytes within the file")
    entry = Entry(name, tag, tuple(shape), begin)
    if math.prod(shape) * BITS.get(tag, 8) % 8:
        raise wrong(f"is {tag} {shape}", "whole bytes")
    if end - begin != entry.nbytes:
        raise wrong(f"has {end - begin} bytes", f"{entry.nbytes}, as {tag} {shape} needs")
    return entry


class File:
    """Opens a safetensors file, and gives its tensors as views of the mapped file or as copies.

    If the file is truncated, the system kills a process that uses a view (SIGBUS); a copy is an error.

    Attributes:
      path: the file.
      entries: the tensors, by name.
      metadata: the metadata.
      state: size, time and a digest of the header, by which a file that has changed is known.

    Raises:
      CheckpointError: the file is truncated or its header is wrong; the message names file and tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        with reading(path):
            self._file = open(path, "rb")  # noqa: SIM115 (closed with this object)
            weakref.finalize(self, self._file.close)
            stat = os.fstat(self._file.fileno())
            text = _header_text(self._file, stat.st_size, path)
        header = json_object(text, path, "header ")
        self.entries, self.metadata = _parse_header(header, 8 + len(text), stat.st_size, path)
        self.state = (stat.st_size, stat.st_mtime_ns, hashlib.sha256(text).hexdigest())

    @cached_property
    def _map(self) -> mmap.mmap:
        try:
            with reading(self.path):
                return mmap.mmap(self._file.fileno(), self.state[0], access=mmap.ACCESS_READ)
        except ValueError as e:
            raise self._changed("truncated") from e

    def check_unchanged(self) -> None:
        """Raises if size, time or header are others than when the file was opened."""
        try:
            state = File(self.path).state
        except CheckpointError as e:
            raise self._changed(str(e)) from e
        if state != self.state:
            what = ("size", "time of change", "header")
            raise self._changed(f"another {next(w for w, a, b in zip(what, state, self.state, strict=True) if a != b)}")

    def _changed(self, how: str) -> CheckpointError:
        observed, expected = f"has changed while it was read ({how})", "the same file until the end"
        hint = "run the command again when no other program writes to it"
        return CheckpointError(observed, expected, file=self.path, hint=hint, code=Exit.IO)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads a tensor, or some rows of it."""
        entry = self.entries[name]
        shape = entry.array_shape
        count = shape[0] if shape else 1
        first, stop, step = rows.indices(count)
        assert step == 1, rows
        out = np.empty((stop - first, *shape[1:]) if shape else (), entry.dtype)
        left = out.reshape(-1).view(np.uint8).data
        offset = entry.begin + first * entry.nbytes // max(count, 1)
        while left:
            with reading(self.path):
                n = os.preadv(self._file.fileno(), [left], offset)
            if n == 0:
                raise self._changed("truncated")
            left, offset = left[n:], offset + n
        return out

    def array(self, name: str) -> np.ndarray:
        """Gives a tensor as a read-only view of the file."""
        entry = self.entries[name]
        count = entry.nbytes // entry.dtype.itemsize
        return np.frombuffer(self._map, entry.dtype, count, entry.begin).reshape(entry.array_shape)

    def release(self, name: str) -> None:
        """Drops a tensor's pages from memory, so that a long file does not fill it."""
        entry = self.entries[name]
        if entry.nbytes and hasattr(self._map, "madvise"):  # an empty tensor may be at the end of the file, on no page
            begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)


# ---------------------------------------------------------------- writing
def header_bytes(tensors: Iterable[Planned], metadata: Mapping[str, str]) -> bytes:
    """Formats the length and the header of a file with these tensors in this order, padded to a multiple of 8."""
    header: JSON = {METADATA: dict(sorted(metadata.items()))}
    offset = 0
    for t in tensors:
        header[t.name] = {"dtype": t.tag, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Writer:
    """Writes the tensors of an open file, in any order; threads may write different ones."""

    def __init__(self, path: Path, file: FileIO, places: Mapping[str, tuple[Planned, int]]):
        self.path, self._file, self._places = path, file, places
        self.written = dict.fromkeys(places, 0)  # bytes

    def put(self, name: str, data: np.ndarray, at: int = 0) -> None:
        """Writes a tensor, or some of its elements, the first of which is element ``at``."""
        planned, offset = self._places[name]
        assert data.dtype == planned.dtype, (name, data.dtype, planned)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
        _write(self._file, raw, offset + at * data.dtype.itemsize)
        self.written[name] += data.nbytes


@contextmanager
def writing(path: Path, tensors: Iterable[Planned], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Opens a file that appears under its name when all tensors are written; an exception or Ctrl-C removes it."""
    tensors = sorted(tensors, key=lambda t: t.name)
    head = header_bytes(tensors, metadata)
    ends = accumulate((t.nbytes for t in tensors), initial=len(head))
    places = {t.name: (t, begin) for t, begin in zip(tensors, ends, strict=False)}
    with replacing(path) as temporary, open(temporary, "wb", buffering=0) as file:
        _write(file, memoryview(head), 0)
        writer = Writer(path, file, places)
        yield writer
        assert writer.written == {t.name: t.nbytes for t in tensors}
        os.fsync(file.fileno())


def _write(file: FileIO, left: memoryview, offset: int) -> None:
    while left:
        written = os.pwrite(file.fileno(), left, offset)
        left, offset = left[written:], offset + written
