"""Copies the files beside the weights, such as a tokenizer."""

import re
from collections.abc import Iterator
from pathlib import Path

from .errors import ReadError, io_error
from .files import remove_temporaries, replacing
from .source import CONFIG, HF_QUANT, Source, links_outside

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# The names that files of a model have. Beside a single input file there may be files of anything else.
_KNOWN = re.compile(r".*\.(?:json|model|txt|jinja|py|md)|(?:LICEN[CS]E|NOTICE|COPYING|README)(?:[-_.].*)?", re.DOTALL)
_CHUNK_BYTES = 1 << 20  # read and written at once


def check_companions(source: Source) -> None:
    """Raises CheckpointError if a file that ``copy_companions`` would copy cannot be read."""
    try:
        for path, warning in _companions(source):
            if not warning:
                next(_chunks(path), b"")
    except ReadError as e:
        raise io_error(e, source.directory) from e


def copy_companions(source: Source, output: Path) -> tuple[str, ...]:
    """Copies tokenizers and the like, and whole folders of text files, such as templates or code, into ``output``.

    Weights, hidden files and the configs that the output has itself are left out. Beside a source that is a single
    file, only files with names of a model's files are copied.

    Returns:
      warnings for skipped folders, external links and special files.

    Raises:
      ReadError: a file cannot be read.
      OSError: a copy cannot be written.
    """
    warnings = []
    for path, warning in _companions(source, output):
        if warning:
            warnings.append(f"{path}: {warning}, not copied")
        else:
            copy = output / path.relative_to(source.directory)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(path, copy)
    return tuple(warnings)


def remove_partial_copies(source: Source, output: Path) -> None:
    """Removes the temporary files that killed processes left of copies."""
    for path, warning in _companions(source, output):
        folder = output / path.parent.relative_to(source.directory)
        if not warning and folder.is_dir():
            remove_temporaries(folder, {path.name})


def _companions(source: Source, output: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yields the files of a model, each with the reason for not copying it, or an empty text.

    A folder that is not copied stands for its files. ``output`` belongs to no model.
    """
    for path in _listed(source.directory):
        if output is not None and path.resolve() == output.resolve():
            continue
        if path.is_dir() and not path.is_symlink():
            yield from () if source.single_file else _of_folder(path, source.directory, output)
        elif path.name.endswith(_WEIGHTS) or path.name in (CONFIG, HF_QUANT):
            continue
        elif not source.single_file or _KNOWN.fullmatch(path.name):
            yield path, _reason(path, source.directory)


def _of_folder(folder: Path, directory: Path, output: Path | None) -> Iterator[tuple[Path, str]]:
    """Gives the files of a folder of text files, or another folder with the reason for not copying it."""
    if output is not None and output.resolve().is_relative_to(folder.resolve()):
        yield folder, "a folder that has the output in it"
        return
    files = list(_below(folder))
    for path in files:
        reason = _reason(path, directory)
        if not reason and (path.name.endswith(_WEIGHTS) or not _KNOWN.fullmatch(path.name)):
            reason = "whose name is not a text file's"
        if reason:
            yield folder, f"a folder with {path.relative_to(directory)}, {reason}"
            return
    if not files:
        yield folder, "an empty folder"
    yield from ((path, "") for path in files)


def _below(folder: Path) -> Iterator[Path]:
    for path in _listed(folder):
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)
        else:
            yield path


def _listed(folder: Path) -> list[Path]:
    """Lists the paths in a folder that are not hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as e:
        raise ReadError(e.errno, e.strerror, str(folder)) from e


def _reason(path: Path, directory: Path) -> str:
    """Returns why a path that is no folder is not copied; empty if it is copied."""
    if not path.is_symlink():
        return "" if path.is_file() else "no regular file"
    if not path.exists():
        return "a link to nothing"
    if path.is_dir():
        return "a link to a folder"
    if not path.is_file():
        return "a link to something that is no file"
    return "a link out of the directory" if links_outside(path, directory) else ""


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
    """Reads a file; raises ReadError, since the caller takes other errors for failed writes."""
    try:
        with open(path, "rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data
    except OSError as e:
        raise ReadError(e.errno, e.strerror, str(path)) from e
