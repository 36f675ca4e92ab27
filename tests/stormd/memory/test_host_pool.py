"""The pool's memory: resident when it is said to be, shown while it is made, given back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from stormd.errors import PoolUnavailable, StartStopped
from stormd.memory import host_pool
from stormd.memory.host_pool import CHUNK_BYTES, MAX_TOUCHERS, HostPool
from stormd.memory.shared_memory import sealed_memory

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_pool_is_resident_zeroed_and_given_back() -> None:
    before = resident_bytes()
    pool = HostPool(96 * MIB)
    assert resident_bytes() - before > 90 * MIB
    assert ctypes.string_at(pool.address + 50 * MIB, 64) == bytes(64)
    ctypes.memset(pool.address, 7, 96 * MIB)
    pool.close()
    pool.close()
    assert resident_bytes() - before < 20 * MIB


def test_a_start_that_is_given_up_leaves_the_rest_untouched() -> None:
    before, seen = resident_bytes(), list[int]()
    with pytest.raises(StartStopped, match="told to end"):
        HostPool(
            64 * CHUNK_BYTES,
            on_progress=lambda done, _: seen.append(done),
            is_stopped=lambda: bool(seen),
        )
    assert len(seen) <= MAX_TOUCHERS
    assert resident_bytes() - before < 20 * MIB


def test_a_pool_that_leaves_no_room_beside_it_is_refused_and_grows_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = HostPool(64 * MIB, first=MIB)
    monkeypatch.setattr(host_pool, "memory_available", lambda: 24 * MIB)
    HostPool(16 * MIB, beside=7 * MIB).close()
    with pytest.raises(
        PoolUnavailable, match=r"16\.0 MiB together.* 8\.0 MiB beside.*24\.0 MiB of"
    ):
        HostPool(16 * MIB, beside=8 * MIB)
    with pytest.raises(PoolUnavailable, match=r"grow by 8\.0 MiB.*24\.0 MiB.*16\.0 MiB are left"):
        pool.commit(MIB, 8 * MIB, beside=16 * MIB)
    pool.commit(MIB, 7 * MIB, beside=16 * MIB)
    pool.close()


def test_a_pool_may_begin_with_a_part_of_its_memory_and_take_more() -> None:
    before = resident_bytes()
    pool = HostPool(1 << 40, first=64 * MIB)
    assert pool.ranges == ((0, 64 * MIB),)
    assert 60 * MIB < resident_bytes() - before < 80 * MIB
    pool.commit(128 * MIB, 96 * MIB, beside=0)
    assert pool.ranges == ((0, 64 * MIB), (128 * MIB, 96 * MIB))
    assert resident_bytes() - before > 150 * MIB
    ctypes.memset(pool.address + 128 * MIB, 7, 96 * MIB)
    pool.give_back(128 * MIB, 96 * MIB)
    assert resident_bytes() - before < 80 * MIB
    pool.close()


@pytest.mark.parametrize("failure", ["madvise", "stopped"])
def test_what_could_not_be_taken_is_given_back(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    stopped: list[bool] = []
    pool = HostPool(1 << 30, first=MIB, is_stopped=lambda: bool(stopped))
    before = resident_bytes()
    touch, touched = host_pool._populate, []

    def populate(address: int, nbytes: int) -> None:
        touch(address, nbytes)
        touched.append(address)
        if failure == "stopped":
            stopped.append(True)
        else:
            raise PoolUnavailable("Cannot allocate memory")

    monkeypatch.setattr(host_pool, "_populate", populate)
    with pytest.raises((PoolUnavailable, StartStopped)):
        pool.commit(MIB, 512 * MIB, beside=0)
    assert touched
    assert resident_bytes() - before < 20 * MIB
    assert pool.ranges == ((0, MIB),)
    pool.close()


def test_what_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolUnavailable, match=r"pool_bytes.*1024.0 TiB.*--pool-bytes"):
        HostPool(1 << 50)

    def no_memory(*_: object) -> int:
        ctypes.set_errno(12)
        return -1

    monkeypatch.setattr(host_pool._libc, "madvise", no_memory)
    with pytest.raises(PoolUnavailable, match="Cannot allocate memory"):
        HostPool(4 * MIB)


def test_an_unlocked_pool_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_pool._libc, "mlock", lambda *_: -1)
    pool = HostPool(4 * MIB)
    assert not pool.locked
    assert "LimitMEMLOCK" in caplog.text
    pool.close()


def test_a_pool_that_may_be_in_use_stays_mapped() -> None:
    pool = HostPool(4 * MIB)
    pool.keep_mapped()
    pool.close()
    ctypes.memset(pool.address, 1, 4 * MIB)
    pool._mapping.close()


def test_a_pool_of_a_memory_file_outlives_its_mapping_and_gives_single_ranges_back() -> None:
    descriptor = sealed_memory("test", 4 * MIB)
    first = HostPool(4 * MIB, first=MIB, descriptor=descriptor)
    first.commit(2 * MIB, MIB, beside=0)
    ctypes.memset(first.address, 7, MIB)
    ctypes.memset(first.address + 2 * MIB, 8, MIB)
    ranges = first.ranges
    first.close()
    again = HostPool(4 * MIB, first=MIB, descriptor=descriptor, kept=ranges)
    assert again.ranges == ranges == ((0, MIB), (2 * MIB, MIB))
    assert ctypes.string_at(again.address + MIB - 1, 1) == b"\7"
    assert ctypes.string_at(again.address + 3 * MIB - 1, 1) == b"\10"
    again.give_back(2 * MIB, MIB)
    assert os.fstat(descriptor).st_blocks * 512 == MIB
    again.close()
    os.close(descriptor)


def test_pages_are_touched_as_they_are_where_the_kernel_has_no_call_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor = sealed_memory("test", MIB)
    os.pwrite(descriptor, b"here", 4096)
    monkeypatch.setattr(host_pool, "MADV_POPULATE_WRITE", 99)  # EINVAL, as of an old kernel
    pool = HostPool(MIB, descriptor=descriptor, kept=[(0, MIB)])
    assert os.fstat(descriptor).st_blocks * 512 == MIB
    assert ctypes.string_at(pool.address + 4096, 4) == b"here"
    pool.close()
    os.close(descriptor)
