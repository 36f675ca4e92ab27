"""The demo's verdict and figures, and what it prints of them."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

import pytest
from storm_bench.demo.command import _print_report
from storm_bench.demo.report import Report, compare
from storm_bench.demo.trainers import Step, Trained

MIB = 1 << 20
STEPS = [Step(2.0, "aa", 1.0), Step(1.5, "bb", 2.0)]
PLAIN = Trained(steps=STEPS, peak_bytes=900 * MIB, device_peak_bytes=70 * MIB)
STATS = {
    "saved_bytes": 1000 * MIB,
    "deduplicated_bytes": 100 * MIB,
    "offloaded_bytes": 800 * MIB,
    "stored_bytes": 400 * MIB,
    "replayed_bytes": 60 * MIB,
    "skipped_bytes": 30 * MIB,
    "kept_bytes": 10 * MIB,
    "ratio": 2.0,
}
OFFLOAD = dataclasses.replace(PLAIN, peak_bytes=580 * MIB, stats=STATS)


def _report(offload: Trained, left: int = 0) -> Report:
    return Report("cpu", "float32", [compare(PLAIN, offload, device="cpu")], 1, 1, left)


def test_identical_runs_pass_and_json_says_all() -> None:
    figures = json.loads(json.dumps(_report(OFFLOAD).to_json()))
    assert figures["passed"] is True
    assert figures["trainers"][0]["identical"] is True
    assert figures["pool"] == {"capacity_bytes": 1, "peak_used_bytes": 1, "left_bytes": 0}


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({"steps": [STEPS[0], Step(1.5, "bc", 2.0)]}, 0),
        ({"steps": [Step(2.0000000000000004, "aa", 1.0), STEPS[1]]}, 0),
        ({"steps": STEPS[:1]}, 0),
        ({"stats": STATS | {"offloaded_bytes": 0}}, 0),
        ({}, 1),
    ],
    ids=["a gradient", "a loss", "a step is missing", "nothing is offloaded", "bytes are left"],
)
def test_whatever_differs_fails(changed: dict[str, object], left: int) -> None:
    assert not _report(dataclasses.replace(OFFLOAD, **changed), left).passed  # type: ignore[arg-type]


def test_bytes_are_of_one_step() -> None:
    figures = compare(PLAIN, OFFLOAD, device="cpu")
    assert figures.offloaded_bytes == 400 * MIB
    assert figures.stored_bytes == 200 * MIB
    parts = (figures.deduplicated_bytes, figures.recomputed_bytes, figures.kept_bytes)
    assert sum(parts, figures.offloaded_bytes) == figures.saved_bytes
    assert figures.step_seconds_plain == 1.5
    assert figures.peak_drop == 0.8


def test_cuda_compares_the_devices_memory_with_the_clients_part_of_it() -> None:
    figures = compare(PLAIN, OFFLOAD, device="cuda", staging_bytes=5 * MIB)
    assert figures.peak_bytes_plain == 70 * MIB
    assert figures.peak_bytes_offload == 75 * MIB


@pytest.mark.parametrize("peak", [580 * MIB, 901 * MIB])
def test_memory_that_did_not_fall_is_said_in_words(
    peak: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = defaultdict(int, {"offloaded_bytes": 800 * MIB, "ratio": 2.0})
    _print_report(_report(dataclasses.replace(PLAIN, peak_bytes=peak, stats=stats)))
    printed = capsys.readouterr().out
    assert ("less, as a share of offloaded bytes" in printed) == (peak < PLAIN.peak_bytes)
    assert ("peak memory did not fall" in printed) == (peak > PLAIN.peak_bytes)
    assert "-0%" not in printed
