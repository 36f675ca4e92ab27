"""What a step stored is gone when autograd has dropped it, however the step ended."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
import storm_client as storm
import torch
from support.daemon_process import DaemonProcess, resident_bytes
from support.waiting import wait_until
from torch import Tensor, nn

GROWTH_BYTES = 8 << 20
"""A fifth of what the measured steps store; allocators keep some memory of their own."""

SETTLE_SECONDS = 150


@pytest.fixture
def holds_nothing(client: storm.Client) -> Callable[[], None]:
    """Wait until the daemon holds nothing."""

    def check() -> None:
        wait_until(lambda: client.status().entries == 0, 30, client.status)
        assert client.status().pool.used_bytes == 0

    return check


def forward(x: Tensor, depth: int = 4) -> Tensor:
    h = x.exp()
    for _ in range(depth):
        h = (h * h.cos()).tanh()
    return h.sum()


def leaf(device: str, nbytes: int = 1 << 20) -> Tensor:
    return torch.full((nbytes // 4,), 0.5, device=device, requires_grad=True)


def test_entries_live_as_long_as_the_graph_or_until_the_backward_pass(
    device: str, client: storm.Client, holds_nothing: Callable[[], None]
) -> None:
    offload = client.offload(min_bytes=1)
    with offload:
        loss = forward(leaf(device))
    offload.stats()
    assert client.status().entries > 0
    del loss
    holds_nothing()
    with offload:
        loss = forward(leaf(device))
    loss.backward()
    holds_nothing()  # although the loss is still there
    assert loss.grad_fn is not None


class KeepsItsResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.below(x).sigmoid()
        return self.above(self.features).sigmoid()


@pytest.mark.parametrize("how", ["no backward pass", "a graph that is retained", "one gradient"])
def test_a_module_that_holds_a_result_is_freed_with_it(
    client: storm.Client, holds_nothing: Callable[[], None], how: str
) -> None:
    """Also after steps that follow a plan."""
    model = KeepsItsResult()
    offload = client.offload(model, min_bytes=1)
    for _ in range(6):
        with offload:
            loss = model(torch.randn(256, 64)).sum()
        if how == "a graph that is retained":
            loss.backward(retain_graph=True)
        elif how == "one gradient":
            torch.autograd.grad(loss, model.above.weight)
    alive = weakref.ref(model)
    del model, offload, loss
    gc.collect()
    assert alive() is None
    holds_nothing()


def test_an_exception_in_the_forward(
    device: str, client: storm.Client, holds_nothing: Callable[[], None]
) -> None:
    offload = client.offload(min_bytes=1)

    def failing() -> None:
        with offload:
            forward(leaf(device))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    holds_nothing()
    with offload:
        loss = forward(leaf(device))
    loss.backward()
    holds_nothing()


def test_a_backward_that_is_broken_off(
    device: str, client: storm.Client, holds_nothing: Callable[[], None]
) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ZeroDivisionError

    offload = client.offload(min_bytes=1)
    with offload:
        loss = forward(Fail.apply(leaf(device).exp()), depth=20)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss
    holds_nothing()


def abandoned(offload: storm.Offload, x: Tensor) -> None:
    with offload:
        forward(x, depth=1)


def failing(offload: storm.Offload, x: Tensor) -> None:
    with suppress(ZeroDivisionError), offload:
        forward(x, depth=1)
        raise ZeroDivisionError


def completed(offload: storm.Offload, x: Tensor) -> None:
    with offload:
        loss = forward(x, depth=1)
    loss.backward()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "step",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (abandoned, failing)), completed],
)
def test_thousands_of_steps_grow_neither_process(
    step: Callable[[storm.Offload, Tensor], None],
    device: str,
    daemon: DaemonProcess,
    client: storm.Client,
    holds_nothing: Callable[[], None],
) -> None:
    offload = client.offload(min_bytes=1)
    x = leaf(device, 16 << 10)

    def sizes_after(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            step(offload, x)
        holds_nothing()
        return resident_bytes(daemon.pid), resident_bytes(os.getpid())

    def settled() -> tuple[int, int]:
        """The sizes once the daemon has loaded its kernels, which it does in the background."""
        deadline, before = time.monotonic() + SETTLE_SECONDS, sizes_after(250)
        while (now := sizes_after(250))[0] - before[0] > GROWTH_BYTES // 4:
            assert time.monotonic() < deadline, (
                f"the daemon grew from {before[0]} to {now[0]} bytes"
            )
            before = now
        return now

    before = settled()
    after = sizes_after(1000)
    assert after[0] - before[0] < GROWTH_BYTES, "the daemon grew"
    assert after[1] - before[1] < GROWTH_BYTES, "this process grew"
