"""What an Offload did during a part of training, as numbers for a framework's log.

All figures are means per step, so they do not depend on how often a framework logs. All is pure.
"""

from __future__ import annotations

from storm_client.monitoring.stats import OffloadStats

__all__ = ["StepFigures", "figures_between"]

GIB = 1 << 30
DIGITS = 6
"""Decimal places that are logged: a KiB in GiB, a microsecond."""


def figures_between(before: OffloadStats, now: OffloadStats, steps: int) -> dict[str, float]:
    """Return the figures of the `steps` steps between two statistics of one Offload.

    `offload_saved_gib`: saved by autograd. `offload_gib`: offloaded to the daemon.
    `offload_replayed_gib`: freed, to be recomputed. `offload_kept_gib`: to be offloaded, but not
    accepted by the daemon. `offload_ratio`: offloaded bytes over their bytes in the pool.
    `offload_wait_seconds`: time spent waiting for restores.
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
    """Remembers a run's first step, which is not 0 if the run was resumed, and its last log."""

    def __init__(self, stats: OffloadStats, step: int) -> None:
        """Begin after `step` completed steps."""
        self._first = self._last = stats
        self._first_step = self.last_step = step

    def since_last(self, now: OffloadStats, step: int) -> dict[str, float]:
        """Return the figures since the last call, empty if no step was done since."""
        if step <= self.last_step:
            return {}
        before, steps = self._last, step - self.last_step
        self._last, self.last_step = now, step
        return figures_between(before, now, steps)

    def of_all(self, now: OffloadStats, step: int) -> dict[str, float]:
        """Return the figures since the beginning, empty if no step was done."""
        if step <= self._first_step:
            return {}
        return figures_between(self._first, now, step - self._first_step)
