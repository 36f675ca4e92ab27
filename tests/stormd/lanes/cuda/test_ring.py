"""Ranges of a ring never overlap, and whoever waits for one gets it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.cuda.ring import Ring


def test_ranges_follow_one_another_and_then_begin_again() -> None:
    ring = Ring(100, 9, by_halves=False)
    taken = [ring.take(30) for _ in range(3)]
    assert taken == [range(30), range(30, 60), range(60, 90)]
    assert not ring.has(30)
    ring.give_back(taken[0])
    assert ring.has(30)
    assert not ring.has(31)
    assert ring.take(30) == range(30)
    assert not ring.has(1)


def test_a_range_as_large_as_all_is_to_be_had_when_none_is_in_use() -> None:
    ring = Ring(100, 9, by_halves=True)
    taken = [ring.take(30), ring.take(30)]
    assert not ring.has(100)
    for one in taken:
        ring.give_back(one)
    assert ring.has(100)
    assert not ring.has(101)


def test_no_more_are_in_use_than_may_be() -> None:
    ring = Ring(100, 2, by_halves=False)
    taken = [ring.take(1), ring.take(1)]
    assert not ring.has(1)
    ring.give_back(taken[1])
    assert ring.has(1)


@pytest.mark.parametrize(("capacity", "most"), [(80, 9), (800, 4)], ids=["bytes", "ranges"])
def test_by_halves_there_is_none_until_half_of_all_is_free(capacity: int, most: int) -> None:
    ring = Ring(capacity, most, by_halves=True)
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
    ring = Ring(100, 5, by_halves=by_halves)
    used: list[range] = []
    for nbytes, which in wanted:
        while not ring.has(nbytes):
            assert used, "nothing is in use, and there is no range"
            ring.give_back(used.pop(which % len(used)))
        used.append(ring.take(nbytes))
        assert len(used) <= 5
        covered = sorted((one.start, one.stop) for one in used)
        assert covered[0][0] >= 0
        assert covered[-1][1] <= 100
        assert all(one[1] <= other[0] for one, other in pairwise(covered))
        assert len(used[-1]) == nbytes
