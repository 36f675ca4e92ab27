"""Restores through the staging area: views of one storage, for as long as needed, or an error."""

from __future__ import annotations

import ctypes
import gc
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import storm_client as storm
import torch
from storm_client.lanes import cpu
from storm_client.lanes.cpu import CpuLane
from storm_client.transport.session import Session
from storm_client.transport.transfers import AHEAD_SHARE
from support.daemon_thread import DaemonThread
from support.devices import DEVICES
from support.waiting import wait_until
from torch import Tensor

from stormd.config import Config

STAGING_BYTES = 8 << 20


@contextmanager
def inner_daemons(staging_bytes: int, part_bytes: int) -> Iterator[DaemonThread]:
    """Start a daemon whose memory the test can reach."""
    with tempfile.TemporaryDirectory(prefix="storm-") as directory:
        daemon = DaemonThread(
            Config(
                address=f"ipc://{directory}/stormd.sock",
                device="cpu",
                pool_bytes=64 << 20,
                cache_bytes=1 << 20,
                staging_bytes_cpu=staging_bytes,
                part_bytes_cpu=part_bytes,
            )
        )
        try:
            yield daemon
            daemon.wait_until_empty()
        finally:
            daemon.stop()


@pytest.fixture
def inner_daemon() -> Iterator[DaemonThread]:
    """The one that most tests need."""
    with inner_daemons(STAGING_BYTES, part_bytes=1 << 20) as daemon:
        yield daemon


def test_a_damaged_block_is_an_error(inner_daemon: DaemonThread) -> None:
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.randn(1 << 18, requires_grad=True)
        with offload:
            loss = x.exp().square().sum()
        offload.stats()
        pool = inner_daemon.server._pool
        ctypes.memset(pool.address + (300 << 10), 0x55, 64 << 10)
        with pytest.raises(storm.CorruptBlob):
            loss.backward()
        assert x.grad is None
        del loss


class Unpacked(torch.autograd.Function):
    """Notes the storages of what its backward gets back."""

    found: list[tuple[int, int, int]]

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        Unpacked.found = [
            (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride(0))
            for tensor in tensors
        ]
        return tuple(torch.ones_like(tensor) for tensor in tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_views_come_back_as_views_of_one_storage(device: str, client: storm.Client) -> None:
    x = torch.randn(128, 96, device=device, requires_grad=True)
    with client.offload(min_bytes=1):
        h = x.exp()
        loss = Unpacked.apply(h, h.t(), h[32:], h[:, ::3])
    del h  # and with it the original storage
    loss.backward()
    assert len({found[0] for found in Unpacked.found}) == 1
    assert [found[1:] for found in Unpacked.found] == [(0, 96), (0, 1), (32 * 96, 96), (0, 96)]


def test_a_restored_storage_is_shared_until_its_last_user(inner_daemon: DaemonThread) -> None:
    """Three operations share one input: it is fetched once, and then it is gone."""
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.randn(1 << 18, requires_grad=True)
        with offload:
            h = x.exp()
            loss = h.sin().sum() + h.cos().sum() + h.square().sum()
        del h
        offload.stats()
        loss.backward()
        restores = inner_daemon.status()["throughput"]["restore"]["operations"]
        assert restores == 1
        del loss


def test_a_session_that_its_daemon_ends_during_a_copy_gives_no_zeros(
    inner_daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shared is given back then, though the client has it mapped."""
    server, copied = inner_daemon.server, cpu.memmove

    def ending(target: int, source: int, nbytes: int) -> None:
        inner_daemon.on_loop(lambda: server._gateway.end_all("shutdown"))
        wait_until(lambda: not inner_daemon.status()["sessions"])
        copied(target, source, nbytes)

    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.randn(1 << 18, requires_grad=True)
        with offload:
            loss = x.exp().square().sum()
        offload.stats()
        monkeypatch.setattr(cpu, "memmove", ending)
        with pytest.raises(storm.DaemonLost):
            loss.backward()
        assert x.grad is None


def test_a_retained_graph_is_fetched_again(inner_daemon: DaemonThread) -> None:
    """Between two passes over a retained graph, nothing of it stays in memory."""
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.randn(1 << 18, requires_grad=True)
        with offload:
            loss = x.exp().square().sum()
        offload.stats()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        once = inner_daemon.status()["throughput"]["restore"]["operations"]
        loss.backward()
        assert torch.equal(x.grad, first + first)
        assert inner_daemon.status()["throughput"]["restore"]["operations"] == 2 * once
        del loss


def test_what_is_fetched_ahead_stays_in_the_staging_area(inner_daemon: DaemonThread) -> None:
    """After the first unpack of a long graph the next ones arrive, in a part of the area."""
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        hold, go_on = threading.Event(), threading.Event()

        class Pause(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:
                hold.set()
                assert go_on.wait(30)
                return grad

        x = torch.zeros(1 << 18, requires_grad=True)
        with offload:
            h = x
            for _ in range(20):
                h = h.exp().clamp(max=2)
            h = Pause.apply(h).exp()
            loss = h.sum()
        del h
        offload.stats()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        assert hold.wait(30)
        transfers = client._supply.sessions.of(torch.device("cpu")).transfers
        wait_until(lambda: not transfers._pending, 30)
        ahead = transfers._ahead_bytes
        go_on.set()
        thread.join(30)
        assert 0 < ahead <= AHEAD_SHARE * STAGING_BYTES
        assert transfers._ahead_bytes == 0
        del loss


def test_an_abandoned_graph_gives_up_what_was_fetched_ahead(inner_daemon: DaemonThread) -> None:
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.zeros(1 << 18, requires_grad=True)
        with offload:
            h = x
            for _ in range(20):
                h = h.exp().clamp(max=2)
            last = h.exp()
            loss = last.sum()
        offload.stats()
        (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
        session = client._supply.sessions.of(torch.device("cpu"))
        assert gradient is not None
        del h, last, loss, gradient
        gc.collect()
        wait_until(lambda: knows_nothing(session), 30)


def knows_nothing(session: Session) -> bool:
    """Tell whether all is cleaned up; under the lock, so never amid a clean-up."""
    with session.connection.lock:
        return (
            not len(session.saved)
            and not session.saved._latest
            and not session.transfers._pending
            and not session.transfers.incoming
            and session.transfers._space.free_bytes == session.transfers._space.capacity
        )


def chain(x: Tensor, length: int) -> Tensor:
    """Return a loss that needs `length` tensors like `x` for its backward."""
    for _ in range(length):
        x = x.sin()
    return x.sum()


@pytest.mark.parametrize("length", [4, 24])
def test_stored_parts_that_a_lane_keeps_need_no_restore(
    inner_daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """24 MiB pass through a staging area of 8: what was stored last is there still."""
    monkeypatch.setattr(CpuLane, "keeps_stored", True)
    x = torch.randn(1 << 18, requires_grad=True)
    chain(x, length).backward()
    expected, x.grad = x.grad, None
    with storm.connect(inner_daemon.address, timeout=30) as client:
        offload = client.offload(min_bytes=1, replay=False)
        for _ in range(3):
            with offload:
                loss = chain(x, length)
            offload.stats()
            loss.backward()
            assert torch.equal(x.grad, expected)
            x.grad = None
        restored = inner_daemon.status()["throughput"]["restore"]["operations"]
        assert restored == 0 if length == 4 else 3 * 15 < restored < 3 * 22
        del loss


def test_a_tensors_own_kept_parts_give_way_to_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of its four parts lie in an area of four with what is free on both sides of them."""
    monkeypatch.setattr(CpuLane, "keeps_stored", True)
    with (
        inner_daemons(staging_bytes=256 << 10, part_bytes=64 << 10) as daemon,
        storm.connect(daemon.address, timeout=30) as client,
    ):
        offload = client.offload(min_bytes=1)
        small = torch.rand(12 << 10, requires_grad=True)  # three quarters of a part
        large = torch.rand(64 << 10, requires_grad=True)
        with offload:
            loss = (small * 1).square().sum()
            offload.stats()
            loss = loss + (large * 1).square().sum()
        offload.stats()
        loss.backward()
        assert torch.equal(large.grad, 2 * large)
        assert torch.equal(small.grad, 2 * small)
        del loss


@pytest.mark.parametrize("seed", range(6, 12))
def test_threads_share_a_small_area_that_keeps_parts(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever lies where, and whoever waits: each thread's next part finds room."""
    monkeypatch.setattr(CpuLane, "keeps_stored", True)
    choice = random.Random(seed)
    sizes = [64, 300, 12 << 10, 16 << 10, 20 << 10, 64 << 10, 70 << 10, 100 << 10]
    with (
        inner_daemons(staging_bytes=256 << 10, part_bytes=64 << 10) as daemon,
        storm.connect(daemon.address, timeout=30) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        offload = client.offload(min_bytes=1)

        def train(counts: list[int]) -> bool:
            leaves = [torch.rand(count, requires_grad=True) for count in counts]
            with offload:
                loss = sum((leaf * 1).square().sum() for leaf in leaves)
            offload.stats()  # all is stored, and what is kept lies where it lies
            loss.backward()
            return all(torch.equal(leaf.grad, 2 * leaf) for leaf in leaves)

        for _ in range(20):
            count = choice.randint(1, 3)
            plans = [choice.choices(sizes, k=choice.randint(1, 10)) for _ in range(count)]
            assert all(threads.map(train, plans))
