"""Reports once, after the first steps, what offloading saves and what it costs.

The first steps learn a plan and try it, so only later ones count. The report has measured figures
only. The time of a step without offloading is unknown, so the cost is the time that training
threads spent on offloading. The text is made here by pure functions; `log_line` logs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from storm_client.monitoring.advice import MIN_BYTES
from storm_client.monitoring.stats import KeptTotals, OffloadStats, StatsRecorder
from storm_client.planner.decisions import NO_ACTIVATIONS
from stormd.protocol.sizes import exact_size, format_size, suggested_pool

__all__ = ["Summary", "log_line"]

FIRST_STEP = 3
"""The first step that is counted: earlier ones learn the plan and try it."""

COUNTED_STEPS = 2

_COMPARING: Final = "later steps may follow other plans, and a line will tell of the best"

log = logging.getLogger("storm_client")


class _Begin(NamedTuple):
    """The totals at the beginning of a step."""

    step: int
    seconds: float
    totals: KeptTotals

    @property
    def stats(self) -> OffloadStats:
        return self.totals.stats


class Summary:
    """Counts the steps of an Offload up to the one that reports. Threads may share it."""

    def __init__(self) -> None:
        self.begun = 0
        self._due = FIRST_STEP
        self._before: _Begin | None = None

    def step_begins(
        self,
        seconds: float,
        recorder: StatsRecorder,
        small_owned: Callable[[], int],
        device_peak: Callable[[], int | None],
        is_comparing: Callable[[], bool],
    ) -> str | None:
        """Note that a step begins at this time; return the report if it is due.

        `small_owned` returns how many bytes of the model's parameters count as small tensors.
        `device_peak` returns the peak of bytes allocated on a GPU, None without one. `is_comparing`
        returns whether plans are being compared, so that later steps may behave differently.
        """
        self.begun += 1
        if self.begun != self._due:
            return None
        now = _Begin(self.begun, seconds, recorder.kept_totals())
        before = self._before
        if before is not None and now.stats.saved_bytes > before.stats.saved_bytes:
            self._due, self._before = 0, None
            line = _line(before, now, small_owned(), device_peak())
            return line if line is None or not is_comparing() else f"{line}; {_COMPARING}"
        # None of these steps saved anything, as in a validation: count the next ones.
        self._before, self._due = now, self.begun + COUNTED_STEPS
        return None


def log_line(text: str) -> None:
    """Log a line for the user: on stderr if the script has not configured logging."""
    if log.hasHandlers():
        log.info(text)
    elif log.level <= logging.INFO:  # unset is the lowest
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None)
        logging.StreamHandler().handle(record)


def _line(before: _Begin, now: _Begin, small_owned: int, peak: int | None) -> str | None:
    """Return a report of the steps between the two; None if they saved too little."""
    steps = now.step - before.step
    small = (_small(now) - _small(before)) // steps
    stayed = (_kept_activations(now) - _kept_activations(before)) // steps - min(small, small_owned)
    offloaded = (now.stats.offloaded_bytes - before.stats.offloaded_bytes) // steps
    replayed = (now.stats.replayed_bytes - before.stats.replayed_bytes) // steps
    if offloaded + replayed + stayed < MIN_BYTES:
        return None
    held, pool = "", ""
    if offloaded:
        # Of all steps: a store may be answered in a later step than it was sent.
        ratio = now.stats.ratio
        held = f" ({format_size(int(offloaded / ratio))} of host memory, ratio {ratio:.2f})"
        # The first steps offload what later ones recompute, and a larger pool takes what this one
        # refused.
        refused = (_refused(now) - _refused(before)) // steps
        enough = exact_size(suggested_pool(int((offloaded + replayed + refused) / ratio)))
        pool = (
            f'; a pool of {enough} is enough: connect(pool_bytes="{enough}"), or, of a daemon that '
            f"you start, --pool-bytes {enough}"
        )
    spent = (_spent(now.stats) - _spent(before.stats)) / steps
    lasted = (now.seconds - before.seconds) / steps
    measured = "" if peak is None else f"; the GPU's peak so far is {format_size(peak)}"
    launches = "" if peak is None else " (its launches, not what the GPU does)"
    return (
        f"stormd: a step saves {format_size(offloaded + replayed + stayed)} of activations: "
        f"{format_size(offloaded)} offloaded{held}, {format_size(replayed)} recomputed, "
        f"{format_size(stayed)} kept{measured}; training threads spent {_shown(spent)} of a step's "
        f"{_shown(lasted)} ({spent / lasted:.0%}) on stores, restores and recomputation{launches}"
        f"{pool}"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _kept_activations(begin: _Begin) -> int:
    """Return the bytes of kept activations; the reasons in NO_ACTIVATIONS do not count."""
    totals = begin.totals
    skipped = sum(n for reason, n in totals.skipped_bytes.items() if reason not in NO_ACTIVATIONS)
    return skipped + sum(totals.kept_bytes.values())


def _refused(begin: _Begin) -> int:
    return sum(begin.totals.kept_bytes.get(reason, 0) for reason in ("pool_full", "quota"))


def _small(begin: _Begin) -> int:
    return begin.totals.skipped_bytes.get("small", 0)


def _spent(stats: OffloadStats) -> float:
    return stats.store_seconds + stats.restore_wait_seconds + stats.replay_seconds
