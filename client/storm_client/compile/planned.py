"""The values that a pair of graphs saves, and the plan: each one's decision and the reason."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from storm_client.compile.estimates import Draft, Saved
from storm_client.planner.decisions import Keep, Offload, Replay
from storm_client.planner.machine import Machine
from storm_client.planner.plan import Plan, Row

__all__ = ["Value", "plan_of"]


class Value(NamedTuple):
    """A tensor that the forward graph saves."""

    made: fx.Node
    """The forward graph's node that makes it."""
    given: fx.Node
    """The backward graph's placeholder for it."""
    is_shared: bool
    """Whether a caller may hold its memory."""
    saved: Saved
    recipe: tuple[fx.Node, ...]
    """The forward graph's nodes that recompute it, in order."""


def plan_of(
    values: Sequence[Value], draft: Draft, peak: int, forward: float, machine: Machine
) -> Plan:
    """Return the plan for the values that a pair of graphs saves, with its costs.

    `peak` is the most bytes that they take together, `forward` the forward pass's seconds.
    """
    rows = []
    for value, decision, is_saved in zip(values, draft.decisions, draft.is_saved, strict=True):
        saved, val = value.saved, value.made.meta["val"]
        if not is_saved:
            continue
        name, reason, cost = "keep", decision.reason if isinstance(decision, Keep) else "", 0.0
        if isinstance(decision, Offload):
            name, reason = "offload", "cheaper to transfer than to recompute"
            if saved.is_only_a_source:
                reason = "others are recomputed from it"
            elif saved.recipe is None:
                reason = "no recomputation with the same bits is known"
            cost = saved.nbytes * machine.link / saved.ratio
        elif isinstance(decision, Replay):
            assert saved.recipe is not None
            name, reason, cost = (
                "replay",
                "cheaper to recompute than to transfer",
                saved.recipe.seconds,
            )
            if (
                max(cost, machine.thread_recompute)
                > saved.nbytes * machine.codec + machine.graph_store
            ):
                reason = "the link is full"
        shape = tuple(map(int, val.shape)) if not free_symbols(val) else ()
        rows.append(Row(_operation(value.made), shape, val.dtype, saved.nbytes, name, reason, cost))
    return Plan(
        tuple(rows),
        peak,
        draft.link_seconds,
        draft.replay_seconds,
        forward,
        draft.stall_seconds,
        measured=machine.measured,
    )


def _operation(node: fx.Node) -> str:
    """Return the name of the operation that made a value; of several results, also the index."""
    if node.target is operator.getitem:
        made_by, index = node.args
        return f"{_operation(made_by)}[{index}]" if isinstance(made_by, fx.Node) else str(index)
    return str(node.target)
