from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from stormd.workers.totals import UserTotals

WORKERS = 3
QUOTA = 20
ROUNDS = 300
LOCK = threading.Lock()


@pytest.fixture
def rows() -> Iterator[list[UserTotals]]:
    descriptor = UserTotals.make(WORKERS)
    made = [UserTotals(descriptor, WORKERS, own) for own in range(WORKERS)]
    os.close(descriptor)
    for one in made:
        one.know(7, 0)
        one.know(8, 1)
    yield made
    for one in made:
        one.close()


def test_each_reads_what_the_others_hold(rows: list[UserTotals]) -> None:
    rows[0].hold(7, 100)
    rows[1].hold(7, 20)
    rows[1].hold(8, 3)
    assert rows[2].claim(7, 50) == 120
    assert rows[0].claim(7, 100) == 70
    assert rows[0].claim(8, 1) == 3


def test_a_worker_that_has_ended_holds_nothing(rows: list[UserTotals]) -> None:
    rows[0].hold(7, 100)
    rows[1].hold(7, 20)
    rows[2].clear(0)
    assert rows[2].claim(7, 0) == 20


def test_whoever_claims_at_once_never_has_more_than_allowed(rows: list[UserTotals]) -> None:
    """All take until there is nothing left, again and again: not once a byte more."""
    barrier, rounds = threading.Barrier(WORKERS), [0] * ROUNDS
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    takers = [threading.Thread(target=_take, args=(row, barrier, rounds)) for row in rows]
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
