"""What the demo prints of its figures."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from storm_bench.demo.command import _print_report
from storm_bench.demo.report import Report, compare
from storm_bench.demo.trainers import Step, Trained

MIB = 1 << 20
PLAIN = Trained(steps=[Step(2.0, "aa", 1.0)], peak_bytes=900 * MIB)


@pytest.mark.parametrize("peak", [580 * MIB, 901 * MIB])
def test_memory_that_did_not_fall_is_said_in_words(
    peak: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = defaultdict(int, {"offloaded_bytes": 800 * MIB, "ratio": 2.0})
    offload = dataclasses.replace(PLAIN, peak_bytes=peak, stats=stats)
    _print_report(Report("cpu", "float32", [compare(PLAIN, offload, device="cpu")], 1, 1, 0))
    printed = capsys.readouterr().out
    assert ("fall, of the bytes offloaded" in printed) == (peak < PLAIN.peak_bytes)
    assert ("peak memory did not fall" in printed) == (peak > PLAIN.peak_bytes)
    assert "-0%" not in printed
