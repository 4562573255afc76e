"""docs/internals.md is true: its modules hold every file, imports go only where it says, and its paths exist.

Its list of operations and the lists of docs/kernels.md are those of the code.
"""

import ast
import functools
import pathlib
import re
from typing import NamedTuple

import pytest

from jnvfp4._native import load, plans
from jnvfp4._ops.arguments import OPERATIONS
from jnvfp4._primitives._base import PRIMITIVES

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "internals.md").read_text()
SUFFIXES = (".py", ".typed", ".h", ".cc", ".cu", ".cuh")
# Libraries that the page says which modules may use: the first part of an import, or the start of a C++ header.
PYTHON_LIBRARIES = {"jax": "JAX", "flax": "Flax", "qwix": "Qwix", "haliax": "haliax", "equinox": "Equinox"}
CPP_LIBRARIES = {"xla/": "XLA", "nanobind/": "nanobind", "cuda": "CUDA"}
PATH = re.compile(r"`((?:jnvfp4|ffi|docs|tests|cmake|examples|benchmarks)/[^`]*|[\w.]+\.(?:md|txt|toml))`")


class Module(NamedTuple):
    """One line of the tables of modules."""

    name: str
    patterns: list[str]
    may_use: set[str]


def rows(page: str, *header: str) -> list[list[str]]:
    """The cells of every table of a page that has these headings."""
    found, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells == list(header):
            inside = True
        elif not cells:
            inside = False
        elif inside and not set(line) <= set("|- "):
            found.append(cells)
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


MODULES = [
    Module(
        name,
        code(files),
        set(code(uses)) | set(re.findall(r"\b(?:JAX|Flax|Qwix|Equinox|haliax|XLA|CUDA|nanobind)\b(?!\.py)", uses)),
    )
    for name, files, _, uses in rows(PAGE, "module", "files", "what it holds", "may use")
    for name in code(name)
]
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("jnvfp4", "ffi")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES
)


def modules_of(file: pathlib.PurePath) -> list[Module]:
    return [module for module in MODULES if any(file in paths_of(pattern) for pattern in module.patterns)]


@functools.cache
def paths_of(pattern: str) -> list[pathlib.Path]:
    return [path.relative_to(ROOT) for path in ROOT.glob(pattern)]


@functools.cache
def module_of(file: pathlib.PurePath) -> Module:
    (module,) = modules_of(file)
    return module


# ---------------------------------------------------------------- what a file uses
def file_of(parts: list[str]) -> pathlib.Path | None:
    for path in (pathlib.Path(*parts).with_suffix(".py"), pathlib.Path(*parts, "__init__.py")):
        if (ROOT / path).is_file():
            return path
    return None


def python_uses(file: pathlib.Path) -> set[pathlib.Path | str]:
    """The files of the package and the libraries that a Python file imports, in functions too."""
    uses: set[pathlib.Path | str] = set()
    package = list(file.parent.parts)
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            imported = [(alias.name.split("."), ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            imported = [([*base, *filter(None, (node.module or "").split("."))], tuple(a.name for a in node.names))]
        else:
            continue
        for parts, names in imported:
            if parts[0] == "jnvfp4":
                uses |= {file_of([*parts, name]) or file_of(parts) for name in names or [""] if parts}
            elif parts[0] in PYTHON_LIBRARIES:
                uses.add(PYTHON_LIBRARIES[parts[0]])
    return uses


def cpp_uses(file: pathlib.Path) -> set[pathlib.Path | str]:
    uses: set[pathlib.Path | str] = set()
    for header in re.findall(r'^#include [<"]([^>"]+)[>"]', (ROOT / file).read_text(), flags=re.M):
        library = next((name for start, name in CPP_LIBRARIES.items() if header.startswith(start)), None)
        if library:
            uses.add(library)
        elif (ROOT / file.parent / header).is_file():
            uses.add((ROOT / file.parent / header).resolve().relative_to(ROOT.resolve()))
    return uses


@functools.cache
def uses_of(file: pathlib.Path) -> set[pathlib.Path | str]:
    return python_uses(file) if file.suffix == ".py" else cpp_uses(file)


def modules_used(module: Module) -> dict[str, list[str]]:
    """The modules and libraries that a module uses, each with the files that use it."""
    used: dict[str, list[str]] = {}
    for file in FILES:
        if file.suffix == ".typed" or module not in modules_of(file):
            continue
        for target in uses_of(file):
            name = target if isinstance(target, str) else module_of(target).name
            if name != module.name:
                used.setdefault(name, []).append(f"{file} uses {target}")
    return used


def cycle(graph: dict[pathlib.Path, set[pathlib.Path]]) -> list[pathlib.Path]:
    """Files that use each other in a circle; empty if there are none."""
    left = dict(graph)
    while leaves := [file for file, targets in left.items() if not targets & left.keys()]:
        for file in leaves:
            del left[file]
    return sorted(left)


# ---------------------------------------------------------------- modules
def test_every_file_is_in_one_module():
    assert {str(file): [r.name for r in modules_of(file)] for file in FILES if len(modules_of(file)) != 1} == {}


def test_every_pattern_has_files():
    assert [pattern for module in MODULES for pattern in module.patterns if not paths_of(pattern)] == []


def test_a_module_stands_above_those_it_uses_in_the_picture():
    picture = re.search(r"```text\n(.*?)```", PAGE, flags=re.S).group(1).splitlines()
    lines = {
        module.name: next((i for i, line in enumerate(picture) if re.search(rf"[| ]{module.name}[| ]", line)), None)
        for module in MODULES
    }
    assert [name for name, line in lines.items() if line is None] == []
    uses = [(module.name, other) for module in MODULES for other in module.may_use & lines.keys()]
    assert [(name, other) for name, other in uses if lines[name] >= lines[other]] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_module_uses_what_the_table_says(module):
    used = modules_used(module)
    assert {name: files for name, files in used.items() if name not in module.may_use} == {}
    assert module.may_use == set(used), "the table names a module that nothing uses"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_module_uses_only_modules_above_it_in_the_table(module):
    above = {other.name for other in MODULES[: MODULES.index(module)]}
    libraries = {*PYTHON_LIBRARIES.values(), *CPP_LIBRARIES.values()}
    assert module.may_use - libraries <= above


@functools.cache
def arrows_in(folder: pathlib.Path) -> dict[pathlib.Path, set[pathlib.Path]]:
    """What each file of a folder, and each folder in it, uses of the others."""
    used: dict[pathlib.Path, set[pathlib.Path]] = {}
    for file in FILES:
        if folder in file.parents and file.suffix != ".typed":
            start, *ends = (folder / path.relative_to(folder).parts[0] for path in (file, *files_used(file, folder)))
            used.setdefault(start, set()).update({*ends} - {start})
    return used


def files_used(file: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    package = pathlib.Path("jnvfp4/__init__.py")  # importing any of it runs it
    return [
        path for path in uses_of(file) if isinstance(path, pathlib.Path) and folder in path.parents and path != package
    ]


FOLDERS = sorted({folder for file in FILES for folder in file.parents if folder.name})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_nothing_in_a_folder_uses_each_other_in_a_circle(folder):
    """Neither its files nor its folders, each of which is on one floor: what it uses does not use it."""
    assert cycle(arrows_in(folder)) == []


def test_circles_are_found():
    a, b, c = map(pathlib.Path, "abc")
    assert cycle({a: {b}, b: {a}, c: set()}) == [a, b]
    assert sum(len(ends) for folder in FOLDERS for ends in arrows_in(folder).values()) > 300


def test_shared_parts_of_primitives_use_no_primitive():
    arrows = arrows_in(pathlib.Path("jnvfp4/_primitives"))
    primitives = {file for file in arrows if not file.name.startswith("_")}
    assert {
        file.name: arrows[file] & primitives for file in arrows.keys() - primitives if arrows[file] & primitives
    } == {}


# ---------------------------------------------------------------- paths and lists
@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_paths_in_the_documents_exist(page):
    """A path with a <name> to choose is a pattern; a path may end in a line's address."""
    paths = [re.sub(r"<\w+>", "*", path.split("::")[0].split(" ")[0]) for path in PATH.findall(page.read_text())]
    assert [path for path in paths if not paths_of(path.rstrip("/"))] == []


def test_the_files_to_change_are_counted():
    table = rows(PAGE, "to add", "files", "which")
    assert len(table) == 5
    assert [(what, int(count)) for what, count, which in table] == [(row[0], len(code(row[2]))) for row in table]


def targets_of(platform: str) -> set[str]:
    return set(re.findall(r'\{"(nvfp4_\w+)"', (ROOT / "ffi" / platform / "module.cc").read_text()))


def test_the_targets_in_the_source_are_those_of_the_extensions():
    for platform, extension in load.extensions().items():
        assert targets_of(platform) == set(extension.targets)


def test_the_operations_primitives_and_targets_of_the_documents():
    table = rows(PAGE, "operation", "primitives", "FFI targets")
    operations, primitives, targets = (
        {name for row in table for name in re.findall(pattern, row[column])}
        for column, pattern in enumerate((r"`(\w+)`", r"`(nvfp4_\w+)`", r"`(nvfp4_\w+)`"))
    )
    assert operations == set(OPERATIONS)
    assert primitives == {primitive.name for primitive in PRIMITIVES}
    assert targets == targets_of("cpu") | targets_of("cuda")


def test_the_kernels_of_products_in_the_documents():
    table = rows((DOCS / "kernels.md").read_text(), "kernel", "runs on", "operands", "sum along K", "file")
    assert tuple(name for row in table for name in code(row[0])) == plans.matmul_kernels()
    table = rows((DOCS / "kernels.md").read_text(), "grouped kernel", "runs on", "operands", "sum along K", "file")
    assert tuple(name for row in table for name in code(row[0])) == plans.grouped_kernels()


def test_the_cuda_kernels_in_the_documents():
    page = (DOCS / "kernels.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "ffi" / "cuda").rglob("*.cu*"))
    kernels = {re.search(r"(\w+_kernel)\(", text).group(1) for text in sources.split("__global__")[1:]}
    assert len(kernels) > 15
    assert set(re.findall(r"`(\w+_kernel)`", page)) == kernels
