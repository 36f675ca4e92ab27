"""The ledger: events in, instructions out, and nothing of anybody left at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.ledger_bench import KIB, LIMITS, SHARE, LedgerBench, a_store

from stormd.ledger import restores
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import Detach, Skip, Unmap, Wait
from stormd.ledger.leases import FREED_A_TURN, STALE_SECONDS
from stormd.memory.arena import granules
from stormd.protocol import (
    Admitted,
    Failed,
    Mapped,
    MapPiece,
    Message,
    Refused,
    Rejected,
    ReserveRange,
    Restored,
    RestoredParts,
    pack,
)


@pytest.fixture
def made() -> Iterator[LedgerBench]:
    fixture = LedgerBench()
    fixture.open()
    yield fixture
    fixture.ledger.assert_invariants()


# --- an entry's life ----------------------------------------------------------------------------


def test_restores_begin_in_the_order_of_asking(made: LedgerBench) -> None:
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


def test_restores_that_were_asked_for_together_are_answered_so_and_those_in_vain_alone(
    made: LedgerBench,
) -> None:
    made.store(1)
    made.lane.finish()
    made.lane.replies.clear()
    made.restore_together((1, 1, KIB), (2, 999, KIB), (3, 1, KIB), (3, 1, KIB), (4, 1, 1 << 40))
    failed = [one for _, _, one in made.lane.replies if isinstance(one, Failed)]
    assert [(one.ticket, one.kind) for one in failed] == [
        (2, "ActivationLost"),
        (3, "UsageError"),
        (4, "UsageError"),
    ]
    made.lane.replies.clear()
    made.lane.finish()
    made.lane.finish(fail=True)
    told = [one for _, _, one in made.lane.replies]
    assert told[0] == RestoredParts(pack([1]))
    assert isinstance(told[1], Failed)
    assert len(told) == 2


def test_more_restores_than_a_message_holds_are_told_in_several(
    made: LedgerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "MAX_BATCH", 2)
    made.store(1)
    made.lane.finish()
    made.restore_together(*((n, 1, KIB) for n in range(1, 6)))
    done = [made.lane._done(job, 1.0) for job in made.lane.jobs]
    made.lane.jobs.clear()
    made.lane.replies.clear()
    made.lane.answer(1, done)
    said = [RestoredParts(pack(tickets)) for tickets in ([1, 2], [3, 4], [5])]
    assert [one for _, _, one in made.lane.replies] == said


def test_a_release_waits_for_what_uses_the_entry(made: LedgerBench) -> None:
    made.store(1)
    made.restore(1)
    made.release(1)
    assert made.ledger.holdings.entries == 1
    made.restore(1, ticket=2)
    failed = made.told(Failed)
    assert failed.kind == "ActivationLost", "for its client it is gone at once"
    made.lane.finish()
    assert made.used, "a restore that was asked for before the release is served"
    made.lane.finish()
    assert isinstance(made.lane.last(), Restored)
    assert (made.used, made.ledger.holdings.entries) == (0, 0)


def test_a_failed_store_fails_what_waits_for_it_and_lets_those_behind_begin(
    made: LedgerBench,
) -> None:
    made.store(1)
    made.store(2)
    made.restore(1, ticket=5)
    made.restore(2, ticket=6)
    made.lane.finish(1)
    made.lane.finish(0, fail=True)
    failures = [reply for reply in made.lane.replies if isinstance(reply[2], Failed)]
    assert [(request, reply.ticket) for _, request, reply in failures] == [(0, 0), (8, 5)]
    assert [job.entry for job in made.lane.jobs] == [2]
    made.ledger.assert_invariants()
    made.lane.finish()
    assert made.lane.last() == Restored(6)


def test_a_rejected_store_has_its_sequence_passed_over(made: LedgerBench) -> None:
    made.store(1, 9 * KIB, sequence=4)
    assert isinstance(made.lane.last(), Rejected)
    assert made.lane.others == [Skip(session=1, sequence=4)]


# --- a pool that grows ----------------------------------------------------------------------


def test_what_has_no_room_yet_waits_and_changes_nothing() -> None:
    made = LedgerBench(committed=2 * KIB)
    made.open()
    assert made.ask(1, 7, a_store(1, 4 * KIB)) == [Wait(1)]
    assert made.space.wanted == granules(blob_bound(4 * KIB))
    assert (made.ledger.holdings.entries, made.promised) == (0, 0)
    assert made.counters.rejected["pool_full"] == 0
    made.space.grow(4 * KIB)
    made.store(1, 4 * KIB)
    assert made.lane.last() == Admitted(1)
    made.ledger.assert_invariants()


# --- sessions -----------------------------------------------------------------------------------


def test_what_a_session_held_is_freed_in_slices() -> None:
    many = 3 * FREED_A_TURN
    made = LedgerBench(replace(LIMITS, max_entries=many, quota_bytes=0), capacity=many * KIB)
    made.open()
    for entry in range(1, many + 1):
        made.store(entry, 1)
        made.lane.finish()
    made.end()
    assert made.ledger.holdings.entries == many - FREED_A_TURN
    made.lane.detach(1)
    made.ledger.assert_invariants()
    assert made.lane.ended == [], "it holds something yet"
    made.lane.take(made.ledger.leases.free_some())
    assert made.ledger.holdings.entries == many - 2 * FREED_A_TURN
    assert made.ledger.leases.is_freeing
    made.lane.take(made.ledger.leases.free_some())
    assert not made.ledger.leases.is_freeing
    assert (made.used, made.ledger.holdings.entries, made.lane.ended) == (0, 0, [1])


def test_all_sessions_end_though_the_end_of_one_lets_another_go() -> None:
    many = FREED_A_TURN + 1
    made = LedgerBench(replace(LIMITS, max_entries=many, quota_bytes=0), capacity=many * KIB)
    made.open(1)
    made.open(2)
    for entry in range(1, many + 1):
        made.store(entry, 1, session=2)
        made.lane.finish()
    made.end(2)
    made.lane.detach(2)
    assert made.ledger.leases.is_freeing
    for session in list(made.ledger.sessions):
        made.end(session)
    assert made.lane.ended == [2]
    made.lane.detach(1)
    assert made.lane.ended == [2, 1]
    assert made.ledger.leases.end(2, "shutdown") == []
    assert made.counters.deaths == 2


def test_one_user_has_so_many_sessions_and_the_others_theirs(made: LedgerBench) -> None:
    """The bench gives sessions of even numbers to user 0, of odd ones to user 1."""
    made.ledger.limit(replace(LIMITS, max_sessions=4, user_sessions=2))
    made.open(3)
    refusal = made.ledger.leases.refusal(1)
    assert "max_sessions_per_uid" in refusal.detail
    assert made.ledger.leases.refusal(1, has_lane=False) is None
    made.open(2)
    assert made.ledger.leases.refusal(0) is None
    made.end(3)
    assert made.ledger.leases.refusal(1) is not None, "it may still hold something"
    made.lane.detach(3)
    assert made.ledger.leases.refusal(1) is None


def test_a_session_without_a_lifeline_gives_way_where_no_place_is_free(made: LedgerBench) -> None:
    made.open(3, attach=False)
    made.open(5, attach=False)
    assert made.ledger.leases.refusal(0) is not None
    assert made.ledger.leases.make_place(0, STALE_SECONDS / 2) == []
    assert made.ledger.leases.make_place(0, STALE_SECONDS) == [Detach(3)]
    assert made.ledger.leases.refusal(0) is None
    made.open(2)
    assert made.ledger.leases.make_place(0, STALE_SECONDS, has_lane=False) == []


def test_a_users_own_session_gives_way_where_that_user_has_too_many(made: LedgerBench) -> None:
    made.ledger.limit(replace(LIMITS, max_sessions=8, user_sessions=2))
    made.open(2, attach=False)
    made.open(3, attach=False)
    assert made.ledger.leases.make_place(0, 100.0) == []
    assert made.ledger.leases.make_place(1, 100.0) == [Detach(3)]
    assert made.ledger.leases.refusal(1) is None


# --- segments -----------------------------------------------------------------------------------


def test_a_segment_may_be_named_only_while_it_is_mapped(made: LedgerBench) -> None:
    made.map(4, KIB)
    made.store(1, segment=4)
    assert isinstance(made.lane.last(), Rejected)
    made.lane.finish()
    assert made.lane.replies[-1] == (1, 3, Mapped(4))
    made.store(1, segment=4)
    assert isinstance(made.lane.last(), Admitted)
    made.unmap(4)
    assert made.lane.others[-1] == Unmap(session=1, segment=4)
    made.store(2, segment=4)
    assert isinstance(made.lane.last(), Rejected)


def test_a_restore_that_waits_is_never_made_into_a_segment_of_the_same_number(
    made: LedgerBench,
) -> None:
    """What was checked against the old segment could lie outside the new one."""
    made.map(4, 8 * KIB)
    made.lane.finish()
    made.store(1, 8 * KIB)
    made.store(2)
    made.restore(1, 8 * KIB, ticket=1, segment=4)
    made.restore(2, ticket=2)
    made.release(1)
    made.lane.finish(1)
    assert len(made.lane.jobs) == 1, "the second restore waits behind the first"
    made.unmap(4)
    failed = made.told(Failed)
    assert (failed.ticket, failed.kind) == (1, "UsageError")
    assert len(made.lane.jobs) == 2, "and begins once that has failed"
    made.map(4, KIB)
    made.ledger.assert_invariants()
    while made.lane.jobs:
        made.lane.finish()
    assert made.ledger.holdings.entries == 1


def test_of_a_range_only_what_is_mapped_may_be_named(made: LedgerBench) -> None:
    def store(entry: int, offset: int, nbytes: int) -> type[Message]:
        made.store(entry, nbytes, segment=4, offset=offset)
        return type(made.lane.last())

    made.take_and_finish(ReserveRange(segment=4, nbytes=8 * KIB))
    assert store(1, 0, KIB) is Rejected
    for piece, offset in ((5, 0), (6, KIB), (7, 4 * KIB)):
        made.take_and_finish(MapPiece(segment=piece, into=4, offset=offset, nbytes=KIB))
        assert made.lane.last() == Mapped(piece)
    assert store(1, KIB // 2, KIB) is Admitted
    assert store(2, KIB, KIB + 1) is Rejected
    assert store(2, 3 * KIB, KIB) is Rejected
    for problem in (
        MapPiece(segment=8, into=4, offset=KIB // 2, nbytes=4 * KIB),
        MapPiece(segment=8, into=4, offset=8 * KIB, nbytes=1),
        MapPiece(segment=8, into=5, offset=2 * KIB, nbytes=KIB),
        MapPiece(segment=5, into=4, offset=2 * KIB, nbytes=KIB),
        MapPiece(segment=8, into=4, offset=2 * KIB, nbytes=0),
    ):
        made.lane.take(made.ask(1, 3, problem))
        assert isinstance(made.lane.last(), Refused)
    made.unmap(5)
    assert store(2, 0, KIB) is Rejected
    assert store(2, KIB, KIB) is Admitted
    made.unmap(4)
    assert store(3, KIB, KIB) is Rejected
    made.unmap(6)
    assert isinstance(made.lane.last(), Refused), "it went with its range"


def test_a_piece_is_not_taken_for_one_of_another_range_of_the_same_number(
    made: LedgerBench,
) -> None:
    """What it was mapped into is gone, and nothing is there in the new range."""
    made.take_and_finish(ReserveRange(segment=4, nbytes=8 * KIB))
    made.lane.take(made.ask(1, 3, MapPiece(segment=5, into=4, offset=0, nbytes=KIB)))
    made.unmap(4)
    made.lane.take(made.ask(1, 3, ReserveRange(segment=4, nbytes=8 * KIB)))
    made.lane.finish()
    assert isinstance(made.lane.last(), Refused)
    made.lane.finish()
    made.store(1, segment=4)
    assert isinstance(made.lane.last(), Rejected)


def test_a_restore_that_waits_fails_with_the_piece_that_it_is_to_go_to(made: LedgerBench) -> None:
    made.take_and_finish(ReserveRange(segment=4, nbytes=8 * KIB))
    for piece, offset in ((5, 0), (6, KIB)):
        made.take_and_finish(MapPiece(segment=piece, into=4, offset=offset, nbytes=KIB))
    made.store(1)
    made.restore(1, ticket=1, segment=4)
    made.unmap(6)
    assert isinstance(made.lane.last(), Mapped | Admitted)
    made.unmap(5)
    failed = made.told(Failed)
    assert (failed.ticket, failed.kind) == (1, "UsageError")
    made.lane.finish()


# --- shares and users' quotas -------------------------------------------------------------------


def test_shares_may_change_while_sessions_hold_more() -> None:
    made = LedgerBench(replace(LIMITS, quota_bytes=0))
    made.open(1), made.open(2)
    for entry in range(1, 7):
        made.store(entry, 8 * KIB, session=1)
    made.ledger.limit(replace(LIMITS, share_bytes=SHARE))
    made.ledger.assert_invariants()
    made.store(1, 4 * KIB, session=2)
    assert isinstance(made.lane.last(), Admitted)
