"""Copies the files beside the weights, such as a tokenizer."""

import re
import shutil
from pathlib import Path

from .files import replacing
from .source import CONFIG, HF_QUANT, links_outside

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# The names that files of a model have. Beside a single input file there may be files of anything else.
_KNOWN = re.compile(r".*\.(?:json|model|txt|jinja|py|md)|(?:LICEN[CS]E|NOTICE|COPYING|README)(?:[-_.].*)?", re.DOTALL)


def copy_companions(directory: Path, output: Path, single_file: bool = False) -> tuple[str, ...]:
    """Copies the files that are neither weights, nor hidden, nor configs that the output has its own of.

    Args:
      directory: the directory of the model.
      output: an existing directory.
      single_file: whether the user named one file, so that only files with names of a model's files are copied.

    Returns:
      a warning for each link that leads out of the directory or to nothing, which is not copied.
    """
    warnings = []
    for path in sorted(directory.iterdir()):
        if path.name.endswith(_WEIGHTS) or path.name.startswith(".") or path.name in (CONFIG, HF_QUANT):
            continue
        if single_file and not _KNOWN.fullmatch(path.name):
            continue
        if path.is_symlink() and not path.exists():
            warnings.append(f"{path}: a link to nothing, not copied")
        elif path.is_file() and links_outside(path, directory):
            warnings.append(f"{path}: a link out of the directory, not copied")
        elif path.is_file():
            with replacing(output / path.name) as temporary:
                shutil.copyfile(path, temporary)
    return tuple(warnings)
