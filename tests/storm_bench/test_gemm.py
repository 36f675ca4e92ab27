"""gemm.py: its table, and that a wrong product is no figure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from storm_bench.gemm import measure_gemm, print_gemm
from storm_kernels import gemm

from stormd import cli
from stormd.errors import ChildFailed


def _arguments(*line: str) -> Any:
    return cli.parser().parse_args(["bench", "gemm", "--device=cpu", "--rounds=2", *line])


def test_every_way_has_its_time_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measure_gemm(_arguments("--cases", "small", "W1"))
    small = figures["cases"]["small"]
    assert small["shape"] == [256, 128, 384]
    for table in ("product", "forward", "backward", "layer"):
        first = next(iter(small[table].values()))
        assert first["of_first"] == 1
        assert first["seconds"] > 0
        assert small[table]["storm"]["skipped"]
    assert 1.2 < small["ratio"] < 1.6
    assert small["counted_bytes"]["storm"] < small["counted_bytes"]["cuBLAS, encoded apart"]
    assert figures["cases"]["W1"] == {"skipped": "it is not for cpu"}
    assert json.loads(json.dumps(figures)) == figures
    print_gemm(figures)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("small (256 x 128 x 384)") for line in lines)
    assert any("left out: " in line for line in lines)


def test_a_wrong_product_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm.gated_mlp

    def wrong(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        h, gate, up = right(x, *weights)
        return h * 1.1, gate, up

    monkeypatch.setattr(gemm, "gated_mlp", wrong)
    with pytest.raises(ChildFailed, match="wrong by"):
        measure_gemm(_arguments())
