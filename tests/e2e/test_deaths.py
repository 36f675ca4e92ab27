"""Whoever is killed, the others go on or are told; real processes, real signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stormd.child_daemon import ChildDaemon
from stormd.demo.run import Plan
from stormd.demo.trainers import run_trainers

NOTICE_SECONDS = 5.0
"""Within this a death is noticed and what the dead held is free."""

# tensors of 1 MiB and more, so that they are offloaded; endless for the tests' purposes
LONG = Plan(
    device="cpu", dtype="float32", steps=10_000, layers=2, width=64, heads=2, rows=32, length=128
)
SHORT = Plan(
    device="cpu", dtype="float32", steps=4, layers=2, width=64, heads=2, rows=32, length=128
)


@contextmanager
def _training(address: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has finished a step and goes on."""
    command = [sys.executable, "-m", "storm_client.demo.trainer", *LONG.arguments(0, address)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "step"
            yield process
        finally:
            process.kill()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def _holds_nothing(daemon: ChildDaemon) -> bool:
    state = daemon.status()
    return not state["sessions"] and state["entries"] == 0 and state["pool"]["used_bytes"] == 0


def test_a_killed_trainer_leaves_nothing_and_harms_no_neighbour(daemon: ChildDaemon) -> None:
    (plain,) = run_trainers([SHORT.arguments(1, None)], lambda *_: None, 60.0)
    with _training(daemon.address) as victim:
        killed: list[int] = []

        def kill_the_other(_index: int, done: int, _loss: float) -> None:
            if done == 2:
                os.kill(victim.pid, 9)
                killed.append(victim.pid)

        (neighbour,) = run_trainers([SHORT.arguments(1, daemon.address)], kill_the_other, 60.0)
    assert killed
    assert [step.gradients for step in neighbour.steps] == [step.gradients for step in plain.steps]
    assert neighbour.stats is not None
    assert neighbour.stats["offloaded_bytes"] > 0
    assert _until(lambda: _holds_nothing(daemon), NOTICE_SECONDS), daemon.status()
    assert daemon.status()["counters"]["deaths"] == 1


def test_a_killed_daemon_is_an_error_in_the_trainer() -> None:
    with ChildDaemon(flags=["--pool-bytes=256MiB", "--device=cpu"]) as daemon:
        with _training(daemon.address) as trainer:
            os.kill(daemon.pid, 9)
            _, complaint = trainer.communicate(timeout=NOTICE_SECONDS + 10)
        assert trainer.returncode == 1
        assert "DaemonLost" in complaint or "ActivationLost" in complaint
