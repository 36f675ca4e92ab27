"""How much lies on the device at each moment of a backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from storm_client.planner.backward import (
    checkpointed_bytes,
    kept_by_checkpointing,
    planned_bytes,
)
from storm_client.planner.decisions import OFFLOAD, REPLAY, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.problem import Problem
from storm_client.planner.solver import choose
from support.planning import alike_blocks, value

KEEP = Keep("budget")
MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0)

CHAIN = Problem(
    (
        value(0, 10),
        value(1, 20, "norm", 0, seconds=1.0),
        value(2, 40, "linear", 1, saved=False, seconds=1.0),
        value(3, 80, "silu", 2, seconds=1.0),
    ),
    # The norm and the silu have saved what they were given and made, the loss the last value.
    used_between={0: (1, 1), 1: (2, 2), 3: (4, 3)},
)
GRADIENTS = [0, 20, 60, 120, 0]
"""Of values 1 to 3, each from its reader's moment to its own; the loss knows none of its own."""


def saved_bytes(*decisions: object) -> list[int]:
    found = planned_bytes(CHAIN, decisions)  # type: ignore[arg-type]
    return [own - others for own, others in zip(found, GRADIENTS, strict=True)]


def test_what_is_kept_lies_there_until_its_last_use() -> None:
    assert saved_bytes(KEEP, KEEP, OFFLOAD, KEEP) == [0, 10, 30, 110, 110]


def test_what_was_offloaded_lies_there_from_its_first_use() -> None:
    assert saved_bytes(OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD) == [0, 10, 20, 80, 80]


def test_what_is_recomputed_has_what_it_is_made_from_there() -> None:
    """Value 2 only while value 3 is recomputed; the others until their own uses."""
    assert saved_bytes(OFFLOAD, REPLAY, REPLAY, REPLAY) == [0, 10, 30, 110, 10 + 20 + 40 + 80]


def blocks(count: int) -> Problem:
    """Return a step of blocks with a loss behind them."""
    values, ends = alike_blocks(count)
    used = {n: (n + 1, n + 1) for n in range(len(values)) if n not in ends}
    values.append(value(len(values), 90, "log_softmax", len(values) - 1, seconds=1.0))
    used[len(values) - 1] = (len(values),) * 2
    return Problem(tuple(values), block_ends=ends, used_between=used)


def test_checkpointing_recomputes_a_block_where_its_backward_pass_begins() -> None:
    problem = blocks(3)
    assert kept_by_checkpointing(problem) == {0, 4, 8, 12, 13}
    found = checkpointed_bytes(problem)
    gradients = planned_bytes(replace(problem, used_between={}), [OFFLOAD] * 14)
    saved = [own - others for own, others in zip(found, gradients, strict=True)]
    given = 3 * 40  # value 0 and the ends of two blocks; nothing is made from that of the third
    assert saved[14] == given + 90
    assert saved[12] == given + 40 + 110 + 110
    assert saved[4] == 40 + 40 + 110 + 110


@pytest.mark.parametrize("window", [0.0, 300.0, 2000.0])
def test_as_little_as_possible_is_at_no_moment_more_than_with_checkpointing(window: float) -> None:
    problem = replace(blocks(5), forward_seconds=window)
    least = planned_bytes(problem, choose(problem, MACHINE).decisions)
    most = checkpointed_bytes(problem)
    assert all(own <= others for own, others in zip(least, most, strict=True))
