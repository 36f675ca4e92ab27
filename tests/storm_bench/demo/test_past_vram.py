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


def test_reports_are_taken() -> None:
    run = taken({"event": "model", "parameters": 7}, *STEPS, END)
    assert (run.parameters, run.losses, run.error) == (7, [5.0, 4.0], "")
    assert (run.peak_bytes, run.offloaded_bytes, run.ratio) == (4 << 30, 1 << 33, 1.4)


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


def test_both_runs_have_the_same_limit_with_what_the_client_takes() -> None:
    plain, offload = PLAN.arguments(None), PLAN.arguments("ipc:///x")
    assert f"--limit-bytes={PLAN.limit_bytes}" in plain
    assert f"--limit-bytes={PLAN.limit_bytes - PLAN.staging_bytes}" in offload
    assert set(offload) - set(plain) == {
        "--address=ipc:///x",
        f"--limit-bytes={PLAN.limit_bytes - PLAN.staging_bytes}",
    }
    assert f"--staging-bytes-cuda={PLAN.staging_bytes}" in PLAN.daemon_flags()


# --- the command ----------------------------------------------------------------------------

MESSAGE = "CUDA out of memory. Tried to allocate 42.00 MiB."


def report(plain_error: str) -> PastReport:
    trained = PastRun(10**6, [5.0], [0.5], peak_bytes=1 << 30, offloaded_bytes=1 << 33, ratio=1.4)
    return PastReport(PastPlan(steps=1), PastRun(10**6, error=plain_error), trained)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(("error", "status"), [(MESSAGE, 0), ("", 1)])
def test_the_exit_status_is_the_verdict(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    status: int,
) -> None:
    monkeypatch.setattr(past_vram, "run_past_vram", lambda _plan: report(error))
    assert cli.main(["demo", "--past-vram"]) == status
    printed = capsys.readouterr().out
    assert ("OutOfMemoryError in step 1: " + MESSAGE in printed) is bool(error)
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
