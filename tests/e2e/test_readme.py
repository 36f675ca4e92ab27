"""What the README says exists: its targets, commands, files, and its two lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def _make_commands() -> list[str]:
    """The README's command lines of make, without their comments."""
    lines = re.findall(r"^    (make .*)$", TEXT, flags=re.MULTILINE)
    return [line.split("#")[0].strip() for line in lines]


def test_make_targets_exist_and_two_commands_come_first() -> None:
    commands = _make_commands()
    assert commands[:2] == ["make demo", "make test"]
    phony = MAKEFILE.partition(".PHONY:")[2].splitlines()[0]
    for command in commands:
        target = command.split()[1]
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE)
        assert target in phony


def test_it_is_read_in_minutes() -> None:
    assert len(TEXT.split()) <= 800


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_two_lines_are_the_examples() -> None:
    block = TEXT.partition("```diff\n")[2].partition("```")[0]
    shown = {line[1:].strip() for line in block.splitlines() if line.startswith("+")}
    example = (ROOT / "client" / "examples" / "gpt_offload.py").read_text()
    for line in ("import storm_client as storm", "offload = storm.offload(model)", "with offload:"):
        assert line in shown
        assert line in example


def test_ci_runs_lint_and_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make lint" in script
    assert "make test" in script
