"""The small process that keeps a daemon's memory and starts the daemon again.

It is used where no service manager does that: under `stormd run`, for a private daemon or in a
container. The process that was started becomes the holder, and the daemon its child. The daemon
talks to the holder as to systemd, and gives it descriptors to keep: of the pool, the journal and
the listening sockets. So a daemon that was killed, or that ends to be replaced, is followed by one
that finds all of these; clients that connect meanwhile wait in the sockets' queues.

The holder ends with the daemon in three cases: the daemon has ended in order or was told to end; it
cannot start; or it is killed again and again as soon as it serves. A daemon does not outlive its
holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, NoReturn

from stormd.open_files import close_all
from stormd.output import EXIT_RESTART, print_to_stderr
from stormd.supervise.processes import die_with_parent, end_by, exit_status, is_handled

__all__ = ["hold"]

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED: Final = (*_ENDING, signal.SIGUSR2)
"""The signals passed on to the daemon. A hang-up ends the daemon only if the daemon itself decides
so."""

_REPLACED: Final = (EXIT_RESTART, -signal.SIGUSR2)
"""Exit statuses of a daemon that was told to make way for another; the second if the signal came
before the daemon could handle it."""

_BRIEF_SECONDS: Final = 0.5
_MAX_BRIEF: Final = 20
"""A daemon that is killed within _BRIEF_SECONDS, _MAX_BRIEF times in a row, is killed by the state
that it continues with."""

_MAX_STARTS: Final = 3
"""Most starts in a row of a daemon that has served before and does not get to serve again."""

_MESSAGE_BYTES: Final = 4096
_MAX_KEPT: Final = 16
_FIRST: Final = 3
_ASIDE: Final = 256
"""Descriptor numbers: the first of those that the daemon inherits, and one above all of them."""

_CREDENTIALS: Final = struct.Struct("iII")


class _Phase(Enum):
    STARTING = auto()
    """The daemon does not serve yet."""
    SERVING = auto()
    ENDING = auto()
    """The daemon was told to end, and is not followed by another."""


def hold(command: Sequence[str]) -> int:
    """Run a daemon by this command, again and again; return its exit status.

    Call it in a single-threaded process that does nothing else afterwards.
    """
    with _Holder(command) as holder:
        ended = holder.run()
    if ended < 0:
        end_by(-ended)
    return ended


class _Holder:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._kept: dict[str, int] = {}
        self._phase = _Phase.STARTING
        self._has_served = False
        self._serving_since = 0.0
        self._starts = self._brief = 0
        self._daemon = 0
        self._name = f"stormd-holder-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self._name}")
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> _Holder:
        return self

    def __exit__(self, *exception: object) -> None:
        for number in filter(is_handled, _PASSED):
            signal.signal(number, signal.SIG_IGN)  # else a second one ends Python's own exit
        signal.set_wakeup_fd(-1)
        self._socket.close()
        close_all((self._woken, self._wake, *self._kept.values()))

    def run(self) -> int:
        """Run daemons until none follows; return how the last one ended, as Popen has it."""
        self._take_signals()
        ended = 0
        while self._start():
            ended = self._wait_for_end()
            if not self._is_followed(ended):
                break
        return ended

    # --- starting ---------------------------------------------------------------------------

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # else no end is noticed
        for number in filter(is_handled, _PASSED):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _frame: object) -> None:
        if number in _ENDING and number != signal.SIGHUP:
            self._phase = _Phase.ENDING
        if self._daemon:
            os.kill(self._daemon, number)

    def _start(self) -> bool:
        """Start a daemon; return False if this process has been told to end."""
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED)  # no signal may be lost in between
        try:
            if self._phase is _Phase.ENDING:
                return False
            self._phase = _Phase.STARTING
            self._starts += 1
            self._daemon = os.fork()
            if not self._daemon:
                self._become_daemon(parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED)
        return True

    def _become_daemon(self, parent: int) -> NoReturn:
        try:
            die_with_parent(signal.SIGKILL, parent)
            for number in (*_PASSED, signal.SIGCHLD):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED)
            environ = os.environ | {"NOTIFY_SOCKET": f"@{self._name}"}
            environ |= {
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": str(len(self._kept)),
                "LISTEN_FDNAMES": ":".join(self._kept),
            }
            _dup_for_exec(list(self._kept.values()))
            os.execve(self._command[0], self._command, environ)  # noqa: S606 - our own interpreter
        except BaseException as error:  # noqa: BLE001 - nothing above is to run in this process
            print_to_stderr(f"the daemon cannot be started: {error}")
        finally:
            os._exit(1)

    # --- while it runs ----------------------------------------------------------------------

    def _wait_for_end(self) -> int:
        poller = select.poll()
        for descriptor in (self._woken, self._socket.fileno()):
            poller.register(descriptor, select.POLLIN)
        while True:
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, _MESSAGE_BYTES)
            pid, status = os.waitpid(self._daemon, os.WNOHANG)
            self._read_messages()  # also the daemon's last messages
            if pid:
                self._daemon = 0
                return os.waitstatus_to_exitcode(status)

    def _read_messages(self) -> None:
        for message, descriptors in self._messages():
            fields = dict(line.split("=", 1) for line in message.split("\n") if "=" in line)
            name = fields.get("FDNAME", "")
            if "FDSTOREREMOVE" in fields:
                self._drop(name)
            if "FDSTORE" in fields and len(descriptors) == 1 and len(self._kept) < _MAX_KEPT:
                self._drop(name)
                self._kept[name] = descriptors.pop()
            close_all(descriptors)
            if "READY" in fields and self._phase is _Phase.STARTING:
                self._phase, self._has_served, self._starts = _Phase.SERVING, True, 0
                self._serving_since = time.monotonic()

    def _messages(self) -> Iterator[tuple[str, list[int]]]:
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(
                    _MESSAGE_BYTES,
                    socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _MAX_KEPT),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return
            descriptors: array[int] = array("i")
            sender = 0
            for _, kind, content in rights:
                if kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(content[: len(content) // 4 * 4])
                elif kind == socket.SCM_CREDENTIALS:
                    sender, _, _ = _CREDENTIALS.unpack(content)
            if sender == self._daemon:
                yield data.decode(errors="replace"), list(descriptors)
            else:
                close_all(descriptors)

    def _drop(self, name: str) -> None:
        close_all((self._kept.pop(name, -1),))

    # --- when it has ended ------------------------------------------------------------------

    def _is_followed(self, ended: int) -> bool:
        """Return whether another daemon takes the place of one that has ended."""
        if self._phase is _Phase.ENDING:
            return False
        if ended in _REPLACED:
            self._starts = 0
            return True
        if ended == 0 or not self._has_served:
            return False
        has_served = self._phase is _Phase.SERVING
        if has_served and time.monotonic() - self._serving_since > _BRIEF_SECONDS:
            self._brief = 0
        else:
            self._brief += 1
        why = f"ended with status {exit_status(ended)}"
        if self._starts >= _MAX_STARTS or self._brief >= _MAX_BRIEF:
            print_to_stderr(f"the daemon {why} and is not started any more: see what it said above")
            return False
        print_to_stderr(f"the daemon {why} and is started again with what it held")
        return True


def _dup_for_exec(descriptors: list[int]) -> None:
    """Copy these descriptors to the numbers where an executed program looks for them."""
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for one in descriptors]
    for place, descriptor in enumerate(aside, _FIRST):
        os.dup2(descriptor, place, inheritable=True)
