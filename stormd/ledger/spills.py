"""What goes to the disk and comes back, and when: the ledger's side of the tier.

Written is the oldest of whoever holds most: a backward pass wants it last. Not what is being
encoded, restored, waited for or lent. A block is given back once its blob is whole on the disk and
room is wanted, so of a pool that is large enough nothing is written. An extent is kept until its
entry is freed: what was read back is given up again without being written again.

Part of the pool, the reserve, is never promised to stores. So what is asked for can be read even
where everything else in the pool is to stay. Restores of a session begin in their order; for the
first of them blocks are taken from others that have not begun. Hence nobody waits for room that is
kept by those who wait for him.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from stormd.ledger.bandwidth import Bandwidth
from stormd.ledger.events import Instruction
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase, OnDisk
from stormd.ledger.restores import Restores
from stormd.ledger.sessions import Entry, Phase, Session
from stormd.ledger.spill_events import ReadJob, SpillDone, SpillFailed, SpillJob, WriteJob
from stormd.ledger.spill_order import SpillOrder
from stormd.memory.arena import Space, granules
from stormd.memory.extents import disk_bytes
from stormd.sizes import format_size

__all__ = ["ADMIT_SECONDS", "Spills"]

ADMIT_SECONDS: Final = 1.0
"""For which a store may wait for the disk. A client keeps a tensor itself after two."""

AHEAD_PART: Final = 8
"""This part of the pool is kept clean or free by writing ahead of the need."""

MOVING_BYTES: Final = 64 << 20
MOVING_MOST: Final = 64
"""Handed to the tier at one time in each direction, in bytes and blobs: enough for every thread to
find the next, little enough that what is asked for does not wait long behind it."""


@dataclass(slots=True)
class _Direction:
    """What the tier has been handed of one direction, and how fast that went."""

    count: int = 0
    nbytes: int = 0
    by_session: Counter[int] = field(default_factory=Counter)
    speed: Bandwidth = field(default_factory=Bandwidth)

    @property
    def has_room(self) -> bool:
        return self.nbytes < MOVING_BYTES and self.count < MOVING_MOST

    def begin(self, place: OnDisk, now: float) -> None:
        self.count += 1
        self.nbytes += place.room
        self.by_session[place.session] += place.room
        self.speed.begin(now)

    def end(self, place: OnDisk, now: float, moved: int) -> None:
        self.count -= 1
        self.nbytes -= place.room
        self.by_session[place.session] -= place.room
        if not self.by_session[place.session]:
            del self.by_session[place.session]
        self.speed.end(now, moved)

    def as_status(self, now: float) -> dict[str, Any]:
        return {
            "bytes": self.speed.total_bytes,
            "busy_seconds": self.speed.busy_seconds,
            "bytes_per_second": self.speed.a_second(now) or 0.0,
        }


class Spills:
    """Moves entries between the pool and `disk`. `reserve` bytes of the pool are for reading.

    `moves` says what is to be begun now, and is to be asked after every event.
    """

    def __init__(self, state: State, restores: Restores, disk: Disk, reserve: int) -> None:
        self._state = state
        self._restores = restores
        self._disk = disk
        self._reserve = granules(reserve)
        self._orders: dict[int, SpillOrder] = {}
        self._generations = itertools.count(1)
        self._asking = itertools.count(1)
        self._writing = _Direction()
        self._reading = _Direction()
        self._begun: list[SpillJob] = []
        self._wanted = 0
        self._lost = 0
        state.touched = []

    # --- room for stores --------------------------------------------------------------------

    @property
    def store_capacity(self) -> int:
        """Bytes of the pool for what cannot be given back at once."""
        return self._state.space.capacity - self._reserve

    @property
    def is_waited_for(self) -> bool:
        """Whether a store waits for what the disk does."""
        return self._wanted > 0

    def promise(self, nbytes: int) -> bool:
        """Have the pool promise room for a store, giving clean blocks back for it."""
        space = self._state.space
        if space.promise(nbytes, keep=self._kept()):
            return True
        if self._disk.ended:
            return False
        self._look()
        while self._drop_idle():
            if space.promise(nbytes, keep=self._kept()):
                return True
        return False

    def pool_bytes(self, nbytes: int) -> int:
        """Return what the pool must have room for, that a store of so many bytes is promised it."""
        return nbytes + self._kept()

    def waits(self, nbytes: int, now: float) -> bool:
        """Tell whether the disk will have made room for a store in time; note that it is to.

        Something is being written then, at whose end the store is to be asked for again.
        """
        if self._disk.ended or nbytes > self.store_capacity or not self._is_writing(now):
            return False
        missing = self._dirty() + nbytes - self.store_capacity
        rate = self._writing.speed.a_second(now)
        if rate is not None and missing > rate * ADMIT_SECONDS:
            return False
        self._wanted = max(self._wanted, nbytes)
        return True

    def shortage(self, now: float) -> str:
        """Return, for people, why the disk makes no room for a store in time, and what to do."""
        if self._disk.ended:
            return f"the tier on disk has ended ({self._disk.ended}): restart the daemon"
        if not self._writing.count:
            taken = format_size(self._disk.space.taken)
            return f"{taken} of the tier on disk are taken, too: raise spill_bytes or pool_bytes"
        rate = format_size(int(self._writing.speed.a_second(now) or 0))
        return f"the tier on disk takes {rate} a second, which is too slow: raise pool_bytes"

    # --- what the tier answers --------------------------------------------------------------

    def moved(
        self, record: Session, results: Iterable[SpillDone | SpillFailed], now: float
    ) -> list[Instruction]:
        """Take in what was written or read, or came to nothing: then the tier has ended."""
        self._wanted = 0  # who waits asks again
        instructions: list[Instruction] = []
        for result in results:
            entry, place = _moving(record, result.entry)
            if isinstance(result, SpillDone):
                self._done(record, result.entry, entry, place, now)
            else:
                instructions += self.end(result.detail)
                instructions += self._failed(record, result.entry, entry, place, now)
            self._settle(record, result.entry)
        return instructions + self._start_waiting(record)

    def end(self, reason: str) -> list[Instruction]:
        """End the tier: what is on the disk alone is lost, all else goes on. Twice is fine.

        What a thread of the tier still uses stays as it is until that answers.
        """
        if self._disk.ended:
            return []
        self._disk.ended = reason
        self._wanted = 0
        self._orders.clear()
        self._state.touched = None
        return [
            instruction
            for record in self._state.sessions.values()
            for instruction in self._end_of(record)
        ]

    # --- what is to be begun ----------------------------------------------------------------

    def moves(self, now: float) -> list[SpillJob]:
        """Return what is to be read and written now."""
        if self._disk.ended:
            return []
        self._look()
        jobs, self._begun = self._begun, []
        while self._reading.has_room and (read := self._read_next(now) or self._read_ahead(now)):
            jobs.append(read)
        while self._is_write_due() and (write := self._write_next(now)):
            jobs.append(write)
        return jobs

    # --- what the operator sees -------------------------------------------------------------

    def as_status(self, now: float) -> dict[str, Any]:
        """Return the tier as `stormd status` shows it."""
        disk = self._disk
        return {
            "capacity_bytes": disk.space.capacity,
            "used_bytes": disk.space.taken,
            "away_bytes": disk.rooms[DiskPhase.AWAY] + disk.rooms[DiskPhase.READING],
            "oldest_seconds": max(0.0, now - next(iter(disk.written.values()), now)),
            "write": self._writing.as_status(now),
            "read": self._reading.as_status(now),
            "lost_entries": self._lost,
            "ended": disk.ended,
        }

    def spilled_bytes(self, session: int) -> int:
        """Return what a session has on the disk."""
        return self._disk.by_session[session]

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool for which no entry is charged: clean, or being read into."""
        return self._disk.rooms[DiskPhase.CLEAN] + self._disk.rooms[DiskPhase.READING]

    def assert_invariants(self) -> None:
        """Raise AssertionError where the tier contradicts the sessions: for tests."""
        disk = self._disk
        places = [
            (entry, entry.disk)
            for record in self._state.sessions.values()
            for entry in record.entries.values()
            if entry.disk is not None
        ]
        for entry, place in places:
            _assert_place(entry, place, has_ended=bool(disk.ended))
        disk.assert_invariants([place for _, place in places])
        for phase, way in (
            (DiskPhase.WRITING, self._writing),
            (DiskPhase.READING, self._reading),
        ):
            moving = [place for _, place in places if place.phase is phase]
            assert (way.count, way.nbytes) == (len(moving), sum(one.room for one in moving))
        if not disk.ended:
            assert self._dirty() <= self.store_capacity
        assert not self._wanted or not disk.ended

    # --- parts of the above -----------------------------------------------------------------

    def _kept(self) -> int:
        """Return what a store must leave free: the reserve, less what is there for reading."""
        return 0 if self._disk.ended else max(0, self._reserve - self.held_bytes)

    def _dirty(self) -> int:
        """Return the bytes of the pool that are promised, or that must be written to be free."""
        return self._state.space.taken - self.held_bytes

    def _look(self) -> None:
        """Take in what has become of entries since the last look."""
        touched, self._state.touched = self._state.touched or [], []
        for record, number in touched:
            entry = record.entries.get(number)
            if entry is None or record.phase is Phase.ENDING or entry.space is not self._pool:
                continue
            place = entry.disk
            if place is not None:
                place.order = (place.order or next(self._asking)) if entry.waits else 0
            self._order_of(record).note(number, entry)

    @property
    def _pool(self) -> Space:
        return self._state.space

    def _order_of(self, record: Session) -> SpillOrder:
        session = record.info.session
        order = self._orders.get(session)
        if order is None:
            order = self._orders[session] = SpillOrder(record)
        return order

    def _living(self) -> list[SpillOrder]:
        """Return the orders of sessions that go on, and forget the others."""
        ended = [
            session for session, order in self._orders.items() if order.record.phase is Phase.ENDING
        ]
        for session in ended:
            del self._orders[session]
        return list(self._orders.values())

    # writing

    def _is_writing(self, now: float) -> bool:
        """Tell whether something is being written; begin where something can be."""
        if not self._writing.count:
            self._look()
            job = self._write_next(now)
            if job is not None:
                self._begun.append(job)
        return self._writing.count > 0

    def _is_write_due(self) -> bool:
        spare = self.store_capacity // AHEAD_PART + self._wanted
        ahead = self._dirty() - self._writing.nbytes
        return ahead > self.store_capacity - spare and self._writing.has_room

    def _write_next(self, now: float) -> WriteJob | None:
        """Begin to write the oldest entry of whoever holds most; None where there is no such."""
        for order in sorted(self._living(), key=lambda one: -one.record.used_bytes):
            found = order.next_dirty()
            if found is None:
                continue
            number, entry = found
            assert entry.block is not None
            wanted = disk_bytes(entry.block.nbytes)
            if not self._disk.space.promise(wanted):
                order.note(number, entry)
                return None
            return self._write(order.record, number, entry, wanted, now)
        return None

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
        self._writing.begin(place, now)
        return WriteJob(
            session=place.session,
            entry=number,
            generation=place.generation,
            block=entry.block,
            extent=place.extent,
        )

    # reading

    def _read_next(self, now: float) -> ReadJob | None:
        """Begin to read what a restore waits for, of whom least is being read."""
        orders = sorted(self._living(), key=self._read_of)
        for order in orders:
            found = order.head()
            if found is not None and self._make_read_room(found[1], is_first=True):
                return self._read(*found, now)
        for order in orders:
            found = order.first_asked()
            if found is not None and self._make_read_room(found[1], is_first=False):
                return self._read(*found, now)
        return None

    def _read_of(self, order: SpillOrder) -> int:
        return self._reading.by_session[order.record.info.session]

    def _read_ahead(self, now: float) -> ReadJob | None:
        """Begin to read what a backward pass will want next, where there is room to spare."""
        if self._wanted:
            return None
        for order in self._living():
            found = order.last_away() if order.record.is_restoring else None
            if found is not None and order.first_asked() is None:
                number, entry = found
                assert entry.disk is not None
                if self._pool.promise(entry.disk.room, keep=self._reserve):
                    return self._read(number, entry, now)
        return None

    def _read(self, number: int, entry: Entry, now: float) -> ReadJob:
        """Begin to read an entry, for which room is promised."""
        place = entry.disk
        assert place is not None
        place.into = self._pool.place(place.room, place.nbytes)
        place.enter(DiskPhase.READING)
        self._reading.begin(place, now)
        return ReadJob(
            session=place.session,
            entry=number,
            generation=place.generation,
            block=place.into,
            extent=place.extent,
        )

    def _make_read_room(self, entry: Entry, *, is_first: bool) -> bool:
        """Have the pool promise room for what is to be read, giving clean blocks back for it.

        For what holds up others, also those that are waited for.
        """
        assert entry.disk is not None
        room = entry.disk.room
        while not self._pool.promise(room, keep=self._kept_for_shares(room)):
            if not self._drop_idle() and not (is_first and self._drop_waiting()):
                wanted = room + self._kept_for_shares(room)
                if self._pool.lacks(wanted):
                    self._pool.want(wanted)
                    self._state.holdings.has_changed = True
                return False
        return True

    def _kept_for_shares(self, nbytes: int) -> int:
        """Return what must stay free for those who have not taken their shares.

        Nothing, where what is read fits into the reserve, which is nobody's share.
        """
        limits, shares = self._state.limits, self._state.holdings.shares
        if not limits.share_bytes or self.held_bytes + nbytes <= self._reserve:
            return 0
        return limits.max_sessions * limits.share_bytes - shares.within_bytes

    def _drop_idle(self) -> bool:
        """Give the block of the oldest clean entry back that nobody waits for."""
        if not self.held_bytes:
            return False
        for order in sorted(self._living(), key=lambda one: -one.clean_count):
            found = order.next_clean()
            if found is not None:
                self._drop(order, *found)
                return True
        return False

    def _drop_waiting(self) -> bool:
        """Give a block back that is waited for, by a restore that cannot begin yet."""
        if not self.held_bytes:
            return False
        for order in self._living():
            found = order.last_waiting()
            if found is not None:
                self._drop(order, *found)
                return True
        return False

    def _drop(self, order: SpillOrder, number: int, entry: Entry) -> None:
        assert entry.block is not None
        assert entry.disk is not None
        self._state.holdings.records.freed(entry)  # before its room is used again
        entry.space.release(entry.block)
        entry.block = None
        entry.disk.enter(DiskPhase.AWAY)
        order.note(number, entry)

    # answers

    def _done(self, record: Session, number: int, entry: Entry, place: OnDisk, now: float) -> None:
        if place.phase is DiskPhase.WRITING:
            self._writing.end(place, now, place.nbytes)
            self._charge(record, entry, 0)
        else:
            self._reading.end(place, now, place.nbytes)
            entry.block, place.into = place.into, None
            self._state.holdings.records.stored(record, number, entry)
        place.enter(DiskPhase.CLEAN)
        if self._disk.ended:
            self._stay(record, entry, place)

    def _failed(
        self, record: Session, number: int, entry: Entry, place: OnDisk, now: float
    ) -> list[Instruction]:
        if place.phase is DiskPhase.WRITING:
            self._writing.end(place, now, 0)
            self._stay(record, entry, place)
            return []
        self._reading.end(place, now, 0)
        assert place.into is not None
        entry.space.release(place.into)
        place.into = None
        self._lose(place)
        return self._fail_waiting(record, number, entry)  # asked for since the tier has ended

    def _fail_waiting(self, record: Session, number: int, entry: Entry) -> list[Instruction]:
        """Answer the restores that wait for what will not come from the disk."""
        if not entry.waits:
            return []
        entry.waits = 0
        return self._restores.fail_of(record, number, self._disk.loss())

    def _settle(self, record: Session, number: int) -> None:
        """Look at an entry that the tier has done with: free, or to be considered again."""
        self._state.holdings.free_unused(record, number)
        if self._state.touched is not None:
            self._state.touched.append((record, number))

    def _charge(self, record: Session, entry: Entry, nbytes: int) -> None:
        """Have a session's entry count for so many bytes of the pool."""
        change, entry.charge = nbytes - entry.charge, nbytes
        self._state.holdings.charge(record, change)

    def _stay(self, record: Session, entry: Entry, place: OnDisk) -> None:
        """Have an entry lie in the pool alone."""
        self._charge(record, entry, place.room)
        place.leave()
        entry.disk = None

    def _lose(self, place: OnDisk) -> None:
        place.enter(DiskPhase.LOST)
        self._lost += 1

    def _end_of(self, record: Session) -> list[Instruction]:
        """Do what the end of the tier means for a session."""
        instructions: list[Instruction] = []
        for number, entry in list(record.entries.items()):
            place = entry.disk
            if place is None or place.phase is DiskPhase.WRITING:
                continue
            if place.phase is DiskPhase.CLEAN:
                self._stay(record, entry, place)
                continue
            if place.phase is DiskPhase.AWAY:
                self._lose(place)
            instructions += self._fail_waiting(record, number, entry)
            self._state.holdings.free_unused(record, number)
        return instructions + self._start_waiting(record)

    def _start_waiting(self, record: Session) -> list[Instruction]:
        if record.phase is Phase.ENDING:
            return []
        return self._restores.start_waiting(record)


def _moving(record: Session, number: int) -> tuple[Entry, OnDisk]:
    """Return an entry that the tier has done with, and its place there."""
    entry = record.entries[number]
    assert entry.disk is not None
    assert entry.disk.is_moving
    return entry, entry.disk


def _assert_place(entry: Entry, place: OnDisk, *, has_ended: bool) -> None:
    phase = place.phase
    assert (entry.block is None) == (phase not in {DiskPhase.WRITING, DiskPhase.CLEAN})
    assert (place.into is None) == (phase is not DiskPhase.READING)
    assert not has_ended or phase not in {DiskPhase.CLEAN, DiskPhase.AWAY}
    assert has_ended or phase is not DiskPhase.LOST
    assert phase is not DiskPhase.LOST or not entry.waits
    assert entry.block is None or entry.block.nbytes == place.nbytes
    assert place.extent.nbytes == disk_bytes(place.nbytes)
    assert entry.loan is None
