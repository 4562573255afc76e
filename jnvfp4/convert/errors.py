"""What goes wrong with a checkpoint, as one line with a hint, and the exit code of the command."""

from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    OK = 0
    USAGE = 2
    BAD_INPUT = 3
    CONFLICT = 4  # of the plan with what loaders read
    VERIFICATION = 5
    IO = 6
    INTERRUPTED = 130


MOST_TEXT = 1000  # characters; a damaged file can have any name for anything


def _line(text: str) -> str:
    if len(text) > MOST_TEXT:
        text = f"{text[: MOST_TEXT // 2]}...{text[-MOST_TEXT // 2 :]}"
    return " ".join(text.splitlines())


class CheckpointError(Exception):
    """One line: file, tensor, what was observed and what is expected; then a hint.

    Args:
      observed: what is there, as a clause.
      expected: what is accepted.
      file: the file it is in, if any.
      tensor: the tensor it is about, if any.
      hint: what to do about it.
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
        where = [str(file)] if file is not None else []
        if tensor is not None:
            where.append(f"tensor {tensor!r:.200}")
        text = ": ".join([*where, observed])
        if expected:
            text += f"; expected {expected}"
        super().__init__(_line(text) + (f"\nhint: {_line(hint)}" if hint else ""))
        self.code = code
        self.file, self.tensor = file, tensor
