"""Every message that the troubleshooting page explains still occurs in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("client/storm_client", "stormd", "kernels/storm_kernels")
GAP = "\0"
"""Stands in a text of the source for what is put in when it is shown."""

ROW = re.compile(r"^\| `(?P<message>[^`]+)` \|")


def explained() -> list[str]:
    """Return the messages in the first columns of tables whose heading says so."""
    found, is_message = [], False
    for line in PAGE.read_text().splitlines():
        is_message = (is_message and line.startswith("|")) or line.startswith("| message |")
        row = ROW.match(line)
        if is_message and row is not None:
            found.append(row["message"])
    return found


def _text(node: ast.expr) -> str:
    """Return a text of the source, with a gap for each value that it shows."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return GAP


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = _text(node)
            if text.strip(GAP):
                yield text


@cache
def shown_texts() -> tuple[str, ...]:
    """Return every text in the packages: that of a message may be in several parts."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(text for path in files for text in _texts(path))


def occurs(message: str) -> bool:
    """Tell whether the words of a message, between its dots, stand in one text in their order."""
    words = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message) if part]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return any(pattern.search(text) for text in shown_texts())


def test_the_page_explains_messages() -> None:
    assert len(explained()) > 50
    assert len(set(explained())) == len(explained())


def test_each_message_occurs_in_the_source() -> None:
    for message in explained():
        assert occurs(message), message
    for message in ("the daemon is on holiday", "no daemon ... on holiday"):
        assert not occurs(message), message


def reasons() -> list[str]:
    """Return the reasons that the page's table of them explains."""
    table = PAGE.read_text().partition("| reason |")[2].partition("\n\n")[0]
    return re.findall(r"`([a-z_]+)`", table)


def test_each_reason_is_one_that_the_source_gives() -> None:
    assert set(reasons()) <= set(shown_texts())


def test_every_reason_of_the_policy_is_explained() -> None:
    tree = ast.parse((ROOT / "client/storm_client/policy.py").read_text())
    given = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Keep"
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(given) > 5
    assert given <= set(reasons())
