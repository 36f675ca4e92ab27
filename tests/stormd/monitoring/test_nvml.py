"""nvml.py with the library's own bindings, whose functions are made up where a GPU is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NoReturn

import pynvml
import pytest

from stormd.monitoring.nvml import Nvml, open_nvml

UUID = "6d0c9b2e-0000-4000-8000-000000000001"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """The bindings with one device, on which two processes compute."""
    processes = [
        SimpleNamespace(pid=10, usedGpuMemory=1 << 30),
        SimpleNamespace(pid=11, usedGpuMemory=None),
    ]
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=87, memory=3),
        "nvmlDeviceGetComputeRunningProcesses": lambda device: processes,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    opened = open_nvml()
    assert opened is not None
    return opened


def handle(uuid: str) -> str:
    if uuid != f"GPU-{UUID}":
        refuse()
    return uuid


def refuse(*_arguments: object) -> NoReturn:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def test_a_device_is_found_by_its_uuid_in_either_form(nvml: Nvml) -> None:
    assert nvml.busy_percent(UUID) == nvml.busy_percent(f"GPU-{UUID}") == 87


def test_processes_whose_memory_is_not_known_are_left_out(nvml: Nvml) -> None:
    assert nvml.process_bytes(UUID) == {10: 1 << 30}


def test_a_refusal_is_none(nvml: Nvml) -> None:
    assert nvml.busy_percent("another") is None
    assert nvml.process_bytes("another") is None


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert open_nvml() is None


def test_without_the_bindings_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert open_nvml() is None
