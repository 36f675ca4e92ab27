"""Who moves bytes next: the bytes of sessions that have work grow together."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.fair_queue import JOB_BYTES, FairQueue, FairShares


def test_what_a_job_costs_beside_its_bytes_counts() -> None:
    """Else a session with the smallest tensors would have nearly all of the workers' time."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.put(1, [("small", 100)])
        queue.put(2, [("large", 15 * JOB_BYTES)])
    taken = [queue.take() for _ in range(170)]
    assert taken.count((2, "large")) == 10


def moved(shares: FairShares, sizes: dict[int, int], total: int) -> Counter[int]:
    """Return what sessions move that always have jobs of these sizes."""
    found: Counter[int] = Counter()
    while found.total() < total:
        session = shares.next(sizes)
        shares.record_bytes(session, sizes[session])
        found[session] += sizes[session]
    return found


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 1000), min_size=2, max_size=5))
def test_whatever_their_sizes_all_move_as_much(sizes: dict[int, int]) -> None:
    shares = FairShares()
    for session in sizes:
        shares.enter(session)
    found = moved(shares, sizes, 10_000)
    assert max(found.values()) - min(found[session] for session in sizes) <= max(sizes.values())


def test_who_pauses_makes_up_for_nothing_either() -> None:
    shares = FairShares()
    shares.enter(1)
    shares.enter(2)
    moved(shares, {1: 10}, 1000)  # while the other one has nothing to do
    shares.enter(2)
    found = moved(shares, {1: 10, 2: 10}, 2000)
    assert abs(found[2] - found[1]) <= 20
