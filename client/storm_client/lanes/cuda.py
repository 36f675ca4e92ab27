"""The cuda lane: tensors in device memory that the daemon maps, or staged through such memory.

The training thread never waits for the device here: streams wait for counters in a page that the
daemon shares. The page exists until no stream waits for a counter or has still to write one.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, TypeVarTuple, cast

import torch
from storm_kernels.errors import KernelsError

from storm_client.devices import is_capturing, with_number
from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.lanes import (
    NOTHING,
    STAGING,
    Lane,
    LaneHello,
    Mapped,
    Request,
    Slot,
    StagingArea,
    Stream,
)
from storm_client.lanes.offers import Mappable
from storm_client.lanes.segments import Segments
from stormd.protocol import MapSegment, ReserveRange, UnmapSegment, Welcome
from stormd.protocol.timeline import RESTORED_SLOTS, STORED, restored_slot, status_slot

try:
    from storm_kernels import cuda_driver
    from storm_kernels.cuda_driver import DeviceBuffer, Event, PrimaryContext, wait_value

    from storm_client.lanes.publishing import Publisher, Shared, closed, new_area
except KernelsError as error:
    raise UsageError(f"tensors on a GPU are not offloaded: {error}") from error

__all__ = ["CudaLane"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

ONE_CONNECTION = "CUDA_DEVICE_MAX_CONNECTIONS"
"""With the value 1, a stream that waits for the daemon would block all other streams."""

STAGING_DIVISOR = 32
"""The staging area is requested as this fraction of the device's memory; a daemon may grant less.
"""

SPARE_STAGING_DIVISOR = 512
"""The same fraction if tensors are stored and restored in place: the area is made only for memory
that cannot be mapped."""

BARRIER_BYTES = 2 << 20
"""Addresses that a barrier has the daemon reserve: the smallest unit of any device."""

POOLED = 1
"""A bit of a stream's id: the stream is PyTorch's. A script may destroy its own at any time."""

POISON_SECONDS = 0.01
"""Between two poisonings of a dead daemon's counters, until the last wait has ended."""

POISONED_SECONDS = 10.0
"""Until nothing of a dead daemon writes any more: its context is gone, and counters keep values."""

BUDGET_DIVISOR = 32
"""Fraction of a device's memory for tensors that wait for the link in their own memory."""


class CudaLane(Lane):
    """Has tensors of one device read and written in place, or copied to and from a staging area.

    Raises:
        UsageError: the device cannot be used through the CUDA driver.
    """

    keeps_stored = True

    def __init__(self, device: torch.device, *, in_place: bool = True) -> None:
        """Describe the lane; without `in_place` it only copies. `attach` must follow."""
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.device = with_number(device)
        ordinal = self.device.index
        try:
            self._context = PrimaryContext(ordinal)
        except KernelsError as error:
            raise UsageError(f"tensors on {device} are not offloaded: {error}") from error
        self._ordinal = ordinal
        self._thread = threading.local()
        self._total_bytes = torch.cuda.get_device_properties(ordinal).total_memory
        self._may_be_in_place = in_place and not _one_connection() and self._can_export()
        divisor = SPARE_STAGING_DIVISOR if self._may_be_in_place else STAGING_DIVISOR
        self.hello = LaneHello(
            device="cuda",
            device_uuid=self._context.uuid,
            staging_bytes=self._total_bytes // divisor,
        )
        self.budget_bytes = self._total_bytes // BUDGET_DIVISOR
        self._lock = threading.Lock()
        """Protects the shared objects, and the streams' waits."""
        self._making_staging = threading.Lock()
        """Held by a thread that makes the staging area."""
        self._granted_bytes = 0
        """The size of staging area that the daemon has granted."""
        self._shared: Shared | None = None
        self._publisher: Publisher | None = None
        self._in_place: _InPlace | None = None
        self._waits: dict[int, Event] = {}
        """By stream: an event that is reached when the stream no longer waits for the page."""

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        """Map the timeline page; without access in place, have the daemon map a staging area.

        Raises:
            DaemonUnavailable: the daemon shared no page.
            UsageError: the device has no memory for the staging area, or cannot export it.
            StormError: the daemon's refusal.
        """
        if not descriptors:
            raise DaemonUnavailable(
                "the daemon shared no timeline page with this cuda session; see its log"
            )
        self._granted_bytes = welcome.staging_bytes
        with torch.cuda.device(self._ordinal):
            self._context.make_current()
            try:
                self._shared = Shared(descriptors[0])
            except KernelsError as error:
                raise UsageError(f"no page is shared with {self.device}: {error}") from error
            self._publisher = Publisher(self._shared)
            if self._may_be_in_place:
                self._in_place = self._attach_in_place(request)
            else:
                area = self._new_area()
                self._shared.use_area(area)
                request(_offer(area))
                self.staging_bytes = area.nbytes

    def offers(self) -> list[MapSegment]:
        """Return the offer of the area that `attach` has made; Segments offers any other."""
        if self._may_be_in_place:
            return []
        with self.driver_context():
            return [_offer(self._area())]

    @property
    def in_place(self) -> _InPlace | None:
        """The daemon's access to tensors in place.

        None with ONE_CONNECTION set to 1, if PyTorch's memory cannot be mapped, and after `close`.
        """
        return self._in_place

    def publish(self) -> int:
        """Publish the next number after all copies that were staged or unstaged so far."""
        return self.call_driver(self._numbers().publish, self._current_stream())

    def stage(self, source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        """Copy bytes from `begin` on into the slot, on the current stream.

        The memory of `source` may be reused after that copy, as after any work on the stream.
        """
        target = self._area().address + slot.offset
        with self.driver_context():
            stream = torch.cuda.current_stream()
            self._view(source).record_stream(stream)
            address = source.data_ptr() + begin
            self._numbers().copy(target, address, slot.nbytes, stream.cuda_stream)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return uninitialised memory of the device."""
        # Not torch.empty(nbytes): with deterministic algorithms it fills the memory.
        return torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]

    def unstage(self, slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        """Copy the slot to offset `begin` of `destination`, on the current stream."""
        source = self._area().address + slot.offset
        with self.driver_context():
            stream = self._current_stream()
            self._numbers().copy(destination.data_ptr() + begin, source, slot.nbytes, stream)

    def current_stream(self) -> Stream:
        """Return the thread's stream on the device, None if it is the default stream."""
        return None if not self._current_stream() else torch.cuda.current_stream(self._ordinal)

    def can_use_stream(self, stream: Stream) -> bool:
        """Return whether `stream` is current, or is one of PyTorch's, which are never destroyed."""
        if stream is None or stream.stream_id & POOLED:
            return True
        return stream == torch.cuda.current_stream(self._ordinal)

    def on_stream(self, stream: Stream) -> AbstractContextManager[object] | None:
        """Return a context in which `stream` is the current one, None if it is already."""
        if stream is None and not self._current_stream():
            return None
        chosen = torch.cuda.default_stream(self._ordinal) if stream is None else stream
        return torch.cuda.stream(cast("torch.cuda.Stream", chosen))

    def is_capturing(self) -> bool:
        """Return whether the current stream's work is being captured into a CUDA graph."""
        return is_capturing(self.device)

    def order_after_copies(self, restored: torch.UntypedStorage) -> None:
        """Order the current stream after all copies so far, if other streams may have made any."""
        numbers, stream = self._numbers(), self._current_stream()
        if numbers.is_only_stream(stream):
            return
        with self.driver_context():
            if numbers.follow(stream):
                self._view(restored).record_stream(torch.cuda.current_stream())

    def poison(self) -> None:
        """End all waits on the daemon's counters, also those that streams have yet to reach.

        A write of the daemon's device that was in flight may undo the poisoning. So the counters
        are poisoned again until no stream waits, or no such write can come.
        """
        end = time.monotonic() + POISONED_SECONDS
        while self._poison() and time.monotonic() < end:
            time.sleep(POISON_SECONDS)

    def close(self) -> None:
        """Free the staging area once no stream uses it; the daemon has unmapped it, or is dead."""
        publisher = self._publisher
        if publisher is not None:
            publisher.end()
        with self._lock:
            shared, self._shared = self._shared, None
            waits, self._waits = self._waits, {}
            self._in_place = None
        if shared is not None:
            with torch.cuda.device(self._ordinal):
                self._context.make_current()
                for event in waits.values():
                    event.synchronize()
                    event.close()
                if publisher is not None:
                    publisher.settle()
                shared.close()
        self._context.close()

    # --- for what is stored and restored in place ----------------------------------------------

    def enter(self) -> None:
        """Make driver calls possible in a new thread, whose current device must be the lane's."""
        if not hasattr(self._thread, "entered"):
            self._context.make_current()
            self._thread.entered = True

    def driver_context(self) -> AbstractContextManager[None]:
        """Return a context in which driver calls are possible; it restores the thread's device."""
        return NOTHING if self._is_entered() else _Entered(self, self._ordinal)

    def call_driver(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Call a function that makes driver calls, and return its result; cheap enough per save."""
        if self._is_entered():  # as in nearly all calls
            return function(*arguments)
        with _Entered(self, self._ordinal):
            return function(*arguments)

    def make_staging(self) -> StagingArea:
        """Return the staging area; make it unless it is there: see lanes.InPlace.

        Interrupts strike the main thread alone, so another one loses no memory. It is started and
        awaited by one call each: the waits of threading.Thread are no place for an interrupt.
        """
        if self._open().area is None:
            failed: list[Exception] = []
            running = threading.Lock()
            running.acquire()
            _thread.start_new_thread(self._make_staging, (failed, running))
            running.acquire()
            if failed:
                raise failed[0]
        area = self._area()
        return StagingArea(area.address, area.nbytes)

    # --- helpers ----------------------------------------------------------------------------

    def _attach_in_place(self, request: Request) -> _InPlace:
        """Return the access in place, once the daemon has memory of its own for the session."""
        in_place = _InPlace(self, shared_by_mps=self._context.shared_by_mps())
        first = in_place.barrier()
        request(first)
        in_place.segments.to_unmap.append(UnmapSegment(first.segment))
        return in_place

    def _make_staging(self, failed: list[Exception], running: threading.Lock) -> None:
        """Make the staging area unless it is there; an error goes to `failed`."""
        try:
            with self._making_staging, self.driver_context():
                shared = self._open()
                if shared.area is None:
                    self._use_if_open(shared, self._new_area())
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            failed.append(error)
        finally:
            running.release()

    def _new_area(self) -> DeviceBuffer:
        try:
            return new_area(self._granted_bytes, self.device)
        except KernelsError as error:
            raise UsageError(
                f"no staging area of {self._granted_bytes} bytes on {self.device}: {error}"
            ) from error

    def _use_if_open(self, shared: Shared, area: DeviceBuffer) -> None:
        """Use a new staging area; if the lane was closed meanwhile, free the area.

        Raises:
            DaemonLost: the lane is closed.
        """
        with self._lock:
            is_open = self._shared is shared
            if is_open:
                shared.use_area(area)
        if not is_open:
            area.close()
            raise closed()

    def _area(self) -> DeviceBuffer:
        """Return the staging area; raise DaemonLost if the lane is closed."""
        area = self._open().area
        assert area is not None, "something is staged before there is a staging area"
        return area

    def _poison(self) -> bool:
        """Poison the daemon's counters once; return whether a stream may still wait for one."""
        with self._lock:
            if self._shared is None:
                return False
            self._shared.timelines.poison(STORED, *_RESTORED)
            try:
                with self.driver_context():
                    return not all(event.done() for event in self._waits.values())
            except KernelsError:
                return False  # a broken device does nothing any more

    def _note_wait(self, stream: int) -> None:
        """Note that a stream waits for a counter, which may have to be poisoned."""
        with self._lock:
            event = self._waits.get(stream) or Event()
            self._waits[stream] = event
            event.record(stream)

    def _view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor over a storage, to tell PyTorch's allocator of streams."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def _can_export(self) -> bool:
        """Return whether another process can map the memory that PyTorch allocates now."""
        with self.driver_context():
            probe = torch.empty(1, dtype=torch.uint8, device=self.device)
            address = probe.data_ptr()
            if cuda_driver.exportable(address) or cuda_driver.is_shareable(address):
                return True
        log.warning(
            "tensors are copied through a staging area, because no other process can map PyTorch's "
            "memory on %s; unset backend:cudaMallocAsync to have them stored and restored in place",
            self.device,
        )
        return False

    def _open(self) -> Shared:
        """Return the objects shared with the daemon; raise DaemonLost if the lane is closed."""
        shared = self._shared
        if shared is None:
            raise closed()
        return shared

    def _numbers(self) -> Publisher:
        """Return the publisher, which itself raises once the lane is closed."""
        assert self._publisher is not None, "not attached"
        return self._publisher

    def _is_entered(self) -> bool:
        # Without the public call, which checks whether CUDA is initialised.
        return hasattr(self._thread, "entered") and torch._C._cuda_getDevice() == self._ordinal

    def _current_stream(self) -> int:
        """Return the handle of the thread's stream on the device, at a tenth of the public cost."""
        return int(torch._C._cuda_getCurrentRawStream(self._ordinal))


_RESTORED = tuple(map(restored_slot, range(RESTORED_SLOTS)))


def _offer(area: DeviceBuffer) -> MapSegment:
    """Return the message that makes the daemon map a staging area."""
    return MapSegment(segment=STAGING, handle=area.ipc_handle(), nbytes=area.nbytes)


class _Entered:
    """A context with a device and possible driver calls; a generator would cost more."""

    __slots__ = ("_device", "_lane")

    def __init__(self, lane: CudaLane, ordinal: int) -> None:
        self._lane = lane
        self._device = torch.cuda.device(ordinal)

    def __enter__(self) -> None:
        self._device.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._lane.enter()

    def __exit__(self, *exception: object) -> None:
        self._device.__exit__(*exception)


def _one_connection() -> bool:
    """Return whether a waiting stream would block all others, and log the consequence."""
    if os.environ.get(ONE_CONNECTION) != "1":
        return False
    log.warning(
        "%s=1: tensors are copied through a staging area, because a stream that waits would hold "
        "up all others; unset it to have them stored and restored in place",
        ONE_CONNECTION,
    )
    return True


def _times_freed(device: torch.device) -> int | None:
    """Return how often PyTorch has given memory back to the driver; None if nobody counts."""
    try:
        return int(torch._C._cuda_memoryStats(device.index)["num_device_free"])
    except (AttributeError, KeyError, RuntimeError):
        return None


class _InPlace:
    """Stores and restores in the tensors' own memory; see lanes.InPlace."""

    def __init__(self, lane: CudaLane, *, shared_by_mps: bool) -> None:
        self.segments = Segments(cuda_driver, driver_context=lane.driver_context)
        self.waits_on_device = shared_by_mps
        self._lane = lane
        self._numbers = lane._numbers()
        self._freed: int | None = None
        """The number of times that PyTorch had given memory back to the driver at the last
        sweep."""

    def find(self, address: int, nbytes: int) -> Mapped | None:
        return self._lane.call_driver(self.segments.find, address, nbytes)

    def awaits_answer(self, address: int, nbytes: int) -> bool:
        return self._lane.call_driver(self.segments.awaits_answer, address, nbytes)

    def make_staging(self) -> StagingArea:
        return self._lane.make_staging()

    def offer_staging(self, address: int) -> None:
        self._lane.call_driver(self.segments.offer_staging, address)

    def offers(self) -> list[Mappable]:
        with self._lane.driver_context():
            return self.segments.offers()

    def sweep(self) -> bool:
        freed = _times_freed(self._lane.device)
        if freed is not None and freed == self._freed:
            return False  # no allocation was freed since: no need to ask the driver about each
        with self._lane.driver_context():
            is_given_back = self.segments.sweep()
        self._freed = freed
        return is_given_back

    def publish_numbers(self, count: int) -> range:
        return self._lane.call_driver(
            self._numbers.publish_numbers, self._lane._current_stream(), count
        )

    @property
    def last_number(self) -> int:
        return self._numbers.last

    def is_read(self, sequence: int) -> bool:
        shared = self._lane._shared
        if shared is None:
            raise closed()
        return shared.timelines.read(STORED) >= sequence

    def wait_before_reuse(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Have the current stream, and the next user of `source`'s memory, wait for `sequence`."""
        counter = self._lane._open().stored
        with self._lane.driver_context():
            stream = torch.cuda.current_stream()
            wait_value(stream.cuda_stream, counter, sequence)
            self._lane._note_wait(stream.cuda_stream)
            self._lane._view(source).record_stream(stream)

    def await_restored(self, tickets: Sequence[int]) -> None:
        self._lane.call_driver(self._await_restored, tickets)

    def _await_restored(self, tickets: Sequence[int]) -> None:
        lane, shared = self._lane, self._lane._open()
        stream = lane._current_stream()
        for ticket in tickets:
            slot = restored_slot(ticket)
            if shared.timelines.read(slot) < ticket:
                wait_value(stream, shared.page_address + slot, ticket)
        lane._note_wait(stream)

    def end_waits(self, ticket: int) -> None:
        shared = self._lane._shared
        if shared is not None:
            shared.timelines.store(restored_slot(ticket), ticket)

    def restore_status(self, ticket: int) -> int | None:
        timelines = self._lane._open().timelines
        if timelines.read(restored_slot(ticket)) != ticket:
            return None
        return timelines.read(status_slot(ticket))

    def barrier(self) -> ReserveRange:
        return ReserveRange(segment=self.segments.new_number(), nbytes=BARRIER_BYTES)

    def headroom(self) -> int:
        device = self._lane.device
        stats = torch.cuda.memory_stats_as_nested_dict(device.index)["allocated_bytes"]["all"]
        return int(stats["peak"] - stats["current"])
