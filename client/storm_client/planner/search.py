"""Finds out which of several plans of one step signature takes the least time, by following each.

A plan is made of estimates: what the link carries beside the device's work, what the training
thread has time for. What a step takes with it shows only when steps follow it. So several plans are
followed for some steps each, which differ in one respect from what would be chosen by prediction,
and what was measured decides.

Some keep as much as checkpointing would, where blocks are known, and the others climb a ladder: the
first puts on the link what blocks are given and nothing else that can be recomputed, as
checkpointing does, and each that follows puts more there, as long as that takes no longer. One that
recomputes nothing is at its top; where a step saves little, one by which all stays comes first.
What the link alone takes longer for than a step has taken is not followed. The best is looked at
once more, and for longer: what steps take may change once memory that others have left is gone.
So is what was measured first: when a training begins its machine does other things, too.
Every time is a step's, from the begin of its block to that of the next. Where steps have many
sizes, only the largest are compared: what a step takes is no multiple of its bytes. If they are
rare, few plans are.

Everything here is pure: no device, clock or plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

__all__ = [
    "ALL_STAYS",
    "AS_BLOCKS",
    "MORE_BESIDE",
    "NOTHING",
    "OFFLOAD_ALONE",
    "PREDICTED",
    "Alternative",
    "Followed",
    "PlanSearch",
]


class Alternative(NamedTuple):
    """In which respect a plan differs from that which is made by prediction."""

    name: str
    link_share: float = 1.0
    """For what part of the forward pass the link is taken to carry something beside it."""
    recomputes: bool = True
    keeps_all: bool = False
    """Whether all stays."""
    fills_blocks: bool = False
    """Whether as much stays as checkpointing each block would keep, whatever pays most."""


PREDICTED: Final = Alternative("by prediction")
NOTHING: Final = Alternative("nothing on the link that can be recomputed", 0.0)
"""As checkpointing: what blocks are given leaves, and all else is recomputed."""

TWO_THIRDS: Final = Alternative("two thirds of the link", 0.65)
MORE: Final = Alternative("more on the link", 1.6)
LADDER: Final = (NOTHING, TWO_THIRDS, PREDICTED, MORE)
"""From the least on the link to the most."""

AS_BLOCKS: Final = (
    Alternative("as much stays as checkpointing keeps", 0.0, fills_blocks=True),
    Alternative("the same and two thirds of the link", 0.65, fills_blocks=True),
)
"""For a step whose blocks are known: the memory that checkpointing takes, for what pays most."""
MORE_BESIDE: Final = Alternative("the same and all of the link", fills_blocks=True)
"""Above them, where the second takes less than the first."""

OFFLOAD_ALONE: Final = Alternative("nothing recomputed", recomputes=False)
ALL_STAYS: Final = Alternative("all stays", keeps_all=True)
"""For a step that saves little, which the thread may take longer to offload than it computes."""

SKIPPED: Final = 1
"""Steps that are not counted once a plan is followed: the first still allocates."""

MEASURED: Final = 3
"""Steps that are."""

LOOKED_AT_AGAIN: Final = 6
"""Steps that are of a plan that is looked at once more."""

MOST_STEPS: Final = 40
"""Followed before the best so far stays, of which smaller ones are not counted."""

WORSE: Final = 1.25
"""Times the best: a plan of which two steps took as long is given up before it is measured."""

NEAR: Final = 1.15
"""Times the best: what takes more is not looked for beside."""

CLOSE: Final = 1.05
"""Times the best: plans that took no more are looked at once more. What else a machine does lasts
longer than the steps of one look."""

FAR: Final = 2.0
"""Times the best: what was measured first is looked at once more if it took no more."""

GAIN: Final = 0.01
"""Of a step: two plans that differ by less take the same time."""

AGAIN: Final = 0.8
"""Of what the chosen plan took: where all of the latest steps take less, all is measured anew."""

MOST_AGAIN: Final = 3
"""Plans that are looked at once more where several are followed in turn: the fastest."""

LATEST: Final = 8
"""So many of them are looked at."""


class Followed(NamedTuple):
    """What a plan took."""

    seconds: float
    staying_bytes: int
    """What stays on the device by it."""


@dataclass
class PlanSearch:
    """Which plan the steps of one signature follow next."""

    others: tuple[Alternative, ...] = (OFFLOAD_ALONE,)
    """Which plans are compared beside those of the ladder, in this order."""
    allowance: float = 0.0
    """Seconds by which a step may take longer than the fastest so that less stays."""
    slack_bytes: int = 0
    """Which may stay of a step for nothing."""
    current: Alternative = PREDICTED
    """The first of those that are compared, unless something is known already."""
    results: dict[Alternative, Followed] = field(default_factory=dict)
    """What was measured so far."""
    ruled_out: set[Alternative] = field(default_factory=set)
    """What takes longer on the link alone than a step has taken."""
    seen_again: set[Alternative] = field(default_factory=set)
    """What was measured twice."""
    is_settled: bool = False
    steps: int = 0
    """Followed until it settled."""
    _staying: int = 0
    _seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the first plan that is not ruled out."""
        if not self.results:
            self.current = self._first

    def follows(self, staying_bytes: int) -> None:
        """Note what stays by the current plan."""
        self._staying = staying_bytes

    def took(self, alternative: Alternative, seconds: float | None) -> bool:
        """Note what a step took that followed a plan; tell whether another is to be followed.

        None is what a step took that is smaller than those that are compared.
        """
        if alternative != self.current:
            return False
        if self.is_settled:
            return seconds is not None and self._took_settled(seconds)
        self.steps += 1
        if seconds is not None:
            self._seconds.append(seconds)
        if self._is_measured():
            self._note_result()
        elif self.steps < MOST_STEPS:
            return False
        return self._go_on()

    def coming(self) -> list[Alternative]:
        """Return what is measured behind the current plan whatever that takes; mostly.

        What puts more on the link is not among them before it is known whether that may pay.
        """
        if self.is_settled:
            return []
        if self.looks_again:
            return self._doubtful()[1:MOST_AGAIN]
        known = {self.current} | self.results.keys() | self.ruled_out
        return [one for one in self._candidates() if one not in known]

    def took_in_turn(
        self, found: Iterable[tuple[Alternative, int, Sequence[float | None]]]
    ) -> None:
        """Note what stays by plans that were followed one after another, and what steps took.

        At least two count of each beside those that are skipped. None is looked at a third time.
        """
        looked_again = self.looks_again
        for alternative, staying, seconds in found:
            self.current, self._staying = alternative, staying
            self.steps += len(seconds)
            self._seconds = [one for one in seconds if one is not None]
            if len(self._seconds) > SKIPPED + 1:
                self._note_result()
        self._go_on(may_doubt=not looked_again)

    def is_too_slow(self, least_seconds: float) -> bool:
        """Tell whether a plan need not be followed whose steps take no less."""
        return least_seconds > NEAR * self._fastest + self.allowance

    def forget(self) -> None:
        """Have plans be compared anew, unless one has been chosen: larger steps have come."""
        if not self.is_settled:
            self._forget()
            self.current = self._first

    def start_again(self, faster: float = 1.0) -> None:
        """Have all be measured anew: the link is another now.

        It is `faster` times as fast; below 1 slower. What recomputes nothing takes as much less
        time at the most: where that were still too much, it is not followed again.
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

    def is_like(self, other: Alternative) -> None:
        """Note that the current plan decides what another one did: it need not be followed."""
        self.results[self.current] = self.results[other]
        self._go_on()

    def rules_out(self, least_seconds: float) -> bool:
        """Tell whether the current plan, whose steps take no less, need not be followed.

        If so the next plan is the current one.
        """
        if not self.is_too_slow(least_seconds):
            return False
        self.ruled_out.add(self.current)
        self._go_on()
        return True

    @property
    def looks_again(self) -> bool:
        """Whether the current plan has been measured, and is to be once more."""
        return not self.is_settled and self.current in self.results

    @property
    def best(self) -> Alternative:
        """What was measured to be best: the least memory of what takes little more time.

        What takes no more than checkpointing, or than may stay for nothing, is chosen by time. The
        first, where nothing was measured.
        """
        longest = self._longest
        measured = [one for one, found in self.results.items() if found.seconds <= longest]
        least = min(map(self._beyond_bytes, measured), default=0)
        small = [one for one in measured if self._beyond_bytes(one) == least]
        longest = (1 + GAIN) * min((self.results[one].seconds for one in small), default=0.0)
        fast = [one for one in small if self.results[one].seconds <= longest]
        return min(fast, key=lambda one: self.results[one].staying_bytes, default=self._first)

    def __str__(self) -> str:
        """Return what was found, in one line."""
        found = sorted(self.results.items(), key=lambda item: item[1].seconds)
        listed = ", ".join(f"{one.name} {1e3 * f.seconds:.1f} ms" for one, f in found)
        state = f"settled after {self.steps} steps" if self.is_settled else "not settled yet"
        return f"{self.current.name}, {state} ({listed})"

    # --- helpers ----------------------------------------------------------------------------

    def _beyond_bytes(self, alternative: Alternative) -> int:
        """Return how much stays beyond what checkpointing keeps, or may stay for nothing."""
        if alternative.fills_blocks:
            return 0
        return max(0, self.results[alternative].staying_bytes - self.slack_bytes)

    @property
    def _longest(self) -> float:
        """How long a step may take for which less stays."""
        return max((1 + GAIN) * self._fastest, self._fastest + self.allowance)

    @property
    def _fastest(self) -> float:
        return min((one.seconds for one in self.results.values()), default=math.inf)

    def _is_measured(self) -> bool:
        counted = self._seconds[SKIPPED:]
        is_long = self.looks_again and self.steps < MOST_STEPS
        if len(counted) >= (LOOKED_AT_AGAIN if is_long else MEASURED):
            return True
        return len(counted) > 1 and min(counted) > WORSE * self._fastest

    def _note_result(self) -> None:
        """Take what its steps took, and of two looks the second."""
        found = Followed(_shortest_of(self._seconds[SKIPPED:]), self._staying)
        before = self.results.get(self.current)
        if before is None:
            self.results[self.current] = found
            return
        self.seen_again.add(self.current)
        self._replace(before, found)

    def _go_on(self, *, may_doubt: bool = True) -> bool:
        """Go to the next plan that is to be measured, or to the best; tell whether that is new."""
        self._seconds.clear()
        done = self.results.keys() | self.ruled_out
        following = next((one for one in self._candidates() if one not in done), None)
        if may_doubt:
            following = following or next(iter(self._doubtful()), None)
        following = None if self.steps >= MOST_STEPS else following
        self.is_settled = following is None
        before, self.current = self.current, following or self.best
        return self.current != before

    @property
    def _first(self) -> Alternative:
        return next(one for one in self._candidates() if one not in self.ruled_out)

    def _candidates(self) -> Sequence[Alternative]:
        """Return what has to be measured, as far as is known by now, in this order."""
        others = [one for one in self.others if one.recomputes]
        return [*others, *self._more_beside(), NOTHING, *self._more_on_the_link()]

    def _more_beside(self) -> list[Alternative]:
        """Return what keeps as much as checkpointing and puts on the link what may pay besides."""
        less, more = (self.results.get(one) for one in AS_BLOCKS)
        pays = less is not None and more is not None and more.seconds < (1 - GAIN) * less.seconds
        return [MORE_BESIDE] if pays or MORE_BESIDE in self.results else []

    def _more_on_the_link(self) -> list[Alternative]:
        """Return what is above the foot of the ladder, up to where more on the link is no gain.

        Where to recompute what checkpointing does is far slower than what was measured beside it,
        nothing is. Where to offload as much as the link has time for takes too long, to offload all
        takes longer still.
        """
        found = {one: result.seconds for one, result in self.results.items()}
        others = (one for one in found if one in self.others or one.fills_blocks)
        beside = min((found[one] for one in others), default=math.inf)
        if found.get(NOTHING, 0.0) > NEAR * beside:
            return []
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
        """Return what is to be looked at again: each once that takes about as long as the fastest.

        The best comes first, which is looked at again in any case, then what was measured first.
        """
        results = self.results  # those that decide the same share one
        seen = {id(results[one]) for one in self.seen_again}
        most = dict.fromkeys(results, CLOSE * self._fastest)
        most |= dict.fromkeys(islice(results, 1), FAR * self._fastest) | {self.best: math.inf}
        left: dict[int, Alternative] = {}
        for one in sorted(results, key=lambda one: (-most[one], results[one].seconds)):
            found = results[one]
            if id(found) not in seen and found.seconds <= most[one]:
                left.setdefault(id(found), one)
        return list(left.values())

    def _took_settled(self, seconds: float) -> bool:
        self._seconds = [*self._seconds, seconds][-LATEST:]
        found = self.results.get(self.current)
        if len(self._seconds) < LATEST or found is None:
            return False
        if max(self._seconds) < AGAIN * found.seconds:
            self._forget()
            self.is_settled, self.steps = False, 0
        elif min(self._seconds) > CLOSE * found.seconds:
            return self._takes_longer(found)
        return False  # this one is measured first

    def _takes_longer(self, found: Followed) -> bool:
        """Look once more at what was better than the chosen plan by now takes, if anything was.

        What a machine did meanwhile may have been in the one look or in the other. Where all take
        longer now the chosen plan comes back, and its own time is known.
        """
        latest = _shortest_of(self._seconds)
        self._replace(found, found._replace(seconds=latest))
        self._seconds.clear()
        best = self.best
        if (1 + GAIN) * self.results[best].seconds > latest:
            return False
        self.is_settled, self.current = False, best
        self.steps = min(self.steps, MOST_STEPS - SKIPPED - LOOKED_AT_AGAIN)  # room for one look
        return True

    def _replace(self, before: Followed, found: Followed) -> None:
        """Have all plans that decide the same have another result."""
        for one, result in self.results.items():
            if result is before:
                self.results[one] = found

    def _forget(self) -> None:
        self.results.clear()
        self.ruled_out.clear()
        self.seen_again.clear()
        self._seconds.clear()


def _shortest_of(seconds: Sequence[float]) -> float:
    """Return the mean of the shortest two thirds: what delays a step is no plan's."""
    shortest = sorted(seconds)[: max(1, 2 * len(seconds) // 3)]
    return sum(shortest) / len(shortest)
