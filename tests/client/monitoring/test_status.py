"""What a client returns of its daemon's state."""

from __future__ import annotations

import pytest
from storm_client.monitoring.status import CacheStatus, DaemonStatus, PoolStatus, SessionStatus

STATE = {
    "version": "1.2",
    "uptime_seconds": 3.5,
    "entries": 2,
    "pool": {"capacity_bytes": 100, "used_bytes": 40, "more": 1},
    "sessions": [
        {"id": 9, "pid": 8, "uid": 7, "device": "cpu", "entries": 2, "used_bytes": 40, "more": 1}
    ],
    "cache": {
        "capacity_bytes": 50,
        "used_bytes": 20,
        "items": 1,
        "counters": {"hits": 4, "misses": 3, "evictions": 2, "more": 1},
    },
    "more": 1,
}


def test_it_is_read_from_the_wire() -> None:
    status = DaemonStatus.of(STATE)
    assert (status.version, status.uptime_seconds, status.entries) == ("1.2", 3.5, 2)
    assert status.pool == PoolStatus(capacity_bytes=100, used_bytes=40)
    assert status.sessions == (
        SessionStatus(id=9, pid=8, uid=7, device="cpu", entries=2, used_bytes=40),
    )
    assert status.cache == CacheStatus(50, 20, items=1, hits=4, misses=3, evictions=2)
    assert status.details["more"] == 1
    assert "more" not in repr(status)
    assert DaemonStatus.of({**STATE, "cache": None}).cache is None
    with pytest.raises(KeyError, match="pool"):
        DaemonStatus.of({name: value for name, value in STATE.items() if name != "pool"})
