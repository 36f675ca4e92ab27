"""Micro-batches: one body that runs as often as there are parts, with the bits of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.compiled_programs import blocks
from support.steps import OPTIMIZERS, everything
from support.training import assert_identical, seeded
from torch import Tensor, nn

Wrap = Callable[..., CompiledStep]


def train(wrap: Wrap, device: str, count: int, optimizer: str = "sgd") -> list[Tensor]:
    """Train with dropout, batch norm, and sums over the loop; `count` parts of four rows."""
    torch.manual_seed(0)
    body = blocks(device, 1) if optimizer == "sgd" else nn.Sequential(nn.Linear(32, 32), nn.GELU())
    net = nn.Sequential(body, nn.Dropout(0.2), nn.BatchNorm1d(8)).to(device)
    update = OPTIMIZERS[optimizer](net.parameters())

    def step(batch: dict[str, Tensor]) -> tuple[object, ...]:
        total = torch.zeros((), device=device)
        largest = None
        for part in storm.micro_batches(batch, count):
            loss = (net(part["x"]) - part["y"]).square().mean() / count
            loss.backward()
            total = total + loss.detach()
            largest = loss.detach() if largest is None else torch.maximum(largest, loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        update.step()
        update.zero_grad()
        return total, largest, loss

    call = wrap(step)
    found = []
    for n in range(3):
        rows = 4 * count
        made = call(
            {"x": seeded(device, rows, 8, 32, seed=n), "y": seeded(device, rows, 8, 32, seed=n + 9)}
        )
        found += [one.detach() for one in made]
    return [*found, *everything(net, update, device)]


@pytest.mark.parametrize(
    ("count", "optimizer"), [(1, "adamw"), (3, "sgd"), (4, "momentum"), (4, "adamw_fused")]
)
def test_a_loop_gives_the_bits_of_all_its_parts(
    count: int, optimizer: str, device: str, wrap: Wrap
) -> None:
    expected = train(lambda step: step, device, count, optimizer)
    assert_identical(train(wrap, device, count, optimizer), expected)


@pytest.mark.slow
def test_neither_graphs_nor_memory_grow_with_the_count(wrap: Wrap) -> None:
    sizes, bytes_ = [], []
    for count in (4, 6):
        made: list[CompiledStep] = []

        def wrapped(step: Callable[..., object], made: list[CompiledStep] = made) -> CompiledStep:
            made.append(wrap(step))
            return made[0]

        train(wrapped, "cpu", count)
        program = made[0].captures()[-1]
        sizes.append([len(call.module.graph.nodes) for call in program.calls])
        bytes_.append([plan.peak_bytes for plan in made[0].plans()])
    assert sizes[0] == sizes[1]
    assert bytes_[0] == bytes_[1]


def one_weight(body: Callable[[Tensor, Tensor], object]) -> Callable[..., object]:
    weight = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> object:
        return body(weight, x)

    return step


def listed(weight: Tensor, x: Tensor) -> Tensor:
    losses = []
    for part in storm.micro_batches(x, 4):
        loss = (part * weight).sum()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def every_other(weight: Tensor, x: Tensor) -> Tensor:
    numbers = itertools.count()
    for part in storm.micro_batches(x, 4):
        loss = (part * weight).sum() if next(numbers) % 2 else (part * weight).exp().sum()
        loss.backward()
    return loss


def numbered(weight: Tensor, x: Tensor) -> Tensor:
    numbers = itertools.count()
    for part in storm.micro_batches(x, 4):
        loss = (part * weight * next(numbers)).sum()
        loss.backward()
    return loss


def averaged(weight: Tensor, x: Tensor) -> Tensor:
    total, parts = torch.zeros(()), 0
    for part in storm.micro_batches(x, 4):
        total = total + (part * weight).sum()
        parts += 1
    return total / parts


def until_the_last(weight: Tensor, x: Tensor) -> Tensor:
    for number, part in enumerate(storm.micro_batches(x, 4)):
        (part * weight).sum().backward()
        if number == 3:
            return weight * 2
    return weight


def left_in(last: int) -> Callable[[Tensor, Tensor], None]:
    """Return a step that leaves its loop in a micro-batch, without a trace in the next ones."""

    def body(weight: Tensor, x: Tensor) -> None:
        for number, part in enumerate(storm.micro_batches(x, 4)):
            (part * weight).sum().backward()
            if number == last:
                break

    return body


def two_loops(weight: Tensor, x: Tensor) -> Tensor:
    for part in storm.micro_batches(x, 4):
        (part * weight).sum().backward()
    for part in storm.micro_batches(x, 2):
        (part * weight).sum().backward()
    return weight


def of_what_is_made(weight: Tensor, x: Tensor) -> Tensor:
    for part in storm.micro_batches(x * 2, 4):
        (part * weight).sum().backward()
    return weight


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (listed, "in the middle"),
        (every_other, "other operations"),
        (numbered, "uses 1 where the third uses 2"),
        (averaged, "changes its variable 'parts' with each part, but of 4"),
        (until_the_last, "changes its variable 'number' with each part"),
        (left_in(0), "leaves the loop before its end"),
        (left_in(2), "leaves the loop before its end"),
        (two_loops, "one loop"),
        (of_what_is_made, "arguments of the step"),
    ],
)
def test_a_loop_that_is_none_is_refused(
    body: Callable[[Tensor, Tensor], object], named: str, wrap: Wrap
) -> None:
    with pytest.raises(UsageError, match=named):
        wrap(one_weight(body))(seeded("cpu", 8, 3))


def test_numbers_that_count_all_parts_may_count(wrap: Wrap) -> None:
    """Where there are no more than are captured, or none changes."""

    def body(weight: Tensor, x: Tensor) -> Tensor:
        total, parts, scale, is_first = torch.zeros(()), 0, 1.0, True
        for part in storm.micro_batches(x, len(x) // 2):
            total = total + scale * (part * weight).sum()
            scale, is_first = 0.5, False
            parts += len(x) <= 6
        return total / (parts + is_first + 1)

    for rows in (2, 6, 8):
        x = seeded("cpu", rows, 3)
        assert_identical([wrap(one_weight(body))(x)], [one_weight(body)(x)])


def test_without_a_capture_parts_are_views() -> None:
    x = torch.arange(12).view(6, 2)
    parts = list(storm.micro_batches({"x": x, "name": "n"}, 3))
    assert [part["x"].tolist() for part in parts] == x.view(3, 2, 2).tolist()
    assert parts[1]["x"].data_ptr() == x[2:].data_ptr()
    assert parts[2]["name"] == "n"


@pytest.mark.parametrize(
    ("batch", "count", "named"),
    [
        (torch.ones(6), 0, "count is 0"),
        (torch.ones(6), 4, r"\(6,\) cannot be divided into 4"),
        (torch.ones(()), 1, "cannot be divided"),
        ({"a": 1}, 2, "no tensor"),
    ],
)
def test_bad_values_are_refused_by_name(batch: object, count: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        storm.micro_batches(batch, count)
