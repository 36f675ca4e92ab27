"""Makes the plan of one alternative: the choice by prediction, or one that differs from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from storm_client.planner.decisions import Keep
from storm_client.planner.filling import choose_below_checkpointing, is_below_checkpointing
from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem
from storm_client.planner.search import Alternative
from storm_client.planner.solver import Choice, choose

__all__ = ["choose_alternative", "staying_bytes"]

_LITTLE: Final = Keep("little")


def choose_alternative(
    alternative: Alternative,
    problem: Problem,
    machine: Machine,
    *,
    room: int | None,
) -> Choice:
    """Return what becomes of each value by a plan.

    `room` is how many bytes may stay, None where as few as possible are to.
    """
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


def staying_bytes(problem: Problem, choice: Choice) -> int:
    """Return how much of what a step saves stays on the device by a choice.

    That is no more than checkpointing each block would keep, where the step is never fuller so.
    """
    decided = zip(problem.values, choice.decisions, strict=True)
    staying = sum(
        value.nbytes for value, decision in decided if value.is_saved and isinstance(decision, Keep)
    )
    if staying > problem.checkpointed_bytes and is_below_checkpointing(problem, choice):
        return problem.checkpointed_bytes
    return staying
