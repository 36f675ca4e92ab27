"""The shared cache: whose names, for how long, what goes first, and who may still read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stormd.cache import items as cache_module
from stormd.cache.items import FREED_AT_ONCE, Cache, CacheChunk, Caller, Item, Label, Loan
from stormd.ledger.records import Records
from stormd.memory.arena import GRANULE, Space
from stormd.monitoring.counters import CacheCounts

CAPACITY = 16 * GRANULE
ANNA, BERT, MATE = Caller(1001, 100), Caller(1002, 200), Caller(1003, 100)


class Fixture:
    """A cache, and puts of one part each."""

    def __init__(self) -> None:
        self.space = Space(CAPACITY, base=4 * GRANULE)
        self.counts = CacheCounts()
        self.cache = Cache(self.space, self.counts, Records())
        self.now = 0.0

    def put(
        self,
        name: str,
        granules: int = 4,
        *,
        caller: Caller = ANNA,
        ttl: float = math.inf,
        parts: int = 1,
    ) -> Item | None:
        nbytes = granules * GRANULE
        if not self.promise(parts * nbytes, caller):
            return None
        placed = [
            CacheChunk(block=self.space.place(nbytes, nbytes), raw_bytes=nbytes, codec="raw")
            for _ in range(parts)
        ]
        label = Label(
            name=name, dtype="uint8", shape=(nbytes,), nbytes=parts * nbytes, chunk_bytes=nbytes
        )
        return self.cache.put(label, caller, tuple(placed), self.now + ttl)

    def promise(self, nbytes: int, caller: Caller = ANNA, putting: int = 0) -> bool:
        """Have room made and promised; False, and nothing was dropped, where there is none."""
        evictions = self.counts.evictions
        while self.cache.make_room(nbytes, caller, putting, self.now):
            pass
        promised = self.space.promise(nbytes)
        assert promised or self.counts.evictions == evictions
        return promised

    def find(self, name: str, caller: Caller = ANNA) -> Item | None:
        return self.cache.find(name, caller, self.now)

    def held(self, *names: str) -> list[str]:
        return [name for name in names if self.find(name) is not None]


@pytest.fixture
def made() -> Any:
    fixture = Fixture()
    yield fixture
    fixture.cache.assert_invariants()


# --- names --------------------------------------------------------------------------------------


def test_a_group_reads_what_its_members_put_and_nobody_else_does(made: Fixture) -> None:
    item = made.put("a", caller=ANNA)
    assert made.find("a", MATE) is item
    assert made.find("a", Caller(ANNA.uid, 777)) is item, "its own under every group"
    assert made.find("a", BERT) is None
    assert made.cache.names(MATE, "", 9) == (["a"], True)
    assert made.cache.names(BERT, "", 9) == ([], True)


def test_names_are_a_users_own_and_come_before_newer_ones_of_the_group(made: Fixture) -> None:
    theirs, mine = made.put("a", caller=BERT), made.put("a", caller=ANNA)
    assert made.find("a", BERT) is theirs
    assert not made.cache.delete("a", MATE, 0.0), "only its owner deletes"
    assert made.find("a", MATE) is mine
    newer = made.put("a", caller=MATE)
    assert made.find("a", ANNA) is mine
    assert made.find("a", Caller(1004, 100)) is newer


# --- room ---------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_makes_room(made: Fixture) -> None:
    for name in ("a", "b", "c", "d"):
        made.put(name)
    item = made.find("a")
    assert item is not None
    for loan in made.cache.lend(item):
        loan.end()
    made.put("e")
    assert made.held("a", "b", "c", "d", "e") == ["a", "c", "d", "e"]
    assert made.counts.evictions == 1


def test_what_is_read_is_not_evicted_and_a_put_that_needs_it_is_refused(made: Fixture) -> None:
    item = made.put("a", 12)
    assert item is not None
    (loan,) = made.cache.lend(item)
    problem = made.cache.shortage(8 * GRANULE)
    assert problem is not None
    assert "try again later" in problem
    assert not made.promise(8 * GRANULE)
    loan.end()
    assert made.cache.shortage(8 * GRANULE) is None
    assert made.promise(8 * GRANULE)
    made.space.withdraw(8 * GRANULE)


def test_room_is_made_by_the_user_who_holds_most(made: Fixture) -> None:
    for name in ("a", "b", "c"):
        made.put(name, caller=ANNA)
    made.put("d", caller=BERT)
    made.put("e", caller=BERT)
    assert made.held("a", "b", "c") == ["b", "c"], "Anna had more"
    made.put("f", caller=BERT)
    assert made.find("d", BERT) is None, "now Bert has as much, and makes room for himself"
    assert made.held("b", "c") == ["b", "c"]
    made.cache.assert_invariants()


def test_one_who_reads_all_that_is_its_own_takes_nothing_of_who_holds_less(made: Fixture) -> None:
    item = made.put("a", 12, caller=BERT)
    made.put("b", caller=ANNA)
    assert item is not None
    (loan,) = made.cache.lend(item)
    assert not made.promise(4 * GRANULE, BERT)
    assert made.held("b") == ["b"]
    loan.end()


def test_nothing_is_dropped_for_a_put_that_would_take_of_one_who_then_holds_less(
    made: Fixture,
) -> None:
    made.put("first", 2, caller=ANNA)
    made.put("second", 3, caller=ANNA)
    made.put("own", 4, caller=BERT)
    assert not made.promise(16 * GRANULE, BERT), "without the first, Anna would hold less than he"
    assert made.held("first", "second") == ["first", "second"]
    assert made.find("own", BERT) is not None
    assert made.promise(13 * GRANULE, BERT), "the first and his own are enough"
    assert made.held("first", "second") == ["second"]
    made.space.withdraw(13 * GRANULE)


def test_of_many_tensors_the_user_who_has_most_loses_one(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of no bytes take a place in the table all the same."""
    monkeypatch.setattr(cache_module, "MAX_ITEMS", 4)
    made.put("theirs", 1, caller=BERT)
    for name in "abcde":
        made.put(name, parts=0)
    assert made.find("theirs", BERT) is not None
    assert made.held(*"abcde") == ["c", "d", "e"]


def test_tensors_that_are_read_and_so_not_dropped_are_limited_too(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_ITEMS", 3)
    loans: list[Loan] = []
    for _ in range(3):  # each put takes the name from one that is being read
        item = made.put("a", 1)
        assert item is not None
        loans += made.cache.lend(item)
    problem = made.cache.shortage(1)
    assert problem == "3 tensors are being read at this moment, the limit: try again later"
    loans.pop().end()
    assert made.cache.shortage(1) is None
    for loan in loans:
        loan.end()


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "replaced", "expired", "damaged"])
def test_whoever_reads_finishes(made: Fixture, how: str) -> None:
    item = made.put("a", 2, ttl=5.0, parts=2)
    assert item is not None
    loans = made.cache.lend(item)
    if how == "deleted":
        made.cache.delete("a", ANNA, 0.0)
    elif how == "replaced":
        made.put("a", 0, parts=0)
    elif how == "expired":
        made.now = 5.0
        assert made.cache.tidy(made.now)
    else:
        loans[0].drop_damaged()
        loans[1].drop_damaged()
    assert made.find("a") is not item
    made.cache.assert_invariants()
    assert made.space.use().used == 4 * GRANULE
    loans[0].end()
    assert made.space.use().used == 4 * GRANULE, "one part is still being read"
    loans[1].end()
    assert made.space.use().used == 0


# --- time ---------------------------------------------------------------------------------------


def test_a_tensor_outlives_its_session_but_not_its_time(made: Fixture) -> None:
    made.put("short", ttl=2.0)
    made.put("long", ttl=3.0)
    made.put("for ever")
    made.now = 1.9
    assert made.held("short", "long", "for ever") == ["short", "long", "for ever"]
    made.now = 2.0
    assert made.held("short", "long", "for ever") == ["long", "for ever"]
    made.now = 1e9
    assert made.cache.tidy(made.now)
    assert made.held("long", "for ever") == ["for ever"]
    assert made.counts.expirations == 2


def test_what_expires_at_once_is_dropped_a_little_at_a_time(made: Fixture) -> None:
    made.cache.space = made.space = Space(1000 * GRANULE)
    for number in range(3 * FREED_AT_ONCE):
        made.put(str(number), 1, ttl=1.0)
    made.now = 1.0
    assert made.find("0") is None, "whether it was dropped yet or not"
    assert not made.cache.delete("1", ANNA, made.now)
    for turn in range(1, 4):
        assert made.cache.tidy(made.now)
        assert made.counts.expirations == turn * FREED_AT_ONCE
    assert not made.cache.tidy(made.now)
    assert made.space.use().used == 0


def test_the_parts_of_a_large_tensor_are_given_back_a_little_at_a_time(made: Fixture) -> None:
    made.cache.space = made.space = Space(1000 * GRANULE)
    parts = 2 * FREED_AT_ONCE + 1
    made.put("a", 1, parts=parts)
    assert made.cache.delete("a", ANNA, 0.0)
    for left in (parts, parts - FREED_AT_ONCE, 1):
        assert made.space.use().used == made.cache.held_bytes() == left * GRANULE
        assert made.cache.has_garbage
        assert made.cache.tidy(0.0)
    assert not made.cache.has_garbage
    assert made.space.use().used == 0


# --- anything in any order ----------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Puts, reads and time in any order, against a model of what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Fixture()
        self.loans: list[Loan] = []
        self.promised: list[int] = []

    @rule(
        name=st.sampled_from("abc"),
        granules=st.integers(1, 5),
        parts=st.integers(0, 3),
        caller=st.sampled_from([ANNA, BERT, MATE]),
        ttl=st.sampled_from([1.0, 3.0, math.inf]),
    )
    def put(self, name: str, granules: int, parts: int, caller: Caller, ttl: float) -> None:
        item = self.made.put(name, granules, parts=parts, caller=caller, ttl=ttl)
        if item is not None:
            assert self.made.find(name, caller) is item

    @rule(granules=st.integers(1, 6))
    def begin_a_put(self, granules: int) -> None:
        if self.made.promise(granules * GRANULE):
            self.promised.append(granules * GRANULE)

    @precondition(lambda self: self.promised)
    @rule()
    def give_a_put_up(self) -> None:
        self.made.space.withdraw(self.promised.pop())

    @rule(name=st.sampled_from("abc"), caller=st.sampled_from([ANNA, BERT, MATE]))
    def read(self, name: str, caller: Caller) -> None:
        item = self.made.find(name, caller)
        if item is not None:
            assert caller.uid == item.owner.uid or caller.gid == item.owner.gid
            assert item.expires > self.made.now
            self.loans += self.made.cache.lend(item)

    @precondition(lambda self: self.loans)
    @rule(damaged=st.booleans(), at=st.integers(0, 1000))
    def end_a_loan(self, damaged: bool, at: int) -> None:
        loan = self.loans.pop(at % len(self.loans))
        if damaged:
            loan.drop_damaged()
        loan.end()

    @rule(name=st.sampled_from("abc"), caller=st.sampled_from([ANNA, BERT, MATE]))
    def delete(self, name: str, caller: Caller) -> None:
        self.made.cache.delete(name, caller, self.made.now)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.made.now += seconds
        self.made.cache.tidy(self.made.now)

    @invariant()
    def holds_together(self) -> None:
        self.made.cache.assert_invariants()
        use = self.made.space.use()
        assert use.used == self.made.cache.held_bytes()
        assert use.promised == sum(self.promised)

    def teardown(self) -> None:
        for loan in self.loans:
            loan.end()
        for name in "abc":
            for caller in (ANNA, BERT, MATE):
                self.made.cache.delete(name, caller, self.made.now)
        assert self.made.space.use().used == 0


TestCacheMachine = CacheMachine.TestCase
