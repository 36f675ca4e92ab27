from __future__ import annotations

import sys
import threading

from hypothesis import given
from hypothesis import strategies as st
from storm_client.plan import KNOWN_STEPS, LOOK_AGAIN, OrderHistory, StepPlan


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


def stepped(history: OrderHistory, sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    plan = packed(history, *sizes)
    for number in order:
        plan.unpacked(number)


def soon(history: OrderHistory, *sizes: int) -> list[int]:
    plan = StepPlan(history)
    found = []
    for number, nbytes in enumerate(sizes):
        if plan.needed_at_once(nbytes):
            found.append(number)
        plan.packed(nbytes)
    return found


def test_what_comes_back_before_it_could_have_gone_is_needed_at_once() -> None:
    history = OrderHistory()
    sizes = (10, 10, 50, 10, 10)
    assert soon(history, *sizes) == []
    stepped(history, sizes, (4, 3, 2, 1, 0))
    assert soon(history, *sizes) == [2, 4]
    assert soon(history, 10, 10, 51, 10, 10) == [4]


def test_the_last_order_says_what_is_needed_at_once() -> None:
    history = OrderHistory()
    stepped(history, (10, 10, 10), (0, 1, 2))
    assert soon(history, 10, 10, 10) == []
    stepped(history, (10, 10, 10), (2, 1, 0))
    assert soon(history, 10, 10, 10) == [2]
    packed(history, 10, 10, 10)
    assert soon(history, 10, 10, 10) == [2]


def test_other_sizes_are_another_kind_of_step() -> None:
    history = OrderHistory()
    first = packed(history, 10, 20, 30)
    for number in (1, 2, 0):
        first.unpacked(number)
    other = packed(history, 10, 20, 31)
    other.unpacked(2)
    assert list(other.upcoming()) == [1, 0]


def test_what_the_last_step_did_not_unpack_comes_last() -> None:
    history = OrderHistory()
    packed(history, 1, 2, 3, 4).unpacked(1)
    plan = packed(history, 1, 2, 3, 4)
    plan.unpacked(1)
    assert list(plan.upcoming()) == [3, 2, 0]


def test_packing_may_go_on_after_the_first_unpack() -> None:
    history = OrderHistory()
    for _ in range(2):  # the second time, the shorter order that it knows names later tensors
        plan = packed(history, 1, 2)
        plan.unpacked(1)
        assert plan.packed(3) == 2
        plan.unpacked(2)
        assert sorted(plan.upcoming()) in ([0, 1], [0])


def test_a_second_pass_over_a_retained_graph_starts_again() -> None:
    plan = packed(OrderHistory(), 1, 2, 3)
    for number in (2, 1, 0):
        plan.unpacked(number)
    plan.unpacked(2)
    assert list(plan.upcoming()) == [1, 0]


def test_each_is_looked_at_once() -> None:
    plan = packed(OrderHistory(), 1, 2, 3, 4, 5)
    plan.unpacked(4)
    assert plan.unseen(3) == [3, 2, 1]
    plan.saw(2)
    assert plan.unseen(3) == [1]
    plan.unpacked(3)
    assert plan.unseen(3) == [1, 0]
    plan.saw(2)
    plan.unpacked(2)
    assert plan.unseen(3) == []


def test_what_was_skipped_is_not_in_sight() -> None:
    plan = packed(OrderHistory(), 1, 2, 3, 4, 5)
    plan.unpacked(4)
    plan.unpacked(1)
    assert plan.unseen(3) == [0]


def test_after_a_while_all_is_looked_at_again() -> None:
    count = 2 * LOOK_AGAIN + 2
    plan = packed(OrderHistory(), *[1] * count)
    looked = 0
    for number in reversed(range(1, count)):
        plan.unpacked(number)
        unseen = plan.unseen(count)
        assert number - 1 in unseen or not unseen
        looked += len(unseen)
        plan.saw(len(unseen))
    assert looked == sum(range(1, count, LOOK_AGAIN))


def test_going_back_looks_again() -> None:
    plan = packed(OrderHistory(), 1, 2, 3)
    for number in (2, 1):
        plan.unpacked(number)
        plan.saw(len(plan.unseen(9)))
    plan.unpacked(2)
    assert plan.unseen(9) == [1, 0]
    plan.saw(2)
    plan.packed(4)
    plan.unpacked(3)
    assert sorted(plan.unseen(9))[:2] == [0, 1]


def test_only_the_latest_kinds_are_remembered() -> None:
    history = OrderHistory()
    for size in range(KNOWN_STEPS + 1):
        plan = packed(history, size, size)
        plan.unpacked(0)
        plan.unpacked(1)
    oldest = packed(history, 0, 0)
    oldest.unpacked(1)
    assert list(oldest.upcoming()) == [0]
    latest = packed(history, KNOWN_STEPS, KNOWN_STEPS)
    latest.unpacked(0)
    assert list(latest.upcoming()) == [1]


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
            history.replace((1, 1), order)
            order.append(2)  # the step goes on packing
            history.replace((1, 1, 1), order)

    thread = threading.Thread(target=train)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20000):
            assert set(history.soon()) <= {0, 1, 2}
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
