"""What groups of values choose by a budget and a link that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.groups import GroupChoice, identical_groups
from storm_client.planner.machine import CPU
from storm_client.planner.prices import Priced, operation_seconds
from storm_client.planner.problem import Problem, Value
from storm_client.planner.selection import choices
from support.planning import alike_blocks

MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0, unmeasured=0.05)


def priced(values: list[Value], ends: frozenset[int], window: float = 0.0) -> Priced:
    problem = Problem(tuple(values), forward_seconds=window, block_ends=ends)
    return Priced(problem, MACHINE, operation_seconds(values, MACHINE), window)


def parts_of(priced: Priced, room: int) -> Iterator[list[GroupChoice]]:
    return choices(priced, identical_groups(priced, frozenset(), {}), room)


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
