"""One state out of the front's and its workers', as one process would report it.

Sessions are the front's, with what their worker says of each. What the front has of a pool is for
nobody and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stormd.monitoring.counters import Counters
from stormd.protocol import DEVICES

__all__ = ["merged_status"]

State = Mapping[str, Any]


def merged_status(
    front: State,
    states: Sequence[State],
    counters: Counters,
    workers: list[dict[str, Any]],
    pool_bytes: int,
) -> dict[str, Any]:
    """Return the state of the whole daemon.

    `states` are the last ones of the workers there are, `counters` those of all processes, and
    `workers` what is shown of each. `pool_bytes` is the pool of all, which workers may lend each
    other: what each may have is then more than its part.
    """
    pool = _pool([state["pool"] for state in states])
    pool["capacity_bytes"] = min(pool["capacity_bytes"], pool_bytes)
    raw_bytes = sum(state["raw_bytes"] for state in states)
    taken = pool["used_bytes"] + pool["promised_bytes"]
    lanes = {lane for state in states for lane in state["lanes"]}
    return {
        **front,
        "lanes": [device for device in DEVICES if device in lanes],
        "pool": pool,
        "spill": _spill([state["spill"] for state in states if state["spill"] is not None]),
        "sessions": _sessions(front["sessions"], states),
        "entries": front["entries"] + sum(state["entries"] for state in states),
        "raw_bytes": raw_bytes,
        "ratio": raw_bytes / taken if pool["used_bytes"] else None,
        "throughput": counters.throughput(),
        "gpus": sorted(
            (gpu for state in states for gpu in state["gpus"]), key=lambda gpu: gpu["device"]
        ),
        "counters": counters.as_status(),
        "log": {"dropped_lines": sum(one["log"]["dropped_lines"] for one in (front, *states))},
        "workers": workers,
    }


def _sessions(sessions: list[dict[str, Any]], states: Sequence[State]) -> list[dict[str, Any]]:
    """Return the front's sessions; who they are is its word, what they hold is their worker's."""
    known = {one["id"]: one for state in states for one in state["sessions"]}
    return [{**one, **known.get(one["id"], {}), "pid": one["pid"]} for one in sessions]


def _pool(pools: Sequence[State]) -> dict[str, Any]:
    """Return the sums; the peak is that of the workers' peaks, which need not be of one moment."""
    names = ("capacity", "committed", "used", "promised", "peak_used")
    return {
        **{f"{name}_bytes": sum(pool[f"{name}_bytes"] for pool in pools) for name in names},
        "largest_free_bytes": max((pool["largest_free_bytes"] for pool in pools), default=0),
        "locked": all(pool["locked"] for pool in pools),
    }


def _spill(tiers: Sequence[State]) -> dict[str, Any] | None:
    if not tiers:
        return None
    names = ("capacity_bytes", "used_bytes", "away_bytes", "lost_entries")
    return {
        **tiers[0],
        **{name: sum(tier[name] for tier in tiers) for name in names},
        "oldest_seconds": max(tier["oldest_seconds"] for tier in tiers),
        "ended": next((tier["ended"] for tier in tiers if tier["ended"]), ""),
        **{way: _direction([tier[way] for tier in tiers]) for way in ("write", "read")},
    }


def _direction(ways: Sequence[State]) -> dict[str, Any]:
    """Return one direction of the disk, whose speed is what all workers have had of it."""
    return {name: sum(way[name] for way in ways) for name in ways[0]}
