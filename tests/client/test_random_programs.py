"""Random programs of views, in-place changes and operations that save: gradients are identical."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import storm_client as storm
import torch.distributed as dist
from storm_client.eager import controller
from storm_client.planner.machine import Machine
from support.comparing import Plain, assert_same, outcome
from support.daemon_process import DaemonProcess
from support.devices import DEVICES
from support.following import PATHS, follow_by
from support.planning import FREE_REPLAYS, SOME_REPLAYS, replay_all
from support.random_programs import (
    MAKING_GRADLESS,
    compare_freely,
    process_group,
    run,
    run_freely,
)
from support.training import assert_identical

PROGRAMS = 16
BATCH = 10
"""Free programs that share a test, and the names of those that follow each other."""
BATCHES = 3
SLOW_BATCHES = 200
PLANNED_STEPS = 8
PROCESSES = 2
PROCESSES_SECONDS = 300.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program(seed: int, device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1, codec="raw" if seed % 2 else "ancf")
    expected = run(seed, device, nullcontext)
    for _ in range(2):
        assert_identical(run(seed, device, lambda: offload), expected)


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    with process_group(dist.HashStore()):
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "batch",
    [
        *range(BATCHES),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(BATCHES, SLOW_BATCHES)),
    ],
)
def test_free_programs(batch: int, device: str, client: storm.Client) -> None:
    compare_freely(range(batch * BATCH, (batch + 1) * BATCH), device, client)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "seed", [7, 23, 200580, 202060, 5000620, 6000000, 6000270, 6203270, 6401150, 6801080]
)
def test_free_programs_that_follow_plans(
    seed: int, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most have blocks in blocks, or uncounted writes to what recomputation reads."""
    replay_all(monkeypatch)
    compare_freely(range(seed, seed + 1), device, client, steps=PLANNED_STEPS)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "batch",
    [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SLOW_BATCHES))],
)
def test_free_programs_that_recompute_gradless_results(
    batch: int, path: str, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    follow_by(path, monkeypatch)
    monkeypatch.setattr(controller, "GRADLESS", -1.0)
    seeds = range(batch * BATCH, (batch + 1) * BATCH)
    compare_freely(seeds, device, client, steps=PLANNED_STEPS, forward=MAKING_GRADLESS)


@pytest.mark.parametrize("path", PATHS)
def test_a_value_that_another_kind_of_step_would_recompute(
    path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step turns out to be of another kind, the value that shows it is not made yet.

    Its own plan does not recompute it in that step. So an input that no operation made is copied
    later than in steps of its kind, and trials of what reads the copy prove nothing for those.
    """
    replay_all(monkeypatch, SOME_REPLAYS)
    follow_by(path, monkeypatch)
    monkeypatch.setattr(controller, "GRADLESS", -1.0)
    offload = client.offload(min_bytes=1000, codec="raw", budget="least")
    programs = [partial(run_freely, 17112010 + n, forward=MAKING_GRADLESS) for n in range(2)]
    expected = [outcome(program, Plain(), "cpu") for program in programs]
    for which in map(int, "001100000111"):
        assert_same(outcome(programs[which], offload, "cpu"), expected[which])


OVERWRITTEN = [8006670]
"""A part of a recomputed value is overwritten by what only a later plan recomputes."""

ALTERNATING = [8003350, 8003351]
"""In a step that turns out to be of the other kind, a tensor was saved as one that is proved in the
expected kind, and was made by another operation."""


GIVEN = [8602150]
"""What a recomputed value is made from gets other data before the next tensor is saved."""

TWICE = [20026870, 20026871]
"""Two backward passes, between which the input of a value on trial is written to. In the first the
value is asked for less often than planned, because what is made from it cannot be recomputed."""


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("seeds", "budget", "order", "machine"),
    [
        (OVERWRITTEN, 1 << 14, "0000", FREE_REPLAYS),
        (ALTERNATING, "least", "110011100010", FREE_REPLAYS),
        (GIVEN, "least", "00000", SOME_REPLAYS),
        (TWICE, "least", "000110100111", FREE_REPLAYS),
    ],
)
def test_free_programs_in_an_order(
    seeds: list[int],
    budget: int | str,
    order: str,
    machine: Machine,
    path: str,
    device: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch, machine)
    follow_by(path, monkeypatch)
    offload = client.offload(min_bytes=1, codec="raw", budget=budget)
    programs = [partial(run_freely, seed) for seed in seeds]
    expected = [outcome(program, Plain(), device) for program in programs]
    for which in map(int, order):
        assert_same(outcome(programs[which], offload, device), expected[which])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_free_programs_of_two_processes(device: str, daemon: DaemonProcess, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "support.random_programs"),
                *(daemon.address, device, str(tmp_path / "store")),
                *(str(rank), str(PROCESSES), str(BATCH)),
            ],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [rank.communicate(timeout=PROCESSES_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
