"""commands/bench.py: the codec's figures on a training step, printed and drawn."""

from __future__ import annotations

import json
import subprocess
import sys

from stormd.commands.bench_codec import print_captured


def test_codec(tmp_path):
    image = tmp_path / "ratios.png"
    command = [sys.executable, "-m", "stormd.cli", "bench", "codec", "--json", f"--image={image}"]
    small = ["--values=20000", "--rounds=1", "--steps=2"]
    done = subprocess.run(
        [*command, *small], check=True, capture_output=True, text=True, timeout=110
    )
    figures = json.loads(done.stdout)["figures"]
    assert {kind["speed"] for kind in figures["kinds"]} == {"fast", "dense"}
    for family in figures["captured"]:
        assert family["dense_of_bound"] >= 0.94
        assert family["fast_of_bound"] >= 0.88
    assert image.read_bytes().startswith(b"\x89PNG")


def test_table_of_captured_tensors(capsys):
    ratios = {"bound_ratio": 2.0, "fast_ratio": 1.8, "dense_ratio": 1.9}
    family = {"family": "some model", **ratios, "fast_of_bound": 0.9, "dense_of_bound": 0.95}
    print_captured([family])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[0] == "some model"
    assert lines[1].endswith("90.0%, 95.0%")
