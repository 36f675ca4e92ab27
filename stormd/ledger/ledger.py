"""Who holds what: the pure state machine over sessions, entries, leases and quotas.

An event goes in, instructions come out, and nothing else happens: no socket, clock or memory is
touched here. Every admitted entry holds either a promise or a block of the arena until it is freed,
exactly once. Nothing is freed while a lane uses it. A session that has ended holds nothing.

Entries:   Store -> encoding -> stored -> (restores read it) -> freed
           Release or the session's end while a lane uses the entry frees it when the lane is done.
Sessions:  opened -> attached -> ending -> gone; `Detached` of the lane is what ends the last step.
Memory:    what the pool has no room for yet, and will have once it has grown, is answered by Wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from stormd.cache.items import Cache, Caller
from stormd.ledger.accounting import (
    Holdings,
    assert_session,
    assert_space,
    restore_problem,
    segment_problem,
    share_problem,
    store_problem,
)
from stormd.ledger.cache_requests import CacheRequests
from stormd.ledger.events import (
    Detach,
    Detached,
    Ended,
    Instruction,
    Jobs,
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
    Wait,
)
from stormd.ledger.parts import Part, blob_bound
from stormd.ledger.places import Places
from stormd.ledger.sessions import (
    CacheAccess,
    Destination,
    Entry,
    Limits,
    Phase,
    Session,
    SessionInfo,
    Ticket,
)
from stormd.memory.arena import Space, granules
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    RESTORE_FIELDS,
    Admitted,
    CachePut,
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
    RestoredParts,
    RestoreParts,
    Store,
    Stored,
    UnmapSegment,
    pack,
    unpack,
)
from stormd.protocol.limits import MAX_BATCH
from stormd.sizes import format_size

__all__ = ["ATTACH_SECONDS", "Ledger"]

ATTACH_SECONDS: Final = 5.0
"""How long a session may exist without its lifeline."""

STALE_SECONDS: Final = 0.5
"""Without a lifeline, after which a session gives way to a new one where no place is free. It takes
a client milliseconds."""

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
        self._places = Places()
        self._holdings = Holdings()
        self._holdings.shares.limit(limits.share_bytes, ())
        self._draining = False
        self._restored: dict[int, list[int]] = {}  # by session: tickets to be answered together
        self._freeing: deque[Session] = deque()  # those that end and have entries to be freed
        self._events = {
            StoreDone: self._stores_done,
            StoreFailed: self._store_failed,
            RestoreDone: self._restores_done,
            RestoreFailed: self._restore_failed,
            SegmentMapped: self._segment_mapped,
            SegmentRefused: self._segment_refused,
            Detached: self._detached,
        }

    # --- sessions ---------------------------------------------------------------------------

    def make_place(self, uid: int, now: float, *, has_lane: bool = True) -> list[Instruction]:
        """Where a user finds no place, end the session that is longest without a lifeline.

        Of the user's own where those are too many, else of the user who has most such sessions.
        One that was opened a moment ago is left alone. `refusal` tells whether there is a place.
        """
        uid_taken, taken = self._places.taken(uid, has_lane=has_lane)
        if uid_taken >= self._user_sessions:
            found = self._places.stalest(has_lane=has_lane, uid=uid)
        elif taken >= self._limits.max_sessions:
            found = self._places.stalest(has_lane=has_lane)
        else:
            return []
        if found is None or now - found.seen < STALE_SECONDS:
            return []
        return self.end(found.info.session, "unattached")

    def refusal(self, uid: int, *, has_lane: bool = True) -> Refused | None:
        """Return why no session of a user's, with a lane or for control alone, can be opened now.

        None where one can. Shares are kept for those with a lane; of the others, which hold
        nothing, there may be as many beside them.
        """
        if self._draining:
            return Refused("DaemonLost", "the daemon is shutting down: start it again")
        uid_taken, taken = self._places.taken(uid, has_lane=has_lane)
        if taken >= self._limits.max_sessions:
            return Refused(
                "QuotaExceeded",
                f"{taken} sessions are open, the limit is "
                f"{self._limits.max_sessions}: end one, or raise max_sessions",
            )
        if uid_taken >= self._user_sessions:
            return Refused(
                "QuotaExceeded",
                f"{uid_taken} sessions of user {uid} are open, the limit is "
                f"{self._user_sessions}: end one, or raise max_sessions_per_uid",
            )
        return None

    @property
    def _user_sessions(self) -> int:
        return self._limits.user_sessions or self._limits.max_sessions

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
        assert self.refusal(info.uid, has_lane=info.has_lane) is None
        assert info.session not in self._sessions
        assert caller is None or self._cache is not None
        segments = {0: staging_bytes} if staging_bytes else {}
        record = Session(info=info, part_bytes=part_bytes, seen=now, segments=segments)
        record.cache = None if caller is None else CacheAccess(caller)
        self._sessions[info.session] = record
        self._places.take(record)
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
        self._places.attached(record)

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
            self._cache.tidy(now)
            for record in self._sessions.values():
                self._cache.close_idle(record, self._holdings, now)
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

        Ending one that is ending, or gone, changes nothing: the end of one lets others go, so
        whoever ends several meets some that are gone.
        """
        record = self._sessions.get(session)
        if record is None or record.phase is Phase.ENDING:
            return []
        if record.phase is Phase.OPENED:  # and so it holds nothing: whoever waits need not
            self._places.leave(record)
        record.phase = Phase.ENDING
        record.cause = cause
        self._counters.ended[cause] += 1
        if record.cache is not None:
            record.cache.put = None  # what was stored for it is freed with the other entries
        for number in record.waiting:
            record.entries[record.tickets.pop(number).entry].waits -= 1
        record.waiting.clear()
        record.to_free = list(record.entries)
        if record.to_free:  # else it is gone once its lane has let go of it
            self._freeing.append(record)
        return [Detach(session), *self.free_some()]

    @property
    def is_freeing(self) -> bool:
        """Whether `free_some` has something to do."""
        return bool(self._freeing) or (self._cache is not None and self._cache.has_garbage)

    def free_some(self) -> list[Instruction]:
        """Free some entries of sessions that end, a few milliseconds' work; to be called again.

        Others are served in between.
        """
        gone: list[Instruction] = []
        left = FREED_A_TURN
        if self._cache is not None:
            self._cache.collect()
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
            part = Part.of(message.nbytes, message.dtype, message.codec)
        except ValueError as error:
            return self._rejected(record, request, message, "invalid", str(error))
        problem = self._store_problem(record, message, part)
        if problem is not None and problem[0] == "pool_full" and self._waits(record, part.charge):
            return [Wait(session)]
        if problem is not None:
            return self._rejected(record, request, message, *problem)
        space = self._space if record.cache is None else self._cache_of(record).space
        entry = Entry(
            raw_bytes=part.nbytes,
            codec=part.codec,
            since=now,
            promised=part.charge,
            charge=part.charge,
            space=space,
        )
        record.last_entry = message.entry
        if record.cache is not None and record.cache.put is not None:
            record.cache.put.since = now
        self._holdings.add(record, message.entry, entry)
        job = StoreJob(
            session=session,
            entry=message.entry,
            part=part,
            segment=message.segment,
            offset=message.offset,
            ready=message.ready or message.sequence,
            sequence=message.sequence,
            space=space,
        )
        admitted = Admitted(message.entry)
        return [
            Reply(session=session, request=request, message=admitted),
            Jobs(session, [job]),
        ]

    def make_cache_room(self, session: int, message: Store, now: float) -> bool:
        """Before a part of a put is stored, drop a little for it; True where to go on with that."""
        record = self._sessions[session]
        if record.cache is None or record.phase is not Phase.ATTACHED:
            return False
        return self._cache_of(record).make_room(record, blob_bound(message.nbytes), now)

    def tidy_cache(self, now: float) -> bool:
        """Before the cache is asked, drop a little of what has expired; True where to go on."""
        return self._cache is not None and self._cache.tidy(now)

    def is_of_cache(self, session: int) -> bool:
        """Tell whether the session is one for the cache."""
        return self._sessions[session].cache is not None

    def restore(
        self, session: int, request: int, message: Restore, now: float
    ) -> list[Instruction]:
        """Start a restore, or hold it back while its entry, or that of one before, is encoded.

        Clients ask in the order of their needs: what is needed last must not take the link first
        because it was encoded first.
        """
        asked = (
            message.ticket, message.entry,
            message.segment, message.offset, message.nbytes, message.sequence,
        )  # fmt: skip
        return self._ask(session, request, [asked], now, together=False)

    def restore_parts(
        self, session: int, request: int, message: RestoreParts, now: float
    ) -> list[Instruction]:
        """Start several restores, or hold them back, as `restore` does each."""
        asked = unpack(message.places, RESTORE_FIELDS)
        return self._ask(session, request, asked, now, together=True)

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
        elif isinstance(message, CachePut) and self._waits(record, self._cache_of(record).size):
            return [Wait(session)]
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

    def results(self, session: int, results: Iterable[Result], now: float) -> list[Instruction]:
        """Take in what lanes have done for a session."""
        record = self._sessions[session]
        instructions: list[Instruction] = []
        for kind, alike in groupby(results, type):
            handler: Any = self._events[kind]
            instructions += handler(record, alike, now)
        return instructions

    def told(self) -> list[Instruction]:
        """Return the answers to restores that results have left to be given together."""
        if not self._restored:
            return []
        restored, self._restored = self._restored, {}
        return [
            Reply(
                session=session,
                request=0,
                message=RestoredParts(pack(tickets[begin : begin + MAX_BATCH])),
            )
            for session, tickets in restored.items()
            if session in self._sessions and self._sessions[session].phase is not Phase.ENDING
            for begin in range(0, len(tickets), MAX_BATCH)
        ]

    def _stores_done(
        self, record: Session, results: Iterable[StoreDone], now: float
    ) -> list[Instruction]:
        instructions: list[Instruction] = []
        entries, flows = record.entries, self._counters.stores
        freed, charged = [], 0
        for result in results:
            number, block = result.entry, result.block
            entry = entries[number]
            entry.block, room = block, granules(block.nbytes)
            charged += room - entry.charge
            entry.charge = room
            flows[entry.codec].add(entry.raw_bytes, block.nbytes, result.seconds, now - entry.since)
            stored = Stored(number, block.nbytes, result.mode)
            instructions.append(Reply(session=record.info.session, request=0, message=stored))
            if entry.released:
                freed.append(number)
        self._holdings.charge(record, charged)
        if record.phase is Phase.ENDING:
            instructions = []
        elif record.waiting:
            instructions += self._start_waiting(record)
        for number in freed:
            self._holdings.free_unused(record, number)
        return instructions

    def _store_failed(
        self, record: Session, results: Iterable[StoreFailed], _now: float
    ) -> list[Instruction]:
        replies: list[Instruction] = []
        session = record.info.session
        for result in results:
            entry = self._holdings.remove(record, result.entry)
            self._counters.stores[entry.codec].failures += 1
            entry.space.withdraw(entry.promised)
            if record.phase is Phase.ENDING:
                continue
            kind, detail = "ActivationLost", result.detail
            failed = Failed(0, result.entry, kind, detail)
            replies.append(Reply(session=session, request=0, message=failed))
            if entry.waits:
                waiting = [n for n in record.waiting if record.tickets[n].entry == result.entry]
                replies += [self._fail_waiting(record, n, kind, detail) for n in waiting]
        return replies + self._start_waiting(record)

    def _restores_done(
        self, record: Session, results: Iterable[RestoreDone], now: float
    ) -> list[Instruction]:
        replies: list[Instruction] = []
        entries, flows = record.entries, self._counters.restores
        together = self._restored.setdefault(record.info.session, [])
        for result in results:
            ticket = record.tickets.pop(result.ticket)
            entry = entries[ticket.entry]
            assert entry.block is not None
            entry.restores -= 1
            flows[entry.codec].add(
                entry.raw_bytes, entry.block.nbytes, result.seconds, now - ticket.since
            )
            if ticket.together:
                together.append(result.ticket)
            else:
                replies += self._answer(record, ticket, Restored(result.ticket))
            if entry.released:
                self._holdings.free_unused(record, ticket.entry)
        return replies

    def _restore_failed(
        self, record: Session, results: Iterable[RestoreFailed], _now: float
    ) -> list[Instruction]:
        replies: list[Instruction] = []
        for result in results:
            ticket = record.tickets.pop(result.ticket)
            entry = record.entries[ticket.entry]
            entry.restores -= 1
            self._counters.restores[entry.codec].failures += 1
            if result.kind == "CorruptBlob":
                self._counters.corrupt += 1
                if entry.loan is not None:
                    entry.loan.spoil()
            self._holdings.free_unused(record, ticket.entry)
            failed = Failed(result.ticket, ticket.entry, result.kind, result.detail)
            replies += self._answer(record, ticket, failed)
        return replies

    def _segment_mapped(
        self, record: Session, results: Iterable[SegmentMapped], _now: float
    ) -> list[Instruction]:
        replies: list[Instruction] = []
        for result in results:
            request, nbytes = record.mapping.pop(result.segment)
            if record.phase is not Phase.ENDING:
                record.segments[result.segment] = nbytes
                answer = Mapped(result.segment)
                replies.append(Reply(session=record.info.session, request=request, message=answer))
        return replies

    def _segment_refused(
        self, record: Session, results: Iterable[SegmentRefused], _now: float
    ) -> list[Instruction]:
        replies: list[Instruction] = []
        for result in results:
            request, _ = record.mapping.pop(result.segment)
            if record.phase is not Phase.ENDING:
                answer = Refused("UsageError", result.detail)
                replies.append(Reply(session=record.info.session, request=request, message=answer))
        return replies

    def _detached(
        self, record: Session, _results: Iterable[Detached], _now: float
    ) -> list[Instruction]:
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
        self._places.assert_invariants(records)
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
        shortage = share_problem(record, shares, self._limits, capacity, nbytes)
        if shortage is not None or self._space.promise(nbytes):
            return shortage
        use = self._space.use()
        taken = f"{format_size(use.taken)} of {format_size(use.capacity)} are taken and "
        if use.capacity < capacity:
            return (
                f"{taken}{format_size(nbytes)} more are asked for, and this machine or container "
                f"has no memory left for more of pool_bytes={format_size(capacity)}: free some"
            )
        return f"{taken}{format_size(nbytes)} more are asked for: raise pool_bytes"

    def _waits(self, record: Session, nbytes: int) -> bool:
        """Tell whether room for so much has yet to come, and note that it is wanted."""
        space = self._space if record.cache is None else self._cache_of(record).space
        if not space.lacks(nbytes):
            return False
        space.want(nbytes)
        return True

    def _store_problem(self, record: Session, message: Store, part: Part) -> tuple[str, str] | None:
        """Return why an entry is not admitted; None, and its room is promised now."""
        problem = store_problem(
            record,
            message,
            self._limits,
            user_bytes=self._holdings.shares.of_user(record.info.uid),
            draining=self._draining,
        )
        return problem or self._shortage(record, part.charge)

    def _shortage(self, record: Session, nbytes: int) -> tuple[str, str] | None:
        shortage = self._promise(record, nbytes)
        return None if shortage is None else ("pool_full", shortage)

    def _free_some_of(self, record: Session, most: int) -> int:
        """Give up to `most` entries of an ending session up; return how many."""
        count = min(most, len(record.to_free))
        for _ in range(count):
            number = record.to_free.pop()
            entry = record.entries.get(number)  # a lane may have answered it away meanwhile
            if entry is not None:
                self._holdings.give_up(record, number)
        return count

    def _gone(self, record: Session) -> list[Instruction]:
        """Forget an ending session if it holds nothing and its lane has let go of it."""
        if not record.detached or record.to_free:
            return []
        assert not record.entries, "a lane let go of a session without answering its jobs"
        del self._sessions[record.info.session]
        self._places.leave(record)
        return [Ended(record.info.session, record.cause)]

    def _rejected(
        self, record: Session, request: int, message: Store, reason: str, detail: str
    ) -> list[Instruction]:
        """Answer what asked for a store in vain, and have nobody wait for its number."""
        self._counters.rejected[reason] += 1
        session, rejected = record.info.session, Rejected(message.entry, reason, detail)
        return [
            Reply(session=session, request=request, message=rejected),
            Skip(session=session, sequence=message.sequence),
        ]

    def _ask(
        self,
        session: int,
        request: int,
        asked: Iterable[tuple[int, ...]],
        now: float,
        *,
        together: bool,
    ) -> list[Instruction]:
        """Have restores begin, or wait for their turns; `asked` has the numbers of each Restore."""
        record = self._sessions[session]
        done: list[Instruction] = []
        jobs: list[StoreJob | RestoreJob] = []
        for number, entry_id, segment, offset, nbytes, sequence in asked:
            problem = restore_problem(record, number, entry_id, segment, offset, nbytes)
            if problem is not None:
                failed = Failed(number, entry_id, *problem)
                done.append(Reply(session=session, request=request, message=failed))
                continue
            entry = record.entries[entry_id]
            record.tickets[number] = Ticket(entry_id, request, now, together)
            if record.waiting or entry.block is None:
                record.waiting[number] = Destination(segment, offset, nbytes, sequence)
                entry.waits += 1
            else:
                entry.restores += 1
                jobs.append(RestoreJob(
                    session, number, entry_id, entry.block, segment, offset, nbytes, sequence
                ))  # fmt: skip
        return done + _begun(session, jobs)

    def _answer(
        self, record: Session, ticket: Ticket, message: Restored | Failed
    ) -> list[Instruction]:
        if record.phase is Phase.ENDING:
            return []
        return [Reply(session=record.info.session, request=ticket.request, message=message)]

    def _start_waiting(self, record: Session) -> list[Instruction]:
        """Start the restores whose turn it is and whose entries are encoded."""
        jobs: list[StoreJob | RestoreJob] = []
        session = record.info.session
        while record.waiting:
            number = next(iter(record.waiting))
            entry_id = record.tickets[number].entry
            entry = record.entries[entry_id]
            if entry.block is None:
                break
            into = record.waiting.pop(number)
            entry.waits -= 1
            entry.restores += 1
            jobs.append(RestoreJob(session, number, entry_id, entry.block, *into))
        return _begun(session, jobs)

    def _fail_into(self, record: Session, segment: int) -> list[Instruction]:
        """Answer the restores into a segment that have not begun."""
        detail = f"segment {segment} was unmapped before the restore began: wait for its answer"
        named = [number for number, into in record.waiting.items() if into.segment == segment]
        failed: list[Instruction] = []
        for number in named:
            entry_id = record.tickets[number].entry
            failed.append(self._fail_waiting(record, number, "UsageError", detail))
            record.entries[entry_id].waits -= 1
            self._holdings.free_unused(record, entry_id)
        return failed

    def _fail_waiting(self, record: Session, number: int, kind: str, detail: str) -> Reply:
        """Answer a restore that waits, and forget it; its entry is the caller's business."""
        del record.waiting[number]
        ticket = record.tickets.pop(number)
        failed = Failed(number, ticket.entry, kind, detail)
        return Reply(session=record.info.session, request=ticket.request, message=failed)


def _begun(session: int, jobs: list[StoreJob | RestoreJob]) -> list[Instruction]:
    return [Jobs(session, jobs)] if jobs else []
