"""The process that the shell sees: passes signals on to the keeper, and ends with its status.

It ends last. If the keeper is killed, the front ends all that is left; if the front is, the keeper
does.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from stormd.protocol import temporary_directory
from stormd.supervise.keeper import keep
from stormd.supervise.processes import Family, end_by, exit_status, send
from stormd.supervise.request import Request
from stormd.supervise.signals import PASSED, Passed, Witness, is_terminal_s

__all__ = ["supervise"]

_TURN_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 10.0
"""For what was killed to be gone; longer only where a driver holds it."""


def supervise(request: Request) -> int:
    """Run the command with what is to be beside it; return the exit status for a shell.

    Call it in a process of one thread, which may then only end: its signals stay blocked. Nothing
    is left running when it returns, or when this process is killed. Where the terminal's Ctrl-C has
    ended the command, this process ends by SIGINT too: only that ends a loop of the shell.
    """
    signals = _passed_here()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, no child could be waited for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})
    sys.stdout.flush()  # what is buffered would be written again by whoever is forked
    sys.stderr.flush()
    family = Family()
    with ExitStack() as cleanup:
        below = temporary_directory("stormd-run-12345678/stormd.sock")
        directory = Path(tempfile.mkdtemp(prefix="stormd-run-", dir=below))
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        witness = Witness()
        cleanup.callback(witness.close)
        reading, writing = os.pipe()
        cleanup.callback(os.close, writing)
        keeper = os.fork()
        if keeper == 0:
            os.close(writing)
            keep(request, os.environ, directory, reading, mask)
        os.close(reading)
        ended, at_terminal = _pass_on(keeper, writing, signals, witness)
        _end_orphans(family, witness.pid)
    if ended == -signal.SIGINT and at_terminal:
        end_by(signal.SIGINT)
    return exit_status(ended)


def _passed_here() -> set[signal.Signals]:
    """Return the signals to pass on: what was ignored from the start, as under nohup, stays so."""
    return {number for number in PASSED if signal.getsignal(number) is not signal.SIG_IGN}


def _pass_on(
    keeper: int, writing: int, signals: set[signal.Signals], witness: Witness
) -> tuple[int, bool]:
    """Tell the keeper of each signal until it ends.

    Returns how it ended, as Popen has it, and whether the terminal has sent SIGINT.
    """
    at_terminal = False
    while True:
        info = signal.sigwaitinfo({*signals, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            received = witness.saw(info)
            at_terminal |= info.si_signo == signal.SIGINT and is_terminal_s(info)
            try:
                os.write(writing, Passed(info.si_signo, received).encoded())
            except BrokenPipeError:
                continue  # the keeper has ended, and its SIGCHLD is on its way
        elif (ended := os.waitpid(keeper, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1]), at_terminal


def _end_orphans(family: Family, witness: int) -> None:
    """Kill what a keeper that was killed has left: there is none else to ask for an order."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (orphans := family.others([witness])) and time.monotonic() < deadline:
        send(orphans, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, _TURN_SECONDS)
        family.reap()
