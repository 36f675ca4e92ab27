"""Steps on several GPUs: each has its own memory and its own link."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from storm_client.planner.alternatives import choose_alternative, kept_bytes
from storm_client.planner.below_checkpointing import is_below_checkpointing
from storm_client.planner.decisions import Replay
from storm_client.planner.devices import Part, parts_of
from storm_client.planner.machine import CUDA
from storm_client.planner.plan import Plan
from storm_client.planner.problem import NO_LOSS, PlainLoss, Problem
from storm_client.planner.search import ALL_KEPT, AS_BLOCKS, NOTHING, PREDICTED, Alternative
from storm_client.planner.solver import choose
from storm_client.planner.timeline import planned
from support.planning import alike_blocks, value

MIB = 1 << 20


def step(blocks: int, *devices: int | None, window: float = 0.0) -> Problem:
    """Return a step of so many blocks on each device, the last with a loss.

    The first value on a device is a copy of the last one on the device before.
    """
    values, ends = [], set[int]()
    for device in devices:
        made, own_ends = alike_blocks(blocks)
        first = len(values)
        ends |= {first + end for end in own_ends}
        for one in made:
            inputs = tuple(first + source for source in one.inputs)
            if first and one.number == 0:
                inputs = (first - 1,)
            values.append(replace(one, number=first + one.number, inputs=inputs, device=device))
    values.append(
        replace(value(len(values), 90, "log_softmax", len(values) - 1), device=devices[-1])
    )
    made_of = tuple(
        replace(
            one,
            nbytes=one.nbytes * MIB,
            seconds=one.seconds * 1e-5,
            uses=1,
            is_given=not one.number,
        )
        for one in values
    )
    return Problem(
        made_of,
        forward_seconds=window,
        turn_seconds=0.0,
        last_bytes=100 * MIB,
        block_ends=frozenset(ends),
        used_between={n: (n + 1, n + 1) for n in range(len(made_of))},
        plain_loss=PlainLoss(0, MIB),
    )


@pytest.mark.parametrize("device", [None, 0, 3])
def test_a_step_on_one_device_is_not_divided(device: int | None) -> None:
    problem = step(4, device, device)
    (part,) = parts_of(problem)
    assert part.problem is problem
    for alternative in (PREDICTED, NOTHING, *AS_BLOCKS, ALL_KEPT):
        found = choose_alternative(alternative, problem, CUDA, room=0)
        assert part.choice_of(found) == found


def test_each_part_has_the_values_of_its_device() -> None:
    problem = step(3, 1, 0, window=3.0)
    first, second = parts_of(problem)
    assert [*first.numbers, *second.numbers] == list(range(len(problem.values)))
    for part in (first, second):
        for place, number in enumerate(part.numbers):
            own, whole = part.problem.values[place], problem.values[number]
            assert (own.number, own.nbytes) == (place, whole.nbytes)
            assert all(source < place for source in own.inputs)
        assert part.problem.used_between == {n: (n + 1, n + 1) for n in range(len(part.numbers))}
    copied = second.problem.values[0]
    assert (copied.operation, copied.inputs, copied.is_given) == ("", (-1,), True)
    windows = first.problem.forward_seconds, second.problem.forward_seconds
    assert math.isclose(sum(windows), 3.0)
    assert min(windows) > 1.0
    assert (first.problem.turn_seconds, second.problem.turn_seconds) == (math.inf, 0.0)
    assert (first.problem.last_bytes, second.problem.last_bytes) == (0, 100 * MIB)
    assert (first.problem.plain_loss, second.problem.plain_loss) == (NO_LOSS, (0, MIB))


def test_a_result_may_be_copied_to_the_first_device() -> None:
    problem = step(3, 0, 1)
    last = problem.values[-1]
    copy = replace(last, number=last.number + 1, inputs=(last.number,), uses=0, device=0)
    first, second = parts_of(replace(problem, values=(*problem.values, copy)))
    assert [len(first.numbers), first.numbers[-1]] == [len(second.numbers), copy.number]
    assert [one.problem.plain_loss for one in (first, second)] == [NO_LOSS, (0, MIB)]
    assert [one.problem.turn_seconds for one in (first, second)] == [math.inf, 0.0]


def test_values_on_the_host_belong_to_the_first_gpu() -> None:
    problem = step(2, None, 1, 0)
    first, second = parts_of(problem)
    assert [first.problem.values[0].device, first.numbers[0]] == [None, 0]
    assert {one.device for one in second.problem.values} == {0}


@pytest.mark.parametrize("alternative", [PREDICTED, NOTHING, *AS_BLOCKS])
@pytest.mark.parametrize("room", [None, 2000 * MIB])
def test_a_device_decides_as_if_it_were_alone(alternative: Alternative, room: int | None) -> None:
    problem = step(6, 0, 1, window=2e-3)
    parts = parts_of(problem)
    found = choose_alternative(alternative, problem, CUDA, room=room)
    saved = sum(part.saved_bytes for part in parts)
    for part in parts:
        share = None if room is None else room * part.saved_bytes // saved
        alone = choose_alternative(alternative, part.problem, CUDA, room=share)
        assert part.choice_of(found).decisions == alone.decisions
        assert alone.link_seconds <= found.link_seconds


def test_each_device_keeps_what_fits_below_its_checkpointed_peak() -> None:
    problem = step(12, 0, 1)
    found = choose_alternative(AS_BLOCKS[0], problem, CUDA, room=None)
    kept = {n for n, one in enumerate(found.decisions) if not isinstance(one, Replay)}
    for part in parts_of(problem):
        assert is_below_checkpointing(part.problem, part.choice_of(found))
        assert problem.nbytes(kept & set(part.numbers)) > part.problem.checkpointed_bytes
    assert kept_bytes(problem, found) == problem.checkpointed_bytes


def test_a_device_that_runs_no_block_keeps_everything() -> None:
    """As checkpointing does: the last device may have the head alone."""
    problem = step(4, 0, 1)
    blocks = [end for end in problem.block_ends if end in parts_of(problem)[0].numbers]
    head = replace(problem, block_ends=frozenset(blocks))
    found = choose_alternative(AS_BLOCKS[0], head, CUDA, room=None)
    _, last = parts_of(head)
    assert not any(isinstance(found.decisions[n], Replay) for n in last.numbers)
    assert any(isinstance(found.decisions[n], Replay) for n in range(last.numbers[0]))


def test_both_links_transfer_at_once() -> None:
    """With one link for both, twice the time of either would be needed."""
    problem = step(8, 0, 1, window=1e-2)
    found = choose_alternative(PREDICTED, problem, CUDA, room=0)
    undivided = choose(problem, CUDA)
    links = [_link_seconds(part, found.costs, found.decisions) for part in parts_of(problem)]
    assert max(links) == pytest.approx(found.link_seconds)
    assert sum(links) > 1.5 * found.link_seconds
    assert undivided.link_seconds == pytest.approx(sum(links), rel=0.5)


def _link_seconds(part: Part, costs: list[float], decisions: list[object]) -> float:
    return sum(costs[n] for n in part.numbers if not isinstance(decisions[n], Replay))


def test_the_predicted_peak_is_that_of_the_fullest_device() -> None:
    problem = step(6, 0, 1)
    found = choose_alternative(AS_BLOCKS[0], problem, CUDA, room=None)
    peaks = [
        planned(part.problem, part.choice_of(found).decisions).peak_bytes
        for part in parts_of(problem)
    ]
    plan = Plan.of(problem, found)
    assert plan.fullest_bytes == max(peaks)
    assert plan.checkpointed_fullest_bytes is not None
    assert plan.fullest_bytes <= plan.checkpointed_fullest_bytes
    assert plan.fullest_bytes < sum(peaks)
