"""A saved tensor that is changed in place raises what PyTorch raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
from torch import Tensor


def change_itself(h: Tensor) -> None:
    h.add_(1)


def change_a_detached_alias(h: Tensor) -> None:
    h.detach().mul_(2)


def change_without_gradients(h: Tensor) -> None:
    with torch.no_grad():
        h.t().copy_(torch.zeros_like(h))


CHANGES = [change_itself, change_a_detached_alias, change_without_gradients]


def message_of(
    change: Callable[[Tensor], None], context: AbstractContextManager[object], device: str
) -> str:
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with context:
        h = x * 3
        loss = (h * h).sum()
    change(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("min_bytes", [1, 1 << 30], ids=["offloaded", "kept"])
def test_a_change_raises_as_in_pytorch(
    change: Callable[[Tensor], None], min_bytes: int, device: str, client: storm.Client
) -> None:
    """The operation is that which made what was saved.

    PyTorch names that which has changed it, where that is part of the graph.
    """

    def start(message: str) -> str:
        """Leave out the hint, and the operation's name where PyTorch names another."""
        message = message.partition("Hint")[0]
        if change is change_a_detached_alias:
            return message
        before, _, rest = message.partition(", which is output")
        return before + rest[rest.index(" is at version") :]

    expected = message_of(change, nullcontext(), device)
    found = message_of(change, client.offload(min_bytes=min_bytes), device)
    assert start(found) == start(expected)
    assert "FloatTensor [64, 64]], which is output 0 of Mul" in found


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.parametrize("is_traced", [False, True])
def test_the_hint_is_that_of_pytorch(is_traced: bool, device: str, client: storm.Client) -> None:
    """With anomaly detection it names the backtrace, instead of the setting that is on already."""

    def hint(context: AbstractContextManager[object]) -> str:
        with torch.autograd.set_detect_anomaly(is_traced, check_nan=False):
            return message_of(change_itself, context, device).partition("Hint: ")[2]

    expected = hint(nullcontext()).replace("(True)", "(True, check_nan=False)")  # older PyTorch's
    assert hint(client.offload(min_bytes=1)) == expected


def test_an_output_that_was_saved_and_changed(device: str, client: storm.Client) -> None:
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with client.offload(min_bytes=1):
        h = x.exp()
    h.add_(1)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        h.sum().backward()


def test_a_parameter_changed_between_forward_and_backward(
    device: str, client: storm.Client
) -> None:
    net = torch.nn.Linear(64, 64, device=device)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    with client.offload(net, min_bytes=1):
        loss = net(x).sum()
    with torch.no_grad():
        net.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_that_races_the_copy(device: str, client: storm.Client) -> None:
    """Another thread changes the tensor over and over while it is being saved.

    A change that ends while the hook runs is noticed by PyTorch, in the forward; any other by
    the version, in the backward.
    """
    offload = client.offload(min_bytes=1)
    stop, changing = threading.Event(), threading.Event()
    h = torch.ones(1 << 20, device=device)

    def change() -> None:
        while not stop.is_set():
            h.add_(1)
            changing.set()

    def step() -> None:
        x = torch.ones(1 << 20, device=device, requires_grad=True)
        with offload:
            loss = (x * h).sum()
        for _ in range(2):  # the first may be told of now and have been counted before
            changing.clear()
            assert changing.wait(30)
        loss.backward()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            with pytest.raises(RuntimeError, match=r"modified by an inplace|modifying its input"):
                step()
    finally:
        stop.set()
        thread.join(30)


def test_a_tensor_changed_before_it_is_saved_again(device: str, client: storm.Client) -> None:
    """The second operation saves the new content, not what is stored of the old one."""
    offload = client.offload(min_bytes=1)
    x = torch.full((64, 64), 0.5, device=device, requires_grad=True)
    y = torch.full((64, 64), 0.25, device=device, requires_grad=True)
    buffer = torch.ones(64, 64, device=device)
    with offload:
        first = (x * buffer).sum()
        buffer.mul_(3)
        second = (y * buffer).sum()
    second.backward()
    assert torch.equal(y.grad, torch.full_like(y, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


class ChangesWhatItSaved(torch.autograd.Function):
    """A backward that spoils its input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.zero_()
        return grad


def test_a_backward_that_changes_what_it_unpacked(device: str, client: storm.Client) -> None:
    """Whoever unpacks the same bytes after it gets PyTorch's error, not the changed bytes."""

    def run(context: AbstractContextManager[object]) -> None:
        x = torch.ones(64, 64, device=device, requires_grad=True)
        with context:
            h = x.exp()
            squared = h.square()  # saves h, unpacked after the one that changes it
            loss = (squared.sum() * 0) + ChangesWhatItSaved.apply(h).sum()
        del h, squared
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(nullcontext())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(client.offload(min_bytes=1))
