"""The daemon's ranges, told to an NVTX that is made up."""

from __future__ import annotations

import pytest

from stormd import ranges
from stormd.ranges import span


class Nvtx:
    def __init__(self) -> None:
        self.told: list[str] = []

    def RangePush(self, name: str) -> None:
        self.told.append(name)

    def RangePop(self) -> None:
        self.told.append("end")


def test_without_a_profiler_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_nvtx", None)
    assert span("encode", 1, 2) is span("copy", 3, 4)


def test_a_profiler_is_told_also_when_something_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Nvtx()
    monkeypatch.setattr(ranges, "_nvtx", nvtx)
    with pytest.raises(ZeroDivisionError), span("encode", 4096, 7), span("copy down", 99, 7):
        raise ZeroDivisionError
    assert nvtx.told == ["stormd encode #7, 4096 B", "stormd copy down #7, 99 B", "end", "end"]


def test_nvtx_is_looked_for_only_where_a_profiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def missing(name: str) -> None:
        looked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(ranges.importlib, "import_module", missing)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert ranges._found() is None
    assert not looked
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/a/library")
    assert ranges._found() is None
    assert looked == ["cupy.cuda.nvtx"]
