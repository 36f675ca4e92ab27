"""The tier on disk beside a plain copy: the same bytes, the same disk, in turns.

    PYTHONPATH=tests python -m bench.spill --path DIR --json tests/bench/results/spill.json

A session stores four times what the pool holds and restores it newest first, step after step, as a
training does; each byte is compared. Beside it as many bytes as the tier wrote and read in a step
go to a file with O_DIRECT and back, by as many threads in pieces of the same size; the second time
counts, as of the tier the last step does. Random bytes, which neither disk nor codec makes fewer.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.recording import parser_of, show
from storm_bench.child_daemon import ChildDaemon
from support.raw_client import RawClient

from stormd.memory.extents import RECORD_BYTES
from stormd.protocol import Restore, Restored, Stored
from stormd.spill.file import SpillFile

MIB = 1 << 20
PART_BYTES = 8 * MIB
SLOTS = 7
"""Parts of the staging area, one less than a session of the default size has."""

THREADS = 4
ROUNDS = 5
STEPS = 3


def plain(path: Path, written: int, read: int) -> dict[str, float]:
    """Return the bytes a second at which so many are written and read, by threads alone."""
    file = SpillFile(path, written // RECORD_BYTES * RECORD_BYTES)
    buffers = [memoryview(mmap.mmap(-1, RECORD_BYTES)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(RECORD_BYTES)
    try:
        _copied(written, buffers, file.write)  # a file system is slower where nothing was written
        return {
            "write": _copied(written, buffers, file.write),
            "read": _copied(read, buffers, file.read),
        }
    finally:
        file.close()


def _copied(nbytes: int, buffers: list[memoryview], move: Any) -> float:
    count = nbytes // RECORD_BYTES

    def work(number: int) -> None:
        for index in range(number, count, THREADS):
            move(index * RECORD_BYTES, buffers[number])

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    return count * RECORD_BYTES / (time.perf_counter() - began)


def tier(path: Path, nbytes: int, encrypt: str, steps: int) -> list[dict[str, float]]:
    """Return what a session gets in each step that stores so many bytes; a quarter of it fits."""
    flags = [
        f"--pool-bytes={nbytes // 4}",
        "--cache-bytes=0",
        "--device=cpu",
        f"--spill-path={path}",
        f"--spill-bytes={nbytes * 5 // 4}",
        f"--spill-encrypt={encrypt}",
        f"--spill-threads={THREADS}",
    ]
    with ChildDaemon(flags=flags) as daemon, RawClient(daemon.address) as client:
        client.open(staging_bytes=(SLOTS + 1) * PART_BYTES)
        texts = [os.urandom(PART_BYTES) for _ in range(SLOTS)]
        count = nbytes // PART_BYTES
        found = [_step(daemon, client, texts, step * count, count) for step in range(steps)]
        state = daemon.status()
        assert state["counters"]["rejected"]["pool_full"] == 0, state
    return found


def _step(
    daemon: ChildDaemon, client: RawClient, texts: list[bytes], first: int, count: int
) -> dict[str, float]:
    before = daemon.status()["spill"]
    began = time.perf_counter()
    _store(client, texts, first, count)
    stored = time.perf_counter()
    between = daemon.status()["spill"]
    begins = time.perf_counter()
    _restore(client, texts, first, count)
    seconds = time.perf_counter() - begins
    after = daemon.status()["spill"]
    written = between["write"]["bytes"] - before["write"]["bytes"]
    read = after["read"]["bytes"] - between["read"]["bytes"]
    return {
        "written_bytes": written,
        "read_bytes": read,
        "write": written / (stored - began),
        "read": read / seconds,
    }


def _store(client: RawClient, texts: list[bytes], first: int, count: int) -> None:
    """Store so many parts behind entry `first`, with as many under way as there are slots."""
    for index in range(count + SLOTS):
        if index >= SLOTS:
            client.wait_for(Stored, entry=first + index - SLOTS + 1)
            client.received = [one for one in client.received if isinstance(one.message, Stored)]
        if index < count:
            assert client.store(texts[index % SLOTS], offset=index % SLOTS * PART_BYTES) == (
                first + index + 1
            )


def _restore(client: RawClient, texts: list[bytes], first: int, count: int) -> None:
    """Restore them, the newest first, and compare."""
    for index in range(count + SLOTS):
        offset = index % SLOTS * PART_BYTES
        if index >= SLOTS:
            done = count - 1 - (index - SLOTS)
            client.wait_for(Restored, ticket=first + done + 1)
            client.release(first + done + 1)
            assert client.staging[offset : offset + PART_BYTES] == texts[done % SLOTS]
        if index < count:
            entry = first + count - index
            more = {"segment": 0, "offset": offset, "nbytes": PART_BYTES, "sequence": 0}
            client.send(Restore(ticket=entry, entry=entry, **more))


def compare(
    path: Path, nbytes: int, encrypt: str, rounds: int = ROUNDS, steps: int = STEPS
) -> dict[str, Any]:
    """Return both in turns, and the ratio of each round; of the tier the last step."""
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        ours = tier(path, nbytes, encrypt, steps)
        theirs = plain(path, int(ours[-1]["written_bytes"]), int(ours[-1]["read_bytes"]))
        found.append({"tier": ours, "plain": theirs})
    ratios = {
        way: [one["tier"][-1][way] / one["plain"][way] for one in found]
        for way in ("write", "read")
    }
    return {
        "rounds": found,
        "median_ratio": {way: statistics.median(values) for way, values in ratios.items()},
        "ratios": ratios,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--path", type=Path, default=Path.cwd())
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--disk", default="", help="what the disk is, for the record")
    args = parser.parse_args()
    given = args.path, args.mib * MIB
    figures = {f"encrypt_{one}": compare(*given, one, args.rounds) for one in ("on", "off")}
    about = {"disk": args.disk, "stored_bytes": args.mib * MIB, "pool_bytes": args.mib * MIB // 4}
    show(args.json, about | {"load_average": os.getloadavg()[0]} | figures)


if __name__ == "__main__":
    main()
