"""`stormd completion`: a script that completes stormd's commands and flags in a shell.

The script is generated from the parser itself, so it has all commands and flags. Generating it
needs shtab, the extra `completion`; using it needs nothing.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Final

from stormd.commands.parsing import all_commands
from stormd.errors import ConfigError
from stormd.output import EXIT_OK, write_line

__all__ = ["HELP", "add_arguments", "run"]

HELP = "print a script that completes this command line in a shell"

_SHELLS: Final = ("bash", "zsh", "fish")
_PATHS: Final = ("FILE", "COMMAND ...")
"""Metavars of the values that are completed as file names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "stormd completion bash > ~/.local/share/bash-completion/completions/stormd\n"
        "stormd completion zsh > ~/.zfunc/_stormd     # ~/.zfunc must be in $fpath\n"
        "stormd completion fish > ~/.config/fish/completions/stormd.fish"
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that is to complete")


def run(args: argparse.Namespace) -> int:
    """Print the script for the command line that `args.line` parses.

    Raises:
        ConfigError: shtab, which generates it, is not installed.
    """
    if find_spec("shtab") is None:
        raise ConfigError("completions are made with shtab: pip install shtab")
    import shtab

    line: argparse.ArgumentParser = args.line
    for command in all_commands(line):
        for action in command._actions:
            metavar = action.metavar
            if metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif isinstance(metavar, str) and metavar.startswith("{"):
                action.choices = metavar[1:-1].split(",")  # the settings check them, not argparse
    write_line(shtab.complete(line, shell=args.shell).rstrip())
    return EXIT_OK
