"""A ledger over a lane that does nothing by itself, as its tests drive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from support.fake_lane import FakeLane
from support.fake_tier import FakeTier

from stormd.ledger.events import Instruction, Wait
from stormd.ledger.ledger import Ledger
from stormd.ledger.on_disk import Disk
from stormd.ledger.records import JournalRecords
from stormd.ledger.sessions import Limits, SessionInfo
from stormd.ledger.spills import Spills
from stormd.memory.arena import Space
from stormd.memory.extents import PAGE
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    NO_LANE,
    PROTOCOL_VERSION,
    Hello,
    MapSegment,
    Message,
    Release,
    Restore,
    RestoreParts,
    Store,
    UnmapSegment,
    pack,
)

Told = TypeVar("Told", bound=Message)
KIB = 1024
CAPACITY = 64 * KIB
STAGING = 16 * KIB
SHARE = 16 * KIB
LIMITS = Limits(max_sessions=3, max_entries=6, quota_bytes=40 * KIB, lease_seconds=5.0)


class LedgerBench:
    """A ledger with a fake lane, and counters beside it.

    A store that has to wait for memory is asked for again after a call of `on_wait`. With
    `disk_bytes` there is a tier on disk, of which `reserve` bytes of the pool are kept for reading.
    With `records` sessions can be resumed.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        capacity: int = CAPACITY,
        committed: int | None = None,
        *,
        disk_bytes: int = 0,
        reserve: int = 0,
        records: JournalRecords | None = None,
    ) -> None:
        self.records = records
        self.space = Space(capacity, committed=committed)
        self.counters = Counters()
        disk = Disk(Space(disk_bytes, granule=PAGE), reserve) if disk_bytes else None
        self.ledger = Ledger(self.space, limits, self.counters, records=records, disk=disk)
        self.lane = FakeLane(self.ledger)
        self.tier = FakeTier(self.ledger, self.lane)
        self.on_wait: Callable[[], None] | None = None

    def open(self, session: int = 1, *, attach: bool = True, device: str = "cpu") -> int:
        info = SessionInfo(
            session=session, device=device, uid=session % 2, pid=100 + session, name="test"
        )
        staging = 0 if device == NO_LANE else STAGING
        hello = None if self.records is None else _hello(device)
        self.ledger.leases.open(
            info,
            chunk_bytes=8 * KIB,
            staging_bytes=staging,
            now=0.0,
            hello=hello,
            secret=b"secret",
        )
        if attach:
            self.ledger.leases.attach(self.ledger.sessions[session], 0.0)
        return session

    def ask(self, session: int, request: int, message: Message) -> list[Instruction]:
        """Return what the ledger says to a message."""
        record = self.ledger.sessions[session]
        return self.ledger.on_request[type(message)](record, request, message, 0.0)

    def store(self, entry: int, nbytes: int = KIB, *, session: int = 1, **fields: int) -> None:
        message = a_store(entry, nbytes, **fields)
        while isinstance((answer := self.ask(session, 7, message))[0], Wait):
            assert self.on_wait is not None, "a wait for memory that is there"
            self.on_wait()
        self.lane.take(answer)

    def restore(
        self,
        entry: int,
        nbytes: int = KIB,
        *,
        ticket: int = 1,
        session: int = 1,
        segment: int = 0,
    ) -> None:
        message = Restore(
            ticket=ticket, entry=entry, segment=segment, offset=0, nbytes=nbytes, sequence=0
        )
        self.lane.take(self.ask(session, 8, message))

    def restore_together(
        self, *asked: tuple[int, int, int], session: int = 1, segment: int = 0
    ) -> None:
        """Ask for several by ticket, entry and bytes."""
        places = [n for t, entry, nbytes in asked for n in (t, entry, segment, 0, nbytes, 0)]
        message = RestoreParts(pack(places))
        self.lane.take(self.ask(session, 9, message))

    def map(self, segment: int, nbytes: int, *, session: int = 1) -> None:
        self.take(MapSegment(segment=segment, handle=b"handle", nbytes=nbytes), session=session)

    def take(self, message: Message, *, session: int = 1) -> None:
        """Have the lane begin what is to be done for a message."""
        self.lane.take(self.ask(session, 3, message))

    def take_and_finish(self, message: Message) -> None:
        """Have the lane do at once what is to be done for a message of the first session."""
        self.take(message)
        while self.lane.jobs:
            self.lane.finish()

    def unmap(self, segment: int, *, session: int = 1) -> None:
        self.lane.take(self.ask(session, 0, UnmapSegment(segment)))

    def release(self, *entries: int, session: int = 1) -> None:
        self.lane.take(self.ask(session, 0, Release(list(entries))))

    def told(self, kind: type[Told]) -> Told:
        """Return the last message to a client, which is of that kind."""
        message = self.lane.last()
        assert isinstance(message, kind), message
        return message

    @property
    def spills(self) -> Spills:
        assert self.ledger.spills is not None, "there is no disk"
        return self.ledger.spills

    def end(self, session: int = 1) -> None:
        self.lane.take(self.ledger.leases.end(session, "died"))

    @property
    def used(self) -> int:
        return self.space.use().used

    @property
    def promised(self) -> int:
        return self.space.use().promised


def a_store(entry: int, nbytes: int = KIB, **fields: int) -> Store:
    """Return a store of plain bytes."""
    places = {"segment": 0, "offset": 0, "sequence": 0, **fields}
    return Store(entry=entry, nbytes=nbytes, dtype="uint8", codec="raw", **places)


def _hello(device: str) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        features=[],
        pid=1,
        uid=0,
        device=device,
        device_uuid="",
        staging_bytes=STAGING,
        name="test",
    )
