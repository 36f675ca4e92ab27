"""The schedule: within its budget, monotonic, and with fetches early enough where memory allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some
from storm_client.compile.schedule import Recipe, Saved, Schedule, schedule
from storm_client.plan.decisions import OFFLOAD, REPLAY, Keep
from storm_client.plan.planner import Costs

COSTS = Costs(link=1.0, shipping=0.1, ship_floor=0.0, replay_floor=0.0, default=0.0)
"""A byte takes a second on the link."""

POSITIONS = 30


def saved(nbytes: int, first: int, last: int | None = None, **more: object) -> Saved:
    return Saved(nbytes, first, first if last is None else last, **more)  # type: ignore[arg-type]


@some.composite
def values(draw: some.DrawFn) -> list[Saved]:
    found: list[Saved] = []
    for number in range(draw(some.integers(0, 12))):
        first = draw(some.integers(0, POSITIONS - 1))
        recipe = None
        if draw(some.booleans()):
            sources = draw(some.sets(some.integers(0, number - 1))) if number else set()
            recipe = Recipe(draw(some.floats(0, 5)), tuple(sorted(sources)))
        found.append(
            Saved(
                draw(some.integers(1, 50)),
                first,
                draw(some.integers(first, POSITIONS - 1)),
                draw(some.booleans()),
                recipe,
            )
        )
    return found


def peak(values: list[Saved], chosen: Schedule, count: int) -> int:
    """Count what is on the device at each position if the first `count` are kept."""
    decided = chosen.decisions(count)
    lasts = [value.last_use for value in values]
    for number, value in enumerate(values):
        if chosen.given_up[number] == REPLAY and value.recipe is not None:
            for source in value.recipe.sources:
                lasts[source] = max(lasts[source], chosen.first_uses[number])
    most = 0
    for position in range(POSITIONS):
        live = 0
        for number, value in enumerate(values):
            begin = 0
            if decided[number] == OFFLOAD:
                begin = chosen.fetches[number]
            elif decided[number] == REPLAY:
                begin = chosen.first_uses[number]
            live += value.nbytes if begin <= position <= lasts[number] else 0
        most = max(most, live)
    return most


@given(values(), some.lists(some.floats(0, 20), min_size=POSITIONS, max_size=POSITIONS))
def test_peaks_are_what_is_there_and_grow_with_the_budget(
    found: list[Saved], seconds: list[float]
) -> None:
    chosen = schedule(found, seconds, COSTS)
    assert list(chosen.peaks) == sorted(chosen.peaks)
    for count, expected in enumerate(chosen.peaks):
        assert peak(found, chosen, count) <= expected
        if chosen.peaks[-1] and count == 0:
            assert chosen.fitting(expected) >= count
    for number, decision in enumerate(chosen.given_up):
        assert chosen.first_uses[number] <= found[number].first_use
        assert chosen.fetches[number] <= chosen.first_uses[number]
        assert isinstance(decision, Keep) == (not found[number].can_leave)


@given(values(), some.integers(0, 400))
def test_no_budget_is_exceeded(found: list[Saved], budget: int) -> None:
    chosen = schedule(found, [1.0] * POSITIONS, COSTS)
    if budget >= chosen.least:
        assert chosen.peaks[chosen.fitting(budget)] <= budget
    assert sum(found[n].nbytes for n in chosen.order[: chosen.holding(budget)]) <= budget


def test_a_fetch_begins_as_early_as_its_transfer_takes() -> None:
    large = saved(10, 20)  # what is needed at once somewhere: room for one of 5 elsewhere
    chosen = schedule([saved(5, 9), large], [1.0] * POSITIONS, COSTS)
    assert chosen.fetches == (4, 10)


def test_transfers_go_one_after_the_other() -> None:
    room = saved(100, 29, recipe=Recipe(0.0))
    chosen = schedule([saved(5, 9), saved(5, 10), room], [1.0] * POSITIONS, COSTS)
    assert chosen.fetches[:2] == (0, 5)


def test_a_fetch_waits_for_memory() -> None:
    """Each alone is the peak: the second begins when the first is not needed any more."""
    chosen = schedule([saved(8, 3, 6), saved(8, 9)], [1.0] * POSITIONS, COSTS)
    assert chosen.least == 8
    assert chosen.fetches == (0, 7)


def test_what_is_cheap_to_compute_is_computed_and_its_source_is_there() -> None:
    source = saved(8, 9)
    made = saved(8, 5, recipe=Recipe(0.1, (0,)))
    dear = saved(8, 12, recipe=Recipe(100.0))
    large = saved(30, 20)
    chosen = schedule([source, made, dear, large], [1.0] * POSITIONS, COSTS)
    assert chosen.given_up == (OFFLOAD, REPLAY, OFFLOAD, OFFLOAD)
    assert chosen.first_uses[0] == 5


def test_computing_again_does_not_raise_the_least_possible() -> None:
    source = saved(8, 20)
    made = saved(8, 5, recipe=Recipe(0.1, (0,)))
    other = saved(8, 10)
    chosen = schedule([source, made, other], [1.0] * POSITIONS, COSTS)
    assert chosen.least == 8
    assert chosen.given_up[1] == OFFLOAD


def test_what_cannot_leave_counts() -> None:
    chosen = schedule([saved(7, 3, can_leave=False), saved(5, 2)], [1.0] * POSITIONS, COSTS)
    assert chosen.least == 12
    assert chosen.order == (1,)


def test_no_values_need_no_memory() -> None:
    chosen = schedule([], [], COSTS)
    assert (chosen.least, chosen.order) == (0, ())
