"""Chooses where in one buffer each value lies, from when it is needed: offsets ahead of time.

Two values that are needed at the same time must not overlap; all others may. The least size that
any layout can have is the most bytes needed at one time. The greedy start places values one after
the other at the lowest offset that is free, in many orders, and keeps the best; where that is
above the bound, `layout_search` looks for one that fits in less, and then OR-tools' CP-SAT, if it
is installed.

Everything here is pure: numbers in, numbers out, the clock aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from storm_client.compile.layout_search import Block, packed
from storm_client.errors import UsageError

__all__ = ["Block", "Layout", "bound", "greedy", "improved", "laid_out", "tightened"]

ROUNDS = 24
"""How often an order is tried with another block first."""
CLOSE = 1000
"""What part of the bound a search goes on for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each block lies."""

    offsets: tuple[int, ...]
    """In the order of the blocks."""
    nbytes: int
    """What the buffer needs."""
    bound: int
    """What no layout can be below."""

    @property
    def is_best(self) -> bool:
        """Whether no layout needs less."""
        return self.nbytes == self.bound

    def assert_invariants(self, blocks: Sequence[Block]) -> None:
        """Check that no two blocks share a byte at any time."""
        assert len(blocks) == len(self.offsets)
        for block, offset in zip(blocks, self.offsets, strict=True):
            assert offset >= 0
            assert offset % block.alignment == 0
            assert offset + block.nbytes <= self.nbytes
        order = sorted(range(len(blocks)), key=lambda n: blocks[n].begin)
        active: list[int] = []
        for number in order:
            block, offset = blocks[number], self.offsets[number]
            active = [one for one in active if blocks[one].end > block.begin]
            for one in active:
                begin, end = self.offsets[one], self.offsets[one] + blocks[one].nbytes
                apart = end <= offset or offset + block.nbytes <= begin
                assert apart or not block.nbytes or begin == end, (one, number)
            active.append(number)


def bound(blocks: Iterable[Block]) -> int:
    """Return the most bytes that are needed at one time."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.begin] = changes.get(block.begin, 0) + block.nbytes
        changes[block.end] = changes.get(block.end, 0) - block.nbytes
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)


def laid_out(blocks: Sequence[Block], seconds: float = 0.0) -> Layout:
    """Return the best layout that greedy orders find, searched on for so many seconds.

    The last third of them is CP-SAT's where OR-tools is installed.
    """
    found = greedy(blocks)
    if not seconds or found.is_best:
        return found
    deadline = time.monotonic() + seconds
    found = tightened(blocks, found, seconds * 2 / 3 if _has_solver() else seconds)
    left = deadline - time.monotonic()
    if not found.is_best and left > 0 and _has_solver():
        return improved(blocks, found, left)
    return found


def tightened(blocks: Sequence[Block], start: Layout, seconds: float, *, seed: int = 0) -> Layout:
    """Return the least layout that the search finds in so many seconds, `start` if none is less.

    The bound is tried first, for half of the time, as it is often reached; then what is halfway
    between the last size that was not and the best that was, for a third of what is left of it.
    """
    deadline = time.monotonic() + seconds
    best, missed, limit, share = start, start.bound - 1, start.bound, 1 / 2
    while best.nbytes - missed > 1 + start.bound // CLOSE and time.monotonic() < deadline:
        offsets = packed(blocks, limit, share * (deadline - time.monotonic()), seed=seed)
        if offsets is None:
            missed = limit
        else:
            best = _layout(blocks, offsets, start.bound)
        limit, share = (missed + best.nbytes) // 2, 1 / 3
    return best


def _layout(blocks: Sequence[Block], offsets: Sequence[int], least: int) -> Layout:
    tops = (offset + block.nbytes for offset, block in zip(offsets, blocks, strict=True))
    return Layout(tuple(offsets), max(tops, default=0), least)


# --- greedy -------------------------------------------------------------------------------------


def greedy(blocks: Sequence[Block]) -> Layout:
    """Return the best of the layouts that place one block after the other, as low as it fits.

    Several orders are tried, and each again and again with the block that lies highest put first.
    """
    least = bound(blocks)
    area = [block.nbytes * (block.end - block.begin) for block in blocks]
    pressure = _pressures(blocks)
    keys: list[Callable[[int], Any]] = [
        lambda n: (-blocks[n].nbytes, blocks[n].begin),
        lambda n: (-area[n], blocks[n].begin),
        lambda n: (-(blocks[n].end - blocks[n].begin), -blocks[n].nbytes),
        lambda n: (blocks[n].begin, -blocks[n].nbytes),
        lambda n: (-blocks[n].end, -blocks[n].nbytes),
        lambda n: (-pressure[n], -blocks[n].nbytes, blocks[n].begin),
        lambda n: (-pressure[n], -area[n]),
    ]
    conflicts = _conflicts(blocks)
    best: Layout | None = None
    for key in keys:
        order = sorted(range(len(blocks)), key=key)
        for _ in range(ROUNDS):
            offsets = _placed(blocks, order, conflicts)
            tops = [o + b.nbytes for o, b in zip(offsets, blocks, strict=True)]
            top = max(tops, default=0)
            if best is None or top < best.nbytes:
                best = Layout(tuple(offsets), top, least)
            if best.is_best:
                return best
            highest = tops.index(top)
            order.remove(highest)
            order.insert(0, highest)
    assert best is not None
    return best


def _pressures(blocks: Sequence[Block]) -> list[int]:
    """Return for each block the most bytes that are needed while it is."""
    places = _ranks(blocks)
    changes = np.zeros(len(places) + 1, dtype=np.int64)
    for block in blocks:
        changes[places[block.begin]] += block.nbytes
        changes[places[block.end]] -= block.nbytes
    live = np.cumsum(changes)
    return [int(live[places[b.begin] : places[b.end]].max(initial=0)) for b in blocks]


def _conflicts(blocks: Sequence[Block]) -> list[list[int]]:
    """Return for each block those that are needed at some time when it is."""
    found: list[list[int]] = [[] for _ in blocks]
    active: list[int] = []
    for number in sorted(range(len(blocks)), key=lambda n: blocks[n].begin):
        active = [one for one in active if blocks[one].end > blocks[number].begin]
        for one in active:
            found[one].append(number)
            found[number].append(one)
        active.append(number)
    return found


def _placed(
    blocks: Sequence[Block], order: Iterable[int], conflicts: Sequence[Sequence[int]]
) -> list[int]:
    offsets = [-1] * len(blocks)
    for number in order:
        taken = sorted(
            (offsets[one], offsets[one] + blocks[one].nbytes)
            for one in conflicts[number]
            if offsets[one] >= 0
        )
        block, at = blocks[number], 0
        for begin, end in taken:
            if begin >= at + block.nbytes:
                break
            if end > at:
                at = -(-end // block.alignment) * block.alignment
        offsets[number] = at
    return offsets


# --- exact --------------------------------------------------------------------------------------


def _has_solver() -> bool:
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def improved(
    blocks: Sequence[Block],
    start: Layout,
    seconds: float,
    *,
    capacity: int | None = None,
    workers: int = 0,
    seed: int = 0,
) -> Layout:
    """Return the best layout that CP-SAT finds in so many seconds, `start` if none is better.

    With a `capacity` the first that fits in is taken. `workers` are threads, by default as many as
    there are processors.

    Raises:
        UsageError: OR-tools is missing.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UsageError(
            "to search for a better layout needs OR-tools: pip install 'stormd[solver]', or take "
            "the greedy one"
        ) from error
    limit = start.nbytes - 1 if capacity is None else capacity
    if start.nbytes <= (capacity or 0) or limit < start.bound:
        return start
    unit = _unit(blocks)
    model = cp_model.CpModel()
    offsets = _placed_by(model, blocks, unit, limit // unit)
    if capacity is None:
        used = model.new_int_var(_units(start.bound, unit), limit // unit, "")
        for block, offset in zip(blocks, offsets, strict=True):
            model.add(offset + _units(block.nbytes, unit) <= used)
        model.minimize(used)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    if workers:
        solver.parameters.num_workers = workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    return _layout(blocks, [unit * int(solver.value(one)) for one in offsets], start.bound)


def _placed_by(model: Any, blocks: Sequence[Block], unit: int, top: int) -> list[Any]:
    """Return the offsets that a model of CP-SAT is to choose below `top`, in so many bytes each.

    Blocks are rectangles, of a time and of a range of bytes, and no two overlap.
    """
    ranks = _ranks(blocks)
    offsets, times, ranges = [], [], []
    for block in blocks:
        size = _units(block.nbytes, unit)
        offset = model.new_int_var(0, max(0, top - size), "")
        offsets.append(offset)
        if not block.nbytes:
            continue
        begin, end = ranks[block.begin], ranks[block.end]
        times.append(model.new_fixed_size_interval_var(begin, end - begin, ""))
        ranges.append(model.new_fixed_size_interval_var(offset, size, ""))
        step = block.alignment // unit
        if step > 1:
            model.add(offset == step * model.new_int_var(0, top // step, ""))
    model.add_no_overlap_2d(times, ranges)
    return offsets


def _ranks(blocks: Sequence[Block]) -> dict[int, int]:
    """Return for each time its place among those at which anything begins or ends."""
    times = sorted({time for block in blocks for time in (block.begin, block.end)})
    return {time: rank for rank, time in enumerate(times)}


def _unit(blocks: Sequence[Block]) -> int:
    """Return what offsets may be multiples of with nothing lost."""
    numbers = [
        n for b in blocks if b.nbytes for n in ((b.alignment,) if b.alignment > 1 else (b.nbytes,))
    ]
    return int(np.gcd.reduce(numbers or [1]))


def _units(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit)
