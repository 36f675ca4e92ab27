"""How much of a step's transfers fits below its peak, at each stage of both passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from storm_client.planner import DeviceWindow
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.in_flight import MIN_BYTES
from storm_client.planner.problem import Problem
from storm_client.planner.rooms import Room, Rooms, rooms_of
from storm_client.planner.timeline import planned
from support.planning import value

MIB = 1 << 20

CHAIN = Problem(
    (
        replace(value(0, 10), is_given=True),
        value(1, 20, "norm", 0, seconds=1.0),
        value(2, 40, "linear", 1, saved=False, seconds=1.0),
        value(3, 80, "silu", 2, seconds=1.0),
    ),
    used_between={0: (1, 1), 1: (2, 2), 3: (4, 3)},
    finds_gradients=False,
)


def test_there_is_room_wherever_a_step_is_below_its_peak() -> None:
    decisions = [OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD]
    timeline = planned(CHAIN, decisions)
    peak = timeline.peak_bytes
    rooms = rooms_of(CHAIN, decisions, timeline)
    assert rooms.forward.moved == (0, 10, 30, 110)
    assert rooms.forward.total == rooms.backward.total == 110
    stages = ((0, 1), (0, 2), (1, 4), (3, 4))
    assert rooms.forward.free == tuple(
        peak - max(timeline.forward[begin:end]) for begin, end in stages
    )
    assert rooms.backward.moved == (0, 80, 100), "the last value is needed first"
    most = [peak - max(timeline.backward[: moment + 1]) for moment in (4, 2, 1)]
    assert rooms.backward.free == tuple(most)
    assert most == sorted(most), "what is prefetched stays, so there is never less room later"


def test_what_is_kept_or_recomputed_is_not_moved() -> None:
    decisions = [OFFLOAD, REPLAY, REPLAY, Keep("budget")]
    rooms = rooms_of(CHAIN, decisions, planned(CHAIN, decisions))
    assert rooms.forward.moved == (0, 10)
    assert rooms.backward.moved == (0,)


def test_gradients_of_parameters_take_the_room_towards_the_end() -> None:
    grown = replace(CHAIN.values[1], parameter_bytes=1000)
    problem = replace(CHAIN, values=(CHAIN.values[0], grown, *CHAIN.values[2:]))
    decisions = [OFFLOAD] * 4
    rooms = rooms_of(problem, decisions, planned(problem, decisions))
    assert not any(rooms.backward.free), "the peak comes when all else is freed"
    assert min(rooms.forward.free) > 700


@pytest.mark.parametrize(("moved", "free"), [(0, 7), (9, 7), (10, 5), (39, 5), (40, 3), (99, 3)])
def test_the_stage_is_found_by_what_was_moved(moved: int, free: int) -> None:
    room = Room((0, 10, 40), (7, 5, 3), 50)
    assert room.when(moved, 50) == free
    assert room.when(2 * moved, 100) == free, "a larger batch: later stages, no more room"
    assert room.when(0, 25) == 3, "a smaller batch takes less room"


def test_a_window_uses_the_room_beside_its_limit() -> None:
    gib = 1 << 30
    window = DeviceWindow(64 * gib)
    window.follow(Rooms(Room((0, gib), (8 * gib, 0), gib), Room((0, gib), (0, 4 * gib), gib)), None)
    assert not window.counts_headroom
    before = window.limit
    assert window.may_hold() == before + 8 * gib
    window.record_store(gib)
    assert window.may_hold() == window.limit, "at the turn there is no room"
    window.on_backward_begin(held=MIN_BYTES)
    assert window.prefetch_limit(0, MIN_BYTES) == window.limit - MIN_BYTES
    window.record_restore(gib - MIN_BYTES)
    assert window.prefetch_limit(0, 0, unused=gib - MIN_BYTES) == window.limit
    assert window.prefetch_limit(0, 0) == window.limit + 4 * gib


def test_what_former_plans_stored_is_forgotten() -> None:
    """A comparison's plans would otherwise be followed with the limits of those before them."""
    window = DeviceWindow(64 << 30)
    for nbytes in (6 << 30, 1 << 30):
        window.follow(Rooms(), None)
        window.record_store(nbytes)
        window.on_backward_begin()
        assert window.limit == nbytes
