"""The processes below this one: started, found and ended, whatever they do to get away.

A child subreaper is handed every orphan among its descendants, so a process that changes its
session and loses its parent is still found here. Nothing of the kernel's is left unreaped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, Final, NoReturn

import psutil

__all__ = ["Family", "die_with_parent", "end_by", "exit_status", "is_heeded", "send"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_ALWAYS_HEEDED: Final = (signal.SIGTERM, signal.SIGUSR2)
"""What is sent to a daemon alone, by somebody who waits for what becomes of it."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Have this process sent the signal when `parent`, which started it, ends; also if it has."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def is_heeded(number: signal.Signals) -> bool:
    """Return whether a daemon handles a signal.

    What was ignored from the start stays so, as hang-ups under nohup and SIGINT in a shell's
    background, but SIGTERM and SIGUSR2: whoever has started it may ignore them for itself.
    """
    return number in _ALWAYS_HEEDED or signal.getsignal(number) is not signal.SIG_IGN


def exit_status(returncode: int) -> int:
    """Return what a shell reports: the status, or 128 and the number of the signal."""
    return returncode if returncode >= 0 else 128 - returncode


def end_by(number: int) -> NoReturn:
    """End this process by a signal that ends what does not handle it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(exit_status(-number))  # not reached


class Family:
    """All descendants of this process, which becomes a subreaper.

    One thread uses it. `start` tells apart what it started from what the kernel handed over.
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

        It joins the process group `group`, or a session of its own where None. With a `log` it
        reads nothing and writes there; else it has this process's streams.

        Raises:
            OSError: it cannot be executed.
        """
        silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(  # noqa: S603 - what the user asked for, or our own
            command,
            env=dict(environ),
            start_new_session=group is None,
            process_group=group,
            preexec_fn=_tie(os.getpid()),  # noqa: PLW1509 - this process has one thread
            **(silent if log is not None else {}),
        )
        self._started[process.pid] = process
        return process

    def reap(self) -> None:
        """Take notice of every child that has ended."""
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
        """Return the living descendants, less these processes and what they started."""
        kept = set(apart_from)
        found = []
        for process in psutil.Process().children(recursive=True):  # parents before their children
            parent = _parent_of(process)
            if process.pid in kept or parent in kept:
                kept.add(process.pid)
            elif _lives(process):
                found.append(process)
        return found


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to those that are there yet."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def _tie(parent: int) -> Callable[[], None]:
    """Return what a child does before it executes its program."""

    def prepare() -> None:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)  # which the keeper ignores
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
