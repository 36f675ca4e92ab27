"""What the codec makes of kinds of tensors; the ratios are the same on every machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from storm_bench.codec import measure_codec, print_captured, print_codec


def test_it_reaches_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measure_codec(values=300_000, rounds=1)
    ratios = {(one["kind"], one["speed"]): one["ratio"] for one in figures}
    assert ratios["bfloat16, dense N(0,1)", "fast"] >= 1.42
    assert ratios["bfloat16, after ReLU", "fast"] >= 2.5
    assert ratios["float32, dense N(0,1)", "dense"] >= 1.19
    assert ratios["uint8, random", "dense"] >= 0.995
    assert all(one["encode_bytes_per_second"] > 0 for one in figures)
    print_codec(figures)
    assert capsys.readouterr().out.count("\n") == len(figures) + 1


@pytest.mark.slow
def test_captured_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "stormd.cli", "bench", "codec", "--json"]
    small = ["--values=20000", "--rounds=1", "--steps=2"]
    done = subprocess.run(
        [*command, *small], check=True, capture_output=True, text=True, timeout=550
    )
    figures = json.loads(done.stdout)["figures"]
    assert {kind["speed"] for kind in figures["kinds"]} == {"fast", "dense"}
    for family in figures["captured"]:
        assert family["dense_of_bound"] >= 0.94
        assert family["fast_of_bound"] >= 0.88
        assert family["tensors"]
    print_captured(figures["captured"])
    printed = capsys.readouterr().out
    assert all(family["family"] in printed for family in figures["captured"])
