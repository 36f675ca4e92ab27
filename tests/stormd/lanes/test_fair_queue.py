"""Who moves bytes next: the bytes of sessions that have work grow together."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.fair_queue import JOB_BYTES, FairQueue


def test_what_a_job_costs_beside_its_bytes_counts() -> None:
    """Else a session with the smallest tensors would have nearly all of the workers' time."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.put(1, [("small", 100)])
        queue.put(2, [("large", 15 * JOB_BYTES)])
    taken = [queue.take() for _ in range(170)]
    assert taken.count((2, "large")) == 10


def moved(sizes: dict[int, int], total: int, queue: FairQueue[int]) -> Counter[int]:
    """Return what sessions move that always have jobs of these sizes, with what each job costs."""
    found: Counter[int] = Counter()
    for session, nbytes in sizes.items():
        queue.put(session, [(nbytes, nbytes)] * 2)
    while found.total() < total:
        taken = queue.take_now()
        assert taken is not None
        session, nbytes = taken
        queue.put(session, [(nbytes, nbytes)])
        found[session] += nbytes + JOB_BYTES
    for session in sizes:
        queue.remove(session)
    return found


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 100 * JOB_BYTES), min_size=2, max_size=5))
def test_whatever_their_sizes_all_move_as_much(sizes: dict[int, int]) -> None:
    most = max(sizes.values()) + JOB_BYTES
    found = moved(sizes, 10 * most, FairQueue())
    assert max(found.values()) - min(found[session] for session in sizes) <= most


def test_who_pauses_makes_up_for_nothing_either() -> None:
    queue: FairQueue[int] = FairQueue()
    both = {1: JOB_BYTES, 2: JOB_BYTES}
    moved(both, 4 * JOB_BYTES, queue)
    moved({1: JOB_BYTES}, 200 * JOB_BYTES, queue)  # while the other one has nothing to do
    found = moved(both, 400 * JOB_BYTES, queue)
    assert abs(found[2] - found[1]) <= 4 * JOB_BYTES
