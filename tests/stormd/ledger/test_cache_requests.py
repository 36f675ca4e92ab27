"""The cache behind the ledger: puts that are complete or nothing, loans, and sessions that end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fake_lane import FakeLane
from support.ledger_bench import a_store

from stormd.cache.items import Cache, Caller
from stormd.ledger.cache_requests import PUT_SECONDS
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import Records
from stormd.ledger.sessions import Limits, SessionInfo
from stormd.memory.arena import Space
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    Admitted,
    CacheCancel,
    CacheCommit,
    CacheDelete,
    CacheFind,
    CacheFound,
    CacheGet,
    CacheList,
    CachePut,
    CacheReady,
    CacheTensor,
    Failed,
    Message,
    Refused,
    Rejected,
    Release,
    Restore,
)

KIB = 1024
POOL, CACHE = 16 * KIB, 32 * KIB
STAGING, PART = 16 * KIB, 8 * KIB
LIMITS = Limits(max_sessions=4, max_entries=6, quota_bytes=KIB, lease_seconds=5.0)
ANNA, BERT = Caller(1001, 100), Caller(1002, 200)


class Fixture:
    """A ledger with a cache and a fake lane."""

    def __init__(self) -> None:
        self.pool = Space(POOL)
        self.space = Space(CACHE, base=POOL)
        self.counters = Counters()
        self.cache = Cache(self.space, self.counters.cache, Records())
        self.ledger = Ledger(self.pool, LIMITS, self.counters, self.cache)
        self.lane = FakeLane(self.ledger)
        self.now = 0.0
        self.numbers = 0

    def open(self, session: int, caller: Caller | None = ANNA, part_bytes: int = PART) -> int:
        info = SessionInfo(session=session, device="cpu", uid=0, pid=session, name="test")
        self.ledger.leases.open(
            info, chunk_bytes=part_bytes, staging_bytes=STAGING, now=self.now, caller=caller
        )
        self.ledger.leases.attach(self.ledger.sessions[session], self.now)
        return session

    def ask(self, session: int, message: Message) -> Any:
        while self.ledger.tidy_cache(self.now):
            self.ledger.assert_invariants()
        self._take(session, 5, message)
        return self.lane.last()

    def _take(self, session: int, request: int, message: Message) -> None:
        record = self.ledger.sessions[session]
        answer = self.ledger.on_request[type(message)](record, request, message, self.now)
        self.lane.take(answer)

    def begin(self, session: int, name: str = "a", nbytes: int = 2 * PART, ttl: float = 0.0) -> Any:
        sizes = {"nbytes": nbytes, "part_bytes": PART, "ttl_seconds": ttl}
        return self.ask(session, CachePut(name=name, dtype="uint8", shape=[nbytes], **sizes))

    def store(self, session: int, nbytes: int = PART) -> Any:
        self.numbers += 1
        message = a_store(self.numbers, nbytes)
        record = self.ledger.sessions[session]
        while self.ledger.make_cache_room(record, message, self.now):
            self.ledger.assert_invariants()
        self._take(session, 7, message)
        return self.lane.last()

    def put(self, session: int, name: str = "a", parts: int = 2, **options: Any) -> Any:
        """Put a tensor of full parts; return the answer to the commit."""
        answer = self.begin(session, name, parts * PART, **options)
        if not isinstance(answer, CacheReady):
            return answer
        entries = []
        for _ in range(parts):
            assert isinstance(self.store(session), Admitted)
            entries.append(self.numbers)
            self.lane.finish(-1, share=0.5)
        return self.ask(session, CacheCommit(entries))

    def restore(self, session: int, entry: int, ticket: int = 1) -> Any:
        message = Restore(ticket=ticket, entry=entry, segment=0, offset=0, nbytes=PART, sequence=0)
        self._take(session, 8, message)
        return self.lane.last()

    def release(self, session: int, *entries: int) -> None:
        self._take(session, 0, Release(list(entries)))

    def end(self, session: int) -> None:
        self.lane.take(self.ledger.leases.end(session, "died"))


@pytest.fixture
def made() -> Any:
    fixture = Fixture()
    fixture.open(1)
    yield fixture
    fixture.ledger.assert_invariants()


# --- putting ------------------------------------------------------------------------------------


def test_what_is_put_or_lent_is_not_counted_as_the_pools(made: Fixture) -> None:
    """The pool's ratio is the raw bytes of what lies in it by its own bytes."""
    made.put(1, parts=1)
    made.begin(1, "b")
    made.store(1)
    made.ask(1, CacheGet("a"))
    assert made.ledger.holdings.entries == 2
    assert made.ledger.holdings.raw_bytes == 0
    made.store(made.open(2, caller=None), 100)
    assert made.ledger.holdings.raw_bytes == 100


def test_a_put_without_a_part_takes_nothing(made: Fixture) -> None:
    for name in "abc":
        made.put(1, name)
    made.open(2)
    assert made.begin(2, "large", nbytes=3 * PART) == CacheReady()
    assert made.counters.cache.evictions == 0
    assert made.space.use().promised == 0
    made.store(2)
    made.lane.finish()
    made.store(2)
    made.lane.finish()
    assert 0 < made.counters.cache.evictions < 3, "each part makes room for itself"


def test_of_two_puts_that_do_not_fit_one_is_told_so(made: Fixture) -> None:
    made.begin(1, nbytes=3 * PART)
    made.begin(made.open(2), "b", nbytes=3 * PART)
    answers = [made.store(session) for session in (1, 2, 1, 2)]
    assert [type(one) for one in answers] == [Admitted, Admitted, Admitted, Rejected]
    rejected = answers[-1]
    assert rejected.reason == "pool_full"
    assert "try again later" in rejected.detail
    made.ask(2, CacheCancel())


def test_a_put_without_parts_is_closed_and_told_of(made: Fixture) -> None:
    made.begin(1, "slow")
    for _ in range(2):  # each part puts the end off
        made.now += PUT_SECONDS
        made.store(1)
        made.lane.take(made.ledger.tick(made.now))
    made.lane.finish()
    assert made.space.use().promised > 0, "it is not too late yet"
    made.now += PUT_SECONDS + 0.1
    made.lane.take(made.ledger.tick(made.now))
    made.ledger.assert_invariants()
    made.lane.finish()
    assert (made.space.use().used, made.space.use().promised) == (0, 0)
    for answer in (made.store(1), made.ask(1, CacheCommit([1, 2]))):
        assert "'slow' ended: no chunk came for 60 s" in answer.detail
    assert made.put(1, "again") == CacheFound(found=True)


def test_a_part_that_fails_can_only_be_given_up(made: Fixture) -> None:
    made.begin(1, nbytes=PART)
    made.store(1)
    made.lane.finish(fail=True)
    assert isinstance(made.lane.last(), Failed)
    refused = made.ask(1, CacheCommit([made.numbers]))
    assert isinstance(refused, Refused)
    made.ask(1, CacheCancel())
    assert (made.space.use().used, made.space.use().promised) == (0, 0)


@pytest.mark.parametrize(
    ("entries", "detail"),
    [
        ([1], "1 entries are no tensor"),
        ([1, 1], "2 entries are no tensor"),
        ([1, 9], "entry 9 does not exist"),
        ([2, 1], "entry 2 has 100 bytes, part 0 has 8192"),
    ],
)
def test_a_commit_is_of_the_tensor_that_was_announced(
    made: Fixture, entries: list[int], detail: str
) -> None:
    made.begin(1, nbytes=PART + 100)
    made.store(1)
    made.lane.finish()
    made.store(1, 100)
    assert "wait for Stored" in made.ask(1, CacheCommit([1, 2])).detail
    made.lane.finish()
    refused = made.ask(1, CacheCommit(entries))
    assert isinstance(refused, Refused)
    assert detail in refused.detail
    assert made.ask(1, CacheCommit([1, 2])) == CacheFound(found=True), "the put was still open"


def test_a_store_without_a_put_or_beyond_it_is_rejected(made: Fixture) -> None:
    rejected = made.store(1)
    assert isinstance(rejected, Rejected)
    assert "CachePut first" in rejected.detail
    made.begin(1, nbytes=PART)
    made.store(1)
    rejected = made.store(1)
    assert isinstance(rejected, Rejected)
    assert "left of what the put asked for" in rejected.detail


def test_what_a_put_must_not_be(made: Fixture) -> None:
    made.open(2, part_bytes=PART // 2)
    refused = made.begin(2)
    assert "the limit is 4096" in refused.detail
    made.begin(1)
    assert "open in this session" in made.begin(1).detail
    assert "raise cache_bytes" in made.begin(made.open(3), nbytes=2 * CACHE).detail


def test_a_session_of_activations_is_told_so(made: Fixture) -> None:
    made.open(2, caller=None)
    for message in (CacheGet("a"), CacheFind("a"), CacheCancel(), CacheList("")):
        refused = made.ask(2, message)
        assert isinstance(refused, Refused)
        assert "Hello" in refused.detail


# --- getting ------------------------------------------------------------------------------------


def test_a_reader_has_limits_too(made: Fixture) -> None:
    made.put(1, parts=2)
    made.open(2, part_bytes=PART // 2)
    assert "came in parts of 8192 bytes" in made.ask(2, CacheGet("a")).detail
    made.open(3)
    for _ in range(3):
        made.ask(3, CacheGet("a"))
    refused = made.ask(3, CacheGet("a"))
    assert refused.kind == "QuotaExceeded"
    assert "6 entries are held and the limit is 6" in refused.detail


# --- anything in any order ----------------------------------------------------------------------


class RequestsMachine(RuleBasedStateMachine):
    """Two cache sessions and one of activations doing anything, dying at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Fixture()
        self.made.ledger.limit(
            Limits(max_sessions=8, max_entries=40, quota_bytes=0, lease_seconds=1e9)
        )
        self.next_session = 0
        self.alive: list[int] = []
        self.stored: dict[int, list[int]] = {}
        self.lent: dict[int, list[int]] = {}
        for caller in (ANNA, BERT, None):
            self.open(caller)

    def open(self, caller: Caller | None) -> None:
        self.next_session += 1
        self.alive.append(self.made.open(self.next_session, caller))
        self.stored[self.next_session] = []
        self.lent[self.next_session] = []

    @rule(at=st.integers(0, 2), name=st.sampled_from("ab"), parts=st.integers(0, 3))
    def begin(self, at: int, name: str, parts: int) -> None:
        answer = self.made.begin(self.alive[at], name, parts * PART, ttl=at * 1.0)
        if isinstance(answer, CacheReady):
            self.stored[self.alive[at]] = []

    @rule(at=st.integers(0, 2))
    def store(self, at: int) -> None:
        if isinstance(self.made.store(self.alive[at]), Admitted):
            self.stored[self.alive[at]].append(self.made.numbers)

    @precondition(lambda self: self.made.lane.jobs)
    @rule(fail=st.booleans(), share=st.sampled_from([0.1, 1.0]))
    def finish(self, fail: bool, share: float) -> None:
        self.made.lane.finish(share=share, fail=fail)

    @rule(at=st.integers(0, 2))
    def commit(self, at: int) -> None:
        self.made.ask(self.alive[at], CacheCommit(self.stored[self.alive[at]]))

    @rule(at=st.integers(0, 2))
    def cancel(self, at: int) -> None:
        self.made.ask(self.alive[at], CacheCancel())

    @rule(at=st.integers(0, 2), name=st.sampled_from("ab"))
    def get(self, at: int, name: str) -> None:
        got = self.made.ask(self.alive[at], CacheGet(name))
        if isinstance(got, CacheTensor):
            parts = got.nbytes // PART
            self.lent[self.alive[at]] += range(got.first_entry, got.first_entry + parts)

    @rule(at=st.integers(0, 2), ticket=st.integers(1, 3))
    def restore(self, at: int, ticket: int) -> None:
        for entry in self.lent[self.alive[at]][:1]:
            self.made.restore(self.alive[at], entry, ticket)

    @rule(at=st.integers(0, 2))
    def release(self, at: int) -> None:
        session = self.alive[at]
        self.made.release(session, *self.lent[session], *self.stored[session])
        self.lent[session].clear()

    @rule(at=st.integers(0, 2), name=st.sampled_from("ab"))
    def delete(self, at: int, name: str) -> None:
        self.made.ask(self.alive[at], CacheDelete(name))

    @rule(at=st.integers(0, 2))
    def die(self, at: int) -> None:
        session = self.alive.pop(at)
        self.made.end(session)
        self.made.ledger.assert_invariants()
        self.made.lane.detach(session)
        self.open((ANNA, BERT, None)[at % 3])

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.made.now += seconds
        self.made.lane.take(self.made.ledger.tick(self.made.now))

    @invariant()
    def holds_together(self) -> None:
        self.made.ledger.assert_invariants()

    def teardown(self) -> None:
        for session in self.alive:
            self.made.end(session)
            self.made.lane.detach(session)
        self.made.ledger.assert_invariants()
        assert self.made.space.use().used == self.made.cache.held_bytes()
        assert (self.made.pool.use().used, self.made.space.use().promised) == (0, 0)


TestRequestsMachine = RequestsMachine.TestCase
