"""demo/past_vram_command.py: what is printed, and what a machine without a GPU is told."""

from __future__ import annotations

import pytest
import torch
from storm_bench.demo import past_vram_command as demo_past_vram
from storm_bench.demo.past_vram import PastPlan, PastReport, PastRun

from stormd import cli

OUT = "CUDA out of memory. Tried to allocate 42.00 MiB."


def report(plain_error: str) -> PastReport:
    trained = PastRun(10**6, [5.0], [0.5], peak_bytes=1 << 30, offloaded_bytes=1 << 33, ratio=1.4)
    return PastReport(PastPlan(steps=1), PastRun(10**6, error=plain_error), trained)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(("error", "status"), [(OUT, 0), ("", 1)])
def test_the_exit_status_is_the_verdict(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    status: int,
) -> None:
    monkeypatch.setattr(demo_past_vram, "run_past_vram", lambda _plan: report(error))
    assert cli.main(["demo", "--past-vram"]) == status
    printed = capsys.readouterr().out
    assert ("OutOfMemoryError in step 1: " + OUT in printed) is bool(error)
    assert "step 1: loss 5.0000, 0.50 s" in printed
    assert "peak 1.5 GiB, 512.0 MiB of it the client's own" in printed
    assert printed.splitlines()[-1] == ("NOT shown" if status else "trained past the limit")


def test_without_a_gpu_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--past-vram"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_limit_that_leaves_nothing_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--past-vram", "--limit=1MiB"]) == 2
    assert "give it more" in capsys.readouterr().err
