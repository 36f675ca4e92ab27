"""The command line: usage, exit status, and errors as one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from storm_client.transport.handshake import is_listening
from support.daemon_thread import DaemonThread
from support.waiting import wait_until

from stormd import __version__, cli
from stormd.errors import AddressInUse

COMMANDS = ["run", "serve", "status", "top", "doctor", "bench", "demo", "completion"]


WITHOUT_STREAMS = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "stormd"]


def _exit_status(arguments: list[str]) -> int:
    """The status of a command line, also where argparse itself ends it."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("command", ["status", "top", "doctor", "demo"])
def test_commands_that_print_figures_print_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _exit_status([command, "--help"])
    assert "--json" in capsys.readouterr().out


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: stormd")
    assert all(f"    {command} " in out or f"    {command}\n" in out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--no-such-flag"],
        ["status", "--timeout", "-1"],
        ["status", "--address", "tcp://localhost:1"],
        ["top", "--interval", "soon"],
        ["demo", "--steps", "0"],
        ["demo", "--pool-bytes", "2GB"],
        ["bench"],
        ["serve", "--pool-bytes", "17"],
        ["serve", "--pool-bytes", "900TiB"],
        ["serve", "--config", "/no/such/file.toml"],
        ["doctor", "--device", "tpu"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status(arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "top"])
def test_no_daemon_exits_3(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status([command, "--address", "ipc:///no/such/stormd.sock"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("stormd: no daemon to be asked at ipc:///no/such/stormd.sock")
    assert error.count("\n") == 1


def test_a_failure_of_the_daemon_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise AddressInUse("a daemon lives at ipc:///x")

    monkeypatch.setattr("stormd.commands.serve.run", fail)
    assert _exit_status(["serve"]) == 1
    assert capsys.readouterr().err == "stormd: a daemon lives at ipc:///x\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--version"], 0), (["status", "--address", "ipc:///no/such/stormd.sock"], 3)],
)
def test_closed_streams_change_no_exit_status(arguments: list[str], expected: int) -> None:
    assert subprocess.run([*WITHOUT_STREAMS, *arguments], check=False).returncode == expected


def test_a_pipe_that_nobody_reads_is_no_failed_check(daemon: DaemonThread) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "stormd", "status", "--address", daemon.address]
    for shown in ([], ["--json"]):
        assert subprocess.run([*command, *shown], stdout=writing, check=False).returncode == 141
    os.close(writing)


def test_output_to_a_full_disk_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "stormd", "serve", "--example-config"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "stormd: the output cannot be written: No space left on device: free room there\n",
    )


def test_a_daemon_serves_without_standard_streams(place: Path) -> None:
    address = f"ipc://{place}/stormd.sock"
    serve = ["serve", "--device", "cpu", "--address", address, "--workers", "2"]
    with subprocess.Popen([*WITHOUT_STREAMS, *serve]) as process:
        wait_until(lambda: is_listening(address) or process.poll() is not None, 60.0)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
