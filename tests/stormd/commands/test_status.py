"""`stormd status` against a real daemon."""

from __future__ import annotations

import json

import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd import __version__, cli

STATUS = ["status", "--timeout=30"]
"""A daemon on a busy machine may take longer than the two seconds that are the default."""


def test_json_has_what_is_promised(daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*STATUS, "--address", daemon.address, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["version"] == __version__
    assert state["uptime_seconds"] > 0
    assert state["pool"]["capacity_bytes"] == 8 << 20
    assert state["pool"]["used_bytes"] == 0
    assert state["entries"] == 0
    assert state["sessions"] == []


def test_the_table_is_of_the_daemon_that_the_environment_names(
    daemon: ChildDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORMD_ADDRESS", daemon.address)
    assert cli.main(STATUS) == 0
    shown = capsys.readouterr().out
    for part in (daemon.address, __version__, "8.0 MiB", "no sessions"):
        assert part in shown
