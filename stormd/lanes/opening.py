"""Opens the lanes that the config asks for.

What stays true: a device that was named is served or is an error; "auto" takes what is there.
"""

from __future__ import annotations

from collections.abc import Callable

from stormd.arena import Space
from stormd.config import Config
from stormd.errors import LaneUnavailable
from stormd.host_pool import HostPool
from stormd.lanes import Lane, Result
from stormd.lanes.cpu import CpuLane

__all__ = ["open_lanes"]


def open_lanes(
    config: Config, pool: HostPool, space: Space, post: Callable[[Result], None]
) -> dict[str, Lane]:
    """Return the lanes by device. May take seconds; not for the event loop.

    Raises:
        LaneUnavailable: the config names a device that this machine or build does not have.
    """
    if config.device == "cuda":
        raise LaneUnavailable("this build has no cuda lane: use --device cpu")
    return {"cpu": _open_cpu(config, pool, space, post)}


def _open_cpu(
    config: Config, pool: HostPool, space: Space, post: Callable[[Result], None]
) -> CpuLane:
    return CpuLane(
        pool=pool,
        space=space,
        post=post,
        staging_bytes=config.staging_bytes_cpu,
        part_bytes=config.part_bytes_cpu,
        threads=config.encode_threads,
    )
