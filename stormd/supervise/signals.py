"""Signals on their way to a command: which are passed on, and how front and keeper speak of them.

A signal reaches the command exactly once. What comes from the terminal, or is sent to the whole
process group, it has received itself; only what was sent to `stormd run` alone is passed on. The
kernel does not say which of the two it was, so a second member of the group is asked: the witness.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
from dataclasses import dataclass
from typing import Final, Self

from stormd.supervise.processes import die_with_parent

__all__ = ["ENDING", "PASSED", "Inbox", "Passed", "Witness", "is_terminal_s"]

PASSED: Final = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
"""What is passed on. The others stop, continue or end the one that they are sent to."""

ENDING: Final = PASSED - {signal.SIGUSR1, signal.SIGUSR2}
"""Those that ask for an end."""

_WITNESS_SECONDS: Final = 0.1
"""For the witness to tell of a signal: the kernel sends to a group's members one after the other,
within microseconds, and the witness has to be given a processor."""

_SI_KERNEL: Final = 0x80
"""Where a terminal's signals come from, as siginfo has it."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A signal that the front has received; `received` where the command has it already."""

    number: int
    received: bool

    def encoded(self) -> bytes:
        """Return the two bytes that stand for it between front and keeper."""
        return bytes((self.number, self.received))


def is_terminal_s(info: signal.struct_siginfo) -> bool:
    """Return whether a terminal has sent it, to the whole group in its foreground."""
    return info.si_code == _SI_KERNEL


class Witness:
    """A process in our group which receives what the whole group receives, and says so."""

    def __init__(self) -> None:
        """Start it. The signals of PASSED must be blocked by now."""
        self._told, telling = os.pipe()
        front = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _testify(telling, front)
        os.close(telling)

    def saw(self, info: signal.struct_siginfo) -> bool:
        """Return whether all of the group have received the signal, which has just come here."""
        if is_terminal_s(info):
            self._heard(0.0)
            return True
        return info.si_signo in self._heard(_WITNESS_SECONDS)

    def close(self) -> None:
        """End it. Twice is fine."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            os.close(self._told)
            self.pid = 0

    def _heard(self, seconds: float) -> bytes:
        readable, _, _ = select.select([self._told], [], [], seconds)
        return os.read(self._told, 64) if readable else b""


def _testify(telling: int, front: int) -> None:
    """Be the witness: only SIGKILL ends it, and the front's death sends that."""
    try:
        die_with_parent(signal.SIGKILL, front)
        while True:
            os.write(telling, bytes((signal.sigwait(PASSED),)))
    finally:
        os._exit(1)


class Inbox:
    """What the keeper waits for: a child's end, a signal that the front passes on, the front's end.

    A context manager. While it is open SIGCHLD has a handler, which starts no process of its own
    and is reset in those that are executed.
    """

    def __init__(self, front: int) -> None:
        """Read what the front writes into the other end of the pipe `front`."""
        self._front = front
        self.front_has_ended = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(front, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _noted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def wait(self, seconds: float | None) -> list[Passed]:
        """Wait for something to happen, at most so long; return the signals that were passed on."""
        passed: list[Passed] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                passed += self._read()
        return passed

    def _read(self) -> list[Passed]:
        data = os.read(self._front, 64)  # pairs are written whole, and 64 is a whole number of them
        if not data:
            self.front_has_ended = True
            self._selector.unregister(self._front)
        return [Passed(data[at], bool(data[at + 1])) for at in range(0, len(data), 2)]


def _noted(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor has been written to."""
