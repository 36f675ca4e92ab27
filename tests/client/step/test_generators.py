"""A step that seeds generators or uses their states is refused; what only looks at them is not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Wrap = Callable[..., CompiledStep]

Body = Callable[[Tensor, torch.Generator], Tensor]


def seeds(x: Tensor, _: torch.Generator) -> Tensor:
    torch.manual_seed(3)
    return functional.dropout(x)


def seeds_behind_what_it_draws(x: Tensor, _: torch.Generator) -> Tensor:
    x = functional.dropout(x)
    torch.manual_seed(3)
    return x


def seeds_by_chance(x: Tensor, _: torch.Generator) -> Tensor:
    torch.seed()
    return functional.dropout(x)


def forks(x: Tensor, _: torch.Generator) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.randn_like(x)
    return x + noise


def draws_the_same_twice(x: Tensor, _: torch.Generator) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return first + torch.rand_like(x)


def seeds_its_own(x: Tensor, own: torch.Generator) -> Tensor:
    own.manual_seed(0)
    return x + torch.rand(x.shape, generator=own)


def seeds_its_own_later(x: Tensor, own: torch.Generator) -> Tensor:
    x = x + torch.rand(x.shape, generator=own)
    own.manual_seed(0)
    return x


@pytest.mark.parametrize(
    ("body", "is_argument"),
    [
        (seeds, False),
        (seeds_behind_what_it_draws, False),
        (seeds_by_chance, False),
        (forks, False),
        (draws_the_same_twice, False),
        (seeds_its_own, False),
        (seeds_its_own, True),
        (seeds_its_own_later, True),
    ],
)
def test_a_step_that_sets_a_generator_is_refused_and_leaves_it(
    body: Body, is_argument: bool, wrap: Wrap
) -> None:
    own = torch.Generator().manual_seed(0)
    given = own if is_argument else None
    call = wrap(lambda x, one=None: body(x, own if one is None else one))
    torch.manual_seed(3)
    before = torch.get_rng_state(), own.get_state()
    with pytest.raises(UsageError, match="seeds a generator or sets its state"):
        call(torch.ones(4), given)
    assert_identical((torch.get_rng_state(), own.get_state()), before)


def looks(x: Tensor) -> Tensor:
    assert torch.get_rng_state().numel()
    assert torch.initial_seed() >= 0
    return functional.dropout(x)


def forks_for_nothing(x: Tensor) -> Tensor:
    x = functional.dropout(x)
    with torch.random.fork_rng(devices=[]):
        x = x * 2
    return functional.dropout(x)


LAYER = nn.Linear(4, 4)


def checkpoints(x: Tensor) -> Tensor:
    """What checkpointing sets in the backward pass it sets back."""
    y = functional.dropout(x)
    loss = checkpoint(LAYER, y, use_reentrant=False).square().sum()
    loss = functional.dropout(loss) + y.sum()
    loss.backward()
    assert LAYER.weight.grad is not None
    gradient = LAYER.weight.grad
    LAYER.zero_grad()
    return gradient


@pytest.mark.parametrize("body", [looks, forks_for_nothing, checkpoints])
def test_a_step_that_sets_back_what_it_found_is_none_of_these(
    body: Callable[[Tensor], Tensor], wrap: Wrap
) -> None:
    found = []
    for call in (body, wrap(body)):
        torch.manual_seed(5)
        found.append([call(seeded("cpu", 4, 4, seed=n)).detach() for n in range(3)])
        found[-1].append(torch.get_rng_state())
    assert_identical(found[1], found[0])


def test_a_seed_that_a_step_reads_takes_effect(wrap: Wrap) -> None:
    def step(x: Tensor) -> tuple[Tensor, int]:
        return functional.dropout(x), torch.initial_seed()

    call = wrap(step)
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        found = [call(torch.ones(4)) for _ in range(2)]
        torch.manual_seed(seed)
        for one, other in zip(found, [step(torch.ones(4)) for _ in range(2)], strict=True):
            assert_identical([one[0]], [other[0]])
            assert one[1] == other[1] == seed


READS: dict[str, Callable[[torch.Generator], object]] = {
    "its seed": lambda own: own.initial_seed(),
    "its state": lambda own: own.get_state(),
    "a copy": copy.deepcopy,
    "PyTorch's seed, past its function": lambda _: torch.default_generator.initial_seed(),
    "PyTorch's state": lambda _: torch.get_rng_state(),
    "a sum of PyTorch's state": lambda _: torch.get_rng_state().sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_uses_the_state_of_a_generator_is_refused(name: str, wrap: Wrap) -> None:
    own = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), own.get_state()

    def step(x: Tensor) -> object:
        return x + torch.rand(4, generator=own), READS[name](own)

    with pytest.raises(UsageError, match=r"reads the seed or state .*test_generators.py"):
        wrap(step)(torch.ones(4))
    assert_identical((torch.get_rng_state(), own.get_state()), before)


@pytest.mark.parametrize("file", ["<stdin>", "/home/me/torch/train.py"])
def test_a_script_may_be_typed_in_or_lie_in_a_folder_called_torch(file: str, wrap: Wrap) -> None:
    space: dict[str, Any] = {"own": torch.Generator().manual_seed(3)}
    exec(compile("def step(x):\n    return x + own.initial_seed()", file, "exec"), space)
    with pytest.raises(UsageError, match=f"reads the seed or state .* at {file}:2"):
        wrap(space["step"])(torch.ones(4))


def test_other_threads_draw_and_seed_as_ever(wrap: Wrap) -> None:
    drawn: list[Tensor] = []

    def elsewhere() -> None:
        torch.manual_seed(7)
        drawn.append(torch.rand(3))
        drawn.append(torch.get_rng_state())

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return functional.dropout(x)

    wrap(step)(torch.ones(4))
    other = torch.Generator().manual_seed(7)
    assert_identical(drawn, [torch.rand(3, generator=other), other.get_state()])
    assert torch.random.default_generator is torch.default_generator
