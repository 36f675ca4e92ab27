"""The life of a Store: admitted into the pool or rejected, encoded by a lane, stored, released.

Every admitted entry holds either a promise or a block of its space until it is freed, exactly once.
Nothing is freed while a lane uses it. A check reads and changes nothing. A message that passes all
checks names only ranges of its own session, within the limits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from stormd.ledger.cache_requests import CacheRequests
from stormd.ledger.chunks import Chunk, blob_bound
from stormd.ledger.events import (
    Instruction,
    Jobs,
    Recorded,
    Skip,
    StoreDone,
    StoreFailed,
    StoreJob,
    Wait,
)
from stormd.ledger.holdings import Shares, State
from stormd.ledger.restores import Restores
from stormd.ledger.sessions import Entry, Limits, Phase, Session
from stormd.ledger.spills import Spills
from stormd.memory.arena import Space, granules
from stormd.protocol import (
    ENTRIES_A_PAGE,
    Admitted,
    Entries,
    Failed,
    ListEntries,
    PassOver,
    Rejected,
    Release,
    Store,
    Stored,
)
from stormd.protocol.limits import FIRST_LEASED
from stormd.sizes import format_size

__all__ = ["Stores", "share_problem", "store_problem"]

Problem = tuple[str, str]
"""The reason (of protocol.REJECTIONS) and detail of a rejection."""


class Stores:
    """Admits entries and takes in the lanes' results.

    `cache` is None if the daemon keeps no cache, `spills` if there is no tier on disk.
    """

    def __init__(
        self,
        state: State,
        restores: Restores,
        cache: CacheRequests | None,
        spills: Spills | None = None,
    ) -> None:
        self._state = state
        self._restores = restores
        self._cache = cache
        self._spills = spills

    # --- requests ---------------------------------------------------------------------------

    def store(self, record: Session, request: int, message: Store, now: float) -> list[Instruction]:
        """Admit an entry, or reject it with the reason."""
        try:
            chunk = Chunk.of(message.nbytes, message.dtype, message.codec)
        except ValueError as error:
            return self._rejected(record, request, message, "invalid", str(error))
        if message.entry <= record.last_entry and message.entry in record.entries:
            return self._store_repeated(record, request, message, chunk)
        problem = self._problem(record, message, chunk)
        if problem is not None and problem[0] == "pool_full":
            if self.should_wait(record, chunk.charge, now):
                return [Wait(record.info.session)]
            if self._spills is not None and record.cache is None:
                problem = "pool_full", f"{problem[1]}; {self._spills.shortage(now)}"
        if problem is not None:
            return self._rejected(record, request, message, *problem)
        space = self._space_of(record)
        entry = Entry(
            raw_bytes=chunk.nbytes,
            codec=chunk.codec,
            since=now,
            promised=chunk.charge,
            charge=chunk.charge,
            space=space,
        )
        record.last_entry = message.entry
        record.is_restoring = False
        if record.cache is not None and record.cache.put is not None:
            record.cache.put.since = now
        holdings = self._state.holdings
        holdings.add(record, message.entry, entry)
        holdings.records.admitted(record, message.entry, entry)
        return _begun(record, request, message, chunk, space)

    def _store_repeated(
        self, record: Session, request: int, message: Store, chunk: Chunk
    ) -> list[Instruction]:
        """Answer a repeated store of an earlier daemon's entry; encode it if it has no blob yet."""
        number, entry = message.entry, record.entries[message.entry]
        problem = _repeat_problem(record, message, entry, chunk)
        if problem:
            return self._rejected(record, request, message, "invalid", problem)
        place = entry.block or entry.disk
        if place is None:
            entry.is_begun = True
            return _begun(record, request, message, chunk, entry.space)
        return [
            record.reply(request, Admitted(number)),
            record.reply(request, Stored(number, place.nbytes, entry.mode)),
            Skip(session=record.info.session, sequence=message.sequence),
        ]

    def list_entries(
        self, record: Session, request: int, message: ListEntries, _now: float
    ) -> list[Instruction]:
        """Answer with a page of the session's entries, from a snapshot made for the first page."""
        if not message.after:
            record.listed = [number for number, one in record.entries.items() if not one.released]
        begin = bisect_right(record.listed, message.after)
        page = record.listed[begin : begin + ENTRIES_A_PAGE]
        is_all = begin + len(page) >= len(record.listed)
        if is_all:
            record.listed = []
        return [record.reply(request, Entries(page, is_all))]

    def pass_over(
        self, record: Session, _request: int, message: PassOver, _now: float
    ) -> list[Instruction]:
        """Tell the lane that no store will come for the numbers that are passed over."""
        if record.phase_problem() or record.lane_problem():
            return []
        return [Skip(session=record.info.session, sequence=message.sequence)]

    def release(
        self, record: Session, _request: int, message: Release, _now: float
    ) -> list[Instruction]:
        """Release entries; those in use are freed once they are not."""
        for entry_id in message.entries:
            if entry_id in record.entries:
                self._state.holdings.release(record, entry_id)
        return []

    # --- results of lanes -------------------------------------------------------------------

    def done(self, record: Session, results: Iterable[StoreDone], now: float) -> list[Instruction]:
        """Take in blobs that have been placed in their space."""
        replies: list[Instruction] = []
        entries, flows = record.entries, self._state.counters.stores
        records = self._state.holdings.records
        freed, charged, sequences = [], 0, []
        for result in results:
            number, block = result.entry, result.block
            entry = entries[number]
            entry.block, entry.mode, room = block, result.mode, granules(block.nbytes)
            charged += room - entry.charge
            entry.charge = room
            if not entry.released:  # else its block is freed below
                records.stored(record, number, entry)
            flows[entry.codec].add(entry.raw_bytes, block.nbytes, result.seconds, now - entry.since)
            replies.append(record.reply(0, Stored(number, block.nbytes, result.mode)))
            if result.sequence:
                sequences.append(result.sequence)
            if entry.released:
                freed.append(number)
            else:
                self._state.touch(record, number)
        self._state.holdings.charge(record, charged)
        if record.phase is Phase.ENDING:
            replies = []
        else:
            replies = _recorded(record, sequences) + replies
            if record.waiting:
                replies += self._restores.start_waiting(record)
        for number in freed:
            self._state.holdings.free_unused(record, number)
        return replies

    def failed(
        self, record: Session, results: Iterable[StoreFailed], _now: float
    ) -> list[Instruction]:
        """Take in stores that failed, and fail the restores that wait for them."""
        replies: list[Instruction] = []
        sequences = []
        for result in results:
            entry = self._state.holdings.remove(record, result.entry)
            self._state.counters.stores[entry.codec].failures += 1
            self._state.holdings.records.freed(entry)
            entry.space.withdraw(entry.promised)
            if record.phase is Phase.ENDING:
                continue
            failed = Failed(0, result.entry, "ActivationLost", result.detail)
            replies.append(record.reply(0, failed))
            if result.sequence:
                sequences.append(result.sequence)
            if entry.waits:
                replies += self._restores.fail_of(record, result.entry, result.detail)
        return _recorded(record, sequences) + replies + self._restores.start_waiting(record)

    # --- space for stores -------------------------------------------------------------------

    def should_wait(self, record: Session, nbytes: int, now: float) -> bool:
        """Return whether space for `nbytes` will come later; if so, note that it is wanted."""
        space = self._space_of(record)
        spills = None if record.cache is not None else self._spills
        wanted = nbytes if spills is None else spills.free_bytes_for(nbytes)
        if space.request_growth(wanted):
            self._state.holdings.has_changed = True
            return True
        return spills is not None and spills.should_wait(nbytes, now)

    def _space_of(self, record: Session) -> Space:
        return self._state.space if record.cache is None else self._cache_of(record).space

    def _cache_of(self, record: Session) -> CacheRequests:
        assert record.cache is not None
        assert self._cache is not None, "open takes no session for a cache that is not there"
        return self._cache

    def _problem(self, record: Session, message: Store, chunk: Chunk) -> Problem | None:
        """Return why an entry is not admitted; if None, its space is promised now."""
        state, shares, uid = self._state, self._state.holdings.shares, record.info.uid
        is_limited = record.cache is None and state.limits.user_quota_bytes > 0
        problem = store_problem(
            record,
            message,
            state.limits,
            user_bytes=shares.claim(uid, chunk.charge) if is_limited else 0,
            draining=state.is_draining,
        )
        if problem is None and not state.holdings.records.has_room:
            problem = "too_many_entries", "the journal of what is held is full: release some first"
        if problem is None and (shortage := self._promise(record, chunk.charge)) is not None:
            problem = "pool_full", shortage
        if problem is not None and is_limited:
            shares.unclaim(uid)
        return problem

    def _promise(self, record: Session, nbytes: int) -> str | None:
        """Promise `nbytes` of the session's space; return None, or why they cannot be promised."""
        if record.cache is not None:
            return self._cache_of(record).spend(record.cache, nbytes)
        state = self._state
        space, spills = state.space, self._spills
        capacity = space.capacity if spills is None else spills.store_capacity
        shortage = share_problem(record, state.holdings.shares, state.limits, capacity, nbytes)
        if shortage is not None:
            return shortage
        if space.promise(nbytes) if spills is None else spills.promise(record, nbytes):
            return None
        if spills is not None and not spills.keeps_shares(record, nbytes):
            return (
                "restores in progress and other sessions' shares of "
                f"{format_size(state.limits.share_bytes)} leave no {format_size(nbytes)}: raise "
                "pool_bytes or lower session_share_bytes"
            )
        use = space.use()
        taken = f"{format_size(use.taken)} of {format_size(use.capacity)} are taken and "
        if use.capacity < space.capacity:
            return (
                f"{taken}{format_size(nbytes)} more are asked for, and this machine or container "
                "has no memory left for more of "
                f"pool_bytes={format_size(space.capacity)}: free some"
            )
        return f"{taken}{format_size(nbytes)} more are asked for: raise pool_bytes"

    def _rejected(
        self, record: Session, request: int, message: Store, reason: str, detail: str
    ) -> list[Instruction]:
        """Reject a store, and tell the lane that its number is skipped."""
        self._state.counters.rejected[reason] += 1
        return [
            record.reply(request, Rejected(message.entry, reason, detail)),
            Skip(session=record.info.session, sequence=message.sequence),
        ]


def _recorded(record: Session, sequences: list[int]) -> list[Instruction]:
    """Tell the lane that the results of these stores are in the journal now."""
    if not sequences:
        return []
    return [Recorded(session=record.info.session, sequences=sequences)]


def _begun(
    record: Session, request: int, message: Store, chunk: Chunk, space: Space
) -> list[Instruction]:
    """Answer that an entry is admitted, and have its lane encode it."""
    session = record.info.session
    job = StoreJob(
        session=session,
        entry=message.entry,
        chunk=chunk,
        segment=message.segment,
        offset=message.offset,
        sequence=message.sequence,
        space=space,
    )
    return [record.reply(request, Admitted(message.entry)), Jobs(session, [job])]


# --- checks of a store -----------------------------------------------------------------------


def store_problem(
    session: Session, message: Store, limits: Limits, *, user_bytes: int, draining: bool
) -> Problem | None:
    """Return why a store is rejected, or None if it is not.

    `user_bytes` is the number of bytes that all sessions of the session's user hold. The pool's
    free space is not checked: only a promise of the arena can tell.
    """
    if detail := _invalid(session, message):
        return "invalid", detail
    nbytes = granules(blob_bound(message.nbytes))
    if draining:
        return "draining", "the daemon is shutting down"
    if detail := _count(session, limits):
        return "too_many_entries", detail
    if session.cache is not None:  # the cache limits itself, by its own size
        return None
    detail = _quota(session, limits, nbytes) or _user_quota(session, limits, user_bytes, nbytes)
    return ("quota", detail) if detail else None


def share_problem(
    session: Session, shares: Shares, limits: Limits, capacity: int, nbytes: int
) -> str | None:
    """Return why a pool of `capacity` has no `nbytes` more for the session, if shares are kept.

    Return None if it has. It always has if the session stays within its own share.
    """
    common = capacity - limits.max_sessions * limits.share_bytes
    taken = shares.common_growth(session.used_bytes, session.used_bytes + nbytes)
    if not limits.share_bytes or not taken or shares.common_bytes + taken <= common:
        return None
    return (
        f"{format_size(shares.common_bytes)} of the {format_size(common)} beyond the sessions' "
        f"shares of {format_size(limits.share_bytes)} are taken and {format_size(taken)} more "
        "are asked for: raise pool_bytes or lower session_share_bytes"
    )


def _invalid(session: Session, message: Store) -> str:
    """Return the first fault found in the message itself, empty if there is none."""
    return (
        session.phase_problem()
        or session.lane_problem()
        or _order(session, message.entry)
        or _size(session, message.nbytes)
        or session.range_problem(message.segment, message.offset, message.nbytes)
    )


def _repeat_problem(session: Session, message: Store, entry: Entry, chunk: Chunk) -> str:
    """Return why an existing entry cannot be stored again, empty if it can."""
    is_there = entry.block is not None or entry.disk is not None
    if entry.released or (entry.is_begun and not is_there) or not session.cell:
        return _order(session, message.entry)
    if (entry.raw_bytes, entry.codec) != (chunk.nbytes, chunk.codec):
        return f"entry {message.entry} has {entry.raw_bytes} bytes with codec {entry.codec}"
    problem = session.phase_problem() or session.lane_problem()
    if problem or is_there:  # its source is not read, and may be freed already
        return problem
    return session.range_problem(message.segment, message.offset, message.nbytes)


def _order(session: Session, entry: int) -> str:
    if session.last_entry < entry < FIRST_LEASED:
        return ""
    if entry >= FIRST_LEASED:
        return f"entry {entry} is of those that only the daemon numbers, from 2^62 on"
    return f"entry {entry} does not follow entry {session.last_entry}: ids only grow"


def _size(session: Session, nbytes: int) -> str:
    if nbytes <= session.chunk_bytes:
        return ""
    return f"{nbytes} bytes in one entry; the limit is {session.chunk_bytes}: send parts"


def _count(session: Session, limits: Limits) -> str:
    if len(session.entries) < limits.max_entries:
        return ""
    return f"{limits.max_entries} entries are held, the limit: release some first"


def _quota(session: Session, limits: Limits, nbytes: int) -> str:
    if not limits.quota_bytes or session.used_bytes + nbytes <= limits.quota_bytes:
        return ""
    return (
        f"{format_size(session.used_bytes)} of {format_size(limits.quota_bytes)} are used and "
        f"{format_size(nbytes)} more are asked for: raise session_quota_bytes"
    )


def _user_quota(session: Session, limits: Limits, used: int, nbytes: int) -> str:
    if not limits.user_quota_bytes or used + nbytes <= limits.user_quota_bytes:
        return ""
    return (
        f"{format_size(used)} of the {format_size(limits.user_quota_bytes)} of user "
        f"{session.info.uid} are used and {format_size(nbytes)} more are asked for: raise "
        "uid_quota_bytes"
    )
