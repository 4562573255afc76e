"""Records which shards of a conversion are finished, so that an interrupted one can be resumed."""

import dataclasses
import hashlib
import json
from pathlib import Path

from ..._version import __version__
from .._files.errors import CheckpointError, Exit
from .._files.files import RECORD, is_temporary, write_json
from .._files.safetensors import JSON
from .._files.source import CONFIG, Source, open_source, read_json
from .options import ConvertOptions


def file_digest(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_of_options(options: ConvertOptions) -> JSON:
    """Describes everything beside the source that changes bytes, as JSON values."""
    values = {**dataclasses.asdict(options), "version": __version__}
    del values["chunk_bytes"]
    amax = options.input_amax
    hessians = None if options.hessians is None else open_source(options.hessians)
    values["hessians"] = hessians and _state_of_files(hessians)
    values["input_amax"] = file_digest(amax) if isinstance(amax, Path) else amax if amax is None else float(amax)
    return json.loads(json.dumps(values))


def _state_of_source(source: Source) -> JSON:
    """Describes the source: a digest of the config; size, time and a digest of the header of each file."""
    config = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode()).hexdigest()
    return {CONFIG: config, **_state_of_files(source)}


def _state_of_files(source: Source) -> JSON:
    return {name: list(file.state) for name, file in source.files.items()}


class ResumeRecord:
    """Keeps the record that is in an output until all shards are finished; ``state`` is its content."""

    def __init__(self, output: Path, source: Source, options: ConvertOptions):
        self._path = output / RECORD
        self.state: JSON = {"options": _state_of_options(options), "source": _state_of_source(source), "shards": {}}

    @property
    def shards(self) -> dict[str, str]:
        """The digests of the shards that the record calls finished, by file name."""
        return self.state["shards"]

    def resume(self) -> None:
        """Takes over the finished shards of an earlier run with the same options and source.

        Raises:
          CheckpointError: options or source have changed, and the message says which; or there is no record.
        """
        if not self._path.is_file():
            directory = self._path.parent
            if directory.is_dir() and any(not is_temporary(path) for path in directory.iterdir()):
                observed = "is not empty and has no record of an interrupted conversion"
                hint = "the conversion is finished, or the files are of something else; --overwrite starts again"
                expected = "a record to resume from"
                raise CheckpointError(observed, expected, file=directory, code=Exit.USAGE, hint=hint)
            return
        old = read_json(self._path)
        if not all(isinstance(old.get(key), dict) for key in self.state):
            raise self._refusal(f"has {', '.join(old) or 'nothing'}", f"objects {', '.join(self.state)}")
        for key in ("options", "source"):
            now, then = self.state[key], old[key]
            changed = sorted(k for k in {*now, *then} if now.get(k) != then.get(k))
            if changed:
                raise self._refusal(f"was begun with other {key}: {', '.join(changed)}", "the same")
        self.state["shards"] = old["shards"]

    def fits(self) -> bool:
        """Tells whether ``resume`` would go on with what is in the output."""
        try:
            self.resume()
        except CheckpointError:
            return False
        return self.is_kept

    def _refusal(self, observed: str, expected: str) -> CheckpointError:
        return CheckpointError(observed, expected, file=self._path, code=Exit.USAGE, hint="--overwrite starts again")

    def is_finished(self, path: Path) -> bool:
        """Tells whether a shard is in the output with the bytes that were written."""
        return path.is_file() and self.shards.get(path.name) == file_digest(path)

    def add(self, path: Path) -> None:
        """Records a finished shard."""
        self.shards[path.name] = file_digest(path)
        write_json(self._path, self.state)

    @property
    def is_kept(self) -> bool:
        """Whether the record is in the output, so that the conversion can be resumed."""
        return self._path.is_file()
