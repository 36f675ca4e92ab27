"""Stores and restores without end, by eight clients that want more than the pool holds.

    PYTHONPATH=tests python -m bench.soak --operations 1000000 --json tests/bench/results/soak.json

The daemon runs in this process, so that the arena's invariants are checked throughout; the
clients are processes of their own and compare every byte that comes back. What stays true: a
wrong byte or a broken invariant is an error and no figure.
"""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import psutil
from bench.recording import parser_of, show
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient

from stormd.config import Config
from stormd.memory.arena import Block, Space
from stormd.protocol import Rejected, Restore, Restored, Stored

KIB, MIB = 1 << 10, 1 << 20
CLIENTS = 8
POOL_BYTES = 256 * MIB
WANTED_BYTES = 48 * MIB
"""What each client holds if it can: together half as much again as the pool."""

SIZES = (*(KIB << power for power in range(10)), 700 * KIB)
BATCH = 8
SLOT_BYTES = MIB
MIX = (64 * MIB, 64 * MIB, 33 * MIB, 17 * MIB, 5 * MIB, MIB, 64 * KIB, 4 * KIB)
"""Requests that a pool with holes is asked for, the largest as often as it has room for them."""


class Sample(NamedTuple):
    """The daemon at one time; `resident_bytes` without the areas that it shares with sessions."""

    resident_bytes: int
    entries: int
    extents: int


# --- a client -------------------------------------------------------------------------------


class Client:
    """Holds entries of mixed sizes; what it stored it can recompute and compare."""

    def __init__(self, address: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._raw = RawClient(address).open(staging_bytes=2 * BATCH * SLOT_BYTES)
        self._source = _source(seed)
        self._held: dict[int, tuple[int, int]] = {}  # entry: where in the source, how much
        self._held_bytes = 0
        self._tickets = 0
        self.operations = 0
        self.rejected = 0

    def run(self, operations: int) -> None:
        """Store, restore and release until so many stores and restores are done."""
        while self.operations < operations:
            self._store_some()
            self._restore_some()
            while self._held_bytes > WANTED_BYTES:
                self._release(self._random.choice(list(self._held)))

    def release_half(self) -> None:
        """Give up every other entry, so that the pool has holes."""
        for entry in list(self._held)[::2]:
            self._release(entry)

    def close(self) -> None:
        self._raw.close()

    def _store_some(self) -> None:
        batch = {}
        for slot in range(BATCH):
            nbytes = self._random.choice(SIZES)
            place = self._random.randrange(0, len(self._source) - nbytes, 2)
            how = {"codec": self._random.choice(("ancf", "raw")), "dtype": "bfloat16"}
            data = self._source[place : place + nbytes]
            batch[self._raw.store(data, offset=slot * SLOT_BYTES, **how)] = place, nbytes
        for entry, held in batch.items():
            answer = self._raw.wait(
                lambda got, entry=entry: (
                    isinstance(got.message, Stored | Rejected) and got.message.entry == entry
                )
            ).message
            self.operations += 1
            if isinstance(answer, Stored):
                self._held[entry] = held
                self._held_bytes += held[1]
            else:
                assert answer.reason == "pool_full", answer
                self.rejected += 1
        self._raw.received.clear()  # Admitted

    def _restore_some(self) -> None:
        chosen = self._random.sample(list(self._held), min(BATCH, len(self._held)))
        batch = []
        for slot, entry in enumerate(chosen):
            self._tickets += 1
            where = {"segment": 0, "offset": (BATCH + slot) * SLOT_BYTES, "sequence": 0}
            nbytes = self._held[entry][1]
            batch.append(Restore(ticket=self._tickets, entry=entry, nbytes=nbytes, **where))
        if batch:
            self._raw.send(*batch)
        for message in batch:
            self._raw.wait_for(Restored, ticket=message.ticket)
            place, nbytes = self._held[message.entry]
            found = self._raw.staging[message.offset : message.offset + nbytes]
            assert found == self._source[place : place + nbytes], "wrong bytes came back"
            self.operations += 1
            if self._random.random() < 0.5:
                self._release(message.entry)

    def _release(self, entry: int) -> None:
        self._raw.release(entry)
        self._held_bytes -= self._held.pop(entry)[1]


def _source(seed: int) -> bytes:
    """Return bytes to store pieces of: half of them bfloat16 values, half of them noise."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(2 * MIB, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() + generator.bytes(4 * MIB)


def client_main(address: str, seed: int, operations: int) -> None:
    """Run a client; it says how it went and waits for the end of its input to leave."""
    client = Client(address, seed)
    client.run(operations)
    client.release_half()
    print(json.dumps({"operations": client.operations, "rejected": client.rejected}), flush=True)
    sys.stdin.read()
    client.close()


# --- the daemon's side ----------------------------------------------------------------------


def soak(operations: int) -> dict[str, Any]:
    """Have the clients do so many operations; return what the daemon's memory did meanwhile."""
    with tempfile.TemporaryDirectory(prefix="stormd-") as directory:
        address = f"ipc://{directory}/stormd.sock"
        daemon = DaemonThread(
            Config(
                address=address,
                pool_bytes=POOL_BYTES,
                cache_bytes=0,
                device="cpu",
                max_entries_per_session=1 << 16,
            )
        )
        try:
            return _soak(daemon, operations)
        finally:
            daemon.stop()


def _soak(daemon: DaemonThread, operations: int) -> dict[str, Any]:
    began = time.monotonic()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(_client_process(daemon.address, seed, operations // CLIENTS))
            for seed in range(CLIENTS)
        ]
        samples = _watch(daemon, clients)
        seconds = time.monotonic() - began
        reports = [json.loads(_output(client).readline()) for client in clients]
        usable = daemon.on_loop(lambda: _usable(daemon.server._spaces[0]))
        for client in clients:
            client.communicate()
            assert client.returncode == 0
    daemon.wait_until_empty()
    return {
        "clients": CLIENTS,
        "operations": sum(report["operations"] for report in reports),
        "rejected": sum(report["rejected"] for report in reports),
        "seconds": seconds,
        "pool_bytes": POOL_BYTES,
        "peak_used_bytes": daemon.status()["pool"]["peak_used_bytes"],
        "invariants_checked": len(samples),
        "resident": _drift(samples),
        "fragmentation": usable,
    }


def _client_process(address: str, seed: int, operations: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.soak", "--client", address, str(seed), str(operations)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _output(client: subprocess.Popen[str]) -> IO[str]:
    assert client.stdout is not None
    return client.stdout


def _watch(daemon: DaemonThread, clients: list[subprocess.Popen[str]]) -> list[Sample]:
    """Check the invariants about once a second until all clients are done; return what was seen."""
    samples = []
    waiting = [_output(client) for client in clients]
    while waiting:
        ready, _, _ = select.select(waiting, [], [], 1.0)
        waiting = [one for one in waiting if one not in ready]
        assert all(client.poll() is None for client in clients), "a client has failed"
        daemon.check()
        samples.append(daemon.on_loop(lambda: _sample(daemon)))
    return samples


def _sample(daemon: DaemonThread) -> Sample:
    info = psutil.Process().memory_info()
    sessions = daemon.server._ledger.sessions.values()
    blocks = [entry.block for session in sessions for entry in session.entries.values()]
    extents = sum(len(block.extents) for block in blocks if block is not None)
    return Sample(info.rss - info.shared, len(blocks), extents)


def _drift(samples: list[Sample]) -> dict[str, Any]:
    """Compare the fourth tenth of the time, when the pool has long been full, with the last."""
    tenth = max(1, len(samples) // 10)
    early = _median(samples[3 * tenth : 4 * tenth] or samples)
    late = _median(samples[-tenth:])
    return {
        "early": early._asdict(),
        "late": late._asdict(),
        "growth": late.resident_bytes / early.resident_bytes - 1,
        "growth_beside_the_pool": (late.resident_bytes - early.resident_bytes)
        / (early.resident_bytes - POOL_BYTES),
    }


def _median(samples: list[Sample]) -> Sample:
    return Sample(*(int(statistics.median(values)) for values in zip(*samples, strict=True)))


def _usable(space: Space) -> dict[str, float]:
    """Ask a pool with holes for a mix of blocks until it has room for none; then give all back."""
    before = space.use()
    blocks: list[Block] = []
    for nbytes in MIX:
        while space.promise(nbytes):
            blocks.append(space.place(nbytes, nbytes))
    used = sum(block.nbytes for block in blocks)
    extents = [len(block.extents) for block in blocks]
    for block in blocks:
        space.release(block)
    space.assert_invariants()
    free = before.capacity - before.used - before.promised
    return {
        "free_bytes": free,
        "largest_free_share": before.largest_free / free,
        "usable_share": used / free,
        "blocks_of_64_mib": sum(block.nbytes == 64 * MIB for block in blocks),
        "most_extents_of_a_block": max(extents),
        "median_extents_of_a_block": statistics.median(extents),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--client", nargs=3, metavar=("ADDRESS", "SEED", "OPERATIONS"))
    args = parser.parse_args()
    if args.client:
        address, seed, operations = args.client
        client_main(address, int(seed), int(operations))
    else:
        show(args.json, {"soak": soak(args.operations)})


if __name__ == "__main__":
    main()
