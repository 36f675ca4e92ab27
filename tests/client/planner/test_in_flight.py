"""How much memory there is, of the devices that are meant."""

from __future__ import annotations

import pytest
import torch
from storm_client import devices
from storm_client.planner import in_flight as window
from storm_client.planner.in_flight import (
    FIT_SHARE,
    LARGEST,
    MIN_BYTES,
    DeviceWindow,
    free_bytes,
    give_back_unused,
)
from support.fake_torch_cuda import FakeTorch, faked

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = faked(monkeypatch, window, devices)
    made.contexts.update((0, 1))
    made.memory[0] = {"free": 500, "reserved": 300, "most": 200, "allocated": 100}
    made.memory[1] = {"free": 100, "reserved": 300, "most": 250, "allocated": 40}
    return made


def test_what_is_free_is_so_on_the_fullest(fake: FakeTorch) -> None:
    assert free_bytes([FIRST]) == int(FIT_SHARE * 600)
    assert free_bytes([FIRST, SECOND]) == free_bytes([SECOND]) == int(FIT_SHARE * 150)


def test_nothing_is_given_back_while_a_device_captures(fake: FakeTorch) -> None:
    fake.capturing.add(1)
    give_back_unused([FIRST, SECOND])
    assert not fake.given_back
    give_back_unused([FIRST])
    assert fake.given_back == 1


def test_the_first_forward_pass_holds_little_whatever_it_stores() -> None:
    """Else a model that fits only with offload would not get through its first step."""
    window = DeviceWindow(1 << 40)
    assert window.may_hold() == MIN_BYTES
    for nbytes in (1 << 20, 1 << 25, 1 << 27) * 100:
        window.record_store(nbytes)
    assert window.may_hold() == LARGEST << 27
    window.on_backward_begin()
    assert window.may_hold() > LARGEST << 27, "there is time to hold more while more is stored"
