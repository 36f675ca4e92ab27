"""Notices that a link has become faster or slower than a plan was made for.

Other GPUs of the node take bandwidth from a link that they share with its device, and leave it
again. How much that is the daemon's copies show. A plan is made anew only for a change that lasts
and matters: to compare plans again costs steps that follow worse ones.

Pure: no daemon, clock or plan.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LinkWatch", "has_changed"]

CHANGED: Final = 1.25
"""Times as fast, or as slow: what differs by less moves few values of a plan."""

FIRST_STEPS: Final = 8
"""Between two looks at the link, and by a plan before it is made anew for that. Each time doubles
the latter, so that a link that never comes to rest does not have plans be compared for ever."""

MOST_STEPS: Final = 1024
"""Then comparing plans takes at most one step of 25."""


def has_changed(before: float, now: float) -> bool:
    """Tell whether a link is another, that takes `now` seconds a byte, and took `before`."""
    return max(before, now) > CHANGED * min(before, now)


class LinkWatch:
    """What the plan of one step signature takes its link for, and for how long."""

    def __init__(self) -> None:
        """Begin without a plan."""
        self._planned: float | None = None
        self._steps = 0
        self._least_steps = FIRST_STEPS

    def planned(self, link: float) -> None:
        """Note that a plan is made for a link that takes so many seconds a byte."""
        self._planned = link

    def is_due(self) -> bool:
        """Count a step that follows the plan; tell whether to look at the link."""
        self._steps += 1
        is_late = self._planned is not None and self._steps >= self._least_steps
        return is_late and self._steps % FIRST_STEPS == 0

    def calls(self, link: float, *, is_used: bool) -> bool:
        """Tell whether another plan is to be made for a link that has been looked at.

        A plan that sends nothing is not made anew for a link that has become slower.
        """
        assert self._planned is not None
        if not has_changed(self._planned, link) or not (is_used or link < self._planned):
            return False
        self._planned, self._steps = link, 0
        self._least_steps = min(2 * self._least_steps, MOST_STEPS)
        return True
