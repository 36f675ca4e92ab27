"""Every command of ours that a document shows is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormd import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for folder in ("docs", "deploy", "client", "kernels", "stormd", ".")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if path.name != "CHANGELOG.md"
)

SHOWN = re.compile(r"(?:^|[`$&'/ ])stormd((?: +[^\s`'|>&#]+)+)", re.MULTILINE)
"""In a line of code, or between backquotes: up to what is the shell's or ends the quotation."""

PLACEHOLDER = re.compile(r"\[|\.\.\.|\u2026|[A-Z]{3,}")


def shown(text: str) -> Iterator[str]:
    """Yield what follows \"stormd\" in the code of a document."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    quoted = "\n".join(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    commands = "|".join(("run", "serve", "status", "top", "doctor", "bench", "demo"))
    for found in SHOWN.findall("\n".join((fenced, indented, quoted))):
        if re.match(rf" +(?:{commands})\b", found) and not PLACEHOLDER.search(found):
            yield found.partition(": ")[0].strip()


def test_documents_show_commands() -> None:
    found = {command for path in DOCUMENTS for command in shown(path.read_text("utf-8"))}
    assert len(found) > 20
    assert "bench train --together --budgets 0.1 0.25 0.4 0.55 0.7 0.85" in found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_taken(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in shown(path.read_text("utf-8")):
        try:
            cli.parser().parse_args(shlex.split(command))
        except SystemExit as end:
            if end.code:
                pytest.fail(f"stormd {command}: {capsys.readouterr().err}")
