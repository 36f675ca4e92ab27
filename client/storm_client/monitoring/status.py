"""The daemon's state as Client.status returns it: what `stormd status --json` prints, typed.

Fields are what each daemon of this protocol version reports; whatever else it says is in `details`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CacheStatus", "DaemonStatus", "PoolStatus", "SessionStatus"]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The daemon's host memory."""

    capacity_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The daemon's shared cache; `evictions` counts tensors that were dropped to make room."""

    capacity_bytes: int
    used_bytes: int
    items: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One connected process on one device."""

    id: int
    pid: int
    uid: int
    device: str
    entries: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """The state of a daemon at one moment."""

    version: str
    uptime_seconds: float
    entries: int
    pool: PoolStatus
    sessions: tuple[SessionStatus, ...]
    cache: CacheStatus | None
    """None where the daemon keeps no cache."""
    details: Mapping[str, Any]
    """The whole object as it was sent."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> DaemonStatus:
        """Read the object that Status carries.

        Raises:
            KeyError: a field is missing.
        """
        pool = state["pool"]
        return cls(
            version=state["version"],
            uptime_seconds=state["uptime_seconds"],
            entries=state["entries"],
            pool=PoolStatus(pool["capacity_bytes"], pool["used_bytes"]),
            sessions=tuple(_session(item) for item in state["sessions"]),
            cache=_cache(state["cache"]),
            details=state,
        )


def _cache(state: Mapping[str, Any] | None) -> CacheStatus | None:
    if state is None:
        return None
    counters = state["counters"]
    return CacheStatus(
        capacity_bytes=state["capacity_bytes"],
        used_bytes=state["used_bytes"],
        items=state["items"],
        hits=counters["hits"],
        misses=counters["misses"],
        evictions=counters["evictions"],
    )


def _session(item: Mapping[str, Any]) -> SessionStatus:
    return SessionStatus(
        id=item["id"],
        pid=item["pid"],
        uid=item["uid"],
        device=item["device"],
        entries=item["entries"],
        used_bytes=item["used_bytes"],
    )
