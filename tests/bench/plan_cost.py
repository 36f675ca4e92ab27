"""What control costs the daemon for one tensor of a compiled graph, with and without a static plan.

    PYTHONPATH=tests python -m bench.plan_cost --json tests/bench/results/plan_cost.json

`messages`: the gateway and the ledger alone, without sockets and without a lane that does anything:
the processor time of decoding, checks, accounting, answers and their encoding, for a tensor that is
stored, restored and released, said one by one (a message each) or in runs of a plan.

`daemon`: a graph is run against a daemon of its own, and what the kernel charged to the thread of
its event loop is divided by the tensors. Sockets and wakes are in it, and what the lane's workers
do is not. Run at a commit without plans it gives the figure to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import storm_client as storm
import torch
from bench.lane_cost import Meter
from storm_bench.child_daemon import ChildDaemon
from torch import Tensor

from stormd.arena import Space
from stormd.control import Delivery
from stormd.counters import Counters
from stormd.events import RestoreDone, RestoreJob, StoreDone, StoreJob
from stormd.gateway import Gateway, Terms
from stormd.lanes import Attachment
from stormd.ledger import Ledger
from stormd.machine import describe, package_versions
from stormd.protocol import (
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    Message,
    Release,
    Restore,
    Store,
    encode,
)
from stormd.protocol import decode as decode_frame
from stormd.sessions import Limits

KIB, MIB = 1 << 10, 1 << 20
TENSORS = 128
TOGETHER = (16, 128)
"""Parts in a frame: what 64 KiB each come to when a MiB travels together, and all of a step."""

WARM_UPS = 5


# --- messages alone ------------------------------------------------------------------------------


class Core:
    """A gateway between a client and a lane that exist only as lists; it counts its own time."""

    def __init__(self, part_bytes: int) -> None:
        self.seconds = 0.0
        self.jobs: list[StoreJob | RestoreJob] = []
        self.frames: list[bytes] = []
        self._part_bytes = part_bytes
        self._space = Space(1 << 30)
        limits = Limits(max_sessions=1, max_entries=60_000, quota_bytes=0, lease_seconds=60.0)
        counters = Counters()
        self.ledger = Ledger(self._space, limits, counters)
        attachment = Attachment(
            descriptors=(), staging_bytes=1 << 30, part_bytes=part_bytes, segment_bytes=1 << 30
        )
        lane = SimpleNamespace(
            begin=lambda _session, jobs: self.jobs.extend(jobs), attach=lambda *_: attachment
        )
        control = SimpleNamespace(
            send=lambda _route, frame: self.frames.append(frame) or Delivery.SENT,
            settle=lambda: None,
            start=lambda *_: None,
        )
        anything: Any = Mock()
        self._gateway = Gateway(
            ledger=self.ledger,
            counters=counters,
            lanes={"cpu": cast("Any", lane)},
            control=cast("Any", control),
            terms=Terms(
                allowed_uids=frozenset((os.getuid(),)),
                lifeline_path="/nowhere",
                cache_part_bytes=0,
                lease_seconds=60.0,
            ),
            status=dict,
            on_progress=lambda: None,
            later=anything,
        )
        self._gateway.start(anything)
        self.say(Hello(
            protocol=PROTOCOL_VERSION, features=[], pid=1, uid=os.getuid(), device="cpu",
            device_uuid="", staging_bytes=0, name="bench",
        ))  # fmt: skip
        [(_, welcome)] = decode_frame(self.frames.pop())
        assert self._gateway.take_token(welcome.token, os.getuid()) is not None  # type: ignore[attr-defined]
        self.seconds = 0.0

    def say(self, *messages: Message) -> None:
        """Have the gateway take messages in one frame."""
        frame: Any = _Frame(encode([Envelope(n + 1, one) for n, one in enumerate(messages)]))
        began = time.thread_time()
        self._gateway.take_frame(_ROUTE, frame)
        self._gateway.flush()
        self.seconds += time.thread_time() - began

    def work(self) -> None:
        """Have the lane do what it was given, and the gateway take its results together."""
        jobs, results = self.jobs.copy(), []
        self.jobs.clear()
        for job in jobs:
            if isinstance(job, StoreJob):
                block = job.place(self._part_bytes * 3 // 4)
                results.append(
                    StoreDone(
                        session=job.session, entry=job.entry, block=block, mode="raw", seconds=0.0
                    )
                )
            else:
                results.append(RestoreDone(session=job.session, ticket=job.ticket, seconds=0.0))
        began = time.thread_time()
        self._gateway.take_results(results)
        self.seconds += time.thread_time() - began


class _Frame:
    """What of a ZeroMQ frame the gateway looks at."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, _name: str) -> str:
        return f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}"


_ROUTE = b"\0bench"


def one_by_one(core: Core, first: int, part_bytes: int, together: int) -> None:
    """Store, restore and release a step's tensors, a message for each."""
    for begin in range(0, TENSORS, together):
        core.say(*(
            Store(
                entry=first + n, segment=0, offset=n * part_bytes, nbytes=part_bytes,
                dtype="bfloat16", codec="ancf", sequence=0,
            )
            for n in range(begin, begin + together)
        ))  # fmt: skip
        core.work()
    for begin in range(0, TENSORS, together):
        core.say(*(
            Restore(
                ticket=first + n, entry=first + n, segment=0, offset=n * part_bytes,
                nbytes=part_bytes, sequence=0,
            )
            for n in range(begin, begin + together)
        ))  # fmt: skip
        core.work()
        core.say(Release(list(range(first + begin, first + begin + together))))


def by_plan(core: Core, first: int, part_bytes: int, together: int) -> None:
    """Do the same in a run of a plan."""
    from stormd.protocol import EndRun, RestoreParts, RunPlan, StoreParts, pack

    core.say(RunPlan(plan=1, run=first))
    for begin in range(0, TENSORS, together):
        part = range(begin, begin + together)
        places = pack(_flat((n, 0, n * part_bytes, 0, 0) for n in part))
        core.say(StoreParts(run=first, places=places))
        core.work()
    core.say(EndRun(first))
    for begin in range(0, TENSORS, together):
        part = range(begin, begin + together)
        asked = ((first + n, first + n, 0, n * part_bytes, part_bytes, 0) for n in part)
        core.say(RestoreParts(pack(_flat(asked))))
        core.work()
        core.say(Release([first + n for n in part]))


def _flat(numbers: Any) -> list[int]:
    return [number for part in numbers for number in part]


def messages_alone(steps: int, together: int, part_bytes: int = 64 * KIB) -> dict[str, float]:
    """Return microseconds a tensor, the least of several turns of each way."""
    from stormd.protocol import RegisterPlan

    core, first = Core(part_bytes), 1000
    core.say(RegisterPlan(
        plan=1, sizes=[part_bytes] * TENSORS, kinds=[0] * TENSORS, dtypes=["bfloat16"],
        codec="ancf",
    ))  # fmt: skip
    found: dict[str, list[float]] = {"one by one": [], "in runs of a plan": []}
    for _ in range(5):
        for name, way in zip(found, (one_by_one, by_plan), strict=True):
            core.seconds = 0.0
            for _ in range(steps):
                way(core, first, part_bytes, together)
                first += TENSORS
                core.frames.clear()
            found[name].append(1e6 * core.seconds / steps / TENSORS)
    core.ledger.assert_invariants()
    assert not core.ledger.entries
    return {name: round(min(each), 2) for name, each in found.items()}


# --- a daemon ------------------------------------------------------------------------------------


def noisy(x: Tensor) -> Tensor:
    """Save tensors that nothing can make again."""
    for _ in range(TENSORS):
        x = x * torch.rand_like(x)
    return x


def with_a_daemon(part_bytes: int, steps: int, turns: int, device: torch.device) -> dict[str, Any]:
    """Return microseconds of the loop's thread for one tensor; the tensors have `part_bytes`."""
    flags = ["--device", device.type, "--pool-bytes", "1GiB"]
    flags += [f"--staging-bytes-{device.type}", "64MiB"]
    with (
        ChildDaemon(flags=flags) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=60.0) as client,
    ):
        compiled = storm.compile(
            noisy, client=client, budget=0.0, min_bytes=1, codec="raw", codegen="eager"
        )
        x = torch.randn(part_bytes // 4, device=device).requires_grad_()
        for _ in range(WARM_UPS):
            compiled(x).sum().backward()
        loops, walls, last = [], [], {}
        for _ in range(turns):
            meter, began = Meter(daemon), time.perf_counter()
            for _ in range(steps):
                compiled(x).sum().backward()
            walls.append((time.perf_counter() - began) / steps / TENSORS * 1e6)
            time.sleep(1.2)  # for releases that leave with a heartbeat
            last = meter.since()
            both = last["stores"] + last["restores"]
            loops.append(last["daemon_threads_us"]["thread loop"] * both / steps / TENSORS)
    return {
        "part_bytes": part_bytes,
        "loop_us_a_tensor": {"least": round(min(loops), 1), "median": _median(loops)},
        "step_us_a_tensor": _median(walls),
        "last_turn": last,
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = describe() | {
        "command": " ".join(sys.argv),
        "protocol": PROTOCOL_VERSION,
        "device": device.type,
        "versions": package_versions(("torch", "pyzmq", "uvloop", "msgpack")),
    }
    if PROTOCOL_VERSION >= 5:  # from here on there are plans
        found["messages_us_a_tensor"] = {
            f"{together} in a frame": messages_alone(options.steps * 5, together)
            for together in TOGETHER
        }
        print(json.dumps(found["messages_us_a_tensor"]), flush=True)
    found["daemon"] = []
    for part_bytes in (16 * KIB, 64 * KIB):
        found["daemon"].append(with_a_daemon(part_bytes, options.steps, options.turns, device))
        print(json.dumps(found["daemon"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
