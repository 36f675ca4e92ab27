"""Notices that a link has become faster or slower than the plan assumed.

Other GPUs of the node use bandwidth of a link that they share with the device, at times. The
daemon's copies show how much. A new plan is made only for a change that lasts and matters: to
compare plans again costs steps that follow worse plans.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LinkWatch", "has_changed"]

CHANGED: Final = 1.25
"""Factor, faster or slower. A smaller change of the link changes few decisions of a plan."""

FIRST_STEPS: Final = 8
"""Steps between two checks of the link, and the least steps of a plan before a link change replaces
it. Each replacement doubles the latter, so that an unsteady link does not restart the comparison
of plans forever."""

MAX_STEPS: Final = 1024
"""Upper bound of that doubling. Then comparing plans takes at most one step of 25."""


def has_changed(before: float, now: float) -> bool:
    """Return whether a link has changed; `before` and `now` are seconds a byte."""
    return max(before, now) > CHANGED * min(before, now)


class LinkWatch:
    """The link speed that the plan of one step signature assumes, and since how many steps."""

    def __init__(self) -> None:
        self._planned: float | None = None
        self._steps = 0
        self._least_steps = FIRST_STEPS

    def planned(self, link: float) -> None:
        """Note that a plan is made for a link of `link` seconds a byte."""
        self._planned = link

    def is_due(self, steps: int) -> bool:
        """Count `steps` that followed the plan; return whether to check the link."""
        checks = self._steps // FIRST_STEPS
        self._steps += steps
        is_late = self._planned is not None and self._steps >= self._least_steps
        return is_late and self._steps // FIRST_STEPS > checks

    def needs_new_plan(self, link: float, *, is_used: bool) -> bool:
        """Return whether the link, just checked, calls for another plan.

        A plan that offloads nothing is not replaced because the link has become slower.
        """
        assert self._planned is not None
        if not has_changed(self._planned, link) or not (is_used or link < self._planned):
            return False
        self._planned, self._steps = link, 0
        self._least_steps = min(2 * self._least_steps, MAX_STEPS)
        return True
