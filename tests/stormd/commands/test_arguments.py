"""Values on the command line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from stormd.commands.arguments import (
    check_picture,
    positive_int,
    positive_seconds,
)
from stormd.errors import ConfigError


def test_positive_numbers() -> None:
    assert positive_int("7") == 7
    assert positive_seconds("0.5") == 0.5


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_int(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "x", ""])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_seconds(text)


def test_pictures_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    check_picture(None)
    check_picture("ratios.png")
    check_picture(str(tmp_path / "ratios.svg"))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("", "must end in one of .png, .svg, .pdf"),
        ("ratios", "'ratios' must end in"),
        ("ratios.xyz", "'ratios.xyz' must end in"),
        ("missing/ratios.png", "create the folder 'missing' first"),
    ],
)
def test_pictures_that_cannot_be_written(
    image: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_picture(image)
