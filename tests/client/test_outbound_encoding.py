"""Stores that this process encodes where the tensor lies: order, room, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import storm_client as storm
import torch
from support.chains import chain, gradient, leaf
from support.coding_lane import CodingCpuLane, FakeCoder
from support.daemon_thread import DaemonThread
from support.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def lane_kind() -> type[CodingCpuLane]:
    return CodingCpuLane


@pytest.fixture
def pool() -> int:
    return 256 * MIB


@pytest.fixture
def area() -> int:
    return 4 * MIB


@pytest.fixture
def results() -> int:
    return 8


@pytest.fixture
def client(
    make_late_daemon: Callable[..., DaemonThread],
    lanes: list[CodingCpuLane],
    pool: int,
    area: int,
    results: int,
) -> Iterator[storm.Client]:
    address = make_late_daemon(pool_bytes=pool, staging_bytes_cpu=area).address
    with storm.connect(address, embedded="never", timeout=30) as client:
        coder = lanes[0].coder
        assert coder is not None
        coder.results = results
        yield client
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)
        assert client.status().pool.used_bytes == 0
        wait_until(lambda: coder.results == results, 30, lambda: coder.results)


@pytest.fixture
def coder(client: storm.Client, lanes: list[CodingCpuLane]) -> FakeCoder:
    found = lanes[0].coder
    assert found is not None
    return found


def test_gradients_are_the_same_though_there_is_little_room(
    client: storm.Client, coder: FakeCoder
) -> None:
    x = leaf()
    expected = gradient(chain(x, 12), x)
    offload = client.offload(min_bytes=1)
    for _ in range(3):
        with offload:
            loss = chain(x, 12)
        assert torch.equal(gradient(loss, x), expected)
        del loss
    assert len(coder.encoded) > 4 * 12  # parts of 256 KiB, 24 MiB through an area of 4
    assert set(offload.stats().kept) == {"needed_at_once"}


@pytest.mark.parametrize(("area", "results"), [(64 * MIB, 64)])
def test_what_is_let_go_has_been_encoded(client: storm.Client, coder: FakeCoder) -> None:
    """With room for all of it nobody has to wait, but for the encoder to have read."""
    x = leaf()
    expected = gradient(chain(x, 12), x)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x, 12)
    assert torch.equal(gradient(loss, x), expected)
    assert not coder.refused
    assert coder.overtaken
    del loss


@pytest.mark.parametrize(("area", "results"), [(64 * MIB, 64)])
def test_a_client_that_would_not_wait_is_noticed(
    client: storm.Client, coder: FakeCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else these tests would prove nothing: what is let go unread has other bytes by then."""
    monkeypatch.setattr(coder, "overtake", lambda sequence, _: coder.overtaken.append(sequence))
    x = leaf()
    expected = gradient(chain(x, 12), x)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x, 12)
    assert not torch.equal(gradient(loss, x), expected)
    assert coder.overtaken
    del loss


def test_sources_go_in_their_order(client: storm.Client, coder: FakeCoder) -> None:
    coder.results = 1
    x = leaf()
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x)
    wait_until(lambda: client.status().entries >= 4)
    coder.results += 7
    first = [coder.encoded[0] + (part << 18) for part in range(4)]
    assert coder.encoded[:4] == first
    assert coder.refused
    del loss


def test_what_waits_for_room_is_used_where_it_is(client: storm.Client, coder: FakeCoder) -> None:
    coder.results = 0
    x = leaf()
    expected = gradient(chain(x, 1), x)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x, 1)
    assert torch.equal(gradient(loss, x), expected)
    assert not coder.encoded
    assert offload.stats().offloaded_bytes == 0
    coder.results = 8


def test_what_has_been_encoded_needs_no_wait(client: storm.Client, coder: FakeCoder) -> None:
    x = leaf()
    offload = client.offload(min_bytes=1)
    for read, waits in ((0, True), (1 << 40, False)):
        coder.read = read
        coder.overtaken.clear()
        with offload:
            loss = chain(x)
        assert bool(coder.overtaken) == waits
        del loss


@pytest.mark.parametrize("pool", [4 * MIB])
def test_a_full_pool_keeps_the_sources(client: storm.Client, coder: FakeCoder) -> None:
    x = leaf()
    expected = gradient(chain(x), x)
    offload = client.offload(min_bytes=1, codec="raw")
    with offload:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected)
    assert offload.stats().kept["pool_full"]
    del loss


@pytest.mark.parametrize("area", [64 * MIB])
def test_a_codec_that_breaks_leaves_it_to_the_daemon(
    client: storm.Client, coder: FakeCoder, lanes: list[CodingCpuLane]
) -> None:
    x = leaf()
    expected = gradient(chain(x), x)
    offload = client.offload(min_bytes=1)
    coder.results = 2
    with offload:
        loss = chain(x)
        coder.able = False
    assert torch.equal(gradient(loss, x), expected)
    with offload:
        again = chain(x)
    assert torch.equal(gradient(again, x), expected)
    assert lanes[0].in_place.found
    coder.results += 6
    del loss, again


def test_a_storage_resized_while_it_waits_is_an_error(
    client: storm.Client, coder: FakeCoder
) -> None:
    coder.results = 0
    x = leaf()
    offload = client.offload(min_bytes=1)
    with offload:
        h = x * 2
        loss = h.cos().sum()
    h.untyped_storage().resize_(0)
    coder.results = 8
    with offload:
        later = (x * 3).cos().sum()  # which also sends what has waited before it
    assert len(coder.encoded) == 4
    with pytest.raises(storm.ActivationLost, match="resized"):
        gradient(loss, x)
    del later
