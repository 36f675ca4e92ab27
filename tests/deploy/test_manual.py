"""The manual page: what packages install is what the parser says."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from stormd.cli import parser
from stormd.config import config_options

MAN = Path(__file__).parents[1].parent / "deploy" / "man"
PAGE = MAN / "stormd.1"


def test_the_installed_page_is_the_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = str(runpy.run_path(str(MAN / "render.py"))["render_manual"](parser()))
    assert PAGE.read_text() == page, "make man"
    for option in config_options():
        flag = option.flag.replace("-", r"\-")
        assert f"\\fB{flag}" in page
        assert option.variable in page
    macros = {line.split()[0] for line in page.splitlines() if line[:1] in (".", "'")}
    assert macros == {".TH", ".SH", ".SS", ".PP", ".TP", ".BR"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_finds_nothing_wrong() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Wbreak", "-z", str(PAGE)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
