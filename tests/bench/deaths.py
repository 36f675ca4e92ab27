"""Kills clients and daemons at random moments, and looks at what that does to everybody else.

    PYTHONPATH=tests python -m bench.deaths --rounds 200 --json tests/bench/results/deaths.json

What stays true: a wrong gradient, a hang or a leak is an AssertionError and no figure. The pause
before a kill is random by purpose: it is no wait for anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from support.trainers import Trainers
from support.waiting import wait_until

from stormd.arena import slack_of
from stormd.child_daemon import ChildDaemon
from stormd.machine import describe

NOTICED_SECONDS = 5.0
STEP_SECONDS = 0.05
"""About one step of a trainer: kills are spread over it."""

SURVIVORS = 2
CLIENTS = 3
SETTLED_ROUND = 3
"""After so many rounds the daemon has all that it keeps."""


def kill_clients(rounds: int, seed: int = 0) -> dict[str, Any]:
    """Kill one of three clients, `rounds` times; the others go on with the right gradients."""
    moments = random.Random(seed)
    seconds: list[float] = []
    survivors_steps = 0
    with _daemon() as daemon, Trainers() as trainers:
        survivors = [trainers.start(daemon.address) for _ in range(SURVIVORS)]
        for pid in survivors:
            trainers.expect(pid, "ready", "same")
        settled = held = _belongings(daemon)
        for number in range(rounds):
            victim = trainers.start(daemon.address)
            trainers.expect(victim, "ready", "same")
            time.sleep(moments.random() * STEP_SECONDS)
            trainers.kill(victim)
            seconds.append(_reclaimed(daemon, SURVIVORS))
            survivors_steps += sum(_right_steps(trainers, pid) for pid in survivors)
            if number == SETTLED_ROUND:
                settled = _belongings(daemon)
        wait_until(lambda: _belongings(daemon).keys() == settled.keys())
        held = _belongings(daemon)
        assert held["descriptors"] <= settled["descriptors"], (held, settled)
        assert held["threads"] <= settled["threads"], (held, settled)
        for pid in survivors:
            trainers.kill(pid)
        _reclaimed(daemon, 0)
        assert not daemon.status()["counters"]["ended"]["failed"]
    return {
        "kills": rounds,
        "reclaim_seconds": _spread(seconds),
        "survivors_right_steps": survivors_steps,
        "daemon_settled": settled,
        "daemon_at_the_end": held,
    }


def kill_daemons(rounds: int, seed: int = 0) -> dict[str, Any]:
    """Kill the daemon of three clients, `rounds` times; each is told, in whatever it is doing."""
    moments = random.Random(seed)
    seconds: list[float] = []
    errors: Counter[str] = Counter()
    with Trainers() as trainers:
        for _ in range(rounds):
            with _daemon() as daemon:
                clients = [trainers.start(daemon.address) for _ in range(CLIENTS)]
                for pid in clients:
                    trainers.expect(pid, "ready", "same")
                time.sleep(moments.random() * STEP_SECONDS)
                killed = time.monotonic()
                os.kill(daemon.pid, signal.SIGKILL)
                for pid in clients:
                    at, words = _last_report(trainers, pid)
                    seconds.append(max(0.0, at - killed))
                    errors[words] += 1
    assert max(seconds) < NOTICED_SECONDS, f"a client was told after {max(seconds)} s"
    return {
        "kills": rounds,
        "clients": CLIENTS,
        "told_seconds": _spread(seconds),
        "errors": dict(errors),
    }


def _daemon() -> ChildDaemon:
    return ChildDaemon(flags=["--pool-bytes=64MiB", "--cache-bytes=1MiB", "--device=cpu"])


def _reclaimed(daemon: ChildDaemon, sessions: int) -> float:
    """Wait until so many sessions are left; return the seconds that took.

    A session leaves the list when all that it held is free; without any, the pool must be empty.
    """
    began = time.monotonic()
    wait_until(lambda: len(daemon.status()["sessions"]) == sessions, NOTICED_SECONDS, daemon.status)
    if not sessions:
        state = daemon.status()
        assert state["entries"] == 0
        assert state["pool"]["used_bytes"] == state["pool"]["promised_bytes"] == 0
        capacity = state["pool"]["capacity_bytes"]
        assert state["pool"]["largest_free_bytes"] == capacity + slack_of(capacity)
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
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "resident_bytes": process.memory_info().rss,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.deaths")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = {
        "machine": describe() | {"command": f"python -m bench.deaths --rounds {args.rounds}"},
        "killed_clients": kill_clients(args.rounds),
        "killed_daemons": kill_daemons(args.rounds),
    }
    text = json.dumps(result, indent=2)
    args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
