"""What the ledger keeps: a session, its entries and the restores under way.

These hold state only; every change to them is made by the other modules of the ledger, each of
which has one kind of event. What may follow what stands here, once:

    a session   OPENED -> ATTACHED -> ENDING -> gone        (leases.py)
                OPENED -> ENDING
    an entry    encoding -> stored -> freed                 (stores.py; restores.py reads it)
                stored: in the pool, on disk, or both       (on_disk.py, spills.py)
                given up while a lane uses it: freed when the lane is done
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from stormd.cache.items import Caller, Loan
from stormd.ledger.address_ranges import AddressRange
from stormd.ledger.events import Mappable
from stormd.ledger.on_disk import OnDisk
from stormd.memory.arena import Block, Space
from stormd.protocol import (
    NO_LANE,
    CachePut,
    Hello,
    PlanLearned,
)
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
    """What one session may hold and for how long it may be silent; 0 bytes sets no quota.

    `user_sessions` is how many sessions with a lane, and as many without one, a user may have; 0
    for all. `user_quota_bytes` is what all sessions of one user may hold together, `share_bytes`
    what of the pool is kept for each of `max_sessions` sessions, whether there is one or not.
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
    """Who a session is, for the operator. `pid` and `uid` as the kernel knows them.

    `device` is NO_LANE where it is for control alone.
    """

    session: int
    device: str
    uid: int
    pid: int
    name: str

    @property
    def has_lane(self) -> bool:
        """Whether it can store, and so takes one of the places and shares there are."""
        return self.device != NO_LANE


class Phase(Enum):
    """A session's life. Only ATTACHED ones may store and restore."""

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
"""What may follow each."""


class Destination(NamedTuple):
    """Where the bytes of an entry are to go, from which value of `published` on."""

    segment: int
    offset: int
    nbytes: int
    sequence: int


@dataclass(slots=True)
class Ticket:
    """One restore of an entry, asked for at `since`; one that was asked for `together` with others
    may be answered so.
    """

    entry: int
    request: int
    since: float
    together: bool


@dataclass(slots=True, kw_only=True)
class Entry:
    """One stored range of `space`. `block` is None while it is encoded, and while it is on disk
    alone; `charge` is what it counts for, `promised` its most. An entry with a `loan` is the
    cache's: its session may read it and is not charged for it. Nor is it for what is on disk.

    `mode` is the codec's, once there is a block, and `cell` where the entry is written down, 0
    where it is not. One that an earlier daemon has admitted, and nobody has asked for since, is
    not `is_begun`.

    `since` is when it was asked for. `restores` counts the lane's jobs that read the block, `waits`
    the tickets that wait for it. `released` entries are invisible to the client and freed once
    nothing uses them.
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
    def in_use(self) -> bool:
        """Whether a lane or the tier on disk reads or writes for this entry, or is about to."""
        is_encoded = self.block is None and self.is_begun
        is_moving = is_encoded if self.disk is None else self.disk.is_moving
        return is_moving or self.restores > 0 or self.waits > 0


@dataclass(slots=True)
class OpenPut:
    """A tensor on its way into the cache, of which `unspent` bytes are not yet an entry's.

    `since` is when its last part was admitted, or it was opened.
    """

    message: CachePut
    unspent: int
    since: float


@dataclass(slots=True)
class CacheAccess:
    """What makes a session one for the cache: for whom, what it puts, the next loan's number.

    `put_closed` is the name of the last put that was closed for want of parts.
    """

    caller: Caller
    put: OpenPut | None = None
    put_closed: str = ""
    next_loan: int = FIRST_LEASED


class Offer(NamedTuple):
    """What a lane is mapping for a request; a piece `into` the range that its number meant then."""

    request: int
    message: Mappable
    into: AddressRange | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """One client. `used_bytes` is what its entries are charged, `seen` a time of the caller's.

    `segments` maps what jobs may name to its size; those that are ranges of addresses say in
    `ranges` what of them is mapped, each piece of which `pieces` maps to its range and offset.
    `mapping` is what is being mapped. `waiting` are the tickets that have not been started, in the
    order of asking, and where each wants its bytes: they are held back while their entry, or that
    of an earlier one, is encoded. While the session ends, `cause` is why, one of
    counters.ENDINGS, and `to_free` are the entries not yet given up; `detached` once its lane has
    let go of it. `plan` is what its trainer said of its steps last; `is_restoring` where it asked
    for a restore after its last store, as in a backward pass.

    A session that can be resumed has the `hello` that opened it, the `secret` of its client, and is
    written down at `cell`. One of an earlier daemon's has no client until that comes. `listed` are
    its entries while they are being told of.
    """

    info: SessionInfo
    part_bytes: int
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
        """Go on to another phase of its life."""
        assert phase in _NEXT[self.phase], f"a session that is {self.phase} cannot be {phase}"
        self.phase = phase

    # --- what any request may find wrong; empty where nothing is -----------------------------

    def phase_problem(self) -> str:
        """Return why nothing may be asked of the session."""
        if self.phase is Phase.ATTACHED:
            return ""
        return "the session has no lifeline yet: connect to Welcome.lifeline first"

    def lane_problem(self) -> str:
        """Return why nothing may be stored by it."""
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
            "plan": None if self.plan is None else _plan_status(self.plan),
        }


def _plan_status(plan: PlanLearned) -> dict[str, Any]:
    return {
        "kept_bytes": plan.kept_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "replayed_bytes": plan.replayed_bytes,
        "budget": plan.budget,
    }
