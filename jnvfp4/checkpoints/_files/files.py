"""Writes files that appear complete or not at all, locks directories, and cuts arrays into slices."""

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...spec import BLOCK
from .errors import CheckpointError, Exit, io_error

CHUNK_BYTES = 64 << 20  # of a tensor that are in memory at once, unless the caller says otherwise
RECORD = ".jnvfp4-progress.json"  # lies in an output while it is unfinished
_TEMPORARY = re.compile(r"(.*)\.tmp-\d+", re.DOTALL)


# ---------------------------------------------------------------- complete files
def temporary_of(path: Path) -> Path:
    """Makes a temporary name for ``path``, which no thread, process or host shares."""
    return path.with_name(f"{path.name}.tmp-{secrets.randbits(32)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary file that is renamed to ``path`` at the end, or removed on an exception or Ctrl-C."""
    temporary = temporary_of(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_file(path: Path, data: bytes) -> None:
    """Writes a file that appears under its name only when it is complete."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def json_bytes(value: object) -> bytes:
    """Formats a JSON file. Of a path that is no text the odd bytes are escaped, as JSON allows."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return (text + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file that appears under its name only when it is complete."""
    write_file(path, json_bytes(value))


def check_finite(value: object, file: Path | str, key: str = "") -> None:
    """Raises if a value of a JSON file has NaN or infinity in it, which only some parsers read.

    The message names ``file`` and ``key``, the path of the value in the file.
    """
    if isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number, since JSON has no other"
        hint = "write a large number, such as 1e30, where infinity means that there is no limit"
        raise CheckpointError(f"{key} is {json.dumps(value)}", expected, file=file, hint=hint)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for k, v in items:
        check_finite(v, file, f"{key}.{k}" if key else str(k))


def is_temporary(path: Path) -> bool:
    """Tells whether a file has the temporary name of another one."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporaries(directory: Path, names: Container[str]) -> None:
    """Removes the temporary files that killed processes left of files with these names."""
    for path in directory.iterdir():
        if (match := _TEMPORARY.fullmatch(path.name)) and match[1] in names and path.is_file():
            path.unlink()


# ---------------------------------------------------------------- directories
def _check_new(directory: Path) -> None:
    """Raises if there is a file of this name, or a directory that is not empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError("is not empty", "an empty or new directory", file=directory, code=Exit.USAGE)


@contextmanager
def new_output(directory: Path) -> Iterator[None]:
    """Makes a directory, or takes an empty one, and keeps other writers out of it while files are written into it.

    Raises:
      CheckpointError: it is not empty, another writer has it, or a file cannot be read or written.
    """
    _check_new(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            _check_new(directory)  # again: another writer may have finished
            try:
                state = {"unfinished": "an output of jnvfp4"}
                with unfinished(directory, state, lambda: any(directory.glob("*.safetensors"))):
                    yield
            except OSError as e:  # while it is locked, so that the hint is about our own files
                hint = "the output is not complete: remove it and run the command again"
                raise io_error(e, directory, hint if any(directory.iterdir()) else "") from e
    except OSError as e:
        raise io_error(e, directory) from e


@contextmanager
def unfinished(directory: Path, state: object, has_shards: Callable[[], object]) -> Iterator[None]:
    """Keeps a record in a directory while files are written into it, since a part of them would open as if whole.

    After an exception or Ctrl-C the record stays if there is a shard.
    """
    record = directory / RECORD
    write_json(record, state)
    try:
        yield
    except BaseException:
        if not has_shards():
            record.unlink(missing_ok=True)
        raise
    record.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other writers out of a directory; the system unlocks it when this process ends in any way."""
    try:
        import fcntl
    except ImportError:  # no POSIX
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            observed = "is being written by another command"
            raise CheckpointError(observed, "a directory of its own", file=directory, code=Exit.USAGE) from e
        yield
    finally:
        os.close(descriptor)


def checked_path(path: Path | str) -> Path:
    """Raises if no file can have this path, which the functions of ``pathlib`` find too late or not at all."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise CheckpointError(f"{str(path)!r} has a character that no path can have", code=Exit.USAGE)
    return Path(path)


def existing_parent(path: Path) -> Path:
    """Finds the nearest directory or file on the way to ``path`` that exists, which may be ``path`` itself."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def check_free_space(output: Path, sizes: Sequence[int]) -> None:
    """Raises if the disk has no room for files of these sizes and a second copy of the largest."""
    need = sum(sizes) + max(sizes, default=0)
    directory = existing_parent(output)
    free = shutil.disk_usage(directory).free
    if free < need:
        raise CheckpointError(f"has {free} bytes free", f"{need} for the output", file=directory, code=Exit.IO)


# ---------------------------------------------------------------- arrays
@dataclass(frozen=True)
class Rows:
    """Behaves like an array whose slices of the first axis are read or computed when they are used."""

    shape: tuple[int, ...]
    dtype: np.dtype
    compute: Callable[[slice], np.ndarray]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.compute(rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.compute(slice(i, i + 1))[0] for i in range(self.shape[0]))


def slices(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> Iterator[slice]:
    """Cuts the first axis into slices of about ``max_bytes``; a matrix at multiples of 16, the rows of a tile."""
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    step = BLOCK if len(shape) == 2 else 1
    rows = max(step, max_bytes // row_bytes // step * step)
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def pieces(x: np.ndarray | Rows, max_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """Gives a tensor a slice at a time, each with the index of its first element."""
    if not x.shape:
        yield 0, x[:]
        return
    for rows in slices(x.shape, x.dtype.itemsize, max_bytes):
        yield rows.start * math.prod(x.shape[1:]), x[rows]
