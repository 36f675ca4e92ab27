from __future__ import annotations

import torch
from storm_client.plan import LOOKAHEAD, PASS_HANDLES, OrderHistory, Step
from storm_client.saved import Handle, View
from support.records import record_of, version_of


def packed(step: Step, count: int) -> list[Handle]:
    handles = []
    for _ in range(count):
        tensor = torch.ones(16)
        record = record_of(tensor)
        handles.append(step.handle(record, View.of(tensor), version_of(tensor)))
    return handles


def test_records_are_expected_in_reverse() -> None:
    step = Step(OrderHistory())
    handles = packed(step, 4)
    step.unpacked(handles[3])
    assert step.upcoming() == [handle.record for handle in (handles[2], handles[1], handles[0])]


def test_dead_records_are_left_out() -> None:
    step = Step(OrderHistory())
    handles = packed(step, 4)
    step.unpacked(handles[3])
    del handles[1]
    assert step.upcoming() == [handles[1].record, handles[0].record]


def test_it_looks_only_so_far() -> None:
    step = Step(OrderHistory())
    handles = packed(step, LOOKAHEAD + 10)
    step.unpacked(handles[-1])
    assert len(step.upcoming()) == LOOKAHEAD


def test_each_record_is_looked_at_once() -> None:
    step = Step(OrderHistory())
    handles = packed(step, LOOKAHEAD + 3)
    step.unpacked(handles[-1])
    records = [handle.record for handle in reversed(handles[:-1])]
    assert step.unseen() == records[:LOOKAHEAD]
    step.saw(LOOKAHEAD)
    assert step.unseen() == []
    handles.pop(1)
    del records[-2]
    step.unpacked(handles[-2])
    assert step.unseen() == [None]


def test_the_next_step_knows_the_order() -> None:
    history = OrderHistory()
    first = Step(history)
    handles = packed(first, 3)
    for number in (0, 2, 1):
        first.unpacked(handles[number])
    second = Step(history)
    handles = packed(second, 3)
    second.unpacked(handles[0])
    assert second.upcoming() == [handles[2].record, handles[1].record]


def test_a_block_around_a_loop_begins_anew_when_a_pass_is_over() -> None:
    step = Step(OrderHistory())
    for _ in range(3):
        handles = packed(step, 4)
        assert [handle.number for handle in handles] == [0, 1, 2, 3]
        for number in (2, 3, 1, 0):
            step.unpacked(handles[number])
        handles.clear()
    handles = packed(step, 4)
    step.unpacked(handles[2])
    assert [record.key for record in step.upcoming()] == [
        handles[number].record.key for number in (3, 1, 0)
    ]


def test_a_block_goes_on_while_something_of_it_lives() -> None:
    step = Step(OrderHistory())
    handles = packed(step, 3)
    step.unpacked(handles[2])
    del handles[1:]
    (later,) = packed(step, 1)
    assert later.number == 3
    step.unpacked(later)
    assert step.upcoming() == [handles[0].record]


def test_what_was_never_asked_for_is_part_of_the_step() -> None:
    step = Step(OrderHistory())
    del packed(step, 3)[:]
    (later,) = packed(step, 1)
    assert later.number == 3


def test_what_a_hook_costs_does_not_grow_while_a_graph_is_kept() -> None:
    """One pass's handles stay; those of the others, thousands, are forgotten."""
    step = Step(OrderHistory())
    kept = packed(step, 3)
    step.unpacked(kept[2])
    for _ in range(1000):
        handles = packed(step, 4)
        while handles:
            step.unpacked(handles.pop())
    handles = packed(step, 4)
    latest = step._packing
    assert len(latest.records) == 4
    assert latest.earlier is not None
    assert [record() for record in latest.earlier.records] == [handle.record for handle in kept]
    assert latest.earlier.earlier is None


def test_what_is_never_asked_for_is_forgotten_too() -> None:
    step = Step(OrderHistory())
    kept = packed(step, 1)
    for _ in range(3 * PASS_HANDLES):
        packed(step, 1)
    assert len(step._packing.records) <= PASS_HANDLES
    step.unpacked(kept[0])
    assert step.upcoming() == []


def test_a_pass_that_is_asked_for_after_a_later_one_goes_on() -> None:
    step = Step(OrderHistory())
    first = packed(step, 3)
    step.unpacked(first[2])
    second = packed(step, 2)
    step.unpacked(second[1])
    assert step.upcoming() == [handle.record for handle in (second[0], first[1], first[0])]
    step.unpacked(first[1])
    assert step.upcoming() == [first[0].record]
