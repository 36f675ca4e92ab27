"""Which entries go to the disk and come back, in which order, and what a store waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.ledger_bench import KIB, LIMITS, LedgerBench, a_store

from stormd.ledger import spill_order, spills
from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import Reply, SpillDone, Wait
from stormd.ledger.on_disk import DiskPhase
from stormd.memory.arena import granules
from stormd.memory.extents import disk_bytes
from stormd.protocol import Admitted, Failed, Rejected, Restored, Store

NBYTES = 8 * KIB - 256
ROOM = granules(blob_bound(NBYTES))
"""Of the pool, for each entry."""

ON_DISK = disk_bytes(blob_bound(NBYTES))
CAPACITY = 10 * ROOM
RESERVE = 2 * ROOM
LARGE = 100 * ON_DISK


@pytest.fixture(autouse=True)
def _small_blobs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_order, "MIN_BYTES", 1)


def _bench(disk_bytes: int = LARGE, sessions: int = 1, share_bytes: int = 0) -> LedgerBench:
    limits = replace(
        LIMITS, max_sessions=2, max_entries=100, quota_bytes=0, share_bytes=share_bytes
    )
    made = LedgerBench(limits, CAPACITY, disk_bytes=disk_bytes, reserve=RESERVE)
    for session in range(1, sessions + 1):
        made.open(session)
    return made


def _store(made: LedgerBench, *entries: int, session: int = 1) -> None:
    """Store entries, with the disk doing what a store waits for and nothing else."""

    def write_one() -> None:
        made.tier.move()
        made.tier.finish()

    made.on_wait = write_one
    for entry in entries:
        made.store(entry, NBYTES, session=session)
        assert isinstance(made.lane.last(), Admitted), made.lane.last()
        made.lane.finish()
    made.ledger.assert_invariants()


def _phase(made: LedgerBench, entry: int, session: int = 1) -> DiskPhase | None:
    place = made.ledger.sessions[session].entries[entry].disk
    return None if place is None else place.phase


def _ask(made: LedgerBench, entry: int, now: float = 0.0) -> object:
    """Return what a store is answered with first."""
    record = made.ledger.sessions[1]
    answers = made.ledger.on_request[Store](record, 1, a_store(entry, NBYTES), now)
    made.lane.take([one for one in answers if not isinstance(one, Wait)])
    return answers[0]


def _away(made: LedgerBench, count: int = 14) -> None:
    """Store entries 1 to `count` and have the disk do all it can."""
    for entry in range(1, count + 1):
        _store(made, entry)
        made.tier.settle()


def _written(made: LedgerBench, now: float) -> None:
    """Have the disk answer the first job at that time."""
    done = SpillDone(session=1, entry=made.tier.jobs.pop(0).entry)
    made.ledger.on_results[SpillDone](made.ledger.sessions[1], [done], now)


# --- writing --------------------------------------------------------------------------------


def test_the_oldest_is_written_first_and_given_back_when_room_is_wanted() -> None:
    made = _bench()
    _store(made, *range(1, 9))
    made.tier.move()
    assert [job.entry for job in made.tier.jobs] == [1]
    made.tier.finish()
    assert _phase(made, 1) is DiskPhase.CLEAN
    _store(made, 9, 10)
    assert _phase(made, 1) is DiskPhase.CLEAN  # what is kept for reading was free
    _store(made, 11)
    assert _phase(made, 1) is DiskPhase.AWAY
    assert made.ledger.sessions[1].used_bytes <= CAPACITY - RESERVE


def test_a_step_is_written_from_its_beginning_once_one_did_not_fit() -> None:
    made = _bench()
    _away(made)
    for entry in range(14, 0, -1):
        made.restore(entry, NBYTES, ticket=entry)
        made.tier.settle()
        made.lane.finish()
        made.release(entry)
    made.tier.settle()
    _store(made, 21)
    made.tier.move()
    assert [job.entry for job in made.tier.jobs] == [21]
    _store(made, 22)
    made.restore(22, NBYTES, ticket=99)  # a backward pass: nothing more is written ahead
    before = list(made.tier.jobs)
    made.tier.move()
    assert made.tier.jobs == before


# --- admission ------------------------------------------------------------------------------


def test_what_a_slow_disk_cannot_take_in_time_stays_with_the_trainer() -> None:
    made = _bench()
    _store(made, *range(1, 9))
    made.tier.move(now=0.0)
    _written(made, 60.0)
    _store(made, 9)
    made.tier.move(now=60.0)
    assert not isinstance(_ask(made, 10, now=60.0), Wait)
    answer = made.told(Rejected)
    assert "the tier on disk takes" in answer.detail
    assert "too slow: raise pool_bytes" in answer.detail


def test_a_disk_that_stands_still_is_slow_before_it_has_answered() -> None:
    made = _bench()
    _away(made, 9)
    made.tier.move(now=0.0)
    _ask(made, 10)
    made.lane.finish()
    waits = _ask(made, 11, now=0.0)
    assert isinstance(waits, Wait)
    made.tier.move(now=0.0)
    assert not isinstance(_ask(made, 11, now=1e9), Wait)


def test_a_full_disk_refuses_as_a_full_pool_does() -> None:
    made = _bench(disk_bytes=2 * ON_DISK)
    _away(made, 10)
    assert not isinstance(_ask(made, 11), Wait)
    answer = made.told(Rejected)
    assert answer.reason == "pool_full"
    assert "of the tier on disk are taken, too: raise spill_bytes" in answer.detail


# --- reading --------------------------------------------------------------------------------


def test_in_a_backward_pass_the_newest_come_back_ahead() -> None:
    made = _bench()
    _away(made)
    away = [n for n in range(1, 15) if _phase(made, n) is DiskPhase.AWAY]
    for entry in (14, 13, 12, 11, 10):
        made.restore(entry, NBYTES, ticket=entry)
        made.lane.finish()
        made.release(entry)
    made.tier.move()
    read = [job.entry for job in made.tier.jobs if job.is_read]
    assert read == away[: -len(read) - 1 : -1]
    assert read


# --- the end --------------------------------------------------------------------------------


def _restore_all_in_the_pool(made: LedgerBench, session: int) -> None:
    """Begin restores of all that a session has in the pool; the lane does not end them."""
    entries = made.ledger.sessions[session].entries
    for number in [number for number, entry in entries.items() if entry.block is not None]:
        made.restore(number, NBYTES, ticket=number, session=session)
    assert made.lane.jobs
    made.tier.settle()


def test_restores_in_progress_leave_others_their_shares() -> None:
    made = _bench(sessions=2, share_bytes=3 * ROOM)
    _store(made, *range(1, 13))
    _restore_all_in_the_pool(made, session=1)
    for entry in (1, 2, 3):
        made.store(entry, NBYTES, session=2)
        assert made.lane.last() == Admitted(entry)
    made.ledger.assert_invariants()


def test_blocks_within_a_share_are_not_freed_for_who_stores_beyond_its_own() -> None:
    made = _bench(sessions=2, share_bytes=3 * ROOM)
    _store(made, *range(1, 13), session=2)
    clean = [number for number in range(1, 13) if _phase(made, number, 2) is DiskPhase.CLEAN]
    assert clean
    made.release(*[number for number in range(1, 13) if number not in clean], session=2)
    _store(made, *range(1, 13))
    assert {_phase(made, number, 2) for number in clean} == {DiskPhase.CLEAN}


def test_a_store_beyond_its_share_is_told_of_the_restores_that_take_the_room() -> None:
    made = _bench(share_bytes=3 * ROOM)
    _store(made, *range(1, 13))
    dirty = [number for number in range(1, 13) if _phase(made, number) is None]
    made.release(*dirty[:2])
    made.tier.settle()
    for number in [number for number in range(1, 13) if number not in dirty[:2]]:
        made.restore(number, NBYTES, ticket=number)
        made.tier.settle()
    assert isinstance(_ask(made, 99), Reply)
    answer = made.told(Rejected)
    assert answer.reason == "pool_full"
    assert "restores in progress and other sessions' shares of" in answer.detail


def test_a_restore_finds_room_while_those_of_others_do_not_end() -> None:
    """Their streams may wait for this session's: its own entries are written to make room."""
    made = _bench(sessions=2, share_bytes=3 * ROOM)
    _store(made, *range(1, 13))
    _restore_all_in_the_pool(made, session=1)
    begun = len(made.lane.jobs)
    for entry in range(1, 5):
        made.store(entry, NBYTES, session=2)
        made.lane.finish(begun)
    assert _phase(made, 1, session=2) is DiskPhase.AWAY
    made.restore(1, NBYTES, ticket=1, session=2)
    made.tier.settle()
    assert len(made.lane.jobs) == begun + 1, "the restore has not begun"
    made.ledger.assert_invariants()


def test_the_end_loses_what_is_away_and_nothing_else() -> None:
    made = _bench()
    _away(made)
    phases = {entry: _phase(made, entry) for entry in range(1, 15)}
    made.restore(1, NBYTES, ticket=1)
    made.lane.take(made.spills.end("a write failed"))
    answer = made.told(Failed)
    assert (answer.kind, answer.ticket) == ("ActivationLost", 1)
    assert "it was on disk alone, and the tier there has ended: a write failed" in answer.detail
    for entry, before in phases.items():
        lost = before is DiskPhase.AWAY
        assert _phase(made, entry) is (DiskPhase.LOST if lost else None)
        made.restore(entry, NBYTES, ticket=100 + entry)
        if lost:
            answer = made.told(Failed)
            assert f"entry {entry}: it was on disk alone" in answer.detail
        else:
            made.lane.finish()
            assert made.lane.last() == Restored(100 + entry)
    made.ledger.assert_invariants()
    made.release(*range(1, 15))
    assert made.used == 0
    status = made.spills.as_status(0.0)
    assert (status["used_bytes"], status["ended"]) == (0, "a write failed")
    assert status["lost_entries"] == sum(one is DiskPhase.AWAY for one in phases.values())


def test_what_was_asked_for_while_a_read_was_to_fail_is_answered() -> None:
    """The tier has ended, and a thread of it has yet to say that its read came to nothing."""
    made = _bench()
    _away(made)
    for entry in (14, 13, 12, 11, 10):
        made.restore(entry, NBYTES, ticket=entry)
        made.lane.finish()
        made.release(entry)
    made.tier.move()
    ahead = made.tier.jobs[0].entry
    made.lane.take(made.spills.end("the disk stands still"))
    made.restore(ahead, NBYTES, ticket=99)
    assert _phase(made, ahead) is DiskPhase.READING
    made.tier.finish(fail=True)
    answer = made.told(Failed)
    assert answer.ticket == 99
    made.ledger.assert_invariants()


def _fill(made: LedgerBench) -> int:
    """Return how many entries are admitted until one is rejected."""
    for entry in range(1, 100):
        made.store(entry, NBYTES)
        if isinstance(made.lane.last(), Rejected):
            return entry - 1
        made.lane.finish()
    raise AssertionError("all were admitted")


@pytest.mark.parametrize("share", [0, 2 * ROOM])
def test_a_pool_whose_tier_has_ended_holds_and_refuses_as_one_without(share: int) -> None:
    limits = replace(LIMITS, max_entries=100, quota_bytes=0, max_sessions=2, share_bytes=share)
    made = LedgerBench(limits, CAPACITY, disk_bytes=LARGE, reserve=RESERVE)
    without = LedgerBench(limits, CAPACITY)
    for one in (made, without):
        one.open(1)
    made.lane.take(made.spills.end("a write failed"))
    assert _fill(made) == _fill(without)
    answer = made.told(Rejected)
    assert answer.reason == "pool_full"
    assert "the tier on disk has ended (a write failed): restart the daemon" in answer.detail
    made.release(1)
    assert isinstance(_ask(made, 50), Reply)
    assert made.lane.last() == Admitted(50)
    made.ledger.assert_invariants()


def test_who_waits_for_a_disk_that_ends_is_answered_at_once() -> None:
    """The first finds what was kept for reading, as in a pool without a tier; then it is full."""
    made = _bench()
    _store(made, *range(1, 9))
    assert isinstance(_ask(made, 9), Wait)
    made.lane.take(made.spills.end("the disk stands still"))
    assert not made.ledger.is_waited_for
    for entry in (9, 10):
        assert not isinstance(_ask(made, entry), Wait)
        assert made.lane.last() == Admitted(entry)
    assert not isinstance(_ask(made, 11), Wait)
    answer = made.told(Rejected)
    assert answer.reason == "pool_full"
    made.tier.move()
    made.tier.finish(fail=True)  # the write that the first has had begun
    while made.lane.jobs:
        made.lane.finish()
    for entry in range(1, 11):
        made.restore(entry, NBYTES, ticket=entry)
        made.lane.finish()
        assert made.lane.last() == Restored(entry)
    made.ledger.assert_invariants()


def test_status_tells_bytes_age_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _bench()
    _store(made, *range(1, 9))
    made.tier.move(now=1.0)
    _written(made, 3.0)
    status = made.spills.as_status(6.0)
    assert status["used_bytes"] == ON_DISK
    assert status["oldest_seconds"] == 5.0
    nbytes = blob_bound(NBYTES)
    assert status["write"] == {
        "bytes": nbytes,
        "busy_seconds": 2.0,
        "bytes_per_second": nbytes / 2.0,
    }
    (session,) = made.ledger.sessions_status()
    assert session["spilled_bytes"] == ON_DISK
    assert made.spills.bytes_per_second == 0, "too little to tell"
    monkeypatch.setattr(spills, "MIN_MOVED", 1)
    assert made.spills.bytes_per_second == 8 * nbytes // 2, "of which it has moved one"
    made.spills.end("a test has ended it")
    assert made.spills.bytes_per_second == 0
