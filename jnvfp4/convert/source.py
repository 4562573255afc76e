"""A checkpoint as it lies in a directory: which tensor is in which file, checked against every header."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.safetensors import Entry, File, json_object

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a key that stands twice is an error."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"cannot be read ({e.strerror})", file=path, code=Exit.IO) from e
    return json_object(text, path)


def leads_out(path: Path, directory: Path) -> bool:
    """Whether a file of the directory is a link to elsewhere. Snapshots of the Hugging Face cache link to its blobs."""
    inside = directory.resolve()
    blobs = [inside.parents[1] / "blobs"] if inside.parent.name == "snapshots" else []
    return not any(path.resolve().is_relative_to(d) for d in (inside, *blobs))


@dataclass
class Source:
    """Tensors by name, and the files they are in. Headers are read, data is not.

    Attributes:
      directory: where the files are.
      files: the shards, by file name.
      places: the shard of each tensor.
      config: `config.json`, or None without one.
      warnings: what is odd but no error.
      single_file: whether it was named as one file, so that other files there may be no part of it.
    """

    directory: Path
    files: dict[str, File]
    places: dict[str, str]
    config: dict[str, Any] | None
    warnings: list[str] = field(default_factory=list)
    single_file: bool = False

    def entry(self, name: str) -> Entry:
        return self.files[self.places[name]].entries[name]

    def entries(self) -> Iterator[Entry]:
        return (self.entry(name) for name in sorted(self.places))

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the file."""
        return self.files[self.places[name]].array(name)

    def release(self, name: str) -> None:
        """Lets the system forget the pages of a tensor that was read."""
        self.files[self.places[name]].release(name)

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The config, and the part of it that is about the language model of several."""
        config = self.config or {}
        text = config.get("text_config")
        return [config, text] if isinstance(text, dict) else [config]

    @property
    def layers(self) -> int | None:
        """How many decoder layers the config says there are."""
        return next((n for c in self.configs if isinstance(n := c.get("num_hidden_layers"), int)), None)


def open_source(path: Path) -> Source:
    """Opens a directory of safetensors files, with or without an index, or one such file.

    Raises:
      CheckpointError: no such files; index and files disagree; a file is damaged.
    """
    single_file = os.path.isfile(path)
    if single_file:
        directory, names, index = path.parent, [path.name], None
    elif path.is_dir():
        directory, index = path, _read_index(path)
        found = sorted(p.name for p in path.glob("*.safetensors"))
        names = sorted(set(index.values())) if index is not None else found
        if not names:
            raise CheckpointError("has no *.safetensors file", file=path, hint=_of_pickles(path))
    else:
        raise CheckpointError("does not exist", "a directory or a file", file=path)
    source = Source(directory, _open(directory, names), {}, _config(directory), single_file=single_file)
    _place(source, index)
    if not source.places:
        raise CheckpointError("has no tensor", "a model", file=path)
    if index is not None:
        source.warnings += [f"{n}: not in the index, ignored" for n in found if n not in source.files]
    if source.config is None:
        source.warnings.append(f"{directory / CONFIG}: missing, so nothing is known of layers and experts")
    return source


def _of_pickles(directory: Path) -> str:
    pickles = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth") for p in directory.glob(ending))
    return f"pickle files such as {pickles[0]} are not read: convert them to safetensors" if pickles else ""


def _within(path: Path) -> Path:
    if leads_out(path, path.parent):
        raise CheckpointError("is a link out of the directory", "a file in it", file=path, hint="copy it there")
    return path


def _config(directory: Path) -> dict[str, Any] | None:
    path = directory / CONFIG
    return read_json(_within(path)) if os.path.isfile(path) else None


def _read_index(directory: Path) -> Mapping[str, str] | None:
    path = directory / INDEX
    if not os.path.isfile(path):
        return None
    index = read_json(_within(path)).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise CheckpointError("has no weight_map", "file names by tensor name", file=path)
    for tensor, name in index.items():
        if PurePosixPath(name).name != name or "\\" in name or name in ("", "..", "."):
            raise CheckpointError(f"names the file {name!r:.200}", "a name without a folder", file=path, tensor=tensor)
    return index


def _open(directory: Path, names: list[str]) -> dict[str, File]:
    files = {}
    for name in names:
        if not _is_utf8(name):
            raise CheckpointError(f"has a file {name!r}", "names in UTF-8", file=directory)
        path = directory / name
        if not os.path.isfile(path):
            raise CheckpointError("is missing", "a file", file=path)
        files[name] = File(_within(path))
    return files


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _place(source: Source, index: Mapping[str, str] | None) -> None:
    for name, file in source.files.items():
        for tensor in file.entries:
            other = source.places.setdefault(tensor, name)
            if other != name:
                raise CheckpointError(f"is in {other} and in {name}", "one file", file=source.directory, tensor=tensor)
    if index is None:
        return
    path = source.directory / INDEX
    for tensor, name in index.items():
        actual = source.places.get(tensor)
        if actual is None:
            raise CheckpointError(f"is said to be in {name}, which has no such tensor", file=path, tensor=tensor)
        if actual != name:
            raise CheckpointError(f"is said to be in {name}, but is in {actual}", file=path, tensor=tensor)
    for tensor, name in source.places.items():
        if tensor not in index:
            raise CheckpointError(f"is in {name}, but not in the index", file=path, tensor=tensor)
