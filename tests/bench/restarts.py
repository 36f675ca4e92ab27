"""Kills and restarts the daemon under trainers, again and again, which must not notice.

    PYTHONPATH=tests python -m bench.restarts --kills 200 --restarts 50 --json restarts.json

What stays true: every gradient is right to the bit and no trainer raises, whatever the daemon was
doing, going on with what an earlier one has left included; in the end nothing is left of anything.
The pauses are random by purpose: they are no wait for anything.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from bench.deaths import FLAGS, NOTICED_SECONDS, reclaimed, start_trainers
from bench.recording import parser_of, show, spread
from storm_bench.child_daemon import ChildDaemon
from support.daemon_process import served_by
from support.trainers import Trainers
from support.waiting import wait_until

TRAINERS = 2
LONGEST_PAUSE = 1.0
"""Seconds that a daemon has served when it is ended: within the first tenth its clients come."""


def end_daemons(
    trainers: Trainers, kills: int, restarts: int, seed: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """End the daemon of two trainers, so many times by SIGKILL and in order; return figures."""
    moments = random.Random(seed)
    ends = [signal.SIGKILL] * kills + [signal.SIGUSR2] * restarts
    moments.shuffle(ends)
    seconds, starts, steps = [], [], 0
    with _daemon(device) as daemon:
        pids = start_trainers(trainers, daemon, TRAINERS, device)
        for number in ends:
            serving = served_by(daemon)
            time.sleep(moments.random() * LONGEST_PAUSE)
            ended = time.monotonic()
            _end(daemon, serving, number)
            starts.append(_processor_seconds(served_by(daemon)))
            for pid in pids:
                steps += _steps_so_far(trainers, pid)
                seconds.append(_first_step_since(trainers, pid, ended, daemon))
        assert daemon.status()["counters"]["ended"]["failed"] == 0
        for pid in pids:
            trainers.kill(pid)
        reclaimed(daemon, 0)
    return {
        "kills": kills,
        "restarts": restarts,
        "trainers": TRAINERS,
        "right_steps": steps + len(seconds),
        "seconds_to_the_end_of_a_step_begun_since": spread(seconds),
        "processor_seconds_of_a_start": spread(starts),
        "load_average": os.getloadavg()[0],
    }


def end_all(trainers: Trainers, rounds: int, seed: int = 0, device: str = "cpu") -> None:
    """Kill the daemon and its trainers together, so many times: nothing is left of them."""
    moments = random.Random(seed)
    with _daemon(device) as daemon:
        for _ in range(rounds):
            pids = start_trainers(trainers, daemon, TRAINERS, device)
            time.sleep(moments.random() * 0.1)
            _end(daemon, served_by(daemon), signal.SIGKILL)
            for pid in pids:
                trainers.kill(pid)
            reclaimed(daemon, 0)


def _daemon(device: str) -> ChildDaemon:
    flags = [*FLAGS[device], "--cache-bytes=1MiB", f"--device={device}", "--resumable"]
    return ChildDaemon(flags=flags)


def _end(daemon: ChildDaemon, pid: int, number: int) -> None:
    """Send a daemon that serves a signal; its holder starts the next."""
    process = Path(f"/proc/{pid}")

    def found() -> str:
        return f"{process}, sent {number}: {_doing(process)}\n{daemon.log_tail()}"

    os.kill(pid, number)
    wait_until(lambda: not process.exists(), NOTICED_SECONDS, found)


def _doing(process: Path) -> str:
    """Return what the kernel says of a process, with the signals that do not reach it."""
    told = ("State", "PPid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    try:
        lines = (process / "status").read_text().splitlines()
        waits = [f"{task.name} {(task / 'wchan').read_text()}" for task in process.glob("task/*")]
    except OSError as error:
        return f"it has gone by now ({error.strerror})"
    return "; ".join([line for line in lines if line.split(":")[0] in told] + waits)


def _steps_so_far(trainers: Trainers, pid: int) -> int:
    words = trainers.heard(pid)
    assert set(words) <= {"same"}, words
    return len(words)


def _first_step_since(trainers: Trainers, pid: int, ended: float, daemon: ChildDaemon) -> float:
    """Return the seconds from the daemon's end to the end of the first step that began since.

    It is right. The one before may have had all that it needed.
    """
    at, has_begun = 0.0, False
    while not has_begun:
        has_begun = at > ended
        at, words = trainers.next(pid, NOTICED_SECONDS)
        assert words == "same", f"{words}\n{daemon.log_tail()}"
    return at - ended


def _processor_seconds(pid: int) -> float:
    """Return what a process has taken so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=tuple(FLAGS), default="cpu")
    args = parser.parse_args()
    with Trainers() as trainers:
        given = trainers, args.kills, args.restarts, args.seed, args.device
        figures = {"ended_daemons": end_daemons(*given)}
        end_all(trainers, 10, args.seed, args.device)
    show(args.json, figures)


if __name__ == "__main__":
    main()
