"""commands/bench.py: the benchmarks' figures, small enough to be quick."""

from __future__ import annotations

import json
import subprocess
import sys


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "stormd.cli", "bench", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    return done.stdout


def test_codec_as_json():
    printed = json.loads(bench("codec", "--values=20000", "--rounds=1", "--steps=2", "--json"))
    figures = printed["figures"]
    assert printed["benchmark"] == "codec"
    assert {kind["speed"] for kind in figures["kinds"]} == {"fast", "dense"}
    assert all(family["dense_of_bound"] > 0.94 for family in figures["captured"])


def test_codec_as_a_table(tmp_path):
    image = tmp_path / "ratios.svg"
    text = bench("codec", "--values=20000", "--rounds=1", "--steps=2", f"--image={image}")
    assert "of the bound" in text
    assert "<svg" in image.read_text()
