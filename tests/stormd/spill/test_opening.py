"""What the config asks of the tier on disk, and what is refused before anything is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.spilling import ENCRYPT, skip_without_disk

from stormd.config import Config
from stormd.errors import ConfigError
from stormd.ledger.chunks import blob_bound
from stormd.memory.extents import disk_bytes
from stormd.memory.host_pool import HostPool
from stormd.sizes import parse_size
from stormd.spill.opening import OpenTier, check_tier, open_tier

MIB = 1 << 20


def _config(tmp_path: Path, **settings: Any) -> Config:
    skip_without_disk(tmp_path)
    whole = {"spill_encrypt": ENCRYPT, "pool_bytes": 64 * MIB, "spill_bytes": 32 * MIB, **settings}
    return Config(spill_path=str(tmp_path), **whole)


def _open(config: Config, *devices: str) -> OpenTier:
    pool = HostPool(MIB)  # no address of it is used
    try:
        return open_tier(config, pool, devices or ("cpu",), lambda *_: None)
    finally:
        pool.close()


def test_it_is_as_large_as_asked_for_and_keeps_room_to_read(tmp_path: Path) -> None:
    made = _open(_config(tmp_path, spill_threads=2))
    space = made.disk.space
    assert 30 * MIB < space.capacity < space.end <= 32 * MIB
    assert 8 * MIB < made.disk.reserve < 9 * MIB
    assert not list(tmp_path.iterdir())
    assert made.tier.close(30.0)
    made = _open(_config(tmp_path, pool_bytes=1024 * MIB))
    assert made.disk.reserve == 64 * MIB, "a part of a large pool"
    assert made.tier.close(30.0)


def test_a_pool_must_hold_a_few_of_the_largest_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool_bytes is 64\.0 MiB.*part_bytes_cuda=96\.0 MiB"):
        _open(_config(tmp_path), "cpu", "cuda")


def _least(config: Config) -> int:
    """Return the least value that the refusal of a config names."""
    with pytest.raises(ConfigError, match=r"set \w+ to at least") as caught:
        check_tier(config, ["cpu"])
    found = re.search(r"to at least (\w+),", str(caught.value))
    assert found, caught.value
    return parse_size(found[1])


def test_the_least_pool_that_is_named_is_enough(tmp_path: Path) -> None:
    """Four blobs of the largest size are a little more than four of the largest parts."""
    least = _least(_config(tmp_path, pool_bytes=32 * MIB))
    assert _least(_config(tmp_path, pool_bytes=least - 1)) == least
    assert _open(_config(tmp_path, pool_bytes=least)).tier.close(30.0)


def test_the_least_file_that_is_named_holds_one_of_the_largest_blobs(tmp_path: Path) -> None:
    least = _least(_config(tmp_path, spill_bytes=1))
    assert _least(_config(tmp_path, spill_bytes=least - 1)) == least
    config = _config(tmp_path, spill_bytes=least)
    check_tier(config, ["cpu"])
    made = _open(config)
    assert made.disk.space.capacity >= disk_bytes(blob_bound(config.part_bytes_cpu))
    assert made.tier.close(30.0)


def test_shares_must_fit_beside_what_is_kept(tmp_path: Path) -> None:
    config = _config(tmp_path, session_share_bytes=MIB, max_sessions=60)
    with pytest.raises(ConfigError, match=r"session_share_bytes for max_sessions=60 are 60\.0 MiB"):
        _open(config)
