"""Rows that children measure: how a child runs to its end, and how a table of rows is shown.

A row is what a child printed as JSON, or {"skipped": reason}.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeAlias

from stormd.output import write_line

__all__ = ["Column", "Ended", "in_short", "print_table", "ratio_to", "run_child"]

Row: TypeAlias = dict[str, Any]


class Ended(NamedTuple):
    """How a child ended: its exit status, None if it took too long, and what it printed."""

    status: int | None
    output: str
    complaints: str


def run_child(
    command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end, and kill it after `seconds` or at an interrupt.

    It writes to files: its own children may outlive it, and would keep a pipe open.
    """
    with (
        TemporaryFile("w+") as output,
        TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(  # noqa: S603 - our own module and flags
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, env=environ
        ) as process,
    ):
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        complaints.seek(0)
        return Ended(status, output.read(), complaints.read())


class Column(NamedTuple):
    """A column of a table; the cell of a missing value, or of None, is left empty."""

    head: str
    value: Callable[[Row], Any]
    factor: float = 1.0
    """To the unit of the head."""
    form: str = ".2f"


def print_table(rows: Iterable[tuple[str, Row]], columns: Sequence[Column]) -> None:
    """Print a line for each row under its name: its cells, or why it was left out."""
    named = list(rows)
    names = max((len(name) for name, _ in named), default=0)
    width = 2 + max(len(column.head) for column in columns)
    write_line(" " * names + "".join(f"{column.head:>{width}}" for column in columns))
    for name, row in named:
        cells = "".join(f"{_cell(row, column):>{width}}" for column in columns)
        write_line(f"{name:{names}}" + (f"  {_why(row)}" if "skipped" in row else cells))


def ratio_to(plain: float | None, row: Row, key: str) -> Row:
    """Return the row with "of_none", its value under `key` over the plain one; as it is without."""
    return row | {"of_none": row[key] / plain} if plain and key in row else row


def in_short(row: Row, milliseconds: float, peak_gib: float | None) -> str:
    """Return a row as the text that is shown once it is measured."""
    if "skipped" in row:
        return _why(row)
    peak = "" if peak_gib is None else f", peak {peak_gib:.2f} GiB"
    return f"{milliseconds:.1f} ms a step{peak}"


def _why(row: Row) -> str:
    return f"left out: {row['skipped']}"


def _cell(row: Row, column: Column) -> str:
    try:
        found = column.value(row)
    except KeyError:
        return ""
    return "" if found is None else format(found * column.factor, column.form)
