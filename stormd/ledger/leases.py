"""The life of sessions: opened, attached, renewed while heard, probed when silent, ended and gone.

A session is a lease on all it holds. It ends when its lifeline does; only that proves a client
dead. A stopped process (a debugger, a long call that holds its interpreter lock) is silent but
alive, and must find its activations later. So a lease that nobody has renewed is only probed. A
session that never attached is ended, and an ended session holds nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from stormd.cache.items import Cache, Caller
from stormd.ledger.events import Detach, Ended, Instruction, Probe
from stormd.ledger.holdings import State
from stormd.ledger.records import KeptSession
from stormd.ledger.sessions import CacheAccess, Phase, Session, SessionInfo
from stormd.protocol import Hello, Refused

__all__ = ["ATTACH_SECONDS", "FREED_A_TURN", "STALE_SECONDS", "Leases", "Places"]

ATTACH_SECONDS: Final = 5.0
"""Maximum time that a session may exist without its lifeline."""

STALE_SECONDS: Final = 0.5
"""Time without a lifeline after which a session may be ended for a new one, if no place is free. A
client needs milliseconds to connect its lifeline."""

FREED_A_TURN: Final = 256
"""Maximum entries of ending sessions that are freed before the loop gets to other work."""


class Leases:
    """Opens and ends sessions. `cache` is None if the daemon keeps no cache."""

    def __init__(self, state: State, cache: Cache | None) -> None:
        self._state = state
        self._cache = cache
        self._places = Places()
        self._freeing: deque[Session] = deque()  # ending sessions with entries to free

    # --- admission --------------------------------------------------------------------------

    def make_place(self, uid: int, now: float, *, has_lane: bool = True) -> list[Instruction]:
        """If the user finds no place, end the session that is longest without a lifeline.

        If the user has too many sessions, it is one of that user's; else one of the user with most
        sessions without a lifeline. A session opened less than STALE_SECONDS ago is not ended.
        `refusal` says whether there is a place now.
        """
        uid_taken, taken = self._places.taken(uid, has_lane=has_lane)
        if uid_taken >= self._user_sessions:
            found = self._places.stalest(has_lane=has_lane, uid=uid)
        elif taken >= self._state.limits.max_sessions:
            found = self._places.stalest(has_lane=has_lane)
        else:
            return []
        if found is None or now - found.seen < STALE_SECONDS:
            return []
        return self.end(found.info.session, "unattached")

    def refusal(self, uid: int, *, has_lane: bool = True) -> Refused | None:
        """Return why the user cannot open a session, with or without a lane; None if it can.

        Shares are kept for sessions with a lane. Sessions without one hold nothing, and as many of
        them may exist beside the others.
        """
        if self._state.is_draining:
            return Refused("DaemonLost", "the daemon is shutting down: start it again")
        uid_taken, taken = self._places.taken(uid, has_lane=has_lane)
        most = self._state.limits.max_sessions
        if taken >= most:
            return Refused(
                "QuotaExceeded",
                f"{taken} sessions are open, the limit is {most}: end one, or raise max_sessions",
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
        return self._state.limits.user_sessions or self._state.limits.max_sessions

    # --- a session's life -------------------------------------------------------------------

    def open(
        self,
        info: SessionInfo,
        *,
        chunk_bytes: int,
        staging_bytes: int,
        now: float,
        caller: Caller | None = None,
        hello: Hello | None = None,
        secret: bytes = b"",
    ) -> Session:
        """Add a session; `staging_bytes` is the size of segment 0, 0 if the client will map it.

        With a `caller` the session is for the cache, which must exist. With a `hello`, a client
        that knows the `secret` can resume the session, if the ledger records its state.
        """
        assert self.refusal(info.uid, has_lane=info.has_lane) is None
        assert info.session not in self._state.sessions
        assert caller is None or self._cache is not None
        segments = {0: staging_bytes} if staging_bytes else {}
        record = Session(info=info, chunk_bytes=chunk_bytes, seen=now, segments=segments)
        record.cache = None if caller is None else CacheAccess(caller)
        record.hello, record.secret = hello, secret
        self._state.holdings.records.opened(record)
        self._enter(record)
        return record

    def _enter(self, record: Session) -> None:
        self._state.sessions[record.info.session] = record
        self._places.take(record)
        self._state.counters.sessions += 1

    def adopt(self, kept: KeptSession, now: float) -> None:
        """Add a session of an earlier daemon, with all it holds; its client has not come yet."""
        record = kept.record
        record.seen, record.last_entry = now, max(kept.entries, default=0)
        self._enter(record)
        self._places.attached(record)
        for number, entry in kept.entries.items():
            self._state.holdings.add(record, number, entry.made(self._state.space, now))
            self._state.touch(record, number)

    def orphans(self) -> list[Session]:
        """Return the sessions of an earlier daemon whose clients have not come yet."""
        return [one for one in self._state.sessions.values() if one.phase is Phase.ORPHANED]

    def resume(self, record: Session, now: float) -> None:
        """Note that an orphaned session's client has come; its lifeline will follow."""
        record.enter(Phase.OPENED)
        record.has_client = True
        record.seen = now
        self._places.awaits_lifeline(record)

    def attach(self, record: Session, now: float) -> None:
        """Note that the session's lifeline is connected: from now on it may store."""
        record.enter(Phase.ATTACHED)
        record.seen = now
        self._places.attached(record)

    def tick(self, now: float) -> list[Instruction]:
        """End sessions that never attached, and probe those that have been silent for a lease.

        The module that hears a client renews its lease by setting `seen`.
        """
        instructions: list[Instruction] = []
        lease = self._state.limits.lease_seconds
        for session, record in list(self._state.sessions.items()):
            silent = now - record.seen
            if record.phase is Phase.OPENED and silent > ATTACH_SECONDS:
                instructions += self.end(session, "unattached")
            elif record.phase is Phase.ATTACHED and silent > lease:
                record.seen = now
                instructions.append(Probe(session))
        return instructions

    def end(self, session: int, cause: str) -> list[Instruction]:
        """Begin a session's end; `cause` is one of counters.ENDINGS.

        Ending a session that is ending or gone changes nothing. Ending one session may complete the
        end of others, so a caller that ends several may find some gone.
        """
        record = self._state.sessions.get(session)
        if record is None or record.phase is Phase.ENDING:
            return []
        is_unattached = record.phase is Phase.OPENED
        record.enter(Phase.ENDING)
        record.cause = cause
        self._state.holdings.records.ended(record)
        self._state.counters.ended[cause] += 1
        if record.cache is not None:
            record.cache.put = None  # the entries stored for it are freed with the others
        for number in record.waiting:
            record.entries[record.tickets.pop(number).entry].waits -= 1
        record.waiting.clear()
        record.to_free = list(record.entries)
        if record.to_free:  # else it is gone once its lane has detached it
            self._freeing.append(record)
        if not record.has_client:  # no lane has it, and nobody must be told
            record.detached = True
            return [*self.remove_if_done(record), *self.free_some()]
        gone = self.free_some()
        if is_unattached:
            self._places.end_unattached(record)
        return [Detach(session), *gone]

    # --- what ending sessions have held -----------------------------------------------------

    @property
    def is_freeing(self) -> bool:
        """Whether `free_some` has something to do."""
        return bool(self._freeing) or (self._cache is not None and self._cache.has_garbage)

    def free_some(self) -> list[Instruction]:
        """Free some entries of ending sessions, a few milliseconds' work; to be called again.

        Other clients are served in between.
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
                gone += self.remove_if_done(record)
        return gone

    def detached(self, record: Session, _results: object, _now: float) -> list[Instruction]:
        """Note that the session's lane has detached it: no more results follow."""
        assert record.phase is Phase.ENDING, "a session that is not ending was detached by its lane"
        record.detached = True
        return self.remove_if_done(record)

    def assert_invariants(self) -> None:
        """Raise AssertionError if sessions and their places contradict each other: for tests."""
        self._places.assert_invariants(self._state.sessions.values())
        for record in self._freeing:
            assert record.phase is Phase.ENDING

    def _free_some_of(self, record: Session, most: int) -> int:
        """Release up to `most` entries of an ending session; return how many."""
        count = min(most, len(record.to_free))
        for _ in range(count):
            number = record.to_free.pop()
            entry = record.entries.get(number)  # a lane's result may have removed it meanwhile
            if entry is not None:
                self._state.holdings.release(record, number)
        return count

    def remove_if_done(self, record: Session) -> list[Instruction]:
        """Forget an ending session if it holds nothing and its lane has detached it.

        Entries that the tier on disk still uses are freed once the tier has answered.
        """
        if not record.detached or record.to_free:
            return []
        if record.entries:
            assert all(entry.disk is not None for entry in record.entries.values()), (
                "a lane detached a session without answering its jobs"
            )
            return []
        del self._state.sessions[record.info.session]
        self._state.holdings.has_changed = True
        self._places.free(record)
        return [Ended(record.info.session, record.cause)] if record.has_client else []


class Places:
    """How many sessions each user has, and which of them have no lifeline yet.

    A session takes a place from its opening until it is gone. Without a lifeline its place is free
    as soon as its end begins, unless entries of an earlier daemon's are still to be freed: they may
    fill a share. Sessions with a lane and those without are counted separately.
    """

    def __init__(self) -> None:
        self._taken: dict[int, Session] = {}
        self._by_user: Counter[tuple[bool, int]] = Counter()
        self._unattached: dict[int, Session] = {}  # the oldest first

    def taken(self, uid: int, *, has_lane: bool) -> tuple[int, int]:
        """Return how many places a user has taken, and how many all users have."""
        every = sum(count for (kind, _), count in self._by_user.items() if kind is has_lane)
        return self._by_user[has_lane, uid], every

    def stalest(self, *, has_lane: bool, uid: int | None = None) -> Session | None:
        """Return the session that is longest without a lifeline, or None.

        It is one of `uid`, or if that is None, of the user who has most such sessions.
        """
        found: dict[int, list[Session]] = {}
        for record in self._unattached.values():
            if record.info.has_lane is has_lane and uid in (None, record.info.uid):
                found.setdefault(record.info.uid, []).append(record)
        return max(found.values(), key=len)[0] if found else None

    def take(self, record: Session) -> None:
        """Give a newly opened session its place."""
        session, info = record.info.session, record.info
        self._taken[session] = self._unattached[session] = record
        self._by_user[info.has_lane, info.uid] += 1

    def awaits_lifeline(self, record: Session) -> None:
        """Note that another daemon's session waits for its lifeline."""
        self._unattached[record.info.session] = record

    def attached(self, record: Session) -> None:
        """Note that a session has its lifeline."""
        del self._unattached[record.info.session]

    def end_unattached(self, record: Session) -> None:
        """Note that the end of a session without a lifeline has begun."""
        del self._unattached[record.info.session]
        if not record.entries:
            self.free(record)

    def free(self, record: Session) -> None:
        """Free a session's place. May be called twice."""
        info = record.info
        if self._taken.pop(info.session, None) is None:
            return
        self._by_user[info.has_lane, info.uid] -= 1
        if not self._by_user[info.has_lane, info.uid]:
            del self._by_user[info.has_lane, info.uid]

    def assert_invariants(self, records: Iterable[Session]) -> None:
        """Raise AssertionError if the places are not those of these sessions: for tests."""
        there = {record.info.session: record for record in records}
        assert self._taken.keys() <= there.keys()
        assert self._unattached == {
            session: record for session, record in there.items() if record.phase is Phase.OPENED
        }
        for session, record in there.items():
            assert session in self._taken or record.phase is Phase.ENDING
        held = [record.info for record in self._taken.values()]
        assert self._by_user == Counter((info.has_lane, info.uid) for info in held)
