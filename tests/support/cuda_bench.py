"""The bench on which the cuda lane is tested, with what its tests share: a fake device, a pool."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.waiting import wait_until

from stormd.ledger.chunks import Chunk
from stormd.ledger.events import (
    Detached,
    RestoreJob,
    Result,
    SegmentMapped,
    StoreDone,
    StoreFailed,
    StoreJob,
)
from stormd.memory.arena import Space
from stormd.memory.host_pool import HostPool
from stormd.protocol import Hello, MapSegment
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, Timelines

KIB = 1 << 10
MIB = 1 << 20
PART = 64 * KIB
CUDA_FILES = (
    "checks",
    "lane",
    "client",
    "device",
    "restores",
    "scratch",
    "session",
    "stores",
)
LANE_MODULES = (
    "storm_kernels.ancf.prepared",
    *(f"stormd.lanes.cuda.{name}" for name in CUDA_FILES),
)
SESSION = 0x1234
LAG_SECONDS = 0.002
"""Longer than a pipeline of the lane waits before it looks again."""

prompt_and_late = pytest.mark.parametrize(
    "lanes", [0.0, LAG_SECONDS], ids=["prompt", "late"], indirect=True
)
HELD_SECONDS = 60.0
"""After which a test that has failed lets its streams go."""


class Results(list[Result]):
    """What a lane has posted; and what stores were promised, by session and entry."""

    def __init__(self) -> None:
        super().__init__()
        self.promised: dict[tuple[int, int], int] = {}

    def give_back(self, space: Space) -> None:
        """Give back all that has been stored, and the promises of what has failed."""
        for one in self:
            if isinstance(one, StoreDone):
                space.release(one.block)
            elif isinstance(one, StoreFailed):
                space.withdraw(self.promised[one.session, one.entry])
        assert (space.use().used, space.use().promised) == (0, 0)


class Bench:
    """A lane on a fake device with one session, driven as the ledger and a client would."""

    def __init__(
        self,
        lane: Any,
        pool: HostPool,
        space: Space,
        results: Results,
        session: int = SESSION,
        ordinal: int = 0,
    ) -> None:
        self.lane, self.pool, self.space, self.results = lane, pool, space, results
        self.session, self._ordinal = session, ordinal
        attachment = lane.attach(session, hello(fake_cuda.UUIDS[ordinal]))
        (self._descriptor,) = attachment.descriptors
        self.part_bytes = attachment.chunk_bytes
        self._page = mmap.mmap(self._descriptor, PAGE_BYTES)
        self.counters = Timelines(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))
        with fake_cuda.entered(ordinal):  # in the client; here, as on the loop, no call succeeds
            self.area = fake_cuda.DeviceBuffer(attachment.staging_bytes)
        self.memory = np.frombuffer(self.area._bytes, np.uint8)

    def resume(self, lane: Any) -> None:
        """Go on with another lane, as a client does whose daemon has ended."""
        self.lane = lane
        lane.attach(self.session, hello(fake_cuda.UUIDS[self._ordinal]), [os.dup(self._descriptor)])
        self.results.clear()
        self.map()

    def map(self) -> None:
        self.lane.map_segment(self.session, offer(self.area))
        self.expect(SegmentMapped)

    def expect(self, kind: type[Result], number: int = 1) -> Any:
        """Wait for the `number`-th result of a kind and return it."""
        found = lambda: [result for result in self.results if isinstance(result, kind)]  # noqa: E731
        wait_until(lambda: len(found()) >= number, found=lambda: self.results)
        return found()[number - 1]

    def store(
        self,
        entry: int,
        offset: int,
        nbytes: int,
        codec: str = "ancf",
        *,
        segment: int = 0,
    ) -> None:
        """Hand over the range as a store whose sequence number is its entry."""
        part = Chunk.of(nbytes, "bfloat16", codec)
        assert self.space.promise(part.bound)
        self.results.promised[self.session, entry] = part.bound
        job = StoreJob(
            session=self.session,
            entry=entry,
            chunk=part,
            segment=segment,
            offset=offset,
            sequence=entry,
            space=self.space,
        )
        self.lane.begin(self.session, [job])

    def restore(
        self,
        ticket: int,
        block: Any,
        offset: int,
        nbytes: int,
        *,
        segment: int = 0,
        sequence: int | None = None,
    ) -> None:
        job = RestoreJob(
            session=self.session,
            ticket=ticket,
            entry=1,
            block=block,
            segment=segment,
            offset=offset,
            nbytes=nbytes,
            sequence=ticket if sequence is None else sequence,
        )
        self.lane.begin(self.session, [job])

    def publish(self, value: int) -> None:
        self.counters.store(PUBLISHED, value)

    def end(self) -> None:
        self.lane.detach(self.session)
        wait_until(lambda: Detached(self.session) in self.results, found=lambda: self.results)
        self.end_client()

    def end_client(self) -> None:
        self.memory = None
        with fake_cuda.entered(self._ordinal):
            self.area.close()
        self._page.close()
        os.close(self._descriptor)


def lanes_on_fake_devices(
    first: int = 4 * MIB, *, is_resumable: bool = False
) -> Iterator[Callable[[list[int]], Bench]]:
    """Yield what makes a bench on devices of these ordinals, over a pool that begins with `first`
    of its 4 MiB. With another, a bench goes on with the lane that is made. In the end all that was
    stored is given back, but for what tests with `is_resumable` have to give back themselves.
    """
    from stormd.lanes.cuda.lane import CudaLane

    pool = HostPool(4 * MIB, first=first)
    space, results = Space(pool.nbytes, committed=first), Results()
    benches: list[Bench] = []

    def lane_on(ordinals: list[int], resumed: Bench | None = None) -> Bench:
        lane = CudaLane(
            ordinals,
            pool=pool,
            post=lambda *found: results.extend(found),
            staging_bytes=MIB,
            chunk_bytes=PART,
            direct_bytes=PART // 2,
            is_resumable=is_resumable,
        )
        if resumed is not None:
            resumed.resume(lane)
            return resumed
        benches.append(Bench(lane, pool, space, results, ordinal=ordinals[0]))
        wait_until(lambda: is_prepared(lane))
        return benches[-1]

    yield lane_on
    for bench in benches:
        if Detached(SESSION) not in results:
            bench.end()
        assert bench.lane.close(10.0)
    if not is_resumable:
        results.give_back(space)
    space.assert_invariants()
    pool.close()


def is_prepared(lane: Any) -> bool:
    """Tell whether the lane encodes all types by now; until then their bytes are stored raw."""
    codecs = [device.codec for device in lane._devices.values()]
    return not any(codec._preparing.is_alive() for codec in codecs)


def hello(uuid: str = fake_cuda.UUID) -> Hello:
    return Hello(
        protocol=1,
        features=[],
        pid=os.getpid(),
        uid=os.getuid(),
        device="cuda",
        device_uuid=uuid,
        staging_bytes=0,
        name="test",
    )


def offer(area: fake_cuda.DeviceBuffer, nbytes: int | None = None) -> MapSegment:
    return MapSegment(
        segment=0, handle=area.ipc_handle(), nbytes=area.nbytes if nbytes is None else nbytes
    )


def fill(bench: Bench, seed: int = 0) -> np.ndarray:
    """Fill the staging area with bfloat16 N(0,1) and return a copy."""
    values = np.random.default_rng(seed).standard_normal(MIB // 2).astype(np.float32)
    bench.memory[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return bench.memory.copy()


@contextmanager
def held(*streams: fake_cuda.Stream) -> Iterator[threading.Event]:
    """Have what is put on streams from now on wait, to the end or the event that is yielded."""
    gate = threading.Event()
    for stream in streams:
        stream.put(lambda: gate.wait(HELD_SECONDS) and None)
    try:
        yield gate
    finally:
        gate.set()


def held_back(bench: Bench) -> AbstractContextManager[threading.Event]:
    """Have the session's encoders wait as behind a kernel that leaves the device no room."""
    opened = bench.lane._sessions[bench.session]._client.opened
    return held(opened.store_stream, opened.checks.stream)
