"""What a plan says to people."""

from __future__ import annotations

from dataclasses import replace

import torch
from storm_client.planner.plan import Plan, Row

MIB = 1 << 20


def row(operation: str, mebibytes: int, decision: str) -> Row:
    return Row(operation, (mebibytes,), torch.uint8, mebibytes * MIB, decision, "why", 1e-3)


PLAN = Plan(
    (
        row("linear", 3, "keep"),
        replace(row("add", 1, "keep"), is_checkpointed=True),
        row("silu", 9, "replay"),
    ),
    peak_bytes=4 * MIB,
    link_seconds=0.0,
    replay_seconds=1e-3,
    forward_seconds=1.0,
    checkpointed_bytes=4 * MIB,
)


def test_what_stays_is_said_beside_what_checkpointing_would_keep() -> None:
    assert "checkpointing each block would keep 4.0 MiB, the plan 4.0 MiB" in str(PLAN)
    for unsaid in ("would recompute", "predicted peak", "measured"):
        assert unsaid not in str(PLAN)
    more = str(replace(PLAN, checkpointed_bytes=3 * MIB))
    assert "keep 3.0 MiB, the plan 4.0 MiB, of which it would recompute linear 3.0 MiB" in more
    assert "add 1.0 MiB" not in more
    assert "checkpointing" not in str(replace(PLAN, checkpointed_bytes=None))


def test_the_fullest_moment_and_what_was_measured_are_said() -> None:
    plan = replace(PLAN, fullest_bytes=5 * MIB, checkpointed_fullest_bytes=7 * MIB)
    assert "predicted peak: 5.0 MiB; with each block checkpointed: 7.0 MiB" in str(plan)
    assert "in flight" not in str(plan)
    assert "in flight at once: up to 2.0 MiB more" in str(replace(plan, in_flight_bytes=2 * MIB))
    assert "measured: link, thread" in str(replace(PLAN, measured=frozenset({"thread", "link"})))
