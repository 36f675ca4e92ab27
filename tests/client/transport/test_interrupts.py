"""What wakes threads, and a set of what lives: no Python code runs where an interrupt is lost.

That waits keep their locks is shown by `tests/client/test_interrupts.py`.
"""

from __future__ import annotations

import select
import sys
import threading

from storm_client.transport.interrupts import SafeCondition, SafeWeakSet, Wakeup
from support.waiting import wait_until


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


def test_a_thread_that_polls_is_woken_by_a_descriptor_and_by_a_change() -> None:
    lock = threading.RLock()
    changed, other, poller = SafeCondition(lock), Wakeup(), select.poll()
    changed.wakeup = Wakeup()
    for wakeup in (changed.wakeup, other):
        poller.register(wakeup, select.POLLIN)

    def poll() -> None:
        with lock:
            changed.poll(poller, 60)

    def notify() -> None:
        with lock:
            changed.notify_all()

    for wake in (notify, other.signal):
        thread = threading.Thread(target=poll)
        thread.start()
        wait_until(lambda: changed.is_polled)
        with lock:  # which the thread has left
            pass
        wake()
        thread.join(30)
        assert not thread.is_alive()
        assert not is_readable(changed.wakeup)
    assert not changed.is_polled


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
