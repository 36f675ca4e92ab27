"""Real daemons and trainers for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stormd.child_daemon import ChildDaemon

PATIENCE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients in this process wait for a daemon that the machine gives no time to.

    Otherwise they keep what they were to offload, as they should, and count nothing of it.
    """
    monkeypatch.setattr("storm_client.storing.PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("storm_client.departing.PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("storm_client.hooks.SETTLE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=512MiB", "--cache-bytes=8MiB", "--device=cpu"]) as daemon:
        yield daemon
