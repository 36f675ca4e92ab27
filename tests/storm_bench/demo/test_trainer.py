"""The demo's trainer: what it reports, in a process of its own as it sets torch's globals."""

from __future__ import annotations

import json
import subprocess
import sys

COMMAND = [
    *(sys.executable, "-m", "storm_bench.demo.trainer", "--seed=1", "--steps=2", "--threads=1"),
    *("--layers=1", "--width=32", "--heads=2", "--rows=2", "--length=32"),
]


def _reports(*flags: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_reports_every_step_and_the_end() -> None:
    first, second, end = _reports("--dtype=bfloat16")
    assert [first["event"], second["event"], end["event"]] == ["step", "step", "end"]
    assert first["gradients"] != second["gradients"]
    assert isinstance(end["peak_bytes"], int)
    assert end["peak_bytes"] > 1 << 20
    assert end["stats"] is None


def test_an_unreachable_daemon_is_an_error() -> None:
    command = [*COMMAND, "--address=ipc:///no/such/stormd.sock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 1
    assert "DaemonUnavailable" in done.stderr
