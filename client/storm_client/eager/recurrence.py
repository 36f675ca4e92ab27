"""Whether steps are like ones before, so that it is worth learning from them.

Where a router sends tokens to now these experts and now those, hardly a step runs what another has
run. To watch each of them and plan it takes the thread longer than all else, and no step ever
follows such a plan.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Recurrence"]

MOST_UNLIKE: Final = 4.0
"""Of steps, less a part for each that was like one before: from then on no new one is learned."""

FORGIVEN: Final = 0.25
"""For each that was. So a fifth of all steps may be new without end."""

FEW: Final = 2.0
"""From so many down they are learned again."""


class Recurrence:
    """Counts steps of an Offload. Threads may share it: a count that is lost decides little."""

    def __init__(self) -> None:
        """Start with the hope that each is like the first."""
        self._unlike = 0.0
        self.is_seen = True
        """Whether it is worth learning a step that is new."""

    def saw(self, *, is_new: bool) -> None:
        """Note a step."""
        change = 1.0 if is_new else -FORGIVEN
        self._unlike = min(max(self._unlike + change, 0.0), MOST_UNLIKE)
        if self._unlike >= MOST_UNLIKE:
            self.is_seen = False
        elif self._unlike <= FEW and not self.is_seen:
            self.is_seen, self._unlike = True, 0.0  # the first that is watched again is new
