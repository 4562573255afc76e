"""Copies the files beside the weights, such as a tokenizer."""

import re
from collections.abc import Iterator
from pathlib import Path

from .errors import ReadError, io_error
from .files import replacing
from .source import CONFIG, HF_QUANT, links_outside

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# The names that files of a model have. Beside a single input file there may be files of anything else.
_KNOWN = re.compile(r".*\.(?:json|model|txt|jinja|py|md)|(?:LICEN[CS]E|NOTICE|COPYING|README)(?:[-_.].*)?", re.DOTALL)


_CHUNK_BYTES = 1 << 20  # read and written at once


def check_companions(directory: Path, single_file: bool = False) -> None:
    """Raises if a file that ``copy_companions`` would copy cannot be read.

    Raises:
      CheckpointError: names the file.
    """
    try:
        for path, warning in _companions(directory, single_file):
            if not warning:
                next(_chunks(path), b"")
    except ReadError as e:
        raise io_error(e, directory) from e


def copy_companions(directory: Path, output: Path, single_file: bool = False) -> tuple[str, ...]:
    """Copies the files that are neither weights, nor hidden, nor configs that the output has its own of.

    Args:
      directory: the directory of the model.
      output: an existing directory.
      single_file: whether the user named one file, so that only files with names of a model's files are copied.

    Returns:
      a warning for each link that leads out of the directory or to nothing, which is not copied.

    Raises:
      ReadError: a file cannot be read.
      OSError: a copy cannot be written.
    """
    warnings = []
    for path, warning in _companions(directory, single_file):
        if warning:
            warnings.append(f"{path}: {warning}, not copied")
        else:
            _copy(path, output / path.name)
    return tuple(warnings)


def _companions(directory: Path, single_file: bool) -> Iterator[tuple[Path, str]]:
    """Gives the files that belong to a model, each with the reason for not copying it, if there is one."""
    for path in sorted(directory.iterdir()):
        if path.name.endswith(_WEIGHTS) or path.name.startswith(".") or path.name in (CONFIG, HF_QUANT):
            continue
        if single_file and not _KNOWN.fullmatch(path.name):
            continue
        if path.is_symlink() and not path.exists():
            yield path, "a link to nothing"
        elif path.is_file():
            yield path, "a link out of the directory" if links_outside(path, directory) else ""


def _copy(path: Path, copy: Path) -> None:
    with replacing(copy) as temporary:
        try:
            with open(temporary, "wb") as file:
                for data in _chunks(path):
                    file.write(data)
        except ReadError:
            raise
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(copy)) from e


def _chunks(path: Path) -> Iterator[bytes]:
    """Reads a file, and raises another error than for one that cannot be written."""
    try:
        with open(path, "rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data
    except OSError as e:
        raise ReadError(e.errno, e.strerror, str(path)) from e
