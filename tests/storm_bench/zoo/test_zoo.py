"""models.py, methods.py and row.py: every model trains alike by every method, or says why not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from storm_bench.train.methods import Unavailable
from storm_bench.zoo import METHODS, MODELS
from storm_bench.zoo.methods import METHODS as THEIR_METHODS
from storm_bench.zoo.models import WORKLOADS, Size, Workload
from storm_bench.zoo.row import Trial, measure

SMALL = Size(torch.device("cpu"), is_small=True)


def trial(model: str = "llama", method: str = "none", *, is_small: bool = True) -> Trial:
    return Trial(model, method, None, Size(SMALL.device, is_small), warm_ups=13, steps=2)


def test_names_are_those_of_the_command() -> None:
    assert list(WORKLOADS) == list(MODELS)
    assert tuple(THEIR_METHODS) == METHODS


def made(model: str) -> Workload:
    torch.manual_seed(0)
    try:
        return WORKLOADS[model](SMALL)
    except (ImportError, Unavailable) as missing:
        pytest.skip(f"{model} needs what is not here: {missing}")


@pytest.mark.parametrize(
    "model", [*list(MODELS)[::4], "lora", pytest.param("wav2vec2", marks=pytest.mark.slow)]
)
def test_recomputing_changes_no_gradient(model: str) -> None:
    gradients = []
    for method in ("none", "checkpoint", "selective"):
        workload = made(model)
        workload.model.train()
        THEIR_METHODS[method].change(workload.model)
        torch.manual_seed(1)
        dtype = workload.autocast or torch.bfloat16
        with torch.autocast("cpu", dtype, enabled=workload.autocast is not None):
            loss = workload.loss(workload.model)
        loss.backward()
        trained = [one.grad for one in workload.model.parameters() if one.grad is not None]
        gradients.append(trained)
    assert gradients[0]
    for others in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], others, strict=True))


def test_a_row() -> None:
    pytest.importorskip("transformers")
    found = measure(trial())
    assert (found["model"], found["method"]) == ("llama", "none")
    assert found["ms"] > 0
    assert found["peak_gib"] > 0
    assert len(found["way_ms"]) == 1
    assert math.isfinite(found["loss"])
    assert "offloaded_gib" not in found


def test_what_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no GPU here" in measure(trial(is_small=False))["skipped"]
    assert "no GPU here" in measure(trial(model="liger"))["skipped"]
    for error, text in [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "CUDA out of memory."),
        (ImportError("No module named 'timm'"), "No module named 'timm'"),
    ]:

        def fails(_size: Size, error: Exception = error) -> Workload:
            raise error

        monkeypatch.setitem(WORKLOADS, "llama", fails)
        expected = {"model": "llama", "method": "none", "skipped": text}
        assert measure(trial()) == expected


@pytest.mark.slow
def test_ranks_share_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    one = ["-m", "storm_bench.zoo", "ranks", "checkpoint", "--ranks=fsdp", "--small"]
    done = subprocess.run(
        [*command, *one, "--warm-ups=1", "--steps=1"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"model": "ranks"') == 2
