"""Who holds what: the pure state machine over sessions, entries, leases and quotas.

An event goes in, instructions come out, and nothing else happens: no socket, clock or memory is
touched here. Every admitted entry holds either a promise or a block of the arena until it is freed,
exactly once. Nothing is freed while a lane uses it. A session that has ended holds nothing.

Entries:   Store -> encoding -> stored -> (restores read it) -> freed
           Release or the session's end while a lane uses the entry frees it when the lane is done.
Runs:      RunPlan -> (parts become entries) -> EndRun or the session's end gives the rest back.
Sessions:  opened -> attached -> ending -> gone; `Detached` of the lane is what ends the last step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from stormd.accounting import (
    Holdings,
    assert_session,
    assert_space,
    limits_problem,
    part_problem,
    plan_problem,
    restore_problem,
    run_problem,
    run_room,
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
from stormd.plans import News, Part, Place, Plan, Run
from stormd.protocol import (
    RESTORE_FIELDS,
    STORE_FIELDS,
    Admitted,
    EndRun,
    Failed,
    ForgetPlan,
    Mapped,
    MapSegment,
    Message,
    PlanLearned,
    PlanRegistered,
    Refused,
    RegisterPlan,
    Rejected,
    Release,
    Restore,
    Restored,
    RestoreParts,
    RunAdmitted,
    RunPlan,
    Store,
    Stored,
    StoreParts,
    UnmapSegment,
)
from stormd.protocol.limits import MAX_ID
from stormd.sessions import (
    CacheAccess,
    Destination,
    Entry,
    Limits,
    Phase,
    Session,
    SessionInfo,
    Ticket,
)
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
        self._told: dict[int, News] = {}  # by session: answers that leave together
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
        for run in list(record.runs):
            self._end_run(record, run)
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
            part = Part.of(message.nbytes, message.dtype)
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
        space = self._space if record.cache is None else self._cache_of(record).space
        shortage = self._promise(record, part.bound)
        if shortage is not None:
            return self._rejected(record, request, message, "pool_full", shortage)
        entry = Entry(
            raw_bytes=part.nbytes,
            codec=message.codec,
            since=now,
            promised=part.bound,
            charge=part.charge,
            space=space,
        )
        record.last_entry = message.entry
        self._holdings.add(record, message.entry, entry)
        job = StoreJob(
            session=session,
            entry=message.entry,
            segment=message.segment,
            offset=message.offset,
            nbytes=part.nbytes,
            dtype=part.dtype,
            codec=message.codec,
            ready=message.ready or message.sequence,
            sequence=message.sequence,
            promised=part.bound,
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
        into = Destination(message.segment, message.offset, message.nbytes, message.sequence)
        ticket = Ticket(entry=message.entry, request=request, into=into, since=now)
        failed = self._ask(record, message.ticket, ticket)
        return self._start_waiting(record) if failed is None else [failed]

    def restore_parts(
        self, session: int, request: int, message: RestoreParts, now: float
    ) -> list[Instruction]:
        """Start several restores, or hold them back, as `restore` does each."""
        record, places = self._sessions[session], message.places
        failed: list[Instruction] = []
        for begin in range(0, len(places), RESTORE_FIELDS):
            number, entry, *into = places[begin : begin + RESTORE_FIELDS]
            ticket = Ticket(
                entry=entry, request=request, into=Destination(*into), since=now, together=True
            )
            problem = self._ask(record, number, ticket)
            if problem is not None:
                failed.append(problem)
        return [*failed, *self._start_waiting(record)]

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

    # --- plans and their runs ---------------------------------------------------------------

    def register_plan(self, session: int, request: int, message: RegisterPlan) -> list[Instruction]:
        """Keep a plan for runs to come, or say why not. Nothing is promised by it."""
        record = self._sessions[session]
        problem = plan_problem(record, message)
        answer: Message
        if problem is None:
            try:
                record.plans[message.plan] = plan = Plan.of(message)
            except ValueError as error:
                answer = Refused("UsageError", str(error))
            else:
                record.plan_parts += len(plan.parts)
                answer = PlanRegistered(message.plan)
        else:
            answer = Refused(*problem)
        return [Reply(session=session, request=request, message=answer)]

    def forget_plan(self, session: int, message: ForgetPlan) -> list[Instruction]:
        """Forget a plan; its runs go on."""
        record = self._sessions[session]
        plan = record.plans.pop(message.plan, None)
        if plan is not None:
            record.plan_parts -= len(plan.parts)
        return []

    def run_plan(self, session: int, request: int, message: RunPlan) -> list[Instruction]:
        """Begin a run: promise room for as many of its first parts as others can spare."""
        record = self._sessions[session]
        problem = run_problem(record, message)
        if problem is not None:
            return [Reply(session=session, request=request, message=Refused(*problem))]
        plan = record.plans[message.plan]
        run = Run(message.run, plan, self._promise_parts(record, plan))
        self._holdings.reserve(record, run.reserved)
        record.runs[run.first] = run
        record.last_entry = run.first + len(plan.parts) - 1
        answer = RunAdmitted(run.first, run.count)
        return [Reply(session=session, request=request, message=answer)]

    def store_parts(
        self, session: int, request: int, message: StoreParts, now: float
    ) -> list[Instruction]:
        """Take parts of a run in; those that were not promised are admitted, or not, as a Store."""
        record, places = self._sessions[session], message.places
        run = record.runs.get(message.run)
        done: list[Instruction] = []
        for begin in range(0, len(places), STORE_FIELDS):
            place = Place(*places[begin : begin + STORE_FIELDS])
            if run is None:
                problem = "this run has ended or was refused: send RunPlan first"
            else:
                problem = part_problem(record, run, place.part, place.segment, place.offset)
            if problem or run is None:
                answer = _part_refusal(message.run, run, place.part, problem)
                done += self._not_stored(record, request, answer, place.sequence)
            elif run.take(place.part):
                done.append(self._part_taken(record, run, place, now, is_reserved=True))
            else:
                done += self._part_admitted(record, request, run, place, now)
        return done

    def end_run(self, session: int, message: EndRun) -> list[Instruction]:
        """Give back what a run was promised and did not use."""
        self._end_run(self._sessions[session], message.run)
        return []

    # --- results of lanes -------------------------------------------------------------------

    def result(self, result: Result, now: float) -> list[Instruction]:
        """Take in what a lane has done."""
        handler: Any = self._events[type(result)]
        record = self._sessions[result.session]
        instructions: list[Instruction] = handler(record, result, now)
        return instructions

    def told(self) -> list[Instruction]:
        """Return the answers about parts that results have left to be given together."""
        if not self._told:
            return []
        told, self._told = self._told, {}
        return [
            Reply(session=session, request=0, message=message)
            for session, news in told.items()
            if session in self._sessions and self._sessions[session].phase is not Phase.ENDING
            for message in news.messages()
        ]

    def _news(self, record: Session) -> News:
        """Return what a session is to be told together."""
        return self._told.setdefault(record.info.session, News())

    def _store_done(self, record: Session, result: StoreDone, now: float) -> list[Instruction]:
        entry = record.entries[result.entry]
        entry.block = result.block
        self._holdings.charge(record, entry, granules(result.block.nbytes))
        flow = self._counters.stores[entry.codec]
        flow.add(entry.raw_bytes, result.block.nbytes, result.seconds, now - entry.since)
        if record.phase is Phase.ENDING:
            self._holdings.free_unused(record, result.entry)
            return []
        instructions: list[Instruction] = []
        if entry.together:
            self._news(record).stored(result.entry, result.block.nbytes, result.mode)
        else:
            stored = Stored(result.entry, result.block.nbytes, result.mode)
            reply = Reply(session=record.info.session, request=0, message=stored)
            instructions.append(reply)
        if record.waiting:
            instructions += self._start_waiting(record)
        if entry.released:
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
        if ticket.together:
            self._news(record).tickets.append(result.ticket)
            return []
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
        assert_space(
            self._space,
            [entry for entry in entries if entry.space is self._space],
            promised=sum(record.reserved[0] for record in records),
        )
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

    def _promise_parts(self, record: Session, plan: Plan) -> int:
        """Have the pool promise room for first parts of a plan; return how many."""
        if self._draining:
            return 0
        use, shares = self._space.use(), self._holdings.shares
        room, parts = run_room(
            record,
            self._limits,
            user_bytes=shares.of_user(record.info.uid),
            free=use.capacity - use.used - use.promised,
        )
        count = min(plan.fitting(room), parts)
        nbytes = plan.totals[count]
        if share_problem(record, shares, self._limits, use.capacity, nbytes):
            return 0
        return count if self._space.promise(nbytes) else 0

    def _part_admitted(
        self, record: Session, request: int, run: Run, place: Place, now: float
    ) -> list[Instruction]:
        """Take in a part that was not promised, or reject it: then it stays with its client."""
        number = run.first + place.part
        rejection = self._rejection(record, run.plan.parts[place.part])
        if rejection is not None:
            rejected = Rejected(number, *rejection)
            return self._not_stored(record, request, rejected, place.sequence)
        session = record.info.session
        return [
            Reply(session=session, request=request, message=Admitted(number)),
            self._part_taken(record, run, place, now, is_reserved=False),
        ]

    def _part_taken(
        self, record: Session, run: Run, place: Place, now: float, *, is_reserved: bool
    ) -> StoreJob:
        """Make an entry of a part for which there is room."""
        index, segment, offset, sequence, ready = place
        part, number = run.plan.parts[index], run.first + index
        entry = Entry(
            raw_bytes=part.nbytes,
            codec=run.plan.codec,
            since=now,
            promised=part.bound,
            charge=part.charge,
            space=self._space,
            together=True,
        )
        self._holdings.add(record, number, entry, is_reserved=is_reserved)
        return StoreJob(
            session=record.info.session,
            entry=number,
            segment=segment,
            offset=offset,
            nbytes=part.nbytes,
            dtype=part.dtype,
            codec=run.plan.codec,
            ready=ready or sequence,
            sequence=sequence,
            promised=part.bound,
            space=self._space,
        )

    def _rejection(self, record: Session, part: Part) -> tuple[str, str] | None:
        """Return why a part that was not promised is not admitted; None, and it is promised now."""
        problem = limits_problem(
            record,
            part.nbytes,
            self._limits,
            user_bytes=self._holdings.shares.of_user(record.info.uid),
            draining=self._draining,
        )
        if problem is not None:
            return problem
        shortage = self._promise(record, part.bound)
        return None if shortage is None else ("pool_full", shortage)

    def _end_run(self, record: Session, number: int) -> None:
        run = record.runs.pop(number, None)
        if run is not None and run.reserved:
            self._space.withdraw(run.reserved)
            self._holdings.reserve(record, -run.reserved)

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
        rejected = Rejected(message.entry, reason, detail)
        return self._not_stored(record, request, rejected, message.sequence)

    def _not_stored(
        self, record: Session, request: int, answer: Message, sequence: int
    ) -> list[Instruction]:
        """Answer what asked for a store in vain, and have nobody wait for its number."""
        if isinstance(answer, Rejected):
            self._counters.rejected[answer.reason] += 1
        session = record.info.session
        return [
            Reply(session=session, request=request, message=answer),
            Skip(session=session, sequence=sequence),
        ]

    def _ask(self, record: Session, number: int, ticket: Ticket) -> Reply | None:
        """Have a restore wait for its turn; return the answer where there will be none."""
        problem = restore_problem(record, number, ticket.entry, ticket.into)
        if problem is not None:
            failed = Failed(number, ticket.entry, *problem)
            return Reply(session=record.info.session, request=ticket.request, message=failed)
        record.tickets[number] = ticket
        record.entries[ticket.entry].held.append(number)
        record.waiting.append(number)
        return None

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
        named = [n for n in record.waiting if record.tickets[n].into.segment == segment]
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
        into = ticket.into
        return RestoreJob(
            session=record.info.session,
            ticket=number,
            entry=ticket.entry,
            block=entry.block,
            segment=into.segment,
            offset=into.offset,
            nbytes=into.nbytes,
            sequence=into.sequence,
        )

    def _end_restore(self, record: Session, number: int) -> tuple[Ticket, Entry]:
        ticket = record.tickets.pop(number)
        entry = record.entries[ticket.entry]
        entry.restores -= 1
        self._holdings.free_unused(record, ticket.entry)
        return ticket, entry


def _part_refusal(first: int, run: Run | None, index: int, problem: str) -> Rejected | Failed:
    """Return the answer to a part that cannot be taken in.

    Of one that was promised its client may have let go, and takes no rejection of it.
    """
    number = min(first + index, MAX_ID)
    if run is not None and index < run.count and not run.handed[index]:
        return Failed(0, number, "UsageError", problem)
    return Rejected(number, "invalid", problem)
