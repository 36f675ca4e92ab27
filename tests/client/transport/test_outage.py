"""An outage: announced once, attempted again and again, never twice at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from storm_client.transport.outage import ATTEMPT_SECONDS, Outage


def test_it_is_announced_once_until_it_ends() -> None:
    outage = Outage()
    assert [outage.announce(), outage.announce()] == [True, False]
    outage.end()
    assert outage.announce()


def test_attempts_keep_their_distance() -> None:
    outage = Outage()
    assert outage.attempt(10.0)
    assert not outage.attempt(10.0 + 5 * ATTEMPT_SECONDS)  # one is under way
    outage.attempted()
    assert outage.attempt(10.0 + ATTEMPT_SECONDS)
    outage.attempted()
    assert not outage.attempt(10.0 + 1.9 * ATTEMPT_SECONDS)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), max_size=50))
def test_whenever_it_is_asked(events: list[tuple[float, bool]]) -> None:
    outage, now, begun, under_way = Outage(), 0.0, [-ATTEMPT_SECONDS], False
    for pause, ends in events:
        now += pause
        if ends and under_way:
            outage.attempted()
            under_way = False
        due = outage.attempt(now)
        assert due == (not under_way and now >= begun[-1] + ATTEMPT_SECONDS)
        if due:
            begun.append(now)
            under_way = True
