"""`stormd top` against a real daemon."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd import cli

TOP = ["top", "--timeout=30"]
"""A daemon on a busy machine may take longer than the two seconds that are the default."""


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["views", "json"])
def test_a_reader_of_a_pipe_gets_each_look_at_once_and_may_leave(
    daemon: ChildDaemon, form: list[str]
) -> None:
    command = [sys.executable, "-m", "stormd.cli", *TOP, "--address", daemon.address, *form]
    with subprocess.Popen(
        [*command, "--interval", "0.01"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as top:
        assert top.stdout.readline()
        top.stdout.close()
        assert top.stderr.read() == b""
        assert top.wait(30) in (1, 141)


def test_looks_as_often_as_asked_with_rates_from_the_second_on(
    daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*TOP, "--address", daemon.address, "--count", "2", "--interval", "0.01"]
    assert cli.main(line) == 0
    assert capsys.readouterr().out.count("no sessions") == 2, "a pipe gets each look"
    assert cli.main([*line, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["rates"] is None
    assert second["rates"] == {"store": 0.0, "restore": 0.0, "links": {}, "disk": {}}
