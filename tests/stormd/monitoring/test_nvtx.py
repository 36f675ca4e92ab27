"""The daemon's ranges, told to an NVTX that is made up."""

from __future__ import annotations

import pytest

from stormd.monitoring import nvtx
from stormd.monitoring.nvtx import nvtx_range


class Nvtx:
    def __init__(self) -> None:
        self.told: list[str] = []

    def RangePush(self, name: str) -> None:
        self.told.append(name)

    def RangePop(self) -> None:
        self.told.append("end")


def test_a_profiler_is_told_also_when_something_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Nvtx()
    monkeypatch.setattr(nvtx, "_nvtx", listener)
    with (
        pytest.raises(ZeroDivisionError),
        nvtx_range("encode", 4096, 7),
        nvtx_range("copy down", 99, 7),
    ):
        raise ZeroDivisionError
    assert listener.told == ["stormd encode #7, 4096 B", "stormd copy down #7, 99 B", "end", "end"]


def test_nvtx_is_looked_for_only_where_a_profiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def missing(name: str) -> None:
        looked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(nvtx.importlib, "import_module", missing)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert nvtx._found() is None
    assert not looked
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/a/library")
    assert nvtx._found() is None
    assert looked == ["cupy.cuda.nvtx"]
