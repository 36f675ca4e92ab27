"""Counts of saved tensors that compiled code makes, until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from storm_client.native import _follow

__all__ = ["Counted", "NativeCounts"]


class Counted(NamedTuple):
    """How many tensors of a layer had the same outcome, and their bytes."""

    layer: str
    what: str
    reason: str
    tensors: int
    nbytes: int


class NativeCounts:
    """Maps each row of some tallies to its meaning."""

    def __init__(self, tallies: _follow.Tallies) -> None:
        self.tallies = tallies
        self._rows: dict[tuple[str, str, str], int] = {}
        self._names: dict[int, tuple[str, str, str]] = {}

    def row(self, layer: str, what: str, reason: str = "") -> int:
        """Return the row that counts a layer's tensors with the outcome `what`."""
        name = layer, what, reason
        row = self._rows.get(name)
        if row is None:
            row = self.tallies.add_row()  # an interrupt behind it leaves a row that nobody uses
            self._names[row] = name
            self._rows[name] = row
        return row

    def drain(self) -> tuple[Iterator[Counted], float]:
        """Return the counts since the last call, and the seconds spent on recomputing."""
        rows, seconds = self.tallies.drain()
        return (Counted(*self._names[row], count, nbytes) for row, count, nbytes in rows), seconds
