"""The schedule: within its budget, monotonic, near the cheapest choice, with fetches in time."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as some
from storm_client.compile.estimates import Draft, Problem, Recipe, Saved
from storm_client.compile.schedule import schedule
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.machine import CPU

MACHINE = replace(CPU, link=1.0, codec=0.1, graph_store=0.0, thread_recompute=0.0)
"""A byte takes a second on the link."""

POSITIONS = 30


def saved(nbytes: int, first: int, last: int | None = None, **more: object) -> Saved:
    return Saved(nbytes, first, first if last is None else last, **more)  # type: ignore[arg-type]


@some.composite
def values(draw: some.DrawFn, most: int = 12) -> list[Saved]:
    found: list[Saved] = []
    made = sorted(draw(some.lists(some.floats(0, 60), min_size=most, max_size=most)))
    for number in range(draw(some.integers(0, most))):
        nbytes = draw(some.integers(1, 50))
        if draw(some.integers(0, 4)) == 0:
            found.append(Saved.only_a_source(nbytes, made=made[number]))
            continue
        first = draw(some.integers(0, POSITIONS - 1))
        last = draw(some.integers(first, POSITIONS - 1))
        recipe = None
        if draw(some.booleans()):
            sources = draw(some.sets(some.integers(0, number - 1))) if number else set()
            recipe = Recipe(draw(some.floats(0, 60)), tuple(sorted(sources)))
        is_offloadable = draw(some.booleans()) or recipe is not None
        found.append(Saved(nbytes, first, last, is_offloadable, recipe, made[number]))
    return found


windows = some.one_of(some.none(), some.floats(60, 200))
times = some.lists(some.floats(0, 20), min_size=POSITIONS, max_size=POSITIONS)


def peak(values: list[Saved], draft: Draft) -> int:
    """Count what is on the device at each position."""
    lasts = [value.last_use for value in values]
    for number, (value, decision) in enumerate(zip(values, draft.decisions, strict=True)):
        if decision == REPLAY:
            for source in value.recipe.sources:
                lasts[source] = max(lasts[source], draft.first_uses[number])
    most = 0
    for position in range(POSITIONS):
        live = 0
        for number, value in enumerate(values):
            if not draft.is_saved[number]:
                continue
            decision, begin = draft.decisions[number], 0
            if decision == OFFLOAD:
                begin = draft.fetches[number]
            elif decision == REPLAY:
                begin = draft.first_uses[number]
            live += value.nbytes if begin <= position <= lasts[number] else 0
        most = max(most, live)
    return most


@given(values(), times, windows, some.booleans())
def test_peaks_are_what_is_there_and_grow_with_the_budget(
    found: list[Saved], seconds: list[float], window: float | None, in_runs: bool
) -> None:
    chosen = schedule(found, seconds, MACHINE, window)
    assert list(chosen.peaks) == sorted(chosen.peaks)
    kept: set[int] = set()
    for count in range(len(chosen.order) + 1):
        draft = chosen.draft(count, in_runs=in_runs)
        assert peak(found, draft) <= chosen.peaks[0 if in_runs else count]
        now = {n for n, one in enumerate(draft.decisions) if one == Keep("budget")}
        assert kept <= now
        kept = now
        for number, decision in enumerate(draft.decisions):
            assert draft.fetches[number] <= draft.first_uses[number]
            assert (decision == Keep("cannot be offloaded")) == (not found[number].is_offloadable)
            if not found[number].is_only_a_source:
                assert draft.is_saved[number]
                assert draft.first_uses[number] <= found[number].first_use
    assert len(kept) == (0 if in_runs else len(chosen.order))


def test_less_that_is_computed_again_may_need_more_at_once() -> None:
    """Value 3 is made earlier for 6, and what it is made from may go; else that stays longer."""
    source = Saved.only_a_source(1)
    found = [
        source,
        saved(1, 0, is_offloadable=False),
        saved(1, 0, is_offloadable=False),
        saved(1, 1, recipe=Recipe(0.0, (0, 1, 2))),
        source,
        source,
        saved(2, 0, 1, recipe=Recipe(0.0078125, (0, 3))),
        saved(1, 1),
        source,
    ]
    chosen = schedule(found, [*[0.0] * (POSITIONS - 1), 1.0], MACHINE, None)
    for count in range(len(chosen.order) + 1):
        assert peak(found, chosen.draft(count, in_runs=True)) <= chosen.least


@given(values(), windows)
def test_what_is_computed_again_has_its_sources(found: list[Saved], window: float | None) -> None:
    chosen = schedule(found, [1.0] * POSITIONS, MACHINE, window)
    for count in range(len(chosen.order) + 1):
        draft = chosen.draft(count)
        used = set()
        for number, decision in enumerate(draft.decisions):
            recipe = found[number].recipe
            if decision == REPLAY and recipe is not None:
                used.update(recipe.sources)
                assert all(draft.is_saved[n] for n in recipe.sources)
                assert all(draft.first_uses[n] <= draft.first_uses[number] for n in recipe.sources)
        for number, value in enumerate(found):
            assert draft.is_saved[number] == (not value.is_only_a_source or number in used)


@given(values(), some.integers(0, 400))
def test_no_budget_is_exceeded(found: list[Saved], budget: int) -> None:
    chosen = schedule(found, [1.0] * POSITIONS, MACHINE)
    if budget >= chosen.least:
        assert chosen.peaks[chosen.fitting(budget)] <= budget
    assert sum(found[n].nbytes for n in chosen.order[: chosen.holding(budget)]) <= budget


def subsets(numbers: list[int]) -> list[frozenset[int]]:
    sizes = range(len(numbers) + 1)
    return list(map(frozenset, chain.from_iterable(combinations(numbers, n) for n in sizes)))


def like_a_model(scale: list[int], window: float, layers: int = 2) -> list[Saved]:
    """Layers: a small value that two large ones are made from, and one that is shipped."""
    found: list[Saved] = []
    for layer in range(layers):
        use, made = 2 * (layers - layer), window * layer / layers
        source = len(found)
        found += [
            Saved.only_a_source(2 * scale[0], made=made),
            saved(
                7 * scale[1],
                use,
                recipe=Recipe(3.0 * scale[1], (source,)),
                made=made + window / 3 / layers,
            ),
            saved(
                7 * scale[2],
                use,
                recipe=Recipe(3.5 * scale[2], (source,)),
                made=made + window / 2 / layers,
            ),
            saved(3 * scale[3], use + 1, made=made + window / layers),
        ]
    return found


@given(
    some.lists(some.integers(1, 4), min_size=4, max_size=4),
    some.floats(40, 120),
    some.floats(0.0, 1.0),
)
def test_a_choice_is_no_worse_than_any_that_keeps_one_value_less(
    scale: list[int], window: float, share: float
) -> None:
    """The kept sets are nested: what fits no more into a budget stays empty."""
    found = like_a_model(scale, window)
    chosen = schedule(found, [10.0] * POSITIONS, MACHINE, window)
    budget = int(chosen.least + share * (chosen.peaks[-1] - chosen.least))
    draft = chosen.draft(chosen.fitting(budget))
    again = [n for n, one in enumerate(draft.decisions) if one == REPLAY]
    kept = [n for n, one in enumerate(draft.decisions) if one == Keep("budget")]
    can = [n for n, value in enumerate(found) if value.recipe is not None]
    leaves = [n for n, value in enumerate(found) if not value.is_only_a_source]
    largest = max(value.nbytes for value in found)
    costs = [
        total(chosen.problem, frozenset(stay), frozenset(run))
        for stay in subsets(leaves)
        for run in subsets([n for n in can if n not in stay])
        if chosen.problem.peak(stay, run) <= budget - largest
    ]
    least = min(costs, default=1e9)
    assert total(chosen.problem, frozenset(kept), frozenset(again)) <= 1.1 * least + 1e-9


def total(problem: Problem, kept: frozenset[int], recomputed: frozenset[int]) -> float:
    """Return what a choice costs a step, in seconds."""
    offloaded = problem.is_offloaded(kept, recomputed)
    replays = sum(map(problem.replay_seconds, recomputed - kept))
    return float(problem.offload_seconds[offloaded].sum()) + replays + problem.late(offloaded)


def test_what_is_free_below_the_peak_from_each_position_on() -> None:
    large = saved(10, 20)
    chosen = schedule([saved(5, 9, 12), large, saved(4, 25)], [1.0] * POSITIONS, MACHINE)
    draft = chosen.draft(0)
    assert draft.fetches == (4, 10, 21)
    assert chosen.peaks[0] == 15  # the first two at once
    assert draft.free_bytes_from[0] == draft.free_bytes_from[12] == 0
    assert draft.free_bytes_from[13] == draft.free_bytes_from[20] == 5
    assert draft.free_bytes_from[21] == draft.free_bytes_from[25] == 11
    assert draft.free_bytes_from[26] == 15
    assert len(draft.free_bytes_from) >= POSITIONS
