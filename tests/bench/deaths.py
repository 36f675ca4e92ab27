"""Kills clients and daemons at random moments, and looks at what that does to everybody else.

    PYTHONPATH=tests python -m bench.deaths --rounds 200 --json tests/bench/results/deaths.json
    PYTHONPATH=tests python -m bench.deaths --device cuda --rounds 50 --groups 5 --json deaths.json

What stays true: a wrong gradient, a hang or a leak is an AssertionError and no figure. The pause
before a kill is random by purpose: it is no wait for anything. Groups are daemons of their own
with clients of their own, all at once on one machine: many kills in the time of a few.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from storm_bench.child_daemon import ChildDaemon
from support.trainers import Trainers
from support.waiting import wait_until

from stormd.machine import describe
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


@dataclass
class ClientDeaths:
    """What killing one client after another has shown; both belongings are the daemon's."""

    seconds: list[float] = field(default_factory=list)
    survivors_steps: int = 0
    settled: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


@dataclass
class DaemonDeaths:
    """What killing one daemon after another has shown: when its clients knew, and what."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def kill_clients(
    rounds: int, seed: int = 0, *, device: str = "cpu", groups: int = 1
) -> dict[str, Any]:
    """Kill one of three clients, `rounds` times; the others go on with the right gradients."""
    found = _in_groups(_client_deaths, rounds, seed, device, groups)
    return {
        "kills": sum(len(one.seconds) for one in found),
        "reclaim_seconds": spread([seconds for one in found for seconds in one.seconds]),
        "survivors_right_steps": sum(one.survivors_steps for one in found),
        "daemon_settled": found[0].settled,
        "daemon_at_the_end": found[0].held,
    }


def kill_daemons(
    rounds: int, seed: int = 0, *, device: str = "cpu", groups: int = 1
) -> dict[str, Any]:
    """Kill the daemon of three clients, `rounds` times; each is told, in whatever it is doing."""
    found = _in_groups(_daemon_deaths, rounds, seed, device, groups)
    seconds = [seconds for one in found for seconds in one.seconds]
    assert max(seconds) < NOTICED_SECONDS, f"a client was told after {max(seconds)} s"
    return {
        "kills": len(seconds) // CLIENTS,
        "clients": CLIENTS,
        "told_seconds": spread(seconds),
        "errors": dict(sum((one.errors for one in found), Counter[str]())),
    }


Deaths = TypeVar("Deaths")


def _in_groups(
    work: Callable[[int, int, str], Deaths], rounds: int, seed: int, device: str, groups: int
) -> list[Deaths]:
    """Return what each group has found; the rounds are shared out among them."""
    shares = [rounds // groups + (number < rounds % groups) for number in range(groups)]
    with ThreadPoolExecutor(groups) as pool:
        running = [
            pool.submit(work, share, seed + number, device) for number, share in enumerate(shares)
        ]
        return [one.result() for one in running]


def _client_deaths(rounds: int, seed: int, device: str) -> ClientDeaths:
    moments, found = random.Random(seed), ClientDeaths()
    sessions = SESSIONS[device]
    with _daemon(device) as daemon, Trainers() as trainers:
        survivors = start_trainers(trainers, daemon, SURVIVORS, device)
        found.settled = _belongings(daemon)
        for number in range(rounds):
            (victim,) = start_trainers(trainers, daemon, 1, device)
            time.sleep(moments.random() * STEP_SECONDS)
            trainers.kill(victim)
            found.seconds.append(reclaimed(daemon, SURVIVORS * sessions))
            found.survivors_steps += sum(_right_steps(trainers, pid) for pid in survivors)
            if number == SETTLED_ROUND:
                found.settled = _belongings(daemon)
        wait_until(lambda: _is_settled(_belongings(daemon), found.settled))
        found.held = _belongings(daemon)
        for pid in survivors:
            trainers.kill(pid)
        reclaimed(daemon, 0)
        assert not daemon.status()["counters"]["ended"]["failed"]
    return found


def _daemon_deaths(rounds: int, seed: int, device: str) -> DaemonDeaths:
    moments, found = random.Random(seed), DaemonDeaths()
    with Trainers() as trainers:
        for _ in range(rounds):
            with _daemon(device) as daemon:
                clients = start_trainers(trainers, daemon, CLIENTS, device)
                time.sleep(moments.random() * STEP_SECONDS)
                killed = time.monotonic()
                os.kill(daemon.pid, signal.SIGKILL)
                for pid in clients:
                    at, words = _last_report(trainers, pid)
                    found.seconds.append(max(0.0, at - killed))
                    found.errors[words] += 1
    return found


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


def _last_report(trainers: Trainers, pid: int) -> tuple[float, str]:
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


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.deaths")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", choices=tuple(FLAGS), default="cpu")
    parser.add_argument("--groups", type=int, default=1, help="daemons at a time")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    how = f"--device {args.device} --rounds {args.rounds} --groups {args.groups}"
    options: dict[str, Any] = {"device": args.device, "groups": args.groups}
    result: dict[str, Any] = {
        "machine": describe() | {"command": f"python -m bench.deaths {how}"},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "killed_clients": kill_clients(args.rounds, **options),
        "killed_daemons": kill_daemons(args.rounds, **options),
    }
    text = json.dumps(result, indent=2)
    args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
