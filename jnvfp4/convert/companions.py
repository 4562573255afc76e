"""Files beside the weights, such as a tokenizer: copied as they are."""

import re
import shutil
from pathlib import Path

from jnvfp4.convert.files import whole
from jnvfp4.convert.plan import HF_QUANT
from jnvfp4.convert.source import CONFIG, leads_out

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# Beside a single file there may be anything: only what a model has.
_KNOWN = re.compile(r".*\.(?:json|model|txt|jinja|py|md)|(?:LICEN[CS]E|NOTICE|COPYING|README)(?:[-_.].*)?", re.DOTALL)


def copy_companions(source_directory: Path, dst: Path, single_file: bool = False) -> list[str]:
    """Copies what is neither weights nor a config that is written anew. Links stay behind if they lead elsewhere.

    Args:
      source_directory: where the model is.
      dst: an existing directory.
      single_file: whether the model was named as one file, so that the directory may have other things too.

    Returns: warnings, one for each link that is not followed.
    """
    warnings = []
    for path in sorted(source_directory.iterdir()):
        if path.name.endswith(_WEIGHTS) or path.name.startswith(".") or path.name in (CONFIG, HF_QUANT):
            continue
        if single_file and not _KNOWN.fullmatch(path.name):
            continue
        if path.is_symlink() and not path.exists():
            warnings.append(f"{path}: a link to nothing, not copied")
        elif path.is_file() and leads_out(path, source_directory):
            warnings.append(f"{path}: a link out of the directory, not copied")
        elif path.is_file():
            with whole(dst / path.name) as temporary:
                shutil.copyfile(path, temporary)
    return warnings
