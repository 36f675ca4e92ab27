"""What groups of values choose by a budget and a link that they share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.groups import GroupChoice, identical_groups
from storm_client.planner.machine import CPU
from storm_client.planner.prices import Priced, operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.selection import choices
from support.planning import alike_blocks, value

MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0, unmeasured=0.05)


def priced(values: list[Value], ends: frozenset[int], window: float = 0.0) -> Priced:
    problem = Problem(tuple(values), forward_seconds=window, block_ends=ends)
    return Priced(problem, MACHINE, operation_seconds(values, MACHINE), window)


def parts_of(priced: Priced, room: int) -> Iterator[list[GroupChoice]]:
    return choices(priced, identical_groups(priced, frozenset(), {}), room)


def test_blocks_are_groups_of_which_one_is_chosen_for() -> None:
    values, ends = alike_blocks(5)
    found = identical_groups(priced(values, ends), frozenset(), {})
    assert sorted(len(one.groups) for one in found) == [1, 1, 4]
    # The first is given what is saved; others what the one before has made, if it is asked for.
    assert [len(one.choices.nodes) for one in found if len(one.groups) > 1] == [4]


def test_what_is_there_anyway_is_of_no_group() -> None:
    values, ends = alike_blocks(2)
    found = identical_groups(priced(values, ends), {0, 1}, {})
    assert not {0, 1}.intersection(n for one in found for group in one.groups for n in group)


def test_of_blocks_that_are_alike_some_keep_more_and_the_last_most() -> None:
    values, ends = alike_blocks(6)
    parts = next(parts_of(priced(values, ends), 220))
    kept = {number for part in parts for number in part.kept}
    assert sum(values[number].nbytes for number in kept) <= 220
    assert {(number - 1) // 4 for number in kept - {0}} == {2, 3, 4, 5}


def test_what_is_made_from_a_later_value_is_behind_it_and_nothing_is_made_from_itself() -> None:
    values = [value(0, 100, "to", 1), value(1, 40, saved=False)]
    values += [value(2, 100, "add", 3, saved=False), value(3, 100, "add", 2)]
    first, second = identical_groups(priced(values, frozenset()), frozenset(), {})
    assert (first.groups, second.groups) == ([[1, 0]], [[3, 2]])
    assert first.choices.nodes[1].sources == (0,)
    assert [node.sources for node in second.choices.nodes] == [(), (0,)]
    assert second.choices.nodes[0].seconds == math.inf


@given(st.integers(1, 4), st.integers(0, 900), st.floats(0.0, 900.0))
def test_each_saved_value_is_had_and_no_more_kept_than_may_be(
    count: int, room: int, window: float
) -> None:
    values, ends = alike_blocks(count)
    for parts in parts_of(priced(values, ends, window), room):
        kept, stored, recomputed = (
            {number for part in parts for number in part[which]} for which in range(3)
        )
        assert sum(values[number].nbytes for number in kept) <= room
        there = kept | stored | recomputed
        assert there.issuperset(one.number for one in values if one.is_saved)
        assert there.issuperset(source for n in recomputed for source in values[n].inputs)
