"""Random numbers are drawn again as they were, and the generator notices nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import storm_client as storm
import torch
from storm_client.eager import recompute
from storm_client.eager.operations import bound
from storm_client.eager.sources import OtherNumbers
from storm_client.errors import ActivationLost
from storm_client.native import loader as native
from support.following import Followed
from support.planning import replay_all
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from storm_client.native import _follow

Context = Callable[[], AbstractContextManager[object]]

STEPS = 8
WIDTH = 64

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def x(device: str) -> Tensor:
    torch.manual_seed(5)
    return seeded(device, 64, WIDTH)


def drawn(function: Callable[..., Tensor], *arguments: Any) -> tuple[_follow.Draw, Tensor]:
    """Return what notes what a function draws, and what it makes of that."""
    module = native.module()
    if module is None:
        pytest.skip(f"no compiled module: {native.reason()}")
    draw = module.note_draw(arguments[0])
    made = function(*arguments)
    draw.end()
    return draw, made


def attention(q: Tensor, dropout: float) -> Tensor:
    q = q.view(2, 2, 16, WIDTH)
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout)


DRAWING: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "dropout": (torch.dropout, (0.3, True)),
    "alpha": (torch.alpha_dropout, (0.3, True)),
    "feature": (torch.feature_dropout, (0.3, True)),
    "feature alpha": (torch.feature_alpha_dropout, (0.3, True)),
    "all of it": (torch.dropout, (1.0, True)),
    "nothing of it": (torch.dropout, (0.0, True)),
    "attention": (attention, (0.3,)),
    "normal numbers": (torch.normal, (1.0,)),
}


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_is_drawn_again_and_the_generator_is_as_it_was(
    name: str, dtype: torch.dtype, x: Tensor
) -> None:
    function, options = DRAWING[name]
    draw, made = drawn(function, x.to(dtype), *options)
    for between in (lambda: torch.randn(3, device=x.device), lambda: torch.manual_seed(6)):
        between()
        state = generator(x).get_state()
        expected = torch.randn(3, device=x.device), torch.rand(4, device=x.device)
        generator(x).set_state(state)
        for _ in range(2):
            assert_identical([draw.again(function, [x.to(dtype), *options], {})], [made])
        found = torch.randn(3, device=x.device), torch.rand(4, device=x.device)
        assert_identical(found, expected)


def generator(x: Tensor) -> torch.Generator:
    return torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator


def disturbed(dropout: Callable[..., Tensor], disturb: Callable[[Tensor], object]) -> Any:
    """Return a dropout behind which another thread does something with the generator."""

    def run(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        made = dropout(x, *arguments, **options)
        beside(lambda: disturb(x))
        return made

    return run


@pytest.mark.parametrize("disturb", [torch.rand_like, lambda _: torch.manual_seed(1)])
def test_another_thread_that_draws_or_seeds_meanwhile_is_told_of(
    disturb: Callable[[Tensor], object], x: Tensor
) -> None:
    draw, _ = drawn(torch.dropout, x, 0.3, True)
    state = generator(x).get_state()
    with pytest.raises(ActivationLost, match="another thread has drawn"):
        draw.again(disturbed(torch.dropout, disturb), [x, 0.3, True], {})
    if disturb is torch.rand_like:
        assert torch.equal(generator(x).get_state(), state)
    beside(lambda: draw.again(torch.dropout, [x, 0.3, True], {}))


def test_another_thread_that_has_drawn_in_the_forward_pass_is_told_of(x: Tensor) -> None:
    draw, _ = drawn(disturbed(torch.dropout, torch.rand_like), x, 0.3, True)
    with pytest.raises(ActivationLost, match="another thread has drawn"):
        draw.again(torch.dropout, [x, 0.3, True], {})


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_leaves_the_generator_as_it_was(error: type[BaseException], x: Tensor) -> None:
    draw, made = drawn(torch.dropout, x, 0.3, True)
    state = generator(x).get_state()

    def failing(*arguments: Any) -> Tensor:
        torch.dropout(*arguments)
        raise error

    with pytest.raises(error):
        draw.again(failing, [x, 0.3, True], {})
    assert torch.equal(generator(x).get_state(), state)
    assert_identical([draw.again(torch.dropout, [x, 0.3, True], {})], [made])


def test_a_draw_inside_of_another(x: Tensor) -> None:
    """As a signal's handler may run a backward pass."""
    draw, made = drawn(torch.dropout, x, 0.3, True)
    other, made_by_other = drawn(torch.dropout, x, 0.6, True)

    def interrupted(*arguments: Any) -> Tensor:
        assert_identical([other.again(torch.dropout, [x, 0.6, True], {})], [made_by_other])
        return torch.dropout(*arguments)

    assert_identical([draw.again(interrupted, [x, 0.3, True], {})], [made])


def test_threads_that_draw_again_take_turns(x: Tensor) -> None:
    draws = [drawn(torch.dropout, x, 0.1 * number, True) for number in range(1, 5)]
    state = generator(x).get_state()
    failed: list[BaseException] = []

    def run(number: int) -> None:
        draw, made = draws[number]
        try:
            for _ in range(100):
                again = draw.again(torch.dropout, [x, 0.1 * (number + 1), True], {})
                assert_identical([again], [made])
        except BaseException as error:  # noqa: BLE001 - seen by the test
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed, failed
    assert torch.equal(generator(x).get_state(), state)


def beside(function: Callable[[], object]) -> None:
    """Call it in a thread of its own, and wait for that."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# --- steps --------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Layers with what drops."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH).to(device)
        self.second = nn.Linear(WIDTH, WIDTH).to(device)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x).tanh()).exp()
        return (self.dropout(self.second(x)) + x).sin().square().mean()


def step(
    net: nn.Module,
    x: Tensor,
    context: Context,
    between: Context = nullcontext,
) -> list[Tensor]:
    """Return the loss, the gradients and what is drawn after the step."""
    net.zero_grad()
    torch.manual_seed(7)
    with context():
        loss = net(x)
    with between():
        loss.backward()
    gradients = [one.grad for one in net.parameters() if one.grad is not None]
    return [loss.detach(), *gradients, torch.rand(4, device=x.device)]


@contextmanager
def drawing_beside(device: str) -> Iterator[None]:
    """Have another thread draw from the generator all the time."""
    ends = threading.Event()

    def draw() -> None:
        while not ends.is_set():
            torch.rand(3, device=device)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_steps_with_another_thread_that_draws_are_right_or_raise(
    device: str, client: storm.Client, path: str, followed: Followed
) -> None:
    net, x = Dropping(device), seeded(device, 32, WIDTH)
    *expected, _ = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=256)
    for _ in range(STEPS):
        step(net, x, lambda: offload)
    assert offload.stats().replayed_bytes > 0
    assert followed[-1] == (path == "compiled")
    for _ in range(40):
        with suppress(OtherNumbers):
            *found, _ = step(net, x, lambda: offload, lambda: drawing_beside(device))
            assert_identical(found, expected)
    found = step(net, x, lambda: offload)
    assert_identical(found, step(net, x, nullcontext))


def test_a_trial_that_another_thread_disturbs_raises(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread may have drawn other numbers than it would have."""
    replay_all(monkeypatch)
    net, x = Dropping(device), seeded(device, 32, WIDTH)
    offload = client.offload(net, min_bytes=256)
    step(net, x, lambda: offload)

    monkeypatch.setattr(recompute, "bound", lambda one: disturbed(bound(one), torch.rand_like))
    with pytest.raises(ActivationLost, match="another thread has drawn"):
        step(net, x, lambda: offload)


def test_without_compiled_code_nothing_is_drawn_again(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    monkeypatch.setattr(native, "module", lambda: None)
    net, x = Dropping(device), seeded(device, 32, WIDTH)
    expected = step(net, x, nullcontext)
    offload = client.offload(net, min_bytes=256)
    for _ in range(STEPS):
        assert_identical(step(net, x, lambda: offload), expected)
    operations = {row.operation for row in offload.plan.rows}
    assert "tanh" in operations
    assert "dropout" not in operations


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return "cuda"


@pytest.mark.gpu
def test_a_captured_graph_goes_on_drawing(gpu: str) -> None:
    x, made = seeded(gpu, 64, WIDTH), torch.empty(64, WIDTH, device=gpu)
    torch.dropout(x, 0.3, train=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.copy_(torch.dropout(x, 0.3, train=True))

    def replayed(again: bool) -> list[Tensor]:
        torch.manual_seed(7)
        draw, _ = drawn(torch.dropout, x, 0.3, True)
        found = []
        for _ in range(3):
            if again:
                draw.again(torch.dropout, [x, 0.3, True], {})
            graph.replay()
            found.append(made.clone())
        return [*found, torch.rand(4, device=gpu)]

    assert_identical(replayed(again=True), replayed(again=False))


@pytest.mark.gpu
def test_recurrent_layers_go_on_with_their_dropout(gpu: str) -> None:
    """CuDNN's draws once what it drops, and anew if a generator's state was set."""
    x, lstm = seeded(gpu, 5, 4, WIDTH), nn.LSTM(WIDTH, 32, 2, dropout=0.4).to(gpu)

    def run(again: bool) -> list[Tensor]:
        torch.manual_seed(7)
        draw, _ = drawn(torch.dropout, x, 0.3, True)
        found = []
        for _ in range(3):
            found.append(lstm(x)[0].detach())
            if again:
                draw.again(torch.dropout, [x, 0.3, True], {})
        return [*found, torch.rand(4, device=gpu)]

    assert_identical(run(again=True), run(again=False))
