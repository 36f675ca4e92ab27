"""What runs of compiled graphs keep of a budget in bytes, and which of them share one."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from storm_client.compile import shared_budget as budget_module
from storm_client.compile.shared_budget import SharedBudget, shared_budget_for


class Supply:
    """Stands for a client's."""


class Graphs:
    def __init__(self, least: int, planned: int | None = None) -> None:
        self.least, self.planned = least, planned


class Held:
    """Something that is kept."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def supply() -> Any:
    return cast("Any", Supply())


@pytest.mark.parametrize("budget", [1000, "fit"])
def test_a_client_has_one_room_for_a_budget(budget: Any) -> None:
    one, other = supply(), supply()
    shared = shared_budget_for(one, budget)
    assert shared_budget_for(one, budget) is shared
    for supplied, asked in ((other, budget), (None, budget), (one, 2000)):
        assert shared_budget_for(supplied, asked) is not shared
    assert shared_budget_for(one, 0.5) is not shared_budget_for(one, 0.5)


def test_a_room_that_nobody_has_any_more_is_forgotten() -> None:
    one = supply()
    gone = weakref.ref(shared_budget_for(one, 1000))
    gc.collect()
    assert gone() is None
    kept = shared_budget_for(one, 2000)
    assert [reference() for reference in budget_module._BUDGETS.values()].count(kept) == 1
    assert all(reference() is not None for reference in budget_module._BUDGETS.values())


def test_what_one_could_not_use_of_its_part_is_the_next_ones() -> None:
    """Where all but one value is larger than a part, some keep one, and together no less."""
    shared, graphs = SharedBudget(1000), [Graphs(100) for _ in range(4)]
    for one in graphs:
        shared.add_graphs(one)
    for one in graphs:
        one.planned = 400 if shared.share_of(one).left(1000, 100) >= 400 else 0
    assert [one.planned for one in graphs] == [0, 400, 0, 400]
    shared.record_backward()
    held = [Held(one.planned or 0) for one in graphs]
    for one in held:
        assert shared.left(one.nbytes) == one.nbytes
        shared.keep(one)


def test_one_that_is_compiled_again_has_its_part_again() -> None:
    shared, one, other = SharedBudget(1000), Graphs(100, 450), Graphs(100, 450)
    shared.add_graphs(one)
    shared.add_graphs(other)
    assert shared.share_of(one).left(1000, 100) == 450


def test_without_a_gpu_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "devices_in_use", list)
    shared = SharedBudget("fit")
    shared.record_backward()
    assert shared.left() == 0


def test_what_a_gpu_has_free_is_shared_besides_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_module, "devices_in_use", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(budget_module, "free_bytes", lambda _: 700)
    shared, held = SharedBudget("fit"), Held(300)
    shared.record_backward()
    shared.keep(held)
    assert shared.left() == 700
    shared, one, other = SharedBudget("fit"), Graphs(100), Graphs(100)
    shared.add_graphs(one)
    shared.add_graphs(other)
    shared.record_backward()
    assert shared.left() == 300
