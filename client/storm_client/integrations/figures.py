"""What an Offload did in a stretch of training, as numbers for a framework's log.

All are means of a step, so that they mean the same however often a framework logs. All is pure.
"""

from __future__ import annotations

from storm_client.monitoring.stats import OffloadStats

__all__ = ["StepFigures", "figures_between"]

GIB = 1 << 30
DIGITS = 6
"""Decimals that are logged: a KiB in GiB, a microsecond."""


def figures_between(before: OffloadStats, now: OffloadStats, steps: int) -> dict[str, float]:
    """Return the figures of the `steps` steps that lie between two statistics of one Offload.

    `offload_saved_gib`: what autograd handed over. `offload_gib`: what left for the daemon.
    `offload_replayed_gib`: what was given up, to be recomputed. `offload_kept_gib`: what should
    have left and did not fit. `offload_ratio`: bytes that left over bytes that they take in the
    pool. `offload_wait_seconds`: waited to have them back.
    """
    left = now.offloaded_bytes - before.offloaded_bytes
    stored = now.stored_bytes - before.stored_bytes
    figures = {
        "offload_saved_gib": (now.saved_bytes - before.saved_bytes) / GIB / steps,
        "offload_gib": left / GIB / steps,
        "offload_replayed_gib": (now.replayed_bytes - before.replayed_bytes) / GIB / steps,
        "offload_kept_gib": (now.kept_bytes - before.kept_bytes) / GIB / steps,
        "offload_ratio": left / stored if stored else 1.0,
        "offload_wait_seconds": (now.restore_wait_seconds - before.restore_wait_seconds) / steps,
    }
    return {name: round(value, DIGITS) for name, value in figures.items()}


class StepFigures:
    """Remembers where a run began, at a step that is not 0 if it was resumed, and its last log."""

    def __init__(self, stats: OffloadStats, step: int) -> None:
        """Begin where `step` steps have been done."""
        self._first = self._last = stats
        self._first_step = self.last_step = step

    def since_last(self, now: OffloadStats, step: int) -> dict[str, float]:
        """Return the figures since the last call, empty where no step was done since."""
        if step <= self.last_step:
            return {}
        before, steps = self._last, step - self.last_step
        self._last, self.last_step = now, step
        return figures_between(before, now, steps)

    def of_all(self, now: OffloadStats, step: int) -> dict[str, float]:
        """Return the figures since the beginning, empty where no step was done."""
        if step <= self._first_step:
            return {}
        return figures_between(self._first, now, step - self._first_step)
