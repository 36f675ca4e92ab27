"""What is asked of a GPU is asked of that one, and makes a context on no other."""

from __future__ import annotations

import pytest
import torch
from storm_client import devices
from storm_client.devices import devices_in_use, is_capturing, with_number
from support.fake_torch_cuda import FakeTorch, faked

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return faked(monkeypatch, devices)


def test_a_capture_is_looked_for_on_the_device_that_is_meant(fake: FakeTorch) -> None:
    fake.contexts.add(1)
    assert not is_capturing(SECOND), "the first has no context, and is the current one"
    fake.capturing.add(1)
    assert is_capturing(SECOND)
    assert fake.current_device() == 0
    fake.contexts.add(0)
    assert not is_capturing(FIRST)
    with fake.in_device(1):
        assert not is_capturing(FIRST)


def test_devices_with_a_context_are_in_use(fake: FakeTorch) -> None:
    assert devices_in_use() == []
    fake.contexts.add(1)
    assert devices_in_use() == [SECOND]
    fake.contexts.add(0)
    assert devices_in_use() == [FIRST, SECOND]


def test_a_device_without_a_number_is_the_current_one(fake: FakeTorch) -> None:
    assert with_number(torch.device("cuda")) == FIRST
    with fake.in_device(1):
        assert with_number(torch.device("cuda")) == SECOND
        assert with_number(FIRST) == FIRST
        assert with_number(torch.device("cpu")) == torch.device("cpu")
