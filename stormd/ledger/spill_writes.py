"""What is written to the disk, and when: the oldest of whoever holds most, ahead of the need.

Ahead are two measures. Part of the pool is kept clean or free; and of a step as much is written
from its beginning on as the step before had on the disk alone, so that the disk works all through
a forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from stormd.ledger.bandwidth import Direction
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase, OnDisk
from stormd.ledger.sessions import Entry, Session
from stormd.ledger.spill_events import SpillJob, WriteJob
from stormd.ledger.spill_order import SpillOrder, SpillOrders
from stormd.memory.extents import disk_bytes

__all__ = ["Writes"]

AHEAD_PART: Final = 8
"""This part of the pool is kept clean or free by writing ahead of the need."""

OVER_PART: Final = 4
"""A step is over when less than this part is left on the disk of what it had there at most."""


class _Need:
    """How much of a step does not fit into the pool, as the step before has shown."""

    def __init__(self) -> None:
        self._expected = 0
        self._begun = 0
        self._most = 0
        self._most_away = 0

    def look(self, on_disk: int, away: int) -> None:
        """Take in how much of the pool's bytes is on the disk, and how much is there alone."""
        self._most = max(self._most, on_disk)
        self._most_away = max(self._most_away, away)
        if self._most and on_disk * OVER_PART < self._most:
            self._expected = self._most_away
            self._begun = self._most = self._most_away = 0

    def begin(self, nbytes: int) -> None:
        """Note that so much is being written."""
        self._begun += nbytes

    @property
    def has_begun(self) -> bool:
        """Whether a step had something on the disk and has not been seen to end."""
        return self._most > 0

    @property
    def is_open(self) -> bool:
        """Whether more will have to be written than has been."""
        return self._begun < self._expected


class Writes:
    """Chooses what is written. `capacity` is the pool's for what must be written to be free.

    `wanted` are the bytes that the largest store which waits for the disk asks for; 0 for none.
    """

    def __init__(self, state: State, disk: Disk, orders: SpillOrders, capacity: int) -> None:
        self._state = state
        self._disk = disk
        self._orders = orders
        self._capacity = capacity
        self._generations = itertools.count(1)
        self._need = _Need()
        self._begun: list[SpillJob] = []
        self.direction: Final = Direction()
        self.wanted = 0

    @property
    def dirty_bytes(self) -> int:
        """Bytes of the pool that are promised, or that must be written to be free."""
        return self._state.space.taken - self._disk.held_bytes

    def is_writing(self, now: float) -> bool:
        """Tell whether something is being written; begin where something can be."""
        if not self.direction.count:
            self._orders.look()
            self._write_of(self._orders.living(), now)
        return self.direction.count > 0

    def begin(self, now: float) -> list[SpillJob]:
        """Return what is to be written now."""
        if self._disk.written or self._need.has_begun:
            away = self._disk.rooms[DiskPhase.AWAY] + self._disk.rooms[DiskPhase.READING]
            self._need.look(self._disk.kept_bytes, away)
        while self.direction.has_room and (orders := self._due()) and self._write_of(orders, now):
            pass
        return self.take_begun()

    def take_begun(self) -> list[SpillJob]:
        """Return what was begun and has not been handed over: it needs its answer, too."""
        begun, self._begun = self._begun, []
        return begun

    def _due(self) -> list[SpillOrder]:
        """Return those of whom something is to be written now."""
        spare = self._capacity // AHEAD_PART + self.wanted
        if self.dirty_bytes - self.direction.nbytes > self._capacity - spare:
            return self._orders.living()
        if not self._need.is_open:
            return []
        return [one for one in self._orders.living() if not one.record.is_restoring]

    def _write_of(self, orders: Sequence[SpillOrder], now: float) -> bool:
        """Begin to write the oldest entry of whoever of these holds most; False for none."""
        for order in sorted(orders, key=lambda one: -one.record.used_bytes):
            found = order.next_dirty()
            if found is None:
                continue
            number, entry = found
            assert entry.block is not None
            wanted = disk_bytes(entry.block.nbytes)
            if not self._disk.space.promise(wanted):
                order.note(number, entry)
                return False
            self._begun.append(self._write(order.record, number, entry, wanted, now))
            return True
        return False

    def _write(
        self, record: Session, number: int, entry: Entry, wanted: int, now: float
    ) -> WriteJob:
        assert entry.block is not None
        place = OnDisk(
            disk=self._disk,
            session=record.info.session,
            generation=next(self._generations),
            extent=self._disk.space.place(wanted, wanted),
            nbytes=entry.block.nbytes,
            since=now,
        )
        entry.disk = place
        self._need.begin(place.room)
        self.direction.begin(place, now)
        return WriteJob(
            session=place.session,
            entry=number,
            generation=place.generation,
            block=entry.block,
            extent=place.extent,
        )
