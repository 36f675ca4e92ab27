"""nvml.py against a library that is made up: what is asked, and how refusals are told."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from stormd import nvml
from stormd.nvml import Nvml, open_nvml

UUID = "6d0c9b2e-0000-4000-8000-000000000001"
REFUSED = 3


class Library:
    """Answers as the driver's library does; `status` is what every question returns."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return self.status

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        self.asked.append(uuid)
        device._obj.value = 1
        return self.status

    def nvmlDeviceGetUtilizationRates(self, _device: Any, found: Any) -> int:
        found._obj.gpu = 87
        return self.status

    def nvmlDeviceGetComputeRunningProcesses_v3(self, _device: Any, count: Any, found: Any) -> int:
        assert count._obj.value == len(found)
        count._obj.value = 2
        found[0].pid, found[0].used_bytes = 10, 1 << 30
        found[1].pid, found[1].used_bytes = 11, (1 << 64) - 1
        return self.status


def test_a_device_is_found_by_its_uuid_in_either_form() -> None:
    library = Library()
    one = Nvml(library)
    assert one.busy_percent(UUID) == one.busy_percent(f"GPU-{UUID}") == 87
    assert set(library.asked) == {f"GPU-{UUID}".encode()}


def test_processes_whose_memory_is_not_known_are_left_out() -> None:
    assert Nvml(Library()).process_bytes(UUID) == {10: 1 << 30}


def test_a_refusal_is_none() -> None:
    one = Nvml(Library(REFUSED))
    assert one.busy_percent(UUID) is None
    assert one.process_bytes(UUID) is None


def test_the_structure_is_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(nvml._Process) == 24


@pytest.mark.parametrize("status", [0, REFUSED])
def test_opening(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Library(status))
    assert (open_nvml() is None) == bool(status)


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert open_nvml() is None
