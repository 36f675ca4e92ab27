"""`stormd demo` as a newcomer runs it, small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.waiting import wait_until


def _demo(device: str) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "stormd.cli",
        "demo",
        "--json",
        "--small",
        "--steps=2",
        "--pool-bytes=256MiB",
    ]
    done = subprocess.run(
        [*command, f"--device={device}"], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, object] = json.loads(done.stdout)
    return figures


def _check(figures: dict[str, object]) -> None:
    assert figures["passed"] is True
    trainers = figures["trainers"]
    assert isinstance(trainers, list)
    assert len(trainers) == 2
    for trainer in trainers:
        assert trainer["identical"]
        assert trainer["steps"] == trainer["equal_losses"] == trainer["equal_gradients"] == 2
        assert trainer["saved_bytes"] >= trainer["offloaded_bytes"] > 4 << 20
        parts = ("deduplicated", "offloaded", "recomputed", "kept")
        counted = sum(trainer[f"{part}_bytes"] for part in parts)
        assert abs(trainer["saved_bytes"] - counted) < len(parts)  # each is rounded to a step
        assert trainer["ratio"] > 1.1
    pool = figures["pool"]
    assert isinstance(pool, dict)
    assert pool["peak_used_bytes"] > 0
    assert pool["left_bytes"] == 0


def test_on_the_cpu() -> None:
    _check(_demo("cpu"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_neither_processes_nor_files(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "stormd.cli", "demo", "--small", "--device=cpu"]
    with subprocess.Popen([*command, "--pool-bytes=16MiB"], stderr=subprocess.DEVNULL) as demo:
        parent = psutil.Process(demo.pid)
        wait_until(lambda: len(parent.children()) == 3, 120.0)  # the daemon and two trainers
        started = parent.children()
        demo.send_signal(number)
        assert demo.wait(60) == 130
    left = psutil.wait_procs(started, 10)[1]
    for one in left:
        one.kill()
    assert left == []
    assert list(tmp_path.glob("stormd-*")) == []


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    _check(_demo("cuda"))


@pytest.mark.gpu
def test_past_the_memory_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    command = [sys.executable, "-m", "stormd.cli", "demo", "--past-vram", "--json", "--steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert "out of memory" in figures["without_offload"]["error"]
    assert len(figures["with_offload"]["losses"]) == 2
    assert figures["with_offload"]["peak_bytes"] <= figures["plan"]["limit_bytes"]
    assert figures["with_offload"]["offloaded_bytes"] > figures["plan"]["limit_bytes"]


@pytest.mark.slow
def test_the_whole_demo_frees_the_clients_memory() -> None:
    command = [sys.executable, "-m", "stormd.cli", "demo", "--json", "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    for trainer in json.loads(done.stdout)["trainers"]:
        assert trainer["peak_drop"] >= 0.7
