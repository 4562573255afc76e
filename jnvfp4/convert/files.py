"""Files that appear whole or not at all."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TEMPORARY = re.compile(r".*\.tmp-\d+", re.DOTALL)


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


def remove_temporaries(directory: Path) -> None:
    """Removes what processes that were killed have left."""
    for path in directory.iterdir():
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            path.unlink()
