"""What the shell sees of a run: its streams, its signals, its status, and its death."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_mps import FakeMps
from support.supervised import Recorder, Run
from support.waiting import wait_until

TO_ONE = [
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR2,
]


@pytest.mark.parametrize(("last", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_command_has_the_streams_and_its_status_is_the_run_s(
    start_beside: Callable[..., Run], last: str, status: int
) -> None:
    run = start_beside("--", "sh", "-c", f"cat; echo aside >&2; {last}", stdin=subprocess.PIPE)
    out, err = run.process.communicate("through\n", timeout=300)
    assert (out, run.process.returncode) == ("through\n", status)
    assert err.startswith("aside\n")


NO_TEMPORARY = "import sys, tempfile; tempfile.tempdir = '/proc'; from stormd.cli import main; "


def test_without_a_directory_for_temporary_files_it_says_so_in_one_line() -> None:
    script = NO_TEMPORARY + "sys.exit(main(['run', '--', 'true']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("stormd: no directory for sockets and logs can be made: ")
    assert done.stderr.endswith("set TMPDIR to one that this user may write to\n")
    assert done.stderr.count("\n") == 1


def test_a_signal_to_the_run_alone_or_its_whole_group_reaches_the_command_once(
    start_beside: Callable[..., Run], recorder: Recorder
) -> None:
    run = start_beside("--", *recorder.command)
    assert os.getpgid(recorder.pid) == run.pid
    for number in TO_ONE:
        run.process.send_signal(number)
        recorder.await_signal(number)
    os.killpg(run.pid, signal.SIGINT)
    _assert_received(run, recorder, [*TO_ONE, signal.SIGINT])


def test_an_interrupt_at_the_terminal_reaches_the_command_once(
    start_beside: Callable[..., Run], recorder: Recorder
) -> None:
    terminal, end = pty.openpty()
    try:
        run = start_beside(
            "--", *recorder.command, stdin=end, preexec_fn=lambda: _take_terminal(end)
        )
        os.close(end)
        assert recorder.pid
        os.write(terminal, b"\x03")
        recorder.await_signal(signal.SIGINT)
        _assert_received(run, recorder, [signal.SIGINT])
    finally:
        os.close(terminal)


def test_an_interrupt_at_the_terminal_ends_a_loop_of_the_shell(
    start_beside: Callable[..., Run], tmp_path: Path
) -> None:
    """A shell goes on where what it ran handled the signal: so the run ends by it, too."""
    terminal, end = pty.openpty()
    try:
        command = ["sh", "-c", f"touch {tmp_path}/up; exec sleep 1000"]
        run = start_beside("--", *command, stdin=end, preexec_fn=lambda: _take_terminal(end))
        os.close(end)
        wait_until((tmp_path / "up").exists, 60.0)
        os.write(terminal, b"\x03")
        assert run.end()[0] == -signal.SIGINT
    finally:
        os.close(terminal)


def test_an_interrupt_from_elsewhere_is_a_status(
    start_beside: Callable[..., Run], tmp_path: Path
) -> None:
    run = start_beside("--", "sh", "-c", f"touch {tmp_path}/up; exec sleep 1000")
    wait_until((tmp_path / "up").exists, 60.0)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 128 + signal.SIGINT


def test_what_was_ignored_stays_ignored(
    start_beside: Callable[..., Run], recorder: Recorder
) -> None:
    run = start_beside(
        "--",
        *recorder.command,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert recorder.pid
    run.process.send_signal(signal.SIGHUP)
    _assert_received(run, recorder, [])


def _take_terminal(end: int) -> None:
    """Make it the terminal of this process's session, and its group the one in the foreground."""
    fcntl.ioctl(end, termios.TIOCSCTTY, 0)


def _assert_received(run: Run, recorder: Recorder, numbers: list[signal.Signals]) -> None:
    """End the run, after a last signal: what was sent before has come by then, or never will."""
    run.process.send_signal(signal.SIGUSR1)
    recorder.await_signal(signal.SIGUSR1)
    assert recorder.signals() == [*numbers, signal.SIGUSR1]
    recorder.end()
    assert run.end()[0] == 0


def test_killed_it_leaves_nothing(
    start: Callable[..., Run], recorder: Recorder, fake_mps: FakeMps
) -> None:
    command = ["sh", "-c", 'setsid sleep 1000 & exec "$@"', "sh", *recorder.command]
    run = start("--", *command, variables=fake_mps.variables())
    assert recorder.pid
    assert run.living_named("serve")
    assert run.living_named("1000")
    assert fake_mps.notes() == ["start visible=all"]
    recorder.end()  # it takes no SIGTERM, and would be given time
    run.process.kill()
    run.end()
    run.assert_nothing_is_left()


def test_killed_with_its_group_it_leaves_nothing(
    start: Callable[..., Run], recorder: Recorder
) -> None:
    run = start("--", "sh", "-c", 'setsid sleep 1000 & exec "$@"', "sh", *recorder.command)
    assert recorder.pid
    os.killpg(run.pid, signal.SIGKILL)
    assert run.end()[0] == -signal.SIGKILL
    run.assert_nothing_is_left()


def test_a_keeper_that_is_killed_leaves_nothing(
    start: Callable[..., Run], recorder: Recorder
) -> None:
    run = start("--", "sh", "-c", 'setsid sleep 1000 & exec "$@"', "sh", *recorder.command)
    assert recorder.pid
    run.keeper().kill()
    assert run.end()[0] == 128 + signal.SIGKILL
    assert not run.living()
