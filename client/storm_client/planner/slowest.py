"""What a rank has measured of its steps, and the combined figures of the slowest of several ranks.

Ranks that plan together make one plan. It must suit the rank that needs the most time: of each
figure the slowest value is taken, and the least memory. Ranks exchange JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeAlias

from storm_client.planner.decisions import OFFLOAD, REPLAY, Decision, Keep, Offload
from storm_client.planner.machine import Machine
from storm_client.planner.problem import NO_LOSS, PlainLoss, Problem
from storm_client.planner.search import Alternative, PlanResult, PlanSearch
from storm_client.planner.solver import Choice

__all__ = ["Agreed", "Figures", "Seconds", "Turn"]

Seconds: TypeAlias = tuple[float | None, ...]
"""Times of the steps that followed one plan; None for steps smaller than the compared ones."""

_RATES: Final = frozenset({"half_flops", "single_flops", "bandwidth", "ahead", "hides"})
"""Figures of a machine for which a smaller value is slower, as False is than True."""


@dataclass(frozen=True)
class Figures:
    """One rank's measurements of the steps of one signature, or the slowest of several ranks'."""

    nbytes: tuple[int, ...]
    """Size of each value, in the largest step."""
    seconds: tuple[float, ...]
    """Time of each value's operation."""
    forward_seconds: float | None
    turn_seconds: float
    last_bytes: int
    rejected: Mapping[int, str]
    machine: Machine
    room: int | None
    """Bytes that may be kept; None means as few as possible."""
    steps: tuple[Seconds, ...] = ()
    """Step times, for each plan that was followed since the latest decision."""
    plain_loss: PlainLoss = NO_LOSS
    lacked_bytes: int = 0
    """As in a `Problem`; of several ranks the least loss bytes and the most lacked bytes."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        machine: Machine,
        room: int | None,
        steps: Sequence[Sequence[float | None]] = (),
    ) -> Figures:
        """Return the figures that one rank would plan from."""
        return cls(
            tuple(value.nbytes for value in problem.values),
            tuple(value.seconds for value in problem.values),
            problem.forward_seconds,
            problem.turn_seconds,
            problem.last_bytes,
            problem.rejected,
            machine,
            room,
            tuple(map(tuple, steps)),
            problem.plain_loss,
            problem.lacked_bytes,
        )

    @classmethod
    def slowest(cls, ranks: Sequence[Figures]) -> Figures:
        """Return figures that all ranks can keep up with.

        The forward pass is as long as that of the slowest rank, for which all wait. It is known
        once all ranks know theirs. The shortest turn decides which values have to be kept at its
        end.
        """
        windows = (one.forward_seconds for one in ranks)
        known = [seconds for seconds in windows if seconds is not None]
        rooms = [one.room for one in ranks if one.room is not None]
        plans = zip_longest(*(one.steps for one in ranks), fillvalue=())
        return cls(
            tuple(map(max, zip(*(one.nbytes for one in ranks), strict=True))),
            tuple(map(max, zip(*(one.seconds for one in ranks), strict=True))),
            None if len(known) < len(ranks) else max(known),
            min(one.turn_seconds for one in ranks),
            min(one.last_bytes for one in ranks),
            {number: why for one in reversed(ranks) for number, why in one.rejected.items()},
            _slowest_machine([one.machine for one in ranks]),
            min(rooms, default=None),
            tuple(map(_slowest_steps, plans)),
            PlainLoss(*map(min, zip(*(one.plain_loss for one in ranks), strict=True))),
            max(one.lacked_bytes for one in ranks),
        )

    def put_into(self, problem: Problem) -> Problem:
        """Return the problem with these figures."""
        values = zip(problem.values, self.nbytes, self.seconds, strict=True)
        return replace(
            problem,
            values=tuple(replace(one, nbytes=n, seconds=seconds) for one, n, seconds in values),
            rejected=dict(self.rejected),
            forward_seconds=self.forward_seconds,
            turn_seconds=self.turn_seconds,
            last_bytes=self.last_bytes,
            plain_loss=self.plain_loss,
            lacked_bytes=self.lacked_bytes,
        )

    def to_text(self) -> str:
        """Return the figures as text for another rank."""
        return json.dumps(asdict(self), default=sorted)  # the only set is `machine.measured`

    @classmethod
    def from_text(cls, text: str) -> Figures:
        """Return the figures that another rank has sent."""
        said = json.loads(text)
        said["machine"] = Machine.of(said["machine"])
        said["rejected"] = {int(number): why for number, why in said["rejected"].items()}
        for name in ("nbytes", "seconds"):
            said[name] = tuple(said[name])
        said["steps"] = tuple(map(tuple, said["steps"]))
        said["plain_loss"] = PlainLoss(*said["plain_loss"])
        return cls(**said)


class Turn(NamedTuple):
    """One of several plans that ranks follow one after another."""

    alternative: Alternative
    choice: Choice


@dataclass(frozen=True)
class Agreed:
    """What ranks are to follow: the plans in turn, and the state of their comparison."""

    turns: tuple[Turn, ...]
    """At least one. Each but the last is followed for a few steps."""
    search: PlanSearch | None
    """None if no plans are compared."""
    measured: frozenset[str]
    """Names of the machine's figures that were measured."""
    nbytes: tuple[int, ...] = ()
    """Size of each value for which the choice was made."""

    def to_text(self) -> str:
        """Return the decision as text for another rank."""
        search, found = self.search, None
        if search is not None:
            found = {
                "others": search.others,
                "allowance": search.allowance,
                "slack_bytes": search.slack_bytes,
                "current": search.current,
                "results": list(search.results.items()),
                "ruled_out": list(search.ruled_out),
                "is_settled": search.is_settled,
                "steps": search.steps,
            }
        turns = [(alternative, _choice_said(choice)) for alternative, choice in self.turns]
        told = {"turns": turns, "search": found, "measured": sorted(self.measured)}
        return json.dumps(told | {"nbytes": self.nbytes})

    @classmethod
    def from_text(cls, text: str) -> Agreed:
        """Return the decision that the leader has sent."""
        said = json.loads(text)
        turns = tuple(Turn(Alternative(*one), _choice(choice)) for one, choice in said["turns"])
        search, measured = _search(said["search"]), frozenset(said["measured"])
        return cls(turns, search, measured, tuple(said["nbytes"]))


def _slowest_steps(ranks: Iterable[Seconds]) -> Seconds:
    """Return the times of one plan's steps on the slowest rank that counts them."""
    steps = zip_longest(*ranks)
    return tuple(max((one for one in step if one is not None), default=None) for step in steps)


def _slowest_machine(machines: Sequence[Machine]) -> Machine:
    changed: dict[str, Any] = {"measured": frozenset().union(*(one.measured for one in machines))}
    for field in fields(Machine):
        if field.name == "measured":
            continue
        values = [getattr(one, field.name) for one in machines]
        changed[field.name] = min(values) if field.name in _RATES else max(values)
    return Machine(**changed)


def _choice_said(choice: Choice) -> dict[str, Any]:
    decisions = [_decision_text(decision) for decision in choice.decisions]
    return choice._asdict() | {"decisions": decisions}


def _choice(said: dict[str, Any]) -> Choice:
    return Choice(**said | {"decisions": [_decision(one) for one in said["decisions"]]})


def _decision_text(decision: Decision) -> str:
    if isinstance(decision, Keep):
        return decision.reason
    return "+" if isinstance(decision, Offload) else "*"


def _decision(text: str) -> Decision:
    return OFFLOAD if text == "+" else REPLAY if text == "*" else Keep(text)


def _search(said: dict[str, Any] | None) -> PlanSearch | None:
    if said is None:
        return None
    results = {Alternative(*one): PlanResult(*found) for one, found in said["results"]}
    ruled_out = {Alternative(*one) for one in said["ruled_out"]}
    current = Alternative(*said["current"])
    others = tuple(Alternative(*one) for one in said["others"])
    found = {"others": others, "current": current, "results": results, "ruled_out": ruled_out}
    return PlanSearch(**said | found)
