"""What torch.compile makes, inside and around offload: exact, quiet, and smaller block by block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.compiled import LOOK_EVERY, CompiledParts
from support.training import Context, assert_identical, gradients, seeded
from torch import Tensor, nn

Program = Callable[[Context, str], list[Tensor]]

PROGRAMS: dict[str, Program] = {}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("nothing_is_measured"),
]
"""Of PyTorch's own, where it compiles."""


def program(function: Program) -> Program:
    """Add a function to those that are compared."""
    PROGRAMS[function.__name__] = function
    return function


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Have PyTorch start what it keeps for the life of the process, once and before each test."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, x = perceptron(device), seeded(device, 16, 32, grad=True)
    torch.compile(net)(x).sum().backward()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def perceptron(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).to(device)


@program
def a_compiled_layer(context: Context, device: str) -> list[Tensor]:
    net, x = perceptron(device), seeded(device, 16, 32, grad=True)
    net.compile()
    with context():
        loss = net(x).tanh().square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *gradients(net)]


@program
def dynamic_shapes(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
    layer.compile(dynamic=True)
    losses = []
    for length in (8, 16, 24):
        with context():
            loss = layer(seeded(device, 2, length, 32)).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *gradients(layer)]


@program
def a_compiled_step_with_its_backward(context: Context, device: str) -> list[Tensor]:
    net = perceptron(device)

    @torch.compile
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    with context():
        loss = step(seeded(device, 16, 32))
    return [loss, *gradients(net)]


@program
def blocks(context: Context, device: str) -> list[Tensor]:
    nets = [perceptron(device) for _ in range(3)]
    for net in nets:
        net.compile()
    x = seeded(device, 16, 32, grad=True)
    with context():
        h = x * 1
        for net in nets:
            h = h + net(h)
        loss = h.square().sum()
    del h
    loss.backward()
    return [loss.detach(), x.grad, *(g for net in nets for g in gradients(net))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_gradients_are_identical(
    name: str, device: str, client: storm.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = PROGRAMS[name](nullcontext, device)
    torch._dynamo.reset()
    offload = client.offload(min_bytes=1)
    assert_identical(PROGRAMS[name](lambda: offload, device), expected)
    assert offload.stats().saved_bytes > 0
    assert "stormd" not in capfd.readouterr().err


def test_what_compiled_blocks_save_leaves(device: str, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    blocks(lambda: offload, device)
    assert offload.stats().offloaded_bytes > 0


class Break:
    """A context manager that torch.compile leaves as it is, and that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


for method in (Break.__enter__, Break.__exit__):
    method.__dict__["_torchdynamo_disable"] = True


def compiled_around(context: object, device: str, *, fullgraph: bool = False) -> list[Tensor]:
    net, x = perceptron(device), seeded(device, 16, 32, grad=True)

    @torch.compile(fullgraph=fullgraph)
    def step(x: Tensor) -> Tensor:
        with context:
            return net(x).square().sum()

    loss = step(x)
    loss.backward()
    return [loss.detach(), x.grad, *gradients(net)]


def test_a_block_inside_of_a_compiled_function(
    device: str, client: storm.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """The graph breaks where the block begins, as it does for any context manager."""
    expected = compiled_around(Break(), device)
    torch._dynamo.reset()
    offload = client.offload(min_bytes=1)
    assert_identical(compiled_around(offload, device), expected)
    assert capfd.readouterr().err == ""


def test_one_graph_around_a_block_is_refused_by_name(device: str, client: storm.Client) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Offload"):
        compiled_around(client.offload(min_bytes=1), device, fullgraph=True)


@pytest.mark.parametrize("wrap", [torch.compile, lambda net: (net.compile(), net)[1]])
def test_a_model_compiled_as_a_whole_is_warned_of_once(
    wrap: Callable[[nn.Module], nn.Module], client: storm.Client
) -> None:
    offload = client.offload(wrap(perceptron("cpu")))
    with pytest.warns(RuntimeWarning, match="Sequential is compiled as a whole"), offload:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload:
            pass


def test_compiled_blocks_are_not_warned_of(client: storm.Client) -> None:
    net = perceptron("cpu")
    net[0].compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with client.offload(net):
            pass


def test_what_is_compiled_between_two_steps_is_known_at_once() -> None:
    parts, net = CompiledParts(), perceptron("cpu")
    assert not parts.may_run([net])
    net[0].compile(backend="eager")
    assert parts.may_run([net])


def test_what_pytorch_has_forgotten_is_found_in_the_modules() -> None:
    """For it compiles them again."""
    parts, net = CompiledParts(), perceptron("cpu")
    assert not parts.may_run([net])
    net[0].compile(backend="eager")
    torch._dynamo.reset()
    assert [parts.may_run([net]) for _ in range(LOOK_EVERY)] == [
        *[False] * (LOOK_EVERY - 1),
        True,
    ]
