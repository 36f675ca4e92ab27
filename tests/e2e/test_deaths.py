"""Whoever is killed or stopped, the others go on or are told; real processes, real signals.

The rounds are those of `bench.deaths`, which asserts what must hold: the others' gradients right
to the bit, everything of the dead free again, every client of a dead daemon told in time.
"""

from __future__ import annotations

import os
import signal

import pytest
import storm_client as storm
import torch
from bench.deaths import Kill, in_groups, kill_clients, kill_daemons, last_report
from storm_bench.child_daemon import ChildDaemon
from support.trainers import Trainers
from support.waiting import wait_until

CLIENT_KILLS = 4
DAEMON_KILLS = 2
GPU_KILLS = 4


def test_clients_killed_at_random_moments(trainers: Trainers) -> None:
    figures = kill_clients(trainers, CLIENT_KILLS, seed=1)
    assert figures["survivors_right_steps"] >= 2 * CLIENT_KILLS


def test_daemons_killed_at_random_moments(trainers: Trainers) -> None:
    figures = kill_daemons(trainers, DAEMON_KILLS, seed=1)
    assert sum(figures["errors"].values()) == figures["clients"] * DAEMON_KILLS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", [kill_clients, kill_daemons])
def test_killed_at_random_moments_on_a_gpu(kill: Kill) -> None:
    found = in_groups(kill, GPU_KILLS, seed=2, device="cuda", groups=2)
    assert sum(one["kills"] for one in found) == GPU_KILLS


def test_a_stopped_client_harms_nobody_and_a_stopped_daemons_death_ends_every_wait(
    trainers: Trainers,
) -> None:
    """The client is stopped for longer than its lease: silent, alive, and not taken for dead."""
    with ChildDaemon(flags=["--pool-bytes=64MiB", "--device=cpu", "--lease-seconds=0.1"]) as daemon:
        stopped, other = both = [trainers.start(daemon.address) for _ in range(2)]
        for pid in both:
            trainers.expect(pid, "ready", "same")
        os.kill(stopped, signal.SIGSTOP)
        uptime = daemon.status()["uptime_seconds"]
        wait_until(lambda: daemon.status()["uptime_seconds"] > uptime + 0.6)
        assert len(daemon.status()["sessions"]) == 2
        for pid in both:
            assert set(trainers.heard(pid)) <= {"same"}
        trainers.expect(other, "same", "same")  # one of them has begun since
        os.kill(stopped, signal.SIGCONT)
        trainers.expect(stopped, *["same"] * 3)
        os.kill(daemon.pid, signal.SIGSTOP)
        for pid in both:
            assert set(trainers.heard(pid)) <= {"same"}
        os.kill(daemon.pid, signal.SIGKILL)
        for pid in both:
            last_report(trainers, pid)


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
