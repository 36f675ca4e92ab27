"""When a device runs out of memory: where PyTorch tells of it, and where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from storm_client.transport import memory_pressure


class Owner:
    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        self.gave_back = 0

    def give_back_memory(self) -> None:
        self.gave_back += 1


@pytest.fixture
def observe() -> Iterator[None]:
    """Let an observer be attached anew."""
    memory_pressure._observe.cache_clear()
    yield
    memory_pressure._observe.cache_clear()


def test_one_observer_serves_every_owner_that_lives(
    observe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Callable[[int, int, int, int], None]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    one, other, gone = Owner(), Owner(), Owner()
    for owner in (one, other, gone):
        memory_pressure.watch(owner)
    del gone, owner
    (observer,) = attached
    observer(0, 1, 2, 3)
    assert (one.gave_back, other.gave_back) == (1, 1)


def test_a_device_that_has_memory_is_left_alone(
    observe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Callable[[int, int, int, int], None]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    one, other = Owner(0), Owner(1)
    for owner in (one, other):
        memory_pressure.watch(owner)
    attached[0](1, 1, 2, 3)
    assert (one.gave_back, other.gave_back) == (0, 1)


def test_an_allocator_without_observers_is_no_error(
    observe: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attach(observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not support it")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    with caplog.at_level("INFO"):
        memory_pressure.watch(Owner())
    assert "cudaMallocAsync does not support it" in caplog.text
