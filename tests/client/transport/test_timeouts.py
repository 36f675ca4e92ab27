from __future__ import annotations

from types import SimpleNamespace

import pytest
from storm_client.transport import timeouts as module
from storm_client.transport.timeouts import Patience


class Clock:
    """A clock, and a connection at which nothing comes: each wait lasts until its deadline."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, deadline: float) -> bool:
        self.now = deadline
        return False


def test_a_daemon_that_answers_others_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, transfers = Clock(), SimpleNamespace(answered=3)
    monkeypatch.setattr(module, "time", clock)
    patience = Patience(clock, transfers)  # type: ignore[arg-type]
    transfers.answered += 1
    assert patience.wait()
    transfers.answered += 2
    assert patience.wait()
    assert not patience.wait(), "nothing has been answered since"
    assert clock.now == 3 * module.STALL_SECONDS


def test_it_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, transfers = Clock(), SimpleNamespace(answered=0)
    monkeypatch.setattr(module, "time", clock)
    patience = Patience(clock, transfers)  # type: ignore[arg-type]
    transfers.answered += 1
    while patience.wait():
        transfers.answered += 1
    assert clock.now == module.LONGEST_SECONDS
