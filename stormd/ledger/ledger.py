"""Who holds what: the pure state machine over sessions, entries, leases and quotas.

An event goes in, instructions come out, and nothing else happens: this code uses no socket, clock
or memory. Each kind of event has its own module, and all modules share one State:

- leases.py: a session's life, from its opening until it is gone
- stores.py, restores.py, segments.py: a client's requests, and the lanes' results of each
- cache_requests.py: the requests that only sessions for the shared cache may send
- spills.py: what is written to the tier on disk and read back (spill_moves.py: when;
  spill_order.py: which entries)
- holdings.py: how holdings add up

If the pool lacks space that it will have once it has grown, the answer is Wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stormd.cache.items import Cache
from stormd.ledger.cache_requests import CACHE_REQUESTS, CacheRequests
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import (
    Detached,
    Instruction,
    RestoreDone,
    RestoreFailed,
    Result,
    SegmentMapped,
    SegmentRefused,
    SpillDone,
    SpillFailed,
    StoreDone,
    StoreFailed,
    Wait,
)
from stormd.ledger.holdings import Holdings, State, assert_session, assert_space
from stormd.ledger.leases import Leases
from stormd.ledger.on_disk import Disk
from stormd.ledger.records import Records
from stormd.ledger.restores import Restores
from stormd.ledger.segments import Segments
from stormd.ledger.sessions import Limits, Phase, Session
from stormd.ledger.spills import Spills
from stormd.ledger.stores import Stores
from stormd.memory.arena import Space
from stormd.memory.shared_rows import UserTotals
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    CachePut,
    ListEntries,
    MapPiece,
    MapSegment,
    Message,
    PassOver,
    PlanLearned,
    Refused,
    Release,
    ReserveRange,
    Restore,
    RestoreParts,
    Store,
    UnmapSegment,
)

__all__ = ["Ledger"]

OnRequest = Callable[[Session, int, Any, float], list[Instruction]]
"""Takes a session, the request's number, the message, and the time."""

OnResults = Callable[[Session, Any, float], list[Instruction]]
"""Takes results of one kind, all of the same session, and the time."""


class Ledger:
    """The state of all sessions. Times are in seconds of any clock that never goes back.

    `on_request` has the handler of each message class, `on_results` that of each result class. They
    return the instructions to carry out. All content of a message comes from a client and is
    checked. `cache` is None if the daemon keeps no cache. With a `disk`, entries may be written
    there.
    `records` has the state that outlives the process; without it nothing does. `totals` has the
    holdings of other processes that serve beside this one.
    """

    def __init__(
        self,
        space: Space,
        limits: Limits,
        counters: Counters,
        cache: Cache | None = None,
        records: Records | None = None,
        *,
        disk: Disk | None = None,
        totals: UserTotals | None = None,
    ) -> None:
        holdings = Holdings(records or Records(), totals)
        self._state = State(space, limits, counters, holdings)
        self.holdings = self._state.holdings
        self.holdings.shares.set_share(limits.share_bytes, ())
        self._cache = cache
        self._requests = None if cache is None else CacheRequests(cache, self._state)
        restores = Restores(self._state)
        self.leases = Leases(self._state, cache)
        self._disk = disk
        self.spills = None if disk is None else Spills(self._state, restores, disk)
        self._stores = Stores(self._state, restores, self._requests, self.spills)
        segments = Segments(restores)
        self.on_request: Mapping[type[Message], OnRequest] = {
            Store: self._stores.store,
            Restore: restores.restore,
            RestoreParts: restores.restore_parts,
            Release: self._stores.release,
            MapSegment: segments.map,
            ReserveRange: segments.map,
            MapPiece: segments.map_piece,
            UnmapSegment: segments.unmap,
            PlanLearned: self._learned,
            ListEntries: self._stores.list_entries,
            PassOver: self._stores.pass_over,
            **dict.fromkeys(CACHE_REQUESTS, self._cached),
        }
        self.on_results: Mapping[type[Result], OnResults] = {
            StoreDone: self._stores.done,
            StoreFailed: self._stores.failed,
            RestoreDone: restores.done,
            RestoreFailed: restores.failed,
            SegmentMapped: segments.tried,
            SegmentRefused: segments.tried,
            Detached: self.leases.detached,
            SpillDone: self._moved,
            SpillFailed: self._moved,
        }

    def limit(self, limits: Limits) -> None:
        """Apply new limits to later requests; what sessions hold now is not affected."""
        self._state.limits = limits
        pool_users = (one.used_bytes for one in self._records() if one.cache is None)
        self.holdings.shares.set_share(limits.share_bytes, pool_users)

    def drain(self) -> None:
        """Accept no new session and no new entry from now on."""
        self._state.is_draining = True

    def tick(self, now: float) -> list[Instruction]:
        """Handle expired tensors, puts and leases; to be called about twice a second."""
        if self._requests is not None:
            self.tidy_cache(now)
            for record in self._records():
                self._requests.close_idle(record, now)
        return self.leases.tick(now)

    # --- the shared cache -------------------------------------------------------------------

    def make_cache_room(self, record: Session, message: Store, now: float) -> bool:
        """Drop a little before a chunk of a put is stored; return whether to call this again."""
        if self._requests is None or record.phase is not Phase.ATTACHED:
            return False
        return self._requests.make_room(record, blob_bound(message.nbytes), now)

    def tidy_cache(self, now: float) -> bool:
        """Drop a few expired tensors before the cache is asked; return whether to call it again."""
        return self._cache is not None and self._cache.tidy(now)

    def _cached(
        self, record: Session, request: int, message: Message, now: float
    ) -> list[Instruction]:
        """Answer a cache request; refuse it if the session is not for the cache."""
        answer: Message
        if record.cache is None or self._requests is None:
            answer = Refused(
                "UsageError", "this session's Hello did not say that it is for the cache"
            )
        elif isinstance(message, CachePut) and self._stores.should_wait(
            record, self._requests.space.capacity, now
        ):  # the first put waits for all of the cache's memory
            return [Wait(record.info.session)]
        else:
            answer = self._requests.answer(record, message, now)
        return [record.reply(request, answer)]

    # --- the tier on disk -------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether the ledger accepts nothing new."""
        return self._state.is_draining

    @property
    def is_waited_for(self) -> bool:
        """Whether a store waits for the disk, and so for any space that is freed."""
        return self.spills is not None and self.spills.is_waited_for

    def _moved(self, record: Session, results: Any, now: float) -> list[Instruction]:
        """Take in results of the tier; an ending session may have waited only for them."""
        assert self.spills is not None
        instructions = self.spills.moved(record, results, now)
        if record.phase is Phase.ENDING:
            instructions += self.leases.remove_if_done(record)
        return instructions

    # --- what the operator sees -------------------------------------------------------------

    def _learned(
        self, record: Session, request: int, message: PlanLearned, _now: float
    ) -> list[Instruction]:
        """Note the trainer's description of its steps; it replaces the session's earlier one.

        It is for operators only: nothing is granted or refused because of it.
        """
        if record.phase is not Phase.ATTACHED or record.cache or not record.info.has_lane:
            detail = "a plan is of a session that stores what autograd saves, and this is none"
            return [record.reply(request, Refused("UsageError", detail))]
        record.plan = message
        return []

    @property
    def sessions(self) -> Mapping[int, Session]:
        """All sessions that are not gone, by id."""
        return self._state.sessions

    def sessions_status(self) -> list[dict[str, Any]]:
        """Return all sessions as `stormd status` shows them."""
        spills = self.spills
        return [
            record.as_status()
            | {"spilled_bytes": 0 if spills is None else spills.spilled_bytes(session)}
            for session, record in self._state.sessions.items()
        ]

    def assert_invariants(self) -> None:
        """Raise AssertionError if the ledger contradicts itself or the arena: for tests."""
        records, space, holdings = self._records(), self._state.space, self.holdings
        self.leases.assert_invariants()
        entries = [entry for record in records for entry in record.entries.values()]
        assert holdings.entries == len(entries)
        held = 0 if self._disk is None else self._disk.held_bytes
        assert_space(space, [entry for entry in entries if entry.space is space], held=held)
        if self.spills is not None:
            self.spills.assert_invariants()
        if self._requests is not None:
            self._requests.assert_invariants(records)
        for record in records:
            assert_session(record)
        pool_users = [record for record in records if record.cache is None]
        in_pool = [entry for record in pool_users for entry in record.entries.values()]
        assert holdings.raw_bytes == sum(entry.raw_bytes for entry in in_pool)
        holdings.shares.assert_invariants(
            [(record.info.uid, record.used_bytes) for record in pool_users]
        )

    def _records(self) -> list[Session]:
        return list(self._state.sessions.values())
