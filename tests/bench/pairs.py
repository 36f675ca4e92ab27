"""Small stores and restores in turn by one client of the library, and the processor time of each.

    PYTHONPATH=tests python -m bench.pairs

Each pair stores 64 KiB raw on the cpu lane by the client's connection, restores them and compares
every byte. On a busy machine compare two checkouts in turns: a pair takes as long as its processor
time, unless others use the cores.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from bench.recording import parser_of, show
from storm_bench.child_daemon import ChildDaemon
from storm_client.lanes import Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.transport.connection import Connection
from storm_client.transport.io_thread import Listener

from stormd.protocol import Message, Release, Restore, Restored, Store, Stored

NBYTES = 64 << 10
WARM_PAIRS = 300
SECONDS = 5.0


class Pairs(Listener):
    """Stores and restores the same bytes again and again."""

    def __init__(self, address: str) -> None:
        self._lane = CpuLane()
        self.connection = Connection(address, self._lane.hello, 30)
        self.connection.attach(self._lane, 30)
        self.connection.start(self)
        self._answered: set[int] = set()
        self._source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
        self._into = torch.empty_like(self._source)
        self._expected = self._source.numpy().tobytes()

    def on_message(self, request: int, message: Message) -> None:
        if isinstance(message, Stored):
            self._answered.add(message.entry)
        elif isinstance(message, Restored):
            self._answered.add(message.ticket)

    def do_one(self) -> None:
        connection = self.connection
        self._lane.stage(self._source.untyped_storage(), 0, Slot(0, NBYTES))
        with connection.lock:
            entry, ticket = next(connection.numbers), next(connection.numbers)
            chunk = {"entry": entry, "segment": 0, "nbytes": NBYTES, "sequence": 0}
            self._ask(entry, Store(offset=0, dtype="uint8", codec="raw", **chunk))
            self._ask(ticket, Restore(ticket=ticket, offset=NBYTES, **chunk))
            connection.post(0, Release([entry]))
        self._lane.unstage(Slot(NBYTES, NBYTES), self._into.untyped_storage(), 0)
        assert self._into.numpy().tobytes() == self._expected, "wrong bytes came back"

    def _ask(self, number: int, message: Message) -> None:
        self.connection.send(number, message)
        while number not in self._answered:
            assert self.connection.wait(time.monotonic() + 60), "no answer"


def processor_seconds(pid: int) -> float:
    """Return what all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    args = parser_of(__doc__).parse_args()
    flags = ["--pool-bytes=256MiB", "--cache-bytes=0", "--device=cpu"]
    with ChildDaemon(flags=flags) as daemon:
        pairs = Pairs(daemon.address)
        for _ in range(WARM_PAIRS):
            pairs.do_one()
        pids = {"client": os.getpid(), "daemon": daemon.pid}
        used = {name: -processor_seconds(pid) for name, pid in pids.items()}
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            pairs.do_one()
            done += 1
        taken = time.perf_counter() - began
        for name, pid in pids.items():
            used[name] = (used[name] + processor_seconds(pid)) / done
        pairs.connection.close()
    figures = {"pairs_per_second": done / taken, "processor_seconds_a_pair": used}
    show(args.json, {"bytes_an_operation": NBYTES, **figures})


if __name__ == "__main__":
    main()
