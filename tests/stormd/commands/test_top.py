"""`stormd top` against a real daemon."""

from __future__ import annotations

import json

import pytest

from stormd import cli
from stormd.child_daemon import ChildDaemon


def test_looks_as_often_as_asked(daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["top", "--address", daemon.address, "--count", "2", "--interval", "0.01"]
    assert cli.main(line) == 0
    assert "no sessions" in capsys.readouterr().out


def test_json_looks_carry_rates_from_the_second_on(
    daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["top", "--address", daemon.address, "--count", "2", "--interval", "0.01", "--json"]
    assert cli.main(line) == 0
    decoder, text = json.JSONDecoder(), capsys.readouterr().out.lstrip()
    first, end = decoder.raw_decode(text)
    second, _ = decoder.raw_decode(text[end:].lstrip())
    assert first["rates"] is None
    assert second["rates"] == {"store": 0.0, "restore": 0.0, "links": {}}
