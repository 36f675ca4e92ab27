"""What the search for generators and iterators reaches, what bounds it, and what it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from storm_client.step import reachable
from storm_client.step.reachable import (
    generator_of,
    is_iterator,
    reachable_from,
    reachable_from_module,
    state_of,
)
from torch import nn


def found(step: Callable[..., Any], *arguments: object) -> list[str]:
    """Return the names of the generators and iterators that are reached from a step."""
    return [
        name
        for name, value in reachable_from(step, arguments)
        if is_iterator(value) or generator_of(value) is not None
    ]


def test_containers_may_hold_themselves() -> None:
    held: list[Any] = [{"a": iter([1])}]
    held += [held, {"held": held}]
    assert found(lambda: held) == ["held[0]['a']"]


def test_only_the_first_items_of_a_container_are_looked_at() -> None:
    rng = np.random.default_rng(0)
    near, far = [0] * (reachable.ITEMS - 1) + [rng], [0] * reachable.ITEMS + [rng]
    assert found(lambda: near) == [f"near[{reachable.ITEMS - 1}]"]
    assert found(lambda: far) == []


def test_the_work_is_bounded_and_near_values_come_first() -> None:
    tables = [[[number] for number in range(1000)] for _ in range(1000)]
    numbers, rng = list(range(1_000_000)), {"rng": np.random.default_rng(0)}
    begin = time.process_time()
    assert found(lambda: (tables, numbers, rng)) == ["rng['rng']"]
    assert time.process_time() - begin < 1
    assert len(list(reachable_from(lambda: tables, []))) <= reachable.VALUES + reachable.ITEMS


class Lazy:
    """An object whose attributes are made by code when they are asked for."""

    def __init__(self) -> None:
        self.rng, self.unread = np.random.default_rng(0), iter([1.0])

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    @property
    def behind(self) -> Any:
        return self.rng


class Scale(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: float) -> Any:
        return x * self.held.rng.random()  # type: ignore[union-attr, operator]


def test_of_objects_the_attributes_that_code_names_are_looked_at_without_running_any() -> None:
    lazy = [Lazy()]
    assert found(lambda: lazy[0].behind) == ["lazy[0].rng"]
    assert found(lambda: lazy[0].other) == []
    assert found(lambda x: [one.rng for one in x], {Lazy()}) == ["argument 0[0].rng"]
    names = [
        name for _, name, value in reachable_from_module(Scale(Lazy()), ()) if generator_of(value)
    ]
    assert names == ["held.rng"]


def test_nothing_is_advanced_by_the_search() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    rng, held = np.random.default_rng(0), [numbers(), iter([1, 2])]
    before = state_of(rng)
    assert found(lambda: (rng, held)) == ["rng", "held[0]", "held[1]"]
    assert state_of(rng) == before
    assert [list(one) for one in held] == [[0, 1, 2], [1, 2]]
    rng.random()
    assert state_of(rng) != before
