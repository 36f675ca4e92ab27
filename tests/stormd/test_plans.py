"""Static plans and their runs: what is promised is kept, what is not used is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.ledger_bench import CAPACITY, KIB, LIMITS, SHARE, LedgerBench

from stormd.arena import Extent, granules
from stormd.parts import blob_bound
from stormd.plans import MAX_PLAN_PARTS_HELD, MAX_PLANS, MAX_RUNS, News
from stormd.protocol import (
    NO_LANE,
    Admitted,
    Failed,
    Message,
    PlanRegistered,
    Refused,
    RegisterPlan,
    Rejected,
    RestoredParts,
    RunAdmitted,
    Stored,
    StoredParts,
    pack,
)
from stormd.protocol.limits import FIRST_LEASED, MAX_BATCH, MAX_ID, MAX_PLAN_PARTS
from stormd.sessions import Limits

BOUND = granules(blob_bound(KIB))
AMPLE = replace(LIMITS, max_entries=60_000, quota_bytes=0)


@pytest.fixture
def made() -> LedgerBench:
    """A session with a plan of three parts of 1 KiB, that is number 1."""
    fixture = LedgerBench()
    fixture.open()
    fixture.register(1, KIB, KIB, KIB)
    assert fixture.lane.last() == PlanRegistered(1)
    return fixture


def answers(made: LedgerBench) -> list[Message]:
    """Return what was answered since the last look."""
    told = [message for _, _, message in made.lane.replies]
    made.lane.replies.clear()
    made.ledger.assert_invariants()
    return told


def refusal(made: LedgerBench) -> str:
    [answer] = answers(made)
    assert isinstance(answer, Refused)
    return answer.detail


# --- a run --------------------------------------------------------------------------------------


def test_a_run_is_promised_at_once_and_its_parts_need_no_answer(made: LedgerBench) -> None:
    answers(made)
    made.run(1, 10)
    assert answers(made) == [RunAdmitted(10, 3)]
    assert (made.used, made.promised) == (0, 3 * BOUND)
    made.hand(10, 0, 1)
    assert answers(made) == []
    assert [job.entry for job in made.lane.jobs] == [10, 11]
    made.lane.finish(share=0.5)
    assert answers(made) == [StoredParts(pack([10, 640]), "raw")]
    assert (made.used, made.promised) == (768, 2 * BOUND)
    made.end_run(10)
    assert made.promised == BOUND, "what is still encoded keeps its promise"
    made.lane.finish()
    assert answers(made) == [StoredParts(pack([11, 1280]), "raw")]
    assert made.promised == 0


def test_entries_outlive_their_run_and_its_plan(made: LedgerBench) -> None:
    made.run(1, 10)
    made.hand(10, 2)
    made.lane.finish()
    made.end_run(10)
    made.forget(1)
    answers(made)
    made.restore(12)
    made.lane.finish()
    made.release(12)
    assert (made.used, made.promised, made.ledger.entries) == (0, 0, 0)
    answers(made)
    made.run(1, 20)
    assert "plan 1 is not registered" in refusal(made)


def test_a_run_goes_on_without_its_plan(made: LedgerBench) -> None:
    made.run(1, 10)
    made.forget(1)
    made.hand(10, 0, 1, 2)
    assert len(made.lane.jobs) == 3


def test_two_runs_of_a_plan_are_live_at_once(made: LedgerBench) -> None:
    for run in (10, 20):
        made.run(1, run)
        made.hand(run, 0, 1)
        made.end_run(run)
    answers(made)
    for _ in range(4):
        made.lane.finish()
    made.restore_together((1, 21, KIB), (2, 20, KIB), (3, 11, KIB), (4, 10, KIB))
    assert [job.entry for job in made.lane.jobs] == [21, 20, 11, 10]


def test_results_that_come_together_are_told_together(made: LedgerBench) -> None:
    made.run(1, 10)
    made.hand(10, 0, 1, 2)
    answers(made)
    for index in (0, 0):
        job = made.lane.jobs.pop(index)
        assert made.ledger.results(1, [made.lane._done(job, 1.0)], 0.0) == []
    made.lane.take(made.ledger.told())
    assert answers(made) == [StoredParts(pack([10, 1280, 11, 1280]), "raw")]
    made.restore_together((5, 11, KIB), (6, 10, KIB))
    assert made.ledger.told() == []


def test_restores_are_answered_together_and_those_in_vain_alone(made: LedgerBench) -> None:
    made.store(1)
    made.lane.finish()
    answers(made)
    made.restore_together((1, 1, KIB), (2, 999, KIB), (3, 1, KIB), (3, 1, KIB), (4, 1, 1 << 40))
    kinds = [(one.ticket, one.kind) for one in answers(made) if isinstance(one, Failed)]
    assert kinds == [(2, "ActivationLost"), (3, "UsageError"), (4, "UsageError")]
    made.lane.finish()
    made.lane.finish(fail=True)
    told = answers(made)
    assert told[0] == RestoredParts(pack([1]))
    assert isinstance(told[1], Failed)


def test_what_a_session_that_ends_would_have_been_told_is_not_said(made: LedgerBench) -> None:
    made.run(1, 10)
    made.hand(10, 0)
    made.ledger.results(1, [made.lane._done(made.lane.jobs.pop(), 1.0)], 0.0)
    made.end()
    assert made.ledger.told() == []


def test_a_store_that_fails_is_told_by_itself(made: LedgerBench) -> None:
    made.run(1, 10)
    made.hand(10, 0, 1)
    answers(made)
    made.lane.finish(fail=True)
    [failed] = answers(made)
    assert isinstance(failed, Failed)
    assert (failed.entry, failed.ticket) == (10, 0)


# --- what is promised ---------------------------------------------------------------------------


def test_a_run_is_promised_a_quarter_of_what_is_free(made: LedgerBench) -> None:
    """Blobs are smaller than their bounds: others are not refused for what is never needed."""
    made.register(2, *[KIB] * 20)
    answers(made)
    made.run(2, 10)
    [answer] = answers(made)
    assert answer == RunAdmitted(10, min(LIMITS.max_entries, CAPACITY // 4 // BOUND))


def test_what_was_not_promised_is_admitted_part_by_part() -> None:
    made = LedgerBench(AMPLE, capacity=40 * KIB)
    made.open()
    made.register(1, *[8 * KIB] * 5)
    answers(made)
    made.run(1, 10)
    assert answers(made) == [RunAdmitted(10, 1)]
    made.hand(10, 0, 1, 2, 3, 4)
    told = answers(made)
    assert told[:3] == [Admitted(11), Admitted(12), Admitted(13)]
    assert isinstance(told[3], Rejected)
    assert (told[3].entry, told[3].reason) == (14, "pool_full")
    made.hand(10, 4)
    [again] = answers(made)
    assert isinstance(again, Rejected)
    assert again.reason == "invalid", "each part is handed over once"


@pytest.mark.parametrize(
    "limits",
    [
        replace(AMPLE, quota_bytes=2 * BOUND),
        replace(AMPLE, user_quota_bytes=2 * BOUND),
        replace(AMPLE, max_entries=2),
    ],
)
def test_a_promise_keeps_to_the_limits(limits: object) -> None:
    made = LedgerBench(limits)  # type: ignore[arg-type]
    made.open()
    made.register(1, KIB, KIB, KIB)
    answers(made)
    made.run(1, 10)
    assert answers(made) == [RunAdmitted(10, 2)]
    made.store(50)
    [rejected] = answers(made)
    assert isinstance(rejected, Rejected), "what a run was promised is taken"
    made.end_run(10)
    made.store(51)
    assert answers(made) == [Admitted(51)]


def test_a_promise_leaves_others_their_shares() -> None:
    made = LedgerBench(replace(AMPLE, share_bytes=SHARE))
    made.open()
    made.register(1, *[KIB] * 12)
    answers(made)
    for run in (10, 30, 50):
        made.run(1, run)
    counts = [one.count for one in answers(made) if isinstance(one, RunAdmitted)]
    assert counts[0] == 12
    record = made.ledger._sessions[1]
    assert record.used_bytes <= CAPACITY - 2 * SHARE


def test_nothing_is_promised_while_the_daemon_drains(made: LedgerBench) -> None:
    made.run(1, 10)
    made.ledger.drain()
    answers(made)
    made.run(1, 20)
    assert answers(made) == [RunAdmitted(20, 0)]
    made.hand(20, 0)
    [rejected] = answers(made)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "draining"
    made.hand(10, 0)
    assert answers(made) == [], "what was promised before is taken"


def test_an_abandoned_run_and_a_death_give_back_what_was_promised(made: LedgerBench) -> None:
    made.run(1, 10)
    made.hand(10, 0)
    made.run(1, 20)
    made.end_run(20)
    assert made.promised == 3 * BOUND
    made.end()
    assert made.promised == BOUND, "the lane has yet to answer for one part"
    made.lane.detach(1)
    assert (made.used, made.promised, made.ledger.sessions) == (0, 0, [])


def test_ending_a_run_twice_changes_nothing(made: LedgerBench) -> None:
    made.run(1, 10)
    made.end_run(10)
    made.end_run(10)
    assert made.promised == 0
    made.ledger.assert_invariants()


# --- what clients may say -----------------------------------------------------------------------


def test_parts_of_no_run_are_rejected(made: LedgerBench) -> None:
    answers(made)
    made.hand(77, 0)
    made.hand(MAX_ID, 5)
    told = answers(made)
    assert [one.entry for one in told if isinstance(one, Rejected)] == [77, MAX_ID]


def test_a_part_is_in_the_plan_and_in_its_segment(made: LedgerBench) -> None:
    made.run(1, 10)
    answers(made)
    made.hand(10, 3)
    made.hand(10, 0, offset=16 * KIB)
    made.hand(10, 1, segment=9)
    beyond, outside, unmapped = answers(made)
    assert isinstance(beyond, Rejected)
    assert isinstance(outside, Failed), "its client may have let go of what was promised"
    assert "outside segment 0" in outside.detail
    assert isinstance(unmapped, Failed)
    assert made.lane.jobs == []


def test_the_numbers_of_entries_only_grow(made: LedgerBench) -> None:
    made.run(1, 10)
    made.store(12)
    made.run(1, 12)
    made.run(1, FIRST_LEASED - 2)
    told = answers(made)
    assert isinstance(told[-3], Rejected)
    assert all(isinstance(one, Refused) for one in told[-2:])
    made.store(13)
    assert answers(made) == [Admitted(13)]


def test_plans_and_runs_are_limited() -> None:
    made = LedgerBench(AMPLE, capacity=1 << 20)
    made.open()
    for number in range(MAX_PLANS):
        made.register(number, 1)
    answers(made)
    made.register(MAX_PLANS, 1)
    assert f"{MAX_PLANS} plans are registered" in refusal(made)
    for number in range(MAX_RUNS):
        made.run(1, 10 + number)
    answers(made)
    made.run(1, 1000)
    assert f"{MAX_RUNS} runs go on" in refusal(made)
    made.end_run(10)
    made.forget(0)
    made.register(MAX_PLANS, 1)
    made.run(MAX_PLANS, 1000)
    assert answers(made) == [PlanRegistered(MAX_PLANS), RunAdmitted(1000, 1)]


def test_parts_of_all_plans_are_limited() -> None:
    made = LedgerBench(AMPLE)
    made.open()
    for number in range(MAX_PLAN_PARTS_HELD // MAX_PLAN_PARTS):
        made.register(number, *[1] * MAX_PLAN_PARTS)
    assert all(isinstance(one, PlanRegistered) for one in answers(made))
    made.register(99, 1)
    assert f"the limit is {MAX_PLAN_PARTS_HELD}" in refusal(made)


def test_a_plan_is_of_what_can_be_stored(made: LedgerBench) -> None:
    answers(made)
    made.register(1, KIB)
    assert "registered already" in refusal(made)
    made.register(2, 8 * KIB + 1)
    assert "the limit is 8192" in refusal(made)
    message = RegisterPlan(plan=3, sizes=[3], kinds=[0], dtypes=["float32"], codec="raw")
    made.lane.take(made.ledger.register_plan(1, 0, message))
    assert "no whole number" in refusal(made)
    made.open(2, device=NO_LANE)
    made.register(4, KIB, session=2)
    assert "for control alone" in refusal(made)


def test_a_session_without_a_lifeline_has_no_plans() -> None:
    made = LedgerBench()
    made.open(attach=False)
    made.register(1, KIB)
    assert "no lifeline" in refusal(made)
    made.run(1, 10)
    assert "no lifeline" in refusal(made)


def test_stores_without_a_plan_are_told_as_before(made: LedgerBench) -> None:
    made.run(1, 10)
    made.store(50)
    answers(made)
    made.lane.finish()
    assert answers(made) == [Stored(50, 1280, "raw")]


def test_more_than_a_message_holds_is_told_in_several() -> None:
    news = News(tickets=list(range(MAX_BATCH + 1)))
    for entry in range(MAX_BATCH + 1):
        news.stored["raw" if entry else "window"] += entry, 1
    sizes = [len(one.to_wire()[0]) for one in news.messages()]
    assert sizes == [16, 16 * MAX_BATCH, 8 * MAX_BATCH, 8]


# --- what is kept for the next run --------------------------------------------------------------


def placed(made: LedgerBench) -> tuple[int, int, int]:
    """Return how many parts lie where they lay before, there and elsewhere, and anew."""
    counters = made.counters
    return counters.placed_again, counters.placed_larger, counters.placed_anew


def step(made: LedgerBench, run: int, *shares: float, plan: int = 1) -> list[tuple[Extent, ...]]:
    """Store in a run what takes these shares of its bounds; return where the blobs lie."""
    made.run(plan, run)
    made.hand(run, *range(len(shares)))
    made.end_run(run)
    for share in shares:
        made.lane.finish(share=share)
    entries = made.ledger._sessions[1].entries
    blocks = [entries[run + index].block for index in range(len(shares))]
    made.ledger.assert_invariants()
    return [block.extents for block in blocks if block is not None]


def release(made: LedgerBench, run: int, count: int = 3) -> None:
    made.release(*range(run, run + count))
    made.ledger.assert_invariants()


def test_a_run_stores_where_the_last_one_did(made: LedgerBench) -> None:
    places = step(made, 10, 0.6, 0.6, 0.6)
    held = made.used
    release(made, 10)
    assert (made.used, made.ledger.kept_bytes, made.ledger.entries) == (held, held, 0)
    made.run(1, 20)
    assert made.promised == 3 * BOUND - held, "what lies there need not be promised again"
    made.end_run(20)
    assert step(made, 30, 0.6, 0.55, 0.6) == places
    assert made.used == held
    assert placed(made) == (3, 0, 3)


def test_a_blob_that_has_grown_lies_elsewhere_as_well_and_has_another_place_then(
    made: LedgerBench,
) -> None:
    [place, *_] = step(made, 10, 0.5, 0.5, 0.5)
    release(made, 10)
    [grown, *_] = step(made, 20, 1.0, 0.5, 0.5)
    assert grown[:1] == place
    assert sum(nbytes for _, nbytes in grown) == BOUND
    assert placed(made) == (2, 1, 3)
    release(made, 20)
    [whole, *_] = step(made, 30, 1.0, 0.5, 0.5)
    assert len(whole) == 1, "what lies in pieces is not kept"
    release(made, 30)
    assert step(made, 40, 1.0, 0.5, 0.5)[0] == whole


def test_what_has_become_much_smaller_does_not_keep_its_room(made: LedgerBench) -> None:
    step(made, 10, 1.0, 1.0, 1.0)
    release(made, 10)
    step(made, 20, 0.5, 1.0, 1.0)
    release(made, 20)
    assert made.ledger.kept_bytes == 2 * BOUND


def test_of_two_runs_at_once_one_has_what_is_kept(made: LedgerBench) -> None:
    first = step(made, 10, 0.6, 0.6)
    second = step(made, 20, 0.6, 0.6)
    assert not set(first) & set(second)
    release(made, 20)
    release(made, 10)
    kept = made.ledger.kept_bytes
    assert kept == made.used
    made.run(1, 30)
    made.run(1, 40)
    assert made.promised == 2 * 3 * BOUND - kept
    made.end_run(30)
    assert step(made, 50, 0.6, 0.6) == second


def test_an_abandoned_run_leaves_what_was_kept(made: LedgerBench) -> None:
    places = step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    kept = made.ledger.kept_bytes
    made.run(1, 20)
    made.hand(20, 1)
    made.end_run(20)
    made.lane.finish(share=0.6)
    assert made.ledger.kept_bytes < kept
    made.release(21)
    assert (made.used, made.ledger.kept_bytes, made.promised) == (kept, kept, 0)
    assert step(made, 30, 0.6, 0.6, 0.6) == places


def test_nothing_is_kept_for_a_plan_that_is_forgotten(made: LedgerBench) -> None:
    step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    made.run(1, 20)
    made.hand(20, 0)
    made.forget(1)
    made.lane.finish(share=0.6)
    made.release(20)
    made.ledger.assert_invariants()
    made.end_run(20)
    assert (made.used, made.promised, made.ledger.kept_bytes) == (0, 0, 0)


def test_what_is_kept_goes_back_when_its_plan_is_forgotten(made: LedgerBench) -> None:
    step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    made.forget(1)
    assert (made.used, made.ledger.kept_bytes) == (0, 0)
    made.ledger.assert_invariants()


def test_a_death_gives_back_what_was_kept_a_few_at_a_time(
    made: LedgerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.ledger.FREED_A_TURN", 2)
    step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    made.run(1, 20)
    made.hand(20, 0)
    made.end()
    made.ledger.assert_invariants()
    made.lane.detach(1)
    while made.ledger.is_freeing:
        made.lane.take(made.ledger.free_some())
        made.ledger.assert_invariants()
    assert (made.used, made.promised, made.ledger.sessions) == (0, 0, [])


def test_a_store_that_fails_gives_back_the_place_it_would_have_had(made: LedgerBench) -> None:
    step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    made.run(1, 20)
    made.hand(20, 0, 1, 2)
    made.end_run(20)
    for _ in range(3):
        made.lane.finish(fail=True)
    assert (made.used, made.promised, made.ledger.kept_bytes) == (0, 0, 0)
    made.ledger.assert_invariants()


@pytest.mark.parametrize("session", [1, 2])
def test_what_is_kept_is_nobody_s_hindrance(session: int) -> None:
    """Whoever finds the pool full, its owner or another, gets what lies idle in it."""
    made = LedgerBench(AMPLE, capacity=16 * BOUND)
    made.open()
    made.open(2)
    made.register(1, *[KIB] * 3)
    step(made, 10, 1.0, 1.0, 1.0)
    release(made, 10)
    for entry in range(20, 36):
        made.store(entry, session=session)
    assert not any(isinstance(one, Rejected) for one in answers(made))
    assert made.ledger.kept_bytes == 0
    made.store(36, session=session)
    assert isinstance(made.lane.last(), Rejected)


def test_what_was_used_longest_ago_goes_first() -> None:
    made = LedgerBench(AMPLE, capacity=16 * BOUND)
    made.open()
    for plan in (1, 2, 1):
        if plan not in made.ledger._sessions[1].plans:
            made.register(plan, *[KIB] * 3)
        first = 10 * (made.ledger._sessions[1].last_entry + 1)
        step(made, first, 1.0, 1.0, 1.0, plan=plan)
        release(made, first)
    for entry in range(10_000, 10_011):
        made.store(entry)
    plans = made.ledger._sessions[1].plans
    assert [plans[number].spares.nbytes for number in (1, 2)] == [3 * BOUND, 0]


@pytest.mark.parametrize(
    "limits", [replace(AMPLE, quota_bytes=4 * BOUND), replace(AMPLE, user_quota_bytes=4 * BOUND)]
)
def test_what_is_kept_counts_in_a_quota_and_gives_way_to_what_its_owner_stores(
    limits: Limits,
) -> None:
    made = LedgerBench(limits)
    for session in (1, 2, 3):  # the first and the last are of one user
        made.open(session)
    made.register(1, *[KIB] * 3)
    step(made, 10, 1.0, 1.0, 1.0)
    release(made, 10)
    record = made.ledger._sessions[1]
    assert record.used_bytes == record.kept_bytes == 3 * BOUND
    assert record.as_status()["used_bytes"] == 0
    assert record.as_status()["planned_bytes"] == 3 * BOUND
    for entry in range(20, 25):
        made.store(entry, session=2)
    assert record.kept_bytes == 3 * BOUND, "another user's quota is no reason"
    storing = 1 if limits.quota_bytes else 3
    for entry in range(30, 34):
        made.store(entry, session=storing)
        assert isinstance(made.lane.last(), Admitted)
    assert record.kept_bytes == 0
    made.store(34, session=storing)
    assert isinstance(made.lane.last(), Rejected)
    made.ledger.assert_invariants()


def test_a_part_that_was_not_promised_lies_where_it_did(made: LedgerBench) -> None:
    places = step(made, 10, 0.6, 0.6, 0.6)
    release(made, 10)
    made.ledger.limit(replace(LIMITS, quota_bytes=made.used))
    made.run(1, 20)
    answers(made)
    made.ledger.limit(LIMITS)
    made.hand(20, 0, 1, 2)
    assert answers(made) == [Admitted(20), Admitted(21), Admitted(22)]
    for _ in range(3):
        made.lane.finish(share=0.6)
    entries = made.ledger._sessions[1].entries.values()
    assert [one.block.extents for one in entries if one.block] == places
