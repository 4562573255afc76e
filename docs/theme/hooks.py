"""Makes pages of the site from files outside docs/ and from code: README.md is the home page."""

import argparse
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jnvfp4._reports.support import support_table
from jnvfp4.cli import _parser

log = get_plugin_logger("hooks")
ROOT = Path(__file__).parents[2]
OUTSIDE = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md", "CONTRIBUTING.md": "contributing.md"}
OUTSIDE |= {"SECURITY.md": "security.md", "jnvfp4/conformance/README.md": "conformance.md"}
LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".cu": "cuda", ".cuh": "cuda", "": "bash", ".txt": "text"}
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


# ---------------------------------------------------------------- files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of ``OUTSIDE`` and every file of the repository that a page links to."""
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for page in files.documentation_pages():
        for _, _, link, _ in LINK.findall(page.content_string):
            path = _repository_path(page.src_uri, link)
            uri = _uri(path)
            if uri is not None and uri.startswith("source/") and uri not in files.src_uris:
                files.append(_source_file(config, path, uri))
    return files


def _repository_path(uri: str, link: str) -> str:
    """Finds the path in the repository that a page of the site links to."""
    source = next((path for path, page in OUTSIDE.items() if page == uri), f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _uri(path: str) -> str | None:
    """Finds where the site has a file of the repository; None for what it has not, such as a folder."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in OUTSIDE or f"{path}/README.md" in OUTSIDE:
        return OUTSIDE.get(path) or OUTSIDE[f"{path}/README.md"]
    if not (ROOT / path).is_file():
        return None
    return f"source/{path}" + ".md" * (Path(path).suffix in LANGUAGES)


def _source_file(config: MkDocsConfig, path: str, uri: str) -> File:
    if not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    language = LANGUAGES[Path(path).suffix]
    head = f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path}"
    return File.generated(config, uri, content=f"{head}\n\n~~~~~~{language}\n{(ROOT / path).read_text()}\n~~~~~~\n")


# ---------------------------------------------------------------- text
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where the site has the file, and fills in what code knows."""
    uri = page.file.src_uri

    def rewritten(match: re.Match) -> str:
        picture, text, link, anchor = match.groups(default="")
        path = _repository_path(uri, link)
        target = _uri(path)
        if target is not None:
            if text.strip("[]`").endswith(".md"):  # a reader of the site knows pages by their titles
                text = f"[{_title(files, target) or text[1:-1]}]"
            link = f"({posixpath.relpath(target, posixpath.dirname(uri))}{anchor})"
            return f"[!{text}{link}]{link}" if picture else text + link  # a picture opens in full size
        return text[1:-1] if (ROOT / path).is_dir() else match[0]  # MkDocs warns of a file that is nowhere

    for marker, generate in (("<!-- specs -->", support_table), ("<!-- commands -->", _commands)):
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return markdown if uri.startswith("source/") else LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of the pages that docstrings name."""

    def link(match: re.Match) -> str:
        title = _title(files, match[1])
        if title is None:
            log.warning("%s names docs/%s, which does not exist", page.file.src_uri, match[1])
        return f'<a href="../../{match[1].removesuffix(".md")}/">{title}</a>'

    return re.sub(r"\bdocs/(\w+\.md)\b", link, html) if page.file.src_uri.startswith("api/") else html


def _title(files: Files, uri: str) -> str | None:
    file = files.get_file_from_path(uri)
    return str(file.page.title) if file is not None and file.page is not None else None


# ---------------------------------------------------------------- the command line
def _commands() -> str:
    """Describes each command by its parser."""
    parser = _parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(_command(command) for command in commands.choices.values())


def _command(parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    if len(usage) > 100:
        usage = f"{parser.prog} [OPTIONS] " + " ".join(a.metavar for a in parser._actions if not a.option_strings)
    text, _, example = (parser.description or "").partition("\n\nexample: ")
    lines = [f"## {parser.prog}", text, "```text", usage, *([example] if example else []), "```"]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest != "help"]
        if actions and group.title not in ("positional arguments", "options"):
            title, example = str(group.title), (group.description or "").removeprefix("example: ")
            lines += [f"### {title[0].upper()}{title[1:]}", f"```text\n{example}\n```"]
        lines += [_action(action) for action in actions]
    return "\n\n".join(lines).replace("```text\n\n", "```text\n").replace("\n\n```\n", "\n```\n")


def _action(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    several = " ..." if action.nargs == "+" else ""
    name = ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}{several}")
    text = re.sub(r"([\\*_<[])", r"\\\1", action.help or "")
    return f"`{name.strip()}`\n:   {text}"
