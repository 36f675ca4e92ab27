"""How signals reach a command: which are passed on, and how front and keeper communicate them.

A signal reaches the command exactly once. The command itself has received a signal that comes from
the terminal or is sent to the whole process group. Only signals sent to `stormd run` alone are
passed on. The kernel does not say which of the two it was, so a second member of the group is
asked: the witness.
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
"""The signals that are passed on. The others stop, continue or end the process they are sent to."""

ENDING: Final = PASSED - {signal.SIGUSR1, signal.SIGUSR2}
"""The signals that ask for an end."""

_WITNESS_SECONDS: Final = 0.1
"""How long the witness may take to report a signal. The kernel signals a group's members one after
the other, within microseconds, but the witness must be scheduled on a CPU."""

_SI_KERNEL: Final = 0x80
"""The code in siginfo of signals that come from a terminal."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A signal that the front has received; `received` if the command has it already."""

    number: int
    received: bool

    def encoded(self) -> bytes:
        """Return the two bytes that encode it between front and keeper."""
        return bytes((self.number, self.received))


def is_terminal_s(info: signal.struct_siginfo) -> bool:
    """Return whether a terminal has sent the signal, to the whole foreground group."""
    return info.si_code == _SI_KERNEL


class Witness:
    """A process in our group that receives what the whole group receives, and reports it."""

    def __init__(self) -> None:
        """Start the witness. The signals of PASSED must be blocked by now."""
        self._told, telling = os.pipe()
        front = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _testify(telling, front)
        os.close(telling)

    def saw(self, info: signal.struct_siginfo) -> bool:
        """Return whether the whole group has received the signal that has just arrived here."""
        if is_terminal_s(info):
            self._heard(0.0)
            return True
        return info.si_signo in self._heard(_WITNESS_SECONDS)

    def close(self) -> None:
        """End the witness. Calling it twice is fine."""
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
    """Run the witness: only SIGKILL ends it, and the front's death sends that."""
    try:
        die_with_parent(signal.SIGKILL, front)
        while True:
            os.write(telling, bytes((signal.sigwait(PASSED),)))
    finally:
        os._exit(1)


class Inbox:
    """The events that the keeper waits for: a child's end, a passed signal, the front's end.

    A context manager. While it is open, SIGCHLD has a handler. The handler starts no process of its
    own, and is reset in executed programs.
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
        """Wait for an event, at most so long; return the signals that were passed on."""
        passed: list[Passed] = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                passed += self._read()
        return passed

    def _read(self) -> list[Passed]:
        data = os.read(self._front, 64)  # pairs are written whole, and 64 is a multiple of 2
        if not data:
            self.front_has_ended = True
            self._selector.unregister(self._front)
        return [Passed(data[at], bool(data[at + 1])) for at in range(0, len(data), 2)]


def _noted(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor has been written to."""
