"""`stormd bench` runs and gives every figure; how large the speeds are is not a test's matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stormd import cli

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run a benchmark and return the figures that it prints as JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        assert cli.main(["bench", *arguments, "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert result["benchmark"] == arguments[0]
        figures: dict[str, Any] = result["figures"]
        return figures

    return run


def test_link_gives_its_figures(bench: Bench) -> None:
    figures = bench("link", "--tensors=2", "--tensor-bytes=2MiB", "--rounds=1", "--operations=20")
    assert figures["bytes"] == 4 << 20
    # A daemon that rests for a second leaves some with us.
    assert figures["offloaded_bytes"] + figures["kept_bytes"] == 4 << 20
    for name in ("link_to_memcpy", "hook_store_seconds", "hook_restore_seconds"):
        assert figures[name] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_train_gives_both_sides_memory_on_a_gpu(bench: Bench) -> None:
    methods = ("none", "save-on-cpu", "storm")
    small = ["--workloads=W0", "--steps=1", "--warm-ups=1", "--pool-bytes=1GiB"]
    figures = bench("train", *small, "--methods", *methods)
    rows = figures["workloads"]["W0"]
    assert figures["mps"] in (True, False)
    assert list(rows) == list(methods)
    for row in rows.values():
        assert min(row[f"{part}_seconds"] for part in ("forward", "backward", "step")) > 0
        assert row["process_device_bytes"] > row["peak_bytes"]
    assert rows["storm"]["daemon_device_bytes"] >= rows["none"]["daemon_device_bytes"] > 0
    assert rows["storm"]["offload"]["saved_bytes"] > 0


def test_ternary_gives_its_figures(bench: Bench) -> None:
    figures = bench("ternary", "--sizes", "128", "--rounds=2")
    mebibytes = {name: round(one / 2**20, 1) for name, one in figures["memory_bytes"].items()}
    assert mebibytes == {"ternary": 23.8, "int8": 95.4, "float16": 190.7, "float32": 381.5}
    product = figures["seconds"]["product 128 x 128"]
    assert {"ours, int8 x", "ours, float32 x", "NumPy float32", "torch bfloat16"} <= set(product)
    for peers in figures["seconds"].values():
        assert all(0 < times["best"] <= times["median"] for times in peers.values())
