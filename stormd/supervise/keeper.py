"""The process that starts MPS, a daemon and the command, and ends them in the opposite order.

It goes through three phases and never back: starting, running, ending. Whatever happens in one
phase, the next one runs to its end, with a deadline for each process that is to end.
"""

from __future__ import annotations

import enum
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any, Final, NoReturn

from stormd.errors import ChildFailed, CommandUnusable, MpsUnavailable, NoDaemon, StormdError
from stormd.output import EXIT_FAILED, print_to_stderr
from stormd.protocol import (
    BUDGET_VARIABLE,
    accepts_connections,
    daemon_environment,
    parse_address,
    socket_trouble,
)
from stormd.query import ADDRESS_VARIABLE, StatusQuery
from stormd.supervise import mps
from stormd.supervise.processes import TURN_SECONDS, Family, end_by, exit_status, send
from stormd.supervise.request import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, Request
from stormd.supervise.savings import describe_savings
from stormd.supervise.signals import ENDING, PASSED, Inbox, Passed

__all__ = ["keep"]

_START_SECONDS: Final = 60.0
_START_SECONDS_A_GIB: Final = 2.0
"""How long a daemon may take to pin its pool and listen, plus so much for each GiB of the pool."""

_SILENT_SECONDS: Final = 5.0
"""How long a start may take before a message about it."""

_MPS_SECONDS: Final = 20.0
"""How long MPS may take to start, and to end."""

_QUIET_SECONDS: Final = 2.0
"""How long processes left by the command may take to end by themselves, as those do that clean up
after others."""

_TERM_SECONDS: Final = 5.0
"""Time from SIGTERM to SIGKILL."""

_DAEMON_SECONDS: Final = 15.0
"""How long a daemon may take to end in order."""

_STATUS_SECONDS: Final = 5.0


def keep(
    request: Request,
    environ: Mapping[str, str],
    directory: Path,
    front: int,
    mask: Iterable[int],
) -> NoReturn:
    """Run the keeper, in a process that was forked for it, and end with the run's exit status.

    `directory` is a private place for sockets and logs. `front` is the pipe on which the front
    passes signals on. `mask` are the signals that were blocked before the run.
    """
    ended = EXIT_FAILED
    try:
        group = os.getpgrp()
        os.setpgid(0, 0)
        _take_no_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with Inbox(front) as inbox:
            ended = _Keeper(request, environ, directory, inbox, group).run()
    except _Interrupted as stop:
        ended = -stop.number
    except StormdError as error:
        print_to_stderr(str(error))
        ended = error.exit_status if isinstance(error, CommandUnusable) else EXIT_FAILED
    except BaseException:  # noqa: BLE001 - a bug of ours; the front ends what is left
        print_to_stderr(traceback.format_exc())
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the front may not be there to do it
        if ended == -signal.SIGINT:
            end_by(signal.SIGINT)  # the front tells this from a command that ends with 130
        os._exit(exit_status(ended))


class _Phase(enum.Enum):
    STARTING = enum.auto()
    """A signal that asks for an end aborts the start."""
    RUNNING = enum.auto()
    """Signals go to the command."""
    ENDING = enum.auto()
    """A signal that asks for an end cuts short the time that processes have to end by
    themselves."""


class _Interrupted(Exception):
    """The start was aborted: by a signal, or because the front has ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Keeper:
    def __init__(
        self,
        request: Request,
        environ: Mapping[str, str],
        directory: Path,
        inbox: Inbox,
        group: int,
    ) -> None:
        self._request = request
        self._environ = dict(environ)
        self._directory = directory
        self._inbox = inbox
        self._group = group
        self._family = Family()
        self._phase = _Phase.STARTING
        self._is_cut_short = False
        self._services: list[Popen[bytes]] = []
        self._command: Popen[bytes] | None = None
        self._daemon: Popen[bytes] | None = None

    def run(self) -> int:
        """Start all, wait for the command, end all; return how it ended, as Popen has it."""
        with ExitStack() as services:
            try:
                return self._run(services)
            finally:
                self._phase = _Phase.ENDING  # also if the start has failed

    def _run(self, services: ExitStack) -> int:
        address, before = self._find_daemon()
        self._start_mps_if_wanted(services, is_own=before is None)
        if before is None:
            self._start_daemon(services, address)
        self._environ[ADDRESS_VARIABLE] = address
        if self._request.budget is not None:
            self._environ[BUDGET_VARIABLE] = self._request.budget
        command = self._start_command()
        self._phase = _Phase.RUNNING
        self._wait_for_end(command)
        self._phase = _Phase.ENDING
        self._end_command()
        self._print_savings(address, before)
        return EXIT_FAILED if command.returncode is None else command.returncode

    # --- starting ---------------------------------------------------------------------------

    def _find_daemon(self) -> tuple[str, dict[str, Any] | None]:
        """Return a daemon's address and state if one answers; else where to start one, and None.

        Raises:
            NoDaemon: a daemon listens at the address that is named, and does not answer this user.
        """
        for address in self._request.addresses:
            state = _state_at(address, is_named=bool(self._request.own_address))
            if state is not None:
                if self._request.pool_bytes is not None:
                    print_to_stderr(f"a daemon answers at {address}: --pool-bytes is not used")
                return address, state
        own = self._request.own_address or f"ipc://{self._directory / 'stormd.sock'}"
        return own, None

    def _start_mps_if_wanted(self, services: ExitStack, *, is_own: bool) -> None:
        """Start MPS if it is wanted, available and not running; say why if it is not available."""
        if self._request.mps == "off" or mps.answers(self._environ):
            return
        try:
            mps.check_available(self._environ, daemon_runs=not is_own)
            self._start_mps(services)
        except MpsUnavailable as error:
            if self._request.mps == "on":
                raise MpsUnavailable(f"--mps on: {error}") from error
            print_to_stderr(f"without CUDA MPS: {error}")

    def _start_mps(self, services: ExitStack) -> None:
        variables = mps.mps_environment(self._directory)
        environ = self._environ | variables
        command, own = mps.control_command(environ)
        with (self._directory / "mps.log").open("w+b") as log:
            control = self._start_service(command, own, log)
            with ExitStack() as failing:
                failing.callback(self._end_mps, control, environ)
                self._until(
                    lambda: control.returncode is not None or mps.answers(environ), _MPS_SECONDS
                )
                if control.returncode is not None or not mps.answers(environ):
                    output = _tail(self._directory / "mps.log")
                    raise MpsUnavailable(
                        f"{mps.CONTROL} {_outcome_of(control)}: {output}; "
                        "`stormd doctor` checks the driver, --mps off does without"
                    )
                services.push(failing.pop_all())
        self._environ |= variables

    def _start_daemon(self, services: ExitStack, address: str) -> None:
        log = self._directory / "daemon.log"
        command = [sys.executable, "-m", "stormd", "serve", "--address", address]
        command += self._request.daemon_flags
        with log.open("wb") as output:
            daemon = self._start_service(command, daemon_environment(self._environ), output)
        services.callback(self._end_daemon, daemon)

        def has_come() -> bool:
            return daemon.returncode is not None or _listens(address)

        if not self._until(has_come, _SILENT_SECONDS):
            print_to_stderr("waiting for the daemon, which pins its pool")
            gib = (self._request.pool_bytes or 0) / (1 << 30)
            self._until(has_come, _START_SECONDS + _START_SECONDS_A_GIB * gib)
        if daemon.returncode is not None or not _listens(address):
            raise ChildFailed(f"the daemon {_outcome_of(daemon)}: {_tail(log)}")
        self._daemon = daemon

    def _start_service(self, command: list[str], environ: dict[str, str], log: Any) -> Popen[bytes]:
        try:
            service = self._family.start(command, environ=environ, log=log)
        except OSError as error:
            raise ChildFailed(f"{command[0]} cannot be started: {error.strerror}") from error
        self._services.append(service)
        return service

    def _start_command(self) -> Popen[bytes]:
        command = self._request.command
        try:
            self._command = self._family.start(command, environ=self._environ, group=self._group)
        except FileNotFoundError as error:
            raise CommandUnusable(f"{command[0]}: {error.strerror}", EXIT_NOT_FOUND) from error
        except OSError as error:
            raise CommandUnusable(f"{command[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE) from error
        return self._command

    # --- running ----------------------------------------------------------------------------

    def _wait_for_end(self, command: Popen[bytes]) -> None:
        """Wait for the end of the command or the front; report the daemon's end."""

        def is_over() -> bool:
            return command.returncode is not None or self._inbox.front_has_ended

        self._until(lambda: is_over() or _has_ended(self._daemon))
        self._report_daemon_end()
        self._until(is_over)

    def _report_daemon_end(self) -> None:
        """Report, once, that the daemon has ended without being asked to."""
        daemon = self._daemon
        if daemon is None or daemon.returncode is None:
            return
        if self._phase is _Phase.ENDING and daemon.returncode == 0:
            return  # it was asked to end
        self._daemon = None
        log = _tail(self._directory / "daemon.log")
        print_to_stderr(f"the daemon {_outcome_of(daemon)}, and what it held is lost: {log}")

    def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until the condition holds; return False on timeout, or if hurried by a signal.

        Raises:
            _Interrupted: while starting, a signal asks for an end, or the front has ended.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not condition():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and (left <= 0 or self._is_cut_short):
                return False
            for passed in self._inbox.wait(None if left is None else min(left, TURN_SECONDS)):
                self._handle_signal(passed)
            self._family.reap()
            if self._inbox.front_has_ended and self._phase is _Phase.STARTING:
                raise _Interrupted(signal.SIGKILL)
        return True

    def _handle_signal(self, passed: Passed) -> None:
        if self._phase is _Phase.RUNNING:
            if not passed.received and self._command is not None:
                self._command.send_signal(passed.number)
        elif passed.number not in ENDING:
            return
        elif self._phase is _Phase.STARTING:
            raise _Interrupted(passed.number)
        else:
            self._is_cut_short = True

    # --- ending -----------------------------------------------------------------------------

    def _end_command(self) -> None:
        """End all processes that the command has left behind, in whatever session, or all of it."""
        self._until(
            lambda: self._inbox.front_has_ended or not self._processes_left(), _QUIET_SECONDS
        )
        left = self._processes_left()
        if not left:
            return
        if not self._inbox.front_has_ended:
            print_to_stderr(
                f"ending processes left by the command: {', '.join(str(one.pid) for one in left)}"
            )
        send(left, signal.SIGTERM)
        self._until(lambda: not self._processes_left(), _TERM_SECONDS)
        self._kill_left()
        self._is_cut_short = False  # daemon and MPS get their own time

    def _kill_left(self) -> None:
        self._family.kill_others(self._service_pids(), self._inbox.wait)

    def _processes_left(self) -> list[Any]:
        return self._family.others(self._service_pids())

    def _service_pids(self) -> list[int]:
        return [service.pid for service in self._services]

    def _print_savings(self, address: str, before: dict[str, Any] | None) -> None:
        if self._inbox.front_has_ended:
            return
        after = _state_at(address)
        if after is None:
            return
        has_failed = self._command is not None and bool(self._command.returncode)
        text = describe_savings(before, after, has_failed=has_failed)
        if text:
            print_to_stderr(text)

    def _end_daemon(self, daemon: Popen[bytes]) -> None:
        daemon.terminate()
        self._until(lambda: daemon.returncode is not None, _DAEMON_SECONDS)
        self._report_daemon_end()  # it may end only now: the command may have been faster
        self._end_service(daemon, 0.0)

    def _end_mps(self, control: Popen[bytes], environ: Mapping[str, str]) -> None:
        if control.returncode is None and not mps.quit_mps(environ):
            control.terminate()
        self._end_service(control, _MPS_SECONDS)

    def _end_service(self, service: Popen[bytes], seconds: float) -> None:
        """Wait for the service's end or kill it after `seconds`; kill its remaining processes."""
        self._until(lambda: service.returncode is not None, seconds)
        self._services.remove(service)
        self._kill_left()


def _take_no_signals() -> None:
    """Leave signals to the front, which receives those that are sent to every process of a job.

    Unlike ignored signals, handlers are not inherited by executed programs. The terminal must not
    stop this process for writing to it, either.
    """
    for number in PASSED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _state_at(address: str, *, is_named: bool = False) -> dict[str, Any] | None:
    """Return the state of the daemon that answers at an address; None if none does.

    Raises:
        NoDaemon: the address `is_named`, and a daemon that does not answer has it: no other can be
            started there.
    """
    trouble = socket_trouble(parse_address(address))
    if trouble is not None and not (is_named and trouble.denies):
        return None
    try:
        with StatusQuery(address, timeout=_STATUS_SECONDS) as query:
            return query.ask()
    except NoDaemon:
        if is_named:
            raise
        return None


def _listens(address: str) -> bool:
    return accepts_connections(parse_address(address))


def _has_ended(process: Popen[bytes] | None) -> bool:
    return process is not None and process.returncode is not None


def _outcome_of(process: Popen[bytes]) -> str:
    if process.returncode is None:
        return "is not ready in time"
    return f"ended with status {exit_status(process.returncode)}"


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace").strip()
    return "\n".join(text.splitlines()[-6:]) or "it printed nothing"
