"""An inbox loses nothing, and no wait for it is longer than it was asked to be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from stormd.lanes.cuda.inbox import Inbox

PRODUCERS, EACH = 4, 2000


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_wait_ends_for_what_comes(often_switched: None) -> None:
    """Each producer waits until what it has put is taken, so that the inbox is often empty."""
    inbox: Inbox[tuple[int, threading.Event]] = Inbox()

    def produce(number: int) -> None:
        for count in range(EACH):
            taken = threading.Event() if count % 8 == 0 else None
            inbox.put((number, taken or threading.Event()))
            if taken is not None:
                taken.wait()

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < PRODUCERS * EACH:
        inbox.wait()  # for ever, if an item could be put unseen
        for number, taken in inbox.take():
            found.append(number)
            taken.set()
    for thread in threads:
        thread.join()
    assert all(found.count(number) == EACH for number in range(PRODUCERS))
