"""A short hash of the C++ and CUDA sources, compiled into the extensions and compared at import.

A script too: the build runs it (``python source_hash.py FFI_FOLDER``).
"""

import hashlib
import pathlib
import sys


def source_hash(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(source_hash(pathlib.Path(sys.argv[1])))
