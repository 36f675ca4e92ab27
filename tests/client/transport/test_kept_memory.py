"""What a step keeps may be offloaded in its midst, and the backward pass finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.transport import kept_memory
from storm_client.transport.kept_memory import kept_bytes
from storm_client.transport.session import Session
from support.daemon_thread import DaemonThread
from support.following import PATHS, Followed, follow_by
from support.in_place_lane import InPlaceCpuLane
from support.planning import SOME_REPLAYS, replay_all
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

CPU = torch.device("cpu")
SIDE = 128
NBYTES = SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "MIN_BYTES", NBYTES)


@pytest.fixture(params=PATHS)
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return follow_by(request.param, monkeypatch)


def forward(weight: Tensor) -> Tensor:
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE)
    for _ in range(4):
        x = (x @ weight).tanh()
    return x


def gradient_of(loss: Tensor, weight: Tensor) -> Tensor:
    weight.grad = None
    loss.backward()
    return weight.grad.clone()


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(3)
    return (torch.randn(SIDE, SIDE) / SIDE**0.5).requires_grad_()


def session_of(client: storm.Client) -> Session:
    found = client._supply.sessions.of(CPU)
    assert found is not None
    return found


def test_a_backward_pass_finds_what_was_offloaded_in_its_midst(
    client: storm.Client, weight: Tensor, followed: Followed
) -> None:
    expected = gradient_of(forward(weight).sum(), weight)
    offload = client.offload(min_bytes=1024, budget=1.0)
    session = session_of(client)
    for step in range(8):
        with offload:
            loss = forward(weight).sum()
        kept = kept_bytes(CPU)
        moved = session.memory.offload_kept() if step % 2 else 0
        if step > 3:
            assert kept >= 3 * NBYTES
        assert moved <= kept
        if step > 3 and moved:
            assert moved >= 3 * NBYTES
            assert kept_bytes(CPU) <= kept - moved
            session.settle(30)
            assert client.status().entries >= 3
        assert torch.equal(gradient_of(loss, weight), expected)
        del loss
    assert kept_bytes(CPU) == 0
    assert any(followed) is followed.may_be_compiled


def test_what_others_are_recomputed_from_can_be_moved(
    client: storm.Client, weight: Tensor, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products, which autograd does not save."""
    replay_all(monkeypatch, SOME_REPLAYS)
    expected = gradient_of(forward(weight).sum(), weight)
    offload = client.offload(min_bytes=1024, budget=0.5)
    for step in range(8):
        with offload:
            loss = forward(weight).sum()
        kept = kept_bytes(CPU)
        moved = session_of(client).memory.offload_kept()
        assert torch.equal(gradient_of(loss, weight), expected)
        if step > 3:
            assert moved == kept >= NBYTES
    assert offload.stats().replayed_bytes
    assert any(followed) is followed.may_be_compiled


def test_what_wraps_tensors_is_left_alone(client: storm.Client, weight: Tensor) -> None:
    """Its own storage has a size and no memory."""
    gradients = []
    for context in (nullcontext(), client.offload(min_bytes=1024)):
        wrapped = TwoTensor(weight.detach(), weight.detach() + 1).requires_grad_()
        with context:
            loss = (wrapped * 2).tanh().sum()
        assert kept_bytes(CPU) == 0
        assert session_of(client).memory.offload_kept() == 0
        loss.backward()
        gradients.append(wrapped.grad)
    assert torch.equal(gradients[0].a, gradients[1].a)
    assert torch.equal(gradients[0].b, gradients[1].b)


def test_what_somebody_holds_is_left_alone(
    client: storm.Client, weight: Tensor, followed: Followed
) -> None:
    offload = client.offload(min_bytes=1024, budget=1.0)
    for _ in range(5):
        with offload:
            result = forward(weight)
            loss = result.sum() + result.square().sum()
        before = session_of(client).memory.offload_kept()
        address = result.data_ptr()
        loss.backward()
        assert result.data_ptr() == address
    assert before == 3 * NBYTES  # all tanh but the last


def test_a_change_in_place_is_noticed_of_what_was_moved(
    client: storm.Client, weight: Tensor, followed: Followed
) -> None:
    offload = client.offload(min_bytes=1024, budget=1.0)
    for changes in (False, False, False, False, True):
        with offload:
            hidden = (weight * 2).tanh()
            loss = hidden.exp().sum()
            if changes:
                with torch.no_grad():
                    hidden.mul_(2)
            del hidden
        session_of(client).memory.offload_kept()
        if not changes:
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_thread_may_unpack_what_another_moves(
    client: storm.Client, weight: Tensor, followed: Followed
) -> None:
    expected = gradient_of(forward(weight).sum(), weight)
    offload = client.offload(min_bytes=1024, budget=1.0)
    session, ends = session_of(client), threading.Event()

    def move() -> None:
        while not ends.is_set():
            session.memory.offload_kept()

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for _ in range(12):
            with offload:
                loss = forward(weight).sum()
            assert torch.equal(gradient_of(loss, weight), expected)
            del loss
    finally:
        ends.set()
        thread.join(60)
    assert not thread.is_alive()


def test_room_is_made_of_what_is_held_back(
    make_late_daemon: Callable[..., DaemonThread], lanes: list[InPlaceCpuLane], weight: Tensor
) -> None:
    expected = gradient_of(forward(weight).sum(), weight)
    daemon = make_late_daemon()
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        offload = client.offload(min_bytes=1024)
        session = session_of(client)
        for _ in range(3):
            with offload:
                loss = forward(weight).sum()
            session.memory.make_room()
            with session.connection.lock:
                assert session.transfers.held.nbytes == 0
                assert session.transfers.prefetched_bytes == 0
                session.transfers.assert_invariants()
            assert torch.equal(gradient_of(loss, weight), expected)
            del loss
