"""GRU, LSTM and RNN in captured steps on a CPU: their kernels do what no schema says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from storm_client.compile.operators import STORE
from storm_client.errors import StormError
from storm_client.step import recurrent
from storm_client.step.capture import capture
from storm_client.step.compiled import CompiledStep
from storm_client.step.nodes import memories, writes
from support.steps import everything
from support.training import assert_identical, seeded
from torch import Tensor, nn

WIDTH = 16

Wrap = Callable[..., CompiledStep]


class Unrolled(nn.Module):
    """A cell, with its state handed on from one element of the sequence to the next."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.zeros(x.shape[1], WIDTH)
        state = (hidden, hidden) if isinstance(self.cell, nn.LSTMCell) else hidden
        outputs = []
        for one in x:
            state = self.cell(one, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs), outputs[-1]


class Frozen(nn.Module):
    """A network that is not trained: its products save nothing but for what is below it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        output, state = self.net(x)
        return output, state


class Teacher(nn.Module):
    """Outputs that nothing is differentiated through, made with gradients recorded or without."""

    def __init__(self, net: nn.Module, *, records: bool) -> None:
        super().__init__()
        self.net = net
        self.records = records

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        with torch.set_grad_enabled(self.records):
            target = self.net(x.detach())[0].detach()
        return x - target, None


NETS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH, bidirectional=True),
    "gru, frozen": lambda: Frozen(nn.GRU(WIDTH, WIDTH, bidirectional=True)),
    "gru, batch first": lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bias=False),
    "gru, bfloat16": lambda: nn.GRU(WIDTH, WIDTH).to(torch.bfloat16),
    "gru cell": lambda: Unrolled(nn.GRUCell(WIDTH, WIDTH)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True),
    "lstm, frozen": lambda: Frozen(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "lstm, bfloat16": lambda: nn.LSTM(WIDTH, WIDTH).to(torch.bfloat16),
    "lstm, recorded for nothing": lambda: Teacher(nn.LSTM(WIDTH, WIDTH), records=True),
    "lstm, not recorded": lambda: Teacher(nn.LSTM(WIDTH, WIDTH), records=False),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(WIDTH, WIDTH)),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH, nonlinearity="relu", bidirectional=True),
}


def train(
    name: str, wrap: Callable[[Callable[[Tensor], object]], Callable[[Tensor], object]]
) -> list[Tensor]:
    """Make two steps, and return losses, gradients, and all that they have changed."""
    torch.manual_seed(0)
    net = NETS[name]()
    dtype = next(net.parameters()).dtype
    below = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    whole = nn.ModuleList([below, net])
    trained = [one for one in whole.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def step(x: Tensor) -> list[Tensor]:
        loss = net(below(x))[0].float().square().mean()
        loss.backward()
        gradients = [one.grad.clone() for one in trained if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return [loss, *gradients]

    call = wrap(step)
    made = [call(seeded("cpu", 4, 3, WIDTH, seed=n).to(dtype)) for n in range(2)]
    return [one.detach() for step in made for one in step] + everything(whole, optimizer, "cpu")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.slow)
        if one in ("gru, bfloat16", "gru cell", "lstm, not recorded")
        else one
        for one in NETS
    ],
)
def test_every_network_gives_the_bits_of_the_function(name: str, wrap: Wrap) -> None:
    made: list[CompiledStep] = []

    def wrapped(step: Callable[..., object]) -> CompiledStep:
        made.append(wrap(step))
        return made[-1]

    assert_identical(train(name, wrapped), train(name, lambda step: step))
    if name in CHECKS:
        CHECKS[name](made[0])


def gates_that_are_written_to_one_by_one_do_not_leave(step: CompiledStep) -> None:
    """They would leave as they are before, while they are written to, or after."""
    (program,) = step.captures()[-1:]
    written = {memory for node in program.ordered.work for memory in writes(node)}
    nodes = [node for call in program.calls for node in call.module.graph.nodes]
    stored = [node.args[0] for node in nodes if node.target is STORE]
    assert stored
    assert not [node for node in stored if memories(node) & written]


def the_workspace_is_part_of_the_plan_and_leaves(step: CompiledStep) -> None:
    """It takes most of what an LSTM saves."""
    rows = [row for plan in step.plans() for row in plan.rows if row.dtype is torch.uint8]
    assert "offload" in {row.decision for row in rows}
    assert sum(row.nbytes for row in rows) > 4 * (4 * 3 * WIDTH * 4 * 4)  # gates, four layers


CHECKS: dict[str, Callable[[CompiledStep], None]] = {
    "gru, frozen": gates_that_are_written_to_one_by_one_do_not_leave,
    "lstm": the_workspace_is_part_of_the_plan_and_leaves,
}


@pytest.mark.slow
def test_generated_code_runs_the_kernel_that_is_differentiated(wrap: Wrap) -> None:
    code = partial(wrap, codegen="inductor")
    offloaded = train("lstm, frozen", code)
    assert_identical(offloaded, train("lstm, frozen", partial(code, min_bytes=1 << 40)))
    for one, other in zip(offloaded, train("lstm, frozen", lambda step: step), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_backward_pass_works_in_a_copy_of_the_workspace() -> None:
    """What was stored may be read while it is used."""
    layer = nn.LSTM(WIDTH, WIDTH)
    captured = capture(lambda x: layer(x)[0].sum().backward(), (seeded("cpu", 4, 3, WIDTH),), {})
    (node,) = captured.recording.graph.find_nodes(
        op="call_function", target=recurrent.BACKWARD_LAYER
    )
    assert node.args[-1].target is torch.ops.aten.clone.default


def test_a_workspace_of_another_size_is_an_error() -> None:
    x, state = seeded("cpu", 4, 3, WIDTH), torch.zeros(3, WIDTH)
    layer = nn.LSTM(WIDTH, WIDTH).requires_grad_(False)
    sizes = (False, [], 2, WIDTH, 1, True, False, False, True)
    given = (x, *layer.parameters(), state, state, *sizes)
    asked = recurrent.workspace_bytes(given)
    assert recurrent.TRAINED_LAYER(*given, asked)[3].nbytes == asked
    with pytest.raises(StormError, match=f"of {asked} bytes, and made one of {asked + 1}"):
        recurrent.TRAINED_LAYER(*given, asked + 1)


@pytest.mark.parametrize("budget", ["least", 1.0])
def test_generated_code_gives_a_backward_pass_the_layouts_that_it_was_recorded_with(
    wrap: Wrap, cpu_costs: None, budget: str | float
) -> None:
    """oneDNN reads wrong values in others: with "least", its input is a copy that is made again."""
    torch.manual_seed(0)
    net = nn.LSTM(WIDTH, 32, batch_first=True)

    def step(x: Tensor) -> list[Tensor]:
        net(x)[0].square().mean().backward()
        found = [one.grad.clone() for one in net.parameters() if one.grad is not None]
        net.zero_grad()
        return found

    x = seeded("cpu", WIDTH, 20, WIDTH)
    expected = step(x)
    made = wrap(step, codegen="inductor", budget=budget, min_bytes=4096)
    assert_identical(made(x), expected)
