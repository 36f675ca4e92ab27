"""An interrupt that comes where results are sent to the daemon."""

from __future__ import annotations

from typing import Any

import pytest
from storm_client.transport.session import Session

__all__ = ["interrupt_second"]


def interrupt_second(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Have Ctrl-C come "before" results are sent for the second time from now on, or "after"."""
    send, strikes = Session.send_results, iter([False, True])

    def interrupted(self: Session, records: Any) -> None:
        struck = next(strikes, False)
        if struck and when == "before":
            raise KeyboardInterrupt
        send(self, records)
        if struck:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "send_results", interrupted)
