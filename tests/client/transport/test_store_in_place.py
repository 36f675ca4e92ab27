"""Stores that the daemon reads where the tensor lies: what stays, what goes, what raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import storm_client as storm
import torch
from storm_client.transport.session import Session
from support.chains import chain, gradient, leaf
from support.daemon_thread import DaemonThread
from support.in_place_lane import FakeInPlace, InPlaceCpuLane
from support.waiting import wait_until

from stormd.protocol import MapSegment

Make = Callable[..., DaemonThread]


def connected(daemon: DaemonThread, lanes: list[InPlaceCpuLane]) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)
        assert client.status().pool.used_bytes == 0


@pytest.fixture
def client(make_late_daemon: Make, lanes: list[InPlaceCpuLane]) -> Iterator[storm.Client]:
    yield from connected(make_late_daemon(), lanes)


@pytest.fixture
def full(make_late_daemon: Make, lanes: list[InPlaceCpuLane]) -> Iterator[storm.Client]:
    yield from connected(make_late_daemon(pool_bytes=4 << 20), lanes)


@pytest.fixture
def way(lanes: list[InPlaceCpuLane], request: pytest.FixtureRequest) -> FakeInPlace:
    request.getfixturevalue("client")
    found = lanes[0].in_place
    assert found is not None
    return found


def test_gradients_are_the_same(client: storm.Client, way: FakeInPlace) -> None:
    x = leaf()
    expected = gradient(chain(x), x)
    offload = client.offload(min_bytes=1, replay=False)
    for _ in range(3):
        with offload:
            loss = chain(x)
        assert torch.equal(gradient(loss, x), expected)
        del loss
    assert way.found > 10
    assert set(offload.stats().kept) == {"needed_at_once"}


def test_a_client_that_would_not_wait_is_noticed(
    client: storm.Client, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else these tests would prove nothing: what is let go unread has other bytes by then."""
    monkeypatch.setattr(
        way, "wait_before_reuse", lambda sequence, source: way.overtaken.append(sequence)
    )
    x = leaf()
    expected = gradient(chain(x), x)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x)
    assert not torch.equal(gradient(loss, x), expected)
    assert way.overtaken
    del loss


def test_no_more_than_may_be_held_is_let_go_unread(client: storm.Client, way: FakeInPlace) -> None:
    """A host that ran on would have the pool promise room for all that its device has yet to do."""
    way.stands_still = True
    x = leaf()
    most = InPlaceCpuLane.budget_bytes // x.nbytes + 1
    offload = client.offload(min_bytes=1)

    def save() -> torch.Tensor:
        with offload:
            return chain(x)

    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(save)
        wait_until(lambda: len(way.overtaken) >= most)
        time.sleep(0.1)
        assert len(way.overtaken) == most
        assert not saving.done()
        way.read = 1 << 40
        session = client._supply.sessions.of(torch.device("cpu"))
        wait_until(lambda: looks_again(session) or saving.done())
        assert torch.equal(gradient(saving.result(), x), gradient(chain(x), x))
    assert way.found > most + 2


def looks_again(session: Session) -> None:
    """Have whoever waits look again, as answers do that come once a source has been read."""
    with session.connection.lock:
        session.connection.notify()


def test_a_full_pool_keeps_the_sources(full: storm.Client, lanes: list[InPlaceCpuLane]) -> None:
    x = leaf()
    expected = gradient(chain(x), x)
    offload = full.offload(min_bytes=1, codec="raw")
    with offload:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected)
    assert offload.stats().kept["pool_full"]
    del loss


def test_a_storage_resized_before_its_turn_to_go_is_an_error(
    client: storm.Client, way: FakeInPlace
) -> None:
    x = leaf()
    offload = client.offload(min_bytes=1)
    with offload:
        h = x * 2
        first = h.cos()
        h.untyped_storage().resize_(0)
        loss = chain(first)
    with pytest.raises(storm.ActivationLost, match="resized"):
        loss.backward()
    del h, first, loss


def test_closing_while_another_thread_sweeps_or_gives_memory_back(
    client: storm.Client, lanes: list[InPlaceCpuLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first: what is closed has nothing to sweep."""
    other = storm.connect(client.address, embedded="never", timeout=30)
    session, way = other._supply.sessions.of(torch.device("cpu")), lanes[-1].in_place
    swept, go_on = threading.Event(), threading.Event()

    def sweep() -> bool:
        swept.set()
        assert go_on.wait(30)
        return True

    monkeypatch.setattr(way, "sweep", sweep)
    monkeypatch.setattr(way, "barrier", lambda: MapSegment(segment=1, handle=b"", nbytes=1))
    with ThreadPoolExecutor(2) as threads:
        sweeping = threads.submit(session.memory.unmap_freed_memory)
        assert swept.wait(30)
        closing = threads.submit(session.close)
        go_on.set()
        sweeping.result(30)
        closing.result(30)
    session.sweep()
    session.memory.unmap_freed_memory()
    other.close()
