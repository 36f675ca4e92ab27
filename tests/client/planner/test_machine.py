"""The figures that plans are made from: of which device, and with compression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from storm_client.planner.machine import (
    CPU,
    CUDA,
    LEAST_COPIED,
    LinkFigures,
    expected_ratio,
    machine_of,
)


def test_each_type_of_device_has_its_figures() -> None:
    assert machine_of(torch.device("cuda", 1)) is CUDA
    assert machine_of(torch.device("cpu")) is CPU


def test_compression_shortens_the_link_alone() -> None:
    faster = CUDA.compressing(2.0)
    assert faster.link == pytest.approx(CUDA.link / 2)
    assert replace(faster, link=CUDA.link) == CUDA


def test_what_is_not_encoded_is_not_compressed() -> None:
    assert expected_ratio(torch.bfloat16, "none") == 1.0
    assert expected_ratio(torch.bfloat16, "ancf") > 1.0
    assert expected_ratio(torch.int64, "ancf") == 1.0


UUID = "GPU-1"


def state(nbytes: int = LEAST_COPIED, *, limit: int = 0, uuid: str = UUID) -> dict[str, Any]:
    """Return what a daemon says of a link that took 2 and 3 ns a byte."""
    ways = {
        one: {"bytes": nbytes, "busy_seconds": nanoseconds * 1e-9 * nbytes}
        for one, nanoseconds in (("store", 2), ("restore", 3))
    }
    return {"gpus": [{"uuid": uuid, "link": ways}], "link_limit_bytes": limit}


def test_a_link_is_as_fast_as_the_slower_of_its_ways_was() -> None:
    machine = CUDA.with_link(LinkFigures.of(state(), UUID))
    assert machine.link == pytest.approx(3e-9)
    assert machine.measured == {"link"}
    assert replace(machine, link=CUDA.link, measured=frozenset()) == CUDA


@pytest.mark.parametrize(
    "figures",
    [
        LinkFigures.of(state(LEAST_COPIED - 1), UUID),
        LinkFigures.of(state(uuid="GPU-2"), UUID),
        LinkFigures.of(state(uuid=""), ""),
        LinkFigures(),
    ],
    ids=["too little", "another", "no device", "no daemon"],
)
def test_what_is_not_known_of_a_link_is_the_other_machines(figures: LinkFigures) -> None:
    assert CUDA.with_link(figures) == CUDA


def spilling(written: int, read: int, *, ended: str = "") -> dict[str, Any]:
    """Return what a daemon says that had 1 GiB each way, of which a disk moved some at 1 GB/s."""
    ways = {
        one: {"bytes": nbytes, "busy_seconds": nbytes * 1e-9}
        for one, nbytes in (("write", written), ("read", read))
    }
    flow = {"raw_bytes": 2 << 30, "blob_bytes": 1 << 30}
    return state() | {
        "spill": {**ways, "ended": ended},
        "throughput": {"store": flow, "restore": flow},
    }


@pytest.mark.parametrize(
    ("figures", "seconds"),
    [
        (spilling(0, 0), 0.0),
        (spilling(LEAST_COPIED - 1, 0), 0.0),
        (spilling(1 << 29, 0), 0.5e-9),
        (spilling(1 << 28, 1 << 30), 1e-9),
        (spilling(1 << 30, 1 << 30, ended="it was full of errors"), 0.0),
    ],
    ids=["unused", "hardly used", "written to", "read from", "ended"],
)
def test_a_disk_is_a_slower_link_for_its_share_of_the_bytes(
    figures: dict[str, Any], seconds: float
) -> None:
    found = LinkFigures.of(figures, UUID)
    assert found.disk == pytest.approx(seconds)
    assert LinkFigures.of(figures, "").disk == found.disk


def test_a_link_waits_for_a_disk_that_is_slower() -> None:
    figures = LinkFigures(disk=1e-8)
    assert CUDA.with_link(figures).link == CPU.with_link(figures).link == pytest.approx(1e-8)
    assert CUDA.with_link(LinkFigures(disk=1e-12)) == CUDA


def test_a_limit_holds_for_hosts_too_whose_copies_say_nothing() -> None:
    """What else runs on their cores would decide that."""
    limited = LinkFigures.of(state(limit=10_000_000), UUID)
    assert CUDA.with_link(limited).link == CPU.with_link(limited).link == pytest.approx(1e-7)
    assert CPU.with_link(LinkFigures.of(state(), UUID)) == CPU
    fast = LinkFigures.of(state(limit=10**12), UUID)
    assert CUDA.with_link(fast).link == pytest.approx(3e-9)
