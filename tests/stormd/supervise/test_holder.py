"""What a holder keeps reaches the next daemon, whatever ended the one before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

SECONDS = 60.0

DAEMON = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path
    from stormd.notify import Notifier, take_kept

    place = Path(sys.argv[1])
    kept = take_kept()
    number = len(list(place.glob("started-*")))
    read = {name: os.pread(descriptor, 100, 0).decode() for name, descriptor in kept.items()}
    (place / f"started-{number}").write_text(f"{os.getpid()} {sorted(read.items())}")
    if not number and sys.argv[2] == "is replaced early":
        (place / "loads").touch()
        time.sleep(60)
    with Notifier.from_environment() as notifier:
        for name in ("one", "other"):
            memory = os.memfd_create(name)
            os.write(memory, f"{name} of {number}".encode())
            notifier.store(name, memory)
            os.close(memory)
        if number:
            notifier.forget("other")
        if sys.argv[2] != "fails" and not (sys.argv[2] == "fails later" and number):
            notifier.ready()
    statuses = {"ends": 0, "fails": 3, "fails later": 4, "crashes": 5}
    status = statuses.get(sys.argv[2])
    if status is not None:
        sys.exit(status)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
    (place / f"waits-{number}").touch()
    while True:  # briefly: a signal just before a sleep is heard behind it
        time.sleep(0.1)
    """
)

HOLD = "import sys; from stormd.supervise.holder import hold; sys.exit(hold(sys.argv[1:]))"

UNHEARD = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
"""
"""What whoever starts a holder may have come to, and it inherits."""

PATIENT = """
from stormd.supervise import holder
holder._BRIEF_SECONDS, holder._MAX_BRIEF = 60.0, 5
"""
"""A daemon's life is brief on a busy machine, too; and there are not as many of them."""

SLOW_EXIT = """
import time
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)
slow = Slow()
"""
"""What Python deletes once it handles no more signals."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "daemon.py").write_text(DAEMON)
    started: list[subprocess.Popen[str]] = []

    def begin(how: str, before: str = "") -> subprocess.Popen[str]:
        daemon = [sys.executable, str(tmp_path / "daemon.py"), str(tmp_path), how]
        holder = subprocess.Popen(
            [sys.executable, "-c", before + HOLD, *daemon], stderr=subprocess.PIPE, text=True
        )
        started.append(holder)
        return holder

    yield begin
    for holder in started:
        holder.kill()
        holder.communicate(timeout=SECONDS)


def life(place: Path, number: int) -> tuple[int, str]:
    """Wait until the daemon of that number waits; return its pid and what it was given."""
    wait_until((place / f"waits-{number}").exists)
    pid, _, kept = (place / f"started-{number}").read_text().partition(" ")
    return int(pid), kept


def is_gone(pid: int) -> bool:
    """Whether it has ended; who has it by now may leave it unreaped for a while."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_it_keeps_reaches_the_next(start: Start, tmp_path: Path) -> None:
    holder = start("waits")
    first, kept = life(tmp_path, 0)
    assert kept == "[]"
    os.kill(first, signal.SIGKILL)
    second, kept = life(tmp_path, 1)
    assert kept == "[('one', 'one of 0'), ('other', 'other of 0')]"
    os.kill(second, signal.SIGUSR2)
    _, kept = life(tmp_path, 2)
    assert kept == "[('one', 'one of 1')]"
    holder.terminate()
    _, err = holder.communicate(timeout=SECONDS)
    assert holder.returncode == 7
    assert err.count("is started again with what it held") == 1, "of the one that was killed"


def test_a_daemon_that_is_told_before_it_listens_is_replaced(start: Start, tmp_path: Path) -> None:
    holder = start("is replaced early")
    wait_until((tmp_path / "loads").exists)
    holder.send_signal(signal.SIGUSR2)
    life(tmp_path, 1)
    holder.terminate()
    assert holder.wait(SECONDS) == 7


def test_signals_that_keep_coming_change_nothing_of_its_end(start: Start, tmp_path: Path) -> None:
    """Also those that come when the daemon has ended and Python is about to."""
    holder = start("waits", SLOW_EXIT)
    life(tmp_path, 0)
    while holder.poll() is None:
        holder.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            holder.wait(0.005)
    assert holder.returncode == 7


def test_a_holder_hears_what_its_parent_did_not(start: Start, tmp_path: Path) -> None:
    """SIGINT excepted, which a shell has its jobs in the background ignore."""
    holder = start("waits", UNHEARD)
    first, _ = life(tmp_path, 0)
    os.kill(first, signal.SIGKILL)
    life(tmp_path, 1)
    holder.send_signal(signal.SIGUSR2)
    life(tmp_path, 2)
    holder.send_signal(signal.SIGINT)
    holder.terminate()
    assert holder.wait(SECONDS) == 7


def test_a_daemon_does_not_outlive_its_holder(start: Start, tmp_path: Path) -> None:
    holder = start("waits")
    pid, _ = life(tmp_path, 0)
    holder.kill()
    wait_until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("how", "status", "starts", "said"),
    [
        ("ends", 0, 1, ""),
        ("fails", 3, 1, ""),
        ("fails later", 4, 4, "stormd: the daemon ended with status 4 and is not started any more"),
        ("crashes", 5, 5, "stormd: the daemon ended with status 5 and is not started any more"),
    ],
)
def test_it_ends_with_a_daemon_that_ended_or_that_cannot_go_on(
    start: Start, tmp_path: Path, how: str, status: int, starts: int, said: str
) -> None:
    holder = start(how, PATIENT)
    _, err = holder.communicate(timeout=SECONDS * 2)
    assert holder.returncode == status
    assert len(list(tmp_path.glob("started-*"))) == starts
    assert err.splitlines()[-1:] == ([] if not said else [err.splitlines()[-1]])
    assert said in err
