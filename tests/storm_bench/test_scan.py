"""scan.py: its table, and that wrong results are no figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from storm_bench import scan as bench_scan
from storm_bench.scan import CASES, Case, measure_scan, print_scan
from storm_kernels import scan

from stormd import cli
from stormd.errors import ChildFailed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        Case("sums", "cumsum", (2, 64, 8)),
        Case("recurrence", "linear", (2, 64, 8)),
        Case("layer", "layer", (2, 16, 8)),
    )
    monkeypatch.setitem(CASES, "cpu", cases)
    monkeypatch.setattr(bench_scan, "_ACCURACY_LENGTH", 1 << 10)


def _arguments(*line: str) -> Any:
    return cli.parser().parse_args(["bench", "scan", "--device=cpu", "--rounds=2", *line])


@pytest.mark.usefixtures("small")
def test_every_case_has_its_ways_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    figures = measure_scan(_arguments())
    assert torch.get_num_threads() == threads
    sums, recurrence = figures["cases"]["sums"], figures["cases"]["recurrence"]
    assert sums["storm"]["of_copy"] == sums["storm"]["seconds"] / sums["copy_seconds"]
    assert "CUDA" in sums["compiled associative_scan"]["skipped"]
    assert "GPU" in recurrence["forward"]["accelerated-scan"]["skipped"]
    assert recurrence["backward"]["storm"]["seconds"] > 0
    layer = figures["cases"]["layer"]
    bound = "no scan at all, result wrong"
    assert set(layer) == {"shape", "storm", "torch.cumsum", bound}
    assert layer[bound]["seconds"] > 0
    assert figures["accuracy"]["storm, compensated, ulps"] <= 2
    assert json.loads(json.dumps(figures)) == figures
    print_scan(figures)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("sums (2 x 64 x 8), copy ")
    assert any("left out: " in line for line in lines)
    assert any(line.startswith("  no scan at all, result wrong ") for line in lines)


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "cumsum", lambda x, dim, **_more: x.cumsum(dim) * 1.01)
    with pytest.raises(ChildFailed, match="storm is wrong by"):
        measure_scan(_arguments())
