"""The state of a daemon as `stormd status --json` prints it, collected from its parts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from stormd import __version__
from stormd.cache.items import Cache
from stormd.config import Config
from stormd.lanes import Lane
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import Totals
from stormd.memory.arena import Space
from stormd.memory.host_pool import HostPool
from stormd.monitoring.counters import Counters
from stormd.monitoring.logs import dropped_lines
from stormd.monitoring.nvml import GpuGauge
from stormd.protocol import DEVICES

__all__ = ["SESSIONS_SHOWN", "merged_status", "state"]

SESSIONS_SHOWN: Final = 1024
"""Sessions that `status` lists: more would not fit into a frame."""


def state(
    *,
    config: Config,
    opened_at: float,
    is_resumable: bool,
    earlier: Totals,
    pool: HostPool,
    space: Space,
    cache: Cache | None,
    ledger: Ledger,
    lanes: Mapping[str, Lane],
    gauge: GpuGauge,
    counters: Counters,
) -> dict[str, Any]:
    """Return the state. On the event loop only, so that no part changes meanwhile."""
    use, holdings = space.use(), ledger.holdings
    spill = _spill_status(config, ledger)
    sessions = ledger.sessions_status()
    return {
        "version": __version__,
        "pid": os.getpid(),
        "address": config.address,
        "uptime_seconds": time.monotonic() - opened_at,
        "lanes": list(lanes),
        "resumable": is_resumable,
        "pool": {
            "capacity_bytes": space.capacity,
            "committed_bytes": space.committed,
            "used_bytes": use.used,
            "promised_bytes": use.promised,
            "peak_used_bytes": use.peak_used,
            "largest_free_bytes": use.largest_free,
            "locked": pool.locked,
        },
        "cache": None if cache is None else cache.as_status(),
        "spill": spill,
        "sessions": sessions[:SESSIONS_SHOWN],
        "session_count": len(sessions),
        "entries": holdings.entries,
        "raw_bytes": holdings.raw_bytes,
        "ratio": _ratio(holdings.raw_bytes, use.used, use.promised, spill),
        "throughput": counters.throughput(),
        "earlier": asdict(earlier),
        "gpus": _gpus_status(lanes.values(), gauge),
        "link_limit_bytes": config.link_limit_bytes,
        "counters": counters.as_status(),
        "log": {"dropped_lines": dropped_lines()},
        "workers": [],
    }


def _ratio(
    raw_bytes: int, used: int, promised: int, spill: Mapping[str, Any] | None
) -> float | None:
    """Return the bytes before encoding for each byte in the pool and, if there is a tier on disk,
    on the disk alone; None if nothing is stored.
    """
    stored = used + (0 if spill is None else spill["away_bytes"])
    return raw_bytes / (stored + promised) if stored else None


def _spill_status(config: Config, ledger: Ledger) -> dict[str, Any] | None:
    if ledger.spills is None:
        return None
    return {
        "path": config.spill_path,
        "encrypted": config.spill_encrypt == "on",
        **ledger.spills.as_status(time.monotonic()),
    }


def _gpus_status(lanes: Iterable[Lane], gauge: GpuGauge) -> list[dict[str, Any]]:
    """Return each served GPU; `busy_percent` is None if the driver does not report it."""
    links = [link for lane in lanes for link in lane.links]
    return [
        {
            "device": link.device,
            "uuid": link.uuid,
            "busy_percent": gauge.busy_percent(link.uuid),
            "link": link.as_status(),
        }
        for link in links
    ]


# --- of worker processes --------------------------------------------------------------------


def merged_status(
    front: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    counters: Counters,
    workers: list[dict[str, Any]],
    pool_bytes: int,
) -> dict[str, Any]:
    """Return the state of a front and its workers, as one process would report it.

    Sessions are the front's, each with its worker's figures. The front's own minimal pool serves
    nobody and is left out.

    `states` are the last states of the running workers, `counters` those of all processes, and
    `workers` the row shown for each worker. `pool_bytes` is the size of the whole pool. If workers
    lend each other memory, their capacities add up to more than that.
    """
    pool = _merged_pool([state["pool"] for state in states])
    pool["capacity_bytes"] = min(pool["capacity_bytes"], pool_bytes)
    spill = _merged_spill([state["spill"] for state in states if state["spill"] is not None])
    raw_bytes = sum(state["raw_bytes"] for state in states)
    lanes = {lane for state in states for lane in state["lanes"]}
    return {
        **front,
        "lanes": [device for device in DEVICES if device in lanes],
        "pool": pool,
        "spill": spill,
        "sessions": _merged_sessions(front["sessions"], states),
        "entries": front["entries"] + sum(state["entries"] for state in states),
        "raw_bytes": raw_bytes,
        "ratio": _ratio(raw_bytes, pool["used_bytes"], pool["promised_bytes"], spill),
        "throughput": counters.throughput(),
        "gpus": sorted(
            (gpu for state in states for gpu in state["gpus"]), key=lambda gpu: gpu["device"]
        ),
        "counters": counters.as_status(),
        "log": {"dropped_lines": sum(one["log"]["dropped_lines"] for one in (front, *states))},
        "workers": workers,
    }


def _merged_sessions(
    sessions: list[dict[str, Any]], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the front's sessions with their worker's figures; the pid is always the front's."""
    known = {one["id"]: one for state in states for one in state["sessions"]}
    return [{**one, **known.get(one["id"], {}), "pid": one["pid"]} for one in sessions]


def _merged_pool(pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the pools as one; its peak is the sum of peaks, which need not be of one moment."""
    names = ("capacity", "committed", "used", "promised", "peak_used")
    return {
        **{f"{name}_bytes": sum(pool[f"{name}_bytes"] for pool in pools) for name in names},
        "largest_free_bytes": max((pool["largest_free_bytes"] for pool in pools), default=0),
        "locked": all(pool["locked"] for pool in pools),
    }


def _merged_spill(tiers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
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


def _direction(ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one direction of the disk summed over all workers, speeds included."""
    return {name: sum(way[name] for way in ways) for name in ways[0]}
