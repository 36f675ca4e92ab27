"""The demo's arithmetic: what counts as identical, and how figures are made."""

from __future__ import annotations

import dataclasses
import json

from storm_bench.demo.report import Report, compare
from storm_bench.demo.trainers import Step, Trained

MIB = 1 << 20


def _plain() -> Trained:
    steps = [Step(2.0, "aa", 1.0), Step(1.5, "bb", 2.0)]
    return Trained(steps=steps, peak_bytes=900 * MIB, device_peak_bytes=70 * MIB)


def _offload(**stats: int) -> Trained:
    numbers = {
        "saved_bytes": 1000 * MIB,
        "deduplicated_bytes": 100 * MIB,
        "offloaded_bytes": 800 * MIB,
        "stored_bytes": 400 * MIB,
        "replayed_bytes": 60 * MIB,
        "skipped_bytes": 30 * MIB,
        "kept_bytes": 10 * MIB,
        "ratio": 2.0,
        **stats,
    }
    return dataclasses.replace(_plain(), peak_bytes=580 * MIB, stats=numbers)


def _report(plain: Trained, offload: Trained, left: int = 0) -> Report:
    return Report("cpu", "float32", [compare(plain, offload, device="cpu")], 1, 1, left)


def test_identical_runs_pass() -> None:
    assert _report(_plain(), _offload()).passed


def test_bytes_are_of_one_step() -> None:
    figures = compare(_plain(), _offload(), device="cpu")
    assert figures.offloaded_bytes == 400 * MIB
    assert figures.stored_bytes == 200 * MIB
    parts = (figures.deduplicated_bytes, figures.recomputed_bytes, figures.kept_bytes)
    assert sum(parts, figures.offloaded_bytes) == figures.saved_bytes
    assert figures.step_seconds_plain == 1.5
    assert figures.peak_drop == 0.8


def test_cuda_compares_the_devices_memory_with_the_clients_part_of_it() -> None:
    figures = compare(_plain(), _offload(), device="cuda", staging_bytes=5 * MIB)
    assert figures.peak_bytes_plain == 70 * MIB
    assert figures.peak_bytes_offload == 75 * MIB


def test_one_gradient_that_differs_fails() -> None:
    other = _offload()
    other.steps[1] = dataclasses.replace(other.steps[1], gradients="bc")
    report = _report(_plain(), other)
    assert report.trainers[0].equal_gradients == 1
    assert not report.passed


def test_one_loss_that_differs_fails() -> None:
    other = _offload()
    other.steps[0] = dataclasses.replace(other.steps[0], loss=2.0000000000000004)
    assert not _report(_plain(), other).passed


def test_a_missing_step_fails() -> None:
    other = _offload()
    other.steps.pop()
    assert not _report(_plain(), other).passed


def test_offloading_nothing_fails() -> None:
    assert not _report(_plain(), _offload(offloaded_bytes=0)).passed


def test_bytes_left_in_the_pool_fail() -> None:
    assert not _report(_plain(), _offload(), left=1).passed


def test_json_says_all() -> None:
    figures = json.loads(json.dumps(_report(_plain(), _offload()).to_json()))
    assert figures["passed"] is True
    assert figures["trainers"][0]["identical"] is True
    assert figures["pool"] == {"capacity_bytes": 1, "peak_used_bytes": 1, "left_bytes": 0}
