"""The pool takes memory ahead of its use, in steps, and copes where there is none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stormd.errors import LaneUnavailable
from stormd.memory import growth, host_pool
from stormd.memory.arena import GRANULE, Space
from stormd.memory.growth import FIRST_BYTES, MAX_A_STEP, PoolGrowth, left_to_others, next_step
from stormd.memory.host_pool import HostPool

MIB = 1 << 20
GIB = 1 << 30
SECONDS = 60.0


def space_of(capacity: int, committed: int, used: int = 0) -> Space:
    space = Space(capacity, committed=committed)
    if used:
        assert space.promise(used)
    return space


@pytest.mark.parametrize(
    ("committed", "used", "step"),
    [
        (FIRST_BYTES, 0, 0),  # nobody uses it
        (FIRST_BYTES, 32 * MIB, 0),  # enough is free
        (FIRST_BYTES, 60 * MIB, FIRST_BYTES),
        (256 * MIB, 250 * MIB, 128 * MIB),  # larger with the space
        (GIB, GIB, MAX_A_STEP),
        (2 * GIB - 8 * MIB, 2 * GIB - 8 * MIB, 8 * MIB),  # to the end, and no further
        (2 * GIB, 2 * GIB, 0),
    ],
)
def test_the_next_step(committed: int, used: int, step: int) -> None:
    assert next_step(space_of(2 * GIB, committed, used)) == step


def test_who_waits_gets_a_step_for_it_also_in_an_empty_space() -> None:
    space = space_of(2 * GIB, 0)
    space.request_growth(100 * MIB + 1)
    assert next_step(space) == 100 * MIB + 4096


@pytest.mark.parametrize(
    ("limit", "left"), [(512 * MIB, 64 * MIB), (16 * GIB, GIB), (2048 * GIB, 2 * GIB)]
)
def test_others_are_left_some_memory(
    monkeypatch: pytest.MonkeyPatch, limit: int, left: int
) -> None:
    monkeypatch.setattr(growth, "memory_limit", lambda: limit)
    assert left_to_others() == left


class Growing:
    """A pool of three times the first step whose steps a test looks at."""

    def __init__(self) -> None:
        self.extended: list[tuple[int, int]] = []
        self.refused = False
        self.steps = 0
        self._ended = asyncio.Event()
        self.threads: set[int] = set()
        self.pool = HostPool(3 * FIRST_BYTES, first=FIRST_BYTES)
        self.space = Space(2 * FIRST_BYTES, committed=FIRST_BYTES)
        self.other = Space(FIRST_BYTES, base=2 * FIRST_BYTES, committed=0)
        loop: Any = asyncio.get_running_loop()
        spaces, lanes = [self.space, self.other], [self]
        self.growth = PoolGrowth(self.pool, spaces, lanes, loop, self._stepped)  # type: ignore[list-item]

    def extend(self, offset: int, nbytes: int) -> None:
        self.threads.add(threading.get_ident())
        if self.refused:
            raise LaneUnavailable("the driver does not take it")
        self.extended.append((offset, nbytes))

    async def step(self) -> None:
        """Wait until the next step has ended."""
        async with asyncio.timeout(SECONDS):
            await self._ended.wait()
        self._ended.clear()

    def _stepped(self) -> None:
        self.steps += 1
        self._ended.set()


@contextmanager
def growing() -> Iterator[Growing]:
    made = Growing()
    yield made
    made.growth.close()
    made.pool.close()


@pytest.mark.parametrize("cause", ["memory", "lane"])
def test_a_step_that_fails_leaves_the_pool_as_it_is_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    async def scenario() -> None:
        with growing() as made:
            if cause == "memory":
                monkeypatch.setattr(host_pool, "memory_available", lambda: 0)
            made.refused = cause == "lane"
            monkeypatch.setattr(growth, "RETRY_SECONDS", 0.02)
            assert made.space.promise(FIRST_BYTES)
            made.space.request_growth(GRANULE)
            made.growth.grow_if_due()
            await made.step()
            assert not made.space.is_growing
            assert made.space.wanted == 0
            assert made.pool.ranges == ((0, FIRST_BYTES),)
            for step in range(2, 4):  # as often as there is time for it, told of once
                while made.steps < step:
                    made.growth.grow_if_due()
                    await asyncio.sleep(0.005)
            assert caplog.text.count("the pool stays at 64.0 MiB") == 1
            monkeypatch.undo()
            made.refused = False
            while made.space.committed == FIRST_BYTES:
                made.growth.grow_if_due()
                await asyncio.sleep(0.005)
            assert made.space.promise(FIRST_BYTES)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_an_end_waits_for_the_step_under_way_and_takes_nothing_in() -> None:
    async def scenario() -> None:
        with growing() as made:
            assert made.space.promise(FIRST_BYTES)
            made.growth.grow_if_due()
            made.growth.close()
            assert made.extended == [(FIRST_BYTES, FIRST_BYTES)]
            await asyncio.sleep(0.05)
            made.growth.grow_if_due()
            assert (made.steps, made.space.committed) == (0, FIRST_BYTES)

    asyncio.run(scenario())


class Budget:
    """Grants what it is told, and wants back what it is told."""

    def __init__(self) -> None:
        self.room = GIB
        self.surplus = 0
        self.given_back = 0

    def claim(self, nbytes: int) -> int:
        granted = min(nbytes, self.room)
        self.room -= granted
        return granted

    def give_back(self, nbytes: int) -> None:
        self.room += nbytes
        self.given_back += nbytes


class Lending(Growing):
    """One space whose memory others may want."""

    def __init__(self) -> None:
        super().__init__()
        self.growth.close()
        self.budget = Budget()
        self.retracted: list[tuple[int, int]] = []
        loop: Any = asyncio.get_running_loop()
        spaces, lanes, budget = [self.space], [self], self.budget
        self.growth = PoolGrowth(self.pool, spaces, lanes, loop, self._stepped, budget=budget)

    def retract(self, offset: int, nbytes: int) -> None:
        self.retracted.append((offset, nbytes))


def test_what_others_want_goes_back_once_it_is_free() -> None:
    async def scenario() -> None:
        made = Lending()
        assert made.space.promise(FIRST_BYTES)
        made.growth.grow_if_due()
        await made.step()
        assert made.space.committed == 2 * FIRST_BYTES
        assert made.space.promise(GRANULE)
        made.budget.surplus = FIRST_BYTES
        made.growth.grow_if_due()
        assert made.growth._step is None, "it is promised"
        made.space.withdraw(FIRST_BYTES)
        made.growth.grow_if_due()
        await made.step()
        assert made.retracted == made.extended == [(FIRST_BYTES, FIRST_BYTES)]
        assert (made.budget.given_back, made.space.committed) == (FIRST_BYTES, FIRST_BYTES)
        assert made.pool.ranges == ((0, FIRST_BYTES),)
        made.growth.grow_if_due()
        assert made.growth._step is None, "the first range stays"
        made.budget.surplus = 0
        made.space.request_growth(FIRST_BYTES)
        made.growth.grow_if_due()
        await made.step()
        assert made.space.committed == 2 * FIRST_BYTES
        made.growth.close()
        made.pool.close()

    asyncio.run(scenario())
