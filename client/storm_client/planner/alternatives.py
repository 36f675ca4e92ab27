"""Makes the plan of one alternative: the predicted choice, or one that differs from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from storm_client.planner.below_checkpointing import (
    choose_below_checkpointing,
    is_below_checkpointing,
)
from storm_client.planner.decisions import Keep
from storm_client.planner.devices import merged, parts_of
from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem
from storm_client.planner.search import Alternative
from storm_client.planner.solver import Choice, choose

__all__ = ["choose_alternative", "kept_bytes"]

_LITTLE: Final = Keep("little")


def choose_alternative(
    alternative: Alternative,
    problem: Problem,
    machine: Machine,
    *,
    room: int | None,
) -> Choice:
    """Return the decisions of an alternative's plan.

    `room` is the number of bytes that may be kept; None means as few as possible. Several GPUs
    share it by the bytes that each of them saves. One that runs no block keeps as much as
    checkpointing: everything.
    """
    parts = parts_of(problem)
    saved = sum(part.saved_bytes for part in parts)
    choices = []
    for part in parts:
        asked, share = alternative, room
        if alternative.fills_blocks and problem.block_ends and not part.problem.block_ends:
            asked, share = alternative._replace(fills_blocks=False), part.saved_bytes
        elif room is not None and len(parts) > 1:
            share = room * part.saved_bytes // max(saved, 1)
        choices.append(_choose(asked, part.problem, machine, share))
    return merged(problem, parts, choices)


def _choose(
    alternative: Alternative, problem: Problem, machine: Machine, room: int | None
) -> Choice:
    window = problem.forward_seconds
    asked = problem
    if window is not None and alternative.link_share != 1.0:
        asked = replace(asked, forward_seconds=alternative.link_share * window)
    if not alternative.recomputes:
        asked = replace(asked, recomputes=False, why_not="")
    if alternative.keeps_all:
        room = sum(value.nbytes for value in problem.saved)
    if alternative.fills_blocks:
        choice = choose_below_checkpointing(replace(asked, last_bytes=0), machine)
    else:
        choice = choose(asked, machine, budget_bytes=room or 0)
    if alternative.keeps_all:
        choice = choice._replace(
            decisions=[_LITTLE if isinstance(one, Keep) else one for one in choice.decisions]
        )
    return choice if window is None else choice._replace(forward_seconds=window)


def kept_bytes(problem: Problem, choice: Choice) -> int:
    """Return the bytes of values that a choice keeps on the device.

    Return at most the bytes that checkpointing each block would keep if the step's peak with this
    choice is on no GPU above that with its blocks checkpointed.
    """
    decided = zip(problem.values, choice.decisions, strict=True)
    kept = sum(value.nbytes for value, decision in decided if isinstance(decision, Keep))
    if kept <= problem.checkpointed_bytes:
        return kept
    parts = parts_of(problem)
    blocks = [one for one in parts if one.problem.block_ends] or parts
    if all(is_below_checkpointing(one.problem, one.choice_of(choice)) for one in blocks):
        return problem.checkpointed_bytes
    return kept
