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


def test_a_daemon_without_a_cache_has_none() -> None:
    assert DaemonStatus.of({**STATE, "cache": None}).cache is None


@pytest.mark.parametrize(
    "field", ["version", "uptime_seconds", "entries", "pool", "sessions", "cache"]
)
def test_a_missing_field_is_an_error(field: str) -> None:
    with pytest.raises(KeyError, match=field):
        DaemonStatus.of({name: value for name, value in STATE.items() if name != field})
