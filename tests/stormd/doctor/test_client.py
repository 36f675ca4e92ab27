"""Checks of the compiled client."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormd.doctor import client


def test_a_compiler_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "some-compiler")
    finding = client.check_compiled()
    assert finding.state == "ok", finding
    assert finding.detail.startswith("some-compiler")


def test_without_a_compiler_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = client.check_compiled()
    assert finding.state == "warn"
    assert "no C++ compiler was found" in finding.detail
    assert "python -m storm_client.native`" in finding.advice
