"""Compiles the script of a kind of step for compiled code to follow.

Of the script's events compiled code needs those that say what becomes of a saved tensor. What it
does not expect, or what is offloaded, it hands over to Python, which walks along the same script.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from storm_client.eager.signature import SAVED, Expected, Kind
from storm_client.planner.decisions import Keep

if TYPE_CHECKING:
    from storm_client.monitoring.native_counts import NativeCounts
    from storm_client.native import Native, _follow

__all__ = ["compiled"]


class _What(IntEnum):
    """What is done at an event; as in native/script.h."""

    KEEP = 0
    PYTHON = 1


def compiled(kind: Kind, follow: Native, counts: NativeCounts) -> _follow.Script | None:
    """Return the script of a kind, compiled; None where Python has to follow its steps."""
    if kind.script is None or kind.has_replays:
        return None
    if kind.compiled is None:
        script = kind.script[:-1]  # behind the last event there is nothing
        events = [
            _event(position, expected, counts)
            for position, expected in enumerate(script)
            if expected.what is SAVED
        ]
        kind.compiled = follow.Script(events, len(script))
    return kind.compiled


def _event(position: int, expected: Expected, counts: NativeCounts) -> tuple[int, int, int, int]:
    value, decision = expected.value, expected.decision
    if not isinstance(decision, Keep) or expected.matters:
        return position, _What.PYTHON, value.nbytes, 0
    return position, _What.KEEP, value.nbytes, counts.row(value.layer, "skipped", decision.reason)
