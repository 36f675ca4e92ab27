"""Sends a daemon frames of every kind of wrong while a neighbour trains.

    PYTHONPATH=tests python -m bench.fuzz --frames 1000000 --json tests/bench/results/fuzz.json

What stays true: a crash, a hang, a wrong gradient of the neighbour's or a byte left over is an
AssertionError and no figure; the same seed sends the same frames.
"""

from __future__ import annotations

import os
import random
import select
import time
from typing import Any

import psutil
import zmq
from bench.deaths import reclaimed
from bench.recording import parser_of, show
from storm_bench.child_daemon import ChildDaemon
from support.frames import FrameFuzzer
from support.raw_client import RawClient
from support.trainers import Trainers

DRAIN_EVERY = 16
STRANGER_SHARE = 0.05
PARTS_SHARE = 0.002
VANISH_SHARE = 0.05
"""Of the looks at a session, after which its client vanishes whatever is in flight."""

NEIGHBOUR_SECONDS = 60.0
"""For one step of the neighbour's, on a machine as busy as may be."""

SETTLED_SHARE = 0.2
"""Of the frames, after which the daemon's memory is looked at first."""


class Attacker:
    """One hostile user: a session, renewed when it has ended, and a stranger."""

    def __init__(self, address: str, seed: int) -> None:
        self.sessions = 0
        self.answers = 0
        self._address = address
        self._random = random.Random(seed)
        self._frames = FrameFuzzer(seed, os.getuid())
        self._stranger = RawClient(address)
        self._client = self._open()

    def send(self, count: int) -> None:
        """Send so many frames, and take the answers."""
        for number in range(count):
            self._send(self._frames.frame())
            if number % DRAIN_EVERY == 0:
                self._drain(self._client)
                self._drain(self._stranger)
                if _has_ended(self._client) or self._random.random() < VANISH_SHARE:
                    self._client.close()
                    self._client = self._open()
        self._drain(self._client)
        self._drain(self._stranger)

    def close(self) -> None:
        """Vanish."""
        self._client.close()
        self._stranger.close()

    def _send(self, frame: bytes) -> None:
        chance = self._random.random()
        if chance < PARTS_SHARE:
            self._client.socket.send_multipart([frame, b"", frame])
        elif chance < PARTS_SHARE + STRANGER_SHARE:
            self._stranger.send_bytes(frame)
        else:
            self._client.send_bytes(frame)

    def _drain(self, client: RawClient) -> None:
        while client.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            client.socket.recv(zmq.NOBLOCK)
            self.answers += 1

    def _open(self) -> RawClient:
        self.sessions += 1
        return RawClient(self._address).open(staging_bytes=1 << 20)


def fuzz(frames: int, seed: int = 0) -> dict[str, Any]:
    """Send so many frames; return what they met and what the daemon's memory did."""
    with _daemon() as daemon, Trainers() as trainers:
        neighbour = trainers.start(daemon.address)
        trainers.expect(neighbour, "ready", "same")
        attacker = Attacker(daemon.address, seed)
        began = time.monotonic()
        settled_frames = int(SETTLED_SHARE * frames)
        steps = _send(attacker, settled_frames, trainers, neighbour)
        settled = _memory(daemon)
        steps += _send(attacker, frames - settled_frames, trainers, neighbour)
        seconds = time.monotonic() - began
        attacker.close()
        trainers.kill(neighbour)
        reclaimed(daemon, 0)
        state = daemon.status()
        counters, throughput = state["counters"], state["throughput"]
        assert not counters["ended"]["failed"], counters
        return {
            "frames": frames,
            "seconds": seconds,
            "sessions": attacker.sessions,
            "answers": attacker.answers,
            "malformed": counters["malformed"],
            "rejected": sum(counters["rejected"].values()),
            "stores": throughput["store"]["operations"],
            "restores": throughput["restore"]["operations"],
            "neighbour_right_steps": steps,
            "resident_bytes_settled": settled,
            "resident_bytes_at_the_end": _memory(daemon),
            "descriptors_at_the_end": psutil.Process(daemon.pid).num_fds(),
        }


def _has_ended(client: RawClient) -> bool:
    """Tell whether the daemon has closed the client's lifeline, on which it never speaks."""
    assert client.line is not None
    return bool(select.select([client.line], [], [], 0.0)[0])


def _daemon() -> ChildDaemon:
    flags = ["--pool-bytes=64MiB", "--cache-bytes=1MiB", "--device=cpu"]
    return ChildDaemon(flags=[*flags, "--session-quota-bytes=16MiB", "--log-level=error"])


def _send(attacker: Attacker, frames: int, trainers: Trainers, neighbour: int) -> int:
    """Send frames in pieces; return the neighbour's steps, of which each piece must see one."""
    steps = 0
    for begin in range(0, frames, 10_000):
        attacker.send(min(10_000, frames - begin))
        words = [trainers.next(neighbour, NEIGHBOUR_SECONDS).words, *trainers.heard(neighbour)]
        assert set(words) == {"same"}, words
        steps += len(words)
    return steps


def _memory(daemon: ChildDaemon) -> int:
    """Return the resident bytes that are the daemon's alone, without the sessions' areas."""
    info = psutil.Process(daemon.pid).memory_info()
    return int(info.rss - info.shared)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    args = parser.parse_args()
    show(args.json, {"fuzz": fuzz(args.frames)})


if __name__ == "__main__":
    main()
