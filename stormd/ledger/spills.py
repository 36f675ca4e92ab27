"""What is written to the disk and read back: the ledger's side of the tier.

The tier writes the oldest entry of the session that holds most, since a backward pass needs it
last. It does not write entries that are being encoded, restored, waited for or lent. A block is
freed once its blob is complete on the disk and space is needed. An extent is kept until its entry
is freed, so an entry that was read back can leave the pool again without another write.

Part of the pool, the reserve, is never promised to stores. So an entry that a restore needs can
always be read, even if nothing else in the pool can be freed. No two requests wait for each other's
space. When the tier ends, entries on the disk alone are lost, and nothing else.

Where shares are kept, a session's clean blocks count for its share like those it is charged for. A
restore may use them at any time, and a store of another session must not wait for it.
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
"""Maximum expected wait of a store for the disk. A client keeps the tensor after two seconds."""

MIN_MOVED: Final = 64 << 20
"""Minimum bytes moved before the disk's speed is reported: small writes are slower than large."""


class Spills:
    """Moves entries between the pool and `disk`.

    `moves` returns the jobs to begin now; call it after every event.
    """

    def __init__(self, state: State, restores: Restores, disk: Disk) -> None:
        self._state = state
        self._restores = restores
        self._disk = disk
        self._reserve = granules(disk.reserve)
        self._orders = SpillOrders(state, disk)
        self._writes = Writes(state, disk, self._orders, self.store_capacity)
        self._reads = Reads(state, disk, self._orders, self._reserve)
        self._lost = 0

    # --- space for stores -------------------------------------------------------------------

    @property
    def store_capacity(self) -> int:
        """Bytes of the pool for entries that are not clean; all of it once the tier has ended."""
        return self._state.space.capacity - (0 if self._disk.ended else self._reserve)

    @property
    def is_waited_for(self) -> bool:
        """Whether a store waits for the disk."""
        return self._writes.largest_waiting > 0

    def promise(self, record: Session, nbytes: int) -> bool:
        """Have the pool promise space for a store; free clean blocks for it if needed."""
        orders = self._orders
        if orders.keeps_shares(record, nbytes) and self._promise(nbytes):
            return True
        if self._disk.ended or self._writes.dirty_bytes + nbytes > self.store_capacity:
            return False
        orders.refresh()
        while not orders.keeps_shares(record, nbytes):
            if not orders.drop_beyond(record):
                return False
        while not self._promise(nbytes):
            if not orders.drop_idle():
                return False
        return True

    def keeps_shares(self, record: Session, nbytes: int) -> bool:
        """Return whether all shares are kept if a session holds `nbytes` more of the pool."""
        return self._orders.keeps_shares(record, nbytes)

    def free_bytes_for(self, nbytes: int) -> int:
        """Return the free bytes that the pool needs before it can promise `nbytes` to a store."""
        return nbytes + self._unused_reserve()

    def should_wait(self, nbytes: int, now: float) -> bool:
        """Return whether the disk will free space for a store in time; if so, note the request.

        If True, a write is in flight, and the store must be tried again when that write ends.
        """
        if self._disk.ended or nbytes > self.store_capacity or not self._writes.is_writing(now):
            return False
        missing = self._writes.dirty_bytes + nbytes - self.store_capacity
        rate = self._writes.direction.speed.bytes_per_second(now)
        if rate is not None and missing > rate * ADMIT_SECONDS:
            return False
        self._writes.largest_waiting = max(self._writes.largest_waiting, nbytes)
        return True

    def shortage(self, now: float) -> str:
        """Return, for people, why the disk frees no space for a store in time, and what to do."""
        if self._disk.ended:
            return f"the tier on disk has ended ({self._disk.ended}): restart the daemon"
        if not self._writes.direction.count:
            taken = format_size(self._disk.space.taken)
            return f"{taken} of the tier on disk are taken, too: raise spill_bytes or pool_bytes"
        rate = format_size(int(self._writes.direction.speed.bytes_per_second(now) or 0))
        return f"the tier on disk takes {rate} a second, which is too slow: raise pool_bytes"

    # --- results of the tier ----------------------------------------------------------------

    def moved(
        self, record: Session, results: Iterable[SpillDone | SpillFailed], now: float
    ) -> list[Instruction]:
        """Take in results of writes and reads; a failure ends the tier."""
        self._writes.largest_waiting = 0  # waiting stores ask again
        instructions: list[Instruction] = []
        for result in results:
            entry, place = _moving(record, result.entry)
            if isinstance(result, SpillDone):
                self._done(record, result.entry, entry, place, now)
            else:
                instructions += self.end(result.detail)
                instructions += self._failed(record, result.entry, entry, place, now)
            self._state.unused(record, result.entry)
        return instructions + self._start_waiting(record)

    def end(self, reason: str) -> list[Instruction]:
        """End the tier: entries on the disk alone are lost, others are kept. May be called twice.

        An entry that a thread of the tier still uses is unchanged until that thread answers.
        """
        if self._disk.ended:
            return []
        self._disk.ended = reason
        self._writes.largest_waiting = 0
        self._orders.end()
        return [
            instruction
            for record in self._state.sessions.values()
            for instruction in self._end_of(record)
        ]

    # --- jobs to begin ----------------------------------------------------------------------

    def moves(self, now: float) -> list[SpillJob]:
        """Return the reads and writes to begin now."""
        if self._disk.ended:
            return self._writes.take_begun()
        self._orders.refresh()
        if not self._disk.written:
            return self._writes.begin(now, stuck=None)
        jobs = self._reads.begin(now, prefetch=not self._writes.largest_waiting)
        return jobs + self._writes.begin(now, stuck=self._reads.stuck)

    # --- what the operator sees -------------------------------------------------------------

    def as_status(self, now: float) -> dict[str, Any]:
        """Return the tier as `stormd status` shows it."""
        disk = self._disk
        return {
            "capacity_bytes": disk.space.capacity,
            "used_bytes": disk.space.taken,
            "away_bytes": disk.by_phase[DiskPhase.AWAY] + disk.by_phase[DiskPhase.READING],
            "oldest_seconds": max(0.0, now - next(iter(disk.written.values()), now)),
            "write": self._writes.direction.as_status(now),
            "read": self._reads.direction.as_status(now),
            "lost_entries": self._lost,
            "ended": disk.ended,
        }

    @property
    def bytes_per_second(self) -> int:
        """Bytes that enter or leave the pool in a second, if the disk is always busy.

        Computed since the start: all bytes stored, or restored, for each second of the disk's busy
        time. The lower of both directions; 0 if the disk has moved little, or the tier has ended.
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
            if speed.total_bytes >= MIN_MOVED
        )
        return int(min(speeds, default=0))

    def spilled_bytes(self, session: int) -> int:
        """Return the bytes that a session has on the disk."""
        return self._disk.by_session[session]

    def assert_invariants(self) -> None:
        """Raise AssertionError if the tier contradicts the sessions: for tests."""
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
            assert (way.count, way.nbytes) == (len(moving), sum(one.pool_bytes for one in moving))
        if not disk.ended:
            assert self._writes.dirty_bytes <= self.store_capacity
        limits = self._state.limits
        if limits.share_bytes:
            kept = limits.max_sessions * limits.share_bytes
            assert self._orders.common_bytes() + kept <= self._state.space.capacity
        assert not self._writes.largest_waiting or not disk.ended

    # --- helpers ----------------------------------------------------------------------------

    def _promise(self, nbytes: int) -> bool:
        return self._state.space.promise(nbytes, keep=self._unused_reserve())

    def _unused_reserve(self) -> int:
        """Return the bytes that a store must leave free: the reserve, less what reading holds."""
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
            self._keep_in_pool(record, entry, place)

    def _failed(
        self, record: Session, number: int, entry: Entry, place: OnDisk, now: float
    ) -> list[Instruction]:
        if place.phase is DiskPhase.WRITING:
            self._writes.direction.end(place, now, 0)
            self._keep_in_pool(record, entry, place)
            return []
        self._reads.direction.end(place, now, 0)
        assert place.into is not None
        entry.space.release(place.into)
        place.into = None
        self._mark_lost(place)
        return self._fail_waiting(record, number, entry)  # requested since the tier ended

    def _fail_waiting(self, record: Session, number: int, entry: Entry) -> list[Instruction]:
        """Fail the restores that wait for an entry that cannot be read from the disk."""
        if not entry.waits:
            return []
        entry.waits = 0
        return self._restores.fail_of(record, number, self._disk.loss())

    def _charge(self, record: Session, entry: Entry, nbytes: int) -> None:
        """Set the bytes of the pool that a session is charged for an entry."""
        change, entry.charge = nbytes - entry.charge, nbytes
        self._state.holdings.charge(record, change)

    def _keep_in_pool(self, record: Session, entry: Entry, place: OnDisk) -> None:
        """Free an entry's place on disk, so that it is in the pool alone."""
        self._charge(record, entry, place.pool_bytes)
        place.free()
        entry.disk = None

    def _mark_lost(self, place: OnDisk) -> None:
        place.enter(DiskPhase.LOST)
        self._lost += 1

    def _end_of(self, record: Session) -> list[Instruction]:
        instructions: list[Instruction] = []
        for number, entry in list(record.entries.items()):
            place = entry.disk
            if place is None or place.phase is DiskPhase.WRITING:
                continue
            if place.phase is DiskPhase.CLEAN:
                self._keep_in_pool(record, entry, place)
                continue
            if place.phase is DiskPhase.AWAY:
                self._mark_lost(place)
            instructions += self._fail_waiting(record, number, entry)
            self._state.holdings.free_unused(record, number)
        return instructions + self._start_waiting(record)

    def _start_waiting(self, record: Session) -> list[Instruction]:
        if record.phase is Phase.ENDING:
            return []
        return self._restores.start_waiting(record)


def _moving(record: Session, number: int) -> tuple[Entry, OnDisk]:
    """Return an entry that the tier has finished with, and its place on disk."""
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
