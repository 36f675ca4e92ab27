"""Captures: what they refuse, by its line, and that they leave no trace."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.capture import capture
from support.steps import everything
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Trained:
    """A layer, its optimizer, and a step whose body is given."""

    def __init__(self, body: Callable[[Trained, Tensor], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.body = body

    def step(self, x: Tensor) -> Any:
        loss = self.net(x).square().mean()
        loss.backward()
        found = None if self.body is None else self.body(self, loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def everything(self) -> list[Tensor]:
        return everything(self.net, self.optimizer, "cpu")


def branches(_: Trained, loss: Tensor) -> object:
    return 1 if loss > 0.5 else 2


def branches_on_a_number(_: Trained, loss: Tensor) -> object:
    return 1 if loss.item() > 0.5 else 2


def finds_elements(self: Trained, loss: Tensor) -> object:
    return self.net.weight.nonzero()


def resizes(_: Trained, loss: Tensor) -> object:
    return loss.new_zeros(4).resize_(8)


def schedules(self: Trained, loss: Tensor) -> object:
    self.optimizer.param_groups[0]["lr"] *= 0.5
    return None


def scales(self: Trained, loss: Tensor) -> object:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss)
    scaler.step(self.optimizer)
    return None


def puts_a_tensor_into_its_module(self: Trained, loss: Tensor) -> object:
    self.net.last = loss
    return None


def makes_a_parameter_anew(self: Trained, loss: Tensor) -> object:
    self.net.weight = nn.Parameter(self.net.weight * 0.9)
    return None


def draws_again(self: Trained, loss: Tensor) -> object:
    x = torch.ones(4, 8, requires_grad=True)
    checkpoint(nn.Sequential(self.net, nn.Dropout(0.5)), x, use_reentrant=False).sum().backward()
    return None


def makes_sparse_gradients(_: Trained, loss: Tensor) -> object:
    nn.Embedding(4, 4, sparse=True)(torch.tensor([1])).sum().backward()
    return None


def lists(self: Trained, _: Tensor) -> object:
    return self.net.bias.tolist()


LENGTHS = torch.tensor([1, 3])


def goes_to_numpy(_: Trained, loss: Tensor) -> object:
    return loss * float(np.asarray(LENGTHS)[0])


def formats(_: Trained, loss: Tensor) -> object:
    return f"{loss:.3f}"


def makes_a_tensor_of_elements(_: Trained, loss: Tensor) -> object:
    return torch.tensor([loss.detach(), 2 * loss.detach()])


REFUSED = {
    lists: r"holds \(\.tolist\(\)\) at .*test_capture.py:",
    goes_to_numpy: r"holds \(\.__array__\(\)\) at .*test_capture.py:",
    formats: r"holds \(\.__format__\(\)\) at .*test_capture.py:",
    makes_a_tensor_of_elements: r"holds \(its memory\) at .*test_capture.py:",
    makes_sparse_gradients: r"sum\(\).backward\(\)\) makes a tensor of layout torch.sparse_coo",
    branches: "return 1 if loss > 0.5 else 2",
    branches_on_a_number: r"return 1 if loss.item\(\) > 0.5 else 2",
    finds_elements: r"return self.net.weight.nonzero\(\)",
    resizes: r"return loss.new_zeros\(4\).resize_",
    schedules: "Call a scheduler after the step",
    scales: "GradScaler",
    puts_a_tensor_into_its_module: "Linear.last",
    makes_a_parameter_anew: "Linear.weight",
    draws_again: "leave checkpointing out",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_what_cannot_be_captured_is_refused_by_its_line(
    body: Callable[[Trained, Tensor], Any],
) -> None:
    one = Trained(body)
    before = one.everything()[:-2]
    attributes = dict(one.net.__dict__)
    with pytest.raises(UsageError, match=REFUSED[body]):
        capture(one.step, (seeded("cpu", 4, 8),), {})
    assert_identical(one.everything()[:-2], before)
    assert one.net.__dict__ == attributes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchscript_is_refused_by_name() -> None:
    net = nn.Linear(8, 8)
    traced = torch.jit.trace(net, torch.ones(2, 8))
    with pytest.raises(UsageError, match="module of TorchScript's"):
        capture(lambda x: traced(x).sum(), (torch.ones(4, 8),), {})
    assert_identical([traced(torch.ones(4, 8))], [net(torch.ones(4, 8))])


def test_a_buffer_may_be_assigned_before_its_module_runs() -> None:
    def trained(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.BatchNorm1d(8)

        def step(x: Tensor) -> Tensor:
            net.running_mean = net.running_mean * 0.5
            loss = net(x).square().mean()
            loss.backward()
            return loss

        call = wrap(step)
        losses = [call(seeded("cpu", 4, 8, seed=n)).detach() for n in range(3)]
        return [*losses, *net.buffers(), *(p.grad for p in net.parameters())]

    compiled = trained(partial(storm.compile_step, codegen="eager", min_bytes=1 << 40))
    assert_identical(compiled, trained(lambda step: step))


@dataclass
class Output:
    loss: Tensor


@dataclass(slots=True)
class SlottedOutput:
    losses: list[Tensor]


IN_VAIN: list[Callable[[Tensor], Any]] = [
    Output,
    lambda x: SlottedOutput([x]),
    lambda x: {x},
    lambda x: Output(x.sum().item()),
    lambda x: Output({"a": [Output(x)]}),
    lambda x: Counter(a=x.sum().item()),
    lambda x: in_array(x.sum().item()),
]


def in_array(value: object) -> object:
    made = np.empty(1, object)
    made[0] = value
    return made


@pytest.mark.parametrize("made", IN_VAIN)
def test_tensors_in_what_a_run_could_not_fill_are_refused(made: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UsageError, match=r"returns tensors in a .*return tuples, lists and dicts"):
        capture(lambda x: made(x * 2), (torch.ones(2),), {})


def test_an_average_of_weights_is_to_be_updated_outside() -> None:
    net = nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(net)
    with pytest.raises(UsageError, match=r"call update_parameters\(\) .* after the step"):
        capture(lambda: average.update_parameters(net), (), {})


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (torch.optim.RAdam, "branches on how often .*; pass capturable=True, or take another$"),
        (torch.optim.Adafactor, "branches on how often .*; take another optimizer$"),
    ],
)
def test_an_update_that_branches_is_refused_with_what_to_do(
    kind: type[torch.optim.Optimizer], advice: str
) -> None:
    one = Trained()
    one.optimizer = kind(one.net.parameters(), lr=1e-2)
    with pytest.raises(UsageError, match=advice):
        capture(one.step, (seeded("cpu", 4, 8),), {})


def of_each_row(net: nn.Linear, x: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (row,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return found(dict(net.named_parameters()), x)["weight"].norm(dim=(1, 2)).sum()


def of_copies(net: nn.Linear, x: Tensor) -> Tensor:
    made, table = copy.deepcopy((net.mean, [x.detach(), x.detach()])), copy.deepcopy(net)
    return (made[0] * made[1][0] - made[1][1] + table(x) + table.mean).sum()


@pytest.mark.parametrize("use", [of_each_row, of_copies])
def test_gradients_of_rows_and_deep_copies_are_those_of_each_run(
    use: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    def trained(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        net.register_buffer("mean", torch.ones(4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.mean.add_(1)
            return use(net, x).detach()

        call = wrap(step)
        return [call(seeded("cpu", 3, 4, seed=n)) for n in range(3)]

    compiled = trained(partial(storm.compile_step, codegen="eager", min_bytes=1 << 40))
    assert_identical(compiled, trained(lambda step: step))


def test_a_capture_runs_nothing() -> None:
    one = Trained()
    one.step(seeded("cpu", 4, 8))
    one.net(seeded("cpu", 4, 8)).sum().backward()
    before, state = one.everything()[:-2], torch.get_rng_state()
    settings = dict(one.optimizer.param_groups[0])
    for _ in range(2):
        capture(one.step, (seeded("cpu", 4, 8),), {})
    assert torch.equal(torch.get_rng_state(), state)
    assert_identical(one.everything()[:-2], before)
    assert one.optimizer.param_groups[0] == settings
    assert type(one.optimizer.param_groups[0]["lr"]) is float


def test_a_generator_of_the_steps_own_advances() -> None:
    def drawn(wrap: Callable[..., Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        call = wrap(lambda x: x + torch.rand(4, generator=generator))
        return [call(torch.zeros(4)) for _ in range(3)]

    compiled = drawn(partial(storm.compile_step, codegen="eager", min_bytes=1 << 40))
    assert_identical(compiled, drawn(lambda step: step))


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: it has the groups and the state of another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_an_optimizer_may_be_wrapped() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        inner = torch.optim.AdamW(net.parameters(), lr=0.1)
        optimizer, found = Wrapper(inner), []

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            inner.zero_grad()
            return loss

        call = wrap(step)
        for number in range(4):
            found.append(call(seeded("cpu", 2, 4, seed=number)))
            inner.param_groups[0]["lr"] *= 0.5
            assert type(inner.param_groups[0]["lr"]) is float
        return [*found, *net.parameters()]

    assert_identical(run(partial(storm.compile_step, codegen="eager")), run(lambda step: step))


class Sharpness(torch.optim.Optimizer):
    """As SAM: it shares its groups with the optimizer that updates, and has a state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)

    @torch.no_grad()
    def ascend(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["before"] = one.clone()
                one.add_(one.grad, alpha=group["rho"])

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        for one, state in self.state.items():
            one.copy_(state["before"])
        self.base.step()


def test_optimizers_may_share_groups_and_have_states_of_their_own() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer, found = Sharpness(net.parameters()), []

        def step(x: Tensor) -> Tensor:
            net(x).square().mean().backward()
            optimizer.ascend()
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            net.zero_grad()
            return loss

        call = wrap(step)
        for number in range(6):
            found.append(call(seeded("cpu", 2, 4, seed=number)))
            optimizer.param_groups[0]["rho" if number == 2 else "lr"] *= 0.5
        states = (*optimizer.state.values(), *optimizer.base.state.values())
        assert all(type(optimizer.param_groups[0][key]) is float for key in ("rho", "lr"))
        return [*found, *net.parameters(), *(one for state in states for one in state.values())]

    assert_identical(run(partial(storm.compile_step, codegen="eager")), run(lambda step: step))


def test_a_module_of_torchscript_that_is_only_held_is_no_concern() -> None:
    net = nn.Linear(4, 4)
    net.held = [torch.jit.script(nn.Linear(2, 2))]
    call = storm.compile_step(lambda x: net(x).sum(), codegen="eager")
    x = seeded("cpu", 2, 4)
    assert_identical([call(x)], [net(x).sum()])
    net.inner = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="module of TorchScript's"):
        call(x)
