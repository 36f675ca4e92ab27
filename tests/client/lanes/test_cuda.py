"""The client's cuda lane: streams, captures, memory; what all lanes do: test_ways_of_training."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.lanes import Lane, Mapped
from storm_client.lanes.segments import Segments
from storm_client.planner import DeviceWindow
from support.daemon_process import DaemonProcess
from support.waiting import wait_until
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

Context = AbstractContextManager[object]

DAEMON = ("--pool-bytes", "512MiB", "--staging-bytes-cuda", "16MiB", "--part-bytes-cuda", "2MiB")
"""Less staging than any model here saves, so that most of it has to leave and come back."""


@pytest.fixture
def client(make_daemon: Callable[..., DaemonProcess]) -> Iterator[storm.Client]:
    address = make_daemon(*DAEMON).address
    with storm.connect(address, embedded="never", timeout=30) as client:
        yield client
        gc.collect()
        wait_until(lambda: client.status().entries == 0, 30, client.status)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))] * 4
    return nn.Sequential(*layers).to("cuda")


def batch(seed: int = 1) -> Tensor:
    return torch.randn(1024, 512, generator=torch.Generator().manual_seed(seed)).cuda()


def forward(model: nn.Module, x: Tensor, context: Context) -> Tensor:
    with context:
        return model(x).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return found


def plain(model: nn.Module, x: Tensor) -> list[Tensor]:
    forward(model, x, nullcontext()).backward()
    return gradients(model)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_offloaded(offload: storm.Offload) -> None:
    assert offload.stats().offloaded_bytes >= 1 << 20, offload.stats()


def test_a_side_streams_forward(client: storm.Client) -> None:
    model, x = network(), batch()
    expected = plain(model, x)
    offload = client.offload(model, min_bytes=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = forward(model, x, offload)
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert_same(gradients(model), expected)
    assert_offloaded(offload)


def test_the_stream_changes_within_a_forward(client: storm.Client) -> None:
    model, x = network(), batch()
    expected = plain(model, x)
    offload = client.offload(model, min_bytes=1)
    streams = [torch.cuda.Stream() for _ in model]
    for _ in range(5):
        with offload:
            y = x
            for layer, stream in zip(model, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = layer(y)
                torch.cuda.current_stream().wait_stream(stream)
            loss = y.square().mean()
        loss.backward()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        assert_same(gradients(model), expected)
    assert_offloaded(offload)


def test_threads_with_streams_of_their_own(client: storm.Client) -> None:
    expected: dict[int, list[Tensor]] = {}
    models = [network() for _ in range(3)]
    for number, model in enumerate(models):
        expected[number] = plain(model, batch(number))
    wrong: list[int] = []

    def train(number: int) -> None:
        model, x = models[number], batch(number)
        offload = client.offload(model, min_bytes=1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                forward(model, x, offload).backward()
                found = gradients(model)
                if not all(map(torch.equal, found, expected[number])):
                    wrong.append(number)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_captured_graph_passes_through(client: storm.Client) -> None:
    model, x = network(), batch()
    expected = plain(model, x)
    offload = client.offload(model, min_bytes=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture wants everything warm
        forward(model, x, nullcontext()).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(model, x, offload).backward()
    graph.replay()
    assert_same(gradients(model), expected)
    stats = offload.stats()
    assert stats.offloaded_bytes == 0
    assert stats.skipped["capture"] > 0


def test_the_device_holds_less_while_the_tensors_are_away(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DeviceWindow, "limit", property(lambda _: 0, lambda *_: None), raising=False
    )
    model, x = network(), batch()
    plain(model, x)
    before = torch.cuda.memory_allocated()
    kept = forward(model, x, nullcontext())
    held = torch.cuda.memory_allocated() - before
    del kept
    offload = client.offload(model, min_bytes=1)
    loss = forward(model, x, offload)
    wait_until(lambda: offload.stats().stored_bytes > 0)
    away = torch.cuda.memory_allocated() - before
    loss.backward()
    model.zero_grad(set_to_none=True)
    assert away < 0.3 * held, f"{away} of {held} bytes stay"


def test_memory_stays_flat_over_many_steps(client: storm.Client) -> None:
    model, x = network(), batch()
    offload = client.offload(model, min_bytes=1)
    sizes = []
    for number in range(200):
        rows = x[: 512 + number % 7 * 64]  # shapes change, segments are freed and reused
        loss = forward(model, rows, offload)
        if number % 3:
            loss.backward()
        del loss
        model.zero_grad(set_to_none=True)
        if number % 40 == 39:
            torch.cuda.empty_cache()
            gc.collect()
            sizes.append(torch.cuda.memory_allocated())
    assert len(set(sizes)) == 1, sizes


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what the daemon has mapped, and read where it lies."""
    from storm_client.lanes.cuda import _InPlace  # its bindings are only where a GPU is

    found: list[int] = []
    find = _InPlace.find

    def counted(self: _InPlace, address: int, nbytes: int) -> Mapped | None:
        place = find(self, address, nbytes)
        if place is not None:
            found.append(nbytes)
        return place

    monkeypatch.setattr(_InPlace, "find", counted)
    return found


def until(read: list[int], step: Callable[[], None]) -> None:
    """Make steps until tensors are read where they lie: their memory is mapped."""
    deadline = time.monotonic() + 60
    while not read:
        assert time.monotonic() < deadline, "nothing was read where it lies"
        step()


def lane_of(client: storm.Client) -> Lane:
    session = client._supply.sessions.of(torch.device("cuda", 0))
    assert session is not None
    return session.lane


def train(client: storm.Client) -> None:
    """Take steps with offload, whose gradients have to be those without."""
    model, x = network(), batch()
    expected = plain(model, x)
    offload = client.offload(model, min_bytes=1)
    for _ in range(5):
        forward(model, x, offload).backward()
        assert_same(gradients(model), expected)
    assert_offloaded(offload)


def test_what_can_be_mapped_needs_no_staging_area(client: storm.Client, read: list[int]) -> None:
    train(client)
    assert read
    assert lane_of(client)._shared.area is None


def test_what_cannot_be_mapped_passes_through_a_staging_area(
    client: storm.Client, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, offer = lane_of(client), Segments._offer
    monkeypatch.setattr(
        Segments, "_offer", lambda self, one: None if one.number else offer(self, one)
    )
    train(client)
    assert lane._shared.area is not None


@pytest.mark.parametrize("codec", ["ancf", "raw"])
def test_what_is_read_where_it_lies_comes_back(
    client: storm.Client, read: list[int], codec: str
) -> None:
    model, x = network(), batch()
    expected = plain(model, x)
    offload = client.offload(model, min_bytes=1, codec=codec)

    def step() -> None:
        read.clear()
        before = offload.stats().offloaded_bytes
        forward(model, x, offload).backward()
        assert_same(gradients(model), expected)
        if sum(read) < 0.8 * (offload.stats().offloaded_bytes - before):
            read.clear()

    until(read, step)


def test_a_change_right_after_saving_is_noticed(client: storm.Client, read: list[int]) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)  # 4 times the staging area

    def step() -> None:
        with offload:
            h = x.exp()
            loss = (h * h.cos()).sum()
        with torch.no_grad():
            h.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    until(read, step)


def test_a_storage_freed_before_it_is_read_raises(client: storm.Client, read: list[int]) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)

    def step() -> None:
        with offload:
            h = x * 2
            loss = h.cos().sum()
        h.untyped_storage().resize_(0)
        if read:
            with pytest.raises(storm.ActivationLost, match="resized"):
                loss.backward()

    until(read, step)


def used_bytes() -> int:
    """Return what all processes hold on the device."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.alone
def test_freed_memory_is_given_back(client: storm.Client, read: list[int]) -> None:
    model, x = network(), batch()
    offload = client.offload(model, min_bytes=1)
    forward(model, x, offload).backward()
    before = used_bytes()
    until(read, lambda: forward(model, x.repeat(16, 1), offload).backward())
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    with offload:
        pass
    wait_until(lambda: used_bytes() <= before, 30, lambda: (used_bytes(), before))


def test_running_out_of_memory_gives_it_back_at_once(client: storm.Client, read: list[int]) -> None:
    model, x = network(), batch()
    offload = client.offload(model, min_bytes=1)
    forward(model, x, offload).backward()
    before = used_bytes()
    until(read, lambda: forward(model, x.repeat(16, 1), offload).backward())
    model.zero_grad(set_to_none=True)
    gc.collect()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 46, device="cuda")
    assert used_bytes() <= before
