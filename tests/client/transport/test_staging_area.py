"""The staging area is made only for what the daemon cannot map: then once, whatever strikes."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.transport import store
from storm_client.transport.session import Session
from support.chains import chain, gradient, leaf
from support.daemon_process import served_by
from support.daemon_thread import DaemonThread
from support.in_place_lane import InPlaceCpuLane
from support.interrupting import interrupted_after
from support.late_lane import LateCpuLane
from support.mapping_client import MappingCpuLane, MappingInPlace, no_memory
from support.mapping_lane import LateMappingLane, MappingLane
from support.other_lanes import daemon_with_lane, end
from support.waiting import wait_until
from torch import Tensor

MIB = 1 << 20
LENGTH = 8


@pytest.fixture
def lane_kind() -> type[InPlaceCpuLane]:
    return MappingCpuLane


@pytest.fixture
def late_lane_kind() -> type[LateCpuLane]:
    class Lane(LateMappingLane):
        opened: ClassVar[list[MappingLane]] = []

    return Lane


@pytest.fixture
def daemon(make_late_daemon: Callable[..., DaemonThread]) -> DaemonThread:
    return make_late_daemon(staging_bytes_cpu=512 * MIB)


@pytest.fixture
def client(daemon: DaemonThread) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client


@pytest.fixture
def session(client: storm.Client) -> Iterator[Session]:
    found = client._supply.sessions.of(torch.device("cpu"))
    yield found
    with found.connection.lock:
        found.transfers.assert_invariants()


@pytest.fixture
def way(client: storm.Client, lanes: list[MappingCpuLane]) -> MappingInPlace:
    found = lanes[0].in_place
    assert found is not None
    return found


@pytest.fixture
def mapper(client: storm.Client, late_lane_kind: type[LateMappingLane]) -> LateMappingLane:
    """The daemon's lane."""
    (opened,) = late_lane_kind.opened
    return opened


def forward(offload: storm.Offload, x: Tensor) -> Tensor:
    with offload:
        loss = chain(x, LENGTH)
    offload.stats()
    return loss


def assert_right(offload: storm.Offload) -> None:
    """Check a step's gradient."""
    x = leaf()
    loss = forward(offload, x)
    assert torch.equal(gradient(loss, x), gradient(chain(x, LENGTH), x))
    del loss


def test_what_can_be_mapped_needs_none(
    client: storm.Client, session: Session, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    offload = client.offload(min_bytes=1, replay=False)
    for _ in range(2):
        assert_right(offload)
    assert way.made == 0
    assert not session.transfers.has_staging
    assert way.found > LENGTH
    assert way.came_back
    assert 0 not in mapper.offered


def test_what_cannot_be_mapped_has_it_made(
    client: storm.Client, session: Session, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    mapper.refuses = bool
    offload = client.offload(min_bytes=1, replay=False)
    for _ in range(2):
        assert_right(offload)
    assert way.made == 1
    assert way.found == 0
    assert mapper.offered.count(0) == 1
    assert offload.stats().offloaded_bytes > LENGTH * MIB


def test_one_refusal_is_enough(
    client: storm.Client, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    mapper.refuses = lambda segment: segment == 1
    offload = client.offload(min_bytes=1, replay=False)
    for _ in range(2):
        assert_right(offload)
    assert way.made == 1
    assert way.found
    assert mapper.offered.count(0) == 1


def test_a_daemon_that_answers_no_offer_is_slow(
    client: storm.Client,
    way: MappingInPlace,
    mapper: LateMappingLane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.05)
    mapper.is_held = True
    offload = client.offload(min_bytes=1, replay=False)
    assert_right(offload)
    assert set(offload.stats().kept) == {"daemon_slow"}
    assert way.made == 0


def test_without_memory_for_it_the_tensors_are_kept(
    client: storm.Client, session: Session, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    mapper.refuses, way.makes_room = bool, no_memory
    offload = client.offload(min_bytes=1, replay=False)
    assert_right(offload)
    assert set(offload.stats().kept) == {"no_staging"}
    assert offload.stats().offloaded_bytes == 0
    way.makes_room = lambda: None
    assert_right(offload)
    assert session.transfers.has_staging
    assert offload.stats().offloaded_bytes


def test_a_daemon_that_refuses_it_has_the_tensors_kept(
    client: storm.Client, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    mapper.refuses = lambda segment: True
    offload = client.offload(min_bytes=1, replay=False)
    for _ in range(2):
        assert_right(offload)
    assert set(offload.stats().kept) == {"no_staging"}
    assert mapper.offered.count(0) == 1


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["makes_room", "interrupts_made"])
def test_an_interrupt_while_it_is_made(
    when: str, client: storm.Client, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    mapper.refuses = bool
    setattr(way, when, interrupt)
    offload = client.offload(min_bytes=1, replay=False)
    with pytest.raises(KeyboardInterrupt):
        forward(offload, leaf())
    setattr(way, when, lambda: None)
    assert_right(offload)
    assert way.made == 1
    assert mapper.offered.count(0) == 1


def test_an_interrupt_while_its_answer_is_awaited(
    client: storm.Client,
    session: Session,
    way: MappingInPlace,
    mapper: LateMappingLane,
    daemon: DaemonThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapper.refuses = bool
    offload = client.offload(min_bytes=1, replay=False)
    wait, offer = session.connection.wait, way.offer_staging

    def hold_up(address: int) -> None:
        mapper.is_held = True
        offer(address)

    def wait_until_offered(deadline: float, every: float = 1.0) -> bool:
        if 0 in mapper.offered:
            raise KeyboardInterrupt
        return wait(deadline, every)

    with monkeypatch.context() as patch:
        patch.setattr(way, "offer_staging", hold_up)
        patch.setattr(session.connection, "wait", wait_until_offered)
        with pytest.raises(KeyboardInterrupt):
            forward(offload, leaf())
    assert not session.transfers.has_staging
    daemon.on_loop(mapper.answer)
    assert_right(offload)
    assert session.transfers.has_staging
    assert (way.made, mapper.offered.count(0)) == (1, 1)


def stored(client: storm.Client, x: Tensor) -> Tensor:
    """Return the loss of a step whose saved tensors are with the daemon, except for the last."""
    session = client._supply.sessions.of(torch.device("cpu"))
    session.transfers.window.limit = session.transfers.window._ceiling = MIB
    loss = forward(client.offload(min_bytes=1, replay=False), x)
    with session.connection.lock:
        session._outbound.release_all_sources()
    session.settle(30)
    return loss


def test_a_restore_waits_for_the_answer_and_prefetching_does_not(
    client: storm.Client,
    session: Session,
    way: MappingInPlace,
    mapper: LateMappingLane,
    daemon: DaemonThread,
) -> None:
    """Where what is restored goes to was never offered before."""
    x = leaf()
    loss = stored(client, x)
    mapper.is_held, seen = True, len(mapper.offered)
    way.spare = 32 * MIB
    thread = threading.Thread(target=loss.backward)
    thread.start()
    wait_until(lambda: len(mapper.offered) > seen or not thread.is_alive())
    assert thread.is_alive()
    daemon.on_loop(mapper.answer)
    thread.join()
    assert torch.equal(x.grad, gradient(chain(x, LENGTH), x))
    assert way.came_back
    assert way.made == 0
    del loss


def test_a_restore_into_memory_that_cannot_be_mapped_has_it_made(
    client: storm.Client, session: Session, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    x = leaf()
    loss = stored(client, x)
    last = max(mapper.offered)
    mapper.refuses = lambda segment: segment > last
    loss.backward()
    assert torch.equal(x.grad, gradient(chain(x, LENGTH), x))
    assert (way.made, mapper.offered.count(0)) == (1, 1)
    del loss


def test_a_restore_without_memory_for_it_can_be_repeated(
    client: storm.Client, session: Session, way: MappingInPlace, mapper: LateMappingLane
) -> None:
    x = leaf()
    loss = stored(client, x)
    last = max(mapper.offered)
    mapper.refuses, way.makes_room = (lambda segment: segment > last), no_memory
    with pytest.raises(storm.UsageError, match="no staging area"):
        loss.backward(retain_graph=True)
    way.makes_room, x.grad = (lambda: None), None
    loss.backward()
    assert torch.equal(x.grad, gradient(chain(x, LENGTH), x))
    assert way.made == 1
    del loss


def test_an_interrupt_at_any_moment_leaves_a_step_that_works(
    daemon: DaemonThread,
    lanes: list[MappingCpuLane],
    late_lane_kind: type[LateMappingLane],
) -> None:
    (mapper,) = late_lane_kind.opened
    mapper.refuses = bool
    chance, fired = random.Random(1), []
    for number in range(30):
        with storm.connect(daemon.address, embedded="never", timeout=30) as client:
            offload, seen = client.offload(min_bytes=1, replay=False), mapper.offered.count(0)
            with suppress(KeyboardInterrupt), interrupted_after(chance.random() * 0.02, fired):
                assert_right(offload)
                wait_until(lambda: len(fired) > number)  # noqa: B023 - called in this iteration
            assert len(fired) == number + 1
            assert_right(offload)
            found = lanes[-1].in_place
            assert found is not None
            assert (found.made, mapper.offered.count(0) - seen) == (1, 1)
            assert set(offload.stats().kept) <= {"needed_at_once"}


@pytest.fixture
def refusing() -> Iterator[ChildDaemon]:
    """A daemon that maps nothing but a staging area, and outlives its process."""
    flags = [
        "--device=cpu", "--resumable", "--resume-seconds=120", "--pool-bytes=64MiB",
        "--cache-bytes=1MiB", "--staging-bytes-cpu=256MiB",
    ]  # fmt: skip
    with daemon_with_lane("refusing_daemon", flags) as child:
        yield child


@pytest.mark.parametrize("is_open", [False, True])
def test_it_goes_on_with_another_daemon(
    is_open: bool, refusing: ChildDaemon, lanes: list[MappingCpuLane]
) -> None:
    """Another daemon maps it again; if there was none yet, it is made for the other."""
    x = leaf()
    with storm.connect(refusing.address, embedded="never", timeout=60) as client:
        offload = client.offload(min_bytes=1, replay=False)
        before = forward(offload, x) if is_open else None
        end(served_by(refusing), signal.SIGKILL)
        assert_right(offload)
        if before is not None:
            assert torch.equal(gradient(before, x), gradient(chain(x, LENGTH), x))
        found = lanes[0].in_place
        assert found is not None
        assert found.made == 1
        assert offload.stats().offloaded_bytes >= LENGTH * MIB
        del before
