"""command.py: the codec's figures on a training step, printed and drawn."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from storm_bench.codec import print_captured

from stormd import cli


@pytest.mark.slow
def test_codec(tmp_path):
    image = tmp_path / "ratios.png"
    command = [sys.executable, "-m", "stormd.cli", "bench", "codec", "--json", f"--image={image}"]
    small = ["--values=20000", "--rounds=1", "--steps=2", "--tensors"]
    done = subprocess.run(
        [*command, *small], check=True, capture_output=True, text=True, timeout=550
    )
    figures = json.loads(done.stdout)["figures"]
    assert {kind["speed"] for kind in figures["kinds"]} == {"fast", "dense"}
    for family in figures["captured"]:
        assert family["dense_of_bound"] >= 0.94
        assert family["fast_of_bound"] >= 0.88
        for tensor in family["tensors"]:
            assert f"chosen: {tensor['mode']}" in tensor["analysis"]
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("benchmark", ["codec", "train"])
def test_a_picture_that_cannot_be_written_is_refused_at_once(benchmark, capsys):
    assert cli.main(["bench", benchmark, "--image=/nowhere/x.png"]) == 2
    assert "create the folder '/nowhere' first" in capsys.readouterr().err


def test_table_of_captured_tensors(capsys):
    ratios = {"bound_ratio": 2.0, "fast_ratio": 1.8, "dense_ratio": 1.9}
    family = {"family": "some model", **ratios, "fast_of_bound": 0.9, "dense_of_bound": 0.95}
    tensors = [{"analysis": "one tensor\nits modes"}, {"analysis": None}]
    print_captured([{**family, "tensors": tensors}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[0] == "some model"
    assert lines[1].endswith("90.0%, 95.0%")
    assert lines[2:] == ["  one tensor", "  its modes", ""]
