"""Whether an output fits on its disk."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from jnvfp4.convert.errors import CheckpointError, Exit


def check_room(dst: Path, sizes: Sequence[int]) -> None:
    """Raises where files of these sizes, and the largest once more, are more than what is free."""
    need = sum(sizes) + max(sizes, default=0)
    there = next(p for p in (dst.absolute(), *dst.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < need:
        raise CheckpointError(f"has {free} bytes free", f"{need} for the output", file=there, code=Exit.IO)
