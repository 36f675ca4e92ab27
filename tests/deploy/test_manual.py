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


@pytest.fixture(scope="module")
def page() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        render = runpy.run_path(str(MAN / "render.py"))["render_manual"]
        return str(render(parser()))


def test_the_installed_page_is_the_parser_s(page: str) -> None:
    assert PAGE.read_text() == page, "make man"


def test_every_setting_is_explained(page: str) -> None:
    for option in config_options():
        flag = option.flag.replace("-", r"\-")
        assert f"\\fB{flag}" in page
        assert option.variable in page


def test_no_line_is_taken_for_a_macro_by_accident(page: str) -> None:
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
