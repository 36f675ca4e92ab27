from __future__ import annotations

import select

from storm_client.transport.wakeup import Wakeup


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
