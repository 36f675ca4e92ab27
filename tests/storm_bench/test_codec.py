"""What the codec makes of kinds of tensors; the ratios are the same on every machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from storm_bench.activations.figures import tensor_figures
from storm_bench.codec import measure_codec, print_captured, print_codec
from storm_kernels import ancf


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


def test_figures_of_a_tensor() -> None:
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    figures = tensor_figures(tensor, analyze=True)
    assert figures.analysis == str(ancf.analyze(tensor, "dense"))
    assert tensor_figures(tensor, analyze=False).analysis is None
    assert figures.raw_nbytes == 1 << 18
    assert figures.bound_nbytes < figures.dense_nbytes < figures.fast_nbytes < figures.raw_nbytes


@pytest.mark.slow
def test_captured_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    print_captured(figures["captured"])
    printed = capsys.readouterr().out
    assert all(family["family"] in printed for family in figures["captured"])
