"""demo/past_vram.py: what passes and what does not, from what trainers report."""

from __future__ import annotations

import pytest
import torch
from storm_bench.demo import past_vram
from storm_bench.demo.past_vram import PastPlan, PastReport, PastRun

from stormd import cli

PLAN = PastPlan(steps=2)
OUT = {"event": "out_of_memory", "error": "CUDA out of memory."}
END = {"event": "end", "peak_bytes": 4 << 30, "offloaded_bytes": 1 << 33, "ratio": 1.4}
STEPS = [{"event": "step", "step": n, "loss": 5.0 - n, "seconds": 0.5} for n in range(2)]


def taken(*reports: dict[str, object]) -> PastRun:
    run = PastRun()
    for report in reports:
        run.take(dict(report))
    return run


@pytest.mark.parametrize(
    ("plain", "offload", "passed"),
    [
        (taken(OUT), taken(*STEPS, END), True),
        (taken(*STEPS, END), taken(*STEPS, END), False),
        (taken(OUT), taken(STEPS[0], OUT), False),
        (taken(OUT), taken(STEPS[0], END), False),
        (taken(OUT), taken(*STEPS, {**END, "peak_bytes": PLAN.limit_bytes}), False),
    ],
    ids=["shown", "nothing to show", "out again", "a step is missing", "over the limit"],
)
def test_verdict(plain: PastRun, offload: PastRun, passed: bool) -> None:
    report = PastReport(PLAN, plain, offload)
    assert report.passed is passed
    assert report.to_json()["passed"] is passed


MESSAGE = "CUDA out of memory. Tried to allocate 42.00 MiB."


def report(plain_error: str) -> PastReport:
    trained = PastRun(10**6, [5.0], [0.5], peak_bytes=1 << 30, offloaded_bytes=1 << 33, ratio=1.4)
    return PastReport(PastPlan(steps=1), PastRun(10**6, error=plain_error), trained)


@pytest.mark.parametrize(("error", "status"), [(MESSAGE, 0), ("", 1)])
def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str, status: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(past_vram, "run_past_vram", lambda _plan: report(error))
    assert cli.main(["demo", "--past-vram"]) == status
    printed = capsys.readouterr().out
    assert ("OutOfMemoryError in step 1: " + MESSAGE in printed) is bool(error)
    assert "step 1: loss 5.0000, 0.50 s" in printed
    assert "peak at most 1.5 GiB, with 512.0 MiB that the client itself may take" in printed
    assert printed.splitlines()[-1] == ("NOT shown" if status else "trained past the limit")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--past-vram"], 1, "needs an NVIDIA GPU"),
        (["--past-vram", "--limit=1MiB"], 2, "give it more"),
        (["--limit=1GiB"], 2, "--limit 1GiB limits the GPU of --past-vram"),
    ],
)
def test_why_it_cannot_run_is_said(
    arguments: list[str],
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", *arguments]) == status
    assert text in capsys.readouterr().err
