"""Files that appear whole or not at all."""

import os
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jnvfp4.convert.errors import CheckpointError, Exit

_TEMPORARY = re.compile(r"(.*)\.tmp-\d+", re.DOTALL)


def temporary_of(path: Path) -> Path:
    """The name a file has until it is whole; that of another process is another one."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary file that gets the name `path` at the end; an exception, also an interrupt, removes it."""
    temporary = temporary_of(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, data: bytes) -> None:
    with whole(path) as temporary:
        temporary.write_bytes(data)


def is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporaries(directory: Path, names: Container[str]) -> None:
    """Removes what processes that were killed have left of files of these names."""
    for path in directory.iterdir():
        if (found := _TEMPORARY.fullmatch(path.name)) and found[1] in names and path.is_file():
            path.unlink()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a directory; the system ends it with the process, however that ends."""
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
