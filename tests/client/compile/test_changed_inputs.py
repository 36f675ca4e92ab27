"""What is changed after the forward pass has read it: nothing is computed from that again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import storm_client as storm
import torch
from support.compiled_programs import PLAIN, Wrap, perceptron
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn


class Changing(nn.Module):
    """Adds a buffer, and changes it afterwards: by itself, or by what has gradients."""

    def __init__(self, device: str, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Parameter(seeded(device, 32, 32))
        self.second = nn.Parameter(seeded(device, 32, 32, seed=2))
        self.register_buffer("mean", seeded(device, 32, 32, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.first
        z = (y + self.mean).exp()
        self.mean.add_(1.0 if self.how == "in the graph" else y)
        return z @ self.second


def changing(how: str, wrap: Wrap, device: str) -> list[Tensor]:
    net = Changing(device, how)
    loss = wrap(net)(seeded(device, 32, 32, seed=4)).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(net), net.mean.detach()]


def assert_as_without_offload(
    program: Callable[[Wrap, str], list[Tensor]], codegen: str, client: storm.Client, device: str
) -> None:
    expected = program(partial(torch.compile, backend=PLAIN[codegen]), device)
    torch._dynamo.reset()
    made: list[Callable[..., Tensor]] = []

    def wrap(model: Callable[..., object]) -> Callable[..., Tensor]:
        options = {"min_bytes": 1, "codegen": codegen, "budget": 0.0}
        made.append(storm.compile(model, client=client, **options))
        return made[-1]

    assert_identical(program(wrap, device), expected)
    assert storm.compiled_stats(made[0]).offloaded_bytes > 0


@pytest.mark.parametrize("how", ["in the graph", "behind the graph"])
def test_nothing_is_computed_again_from_a_buffer_that_changes(
    how: str, device: str, client: storm.Client
) -> None:
    assert_as_without_offload(partial(changing, how), "eager", client, device)


def given_other_data(wrap: Wrap, device: str) -> list[Tensor]:
    net = perceptron(device)
    loss = wrap(net)(seeded(device, 64, 32)).square().mean()
    for parameter in net.parameters():
        parameter.data = parameter.data * 2
    loss.backward()
    return [loss.detach(), *gradients(net)]


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_parameters_that_are_given_other_data_are_computed_from_as_they_were(
    codegen: str, device: str, client: storm.Client
) -> None:
    assert_as_without_offload(given_other_data, codegen, client, device)


class Returning(nn.Module):
    """Returns a product that its backward pass reads, and could recompute."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = nn.Parameter(seeded(device, 32, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ self.first
        return product.sin() * product, product


def written_without_a_count(wrap: Wrap, device: str) -> list[Tensor]:
    net = Returning(device)
    made, product = wrap(net)(seeded(device, 64, 32))
    product.data.mul_(1.5)
    made.square().mean().backward()
    return [made.detach(), *gradients(net)]


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_result_is_read_as_its_caller_has_left_it(
    codegen: str, device: str, client: storm.Client, full_link: None
) -> None:
    """As PyTorch reads it, which has saved it: it is not recomputed from what made it."""
    expected = written_without_a_count(partial(torch.compile, backend=PLAIN[codegen]), device)
    torch._dynamo.reset()
    options = {"client": client, "min_bytes": 1, "codegen": codegen, "budget": 0.0}
    assert_identical(written_without_a_count(partial(storm.compile, **options), device), expected)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_result_that_its_caller_has_changed_raises(
    codegen: str, device: str, client: storm.Client, full_link: None
) -> None:
    net = Returning(device)
    for wrap in (
        partial(torch.compile, backend=PLAIN[codegen]),
        partial(storm.compile, client=client, min_bytes=1, codegen=codegen, budget=0.0),
    ):
        torch._dynamo.reset()
        made, product = wrap(net)(seeded(device, 64, 32))
        with torch.no_grad():
            product.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


def test_a_parameter_that_is_changed_before_it_is_computed_from_raises(
    device: str, client: storm.Client, full_link: None
) -> None:
    """The first layer's weight is read by what is recomputed, and by nothing else."""
    net = perceptron(device)
    call = storm.compile(net, client=client, min_bytes=1, codegen="eager", budget=0.0)
    loss = call(seeded(device, 64, 32)).square().mean()
    with torch.no_grad():
        net[0][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
