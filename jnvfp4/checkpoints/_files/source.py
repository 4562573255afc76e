"""Opens the files of a checkpoint: which tensor is in which file, checked against every header and the index."""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from .errors import CheckpointError, reading
from .files import RECORD, Rows, checked_path
from .safetensors import JSON, File, Planned, json_object

CONFIG = "config.json"
HF_QUANT = "hf_quant_config.json"
PARAMS = "params.json"  # Mistral's config
SHARD = ".safetensors"  # what the names of files with tensors end in
_STEMS = ("model", "diffusion_pytorch_model", "consolidated")  # what names of shards begin with, and of their index
_NOT_OF_MODEL = {"adapter": "an adapter", _STEMS[2]: "a copy of the model for other loaders"}  # by their beginning
INDEXES = tuple(f"{stem}{SHARD}.index.json" for stem in _STEMS)
_PICKLES = (".bin", ".pt", ".pth")
Warn = Callable[[str], object]


def read_json(path: Path) -> JSON:
    """Reads a file that holds a JSON object in which no key appears twice."""
    with reading(path):
        text = path.read_bytes()
    return json_object(text, path)


def links_outside(path: Path, directory: Path) -> bool:
    """Tells whether a file of the directory is a link to a file outside; the Hugging Face cache links to its blobs."""
    inside = directory.resolve()
    blobs = [p.parents[1] / "blobs" for p in (inside, *inside.parents) if p.parent.name == "snapshots"]
    return not any(path.resolve().is_relative_to(d) for d in (inside, *blobs))


@dataclass(frozen=True)
class View:
    """Describes a tensor that is computed from tensors of a source.

    Attributes:
      tensor: what it is.
      source: the source.
      parts: the names of the tensors that are read for it.
      array: computes it, or gives ``Rows`` that are computed when they are used.
    """

    tensor: Planned
    source: "Source"
    parts: tuple[str, ...]
    array: Callable[[], np.ndarray | Rows]


@dataclass(frozen=True)
class Source:
    """Holds the tensors of a checkpoint by name. Headers are read, data only where ``array`` is used.

    Attributes:
      directory: the directory of the files.
      files: the shards, by file name.
      places: the file name of each tensor's shard; a view has the shard of its first part.
      config: the content of ``config.json``, or None if there is no such file. A quantization in ``params`` is in it.
      warnings: sentences about findings that are no errors, except those of ``file_warnings``.
      file_warnings: sentences about files beside the model that may be no part of it.
      single_file: whether the user named one file, so that its directory may have files of other models.
      views: the tensors that are computed, by name.
      params: the content of ``params.json``, where ``config.json`` describes no model.
      stem: what the names of shards of a loader begin with.
    """

    directory: Path
    files: Mapping[str, File]
    places: Mapping[str, str]
    config: JSON | None
    warnings: tuple[str, ...] = ()
    file_warnings: tuple[str, ...] = ()
    single_file: bool = False
    views: Mapping[str, View] = field(default_factory=dict)
    params: JSON | None = None
    stem: str = _STEMS[0]

    def entry(self, name: str) -> Planned:
        """Describes a tensor."""
        return self.views[name].tensor if name in self.views else self.files[self.places[name]].entries[name]

    def entries(self) -> Iterator[Planned]:
        """Describes all tensors, in the order of their names."""
        return (self.entry(name) for name in sorted(self.places))

    def array(self, name: str) -> Any:
        """Returns a tensor as a view of its file, which must not be truncated meanwhile, or computes it."""
        return self.views[name].array() if name in self.views else self.files[self.places[name]].array(name)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads or computes a tensor, or some rows of it."""
        return self.views[name].array()[rows] if name in self.views else self.files[self.places[name]].read(name, rows)

    def rows(self, name: str) -> np.ndarray | Rows:
        """Returns a tensor whose rows are read or computed when they are used."""
        if name in self.views:
            return self.array(name)
        entry = self.entry(name)
        return Rows(entry.array_shape, entry.dtype, partial(self.read, name))

    def with_views(self, views: Iterable[View]) -> "Source":
        """Shows views in place of the tensors that they are made of."""
        by_name = {view.tensor.name: view for view in views}
        replaced = {part for view in by_name.values() for part in view.parts}
        places = {n: f for n, f in self.places.items() if n not in replaced}
        for name, view in by_name.items():
            if name in places:
                observed = f"is in the source, and would be made of {view.parts[0]!r}"
                raise CheckpointError(observed, "one of them", tensor=name)
            places[name] = self.places[view.parts[0]]
        return replace(self, places=places, views={**self.views, **by_name})

    def warn_of_files(self, warn: Warn) -> None:
        """Warns of files beside the model, one by one."""
        for text in self.file_warnings:
            warn(text)

    def check_unchanged(self) -> None:
        """Raises if a file is another one than when it was opened."""
        for file in self.files.values():
            file.check_unchanged()

    def release(self, name: str) -> None:
        """Drops the pages of everything that is read for a tensor."""
        if name not in self.views:
            self.files[self.places[name]].release(name)
            return
        for part in self.views[name].parts:
            self.views[name].source.release(part)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(e.nbytes for e in self.entries())

    @property
    def configs(self) -> list[JSON]:
        """The config, and the part of a multimodal config that describes the language model."""
        config = self.config or {}
        text = config.get("text_config")
        return [config, text] if isinstance(text, dict) else [config]

    @property
    def layers(self) -> int | None:
        """The number of decoder layers according to the config."""
        return next((n for c in self.configs if isinstance(n := c.get("num_hidden_layers"), int)), None)

    @property
    def mtp_from(self) -> int | None:
        """The number of the first layer that predicts tokens after the next one, if the config says that any does."""
        return self.layers if any(c.get("num_nextn_predict_layers") for c in self.configs) else None


def open_source(path: Path) -> Source:
    """Opens a directory of safetensors files, with or without an index, or one such file.

    Raises:
      CheckpointError: there are no such files, the directory is an unfinished output, the index and the files
        disagree, or a file is damaged.
    """
    path = checked_path(path)
    single_file = os.path.isfile(path)
    directory = path.parent if single_file else path
    _refuse_unfinished(directory)
    if single_file and not path.name.endswith(SHARD):
        hint = _pickle_hint(directory) if path.suffix in _PICKLES else ""
        raise CheckpointError("is no checkpoint", f"a file whose name ends in {SHARD}", file=path, hint=hint)
    if not directory.is_dir():
        raise CheckpointError("does not exist", "a directory or a file", file=path)
    present = [path.name] if single_file else sorted(p.name for p in path.glob(f"*{SHARD}"))
    index_path = None if single_file else _index_of(path, present)
    index = None if index_path is None else _read_index(index_path)
    names, of_files = _without_copies(present) if index is None else (sorted(set(index.values())), ())
    if not names:
        raise CheckpointError(f"has no *{SHARD} file", file=path, hint=_pickle_hint(path))
    files, config, params = _open_shards(directory, names), *_read_configs(directory)
    places = _places_of(directory, files)
    if index_path is not None and index is not None:
        _check_index(index_path, index, places)
        more, of_files = _outside_index(directory, [name for name in present if name not in names], places)
        files, places = files | more, places | _places_of(directory, more)
    if not places:
        raise CheckpointError("has no tensor", "a model", file=path)
    missing = f"{directory / CONFIG}: missing, so the number of layers and the model type are unknown"
    warnings = (missing,) if config is None else ()
    named = names if index_path is None else [index_path.name]
    stem = next((stem for stem in _STEMS if all(name.startswith(stem) for name in named)), _STEMS[0])
    return Source(directory, files, places, config, warnings, of_files, single_file, params=params, stem=stem)


def _index_of(directory: Path, present: list[str]) -> Path | None:
    """Finds the index. That of Mistral's files is none of the model beside those of transformers."""
    stems = _STEMS[:2] if any(name.startswith(_STEMS[0]) for name in present) else _STEMS
    paths = [directory / INDEXES[_STEMS.index(stem)] for stem in stems]
    return next((path for path in paths if os.path.lexists(path)), None)


def _without_copies(present: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Leaves out adapters, and Mistral's copy of a model beside that of transformers, with a warning."""
    model = next((name for name in present if name.startswith(_STEMS[0])), None)
    found = {name: kind for name in present if model and (kind := _not_of_model(name))}
    warnings = [f"{name}: {kind}, beside {model}: ignored" for name, kind in found.items()]
    others = [name for name in present if name not in found and model and not name.startswith(_STEMS[0])]
    warnings += [f"{name}: beside {model}, without an index: its tensors are part of the model" for name in others]
    return [name for name in present if name not in found], tuple(warnings)


def _not_of_model(name: str) -> str | None:
    return next((kind for start, kind in _NOT_OF_MODEL.items() if name.startswith(start)), None)


def _outside_index(
    directory: Path, names: list[str], places: Mapping[str, str]
) -> tuple[dict[str, File], tuple[str, ...]]:
    """Opens the files that are not in the index, and gives warnings of these and of files that are no part of it."""
    files: dict[str, File] = {}
    warnings = []
    for name in names:
        taken = {*places, *(tensor for file in files.values() for tensor in file.entries)}
        found = _part_of_model(directory / name, taken)
        if isinstance(found, File):
            files[name] = found
            found = f"its tensors are taken into the output: {len(found.entries)}"
        warnings.append(f"{name}: not in the index, {found}")
    return files, tuple(warnings)


def _part_of_model(path: Path, taken: Container[str]) -> File | str:
    """Opens a file whose tensors are not among others of the model, or says why it is none."""
    if kind := _not_of_model(path.name):
        return f"{kind}: ignored"
    if not _is_text(path.name) or not path.is_file() or links_outside(path, path.parent):
        return f"{'a link out of the directory' if path.is_file() else 'no regular file'}: ignored"
    try:
        file = File(path)
    except CheckpointError as e:
        return f"{str(e).removeprefix(f'{path}: ')}: ignored"
    both = next((tensor for tensor in file.entries if tensor in taken), None)
    return file if both is None else f"but has {both!r:.200}, which is: ignored"


def _read_configs(directory: Path) -> tuple[JSON | None, JSON | None]:
    """Reads ``config.json``, and Mistral's ``params.json`` where that describes no model; each is None if missing."""
    config = _read_if_there(directory / CONFIG)
    if (config or {}).keys() - {"quantization_config", "torch_dtype", "dtype"}:
        return config, None
    params = _read_if_there(directory / PARAMS)
    quantization = (params or {}).get("quantization")
    return {**(config or {}), "quantization_config": quantization} if quantization else config, params


def _refuse_unfinished(directory: Path) -> None:
    """Raises if the record of an unfinished output is in a directory, whose shards look like a smaller model."""
    record = directory / RECORD
    if not os.path.isfile(record):
        return
    hint = "run the command that wrote it again, into a new directory"
    with suppress(CheckpointError):
        if "options" in read_json(record):
            hint = "run the same `jnvfp4 convert` again with --resume"
    raise CheckpointError("is an unfinished output", "one that is complete", file=directory, hint=hint)


def _pickle_hint(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLES)
    return f"pickle files such as {pickles[0]} are not read: convert them to safetensors" if pickles else ""


def _check_inside(path: Path) -> Path:
    if links_outside(path, path.parent):
        raise CheckpointError("is a link out of the directory", "a file in it", file=path, hint="copy it there")
    return path


def _read_if_there(path: Path) -> JSON | None:
    """Reads a JSON file of a checkpoint; None if nothing has its name."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise CheckpointError("is no regular file", "a JSON file", file=path)
    return read_json(_check_inside(path)) if os.path.isfile(path) else None


def read_hf_quant(source: Source) -> JSON:
    """Reads ``hf_quant_config.json``, which is empty if there is no such file."""
    return _read_if_there(source.directory / HF_QUANT) or {}


def _read_index(path: Path) -> Mapping[str, str]:
    index = (_read_if_there(path) or {}).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise CheckpointError("has no weight_map", "file names by tensor name", file=path)
    for tensor, name in index.items():
        has_folder = PurePosixPath(name).name != name or "\\" in name or "\0" in name
        # Under another name it could be a file that the converter writes, or no reader finds it.
        if has_folder or not name.endswith(SHARD):
            expected = "a name without a folder or NUL" if has_folder else f"a name that ends in {SHARD}"
            raise CheckpointError(f"names the file {name!r:.200}", expected, file=path, tensor=tensor)
    return index


def without_quantization(config: JSON) -> JSON:
    """Leaves out how a source was quantized, of a multimodal model also where it describes the language model."""
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := out.get("text_config"), dict):
        out["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return out


def params_file(params: JSON, quantization: JSON | None = None) -> dict[str, JSON]:
    """Makes Mistral's ``params.json``, by file name."""
    ordinary = {key: value for key, value in params.items() if key != "quantization"}
    return {PARAMS: ordinary if quantization is None else {**ordinary, "quantization": quantization}}


def index_file(shards: Mapping[str, Iterable[Planned]], stem: str) -> dict[str, JSON]:
    """Makes the index of the tensors in several shards, by file name; one shard has none."""
    if len(shards) == 1:
        return {}
    places = {p.name: (shard, p.nbytes) for shard, tensors in shards.items() for p in tensors}
    size = sum(nbytes for _, nbytes in places.values())
    name = INDEXES[_STEMS.index(stem)]
    return {name: {"metadata": {"total_size": size}, "weight_map": {n: places[n][0] for n in sorted(places)}}}


def _is_text(name: str) -> bool:
    return name == name.encode(errors="ignore").decode()


def _open_shards(directory: Path, names: list[str]) -> dict[str, File]:
    files = {}
    for name in names:
        if not _is_text(name):
            raise CheckpointError(f"has a file {name!r}", "names in UTF-8", file=directory)
        path = directory / name
        if not os.path.isfile(path):
            observed = "is missing"
            if os.path.lexists(path):
                observed = "is no regular file" if os.path.exists(path) else "is a link that leads to no file"
            raise CheckpointError(observed, "a file", file=path)
        files[name] = File(_check_inside(path))
    return files


def _places_of(directory: Path, files: Mapping[str, File]) -> dict[str, str]:
    places: dict[str, str] = {}
    for name, file in files.items():
        for tensor in file.entries:
            other = places.setdefault(tensor, name)
            if other != name:
                raise CheckpointError(f"is in {other} and in {name}", "one file", file=directory, tensor=tensor)
    return places


def _check_index(path: Path, index: Mapping[str, str], places: Mapping[str, str]) -> None:
    for tensor in {**index, **places}:
        named, actual = index.get(tensor), places.get(tensor)
        if named != actual:
            found = f"but is in {actual}" if actual else "which has no such tensor"
            observed = f"should be in {named}, {found}" if named else f"is in {actual}, but not in the index"
            raise CheckpointError(observed, file=path, tensor=tensor)
