"""What runs of compiled graphs keep of a budget in bytes, and which of them share one."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from storm_client.compile import shared_budget as room_module
from storm_client.compile.shared_budget import Room, room_for


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
    assert room.left(1000) == 700
    del large
    gc.collect()
    assert room.left(1000) == 900


def test_each_of_those_that_share_it_has_an_equal_part() -> None:
    room, graphs = Room(1000), [Graphs(100) for _ in range(3)]
    for one in graphs:
        room.share(one)
    parts = []
    for one in graphs:
        one.planned = room.part_of(one).left(1000, 100)
        parts.append(one.planned)
    assert parts == [300, 300, 300]


def test_what_one_could_not_use_of_its_part_is_the_next_ones() -> None:
    """Where all but one value is larger than a part, some keep one, and together no less."""
    room, graphs = Room(1000), [Graphs(100) for _ in range(4)]
    for one in graphs:
        room.share(one)
    for one in graphs:
        one.planned = 400 if room.part_of(one).left(1000, 100) >= 400 else 0
    assert [one.planned for one in graphs] == [0, 400, 0, 400]
    room.goes_back()
    held = [Held(one.planned or 0) for one in graphs]
    for one in held:
        assert room.left(one.nbytes) == one.nbytes
        room.keep(one)


def test_one_that_is_compiled_again_has_its_part_again() -> None:
    room, one, other = Room(1000), Graphs(100, 450), Graphs(100, 450)
    room.share(one)
    room.share(other)
    assert room.part_of(one).left(1000, 100) == 450


def test_what_is_free_is_shared_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "devices_in_use", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(room_module, "free_bytes", lambda _: 700)
    room, one, other = Room("fit"), Graphs(100), Graphs(100)
    room.share(one)
    room.share(other)
    room.goes_back()
    assert room.left() == 300


def test_what_is_kept_counts_until_it_dies() -> None:
    room, one, other = Room(1000), Held(300), Held(200)
    room.goes_back()
    room.keep(one)
    room.keep(other)
    assert (room.kept_bytes, room.left(1000)) == (500, 500)
    del one
    assert (room.kept_bytes, room.left(1000)) == (200, 800)


def test_without_a_gpu_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "devices_in_use", list)
    room = Room("fit")
    room.goes_back()
    assert room.left() == 0


def test_what_a_gpu_has_free_is_there_besides_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "devices_in_use", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(room_module, "free_bytes", lambda _: 500)
    room, held = Room("fit"), Held(300)
    room.goes_back()
    room.keep(held)
    assert room.left() == 500
