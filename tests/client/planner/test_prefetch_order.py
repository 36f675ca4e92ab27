"""The order in which a step uses its tensors, and how much device memory its offloading takes."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner import DeviceWindow, OrderHistory, Step, prefetch_order
from storm_client.planner.in_flight import (
    MIN_BYTES,
)
from storm_client.planner.prefetch_order import (
    StepPlan,
)
from storm_client.saved.ranges import Handle
from storm_client.saved.versions import View
from support.records import record_of, version_of

# --- the order of use -----------------------------------------------------------------------


def packed(history: OrderHistory, *sizes: int) -> StepPlan:
    plan = StepPlan(history)
    for number, nbytes in enumerate(sizes):
        assert plan.packed(nbytes) == number
    return plan


def test_the_first_step_is_expected_to_go_backwards() -> None:
    plan = packed(OrderHistory(), 10, 20, 30, 40)
    plan.unpacked(3)
    assert list(plan.upcoming()) == [2, 1, 0]
    plan.unpacked(1)
    assert list(plan.upcoming()) == [0]


def test_the_order_of_the_last_step_is_learned() -> None:
    history = OrderHistory()
    first = packed(history, 10, 20, 30)
    for number in (1, 2, 0):
        first.unpacked(number)
    second = packed(history, 10, 20, 30)
    second.unpacked(1)
    assert list(second.upcoming()) == [2, 0]


def test_an_interrupt_as_the_order_is_fixed_leaves_that_to_the_next_unpack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second backward pass had an order without places."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    plan = packed(OrderHistory(), 10, 20, 30)
    with monkeypatch.context() as patch:
        patch.setattr(prefetch_order, "enumerate", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            plan.unpacked(2)
    plan.unpacked(2)
    assert list(plan.upcoming()) == [1, 0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_only_what_was_packed_is_ever_expected(events: list[tuple[bool, int]]) -> None:
    history = OrderHistory()
    for _ in range(3):
        plan, count = StepPlan(history), 0
        for is_pack, number in events:
            if is_pack:
                plan.packed(number)
                count += 1
            elif count:
                plan.unpacked(number % count)
                upcoming = list(plan.upcoming())
                assert len(set(upcoming)) == len(upcoming)
                assert all(0 <= other < count for other in upcoming)
                assert number % count not in upcoming


def test_threads_that_share_a_history() -> None:
    history = OrderHistory()
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            order = [1]
            history.replace([1, 1], order)
            order.append(2)  # the step goes on packing
            history.replace([1, 1, 1], order)

    thread = threading.Thread(target=train)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20000):
            assert set(history.needed_at_once()) <= {0, 1, 2}
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


# --- steps ----------------------------------------------------------------------------------


def handles_of(step: Step, count: int) -> list[Handle]:
    handles = []
    for _ in range(count):
        tensor = torch.ones(16)
        record = record_of(tensor)
        handles.append(step.handle(record, View.of(tensor), version_of(tensor)))
    return handles


def test_a_block_around_a_loop_begins_anew_when_a_pass_is_over() -> None:
    step = Step(OrderHistory())
    for _ in range(3):
        handles = handles_of(step, 4)
        assert [handle.number for handle in handles] == [0, 1, 2, 3]
        for number in (2, 3, 1, 0):
            step.unpacked(handles[number])
        handles.clear()
    handles = handles_of(step, 4)
    step.unpacked(handles[2])
    assert [record.key for record in step.upcoming()] == [
        handles[number].record.key for number in (3, 1, 0)
    ]


def test_what_a_hook_costs_does_not_grow_while_a_graph_is_kept() -> None:
    """One pass's handles stay; those of the others, thousands, are forgotten."""
    step = Step(OrderHistory())
    kept = handles_of(step, 3)
    step.unpacked(kept[2])
    for _ in range(1000):
        handles = handles_of(step, 4)
        while handles:
            step.unpacked(handles.pop())
    handles = handles_of(step, 4)
    latest = step._packing
    assert len(latest.records) == 4
    assert [record() for record in latest.earlier.records] == [handle.record for handle in kept]
    assert latest.earlier.earlier is None


# --- the device window: three tensors, spare memory, never the ceiling ----------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("stored", "limit"),
    [
        ([MIN_BYTES // 8], MIN_BYTES),
        ([GIB // 4], GIB // 4),
        ([GIB, GIB], GIB),
        ([GIB] * 5, 5 * GIB // 2),
        ([GIB] * 20, 3 * GIB),
    ],
)
def test_what_a_pass_stores_bounds_what_is_held(stored: list[int], limit: int) -> None:
    window = DeviceWindow(4 * GIB)
    for nbytes in stored:
        window.record_store(nbytes)
    window.on_backward_begin()
    assert window.limit == limit
    window.record_store(stored[0])
    assert window.limit == limit  # of the next pass, too


def test_running_out_of_memory_halves_it_down_to_a_little() -> None:
    window = DeviceWindow(4 * GIB)
    window.record_store(GIB)
    window.shrink()
    assert (window.limit, window.prefetch_limit(100 * GIB, 0)) == (2 * GIB, 2 * GIB)
    assert window.unread == 2 * GIB
    for _ in range(10):
        window.shrink()
    assert window.limit == window.prefetch_limit(100 * GIB, 0) == MIN_BYTES
    window.record_store(GIB)
    assert window.limit == MIN_BYTES
