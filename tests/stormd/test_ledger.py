"""The ledger: events in, instructions out, and nothing of anybody left at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fake_lane import FakeLane

from stormd.arena import Space, granules
from stormd.counters import Counters
from stormd.instructions import Probe, Skip, Unmap
from stormd.lanes import blob_bound
from stormd.ledger import ATTACH_SECONDS, Ledger
from stormd.protocol import (
    Admitted,
    Failed,
    Mapped,
    MapSegment,
    Refused,
    Rejected,
    Release,
    Restore,
    Restored,
    Store,
    Stored,
    UnmapSegment,
)
from stormd.records import Limits, SessionInfo

KIB = 1024
CAPACITY = 64 * KIB
STAGING = 16 * KIB
SHARE = 16 * KIB
LIMITS = Limits(max_sessions=3, max_entries=6, quota_bytes=40 * KIB, lease_seconds=5.0)


class Fixture:
    """A ledger with a fake lane, and counters beside it."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.space = Space(CAPACITY)
        self.counters = Counters()
        self.ledger = Ledger(self.space, limits, self.counters)
        self.lane = FakeLane(self.ledger)

    def open(self, session: int = 1, *, attach: bool = True) -> int:
        info = SessionInfo(session, "cpu", session % 2, 100 + session, "test")
        self.ledger.open(info, part_bytes=8 * KIB, staging_bytes=STAGING, now=0.0)
        if attach:
            self.ledger.attach(session, 0.0)
        return session

    def store(self, entry: int, nbytes: int = KIB, *, session: int = 1, sequence: int = 0) -> None:
        message = Store(entry, 0, 0, nbytes, "uint8", "raw", sequence)
        self.lane.take(self.ledger.store(session, 7, message, 0.0))

    def restore(self, entry: int, nbytes: int = KIB, *, ticket: int = 1, session: int = 1) -> None:
        message = Restore(ticket, entry, 0, 0, nbytes, 0)
        self.lane.take(self.ledger.restore(session, 8, message, 0.0))

    def release(self, *entries: int, session: int = 1) -> None:
        self.lane.take(self.ledger.release(session, Release(list(entries))))

    def end(self, session: int = 1) -> None:
        self.lane.take(self.ledger.end(session, "died"))

    @property
    def used(self) -> int:
        return self.space.use().used

    @property
    def promised(self) -> int:
        return self.space.use().promised


@pytest.fixture
def made() -> Fixture:
    fixture = Fixture()
    fixture.open()
    return fixture


# --- an entry's life ----------------------------------------------------------------------------


def test_a_store_is_admitted_promised_placed_and_said(made: Fixture) -> None:
    made.store(1)
    assert made.lane.replies == [(1, 7, Admitted(1))]
    assert (made.used, made.promised) == (0, 1280)
    made.lane.finish(share=0.5)
    assert made.lane.replies[1:] == [(1, 0, Stored(1, 640, "raw"))]
    assert (made.used, made.promised) == (768, 0)
    made.ledger.assert_invariants()


def test_a_restore_waits_for_its_store(made: Fixture) -> None:
    made.store(1)
    made.restore(1)
    assert len(made.lane.jobs) == 1
    made.lane.finish()
    made.lane.finish()
    assert made.lane.replies[-1] == (1, 8, Restored(1))
    made.ledger.assert_invariants()


def test_restores_begin_in_the_order_of_asking(made: Fixture) -> None:
    """The one that was encoded first must not take the link from what is needed before it."""
    for entry in (1, 2, 3):
        made.store(entry)
    for entry in (3, 2, 1):
        made.restore(entry, ticket=entry)
        made.ledger.assert_invariants()
    made.lane.finish()
    made.lane.finish()
    assert [job.entry for job in made.lane.jobs] == [3], "its store: it is asked for first"
    made.lane.finish()
    assert [job.entry for job in made.lane.jobs] == [3, 2, 1]
    for _ in range(3):
        made.lane.finish()
    made.ledger.assert_invariants()


def test_a_store_that_fails_lets_those_behind_it_begin(made: Fixture) -> None:
    made.store(1)
    made.store(2)
    made.restore(1, ticket=1)
    made.restore(2, ticket=2)
    made.lane.finish(1)
    made.lane.finish(0, fail=True)
    assert [job.entry for job in made.lane.jobs] == [2]
    made.ledger.assert_invariants()
    made.lane.finish()
    assert made.lane.last() == Restored(2)


def test_a_release_waits_for_what_uses_the_entry(made: Fixture) -> None:
    made.store(1)
    made.restore(1)
    made.release(1)
    assert made.ledger.entries == 1
    made.lane.finish()
    assert made.used, "a restore that was asked for before the release is served"
    made.lane.finish()
    assert isinstance(made.lane.last(), Restored)
    assert (made.used, made.ledger.entries) == (0, 0)
    made.ledger.assert_invariants()


def test_a_released_entry_is_gone_for_its_client_at_once(made: Fixture) -> None:
    made.store(1)
    made.release(1)
    made.restore(1)
    failed = made.lane.last()
    assert isinstance(failed, Failed)
    assert failed.kind == "ActivationLost"
    made.lane.finish()
    assert made.used == 0


def test_a_failed_store_fails_what_waits_for_it(made: Fixture) -> None:
    made.store(1)
    made.restore(1, ticket=5)
    made.lane.finish(fail=True)
    failures = [reply for reply in made.lane.replies if isinstance(reply[2], Failed)]
    assert [(request, reply.ticket) for _, request, reply in failures] == [(0, 0), (8, 5)]
    assert (made.used, made.promised, made.ledger.entries) == (0, 0, 0)
    made.ledger.assert_invariants()


def test_a_damaged_blob_keeps_its_entry_and_is_counted(made: Fixture) -> None:
    made.store(1)
    made.lane.finish()
    made.restore(1)
    made.lane.finish(fail=True)
    assert made.lane.last() == Failed(1, 1, "CorruptBlob", "damaged")
    assert made.counters.corrupt == 1
    assert made.ledger.entries == 1


def test_a_rejected_store_has_its_sequence_passed_over(made: Fixture) -> None:
    made.store(1, 9 * KIB, sequence=4)
    assert isinstance(made.lane.last(), Rejected)
    assert made.lane.others == [Skip(1, 4)]


def test_a_full_pool_rejects_until_there_is_room(made: Fixture) -> None:
    made.open(2)
    for entry in range(1, 5):
        made.store(entry, 8 * KIB)
    for entry in range(1, 4):
        made.store(entry, 8 * KIB, session=2)
    made.store(4, 8 * KIB, session=2)
    rejected = made.lane.last()
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "pool_full"
    assert made.counters.rejected["pool_full"] == 1
    made.lane.finish(share=0.1)
    made.store(5, 8 * KIB, session=2)
    assert isinstance(made.lane.last(), Admitted)
    made.ledger.assert_invariants()


# --- sessions -----------------------------------------------------------------------------------


def test_a_session_frees_all_it_held_when_its_lane_lets_go(made: Fixture) -> None:
    for entry in (1, 2, 3):
        made.store(entry)
    made.lane.finish()
    made.restore(1)
    made.end()
    assert made.used == 1280, "entry 1 is being read"
    made.ledger.assert_invariants()
    made.lane.detach(1)
    assert (made.used, made.promised, made.ledger.entries) == (0, 0, 0)
    assert made.lane.ended == [1]
    assert made.counters.ended["died"] == 1


def test_ending_twice_is_ending_once(made: Fixture) -> None:
    made.end()
    assert made.ledger.end(1, "goodbye") == []
    made.lane.detach(1)
    assert made.counters.deaths == 1


def test_a_late_result_of_an_ending_session_is_freed_and_not_answered(made: Fixture) -> None:
    made.store(1)
    made.end()
    replies = len(made.lane.replies)
    made.lane.finish()
    assert (made.used, len(made.lane.replies)) == (0, replies)


def test_a_session_that_never_attaches_ends(made: Fixture) -> None:
    made.open(2, attach=False)
    made.lane.take(made.ledger.tick(ATTACH_SECONDS))
    assert made.lane.detaching == set()
    made.ledger.touch(1, ATTACH_SECONDS)
    made.lane.take(made.ledger.tick(ATTACH_SECONDS + 0.1))
    assert made.lane.detaching == {2}


def test_a_silent_session_is_probed_once_a_lease(made: Fixture) -> None:
    assert made.ledger.tick(5.0) == []
    assert made.ledger.tick(5.1) == [Probe(1)]
    assert made.ledger.tick(10.0) == []
    assert made.ledger.tick(10.2) == [Probe(1)]


def test_sessions_are_limited_and_none_opens_while_draining(made: Fixture) -> None:
    made.open(2)
    made.open(3)
    refusal = made.ledger.refusal()
    assert refusal is not None
    assert refusal.kind == "QuotaExceeded"
    made.ledger.drain()
    refusal = made.ledger.refusal()
    assert refusal is not None
    assert refusal.kind == "DaemonLost"
    made.store(1)
    rejected = made.lane.last()
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "draining"


# --- segments -----------------------------------------------------------------------------------


def test_a_segment_may_be_named_only_while_it_is_mapped(made: Fixture) -> None:
    def store(entry: int) -> None:
        message = Store(entry, 4, 0, KIB, "uint8", "raw", 0)
        made.lane.take(made.ledger.store(1, 0, message, 0.0))

    made.lane.take(made.ledger.map_segment(1, 3, MapSegment(4, b"handle", 1, KIB)))
    store(1)
    assert isinstance(made.lane.last(), Rejected)
    made.lane.finish()
    assert made.lane.replies[-1] == (1, 3, Mapped(4))
    store(1)
    assert isinstance(made.lane.last(), Admitted)
    made.lane.take(made.ledger.unmap_segment(1, 0, UnmapSegment(4)))
    assert made.lane.others[-1] == Unmap(1, 4)
    store(2)
    assert isinstance(made.lane.last(), Rejected)


def test_a_segment_that_cannot_be_mapped_is_refused(made: Fixture) -> None:
    made.lane.take(made.ledger.map_segment(1, 3, MapSegment(4, b"handle", 1, KIB)))
    made.lane.finish(fail=True)
    assert made.lane.replies[-1] == (1, 3, Refused("UsageError", "no such handle"))
    made.lane.take(made.ledger.map_segment(1, 3, MapSegment(0, b"handle", 1, KIB)))
    assert isinstance(made.lane.last(), Refused)
    made.lane.take(made.ledger.unmap_segment(1, 3, UnmapSegment(9)))
    assert isinstance(made.lane.last(), Refused)


# --- shares and users' quotas -------------------------------------------------------------------


def test_a_share_is_there_however_full_the_pool_is() -> None:
    made = Fixture(replace(LIMITS, quota_bytes=0, share_bytes=SHARE, max_entries=99))
    greedy, modest = made.open(1), made.open(2)
    for entry in range(1, 20):
        made.store(entry, 4 * KIB, session=greedy)
    last = made.lane.last()
    assert isinstance(last, Rejected)
    assert (last.reason, "session_share_bytes" in last.detail) == ("pool_full", True)
    assert made.ledger._sessions[greedy].used_bytes <= CAPACITY - 2 * SHARE
    for entry in range(1, 4):
        made.store(entry, 4 * KIB, session=modest)
        assert isinstance(made.lane.last(), Admitted)


def test_a_users_sessions_share_a_quota() -> None:
    made = Fixture(replace(LIMITS, user_quota_bytes=12 * KIB))
    made.open(1), made.open(2), made.open(3)
    made.store(1, 8 * KIB, session=1)
    made.store(1, 8 * KIB, session=3)  # of the same user
    last = made.lane.last()
    assert isinstance(last, Rejected)
    assert (last.reason, "uid_quota_bytes" in last.detail) == ("quota", True)
    made.store(1, 8 * KIB, session=2)
    assert isinstance(made.lane.last(), Admitted)


def test_shares_may_change_while_sessions_hold_more() -> None:
    made = Fixture(replace(LIMITS, quota_bytes=0))
    made.open(1), made.open(2)
    for entry in range(1, 7):
        made.store(entry, 8 * KIB, session=1)
    made.ledger.limit(replace(LIMITS, share_bytes=SHARE))
    made.ledger.assert_invariants()
    made.store(1, 4 * KIB, session=2)
    assert isinstance(made.lane.last(), Admitted)


# --- any order of events ------------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Three sessions that do anything in any order, over a lane that answers at any time."""

    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.made = Fixture(self.limits)
        self.next_session = 1
        self.next_entry = 1
        self.next_ticket = 1

    @property
    def living(self) -> list[int]:
        return [one for one in self.made.ledger.sessions if one not in self.made.lane.detaching]

    @precondition(lambda self: self.made.ledger.refusal() is None)
    @rule(attach=st.booleans())
    def open(self, attach: bool) -> None:
        self.made.open(self.next_session, attach=attach)
        self.next_session += 1

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 10 * KIB))
    def store(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        self.made.store(self.next_entry, nbytes, session=session)
        assert isinstance(self.made.lane.last(), Admitted | Rejected)
        self.next_entry += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def restore(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger._sessions[session]
        entry = data.draw(st.sampled_from([*record.entries, 999]))
        known = record.entries.get(entry)
        size = known.raw_bytes if known else nbytes
        self.made.restore(entry, size, ticket=self.next_ticket, session=session)
        self.next_ticket += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        entries = [*self.made.ledger._sessions[session].entries, 999]
        chosen = data.draw(st.lists(st.sampled_from(entries), max_size=3))
        self.made.release(*chosen, session=session)

    @precondition(lambda self: self.made.lane.jobs)
    @rule(data=st.data(), share=st.floats(0.01, 1.0), fail=st.booleans())
    def finish(self, data: st.DataObject, share: float, fail: bool) -> None:
        index = data.draw(st.integers(0, len(self.made.lane.jobs) - 1))
        self.made.lane.finish(index, share=share, fail=fail)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.made.end(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.made.lane.detaching)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.made.lane.detach(data.draw(st.sampled_from(sorted(self.made.lane.detaching))))

    @rule(now=st.floats(0.0, 6.0))
    def tick(self, now: float) -> None:
        self.made.lane.take(self.made.ledger.tick(now))

    @invariant()
    def holds(self) -> None:
        self.made.ledger.assert_invariants()

    def teardown(self) -> None:
        for session in self.living:
            self.made.end(session)
        for session in sorted(self.made.lane.detaching):
            self.made.lane.detach(session)
        assert (self.made.used, self.made.promised, self.made.ledger.entries) == (0, 0, 0)
        assert self.made.ledger.raw_bytes == 0
        assert self.made.ledger.sessions == []


class ShareMachine(LedgerMachine):
    """The same with shares and a user's quota: what is a session's own it always gets."""

    limits = replace(LIMITS, quota_bytes=0, user_quota_bytes=56 * KIB, share_bytes=SHARE)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def store_within_the_share(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger._sessions[session]
        self.made.store(self.next_entry, nbytes, session=session)
        self.next_entry += 1
        answer = self.made.lane.last()
        if isinstance(answer, Rejected) and answer.reason == "pool_full":
            assert record.used_bytes + granules(blob_bound(nbytes)) > SHARE

    @invariant()
    def quotas_hold(self) -> None:
        shares = self.made.ledger._holdings.shares
        assert max(shares.of_user(0), shares.of_user(1)) <= 56 * KIB
        assert shares.common_bytes <= CAPACITY - 3 * SHARE


TestShareMachine = ShareMachine.TestCase
TestShareMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
