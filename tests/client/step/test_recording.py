"""What is recorded: whose memory results lie in, and what would change that unseen is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from storm_client.errors import UsageError
from storm_client.step.capture import capture
from storm_client.step.compiled import CompiledStep
from support.training import assert_identical, seeded
from torch import Tensor, nn

Body = Callable[[nn.Linear, Tensor], Tensor]
Wrap = Callable[..., CompiledStep]


def step_of(body: Body) -> tuple[nn.Linear, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(32, 96)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = body(net, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, step


def unsafe_chunks(net: nn.Linear, x: Tensor) -> Tensor:
    a, b, c = torch.unsafe_chunk(net(x), 3, 1)
    a.sigmoid_()
    b.add_(a).tanh_()
    return (a * b * c).exp()


def unsafe_chunks_of_sizes(net: nn.Linear, x: Tensor) -> Tensor:
    a, b = torch.unsafe_split_with_sizes(net(x), [32, 64], 1)
    a.sigmoid_()
    return (a * b.tanh_()[:, :32]).exp()


def data_of_a_saved_tensor(net: nn.Linear, x: Tensor) -> Tensor:
    y = net(x).sigmoid()
    y.data[:, 3:5].mul_(0.5)
    return y.exp()


def data_of_a_parameter(net: nn.Linear, x: Tensor) -> Tensor:
    y = net(x).sigmoid()
    net.weight.data.clamp_(-0.1, 0.1)
    return y


@pytest.mark.parametrize(
    "body", [unsafe_chunks, unsafe_chunks_of_sizes, data_of_a_saved_tensor, data_of_a_parameter]
)
def test_what_is_written_past_version_counters_is_written(body: Body, wrap: Wrap) -> None:
    found = []
    for wrapped in (lambda step: step, wrap):
        net, step = step_of(body)
        call = wrapped(step)
        losses = [call(seeded("cpu", 16, 32, seed=n)).detach() for n in range(3)]
        found.append([*losses, *net.parameters()])
    assert_identical(found[1], found[0])


def another_memory(net: nn.Linear, x: Tensor) -> Tensor:
    y = net(x)
    y.data = torch.ones_like(y)
    return y


def another_memory_of_a_parameter(net: nn.Linear, x: Tensor) -> Tensor:
    net.weight.data = net.weight.data * 0.9
    return net(x)


def set_memory(net: nn.Linear, x: Tensor) -> Tensor:
    y = net(x)
    return y + y.detach().clone().set_(y.detach())


@pytest.mark.parametrize("body", [another_memory, another_memory_of_a_parameter, set_memory])
def test_another_memory_is_refused_by_its_line(body: Body) -> None:
    net, step = step_of(body)
    before = [(one, one.data_ptr(), one.detach().clone()) for one in net.parameters()]
    with pytest.raises(UsageError, match=r"other memory .*test_recording.py.*copy_\(\)"):
        capture(step, (seeded("cpu", 16, 32),), {})
    assert [one.data_ptr() for one in net.parameters()] == [place for _, place, _ in before]
    assert_identical(net.parameters(), [values for _, _, values in before])


def test_an_operator_that_hides_whose_memory_it_returns_is_refused() -> None:
    library = torch.library.Library("stormd_test", "DEF")
    library.define("top(Tensor x) -> Tensor")
    library.impl("top", lambda x: x[:4], "CompositeExplicitAutograd")

    def body(net: nn.Linear, x: Tensor) -> Tensor:
        y = net(x)
        return y.sum() + torch.ops.stormd_test.top(y.detach())

    try:
        with pytest.raises(UsageError, match=r"stormd_test.top.default at .*its schema does not"):
            capture(step_of(body)[1], (seeded("cpu", 16, 32),), {})
    finally:
        library._destroy()
