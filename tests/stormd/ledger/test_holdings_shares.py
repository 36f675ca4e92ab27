"""Shares: sums that follow every change, and a share that costs nobody else anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stormd.ledger.holdings import Shares


def test_within_its_share_a_session_takes_nothing_common() -> None:
    shares = Shares()
    shares.limit(100, ())
    shares.moved(7, 0, 100)
    assert (shares.of_user(7), shares.common_bytes) == (100, 0)
    shares.moved(7, 100, 130)
    shares.moved(7, 0, 50)
    assert (shares.of_user(7), shares.common_bytes) == (180, 30)
    assert shares.taken(90, 120) == 20
    assert shares.taken(120, 90) == -20


def test_another_share_counts_from_then_on() -> None:
    shares = Shares()
    shares.moved(7, 0, 100)
    assert shares.common_bytes == 100
    shares.limit(60, (100,))
    assert shares.common_bytes == 40


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), max_size=40),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_sums_follow_every_change(
    changes: list[tuple[int, int]], first_share: int, second_share: int
) -> None:
    shares, used = Shares(), dict.fromkeys(range(4), 0)
    shares.limit(first_share, used.values())
    for number, (session, after) in enumerate(changes):
        if number == len(changes) // 2:
            shares.limit(second_share, used.values())
        shares.moved(session % 2, used[session], after)
        used[session] = after
        shares.assert_invariants([(session % 2, held) for session, held in used.items()])
