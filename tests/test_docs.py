"""The Python blocks of the README and of docs/ run as written, each file in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import skip_unless_haliax_runs

from jnvfp4._reports.support import support_table
from jnvfp4.spec import SUPPORTED_SPECS

ROOT = pathlib.Path(__file__).parent.parent
NEEDS = {  # libraries that jnvfp4 does not depend on, by page
    "flax.md": ("flax", "optax", "qwix"),
    "haliax.md": ("optax",),
}
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: pathlib.Path) -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))


README, *PAGES_OF_CODE = sorted((p for p in PAGES if python_blocks(p)), key=lambda p: p.name != "README.md")


@pytest.mark.parametrize(
    "page", [README, *(pytest.param(p, marks=pytest.mark.long) for p in PAGES_OF_CODE)], ids=lambda p: p.name
)
def test_code_blocks_run(page, tmp_path):
    for library in NEEDS.get(page.name, ()):
        pytest.importorskip(library)
    if page.name == "haliax.md":
        skip_unless_haliax_runs()
    script = tmp_path / "blocks.py"
    script.write_text(python_blocks(page))
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("page", "examples"), [("flax.md", 2), ("haliax.md", 1)])
def test_ten_lines_are_added_to_a_model(page, examples):
    """Linen, NNX and haliax by the lines that are marked; Qwix by the whole block."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.M | re.S)
    marked = [count for block in blocks if (count := len(re.findall(r"#.*\badded\b", block, flags=re.M)))]
    assert len(marked) == examples
    assert max(marked) <= 10
    driven = [block for block in blocks if "qwix.quantize_model" in block]
    assert all(len(block.splitlines()) <= 10 for block in driven)


def test_the_support_table_is_the_list_of_specs():
    """docs/support.md holds what `python -m jnvfp4 support` prints."""
    page = (ROOT / "docs" / "support.md").read_text()
    assert support_table() in page
    assert f"{len(SUPPORTED_SPECS)} specs" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_placeholder_is_left(page):
    assert not re.search(r"\b(COMMIT|TODO|FIXME|XXX)\b(?!=)", re.sub(r"`[^`]*`", "", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
