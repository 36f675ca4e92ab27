from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from stormd.memory.shared_rows import PoolBudget, Rows, UserTotals

WORKERS = 3
PAGE = mmap.PAGESIZE
QUOTA = 20
ROUNDS = 300
LOCK = threading.Lock()


@pytest.fixture
def rows() -> Iterator[list[Rows]]:
    descriptor = Rows.make(WORKERS)
    made = [Rows(descriptor, WORKERS, own) for own in range(WORKERS)]
    os.close(descriptor)
    yield made
    for one in made:
        one.close()


@pytest.fixture
def totals(rows: list[Rows]) -> list[UserTotals]:
    made = [UserTotals(one) for one in rows]
    for one in made:
        one.set_column(7, 0)
        one.set_column(8, 1)
    return made


def test_each_reads_what_the_others_hold(totals: list[UserTotals]) -> None:
    totals[0].hold(7, 100)
    totals[1].hold(7, 20)
    totals[1].hold(8, 3)
    assert totals[2].claim(7, 50) == 120
    assert totals[0].claim(7, 100) == 70
    assert totals[0].claim(8, 1) == 3


def test_a_worker_that_has_ended_holds_nothing(rows: list[Rows], totals: list[UserTotals]) -> None:
    totals[0].hold(7, 100)
    totals[1].hold(7, 20)
    rows[2].clear(0)
    assert totals[2].claim(7, 0) == 20


def test_whoever_claims_at_once_never_has_more_than_allowed(totals: list[UserTotals]) -> None:
    """All take until there is nothing left, again and again: not once a byte more."""
    barrier, rounds = threading.Barrier(WORKERS), [0] * ROUNDS
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    takers = [threading.Thread(target=_take, args=(one, barrier, rounds)) for one in totals]
    try:
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
    finally:
        sys.setswitchinterval(before)
    assert 0 < max(rounds) <= QUOTA


def _take(row: UserTotals, barrier: threading.Barrier, rounds: list[int]) -> None:
    for number in range(ROUNDS):
        held = refused = 0
        barrier.wait()
        while refused < 3:
            if row.claim(7, held + 1) + held + 1 <= QUOTA:
                held += 1
            else:
                row.hold(7, held)
                refused += 1
        barrier.wait()
        with LOCK:
            rounds[number] += held
        row.hold(7, 0)


# --- the pool -------------------------------------------------------------------------------


def budgets(rows: list[Rows]) -> list[PoolBudget]:
    """Return those of a pool of 30 pages, of which each worker begins with two."""
    made = [PoolBudget(one, WORKERS, 30 * PAGE, 2 * PAGE) for one in rows]
    assert [one.claim(one.first) for one in made] == [2 * PAGE] * WORKERS
    return made


def test_what_was_lent_is_asked_for_and_comes_back(rows: list[Rows]) -> None:
    first, second, _ = budgets(rows)
    first.set_has_session(is_busy=True)
    assert first.claim(24 * PAGE) == 24 * PAGE
    assert first.surplus == 0  # nobody wants it
    second.set_has_session(is_busy=True)
    assert second.claim(4 * PAGE) == 0
    assert (first.surplus, second.surplus) == (16 * PAGE, 0)
    first.give_back(5 * PAGE)
    assert second.claim(4 * PAGE) == 4 * PAGE
    assert first.surplus == 0
    first.set_has_session(is_busy=False)
    assert second.claim(20 * PAGE) == PAGE
    assert first.surplus == (26 - 5 - 2) * PAGE


def test_what_a_dead_worker_had_is_there_for_others_but_its_first_bytes(rows: list[Rows]) -> None:
    first, second, third = budgets(rows)
    second.set_has_session(is_busy=True)
    second.claim(8 * PAGE)
    first.set_has_session(is_busy=True)
    assert first.claim(30 * PAGE) == 16 * PAGE
    rows[2].clear(1)
    assert first.claim(30 * PAGE) == 8 * PAGE
    again = PoolBudget(rows[1], WORKERS, 30 * PAGE, 2 * PAGE)
    assert again.claim(again.first) == 2 * PAGE
    assert first.held + again.held + third.held == 30 * PAGE
