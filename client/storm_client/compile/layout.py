"""Where in one memory each buffer lies, from when it is used: offsets for known lifetimes.

Buffers whose lifetimes overlap may not overlap in memory, and the memory is to be small: dynamic
storage allocation, which is NP-hard. The most bytes that live at any moment are a lower bound. A
start is found by placing buffers one after the other in several orders, and improved by searching
for orders; where that has not reached the bound, OR-tools' CP-SAT is asked if it is installed (the
extra `layout`), for as long as is allowed.

Everything here is pure but for the clock that ends the search.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from storm_client.errors import UsageError

__all__ = ["Buffer", "Layout", "lay_out", "lower_bound"]

SEARCH_SHARE = 0.2
"""Of the time allowed that is spent on searching for orders where CP-SAT can be asked besides."""

MOST_TRIES = 20_000
"""Orders that are tried; by then a search has ended to find better ones."""

RESTART_TRIES = 500
"""After so many tries without success the search goes on from the best order."""

WORSE_CHANCE = 0.02
"""How often a worse order is gone on from."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """So many bytes, needed from time `first` on and no more at time `end`."""

    first: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where buffers lie."""

    offsets: tuple[int, ...]
    """In bytes, one a buffer."""
    nbytes: int
    """The size of the memory that holds all of them."""
    lower_bound: int
    """The most bytes that live at once; no layout takes less."""

    @property
    def is_optimal(self) -> bool:
        """Whether it is known that no layout takes less."""
        return self.nbytes == self.lower_bound

    def assert_invariants(self, buffers: Sequence[Buffer]) -> None:
        """Check that no two buffers that live at once overlap, and that all lie inside."""
        assert len(buffers) == len(self.offsets)
        placed = sorted(zip(self.offsets, buffers, strict=True), key=lambda one: one[0])
        for index, (offset, buffer) in enumerate(placed):
            assert offset >= 0
            assert offset + buffer.nbytes <= self.nbytes
            for other_offset, other in placed[index + 1 :]:
                if other_offset >= offset + buffer.nbytes:
                    break
                assert not _meet(buffer, other), (offset, buffer, other_offset, other)


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """Return the most bytes that live at any one time."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.nbytes
        changes[buffer.end] = changes.get(buffer.end, 0) - buffer.nbytes
    live = most = 0
    for moment in sorted(changes):
        live += changes[moment]
        most = max(most, live)
    return most


def lay_out(
    buffers: Sequence[Buffer], *, seconds: float = 10.0, alignment: int = 1, seed: int = 0
) -> Layout:
    """Return offsets, multiples of `alignment`, for buffers of any lifetimes.

    Ends as soon as the lower bound is reached, and after about `seconds` at the latest. The same
    arguments give the same layout where the search ends by itself.

    Raises:
        UsageError: a buffer ends before it begins or has a negative size, or `alignment` is not
            positive.
    """
    _check(buffers, alignment)
    end = time.monotonic() + seconds
    sized = [
        Buffer(one.first, one.end, -(-one.nbytes // alignment)) for one in buffers
    ]  # in units of the alignment
    bound = lower_bound(sized)
    problem = _Problem(sized)
    best = min((problem.place(order) for order in problem.orders()), key=_Placed.rank)
    can_ask = find_spec("ortools") is not None
    share = SEARCH_SHARE if can_ask else 1.0
    best = _search(problem, best, bound, time.monotonic() + seconds * share, seed)
    if can_ask and best.top > bound:
        best = _exact(problem, best, bound, end - time.monotonic())
    return Layout(
        tuple(offset * alignment for offset in best.offsets),
        best.top * alignment,
        bound * alignment,
    )


def _check(buffers: Sequence[Buffer], alignment: int) -> None:
    if alignment < 1:
        raise UsageError(f"alignment is {alignment}; it must be a number of bytes, at least 1")
    for number, buffer in enumerate(buffers):
        if buffer.end < buffer.first or buffer.nbytes < 0:
            raise UsageError(
                f"buffer {number} is {buffer}: it ends before it begins, or is negative"
            )


def _meet(one: Buffer, other: Buffer) -> bool:
    """Tell whether two buffers need memory at the same time: one without bytes or life does not."""
    return (
        max(one.first, other.first) < min(one.end, other.end)
        and one.nbytes > 0
        and other.nbytes > 0
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """Offsets of all buffers, and the order in which they were placed."""

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    top: int
    high: int
    """How many buffers end at the top: of two layouts the one with fewer is nearer to less."""

    def rank(self) -> tuple[int, int]:
        return self.top, self.high


class _Problem:
    """Buffers, and which of them live at once."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.meeting: list[list[int]] = [[] for _ in buffers]
        by_first = sorted(range(len(buffers)), key=lambda n: buffers[n].first)
        alive: list[int] = []
        for number in by_first:
            alive = [n for n in alive if buffers[n].end > buffers[number].first]
            for other in alive:
                if _meet(buffers[other], buffers[number]):
                    self.meeting[number].append(other)
                    self.meeting[other].append(number)
            alive.append(number)

    def orders(self) -> Iterable[tuple[int, ...]]:
        """Return orders that are known to do well."""
        buffers = self.buffers
        keys: tuple[Callable[[Buffer], float], ...] = (
            lambda one: one.nbytes,
            lambda one: one.nbytes * (one.end - one.first),
            lambda one: one.end - one.first,
            lambda one: -one.first,
            lambda one: one.end,
        )
        for key in keys:
            ranked = sorted(
                range(len(buffers)),
                key=lambda n: (key(buffers[n]), buffers[n].nbytes),
                reverse=True,
            )
            yield tuple(ranked)

    def place(self, order: Sequence[int]) -> _Placed:
        """Give each buffer, in this order, the lowest offset that is free for its whole life."""
        buffers = self.buffers
        offsets = [-1] * len(buffers)
        for number in order:
            taken = sorted(
                (offsets[n], offsets[n] + buffers[n].nbytes)
                for n in self.meeting[number]
                if offsets[n] >= 0
            )
            at, nbytes = 0, buffers[number].nbytes
            for begin, end in taken:
                if begin - at >= nbytes:
                    break
                at = max(at, end)
            offsets[number] = at
        tops = [offset + one.nbytes for offset, one in zip(offsets, buffers, strict=True)]
        top = max(tops, default=0)
        return _Placed(tuple(order), tuple(offsets), top, tops.count(top))


def _search(problem: _Problem, best: _Placed, bound: int, end: float, seed: int) -> _Placed:
    """Return the best of many orders near the best one: what lies highest is placed earlier."""
    chance = random.Random(seed)  # noqa: S311 - a search, not a secret
    count = len(problem.buffers)
    current = best
    tries = 0
    while best.top > bound and time.monotonic() < end and tries < MOST_TRIES:
        tries += 1
        order = list(current.order)
        tops = [current.offsets[n] + problem.buffers[n].nbytes for n in range(count)]
        highest = [n for n in range(count) if tops[n] == current.top]
        number = chance.choice(highest)
        around = [number, *problem.meeting[number]]
        for moved in {number, chance.choice(around)}:
            place = order.index(moved)
            order.insert(chance.randint(0, place), order.pop(place))
        found = problem.place(order)
        if found.rank() <= current.rank() or chance.random() < WORSE_CHANCE:
            current = found
        if found.rank() < best.rank():
            best = current = found
        elif tries % RESTART_TRIES == 0:
            current = best
    return best


def _exact(problem: _Problem, start: _Placed, bound: int, seconds: float) -> _Placed:
    """Return what CP-SAT finds in so many seconds, or the start."""
    if seconds <= 0:
        return start
    from ortools.sat.python import cp_model

    unit = math.gcd(*(one.nbytes for one in problem.buffers))
    model = cp_model.CpModel()
    most = start.top // unit
    top = model.new_int_var(bound // unit, most, "top")
    offsets, rows, columns, sizes = [], [], [], []
    for number, buffer in enumerate(problem.buffers):
        size = buffer.nbytes // unit
        offset = model.new_int_var(0, most - size, f"offset{number}")
        model.add(offset + size <= top)
        model.add_hint(offset, start.offsets[number] // unit)
        offsets.append(offset)
        if size and buffer.end > buffer.first:
            life = buffer.end - buffer.first
            rows.append(model.new_fixed_size_interval_var(buffer.first, life, f"life{number}"))
            columns.append(model.new_fixed_size_interval_var(offset, size, f"place{number}"))
            sizes.append(size)
    model.add_no_overlap_2d(rows, columns)
    model.add_cumulative(rows, sizes, top)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = len(os.sched_getaffinity(0))
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    found = tuple(solver.value(offset) * unit for offset in offsets)
    size = max((at + one.nbytes for at, one in zip(found, problem.buffers, strict=True)), default=0)
    return _Placed(start.order, found, size, 0) if size < start.top else start
