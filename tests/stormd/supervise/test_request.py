"""Programs are found as a shell finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormd.errors import CommandUnusable
from stormd.supervise.request import find_program


def test_what_cannot_be_executed_is_126(tmp_path: Path) -> None:
    for file in ("train.py", "train"):
        (tmp_path / file).touch(mode=0o644)
    for name in ("train", str(tmp_path / "train")):
        with pytest.raises(CommandUnusable, match=r"not executable: .* chmod \+x") as caught:
            find_program(name, {"PATH": str(tmp_path)})
        assert caught.value.exit_status == 126
    with pytest.raises(CommandUnusable, match=r"write python /.*/train\.py"):
        find_program(str(tmp_path / "train.py"), {})


def test_what_lies_in_the_current_directory_is_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandUnusable, match=r"on PATH: write python \./train\.py") as caught:
        find_program("train.py", {"PATH": str(tmp_path / "missing")})
    assert caught.value.exit_status == 127


def test_a_directory_is_126(tmp_path: Path) -> None:
    with pytest.raises(CommandUnusable, match="is a directory") as caught:
        find_program(str(tmp_path), {})
    assert caught.value.exit_status == 126
