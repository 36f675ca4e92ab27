"""Checksums of what lies on a fake device, made in as few launches as may be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from storm_kernels.ancf.checksum import checksum
from storm_kernels.errors import CudaDriverError, KernelsError
from support import fake_cuda
from support.cuda_bench import MIB, Bench, fill, held
from support.waiting import wait_until


@pytest.fixture
def checks(bench: Bench) -> Any:
    """Those of a session that is mapped, its memory filled; this thread stands for its own."""
    bench.map()
    fill(bench)
    fake_cuda.enter(0)
    yield bench.lane._sessions[bench.session]._client.opened.checks
    fake_cuda.enter(None)


@pytest.fixture
def counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each launch was for."""
    codec, found = next(iter(bench.lane._devices.values())).codec, list[int]()
    real = codec.check

    def check(spans: int, count: int, sums: int, *, stream: int) -> None:
        found.append(count)
        real(spans, count, sums, stream=stream)

    monkeypatch.setattr(codec, "check", check)
    return found


def known(checks: Any, *some: Any) -> Callable[[], bool]:
    def look() -> bool:
        checks.refresh()
        return all(check.is_known for check in some)

    return look


def test_each_is_the_checksum_of_its_bytes(bench: Bench, checks: Any) -> None:
    spans = [(0, MIB), (3, 70_001), (MIB - 1, 1), (0, 2048)]
    some = [checks.add(bench.area.address + offset, nbytes) for offset, nbytes in spans]
    wait_until(known(checks, *some))
    for (offset, nbytes), check in zip(spans, some, strict=True):
        assert check.value == checksum(bench.memory[offset : offset + nbytes])


def test_what_has_come_meanwhile_is_launched_together(
    bench: Bench, checks: Any, counts: list[int]
) -> None:
    most = sys.modules["stormd.lanes.cuda.checks"].MAX_TOGETHER
    with held(checks.stream):
        some = [checks.add(bench.area.address, n) for n in range(1, most + 4)]
        checks.refresh()
        assert not any(check.is_known for check in some)
    wait_until(known(checks, *some))
    assert counts == [1, most, 2]
    assert [check.value for check in some] == [
        checksum(bench.memory[:n]) for n in range(1, most + 4)
    ]


def test_what_is_forgotten_is_not_read(bench: Bench, checks: Any, counts: list[int]) -> None:
    with held(checks.stream):
        first, second, third = (checks.add(bench.area.address, n) for n in (1, 2, 3))
        checks.forget(first)  # it is in flight: too late
        checks.forget(second)
    wait_until(known(checks, first, third))
    assert counts == [1, 1]
    assert not second.is_known
    assert third.value == checksum(bench.memory[:3])


def test_a_launch_that_fails_fails_its_own(bench: Bench, checks: Any, counts: list[int]) -> None:
    with held(checks.stream):
        first = checks.add(bench.area.address, 1)
        fake_cuda.CudaCodec.broken = 0
        lost = [checks.add(bench.area.address, n) for n in (2, 3)]
    wait_until(known(checks, first, *lost))
    last = checks.add(bench.area.address, 4)
    wait_until(known(checks, last))
    assert counts == [1, 2, 1]
    for check in lost:
        with pytest.raises(KernelsError, match="does not start"):
            check.value  # noqa: B018 - it raises
    for check in (first, last):
        assert check.value == checksum(bench.memory[: check.nbytes])


def test_a_broken_device_is_told(bench: Bench, checks: Any) -> None:
    with held(checks.stream):
        checks.add(bench.area.address, 1)
        fake_cuda.fault(0, "an illegal address")
        with pytest.raises(CudaDriverError, match="illegal address"):
            checks.refresh()
        fake_cuda.repair()
