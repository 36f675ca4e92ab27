"""How many worker processes a daemon has, which devices each serves, and its part of the resources.

One Python interpreter is saturated by three to five GPUs, so each GPU has a process of its own if
there are two or more. An operator's settings are for the whole daemon: this module divides them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stormd.config import Config
from stormd.lanes.opening import served_uuids
from stormd.machine import memory_available
from stormd.memory.shared_rows import PoolBudget, UserTotals

__all__ = [
    "Plan",
    "WorkerPlace",
    "config_of",
    "front_config",
    "plan_workers",
    "shares_pool",
    "worker_config",
]

log = logging.getLogger(__name__)

MIN_BYTES: Final = 1 << 20
"""Least bytes of a pool, and so the size of the front's, in which nothing is stored."""

MIN_MESSAGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """One worker: its number, and its devices by ordinal and by UUID; none for the cpu lane."""

    index: int
    ordinals: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The worker's name in logs and tables."""
        return ", ".join(f"cuda:{one}" for one in self.ordinals) or f"cpu, worker {self.index}"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What makes a daemon a worker: it has no address, and serves what the front hands over.

    `lifeline` is where its clients' lifelines connect, `ordinals` are its devices, `totals` the
    bytes that users hold in all workers. `budget` is its part of a pool that all workers share,
    None if it has a pool of its own. `on_session(session, cause)` is called for each session that
    has its lifeline, with "attached", and for each that has ended. `provide_status` passes the
    state of all processes to its argument.
    """

    lifeline: Path
    ordinals: tuple[int, ...]
    totals: UserTotals
    budget: PoolBudget | None
    on_session: Callable[[int, str], None]
    provide_status: Callable[[Callable[[dict[str, Any]], None]], None]


def plan_workers(config: Config) -> list[Plan]:
    """Return the workers that these settings ask for; none if this process serves alone.

    May load CUDA's driver, but makes no context. Not for the event loop.
    """
    if config.workers == "off":
        return []
    is_alone = config.resumable or config.exit_with_last_client
    if config.workers == "auto" and is_alone:
        if config.resumable and len(served_uuids(config)) > 1:
            log.warning(
                "one process serves all devices: what is stored can outlive no worker; set "
                "resumable off for a worker each"
            )
        return []
    uuids = served_uuids(config)
    count = len(uuids) if config.workers == "auto" else int(config.workers)
    if count < 2:
        return []
    return [_plan_of(index, count, uuids) for index in range(count)]


def front_config(config: Config) -> Config:
    """Return the front's settings: it serves only the cache, by the cpu lane, and queries."""
    return replace(
        config,
        workers="off",
        pool_bytes=MIN_BYTES,
        device="cpu",
        spill_path="",
        spill_bytes=0,
        session_share_bytes=0,
        session_quota_bytes=0,
        uid_quota_bytes=0,
    )


def worker_config(config: Config, plan: Plan, count: int) -> Config:
    """Return one worker's settings, of `count`: an equal part of memory, disk space and threads.

    A shared (lent) pool is mapped in full by each worker. If shares are kept for sessions, each
    worker accepts only its part of `max_sessions`: it could not keep more shares.
    """
    staging = config.all_staging_bytes_cpu or memory_available() // 2
    sessions = config.max_sessions
    if config.session_share_bytes:
        sessions = max(1, sessions // count)
    return replace(
        config,
        workers="off",
        metrics_address="",
        resumable=False,
        exit_with_last_client=False,
        pool_bytes=config.pool_bytes // (1 if shares_pool(config) else count),
        cache_bytes=0,
        spill_bytes=config.spill_bytes // count,
        message_bytes=max(MIN_MESSAGE_BYTES, config.message_bytes // count),
        device=config.device if plan.ordinals else "cpu",
        all_staging_bytes_cpu=max(config.staging_bytes_cpu, staging // count),
        encode_threads=max(1, config.encode_threads // count),
        max_sessions=sessions,
        max_sessions_per_uid=min(sessions, config.sessions_per_uid),
    )


def shares_pool(config: Config) -> bool:
    """Return whether workers lend each other memory of the pool.

    They do if memory is taken as it is used. But shares kept for sessions, and blobs in flight from
    the disk, need a fixed part of the pool.
    """
    keeps = config.session_share_bytes or config.spill_path
    return config.pool_commit == "use" and not keeps


def config_of(fields: Mapping[str, Any]) -> Config:
    """Return the settings that `asdict` turned into `fields`, perhaps in another process."""
    return Config(**{**fields, "allowed_uids": tuple(fields["allowed_uids"])})


def _plan_of(index: int, count: int, uuids: list[str]) -> Plan:
    """Return the plan of every `count`-th device, from the `index`-th on."""
    ordinals = tuple(range(index, len(uuids), count))
    return Plan(index, ordinals, tuple(uuids[one] for one in ordinals))
