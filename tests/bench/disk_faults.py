"""Disks that fail under a ledger and the tier's threads: right bytes or ActivationLost, each time.

    PYTHONPATH=tests python -m bench.disk_faults --json tests/bench/results/disk_faults.json

A round is a session that stores twice what the pool holds and restores all of it, over a file that
fails at random: with an error, silently, or for good. The ledger and the tier are the daemon's own;
a lane of this program fills blocks and compares what comes back.
"""

from __future__ import annotations

import ctypes
import queue
import time
from collections import Counter
from random import Random
from typing import Any

from bench.recording import parser_of, show
from support.failing_file import FAULTS, FailingFile
from support.spilling import ENCRYPT, put_bytes, read_bytes

from stormd.ledger.chunks import blob_bound
from stormd.ledger.events import (
    Instruction,
    Jobs,
    Reply,
    RestoreDone,
    RestoreJob,
    Result,
    SpillDone,
    SpillFailed,
    StoreDone,
    StoreJob,
    Wait,
)
from stormd.ledger.ledger import Ledger
from stormd.ledger.on_disk import Disk
from stormd.ledger.sessions import Limits, SessionInfo
from stormd.memory.arena import Space, slack_of
from stormd.memory.extents import PAGE
from stormd.monitoring.counters import Counters
from stormd.protocol import Failed, Message, Rejected, Release, Restore, Restored, Store
from stormd.spill.sealing import Checksums, Encryption
from stormd.spill.tier import SpillTier

KIB = 1 << 10
SESSION = 1
POOL_BYTES = 1024 * KIB
PART_BYTES = 64 * KIB
FILE_BYTES = 4096 * KIB
ENTRIES = 44
AT_ONCE = 6
"""Restores that are asked for together, the newest first."""

DEADLINE = 60.0
LIMITS = Limits(max_sessions=1, max_entries=1000, quota_bytes=0, lease_seconds=5.0)


class Round:
    """One session over one tier. `outcome` counts what became of its entries."""

    def __init__(self, seed: int, chance: float) -> None:
        self._random = Random(seed)
        self._texts: dict[int, bytes] = {}
        self._blobs: dict[int, int] = {}
        self._pool = ctypes.create_string_buffer(POOL_BYTES + slack_of(POOL_BYTES))
        self._address = ctypes.addressof(self._pool)
        self._results: queue.Queue[SpillDone | SpillFailed] = queue.Queue()
        self.file = FailingFile(FILE_BYTES, self._random, chance)
        self._tier = SpillTier(
            file=self.file,
            sealer=Encryption() if seed % 2 and ENCRYPT == "on" else Checksums(),
            pool_address=self._address,
            post=self._post,
            threads=2,
        )
        self._ledger = Ledger(
            Space(POOL_BYTES, slack=slack_of(POOL_BYTES)),
            LIMITS,
            Counters(),
            disk=Disk(Space(FILE_BYTES, granule=PAGE), 2 * blob_bound(PART_BYTES)),
        )
        self.outcome: Counter[str] = Counter()
        self._open()

    def run(self) -> None:
        """Store, restore and release; assert that nothing is wrong and nothing is left."""
        stored = [number for number in range(1, ENTRIES + 1) if self._store(number)]
        self._ledger.assert_invariants()
        for begin in range(0, len(stored), AT_ONCE):
            self._restore(stored[::-1][begin : begin + AT_ONCE])
        self._ledger.assert_invariants()
        self._settle()
        assert self._ledger.holdings.entries == 0
        assert self._tier.close(DEADLINE)
        assert self.file.closed

    # --- the session ------------------------------------------------------------------------

    def _open(self) -> None:
        info = SessionInfo(session=SESSION, device="cpu", uid=0, pid=1, name="faults")
        self._ledger.leases.open(info, chunk_bytes=PART_BYTES, staging_bytes=PART_BYTES, now=0.0)
        self._record = self._ledger.sessions[SESSION]
        self._ledger.leases.attach(self._record, 0.0)

    def _store(self, number: int) -> bool:
        nbytes = self._random.randint(30 * KIB, PART_BYTES)
        message = Store(
            entry=number,
            segment=0,
            offset=0,
            nbytes=nbytes,
            dtype="uint8",
            codec="raw",
            sequence=0,
        )
        self._texts[number] = self._random.randbytes(nbytes // 2)
        answers = self._ask(message)
        while isinstance(answers[0], Wait):
            self._move()
            self._take(self._results.get(timeout=DEADLINE))
            answers = self._ask(message)
        self._perform(answers)
        self._move()
        is_kept = any(isinstance(one, Reply) and type(one.message) is Rejected for one in answers)
        self.outcome["kept"] += is_kept
        return not is_kept

    def _restore(self, numbers: list[int]) -> None:
        entries = self._record.entries
        for number in numbers:
            restore = Restore(
                ticket=number,
                entry=number,
                segment=0,
                offset=0,
                nbytes=entries[number].raw_bytes,
                sequence=0,
            )
            self._perform(self._ask(restore))
        self._move()
        while self._record.tickets:
            self._take(self._results.get(timeout=DEADLINE))
            self._move()
        self._perform(self._ask(Release(numbers)))

    def _settle(self) -> None:
        while self._ledger.holdings.entries:
            self._take(self._results.get(timeout=DEADLINE))

    # --- ledger and tier --------------------------------------------------------------------

    def _ask(self, message: Message) -> list[Instruction]:
        return self._ledger.on_request[type(message)](self._record, 1, message, time.monotonic())

    def _move(self) -> None:
        jobs = self._ledger.spills.moves(time.monotonic())
        if jobs:
            self._tier.begin(jobs)

    def _post(self, *answers: SpillDone | SpillFailed) -> None:
        for answer in answers:
            self._results.put(answer)

    def _take(self, result: Result) -> None:
        now = time.monotonic()
        self._perform(self._ledger.on_results[type(result)](self._record, [result], now))

    # --- the lane and the client ------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Jobs):
                for job in instruction.jobs:
                    self._do(job)
            elif isinstance(instruction, Reply):
                self._hear(instruction.message)

    def _do(self, job: StoreJob | RestoreJob) -> None:
        if isinstance(job, StoreJob):
            text = self._texts[job.entry]
            block = job.place(len(text))
            put_bytes(self._address, block, text)
            done: Result = StoreDone(
                session=SESSION, entry=job.entry, block=block, mode="raw", seconds=0.0
            )
        else:
            found = read_bytes(self._address, job.block)
            assert found == self._texts[job.entry], "wrong bytes were restored"
            done = RestoreDone(session=SESSION, ticket=job.ticket, seconds=0.0)
        self._take(done)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Failed):
            assert message.kind == "ActivationLost", message
            assert "the tier there has ended" in message.detail, message
            self.outcome["lost"] += 1
        elif isinstance(message, Restored):
            self.outcome["restored"] += 1


def run(faults: int, chance: float = 0.02, seed: int = 0) -> dict[str, Any]:
    """Go on until there were so many faults; return what came of them."""
    began, total, rounds, ended = time.monotonic(), 0, 0, 0
    outcome: Counter[str] = Counter()
    while total < faults:
        one = Round(seed + rounds, chance)
        one.run()
        rounds += 1
        total += one.file.faults
        ended += one.outcome["lost"] > 0
        outcome += one.outcome
    return {
        "faults": total,
        "kinds": list(FAULTS),
        "rounds": rounds,
        "rounds_that_lost_something": ended,
        **{f"entries_{name}": outcome[name] for name in ("restored", "lost", "kept")},
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    args = parser.parse_args()
    show(args.json, run(args.faults))


if __name__ == "__main__":
    main()
