"""Ranges as torch's profiler and NVTX see them, and that they are nothing to anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import storm_client as storm
import torch
from storm_client.monitoring import profiler_ranges as ranges
from storm_client.monitoring.profiler_ranges import span
from torch.profiler import ProfilerActivity, profile


def test_a_step_shows_what_the_client_does(client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.ones(1 << 12, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with offload:
            y = x
            for _ in range(4):
                y = y.exp().tanh()
            y = y.sum()
        offload.stats()  # until all has left, there may be nothing to fetch
        y.backward()
    words = [" ".join(event.key.split()[1:-3]) for event in profiled.key_averages()]
    assert {"pack", "unpack", "fetch ahead"} <= set(words)


def test_nvtx_is_told_where_a_profiler_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def nvtx_range(name: str) -> Iterator[None]:
        told.append(name)
        try:
            yield
        finally:
            told.append("end")

    monkeypatch.setattr(ranges, "_listening", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    with pytest.raises(ZeroDivisionError), span("pack", 5):
        raise ZeroDivisionError
    assert told == ["storm pack #0, 5 B", "end"]
