"""The `stormd` command: parses the command line and runs one command.

The exit status is 0 for success, 1 for a failed check or a failure of the daemon, 2 for wrong usage
or a bad setting, 3 where no daemon answers, and 130 after an interrupt. An error of ours ends as
one line on standard error, never as a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from stormd import __version__
from stormd.commands import bench, demo, doctor, serve, status, top
from stormd.commands.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_DAEMON, EXIT_USAGE
from stormd.errors import ConfigError, NoDaemon, StormdError
from stormd.protocol import ProtocolError

__all__ = ["main", "parser"]

_COMMANDS: Final[dict[str, ModuleType]] = {
    "serve": serve,
    "status": status,
    "top": top,
    "doctor": doctor,
    "bench": bench,
    "demo": demo,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, sys.argv where None, and return the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        exit_status: int = _COMMANDS[chosen.command].run(chosen)
        sys.stdout.flush()  # here, where a reader that has gone is still an error of ours
    except NoDaemon as error:
        return _failed(error, EXIT_NO_DAEMON)
    except (ConfigError, ProtocolError) as error:
        return _failed(error, EXIT_USAGE)
    except StormdError as error:
        return _failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _unread()
    return exit_status


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `command` names the chosen command."""
    top_level = _Parser(
        prog="stormd",
        description="Keeps training activations losslessly compressed in shared host memory.",
        epilog="exit status: 0 done, 1 a check failed, 2 wrong usage, 3 no daemon answers, "
        "130 interrupted",
    )
    top_level.add_argument("--version", action="version", version=f"stormd {__version__}")
    commands = top_level.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_later(module.add_arguments)
    return top_level


class _Parser(argparse.ArgumentParser):
    """A command's arguments are added when it is chosen: others' programs stay unloaded."""

    _add: Callable[[argparse.ArgumentParser], None] | None = None

    def add_later(self, add: Callable[[argparse.ArgumentParser], None]) -> None:
        """Have `add` called with this parser before it parses anything."""
        self._add = add

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, having added what is to be added."""
        add, self._add = self._add, None
        if add is not None:
            add(self)
        return super().parse_known_args(args, namespace)


def _unread() -> int:
    """End as a command does whose reader has seen enough, as `stormd status | head -1`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return 141  # what a shell reports for a command ended by SIGPIPE


def _failed(error: Exception, exit_status: int) -> int:
    sys.stderr.write(f"stormd: {error}\n")
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
