"""Ranges of rings never overlap, and whoever waits for one gets it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.cuda.ring import Ring, RingPair, Side


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 9)), max_size=60),
)
def test_whatever_order_they_come_back_in(by_halves: bool, wanted: list[tuple[int, int]]) -> None:
    ring = Ring(range(100), 5, by_halves=by_halves)
    used: list[range] = []
    for nbytes, which in wanted:
        while not ring.has(nbytes):
            assert used, "nothing is in use, and there is no range"
            ring.give_back(used.pop(which % len(used)))
        used.append(ring.take(nbytes))
        assert len(used) <= 5
        assert len(used[-1]) == nbytes
        assert_apart(used, 100)


def assert_apart(used: list[range], capacity: int) -> None:
    """Check that ranges lie in a memory and do not overlap."""
    covered = sorted((one.start, one.stop) for one in used)
    assert covered[0][0] >= 0
    assert covered[-1][1] <= capacity
    assert all(one[1] <= other[0] for one, other in pairwise(covered))


def test_a_range_may_lie_in_an_end_and_the_middle() -> None:
    pair = RingPair(30, 40, 9, by_halves=False)
    assert pair.has(Side.HIGH, 60)
    high = pair.take(Side.HIGH, 60)
    assert high == range(30, 90)
    assert not pair.has(Side.LOW, 31)
    pair.give_back(Side.HIGH, high)
    assert pair.has(Side.LOW, 70)
    assert pair.take(Side.LOW, 70) == range(70)


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(Side), st.integers(1, 30), st.integers(0, 9)), max_size=60),
)
def test_two_that_share_a_memory(by_halves: bool, wanted: list[tuple[Side, int, int]]) -> None:
    """Each gets what it wants by giving back its own alone."""
    pair = RingPair(30, 40, 5, by_halves=by_halves)
    used: dict[Side, list[range]] = {side: [] for side in Side}
    for side, nbytes, which in wanted:
        mine = used[side]
        while not pair.has(side, nbytes):
            assert mine, "nothing of its own is in use, and there is no range"
            pair.give_back(side, mine.pop(which % len(mine)))
        mine.append(pair.take(side, nbytes))
        assert len(mine) <= 5
        assert len(mine[-1]) == nbytes
        assert_apart(used[Side.LOW] + used[Side.HIGH], pair.nbytes)
