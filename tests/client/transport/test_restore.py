"""Restores through the staging area: views of one storage, for as long as needed, or an error."""

from __future__ import annotations

import ctypes
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import storm_client as storm
import torch
from storm_client.lanes import cpu
from storm_client.lanes.cpu import CpuLane
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


@pytest.mark.parametrize("seed", [6, 8])
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

        for _ in range(10):
            count = choice.randint(1, 3)
            plans = [choice.choices(sizes, k=choice.randint(1, 10)) for _ in range(count)]
            assert all(threads.map(train, plans))
