"""`stormd status` against a real daemon."""

from __future__ import annotations

import json

import pytest
from storm_bench.child_daemon import ChildDaemon
from support.raw_client import RawClient

from stormd import __version__, cli
from stormd.protocol import Ping, PlanLearned

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


@pytest.mark.parametrize("command", [STATUS, ["top", "--timeout=30", "--count=1"]])
def test_what_a_client_says_is_shown_as_it_is(
    daemon: ChildDaemon, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as markup, of which a tag that nothing opened would end the command."""
    with RawClient(daemon.address) as client:
        client.open()
        plan = dict.fromkeys(("kept_bytes", "offloaded_bytes", "replayed_bytes"), 1)
        client.send(PlanLearned(**plan, budget="[/x] :cat:"))
        client.ask(Ping())
        assert cli.main([*command, "--address", daemon.address]) == 0
    assert "[/x] :cat:" in capsys.readouterr().out
