from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from stormd.config import Config
from stormd.errors import ConfigError
from stormd.workers import plan
from stormd.workers.plan import (
    Plan,
    config_of,
    front_config,
    plan_workers,
    worker_config,
)

MIB = 1 << 20


def planned(monkeypatch: pytest.MonkeyPatch, gpus: int, **settings: object) -> list[Plan]:
    uuids = [f"gpu-{n}" for n in range(gpus)]
    monkeypatch.setattr(
        plan, "served_uuids", lambda config: [] if config.device == "cpu" else uuids
    )
    return plan_workers(Config(**settings))  # type: ignore[arg-type]


def test_two_gpus_or_more_have_a_worker_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(monkeypatch, 3)
    assert [one.ordinals for one in found] == [(0,), (1,), (2,)]
    assert [one.uuids for one in found] == [("gpu-0",), ("gpu-1",), ("gpu-2",)]


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": "off"},
        {"device": "cpu"},
        {"resumable": True},
        {"exit_with_last_client": True},
    ],
)
def test_one_process_serves_all(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Asked so, without a GPU, where what is stored outlives it, and for one client."""
    assert planned(monkeypatch, 4, **settings) == []


def test_gpus_are_dealt_to_as_many_workers_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = planned(monkeypatch, 3, workers="2")
    assert [one.ordinals for one in found] == [(0, 2), (1,)]
    assert [one.ordinals for one in planned(monkeypatch, 1, workers="2")] == [(0,), ()]
    assert len(planned(monkeypatch, 0, workers="4", device="cpu")) == 4


@pytest.mark.parametrize("text", ["1", "0", "-2", "65", "many", ""])
def test_a_number_of_workers_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="workers"):
        Config(workers=text)


def test_workers_and_resumable_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="workers=off"):
        Config(workers="2", resumable=True)


def test_a_worker_has_its_part_of_all() -> None:
    config = Config(
        pool_bytes=64 * MIB,
        encode_threads=5,
        max_sessions=8,
        session_share_bytes=8 * MIB,
        uid_quota_bytes=32 * MIB,
        metrics_address="127.0.0.1:1",
        spill_path="/x",
        spill_bytes=64 * MIB,
    )
    found = worker_config(config, Plan(1, (1,), ("gpu-1",)), 4)
    assert (found.pool_bytes, found.cache_bytes, found.spill_bytes) == (16 * MIB, 0, 16 * MIB)
    assert (found.encode_threads, found.device, found.workers) == (1, "auto", "off")
    assert (found.max_sessions, found.session_share_bytes) == (2, 8 * MIB)
    assert (found.metrics_address, found.uid_quota_bytes) == ("", 32 * MIB)
    without_shares = replace(config, session_share_bytes=0)
    without_gpu = worker_config(without_shares, Plan(0), 4)
    assert (without_gpu.max_sessions, without_gpu.device) == (8, "cpu")


def test_the_front_keeps_the_cache_and_stores_nothing_else() -> None:
    config = Config(pool_bytes=64 * MIB, cache_bytes=8 * MIB, session_share_bytes=1 * MIB)
    found = front_config(config)
    assert (found.pool_bytes, found.cache_bytes, found.device) == (MIB, 8 * MIB, "cpu")
    assert found.address == config.address


def test_settings_travel() -> None:
    config = Config(allowed_uids=(0, 7))
    assert config_of({**asdict(config), "allowed_uids": [0, 7]}) == config
