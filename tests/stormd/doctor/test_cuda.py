"""Checks of CUDA, with a driver that answers as told and with none."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from stormd.config import Config
from stormd.doctor import cuda


class Driver:
    """Answers like libcuda for a machine with one device."""

    def __init__(self, version: int = 13000, devices: int = 1, attribute: int = 1) -> None:
        self._version, self._devices, self._attribute = version, devices, attribute

    def cuDriverGetVersion(self, out: Any) -> int:
        return _set(out, self._version)

    def cuDeviceGetCount(self, out: Any) -> int:
        return _set(out, self._devices)

    def cuDeviceGet(self, out: Any, index: int) -> int:
        return _set(out, index)

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
        return _set(out, self._attribute)


def _set(out: Any, value: int) -> int:
    out._obj.value = value
    return 0


def _with(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    monkeypatch.setattr(cuda, "_driver", lambda: driver)


@pytest.mark.parametrize(
    ("driver", "state"),
    [(Driver(), "ok"), (Driver(version=12040), "fail"), (Driver(devices=0), "warn")],
)
def test_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver, state: str) -> None:
    _with(monkeypatch, driver)
    assert cuda.check_driver(Config()).state == state


def test_no_driver_fails_only_where_cuda_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, None)
    assert cuda.check_driver(Config(device="cuda")).state == "fail"
    expected = "fail" if Path("/dev/nvidiactl").exists() else "skip"
    assert cuda.check_driver(Config(device="cpu")).state == expected
    assert cuda.check_ipc().state == "skip"
    assert cuda.check_expandable().state == "skip"
    assert cuda.check_mps().state == "skip"


@pytest.mark.parametrize(("attribute", "state"), [(1, "ok"), (0, "fail")])
def test_ipc(monkeypatch: pytest.MonkeyPatch, attribute: int, state: str) -> None:
    _with(monkeypatch, Driver(attribute=attribute))
    assert cuda.check_ipc().state == state
    assert cuda.check_expandable().state == ("ok" if attribute else "warn")


def test_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _with(monkeypatch, Driver())
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert cuda.check_mps().state == "warn"
    (tmp_path / "control").touch()
    assert cuda.check_mps().state == "ok"


@pytest.mark.parametrize(("value", "state"), [("1", "warn"), ("8", "ok"), (None, "ok")])
def test_queues(monkeypatch: pytest.MonkeyPatch, value: str | None, state: str) -> None:
    if value is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert cuda.check_connections().state == state


@pytest.mark.gpu
def test_a_real_driver_is_asked() -> None:
    if cuda._driver() is None:
        pytest.skip("no NVIDIA driver here")
    assert isinstance(cuda._driver(), ctypes.CDLL)
    assert cuda.check_driver(Config()).state == "ok"
    assert cuda.check_ipc().state == "ok"


def test_encoding_products_are_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {75: 9, 76: 0}

    class Device(Driver):
        def cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> int:
            return _set(out, capability[attribute])

    _with(monkeypatch, Device())
    assert cuda.check_products().state == "ok"
    capability.update({75: 8, 76: 6})
    finding = cuda.check_products()
    assert finding.state == "skip"
    assert "device 0 has 8.6" in finding.detail
    _with(monkeypatch, None)
    assert cuda.check_products().state == "skip"


@pytest.mark.parametrize(
    ("devices", "settings", "state", "detail"),
    [
        (1, {}, "ok", "one process"),
        (2, {}, "ok", "each of 2 GPUs"),
        (2, {"device": "cpu"}, "ok", "one process"),
        (4, {"workers": "off"}, "warn", "serves 4 GPUs"),
        (4, {"resumable": True}, "warn", "serves 4 GPUs"),
        (4, {"workers": "2"}, "ok", "2 worker processes for 4 GPUs"),
    ],
)
def test_several_gpus_have_a_worker_each(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    settings: dict[str, Any],
    state: str,
    detail: str,
) -> None:
    _with(monkeypatch, Driver(devices=devices))
    found = cuda.check_workers(Config(**settings))
    assert (found.state, bool(found.advice)) == (state, state == "warn")
    assert detail in found.detail
