"""Opens the tier on disk that the config asks for.

Problems are reported at start, and before the pool is pinned if they can be known then: a directory
that cannot be used, no encryption package, too small a pool. Only the disk space is taken later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stormd.config import Config
from stormd.errors import ConfigError
from stormd.ledger.chunks import blob_bound
from stormd.ledger.on_disk import Disk
from stormd.memory.arena import Space, granules
from stormd.memory.extents import PAGE, disk_bytes
from stormd.memory.host_pool import HostPool
from stormd.sizes import exact_size, format_size
from stormd.spill.file import SpillFile, check_directory
from stormd.spill.sealing import Checksums, Encryption, Sealer
from stormd.spill.tier import Post, SpillTier

__all__ = ["OpenTier", "check_tier", "open_tier"]

log = logging.getLogger(__name__)

SLACK_PART: Final = 33
"""Divisor: this part of the file is kept free, so that blobs do not split ever finer."""

RESERVE_PART: Final = 16
"""Divisor: this part of the pool is reserved for reading, or the largest blob's size if more."""


@dataclass(frozen=True, slots=True)
class OpenTier:
    """The tier, and its space on disk."""

    tier: SpillTier
    disk: Disk


def check_tier(config: Config, devices: Iterable[str]) -> None:
    """Check all of the tier that needs neither the pool nor the disk space. Not for the event loop.

    Raises:
        SpillUnavailable, ConfigError: as `open_tier`; or the file is too small to be of use.
    """
    if not config.spill_path:
        return
    check_directory(Path(config.spill_path))
    _sealer(config)
    name = _largest_part(config, devices)
    _reserve(config, name)
    _check_room(config, name)


def open_tier(config: Config, pool: HostPool, devices: Iterable[str], post: Post) -> OpenTier:
    """Open the tier that the config names; `devices` are those of its lanes.

    This may take seconds, so it must not run on the event loop.

    Raises:
        SpillUnavailable: the directory, its file system or this installation does not support it.
        ConfigError: the pool is too small to read into.
    """
    reserve = _reserve(config, _largest_part(config, devices))
    sealer = _sealer(config)
    file = SpillFile(Path(config.spill_path), granules(config.spill_bytes, PAGE))
    try:
        tier = SpillTier(
            file=file,
            sealer=sealer,
            pool_address=pool.address,
            post=post,
            threads=config.spill_threads,
        )
    except BaseException:
        file.close()
        raise
    encrypts = config.spill_encrypt == "on"
    fields = {"path": config.spill_path, "bytes": config.spill_bytes, "encrypted": encrypts}
    log.info("tier on disk opened", extra=fields)
    return OpenTier(tier, Disk(_space(config.spill_bytes), reserve))


def _sealer(config: Config) -> Sealer:
    return Encryption() if config.spill_encrypt == "on" else Checksums()


def _largest_part(config: Config, devices: Iterable[str]) -> str:
    """Return the name of the largest of the lanes' part_bytes."""
    return max((f"part_bytes_{device}" for device in devices), key=lambda one: getattr(config, one))


def _space(nbytes: int) -> Space:
    slack = nbytes // SLACK_PART // PAGE * PAGE
    return Space(nbytes - slack, slack=slack, granule=PAGE)


def _reserve(config: Config, name: str) -> int:
    """Return the bytes of the pool for reading: at least the largest blob of any lane.

    `name` is that of the setting of the largest blob's bytes.
    """
    part: int = getattr(config, name)
    largest = granules(blob_bound(part))
    reserve = max(largest, granules(config.pool_bytes // RESERVE_PART))
    if 4 * largest > config.pool_bytes:
        raise ConfigError(
            f"pool_bytes is {format_size(config.pool_bytes)}, and with a tier on disk must hold "
            f"four of the largest pieces, {name}={format_size(part)} and a header each: set "
            f"pool_bytes to at least {exact_size(4 * largest)}, or lower {name}"
        )
    shares = config.max_sessions * config.session_share_bytes
    if shares > config.pool_bytes - reserve:
        raise ConfigError(
            f"session_share_bytes for max_sessions={config.max_sessions} are {format_size(shares)} "
            f"together, and the tier on disk leaves {format_size(config.pool_bytes - reserve)} of "
            "the pool for them: lower one or raise pool_bytes"
        )
    return reserve


def _check_room(config: Config, name: str) -> None:
    """Check that the file holds one of the largest blobs, beside what is kept free of it."""
    part: int = getattr(config, name)
    least = granules(disk_bytes(blob_bound(part)) * SLACK_PART // (SLACK_PART - 1), PAGE)
    if config.spill_bytes < least:
        raise ConfigError(
            f"spill_bytes is {format_size(config.spill_bytes)}, and must hold one of the largest "
            f"pieces, {name}={format_size(part)}, and what is kept free beside it: set spill_bytes "
            f"to at least {exact_size(least)}, or lower {name}"
        )
