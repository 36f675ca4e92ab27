"""Large results: each leaves by one call into Python, once nobody else holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.hooks import StepHooks
from storm_client.results import Results
from support.following import Followed, follow_by
from support.in_place_lane import InPlaceCpuLane
from support.interrupted_sends import interrupt_second
from support.planning import offload_products
from support.training import assert_identical, seeded
from support.waiting import wait_until
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

MIB = 1 << 20
LARGE = 16 * MIB
WIDTH = 64
STEPS = 5


class Calls(list[str]):
    """What Python was asked for in the last step."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    noted = Calls()

    def note(of: type, name: str, told: Callable[[Any], bool] = bool) -> None:
        function = getattr(of, name)

        def noting(self: Any, *given: Any) -> Any:
            found = function(self, *given)
            noted.append(name if told(found) else f"no {name}")
            return found

        monkeypatch.setattr(of, name, noting)

    note(Results, "offload_waiting", lambda _: True)
    note(Results, "offload_unshared")
    note(StepHooks, "_pack_expected")
    return noted


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    offload_products(monkeypatch)
    monkeypatch.setattr(InPlaceCpuLane, "budget_bytes", 4 * MIB)  # so that all leaves
    return follow_by("compiled", monkeypatch)


@pytest.fixture(params=["staged", "in place"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def any_client(kind: str, request: pytest.FixtureRequest) -> Iterator[storm.Client]:
    """A client whose thread copies what it sends, and one whose daemon reads where it lies."""
    if kind == "staged":
        yield request.getfixturevalue("client")
        return
    make, sizes = request.getfixturevalue("make_late_daemon"), {"pool_bytes": 512 * MIB}
    sizes |= {"staging_bytes_cpu": 2 << 30, "all_staging_bytes_cpu": 4 << 30}
    daemon = make(**sizes, part_bytes_cpu=2 * LARGE)
    (lanes := request.getfixturevalue("lanes")).clear()
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)


Forward = Callable[[Tensor, Tensor], Tensor]


def leaves() -> list[Tensor]:
    count = LARGE // WIDTH // 4
    weight, x = seeded("cpu", WIDTH, WIDTH, seed=1), seeded("cpu", count, WIDTH, seed=2)
    return [weight.requires_grad_(), x.requires_grad_()]


def step(forward: Forward, block: Any = None) -> list[Tensor]:
    weight, x = leaves()
    if block is None:
        loss = forward(x, weight)
    else:
        with block:
            loss = forward(x, weight)
    loss.backward()
    return [loss.detach(), weight.grad, x.grad]  # type: ignore[list-item]


def products(x: Tensor, weight: Tensor, *, changes: bool = False) -> Tensor:
    for _ in range(3):
        made = linear(x, weight)
        x = silu(made)
        if changes:
            made.mul_(2)
    return x.square().mean()


class SavedThrice(torch.autograd.Function):
    """Looks at what it has saved of one result: it is one storage again."""

    @staticmethod
    def forward(ctx: Any, made: Tensor) -> Tensor:
        ctx.save_for_backward(made, made.view(-1), made[1:])
        return made.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        places = {saved.untyped_storage().data_ptr() for saved in ctx.saved_tensors}
        assert len(places) == 1
        first, flat, rest = ctx.saved_tensors
        return grad * first * flat.view_as(first) + rest.sum()


def saved_thrice(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(2):
        x = SavedThrice.apply(linear(x, weight))
    return x.square().mean()


def held(x: Tensor, weight: Tensor) -> Tensor:
    """The script holds what leaves, until the end."""
    made = []
    for _ in range(3):
        made.append(linear(x, weight))
        x = silu(made[-1])
    return (x * made[0]).mean()


def attention(x: Tensor, weight: Tensor) -> Tensor:
    """It saves its result before it returns it."""
    for _ in range(2):
        query = linear(x, weight).view(-1, 16, 64, WIDTH)
        x = scaled_dot_product_attention(query, query, query).reshape(x.shape)
    return x.square().mean()


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """Views of one result are saved."""
    for _ in range(2):
        left, right = linear(x, weight).chunk(2, dim=1)
        x = torch.cat([silu(left) * right, left.sin() * right], dim=1)
    return x.square().mean()


BY_PYTHON = {products: 1, held: 2, attention: 1, parts: 4}
"""How often the first value of a step is saved, which Python packs."""


def trained(
    forward: Forward, client: storm.Client, followed: Followed, calls: Calls
) -> storm.Offload:
    """Train until compiled code has followed steps; each has the bits that it has without."""
    expected = step(forward)
    block = client.offload(min_bytes=1 << 16, budget=0.0, codec="raw")
    for _ in range(STEPS):
        calls.clear()
        assert_identical(step(forward, block), expected)
    assert followed[-1]
    return block


def assert_is_asked_once(forward: Forward, block: storm.Offload, calls: Calls) -> None:
    """Python is asked for each result once, when nobody else holds it or at the block's end."""
    assert calls.count("_pack_expected") <= BY_PYTHON[forward]
    assert calls.count("offload_waiting" if forward is held else "offload_unshared") > 0
    assert block.stats().offloaded_bytes > STEPS * LARGE


def test_large_results_leave_or_are_refused(
    any_client: storm.Client, followed: Followed, calls: Calls
) -> None:
    """Refused are those that are changed; graphs that are dropped leave nothing behind."""
    trained(saved_thrice, any_client, followed, calls)
    block = trained(products, any_client, followed, calls)
    assert_is_asked_once(products, block, calls)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1"):
        step(lambda x, weight: products(x, weight, changes=True), block)
    weight, x = leaves()
    with block:
        products(x, weight)  # nobody keeps it
        kept = products(x, weight)
    assert kept is not None
    del kept


@pytest.mark.slow
@pytest.mark.parametrize("forward", [attention, held, parts])
def test_bits_are_those_without(
    forward: Forward, any_client: storm.Client, followed: Followed, calls: Calls
) -> None:
    block = trained(forward, any_client, followed, calls)
    assert_is_asked_once(forward, block, calls)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_all_whole(
    when: str,
    any_client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, block = step(products), any_client.offload(min_bytes=1 << 16, budget=0.0)
    for _ in range(STEPS):
        step(products, block)
    interrupt_second(monkeypatch, when)
    made: list[Tensor] = []

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = silu(linear(x, weight))
            made.append(x)
        return x.square().mean()

    with pytest.raises(KeyboardInterrupt):
        step(noted, block)
    made[-1].sum().backward()  # what was saved until then is whole
    made.clear()
    assert_identical(step(products, block), expected)
