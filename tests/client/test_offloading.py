from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_kernels.encoded_bytes import mark_encoded
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
"""Of PyTorch's, about sparse and nested tensors."""


class Subclass(torch.Tensor):
    pass


def test_an_offload_is_reusable(client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    for _ in range(3):
        x = torch.ones(64, 64, requires_grad=True)
        with offload as entered:
            loss = x.exp().sum()
        assert entered is offload
        assert offload.address == client.address
        loss.backward()
    assert offload.stats().offloaded_bytes == 3 * x.nbytes


def test_a_block_is_left_once_and_in_its_own_thread(client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    with pytest.raises(storm.UsageError, match="left that this thread is not in"):
        offload.__exit__(None, None, None)
    raised: list[BaseException] = []

    def leave_elsewhere() -> None:
        try:
            offload.__exit__(None, None, None)
        except storm.UsageError as error:
            raised.append(error)

    offload.__enter__()
    thread = Thread(target=leave_elsewhere)
    thread.start()
    thread.join(60)
    assert len(raised) == 1
    x = torch.ones(64, 64, requires_grad=True)
    h = x.exp()
    offload.__exit__(None, None, None)
    assert offload.stats().offloaded_bytes == h.nbytes


def test_several_offloads_of_one_client_count_apart(client: storm.Client) -> None:
    one, two = client.offload(min_bytes=1), client.offload(min_bytes=1, codec="raw")
    x = torch.ones(64, 64, requires_grad=True)
    with one:
        h = x.exp()
    with two:
        loss = h.cos().sum()
    assert one.stats().offloaded_bytes == h.nbytes
    assert two.stats().offloaded_bytes == 0
    assert two.stats().deduplicated_bytes == h.nbytes
    loss.backward()


def test_hooks_that_were_there_before_are_there_again(client: storm.Client) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach()

    x = torch.ones(64, 64, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        with client.offload(min_bytes=1):
            inner = x.exp()
        assert not packed
        outer = x.exp()
        assert packed == [64 * 64]
    (inner + outer).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp())


SKIPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "small": lambda x: x[:2, :2].exp().sum(),
    "subclass": lambda x: x.as_subclass(Subclass).square().sum(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:9]]).relu().to_padded_tensor(0).sum(),
    "sparse": lambda x: torch.sparse.mm(torch.eye(64).to_sparse(), x.exp()).sum(),
}


@pytest.mark.parametrize("reason", SKIPPED)
def test_what_cannot_be_offloaded_stays_and_is_counted(reason: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1024)
    x = torch.ones(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(SKIPPED[reason](x)), x)
    with offload:
        loss = plain(SKIPPED[reason](x))
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(plain(found), plain(expected))
    assert offload.stats().skipped[reason] > 0


def plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(torch.Tensor)


def test_a_small_tensor_expanded_to_a_large_one_stays(client: storm.Client) -> None:
    offload = client.offload(min_bytes=1 << 16)
    x = torch.ones(64, requires_grad=True)
    with offload:
        loss = x.exp().expand(1024, 64).cos().sum()  # the input of cos is 256 bytes wide
    assert offload.stats().offloaded_bytes == 0
    loss.backward()


def test_parameters_that_moved_since_are_recognised(client: storm.Client) -> None:
    net = torch.nn.Linear(64, 64)
    offload = client.offload(net, min_bytes=1)
    net.to(torch.float64)
    with offload:
        loss = net(torch.ones(64, 64, dtype=torch.float64, requires_grad=True)).sum()
    assert offload.stats().skipped == {"parameter": 1, "leaf": 1}
    loss.backward()


@pytest.mark.usefixtures("followed")
def test_parameters_may_be_swapped_after_steps(client: storm.Client) -> None:
    """PyTorch swaps no tensor that has a weak reference, as for a module of DTensors it must."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    offload = client.offload(net, min_bytes=1)
    for _ in range(5):
        with offload:
            loss = net(torch.ones(64, 64)).square().sum()
        loss.backward()
    net.zero_grad()
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros_like(parameter)))
    with offload:
        loss = net(torch.ones(64, 64)).square().sum()
    assert loss == 0.0
    loss.backward()


def test_an_output_that_stays_is_freed_with_its_graph(client: storm.Client) -> None:
    """An operation's output must not be held by what the operation itself holds."""
    offload = client.offload(min_bytes=1 << 30)
    freed: list[bool] = []
    gc.disable()
    try:
        x = torch.ones(64, 64, requires_grad=True)
        with offload:
            h = x.exp()
        h.grad_fn.register_hook(Notice(freed))
        del h
        assert freed == [True]
    finally:
        gc.enable()


class Notice:
    """A callable that notes its own end."""

    def __init__(self, freed: list[bool]) -> None:
        self._freed = freed

    def __call__(self, *gradients: Any) -> None: ...

    def __del__(self) -> None:
        self._freed.append(True)


class Encodes(torch.autograd.Function):
    """Saves a blob that it has made, as storm_kernels.gemm's products do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        blob = torch.zeros(1 << 16, dtype=torch.uint8)
        mark_encoded(blob)
        ctx.save_for_backward(blob)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (blob,) = ctx.saved_tensors
        assert not blob.any()
        return grad * 2


def test_what_was_encoded_before_is_stored_as_it_is(client: storm.Client) -> None:
    """Zeros, which any encoder would have made nothing of."""
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = Encodes.apply(x).exp().sum()
    loss.backward()
    stats = offload.stats()
    assert stats.offloaded_by_dtype["encoded"] == 1 << 16
    assert stats.stored_by_mode["raw"] >= 1 << 16
    assert "uint8" not in stats.offloaded_by_dtype
