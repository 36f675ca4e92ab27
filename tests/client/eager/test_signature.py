"""When a signature's plan is made anew, and what is known of plans that it has followed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from storm_client.eager.comparison import Comparison
from storm_client.eager.events import SAVED, RecordedValue
from storm_client.eager.plan_maker import planned_values
from storm_client.eager.proofs import MAX_TRIES
from storm_client.eager.recognition import StepRecord, StepSignatures
from storm_client.eager.signature import StepSignature
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.search import PlanSearch


class Passed:
    """A forward pass of some seconds, which the device may not have ended."""

    def __init__(self, seconds: float, *, is_known: bool = True) -> None:
        self.is_known = is_known
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds


def signature(*, is_on_gpu: bool = True) -> StepSignature:
    device = torch.device("cuda", 1) if is_on_gpu else torch.device("cpu")
    value = RecordedValue(0, 100, torch.float32, torch.Size((25,)), device)
    made = StepSignature(((SAVED, 0, None, ()),), [value])
    made.follow([OFFLOAD])
    return made


def observe(made: StepSignature, seconds: Iterable[float]) -> None:
    for one in seconds:
        made.observe(Passed(one))


def planned(made: StepSignature, seconds: Iterable[float]) -> float | None:
    """Return the window of the plan that is made after such forward passes."""
    observe(made, seconds)
    window = made.times.measure()
    made.mark_planned()
    return window


def test_two_forward_passes_make_the_plan_anew() -> None:
    made = signature()
    observe(made, [3.0])
    assert not made.is_outdated
    observe(made, [2.0])
    assert made.is_outdated
    assert made.times.measure() == 2.0


def test_later_ones_change_nothing() -> None:
    """What is longer waits; what is shorter may be what another plan does."""
    made = signature()
    planned(made, [2.0, 2.0])
    observe(made, [5.0, 1.0, 1.0, 1.0])
    assert not made.is_outdated
    assert made.times.measure() == 2.0


def test_steps_settle_once_after_each_change_of_decisions() -> None:
    """What learning needed is given back then: not earlier, and not in every step."""
    made = signature(is_on_gpu=False)
    seen = []
    for decisions in ([OFFLOAD], [OFFLOAD], [Keep("budget_has_room")]):
        made.follow(decisions)
        for _ in range(4):
            seen.append(made.settles())
            made.observe(Passed(1.0))
    assert seen == [False, False, True, False, *[False] * 4, False, False, True, False]


def test_while_plans_are_compared_memory_is_given_back_once() -> None:
    made = signature()
    search = made.compare(Comparison(PlanSearch(), CPU)).search
    for number, decisions in enumerate(([OFFLOAD], [REPLAY], [OFFLOAD])):
        made.follow(decisions)
        observe(made, [1.0] * 4)
        assert made.settles() is (number == 0)
    search.is_settled = True
    assert made.settles()
    assert not made.settles()


def test_what_no_backward_pass_asks_for_is_tried_by_one_plan_alone() -> None:
    made = signature()
    made.follow([REPLAY])
    goes_on = [made.evidence.count_trial(0) for _ in range(MAX_TRIES + 1)]
    assert goes_on == [True] * MAX_TRIES + [False]
    made.follow([OFFLOAD])
    assert not made.evidence.count_trial(0)


def test_what_has_proved_itself_by_a_plan_has_done_so_when_that_is_followed_again() -> None:
    made = signature()

    def way() -> int:
        assert made.followed is not None
        return made.followed.ways[0]

    made.follow([REPLAY])
    made.evidence.prove(0, way(), 100)
    made.follow([OFFLOAD])
    assert not made.evidence.recomputed.holds(way(), 100)
    made.follow([REPLAY])
    assert made.evidence.recomputed.holds(way(), 100)
    assert not made.evidence.recomputed.holds(way(), 99)


def test_a_larger_step_is_news_and_is_told_as_it_would_take() -> None:
    made = signature()
    planned(made, [2.0, 2.0])
    made.values[0].seconds, made.values[0].uses = 1.0, 2
    made.follow([Keep("budget_has_room")])
    step = StepRecord(StepSignatures(), made, may_follow_script=True)
    assert step.decision_for(0, 100) == Keep("budget_has_room")
    assert step.decision_for(0, 101) is OFFLOAD, "the plan has no room for so much"
    for nbytes in (50, 150):
        step.record_save(0, nbytes)
    made.grow(step.larger)
    assert made.is_outdated
    assert made.share(step.saved_bytes_with_repeats) == 200 / 300
    assert made.saved_bytes == 150
    assert made.values[0].planned().seconds == 1.5
    assert made.times.window == 3.0
    made.mark_planned()
    made.grow({0: 150})
    assert not made.is_outdated


def test_a_signature_that_is_learned_later_knows_what_operations_took_before() -> None:
    def values(*shapes: tuple[int, ...]) -> list[RecordedValue]:
        return [
            RecordedValue(n, 4, torch.float32, torch.Size(shape), operation="mm", inputs=(n - 1,))
            for n, shape in enumerate(shapes)
        ]

    first, second = (
        StepSignature((), values((4,), (8,), (8,))),
        StepSignature((), values((4,), (8,), (16,))),
    )
    first.values[0].seconds, first.values[1].timing = 1.0, lambda: 2.0
    first.values[2].seconds = 3.0
    second.take_times([first])
    assert [value.planned().seconds for value in second.values] == [1.0, 2.0, 0.0]


def test_what_was_written_over_is_planned_with_what_was_written() -> None:
    """Nobody can offload or keep it: all of these operations are recomputed, or none."""
    values = [
        RecordedValue(number, 100, torch.float32, torch.Size((25,)), operation="conv2d" * number)
        for number in range(5)
    ]
    source, other, made, written, besides = values
    source.uses, written.uses, besides.uses = 1, 1, 1
    other.inputs, other.seconds = (source.number, -1), 4.0
    made.inputs, made.is_expensive, made.seconds = (source.number,), True, 2.0
    written.inputs, written.seconds = (made.number, other.number, -1), 0.5
    besides.inputs, besides.seconds = written.inputs, 0.5
    written.over, besides.over = (made.number, other.number), (other.number, made.number)
    saved = (source, written, besides)
    known = StepSignature(tuple((SAVED, value.number, None, ()) for value in saved), values)

    told = planned_values(known.values)
    assert (
        set(told[written.number].inputs) == set(told[besides.number].inputs) == {source.number, -1}
    )
    assert told[written.number].is_expensive
    assert (told[written.number].seconds, told[besides.number].seconds) == (2.5, 4.5)
    for replays, followed in (
        ([OFFLOAD] * 3 + [REPLAY, OFFLOAD], [OFFLOAD, REPLAY, REPLAY, REPLAY, OFFLOAD]),
        ([OFFLOAD] * 5, [OFFLOAD] * 5),
    ):
        known.follow(replays)
        assert known.followed is not None
        assert known.followed.decisions == followed


def ended(signatures: StepSignatures, name: str) -> None:
    """Have a step end that makes what is of that name; "?" is one that cannot be remembered."""
    step = StepRecord(signatures, None)
    value = RecordedValue(0, 100, torch.float32, torch.Size((25,)))
    step.add(value)
    step.record_event((name, 0, value.dtype, ()), value.nbytes)
    if name == "?":
        step.stop()
    signatures.ended(step)


def expected_behind(names: str) -> str:
    """Return of which name the step is expected to be that comes behind such steps."""
    signatures = StepSignatures()
    for name in names:
        ended(signatures, name)
    assert signatures.expected is not None
    return str(signatures.expected.events[0][0])


def test_a_step_is_expected_that_came_behind_as_many_like_the_latest() -> None:
    assert expected_behind("aaa") == "a"
    assert expected_behind("abab") == "a"
    assert [expected_behind("aaab" * 2 + "aaab"[:count]) for count in range(4)] == list("aaab")
    assert [expected_behind("abac" * 2 + "abac"[:count]) for count in range(4)] == list("abac")
    assert expected_behind("aab" + "aaa") == "a", "behind three of them nothing was seen"


def test_nothing_is_said_to_have_come_behind_a_step_that_nobody_remembers() -> None:
    assert expected_behind("abab?b") == "a", "one b was not seen behind the other"
