"""Clients that connect, store, restore and leave, all at once: latency, throughput, fairness.

    PYTHONPATH=tests python -m bench.load --json tests/bench/results/load.json

Every client is a process that does one operation at a time and compares what comes back; the
figures of 1 client are those of the daemon and the loop around it alone. On a machine with fewer
cores than clients the latencies are mostly those of waiting for a core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.recording import parser_of, show, spread
from storm_bench.child_daemon import ChildDaemon
from support.raw_client import RawClient

from stormd.protocol import Goodbye, Restore, Restored, Store, Stored

KIB, MIB = 1 << 10, 1 << 20
COUNTS = (1, 8, 64)
LANES = (2, 8)
SECONDS = 5.0
"""For which each client stores and restores."""

NBYTES = 64 * KIB
GREEDY_BYTES = MIB
GREEDY_WINDOW = 16
"""Stores that the greedy client has in flight at any time."""

START_POOL = "4GiB"
STARTS = 3
"""On a virtual machine the first start waits for its host to find the memory."""


# --- a client -------------------------------------------------------------------------------


def polite(address: str, seconds: float) -> dict[str, Any]:
    """Store and restore one at a time; return the seconds that each took."""
    began = time.monotonic()
    client = RawClient(address).open(staging_bytes=MIB)
    connected = time.monotonic()
    data = os.urandom(NBYTES)
    stores, restores = [], []
    while not stores or time.monotonic() - connected < seconds:
        began_store = time.perf_counter()
        entry = client.stored(data)
        began_restore = time.perf_counter()
        found = client.restored(entry, NBYTES, offset=NBYTES)
        ended = time.perf_counter()
        assert found == data, "wrong bytes came back"
        stores.append(began_restore - began_store)
        restores.append(ended - began_restore)
        client.release(entry)
        client.received.clear()  # Admitted
    leaving = time.monotonic()
    client.send(Goodbye())
    assert client.is_cut_off()
    left = time.monotonic()
    client.close()
    return {
        "connect": connected - began,
        "leave": left - leaving,
        "stores": stores,
        "restores": restores,
    }


def greedy(address: str, seconds: float) -> dict[str, Any]:
    """Keep many large stores and restores in flight; return how many were done."""
    client = RawClient(address).open(staging_bytes=(GREEDY_WINDOW + 1) * GREEDY_BYTES)
    client.staging[: GREEDY_WINDOW * GREEDY_BYTES] = os.urandom(GREEDY_WINDOW * GREEDY_BYTES)
    began, numbers, done = time.monotonic(), 0, 0
    while not done or time.monotonic() - began < seconds:
        entries = range(numbers + 1, numbers + GREEDY_WINDOW + 1)
        numbers += GREEDY_WINDOW
        client.send(
            *(
                Store(
                    entry=entry,
                    segment=0,
                    offset=slot * GREEDY_BYTES,
                    nbytes=GREEDY_BYTES,
                    dtype="uint8",
                    codec="raw",
                    sequence=0,
                )
                for slot, entry in enumerate(entries)
            ),
            *(
                Restore(
                    ticket=entry,
                    entry=entry,
                    segment=0,
                    offset=GREEDY_WINDOW * GREEDY_BYTES,
                    nbytes=GREEDY_BYTES,
                    sequence=0,
                )
                for entry in entries
            ),
        )
        for entry in entries:
            client.wait_for(Stored, entry=entry)
            client.wait_for(Restored, ticket=entry)
        client.release(*entries)
        client.received.clear()
        done += 2 * GREEDY_WINDOW
    client.close()
    return {"operations": done, "seconds": time.monotonic() - began}


def client_main(role: str, address: str, seconds: float) -> None:
    """Be a client, once the word to begin has come."""
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"polite": polite, "greedy": greedy}[role](address, seconds)), flush=True)


# --- rounds ---------------------------------------------------------------------------------


def crowd(count: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Have so many clients work at once; return their latencies and what they got done."""
    with _daemon() as daemon:
        found = _run(daemon.address, ["polite"] * count, seconds)
        state = daemon.status()
        assert state["entries"] == 0, state
    done = [len(one["stores"]) + len(one["restores"]) for one in found]
    return {
        "clients": count,
        "connect_seconds": spread([one["connect"] for one in found]),
        "leave_seconds": spread([one["leave"] for one in found]),
        "store_seconds": spread([value for one in found for value in one["stores"]]),
        "restore_seconds": spread([value for one in found for value in one["restores"]]),
        "operations_per_second": sum(done) / seconds,
        "bytes_per_second": sum(done) * NBYTES / seconds,
        "least_to_most_served": min(done) / max(done),
    }


def beside_a_greedy_one(seconds: float = SECONDS) -> dict[str, Any]:
    """Return what a client gets that does one small thing at a time, alone and beside a glutton."""
    figures = {}
    for name, roles in (("alone", ["polite"]), ("beside", ["polite", "greedy"])):
        with _daemon() as daemon:
            modest, *others = _run(daemon.address, roles, seconds)
        figures[name] = {
            "store_seconds": spread(modest["stores"]),
            "restore_seconds": spread(modest["restores"]),
            "operations_per_second": 2 * len(modest["stores"]) / seconds,
        }
        if others:
            rate = others[0]["operations"] * GREEDY_BYTES / others[0]["seconds"]
            figures[name]["greedy_bytes_per_second"] = rate
    return figures


def lanes(count: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Return what so many clients get done at one process, and at as many workers.

    Processors are counted: where there are fewer than processes, these bound both.
    """
    figures: dict[str, Any] = {"clients": count, "processors": len(os.sched_getaffinity(0))}
    for workers in ("off", str(count)):
        with _daemon(f"--workers={workers}", "--encode-threads=1") as daemon:
            found = _run(daemon.address, ["polite"] * count, seconds)
            state = daemon.status()
            assert state["entries"] == 0, state
            busy = [one["processor_seconds"] for one in state["workers"]]
        done = sum(len(one["stores"]) + len(one["restores"]) for one in found)
        figures[f"workers_{workers}"] = {
            "operations_per_second": done / seconds,
            "store_seconds": spread([value for one in found for value in one["stores"]]),
            "workers_processor_seconds": busy,
        }
    return figures


def start_and_end() -> dict[str, float]:
    """Return how long a daemon with a large pool takes to be ready, and to end on SIGTERM."""
    began = time.monotonic()
    with ChildDaemon(flags=[f"--pool-bytes={START_POOL}", "--device=cpu"]) as daemon:
        ready = time.monotonic() - began
        with RawClient(daemon.address) as client:
            entry = client.open().stored(os.urandom(NBYTES))
            began = time.monotonic()
            os.kill(daemon.pid, signal.SIGTERM)
            assert len(client.restored(entry, NBYTES)) == NBYTES
            client.release(entry)
            assert client.is_cut_off()
        daemon.close()
        return {"ready_seconds": ready, "end_seconds": time.monotonic() - began}


def _run(address: str, roles: list[str], seconds: float) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(_process(role, address, seconds)) for role in roles]
        for client in clients:
            assert client.stdout.readline() == "ready\n"
        for client in clients:
            client.stdin.write("go\n")
            client.stdin.flush()
        return [json.loads(client.communicate()[0]) for client in clients]


def _process(role: str, address: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.load", "--client", role, address, str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _daemon(*flags: str) -> ChildDaemon:
    return ChildDaemon(flags=["--pool-bytes=256MiB", "--cache-bytes=0", "--device=cpu", *flags])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--client", nargs=3, metavar=("ROLE", "ADDRESS", "SECONDS"))
    args = parser.parse_args()
    if args.client:
        role, address, seconds = args.client
        client_main(role, address, float(seconds))
        return
    figures = {
        "bytes_an_operation": NBYTES,
        "crowds": [crowd(count) for count in COUNTS],
        "fairness": beside_a_greedy_one(),
        "lanes": [lanes(count) for count in LANES],
        f"daemon_with_{START_POOL}": [start_and_end() for _ in range(STARTS)],
    }
    show(args.json, figures)


if __name__ == "__main__":
    main()
