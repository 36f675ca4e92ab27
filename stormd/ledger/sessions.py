"""The ledger's data: a session, its entries and its restores in flight.

These classes hold state only; the other modules of the ledger, each for one kind of event, change
it. The possible transitions are:

    a session   OPENED -> ATTACHED -> ENDING -> gone        (leases.py)
                OPENED -> ENDING
    an entry    encoding -> stored -> freed                 (stores.py; restores.py reads it)
                stored: in the pool, on disk, or both       (on_disk.py, spills.py)
                released while a lane uses it: freed when the lane is done
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from stormd.cache.items import Caller, Loan
from stormd.ledger.address_ranges import AddressRange
from stormd.ledger.events import Mappable, Reply
from stormd.ledger.on_disk import DiskPhase, OnDisk
from stormd.memory.arena import Block, Space
from stormd.protocol import NO_LANE, CachePut, Hello, Message, PlanLearned
from stormd.protocol.limits import FIRST_LEASED

__all__ = [
    "CacheAccess",
    "Destination",
    "Entry",
    "Limits",
    "Offer",
    "OpenPut",
    "Phase",
    "Session",
    "SessionInfo",
    "Ticket",
    "session_name",
]


def session_name(session: int) -> str:
    """Return a session's id as logs and tables show it."""
    return f"{session:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one session may hold and how long it may be silent; 0 bytes sets no quota.

    `user_sessions` is the maximum of sessions with a lane, and of sessions without one, that one
    user may have; 0 means max_sessions. `user_quota_bytes` limits all sessions of one user
    together. `share_bytes` of the pool are kept for each of `max_sessions` sessions, whether it
    exists or not.
    """

    max_sessions: int
    max_entries: int
    quota_bytes: int
    lease_seconds: float
    user_sessions: int = 0
    user_quota_bytes: int = 0
    share_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """Identifies a session to the operator. `pid` and `uid` are those that the kernel knows.

    `device` is NO_LANE for a session without a lane.
    """

    session: int
    device: str
    uid: int
    pid: int
    name: str

    @property
    def has_lane(self) -> bool:
        """Whether the session can store, and so takes one of the places and shares."""
        return self.device != NO_LANE


class Phase(Enum):
    """A session's phase. Only ATTACHED sessions may store and restore."""

    ORPHANED = auto()
    """It was an earlier daemon's, and its client has not come yet."""
    OPENED = auto()
    ATTACHED = auto()
    ENDING = auto()


_NEXT: Final = {
    Phase.ORPHANED: (Phase.OPENED, Phase.ENDING),
    Phase.OPENED: (Phase.ATTACHED, Phase.ENDING),
    Phase.ATTACHED: (Phase.ENDING,),
    Phase.ENDING: (),
}
"""The phases that may follow each phase."""


class Destination(NamedTuple):
    """Where to restore an entry, and from which value of `published` on it may be written."""

    segment: int
    offset: int
    nbytes: int
    sequence: int


@dataclass(slots=True)
class Ticket:
    """One restore of an entry, requested at `since`. If it was requested `together` with others,
    one message may answer them.
    """

    entry: int
    request: int
    since: float
    together: bool


@dataclass(slots=True, kw_only=True)
class Entry:
    """One stored range of `space`. `block` is None while the entry is being encoded, and while it
    is on disk alone. `charge` is the bytes that count for its session, at most `promised`. An entry
    with a `loan` belongs to the cache: its session may read it and is not charged for it. A session
    is not charged for entries on disk either.

    `mode` is the codec's mode, once there is a block. `cell` is the place of the entry's record, 0
    if it has none. `is_begun` is False for an entry that an earlier daemon admitted but did not
    store, until the client repeats its store.

    `since` is when its store was requested. `restores` counts the lane's jobs that read the block,
    `waits` the tickets that wait for it. `released` entries are invisible to the client and are
    freed once nothing uses them.
    """

    raw_bytes: int
    codec: str
    since: float
    promised: int
    charge: int
    space: Space
    block: Block | None = None
    restores: int = 0
    waits: int = 0
    released: bool = False
    loan: Loan | None = None
    disk: OnDisk | None = None
    mode: str = ""
    cell: int = 0
    is_begun: bool = True

    @property
    def disk_phase(self) -> DiskPhase | None:
        """Its phase in the tier on disk; None if it is in the pool alone."""
        return None if self.disk is None else self.disk.phase

    @property
    def in_use(self) -> bool:
        """Whether a lane or the tier on disk reads or writes for this entry, or will do so."""
        is_encoded = self.block is None and self.is_begun
        is_moving = is_encoded if self.disk is None else self.disk.is_moving
        return is_moving or self.restores > 0 or self.waits > 0


@dataclass(slots=True)
class OpenPut:
    """An unfinished put of a tensor into the cache; `unspent` bytes have no entry yet.

    `since` is when its last chunk was admitted, or when the put was opened.
    """

    message: CachePut
    unspent: int
    since: float


@dataclass(slots=True)
class CacheAccess:
    """Makes a session one for the cache: has its user, its open put, and its next loan's number.

    `put_closed` is the name of the last put that was closed because no chunks came.
    """

    caller: Caller
    put: OpenPut | None = None
    put_closed: str = ""
    next_loan: int = FIRST_LEASED


class Offer(NamedTuple):
    """A mapping in progress in the lane; `into` is a piece's range at the time of the request."""

    request: int
    message: Mappable
    into: AddressRange | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """One client. `used_bytes` is the charge of all its entries, `seen` a time of the caller's.

    `segments` maps each segment that jobs may name to its size. For each that is an address range,
    `ranges` has its mapped pieces; `pieces` maps each piece to its range and offset. `mapping` has
    the mappings in progress. `waiting` maps tickets that have not been started, in the order of
    their requests, to their destinations. A ticket waits while its entry, or that of an earlier
    ticket, is not in the pool. While the session ends, `cause` is why, one of counters.ENDINGS, and
    `to_free` has the entries not yet released. `detached` is set once its lane has detached it.
    `plan` is its trainer's latest description of a step. `is_restoring` is set if it has
    requested a restore since its last store, as in a backward pass.

    A session that can be resumed has the `hello` that opened it and its client's `secret`, and is
    recorded at `cell`. An earlier daemon's session has no client until that client comes. `listed`
    has its entries while ListEntries pages through them.
    """

    info: SessionInfo
    chunk_bytes: int
    seen: float
    segments: dict[int, int]
    phase: Phase = Phase.OPENED
    ranges: dict[int, AddressRange] = field(default_factory=dict)
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    mapping: dict[int, Offer] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    waiting: OrderedDict[int, Destination] = field(default_factory=OrderedDict)
    last_entry: int = 0
    used_bytes: int = 0
    cache: CacheAccess | None = None
    to_free: list[int] = field(default_factory=list)
    detached: bool = False
    cause: str = ""
    plan: PlanLearned | None = None
    is_restoring: bool = False
    hello: Hello | None = None
    secret: bytes = b""
    cell: int = 0
    has_client: bool = True
    listed: list[int] = field(default_factory=list)

    def enter(self, phase: Phase) -> None:
        """Enter another phase."""
        assert phase in _NEXT[self.phase], f"a session that is {self.phase} cannot be {phase}"
        self.phase = phase

    def reply(self, request: int, message: Message) -> Reply:
        """Return the instruction to send its client a message, which answers a request."""
        return Reply(session=self.info.session, request=request, message=message)

    # --- what may be wrong with any request; empty if nothing is ------------------------------

    def phase_problem(self) -> str:
        """Return why the session may request nothing."""
        if self.phase is Phase.ATTACHED:
            return ""
        return "the session has no lifeline yet: connect to Welcome.lifeline first"

    def lane_problem(self) -> str:
        """Return why the session may store nothing."""
        if self.info.has_lane:
            return ""
        return "this session is for control alone: open one for a device to store what is there"

    def range_problem(self, segment: int, offset: int, nbytes: int) -> str:
        """Return why no job may name these bytes of a segment."""
        size, end = self.segments.get(segment), offset + nbytes
        if size is None:
            return f"segment {segment} is not mapped"
        pieces = self.ranges.get(segment)
        if pieces is not None and not pieces.covers(offset, end):
            return f"not all of bytes {offset} to {end} of range {segment} is mapped"
        if end <= size:
            return ""
        return f"bytes {offset} to {end} lie outside segment {segment} of {size} bytes"

    # --- what the operator sees --------------------------------------------------------------

    def as_status(self) -> dict[str, Any]:
        """Return the session as `stormd status` shows it."""
        return {
            "id": self.info.session,
            "session": session_name(self.info.session),
            "pid": self.info.pid,
            "uid": self.info.uid,
            "device": self.info.device,
            "name": self.info.name,
            "entries": len(self.entries),
            "used_bytes": self.used_bytes,
            "resumable": self.cell != 0,
            "orphaned": self.phase is Phase.ORPHANED,
            "plan": None if self.plan is None else self.plan.as_dict(),
        }
