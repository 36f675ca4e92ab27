"""Searches for a layout that fits in a given size, where greedy orders find none.

Blocks are rectangles whose place in time is given; their offsets are searched for. A *section* is a
time at which as many blocks as possible are needed: between two sections nothing more has to be
looked at. A block's *low* is the lowest offset that is left to it, and a section's *floor* the
lowest one of the blocks that are yet to be placed in it.

A node of the search takes one section and asks what lies on its floor: each block that can is a
choice, and that nothing does is the last. Like this the section with the fewest answers can come
first, wherever it lies, whereas a search that only places block after block has many answers at
each node. What is cut off:

- where, in some section, the blocks whose low is at least so much would, stacked from there, not
  fit (the bound for one machine with release dates);
- what was searched before: the blocks left and their lows tell all about what can still come;
- where nothing lies on the floor, the next block above the gap rests on one beside it: how far down
  that can be is how far the floor rises at least. With nothing to rest on there need be no gap;
- of blocks with the same life and size, only one order is tried;
- parts of time that no block left spans are searched one by one, and where one has no answer,
  others are not tried in new ways first.

Searches by depth are lucky or not, so each of a few strategies has a limited number of nodes, in
turn, with what is placed first drawn a little differently each time (Luby's sequence of limits).

That offsets are taken from the bottom up, that blocks left raise floors and that time falls apart
are ideas of M. Moffitt's MiniMalloc (ASPLOS 2023).

Everything here is pure: numbers in, numbers out, the clock aside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import cycle, pairwise
from typing import Any, TypeAlias

import numpy as np

from storm_client.errors import UsageError

__all__ = ["Block", "packed"]

Array: TypeAlias = np.ndarray[Any, Any]
Span: TypeAlias = tuple[int, int]
"""Sections, from the first up to, not including, the last."""

PLACED = 1 << 60
"""The low of a block that is placed: above any offset."""
GAP = -1
"""The choice that no block lies on the floor."""
NODES = 500
"""What the shortest run of a strategy may look at."""
NOISE = 0.5
"""By what share priorities are drawn apart."""
MOST_KNOWN = 1 << 20
"""How many dead ends are remembered, each in some 100 bytes."""
MOST_BLOCKS = 4096
"""How many are searched: tables hold up to their square, and a node looks at all that is left."""


@dataclass(frozen=True, slots=True)
class Block:
    """A value's memory: needed at the times from `begin` up to, not including, `end`."""

    begin: int
    end: int
    nbytes: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.begin >= self.end or self.nbytes < 0 or self.alignment < 1:
            raise UsageError(f"{self} is no block: it is needed at no time, or has no size")


class _End(Enum):
    FOUND = auto()
    NONE = auto()
    STOPPED = auto()


def packed(
    blocks: Sequence[Block], capacity: int, seconds: float, *, seed: int = 0
) -> tuple[int, ...] | None:
    """Return offsets at which all blocks lie below `capacity` bytes, in the order of the blocks.

    None if there are none, if none was found in so many seconds, or if MOST_BLOCKS are exceeded.
    The same seed has the same offsets found, on a slow machine later.
    """
    deadline = time.monotonic() + seconds
    sized = sorted((n for n, b in enumerate(blocks) if b.nbytes), key=lambda n: blocks[n].begin)
    offsets = [0] * len(blocks)
    if not sized:
        return tuple(offsets)
    if len(sized) > MOST_BLOCKS:
        return None
    problem = _Problem.of([blocks[n] for n in sized])
    search = _Search(problem, capacity, np.random.default_rng(seed))
    if search.run(deadline) is not _End.FOUND:
        return None
    for number, offset in zip(sized, search.offsets.tolist(), strict=True):
        offsets[number] = offset
    return tuple(offsets)


# --- the problem --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Problem:
    """Blocks that have bytes, by their begin, and the sections in which they are."""

    size: Array
    alignment: Array
    begin: Array
    """Each block's first section."""
    end: Array
    """The one after its last."""
    begun: Array
    """How many blocks have begun before each section."""
    stacks: Array
    """By block and section: the block's bytes, nothing where it is not needed."""
    conflicts: list[Array]
    twin: Array
    """The block before that has the same life, size and alignment; -1 if none has."""
    priorities: tuple[Array, ...]
    """Area, life and size: by which of them what is large comes first."""

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> _Problem:
        """Take blocks that are in the order of their begins."""
        times = np.array(_section_times(blocks))
        begins, ends = np.array([(b.begin, b.end) for b in blocks]).T
        begin, end = np.searchsorted(times, begins), np.searchsorted(times, ends)
        size = np.array([b.nbytes for b in blocks], dtype=np.int64)
        sections = np.arange(len(times))
        inside = (begin[:, None] <= sections) & (sections < end[:, None])
        overlap = (begin[:, None] < end) & (begin < end[:, None])
        np.fill_diagonal(overlap, False)
        life = (ends - begins).astype(np.float64)
        return cls(
            size=size,
            alignment=np.array([b.alignment for b in blocks], dtype=np.int64),
            begin=begin,
            end=end,
            begun=np.searchsorted(begin, np.arange(len(times) + 1)),
            stacks=np.where(inside, size[:, None], 0),
            conflicts=[np.flatnonzero(row) for row in overlap],
            twin=_twins(np.stack((begin, end, size, [b.alignment for b in blocks]), axis=1)),
            priorities=(life * size, life, size.astype(np.float64)),
        )


def _section_times(blocks: Sequence[Block]) -> list[int]:
    """Return the begins after which a block ends before the next one begins.

    What is needed at any other begin is needed at the next one too.
    """
    begins = sorted({b.begin for b in blocks})
    ends = sorted(b.end for b in blocks)
    passed = np.searchsorted(ends, [*begins, ends[-1]], side="right")
    return [
        begin
        for begin, (before, after) in zip(begins, pairwise(passed), strict=True)
        if after > before
    ]


def _twins(rows: Array) -> Array:
    """Return of each row the last one before that is the same, -1 where none is."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for number, row in enumerate(map(tuple, rows.tolist())):
        found.append(seen.get(row, -1))
        seen[row] = number
    return np.array(found)


# --- the search ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Strategy:
    """What comes first: sections with few answers or with little to waste; which blocks."""

    by_slack: bool
    priority: Array


@dataclass(slots=True)
class _Node:
    """A section's choices, and what to put back before the next of them. A dead end has none."""

    span: Span = (0, 0)
    section: int = 0
    choices: list[int] = field(default_factory=list)
    """What is left of them, the next one last."""
    saved: tuple[Array, ...] = ()
    """The lows and crossings of before the first choice, or nothing where there is none."""
    parts: list[Span] = field(default_factory=list)
    """What is left to be searched after the choice that was made."""
    key: bytes = b""


class _Search:
    """Where blocks are while some are placed: a depth-first search, its path in a list."""

    def __init__(self, problem: _Problem, capacity: int, chosen: np.random.Generator) -> None:
        self._problem = problem
        self._capacity = capacity
        self._chosen = chosen
        self._known: set[bytes] = set()
        self.offsets = np.zeros(len(problem.size), dtype=np.int64)
        self._start()

    def _start(self) -> None:
        """Have no block placed."""
        stacks = self._problem.stacks
        self._low = np.zeros(len(stacks) + 1, dtype=np.int64)
        self._low[-1] = PLACED  # the twin of what has none
        # How many blocks left are in a section and in the next one.
        self._crossing = ((stacks[:, :-1] > 0) & (stacks[:, 1:] > 0)).sum(axis=0)

    def run(self, deadline: float) -> _End:
        """Search with one strategy after the other until the deadline of time.monotonic()."""
        area, life, size = self._problem.priorities
        strategies = cycle((_Strategy(False, area), _Strategy(False, life), _Strategy(True, size)))
        end = _End.STOPPED
        for strategy, length in zip(strategies, _luby(), strict=False):
            end = self._descend(strategy, NODES * length, deadline)
            if end is not _End.STOPPED or time.monotonic() >= deadline:
                break
        return end

    def _descend(self, strategy: _Strategy, limit: int, deadline: float) -> _End:
        self._start()
        path = [_Node(parts=self._parts((0, self._problem.stacks.shape[1])))]
        for _ in range(limit):
            while not path[-1].parts:  # all that it was to have placed is
                path.pop()
                if not path:
                    return _End.FOUND
            path.append(self._opened(path[-1].parts.pop(), strategy))
            while not self._advanced(path[-1]):
                self._remember(path.pop().key)
                if not path:
                    return _End.NONE
            if time.monotonic() >= deadline:
                break
        return _End.STOPPED

    def _remember(self, key: bytes) -> None:
        if key and len(self._known) < MOST_KNOWN:
            self._known.add(key)

    def _opened(self, span: Span, strategy: _Strategy) -> _Node:
        """Return a node of these sections, a dead end if nothing can come of it."""
        first, last = span
        left = self._left(span)
        left = left[np.argsort(-self._low[left], kind="stable")]
        lows = self._low[left, None]
        stacks = self._problem.stacks[left, first:last]
        heights = np.cumsum(stacks, axis=0)
        key = blake2b(left.tobytes() + lows.tobytes(), digest_size=16).digest()
        if key in self._known or (heights + lows > self._capacity).any():
            return _Node()
        floor = np.where(stacks > 0, lows, PLACED).min(axis=0)
        first_twins = self._low[self._problem.twin[left]] == PLACED
        answers = (stacks > 0) & (lows == floor) & first_twins[:, None]
        slack = self._capacity - floor - heights[-1]
        section = _most_urgent(floor, answers.sum(axis=0), slack, strategy)
        choices = self._ordered(left[answers[:, section]], strategy)
        gap = [GAP] if slack[section] else []
        saved = self._low[self._blocks(span)].copy(), self._crossing[first:last].copy()
        return _Node(span, first + section, gap + choices, saved, key=key)

    def _ordered(self, blocks: Array, strategy: _Strategy) -> list[int]:
        """Return blocks with what comes first last."""
        drawn = 1 + NOISE * self._chosen.random(len(blocks))
        return [int(block) for block in blocks[np.argsort(strategy.priority[blocks] * drawn)]]

    def _advanced(self, node: _Node) -> bool:
        """Make a node's next choice, with all put back that the last one changed. False if none."""
        if not node.choices:
            return False
        first, last = node.span
        self._low[self._blocks(node.span)], self._crossing[first:last] = node.saved
        choice = node.choices.pop()
        if choice != GAP:
            self._place(choice)
        elif not self._raise_floor(node):
            return False
        node.parts = self._parts(node.span)
        return True

    def _place(self, block: int) -> None:
        problem = self._problem
        self.offsets[block] = self._low[block]
        others = problem.conflicts[block]
        top = _aligned(self._low[block] + problem.size[block], problem.alignment[others])
        self._low[others] = np.maximum(self._low[others], top)
        self._low[block] = PLACED
        self._crossing[problem.begin[block] : problem.end[block] - 1] -= 1

    def _raise_floor(self, node: _Node) -> bool:
        """Have no block lie on the floor of a node's section. False if then all rest on nothing."""
        problem, section = self._problem, node.section
        within = self._left(node.span)
        within = within[problem.stacks[within, section] > 0]
        lows = self._low[within]
        floor = lows.min()
        supports = [self._support(block, section) for block in within[lows == floor]]
        raised = min(*supports, *lows[lows > floor].tolist(), PLACED)
        # All rise by no more than the lowest: the others may rest on that one.
        self._low[within] = np.maximum(lows, _aligned(raised, problem.alignment[within]))
        return bool(raised < PLACED)

    def _support(self, block: int, section: int) -> int:
        """Return the lowest top of what is left, outside of a section, for a block to rest on."""
        problem, beside = self._problem, self._problem.conflicts[block]
        beside = beside[(problem.stacks[beside, section] == 0) & (self._low[beside] < PLACED)]
        return int((self._low[beside] + problem.size[beside]).min(initial=PLACED))

    def _blocks(self, span: Span) -> slice:
        """Return which blocks begin in these sections; none other left is needed in them."""
        begun = self._problem.begun
        return slice(int(begun[span[0]]), int(begun[span[1]]))

    def _left(self, span: Span) -> Array:
        """Return the blocks in these sections that are yet to be placed."""
        blocks = self._blocks(span)
        return np.flatnonzero(self._low[blocks] < PLACED) + int(blocks.start)

    def _parts(self, span: Span) -> list[Span]:
        """Return the sections that blocks left join, those with the fewest last."""
        first, last = span
        cuts = first + 1 + np.flatnonzero(self._crossing[first : last - 1] == 0)
        parts = pairwise([first, *cuts.tolist(), last])
        counted = [(len(self._left(part)), part) for part in parts]
        return [part for left, part in sorted(counted, reverse=True) if left]


def _most_urgent(floor: Array, answers: Array, slack: Array, strategy: _Strategy) -> int:
    """Return the section to go on with, of those whose floor is lower than what is beside it.

    What can lie on the floor there lies on it everywhere, so placing it takes no room from others.
    """
    sections = np.flatnonzero(_valleys(floor))
    keys = (answers, slack) if strategy.by_slack else (slack, answers)
    return int(sections[np.lexsort([key[sections] for key in keys])[0]])


def _valleys(floor: Array) -> Array:
    """Return of each section whether the floor rises on both sides of it, or ends there."""
    starts = np.flatnonzero(np.diff(floor, prepend=-1))
    levels = np.concatenate(([PLACED], floor[starts], [PLACED]))
    low = (levels[1:-1] < levels[:-2]) & (levels[1:-1] < levels[2:])
    return np.repeat(low, np.diff(starts, append=len(floor)))


def _aligned(offset: Any, alignment: Any) -> Any:
    return -(-offset // alignment) * alignment


def _luby() -> Iterator[int]:
    """Yield 1 1 2 1 1 2 4 …: restarts with it take, up to a logarithm, no longer than the best."""
    u, v = 1, 1
    while True:
        yield v
        u, v = (u + 1, 1) if u & -u == v else (u, 2 * v)
