"""Brings the repository's own documents into the site, so that none is written twice.

A page includes a file, or one section of it, by a line of its own:

    <!-- include: README.md # A step -->

Every Markdown file of the repository, and every file that one links to, is also part of the site
under source/, at its own path: links between them work as they do in the repository. A link to a
folder leads to its README.md, or nowhere. What is missing fails a strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("client", "deploy", "kernels", "stormd")
INCLUDE = re.compile(r"^<!-- include: (?P<path>\S+?)(?: # (?P<heading>.+?))? -->$", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the repository's documents, and what they and the pages link to."""
    documents = [*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md"))]
    found = set(documents)
    for document in (*documents, *(ROOT / "docs").glob("*.md")):
        for link in LINK.finditer(document.read_text()):
            target = (document.parent / link["target"]).resolve()
            if target.is_relative_to(ROOT / "docs" / "source"):
                target = ROOT / target.relative_to(ROOT / "docs" / "source")
            if target.is_file() and target.is_relative_to(ROOT):
                found.add(target)
    found -= set((ROOT / "docs").glob("*.md"))
    for path in sorted(found):
        name = f"source/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put in what a page includes; turn links to folders of the repository into ones to files."""
    name = page.file.src_uri
    if name.startswith("source/"):
        path = name.removeprefix("source/")
        back = "../" * name.count("/")
        return _moved(_with_folders(markdown, path), path, page_prefix=back, source_prefix=None)
    return INCLUDE.sub(lambda found: _included(found["path"], found["heading"]), markdown)


def _included(path: str, heading: str | None) -> str:
    """Return a document or a section of it, with links as they lead from a page of the site."""
    file = ROOT / path
    if not file.is_file():
        raise PluginError(f"a page includes {path}, which the repository does not have")
    text = _with_folders(file.read_text(), path)
    if heading is not None:
        text = _section(text, path, heading)

    return _moved(text, path, page_prefix="", source_prefix="source/")


def _moved(text: str, path: str, *, page_prefix: str, source_prefix: str | None) -> str:
    """Return a document's text with links as they lead from where it is shown.

    What it links to in docs/ is a page of the site; the rest lies under `source_prefix`, or where
    the document expects it if that is None.
    """

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["target"]))
        if target.startswith("docs/"):
            target = page_prefix + target.removeprefix("docs/")
        elif source_prefix is None:
            return link[0]
        else:
            target = source_prefix + target
        return f"[{link['text']}]({target}{link['anchor'] or ''})"

    return LINK.sub(moved, text)


def _section(text: str, path: str, heading: str) -> str:
    """Return what stands below a heading of the second level, up to the next one."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise PluginError(f"a page includes the section {heading!r} of {path}, which has none")
    return found[1]


def _with_folders(markdown: str, path: str) -> str:
    """Have links to folders lead to their README.md, or leave their text alone."""

    def changed(link: re.Match[str]) -> str:
        folder = ROOT / posixpath.dirname(path) / link["target"]
        if not folder.is_dir():
            return link[0]
        if not (folder / "README.md").is_file():
            return link["text"]
        return f"[{link['text']}]({link['target'].rstrip('/')}/README.md)"

    return LINK.sub(changed, markdown)
