from __future__ import annotations

import torch
from storm_client.prefetch import OrderHistory
from storm_client.records import Handle, View
from storm_client.steps import LOOKAHEAD, Step
from support.records import record_of


def packed(step: Step, count: int) -> list[Handle]:
    handles = []
    for _ in range(count):
        tensor = torch.ones(16)
        record = record_of(tensor)
        handles.append(step.handle(record, View.of(tensor), record.version))
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
