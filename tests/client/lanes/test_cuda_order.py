"""What the client's cuda lane orders and enters, on fake devices; the rest is in test_cuda."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import storm_kernels
import torch
from storm_client.errors import DaemonLost, UsageError
from storm_client.lanes import Mapped, Slot
from storm_kernels.errors import CudaDriverError
from support import fake_cuda
from support.fake_torch_cuda import FakeTorch, fake_torch
from support.waiting import wait_until

from stormd.memory.shared_memory import SharedMemory
from stormd.protocol import MapPiece, MapSegment, Message, ReserveRange
from stormd.protocol.timeline import (
    PAGE_BYTES,
    POISON,
    PUBLISHED,
    RESTORED_SLOTS,
    STORED,
    Timelines,
    restored_slot,
    status_slot,
)

MODULES = tuple(f"storm_client.lanes.{name}" for name in ("cuda", "publishing"))
STAGING = 1 << 20
PART = 1 << 16


class Bench:
    """A lane that is attached, and the timeline page as its daemon sees it."""

    def __init__(self, lane: Any, page: SharedMemory) -> None:
        self.lane = lane
        self.offers: list[Message] = []
        welcome = SimpleNamespace(staging_bytes=STAGING, part_bytes=PART)
        descriptor = page.take_descriptor()
        lane.attach(welcome, [descriptor], self._offered)
        os.close(descriptor)
        self.counters = Timelines(page.address)
        self._page = page

    def _offered(self, message: Message) -> Message:
        self.offers.append(message)
        return message

    def area(self, slot: Slot) -> bytes:
        return ctypes.string_at(self.lane._shared.area.address + slot.offset, slot.nbytes)

    def write(self, counter: int, value: int) -> None:
        """Write a counter as a device does, whatever its value was."""
        ctypes.c_uint64.from_address(self._page.address + counter).value = value

    def published(self, sequence: int) -> None:
        wait_until(lambda: self.counters.read(PUBLISHED) >= sequence)

    def publishes_behind(self, busy: threading.Event, sequence: int) -> None:
        """Check that the number comes only when `busy`, which a stream waits for, is set."""
        time.sleep(0.05)
        try:
            assert self.counters.read(PUBLISHED) < sequence, "the work before it is not done"
        finally:
            busy.set()
        self.published(sequence)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    with fake_cuda.standing_in(monkeypatch, MODULES):
        driver = sys.modules["storm_kernels.cuda_driver"]
        monkeypatch.setattr(storm_kernels, "cuda_driver", driver, raising=False)
        made = fake_torch()
        for name in (*MODULES, "storm_client.devices"):
            monkeypatch.setattr(import_module(name), "torch", made)
        yield made
        made.close()


@pytest.fixture
def bench(fake: FakeTorch) -> Iterator[Callable[..., Bench]]:
    lanes, pages = [], []

    def made(ordinal: int = 0, **options: bool) -> Bench:
        from storm_client.lanes.cuda import CudaLane

        lanes.append(CudaLane(torch.device("cuda", ordinal), **options))
        pages.append(SharedMemory("test-timeline", PAGE_BYTES))
        return Bench(lanes[-1], pages[-1])

    yield made
    for lane, page in zip(lanes, pages, strict=True):
        lane.close()
        page.close()


@pytest.fixture
def side(fake: FakeTorch) -> Iterator[fake_cuda.Stream]:
    """Another stream than the default one."""
    with fake_cuda.entered(0):
        made = fake_cuda.Stream()
    yield made
    with fake_cuda.entered(0):
        made.close()


def ends_with(thread: threading.Thread, busy: threading.Event, complaint: str) -> None:
    """Check that the thread goes on until `busy`, which a stream waits for, is set; then ends."""
    thread.join(0.1)
    try:
        assert thread.is_alive(), complaint
    finally:
        busy.set()
    thread.join()


def test_the_current_device_stays(fake: FakeTorch, bench: Callable[..., Bench]) -> None:
    """PyTorch's current device is that of the context that a thread has entered last."""
    lane = bench(1).lane
    area = lane.in_place.make_staging()
    tensor = fake.tensor(PART, device=1)
    seen: list[int] = []

    def use() -> None:
        for call in (
            lane.in_place.sweep,
            lambda: lane.in_place.find(tensor.data_ptr(), PART),
            lane.in_place.barrier,
            lane.in_place.make_staging,
            lambda: lane.in_place.offer_staging(area.address),
            lambda: lane.in_place.awaits_answer(area.address, PART),
            lambda: lane.in_place.publish_numbers(1),
            lambda: lane.in_place.wait_before_reuse(0, tensor),
            lambda: lane.in_place.await_restored([0]),
            lambda: lane.stage(tensor, 0, Slot(0, PART)),
            lambda: lane.unstage(Slot(0, PART), tensor, 0),
            lambda: lane.order_after_copies(tensor),
            lane.is_capturing,
            lane.current_stream,
            lambda: lane.on_stream(None),
        ):
            call()
            seen.append(fake.current_device())

    seen.append(fake.current_device())
    use()
    thread = threading.Thread(target=use)  # in which no context has been entered
    thread.start()
    thread.join()
    assert seen == [0] * 31


def test_expandable_segments_are_used_in_place(
    fake: FakeTorch, bench: Callable[..., Bench]
) -> None:
    fake.expandable = True
    lane = bench().lane
    assert lane.hello.staging_bytes == (1 << 30) // 512
    tensor, segments = fake.tensor(PART), lane.in_place.segments
    assert lane.in_place.find(tensor.data_ptr(), PART) is None
    handed: list[int] = []

    def send_descriptor(number: int, descriptor: int) -> bool:
        handed.append(os.fstat(descriptor).st_size)
        return True

    def offer() -> None:
        for request in (1, 2):
            offers.append(segments.next_offer(send_descriptor))
            segments.post(request, offers[-1], [])
            assert segments.next_offer(send_descriptor) is None  # before it is answered
            segments.on_answer(request, None)

    offers: list[Message] = []
    thread = threading.Thread(target=offer)  # as that which listens, in no context
    thread.start()
    thread.join()
    assert [type(one) for one in offers] == [ReserveRange, MapPiece]
    assert handed == [PART]
    assert lane.in_place.find(tensor.data_ptr(), PART) == Mapped(2, 0)
    segments.close()


def test_a_stream_of_another_device_is_none_of_the_lanes(
    fake: FakeTorch, bench: Callable[..., Bench], side: fake_cuda.Stream
) -> None:
    """It is current in the thread, and not there."""
    client = bench(1)
    lane, tensor, busy = client.lane, fake.tensor(PART, device=1), threading.Event()
    lane.in_place.make_staging()
    with fake.in_stream(side):
        side.put(busy.wait)
        assert lane.current_stream() is None
        tensor.fill(7)
        lane.stage(tensor, 0, Slot(0, PART))
        client.published(lane.publish())
        assert client.area(Slot(0, PART)) == tensor.read()
        assert tensor.recorded == [0]
    busy.set()


def test_a_late_write_of_a_dead_daemon_keeps_no_stream_waiting(
    fake: FakeTorch, bench: Callable[..., Bench]
) -> None:
    """Its device may still do what was in flight when it died."""
    client, busy, looked = bench(), threading.Event(), threading.Event()
    stream = fake.stream_of(0)
    stream.put(busy.wait)
    client.lane.in_place.wait_before_reuse(7, fake.tensor(PART))
    stream.put(looked.set)
    dead = threading.Thread(target=client.lane.poison)
    dead.start()
    wait_until(lambda: client.counters.read(STORED) > 7)
    client.write(STORED, 3)
    busy.set()
    try:
        assert looked.wait(60), "the stream waits for a daemon that is dead"
        dead.join()
    finally:
        client.write(STORED, 7)


def test_the_page_outlives_what_streams_wait_for(
    fake: FakeTorch, bench: Callable[..., Bench]
) -> None:
    """A script may end its client while the device has yet to get there."""
    client, busy = bench(), threading.Event()
    fake.stream_of(0).put(busy.wait)
    client.lane.in_place.wait_before_reuse(0, fake.tensor(PART))

    def end() -> None:
        client.lane.poison()
        client.lane.close()

    thread = threading.Thread(target=end)
    thread.start()
    wait_until(lambda: client.counters.read(STORED) >= POISON)
    ends_with(thread, busy, "the page was given up")


def test_numbers_come_in_order_when_a_second_stream_comes_by(
    fake: FakeTorch, bench: Callable[..., Bench], side: fake_cuda.Stream
) -> None:
    """The default stream writes the first ones itself, another stream's are written for it."""
    client, busy = bench(), threading.Event()
    lane = client.lane
    fake.stream_of(0).put(busy.wait)
    (first,) = lane.in_place.publish_numbers(1)
    with fake.in_stream(side):
        (second,) = lane.in_place.publish_numbers(1)
    (third,) = lane.in_place.publish_numbers(1)
    assert (second, third) == (first + 1, first + 2)
    client.publishes_behind(busy, first)
    client.published(third)


def test_a_side_streams_number_waits_for_that_stream(
    fake: FakeTorch, bench: Callable[..., Bench], side: fake_cuda.Stream
) -> None:
    client, busy = bench(), threading.Event()
    side.put(busy.wait)
    with fake.in_stream(side):
        (number,) = client.lane.in_place.publish_numbers(1)
    client.publishes_behind(busy, number)


def test_the_page_outlives_the_numbers_that_are_still_to_be_written(
    fake: FakeTorch, bench: Callable[..., Bench]
) -> None:
    client, busy = bench(), threading.Event()
    fake.stream_of(0).put(busy.wait)
    client.lane.in_place.publish_numbers(1)
    thread = threading.Thread(target=client.lane.close)
    thread.start()
    ends_with(thread, busy, "the page was given up")


def test_a_stream_that_never_comes_to_its_wait_keeps_nobody(
    fake: FakeTorch, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for something else that never comes: another rank of the training."""
    monkeypatch.setattr("storm_client.lanes.cuda.POISONED_SECONDS", 0.05)
    client, busy = bench(), threading.Event()
    fake.stream_of(0).put(busy.wait)
    client.lane.in_place.wait_before_reuse(7, fake.tensor(PART))
    try:
        client.lane.poison()
    finally:
        busy.set()
    assert client.counters.read(STORED) >= POISON


def test_the_page_says_what_became_of_a_restore(bench: Callable[..., Bench]) -> None:
    """Whatever daemon has written it: only a counter that says the ticket is about that restore."""
    client = bench()
    in_place = client.lane.in_place
    ticket = RESTORED_SLOTS + 7
    assert in_place.restore_status(ticket) is None
    client.write(restored_slot(ticket), 7)
    assert in_place.restore_status(ticket) is None
    client.write(status_slot(ticket), 3)
    client.write(restored_slot(ticket), ticket)
    assert in_place.restore_status(ticket) == 3
    assert in_place.restore_status(7) is None
    assert in_place.last_number == client.lane.publish() - 1


def test_a_copy_that_comes_while_the_lane_is_closed_is_not_begun(
    fake: FakeTorch, bench: Callable[..., Bench]
) -> None:
    """Another thread may close it between the look at what is open and the copy."""
    client, tensor = bench(), fake.tensor(PART)
    client.lane.in_place.make_staging()
    tensor.fill(5)
    slot = Slot(0, PART)
    client.lane._publisher.end()
    with pytest.raises(DaemonLost, match="closed"):
        client.lane.stage(tensor, 0, slot)
    with pytest.raises(DaemonLost, match="closed"):
        client.lane.in_place.publish_numbers(1)
    with fake_cuda.entered(0):
        fake.stream_of(0).synchronize()
    assert client.area(slot) == bytes(PART)


def areas() -> list[fake_cuda.DeviceBuffer]:
    """Return the staging areas that there are."""
    buffers = [one for one in fake_cuda.live if isinstance(one, fake_cuda.DeviceBuffer)]
    return [one for one in buffers if one.nbytes == STAGING]


def test_there_is_no_staging_area_until_it_is_made(bench: Callable[..., Bench]) -> None:
    client = bench()
    assert [type(one) for one in client.offers] == [ReserveRange]
    assert (client.lane.staging_bytes, client.lane.offers(), areas()) == (0, [], [])
    made = [client.lane.in_place.make_staging() for _ in range(2)]
    (area,) = areas()
    assert made == [(area.address, STAGING)] * 2


def test_a_lane_that_only_copies_has_it_from_the_first(bench: Callable[..., Bench]) -> None:
    client = bench(in_place=False)
    (area,) = areas()
    offer = MapSegment(segment=0, handle=area.ipc_handle(), nbytes=STAGING)
    assert (client.offers, client.lane.offers()) == ([offer], [offer])
    assert client.lane.staging_bytes == STAGING
    assert client.lane.in_place is None
    assert client.lane.hello.staging_bytes == (1 << 30) // 32


class FullDevice:
    """Has no memory for a staging area until PyTorch gives enough back, if ever."""

    def __init__(self, fake: FakeTorch, unused: int, *, is_enough: bool = True) -> None:
        fake.memory[0] = {"free": 0, "reserved": PART + unused, "allocated": PART, "most": 0}
        self._fake, self._is_enough = fake, is_enough

    def __call__(self, nbytes: int) -> fake_cuda.DeviceBuffer:
        if self._is_enough and self._fake.given_back:
            return fake_cuda.DeviceBuffer(nbytes)
        raise CudaDriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", f"{nbytes} bytes")


@pytest.mark.parametrize(
    ("unused", "is_enough", "given_back"), [(STAGING - 1, True, 0), (STAGING, False, 1)]
)
def test_without_memory_there_is_none_and_the_next_attempt_may_succeed(
    unused: int,
    is_enough: bool,
    given_back: int,
    fake: FakeTorch,
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What PyTorch has cached is given back only if that may help."""
    client = bench()
    full = FullDevice(fake, unused, is_enough=is_enough)
    with monkeypatch.context() as patch:
        patch.setattr("storm_client.lanes.publishing.DeviceBuffer", full)
        with pytest.raises(UsageError, match=f"no staging area of {STAGING} bytes on cuda:0"):
            client.lane.in_place.make_staging()
    assert (fake.given_back, areas()) == (given_back, [])
    assert client.lane.in_place.make_staging().nbytes == STAGING


def test_memory_that_pytorch_does_not_use_is_given_back_for_it(
    fake: FakeTorch, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bench()
    full = FullDevice(fake, STAGING)
    monkeypatch.setattr("storm_client.lanes.publishing.DeviceBuffer", full)
    assert client.lane.in_place.make_staging().nbytes == STAGING
    assert fake.given_back == 1


class Pause:
    """Makes a staging area, and goes on only when it may."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, nbytes: int) -> fake_cuda.DeviceBuffer:
        made = fake_cuda.DeviceBuffer(nbytes)
        self.reached.set()
        assert self.go_on.wait(60)
        return made


def test_an_interrupt_while_it_is_made_loses_no_memory(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pause = bench(), Pause()
    monkeypatch.setattr("storm_client.lanes.publishing.DeviceBuffer", pause)

    def interrupt() -> None:
        pause.reached.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def raises(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raises)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.lane.in_place.make_staging()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    pause.go_on.set()
    assert client.lane.in_place.make_staging().nbytes == STAGING
    assert len(areas()) == 1


def test_a_lane_that_is_closed_while_it_is_made_has_it_freed(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pause, errors = bench(), Pause(), []
    monkeypatch.setattr("storm_client.lanes.publishing.DeviceBuffer", pause)
    in_place = client.lane.in_place

    def make() -> None:
        try:
            in_place.make_staging()
        except DaemonLost as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    assert pause.reached.wait(60)
    client.lane.close()
    pause.go_on.set()
    thread.join()
    assert len(errors) == 1
    assert areas() == []
