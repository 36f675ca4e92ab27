"""`stormd demo` as a newcomer runs it, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.devices import DEVICES
from support.waiting import wait_until

DEMO = [sys.executable, "-m", "stormd.cli", "demo"]


def _figures(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [*DEMO, "--json", *arguments], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("device", DEVICES)
def test_two_trainers_share_a_daemon_and_all_bits_are_the_same(device: str) -> None:
    figures = _figures("--small", "--steps=2", "--pool-bytes=256MiB", f"--device={device}")
    assert figures["passed"] is True
    assert len(figures["trainers"]) == 2
    for trainer in figures["trainers"]:
        assert trainer["identical"]
        assert trainer["steps"] == trainer["equal_losses"] == trainer["equal_gradients"] == 2
        assert trainer["saved_bytes"] >= trainer["offloaded_bytes"] > 4 << 20
        parts = ("deduplicated", "offloaded", "recomputed", "kept")
        counted = sum(trainer[f"{part}_bytes"] for part in parts)
        assert abs(trainer["saved_bytes"] - counted) < len(parts)  # each is rounded to a step
        assert trainer["ratio"] > 1.1
    assert figures["pool"]["peak_used_bytes"] > 0
    assert figures["pool"]["left_bytes"] == 0


def test_an_interrupt_leaves_neither_processes_nor_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM; test_interrupts.py has SIGINT too, which comes the same way."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    small = ["--small", "--device=cpu", "--pool-bytes=16MiB"]
    with subprocess.Popen([*DEMO, *small], stderr=subprocess.DEVNULL) as demo:
        parent = psutil.Process(demo.pid)
        wait_until(lambda: len(parent.children()) == 3, 120.0)  # the daemon and two trainers
        started = parent.children()
        demo.terminate()
        assert demo.wait(60) == 130
    left = psutil.wait_procs(started, 10)[1]
    for one in left:
        one.kill()
    assert left == []
    assert list(tmp_path.glob("stormd-*")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_past_the_memory_of_a_gpu() -> None:
    figures = _figures("--past-vram", "--steps=2")
    assert "out of memory" in figures["without_offload"]["error"]
    assert len(figures["with_offload"]["losses"]) == 2
    assert figures["with_offload"]["peak_bytes"] <= figures["plan"]["limit_bytes"]
    assert figures["with_offload"]["offloaded_bytes"] > figures["plan"]["limit_bytes"]


@pytest.mark.slow
def test_the_whole_demo_frees_the_clients_memory() -> None:
    for trainer in _figures("--device=cpu")["trainers"]:
        assert trainer["peak_drop"] >= 0.7
