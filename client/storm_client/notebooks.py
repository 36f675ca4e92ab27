"""HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table_html"]


def table_html(
    headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """Return a table as HTML, with `notes` as lines below it; all arguments are plain text."""
    from html import escape  # imported late: the import reads the names of all entities

    heading = "".join(f"<th>{escape(one)}</th>" for one in headings)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = "<br>".join(map(escape, notes))
    return f"<table><tr>{heading}</tr>{body}</table>" + (f"<p>{below}</p>" if below else "")
