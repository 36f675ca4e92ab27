"""Modules that run in one kernel where nobody watches do so with offload as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.eager.function_modes import Watching, are_altered, unaltered
from support.altering_modes import ALTERING
from support.training import Context, assert_identical, seeded
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._device import DeviceContext

WIDTH = 64
STEPS = 8

has_torch_function = torch.overrides.has_torch_function

pytestmark = pytest.mark.filterwarnings("ignore")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)


def encoder() -> nn.Module:
    one = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(one, 2)


class OnTop(nn.Module):
    """Trains two products on what a part makes that does not train."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, teacher: nn.Module) -> Tensor:
        with torch.no_grad():
            aim = teacher(x)
        return (self.head(self.part(x)) - aim).square().mean()


@pytest.mark.parametrize("part", [Attention, layer, encoder])
def test_parts_and_teachers_have_their_bits(
    part: Callable[[], nn.Module], device: str, client: storm.Client
) -> None:
    torch.manual_seed(0)
    net, teacher = OnTop(part()).to(device), part().to(device).eval()
    net.part.eval()
    x = seeded(device, 4, 16, WIDTH)

    def step(context: Context) -> list[Tensor]:
        net.zero_grad()
        with context():
            loss = net(x, teacher)
        loss.backward()
        return [
            loss.detach(),
            *(one.grad.clone() for one in net.head.parameters() if one.grad is not None),
        ]

    expected = step(nullcontext)
    offload = client.offload(net, min_bytes=1)
    for _ in range(STEPS):
        assert_identical(step(lambda: offload), expected)
    assert torch.overrides.has_torch_function is has_torch_function


def test_they_have_them_in_a_compiled_step(device: str, client: storm.Client) -> None:
    x = seeded(device, 4, 16, WIDTH)

    def trained(wrap: Callable[[Callable[[Tensor], Tensor]], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net, teacher = OnTop(Attention()).to(device), Attention().to(device).eval()
        net.part.eval()
        optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x, teacher)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        return [*(run(x).clone() for _ in range(3)), *net.parameters()]

    expected = trained(lambda step: step)
    found = trained(lambda step: storm.compile_step(step, client=client, codegen="eager"))
    assert_identical(found, expected)
    assert torch.overrides.has_torch_function is has_torch_function


def test_torchscript_compiles_attention_while_a_mode_watches(client: storm.Client) -> None:
    torch.manual_seed(0)
    net = nn.MultiheadAttention(24, 2)  # TorchScript compiles a class once for each width
    x = seeded("cpu", 4, 2, 24)

    def gradients(attention: Any) -> list[Tensor]:
        net.zero_grad()
        attention(x, x, x)[0].sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]

    expected = gradients(net)
    with client.offload(net, min_bytes=1):
        assert_identical(gradients(net), expected)
        assert_identical(gradients(torch.jit.script(net)), expected)  # type: ignore[no-untyped-call]


class Theirs(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Ours(Watching):
    __torch_function__ = Theirs.__torch_function__


class Subclass(Tensor):
    pass


def test_what_others_override_is_told() -> None:
    x = torch.ones(2)
    with Ours():
        asked = torch.overrides.has_torch_function
        assert asked is not has_torch_function
        assert not asked((x, None, nn.Parameter(x)))
        assert asked((x, x.as_subclass(Subclass)))
        with Theirs():
            assert asked((x,))
        with DeviceContext(torch.device("cpu")):
            assert asked((x,))
    assert not asked((x,))
    assert torch.overrides.has_torch_function is has_torch_function


def test_one_thread_ends_while_another_watches() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def watch() -> None:
        with Ours():
            begun.set()
            go_on.wait(60)

    thread = threading.Thread(target=watch)
    thread.start()
    assert begun.wait(60)
    Ours().end()
    assert torch.overrides.has_torch_function is not has_torch_function
    go_on.set()
    thread.join()
    assert torch.overrides.has_torch_function is has_torch_function


class PassingThrough(BaseTorchFunctionMode, Watching):
    """Watches nothing."""


@pytest.mark.parametrize("mode", ALTERING)
def test_modes_of_a_script_may_alter_functions(mode: Callable[[], Any]) -> None:
    x = torch.ones(4)
    expected = nn.functional.silu(x)
    with DeviceContext(torch.device("cpu")), PassingThrough():  # type: ignore[no-untyped-call]
        assert not are_altered()
        with mode():
            assert are_altered()
            halved = nn.functional.silu(x)
            with unaltered():
                assert not are_altered()
                assert_identical([nn.functional.silu(x)], [expected])
            assert_identical([nn.functional.silu(x)], [halved])
        assert not are_altered()
    assert_identical([halved], [expected / 2])
