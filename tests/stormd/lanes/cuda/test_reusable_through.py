"""Through which number all is done, in whatever order it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stormd.lanes.cuda.reusable_through import ReusableThrough


@given(st.sets(st.integers(1, 1000), max_size=30), st.randoms(use_true_random=False))
def test_all_through_the_number_are_done(numbers: set[int], random: object) -> None:
    turns = ReusableThrough()
    expected = sorted(numbers)
    for number in expected:
        turns.expect(number)
    left, through = list(expected), 0
    random.shuffle(left)  # type: ignore[attr-defined]
    while left:
        some = [left.pop() for _ in range(min(2, len(left)))]
        now = turns.done(some)
        assert now >= through
        through = now
        assert all(number > through for number in left)
        following = [number for number in expected if number > through]
        assert not following or following[0] in left
        assert turns.done(some) == through
    assert through == max(numbers, default=0)
