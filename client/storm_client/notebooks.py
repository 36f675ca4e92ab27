"""Tables as notebooks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table_html"]


def table_html(
    headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """Return a table with its headings, and the notes as lines below it; all of it is text."""
    from html import escape  # not before a table is shown: it reads the names of all entities

    heading = "".join(f"<th>{escape(one)}</th>" for one in headings)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = "<br>".join(map(escape, notes))
    return f"<table><tr>{heading}</tr>{body}</table>" + (f"<p>{below}</p>" if below else "")
