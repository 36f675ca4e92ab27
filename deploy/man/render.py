"""Renders the manual page stormd(1) from the argument parser: it contains all texts of `--help`.

`make man` writes the page beside this file, from where packages install it. A test checks that the
file is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from stormd import __version__
from stormd.commands.parsing import all_commands

__all__ = ["render_manual"]

_EXIT: Final = (
    ("0", "Done."),
    ("1", "A check failed, or the daemon could not do its work."),
    ("2", "Wrong usage, or a setting that cannot be used."),
    ("3", "No daemon answers."),
    ("126, 127", "stormd run: the command cannot be executed, or is not found."),
    ("128 + N", "Ended by signal N; stormd run: the command was."),
)
_FILES: Final = (
    ("/run/stormd/stormd.sock", "The system's daemon."),
    ("$XDG_RUNTIME_DIR/stormd/stormd.sock", "The user's."),
    ("/tmp/stormd-UID/stormd.sock", "The user's where there is no XDG_RUNTIME_DIR."),  # noqa: S108 - a text
)


def render_manual(parser: argparse.ArgumentParser) -> str:
    """Return the page in the macros of man(7)."""
    whole, *commands = all_commands(parser)
    title = _plain(whole.description or "").rstrip(".")
    lines = [
        f'.TH STORMD 1 "" "stormd {__version__}" "User Commands"',
        ".SH NAME",
        rf"stormd \- {_text(title[:1].lower() + title[1:])}",
        ".SH SYNOPSIS",
        *_synopsis(whole),
        ".SH COMMANDS",
        *(line for command in commands for line in _command(command)),
        ".SH EXIT STATUS",
        *_terms(_EXIT),
        ".SH FILES",
        *_terms(_FILES),
        ".SH SEE ALSO",
        _text("A settings file with every option, its default and what it means is printed by"),
        r".BR stormd\ serve\ \-\-example\-config .",
    ]
    return "\n".join(lines) + "\n"


def _command(command: argparse.ArgumentParser) -> Iterator[str]:
    yield f'.SS "{_text(command.prog)}"'
    yield _text(_plain(command.description or ""))
    yield ".PP"
    yield from _synopsis(command)
    formatter = command._get_formatter()
    for action in command._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        expanded = formatter._expand_help(action) if action.help else ""
        yield from _terms([(_invocation(action), _plain(expanded))])


def _synopsis(command: argparse.ArgumentParser) -> Iterator[str]:
    usage = _plain(command.format_usage()).removeprefix("usage: ")
    yield rf"\fB{_text(usage)}\fR"


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return names
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return f"{names} {action.metavar or choices or action.dest.upper()}"


def _terms(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in terms:
        yield ".TP"
        yield rf"\fB{_text(term)}\fR"
        yield _text(text)


def _plain(text: str) -> str:
    """Return the text on one line."""
    return " ".join(text.split())


def _text(text: str) -> str:
    """Return the text, escaped so that roff treats none of it as markup."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return rf"\&{escaped}" if escaped.startswith(".") else escaped


if __name__ == "__main__":
    from stormd.cli import parser

    sys.stdout.write(render_manual(parser()))
