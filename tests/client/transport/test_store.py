"""Stores through the staging area: each storage once, and what the daemon refuses stays here."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import storm_client as storm
import torch
from storm_client import offloading
from storm_client.transport import store as outbound
from support.daemon_process import DaemonProcess, daemons
from support.waiting import wait_until
from torch import Tensor


def step(context: AbstractContextManager[object], device: str, mib: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(mib << 18, generator=generator).to(device).requires_grad_()
    with context:
        h = x.exp()
        for _ in range(5):
            h = (h * h.cos()).tanh()
        loss = h.sum()
    del h
    loss.backward()
    return [loss.detach(), x.grad]


def assert_same(context: AbstractContextManager[object], device: str, mib: int = 1) -> None:
    for found, expected in zip(
        step(context, device, mib), step(nullcontext(), device, mib), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def small() -> Iterator[DaemonProcess]:
    """A daemon whose pool holds 12 parts of a tensor."""
    with daemons() as make:
        yield make("--pool-bytes", "12MiB", "--part-bytes-cpu", "1MiB")


@pytest.fixture(scope="module")
def narrow() -> Iterator[DaemonProcess]:
    """A daemon whose staging areas hold 4 parts, and no tensor."""
    with daemons() as make:
        yield make("--staging-bytes-cpu", "256KiB", "--part-bytes-cpu", "64KiB")


@contextmanager
def connected(daemon: DaemonProcess) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client
        wait_until(lambda: client.status().entries == 0, 30, client.status)
        assert client.status().pool.used_bytes == 0


def test_pool_full(device: str, small: DaemonProcess) -> None:
    with connected(small) as client:
        offload = client.offload(min_bytes=1, codec="raw")
        for _ in range(2):
            assert_same(offload, device, mib=2)
        stats = offload.stats()
    assert stats.kept["pool_full"] > 0
    assert stats.kept_bytes > 0
    assert stats.offloaded_bytes > 0


def test_a_tensor_larger_than_the_pool(device: str, small: DaemonProcess) -> None:
    """Its first parts are admitted, a later one is not: nothing of it stays with the daemon."""
    with connected(small) as client:
        offload = client.offload(min_bytes=1, codec="raw")
        x = torch.ones(16 << 18, device=device, requires_grad=True)
        with offload:
            loss = x.exp().sum()
        assert offload.stats().kept == {"pool_full": 1}
        wait_until(lambda: client.status().pool.used_bytes == 0, 30, client.status)
        assert offload.stats().stored_bytes == 0
        loss.backward()
        assert torch.equal(x.grad, x.detach().exp())


def test_a_tensor_that_stayed_and_was_resized_is_an_error(
    device: str, small: DaemonProcess
) -> None:
    with connected(small) as client:
        offload = client.offload(min_bytes=1, codec="raw")
        x = torch.ones(16 << 18, device=device, requires_grad=True)
        with offload:
            h = x * 2
            loss = h.cos().sum()
        assert offload.stats().kept
        h.untyped_storage().resize_(0)
        with pytest.raises(storm.ActivationLost, match="resized"):
            loss.backward()
        del h, loss


def test_a_tensor_that_was_resized_before_it_was_refused_is_an_error(small: DaemonProcess) -> None:
    """Its first parts are admitted and can be had, which makes no tensor of the others."""
    with connected(small) as client:
        offload = client.offload(min_bytes=1, codec="raw")
        x = torch.ones(16 << 18, requires_grad=True)
        os.kill(small.pid, signal.SIGSTOP)
        try:
            with offload:
                h = x * 2
                loss = h.cos().sum()
            h.untyped_storage().resize_(0)
            errors: list[BaseException] = []
            thread = threading.Thread(target=collect, args=(errors, loss.backward))
            thread.start()
            connection = client._supply.sessions.of(torch.device("cpu")).connection
            wait_until(lambda: connection.changed.is_polled, 30)
        finally:
            os.kill(small.pid, signal.SIGCONT)
        thread.join(30)
        assert [type(error) for error in errors] == [storm.ActivationLost]
        assert offload.stats().kept == {"pool_full": 1}
        assert x.grad is None
        del h, loss, errors


def collect(errors: list[BaseException], call: Callable[[], object]) -> None:
    """Call, and put what it raises with the errors."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        errors.append(error)


def test_a_staging_area_smaller_than_a_tensor(narrow: DaemonProcess) -> None:
    with connected(narrow) as client:
        offload = client.offload(min_bytes=1)
        for _ in range(2):
            assert_same(offload, "cpu", mib=1)
        assert not offload.stats().kept


def test_several_threads_share_a_small_staging_area(narrow: DaemonProcess) -> None:
    """Each forward and backward needs more than the whole area, and all go on at once."""
    with connected(narrow) as client:
        offload = client.offload(min_bytes=1)
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda _: assert_same(offload, "cpu"), range(6)))


def test_a_daemon_that_does_not_read(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped daemon costs one wait for room; then tensors stay, and come back all the same."""
    options = ("--staging-bytes-cpu", "2MiB", "--part-bytes-cpu", "1MiB")
    daemon = make_daemon("--pool-bytes", "64MiB", *options)
    monkeypatch.setattr(outbound, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(offloading, "SETTLE_SECONDS", 0.1)
    with connected(daemon) as client:
        offload = client.offload(min_bytes=1)
        x = torch.ones(1 << 18, requires_grad=True)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with offload:
                h = x.exp()
                for _ in range(5):
                    h = h.exp().clamp(max=2)
                loss = h.sum()
            stopped = offload.stats()
            assert stopped.kept["daemon_slow"] > 0
            assert stopped.offloaded_bytes == 0
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        loss.backward()
        assert x.grad is not None


# --- deduplication --------------------------------------------------------------------------


def test_a_storage_saved_several_times_is_stored_once(device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.ones(512, 512, device=device, requires_grad=True)
    with offload:
        h = x * 2
        loss = (h * h).sum() + (h.t() * h.view(-1).view(512, 512)).sum() + h[:400].exp().sum()
    stats = offload.stats()
    # h twice by each product, and the output of exp: three of the four are what is stored.
    assert stats.saved_bytes == 4 * h.nbytes + 400 * 512 * 4
    assert stats.deduplicated_bytes == 3 * h.nbytes
    assert stats.offloaded_bytes == h.nbytes + 400 * 512 * 4
    loss.backward()


def test_another_storage_at_the_same_address_is_another_one(
    device: str, client: storm.Client
) -> None:
    """The allocator hands out a freed tensor's memory again; the old bytes must not be found."""
    offload = client.offload(min_bytes=1)
    total = torch.zeros((), device=device)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with offload:
        for number in range(20):
            h = torch.full((64, 64), float(number), device=device)
            total = total + (x * h).sum()
            del h
    total.backward()
    assert torch.equal(x.grad, torch.full_like(x, sum(range(20))))
    assert offload.stats().deduplicated_bytes == 0
