"""Tables as notebooks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table_html"]


def table_html(
    headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """Return a table with its headings, and the notes as lines below it; all of it is text."""
    heading = "".join(f"<th>{escape(one)}</th>" for one in headings)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    below = "<br>".join(map(escape, notes))
    return f"<table><tr>{heading}</tr>{body}</table>" + (f"<p>{below}</p>" if below else "")


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)
