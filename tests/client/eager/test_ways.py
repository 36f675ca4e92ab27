"""In which ways values are recomputed, and when a step has prepared another way than its plan's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from storm_client.eager.events import SAVED, Event, RecordedValue
from storm_client.eager.recipe_maker import RecipeMaker
from storm_client.eager.recognition import StepRecord, StepSignatures
from storm_client.eager.recompute import Result
from storm_client.eager.signature import StepSignature
from storm_client.eager.sources import PackedInput
from storm_client.eager.tracked import TrackedStorage
from storm_client.eager.values import SaveHooks, Values
from storm_client.eager.ways import NO_WAY, Way, first_readers, ways_of
from storm_client.monitoring.layers import Layers
from storm_client.planner.decisions import OFFLOAD, Decision, Keep, Offload, Replay
from torch import Tensor

SHAPE = torch.Size([4])
NBYTES = 16
INPUTS = ((), (0,), (0,), (1,))
"""Of four values: the first is given, two are made from it, and the last from one of these."""


def recorded(*, is_copied: bool) -> list[RecordedValue]:
    return [
        RecordedValue(
            number, NBYTES, torch.float32, SHAPE, is_copied=is_copied and not number, inputs=inputs
        )
        for number, inputs in enumerate(INPUTS)
    ]


def events_of(order: Sequence[int]) -> tuple[Event, ...]:
    made = [(torch.sin, number, torch.float32, INPUTS[number]) for number in order]
    return (SAVED, 0, None, ()), *made


def way_of_the_third(*, is_copied: bool, replays_second: bool, order: Sequence[int]) -> Way:
    values, second = recorded(is_copied=is_copied), Replay() if replays_second else OFFLOAD
    decisions: list[Decision] = [OFFLOAD, second, Replay(), OFFLOAD]
    readers = first_readers(events_of(order), values, decisions)
    return ways_of(values, decisions, readers)[2]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_way_includes_for_which_operation_an_input_is_copied(is_copied: bool) -> None:
    """Something may write to it uncounted between the operations that read it."""

    def way(*order: int, replays_second: bool) -> Way:
        return way_of_the_third(is_copied=is_copied, replays_second=replays_second, order=order)

    alone = way(1, 2, replays_second=False)
    assert (way(1, 2, replays_second=True) == alone) == (not is_copied)
    assert way(2, 1, replays_second=True) == alone


class Step:
    """A step whose plan recomputes all but the given value, and what it has done so far."""

    def __init__(self) -> None:
        values = recorded(is_copied=True)
        signature = StepSignature(events_of((1, 2, 3)), values)
        signature.follow([OFFLOAD, Replay(), Replay(), Replay()])
        assert signature.followed is not None
        self.plan = signature.followed
        record = StepRecord(StepSignatures(), signature)
        hooks = SaveHooks(*[None] * len(SaveHooks._fields))  # type: ignore[arg-type]
        self.values = Values(record, 1, Layers([]), counts_gradless=False)
        self.recipes = RecipeMaker(record, self.values, hooks, min_bytes=1)
        self.tensors = [torch.zeros(SHAPE) for _ in values]
        self.tracked = [self.track(*one) for one in zip(values, self.tensors, strict=True)]

    def track(self, value: RecordedValue, tensor: Tensor) -> TrackedStorage:
        return TrackedStorage(value, 0, self.values.pins.add(tensor.untyped_storage()))

    def way(self, number: int) -> Way:
        inputs = INPUTS[number]
        tensors, tracked = ([of[n] for n in inputs] for of in (self.tensors, self.tracked))
        return self.recipes.way_of(self.tracked[number], tensors, tracked)  # type: ignore[arg-type]


@pytest.mark.parametrize(("copied_for", "is_planned"), [(None, False), (1, True), (2, False)])
def test_a_copy_made_for_another_operation_is_another_way(
    copied_for: int | None, is_planned: bool
) -> None:
    """The plan copies for the first value; the step may have followed another plan until then."""
    step = Step()
    assert step.way(1) == step.plan.ways[1] != NO_WAY
    if copied_for is not None:
        given = step.tracked[0]
        given.copy, given.copied_for = PackedInput(None, lambda _: torch.zeros(SHAPE)), copied_for
    assert step.way(2) == (step.plan.ways[2] if is_planned else NO_WAY)


@pytest.mark.parametrize("recomputed", [None, "otherwise", "as planned"])
def test_an_input_that_is_recomputed_otherwise_is_another_way(recomputed: str | None) -> None:
    step = Step()
    tensor, tracked = step.tensors[1], step.tracked[1]
    if recomputed is not None:
        tracked.result = Result(tensor, tracked.pin, step.values.pins)
        tracked.result.way = step.plan.ways[1] if recomputed == "as planned" else b"another"
    assert step.way(3) == (step.plan.ways[3] if recomputed == "as planned" else NO_WAY)


@pytest.mark.parametrize("nbytes", [NBYTES, NBYTES + 1])
def test_a_step_knows_that_an_input_has_outgrown_what_the_plan_keeps(nbytes: int) -> None:
    """It offloads such an input, so what it recomputes proves nothing for the plan."""
    signature = StepSignature(events_of((1, 2, 3)), recorded(is_copied=True))
    signature.follow([Keep("budget"), Replay(), Replay(), Replay()])
    record = StepRecord(StepSignatures(), signature)
    has_outgrown = nbytes > NBYTES
    assert isinstance(record.decision_for_input(0, nbytes), Offload if has_outgrown else Keep)
    assert record.has_outgrown_plan == has_outgrown
    assert record.larger == ({0: nbytes} if has_outgrown else {})
