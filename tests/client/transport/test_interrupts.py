"""What wakes the listener, and a set of what lives: no Python code runs where an interrupt is lost.

That waits keep their locks is shown by `tests/client/test_interrupts.py`.
"""

from __future__ import annotations

import select
import sys

from storm_client.transport.interrupts import SafeWeakSet, Wakeup


def is_readable(wakeup: Wakeup) -> bool:
    poller = select.poll()
    poller.register(wakeup.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def test_a_signal_is_seen_once() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup)
    wakeup.signal()
    wakeup.signal()
    assert is_readable(wakeup)
    assert wakeup.clear()
    assert not wakeup.clear()
    assert not is_readable(wakeup)


class Member:
    pass


def test_what_is_left_of_the_dead_does_not_grow() -> None:
    members: SafeWeakSet[Member] = SafeWeakSet()
    kept = Member()
    members.add(kept)
    for _ in range(100):
        members.add(Member())
    assert len(members._members) <= 2
    assert list(members) == [kept]


def test_no_python_code_runs_when_a_member_dies() -> None:
    members: SafeWeakSet[Member] = SafeWeakSet()
    member = Member()
    members.add(member)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    del member
    sys.setprofile(None)
    assert "call" not in calls
