"""The cpu lane by itself: real threads and memory, a list in the place of the daemon."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterator

import pytest

from stormd.errors import LaneUnavailable
from stormd.lanes import Attachment, cpu
from stormd.lanes.cpu import AT_ONCE_BYTES, CpuLane
from stormd.lanes.host_codec import HostCodec
from stormd.ledger.chunks import Chunk
from stormd.ledger.events import (
    Detached,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    StoreDone,
    StoreFailed,
    StoreJob,
)
from stormd.memory.arena import Block, Space
from stormd.memory.host_pool import HostPool
from stormd.protocol import PROTOCOL_VERSION, Hello
from stormd.protocol.timeline import POISON, STORED

MIB = 1 << 20
POOL = 8 * MIB


def hello_of(name: str, staging: int = 0) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        features=[],
        pid=1,
        uid=0,
        device="cpu",
        device_uuid="",
        staging_bytes=staging,
        name=name,
    )


class Bench:
    """A lane, what it posted, and the client's side of its sessions."""

    def __init__(
        self, threads: int = 2, all_staging: int = 64 * MIB, at_once_bytes: int = 0
    ) -> None:
        self.pool = HostPool(POOL)
        self.space = Space(POOL)
        self.results: queue.Queue[Result] = queue.Queue()
        self.lane = CpuLane(
            pool=self.pool,
            post=self.post,
            staging_bytes=2 * MIB,
            all_staging_bytes=all_staging,
            chunk_bytes=MIB,
            threads=threads,
            at_once_bytes=at_once_bytes,
        )
        self.memories: dict[int, mmap.mmap] = {}

    def post(self, *results: Result) -> None:
        for result in results:
            self.results.put(result)

    def attach(self, session: int, staging: int = 0) -> Attachment:
        hello = hello_of("test", staging)
        attachment = self.lane.attach(session, hello)
        self.memories[session] = mmap.mmap(attachment.descriptors[1], attachment.staging_bytes)
        for descriptor in attachment.descriptors:
            os.close(descriptor)
        return attachment

    def store(self, session: int, entry: int, data: bytes, codec: str = "raw") -> None:
        self.memories[session][: len(data)] = data
        part = Chunk.of(len(data), "uint8", codec)
        assert self.space.promise(part.bound)
        self.begin(session, self.a_store(session, entry, part))

    def a_store(self, session: int, entry: int, part: Chunk, offset: int = 0) -> StoreJob:
        return StoreJob(
            session=session, entry=entry, chunk=part, segment=0, offset=offset, sequence=0,
            space=self.space,
        )  # fmt: skip

    def begin(self, session: int, *jobs: StoreJob | RestoreJob) -> None:
        self.post(*self.lane.begin(session, jobs))

    def next(self) -> Result:
        return self.results.get(timeout=60)

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
        assert self.lane.close(10)
        self.pool.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def end(bench: Bench, *sessions: int) -> None:
    for session in sessions:
        bench.lane.detach(session)
    for _ in sessions:
        assert isinstance(bench.next(), Detached)


def stored(bench: Bench, session: int, data: bytes, codec: str) -> Block:
    bench.store(session, 1, data, codec)
    result = bench.next()
    assert isinstance(result, StoreDone)
    assert (result.session, result.entry) == (session, 1)
    assert result.seconds > 0
    return result.block


def a_restore(ticket: int, block: Block, nbytes: int) -> RestoreJob:
    return RestoreJob(
        session=1, ticket=ticket, entry=1, block=block, segment=0, offset=MIB, nbytes=nbytes,
        sequence=0,
    )  # fmt: skip


@pytest.mark.parametrize("codec", ["raw", "ancf"])
def test_a_few_bytes_are_stored_and_restored_at_once(codec: str) -> None:
    bench = Bench(at_once_bytes=AT_ONCE_BYTES)
    bench.attach(1)
    data = os.urandom(AT_ONCE_BYTES)
    bench.store(1, 1, data, codec)
    done = bench.results.get_nowait()
    assert isinstance(done, StoreDone)
    bench.begin(1, a_restore(9, done.block, len(data)))
    assert isinstance(bench.results.get_nowait(), RestoreDone)
    assert bench.memories[1][MIB : MIB + len(data)] == data
    bench.begin(1, a_restore(10, done.block, len(data) - 1))
    failed = bench.results.get_nowait()
    assert isinstance(failed, RestoreFailed)
    assert failed.kind == "CorruptBlob"
    end(bench, 1)
    bench.close()


def test_what_is_small_waits_its_turn_behind_what_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop does neither a part above the limit nor one of a session with work under way."""
    bench = Bench(at_once_bytes=AT_ONCE_BYTES)
    bench.attach(1)
    block = stored(bench, 1, os.urandom(AT_ONCE_BYTES + 1), "raw")
    held = threading.Event()
    perform = bench.lane._perform

    def slow(codec: HostCodec, job: StoreJob | RestoreJob) -> Result:
        assert held.wait(60)
        return perform(codec, job)

    monkeypatch.setattr(bench.lane, "_perform", slow)
    bench.begin(1, a_restore(2, block, AT_ONCE_BYTES + 1))
    bench.store(1, 2, b"small")
    assert bench.results.empty()
    held.set()
    assert {type(bench.next()) for _ in range(2)} == {RestoreDone, StoreDone}
    end(bench, 1)
    bench.close()


def test_pages_go_back_with_the_session_though_the_client_keeps_them(bench: Bench) -> None:
    hello = hello_of("test")
    attachment = bench.lane.attach(1, hello)
    page, staging = attachment.descriptors
    with mmap.mmap(staging, attachment.staging_bytes) as kept, mmap.mmap(page, 4096) as counters:
        kept[:] = b"x" * len(kept)
        assert os.fstat(staging).st_blocks * 512 == len(kept)
        assert int.from_bytes(counters[STORED : STORED + 8], "little") == 0
        end(bench, 1)
        assert os.fstat(staging).st_blocks == 0
        # Whoever copies out of it is told, by what is written before they go.
        assert int.from_bytes(counters[STORED : STORED + 8], "little") >= POISON
        assert kept[:1] == b"\0"
    for descriptor in attachment.descriptors:
        os.close(descriptor)


def test_what_sessions_share_is_limited_until_it_is_given_back() -> None:
    bench = Bench(all_staging=5 * MIB)
    bench.attach(1)
    bench.attach(2)
    with pytest.raises(
        LaneUnavailable, match=r"2 sessions share 4\.0 MiB.*2\.0 MiB more.*5\.0 MiB"
    ):
        bench.attach(3)
    bench.attach(4, staging=MIB)
    end(bench, 2)
    bench.attach(3)
    end(bench, 1, 3, 4)
    bench.close()


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_without_memory_for_every_workers_scratch_it_does_not_open(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    left = [None, None]

    def made(pool: HostPool, part_bytes: int) -> HostCodec:
        if not left:
            raise error
        left.pop()
        return HostCodec(pool, part_bytes)

    monkeypatch.setattr(cpu, "HostCodec", made)
    with pytest.raises(LaneUnavailable, match=r"scratch of 3 workers.*1\.0 MiB each.*ulimit -v"):
        Bench(threads=3)


def test_without_threads_for_all_workers_it_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    class Scarce(threading.Thread):
        def start(self) -> None:
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            if self.name.startswith("stormd-cpu"):
                started.append(self)
            super().start()

    monkeypatch.setattr(cpu.threading, "Thread", Scarce)
    with pytest.raises(LaneUnavailable, match="only 2 of 3 threads"):
        Bench(threads=3)
    assert not any(thread.is_alive() for thread in started)


def test_whatever_goes_wrong_in_a_job_is_answered(bench: Bench) -> None:
    bench.attach(1)
    bench.begin(1, bench.a_store(1, 4, Chunk.of(10, "uint8", "raw"), offset=2 * MIB))
    failed = bench.next()
    assert isinstance(failed, StoreFailed)
    assert failed.entry == 4
    stored(bench, 1, b"the worker goes on", "raw")
    end(bench, 1)


def test_detaching_answers_every_job_once_and_then_says_so(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2)
    for entry in range(1, 7):
        bench.store(1, entry, bytes(MIB), "ancf")
    bench.lane.detach(1)
    answered = []
    while not isinstance(result := bench.next(), Detached):
        assert isinstance(result, StoreDone | StoreFailed)
        answered.append(result.entry)
    assert sorted(answered) == list(range(1, 7))
    stored(bench, 2, b"the neighbour is served", "raw")
    end(bench, 2)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "Too many open files: raise the limit of open files"),
        (errno.ENOMEM, "Cannot allocate memory: free memory, or raise"),
        (errno.EPERM, "Operation not permitted: see the daemon's log"),
    ],
)
def test_a_session_without_memory_is_refused_with_what_is_short(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def no_memory(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", no_memory)
    hello = hello_of("test")
    with pytest.raises(LaneUnavailable, match=told):
        bench.lane.attach(1, hello)
