"""The Python blocks of the README and of docs/ run as written, each file in a process of its own; links are whole."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jnvfp4
from jnvfp4._reports.support import support_table
from jnvfp4.spec import SUPPORTED_SPECS, name_of

ROOT = pathlib.Path(__file__).parent.parent
NEEDS = {"models.md": ("flax", "optax", "qwix", "equinox")}  # libraries that jnvfp4 does not depend on, by page
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in NAMES), *DOCS]


def python_blocks(page: pathlib.Path) -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))


README, *PAGES_OF_CODE = sorted((p for p in PAGES if python_blocks(p)), key=lambda p: p.name != "README.md")


@pytest.mark.parametrize(
    "page", [README, *(pytest.param(p, marks=pytest.mark.long) for p in PAGES_OF_CODE)], ids=lambda p: p.name
)
def test_code_blocks_run(page, tmp_path):
    for library in NEEDS.get(page.name, ()):
        pytest.importorskip(library)
    script = tmp_path / "blocks.py"
    script.write_text(python_blocks(page))
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if page.name == "sharding.md" else {})  # which needs eight devices
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ten_lines_are_added_to_a_model():
    """Linen and NNX by the lines that are marked; Qwix by the whole block."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "models.md").read_text(), flags=re.M | re.S)
    marked = [count for block in blocks if (count := len(re.findall(r"#.*\badded\b", block, flags=re.M)))]
    assert len(marked) == 2
    assert max(marked) <= 10
    (driven,) = (block for block in blocks if "qwix.quantize_model" in block)
    assert len(driven.splitlines()) <= 10


def test_the_specs_in_the_documents_are_the_list_of_specs():
    """docs/support.md counts the specs that `python -m jnvfp4 support` prints, and names those with a name."""
    names = {name_of(spec) for spec in SUPPORTED_SPECS}
    assert len(names) == len(SUPPORTED_SPECS)
    assert all(f"| `{name}` |" in support_table() for name in names)
    named = {name for name in names if hasattr(jnvfp4, name)}
    page = (ROOT / "docs" / "support.md").read_text()
    chosen = sum(spec.select in ("mae", "mse") for spec in SUPPORTED_SPECS)
    rest = len(names - named) - chosen
    assert f"{len(names)} specs: {len(named)} below, the {chosen} of `four_over_six" in page
    assert f"and the {rest} of `QuantSpec(" in page
    assert named <= set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*?\|", page, flags=re.M))))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_placeholder_is_left(page):
    assert not re.search(r"\b(COMMIT|TODO|FIXME|XXX)\b(?!=)", re.sub(r"`[^`]*`", "", page.read_text()))


def prose(page: pathlib.Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), flags=re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return {name if not (before := found[:i].count(name)) else f"{name}-{before}" for i, name in enumerate(found)}


def broken_links(page: pathlib.Path) -> list[str]:
    links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    targets = [((page.parent / path) if path else page, anchor) for path, anchor in links]
    return [
        f"{target.name}#{anchor}"
        for target, anchor in targets
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_exist(page):
    """Files, and anchors of headings."""
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b_c`: d's\n## E\n## E\n```text\n# no heading\n```\n"
        "[a](#a-b_c-ds) [e](page.md#e-1) [x](#no-heading) [y](none.md) [z](page.md#e-2) `[i](none.md)` [w](http://a.b/#c)"
    )
    assert broken_links(page) == ["page.md#no-heading", "none.md#", "page.md#e-2"]


def test_the_pages_are_short():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    assert len(readme.split()) <= 1100
    assert len(DOCS) <= 10
    assert sum(len(page.read_text().splitlines()) for page in DOCS) <= 2110


# ---------------------------------------------------------------- files that people and hosts look for
def required(form: dict) -> str:
    """What a form does not do without."""
    fields = [f["attributes"] for f in form["body"] if f.get("validations", {}).get("required")]
    return "\n".join(f"{field['label']}: {field['description']}" for field in fields if "description" in field)


def test_forms_ask_for_what_the_commands_print():
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert "`jnvfp4 doctor --json`" in required(forms["bug"])
    assert "`out/blackwell.tar.gz`" in required(forms["blackwell"])
    assert all(form["name"] and form["description"] for name, form in forms.items() if name != "config")


def test_the_workflow_runs_what_everybody_runs():
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == jnvfp4.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["authors"] == project["authors"] == [{"name": "The jnvfp4 authors"}]
    assert citation["license"] == project["license"]


def test_the_readme_lists_all_pages():
    listed = (ROOT / "README.md").read_text().split("## Documentation")[1]
    assert set(re.findall(r"\(docs/(\w+\.md)\)", listed)) == {page.name for page in DOCS}
