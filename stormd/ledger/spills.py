"""What goes to the disk and comes back: the ledger's side of the tier.

Written is the oldest of whoever holds most: a backward pass wants it last. Not what is being
encoded, restored, waited for or lent. A block is given back once its blob is whole on the disk and
room is wanted. An extent is kept until its entry is freed: what was read back is given up again
without being written again.

Part of the pool, the reserve, is never promised to stores. So what is asked for can be read even
where everything else in the pool is to stay, and nobody waits for room that is kept by those who
wait for him. When the tier ends, what is on the disk alone is lost, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from stormd.ledger.events import Instruction, SpillDone, SpillFailed, SpillJob
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase, OnDisk
from stormd.ledger.restores import Restores
from stormd.ledger.sessions import Entry, Phase, Session
from stormd.ledger.spill_moves import Reads, Writes
from stormd.ledger.spill_order import SpillOrders
from stormd.memory.arena import granules
from stormd.memory.extents import disk_bytes
from stormd.sizes import format_size

__all__ = ["ADMIT_SECONDS", "Spills"]

ADMIT_SECONDS: Final = 1.0
"""For which a store may wait for the disk. A client keeps a tensor itself after two."""

LEAST_MOVED: Final = 64 << 20
"""Bytes from which on it is told how fast the disk is: small writes do not reach that of large."""


class Spills:
    """Moves entries between the pool and `disk`. `reserve` bytes of the pool are for reading.

    `moves` says what is to be begun now, and is to be asked after every event.
    """

    def __init__(self, state: State, restores: Restores, disk: Disk, reserve: int) -> None:
        self._state = state
        self._restores = restores
        self._disk = disk
        self._reserve = granules(reserve)
        self._orders = SpillOrders(state, disk)
        self._writes = Writes(state, disk, self._orders, self.store_capacity)
        self._reads = Reads(state, disk, self._orders, self._reserve)
        self._lost = 0

    # --- room for stores --------------------------------------------------------------------

    @property
    def store_capacity(self) -> int:
        """Bytes of the pool for what cannot be given back at once; all, once the tier has ended."""
        return self._state.space.capacity - (0 if self._disk.ended else self._reserve)

    @property
    def is_waited_for(self) -> bool:
        """Whether a store waits for what the disk does."""
        return self._writes.wanted > 0

    def promise(self, nbytes: int) -> bool:
        """Have the pool promise room for a store, giving clean blocks back for it."""
        space = self._state.space
        if space.promise(nbytes, keep=self._kept()):
            return True
        if self._disk.ended or self._writes.dirty_bytes + nbytes > self.store_capacity:
            return False
        self._orders.look()
        while self._orders.drop_idle():
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
        if self._disk.ended or nbytes > self.store_capacity or not self._writes.is_writing(now):
            return False
        missing = self._writes.dirty_bytes + nbytes - self.store_capacity
        rate = self._writes.direction.speed.a_second(now)
        if rate is not None and missing > rate * ADMIT_SECONDS:
            return False
        self._writes.wanted = max(self._writes.wanted, nbytes)
        return True

    def shortage(self, now: float) -> str:
        """Return, for people, why the disk makes no room for a store in time, and what to do."""
        if self._disk.ended:
            return f"the tier on disk has ended ({self._disk.ended}): restart the daemon"
        if not self._writes.direction.count:
            taken = format_size(self._disk.space.taken)
            return f"{taken} of the tier on disk are taken, too: raise spill_bytes or pool_bytes"
        rate = format_size(int(self._writes.direction.speed.a_second(now) or 0))
        return f"the tier on disk takes {rate} a second, which is too slow: raise pool_bytes"

    # --- what the tier answers --------------------------------------------------------------

    def moved(
        self, record: Session, results: Iterable[SpillDone | SpillFailed], now: float
    ) -> list[Instruction]:
        """Take in what was written or read, or came to nothing: then the tier has ended."""
        self._writes.wanted = 0  # who waits asks again
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
        self._writes.wanted = 0
        self._orders.end()
        return [
            instruction
            for record in self._state.sessions.values()
            for instruction in self._end_of(record)
        ]

    # --- what is to be begun ----------------------------------------------------------------

    def moves(self, now: float) -> list[SpillJob]:
        """Return what is to be read and written now."""
        if self._disk.ended:
            return self._writes.take_begun()
        self._orders.look()
        jobs: list[SpillJob] = []
        if self._disk.written:
            jobs = self._reads.begin(now, ahead=not self._writes.wanted)
        return jobs + self._writes.begin(now)

    # --- what the operator sees -------------------------------------------------------------

    def as_status(self, now: float) -> dict[str, Any]:
        """Return the tier as `stormd status` shows it."""
        disk = self._disk
        return {
            "capacity_bytes": disk.space.capacity,
            "used_bytes": disk.space.taken,
            "away_bytes": disk.rooms[DiskPhase.AWAY] + disk.rooms[DiskPhase.READING],
            "oldest_seconds": max(0.0, now - next(iter(disk.written.values()), now)),
            "write": self._writes.direction.as_status(now),
            "read": self._reads.direction.as_status(now),
            "lost_entries": self._lost,
            "ended": disk.ended,
        }

    @property
    def bytes_per_second(self) -> int:
        """What comes to the pool, or leaves it, in a second for which the disk is always busy.

        By the disk's share of the bytes and its speed, both since the start. The less of both
        directions; 0 where the disk has moved little, or the tier has ended.
        """
        if self._disk.ended:
            return 0
        counters = self._state.counters
        ways = (
            (self._writes.direction.speed, counters.stores),
            (self._reads.direction.speed, counters.restores),
        )
        speeds = (
            sum(flow.blob_bytes for flow in flows.values()) / speed.busy_seconds
            for speed, flows in ways
            if speed.total_bytes >= LEAST_MOVED
        )
        return int(min(speeds, default=0))

    def spilled_bytes(self, session: int) -> int:
        """Return what a session has on the disk."""
        return self._disk.by_session[session]

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
            (DiskPhase.WRITING, self._writes.direction),
            (DiskPhase.READING, self._reads.direction),
        ):
            moving = [place for _, place in places if place.phase is phase]
            assert (way.count, way.nbytes) == (len(moving), sum(one.room for one in moving))
        if not disk.ended:
            assert self._writes.dirty_bytes <= self.store_capacity
        assert not self._writes.wanted or not disk.ended

    # --- parts of the above -----------------------------------------------------------------

    def _kept(self) -> int:
        """Return what a store must leave free: the reserve, less what is there for reading."""
        return 0 if self._disk.ended else max(0, self._reserve - self._disk.held_bytes)

    def _done(self, record: Session, number: int, entry: Entry, place: OnDisk, now: float) -> None:
        if place.phase is DiskPhase.WRITING:
            self._writes.direction.end(place, now, place.nbytes)
            self._charge(record, entry, 0)
        else:
            self._reads.direction.end(place, now, place.nbytes)
            entry.block, place.into = place.into, None
            self._state.holdings.records.stored(record, number, entry)
        place.enter(DiskPhase.CLEAN)
        if self._disk.ended:
            self._stay(record, entry, place)

    def _failed(
        self, record: Session, number: int, entry: Entry, place: OnDisk, now: float
    ) -> list[Instruction]:
        if place.phase is DiskPhase.WRITING:
            self._writes.direction.end(place, now, 0)
            self._stay(record, entry, place)
            return []
        self._reads.direction.end(place, now, 0)
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
