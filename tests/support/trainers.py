"""Training processes that start in milliseconds and may be killed at any moment.

One process, the nursery, loads torch once and forks a trainer for each order; every trainer
writes its reports into the one pipe that all share, a line at a time. What stays true: when the
context is left, nursery and trainers are gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
from storm_bench.child_daemon import ChildDaemon
from support.waiting import wait_until

__all__ = ["Report", "Trainers", "workers_of"]

START_SECONDS = 180.0
ENDLESS = 1_000_000
NURSERY = 0
"""The process number under which the nursery itself reports."""


class Report(NamedTuple):
    """A line of a trainer: the time (of time.monotonic) and its words."""

    at: float
    words: str


def workers_of(daemon: ChildDaemon) -> list[dict[str, Any]]:
    """Return what a daemon says of the processes that serve its devices."""
    found: list[dict[str, Any]] = daemon.status()["workers"]
    return found


class Trainers:
    """A nursery and its trainers; a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[int] = []
        self._reports: dict[int, deque[Report]] = defaultdict(deque)
        self._unfinished = b""

    def start(self, address: str, steps: int = ENDLESS, *, device: str = "cpu") -> int:
        """Start a trainer at a daemon; return its process id."""
        self._process.stdin.write(json.dumps([address, steps, device]).encode() + b"\n")
        self._process.stdin.flush()
        self._started.append(int(self.next(NURSERY, START_SECONDS).words))
        return self._started[-1]

    def next(self, pid: int, seconds: float) -> Report:
        """Return a trainer's next report.

        Raises:
            TimeoutError: there is none within that time.
        """
        deadline = time.monotonic() + seconds
        while not self._reports[pid]:
            if not self._read(deadline - time.monotonic()):
                raise TimeoutError(f"trainer {pid} has said nothing for {seconds:g} s")
        return self._reports[pid].popleft()

    def expect(self, pid: int, *words: str, seconds: float = START_SECONDS) -> None:
        """Assert that a trainer's next reports are these."""
        for word in words:
            found = self.next(pid, seconds).words
            assert found == word, f"trainer {pid} says {found!r} instead of {word!r}"

    def heard(self, pid: int) -> list[str]:
        """Return the words of all reports of a trainer that have arrived, and forget them."""
        while self._read(0.0):
            pass
        words = [report.words for report in self._reports[pid]]
        self._reports[pid].clear()
        return words

    def kill(self, pid: int) -> None:
        """End a trainer as a crash would."""
        os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End those that live, and wait until none is left: the nursery serves the next test."""
        for pid in self._started:
            with suppress(ProcessLookupError):
                self.kill(pid)
        wait_until(lambda: not any(map(psutil.pid_exists, self._started)))
        self._started.clear()
        self._reports.clear()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "support.trainers"]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.expect(NURSERY, "ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # the nursery's order to kill its children and end
        self._process.wait()
        self._process.stdout.close()

    def _read(self, seconds: float) -> bool:
        """Take in what arrives within the time; return whether anything did."""
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], max(0.0, seconds))[0]:
            return False
        data = os.read(descriptor, 1 << 16)
        if not data:
            raise RuntimeError(f"the nursery has ended, with status {self._process.wait()}")
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            pid, at, words = line.decode().split(" ", 2)
            self._reports[int(pid)].append(Report(float(at), words))
        return True


# --- the nursery's side ---------------------------------------------------------------------


def _say(pid: int, at: float, words: str) -> None:
    """Write a line in one piece: shorter than PIPE_BUF, it is never mixed with another."""
    os.write(1, f"{pid} {at!r} {words}\n".encode())


def _be_trainer(address: str, steps: int, device: str) -> None:
    from support.checked_training import Training, reports

    for at, words in reports(Training(device), address, steps):
        _say(os.getpid(), at, words)


def _nurse() -> None:
    import support.checked_training  # noqa: F401 - loads torch once, for all that are forked

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    children: list[int] = []
    _say(NURSERY, time.monotonic(), "ready")
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            os.close(0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _be_trainer(*json.loads(line))
            finally:
                os._exit(0)
        children.append(pid)
        _say(NURSERY, time.monotonic(), str(pid))
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _nurse()
