"""The site: every public name is on one page of docs/api and has a docstring, and a strict build has no warning."""

import ast
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest
from conftest import skip_or_fail

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
STUBS = sorted((ROOT / "docs" / "api").glob("*.md"))
SHOWN = {page.name: re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M) for page in STUBS}
TYPES = SHOWN.pop("types.md")  # what signatures name, also of private modules; their definition says all
LISTED = [name for names in SHOWN.values() for name in names]
PUBLIC_MODULES = ("", "checkpoints", "equinox", "flax", "flax.linen", "flax.nnx", "haliax", "policy", "qwix", "recipes")
PUBLIC_MODULES += ("attention", "calibration", "remat", "sharding", "stats")
ELSEWHERE = {"jnvfp4.recipes.Recipe", "jnvfp4.policy.Policy", "jnvfp4.policy.Rule"}
WHOLE = {"jnvfp4.reference", "jnvfp4.spec.four_over_six"}  # a module, with all that it has; and one name of another


def public_names(module: str) -> set[str]:
    """Reads a module without importing it: ``__all__``; or what it defines, and what it imports as the same name."""
    path = ROOT.joinpath("jnvfp4", *module.split("."))
    source = path.with_suffix(".py") if module and path.with_suffix(".py").exists() else path / "__init__.py"
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=value):
                return set(ast.literal_eval(value))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(name)]):
                names.add(name)
            case ast.ImportFrom(names=imported, module=of) if of is not None:  # not modules
                names |= {alias.name for alias in imported if alias.asname == alias.name}
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_is_on_one_page():
    public = {f"jnvfp4.{m}.{name}" if m else f"jnvfp4.{name}" for m in PUBLIC_MODULES for name in public_names(m)}
    assert set(LISTED) - WHOLE == public - ELSEWHERE - set(TYPES)
    assert max(Counter(LISTED + TYPES).values()) == 1


def test_pages_of_names_are_short():
    """They hold names and headings; words are in docstrings."""
    assert all(len(page.read_text().splitlines()) <= 80 for page in STUBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_has_one_title(page):
    """The table of contents of a page is what stands below its first title."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert len(re.findall(r"^# ", text, flags=re.M)) == 1


def mkdocs_or_skip() -> None:
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")):
        skip_or_fail("docs", "mkdocs-material or mkdocstrings is not installed")


def test_every_public_name_has_a_docstring():
    mkdocs_or_skip()
    import griffe

    package = griffe.load("jnvfp4", search_paths=[ROOT])
    rules = [f"jnvfp4.reference.{name}" for name in public_names("reference") if name.islower()]
    without = [name for name in LISTED + rules if not package[name.removeprefix("jnvfp4.")].has_docstring]
    assert not without


@pytest.mark.long
def test_the_site_builds_in_strict_mode(tmp_path):
    mkdocs_or_skip()
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
