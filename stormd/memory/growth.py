"""Takes more of the machine's memory for the pool while the pool is used, ahead of the need.

A step makes a range resident and accessible to every lane, in a thread of its own. Only then is the
range added to the space from which the ledger promises, so a promise never covers memory that has
yet to come. No step leaves the rest of the machine, or of the container, short of memory.

Memory is given back when the daemon ends: if it were given back earlier, the next training step
would have to wait for it again. But memory that a worker process has beyond its share of the pool
is given back once it is free and another worker wants it.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from stormd.errors import LaneUnavailable, PoolUnavailable, StartStopped
from stormd.machine import memory_limit
from stormd.memory.arena import Space
from stormd.memory.host_pool import HostPool
from stormd.memory.shared_rows import PoolBudget
from stormd.sizes import format_size

__all__ = ["FIRST_BYTES", "PoolGrowth", "left_to_others", "next_step"]

log = logging.getLogger(__name__)

FIRST_BYTES: Final = 64 << 20
"""The first bytes of a pool that grows, and its least step: a fraction of a second's work."""

MAX_A_STEP: Final = 128 << 20
"""Most bytes of a step: a waiter then waits for well below a second even if the host has yet to
find the memory."""

FREE_DIVISOR: Final = 4
"""A used space keeps 1 / FREE_DIVISOR of its ready memory free, or more memory is added."""

RETRY_SECONDS: Final = 5.0
"""Seconds after which a machine that had no memory is asked again."""

RETRY_CLAIM_SECONDS: Final = 0.5
"""The same for memory of other workers, which check as often whether somebody wants what they can
spare."""

LEFT_DIVISOR: Final = 16
MIN_FREE_BYTES: Final = 64 << 20
MAX_FREE_BYTES: Final = 2 << 30
"""Memory of the machine or the container that is left to others: a 16th, within these bounds."""


class Extendable(Protocol):
    """The methods of a lane that are needed here."""

    def extend(self, offset: int, nbytes: int) -> None: ...
    def retract(self, offset: int, nbytes: int) -> None: ...


def next_step(space: Space) -> int:
    """Return how many bytes the space is to grow by next; 0 if it has enough.

    A space that nobody uses does not grow. Steps grow with the space, so that a fast start takes
    few steps. They end at whole pages.
    """
    use, left = space.use(), space.end - space.base - space.committed
    needed = max(space.wanted, use.taken + use.ready // FREE_DIVISOR if use.taken else 0)
    if not space.is_growing or needed <= use.ready:
        return 0
    step = min(max(needed - use.ready, space.committed // 2, FIRST_BYTES), MAX_A_STEP)
    return min(-(-step // mmap.PAGESIZE) * mmap.PAGESIZE, left)


def left_to_others() -> int:
    """Return the bytes of memory that no step may take."""
    return min(max(memory_limit() // LEFT_DIVISOR, MIN_FREE_BYTES), MAX_FREE_BYTES)


class PoolGrowth:
    """Grows `spaces` of a pool, one step at a time. `close` must follow, before the lanes' `close`.

    `on_step` is called on the loop after each step, also after one that failed: then the spaces
    allow no growth for some seconds, and nobody waits for it any longer. With a `budget`, which is
    shared with other processes, there is one space, and the first range of its memory is never
    given back.
    """

    def __init__(
        self,
        pool: HostPool,
        spaces: Sequence[Space],
        lanes: Iterable[Extendable],
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[], None],
        *,
        budget: PoolBudget | None = None,
    ) -> None:
        self._budget = budget
        self._pool = pool
        self._spaces = [space for space in spaces if space.is_growing]
        assert budget is None or len(spaces) == 1
        self._lanes = list(lanes)
        self._loop = loop
        self._on_step = on_step
        self._step: asyncio.Future[None] | None = None
        self._retry_at = 0.0
        self._has_failed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stormd-grow")

    def grow_if_due(self) -> None:
        """Begin a step if one is due and none is under way. Called on the loop, often."""
        if self._step is not None or not self._spaces:
            return
        if self._has_failed and time.monotonic() < self._retry_at:
            return
        for space in self._spaces:
            space.allow_growth(allowed=True)
            nbytes = next_step(space)
            if nbytes:
                self._claim(space, nbytes)
                return
        if self._budget is not None and self._budget.surplus:
            self._begin_giving_back(self._spaces[0])

    def close(self) -> None:
        """Wait for the step under way, and begin no more. Called on the loop."""
        self._spaces = []
        self._executor.shutdown()

    def _claim(self, space: Space, nbytes: int) -> None:
        granted = nbytes if self._budget is None else self._budget.claim(nbytes)
        if granted:
            self._begin(space, granted)
            return
        self._pause_growth("other workers have the rest of it", RETRY_CLAIM_SECONDS)
        self._loop.call_soon(self._on_step)

    def _begin_giving_back(self, space: Space) -> None:
        """Begin to give the last range back, if nothing needs it.

        The range may be larger than the surplus: the part below the share can be claimed again.
        """
        (offset, nbytes), is_only = self._pool.ranges[-1], len(self._pool.ranges) == 1
        if is_only or not space.shrink(nbytes):
            return
        step = self._loop.run_in_executor(self._executor, self._give_back, offset, nbytes)
        self._step = step
        step.add_done_callback(lambda done: self._given_back(done, space, nbytes))

    def _give_back(self, offset: int, nbytes: int) -> None:
        """Give a range's memory back. Runs in the growth thread."""
        for lane in self._lanes:
            lane.retract(offset, nbytes)
        self._pool.give_back(offset, nbytes)

    def _given_back(self, step: asyncio.Future[None], space: Space, nbytes: int) -> None:
        self._step = None
        if step.cancelled() or not self._spaces:
            return
        error = step.exception()
        if error is None and self._budget is not None:
            self._budget.give_back(nbytes)
        else:  # the memory is still there, so it is used again
            log.error("memory of the pool cannot be given back", exc_info=error)
            space.grow(nbytes)
        self._on_step()

    def _begin(self, space: Space, nbytes: int) -> None:
        offset = space.base + space.committed
        step = self._loop.run_in_executor(self._executor, self._commit, offset, nbytes)
        self._step = step
        step.add_done_callback(lambda done: self._grown(done, space, nbytes))

    def _commit(self, offset: int, nbytes: int) -> None:
        """Make a range resident and accessible to all lanes. Runs in the growth thread."""
        self._pool.commit(offset, nbytes, beside=left_to_others())
        try:
            for lane in self._lanes:
                lane.extend(offset, nbytes)
        except BaseException:
            self._pool.give_back(offset, nbytes)
            raise

    def _grown(self, step: asyncio.Future[None], space: Space, nbytes: int) -> None:
        self._step = None
        if step.cancelled() or not self._spaces:
            return
        error = step.exception()
        if error is not None and self._budget is not None:
            self._budget.give_back(nbytes)
        if error is None:
            self._has_failed = False
            space.grow(nbytes)
        elif isinstance(error, PoolUnavailable | LaneUnavailable | StartStopped):
            self._pause_growth(str(error), RETRY_SECONDS)
        else:  # our bug; the pool stays as large as it is
            log.error("the pool does not grow", exc_info=error)
            self._pause_growth(str(error), RETRY_SECONDS)
        self._on_step()

    def _pause_growth(self, reason: str, seconds: float) -> None:
        """Stop growing for a while; log it once, not at every attempt."""
        if not self._has_failed:
            size = format_size(sum(nbytes for _, nbytes in self._pool.ranges))
            log.warning("the pool stays at %s: %s", size, reason)
        self._has_failed, self._retry_at = True, time.monotonic() + seconds
        for space in self._spaces:
            space.allow_growth(allowed=False)
