"""The daemon's state as Client.status returns it: what `stormd status --json` prints, typed.

The fields are those that every daemon of this protocol version reports; `details` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

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
    """None if the daemon keeps no cache."""
    details: Mapping[str, Any] = field(repr=False)
    """The whole object as the daemon sent it."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> DaemonStatus:
        """Read the object that Status carries; raise KeyError if a field is missing."""
        cache = state["cache"]
        return cls(
            version=state["version"],
            uptime_seconds=state["uptime_seconds"],
            entries=state["entries"],
            pool=_read(PoolStatus, state["pool"]),
            sessions=tuple(_read(SessionStatus, item) for item in state["sessions"]),
            cache=None if cache is None else _read(CacheStatus, {**cache, **cache["counters"]}),
            details=state,
        )


Part = TypeVar("Part", PoolStatus, CacheStatus, SessionStatus)


def _read(kind: type[Part], state: Mapping[str, Any]) -> Part:
    return kind(**{one.name: state[one.name] for one in fields(kind)})
