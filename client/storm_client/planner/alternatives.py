"""Makes the plan of one alternative: the choice by prediction, or one that differs from it."""

from __future__ import annotations

from dataclasses import replace

from storm_client.planner.decisions import Keep
from storm_client.planner.host import HostBound, choose_for_host, spare_seconds
from storm_client.planner.machine import Machine
from storm_client.planner.problem import Problem
from storm_client.planner.search import Alternative
from storm_client.planner.solver import Choice, choose

__all__ = ["choose_alternative", "staying_bytes"]


def choose_alternative(
    alternative: Alternative,
    problem: Problem,
    machine: Machine,
    *,
    room: int | None,
    host: HostBound | None = None,
    is_worth_it: bool = True,
    functions: int = 0,
) -> Choice:
    """Return what becomes of each value by a plan.

    `room` is how many bytes may stay, None where as few as possible are to. `host` is what is known
    of the thread, of which a plan for its sake needs to be told; if it is not worth it, all stays
    for its sake. A step runs `functions` of the table.
    """
    window = problem.forward_seconds
    asked = problem
    if window is not None and alternative.link_share != 1.0:
        asked = replace(asked, forward_seconds=alternative.link_share * window)
    for_the_thread = alternative.thread_share > 0.0 and host is not None
    if not alternative.recomputes and not for_the_thread:
        asked = replace(asked, recomputes=False, why_not="")
    choice = choose(asked, machine, budget_bytes=room or 0)
    if for_the_thread and host is not None:
        choice = choose_for_host(
            choice,
            problem.values,
            host,
            link=machine.link,
            functions=functions,
            room=room,
            spare=alternative.thread_share * spare_seconds(host) if is_worth_it else 0.0,
        )
    return choice if window is None else choice._replace(forward_seconds=window)


def staying_bytes(problem: Problem, choice: Choice) -> int:
    """Return how much of what a step saves stays on the device by a choice."""
    decided = zip(problem.values, choice.decisions, strict=True)
    return sum(
        value.nbytes for value, decision in decided if value.is_saved and isinstance(decision, Keep)
    )
