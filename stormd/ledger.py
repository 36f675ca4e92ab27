"""Who holds what: the pure state machine over sessions, entries, leases and quotas.

An event goes in, instructions come out, and nothing else happens: no socket, clock or memory is
touched here. Every admitted entry holds either a promise or a block of the arena until it is freed,
exactly once. Nothing is freed while a lane uses it. A session that has ended holds nothing.

Entries:   Store -> encoding -> stored -> (restores read it) -> freed
           Release or the session's end while a lane uses the entry frees it when the lane is done.
Sessions:  opened -> attached -> ending -> gone; `Detached` of the lane is what ends the last step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from stormd.accounting import (
    Holdings,
    assert_session,
    assert_space,
    restore_problem,
    segment_problem,
    share_problem,
    store_problem,
)
from stormd.arena import Space, granules
from stormd.cache.items import Cache, Caller
from stormd.cache.requests import CacheRequests
from stormd.counters import Counters
from stormd.events import (
    Detach,
    Detached,
    Ended,
    Instruction,
    Map,
    Probe,
    Reply,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    Skip,
    StoreDone,
    StoreFailed,
    StoreJob,
    Unmap,
)
from stormd.lanes import blob_bound, parse_dtype
from stormd.protocol import (
    Admitted,
    Failed,
    Mapped,
    MapSegment,
    Message,
    PlanLearned,
    Refused,
    Rejected,
    Release,
    Restore,
    Restored,
    Store,
    Stored,
    UnmapSegment,
)
from stormd.sessions import CacheAccess, Entry, Limits, Phase, Session, SessionInfo, Ticket
from stormd.sizes import format_size

__all__ = ["ATTACH_SECONDS", "Ledger"]

ATTACH_SECONDS: Final = 5.0
"""How long a session may exist without its lifeline."""

FREED_A_TURN: Final = 256
"""Entries of ending sessions that are freed before the loop gets to other work."""


class Ledger:
    """The state of all sessions. `now` in seconds of any clock that does not step back.

    Session ids come from the caller, who has made sure that they exist; everything inside a
    message comes from a client and is checked. `cache` is None where the daemon keeps none.
    """

    def __init__(
        self, space: Space, limits: Limits, counters: Counters, cache: Cache | None = None
    ) -> None:
        self._space = space
        self._cache = None if cache is None else CacheRequests(cache)
        self._limits = limits
        self._counters = counters
        self._sessions: dict[int, Session] = {}
        self._holdings = Holdings()
        self._holdings.shares.limit(limits.share_bytes, ())
        self._draining = False
        self._freeing: deque[Session] = deque()  # those that end and have entries to be freed
        self._events = {
            StoreDone: self._store_done,
            StoreFailed: self._store_failed,
            RestoreDone: self._restore_done,
            RestoreFailed: self._restore_failed,
            SegmentMapped: self._segment_mapped,
            SegmentRefused: self._segment_refused,
            Detached: self._detached,
        }

    # --- sessions ---------------------------------------------------------------------------

    def refusal(self, *, has_lane: bool = True) -> Refused | None:
        """Return why no session, with a lane or for control alone, can be opened now.

        None where one can. Shares are kept for those with a lane; of the others, which hold
        nothing, there may be as many beside them.
        """
        if self._draining:
            return Refused("DaemonLost", "the daemon is shutting down: start it again")
        kind = [one for one in self._sessions.values() if one.info.has_lane is has_lane]
        if len(kind) >= self._limits.max_sessions:
            return Refused(
                "QuotaExceeded",
                f"{len(kind)} sessions are open, the limit is "
                f"{self._limits.max_sessions}: end one, or raise max_sessions",
            )
        return None

    def open(
        self,
        info: SessionInfo,
        *,
        part_bytes: int,
        staging_bytes: int,
        now: float,
        caller: Caller | None = None,
    ) -> None:
        """Add a session; `staging_bytes` is the size of segment 0, 0 where it is to be mapped.

        With a `caller` it is one for the cache, of which there must be one.
        """
        assert self.refusal(has_lane=info.has_lane) is None
        assert info.session not in self._sessions
        assert caller is None or self._cache is not None
        segments = {0: staging_bytes} if staging_bytes else {}
        record = Session(info=info, part_bytes=part_bytes, seen=now, segments=segments)
        record.cache = None if caller is None else CacheAccess(caller)
        self._sessions[info.session] = record
        self._counters.sessions += 1

    def limit(self, limits: Limits) -> None:
        """Hold everything that comes to other limits; what there is stays as it is."""
        self._limits = limits
        pool_users = (one.used_bytes for one in self._sessions.values() if one.cache is None)
        self._holdings.shares.limit(limits.share_bytes, pool_users)

    def attach(self, session: int, now: float) -> None:
        """Note that the session's lifeline is connected: from now on it may store."""
        record = self._sessions[session]
        assert record.phase is Phase.OPENED
        record.phase = Phase.ATTACHED
        record.seen = now

    def touch(self, session: int, now: float) -> None:
        """Renew the session's lease: its client was heard."""
        self._sessions[session].seen = now

    def tick(self, now: float) -> list[Instruction]:
        """End sessions that never attached, and probe those that have been silent for a lease.

        A stopped process (a debugger, a long call that holds its interpreter lock) is silent and
        alive, and its activations must wait for it. So silence alone ends nothing.
        """
        instructions: list[Instruction] = []
        if self._cache is not None:
            self._cache.expire(now)
        for session, record in list(self._sessions.items()):
            silent = now - record.seen
            if record.phase is Phase.OPENED and silent > ATTACH_SECONDS:
                instructions += self.end(session, "unattached")
            elif record.phase is Phase.ATTACHED and silent > self._limits.lease_seconds:
                record.seen = now
                instructions.append(Probe(session))
        return instructions

    def end(self, session: int, cause: str) -> list[Instruction]:
        """Begin a session's end, for a cause of counters.ENDINGS.

        Ending one that is ending changes nothing.
        """
        record = self._sessions[session]
        if record.phase is Phase.ENDING:
            return []
        record.phase = Phase.ENDING
        record.cause = cause
        self._counters.ended[cause] += 1
        if self._cache is not None:
            self._cache.withdraw_put(record)
        record.waiting.clear()
        record.to_free = list(record.entries)
        if record.to_free:  # else it is gone once its lane has let go of it
            self._freeing.append(record)
        return [Detach(session), *self.free_some()]

    @property
    def is_freeing(self) -> bool:
        """Whether `free_some` has something to do."""
        return bool(self._freeing)

    def free_some(self) -> list[Instruction]:
        """Free some entries of sessions that end, a few milliseconds' work; to be called again.

        Others are served in between.
        """
        gone: list[Instruction] = []
        left = FREED_A_TURN
        while self._freeing and left:
            record = self._freeing[0]
            left -= self._free_some_of(record, left)
            if not record.to_free:
                self._freeing.popleft()
                gone += self._gone(record)
        return gone

    def drain(self) -> None:
        """Take no new session and no new entry from now on."""
        self._draining = True

    # --- requests of clients ----------------------------------------------------------------

    def store(self, session: int, request: int, message: Store, now: float) -> list[Instruction]:
        """Admit an entry, or say why not."""
        record = self._sessions[session]
        try:
            dtype = parse_dtype(message.dtype, message.nbytes)
        except ValueError as error:
            return self._rejected(record, request, message, "invalid", str(error))
        problem = store_problem(
            record,
            message,
            self._limits,
            user_bytes=self._holdings.shares.of_user(record.info.uid),
            draining=self._draining,
        )
        if problem is not None:
            return self._rejected(record, request, message, *problem)
        promised = blob_bound(message.nbytes)
        space = self._space if record.cache is None else self._cache_of(record).space
        shortage = self._promise(record, promised)
        if shortage is not None:
            return self._rejected(record, request, message, "pool_full", shortage)
        entry = Entry(
            raw_bytes=message.nbytes,
            codec=message.codec,
            since=now,
            promised=promised,
            charge=granules(promised),
            space=space,
        )
        record.last_entry = message.entry
        self._holdings.add(record, message.entry, entry)
        job = StoreJob(
            session=session,
            entry=message.entry,
            segment=message.segment,
            offset=message.offset,
            nbytes=message.nbytes,
            dtype=dtype,
            codec=message.codec,
            ready=message.ready or message.sequence,
            sequence=message.sequence,
            promised=promised,
            space=space,
            result=message.result,
        )
        return [Reply(session=session, request=request, message=Admitted(message.entry)), job]

    def restore(
        self, session: int, request: int, message: Restore, now: float
    ) -> list[Instruction]:
        """Start a restore, or hold it back while its entry, or that of one before, is encoded.

        Clients ask in the order of their needs: what is needed last must not take the link first
        because it was encoded first.
        """
        record = self._sessions[session]
        problem = restore_problem(record, message)
        if problem is not None:
            failed = Failed(message.ticket, message.entry, *problem)
            return [Reply(session=session, request=request, message=failed)]
        record.tickets[message.ticket] = Ticket(
            entry=message.entry, request=request, message=message, since=now
        )
        entry = record.entries[message.entry]
        entry.held.append(message.ticket)
        record.waiting.append(message.ticket)
        return self._start_waiting(record)

    def release(self, session: int, message: Release) -> list[Instruction]:
        """Give entries up; those in use are freed when they no longer are."""
        record = self._sessions[session]
        for entry_id in message.entries:
            if entry_id in record.entries:
                self._holdings.give_up(record, entry_id)
        return []

    def learned(self, session: int, request: int, message: PlanLearned) -> list[Instruction]:
        """Note what the session's trainer says of its steps, in the place of what it said before.

        It is for people: nothing is granted or refused by it.
        """
        record = self._sessions[session]
        if record.phase is not Phase.ATTACHED or record.cache or not record.info.has_lane:
            detail = "a plan is of a session that stores what autograd saves, and this is none"
            return [Reply(session=session, request=request, message=Refused("UsageError", detail))]
        record.plan = message
        return []

    def cached(self, session: int, request: int, message: Message, now: float) -> list[Instruction]:
        """Answer a request about the cache, of a session that is for it or is told so."""
        record = self._sessions[session]
        answer: Message
        if record.cache is None:
            answer = Refused(
                "UsageError", "this session's Hello did not say that it is for the cache"
            )
        else:
            answer = self._cache_of(record).answer(
                record, self._holdings, message, now, self._limits
            )
        return [Reply(session=session, request=request, message=answer)]

    def map_segment(self, session: int, request: int, message: MapSegment) -> list[Instruction]:
        """Have a segment mapped, unless its number is taken or there are too many."""
        record = self._sessions[session]
        problem = segment_problem(record, message)
        if problem is not None:
            return [Reply(session=session, request=request, message=Refused("UsageError", problem))]
        record.mapping[message.segment] = (request, message.nbytes)
        return [Map(session=session, segment=message)]

    def unmap_segment(self, session: int, request: int, message: UnmapSegment) -> list[Instruction]:
        """Take a segment out of use; new jobs cannot name it from here on.

        Restores into it that wait come to nothing: they were held to the size of this segment, and
        its number may mean a smaller one before they begin.
        """
        record = self._sessions[session]
        if record.segments.pop(message.segment, None) is None:
            detail = f"segment {message.segment} is not mapped"
            return [Reply(session=session, request=request, message=Refused("UsageError", detail))]
        failed = self._fail_into(record, message.segment)
        return [
            *failed,
            Unmap(session=session, segment=message.segment),
            *self._start_waiting(record),
        ]

    # --- results of lanes -------------------------------------------------------------------

    def result(self, result: Result, now: float) -> list[Instruction]:
        """Take in what a lane has done."""
        handler: Any = self._events[type(result)]
        record = self._sessions[result.session]
        instructions: list[Instruction] = handler(record, result, now)
        return instructions

    def _store_done(self, record: Session, result: StoreDone, now: float) -> list[Instruction]:
        entry = record.entries[result.entry]
        entry.block = result.block
        self._holdings.charge(record, entry, granules(result.block.nbytes))
        flow = self._counters.stores[entry.codec]
        flow.add(entry.raw_bytes, result.block.nbytes, result.seconds, now - entry.since)
        if record.phase is Phase.ENDING:
            self._holdings.free_unused(record, result.entry)
            return []
        stored = Stored(result.entry, result.block.nbytes, result.mode)
        instructions: list[Instruction] = [
            Reply(session=record.info.session, request=0, message=stored)
        ]
        instructions += self._start_waiting(record)
        self._holdings.free_unused(record, result.entry)
        return instructions

    def _store_failed(self, record: Session, result: StoreFailed, _now: float) -> list[Instruction]:
        entry = self._holdings.remove(record, result.entry)
        self._counters.stores[entry.codec].failures += 1
        entry.space.withdraw(entry.promised)
        if record.phase is Phase.ENDING:
            return []
        kind, detail = "ActivationLost", result.detail
        failed = Failed(0, result.entry, kind, detail)
        replies: list[Instruction] = [Reply(session=record.info.session, request=0, message=failed)]
        replies += [self._fail_waiting(record, number, kind, detail) for number in entry.held]
        return replies + self._start_waiting(record)

    def _restore_done(self, record: Session, result: RestoreDone, now: float) -> list[Instruction]:
        ticket, entry = self._end_restore(record, result.ticket)
        assert entry.block is not None
        flow = self._counters.restores[entry.codec]
        flow.add(entry.raw_bytes, entry.block.nbytes, result.seconds, now - ticket.since)
        return self._answer(record, ticket, Restored(result.ticket))

    def _restore_failed(
        self, record: Session, result: RestoreFailed, _now: float
    ) -> list[Instruction]:
        ticket, entry = self._end_restore(record, result.ticket)
        self._counters.restores[entry.codec].failures += 1
        if result.kind == "CorruptBlob":
            self._counters.corrupt += 1
            if entry.loan is not None:
                entry.loan.spoil()
        failed = Failed(result.ticket, ticket.entry, result.kind, result.detail)
        return self._answer(record, ticket, failed)

    def _segment_mapped(
        self, record: Session, result: SegmentMapped, _now: float
    ) -> list[Instruction]:
        request, nbytes = record.mapping.pop(result.segment)
        if record.phase is Phase.ENDING:
            return []
        record.segments[result.segment] = nbytes
        return [Reply(session=record.info.session, request=request, message=Mapped(result.segment))]

    def _segment_refused(
        self, record: Session, result: SegmentRefused, _now: float
    ) -> list[Instruction]:
        request, _ = record.mapping.pop(result.segment)
        if record.phase is Phase.ENDING:
            return []
        return [
            Reply(
                session=record.info.session,
                request=request,
                message=Refused("UsageError", result.detail),
            )
        ]

    def _detached(self, record: Session, _result: Detached, _now: float) -> list[Instruction]:
        assert record.phase is Phase.ENDING, "a lane let go of a living session"
        record.detached = True
        return self._gone(record)

    # --- what the operator sees -------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Entries of all sessions."""
        return self._holdings.entries

    @property
    def raw_bytes(self) -> int:
        """Bytes, before encoding, of the entries in the pool."""
        return self._holdings.raw_bytes

    @property
    def sessions(self) -> list[int]:
        """The ids of all sessions that are not gone."""
        return list(self._sessions)

    def sessions_status(self) -> list[dict[str, Any]]:
        """Return all sessions as `stormd status` shows them."""
        return [record.as_status() for record in self._sessions.values()]

    def assert_invariants(self) -> None:
        """Raise AssertionError where the ledger contradicts itself or the arena: for tests."""
        records = list(self._sessions.values())
        entries = [entry for record in records for entry in record.entries.values()]
        assert self._holdings.entries == len(entries)
        assert_space(self._space, [entry for entry in entries if entry.space is self._space])
        if self._cache is not None:
            self._cache.assert_invariants(records)
        for record in records:
            assert_session(record)
        pool_users = [record for record in records if record.cache is None]
        in_pool = [entry for record in pool_users for entry in record.entries.values()]
        assert self._holdings.raw_bytes == sum(entry.raw_bytes for entry in in_pool)
        self._holdings.shares.assert_invariants(
            [(record.info.uid, record.used_bytes) for record in pool_users]
        )

    # --- parts of the above -----------------------------------------------------------------

    def _cache_of(self, record: Session) -> CacheRequests:
        assert record.cache is not None
        assert self._cache is not None, "open takes no session for a cache that is not there"
        return self._cache

    def _promise(self, record: Session, nbytes: int) -> str | None:
        """Have the session's space promise room; return None, or why it does not."""
        if record.cache is not None:
            return self._cache_of(record).spend(record.cache, nbytes)
        shares, capacity = self._holdings.shares, self._space.capacity
        shortage = share_problem(record, shares, self._limits, capacity, granules(nbytes))
        if shortage is not None or self._space.promise(nbytes):
            return shortage
        use = self._space.use()
        return (
            f"{format_size(use.used + use.promised)} of {format_size(use.capacity)} are taken and "
            f"{format_size(nbytes)} more are asked for: raise pool_bytes"
        )

    def _free_some_of(self, record: Session, most: int) -> int:
        """Give up to `most` entries of an ending session up; return how many."""
        count = min(most, len(record.to_free))
        for _ in range(count):
            number = record.to_free.pop()
            entry = record.entries.get(number)  # a lane may have answered it away meanwhile
            if entry is not None:
                entry.held.clear()
                self._holdings.give_up(record, number)
        return count

    def _gone(self, record: Session) -> list[Instruction]:
        """Forget an ending session if it holds nothing and its lane has let go of it."""
        if not record.detached or record.to_free:
            return []
        assert not record.entries, "a lane let go of a session without answering its jobs"
        del self._sessions[record.info.session]
        return [Ended(record.info.session, record.cause)]

    def _rejected(
        self, record: Session, request: int, message: Store, reason: str, detail: str
    ) -> list[Instruction]:
        self._counters.rejected[reason] += 1
        rejected = Rejected(message.entry, reason, detail)
        return [
            Reply(session=record.info.session, request=request, message=rejected),
            Skip(session=record.info.session, sequence=message.sequence),
        ]

    def _answer(
        self, record: Session, ticket: Ticket, message: Restored | Failed
    ) -> list[Instruction]:
        if record.phase is Phase.ENDING:
            return []
        return [Reply(session=record.info.session, request=ticket.request, message=message)]

    def _start_waiting(self, record: Session) -> list[Instruction]:
        """Start the restores whose turn it is and whose entries are encoded."""
        started: list[Instruction] = []
        while record.waiting:
            number = record.waiting[0]
            entry = record.entries[record.tickets[number].entry]
            if entry.block is None:
                break
            record.waiting.popleft()
            entry.held.remove(number)
            started.append(self._start_restore(record, number))
        return started

    def _fail_into(self, record: Session, segment: int) -> list[Instruction]:
        """Answer the restores into a segment that have not begun."""
        detail = f"segment {segment} was unmapped before the restore began: wait for its answer"
        named = [n for n in record.waiting if record.tickets[n].message.segment == segment]
        failed: list[Instruction] = []
        for number in named:
            entry = record.tickets[number].entry
            failed.append(self._fail_waiting(record, number, "UsageError", detail))
            record.entries[entry].held.remove(number)
            self._holdings.free_unused(record, entry)
        return failed

    def _fail_waiting(self, record: Session, number: int, kind: str, detail: str) -> Reply:
        """Answer a restore that waits, and forget it; its entry is the caller's business."""
        record.waiting.remove(number)
        ticket = record.tickets.pop(number)
        failed = Failed(number, ticket.entry, kind, detail)
        return Reply(session=record.info.session, request=ticket.request, message=failed)

    def _start_restore(self, record: Session, number: int) -> RestoreJob:
        ticket = record.tickets[number]
        entry = record.entries[ticket.entry]
        assert entry.block is not None
        ticket.started = True
        entry.restores += 1
        message = ticket.message
        return RestoreJob(
            session=record.info.session,
            ticket=number,
            entry=ticket.entry,
            block=entry.block,
            segment=message.segment,
            offset=message.offset,
            nbytes=message.nbytes,
            sequence=message.sequence,
        )

    def _end_restore(self, record: Session, number: int) -> tuple[Ticket, Entry]:
        ticket = record.tickets.pop(number)
        entry = record.entries[ticket.entry]
        entry.restores -= 1
        self._holdings.free_unused(record, ticket.entry)
        return ticket, entry
