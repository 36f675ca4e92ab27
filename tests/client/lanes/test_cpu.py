from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.lanes import Slot, cpu
from storm_client.lanes.cpu import CpuLane

from stormd.protocol import Message, Welcome
from stormd.protocol.timeline import PAGE_BYTES

STAGING_BYTES = 1 << 20


def welcome() -> Welcome:
    return Welcome(
        session=1,
        token=b"t",
        protocol=1,
        features=[],
        version="1",
        lifeline="/lifeline",
        staging_bytes=STAGING_BYTES,
        part_bytes=1 << 18,
        lease_seconds=5.0,
    )


def no_request(message: Message) -> Message:
    raise AssertionError(message)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("staging")
    os.truncate(descriptor, STAGING_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = os.memfd_create("timeline")
    os.truncate(descriptor, PAGE_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def lane(memory: int, page: int) -> Iterator[CpuLane]:
    lane = CpuLane()
    lane.attach(welcome(), [page, memory], no_request)
    yield lane
    lane.close()


def test_a_daemon_that_shares_too_little(memory: int) -> None:
    with pytest.raises(storm.DaemonUnavailable, match="1 of 2 memory files"):
        CpuLane().attach(welcome(), [memory], no_request)


Copy = Callable[[CpuLane, torch.Tensor, Slot], None]


def stage(lane: CpuLane, tensor: torch.Tensor, slot: Slot) -> None:
    lane.stage(tensor.untyped_storage(), 0, slot)


def unstage(lane: CpuLane, tensor: torch.Tensor, slot: Slot) -> None:
    lane.unstage(slot, tensor.untyped_storage(), 0)


@pytest.mark.parametrize("copy", [stage, unstage])
def test_closing_while_another_thread_copies(
    lane: CpuLane, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(0, 64)
    mapped: list[bool] = []

    def closing(target: int, source: int, nbytes: int) -> None:
        lane.close()
        mapped.append(is_mapped(target) and is_mapped(source))

    monkeypatch.setattr(cpu, "memmove", closing)
    copy(lane, torch.zeros(64, dtype=torch.uint8), slot)
    assert mapped == [True]
    with pytest.raises(storm.DaemonLost, match="closed"):
        copy(lane, torch.zeros(64, dtype=torch.uint8), slot)


def is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
