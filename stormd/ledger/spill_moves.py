"""What is written to the disk and read from it, and when. Pure.

The tier writes the oldest entry of the session that holds most, ahead of the need, by two rules. It
keeps part of the pool clean or free. And from a step's beginning on it writes as many bytes as the
previous step had on the disk alone, so that the disk works all through a forward pass.

The tier first reads entries that restores wait for. Then it prefetches the newest, which a backward
pass needs next, if there is space to spare. To read an entry that a restore waits for, clean blocks
are freed. If that entry holds back all other restores of its session, clean blocks of restores that
have not begun are freed, too. So it can always be read: at least the reserve is available for it.
While others' restores in progress use the reserve, entries are written to make room for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stormd.ledger.events import SpillJob
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase, OnDisk
from stormd.ledger.sessions import Entry, Session
from stormd.ledger.spill_order import Numbered, SpillOrder, SpillOrders
from stormd.memory.arena import Block
from stormd.memory.extents import disk_bytes

__all__ = ["Bandwidth", "Direction", "Reads", "Writes"]

MOVING_BYTES: Final = 64 << 20
MAX_MOVING: Final = 64
"""In-flight limits of each direction, in bytes and blobs. Every thread finds its next job, but a
requested read does not wait long behind other jobs."""

_HALVED_SECONDS: Final = 2.0
"""Busy time after which the measurements so far are weighted half."""

WRITE_AHEAD_DIVISOR: Final = 8
"""Divisor: writing ahead keeps this part of the pool clean or free."""

STEP_OVER_DIVISOR: Final = 4
"""Divisor: a step is over when less than this part of its maximum on the disk is left there."""


class Bandwidth:
    """The disk's recent speed in one direction. `now` is from a clock that never goes back.

    The time counts while a transfer is in flight, even one that has not ended: a stalled disk is
    measured as slow before it answers.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self.busy_seconds = 0.0
        self._in_flight = 0
        self._marked = 0.0
        self._nbytes = 0.0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Note that a transfer begins."""
        self._mark(now)
        self._in_flight += 1

    def end(self, now: float, nbytes: int) -> None:
        """Note that a transfer has ended, and the bytes it has moved: 0 if it failed."""
        self._mark(now)
        self._in_flight -= 1
        self.total_bytes += nbytes
        self._nbytes += nbytes
        if self._seconds > _HALVED_SECONDS:
            self._seconds /= 2
            self._nbytes /= 2

    def bytes_per_second(self, now: float) -> float | None:
        """Return the bytes per second of busy time; None before any bytes were moved."""
        if not self.total_bytes:
            return None
        waiting = now - self._marked if self._in_flight else 0.0
        return self._nbytes / max(self._seconds + waiting, 1e-9)

    def _mark(self, now: float) -> None:
        if self._in_flight:
            self._seconds += now - self._marked
            self.busy_seconds += now - self._marked
        self._marked = now


@dataclass(slots=True)
class Direction:
    """The jobs that the tier has in flight, all reads or all writes, and their speed."""

    is_read: bool
    count: int = 0
    nbytes: int = 0
    by_session: Counter[int] = field(default_factory=Counter)
    speed: Bandwidth = field(default_factory=Bandwidth)

    @property
    def has_room(self) -> bool:
        """Whether the tier may get more jobs."""
        return self.nbytes < MOVING_BYTES and self.count < MAX_MOVING

    def begin(self, place: OnDisk, number: int, block: Block, now: float) -> SpillJob:
        """Return the job for entry `number`, whose blob is in `block` or is read into it."""
        self.count += 1
        self.nbytes += place.pool_bytes
        self.by_session[place.session] += place.pool_bytes
        self.speed.begin(now)
        return SpillJob(
            session=place.session,
            entry=number,
            generation=place.generation,
            block=block,
            extent=place.extent,
            is_read=self.is_read,
        )

    def end(self, place: OnDisk, now: float, moved: int) -> None:
        """Note that a job has ended, and the bytes it has moved: 0 if it failed."""
        self.count -= 1
        self.nbytes -= place.pool_bytes
        self.by_session[place.session] -= place.pool_bytes
        if not self.by_session[place.session]:
            del self.by_session[place.session]
        self.speed.end(now, moved)

    def as_status(self, now: float) -> dict[str, Any]:
        """Return bytes and speed, as JSON values."""
        return {
            "bytes": self.speed.total_bytes,
            "busy_seconds": self.speed.busy_seconds,
            "bytes_per_second": self.speed.bytes_per_second(now) or 0.0,
        }


class _Need:
    """Estimates, by the previous step, how many bytes of a step do not fit into the pool."""

    def __init__(self) -> None:
        self._expected = 0
        self._begun = 0
        self._most = 0
        self._most_away = 0

    def update(self, on_disk: int, away: int) -> None:
        """Take in the pool bytes of the blobs that are on the disk, and of those there alone."""
        self._most = max(self._most, on_disk)
        self._most_away = max(self._most_away, away)
        if self._most and on_disk * STEP_OVER_DIVISOR < self._most:
            self._expected = self._most_away
            self._begun = self._most = self._most_away = 0

    def begin(self, nbytes: int) -> None:
        """Note that the write of so many bytes begins."""
        self._begun += nbytes

    @property
    def has_begun(self) -> bool:
        """Whether a step had entries on the disk and was not seen to end."""
        return self._most > 0

    @property
    def is_open(self) -> bool:
        """Whether more bytes must be written than have been in this step."""
        return self._begun < self._expected


class Writes:
    """Chooses what is written. `capacity` bytes of the pool are for entries that are not clean.

    `largest_waiting` is the size, in bytes, of the largest store that waits for the disk; 0 if none
    does.
    """

    def __init__(self, state: State, disk: Disk, orders: SpillOrders, capacity: int) -> None:
        self._state = state
        self._disk = disk
        self._orders = orders
        self._capacity = capacity
        self._generations = itertools.count(1)
        self._need = _Need()
        self._begun: list[SpillJob] = []
        self.direction: Final = Direction(is_read=False)
        self.largest_waiting = 0

    @property
    def dirty_bytes(self) -> int:
        """Bytes of the pool that are promised, or that must be written before they can be freed."""
        return self._state.space.taken - self._disk.held_bytes

    def is_writing(self, now: float) -> bool:
        """Return whether a write is in flight, after beginning one if none is and one can be."""
        if not self.direction.count:
            self._orders.refresh()
            self._write_of(self._orders.active(), now)
        return self.direction.count > 0

    def begin(self, now: float, *, stuck: SpillOrder | None) -> list[SpillJob]:
        """Return the writes to begin now; the session `stuck` has no room to read, if not None."""
        if self._disk.written or self._need.has_begun:
            away = self._disk.by_phase[DiskPhase.AWAY] + self._disk.by_phase[DiskPhase.READING]
            self._need.update(self._disk.kept_bytes, away)
        while self.direction.has_room and (orders := self._due()) and self._write_of(orders, now):
            pass
        if stuck is not None and not self.direction.count and not self._write_of([stuck], now):
            self._write_of(self._orders.active(), now)
        return self.take_begun()

    def take_begun(self) -> list[SpillJob]:
        """Return the writes that were begun and not returned yet: each needs its answer."""
        begun, self._begun = self._begun, []
        return begun

    def _due(self) -> list[SpillOrder]:
        """Return the orders of the sessions of which something must be written now."""
        spare = self._capacity // WRITE_AHEAD_DIVISOR + self.largest_waiting
        if self.dirty_bytes - self.direction.nbytes > self._capacity - spare:
            return self._orders.active()
        if not self._need.is_open:
            return []
        return [one for one in self._orders.active() if not one.record.is_restoring]

    def _write_of(self, orders: Sequence[SpillOrder], now: float) -> bool:
        """Begin to write the oldest entry of the session that holds most; False if none can be."""
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
    ) -> SpillJob:
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
        self._need.begin(place.pool_bytes)
        return self.direction.begin(place, number, entry.block, now)


class Reads:
    """Chooses what is read. `reserve` bytes of the pool are never promised to stores."""

    def __init__(self, state: State, disk: Disk, orders: SpillOrders, reserve: int) -> None:
        self._state = state
        self._disk = disk
        self._orders = orders
        self._reserve = reserve
        self._blocked: SpillOrder | None = None
        self.direction: Final = Direction(is_read=True)

    @property
    def stuck(self) -> SpillOrder | None:
        """The session whose first restore found no room at the last `begin`, if none is read."""
        return None if self.direction.count else self._blocked

    def begin(self, now: float, *, prefetch: bool) -> list[SpillJob]:
        """Return the reads to begin now; `prefetch` only when nobody else needs the pool."""
        self._blocked = None
        jobs: list[SpillJob] = []
        while self.direction.has_room:
            found = self._next(prefetch=prefetch)
            if found is None:
                break
            jobs.append(self._read(*found, now))
        return jobs

    def _next(self, *, prefetch: bool) -> Numbered | None:
        """Return the entry to read next, with its space promised; None if there is none.

        The session with the fewest bytes being read comes first. While an entry that holds back
        other restores finds no space, no other read begins: those could take the space forever.
        """
        reading = self.direction.by_session
        orders = sorted(self._orders.active(), key=lambda one: reading[one.record.info.session])
        for order in orders:
            found = order.blocking_entry()
            if found is not None:
                if self._make_room(order.record, found[1], is_first=True):
                    return found
                self._blocked = order
                return None
        for order in orders:
            found = order.first_requested()
            if found is not None and self._make_room(order.record, found[1], is_first=False):
                return found
        return self._next_prefetch(orders) if prefetch else None

    def _next_prefetch(self, orders: Sequence[SpillOrder]) -> Numbered | None:
        """Return an entry that a backward pass will need next, if there is space to spare."""
        for order in orders:
            found = order.last_away() if order.record.is_restoring else None
            if found is not None and order.first_requested() is None:
                place = found[1].disk
                assert place is not None
                room = place.pool_bytes
                keeps_shares = self._orders.keeps_shares(order.record, room)
                if keeps_shares and self._state.space.promise(room, keep=self._reserve):
                    return found
        return None

    def _read(self, number: int, entry: Entry, now: float) -> SpillJob:
        place = entry.disk
        assert place is not None
        place.into = self._state.space.place(place.pool_bytes, place.nbytes)
        place.enter(DiskPhase.READING)
        return self.direction.begin(place, number, place.into, now)

    def _make_room(self, record: Session, entry: Entry, *, is_first: bool) -> bool:
        """Have the pool promise space for an entry to be read, freeing clean blocks for it.

        If `is_first`, the entry holds back others; then clean blocks that restores wait for are
        freed, too.
        """
        assert entry.disk is not None
        orders, room = self._orders, entry.disk.pool_bytes
        while not self._promise(record, room):
            if orders.drop_beyond(record) or orders.drop_idle():
                continue
            if not is_first or not orders.drop_waiting():
                if self._state.space.request_growth(room):
                    self._state.holdings.has_changed = True
                return False
        return True

    def _promise(self, record: Session, room: int) -> bool:
        """Have the pool promise space that is nobody else's share; the reserve never is."""
        is_in_reserve = self._disk.held_bytes + room <= self._reserve
        if not is_in_reserve and not self._orders.keeps_shares(record, room):
            return False
        return self._state.space.promise(room)
