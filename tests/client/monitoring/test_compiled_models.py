"""What torch.compile makes, inside and around offload: exact, quiet, and smaller block by block."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client import hook_stack as stacks
from support import compiling_first
from support.planning import mind_the_device_alone, replay_all
from support.training import Context, assert_identical, gradients, seeded
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

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
def dynamic_shapes(context: Context, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
    layer.compile(dynamic=True, backend="aot_eager")
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

    @torch.compile(backend="aot_eager")
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


class Break:
    """A context manager that torch.compile leaves as it is, and that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


for method in (Break.__enter__, Break.__exit__):
    method.__dict__["_torchdynamo_disable"] = True


def compiled_around(context: object, device: str, *, fullgraph: bool = False) -> list[Tensor]:
    net, x = perceptron(device), seeded(device, 16, 32, grad=True)

    @torch.compile(fullgraph=fullgraph, backend="aot_eager")
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
        blockwise = perceptron("cpu")
        blockwise[0].compile()
        with client.offload(blockwise):
            pass


def steps(call: Callable[[Tensor], Tensor], offload: storm.Offload, x: Tensor) -> list[str]:
    """Make some steps; return what was warned of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(6):
            with offload:
                loss = call(x).square().sum()
            loss.backward()
    return [str(one.message) for one in found if "peak" in str(one.message)]


@pytest.mark.parametrize(("of", "replay"), [("module", True), ("function", False)])
def test_a_model_that_is_compiled_after_it_was_given_is_warned_of_once(
    of: str, replay: bool, device: str, client: storm.Client
) -> None:
    net = perceptron(device)
    offload = client.offload(net, min_bytes=1, replay=replay)
    call = torch.compile(net if of == "module" else lambda x: net(x) * 1, backend="aot_eager")
    (text,) = steps(call, offload, seeded(device, 16, 32))
    assert text.startswith("one compiled graph saves ")
    assert "storm_client.compile(model)" in text


def test_what_the_backend_handles_is_not_warned_of(device: str, client: storm.Client) -> None:
    net = perceptron(device)
    offload = client.offload(net, min_bytes=1)
    call = storm.compile(net, client=client, min_bytes=1, codegen="eager")
    assert steps(call, offload, seeded(device, 16, 32)) == []


# --- recomputation beside compiled code -----------------------------------------------------


STEPS = 5


def curve(x: Tensor) -> Tensor:
    """Have bits of its own where a compiler fuses it."""
    return nn.functional.gelu(x) * x.sin() * x.cos().tanh()


class Curved(nn.Module):
    """Three blocks that can be recomputed, behind each of which something may be put."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.behind: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + self.behind(nn.functional.silu(linear(norm(x))))
        return x


def curved_step(net: Curved, x: Tensor, context: Context) -> list[Tensor]:
    net.zero_grad()
    with context():
        loss = net(x).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(net)]


def curved(device: str) -> tuple[Curved, Tensor]:
    torch.manual_seed(0)
    return Curved().to(device), seeded(device, 16, 32)


def compile_beside() -> None:
    """Compile what is never called, a loss elsewhere, an optimizer, and flex attention."""
    torch.compile(curve)
    x = seeded("cpu", 16, 32, grad=True)
    torch.compile(curve)(x).sum().backward()
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(seeded("cpu", 2, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    importlib.import_module("torch.nn.attention.flex_attention")


@pytest.mark.parametrize("when", [0, STEPS - 1])
def test_what_is_compiled_beside_a_step_takes_nothing_from_it(
    when: int, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    net, x = curved(device)
    offload = client.offload(net, min_bytes=1)
    expected = curved_step(net, x, nullcontext)
    for number in range(STEPS):
        if number == when:
            compile_beside()
        assert_identical(curved_step(net, x, lambda: offload), expected)
    before = offload.stats().replayed_bytes
    for _ in range(STEPS):  # a GPU's passes are timed first, and the next step tries another plan
        assert_identical(curved_step(net, x, lambda: offload), expected)
    assert offload.stats().replayed_bytes > before
    assert "compiled code" not in str(offload.plan)


@pytest.mark.parametrize(("when", "is_known"), [(0, True), (STEPS - 1, False)])
def test_compiled_code_within_a_step_is_run_as_without_offload(
    when: int,
    is_known: bool,
    device: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody watches it, and the plan says why nothing is recomputed."""
    replay_all(monkeypatch)
    net, x = curved(device)
    plain = curved_step(net, x, nullcontext)
    compiled = torch.compile(curve)
    if is_known:
        net.behind = compiled
        curved_step(net, x, nullcontext)
        net.behind = lambda x: x
    counters.clear()
    found = []
    offload = client.offload(net, min_bytes=1)
    for number in range(STEPS + 2):
        if number == when:
            net.behind = compiled
        found.append(curved_step(net, x, lambda: offload))
        assert not stacks.function_modes()
    expected = curved_step(net, x, nullcontext)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == (not is_known)
    for number, step in enumerate(found):
        assert_identical(step, expected if number >= when else plain)
    before = offload.stats().replayed_bytes
    assert_identical(curved_step(net, x, lambda: offload), expected)
    assert offload.stats().replayed_bytes == before
    assert "the step runs compiled code" in str(offload.plan)


def test_nothing_of_dynamo_is_replaced_while_nobody_watches(
    device: str, client: storm.Client
) -> None:
    def there() -> list[object]:
        of_dynamo = [eval_frame.set_eval_frame, eval_frame._maybe_set_eval_frame]  # type: ignore[attr-defined]
        return [*of_dynamo, torch._C._dynamo.eval_frame.set_eval_frame]

    before = there()
    net, x = curved(device)
    offload = client.offload(net, min_bytes=1)
    with offload:
        net(x)
        assert there() != before
    assert there() == before


@pytest.mark.slow
def test_dynamo_may_be_loaded_in_a_block(client: storm.Client) -> None:
    """In a process that has not loaded it yet."""
    subprocess.run(
        [sys.executable, str(Path(compiling_first.__file__)), client.address],
        check=True,
        timeout=300.0,
    )


def test_the_plan_says_that_recomputation_is_switched_off(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is offloaded: what stays because the step is bound by its thread would do so too."""
    mind_the_device_alone(monkeypatch)
    net, x = curved(device)
    offload = client.offload(net, min_bytes=1, replay=False)
    for _ in range(3):
        curved_step(net, x, lambda: offload)
    assert "replay=False was passed" in str(offload.plan)
    assert "no operation is known" not in str(offload.plan)
