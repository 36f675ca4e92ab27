"""What runs of compiled graphs keep of a budget in bytes, and which of them share one."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
from storm_client.compile import room as room_module
from storm_client.compile.room import Room, room_for


class Supply:
    """Stands for a client's."""


class Graphs:
    def __init__(self, least: int) -> None:
        self.least = least


class Held:
    """Something that is kept."""


def supply() -> Any:
    return cast("Any", Supply())


@pytest.mark.parametrize("budget", [1000, "fit"])
def test_a_client_has_one_room_for_a_budget(budget: Any) -> None:
    one, other = supply(), supply()
    room = room_for(one, budget)
    assert room_for(one, budget) is room
    assert room_for(other, budget) is not room
    assert room_for(None, budget) is not room
    assert room_for(one, 2000) is not room


def test_fractions_share_nothing() -> None:
    one = supply()
    assert room_for(one, 0.5) is not room_for(one, 0.5)


def test_a_room_that_nobody_has_any_more_is_forgotten() -> None:
    one = supply()
    gone = weakref.ref(room_for(one, 1000))
    gc.collect()
    assert gone() is None
    kept = room_for(one, 2000)
    assert [reference() for reference in room_module._ROOMS.values()].count(kept) == 1
    assert all(reference() is not None for reference in room_module._ROOMS.values())


def test_all_that_share_it_leave_room_for_the_largest_least() -> None:
    room, small, large = Room(1000), Graphs(100), Graphs(300)
    room.share(small)
    room.share(large)
    assert room.left() == 0, "which graphs there are is not known"
    room.goes_back()
    assert room.left() == 350, "each has as much"
    del large
    gc.collect()
    assert room.left() == 900


def test_each_of_those_that_share_it_has_an_equal_part() -> None:
    room, graphs = Room(1000), [Graphs(100) for _ in range(3)]
    for one in graphs:
        room.share(one)
    room.goes_back()
    held = [Held() for _ in graphs]
    for one in held:
        assert room.left() == 300
        room.keep(one, 300)
    assert room.left() == 0


def test_what_is_kept_counts_until_it_dies() -> None:
    room, one, other = Room(1000), Held(), Held()
    room.goes_back()
    room.keep(one, 300)
    room.keep(other, 200)
    assert (room.kept_bytes, room.left()) == (500, 500)
    del one
    assert (room.kept_bytes, room.left()) == (200, 800)


def test_without_a_gpu_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module.torch.cuda, "is_available", lambda: False)
    room = Room("fit")
    room.goes_back()
    assert room.left() == 0


def test_what_a_gpu_has_free_is_there_besides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(room_module, "free_bytes", lambda: 500)
    room, held = Room("fit"), Held()
    room.goes_back()
    room.keep(held, 300)
    assert room.left() == 500
