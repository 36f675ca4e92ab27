"""The processes below this one: started, found and ended, even if they try to escape.

A child subreaper becomes the parent of every orphan among its descendants. So a process that
changes its session and loses its parent is still found here. All children that the kernel hands
over are reaped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, Final, NoReturn

import psutil

__all__ = ["Family", "die_with_parent", "end_by", "exit_status", "is_handled", "send"]

TURN_SECONDS: Final = 0.05
"""Interval for polling conditions that cannot be waited for."""

_KILL_SECONDS: Final = 10.0
"""How long killed processes may take to disappear; they take longer only if a driver holds them."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_ALWAYS_HANDLED: Final = (signal.SIGTERM, signal.SIGUSR2)
"""Signals sent to a daemon alone, by somebody who waits for their effect."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Have the signal sent to this process when its parent `parent` ends, or has ended."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def is_handled(number: signal.Signals) -> bool:
    """Return whether a daemon handles a signal.

    Signals that were ignored from the start stay ignored, such as hang-ups under nohup and SIGINT
    in a shell's background. Exceptions are SIGTERM and SIGUSR2: the process that started the daemon
    may ignore them for itself.
    """
    return number in _ALWAYS_HANDLED or signal.getsignal(number) is not signal.SIG_IGN


def exit_status(returncode: int) -> int:
    """Return the status that a shell reports: the exit status, or 128 plus the signal's number."""
    return returncode if returncode >= 0 else 128 - returncode


def end_by(number: int) -> NoReturn:
    """End this process by a signal that ends a process without a handler for it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(exit_status(-number))  # not reached


class Family:
    """All descendants of this process, which becomes a subreaper.

    Only one thread uses it. It distinguishes processes started by `start` from those that the
    kernel handed over.
    """

    def __init__(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        group: int | None = None,
        log: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process that is sent SIGTERM when this one dies.

        It joins the process group `group`, or gets a session of its own if that is None. With a
        `log`, it reads no input and writes its output there; else it has this process's streams.

        Raises:
            OSError: it cannot be executed.
        """
        silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(  # noqa: S603 - what the user asked for, or our own
            command,
            env=dict(environ),
            start_new_session=group is None,
            process_group=group,
            preexec_fn=_child_setup(os.getpid()),  # noqa: PLW1509 - this process has one thread
            **(silent if log is not None else {}),
        )
        self._started[process.pid] = process
        return process

    def reap(self) -> None:
        """Reap every child that has ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            ours = self._started.pop(ended.si_pid, None)
            if ours is not None:
                ours.wait()  # at once: it has ended
            else:
                os.waitpid(ended.si_pid, 0)

    def others(self, apart_from: Iterable[int]) -> list[psutil.Process]:
        """Return the living descendants, without these processes and those that they started."""
        kept = set(apart_from)
        found = []
        for process in psutil.Process().children(recursive=True):  # parents before their children
            parent = _parent_of(process)
            if process.pid in kept or parent in kept:
                kept.add(process.pid)
            elif _lives(process):
                found.append(process)
        return found

    def kill_others(self, apart_from: Iterable[int], wait: Callable[[float], object]) -> None:
        """Kill those processes, also new ones, until none is left; `wait` waits for a child's end.

        `wait` takes the most seconds to wait.
        """
        kept, deadline = list(apart_from), time.monotonic() + _KILL_SECONDS
        while (left := self.others(kept)) and time.monotonic() < deadline:
            send(left, signal.SIGKILL)
            wait(TURN_SECONDS)
            self.reap()


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those processes that still exist."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def _child_setup(parent: int) -> Callable[[], None]:
    """Return the function that a child runs before it executes its program."""

    def prepare() -> None:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)  # the keeper ignores it
        die_with_parent(signal.SIGTERM, parent)

    return prepare


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
