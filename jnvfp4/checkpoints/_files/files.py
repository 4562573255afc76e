"""Writes files that appear complete or not at all, locks directories, and cuts arrays into slices."""

import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ...spec import BLOCK
from .errors import CheckpointError, Exit

CHUNK_BYTES = 64 << 20  # of a tensor that are in memory at once, unless the caller says otherwise
RECORD = ".jnvfp4-progress.json"  # lies in an output while it is unfinished
_TEMPORARY = re.compile(r"(.*)\.tmp-\d+", re.DOTALL)


# ---------------------------------------------------------------- complete files
def temporary_of(path: Path) -> Path:
    """Makes the temporary name of ``path``, which has the process id so that processes do not collide."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


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
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def is_temporary(path: Path) -> bool:
    """Tells whether a file has the temporary name of another one."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporaries(directory: Path, names: Container[str]) -> None:
    """Removes the temporary files that killed processes left of files with these names."""
    for path in directory.iterdir():
        if (match := _TEMPORARY.fullmatch(path.name)) and match[1] in names and path.is_file():
            path.unlink()


# ---------------------------------------------------------------- directories
@contextmanager
def unfinished(directory: Path) -> Iterator[None]:
    """Keeps a record in a directory while files are written into it, since a part of them would open as if whole.

    After an exception or Ctrl-C the record stays if there is a shard.
    """
    record = directory / RECORD
    write_file(record, json_bytes({"unfinished": "an output of jnvfp4"}))
    try:
        yield
    except BaseException:
        if not any(directory.glob("*.safetensors")):
            record.unlink(missing_ok=True)
        raise
    record.unlink()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a directory; the system unlocks it when this process ends in any way."""
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
            raise CheckpointError(
                "is being written by another conversion", "a directory of its own", file=directory, code=Exit.USAGE
            ) from e
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
def slices(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> Iterator[slice]:
    """Cuts the first axis into slices of about ``max_bytes``; a matrix at multiples of 16, the rows of a tile."""
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    step = BLOCK if len(shape) == 2 else 1
    rows = max(step, max_bytes // row_bytes // step * step)
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))
