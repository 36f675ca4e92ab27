"""Checks of what is installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from stormd.doctor import installed


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "package_versions", lambda: {"torch": "2.13.0", "uvloop": None})
    finding = installed.check_packages()
    assert (finding.state, finding.advice) == ("fail", "pip install uvloop")


@pytest.mark.parametrize(
    ("version", "state"), [("2.9.1", "fail"), ("2.11.0+cu130", "ok"), ("10.0", "ok")]
)
def test_torch_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    assert installed.check_packages().state == state


def test_the_codec_is_tried_for_real() -> None:
    finding = installed.check_codec()
    assert finding.state == "ok", finding
    assert "numpy" in finding.detail


def test_without_a_compiler_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = installed.check_compiled()
    assert finding.state == "warn"
    assert "no C++ compiler was found" in finding.detail
    assert "python -m storm_client.native`" in finding.advice
