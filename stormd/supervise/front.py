"""The process that the shell sees: it passes signals on to the keeper, and ends with its status.

The front ends last. If the keeper is killed, the front ends all that is left. If the front is
killed, the keeper ends all.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from stormd.errors import DirectoryUnsafe, error_with_remedy
from stormd.protocol import temporary_directory
from stormd.supervise.keeper import keep
from stormd.supervise.processes import Family, end_by, exit_status
from stormd.supervise.request import Request
from stormd.supervise.signals import PASSED, Passed, Witness, is_terminal_s

__all__ = ["supervise"]


def supervise(request: Request) -> int:
    """Run the command with its services beside it; return the exit status for a shell.

    Call it in a single-threaded process that ends afterwards: its signals stay blocked. Nothing is
    left running when this function returns, or when this process is killed. If the terminal's
    Ctrl-C has ended the command, this process ends by SIGINT too: only that ends a loop of the
    shell.
    """
    signals = _passed_here()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, no child could be waited for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})
    sys.stdout.flush()  # otherwise each forked process would write the buffers again
    sys.stderr.flush()
    family = Family()
    with ExitStack() as cleanup:
        directory = _private_directory()
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
        # A killed keeper leaves processes that nobody else could end in order.
        family.kill_others([witness.pid], partial(signal.sigtimedwait, {signal.SIGCHLD}))
    if ended == -signal.SIGINT and at_terminal:
        end_by(signal.SIGINT)
    return exit_status(ended)


def _private_directory() -> Path:
    """Make a directory for sockets and logs.

    Raises:
        DirectoryUnsafe: there is no directory for temporary files.
    """
    try:
        below = temporary_directory("stormd-run-12345678/stormd.sock")
        return Path(tempfile.mkdtemp(prefix="stormd-run-", dir=below))
    except OSError as error:
        raise DirectoryUnsafe(
            "no directory for sockets and logs can be made: "
            f"{error_with_remedy(error, 'set TMPDIR to one that this user may write to')}"
        ) from error


def _passed_here() -> set[signal.Signals]:
    """Return the signals to pass on: those ignored from the start, as under nohup, stay ignored."""
    return {number for number in PASSED if signal.getsignal(number) is not signal.SIG_IGN}


def _pass_on(
    keeper: int, writing: int, signals: set[signal.Signals], witness: Witness
) -> tuple[int, bool]:
    """Send each signal to the keeper until the keeper ends.

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
                continue  # the keeper has ended, and its SIGCHLD will follow
        elif (ended := os.waitpid(keeper, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1]), at_terminal
