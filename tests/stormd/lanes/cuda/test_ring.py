"""Ranges of rings never overlap, and whoever waits for one gets it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.cuda.ring import Ring, RingPair, Side


def test_ranges_follow_one_another_and_then_begin_again() -> None:
    ring = Ring(range(100), 9, by_halves=False)
    taken = [ring.take(30) for _ in range(3)]
    assert taken == [range(30), range(30, 60), range(60, 90)]
    assert not ring.has(30)
    ring.give_back(taken[0])
    assert ring.has(30)
    assert not ring.has(31)
    assert ring.take(30) == range(30)
    assert not ring.has(1)


def test_a_range_as_large_as_all_is_to_be_had_when_none_is_in_use() -> None:
    ring = Ring(range(100), 9, by_halves=True)
    taken = [ring.take(30), ring.take(30)]
    assert not ring.has(100)
    for one in taken:
        ring.give_back(one)
    assert ring.has(100)
    assert not ring.has(101)


def test_no_more_are_in_use_than_may_be() -> None:
    ring = Ring(range(100), 2, by_halves=False)
    taken = [ring.take(1), ring.take(1)]
    assert not ring.has(1)
    ring.give_back(taken[1])
    assert ring.has(1)


@pytest.mark.parametrize(("capacity", "most"), [(80, 9), (800, 4)], ids=["bytes", "ranges"])
def test_by_halves_there_is_none_until_half_of_all_is_free(capacity: int, most: int) -> None:
    ring = Ring(range(capacity), most, by_halves=True)
    taken = [ring.take(20) for _ in range(4)]
    assert not ring.has(20)
    ring.give_back(taken[0])
    assert not ring.has(20)
    ring.give_back(taken[1])
    assert ring.has(20)
    ring.take(20)
    assert ring.has(20)  # half was free: all of it may be taken


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


def test_the_middle_is_for_whoever_needs_it_while_the_other_has_nothing_there() -> None:
    pair = RingPair(30, 40, 9, by_halves=False)
    low = [pair.take(Side.LOW, 30)]
    assert low == [range(30)]
    assert pair.has(Side.LOW, 40)
    low.append(pair.take(Side.LOW, 40))
    assert low[1] == range(30, 70)
    assert pair.has(Side.HIGH, 30)
    high = pair.take(Side.HIGH, 30)
    assert high == range(70, 100)
    assert not pair.has(Side.HIGH, 1)  # the middle is in use
    pair.give_back(Side.LOW, low[1])
    assert pair.has(Side.HIGH, 40)
    assert not pair.has(Side.LOW, 1)  # its own end is full, and the middle is promised
    assert pair.take(Side.HIGH, 40) == range(30, 70)
    assert not pair.has(Side.LOW, 1)
    pair.give_back(Side.LOW, low[0])
    assert pair.has(Side.LOW, 30)
    assert not pair.has(Side.LOW, 31)


def test_a_range_may_lie_in_an_end_and_the_middle() -> None:
    pair = RingPair(30, 40, 9, by_halves=False)
    assert pair.has(Side.HIGH, 60)
    high = pair.take(Side.HIGH, 60)
    assert high == range(30, 90)
    assert not pair.has(Side.LOW, 31)
    pair.give_back(Side.HIGH, high)
    assert pair.has(Side.LOW, 70)
    assert pair.take(Side.LOW, 70) == range(70)


@pytest.mark.parametrize("side", Side)
def test_one_that_keeps_all_it_can_have_leaves_the_other_its_end(side: Side) -> None:
    pair = RingPair(30, 40, 99, by_halves=True)
    while pair.has(side, 10):
        pair.take(side, 10)
    other = Side.HIGH if side is Side.LOW else Side.LOW
    for _ in range(9):
        assert pair.has(other, 30)
        pair.give_back(other, pair.take(other, 30))


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
