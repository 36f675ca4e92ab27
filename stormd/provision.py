"""What a daemon's parts get according to its settings: memory, limits, and who may connect."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

from stormd.config import Config
from stormd.handover import Handover
from stormd.lanes.opening import served_uuids
from stormd.ledger.chunks import blob_bound
from stormd.ledger.sessions import Limits
from stormd.memory.arena import Space, slack_of
from stormd.memory.numa import near_gpus, prefer_node
from stormd.spill.records import WORKER_BYTES

__all__ = [
    "adopted_spaces",
    "allowed_uids",
    "bytes_beside_pool",
    "cache_chunk_bytes",
    "limits_of",
    "near_gpu",
]

_T = TypeVar("_T")

REST_BYTES: Final = 32 << 20
"""Further growth of the process: socket buffers, its own state, libraries that load late. Measured
with one session: 6 MiB."""


def bytes_beside_pool(config: Config) -> int:
    """Return the bytes that serving takes beside the pool: cpu lane, disk, messages, the rest."""
    scratch = config.encode_threads * blob_bound(config.part_bytes_cpu)
    movers = config.spill_threads * WORKER_BYTES if config.spill_path else 0
    return REST_BYTES + scratch + movers + config.staging_bytes_cpu + config.message_bytes


def near_gpu(config: Config, make: Callable[[], _T]) -> _T:
    """Return the result of `make`, with memory of the NUMA node near the GPUs to be served.

    From now on this thread and those it starts take memory from that node. If the GPUs are near
    different nodes, no node is preferred.
    """
    prefer_node(near_gpus(range(len(served_uuids(config)))))
    return make()


def _spaces(config: Config) -> list[Space]:
    """Return the space of the pool, and of the cache if there is one; nothing is committed yet."""
    pool, cache = config.pool_bytes, config.cache_bytes
    spaces = [Space(pool, slack=slack_of(pool), committed=0)]
    if cache:
        base = config.cache_offset
        spaces.append(Space(cache, base=base, slack=slack_of(cache), committed=0))
    return spaces


def adopted_spaces(
    config: Config, handover: Handover | None
) -> tuple[list[Space], list[tuple[int, int]]]:
    """Return the spaces with the blocks of an earlier daemon, and their committed ranges.

    A range is an offset and its bytes. There are none without an earlier daemon's state, or if
    that state contradicts itself.
    """
    if handover is None or handover.state is None:
        return _spaces(config), []
    state, spaces = handover.state, _spaces(config)
    try:
        for space, committed in zip(spaces, state.layout.committed, strict=True):
            space.grow(committed)
        spaces[0].adopt(state.pool_blocks(), state.promised_bytes())
        for space in spaces[1:]:
            space.adopt(state.cache_blocks(), 0)
    except (ValueError, AssertionError) as error:
        handover.discard_state(str(error))
        return _spaces(config), []
    return spaces, [(space.base, space.committed) for space in spaces if space.committed]


def limits_of(config: Config) -> Limits:
    """Return the limits of what the ledger grants."""
    return Limits(
        max_sessions=config.max_sessions,
        user_sessions=config.sessions_per_uid,
        max_entries=config.max_entries_per_session,
        quota_bytes=config.session_quota_bytes,
        lease_seconds=config.lease_seconds,
        user_quota_bytes=config.uid_quota_bytes,
        share_bytes=config.session_share_bytes,
    )


def cache_chunk_bytes(config: Config) -> int:
    """Return the largest part that every lane takes, as any may get it; 0 without a cache."""
    return min(config.part_bytes_cpu, config.part_bytes_cuda) if config.cache_bytes else 0


def allowed_uids(config: Config) -> frozenset[int]:
    """Return who may connect: by default root and the daemon's own user."""
    return frozenset(config.allowed_uids or (0, os.getuid()))
