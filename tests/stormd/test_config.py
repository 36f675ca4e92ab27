"""The settings: defaults and limits, of each and between them."""

from __future__ import annotations

import dataclasses
import grp
from typing import Any

import pytest

from stormd.config import Config, config_options, default_of
from stormd.errors import ConfigError


def test_pool_and_cache_are_pinned_beside_each_other() -> None:
    assert Config(pool_bytes=3 << 20, cache_bytes=1 << 20).host_bytes == (4 << 20) + (128 << 10)
    assert Config(pool_bytes=3 << 20, cache_bytes=0).host_bytes == (3 << 20) + (96 << 10)


def test_every_field_is_an_option() -> None:
    assert [option.name for option in config_options()] == [
        item.name for item in dataclasses.fields(Config)
    ]
    assert all(option.help and option.section for option in config_options())
    assert all(default_of(option) is not None for option in config_options())


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"pool_bytes": 5}, ["pool_bytes", "5 bytes", "1048576", "--pool-bytes"]),
        ({"pool_bytes": -1}, ["pool_bytes", "-1 bytes"]),
        ({"pool_bytes": True}, ["pool_bytes", "True", "4GiB"]),
        ({"pool_bytes": "4GiB"}, ["pool_bytes", "'4GiB'"]),
        ({"address": "tcp://host:1"}, ["tcp://host:1", "ipc:///PATH", "--address"]),
        ({"address": "ipc://" + "/x" * 60}, ["120 bytes", "shorter"]),
        ({"device": "gpu"}, ["device", "'gpu'", "cuda"]),
        ({"part_bytes_cpu": 64 << 20}, ["part_bytes_cpu", "64.0 MiB", "staging_bytes_cpu"]),
        ({"part_bytes_cuda": 1 << 31}, ["part_bytes_cuda", "1.0 GiB"]),
        ({"encode_threads": 0}, ["encode_threads", "0", "at least 1"]),
        ({"lease_seconds": 0.0}, ["lease_seconds", "0 seconds", "0.1 seconds"]),
        ({"lease_seconds": float("nan")}, ["lease_seconds", "nan"]),
        ({"socket_mode": 0o444}, ["socket_mode", "0o444", "0o600"]),
        ({"allowed_uids": (-1,)}, ["allowed_uids", "-1"]),
        ({"allowed_uids": ("root",)}, ["allowed_uids", "root"]),
        ({"allowed_uids": (0, 2**32 - 1)}, ["allowed_uids", "4294967295]", "0 to 4294967294"]),
        ({"socket_group": "nosuch"}, ["socket_group", "'nosuch'", "groupadd"]),
        ({"socket_group": "a\0b"}, ["socket_group", "no such group"]),
        ({"log_level": "loud"}, ["log_level", "'loud'", "warning"]),
    ],
)
def test_errors_name_value_limit_and_next_step(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    for part in parts:
        assert part in str(caught.value)


def test_groups_and_users_that_can_be_are_taken() -> None:
    group = grp.getgrall()[0].gr_name
    config = Config(socket_group=group, allowed_uids=(0, 2**32 - 2))
    assert (config.socket_group, config.allowed_uids) == (group, (0, 2**32 - 2))


def test_metrics_address_is_read_at_construction() -> None:
    assert Config(metrics_address="[::1]:9464").metrics_address == "[::1]:9464"
    assert Config().metrics_address == ""
    with pytest.raises(ConfigError, match="metrics_address is '9464'"):
        Config(metrics_address="9464")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_sessions": 5, "pool_bytes": 4 << 20}, "max_sessions=5"),
        ({"session_quota_bytes": 1000}, "session_quota_bytes is"),
        ({"uid_quota_bytes": 1000}, "uid_quota_bytes is"),
    ],
)
def test_a_share_must_be_there_and_allowed(changes: dict[str, int], words: str) -> None:
    fits = {"session_share_bytes": 1 << 20, "max_sessions": 4, "pool_bytes": 4 << 20}
    assert Config(**fits).session_share_bytes == 1 << 20
    with pytest.raises(ConfigError, match=words):
        Config(**{**fits, **changes})
