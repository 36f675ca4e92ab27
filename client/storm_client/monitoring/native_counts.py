"""What compiled code has counted of saved tensors, until somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["Counted", "NativeCounts", "Tallies"]


class Tallies(Protocol):
    """Rows of counts and bytes, and seconds: those of the compiled module."""

    def add_row(self) -> int:
        """Return the number of a new row."""
        ...

    def drain(self) -> tuple[list[tuple[int, int, int]], float]:
        """Return row, count and bytes of what was counted since the last time, and seconds."""
        ...


class Counted(NamedTuple):
    """How many tensors of a layer became something, and their bytes."""

    layer: str
    what: str
    reason: str
    tensors: int
    nbytes: int


class NativeCounts:
    """Tells what each row of some tallies stands for."""

    def __init__(self, tallies: Tallies) -> None:
        """Start with rows of nothing."""
        self.tallies = tallies
        self._rows: dict[tuple[str, str, str], int] = {}
        self._names: list[tuple[str, str, str]] = []

    def row(self, layer: str, what: str, reason: str = "") -> int:
        """Return the row that counts the tensors of a layer that become `what`."""
        name = layer, what, reason
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self.tallies.add_row()
            self._names.append(name)
        return row

    def drain(self) -> tuple[Iterator[Counted], float]:
        """Return what was counted since the last time, and the seconds spent on recomputing."""
        rows, seconds = self.tallies.drain()
        return (Counted(*self._names[row], count, nbytes) for row, count, nbytes in rows), seconds
