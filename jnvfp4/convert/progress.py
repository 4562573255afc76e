"""What of an interrupted conversion can be used again."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jnvfp4
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.files import is_temporary, write_whole
from jnvfp4.convert.options import ConvertOptions
from jnvfp4.convert.plan import json_bytes
from jnvfp4.convert.source import CONFIG, Source, read_json

NAME = ".jnvfp4-progress.json"


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _options(options: ConvertOptions) -> dict[str, Any]:
    """What changes bytes beside the source, as JSON values."""
    values = {**dataclasses.asdict(options), "version": jnvfp4.__version__}
    del values["chunk_bytes"]
    if isinstance(options.input_scale, Path):
        values["input_scale"] = file_digest(options.input_scale)
    return json.loads(json.dumps(values))


def _sources(source: Source) -> dict[str, Any]:
    out: dict[str, Any] = {CONFIG: hashlib.sha256(json.dumps(source.config, sort_keys=True).encode()).hexdigest()}
    for name, file in source.files.items():
        stat = file.path.stat()
        entries = repr(sorted((e.name, e.tag, e.shape, e.begin) for e in file.entries.values()))
        out[name] = [stat.st_size, stat.st_mtime_ns, hashlib.sha256(entries.encode()).hexdigest()]
    return out


class Progress:
    """Which shards of an output are done; a file in it until all are."""

    def __init__(self, dst: Path, source: Source, options: ConvertOptions):
        self._path = dst / NAME
        self._state: dict[str, Any] = {"options": _options(options), "source": _sources(source), "shards": {}}

    @property
    def shards(self) -> dict[str, str]:
        """Digests of the shards that are said to be done, by name."""
        return self._state["shards"]

    def resume(self) -> None:
        """Takes over what an earlier run with the same options and source did.

        Raises:
          CheckpointError: options or source are others now; says which.
        """
        if not self._path.is_file():
            directory = self._path.parent
            if directory.is_dir() and any(not is_temporary(path) for path in directory.iterdir()):
                raise CheckpointError(
                    "is not empty and has no record of an interrupted conversion", "one to go on with",
                    file=directory, code=Exit.USAGE, hint="it is finished, or another's; --overwrite starts again",
                )  # fmt: skip
            return
        old = read_json(self._path)
        if not all(isinstance(old.get(what), dict) for what in self._state):
            raise CheckpointError(
                f"has {', '.join(old) or 'nothing'}", f"objects {', '.join(self._state)}",
                file=self._path, code=Exit.USAGE, hint="--overwrite starts again",
            )  # fmt: skip
        for what in ("options", "source"):
            now, then = self._state[what], old[what]
            changed = sorted(k for k in {*now, *then} if now.get(k) != then.get(k))
            if changed:
                raise CheckpointError(
                    f"was begun with other {what}: {', '.join(changed)}", "the same", file=self._path, code=Exit.USAGE,
                    hint="--overwrite starts again",
                )  # fmt: skip
        self._state["shards"] = old["shards"]

    def done(self, path: Path) -> bool:
        """Whether a shard is there as it was written."""
        return path.is_file() and self._state["shards"].get(path.name) == file_digest(path)

    def add(self, path: Path) -> None:
        self._state["shards"][path.name] = file_digest(path)
        write_whole(self._path, json_bytes(self._state))

    def __enter__(self) -> "Progress":
        """Leaves a record to go on with; what fails before a shard is done removes it again."""
        write_whole(self._path, json_bytes(self._state))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self.shards:
            self._path.unlink(missing_ok=True)
