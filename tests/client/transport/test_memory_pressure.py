"""When a device runs out of memory: where PyTorch tells of it, and where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from storm_client.planner import shortage
from storm_client.transport import memory_pressure
from storm_client.transport.interrupts import SafeWeakSet


class Owner:
    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        self.gave_back = 0
        self.calls: list[str] = []
        self.kept = 0

    def unmap_freed_memory(self) -> None:
        self.gave_back += 1

    def make_room(self) -> None:
        self.calls.append("make room")

    def offload_kept(self) -> int:
        self.calls.append("offload")
        moved, self.kept = self.kept, 0
        return moved


@pytest.fixture
def observe() -> Iterator[None]:
    """Let an observer be attached anew."""
    memory_pressure._observe.cache_clear()
    yield
    memory_pressure._observe.cache_clear()


def test_one_observer_serves_every_owner_that_lives_on_its_device(
    observe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Callable[[int, int, int, int], None]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    one, other, elsewhere, gone = Owner(), Owner(), Owner(1), Owner()
    for owner in (one, other, elsewhere, gone):
        memory_pressure.watch(owner)
    del gone, owner
    (observer,) = attached
    observer(0, 1, 2, 3)
    assert (one.gave_back, other.gave_back, elsewhere.gave_back) == (1, 1, 0)


def test_an_allocator_without_observers_is_no_error(
    observe: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attach(observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not support it")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    with caplog.at_level("INFO"):
        memory_pressure.watch(Owner())
    assert "cudaMallocAsync does not support it" in caplog.text


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a GPU with little memory."""
    monkeypatch.setattr(memory_pressure, "_OWNERS", SafeWeakSet())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 69 << 30)


DEVICE = torch.device("cuda", 0)


def test_room_is_made_by_ways_that_cost_ever_more(memory: None) -> None:
    one, other = Owner(0), Owner(1)
    one.kept = 10
    for owner in (one, other):
        memory_pressure._OWNERS.add(owner)
    assert memory_pressure.make_room(DEVICE, 100, 0) is True
    assert one.calls == ["make room"]
    assert memory_pressure.make_room(DEVICE, 100, 1) is True
    assert one.calls[1:] == ["offload", "make room"]
    said = memory_pressure.make_room(DEVICE, 100, 2)
    assert one.calls[3:] == other.calls == []
    assert isinstance(said, str)
    assert "of 69.0 GiB in use 69.0 GiB are parameters" in said
    assert "9.0 GiB are other processes'" in said
    assert "no budget fits this step" in said


def test_what_room_there_is_not_is_said(memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_pressure.make_room(DEVICE, 100, 0) is False, "the device has no sessions"
    one = Owner(0)
    memory_pressure._OWNERS.add(one)
    assert memory_pressure.make_room(DEVICE, 100, 0) is True
    assert isinstance(memory_pressure.make_room(DEVICE, 100, 1), str), "nothing is kept"
    monkeypatch.setattr(memory_pressure, "kept_bytes", lambda _: 2 << 30)
    said = memory_pressure.make_room(DEVICE, 100, 2)
    assert "2.0 GiB saved tensors" in str(said)
    assert "`stormd status`" in str(said)


def test_no_room_is_made_for_what_may_fail(memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Owner(0)
    memory_pressure._OWNERS.add(one)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with memory_pressure.MayFail():
        assert memory_pressure._on_failed_allocation(100, 0) is False
    assert memory_pressure._on_failed_allocation(100, 0) is True


def test_the_next_plan_has_less_room(memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "_SHORTAGES", {})
    memory_pressure._OWNERS.add(one := Owner(0))
    memory_pressure.make_room(DEVICE, 100, 0)
    assert shortage.shortage_bytes([DEVICE]) == 0
    one.kept = 10
    memory_pressure.make_room(DEVICE, 100, 1)
    memory_pressure.make_room(DEVICE, 100, 2)
    assert shortage.shortage_bytes([torch.device("cuda", 1), DEVICE]) == 100
