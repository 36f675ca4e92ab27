"""nvml.py with a library that is made up; the thread's end is checked by every test."""

from __future__ import annotations

from itertools import count

import pytest
from support.waiting import wait_until

from stormd.monitoring import nvml
from stormd.monitoring.nvml import GpuGauge

UUID = "6d0c9b2e-0000-4000-8000-000000000001"


class Nvml:
    def __init__(self) -> None:
        self._looks = count(1)

    def busy_percent(self, uuid: str) -> int | None:
        return next(self._looks) if uuid == UUID else None


def test_the_last_look_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "open_nvml", Nvml)
    gauge = GpuGauge([UUID, "another"], seconds=0.001)
    try:
        wait_until(lambda: (gauge.busy_percent(UUID) or 0) > 3)
        assert gauge.busy_percent("another") is None
    finally:
        gauge.close()
        gauge.close()


@pytest.mark.parametrize("uuids", [[], [UUID]])
def test_without_devices_or_library_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, uuids: list[str]
) -> None:
    monkeypatch.setattr(nvml, "open_nvml", lambda: None)
    gauge = GpuGauge(uuids)
    assert gauge.busy_percent(UUID) is None
    gauge.close()
