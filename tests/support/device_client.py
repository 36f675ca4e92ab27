"""A client's lane whose staging area is a device's memory too, used in the order of a stream.

What stays true: `published` says what the stream has come to, which is late by chance. The stream
waits for counters of the page as a device does. What lies in the device's memory for a store is
overwritten at the moment that `stored` allows it, so whoever reads it later reads garbage. Memory
that was handed out is used once the stream has come past the waits for it.

It goes with a daemon that has a `DeviceLane`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from storm_client.lanes import Mapped, Request, Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.lanes.segments import Segments
from storm_client.transport.staging_space import StagingSpace
from support.device_lane import DONE_TWICE
from support.in_place_lane import WithArea

from stormd.protocol import MapSegment, Welcome
from stormd.protocol.timeline import (
    PAGE_BYTES,
    PUBLISHED,
    STORED,
    Timelines,
    restored_slot,
    status_slot,
)

LAG_SECONDS = 0.001
LOOK_SECONDS = 0.0002
OVERWRITTEN = 0x5A


class _Stream:
    """Does one thing after another in a thread of its own, on a page of counters."""

    def __init__(self, descriptor: int) -> None:
        self._page: mmap.mmap | ctypes.Array[ctypes.c_char] = mmap.mmap(descriptor, PAGE_BYTES)
        self.counters = Timelines(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))
        self.last = 0
        self._is_over = threading.Event()
        self._chance = random.Random(os.getpid())
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device-stream", daemon=True)
        self._thread.start()

    def numbers(self, count: int) -> range:
        """Return `count` numbers, which are published behind what was put on the stream so far."""
        first, self.last = self.last + 1, self.last + count
        last = self.last
        self._work.put(lambda: self.counters.store(PUBLISHED, last))
        return range(first, last + 1)

    def wait_for(self, counter: int, value: int) -> None:
        self._work.put(lambda: self.reach(counter, value))

    def reach(self, counter: int, value: int) -> None:
        """Return when a counter has come so far, or nothing waits any more."""
        while self.counters.read(counter) < value and not self._is_over.is_set():
            time.sleep(LOOK_SECONDS)

    def release(self) -> None:
        """Wait for nothing any more."""
        self._is_over.set()

    def close(self) -> None:
        self.release()
        self._work.put(None)
        self._thread.join()
        self._page = (ctypes.c_char * PAGE_BYTES)()  # the shared one is unmapped
        self.counters = Timelines(ctypes.addressof(self._page))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._chance.random() * LAG_SECONDS)
            work()


class DeviceClientLane(CpuLane):
    """A lane of the device; half of the shared area is its memory, the rest the staging area."""

    in_place: DeviceInPlace | None = None
    budget_bytes = 2 << 20
    done_twice = 0
    """Once it is closed: a restore that was done again, into memory that may have been in use."""

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        super().attach(welcome, descriptors, request)
        self.area_bytes = welcome.staging_bytes
        self.staging_bytes = welcome.staging_bytes // 2
        self.stream = _Stream(descriptors[0])
        self._memory = StagingSpace(welcome.staging_bytes - self.staging_bytes)
        self._sources: deque[tuple[int, Slot]] = deque()  # with the number of their last store
        self._dead: deque[Slot] = deque()  # of storages that nobody has any more
        self._waits = threading.local()
        self.in_place = DeviceInPlace(self)

    def area_address(self) -> int:
        return self._mapped().area

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a range of the device's memory, None where there is none; with the lock held."""
        while self._sources and self.is_read(self._sources[0][0]):
            self._give_back(self._sources.popleft()[1])
        while self._dead:
            self._give_back(self._dead.popleft())
        return self._memory.allocate(nbytes)

    def address(self, slot: Slot) -> int:
        return self.area_address() + self.staging_bytes + slot.offset

    def is_read(self, sequence: int) -> bool:
        return self.stream.counters.read(STORED) >= sequence

    def reads_until(self, sequence: int, slot: Slot) -> None:
        self._sources.append((sequence, slot))

    def _give_back(self, slot: Slot) -> None:
        ctypes.memset(self.address(slot), OVERWRITTEN, slot.nbytes)
        self._memory.free(slot)

    # --- the lane ---------------------------------------------------------------------------

    def publish(self) -> int:
        return self.stream.numbers(1)[0]

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        in_place = self.in_place
        with in_place.lock:
            slot = self.reserve(nbytes)
        if slot is None:
            return super().allocate(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(self.address(slot))
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        weakref.finalize(memory, self._dead.append, slot)
        return storage

    def awaits(self, tickets: Sequence[int]) -> None:
        """Have this thread's stream wait, and the thread itself when it uses the memory."""
        for ticket in tickets:
            self.stream.wait_for(restored_slot(ticket), ticket)
        self._waits.tickets = [*getattr(self._waits, "tickets", []), *tickets]

    def order_after_copies(self, restored: torch.UntypedStorage) -> None:
        for ticket in getattr(self._waits, "tickets", []):
            self.stream.reach(restored_slot(ticket), ticket)
        self._waits.tickets = []

    def poison(self) -> None:
        self.stream.release()

    def close(self) -> None:
        if self._shared is not None:
            self.done_twice = self.stream.counters.read(DONE_TWICE)
            self.stream.close()
        super().close()


class DeviceInPlace(WithArea):
    """What an InPlace is on it. Tensors lie in the host's memory, and are copied to the device's
    when they are stored: which is when a device would have computed them there.
    """

    waits_on_device = True

    def __init__(self, lane: DeviceClientLane) -> None:
        self.segments = Segments(None)  # type: ignore[arg-type]
        self.spare = lane.area_bytes // 8
        self.lock = threading.RLock()  # protects the device's memory
        self.handed_out = 0
        self.outcomes: list[int | None] = []
        """What has been said of restores that were under way when a daemon ended."""
        self._lane = lane
        self._source: Slot | None = None

    def find(self, address: int, nbytes: int) -> Mapped | None:
        offset = address - self._lane.area_address()
        if 0 <= offset < self._lane.area_bytes:
            return Mapped(0, offset)
        with self.lock:
            if self._source is not None:  # it was found, and is not sent yet
                self._lane.reads_until(0, self._source)
            self._source = self._lane.reserve(nbytes)
            if self._source is None:
                return None
            target = self._lane.address(self._source)
            ctypes.memmove(target, address, nbytes)
            return Mapped(0, target - self._lane.area_address())

    def publish_numbers(self, count: int) -> range:
        numbers = self._lane.stream.numbers(count)
        with self.lock:
            if self._source is not None:
                self._lane.reads_until(numbers[-1], self._source)
                self._source = None
        return numbers

    @property
    def last_number(self) -> int:
        return self._lane.stream.last

    def is_read(self, sequence: int) -> bool:
        return self._lane.is_read(sequence)

    def wait_before_reuse(self, sequence: int, source: torch.UntypedStorage) -> None:
        self._lane.stream.wait_for(STORED, sequence)

    def await_restored(self, tickets: Sequence[int]) -> None:
        self.handed_out += len(tickets)
        self._lane.awaits(tickets)

    def end_waits(self, ticket: int) -> None:
        self._lane.stream.counters.store(restored_slot(ticket), ticket)

    def restore_status(self, ticket: int) -> int | None:
        counters = self._lane.stream.counters
        is_done = counters.read(restored_slot(ticket)) == ticket
        self.outcomes.append(counters.read(status_slot(ticket)) if is_done else None)
        return self.outcomes[-1]

    def offers(self) -> list[MapSegment]:
        return []

    def headroom(self) -> int:
        return self.spare
