"""Restores into memory that the daemon maps: early, in full, or an error."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import storm_client as storm
import torch
from storm_client.transport import restore as restore_module
from storm_client.transport import timeouts as patience_module
from storm_client.transport.session import Session
from support.chains import chain, gradient, leaf
from support.daemon_thread import DaemonThread
from support.in_place_lane import FakeInPlace, InPlaceCpuLane
from support.waiting import wait_until
from torch import Tensor

from stormd.protocol import Failed, Message, Restored, RestoredParts

MIB = 1 << 20


@pytest.fixture
def daemon(make_late_daemon: Callable[..., DaemonThread]) -> DaemonThread:
    return make_late_daemon(pool_bytes=64 * MIB, staging_bytes_cpu=64 * MIB)


@pytest.fixture
def client(daemon: DaemonThread, lanes: list[InPlaceCpuLane]) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client


@pytest.fixture
def way(client: storm.Client, lanes: list[InPlaceCpuLane]) -> FakeInPlace:
    found = lanes[0].in_place
    assert found is not None
    return found


def test_what_comes_back_is_written_where_it_is_used(
    client: storm.Client, way: FakeInPlace
) -> None:
    x = leaf()
    expected = gradient(chain(x, 8), x)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = chain(x, 8)
    assert torch.equal(gradient(loss, x), expected)
    assert way.came_back == way.found - 2  # the newest were held
    del loss


class Pause(torch.autograd.Function):
    """Stops a backward pass until it may go on."""

    reached: threading.Event
    go_on: threading.Event

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        Pause.reached.set()
        assert Pause.go_on.wait(30)
        return grad


def paused(offload: storm.Offload, x: Tensor) -> tuple[threading.Thread, Tensor]:
    """Begin a backward pass that has unpacked one tensor and waits, with the rest ahead of it."""
    Pause.reached, Pause.go_on = threading.Event(), threading.Event()
    with offload:
        h = x * 1
        for _ in range(12):
            h = h.cos()
        h = Pause.apply(h).exp() * 1
        loss = (h * 2).exp().sum()
    offload.stats()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert Pause.reached.wait(30)
    return thread, loss


@pytest.mark.parametrize(("spare", "ahead"), [(0, 3), (12 * MIB, 6)])
def test_as_much_comes_early_as_there_is_memory(
    client: storm.Client, way: FakeInPlace, daemon: DaemonThread, spare: int, ahead: int
) -> None:
    session = client._supply.sessions.of(torch.device("cpu"))
    session.transfers.window._ceiling = 32 * MIB
    way.spare = spare
    x = leaf()
    thread, loss = paused(client.offload(min_bytes=1), x)
    transfers = session.transfers
    wait_until(lambda: not transfers._pending, 30, lambda: transfers._pending)
    assert len(transfers.incoming) == ahead
    Pause.go_on.set()
    thread.join(30)
    assert x.grad is not None
    del loss


def test_what_nobody_wants_any_more_is_let_go(client: storm.Client, way: FakeInPlace) -> None:
    x = leaf()
    session = client._supply.sessions.of(torch.device("cpu"))
    transfers = session.transfers
    thread, loss = paused(client.offload(min_bytes=1), x)
    with session.connection.lock:
        transfers.cancel_prefetched()
    wait_until(lambda: not transfers.prefetched_bytes, 30, lambda: transfers.prefetched_bytes)
    Pause.go_on.set()
    thread.join(30)
    assert x.grad is not None
    del loss
    assert not transfers.incoming


def test_a_damaged_blob_is_an_error(
    client: storm.Client, way: FakeInPlace, daemon: DaemonThread
) -> None:
    model = torch.nn.Linear(4, 4)
    model.weight.register_hook(lambda _: None)  # which has the host wait before anything is used
    offload = client.offload(model, min_bytes=1)
    x = leaf()
    with offload:
        loss = chain(x, 8)
    offload.stats()
    pool = daemon.server._pool
    ctypes.memset(pool.address + 300, 0x55, 8 * MIB)
    with pytest.raises(storm.CorruptBlob):
        loss.backward()
    assert x.grad is None
    transfers = client._supply.sessions.of(torch.device("cpu")).transfers
    del loss
    wait_until(lambda: not transfers._pending, 30, lambda: transfers._pending)


@contextmanager
def restores_unheard(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have answers about restores come only behind what is inside, which waits but for a moment."""
    transfers, unheard = session.transfers, []
    reply = transfers.on_reply

    def without_restores(request: int, message: Message) -> None:
        if isinstance(message, Restored | RestoredParts):
            unheard.append((request, message))
        else:
            reply(request, message)

    with monkeypatch.context() as patch:
        patch.setattr(patience_module, "STALL_SECONDS", 0.2)
        patch.setattr(transfers, "on_reply", without_restores)
        yield
    with session.connection.lock:
        for request, message in unheard:
            reply(request, message)
        transfers.assert_invariants()


@contextmanager
def restores_heard_late(
    session: Session, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Have answers about restores come only once memory was handed out."""
    unheard: list[tuple[int, Message]] = []
    reply, await_restored = session.transfers.on_reply, way.await_restored

    def on_reply(request: int, message: Message) -> None:
        if isinstance(message, Restored | RestoredParts) and not way.handed_out:
            unheard.append((request, message))
        else:
            reply(request, message)

    def hand_out(tickets: Sequence[int]) -> None:
        await_restored(tickets)
        while unheard:
            reply(*unheard.pop(0))

    with monkeypatch.context() as patch:
        patch.setattr(session.transfers, "on_reply", on_reply)
        patch.setattr(way, "await_restored", hand_out)
        yield


def test_a_daemon_that_does_not_deliver_is_an_error(
    client: storm.Client, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may still be writing to is kept until it has answered."""
    offload = client.offload(min_bytes=1)
    x = leaf()
    expected = gradient(chain(x, 8), x)
    with offload:
        loss = chain(x, 8)
    offload.stats()
    session = client._supply.sessions.of(torch.device("cpu"))
    with restores_unheard(session, monkeypatch):
        with pytest.raises(
            storm.ActivationLost,
            match=r"did not restore entry \d+, and answered nothing for 60 s: restart it .*repeat",
        ):
            loss.backward(retain_graph=True)
        assert session.transfers.writes_to_memory()
    loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("is_handed_out", [False, True])
def test_a_daemon_that_answers_others_alone_is_an_error_that_says_so(
    client: storm.Client, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch, is_handed_out: bool
) -> None:
    _x, loss = handed_out(client)
    if not is_handed_out:
        monkeypatch.setattr(way, "waits_on_device", False)
    session = client._supply.sessions.of(torch.device("cpu"))
    for module in (patience_module, restore_module):
        monkeypatch.setattr(module, "LONGEST_SECONDS", 0.1)
    with (
        restores_unheard(session, monkeypatch),
        pytest.raises(
            storm.ActivationLost,
            match=r"and answered only other requests for 0\.1 s: restart it .*repeat the step",
        ),
    ):
        loss.backward()
    assert bool(way.handed_out) == is_handed_out
    del loss


def handed_out(client: storm.Client) -> tuple[Tensor, Tensor]:
    """Return a leaf and a loss of it whose saved tensors are away, none of which comes early."""
    session = client._supply.sessions.of(torch.device("cpu"))
    session.transfers.window.limit = session.transfers.window._ceiling = MIB
    x = leaf()
    with client.offload(min_bytes=1) as offload:
        loss = chain(x, 8)
    offload.stats()
    return x, loss


def test_memory_is_used_before_the_daemon_has_answered(
    client: storm.Client, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client._supply.sessions.of(torch.device("cpu"))
    x, loss = handed_out(client)
    with restores_heard_late(session, way, monkeypatch):
        loss.backward()
    expected = x.detach().clone().requires_grad_()
    assert torch.equal(x.grad, gradient(chain(expected, 8), expected))
    assert way.handed_out
    assert not session.transfers.handed_out  # the pass has ended with all answers
    del loss


def test_outside_of_a_backward_pass_the_host_waits(client: storm.Client, way: FakeInPlace) -> None:
    x, loss = handed_out(client)
    node = loss.grad_fn.next_functions[0][0]
    while (saved := getattr(node, "_saved_self", None)) is None:
        node = node.next_functions[0][0]
    assert saved.shape == x.shape
    assert way.came_back
    assert not way.handed_out
    del loss, node, saved


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_where_a_hook_may_use_a_gradient_the_host_waits(
    client: storm.Client, way: FakeInPlace, hook: str
) -> None:
    model = torch.nn.Linear(4, 4)
    getattr(model.weight, hook)(lambda _: None)
    session = client._supply.sessions.of(torch.device("cpu"))
    session.transfers.window.limit = session.transfers.window._ceiling = MIB
    x = leaf()
    with client.offload(model, min_bytes=1) as offload:
        loss = chain(x, 8)
    offload.stats()
    loss.backward()
    assert way.came_back
    assert not way.handed_out
    del loss


def test_what_was_used_and_is_damaged_ends_the_backward_pass(
    client: storm.Client, way: FakeInPlace, daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    _x, loss = handed_out(client)
    transfers = client._supply.sessions.of(torch.device("cpu")).transfers
    reply, held = transfers.on_reply, []

    def late(request: int, message: Message) -> None:
        held.append((request, message))
        while held and (way.handed_out or not isinstance(held[0][1], Failed)):
            reply(*held.pop(0))

    def await_restored(tickets: Sequence[int]) -> None:
        """Wait for nothing, and hear of failures only now."""
        way.handed_out += len(tickets)
        while way.handed_out and held:
            reply(*held.pop(0))

    monkeypatch.setattr(transfers, "on_reply", late)
    monkeypatch.setattr(way, "await_restored", await_restored)
    pool = daemon.server._pool
    ctypes.memset(pool.address + 300, 0x55, 8 * MIB)
    with pytest.raises(storm.CorruptBlob):
        loss.backward()
    assert way.handed_out
    monkeypatch.setattr(transfers, "on_reply", reply)
    with client._supply.sessions.of(torch.device("cpu")).connection.lock:
        while held:
            reply(*held.pop(0))
    del loss
    wait_until(lambda: not transfers._pending, 30, lambda: transfers._pending)


def test_a_pass_whose_daemon_does_not_answer_ends_in_an_error(
    client: storm.Client, way: FakeInPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon may still be writing to is kept, and no stream waits for it any more."""
    _x, loss = handed_out(client)
    session = client._supply.sessions.of(torch.device("cpu"))
    released, release = [], way.end_waits
    monkeypatch.setattr(way, "end_waits", lambda one: (released.append(one), release(one)))
    with restores_unheard(session, monkeypatch):
        with pytest.raises(storm.ActivationLost, match="answered nothing"):
            loss.backward()
        assert session.transfers.writes_to_memory()
    assert released
    assert not session.transfers.writes_to_memory()
    del loss
