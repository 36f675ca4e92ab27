"""Checks of what is installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from stormd.doctor import codec


def test_packages_are_there() -> None:
    finding = codec.check_packages()
    assert finding.state == "ok"
    assert f"torch {metadata.version('torch')}" in finding.detail


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "package_versions", lambda: {"torch": "2.13.0", "uvloop": None})
    finding = codec.check_packages()
    assert (finding.state, finding.advice) == ("fail", "pip install uvloop")


@pytest.mark.parametrize(
    ("version", "state"), [("2.9.1", "fail"), ("2.11.0+cu130", "ok"), ("10.0", "ok")]
)
def test_torch_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    assert codec.check_packages().state == state


def test_the_codec_is_tried_for_real() -> None:
    finding = codec.check_codec()
    assert finding.state == "ok", finding
    assert "numpy" in finding.detail


def test_the_c_library_is_reported() -> None:
    assert codec.check_c_library().state in ("ok", "warn")
