"""Counts of saved tensors that compiled code makes, until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Counted", "NativeCounts", "Tallies"]


class Tallies(Protocol):
    """Rows of counts and bytes, and seconds; implemented by the compiled module."""

    def add_row(self) -> int:
        """Return the number of a new row."""

    def drain(self) -> tuple[list[tuple[int, int, int]], float]:
        """Return row, count and bytes for each row counted since the last call, and the seconds."""

    def seconds_an_operation(self) -> float | None:
        """Return the thread's seconds for recomputing one operation; None if too few were."""


class Counted(NamedTuple):
    """How many tensors of a layer had the same outcome, and their bytes."""

    layer: str
    what: str
    reason: str
    tensors: int
    nbytes: int


class NativeCounts:
    """Maps each row of some tallies to its meaning."""

    def __init__(self, tallies: Tallies) -> None:
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
