"""Losses and gradients with offload are bit for bit those without, whatever is trained, and how.

What single modules and operators save is compared by PyTorch's databases (test_pytorch_databases).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from support.training import (
    Case,
    Context,
    assert_identical,
    assert_offload_changes_nothing,
    gradients,
    seeded,
    small_net,
    trained,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 5
"""So many that later ones follow a plan, and the first ones have been examined for advice."""

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a function to the cases that are tested."""
    CASES[function.__name__] = function
    return function


@case
def gradient_accumulation(context: Context, device: str) -> list[Tensor]:
    net = small_net(device)
    losses = []
    for seed in range(3):
        with context():
            loss = net(seeded(device, 64, 32, seed=seed)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *gradients(net)]


@case
def several_forwards_before_their_backwards(context: Context, device: str) -> list[Tensor]:
    net = small_net(device)
    losses = []
    for seed in range(3):
        with context():
            losses.append(net(seeded(device, 64, 32, seed=seed)).square().mean())
    for loss in (losses[1], losses[0], losses[2]):
        loss.backward()
    return [*(loss.detach() for loss in losses), *gradients(net)]


@case
def double_backward_inside(context: Context, device: str) -> list[Tensor]:
    net, x = small_net(device), seeded(device, 64, 32, grad=True)
    with context():
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        loss = slope.square().mean()
    loss.backward()
    return [loss.detach(), *gradients(net), x.grad]


@case
def double_backward_outside(context: Context, device: str) -> list[Tensor]:
    net, x = small_net(device), seeded(device, 64, 32, grad=True)
    with context():
        energy = net(x).square().sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    loss = slope.square().mean()
    loss.backward()
    return [loss.detach(), *gradients(net), x.grad]


# --- what is trained ------------------------------------------------------------------------


@case
def convolutions_with_batch_norm_and_inplace_relu(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(10),
    ).to(device)
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        return trained(net, seeded(device, 4, 3, 32, 32), context)


@case
def shared_weights(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.mix = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.mix(torch.tanh(self.mix(self.embed(ids))))
            return F.linear(hidden, self.embed.weight)

    net = Net().to(device)
    ids = torch.arange(40, device=device).reshape(4, 10)
    with context():
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return [loss.detach(), *gradients(net)]


# --- ways of training -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant: bool, device: str, client: storm.Client) -> None:
    """Segments inside the context are recomputed; what lies between them is offloaded."""

    def run(context: Context) -> list[Tensor]:
        net, x = small_net(device), seeded(device, 64, 32, grad=True)
        with context():
            hidden = checkpoint(net, x.exp(), use_reentrant=reentrant)
            loss = checkpoint(net, hidden * hidden, use_reentrant=reentrant).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(net), x.grad]

    offload = client.offload(min_bytes=1)
    assert_identical(run(lambda: offload), run(nullcontext))
    assert offload.stats().offloaded_bytes > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around(reentrant: bool, device: str, client: storm.Client) -> None:
    """The context is entered inside a segment: in its forward, and in its recomputation."""

    def run(context: Context) -> list[Tensor]:
        net, x = small_net(device), seeded(device, 64, 32, grad=True)

        def segment(h: Tensor) -> Tensor:
            with context():
                return net(h.exp())

        loss = checkpoint(segment, x, use_reentrant=reentrant).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(net), x.grad]

    offload = client.offload(min_bytes=1)
    assert_identical(run(lambda: offload), run(nullcontext))
    assert offload.stats().offloaded_bytes > 0


def test_the_context_may_be_entered_inside_itself(device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)

    def run(context: Context) -> list[Tensor]:
        x = seeded(device, 64, 32, grad=True)
        with context():
            h = x.exp()
            with context():
                h = (h * h).tanh()
            loss = (h * h).sum()
        loss.backward()
        return [loss.detach(), x.grad]

    assert_identical(run(lambda: offload), run(nullcontext))


@case
def replicas_in_threads(context: Context, device: str) -> list[Tensor]:
    """As DataParallel does: forwards of one model in several threads, then one backward.

    Each thread is a new one: PyTorch orders a backward pass by what each has counted.
    """
    net = small_net(device)
    outputs: dict[int, Tensor] = {}

    def forward(seed: int) -> None:
        with context():
            outputs[seed] = net(seeded(device, 64, 32, seed=seed)).square().mean()

    threads = [threading.Thread(target=forward, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    loss = torch.stack([outputs[seed] for seed in range(4)]).sum()
    loss.backward()
    return [loss.detach(), *gradients(net)]


def test_two_threads_go_backward_through_one_graph(device: str, client: storm.Client) -> None:
    """Both ask for the same ranges at once; each gets the right gradient."""
    offload = client.offload(min_bytes=1)
    x = seeded(device, 256, 256, grad=True)
    with offload:
        h = x.exp()
        for _ in range(6):
            h = (h * h.cos()).tanh()
        one, two = h.sum(), (h * 2).sum()
    expected = [torch.autograd.grad(out, x, retain_graph=True)[0] for out in (one, two)]
    del h

    def backward(out: Tensor) -> Tensor:
        return torch.autograd.grad(out, x, retain_graph=True)[0]

    with ThreadPoolExecutor(2) as threads:
        assert_identical(threads.map(backward, (one, two)), expected)


@pytest.mark.usefixtures("followed")
def test_sparse_parameters_and_results(device: str, client: storm.Client) -> None:
    """They have no number of bytes and no strides."""

    def net_and_graph() -> nn.Module:
        net = small_net(device)
        edges = torch.eye(64, device=device).to_sparse()
        net.register_parameter("edges", nn.Parameter(edges))
        return net

    def run(context: Context, net: nn.Module) -> list[Tensor]:
        losses = []
        for _ in range(STEPS):
            with context():
                hidden = torch.sparse.mm(net.edges, net(seeded(device, 64, 32)))
                loss = ((hidden.to_sparse() * 2.0).to_dense() * hidden).tanh().sum()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(gradient.to_dense() for gradient in gradients(net))]

    net = net_and_graph()
    offload = client.offload(net, min_bytes=1)
    assert_identical(run(lambda: offload, net), run(nullcontext, net_and_graph()))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_identical(name: str, device: str, client: storm.Client) -> None:
    assert_offload_changes_nothing(CASES[name], client.offload(min_bytes=1), device)
