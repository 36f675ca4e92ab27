"""The commented example of the config file, made from the definition of the settings.

The example names every option with its default, and a daemon that reads it unchanged behaves as one
without a file: every setting in it is commented out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

from stormd.config import Option, config_options, default_of
from stormd.sizes import exact_size

__all__ = ["render_example", "render_value"]

_HEADING: Final = """\
# stormd's settings. Command-line flags win over STORMD_... variables, those over this file.
# Sizes are texts with KiB, MiB, GiB or TiB, or plain numbers of bytes. A commented line shows
# the default.
"""


def render_example() -> str:
    """Return the text of the example file."""
    groups = groupby(config_options(), key=lambda option: option.section)
    return "\n".join([_HEADING, *(_section(name, options) for name, options in groups)])


def render_value(option: Option, value: Any) -> str:
    """Return a value as the TOML file spells it."""
    if option.kind == "size":
        return f'"{exact_size(value)}"' if value else "0"
    if option.kind == "mode":
        return f"0o{value:o}"
    if option.kind == "uids":
        return str(list(value))
    if option.kind == "switch":
        return str(value).lower()
    return f'"{value}"' if option.kind == "text" else f"{value}"


def _section(name: str, options: Iterator[Option]) -> str:
    return "\n".join([f"# --- {name} ".ljust(96, "-"), "", *(_entry(option) for option in options)])


def _entry(option: Option) -> str:
    shown = default_of(option) if option.example is None else option.example
    comments = [line for note in _notes(option) for line in textwrap.wrap(note, 94)]
    setting = f"{option.name} = {render_value(option, shown)}"
    return "\n".join(f"# {line}" for line in [*comments, setting]) + "\n"


def _notes(option: Option) -> Iterator[str]:
    yield f"{option.help[0].upper()}{option.help[1:]}."
    if option.choices:
        yield f"One of {', '.join(option.choices)}."
    if option.default_note:
        yield f"Default: {option.default_note}."
    if option.reloadable:
        yield "Read again on SIGHUP."
    yield f"{option.flag}, {option.variable}"
