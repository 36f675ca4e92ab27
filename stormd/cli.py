"""The `stormd` command: parses the command line and runs one command.

The exit status is 0 for success, 1 for a failed check or a failure of the daemon, 2 for wrong usage
or a bad setting, 3 if no daemon answers, and 130 after an interrupt. `stormd run` exits with the
status of the command that it ran. A StormdError or ProtocolError ends as one line on standard
error, never as a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from stormd import __version__
from stormd.commands import (
    advise,
    completion,
    doctor,
    run,
    serve,
    status,
    top,
    upgrade,
)
from stormd.commands.parsing import Parser
from stormd.commands.programs import BENCH, DEMO, Program
from stormd.errors import CommandUnusable, ConfigError, NoDaemon, StormdError, error_with_remedy
from stormd.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_DAEMON,
    EXIT_OK,
    EXIT_USAGE,
    open_closed_streams,
    print_to_stderr,
)
from stormd.protocol import ProtocolError

__all__ = ["main", "parser"]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why a file takes no more output."""

_COMMANDS: Final[dict[str, ModuleType | Program]] = {
    "run": run,
    "advise": advise,
    "serve": serve,
    "status": status,
    "top": top,
    "upgrade": upgrade,
    "doctor": doctor,
    "bench": BENCH,
    "demo": DEMO,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, sys.argv if None, and return the exit status."""
    open_closed_streams()
    line = parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    line.set_defaults(line=line, given=given)  # for `completion`, and to start a daemon again
    chosen = line.parse_args(given)
    if chosen.command is None:
        line.print_help()
        return EXIT_OK
    try:
        exit_status: int = _COMMANDS[chosen.command].run(chosen)
        sys.stdout.flush()  # here, so that a closed pipe raises inside this try
    except (StormdError, ProtocolError) as error:
        print_to_stderr(str(error))
        return _status_of(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _unwritten(error)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich met it, and ends with status 1
            return _unwritten(end.__context__)
        raise
    return exit_status


def parser() -> Parser:
    """Return the parser of the whole command line; `command` names the chosen command."""
    top_level = Parser(
        prog="stormd",
        description="Keeps training activations losslessly compressed in shared host memory.",
        epilog="exit status: 0 done, 1 a check failed, 2 wrong usage, 3 no daemon answers, "
        "130 interrupted",
    )
    top_level.add_argument("--version", action="version", version=f"stormd {__version__}")
    commands = top_level.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        command = commands.add_parser(name, help=module.HELP, description=text)
        command.add_later(module.add_arguments)
    return top_level


def _unwritten(error: OSError) -> int:
    """Return the exit status for output that nobody reads, as in `stormd status | head -1`, or
    that a full disk does not take; any other error is raised again.
    """
    is_unread = isinstance(error, BrokenPipeError)
    if not is_unread and (error.errno not in _FULL or error.filename is not None):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    if is_unread:
        return 141  # what a shell reports for a command ended by SIGPIPE
    print_to_stderr(f"the output cannot be written: {error_with_remedy(error, 'write elsewhere')}")
    return EXIT_FAILED


def _status_of(error: StormdError | ProtocolError) -> int:
    match error:
        case NoDaemon():
            return EXIT_NO_DAEMON
        case ConfigError() | ProtocolError():
            return EXIT_USAGE
        case CommandUnusable():
            return error.exit_status
        case _:
            return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
