"""The state of a daemon as `stormd status --json` prints it: each part says its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
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
from stormd.monitoring.gpu_gauge import GpuGauge
from stormd.monitoring.logs import dropped_lines

__all__ = ["SESSIONS_SHOWN", "state"]

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
    """Return the state; on the event loop only, so that no part changes meanwhile."""
    use = space.use()
    sessions = ledger.sessions_status()
    ratio = ledger.raw_bytes / (use.used + use.promised) if use.used else None
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
        "spill": _spill_status(config, ledger),
        "sessions": sessions[:SESSIONS_SHOWN],
        "session_count": len(sessions),
        "entries": ledger.entries,
        "raw_bytes": ledger.raw_bytes,
        "ratio": ratio,
        "throughput": counters.throughput(),
        "earlier": asdict(earlier),
        "gpus": _gpus_status(lanes.values(), gauge),
        "link_limit_bytes": config.link_limit_bytes,
        "counters": counters.as_status(),
        "log": {"dropped_lines": dropped_lines()},
        "workers": [],
    }


def _spill_status(config: Config, ledger: Ledger) -> dict[str, Any] | None:
    """Return the tier on disk, None where there is none."""
    if ledger.spills is None:
        return None
    return {
        "path": config.spill_path,
        "encrypted": config.spill_encrypt == "on",
        **ledger.spills.as_status(time.monotonic()),
    }


def _gpus_status(lanes: Iterable[Lane], gauge: GpuGauge) -> list[dict[str, Any]]:
    """Return each GPU that is served; `busy_percent` is None where the driver does not say."""
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
