"""Finds which of several plans of one step signature takes the least time, by following each.

A plan is based on estimates: how many transfers the device's work hides, and what the training
thread has time for. The real step time shows only when steps follow the plan. So steps follow
several plans for a few steps each, and the measured times decide. Each plan differs in one respect
from the predicted one.

The best plan is measured once more, and for longer, and so is the first. Every time is that of a
whole step, from the beginning of its `with` block to the next. If steps have many sizes, only the
largest are compared: step time is not proportional to bytes. DESIGN.md says in which order plans
are compared, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

__all__ = [
    "ALL_KEPT",
    "AS_BLOCKS",
    "MORE_BESIDE",
    "NOTHING",
    "OFFLOAD_ALONE",
    "PREDICTED",
    "Alternative",
    "PlanResult",
    "PlanSearch",
]


class Alternative(NamedTuple):
    """The respect in which a plan differs from the predicted one."""

    name: str
    link_share: float = 1.0
    """The part of the forward pass during which transfers are assumed to be hidden."""
    recomputes: bool = True
    keeps_all: bool = False
    """Whether everything is kept."""
    fills_blocks: bool = False
    """Whether to keep as many bytes as checkpointing each block would: the values that pay most."""


PREDICTED: Final = Alternative("by prediction")
NOTHING: Final = Alternative("nothing on the link that can be recomputed", 0.0)
"""As checkpointing: the inputs of blocks are offloaded, everything else is recomputed."""

TWO_THIRDS: Final = Alternative("two thirds of the link", 0.65)
MORE: Final = Alternative("more on the link", 1.6)
"""The ladder, from the least offloaded to the most, is NOTHING, TWO_THIRDS, PREDICTED, MORE."""

AS_BLOCKS: Final = (
    Alternative("as much kept as by checkpointing", 0.0, fills_blocks=True),
    Alternative(
        "as much kept as by checkpointing and two thirds of the link", 0.65, fills_blocks=True
    ),
)
"""For a step with known blocks: uses the memory of checkpointing for the values that pay most."""
MORE_BESIDE: Final = Alternative(
    "as much kept as by checkpointing and all of the link", fills_blocks=True
)
"""Measured after `AS_BLOCKS`, unless the second of them takes much longer than the first."""

OFFLOAD_ALONE: Final = Alternative("nothing recomputed", recomputes=False)
ALL_KEPT: Final = Alternative("everything kept", keeps_all=True)
"""For a step that saves little: offloading it may cost the thread more than the step computes."""

SKIPPED: Final = 1
"""Steps that are not counted after a plan starts: the first still allocates."""

MEASURED: Final = 3
"""Steps that are counted."""

REMEASURED: Final = 6
"""Steps that are counted when a plan is measured once more."""

MAX_STEPS: Final = 40
"""Most steps of a comparison, smaller steps included; then the best plan so far is chosen."""

WORSE: Final = 1.25
"""Times the best: a plan is abandoned early if two of its steps took as long."""

NEAR: Final = 1.15
"""Times the best: plans whose steps take longer are not followed."""

CLOSE: Final = 1.05
"""Times the best: plans that took no more are measured again. Disturbances by other work on the
machine last longer than the steps of one measurement."""

FAR: Final = 2.0
"""Times the best: the first measured plan is measured again if it took no more."""

GAIN: Final = 0.01
"""Share of a step's time: two plans that differ by less take the same time."""

RESTART_SHARE: Final = 0.8
"""Share of the chosen plan's time: if all latest steps take less, all plans are measured anew."""

MAX_REMEASURED: Final = 3
"""Most plans that are measured again if several are followed in turn: the fastest."""

LATEST: Final = 8
"""Number of latest steps that are considered for this."""


class PlanResult(NamedTuple):
    """The measured result of a plan."""

    seconds: float
    kept_bytes: int
    """Bytes that the plan keeps on the device."""


@dataclass
class PlanSearch:
    """Decides which plan the steps of one signature follow next."""

    others: tuple[Alternative, ...] = (OFFLOAD_ALONE,)
    """Plans that are compared besides those of the ladder, in this order."""
    allowance: float = 0.0
    """Seconds by which a step may be slower than the fastest plan's if less is kept."""
    slack_bytes: int = 0
    """Bytes of a step that may be kept at no penalty."""
    current: Alternative = PREDICTED
    """Initially the first plan to compare, unless results are known already."""
    results: dict[Alternative, PlanResult] = field(default_factory=dict)
    """The measurements so far."""
    ruled_out: set[Alternative] = field(default_factory=set)
    """Plans whose link time alone exceeds the measured step time."""
    remeasured: set[Alternative] = field(default_factory=set)
    """Plans that were measured twice."""
    is_settled: bool = False
    steps: int = 0
    """Steps of the comparison until it settled."""
    _kept_bytes: int = 0
    _seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the first plan that is not ruled out."""
        if not self.results:
            self.current = self._first

    def record_kept_bytes(self, kept_bytes: int) -> None:
        """Note how many bytes the current plan keeps."""
        self._kept_bytes = kept_bytes

    def record_step(self, alternative: Alternative, seconds: float | None) -> bool:
        """Note the time of a step that followed a plan; return whether to change to another plan.

        `seconds` is None for a step that is smaller than the compared ones.
        """
        if alternative != self.current:
            return False
        if self.is_settled:
            return seconds is not None and self._record_settled(seconds)
        self.steps += 1
        if seconds is not None:
            self._seconds.append(seconds)
        if self._is_measured():
            self._record_result()
        elif self.steps < MAX_STEPS:
            return False
        return self._advance()

    def upcoming(self) -> list[Alternative]:
        """Return the plans to measure after the current one, mostly whatever its result is.

        A plan that offloads more is not included before measurements show whether that may pay.
        """
        if self.is_settled:
            return []
        if self.is_remeasuring:
            return self._doubtful()[1:MAX_REMEASURED]
        known = {self.current} | self.results.keys() | self.ruled_out
        return [one for one in self._candidates() if one not in known]

    def record_turns(
        self, found: Iterable[tuple[Alternative, int, Sequence[float | None]]]
    ) -> None:
        """Note the kept bytes and the step times of plans that were followed one after another.

        A plan counts with at least two steps beside those that are skipped. None is measured a
        third time.
        """
        was_remeasuring = self.is_remeasuring
        for alternative, kept, seconds in found:
            self.current, self._kept_bytes = alternative, kept
            self.steps += len(seconds)
            self._seconds = [one for one in seconds if one is not None]
            if len(self._seconds) > SKIPPED + 1:
                self._record_result()
        self._advance(may_doubt=not was_remeasuring)

    def is_too_slow(self, least_seconds: float) -> bool:
        """Return whether to skip a plan whose steps take at least `least_seconds`."""
        return least_seconds > NEAR * self._fastest + self.allowance

    def forget(self) -> None:
        """Compare plans anew, since larger steps have appeared, unless one has been chosen."""
        if not self.is_settled:
            self._forget()
            self.current = self._first

    def start_again(self, faster: float = 1.0) -> None:
        """Measure all plans anew: the link has changed.

        The link is `faster` times as fast; below 1 slower. A plan that recomputes nothing becomes
        faster by this factor at most. If it would still be too slow, it is not followed again.
        """
        least = NEAR * self._fastest * max(1.0, faster)
        hopeless = {
            one
            for one, found in self.results.items()
            if not one.recomputes and found.seconds > least
        }
        self._forget()
        self.ruled_out |= hopeless
        self.is_settled, self.steps, self.current = False, 0, self._first

    def reuse_result_of(self, other: Alternative) -> None:
        """Note that the current plan decides the same as `other`, and need not be followed."""
        self.results[self.current] = self.results[other]
        self._advance()

    def skip_if_slow(self, least_seconds: float) -> bool:
        """Return whether to skip the current plan, whose steps take at least `least_seconds`.

        If so, the next plan becomes the current one.
        """
        if not self.is_too_slow(least_seconds):
            return False
        self.ruled_out.add(self.current)
        self._advance()
        return True

    @property
    def is_remeasuring(self) -> bool:
        """Whether the current plan has been measured, and is being measured once more."""
        return not self.is_settled and self.current in self.results

    @property
    def best(self) -> Alternative:
        """The best measured plan: the one with the least memory among the almost fastest.

        Plans that keep no more than checkpointing, or than `slack_bytes`, are chosen by time. Of
        those that take the same time, the ladder's keep less. If nothing was measured, the first
        plan.
        """
        longest = self._longest
        measured = [one for one, found in self.results.items() if found.seconds <= longest]
        least = min(map(self._beyond_bytes, measured), default=0)
        small = [one for one in measured if self._beyond_bytes(one) == least]
        longest = (1 + GAIN) * min((self.results[one].seconds for one in small), default=0.0)
        fast = [one for one in small if self.results[one].seconds <= longest]
        return min(fast, key=self._kept, default=self._first)

    def __str__(self) -> str:
        found = sorted(self.results.items(), key=lambda item: item[1].seconds)
        listed = ", ".join(f"{one.name} {1e3 * f.seconds:.1f} ms" for one, f in found)
        state = f"settled after {self.steps} steps" if self.is_settled else "not settled yet"
        return f"{self.current.name}, {state} ({listed})"

    # --- helpers ----------------------------------------------------------------------------

    def _kept(self, alternative: Alternative) -> tuple[bool, int]:
        return alternative.fills_blocks, self.results[alternative].kept_bytes

    def _beyond_bytes(self, alternative: Alternative) -> int:
        """Return the kept bytes beyond what checkpointing keeps, or beyond `slack_bytes`."""
        if alternative.fills_blocks:
            return 0
        return max(0, self.results[alternative].kept_bytes - self.slack_bytes)

    @property
    def _longest(self) -> float:
        """The longest step time that is accepted in order to keep less."""
        return max((1 + GAIN) * self._fastest, self._fastest + self.allowance)

    @property
    def _fastest(self) -> float:
        return min((one.seconds for one in self.results.values()), default=math.inf)

    def _is_measured(self) -> bool:
        counted = self._seconds[SKIPPED:]
        is_long = self.is_remeasuring and self.steps < MAX_STEPS
        if len(counted) >= (REMEASURED if is_long else MEASURED):
            return True
        return len(counted) > 1 and min(counted) > WORSE * self._fastest

    def _record_result(self) -> None:
        """Record the times of the current plan; a second measurement replaces the first."""
        found = PlanResult(_shortest_of(self._seconds[SKIPPED:]), self._kept_bytes)
        before = self.results.get(self.current)
        if before is None:
            self.results[self.current] = found
            return
        self.remeasured.add(self.current)
        self._replace(before, found)

    def _advance(self, *, may_doubt: bool = True) -> bool:
        """Change to the next plan to measure, or to the best; return whether it is another."""
        self._seconds.clear()
        done = self.results.keys() | self.ruled_out
        following = next((one for one in self._candidates() if one not in done), None)
        if may_doubt:
            following = following or next(iter(self._doubtful()), None)
        following = None if self.steps >= MAX_STEPS else following
        self.is_settled = following is None
        before, self.current = self.current, following or self.best
        return self.current != before

    @property
    def _first(self) -> Alternative:
        return next(one for one in self._candidates() if one not in self.ruled_out)

    def _candidates(self) -> Sequence[Alternative]:
        """Return the plans to measure as far as known by now, in order."""
        others = [one for one in self.others if one.recomputes]
        return [*others, *self._more_beside(), NOTHING, *self._more_on_the_link()]

    def _more_beside(self) -> list[Alternative]:
        """Return the plan that keeps as much as checkpointing and offloads all that may pay.

        Where there is hardly time for a link, the second plan may not use it: that shows nothing.
        """
        less, more = (self.results.get(one) for one in AS_BLOCKS)
        may_pay = less is not None and more is not None and more.seconds < CLOSE * less.seconds
        return [MORE_BESIDE] if may_pay or MORE_BESIDE in self.results else []

    def _more_on_the_link(self) -> list[Alternative]:
        """Return the plans above the first of the ladder, up to where offloading more is no gain.

        If the first, which recomputes as checkpointing does, is far slower than the plans beside
        the ladder, return at most the predicted one: it may be as fast as plans that use
        checkpointing's memory, with less. If offloading as much as the link has time for takes too
        long, offloading everything takes longer still.
        """
        found = {one: result.seconds for one, result in self.results.items()}
        others = (one for one in found if one in self.others or one.fills_blocks)
        beside = min((found[one] for one in others), default=math.inf)
        if found.get(NOTHING, 0.0) > NEAR * beside:
            return [PREDICTED] if AS_BLOCKS[0] in self.others else []
        if TWO_THIRDS not in found or found[TWO_THIRDS] > (1 + GAIN) * found.get(NOTHING, math.inf):
            return [TWO_THIRDS]
        above = [TWO_THIRDS, PREDICTED]
        if PREDICTED not in found:
            return above
        if found[PREDICTED] < min(found[TWO_THIRDS], found.get(NOTHING, math.inf)):
            above.append(MORE)
        if found[PREDICTED] <= max(self._longest, (1 + GAIN) * found.get(NOTHING, math.inf)):
            above += [one for one in self.others if not one.recomputes]
        return above

    def _doubtful(self) -> list[Alternative]:
        """Return the plans to measure again, each once: those about as fast as the fastest.

        The best comes first, and is measured again in any case. The first measured plan follows.
        """
        results = self.results  # plans that decide the same share one result
        seen = {id(results[one]) for one in self.remeasured}
        most = dict.fromkeys(results, CLOSE * self._fastest)
        most |= dict.fromkeys(islice(results, 1), FAR * self._fastest) | {self.best: math.inf}
        left: dict[int, Alternative] = {}
        for one in sorted(results, key=lambda one: (-most[one], results[one].seconds)):
            found = results[one]
            if id(found) not in seen and found.seconds <= most[one]:
                left.setdefault(id(found), one)
        return list(left.values())

    def _record_settled(self, seconds: float) -> bool:
        self._seconds = [*self._seconds, seconds][-LATEST:]
        found = self.results.get(self.current)
        if len(self._seconds) < LATEST or found is None:
            return False
        if max(self._seconds) < RESTART_SHARE * found.seconds:
            self._forget()
            self.is_settled, self.steps = False, 0
        elif min(self._seconds) > CLOSE * found.seconds:
            return self._takes_longer(found)
        return False  # the current plan is measured first

    def _takes_longer(self, found: PlanResult) -> bool:
        """Measure again the plan that beats the chosen plan's latest time, if there is one.

        Other work on the machine may have disturbed either measurement. If all plans take longer
        now, the chosen plan is followed again, with its new time known.
        """
        latest = _shortest_of(self._seconds)
        self._replace(found, found._replace(seconds=latest))
        self._seconds.clear()
        best = self.best
        if (1 + GAIN) * self.results[best].seconds > latest:
            return False
        self.is_settled, self.current = False, best
        self.steps = min(self.steps, MAX_STEPS - SKIPPED - REMEASURED)  # one measurement left
        return True

    def _replace(self, before: PlanResult, found: PlanResult) -> None:
        """Replace the result of all plans that decide the same."""
        for one, result in self.results.items():
            if result is before:
                self.results[one] = found

    def _forget(self) -> None:
        self.results.clear()
        self.ruled_out.clear()
        self.remeasured.clear()
        self._seconds.clear()


def _shortest_of(seconds: Sequence[float]) -> float:
    """Return the mean of the shortest two thirds: delays of single steps are not the plan's."""
    shortest = sorted(seconds)[: max(1, 2 * len(seconds) // 3)]
    return sum(shortest) / len(shortest)
