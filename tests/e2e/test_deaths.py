"""Whoever is killed or stopped, the others go on or are told; real processes, real signals.

The rounds are those of `bench.deaths`, which asserts what must hold: the others' gradients right
to the bit, everything of the dead free again, every client of a dead daemon told in time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from bench.deaths import NOTICED_SECONDS, kill_clients, kill_daemons
from storm_bench.child_daemon import ChildDaemon
from support.trainers import Trainers
from support.waiting import wait_until

CLIENT_KILLS = 8
DAEMON_KILLS = 4
GPU_KILLS = 4


def test_clients_killed_at_random_moments() -> None:
    figures = kill_clients(CLIENT_KILLS, seed=1)
    assert figures["kills"] == CLIENT_KILLS
    assert figures["survivors_right_steps"] >= 2 * CLIENT_KILLS


def test_daemons_killed_at_random_moments() -> None:
    figures = kill_daemons(DAEMON_KILLS, seed=1)
    assert sum(figures["errors"].values()) == figures["clients"] * DAEMON_KILLS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", [kill_clients, kill_daemons])
def test_killed_at_random_moments_on_a_gpu(kill: Callable[..., dict[str, Any]]) -> None:
    assert kill(GPU_KILLS, seed=2, device="cuda", groups=2)["kills"] == GPU_KILLS


def test_a_stopped_client_keeps_what_it_has_and_harms_nobody(trainers: Trainers) -> None:
    """Stopped for longer than its lease: silent, alive, and not to be taken for dead."""
    with ChildDaemon(flags=["--pool-bytes=64MiB", "--device=cpu", "--lease-seconds=0.2"]) as daemon:
        stopped, other = (trainers.start(daemon.address) for _ in range(2))
        for pid in (stopped, other):
            trainers.expect(pid, "ready", "same")
        os.kill(stopped, signal.SIGSTOP)
        uptime = daemon.status()["uptime_seconds"]
        wait_until(lambda: daemon.status()["uptime_seconds"] > uptime + 1.5)
        assert len(daemon.status()["sessions"]) == 2
        for pid in (stopped, other):
            assert set(trainers.heard(pid)) <= {"same"}
        trainers.expect(other, "same", "same")  # one of them has begun since
        os.kill(stopped, signal.SIGCONT)
        trainers.expect(stopped, *["same"] * 3)


def test_the_death_of_a_stopped_daemon_ends_every_wait(trainers: Trainers) -> None:
    """Stopped, it answers nobody and is not dead; killed then, its clients are told at once."""
    with ChildDaemon(flags=["--pool-bytes=64MiB", "--device=cpu"]) as daemon:
        clients = [trainers.start(daemon.address) for _ in range(2)]
        for pid in clients:
            trainers.expect(pid, "ready", "same")
        os.kill(daemon.pid, signal.SIGSTOP)
        for pid in clients:
            assert set(trainers.heard(pid)) <= {"same"}
        os.kill(daemon.pid, signal.SIGKILL)
        for pid in clients:
            words = trainers.next(pid, NOTICED_SECONDS).words
            while words == "same":
                words = trainers.next(pid, NOTICED_SECONDS).words
            assert words.split()[-1] in ("DaemonLost", "ActivationLost")


def test_waits_for_a_stopped_daemon_end_by_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not dead, so nothing tells its clients: a store keeps its tensor, a restore raises."""
    flags = ["--pool-bytes=64MiB", "--device=cpu", "--staging-bytes-cpu=1MiB"]
    with (
        ChildDaemon(flags=[*flags, "--part-bytes-cpu=256KiB"]) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        offload = client.offload(min_bytes=1)
        x = torch.ones(1 << 16, requires_grad=True)
        with offload:
            lost = x.exp().square().sum()
        assert offload.stats().offloaded_bytes > 0
        os.kill(daemon.pid, signal.SIGSTOP)
        monkeypatch.setattr("storm_client.transport.timeouts.STALL_SECONDS", 0.5)
        monkeypatch.setattr("storm_client.transport.store.PATIENCE_SECONDS", 0.2)
        monkeypatch.setattr("storm_client.offloading.SETTLE_SECONDS", 0.2)
        monkeypatch.setattr(client, "_timeout", 0.5)
        try:
            with offload:  # more than the staging area holds
                kept = torch.ones(1 << 20, requires_grad=True).exp().square().sum()
            kept.backward()
            assert offload.stats().kept["daemon_slow"] > 0
            with pytest.raises(storm.ActivationLost, match="did not restore"):
                lost.backward()
            with pytest.raises(storm.DaemonLost, match="did not answer"):
                client.status()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert client.status().pool.capacity_bytes > 0
