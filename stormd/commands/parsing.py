"""The command line's parser: arguments load with their command, and help shows every default.

`all_commands` is for programs that need the whole command line (completions, the manual).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

__all__ = ["Parser", "all_commands"]


class Parser(argparse.ArgumentParser):
    """Adds a command's arguments only when it is chosen, so other commands' code is not loaded.

    Options cannot be abbreviated: a prefix that is unique now may be ambiguous in a later version.
    """

    _add: Callable[[argparse.ArgumentParser], None] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the same arguments as argparse's parser."""
        super().__init__(
            *args, **{"formatter_class": _HelpFormatter, "allow_abbrev": False, **options}
        )

    def add_later(self, add: Callable[[argparse.ArgumentParser], None]) -> None:
        """Have `add` called with this parser before it parses anything."""
        self._add = add

    def load(self) -> None:
        add, self._add = self._add, None
        if add is not None:
            add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Load the arguments and parse; an unknown argument exits with this command's message."""
        self.load()
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help has all there are"
            self.exit(2, f"{self.prog}: unknown argument {name}: {hint}\n")
        return chosen, unknown


def all_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Load and yield the parser, then the parsers of all its commands, in their order."""
    if isinstance(parser, Parser):
        parser.load()
    yield parser
    for action in parser._actions:  # argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from all_commands(below)


class _HelpFormatter(argparse.HelpFormatter):
    """Help that shows the default of each option whose text does not contain it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        is_switch = action.nargs == 0 or isinstance(action.default, bool)
        if is_switch or not action.option_strings or "default: " in text:
            return text
        if action.default in (None, [], argparse.SUPPRESS):
            return text
        return f"{text} (default: {_shown(action.default)})".lstrip()


def _shown(default: Any) -> str:
    words = default if isinstance(default, list) else [default]
    return " ".join(str(word) for word in words).replace("%", "%%")
