"""Kills clients and daemons at random moments, and looks at what that does to everybody else.

    PYTHONPATH=tests python -m bench.deaths --rounds 200 --json tests/bench/results/deaths.json
    PYTHONPATH=tests python -m bench.deaths --device cuda --rounds 50 --groups 5 --json deaths.json

What stays true: a wrong gradient, a hang or a leak is an AssertionError and no figure. The pause
before a kill is random by purpose: it is no wait for anything. Groups are daemons of their own
with clients of their own, all at once on one machine: many kills in the time of a few.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import psutil
import torch
from bench.recording import parser_of, show, spread
from storm_bench.child_daemon import ChildDaemon
from support.trainers import Trainers
from support.waiting import wait_until

from stormd.memory.arena import slack_of
from stormd.monitoring.nvml import open_nvml

NOTICED_SECONDS = 60.0
"""Longer is a hang; how long it takes is a figure, and no test's matter on a busy machine."""

STEP_SECONDS = 0.05
"""About one step of a trainer: kills are spread over it."""

SURVIVORS = 2
CLIENTS = 3
SETTLED_ROUND = 3
"""After so many rounds the daemon has all that it keeps."""

SESSIONS = {"cpu": 1, "cuda": 2}
"""Of one client by the device that it trains on: every client has one on the host."""

FLAGS = {
    "cpu": ["--pool-bytes=64MiB"],
    "cuda": ["--pool-bytes=512MiB", "--staging-bytes-cuda=8MiB", "--part-bytes-cuda=2MiB"],
}
DEVICE_SLACK_BYTES = 64 << 20
"""How much more device memory the driver may hold for the daemon, of what was freed."""


Figures = dict[str, Any]


class Kill(Protocol):
    """Kills somebody so many times, and returns what that has shown."""

    def __call__(self, trainers: Trainers, rounds: int, seed: int, device: str) -> Figures: ...


def in_groups(kill: Kill, rounds: int, seed: int, device: str, groups: int) -> list[Figures]:
    """Share the rounds out among groups that run at once; return what each has found."""
    shares = [rounds // groups + (number < rounds % groups) for number in range(groups)]

    def group(number: int) -> Figures:
        with Trainers() as trainers:
            return kill(trainers, shares[number], seed + number, device)

    with ThreadPoolExecutor(groups) as pool:
        return list(pool.map(group, range(groups)))


def kill_clients(trainers: Trainers, rounds: int, seed: int = 0, device: str = "cpu") -> Figures:
    """Kill one of three clients, `rounds` times; the others go on with the right gradients."""
    moments, seconds, steps = random.Random(seed), [], 0
    sessions = SESSIONS[device]
    with _daemon(device) as daemon:
        survivors = start_trainers(trainers, daemon, SURVIVORS, device)
        settled = _belongings(daemon)
        for number in range(rounds):
            (victim,) = start_trainers(trainers, daemon, 1, device)
            time.sleep(moments.random() * STEP_SECONDS)
            trainers.kill(victim)
            seconds.append(reclaimed(daemon, SURVIVORS * sessions))
            steps += sum(_right_steps(trainers, pid) for pid in survivors)
            if number == SETTLED_ROUND:
                settled = _belongings(daemon)
        wait_until(lambda: _is_settled(_belongings(daemon), settled))
        held = _belongings(daemon)
        for pid in survivors:
            trainers.kill(pid)
        reclaimed(daemon, 0)
        assert not daemon.status()["counters"]["ended"]["failed"]
    return {
        "kills": len(seconds),
        "reclaim_seconds": spread(seconds),
        "survivors_right_steps": steps,
        "daemon_settled": settled,
        "daemon_at_the_end": held,
    }


def kill_daemons(trainers: Trainers, rounds: int, seed: int = 0, device: str = "cpu") -> Figures:
    """Kill the daemon of three clients, `rounds` times; each is told, in whatever it is doing."""
    moments, seconds, errors = random.Random(seed), [], Counter[str]()
    for _ in range(rounds):
        with _daemon(device) as daemon:
            clients = start_trainers(trainers, daemon, CLIENTS, device)
            time.sleep(moments.random() * STEP_SECONDS)
            killed = time.monotonic()
            os.kill(daemon.pid, signal.SIGKILL)
            for pid in clients:
                at, words = last_report(trainers, pid)
                seconds.append(max(0.0, at - killed))
                errors[words] += 1
    return {
        "kills": rounds,
        "clients": CLIENTS,
        "told_seconds": spread(seconds),
        "errors": dict(errors),
    }


def _daemon(device: str) -> ChildDaemon:
    return ChildDaemon(flags=[*FLAGS[device], "--cache-bytes=1MiB", f"--device={device}"])


def start_trainers(trainers: Trainers, daemon: ChildDaemon, count: int, device: str) -> list[int]:
    """Start so many trainers; each has done a first step right."""
    pids = [trainers.start(daemon.address, device=device) for _ in range(count)]
    for pid in pids:
        trainers.expect(pid, "ready", "same")
    return pids


def _is_settled(now: dict[str, int], settled: dict[str, int]) -> bool:
    """Tell whether the daemon holds no more threads, descriptors and device memory than then."""
    slack = {"device_bytes": DEVICE_SLACK_BYTES, "resident_bytes": sys.maxsize}
    return all(now[name] <= settled[name] + slack.get(name, 0) for name in settled)


def reclaimed(daemon: ChildDaemon, sessions: int) -> float:
    """Wait until so many sessions are left; return the seconds that took.

    A session leaves the list when all that it held is free. Without any, the pool must be empty,
    each worker's where there are workers.
    """
    began = time.monotonic()
    wait_until(lambda: len(daemon.status()["sessions"]) == sessions, NOTICED_SECONDS, daemon.status)
    if not sessions:
        state = daemon.status()
        assert state["entries"] == 0
        assert state["pool"]["used_bytes"] == state["pool"]["promised_bytes"] == 0
        for pool in [one["pool"] for one in state["workers"]] or [state["pool"]]:
            capacity = pool["capacity_bytes"]
            assert pool["largest_free_bytes"] == capacity + slack_of(capacity)
    return time.monotonic() - began


def _right_steps(trainers: Trainers, pid: int) -> int:
    """Return the steps since the last look, of which there must be one, all of them right."""
    words = [trainers.next(pid, NOTICED_SECONDS).words, *trainers.heard(pid)]
    assert set(words) == {"same"}, words
    return len(words)


def last_report(trainers: Trainers, pid: int) -> tuple[float, str]:
    """Return the report of the error that a trainer ended with; steps before it were right."""
    while True:
        at, words = trainers.next(pid, NOTICED_SECONDS)
        if words != "same":
            assert words.split()[-1] in ("DaemonLost", "ActivationLost"), words
            return at, words


def _belongings(daemon: ChildDaemon) -> dict[str, int]:
    process = psutil.Process(daemon.pid)
    found = {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "resident_bytes": process.memory_info().rss,
    }
    device_bytes = _device_bytes(daemon.pid)
    return found if device_bytes is None else {**found, "device_bytes": device_bytes}


def _device_bytes(pid: int) -> int | None:
    """Return the memory of a process on the first GPU; None where it has none or cannot be told."""
    nvml = open_nvml()
    if nvml is None or not torch.cuda.is_available():
        return None
    by_pid = nvml.process_bytes(str(torch.cuda.get_device_properties(0).uuid)) or {}
    return by_pid.get(pid)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", choices=tuple(FLAGS), default="cpu")
    parser.add_argument("--groups", type=int, default=1, help="daemons at a time")
    args = parser.parse_args()
    kinds: dict[str, Kill] = {"killed_clients": kill_clients, "killed_daemons": kill_daemons}
    figures = {
        name: in_groups(kill, args.rounds, 0, args.device, args.groups)
        for name, kill in kinds.items()
    }
    show(args.json, figures)


if __name__ == "__main__":
    main()
