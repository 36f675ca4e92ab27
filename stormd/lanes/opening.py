"""Opens the lanes that the config asks for.

A device that the config names is served, or its absence is an error. "auto" uses what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from storm_kernels.errors import BackendUnavailable

from stormd.config import Config
from stormd.errors import LaneUnavailable
from stormd.lanes import Lane, Post
from stormd.lanes.cpu import CpuLane
from stormd.machine import memory_available
from stormd.memory.host_pool import HostPool

__all__ = ["open_lanes", "served_uuids"]

log = logging.getLogger(__name__)


def served_uuids(config: Config) -> list[str]:
    """Return the UUIDs of the GPUs that are served with these settings, by ordinal.

    May load CUDA's driver, but makes no context. Not for the event loop.

    Raises:
        LaneUnavailable: the config names a device that this machine or build does not have.
    """
    if config.device == "cpu":
        return []
    try:
        # Not at the top: without CUDA, and on a cpu daemon, its libraries stay unloaded.
        from storm_kernels.cuda_driver import device_uuids

        return device_uuids()
    except (BackendUnavailable, ImportError) as error:
        if config.device == "cuda":
            raise LaneUnavailable(f"CUDA is not available: {error}") from error
        return []


def open_lanes(
    config: Config, pool: HostPool, post: Post, ordinals: Sequence[int] | None = None
) -> dict[str, Lane]:
    """Return the lanes by device. May take seconds; not for the event loop.

    The cuda lane serves the devices of these ordinals, or all visible devices if `ordinals` is
    None.

    Raises:
        LaneUnavailable: the config names a device that this machine or build does not have.
    """
    cuda = _open_cuda(config, pool, post, ordinals) if config.device != "cpu" else None
    cpu = _open_cpu(config, pool, post)
    lanes: dict[str, Lane] = {"cpu": cpu} if cuda is None else {"cpu": cpu, "cuda": cuda}
    for lane in lanes.values():
        lane.limit_link(config.link_limit_bytes)
    return lanes


def _open_cuda(
    config: Config, pool: HostPool, post: Post, ordinals: Sequence[int] | None
) -> Lane | None:
    """Return the lane of the devices; None if there are none and the config says "auto"."""
    try:
        # Not at the top: without CUDA, and on a cpu daemon, its libraries stay unloaded.
        from storm_kernels.ancf.cuda_modules import load_cupy
        from storm_kernels.cuda_driver import device_uuids

        from stormd.lanes.cuda.lane import CudaLane

        if ordinals is None:
            ordinals = range(len(device_uuids()))
        load_cupy()  # this compiles the codec
    except (BackendUnavailable, ImportError) as error:
        if config.device == "cuda":
            raise LaneUnavailable(f"CUDA is not available: {error}") from error
        log.info("no cuda lane: %s", error)
        return None
    return CudaLane(
        list(ordinals),
        pool=pool,
        post=post,
        staging_bytes=config.staging_bytes_cuda,
        chunk_bytes=config.part_bytes_cuda,
        direct_bytes=config.direct_bytes_cuda,
        is_resumable=config.resumable,
    )


def _open_cpu(config: Config, pool: HostPool, post: Post) -> CpuLane:
    left = max(memory_available() // 2, config.staging_bytes_cpu)
    return CpuLane(
        pool=pool,
        post=post,
        staging_bytes=config.staging_bytes_cpu,
        all_staging_bytes=config.all_staging_bytes_cpu or left,
        chunk_bytes=config.part_bytes_cpu,
        threads=config.encode_threads,
    )
