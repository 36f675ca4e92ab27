"""Generated code lays results out as PyTorch's kernels do, and draws in the order of the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.step.capture import capture
from storm_client.step.compiled import CompiledStep
from storm_client.step.passes import ordered
from storm_client.step.program import _graph
from storm_client.step.strides import with_recorded_strides
from support.training import assert_identical, gradients, seeded
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table
from torch.nn import functional


def traced(step: Callable[..., Any], *arguments: Tensor) -> fx.GraphModule:
    """Return the graph of a step's operations as a compiler is given it, decomposed."""
    captured = capture(step, arguments, {})
    nodes = ordered(captured).work
    module = _graph(nodes, [node for node in nodes if isinstance(node.meta.get("val"), Tensor)])
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: object) -> fx.GraphModule:
        found.append(graph)
        return graph

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        aot_autograd(
            fw_compiler=keep, inference_compiler=keep, decompositions=select_decomp_table()
        )(with_recorded_strides(module), examples)
    (output,) = module.graph.find_nodes(op="output")
    (made,) = found[0].graph.find_nodes(op="output")
    for recorded, one in zip(output.args[0], made.args[0], strict=True):
        expected, value = recorded.meta["val"], one.meta["val"]
        if expected.dim() and expected._is_view() is False:
            assert value.stride() == expected.stride(), recorded
    return found[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.dropout(x, 0.5),
        lambda x: functional.dropout(x, 0.5).transpose(0, 1).view(-1, 8),  # legal for these alone
        lambda x: torch.rand_like(x) * x,
        lambda x: torch.empty_like(x).uniform_() + x,
        lambda x: x.clone().masked_fill_(torch.ones(4, 3, 8).bool(), 1.0).transpose(0, 1).view(-1),
        lambda x: x.clone().bernoulli_(0.5)[1:].mul_(2),
        lambda x: functional.rrelu(x, training=True),
        lambda x: functional.layer_norm(x, (8,)),
        lambda x: torch.cumsum(x, 1),
    ],
)
def test_results_have_the_strides_that_were_recorded(function: Callable[[Tensor], Tensor]) -> None:
    traced(lambda x: function(x.transpose(0, 1)), seeded("cpu", 3, 4, 8))


# --- whole steps ----------------------------------------------------------------------------------


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x.transpose(0, 1)).transpose(0, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transposed": Transposed,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "channels_last": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Dropout(0.2),
        nn.Dropout2d(0.2),
        nn.GELU(),
    ).to(memory_format=torch.channels_last),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generated_code_runs_what_is_laid_out_otherwise(
    name: str, device: str, client: storm.Client
) -> None:
    """With dropout in several places, whose kernels a store must not have change places."""

    def trained(wrap: Callable[[Callable[[Tensor], Tensor]], CompiledStep]) -> list[Tensor]:
        torch.manual_seed(0)
        net = MODELS[name]().to(device)

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss

        call = wrap(step)
        losses = [call(seeded(device, 4, 3, 16, seed=n)) for n in range(2)]
        return [*losses, *gradients(net)]

    wrap = partial(storm.compile_step, client=client)
    offloaded = trained(partial(wrap, min_bytes=1))
    assert all(one.isfinite().all() for one in offloaded)
    assert_identical(offloaded, trained(partial(wrap, min_bytes=1 << 40)))


def test_what_is_drawn_is_there_when_it_is_read(device: str, client: storm.Client) -> None:
    weight = torch.ones((), device=device, requires_grad=True)

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = functional.dropout(x * weight, 0.5)
        other = functional.dropout(one, 0.5)
        noise = torch.empty_like(x).exponential_()
        (one + other + noise).sum().backward()
        return one.detach(), other.detach(), noise

    one, other, noise = storm.compile_step(step, client=client, min_bytes=1)(
        torch.ones(64, 64, device=device)
    )
    assert set(one.unique().tolist()) == {0.0, 2.0}
    assert set(other.unique().tolist()) == {0.0, 4.0}
    assert 0.4 < one.mean() / 2 < 0.6
    assert 0.8 < noise.mean() < 1.2
