"""The pool takes memory ahead of its use, in steps, and copes where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio

from stormd.errors import LaneUnavailable
from stormd.memory import growth
from stormd.memory.arena import GRANULE, Space
from stormd.memory.growth import FIRST_BYTES, MAX_A_STEP, PoolGrowth, left_to_others, next_step
from stormd.memory.host_pool import HostPool
from stormd.memory.shared_rows import PoolBudget

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
    """A pool of twice the first step, which others may want, and whose steps a test looks at."""

    def __init__(self) -> None:
        self.extended: list[tuple[int, int]] = []
        self.retracted: list[tuple[int, int]] = []
        self.refused = False
        self.steps = 0
        self.surplus = 0  # what others want back
        self.claimed, self.room = 0, GIB
        self._ended = asyncio.Event()
        self.pool = HostPool(2 * FIRST_BYTES, first=FIRST_BYTES)
        self.space = Space(2 * FIRST_BYTES, committed=FIRST_BYTES)
        loop: Any = asyncio.get_running_loop()
        spaces, lanes, budget = [self.space], [self], cast("PoolBudget", self)
        self.growth = PoolGrowth(self.pool, spaces, lanes, loop, self._stepped, budget=budget)

    def extend(self, offset: int, nbytes: int) -> None:
        if self.refused:
            raise LaneUnavailable("the driver does not take it")
        self.extended.append((offset, nbytes))

    def retract(self, offset: int, nbytes: int) -> None:
        self.retracted.append((offset, nbytes))

    def claim(self, nbytes: int) -> int:
        granted = min(nbytes, self.room)
        self.room -= granted
        self.claimed += granted
        return granted

    def give_back(self, nbytes: int) -> None:
        self.claimed -= nbytes

    async def step(self) -> None:
        """Begin a step if one is due, and wait until the next has ended."""
        self.growth.grow_if_due()
        async with asyncio.timeout(SECONDS):
            await self._ended.wait()
        self._ended.clear()

    def _stepped(self) -> None:
        self.steps += 1
        self._ended.set()


@pytest_asyncio.fixture
async def made() -> AsyncIterator[Growing]:
    growing = Growing()
    yield growing
    growing.growth.close()
    growing.pool.close()


async def test_a_step_that_fails_leaves_the_pool_as_it_is_and_is_tried_again(
    made: Growing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(growth, "RETRY_SECONDS", 0.02)
    made.refused = True
    assert made.space.promise(FIRST_BYTES)
    made.space.request_growth(GRANULE)
    await made.step()
    assert (made.space.is_growing, made.space.wanted, made.claimed) == (False, 0, 0)
    assert made.pool.ranges == ((0, FIRST_BYTES),)
    async with asyncio.timeout(SECONDS):
        while made.steps < 3:  # as often as there is time for it, told of once
            made.growth.grow_if_due()
            await asyncio.sleep(0.005)
        assert caplog.text.count("the pool stays at 64.0 MiB") == 1
        made.refused = False
        while made.space.committed == FIRST_BYTES:
            made.growth.grow_if_due()
            await asyncio.sleep(0.005)
    assert made.space.promise(FIRST_BYTES)


async def test_where_others_have_the_rest_nobody_waits_and_it_is_asked_for_again(
    made: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "RETRY_CLAIM_SECONDS", 0.0)
    made.room = 0
    made.space.request_growth(2 * FIRST_BYTES)
    await made.step()  # in vain
    assert (made.space.is_growing, made.space.wanted) == (False, 0)
    made.room = GIB
    made.growth.grow_if_due()
    made.space.request_growth(2 * FIRST_BYTES)
    await made.step()
    assert made.space.committed == 2 * FIRST_BYTES


async def test_an_end_waits_for_the_step_under_way_and_takes_nothing_in(made: Growing) -> None:
    assert made.space.promise(FIRST_BYTES)
    made.growth.grow_if_due()
    made.growth.close()
    assert made.extended == [(FIRST_BYTES, FIRST_BYTES)]
    await asyncio.sleep(0.05)
    made.growth.grow_if_due()
    assert (made.steps, made.space.committed) == (0, FIRST_BYTES)


async def test_what_others_want_goes_back_once_it_is_free(made: Growing) -> None:
    assert made.space.promise(FIRST_BYTES)
    await made.step()
    assert made.space.promise(GRANULE)
    made.surplus = FIRST_BYTES
    made.growth.grow_if_due()
    assert made.growth._step is None, "it is promised"
    made.space.withdraw(FIRST_BYTES)
    await made.step()
    assert made.retracted == made.extended == [(FIRST_BYTES, FIRST_BYTES)]
    assert (made.claimed, made.space.committed) == (0, FIRST_BYTES)
    assert made.pool.ranges == ((0, FIRST_BYTES),)
    made.growth.grow_if_due()
    assert made.growth._step is None, "the first range stays"
    made.surplus = 0
    made.space.request_growth(FIRST_BYTES)
    await made.step()
    assert made.space.committed == 2 * FIRST_BYTES
