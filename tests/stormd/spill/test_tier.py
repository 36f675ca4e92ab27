"""The tier's threads: every job answered once, reads first, and nothing more after a fault."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest
from support.failing_file import FAULTS, FailingFile, MemoryFile
from support.spilling import ENCRYPT
from support.waiting import wait_until

from stormd.errors import SpillUnavailable
from stormd.ledger.events import SpillDone, SpillFailed, SpillJob
from stormd.memory.arena import Block, Extent
from stormd.memory.extents import PAGE
from stormd.spill import tier as module
from stormd.spill.file import SpillFile
from stormd.spill.records import BlobMover
from stormd.spill.sealing import Checksums, Encryption, Sealer
from stormd.spill.tier import SpillTier

BLOB = 3 * PAGE
POOL_BLOBS = 64
DEADLINE = 60.0

Answer = SpillDone | SpillFailed


class _Bench:
    """A tier over a pool, whose answers are kept; blob n lies at place n of pool and file."""

    def __init__(self, file: SpillFile, threads: int = 1, sealer: Sealer | None = None) -> None:
        self.pool = ctypes.create_string_buffer(POOL_BLOBS * BLOB)
        self.answers: queue.Queue[Answer] = queue.Queue()
        self.tier = SpillTier(
            file=file,
            sealer=sealer or Checksums(),
            pool_address=ctypes.addressof(self.pool),
            post=lambda *answers: [self.answers.put(one) for one in answers] and None,
            threads=threads,
        )

    def put(self, number: int, text: bytes) -> None:
        ctypes.memmove(ctypes.addressof(self.pool) + number * BLOB, text, len(text))

    def get(self, number: int) -> bytes:
        return ctypes.string_at(ctypes.addressof(self.pool) + number * BLOB, BLOB)

    def answer(self) -> Answer:
        return self.answers.get(timeout=DEADLINE)


def _write(number: int, generation: int = 1) -> SpillJob:
    return SpillJob(
        is_read=False,
        session=1,
        entry=number,
        generation=generation,
        block=_block(number),
        extent=_extent(number),
    )


def _read(number: int, generation: int = 1, into: int | None = None) -> SpillJob:
    return SpillJob(
        is_read=True,
        session=1,
        entry=number,
        generation=generation,
        block=_block(number if into is None else into),
        extent=_extent(number),
    )


def _block(number: int) -> Block:
    return Block((Extent(number * BLOB, BLOB),), BLOB)


def _extent(number: int) -> Block:
    return Block((Extent(number * 4 * PAGE, 4 * PAGE),), 4 * PAGE)


@pytest.fixture
def made() -> Iterator[Callable[..., _Bench]]:
    benches: list[_Bench] = []

    def make(file: SpillFile, threads: int = 1, sealer: Sealer | None = None) -> _Bench:
        benches.append(_Bench(file, threads, sealer))
        return benches[-1]

    yield make
    for bench in benches:
        assert bench.tier.close(DEADLINE)


def _sealer(encrypts: bool) -> Sealer:
    return Encryption() if encrypts else Checksums()


def _file() -> MemoryFile:
    return MemoryFile(POOL_BLOBS * 4 * PAGE)


class _Gate(MemoryFile):
    """Holds the first call up until it is opened, and notes what is done then."""

    def __init__(self) -> None:
        super().__init__(POOL_BLOBS * 4 * PAGE)
        self.opened = threading.Event()
        self.calls: list[str] = []

    def write(self, offset: int, data: memoryview) -> None:
        self.calls.append("write")
        assert self.opened.wait(DEADLINE)
        super().write(offset, data)

    def read(self, offset: int, into: memoryview) -> None:
        self.calls.append("read")
        super().read(offset, into)


def test_reads_come_before_writes(made: Callable[..., _Bench]) -> None:
    gate = _Gate()
    bench = made(gate)
    bench.tier.begin([_write(1), _write(2), _write(3)])
    wait_until(lambda: gate.calls == ["write"])
    bench.tier.begin([_read(1)])
    gate.opened.set()
    assert all(isinstance(bench.answer(), SpillDone) for _ in range(4))
    assert gate.calls == ["write", "read", "write", "write"]


def test_after_a_fault_nothing_is_read_or_written_any_more(made: Callable[..., _Bench]) -> None:
    file = FailingFile(POOL_BLOBS * 4 * PAGE, Random(1), 1.0, ("eio",))
    bench = made(file)
    bench.tier.begin([_write(1), _write(2), _read(3)])
    answers = [bench.answer() for _ in range(3)]
    assert all(isinstance(one, SpillFailed) for one in answers)
    assert file.faults == 1
    assert "Input/output error" in bench.tier.fault()
    bench.tier.begin([_write(4)])
    assert isinstance(bench.answer(), SpillFailed)


@pytest.mark.parametrize("kind", list(FAULTS))
def test_no_fault_gives_wrong_bytes(made: Callable[..., _Bench], kind: str) -> None:
    for seed in range(10):
        file = FailingFile(POOL_BLOBS * 4 * PAGE, Random(seed), 0.1, (kind,))
        bench = made(file, sealer=_sealer(seed % 2 == 0 and ENCRYPT == "on"))
        texts = {number: os.urandom(BLOB) for number in range(10)}
        for number, text in texts.items():
            bench.put(number, text)
        bench.tier.begin([_write(number) for number in texts])
        whole = {one.entry for one in (bench.answer() for _ in texts) if isinstance(one, SpillDone)}
        bench.tier.begin([_read(number, into=20 + number) for number in whole])
        for _ in whole:
            answer = bench.answer()
            if isinstance(answer, SpillDone):
                assert bench.get(20 + answer.entry) == texts[answer.entry]
            else:
                assert bench.tier.fault()


def test_a_disk_that_stands_still_is_noticed_and_waited_for_by_nobody(
    made: Callable[..., _Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.05)
    gate = _Gate()
    bench = made(gate, threads=2)
    bench.tier.begin([_write(1)])
    wait_until(lambda: bool(bench.tier.fault()))
    assert "has been at one job for" in bench.tier.fault()
    bench.tier.begin([_write(2)])  # another thread answers
    answer = bench.answer()
    assert isinstance(answer, SpillFailed)
    assert answer.entry == 2
    assert not bench.tier.close(0.01)
    assert not gate.closed
    gate.opened.set()
    assert isinstance(bench.answer(), SpillDone)  # what was under way came to its end
    assert bench.tier.close(DEADLINE)
    assert gate.closed


def test_want_of_memory_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    before = set(threading.enumerate())

    def short(*arguments: object) -> BlobMover:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(12, "Cannot allocate memory")
        return BlobMover(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "BlobMover", short)
    file = _file()
    with pytest.raises(SpillUnavailable, match=r"only 2 of 4 threads.*lower spill_threads"):
        SpillTier(file=file, sealer=Checksums(), pool_address=0, post=lambda *_: None, threads=4)
    assert file.closed
    assert set(threading.enumerate()) == before


def test_a_bug_answers_its_job_and_ends_the_tier(made: Callable[..., _Bench]) -> None:
    class Broken(MemoryFile):
        def write(self, offset: int, data: memoryview) -> None:
            raise ZeroDivisionError

    bench = made(Broken(PAGE))
    bench.tier.begin([_write(1)])
    answer = bench.answer()
    assert isinstance(answer, SpillFailed)
    assert "ZeroDivisionError" in answer.detail
