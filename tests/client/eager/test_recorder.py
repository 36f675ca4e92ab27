"""Marks and spans: of the host, and of the device that they were made for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from storm_client.eager import recorder
from storm_client.eager.events import SAVED, RecordedValue
from storm_client.eager.recorder import Mark
from storm_client.eager.signature import StepSignature
from storm_kernels.errors import CudaDriverError
from support import fake_cuda
from support.fake_torch_cuda import FakeTorch, faked

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    with fake_cuda.standing_in(monkeypatch, ()):
        made = faked(monkeypatch, recorder)
        yield made
        made.close()


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_a_span_is_of_the_device_that_it_begins_on(
    device: torch.device, current: int, fake: FakeTorch
) -> None:
    """Whichever is current where it begins and where it ends."""
    with fake.in_device(current):
        begin = Mark(device)
    with fake.in_device(1 - current):
        span = begin.until_now()
    assert span() == pytest.approx(0.001)
    assert span.is_known


def test_a_span_is_known_when_its_device_has_come_so_far(fake: FakeTorch) -> None:
    busy = threading.Event()
    fake.stream_of(1).put(busy.wait)
    span = Mark(SECOND).until_now()
    assert not span.is_known
    busy.set()
    assert span() > 0
    assert span.is_known


def test_marks_of_two_devices_would_be_an_error(fake: FakeTorch) -> None:
    with pytest.raises(CudaDriverError, match="invalid resource handle"):
        Mark(FIRST).seconds_until(Mark(SECOND))


def values(*where: tuple[torch.device | str, int]) -> StepSignature:
    made = [
        RecordedValue(number, nbytes, torch.uint8, torch.Size((nbytes,)), torch.device(device))
        for number, (device, nbytes) in enumerate(where)
    ]
    events: tuple[Any, ...] = tuple((SAVED, one.number, None, ()) for one in made)
    return StepSignature(events, made)


def test_passes_are_timed_on_the_device_with_the_most_bytes() -> None:
    signature = values((FIRST, 100), ("cpu", 1000), (SECOND, 80), (SECOND, 30))
    assert signature.devices == (SECOND, FIRST)
    assert signature.clock == SECOND
    assert signature.is_on_gpu
