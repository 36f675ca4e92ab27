"""The daemon is killed and restarted under trainers, which do not notice; real processes.

The rounds are those of `bench.restarts`, which asserts what must hold: gradients right to the bit,
no trainer that raises, nothing left where trainers and daemon are killed together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.restarts import end_all, end_daemons
from support.trainers import Trainers

from stormd.supervise.mps import CONTROL

KILLS = 2
RESTARTS = 1
GPU_KILLS = 25
GPU_RESTARTS = 5


def test_trainers_go_on_and_nothing_is_left_where_they_are_killed_with_it(
    trainers: Trainers,
) -> None:
    figures = end_daemons(trainers, KILLS, RESTARTS, seed=1)
    assert figures["right_steps"] >= 2 * (KILLS + RESTARTS)
    end_all(trainers, 1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trainers_go_on_for_long(trainers: Trainers) -> None:
    end_daemons(trainers, 200, 50, seed=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(600)
def test_trainers_on_a_gpu_go_on(trainers: Trainers) -> None:
    figures = end_daemons(trainers, GPU_KILLS, GPU_RESTARTS, seed=3, device="cuda")
    assert figures["right_steps"] >= 2 * (GPU_KILLS + GPU_RESTARTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.skipif(shutil.which(CONTROL) is None, reason="no MPS here")
@pytest.mark.timeout(600)
def test_trainers_go_on_that_use_memory_early(tmp_path: Path) -> None:
    """As they do under MPS, where streams wait for the bytes."""
    figures = tmp_path / "figures.json"
    ends = [f"--kills={GPU_KILLS}", f"--restarts={GPU_RESTARTS}"]
    bench = [sys.executable, "-m", "bench.restarts", "--device=cuda", *ends, f"--json={figures}"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "stormd", "run", "--mps=on", "--pool-bytes=64MiB", "--"]
    subprocess.run([*command, *bench], check=True, env={**os.environ, "PYTHONPATH": path})
    found = json.loads(figures.read_text())["ended_daemons"]
    assert found["right_steps"] >= 2 * (GPU_KILLS + GPU_RESTARTS)
