"""A session for the cache: what goes wrong gives its staging area and its put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from storm_client.cache import session as cache_session
from storm_client.cache.session import CacheSession
from storm_client.errors import (
    ActivationLost,
    CorruptBlob,
    ProtocolMismatch,
    QuotaExceeded,
    StormError,
    UsageError,
)
from storm_client.lanes import Slot
from storm_client.lanes.cpu import CpuLane
from storm_client.transport.transfer import Transfer
from support.daemon_process import DaemonProcess, daemons
from support.waiting import wait_until

from stormd.protocol import (
    CacheCancel,
    CacheFind,
    CacheFound,
    CacheGet,
    CacheTensor,
    Envelope,
    Failed,
    Message,
    Rejected,
    Restored,
)

PART = 64 << 10
STAGING = 4 * PART


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with daemons() as make:
        yield make(
            "--pool-bytes=16MiB",
            "--cache-bytes=1MiB",
            f"--staging-bytes-cpu={STAGING}",
            f"--part-bytes-cpu={PART}",
        )


@pytest.fixture
def lane() -> CpuLane:
    return CpuLane()


@pytest.fixture
def session(daemon: DaemonProcess, lane: CpuLane) -> Iterator[CacheSession]:
    """A session; after the test all of its staging area is free and it holds nothing."""
    session = CacheSession(daemon.address, lane, 10.0)
    yield session
    transfers = session._transfers
    space = transfers._space
    wait_until(lambda: space.free_bytes == STAGING, 10.0, lambda: space.free_bytes)
    transfers.assert_invariants()
    assert not transfers._pending
    assert not transfers.incoming
    assert session.ask(CacheCancel()) == CacheFound(found=False)
    session.close()


def data(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def put(session: CacheSession, name: str, tensor: torch.Tensor) -> None:
    session.put(name, torch.uint8, list(tensor.shape), 0.0, tensor)


def fetch(session: CacheSession, name: str) -> torch.Tensor:
    found = session.ask(CacheGet(name))
    assert isinstance(found, CacheTensor)
    return session.fetch(found)


def test_a_name_changes_its_meaning_only_with_a_whole_put(
    session: CacheSession, lane: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data(3 * PART)
    put(session, "a", before)
    stage, calls = lane.stage, []

    def fails_the_third_time(source: torch.UntypedStorage, begin: int, slot: Slot) -> None:
        calls.append(slot)
        if len(calls) == 3:
            raise MemoryError("no more")
        stage(source, begin, slot)

    with monkeypatch.context() as patch:
        patch.setattr(lane, "stage", fails_the_third_time)
        with pytest.raises(MemoryError):
            put(session, "a", data(5 * PART))
    assert torch.equal(fetch(session, "a"), before)
    put(session, "a", data(5 * PART))


def test_a_fetch_that_fails_lets_go_of_what_is_under_way(
    session: CacheSession, lane: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(session, "a", data(8 * PART))

    def fails(slot: Slot, destination: torch.UntypedStorage, begin: int) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(lane, "unstage", fails)
        with pytest.raises(MemoryError):
            fetch(session, "a")
    assert fetch(session, "a").numel() == 8 * PART


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("quota", QuotaExceeded), ("draining", StormError)],
)
def test_a_part_that_is_rejected_ends_the_put(
    session: CacheSession,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    kind: type[StormError],
) -> None:
    stores, connection = session._transfers.stores, session._connection
    store = stores.store

    def rejects(*told: Any) -> Transfer:
        """Have the daemon not hear of the store, and answer it itself."""
        transfer = store(*told)
        assert connection.outbox.pop().request == transfer.number
        answer = Rejected(transfer.number, reason, "because")
        connection._messages._inbox.append(Envelope(transfer.number, answer))
        return transfer

    with monkeypatch.context() as patch:
        patch.setattr(stores, "store", rejects)
        with pytest.raises(kind, match="because"):
            put(session, "rejected", data(PART))
    assert session.ask(CacheFind("rejected")) == CacheFound(found=False)


def test_a_damaged_part_is_raised_and_nothing_returned(
    session: CacheSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(session, "a", data(6 * PART))
    on_message = session.on_message
    restored: list[int] = []

    def damages_the_second(request: int, message: object) -> None:
        if isinstance(message, Restored):
            restored.append(message.ticket)
            if len(restored) == 2:
                message = Failed(message.ticket, 1, "CorruptBlob", "damaged")
        on_message(request, message)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "on_message", damages_the_second)
    with pytest.raises(CorruptBlob, match="damaged"):
        fetch(session, "a")


def test_nothing_is_fetched_in_a_capture(
    session: CacheSession, lane: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of the graph would not have the daemon bring the bytes again."""
    tensor = data(PART)
    put(session, "a", tensor)
    with monkeypatch.context() as capture:
        capture.setattr(lane, "is_capturing", lambda: True)
        with pytest.raises(UsageError, match="CUDA graph"):
            fetch(session, "a")
    assert torch.equal(fetch(session, "a"), tensor)


def test_what_was_released_cannot_be_fetched(session: CacheSession) -> None:
    put(session, "a", data(PART))
    found = session.ask(CacheGet("a"))
    assert isinstance(found, CacheTensor)
    session.fetch(found)
    with pytest.raises(ActivationLost, match="does not exist or was released"):
        session.fetch(found)


def test_a_daemon_that_knows_no_cache_leaves_nothing_open(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_session, "CACHE_FEATURE", "another feature")
    with pytest.raises(ProtocolMismatch, match="knows no cache"):
        CacheSession(daemon.address, CpuLane(), 10.0)


def test_a_get_without_memory_for_it_returns_what_it_was_lent(
    session: CacheSession, lane: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for one: it could not be replaced, were it lent still."""
    tensor = data(9 * PART)
    put(session, "a", tensor)

    def allocate(nbytes: int) -> torch.Tensor:
        raise MemoryError(nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(lane, "allocate", allocate)
        with pytest.raises(MemoryError):
            fetch(session, "a")
    put(session, "b", tensor)
    assert torch.equal(fetch(session, "b"), tensor)


def interrupted(request: Callable[[], object], session: CacheSession) -> None:
    """Make a request, with Ctrl-C before its answer."""
    connection = session._connection

    def send(number: int, message: Message) -> None:
        patched.undo()
        connection.post(number, message)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connection, "send", send)
        with pytest.raises(KeyboardInterrupt):
            request()


def test_a_put_that_is_interrupted_as_it_begins_is_no_longer_open(session: CacheSession) -> None:
    interrupted(lambda: put(session, "a", data(PART)), session)
    tensor = data(PART)
    put(session, "a", tensor)
    assert torch.equal(fetch(session, "a"), tensor)


def test_a_get_that_is_interrupted_returns_what_it_was_lent(session: CacheSession) -> None:
    """The cache has room for one: it could not be replaced, were it lent still."""
    tensor = data(9 * PART)
    put(session, "a", tensor)
    interrupted(lambda: session.ask(CacheGet("a")), session)
    session.ask(CacheFind("a"))  # answered after the interrupted one
    put(session, "b", tensor)
