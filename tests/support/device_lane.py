"""A daemon's cpu lane that does what it is asked for in the order of a device, and late.

What stays true: nothing is read or written before the session's `published` counter allows it. A
destination holds garbage until its decoder has ended; then its status is in the page, then its
counter, and later the client is answered. `stored` is raised by the code of the cuda lane, and
whatever a kill leaves undone stays so. How long each step takes is chance.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from storm_kernels.errors import CorruptBlob

from stormd.lanes import Attachment
from stormd.lanes.cpu import CpuLane
from stormd.lanes.cuda.reusable_through import ReusableThrough
from stormd.lanes.host_codec import HostCodec
from stormd.ledger.events import RestoreDone, RestoreJob, Result, StoreDone, StoreJob
from stormd.memory.host_pool import HostPool
from stormd.protocol import Hello
from stormd.protocol.timeline import PUBLISHED, STORED, restored_slot, status_slot

LAG_SECONDS = 0.002
ANSWER_SECONDS = 0.01
"""Until a restore is answered that is done: what a kill in between leaves has to be seen often."""
LOOK_SECONDS = 0.0002
UNWRITTEN = (1 << 64) - 1
GARBAGE = 0xA5
DAMAGED = 3
DONE_TWICE = 128
"""Byte offset in the page: the last restore that was asked for again though it was done."""

_chance = random.Random(os.getpid())


def lag(seconds: float = LAG_SECONDS) -> None:
    time.sleep(_chance.random() * seconds)


class DeviceLane(CpuLane):
    """Each session has a thread for each direction, whose jobs are done in their order."""

    def __init__(self, *, pool: HostPool, chunk_bytes: int, **options: Any) -> None:
        super().__init__(pool=pool, chunk_bytes=chunk_bytes, **options)
        self._made = pool, chunk_bytes
        self._devices: dict[int, _Device] = {}

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:
        attachment = super().attach(session, hello, descriptors)
        self._devices[session] = _Device(self, session)
        return attachment

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> tuple[()]:
        for job in jobs:
            self._devices[session].put(job)
        return ()

    def skip_sequence(self, session: int, sequence: int) -> None:
        self._devices[session].turns.expect(sequence)
        self.recorded(session, [sequence])

    def recorded(self, session: int, sequences: Sequence[int]) -> None:
        through = self._devices[session].turns.done(sequences)
        self._memories[session].timelines.store(STORED, through)

    def detach(self, session: int) -> None:
        device = self._devices.pop(session)

        def end() -> None:
            device.end()
            super(DeviceLane, self).detach(session)

        threading.Thread(target=end).start()

    def close(self, seconds: float) -> bool:
        for device in self._devices.values():
            device.end()
        return super().close(seconds)

    # --- run by a session's threads ---------------------------------------------------------

    def codec(self) -> HostCodec:
        return HostCodec(*self._made)

    def published(self, session: int) -> int:
        return self._memories[session].timelines.read(PUBLISHED)

    def done(self, codec: HostCodec, job: StoreJob | RestoreJob) -> Result:
        lag()
        result = self._perform(codec, job)
        if isinstance(job, StoreJob):
            return replace(result, sequence=job.sequence)  # type: ignore[arg-type,return-value]
        lag(ANSWER_SECONDS)
        return result

    def post(self, result: Result) -> None:
        self._post(result)

    def _store(self, codec: HostCodec, job: StoreJob) -> StoreDone:
        done = super()._store(codec, job)
        lag()  # the blob is in the pool, which nobody knows yet
        return done  # type: ignore[return-value]

    def _restore(self, codec: HostCodec, job: RestoreJob) -> RestoreDone:
        timelines = self._memories[job.session].timelines
        address, status = self._address(job), status_slot(job.ticket)
        if timelines.read(restored_slot(job.ticket)) == job.ticket:
            timelines.put(DONE_TWICE, job.ticket)
        timelines.put(status, UNWRITTEN)
        ctypes.memset(address, GARBAGE, job.nbytes)
        lag()
        try:
            codec.restore(job.block, address, job.nbytes)
            timelines.put(status, 0)
        except CorruptBlob:
            timelines.put(status, DAMAGED)
            raise
        finally:
            lag()
            timelines.store(restored_slot(job.ticket), job.ticket)
        return RestoreDone(session=job.session, ticket=job.ticket, seconds=0.0)


class _Device:
    """The two threads of a session, and whose turn it is."""

    def __init__(self, lane: DeviceLane, session: int) -> None:
        self.turns = ReusableThrough()
        self._lane, self._session = lane, session
        self._is_over = threading.Event()
        self._lines: dict[type, SimpleQueue[StoreJob | RestoreJob | None]] = {
            kind: SimpleQueue() for kind in (StoreJob, RestoreJob)
        }
        self._threads = [
            threading.Thread(target=self._run, args=(line,), daemon=True)
            for line in self._lines.values()
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: StoreJob | RestoreJob) -> None:
        if isinstance(job, StoreJob):
            self.turns.expect(job.sequence)
        self._lines[type(job)].put(job)

    def end(self) -> None:
        """Answer what waits without a look at its turn, as the client is gone, and end."""
        self._is_over.set()
        for line in self._lines.values():
            line.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, line: SimpleQueue[StoreJob | RestoreJob | None]) -> None:
        codec = self._lane.codec()
        while (job := line.get()) is not None:
            while not self._is_due(job) and not self._is_over.is_set():
                time.sleep(LOOK_SECONDS)
            self._lane.post(self._lane.done(codec, job))
        codec.close()

    def _is_due(self, job: StoreJob | RestoreJob) -> bool:
        return self._lane.published(self._session) >= job.sequence
