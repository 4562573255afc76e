"""Errors that a command prints as one line with a hint, and the exit code of each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """The exit codes of the command ``jnvfp4``."""

    OK = 0
    DIFFERENT = 1  # two checkpoints differ, or lint found something
    USAGE = 2
    BAD_INPUT = 3
    CONFLICT = 4  # a loader would read the plan differently
    VERIFICATION = 5
    IO = 6
    INTERRUPTED = 130


MAX_TEXT = 1000  # characters; names in a damaged file can have any length


def _one_line(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}...{text[-MAX_TEXT // 2 :]}"
    return " ".join(text.splitlines())


class CommandError(Exception):
    """Ends a command with an exit code and a line: what was ``observed`` and ``expected``, and a hint what to do."""

    def __init__(self, observed: str, expected: str = "", *, hint: str = "", code: Exit = Exit.USAGE):
        text = f"{observed}; expected {expected}" if expected else observed
        super().__init__(_one_line(text) + (f"\nhint: {_one_line(hint)}" if hint else ""))
        self.code = code


class ReadError(OSError):
    """Reports that a file cannot be read while another one is written."""


class CheckpointError(CommandError):
    """Reports what is wrong with a checkpoint or with the options of a conversion, and where.

    Args:
      observed: what is wrong, as a clause about the file or tensor.
      expected: what would be accepted.
      file: the file or directory it is about, if any.
      tensor: the name of the tensor it is about, if any.
      hint: what the user can do about it.
      code: exit code of the command.
    """

    def __init__(
        self,
        observed: str,
        expected: str = "",
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        hint: str = "",
        code: Exit = Exit.BAD_INPUT,
    ):
        subjects = [str(file)] if file is not None else []
        if tensor is not None:
            subjects.append(f"tensor {tensor!r:.200}")
        super().__init__(": ".join([*subjects, observed]), expected, hint=hint, code=code)
        self.file, self.tensor = file, tensor


class OptionError(CheckpointError):
    """Reports what is wrong with options: ``clauses`` has a clause for each option, such as "is 0"."""

    def __init__(self, clauses: Mapping[str, str], expected: str = "", *, hint: str = ""):
        observed = " and ".join(f"{option} {clause}" for option, clause in clauses.items())
        super().__init__(observed, expected, hint=hint, code=Exit.USAGE)
        self._clauses, self._expected, self._hint = clauses, expected, hint

    def renamed(self, name_of: Callable[[str], str]) -> "OptionError":
        """Makes the error in which options have the names that a user of the command knows: its flags."""
        clauses = {name_of(option): clause for option, clause in self._clauses.items()}
        return OptionError(clauses, self._expected, hint=self._hint)


def io_error(e: OSError, output: Path, hint: str = "") -> CheckpointError:
    """Says which file could not be read or written."""
    verb = "read" if isinstance(e, ReadError) else "written"
    return CheckpointError(f"cannot be {verb} ({e.strerror})", file=e.filename or output, hint=hint, code=Exit.IO)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Says that a file could not be read."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot be read ({e.strerror})", file=path, code=Exit.IO) from e
